"""Which known fault explains wrong outputs; else, where and what the wrong elements are.

Three questions, each answered from the outputs alone:

* :func:`match_variants`: which of the operator's wrong variants gives these outputs, bit for bit
  or but for roundings of its own? A variant counts only where it explains elements that the truth
  does not.
* :func:`describe_structure`: which rows, heads and columns are wrong, and what stands there?
* :func:`claim_hint`: do the cases that failed have something in common that a claim rules out?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, pairwise

import torch

from .budget import Contract, interval
from .certified import block_elements, evaluate, fill_output, one_thread
from .comparison import Comparison, compare
from .definition import Block, Case, Copied, Operator, Summed, TensorSpec, Variant
from .rounding import Format, format_of
from .verdict import Diagnosis

Tensors = Mapping[str, torch.Tensor]

ROUNDOFFS = 4
"""Unit roundoffs of a row's largest sum of |terms| by which two evaluations of one formula may
differ: each term stored in the output type errs by one at most, all together by one of the sum,
and so does the last rounding; twice, for either side."""

SHARE = 0.999
"""Share of the elements of an output that a variant must give."""

EXPLAINED = 0.9
"""Share of the wrong elements that must lie much nearer to the variant than to the truth. Where
variant and truth themselves are close, roundings blur which one is meant."""

NEARER = 0.5
"""How much nearer: the distance to the variant over that to the truth."""

_SAMPLE = 4096
_CHUNK = 1 << 20
_FLOAT32_LARGEST = 3.4e38


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


# One output, element by element.


@dataclass(frozen=True)
class Judged:
    """One output judged element by element, apart from :mod:`oracle.comparison`.

    Attributes:
        truth: the correctly rounded output.
        wrong: bool, where the contract does not allow the element.
        magnitudes: float32, the sum of |terms| of computed elements, 0 of others.
        scale: float32 ``[..., 1]``: the largest sum of |terms| (or |value|) in each row of the
            last axis.
        regions: region name to the indices along each dimension that its elements have.
    """

    truth: torch.Tensor
    wrong: torch.Tensor
    magnitudes: torch.Tensor
    scale: torch.Tensor
    regions: Mapping[str, tuple[torch.Tensor, ...]]


def judge_elements(
    operator: Operator,
    inputs: Tensors,
    spec: TensorSpec,
    output: torch.Tensor,
    contract: Contract = "stored_intermediates",
) -> Judged:
    """Say of every element of one output whether a contract allows it.

    Args:
        operator: what the output should be of.
        inputs: every input by name.
        spec: the output's specification.
        output: the output, of the right shape and dtype, on the inputs' device.
        contract: the contract of computed elements.

    Returns:
        The judgement; it holds a few times the memory of the output.
    """
    fmt = format_of(output.dtype)
    output = output.detach()
    shape, device = output.shape, output.device
    truth = torch.empty(shape, dtype=fmt.dtype, device=device)
    wrong = torch.zeros(shape, dtype=torch.bool, device=device)
    magnitudes = torch.zeros(shape, dtype=torch.float32, device=device)
    marks = {
        name: [torch.zeros(size, dtype=torch.bool, device=device) for size in shape]
        for name in spec.regions
    }
    inputs = {name: tensor.detach() for name, tensor in inputs.items()}
    with one_thread():
        for block in operator.blocks(inputs, spec.name, block_elements(device)):
            for mark, selection in zip(marks[block.region], block.index, strict=True):
                mark[selection] = True
            _judge_block(block, output, contract, truth, wrong, magnitudes)
    truth_size = torch.where(torch.isfinite(truth), truth, 0).abs().to(torch.float32)
    scale = torch.maximum(magnitudes, truth_size)
    scale = scale.amax(-1, keepdim=True) if scale.numel() and scale.dim() else scale
    regions = {
        name: tuple(mark.nonzero().squeeze(1) for mark in along)
        for name, along in marks.items()
        if all(bool(mark.any()) for mark in along)
    }
    return Judged(truth, wrong, magnitudes, scale, regions)


def _judge_block(
    block: Block,
    output: torch.Tensor,
    contract: Contract,
    truth: torch.Tensor,
    wrong: torch.Tensor,
    magnitudes: torch.Tensor,
) -> None:
    fmt = format_of(output.dtype)
    actual = output[block.index]
    if actual.numel() == 0:
        return
    if isinstance(block.meaning, Summed):
        values = evaluate(block.meaning.terms(), fmt)
        truth[block.index] = values.rounded
        total = values.terms.abs().sum(0).clamp(max=_FLOAT32_LARGEST)
        magnitudes[block.index] = total.to(torch.float32)
        same = _same_numbers(actual, values.rounded)
        places = (~same).reshape(-1).nonzero().squeeze(1)
        picked = actual.reshape(-1)[places]
        accepted = torch.zeros_like(picked, dtype=torch.bool)
        if contract != "correctly_rounded" and places.numel():
            terms = values.terms.reshape(values.terms.shape[0], -1)[:, places]
            bounds = interval(terms, contract, fmt)
            accepted = bounds.accepts(picked)
            if values.finite is not None:
                # A term that is not finite fixes the class of the sum, unless out of domain.
                lenient = ~bounds.in_domain & ~torch.isfinite(picked)
                finite = values.finite.reshape(-1)[places]
                accepted = torch.where(finite, accepted, lenient)
        outside = torch.zeros(actual.numel(), dtype=torch.bool, device=actual.device)
        outside[places] = ~accepted
        wrong[block.index] = outside.reshape(actual.shape)
        return
    target = truth.view(fmt.bits_dtype)
    if isinstance(block.meaning, Copied):
        source = block.meaning.source.view(fmt.bits_dtype)
        target[block.index] = source
        wrong[block.index] = actual.contiguous().view(fmt.bits_dtype) != source
    else:
        target[block.index] = 0
        wrong[block.index] = ~(actual == 0)


def _same_numbers(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return where numbers are equal, whatever the sign of zero; a NaN equals any NaN."""
    return (one == other) | (torch.isnan(one) & torch.isnan(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(format_of(tensor.dtype).bits_dtype)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return where bits are equal; a NaN equals any NaN."""
    return (_bits(one) == _bits(other)) | (torch.isnan(one) & torch.isnan(other))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return float32 of 16-bit numbers and float64 of others: differences do not cancel away."""
    return tensor.to(torch.float64 if tensor.dtype.itemsize > 2 else torch.float32)


def _tolerance(scale: torch.Tensor, other: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return how far two evaluations of a formula may lie apart."""
    size = torch.maximum(scale.to(other.dtype), other.abs().clamp(max=_FLOAT32_LARGEST))
    return size * (ROUNDOFFS * fmt.unit_roundoff) + 2 * fmt.smallest


def _close(candidate: torch.Tensor, other: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return where a candidate's numbers are others' but for roundings."""
    c, o = _wide(candidate), _wide(other)
    tolerance = _tolerance(scale, o, format_of(candidate.dtype))
    return ((c - o).abs() <= tolerance) | _same_numbers(c, o)


class _Wrong:
    """Wrong elements: what stands there and what should.

    Args:
        actual: what stands there, one dimension.
        truth: what should.
    """

    def __init__(self, actual: torch.Tensor, truth: torch.Tensor) -> None:
        self._bits, self._truth_bits = _bits(actual), _bits(truth)
        self._actual = _wide(actual)
        to_truth = (self._actual - _wide(truth)).abs()
        self._to_truth = torch.where(torch.isnan(to_truth), torch.inf, to_truth)
        self._nan = torch.isnan(actual)

    def explained(self, other: torch.Tensor) -> float:
        """Return the share that is another tensor's rather than the truth's."""
        bits = _bits(other)
        differs = bits != self._truth_bits
        if not bool(differs.any()):
            return 0.0
        wide = _wide(other)
        # Where bits alone differ (a NaN's payload, the sign of a zero) distances say nothing.
        same = (self._bits == bits) | (self._nan & torch.isnan(wide))
        nearer = (self._actual - wide).abs() <= NEARER * self._to_truth
        return float((differs & (same | nearer)).float().mean())

    def distance(self, other: torch.Tensor) -> float:
        """Return the mean distance to another tensor over that to the truth.

        Where numbers say nothing (NaNs, zeros of either sign) the bits do: machines convert NaNs
        differently, so no variant is refused for these, but they tell variants apart.
        """
        to_other = (self._actual - _wide(other)).abs()
        ratio = to_other / self._to_truth
        silent = torch.isnan(ratio) | (to_other == 0)
        ratio = torch.where(silent, (self._bits != _bits(other)).to(ratio.dtype), ratio)
        return float(ratio.clamp(max=1.0).mean())


# Variants.


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


def failing_outputs(comparison: Comparison) -> tuple[str, ...]:
    """Return the names of the outputs with a region that does not pass, in order."""
    names = [region.output for region in comparison.regions if not region.passed]
    return tuple(dict.fromkeys(names))


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
            wrong = ~_same_numbers(candidate, judged.truth)
        places = wrong.reshape(-1).nonzero().squeeze(1)
        self._places = places[:: max(1, -(-places.numel() // _SAMPLE))]
        self._wrong = _Wrong(self._picked(candidate), self._picked(judged.truth))

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
        close = changed = 0
        exact = True
        for c, v, t, scale in _row_chunks(candidate, variant, judged.truth, judged.scale):
            identical = _same_bits(c, v)
            if bool(identical.all()):
                close += c.numel()
            else:
                exact = False
                close += int((identical | _close(c, v, scale)).sum())
            changed += int((~_same_bits(v, t)).sum())
        if close < SHARE * candidate.numel():
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

    Args:
        matchings: one for each failing case looked at.

    Returns:
        One match for each such variant, its figures taken over all cases, the best one first in
        the order of :func:`match_variants`; equals are ordered by name.
    """
    merged = []
    for first in matchings[0].matches if matchings else ():
        matches = [_whole(matching, first.variant) for matching in matchings]
        if all(match is not None for match in matches):
            merged.append(_merge([match for match in matches if match is not None]))
    return tuple(sorted(merged, key=lambda match: (_rank(match, 0), match.variant)))


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
) -> Diagnosis:
    """Name the fault behind failing cases, or describe it.

    Args:
        operator: the operator.
        failures: small cases that failed; looked at one after the other, so a generator keeps
            one in memory at a time.
        contract: the contract they were compared under.
        passed: the inputs of small cases that passed, which tell apart faults that fit alike.

    Returns:
        The diagnosis; its evidence is empty only where there is no failure.
    """
    matchings: list[Matching] = []
    structure = ""
    for failure in failures:
        inputs, outputs = failure.inputs, failure.outputs
        if not structure:
            text = describe_structure(operator, inputs, outputs, failure.comparison, contract)
            structure = f"In case {failure.case}: {text}" if text else ""
        matchings.append(
            match_variants(operator, inputs, outputs, failure.comparison, contract=contract)
        )
    whole = combine(matchings)
    for inputs in passed:
        if len(whole) < 2:
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
    cases = f"the {len(matchings)} failing cases" if len(matchings) > 1 else "the failing case"
    if whole:
        best = whole[0]
        how = "bit for bit what this fault gives" if best.exact else "this fault, but for roundings"
        evidence = f"{_listed(best.outputs)} in {cases} looked at: {how}."
        equal = [m.variant for m in whole[1:] if _rank(m, 0) == _rank(best, 0)]
        if equal:
            evidence += f" {_listed(equal[:3])} would look the same there."
        return Diagnosis(best.variant, best.description, _joined(evidence, structure))
    parts = combine_by_output(matchings)
    if not parts:
        return Diagnosis("", "", structure)
    evidence = " ".join(
        f"{_listed(part.outputs)} in {cases} looked at: {part.variant}"
        f"{'' if part.exact else ', but for roundings'}."
        for part in parts
    )
    explained = {name for part in parts for name in part.outputs}
    failing = dict.fromkeys(name for matching in matchings for name in matching.failing)
    rest = [name for name in failing if name not in explained]
    if rest:
        evidence += f" No known fault explains {_listed(rest)}."
    return Diagnosis(
        " + ".join(part.variant for part in parts),
        " ".join(part.description for part in parts),
        _joined(evidence, structure),
    )


def _joined(*texts: str) -> str:
    return " ".join(text for text in texts if text)


def _listed(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


# Structure.

_MOST_LISTED = 4
_MOST_ULPS = 16
_FEWEST_MOVED = 8
"""Fewer right values in wrong places may be there by chance."""
_FILL_BYTES = (0x7F, 0xFE, 0xFF)
_MOST_SENTENCES = 2


def describe_structure(
    operator: Operator,
    inputs: Tensors,
    outputs: Tensors,
    comparison: Comparison,
    contract: Contract = "stored_intermediates",
) -> str:
    """Say where the wrong elements are and what stands there, in one or two sentences.

    Args:
        operator: what the outputs should be of.
        inputs: every input by name.
        outputs: every output by name.
        comparison: the comparison of these.
        contract: its contract.

    Returns:
        The sentences; empty where no element is wrong.
    """
    said: dict[str, list[str]] = {}
    for result in comparison.regions:
        if result.biased and result.mean is not None:
            text = (
                f"no element is wrong by itself, but their mean error is {result.mean.mean:+.3f}"
                f" ulp, outside {result.mean.low:+.3f} to {result.mean.high:+.3f}"
            )
            said.setdefault(text, []).append(f"{result.output} ({result.region})")
    for name in failing_outputs(comparison):
        spec = next(spec for spec in operator.outputs if spec.name == name)
        judged = judge_elements(operator, inputs, spec, outputs[name], contract)
        for region, text in _describe_output(operator, inputs, outputs, spec, judged):
            where = f"{name} ({region})" if len(judged.regions) > 1 else name
            said.setdefault(text, []).append(where)
    sentences = [f"{_listed(places)}: {text}." for text, places in said.items()]
    left = len(sentences) - _MOST_SENTENCES
    if left > 0:
        rest = [place for places in list(said.values())[_MOST_SENTENCES:] for place in places]
        sentences[_MOST_SENTENCES:] = [f"Also wrong: {_listed(rest)}."]
    return " ".join(sentences)


def _describe_output(
    operator: Operator, inputs: Tensors, outputs: Tensors, spec: TensorSpec, judged: Judged
) -> Iterator[tuple[str, str]]:
    """Yield region and sentence for each region with wrong elements."""
    for region, indices in judged.regions.items():
        wrong = _select(judged.wrong, indices)
        if not bool(wrong.any()):
            continue
        where = describe_places(spec, wrong, indices, _positions(operator, inputs))
        facts = _Part(
            spec=spec,
            actual=_select(outputs[spec.name], indices),
            truth=_select(judged.truth, indices),
            wrong=wrong,
            scale=judged.scale,
            indices=indices,
        )
        what = _describe_values(facts, operator, inputs, outputs, judged)
        yield region, f"{where}; {what}" if what else where


def _select(tensor: torch.Tensor, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the part of a tensor at the given indices along each dimension."""
    for dimension, index in enumerate(indices):
        if index.numel() != tensor.shape[dimension]:
            tensor = tensor.index_select(dimension, index)
    return tensor


def _positions(operator: Operator, inputs: Tensors) -> dict[str, tuple[str, list[int]]]:
    """Return, by the axis that counts its entries, each index tensor's name and entries."""
    return {
        spec.axes[0]: (spec.name, inputs[spec.name].tolist())
        for spec in operator.inputs
        if spec.indexes is not None
    }


def describe_places(
    spec: TensorSpec,
    wrong: torch.Tensor,
    indices: Sequence[torch.Tensor],
    positions: Mapping[str, tuple[str, list[int]]],
) -> str:
    """Say which elements of a region are wrong, by axis names and indices.

    Args:
        spec: the output's specification.
        wrong: bool, the shape of the region.
        indices: the region's indices along each dimension of the output.
        positions: axis name to the name and entries of the index tensor along it.

    Returns:
        A clause such as ``all 640 elements with head_dim from 64 on are wrong``.
    """
    count = int(wrong.sum())
    if count == 1:
        at = [int(i[k]) for i, k in zip(indices, wrong.nonzero()[0].tolist(), strict=True)]
        return f"one of {wrong.numel()} elements is wrong, at {at}"
    touched = [_touched(wrong, dimension) for dimension in range(wrong.dim())]
    dense = 2 * count >= math.prod(map(len, touched))
    reach, parts = 1, []
    for dimension, axis in enumerate(spec.axes):
        size = wrong.shape[dimension]
        # Few elements scattered by chance leave out some indices of a long axis: that says nothing.
        telling = dense or count > size * (math.log(size) + 3)
        if axis == "1" or not telling or len(touched[dimension]) == size:
            reach *= size
            continue
        reach *= len(touched[dimension])
        among = indices[dimension].tolist()
        parts.append(_describe_axis(axis, touched[dimension], among, positions))
    amount = f"all {count}" if count == reach else f"{count} of {reach}"
    where = f" with {_listed(parts)}" if parts else ""
    return f"{amount} elements{where} are wrong"


def _touched(wrong: torch.Tensor, dimension: int) -> list[int]:
    """Return the ascending places along a dimension at which anything is wrong."""
    others = [other for other in range(wrong.dim()) if other != dimension]
    return (wrong.amax(others) if others else wrong).nonzero().squeeze(1).tolist()


def _describe_axis(
    axis: str,
    touched: list[int],
    among: list[int],
    positions: Mapping[str, tuple[str, list[int]]],
) -> str:
    """Describe some of the indices along an axis.

    Args:
        axis: its name.
        touched: ascending places in ``among``, not all of them.
        among: ascending indices along the axis.
        positions: as in :func:`describe_places`.
    """
    named = [among[place] for place in touched]
    missing = [among[place] for place in sorted(set(range(len(among))) - set(touched))]
    return (
        _describe_run(axis, touched, named, len(among) - 1)
        or _describe_threshold(axis, named, missing, positions)
        or _describe_scattered(axis, touched, named, missing)
    )


def _describe_run(axis: str, touched: Sequence[int], named: Sequence[int], last: int) -> str:
    """Describe one index or consecutive ones; empty for others."""
    if len(named) == 1:
        end = " (the last)" if touched[0] == last else " (the first)" if touched[0] == 0 else ""
        return f"{axis} {named[0]}{end}"
    if touched[-1] - touched[0] >= len(touched):
        return ""
    if touched[-1] == last:
        return f"{axis} from {named[0]} on"
    return f"{axis} up to {named[-1]}" if touched[0] == 0 else f"{axis} {named[0]}..{named[-1]}"


def _describe_scattered(
    axis: str, touched: Sequence[int], named: Sequence[int], missing: Sequence[int]
) -> str:
    steps = {b - a for a, b in pairwise(touched)}
    if len(steps) == 1 and len(named) > 2:
        return f"every {_ordinal(steps.pop())} {axis} from {named[0]} on"
    if len(named) <= _MOST_LISTED:
        return f"{axis} {', '.join(map(str, named))}"
    if len(missing) <= _MOST_LISTED:
        return f"{axis} other than {', '.join(map(str, missing))}"
    total = len(named) + len(missing)
    return f"{len(named)} of {total} indices along {axis}, the first {named[0]}"


def _describe_threshold(
    axis: str,
    named: Sequence[int],
    missing: Sequence[int],
    positions: Mapping[str, tuple[str, list[int]]],
) -> str:
    """Describe indices by the entries of an index tensor along the axis, if one bound does."""
    if axis not in positions or not missing:
        return ""
    name, entries = positions[axis]
    inside = [entries[index] for index in named]
    outside = [entries[index] for index in missing]
    if min(inside) > max(outside):
        return f"{name} at least {min(inside)}"
    if max(inside) < min(outside):
        return f"{name} at most {max(inside)}"
    return ""


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


# What stands at the wrong places.


@dataclass(frozen=True)
class _Part:
    """A region of an output: what is there, what should be, and where that differs."""

    spec: TensorSpec
    actual: torch.Tensor
    truth: torch.Tensor
    wrong: torch.Tensor
    scale: torch.Tensor
    indices: tuple[torch.Tensor, ...]
    picked: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        scale = _select(self.scale, self.indices[:-1]).expand(self.wrong.shape)
        picked = tuple(x[self.wrong] for x in (self.actual, self.truth, scale))
        object.__setattr__(self, "picked", picked)

    def holds(self, other: torch.Tensor) -> bool:
        """Whether the wrong elements are those of a tensor of the region's shape."""
        actual, truth, scale = self.picked
        if actual.dtype != other.dtype:
            return False
        given = other[self.wrong]
        if _Wrong(actual, truth).explained(given) < EXPLAINED:
            return False
        return _most(_close(actual, given, scale))


def _most(mask: torch.Tensor) -> bool:
    return int(mask.sum()) >= SHARE * mask.numel()


def _describe_values(
    part: _Part, operator: Operator, inputs: Tensors, outputs: Tensors, judged: Judged
) -> str:
    """Say what the wrong elements are, if it can be said simply."""
    actual, truth, scale = part.picked
    plain = (
        _describe_constant(actual, truth)
        or _describe_sign(actual, truth)
        or _describe_ulps(actual, truth)
    )
    if plain or actual.numel() < _FEWEST_MOVED:
        return plain
    return (
        _describe_moved(part, judged)
        or _describe_source(part, operator, inputs, outputs)
        or _describe_factor(part)
        or _describe_nearness(actual, truth, scale)
        or _describe_remainder(actual, truth)
    )


def _describe_constant(actual: torch.Tensor, truth: torch.Tensor) -> str:
    """Say that all are one value, or that numbers are right and their bits are not."""
    bits = _bits(actual)
    single = actual.numel() == 1
    byte = int(bits[0]) & 0xFF
    fill = int.from_bytes(bytes([byte]) * bits.dtype.itemsize, "little", signed=True)
    facts: tuple[tuple[torch.Tensor, str], ...] = (
        (
            (bits == fill) if byte in _FILL_BYTES else torch.zeros_like(bits, dtype=torch.bool),
            f"all hold what fresh memory was filled with (0x{byte:02X})",
        ),
        (torch.isnan(actual) & torch.isnan(truth), "NaNs whose bits changed"),
        (torch.isnan(actual), "it is NaN" if single else "all are NaN"),
        ((actual == 0) & (truth == 0), "zeros whose sign changed"),
        (actual == 0, "it is zero" if single else "all are zero"),
        (torch.isinf(actual), "it is infinite" if single else "all are infinite"),
        (
            (bits == bits[0]) if not single else torch.zeros_like(bits, dtype=torch.bool),
            f"all are {float(actual[0]):.6g}",
        ),
    )
    return next((text for mask, text in facts if bool(mask.all())), "")


def _describe_sign(actual: torch.Tensor, truth: torch.Tensor) -> str:
    flipped = (actual == -truth) & (actual != 0)
    return "the sign is flipped" if _most(flipped) else ""


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers in the order of the numbers, one apart for neighbours."""
    bits = _bits(tensor).to(torch.int64)
    top = 1 << (8 * tensor.dtype.itemsize - 1)
    return torch.where(bits < 0, -(bits + top), bits)


def _describe_ulps(actual: torch.Tensor, truth: torch.Tensor) -> str:
    if bool((torch.isnan(actual) | torch.isnan(truth)).any()):
        return ""
    apart = _ordered(actual) - _ordered(truth)
    most = int(apart.abs().max())
    if most > _MOST_ULPS:
        return ""
    outward = torch.where(truth < 0, -apart, apart)
    direction = ""
    if actual.numel() > 1:
        if bool((outward < 0).all()):
            direction = ", always towards zero"
        elif bool((outward > 0).all()):
            direction = ", always away from zero"
        elif bool((apart < 0).all()):
            direction = ", always down"
        elif bool((apart > 0).all()):
            direction = ", always up"
        else:
            direction = ", in both directions"
    return f"off by {'at most ' if most > 1 else ''}{most} ulp{direction}"


def _describe_moved(part: _Part, judged: Judged) -> str:
    """Say that right values stand in the wrong place, if they do."""
    for text, move in _moves(part.spec):
        moved = move(judged.truth)
        if part.holds(_select(moved, part.indices)):
            return text
        if part.truth.shape != judged.truth.shape and part.holds(move(part.truth)):
            return f"{text}, within these rows"
    return ""


_Move = Callable[[torch.Tensor], torch.Tensor]


def _moves(spec: TensorSpec) -> Iterator[tuple[str, _Move]]:
    """Yield ways in which right values come to stand in wrong places."""
    axes = [(dimension, axis) for dimension, axis in enumerate(spec.axes) if axis != "1"]
    for dimension, axis in axes:
        moves: tuple[tuple[str, Callable[..., torch.Tensor]], ...] = (
            ("of one index before along {axis}", _rolled),
            ("of one index further along {axis}", _rolled_back),
            ("of index 0 along {axis}", _first),
            ("with {axis} reversed", _reversed),
            ("with the halves of {axis} exchanged", _halves_exchanged),
            ("with neighbours along {axis} exchanged", _neighbours_exchanged),
        )
        for text, move in moves:
            sentence = f"they are the right values {text.format(axis=axis)}"
            yield sentence, partial(move, dimension=dimension)
    for (one, a), (other, b) in combinations(axes, 2):
        text = f"they are the right values as if {a} and {b} were exchanged in memory"
        yield text, partial(_transposed, one=one, other=other)


def _rolled(tensor: torch.Tensor, *, dimension: int) -> torch.Tensor:
    return tensor.roll(1, dimension)


def _rolled_back(tensor: torch.Tensor, *, dimension: int) -> torch.Tensor:
    return tensor.roll(-1, dimension)


def _reversed(tensor: torch.Tensor, *, dimension: int) -> torch.Tensor:
    return tensor.flip(dimension)


def _halves_exchanged(tensor: torch.Tensor, *, dimension: int) -> torch.Tensor:
    return tensor.roll(tensor.shape[dimension] // 2, dimension)


def _neighbours_exchanged(tensor: torch.Tensor, *, dimension: int) -> torch.Tensor:
    size = tensor.shape[dimension]
    places = torch.arange(size, device=tensor.device)
    return tensor.index_select(dimension, (places ^ 1).clamp(max=size - 1))


def _transposed(tensor: torch.Tensor, *, one: int, other: int) -> torch.Tensor:
    return tensor.transpose(one, other).reshape(tensor.shape)


def _first(tensor: torch.Tensor, *, dimension: int) -> torch.Tensor:
    return tensor.narrow(dimension, 0, 1).expand_as(tensor)


def _describe_source(part: _Part, operator: Operator, inputs: Tensors, outputs: Tensors) -> str:
    """Say that another tensor's values stand there, if they do."""
    shape = outputs[part.spec.name].shape
    for spec in operator.inputs:
        source = inputs[spec.name]
        if spec.indexes is not None:
            continue
        if source.shape == shape and part.holds(_select(source, part.indices)):
            return f"they are the input {spec.name} at the same places"
        if source.shape == part.truth.shape and part.holds(source):
            return f"they are the input {spec.name}"
    for spec in operator.outputs:
        if spec.name != part.spec.name and outputs[spec.name].shape == shape:
            other = torch.empty_like(part.actual.new_empty(shape))
            fill_output(operator, inputs, spec.name, other)
            if part.holds(_select(other, part.indices)):
                return f"they are the right values of {spec.name}"
    return ""


def _describe_factor(part: _Part) -> str:
    """Say that the values are the right ones times a constant, if they are."""
    picked, right, scale = part.picked
    actual, truth = picked.to(torch.float64), right.to(torch.float64)
    squares = float((truth * truth).sum())
    if actual.numel() < 2 or not math.isfinite(squares) or squares == 0:
        return ""
    factor = float((actual * truth).sum()) / squares
    if not math.isfinite(factor) or abs(factor - 1) < 0.02 or abs(factor) < 1e-3:
        return ""
    fmt = format_of(picked.dtype)
    off = (actual - factor * truth).abs()
    allowed = _tolerance(scale.to(torch.float64) * max(1.0, abs(factor)), factor * truth, fmt)
    nearer = off <= NEARER * (actual - truth).abs()
    if not _most(off <= allowed) or float(nearer.float().mean()) < EXPLAINED:
        return ""
    return f"they are the right values times {_fraction(factor)}"


def _fraction(factor: float) -> str:
    for text, number in ((f"{round(factor)}", factor), (f"1/{round(1 / factor)}", 1 / factor)):
        if round(number) != 0 and abs(number / round(number) - 1) < 0.01:
            return text
    return f"{factor:.3g}"


def _describe_nearness(actual: torch.Tensor, truth: torch.Tensor, scale: torch.Tensor) -> str:
    if _most(_close(actual, truth, scale)):
        return "they are near the right values, as with intermediate results of low precision"
    return ""


def _describe_remainder(actual: torch.Tensor, truth: torch.Tensor) -> str:
    """Say at least what is plain: how many are not numbers, how large the error is."""
    lost = torch.isnan(actual) & ~torch.isnan(truth)
    if bool(lost.any()):
        return f"{int(lost.sum())} of them are NaN"
    kept = torch.isnan(truth) | torch.isinf(truth)
    if bool(kept.all()):
        return "all should be NaN or infinite"
    return ""


# Claims.


def claim_hint(operator: Operator, results: Sequence[tuple[Case, str]]) -> str:
    """Say under which claims a candidate that failed meets the contract, if there are such.

    The narrowest claims that hold for all cases that passed are the sizes, types, layouts and
    constraints seen among them. If no case that failed meets all of these claims, those that no
    failed case needs are dropped, and the rest is the hint.

    Args:
        operator: the cases' operator.
        results: cases of the general domain, each with its status.

    Returns:
        One sentence with the claims as written after ``--where``; empty where there are none,
        where fewer than two cases passed, or where none failed.
    """
    passed = [case for case, status in results if status == "passed"]
    failed = [case for case, status in results if status not in ("passed", "empty_ok", "not_run")]
    if len(passed) < 2 or not failed:
        return ""
    claims = [claim for claim in _claims(operator, passed) if not all(map(claim.meets, failed))]
    if any(all(claim.meets(case) for claim in claims) for case in failed):
        return ""
    for claim in list(claims):
        rest = [other for other in claims if other is not claim]
        if not any(all(other.meets(case) for other in rest) for case in failed):
            claims = rest
    where = " ".join(claim.text for claim in reversed(claims))
    return (
        f"All {len(passed)} cases with {where} passed and all {len(failed)} others failed: it meets"
        f" the contract under --where {where}."
    )


@dataclass(frozen=True)
class _Claim:
    """Something all cases that passed have in common.

    Attributes:
        text: as written after ``--where``.
        meets: whether a case has it.
    """

    text: str
    meets: Callable[[Case], bool]


def _claims(operator: Operator, passed: Sequence[Case]) -> Iterator[_Claim]:
    """Yield the narrowest claims that hold for some cases, those to be dropped first in front."""
    free = [axis.name for axis in operator.axes if not axis.sum_of]
    # A size that every case varies would be claimed by chance: only one that all passed cases
    # share says something, unless the operator's official domain fixes the axis.
    for axis in sorted(free, key=lambda name: name in operator.official):
        sizes = sorted({case.sizes[axis] for case in passed})
        if len(sizes) == 1 or axis in operator.official:
            text = f"{axis}={','.join(map(str, sizes))}"
            yield _Claim(text, partial(_has_size, axis=axis, sizes=tuple(sizes)))
    if all(_contiguous(operator, case) for case in passed):
        yield _Claim("layout=contiguous", lambda case: _contiguous(operator, case))
    for name in operator.constraints:
        if all(name in case.constraints for case in passed):
            yield _Claim(name, partial(_has_constraint, name=name))
    dtypes = [name for name in operator.dtypes if any(case.dtype == name for case in passed)]
    yield _Claim(f"dtype={','.join(dtypes)}", lambda case: case.dtype in dtypes)


def _has_size(case: Case, *, axis: str, sizes: tuple[int, ...]) -> bool:
    return case.sizes[axis] in sizes


def _has_constraint(case: Case, *, name: str) -> bool:
    return name in case.constraints


def _contiguous(operator: Operator, case: Case) -> bool:
    """Whether all inputs of a case are contiguous."""
    return all(
        case.layouts[spec.name].is_contiguous(operator.case_shape(spec, case))
        for spec in operator.inputs
        if spec.name in case.layouts
    )
