"""Which known fault explains wrong outputs; else, where and what the wrong elements are.

Which of the operator's wrong variants gives these outputs, bit for bit or but for roundings of its
own? A variant counts only where it explains elements that the truth does not. Where none does, the
structure of the error is told (:mod:`oracle.structure`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .budget import Contract
from .certified import one_thread
from .comparison import Comparison, compare
from .definition import Operator, Variant
from .elements import (
    EXPLAINED,
    SHARE,
    Judged,
    Tensors,
    WrongElements,
    close,
    judge_elements,
    same_bits,
    same_numbers,
)
from .structure import describe_structure, failing_outputs, listed
from .verdict import Diagnosis

_SAMPLE = 4096
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Match:
    """A wrong variant that explains failing outputs of one case.

    Attributes:
        variant: its name.
        description: its sentence.
        outputs: the failing outputs it explains, in the operator's order.
        contradicted: the other outputs in which the variant would fail: they are right, or wrong
            in another way.
        exact: whether the explained outputs are the variant's, bit for bit (a NaN is a NaN).
        changed: how many elements of the explained outputs the variant changes.
        distance: mean distance of the wrong elements to the variant, over that to the truth; for
            an exact match, the share of the wrong elements that are NaNs of other bits than the
            variant's.
    """

    variant: str
    description: str
    outputs: tuple[str, ...]
    contradicted: tuple[str, ...]
    exact: bool
    changed: int
    distance: float


@dataclass(frozen=True)
class Matching:
    """What explains one failing case.

    Attributes:
        failing: the failing outputs, in the operator's order.
        matches: the variants that explain some of them, the best one first.
    """

    failing: tuple[str, ...]
    matches: tuple[Match, ...]


@dataclass(frozen=True)
class Failure:
    """A case that failed, for :func:`diagnose`.

    Attributes:
        case: its name.
        inputs: every input by name, as they were before the call.
        outputs: every output by name, as the candidate left it.
        comparison: the comparison of these.
    """

    case: str
    inputs: Tensors
    outputs: Tensors
    comparison: Comparison


class Catalogue:
    """The outputs of an operator's wrong variants for some inputs.

    Args:
        operator: whose variants.
        inputs: every input by name.
        keep: whether outputs are kept for the next question, at the cost of their memory.

    Attributes:
        variants: the wrong variants, in the operator's order.
    """

    def __init__(self, operator: Operator, inputs: Tensors, *, keep: bool = False) -> None:
        self.variants = tuple(variant for variant in operator.variants if not variant.legal)
        self._operator = operator
        self._inputs = inputs
        self._kept: dict[str, Tensors] | None = {} if keep else None

    def outputs(self, variant: Variant) -> Tensors:
        """Return a variant's outputs by name."""
        if self._kept is not None and variant.name in self._kept:
            return self._kept[variant.name]
        outputs = compute_variant(self._operator, variant, self._inputs)
        if self._kept is not None:
            self._kept[variant.name] = outputs
        return outputs


def compute_variant(operator: Operator, variant: Variant, inputs: Tensors) -> Tensors:
    """Return a variant's outputs by name.

    Raises:
        ValueError: if the variant returns another number of outputs than the operator has.
    """
    given = [inputs[spec.name].detach() for spec in operator.inputs]
    outputs = variant.compute(given)
    if len(outputs) != len(operator.outputs):
        raise ValueError(
            f"variant {variant.name} of {operator.id} returned {len(outputs)} outputs; the"
            f" operator has {len(operator.outputs)}"
        )
    return {spec.name: out for spec, out in zip(operator.outputs, outputs, strict=True)}


