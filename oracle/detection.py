"""What the judge detects: which wrong variants and corruptions, in which case; what it accepts.

Everything runs on the cases' inputs in this process. What comes out is data: per wrong variant and
corruption whether it was caught, where first, and (for variants) whether its diagnosis names it;
per legal variant, on how many inputs it was accepted. Four outcomes are told apart:

* ``caught``: the comparison fails in some case.
* ``unchanged``: the outputs are the right ones, bit for bit, in every case: nothing to catch.
* ``within_contract``: they differ, but every element is one the contract allows.
* ``missed``: they differ, the contract does not allow it, and the comparison passed.

The last two are told apart by a second judgement, element by element
(:func:`oracle.diagnosis.judge_elements`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from .budget import Contract
from .certified import truth
from .comparison import Comparison
from .corruption import Corruption, corruptions
from .definition import Case, Operator
from .diagnosis import (
    Catalogue,
    Matching,
    combine,
    compare_outputs,
    compute_variant,
    conclude,
    is_ambiguous,
    match_variants,
)
from .elements import Tensors, judge_elements
from .inputs import make_inputs
from .rounding import format_of
from .structure import failing_outputs

Outcome = Literal["caught", "missed", "within_contract", "unchanged"]

_WRONG: tuple[Outcome, ...] = ("caught", "missed")

Progress = Callable[[int, int, str], None]
"""``on_step(done, total, name)``: so many of the steps are done, the last one on ``name``."""

_MOST_DIAGNOSED = 3

_EARLIER_SEED = 1 << 40
"""What is added to a seed for the earlier call whose outputs stale rows hold."""


@dataclass(frozen=True)
class Catch:
    """The first comparison that failed.

    Attributes:
        case: the case's name.
        seed: of its inputs.
        status: of the comparison, ``wrong_values`` or ``below_contract``.
        output: the first failing output.
        region: its first failing region.
        wrong: how many elements of that region are outside the contract; 0 where only their mean
            error is.
    """

    case: str
    seed: int
    status: str
    output: str
    region: str
    wrong: int


@dataclass(frozen=True)
class VariantDetection:
    """What became of a wrong variant.

    Attributes:
        name: the variant's name.
        description: its sentence.
        outcome: see the module.
        first: where it was caught first; None where it was not.
        caught_in: names of all cases that catch it, with any seed.
        same_as: the earlier variant with the same outputs in every case; empty for a kind of its
            own. Only kinds of their own are counted.
        named: the diagnosis of its outputs, as the diagnosis gives it; empty where it has no name
            for them or nothing was caught.
        named_rightly: whether that is the variant's name, or that of one with the same outputs.
        named_roughly: the diagnosis of its outputs after every computed element got an error like
            that of storing its terms, as another implementation of the same fault would have.
        roughly_rightly: as ``named_rightly``, for ``named_roughly``.
    """

    name: str
    description: str
    outcome: Outcome
    first: Catch | None
    caught_in: tuple[str, ...]
    same_as: str
    named: str
    named_rightly: bool
    named_roughly: str
    roughly_rightly: bool


@dataclass(frozen=True)
class CorruptionDetection:
    """What became of a generic corruption.

    Attributes:
        name: the corruption's name.
        description: its sentence.
        outcome: see the module.
        first: where it was caught first; None where it was not.
    """

    name: str
    description: str
    outcome: Outcome
    first: Catch | None


@dataclass(frozen=True)
class LegalDetection:
    """What became of a legal variant.

    Attributes:
        name: the variant's name.
        description: its sentence.
        judged: on how many inputs (cases times seeds) it was judged.
        changed: on how many of these its outputs were not the correctly rounded ones.
        rejected: where it was rejected, which is a false alarm.
    """

    name: str
    description: str
    judged: int
    changed: int
    rejected: tuple[Catch, ...]


@dataclass(frozen=True)
class Detection:
    """The power of detection of an operator's cases, and their false alarms.

    Attributes:
        operator: the operator's id.
        contract: the contract of the comparisons.
        cases: the names of the cases.
        seeds: the seeds of the wrong variants' and corruptions' inputs.
        legal_seeds: the seeds of the legal variants' inputs.
        variants: the wrong variants, in the operator's order.
        corruptions: the generic corruptions.
        legal: the legal variants, in the operator's order.
    """

    operator: str
    contract: str
    cases: tuple[str, ...]
    seeds: tuple[int, ...]
    legal_seeds: tuple[int, ...]
    variants: tuple[VariantDetection, ...]
    corruptions: tuple[CorruptionDetection, ...]
    legal: tuple[LegalDetection, ...]

    @property
    def kinds(self) -> tuple[VariantDetection, ...]:
        """The wrong variants that are kinds of their own and are wrong in these cases."""
        return tuple(v for v in self.variants if not v.same_as and v.outcome in _WRONG)

    @property
    def unexposed(self) -> tuple[VariantDetection, ...]:
        """The wrong variants that are right, or within the contract, in all of these cases."""
        return tuple(v for v in self.variants if v.outcome not in _WRONG)

    @property
    def caught(self) -> int:
        """How many kinds were caught."""
        return sum(variant.outcome == "caught" for variant in self.kinds)

    @property
    def named(self) -> int:
        """How many kinds were caught and named rightly."""
        return sum(variant.named_rightly for variant in self.kinds)

    @property
    def roughly_named(self) -> int:
        """How many kinds were named rightly although they were rounded otherwise."""
        return sum(variant.roughly_rightly for variant in self.kinds)

    @property
    def false_alarms(self) -> int:
        """How many legal variants were rejected at least once."""
        return sum(bool(variant.rejected) for variant in self.legal)

    @property
    def complete(self) -> bool:
        """Whether all that is wrong in these cases was caught, and nothing else."""
        return (
            self.caught == len(self.kinds)
            and not any(corruption.outcome == "missed" for corruption in self.corruptions)
            and not self.false_alarms
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data fit for JSON; beside the fields there are the totals."""
        totals = ("caught", "named", "roughly_named", "false_alarms", "complete")
        return (
            asdict(self)
            | {"kinds": len(self.kinds), "unexposed": len(self.unexposed)}
            | {name: getattr(self, name) for name in totals}
        )


