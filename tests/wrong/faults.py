"""Faulty roundings, copies and writes that the wrong kernels of both operators share.

Roundings take float32 and give bfloat16, ``nearest`` being the right one; copies take and give
bfloat16.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

BF16_MAX = torch.finfo(torch.bfloat16).max
BF16_SMALLEST_NORMAL = torch.finfo(torch.bfloat16).smallest_normal


# Roundings


def nearest(number: Tensor) -> Tensor:
    return number.to(torch.bfloat16)


def toward_zero(number: Tensor) -> Tensor:
    return _high_half(number.contiguous().view(torch.int32))


def away_from_zero(number: Tensor) -> Tensor:
    return _rounded_after_adding(number, 0xFFFF)


def ties_away(number: Tensor) -> Tensor:
    return _rounded_after_adding(number, 0x8000)


def flushed(number: Tensor) -> Tensor:
    return torch.where(number.abs() < BF16_SMALLEST_NORMAL, 0.0, number).to(torch.bfloat16)


def clamped(number: Tensor) -> Tensor:
    return number.clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16)


def without_nan(number: Tensor) -> Tensor:
    return torch.where(number.isnan(), 0.0, number).to(torch.bfloat16)


def scaled(number: Tensor) -> Tensor:
    return (number * (1 + 2.0**-7)).to(torch.bfloat16)


def _rounded_after_adding(number: Tensor, increment: int) -> Tensor:
    """The high half of the pattern plus an increment, which grows the magnitude of either sign."""
    pattern = number.contiguous().view(torch.int32)
    return torch.where(
        number.isfinite(), _high_half(pattern + increment), number.to(torch.bfloat16)
    )


def _high_half(pattern: Tensor) -> Tensor:
    return (pattern >> 16).to(torch.int16).view(torch.bfloat16)


# Copies


def through_fp16(values: Tensor) -> Tensor:
    return values.to(torch.float16).to(torch.bfloat16)


def through_fp32(values: Tensor) -> Tensor:
    """Harmless but for NaN, which torch rounds to bfloat16 without its payload."""
    return values.to(torch.float32).to(torch.bfloat16)


def without_subnormals(values: Tensor) -> Tensor:
    pattern = values.contiguous().view(torch.int16)
    is_subnormal = (pattern & 0x7F80) == 0
    return torch.where(is_subnormal, pattern & -0x8000, pattern).view(torch.bfloat16)


def without_negative_zero(values: Tensor) -> Tensor:
    return values + 0.0


def with_canonical_nan(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), torch.nan, values)


def with_nan_as_zero(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), 0.0, values)


def with_finite_bounds(values: Tensor) -> Tensor:
    return values.clamp(-BF16_MAX, BF16_MAX)


def without_last_bit(values: Tensor) -> Tensor:
    return (values.contiguous().view(torch.int16) & -2).view(torch.bfloat16)


# Writes


def flip_a_bit(values: Tensor, index: tuple[int, ...]) -> None:
    """Change one bfloat16 element by half of its binade, in place."""
    values.view(torch.int16)[index] ^= 0x40


def clear_behind(tensor: Tensor, count: int = 64) -> None:
    """Zero the memory of ``count`` elements behind a contiguous tensor on a CPU.

    torch refuses to write outside a tensor's storage; a kernel with a wrong mask is not asked.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"the memory behind a tensor on {tensor.device} is not written to here")
    ctypes.memset(tensor.data_ptr() + tensor.nbytes, 0, count * tensor.itemsize)
