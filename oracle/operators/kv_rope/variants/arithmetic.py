"""Wrong arithmetic: roundings, ranges, and terms treated specially.

Roundings to a wrong neighbour are of the output type in bfloat16 and float16. Honest float32
sums may already miss the nearest number by as much, so there the same rounding goes to TF32, which
has 11 bits, as kernels do that feed float32 to tensor cores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ....rounding import format_of
from .copies import OTHER_TYPE
from .parts import (
    BACKWARD,
    Kind,
    Parts,
    product,
    sum_heads,
)

_LOW_BITS_OF_TF32 = 13


@dataclass(frozen=True)
class _Neighbours:
    """The numbers around a value, of equal magnitude where it is one of them.

    Attributes:
        below: the one nearer to zero.
        above: the one away from zero.
        nearest: that one of them that is nearest, ties to even.
        is_tie: where both are equally near.
    """

    below: torch.Tensor
    above: torch.Tensor
    nearest: torch.Tensor
    is_tie: torch.Tensor


def _neighbours(total: torch.Tensor, dtype: torch.dtype) -> _Neighbours:
    """Return the numbers of a type, TF32 for float32, around float32 values."""
    size = total.abs()
    if dtype == torch.float32:
        bits = total.contiguous().view(torch.int32)
        low = bits & ((1 << _LOW_BITS_OF_TF32) - 1)
        low = torch.where(total.isfinite(), low, 0)
        below = bits - low
        above = torch.where(low == 0, bits, below + (1 << _LOW_BITS_OF_TF32))
        nearest = _nearest_pattern(total, _LOW_BITS_OF_TF32)
    else:
        fmt = format_of(dtype)
        nearest = total.to(dtype)
        bits = nearest.view(fmt.bits_dtype)
        rounded = nearest.to(torch.float32).abs()
        below = bits - (rounded > size).to(bits.dtype)
        above = bits + (rounded < size).to(bits.dtype)
    below, above = below.view(dtype), above.view(dtype)
    # Exact in float64: the numbers have at most 24 bits and lie close together.
    down = size.to(torch.float64) - below.to(torch.float64).abs()
    up = above.to(torch.float64).abs() - size.to(torch.float64)
    return _Neighbours(below, above, nearest, (down == up) & (down > 0))


def _nearest_pattern(value: torch.Tensor, drop: int) -> torch.Tensor:
    """Round float32 to nearest even at a bit of its pattern, dropping the lower ones."""
    bits = value.contiguous().view(torch.int32)
    half_less_one = (1 << (drop - 1)) - 1
    rounded = (bits + half_less_one + ((bits >> drop) & 1)) & -(1 << drop)
    return torch.where(value.isfinite(), rounded, bits).view(torch.float32)


def _truncated(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _neighbours(total, dtype).below


def _away_from_zero(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _neighbours(total, dtype).above


def _rounded_down(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    around = _neighbours(total, dtype)
    return torch.where(total < 0, around.above, around.below)


def _ties_away(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    around = _neighbours(total, dtype)
    return torch.where(around.is_tie, around.above, around.nearest)


def _ties_to_zero(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    around = _neighbours(total, dtype)
    return torch.where(around.is_tie, around.below, around.nearest)


def _ties_up(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    around = _neighbours(total, dtype)
    upper = torch.where(total > 0, around.above, around.below)
    return torch.where(around.is_tie, upper, around.nearest)


def _twice(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    precision = 11 if dtype == torch.float32 else format_of(dtype).precision
    first = _nearest_pattern(total, 24 - precision - 2)
    return _neighbours(first, dtype).nearest


def _in_other_type(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return total.to(OTHER_TYPE[dtype]).to(dtype)


def _flushed(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    smallest = torch.finfo(dtype).smallest_normal
    return torch.where(total.abs() < smallest, 0.0, total).to(dtype)


def _clamped(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return total.clamp(-largest, largest).to(dtype)


def _nan_as_zero(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.where(total.isnan(), 0.0, total).to(dtype)


def _too_large(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    epsilon = 2.0**-10 if dtype == torch.float32 else torch.finfo(dtype).eps
    return (total * (1 + epsilon)).to(dtype)


def _softmax_scaled(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Multiplied, as dividing by a number is no correctly rounded division on every device.
    return (total * (1 / math.sqrt(total.shape[-1]))).to(dtype)


_ROUNDINGS = tuple(
    Kind(name, description, Parts(store=store, store_sums=store))
    for name, description, store in (
        (
            "truncated-instead-of-rounded",
            "Results are cut off toward zero (in float32: to TF32).",
            _truncated,
        ),
        (
            "rounded-away-from-zero",
            "Results are rounded away from zero (in float32: to TF32).",
            _away_from_zero,
        ),
        (
            "rounded-down",
            "Results are rounded toward minus infinity (in float32: to TF32).",
            _rounded_down,
        ),
        (
            "ties-away-from-zero",
            "Ties are rounded away from zero instead of to even (in float32: to TF32).",
            _ties_away,
        ),
        (
            "ties-to-zero",
            "Ties are rounded toward zero instead of to even (in float32: to TF32).",
            _ties_to_zero,
        ),
        (
            "ties-up",
            "Ties are rounded toward plus infinity, as by floor(x + 1/2) (in float32: to TF32).",
            _ties_up,
        ),
        (
            "rounded-twice",
            "Results are rounded to two bits more before they are rounded (in float32: to TF32).",
            _twice,
        ),
        (
            "results-through-the-wrong-16-bit-type",
            "Results go through float16, those of other types through bfloat16.",
            _in_other_type,
        ),
        ("subnormal-results-flushed", "Subnormal results are flushed to zero.", _flushed),
        (
            "overflow-clamped",
            "Infinite results become the largest finite number.",
            _clamped,
        ),
        ("nan-results-as-zero", "Results that are NaN become zero.", _nan_as_zero),
        (
            "results-one-ulp-too-large",
            "Results are too large by the factor 1 + eps (in float32: 1 + 2^-10).",
            _too_large,
        ),
    )
)


def _other_type_product(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return product(x, factor).to(OTHER_TYPE[x.dtype]).to(torch.float32)


def _flushed_product(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    smallest = torch.finfo(x.dtype).smallest_normal
    return product(
        torch.where(x.abs() < smallest, 0, x), torch.where(factor.abs() < smallest, 0, factor)
    )


def _zero_factor_skipped(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return torch.where(factor == 0, 0.0, product(x, factor))


def _saturated_product(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return product(x, factor).clamp(-6.0e4, 6.0e4)


def _coarse(table: torch.Tensor) -> torch.Tensor:
    coarser = torch.float8_e4m3fn if table.dtype == torch.bfloat16 else torch.bfloat16
    return table.to(coarser).to(table.dtype)


def _small_rest_lost(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = a + b
    return torch.where(total.abs() < 2.0**-6 * torch.maximum(a.abs(), b.abs()), 0.0, total)


def _small_sum_lost(products: torch.Tensor) -> torch.Tensor:
    total = sum_heads(products)
    return torch.where(total.abs() < 2.0**-6 * products.abs().amax(dim=1), 0.0, total)


def _small_term_lost(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    smaller, larger = torch.minimum(a.abs(), b.abs()), torch.maximum(a.abs(), b.abs())
    return torch.where(smaller < 2.0**-6 * larger, torch.where(a.abs() < b.abs(), b, a), a + b)


_TERMS = (
    Kind(
        "products-in-the-wrong-16-bit-type",
        "Products are rounded to float16, those of other types to bfloat16.",
        Parts(
            cos_product=_other_type_product,
            sin_product=_other_type_product,
            head_product=_other_type_product,
        ),
    ),
    Kind(
        "subnormal-inputs-flushed",
        "Subnormal factors are taken for zero.",
        Parts(
            cos_product=_flushed_product,
            sin_product=_flushed_product,
            head_product=_flushed_product,
        ),
    ),
    Kind(
        "products-saturated",
        "Products are clamped to the range of float16, 6e4.",
        Parts(
            cos_product=_saturated_product,
            sin_product=_saturated_product,
            head_product=_saturated_product,
        ),
    ),
    Kind(
        "zero-table-entries-skipped",
        "A term whose table entry is zero is skipped, though infinity times zero is NaN.",
        Parts(cos_product=_zero_factor_skipped, sin_product=_zero_factor_skipped),
    ),
    Kind(
        "tables-in-lower-precision",
        "cos and sin are rounded to bfloat16 (in bfloat16: to float8, e4m3).",
        Parts(read=lambda t: t._replace(cos=_coarse(t.cos), sin=_coarse(t.sin))),
    ),
    Kind(
        "small-rest-lost",
        "Where terms cancel to less than 2^-6 of the larger one, the result is zero.",
        Parts(add=_small_rest_lost, reduce=_small_sum_lost),
    ),
    Kind(
        "small-term-lost",
        "In a rotation a term below 2^-6 of the other one is left out.",
        Parts(add=_small_term_lost),
    ),
    Kind(
        "scaled-for-softmax",
        "The rotated rows are scaled by 1 / sqrt(D), which belongs to the attention.",
        Parts(store=_softmax_scaled),
    ),
    Kind(
        "head-sums-truncated",
        "grad_cos and grad_sin are cut off toward zero (in float32: to TF32).",
        Parts(store_sums=_truncated),
        BACKWARD,
    ),
    Kind(
        "rotated-gradients-truncated",
        "grad_key_states is cut off toward zero (in float32: to TF32).",
        Parts(store=_truncated),
        BACKWARD,
    ),
)

FAULTS: tuple[Kind, ...] = _ROUNDINGS + _TERMS