@dataclass
class _Record:
    """What is known so far about one wrong variant or corruption."""

    first: Catch | None = None
    caught_in: list[str] = field(default_factory=list)
    changed: bool = False
    beyond: bool = False
    digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    exact: list[Matching] = field(default_factory=list)
    rough: list[Matching] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        """The outcome over the cases so far."""
        if self.first is not None:
            return "caught"
        if not self.changed:
            return "unchanged"
        return "missed" if self.beyond else "within_contract"


def detect(
    operator: Operator,
    cases: Sequence[Case],
    seeds: Sequence[int] = (0,),
    *,
    legal_seeds: Sequence[int] | None = None,
    contract: Contract = "stored_intermediates",
    diagnosed: int = 3,
    on_step: Progress | None = None,
) -> Detection:
    """Try everything wrong on the judge, and everything legal.

    Args:
        operator: whose variants and outputs.
        cases: small cases of it; their inputs are made contiguous, on the CPU.
        seeds: of the inputs for wrong variants and corruptions.
        legal_seeds: of the inputs for legal variants; ``seeds`` by default.
        contract: the contract of the comparisons.
        diagnosed: how many failing inputs of a wrong variant its diagnosis looks at, up to three
            times as many where several variants fit; 0 for no diagnosis.
        on_step: called after each step.

    Returns:
        The data; the same arguments give the same data.
    """
    run = _Run(operator, cases, contract, diagnosed)
    legal_seeds = tuple(seeds if legal_seeds is None else legal_seeds)
    every = tuple(dict.fromkeys((*seeds, *legal_seeds)))
    per_case = len(seeds) * (len(run.wrong) + len(run.corruptions)) + len(legal_seeds) * len(
        run.legal
    )
    steps = _Steps(len(cases) * per_case, on_step)
    for case in cases:
        for seed in every:
            trial = _Trial.make(operator, case, seed)
            if seed in seeds:
                run.try_wrong(trial, steps)
                run.try_corruptions(trial, steps)
            if seed in legal_seeds:
                run.try_legal(trial, steps)
    return Detection(
        operator=operator.id,
        contract=contract,
        cases=tuple(case.name for case in cases),
        seeds=tuple(seeds),
        legal_seeds=legal_seeds,
        variants=run.variant_results(),
        corruptions=run.corruption_results(),
        legal=run.legal_results(),
    )


class _Steps:
    """Counts steps and tells them."""

    def __init__(self, total: int, on_step: Progress | None) -> None:
        self._done, self._total, self._on_step = 0, total, on_step

    def done(self, name: str) -> None:
        self._done += 1
        if self._on_step is not None:
            self._on_step(self._done, self._total, name)


@dataclass(frozen=True)
class _Trial:
    """The inputs of one case and seed, and the right outputs."""

    case: Case
    seed: int
    inputs: Tensors
    right: Tensors

    @classmethod
    def make(cls, operator: Operator, case: Case, seed: int) -> _Trial:
        inputs = make_inputs(case, seed, operator=operator)
        return cls(case, seed, inputs, truth(operator, inputs).outputs)

    def changed(self, outputs: Tensors) -> tuple[str, ...]:
        """Return the names of the outputs whose bits are not the right ones."""
        return tuple(
            name for name, right in self.right.items() if not _equal_bits(outputs[name], right)
        )