def match_variants(
    operator: Operator,
    inputs: Tensors,
    outputs: Tensors,
    comparison: Comparison,
    *,
    contract: Contract = "stored_intermediates",
    catalogue: Catalogue | None = None,
) -> Matching:
    """Find the wrong variants that explain a case's failing outputs.

    Args:
        operator: what the outputs should be of; its ``variants`` are tried.
        inputs: every input by name, as they were before the call.
        outputs: every output by name, of the right shape and dtype, on the inputs' device.
        comparison: of these outputs; without a failing output nothing matches.
        contract: the contract of the comparison.
        catalogue: the variants' outputs, if they are at hand.

    Returns:
        The failing outputs and the matches: those that explain every failing output first, of
        these the ones that no other output contradicts, then exact ones, then those nearest to
        the outputs, then those that change the fewest elements. Beside the outputs, one
        variant's outputs and a few times one output are held in memory.
    """
    failing = failing_outputs(comparison)
    if not failing:
        return Matching((), ())
    catalogue = catalogue or Catalogue(operator, inputs)
    targets = {}
    for spec in operator.outputs:
        if spec.name in failing:
            candidate = outputs[spec.name].detach()
            judged = judge_elements(operator, inputs, spec, candidate, contract)
            targets[spec.name] = _Target(candidate, judged)
    matches = []
    with one_thread():
        for variant in catalogue.variants:
            computed = catalogue.outputs(variant)
            fits = {}
            for name in failing:
                fit = targets[name].fit(computed[name])
                if fit is not None:
                    fits[name] = fit
            if fits:
                rest = [spec.name for spec in operator.outputs if spec.name not in fits]
                contradicted = _failing_in(operator, inputs, computed, rest, contract)
                matches.append(_match(variant, fits, contradicted))
    order = sorted(matches, key=lambda match: (_rank(match, len(failing)), match.variant))
    return Matching(failing, tuple(order))


def _rank(match: Match, failing: int) -> tuple[float, ...]:
    return (
        failing - len(match.outputs),
        len(match.contradicted),
        not match.exact,
        round(match.distance, 3),
        match.changed,
    )


@dataclass(frozen=True)
class _Fit:
    """How a variant's output fits a candidate's.

    Attributes:
        exact: bit for bit.
        changed: elements in which the variant differs from the truth.
        distance: as in :class:`Match`.
    """

    exact: bool
    changed: int
    distance: float


def _match(variant: Variant, fits: Mapping[str, _Fit], contradicted: tuple[str, ...]) -> Match:
    return Match(
        variant=variant.name,
        description=variant.description,
        outputs=tuple(fits),
        contradicted=contradicted,
        exact=all(fit.exact for fit in fits.values()),
        changed=sum(fit.changed for fit in fits.values()),
        distance=max(fit.distance for fit in fits.values()),
    )


