"""Wrong copies: bits that are lost on the way."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....rounding import Format, format_of
from .parts import Kind, Parts, Unary, carried

OTHER_TYPE = {
    torch.bfloat16: torch.float16,
    torch.float16: torch.bfloat16,
    torch.float32: torch.bfloat16,
}
"""The 16-bit type that a value of each type must not pass through."""


def _exponent_mask(fmt: Format) -> int:
    return (1 << (8 * fmt.width - 1)) - (1 << (fmt.precision - 1))


def _sign_bit(fmt: Format) -> int:
    """Return the pattern of -0.0 as a signed integer."""
    return -(1 << (8 * fmt.width - 1))


def _of_bits(change: Callable[[torch.Tensor, Format], torch.Tensor]) -> Unary:
    """Return a copy that changes bit patterns, given as signed integers."""

    def copy(x: torch.Tensor) -> torch.Tensor:
        fmt = format_of(x.dtype)
        return change(x.contiguous().view(fmt.bits_dtype), fmt).view(x.dtype)

    return copy


def _is_nan(bits: torch.Tensor, fmt: Format) -> torch.Tensor:
    return (bits & ~_sign_bit(fmt)) > _exponent_mask(fmt)


def _canonical_nan(bits: torch.Tensor, fmt: Format) -> torch.Tensor:
    quiet = _exponent_mask(fmt) | (1 << (fmt.precision - 2))
    return torch.where(_is_nan(bits, fmt), quiet, bits)


def _unsigned_nan(bits: torch.Tensor, fmt: Format) -> torch.Tensor:
    return torch.where(_is_nan(bits, fmt), bits & ~_sign_bit(fmt), bits)


def _quiet_nan(bits: torch.Tensor, fmt: Format) -> torch.Tensor:
    return torch.where(_is_nan(bits, fmt), bits | (1 << (fmt.precision - 2)), bits)


def _nan_as_zero(bits: torch.Tensor, fmt: Format) -> torch.Tensor:
    return torch.where(_is_nan(bits, fmt), 0, bits)


def _finite(bits: torch.Tensor, fmt: Format) -> torch.Tensor:
    infinite = (bits & ~_sign_bit(fmt)) == _exponent_mask(fmt)
    return torch.where(infinite, bits - 1, bits)


def _flushed(bits: torch.Tensor, fmt: Format) -> torch.Tensor:
    return torch.where((bits & _exponent_mask(fmt)) == 0, bits & _sign_bit(fmt), bits)


def _positive_zero(bits: torch.Tensor, fmt: Format) -> torch.Tensor:
    return torch.where(bits == _sign_bit(fmt), 0, bits)


def _without_last_bit(bits: torch.Tensor, _fmt: Format) -> torch.Tensor:
    return bits & -2


def _through_other_type(x: torch.Tensor) -> torch.Tensor:
    return x.to(OTHER_TYPE[x.dtype]).to(x.dtype)


def _through_float8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


_COPIES = tuple(
    Kind(name, description, Parts(copy=copy))
    for name, description, copy in (
        (
            "nan-payload-lost",
            "Copies turn every NaN into one, without its sign and payload.",
            _of_bits(_canonical_nan),
        ),
        ("nan-sign-lost", "Copies clear the sign of NaN.", _of_bits(_unsigned_nan)),
        ("signalling-nan-quieted", "Copies set the quiet bit of NaN.", _of_bits(_quiet_nan)),
        ("nan-as-zero", "Copies turn NaN into zero.", _of_bits(_nan_as_zero)),
        (
            "infinities-clamped",
            "Copies turn infinities into the largest finite number.",
            _of_bits(_finite),
        ),
        ("flushed-subnormals", "Copies flush subnormals to zero.", _of_bits(_flushed)),
        ("negative-zero-lost", "Copies turn -0.0 into 0.0.", _of_bits(_positive_zero)),
        (
            "last-bit-lost",
            "Copies lose the last bit of the significand.",
            _of_bits(_without_last_bit),
        ),
        (
            "copies-through-the-wrong-16-bit-type",
            "Copies go through float16, those of other types through bfloat16.",
            _through_other_type,
        ),
        (
            "copies-through-float8",
            "Copies go through float8 (e4m3), as in a quantised cache.",
            _through_float8,
        ),
    )
)

_NEW_VALUES = (
    Kind(
        "last-bit-of-new-values-lost",
        "The new values lose the last bit of the significand; the caches are copied rightly.",
        Parts(carry=lambda parts, tokens: _of_bits(_without_last_bit)(carried(parts, tokens))),
    ),
)


FAULTS: tuple[Kind, ...] = _COPIES + _NEW_VALUES