class _Run:
    """The records of all that is tried."""

    def __init__(
        self, operator: Operator, cases: Sequence[Case], contract: Contract, diagnosed: int
    ) -> None:
        self._operator, self._contract, self._diagnosed = operator, contract, diagnosed
        self._cases = [case.name for case in cases]
        self.wrong = tuple(variant for variant in operator.variants if not variant.legal)
        self.legal = tuple(variant for variant in operator.variants if variant.legal)
        self.corruptions = corruptions(operator)
        self._of_wrong = {variant.name: _Record() for variant in self.wrong}
        self._of_corruption = {corruption.name: _Record() for corruption in self.corruptions}
        self._judged = dict.fromkeys((variant.name for variant in self.legal), 0)
        self._changed = dict(self._judged)
        self._rejected: dict[str, list[Catch]] = {name: [] for name in self._judged}

    def try_wrong(self, trial: _Trial, steps: _Steps) -> None:
        """Compare every wrong variant, and diagnose those that have failed seldom yet."""
        catalogue = Catalogue(self._operator, trial.inputs, keep=True)
        for variant in self.wrong:
            record = self._of_wrong[variant.name]
            outputs = catalogue.outputs(variant)
            for name in trial.right:
                record.digest.update(_bytes(outputs[name]))
            # A further seed of a case that caught it says nothing new, unless to the diagnosis.
            new = trial.case.name not in record.caught_in or self._wants(record)
            comparison = self._compare(trial, outputs, record) if new else None
            if comparison is not None and comparison.status != "passed":
                record.caught_in.append(trial.case.name)
                self._diagnose(trial, outputs, comparison, record, catalogue)
            steps.done(variant.name)

    def try_corruptions(self, trial: _Trial, steps: _Steps) -> None:
        """Compare every corruption that has not been caught yet."""
        earlier: Tensors | None = None
        for corruption in self.corruptions:
            record = self._of_corruption[corruption.name]
            if record.first is None:
                if earlier is None:
                    seed = trial.seed + _EARLIER_SEED
                    earlier = _Trial.make(self._operator, trial.case, seed).right
                self._compare(trial, corruption.apply(trial.right, earlier), record)
            steps.done(corruption.name)

    def try_legal(self, trial: _Trial, steps: _Steps) -> None:
        """Compare every legal variant."""
        for variant in self.legal:
            record = _Record()
            outputs = compute_variant(self._operator, variant, trial.inputs)
            self._compare(trial, outputs, record)
            self._judged[variant.name] += 1
            self._changed[variant.name] += record.changed
            if record.first is not None:
                self._rejected[variant.name].append(record.first)
            steps.done(variant.name)

    def _compare(self, trial: _Trial, outputs: Tensors, record: _Record) -> Comparison | None:
        """Compare the changed outputs, if any, and record what comes of it."""
        changed = trial.changed(outputs)
        if not changed:
            return None
        record.changed = True
        comparison = self._compare_some(trial, outputs, changed)
        if comparison.status != "passed":
            record.first = record.first or _catch(trial, comparison)
        elif record.first is None and not record.beyond:
            record.beyond = self._is_beyond(trial, outputs, changed)
        return comparison

    def _compare_some(self, trial: _Trial, outputs: Tensors, names: Sequence[str]) -> Comparison:
        return compare_outputs(
            self._operator,
            trial.inputs,
            outputs,
            names,
            self._contract,
            random=trial.case.random,
        )

    def _is_beyond(self, trial: _Trial, outputs: Tensors, changed: Sequence[str]) -> bool:
        """Whether the second judgement finds an element outside the contract."""
        return any(
            bool(
                judge_elements(
                    self._operator, trial.inputs, spec, outputs[spec.name], self._contract
                ).wrong.any()
            )
            for spec in self._operator.outputs
            if spec.name in changed
        )

    def _wants(self, record: _Record) -> bool:
        """Whether the diagnosis of a variant may look at further inputs."""
        return self._unsure(record.exact) or self._unsure(record.rough)

    def _unsure(self, matchings: Sequence[Matching]) -> bool:
        """Whether a diagnosis needs another failing input: too few, or several variants fit."""
        if len(matchings) < self._diagnosed:
            return True
        return len(matchings) < _MOST_DIAGNOSED * self._diagnosed and is_ambiguous(
            combine(matchings)
        )

    def _diagnose(
        self,
        trial: _Trial,
        outputs: Tensors,
        comparison: Comparison,
        record: _Record,
        catalogue: Catalogue,
    ) -> None:
        """Match the variants with the outputs as they are, and as rounded otherwise."""
        if self._unsure(record.exact):
            record.exact.append(self._match(trial, outputs, comparison, catalogue))
        if self._unsure(record.rough):
            rough = rounded_otherwise(
                self._operator, trial.inputs, outputs, trial.seed, self._contract
            )
            names = [spec.name for spec in self._operator.outputs]
            compared = self._compare_some(trial, rough, names)
            if failing_outputs(compared):
                record.rough.append(self._match(trial, rough, compared, catalogue))

    def _match(
        self, trial: _Trial, outputs: Tensors, comparison: Comparison, catalogue: Catalogue
    ) -> Matching:
        return match_variants(
            self._operator,
            trial.inputs,
            outputs,
            comparison,
            contract=self._contract,
            catalogue=catalogue,
        )

    def variant_results(self) -> tuple[VariantDetection, ...]:
        """Return what became of the wrong variants."""
        first_with: dict[bytes, str] = {}
        family = {}
        for name, record in self._of_wrong.items():
            family[name] = first_with.setdefault(record.digest.digest(), name)
        results = []
        for variant in self.wrong:
            record = self._of_wrong[variant.name]
            named, roughly = self._name(record, record.exact), self._name(record, record.rough)
            own = family[variant.name]
            results.append(
                VariantDetection(
                    name=variant.name,
                    description=variant.description,
                    outcome=record.outcome,
                    first=record.first,
                    caught_in=tuple(dict.fromkeys(record.caught_in)),
                    same_as="" if own == variant.name else own,
                    named=named,
                    named_rightly=family.get(named) == own,
                    named_roughly=roughly,
                    roughly_rightly=family.get(roughly) == own,
                )
            )
        return tuple(results)

    def _name(self, record: _Record, matchings: Sequence[Matching]) -> str:
        """Return the name that the diagnosis of a variant's failing inputs gives.

        As in :func:`oracle.diagnosis.diagnose`, some cases that passed rule out variants that
        would have failed there.
        """
        whole = combine(matchings)
        if is_ambiguous(whole):
            passed = [name for name in self._cases if name not in record.caught_in]
            standing = [
                match
                for match in whole
                if not set(passed[: self._diagnosed]) & set(self._of_wrong[match.variant].caught_in)
            ]
            whole = tuple(standing) or whole
        return conclude(matchings, whole, "").name if matchings else ""

    def corruption_results(self) -> tuple[CorruptionDetection, ...]:
        """Return what became of the corruptions."""
        return tuple(
            _corruption_result(corruption, self._of_corruption[corruption.name])
            for corruption in self.corruptions
        )

    def legal_results(self) -> tuple[LegalDetection, ...]:
        """Return what became of the legal variants."""
        return tuple(
            LegalDetection(
                name=variant.name,
                description=variant.description,
                judged=self._judged[variant.name],
                changed=self._changed[variant.name],
                rejected=tuple(self._rejected[variant.name]),
            )
            for variant in self.legal
        )


