"""Truth: the correctly rounded value of every output element, certified and streamed.

The terms of an element are exact float64 numbers. Their sum is carried as ``high + low`` with a
bound on what is missing. Sums of two terms are exact (two-sum). Longer sums are exact whenever
every second-order residual vanishes; where one does not, Ziv's test asks whether the bound could
change the rounding, and the few elements still undecided are summed in exact rational arithmetic.
So every element's rounding is *proved*, and the counts by method are kept as the certificate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

import torch

from .blocks import selection_size
from .definition import Block, Case, Copied, Operator, Summed
from .rounding import Format, format_of, round_to_format, two_sum

BLOCK_ELEMENTS = 1 << 17
"""Elements times terms held at once on a CPU: a few MiB of float64, within a core's L2 cache."""

GPU_BLOCK_ELEMENTS = 1 << 23
"""The same on a GPU, where launching costs more than memory."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one CPU thread while the block runs.

    Blocks fit a core's cache, and threads that meet after each short operation lose more than they
    win: on two cores that are busy with something else, a hundred times. The number of threads is
    a setting of the whole process, so judge in several processes rather than several threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def block_elements(device: torch.device) -> int:
    """Return how many elements (times terms) to hold at once on a device."""
    return GPU_BLOCK_ELEMENTS if device.type == "cuda" else BLOCK_ELEMENTS


@dataclass(frozen=True)
class Certificate:
    """How many elements were proved correctly rounded, by method.

    Attributes:
        copied: copied or zeroed elements: nothing to round.
        exact: the sum is exactly ``high + low``.
        bounded: the error bound cannot change the rounding (Ziv's test).
        rational: summed in exact rational arithmetic.
    """

    copied: int = 0
    exact: int = 0
    bounded: int = 0
    rational: int = 0

    def __add__(self, other: Certificate) -> Certificate:
        """Add the counts."""
        return Certificate(
            self.copied + other.copied,
            self.exact + other.exact,
            self.bounded + other.bounded,
            self.rational + other.rational,
        )

    @property
    def total(self) -> int:
        """How many elements are certified."""
        return self.copied + self.exact + self.bounded + self.rational


@dataclass(frozen=True)
class DoubleDouble:
    """Values ``high + low + d`` with ``abs(d) <= error``; all float64 of one shape.

    ``high`` is the float64 nearest to ``high + low``.
    """

    high: torch.Tensor
    low: torch.Tensor
    error: torch.Tensor


@dataclass(frozen=True)
class Values:
    """The truth about a block of summed elements.

    Attributes:
        rounded: the correctly rounded value in the output's format; where a term is not finite,
            the infinity or NaN that the sum is.
        high: float64, the sum of the finite terms, leading part.
        low: float64, its remainder (of the right sign wherever it matters to rounding).
        terms: float64 ``[count, ...]``, non-finite terms replaced by zero.
        finite: bool, whether all terms are finite; None when they are everywhere.
        certificate: counts by method.
    """

    rounded: torch.Tensor
    high: torch.Tensor
    low: torch.Tensor
    terms: torch.Tensor
    finite: torch.Tensor | None
    certificate: Certificate


def add_terms(terms: torch.Tensor) -> DoubleDouble:
    """Add finite float64 terms along the first axis with a bound on the error.

    Two-sum at two levels (Ogita, Rump, Oishi, "Accurate sum and dot product", SIAM J. Sci.
    Comput. 2005, cascaded once more): the first level's errors are added up by two-sum again,
    and only the second level's errors are lost; their magnitudes are added to ``error``.

    Args:
        terms: float64 ``[count, ...]``, finite; no partial sum may overflow.
    """
    zero = torch.zeros_like(terms[0])
    if terms.shape[0] == 1:
        return DoubleDouble(terms[0], zero, zero)
    if terms.shape[0] == 2:
        high, low = two_sum(terms[0], terms[1])
        return DoubleDouble(high, low, zero)
    total, rest = two_sum(terms[0], terms[1])
    lost = torch.zeros_like(zero)
    for term in terms[2:]:
        total, residual = two_sum(total, term)
        rest, dropped = two_sum(rest, residual)
        lost += dropped.abs()
    high, low = two_sum(total, rest)
    # 1 + 2^-40 covers the roundings made in adding up the bound itself (far fewer than 2^12).
    return DoubleDouble(high, low, lost * (1 + 2.0**-40))


def round_down(value: DoubleDouble, fmt: Format) -> torch.Tensor:
    """Round the lower end ``value - error`` of an enclosure to a format.

    Where ``error`` is zero this is the correctly rounded value.
    """
    return round_to_format(*two_sum(value.high, value.low - _slack(value)), fmt)


def round_up(value: DoubleDouble, fmt: Format) -> torch.Tensor:
    """Round the upper end ``value + error`` of an enclosure to a format."""
    return round_to_format(*two_sum(value.high, value.low + _slack(value)), fmt)


def _slack(value: DoubleDouble) -> torch.Tensor:
    """Return what to move ``low`` by so that the end, itself rounded to float64, is safe."""
    moved = 2 * value.error + value.low.abs() * 2.0**-52
    return torch.where(value.error == 0, 0.0, moved)


def split_non_finite(terms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the terms with non-finite ones zeroed, and where all are finite (None: everywhere)."""
    # A sum is finite only if all its terms are; it is much cheaper than looking at each.
    if math.isfinite(float(terms.sum())):
        return terms, None
    finite = torch.isfinite(terms)
    return torch.where(finite, terms, 0.0), finite.all(dim=0)


def sum_class(terms: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the sum of terms some of which are not finite, in a format: +inf, -inf or NaN.

    Only infinities and NaN matter: finite terms are taken as zero, so that no finite overflow
    can pass for an infinity. A NaN is the quiet one without sign or payload, as what a conversion
    leaves of others depends on the machine.
    """
    total = torch.where(torch.isfinite(terms), 0.0, terms).sum(dim=0).to(fmt.dtype)
    nan = torch.tensor(math.nan, dtype=fmt.dtype, device=terms.device)
    return torch.where(torch.isnan(total), nan, total)


def evaluate(terms: torch.Tensor, fmt: Format) -> Values:
    """Round sums of exact terms correctly, with the certificate.

    Args:
        terms: float64 ``[count, ...]``, each exactly a term of the element.
        fmt: the output's format.
    """
    finite_terms, finite = split_non_finite(terms)
    value = add_terms(finite_terms)
    high, low = value.high, value.low
    rounded = round_to_format(high, low, fmt)
    inexact = value.error != 0
    bounded = rational = 0
    if bool(inexact.any()):
        undecided = inexact & (round_down(value, fmt) != round_up(value, fmt))
        bounded = int(inexact.sum()) - int(undecided.sum())
        rational = int(undecided.sum())
        if rational:
            high, low, rounded = high.clone(), low.clone(), rounded.clone()
            high[undecided], low[undecided] = _rational_sums(finite_terms[:, undecided])
            rounded[undecided] = round_to_format(high[undecided], low[undecided], fmt)
    if finite is not None:
        rounded = torch.where(finite, rounded, sum_class(terms, fmt))
    exact = rounded.numel() - bounded - rational
    certificate = Certificate(exact=exact, bounded=bounded, rational=rational)
    return Values(rounded, high, low, finite_terms, finite, certificate)


def _rational_sums(terms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add finite terms ``[count, elements]`` exactly; return float64 high and low.

    Python's conversion of a Fraction to float is correctly rounded, so ``high`` is nearest and
    ``low`` has the right sign; it is zero only where the sum is a float64.
    """
    highs, lows = [], []
    for column in terms.T.tolist():
        exact = sum((Fraction(term) for term in column), Fraction(0))
        high = float(exact)
        highs.append(high)
        lows.append(float(exact - Fraction(high)))
    pair = torch.tensor([highs, lows], dtype=torch.float64, device=terms.device)
    return pair[0], pair[1]


@dataclass(frozen=True)
class Truth:
    """The correctly rounded outputs of an operator.

    Attributes:
        outputs: every output by name, in the case's dtype, contiguous, on the inputs' device.
        certificate: how each element was proved.
    """

    outputs: Mapping[str, torch.Tensor]
    certificate: Certificate


def truth(case: Case | Operator, inputs: Mapping[str, torch.Tensor]) -> Truth:
    """Compute the certified, correctly rounded outputs.

    Args:
        case: the case, or the operator itself.
        inputs: every input by name; floating tensors of one dtype, on one device.

    Returns:
        All outputs and the certificate. Beside the outputs only one block is held in memory.

    Raises:
        InvalidInput: if the inputs do not fit the operator.
    """
    if isinstance(case, Case):
        from .operators import find_operator

        operator = find_operator(case.operator)
    else:
        operator = case
    sizes = operator.bind(inputs)
    inputs = {name: tensor.detach() for name, tensor in inputs.items()}
    first = next(inputs[spec.name] for spec in operator.inputs if spec.indexes is None)
    fmt = format_of(first.dtype)
    outputs: dict[str, torch.Tensor] = {}
    certificate = Certificate()
    for spec in operator.outputs:
        shape = operator.shape(spec, sizes)
        output = torch.empty(shape, dtype=fmt.dtype, device=first.device)
        certificate += fill_output(operator, inputs, spec.name, output)
        outputs[spec.name] = output
    return Truth(outputs, certificate)


def fill_output(
    operator: Operator, inputs: Mapping[str, torch.Tensor], name: str, output: torch.Tensor
) -> Certificate:
    """Write one output's certified values into a tensor of its shape, block by block."""
    certificate = Certificate()
    with one_thread():
        for block in operator.blocks(inputs, name, block_elements(output.device)):
            certificate += _fill_block(block, output)
    return certificate


def _fill_block(block: Block, output: torch.Tensor) -> Certificate:
    fmt = format_of(output.dtype)
    meaning = block.meaning
    if isinstance(meaning, Summed):
        values = evaluate(meaning.terms(), fmt)
        output[block.index] = values.rounded
        return values.certificate
    # Bits, not values, are copied: a NaN keeps its payload.
    target = output.view(fmt.bits_dtype)
    target[block.index] = meaning.source.view(fmt.bits_dtype) if isinstance(meaning, Copied) else 0
    sizes = (selection_size(selection) for selection in block.index)
    return Certificate(copied=math.prod(sizes))
