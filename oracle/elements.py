"""One output judged element by element: a second opinion beside :mod:`oracle.comparison`.

The comparison counts; this says of every single element whether the contract allows it, and how
large its terms are. Diagnosis and detection look at small cases only, so it may hold whole masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .budget import Contract, interval
from .certified import block_elements, evaluate, one_thread
from .definition import Block, Copied, Operator, Summed, TensorSpec
from .rounding import Format, format_of

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

_FLOAT32_LARGEST = 3.4e38


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
        same = same_numbers(actual, values.rounded)
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


def same_numbers(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return where numbers are equal, whatever the sign of zero; a NaN equals any NaN."""
    return (one == other) | (torch.isnan(one) & torch.isnan(other))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bit patterns, contiguous."""
    return tensor.contiguous().view(format_of(tensor.dtype).bits_dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return where bits are equal; a NaN equals any NaN."""
    return (bits_of(one) == bits_of(other)) | (torch.isnan(one) & torch.isnan(other))


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return float32 of 16-bit numbers and float64 of others: differences do not cancel away."""
    return tensor.to(torch.float64 if tensor.dtype.itemsize > 2 else torch.float32)


def tolerance_of(scale: torch.Tensor, other: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return how far two evaluations of a formula may lie apart."""
    size = torch.maximum(scale.to(other.dtype), other.abs().clamp(max=_FLOAT32_LARGEST))
    return size * (ROUNDOFFS * fmt.unit_roundoff) + 2 * fmt.smallest


def close(candidate: torch.Tensor, other: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return where a candidate's numbers are others' but for roundings."""
    c, o = widened(candidate), widened(other)
    tolerance = tolerance_of(scale, o, format_of(candidate.dtype))
    return ((c - o).abs() <= tolerance) | same_numbers(c, o)


class WrongElements:
    """Wrong elements: what stands there and what should.

    Args:
        actual: what stands there, one dimension.
        truth: what should.
    """

    def __init__(self, actual: torch.Tensor, truth: torch.Tensor) -> None:
        self._bits, self._truth_bits = bits_of(actual), bits_of(truth)
        self._actual = widened(actual)
        to_truth = (self._actual - widened(truth)).abs()
        self._to_truth = torch.where(torch.isnan(to_truth), torch.inf, to_truth)
        self._nan = torch.isnan(actual)

    def explained(self, other: torch.Tensor) -> float:
        """Return the share that is another tensor's rather than the truth's."""
        bits = bits_of(other)
        differs = bits != self._truth_bits
        if not bool(differs.any()):
            return 0.0
        wide = widened(other)
        # Where bits alone differ (a NaN's payload, the sign of a zero) distances say nothing.
        same = (self._bits == bits) | (self._nan & torch.isnan(wide))
        nearer = (self._actual - wide).abs() <= NEARER * self._to_truth
        return float((differs & (same | nearer)).float().mean())

    def distance(self, other: torch.Tensor) -> float:
        """Return the mean distance to another tensor over that to the truth.

        Where numbers say nothing (NaNs, zeros of either sign) the bits do: machines convert NaNs
        differently, so no variant is refused for these, but they tell variants apart.
        """
        to_other = (self._actual - widened(other)).abs()
        ratio = to_other / self._to_truth
        silent = torch.isnan(ratio) | (to_other == 0)
        ratio = torch.where(silent, (self._bits != bits_of(other)).to(ratio.dtype), ratio)
        return float(ratio.clamp(max=1.0).mean())