def _corruption_result(corruption: Corruption, record: _Record) -> CorruptionDetection:
    return CorruptionDetection(
        corruption.name, corruption.description, record.outcome, record.first
    )


def _catch(trial: _Trial, comparison: Comparison) -> Catch:
    region = next(r for r in comparison.regions if not r.passed)
    return Catch(
        case=trial.case.name,
        seed=trial.seed,
        status=comparison.status,
        output=region.output,
        region=region.region,
        wrong=region.elements - region.within,
    )


def rounded_otherwise(
    operator: Operator, inputs: Tensors, outputs: Tensors, seed: int, contract: Contract
) -> dict[str, torch.Tensor]:
    """Give computed elements errors like those of another order of rounding.

    Args:
        operator: what the outputs are, rightly or wrongly, of.
        inputs: every input by name.
        outputs: every output by name; copied and zeroed elements stay as they are.
        seed: of the errors.
        contract: of computed elements.

    Returns:
        The outputs, with each finite computed element moved by at most half a unit roundoff of
        the sum of the magnitudes of its right terms, and rounded once. An element that was within
        the contract stays so, as in a kernel that is right there.
    """
    generator = torch.Generator().manual_seed(seed)
    result = dict(outputs)
    for spec in operator.outputs:
        output = outputs[spec.name]
        fmt = format_of(output.dtype)
        before = judge_elements(operator, inputs, spec, output, contract)
        noise = torch.rand(output.shape, generator=generator, dtype=torch.float64) - 0.5
        error = noise * before.magnitudes * fmt.unit_roundoff
        moved = (output.to(torch.float64) + error).to(fmt.dtype)
        # What is exactly zero was hardly computed: it stays.
        kept = torch.isfinite(moved) & (before.magnitudes > 0) & (output != 0)
        moved = torch.where(kept, moved, output)
        after = judge_elements(operator, inputs, spec, moved, contract)
        result[spec.name] = torch.where(after.wrong & ~before.wrong, output, moved)
    return result


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = format_of(one.dtype).bits_dtype
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
