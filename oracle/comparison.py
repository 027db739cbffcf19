"""Outputs against the truth: by output and region, in blocks, every element counted.

Elements *within* their interval are counted and all are required; nothing is ever counted as
"outside", so a NaN, which compares false, can never pass. Budgets are evaluated only for elements
that differ from the correctly rounded answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .budget import Budget, Contract, Interval
from .certified import (
    Certificate,
    Values,
    block_elements,
    evaluate,
    one_thread,
    split_non_finite,
)
from .definition import Block, Copied, Operator, Summed, TensorSpec
from .rounding import Format, format_of, ulp
from .scheme import EXACT_ROUNDING, SINGLE_ROUNDING, SchemeResult, SchemeTally
from .verdict import GRADES, Element, RegionResult

SCHEME_ELEMENTS = 1 << 15
"""A rounding scheme is looked for in so many elements of a region, the first ones."""

_RELAXED: tuple[Contract, ...] = ("single_rounding", "stored_intermediates", "bounded_error")


@dataclass(frozen=True)
class Comparison:
    """The comparison of all outputs of one case.

    Attributes:
        regions: one result for each output and region that has elements.
        certificate: how the correctly rounded answers were proved.
        remarks: what was seen and is not judged, such as a zero of the other sign.
    """

    regions: tuple[RegionResult, ...]
    certificate: Certificate
    remarks: tuple[str, ...]

    @property
    def elements(self) -> int:
        """How many elements were compared."""
        return sum(region.elements for region in self.regions)

    @property
    def status(self) -> str:
        """``passed``, ``wrong_values``, ``below_contract``, or ``empty_ok`` without elements."""
        failed = [region for region in self.regions if not region.passed]
        if not failed:
            return "passed" if self.elements else "empty_ok"
        weaker = all(region.meaning == "computed" and region.grade for region in failed)
        return "below_contract" if weaker else "wrong_values"


@dataclass
class _Tally:
    """Running counts of one region while its blocks go by."""

    spec: TensorSpec
    region: str
    contract: Contract
    fmt: Format
    meaning: str = ""
    elements: int = 0
    within: int = 0
    identical: int = 0
    out_of_domain: int = 0
    zeros_of_other_sign: int = 0
    worst: float | None = None
    broken: set[str] = field(default_factory=set)
    first: Element | None = None
    certificate: Certificate = field(default_factory=Certificate)
    scheme: SchemeResult | None = None

    def result(self, random: bool) -> RegionResult:
        """Return what was counted; the mean error means something for random inputs only."""
        unexplained = random and self.scheme is not None and self.scheme.name is None
        mean = self.scheme.mean if self.scheme is not None and unexplained else None
        return RegionResult(
            output=self.spec.name,
            region=self.region,
            meaning=self.meaning,
            elements=self.elements,
            within=self.within,
            identical=self.identical,
            certified=self.certificate.total,
            grade=None if mean is not None and mean.alarm else self.grade(),
            worst_error_ulp=self.worst,
            out_of_domain=self.out_of_domain,
            first_wrong=self.first,
            scheme=self._scheme_name(),
            mean=mean,
        )

    def _scheme_name(self) -> str:
        if self.scheme is not None:
            return self.scheme.name or ""
        names = {"correctly_rounded": EXACT_ROUNDING, "single_rounding": SINGLE_ROUNDING}
        return names.get(self.grade() or "", "")

    @property
    def needs_explanation(self) -> bool:
        """Whether all elements are allowed, but not as one rounding of a float32 sum."""
        return (
            self.meaning == "computed"
            and self.within == self.elements
            and self.grade() not in ("correctly_rounded", "single_rounding")
        )

    def grade(self) -> str | None:
        """Return the tightest contract that every element meets; None if they meet none."""
        if self.meaning != "computed":
            return "exact" if self.within == self.elements else None
        if self.identical == self.elements:
            return "correctly_rounded"
        return next((contract for contract in _RELAXED if contract not in self.broken), None)

    def keep_first(self, element: Element) -> None:
        """Remember the element if it comes before the one known."""
        if self.first is None or element.index < self.first.index:
            self.first = element


def compare(
    operator: Operator,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    contract: Contract,
    *,
    random: bool = False,
) -> Comparison:
    """Compare outputs with the truth.

    Args:
        operator: what the outputs should be of.
        inputs: every input by name, as they were before the call.
        outputs: every output by name, of the right shape and dtype, on the inputs' device.
        contract: the contract asked for.
        random: whether the inputs are independent random draws: then the mean error of elements
            that no rounding scheme explains is tested as well.

    Returns:
        The result by output and region.
    """
    inputs = {name: tensor.detach() for name, tensor in inputs.items()}
    results: list[RegionResult] = []
    certificate = Certificate()
    remarks: list[str] = []
    for spec in operator.outputs:
        with one_thread():
            tallies = _compare_output(operator, inputs, spec, outputs[spec.name].detach(), contract)
        for tally in tallies:
            results.append(tally.result(random))
            certificate += tally.certificate
            if tally.zeros_of_other_sign:
                remarks.append(
                    f"{spec.name}, {tally.region}: {tally.zeros_of_other_sign} zeros have the other"
                    " sign than the correctly rounded answer (not judged)"
                )
    return Comparison(tuple(results), certificate, tuple(remarks))


def _compare_output(
    operator: Operator,
    inputs: Mapping[str, torch.Tensor],
    spec: TensorSpec,
    output: torch.Tensor,
    contract: Contract,
) -> list[_Tally]:
    fmt = format_of(output.dtype)
    tallies = {name: _Tally(spec, name, contract, fmt) for name in spec.regions}
    bits = output.view(fmt.bits_dtype)
    for block in operator.blocks(inputs, spec.name, block_elements(output.device)):
        tally = tallies[block.region]
        actual = bits[block.index]
        if actual.numel() == 0:
            continue
        tally.elements += actual.numel()
        if isinstance(block.meaning, Summed):
            tally.meaning = "computed"
            _compare_summed(tally, block, actual.view(fmt.dtype), block.meaning)
        elif isinstance(block.meaning, Copied):
            tally.meaning = "copied"
            _compare_copied(tally, block, actual, block.meaning.source.view(fmt.bits_dtype))
        else:
            tally.meaning = "zeroed"
            _compare_zeroed(tally, block, actual)
    for tally in tallies.values():
        if tally.needs_explanation:
            tally.scheme = _find_scheme(operator, inputs, tally, output)
    return [tally for tally in tallies.values() if tally.elements]


def _find_scheme(
    operator: Operator, inputs: Mapping[str, torch.Tensor], tally: _Tally, output: torch.Tensor
) -> SchemeResult:
    """Look for the rounding scheme of a region, in its first elements."""
    found = SchemeTally(tally.fmt)
    elements = 0
    for block in operator.blocks(inputs, tally.spec.name, SCHEME_ELEMENTS):
        meaning = block.meaning
        if block.region != tally.region or not isinstance(meaning, Summed):
            continue
        actual = output[block.index]
        if elements + actual.numel() > SCHEME_ELEMENTS and elements:
            break
        elements += actual.numel()
        terms, finite = split_non_finite(meaning.terms())
        clusters = None if meaning.clusters is None else meaning.clusters()
        found.add(terms, actual, finite, clusters)
    return found.result(len(operator.outputs))


def _compare_copied(
    tally: _Tally, block: Block, actual: torch.Tensor, source: torch.Tensor
) -> None:
    tally.certificate += Certificate(copied=actual.numel())
    if torch.equal(actual, source):
        tally.identical += actual.numel()
        tally.within += actual.numel()
        return
    same = actual == source
    count = int(same.sum())
    tally.identical += count
    tally.within += count
    _keep_first_bits(tally, block, ~same, actual, source)


def _compare_zeroed(tally: _Tally, block: Block, actual: torch.Tensor) -> None:
    tally.certificate += Certificate(copied=actual.numel())
    if not bool(actual.any()):
        tally.identical += actual.numel()
        tally.within += actual.numel()
        return
    magnitude = actual & ((1 << (8 * tally.fmt.width - 1)) - 1)
    zero = magnitude == 0
    tally.within += int(zero.sum())
    positive = int((actual == 0).sum())
    tally.identical += positive
    tally.zeros_of_other_sign += int(zero.sum()) - positive
    if not bool(zero.all()):
        _keep_first_bits(tally, block, ~zero, actual, torch.zeros_like(actual))


def _keep_first_bits(
    tally: _Tally, block: Block, wrong: torch.Tensor, actual: torch.Tensor, wanted: torch.Tensor
) -> None:
    """Remember the first wrong element of a block that is compared by its bits."""
    place = int(wrong.reshape(-1).to(torch.uint8).argmax())
    index = _global_index(block, actual.shape, place)
    got, expected = actual.reshape(-1)[place], wanted.reshape(-1)[place]
    tally.keep_first(
        Element(
            index=index,
            got=_text(got.view(tally.fmt.dtype)),
            got_bits=_hexadecimal(got, tally.fmt),
            expected=_text(expected.view(tally.fmt.dtype)),
            expected_bits=_hexadecimal(expected, tally.fmt),
        )
    )


def _compare_summed(tally: _Tally, block: Block, actual: torch.Tensor, meaning: Summed) -> None:
    values = evaluate(meaning.terms(), tally.fmt)
    tally.certificate += values.certificate
    tally.out_of_domain += Budget(values.terms, tally.fmt).out_of_domain(tally.contract)
    rounded = values.rounded
    bits = tally.fmt.bits_dtype
    if torch.equal(actual.view(bits), rounded.view(bits)):
        tally.identical += actual.numel()
        tally.within += actual.numel()
        return
    equal = actual == rounded
    tally.zeros_of_other_sign += int((equal & (actual.view(bits) != rounded.view(bits))).sum())
    identical = equal | (torch.isnan(actual) & torch.isnan(rounded))
    count = int(identical.sum())
    tally.identical += count
    tally.within += count
    if count < actual.numel():
        places = (~identical).reshape(-1).nonzero().squeeze(1)
        _judge_differing(tally, block, _Differing.pick(actual, values, places))


@dataclass(frozen=True)
class _Differing:
    """The elements of a block that differ from the correctly rounded answer."""

    places: torch.Tensor
    shape: torch.Size
    actual: torch.Tensor
    rounded: torch.Tensor
    high: torch.Tensor
    low: torch.Tensor
    terms: torch.Tensor
    finite: torch.Tensor

    @classmethod
    def pick(cls, actual: torch.Tensor, values: Values, places: torch.Tensor) -> _Differing:
        """Pick out the elements at flat positions of the block."""
        finite = (
            torch.ones_like(places, dtype=torch.bool)
            if values.finite is None
            else values.finite.reshape(-1)[places]
        )
        return cls(
            places=places,
            shape=actual.shape,
            actual=actual.reshape(-1)[places],
            rounded=values.rounded.reshape(-1)[places],
            high=values.high.reshape(-1)[places],
            low=values.low.reshape(-1)[places],
            terms=values.terms.reshape(values.terms.shape[0], -1)[:, places],
            finite=finite,
        )

    def accepted(self, bounds: Interval) -> torch.Tensor:
        """Return where the value is accepted.

        Where a term is not finite the class of the result had to match, and it did not; only
        outside the contract's domain is another infinity or NaN accepted then.
        """
        lenient = ~bounds.in_domain & ~torch.isfinite(self.actual)
        return torch.where(self.finite, bounds.accepts(self.actual), lenient)


def _judge_differing(tally: _Tally, block: Block, differing: _Differing) -> None:
    """Count which contracts the differing elements meet, and keep the first wrong one."""
    budget = Budget(differing.terms, tally.fmt)
    wanted: Interval | None = None
    # From the tightest contract on: once all elements meet one, they meet the looser ones too.
    for contract in _RELAXED:
        if contract in tally.broken and contract != tally.contract:
            continue
        bounds = budget.interval(contract)
        accepted = differing.accepted(bounds)
        if contract == tally.contract:
            wanted = bounds
        if bool(accepted.all()):
            break
        tally.broken.add(contract)
    _record_error(tally, differing)
    if tally.contract == "correctly_rounded":
        bounds = budget.interval(tally.contract)
        within = torch.zeros_like(differing.finite)
    elif wanted is None and tally.contract not in tally.broken:
        # A tighter contract accepted them all.
        tally.within += differing.places.numel()
        return
    else:
        bounds = wanted or budget.interval(tally.contract)
        within = differing.accepted(bounds)
    tally.within += int(within.sum())
    if not bool(within.all()):
        _keep_first_value(tally, block, differing, bounds, ~within)


def _record_error(tally: _Tally, differing: _Differing) -> None:
    error = _error_ulp(differing, tally.fmt).abs()
    error = error[torch.isfinite(error)]
    if error.numel():
        worst = float(error.max())
        tally.worst = worst if tally.worst is None else max(tally.worst, worst)


def _error_ulp(differing: _Differing, fmt: Format) -> torch.Tensor:
    """Return (value - exact) / ulp(correctly rounded), NaN where it makes no sense."""
    actual = differing.actual.to(torch.float64)
    error = (actual - differing.high) - differing.low
    sound = torch.isfinite(actual) & torch.isfinite(differing.rounded) & differing.finite
    return torch.where(sound, error / ulp(differing.rounded, fmt), torch.nan)


def _keep_first_value(
    tally: _Tally, block: Block, differing: _Differing, bounds: Interval, wrong: torch.Tensor
) -> None:
    place = int(wrong.to(torch.uint8).argmax())
    error = float(_error_ulp(differing, tally.fmt)[place])
    finite = bool(differing.finite[place])
    bits = tally.fmt.bits_dtype
    tally.keep_first(
        Element(
            index=_global_index(block, differing.shape, int(differing.places[place])),
            got=_text(differing.actual[place]),
            got_bits=_hexadecimal(differing.actual.view(bits)[place], tally.fmt),
            expected=_text(differing.rounded[place]),
            expected_bits=_hexadecimal(differing.rounded.view(bits)[place], tally.fmt),
            exact=f"{float(differing.high[place]):.17g}" if finite else "",
            error_ulp=None if math.isnan(error) else error,
            low=_text(bounds.low[place]) if finite else "",
            high=_text(bounds.high[place]) if finite else "",
        )
    )


def _global_index(block: Block, shape: torch.Size, place: int) -> tuple[int, ...]:
    """Turn a flat position within a block into an index of the whole output."""
    local: list[int] = []
    for size in reversed(shape):
        place, coordinate = divmod(place, size)
        local.append(coordinate)
    index = []
    for selection, coordinate in zip(block.index, reversed(local), strict=True):
        if isinstance(selection, slice):
            index.append((selection.start or 0) + coordinate)
        else:
            index.append(int(selection[coordinate]))
    return tuple(index)


def _text(value: torch.Tensor) -> str:
    """Write one number so that it reads back exactly: inf, -inf, nan or shortest digits."""
    return repr(float(value))


def _hexadecimal(bits: torch.Tensor, fmt: Format) -> str:
    digits = 2 * fmt.width
    return f"0x{int(bits) & ((1 << 8 * fmt.width) - 1):0{digits}x}"


def is_met(grade: str | None, contract: Contract) -> bool:
    """Whether a grade is at least as tight as a contract."""
    return grade is not None and GRADES.index(grade) <= GRADES.index(contract)