class _Target:
    """A failing output that a variant may explain.

    Args:
        candidate: the output.
        judged: its judgement.
    """

    def __init__(self, candidate: torch.Tensor, judged: Judged) -> None:
        self._candidate, self._judged = candidate, judged
        wrong = judged.wrong
        if not bool(wrong.any()):
            # No element is wrong by itself, only their mean error: then all that are not rounded
            # correctly tell.
            wrong = ~same_numbers(candidate, judged.truth)
        places = wrong.reshape(-1).nonzero().squeeze(1)
        self._places = places[:: max(1, -(-places.numel() // _SAMPLE))]
        self._wrong = WrongElements(self._picked(candidate), self._picked(judged.truth))

    def _picked(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1)[self._places]

    def fit(self, variant: torch.Tensor) -> _Fit | None:
        """Return how a variant's output fits; None where it does not."""
        candidate, judged = self._candidate, self._judged
        if variant.shape != candidate.shape or variant.dtype != candidate.dtype:
            return None
        picked = self._picked(variant)
        if not picked.numel() or self._wrong.explained(picked) < EXPLAINED:
            return None
        near = changed = 0
        exact = True
        for c, v, t, scale in _row_chunks(candidate, variant, judged.truth, judged.scale):
            identical = same_bits(c, v)
            if bool(identical.all()):
                near += c.numel()
            else:
                exact = False
                near += int((identical | close(c, v, scale)).sum())
            changed += int((~same_bits(v, t)).sum())
        if near < SHARE * candidate.numel():
            return None
        return _Fit(exact, changed, self._wrong.distance(picked))


def _row_chunks(
    candidate: torch.Tensor, variant: torch.Tensor, truth: torch.Tensor, scale: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield about a million elements of each tensor at a time, as ``[rows, width]``."""
    width = candidate.shape[-1] if candidate.dim() else 1
    step = max(1, _CHUNK // width)
    flat = [x.reshape(-1, width) for x in (candidate, variant, truth)]
    flat.append(scale.reshape(-1, 1))
    for start in range(0, flat[0].shape[0], step):
        yield tuple(x[start : start + step] for x in flat)


def _narrowed(operator: Operator, names: Sequence[str]) -> Operator:
    """Return an operator that has only some outputs, for comparing these alone."""
    return replace(
        operator,
        outputs=tuple(spec for spec in operator.outputs if spec.name in names),
        inplace=(),
        probes=(),
        suites=(),
        general_probes=(),
        large=(),
        variants=(),
    )


def compare_outputs(
    operator: Operator,
    inputs: Tensors,
    outputs: Tensors,
    names: Sequence[str],
    contract: Contract,
    *,
    random: bool = False,
) -> Comparison:
    """Compare some outputs only; see :func:`oracle.comparison.compare`.

    Independent random inputs are compared in all outputs: how many there are decides how large a
    mean error may be by chance.
    """
    if not random:
        operator = _narrowed(operator, names)
    return compare(operator, inputs, outputs, contract, random=random)


def _failing_in(
    operator: Operator,
    inputs: Tensors,
    outputs: Tensors,
    names: Sequence[str],
    contract: Contract,
) -> tuple[str, ...]:
    """Return which of some outputs fail."""
    if not names:
        return ()
    return failing_outputs(compare_outputs(operator, inputs, outputs, names, contract))


def refute(
    operator: Operator,
    inputs: Tensors,
    names: Iterable[str],
    *,
    contract: Contract = "stored_intermediates",
) -> tuple[str, ...]:
    """Return which variants a case that passed leaves standing.

    Args:
        operator: the operator.
        inputs: the inputs of a case in which the candidate was right.
        names: variants that fit the failing cases.
        contract: the contract of the comparison.

    Returns:
        Of the names, in order, those of variants that are right in this case too.
    """
    every = [spec.name for spec in operator.outputs]
    by_name = {variant.name: variant for variant in operator.variants}
    return tuple(
        name
        for name in names
        if not _failing_in(
            operator, inputs, compute_variant(operator, by_name[name], inputs), every, contract
        )
    )


def combine(matchings: Sequence[Matching]) -> tuple[Match, ...]:
    """Return the variants that explain all failing outputs of all failing cases.

    Cases that no variant explains are left aside if they are fewer than half: where values
    overflow or are not finite, two evaluations of one formula may have little in common.

    Args:
        matchings: one for each failing case looked at.

    Returns:
        One match for each such variant, its figures taken over all cases, the best one first in
        the order of :func:`match_variants`; equals are ordered by name.
    """
    telling = _telling(matchings)
    merged = []
    for first in telling[0].matches if telling else ():
        matches = [_whole(matching, first.variant) for matching in telling]
        if all(match is not None for match in matches):
            merged.append(_merge([match for match in matches if match is not None]))
    return tuple(sorted(merged, key=lambda match: (_rank(match, 0), match.variant)))


def _telling(matchings: Sequence[Matching]) -> list[Matching]:
    """Return the matchings that decide: those with a match, unless they are half or fewer."""
    matched = [matching for matching in matchings if matching.matches]
    return matched if 2 * len(matched) > len(matchings) else list(matchings)


def is_ambiguous(whole: Sequence[Match]) -> bool:
    """Whether another variant fits about as well as the best one of :func:`combine`."""
    return len(whole) > 1 and _rank(whole[0], 0)[:3] == _rank(whole[1], 0)[:3]


def _whole(matching: Matching, name: str) -> Match | None:
    """Return the match of a variant if it explains every failing output of the case."""
    for match in matching.matches:
        if match.variant == name and match.outputs == matching.failing:
            return match
    return None


def _merge(matches: Sequence[Match]) -> Match:
    def union(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in parts for name in part))

    return replace(
        matches[0],
        outputs=union(match.outputs for match in matches),
        contradicted=union(match.contradicted for match in matches),
        exact=all(match.exact for match in matches),
        changed=sum(match.changed for match in matches),
        distance=max(match.distance for match in matches),
    )


def combine_by_output(matchings: Sequence[Matching]) -> tuple[Match, ...]:
    """Return one variant for each failing output that one explains, as few as possible.

    For outputs with different faults: a variant counts for an output if it explains it in every
    case where it failed.

    Returns:
        Matches with the outputs each is taken for, in the order of these.
    """
    matchings = _telling(matchings)
    failing = list(dict.fromkeys(name for matching in matchings for name in matching.failing))
    found: dict[str, list[Match]] = {}
    for matching in matchings:
        for match in matching.matches:
            found.setdefault(match.variant, []).append(match)
    covers: dict[str, set[str]] = {}
    for variant, matches in found.items():
        covers[variant] = {
            name
            for name in failing
            if sum(name in match.outputs for match in matches)
            == sum(name in matching.failing for matching in matchings)
        }
    chosen: list[Match] = []
    left = set(failing)
    while left:
        ranked = sorted(
            (-len(covers[variant] & left), _rank(_merge(matches), 0), variant)
            for variant, matches in found.items()
        )
        if not ranked or ranked[0][0] == 0:
            break
        variant = ranked[0][2]
        taken = tuple(name for name in failing if name in covers[variant] & left)
        chosen.append(replace(_merge(found[variant]), outputs=taken))
        left -= set(taken)
    return tuple(sorted(chosen, key=lambda match: failing.index(match.outputs[0])))


def diagnose(
    operator: Operator,
    failures: Iterable[Failure],
    *,
    contract: Contract = "stored_intermediates",
    passed: Iterable[Tensors] = (),
    enough: int = 3,
) -> Diagnosis:
    """Name the fault behind failing cases, or describe it.

    Args:
        operator: the operator.
        failures: small cases that failed; looked at one after the other, so a generator keeps
            one in memory at a time.
        contract: the contract they were compared under.
        passed: the inputs of small cases that passed, which tell apart faults that fit alike.
        enough: after so many failures, further ones are looked at only as long as several
            variants fit about as well.

    Returns:
        The diagnosis; its evidence is empty only where there is no failure.
    """
    matchings: list[Matching] = []
    whole: tuple[Match, ...] = ()
    structure = ""
    for failure in failures:
        if len(matchings) >= enough and not is_ambiguous(whole):
            break
        inputs, outputs = failure.inputs, failure.outputs
        if not structure:
            text = describe_structure(operator, inputs, outputs, failure.comparison, contract)
            structure = f"In case {failure.case}: {text}" if text else ""
        matchings.append(
            match_variants(operator, inputs, outputs, failure.comparison, contract=contract)
        )
        whole = combine(matchings)
    for inputs in passed:
        if not is_ambiguous(whole):
            break
        standing = refute(operator, inputs, [m.variant for m in whole], contract=contract)
        whole = tuple(match for match in whole if match.variant in standing) or whole
    return conclude(matchings, whole, structure)


def conclude(matchings: Sequence[Matching], whole: Sequence[Match], structure: str) -> Diagnosis:
    """Put the findings of all failing cases into words.

    Args:
        matchings: one for each failing case looked at.
        whole: the variants that explain all of it, the best one first.
        structure: where the wrong elements are and what they hold, in sentences.
    """
    cases = _counted(len(_telling(matchings)), len(matchings))
    if whole:
        best = whole[0]
        how = "bit for bit what this fault gives" if best.exact else "this fault, but for roundings"
        evidence = f"{listed(best.outputs)} in {cases} looked at: {how}."
        if best.contradicted:
            evidence += f" It would also show in {listed(best.contradicted)}, where all is right."
        equal = [m.variant for m in whole[1:] if _rank(m, 0) == _rank(best, 0)]
        if equal:
            evidence += f" {listed(equal[:3])} would look the same there."
        return Diagnosis(best.variant, best.description, _joined(evidence, structure))
    parts = combine_by_output(matchings)
    if not parts:
        return Diagnosis("", "", structure)
    evidence = " ".join(
        f"{listed(part.outputs)} in {cases} looked at: {part.variant}"
        f"{'' if part.exact else ', but for roundings'}."
        for part in parts
    )
    explained = {name for part in parts for name in part.outputs}
    failing = dict.fromkeys(name for matching in matchings for name in matching.failing)
    rest = [name for name in failing if name not in explained]
    if rest:
        evidence += f" No known fault explains {listed(rest)}."
    return Diagnosis(
        " + ".join(part.variant for part in parts),
        " ".join(part.description for part in parts),
        _joined(evidence, structure),
    )


def _counted(telling: int, looked_at: int) -> str:
    if telling < looked_at:
        return f"{telling} of the {looked_at} failing cases"
    return f"the {looked_at} failing cases" if looked_at > 1 else "the failing case"


def _joined(*texts: str) -> str:
    return " ".join(text for text in texts if text)
