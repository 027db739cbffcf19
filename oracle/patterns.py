"""Bit patterns that probes are made of: codes, ties, special values, subnormals.

All functions return unsigned integers of the type's width (or fill arrays of them), so that the
values reach the candidate exactly as written here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .inputs import encode
from .rounding import format_of


def codes(shape: tuple[int, ...], dtype: str, start: int = 0) -> NDArray[Any]:
    """Return normal numbers of alternating sign that tell elements apart.

    Elements less than 24,576 places apart differ in value (16,384 in float16), so an element that
    comes from elsewhere shows where it came from.

    Args:
        shape: the shape to fill, in index order.
        dtype: the floating type's name.
        start: number of the first code, so that two tensors can hold different ones.
    """
    fmt = format_of(dtype)
    count = int(np.prod(shape))
    number = np.arange(start, start + count, dtype=np.int64)
    one = int(encode(1.0, dtype))
    # A stretch of patterns around 1.0 that stays clear of subnormals and infinities when
    # multiplied by the small powers of two that probes use.
    span = {16: 12288, 32: 1 << 24}[8 * fmt.width] if dtype != "float16" else 8192
    magnitude = one - span // 2 + number % span
    sign = (number // span + number) % 2
    unsigned = np.dtype(f"u{fmt.width}")
    return (magnitude | (sign << (8 * fmt.width - 1))).astype(unsigned).reshape(shape)


def every_pattern(
    shape: tuple[int, ...], dtype: str, start: int = 0, step: int = 1
) -> NDArray[Any]:
    """Return bit patterns in turn that visit all there are in a 16-bit type.

    NaNs of every payload, infinities, both zeros and all subnormals are among the first 65,536. In
    float32 these are the upper halves of the patterns; the lower halves run through all numbers of
    16 bits too, except that zeros and infinities keep zeros there and so are visited themselves.

    Args:
        shape: the shape to fill, in index order.
        dtype: the floating type's name.
        start: the first pattern (its upper half in float32).
        step: from one pattern to the next; it must be odd to visit all.
    """
    fmt = format_of(dtype)
    count = int(np.prod(shape))
    number = (start + step * np.arange(count, dtype=np.int64)) % 65536
    if fmt.width == 4:
        infinity = int(encode(np.inf, dtype)) >> 16
        magnitude = number % 32768
        low = number * 40503 % 65536
        number = number << 16 | np.where((magnitude == 0) | (magnitude == infinity), 0, low)
    return number.astype(np.dtype(f"u{fmt.width}")).reshape(shape)


def signalling_nans(shape: tuple[int, ...], dtype: str, start: int = 0) -> NDArray[Any]:
    """Return signalling NaNs of running payloads and alternating sign.

    Arithmetic, and on many machines a conversion to another type, turns each into a quiet NaN.

    Args:
        shape: the shape to fill, in index order.
        dtype: the floating type's name.
        start: number of the first payload, so that two tensors can hold different ones.
    """
    fmt = format_of(dtype)
    number = np.arange(start, start + int(np.prod(shape)), dtype=np.int64)
    payloads = (1 << (fmt.precision - 2)) - 1
    pattern = int(encode(np.inf, dtype)) + 1 + number % payloads
    sign = (number // payloads + number) % 2
    unsigned = np.dtype(f"u{fmt.width}")
    return (pattern | sign << (8 * fmt.width - 1)).astype(unsigned).reshape(shape)


def specials(dtype: str) -> NDArray[Any]:
    """Return infinities, quiet NaNs of two payloads, both zeros and the extremes of a type."""
    fmt = format_of(dtype)
    width = 8 * fmt.width
    infinity = int(encode(np.inf, dtype))
    sign = 1 << (width - 1)
    quiet = infinity | (1 << (fmt.precision - 2))
    smallest_normal = 1 << (fmt.precision - 1)
    magnitudes = [infinity, quiet, quiet | 1, 0, 1, smallest_normal - 1, smallest_normal]
    magnitudes.append(infinity - 1)
    patterns = magnitudes + [pattern | sign for pattern in magnitudes]
    return np.array(patterns, dtype=f"u{fmt.width}")


def scaled(bits: NDArray[Any], exponent: int, dtype: str) -> NDArray[Any]:
    """Multiply numbers by ``2**exponent``, rounding once where they become subnormal."""
    return encode(np.ldexp(decode(bits, dtype), exponent), dtype)


def decode(bits: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Return the numbers that bit patterns stand for."""
    fmt = format_of(dtype)
    signed = np.ascontiguousarray(bits).view(np.dtype(f"i{fmt.width}"))
    values: NDArray[np.float64] = torch.from_numpy(signed).view(fmt.dtype).to(torch.float64).numpy()
    return values
