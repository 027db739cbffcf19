"""Formats and rounding: the one place where a value becomes a number of an output type.

A value is given as an unevaluated sum ``high + low`` of two float64 numbers, with ``high`` the
float64 nearest to it, so that ``low`` says on which side of ``high`` it lies. Rounding goes
``(high, low) -> round-to-odd in float64 -> (round-to-odd in float32) -> the format``, never
through a nearest float32: an odd last bit marks "not exact", so the last step decides every tie
and every near-tie as if it saw the value itself (S. Boldo and G. Melquiond, "Emulation of a FMA
and correctly rounded sums: proved algorithms using rounding to odd", IEEE Trans. Comput. 2008:
right whenever the intermediate format has at least two more bits than the last).

All functions work on tensors of any shape, on any device, elementwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with subnormals.

    Attributes:
        name: torch's name of the type.
        dtype: the torch type.
        bits_dtype: the signed integer type of the same width.
        precision: bits of the significand, the hidden one included.
        min_exponent: exponent of the smallest normal number.
        max_exponent: exponent of the largest finite number.
    """

    name: str
    dtype: torch.dtype
    bits_dtype: torch.dtype
    precision: int
    min_exponent: int
    max_exponent: int

    @property
    def unit_roundoff(self) -> float:
        """Half the spacing of the numbers in [1, 2): 2^-precision."""
        return 2.0**-self.precision

    @property
    def smallest(self) -> float:
        """The smallest subnormal number."""
        return 2.0 ** (self.min_exponent - self.precision + 1)

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return (2.0 - 2.0 ** (1 - self.precision)) * 2.0**self.max_exponent

    @property
    def width(self) -> int:
        """Bytes per element."""
        return self.bits_dtype.itemsize


BFLOAT16 = Format("bfloat16", torch.bfloat16, torch.int16, 8, -126, 127)
FLOAT16 = Format("float16", torch.float16, torch.int16, 11, -14, 15)
FLOAT32 = Format("float32", torch.float32, torch.int32, 24, -126, 127)
_FORMATS = {fmt.name: fmt for fmt in (BFLOAT16, FLOAT16, FLOAT32)}


def format_of(dtype: str | torch.dtype) -> Format:
    """Return the format of a type.

    Args:
        dtype: a torch type or its name, such as ``"bfloat16"``.

    Raises:
        ValueError: if the type is not one of bfloat16, float16, float32.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _FORMATS:
        raise ValueError(f"no rounding is defined for {name}; known are {', '.join(_FORMATS)}")
    return _FORMATS[name]


def two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float64 sum and its error: ``a + b == high + low`` exactly (Knuth, Moller).

    Args:
        a: float64, finite.
        b: float64, finite, broadcastable with ``a``; the sum must not overflow.

    Returns:
        ``(high, low)``, float64.
    """
    high = a + b
    of_b = high - a
    low = (a - (high - of_b)).add_(b - of_b)
    return high, low


def round_to_odd(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Round ``high + low`` to float64 by round-to-odd.

    Args:
        high: float64, the float64 nearest to the value.
        low: float64, the value minus ``high``, or anything of that sign; zero where ``high`` is
            not finite, which passes through.

    Returns:
        float64: ``high`` where ``low`` is zero; else that one of the two float64 numbers around
        the value whose last bit is one.
    """
    if not bool(low.any()):
        return high
    bits = high.view(torch.int64)
    away = torch.where((low > 0) == (high > 0), 1, -1)
    inexact = (low != 0) & ((bits & 1) == 0)
    return torch.where(inexact, bits + away, bits).view(torch.float64)


def _float32_to_odd(value: torch.Tensor) -> torch.Tensor:
    """Round float64 to float32 by round-to-odd; a value too large becomes the largest number.

    Infinities pass through, and a NaN stays a NaN (of another payload).
    """
    nearest = value.to(torch.float32)
    back = nearest.to(torch.float64)
    bits = nearest.view(torch.int32)
    away = torch.where(value.abs() > back.abs(), 1, -1).to(torch.int32)
    inexact = (back != value) & ((bits & 1) == 0)
    return torch.where(inexact, bits + away, bits).view(torch.float32)


def round_to_format(high: torch.Tensor, low: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round ``high + low`` to a format, to nearest, ties to even, once.

    Args:
        high: float64, the float64 nearest to the value; inf and NaN pass through.
        low: float64, the rest of the value, or anything of its sign; zero where ``high`` is not
            finite.
        fmt: the format to round to.

    Returns:
        A tensor of ``fmt.dtype``: the correctly rounded value, subnormals and overflow to
        infinity included.
    """
    odd = round_to_odd(high, low)
    if fmt.precision > 22:
        return odd.to(fmt.dtype)
    return _float32_to_odd(odd).to(fmt.dtype)


def round_float64(value: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round float64 values, taken as exact, to a format once (``Tensor.to`` rounds twice)."""
    return round_to_format(value, torch.zeros_like(value), fmt)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return float64 ``2**exponent`` exactly, for integer exponents in -1022..1023."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def ulp(value: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the unit in the last place of finite numbers of a format, as float64.

    It is ``2^(max(e, min_exponent) - precision + 1)`` with ``e`` the exponent of the value.
    """
    exponent = torch.frexp(value.to(torch.float64)).exponent - 1
    exponent = torch.where(value == 0, fmt.min_exponent, exponent.clamp(min=fmt.min_exponent))
    return power_of_two(exponent - (fmt.precision - 1))
