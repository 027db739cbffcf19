# mypy: allow-untyped-decorators
# ruff: noqa: RET505  Triton compiles what follows an `if`, also after a `return` in it
"""Rounding primitives for kernels: exact widening, error-free sums, one rounding at the end.

A sum is carried as ``high + low`` with ``high`` nearest to it, and rounded once, by way of
round-to-odd: an odd last bit marks "not exact", so that the last rounding decides every tie and
near-tie as if it saw the exact sum (S. Boldo and G. Melquiond, "Emulation of a FMA and correctly
rounded sums: proved algorithms using rounding to odd", IEEE Trans. Comput. 2008: right whenever the
intermediate format has at least two more bits than the last).

All of it relies on additions and multiplications that round one by one: launch with
``enable_fp_fusion=False``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen(x: tl.tensor) -> tl.tensor:
    """Convert bfloat16, float16 or float32 to float32, exactly.

    A bfloat16 is the upper half of a float32. The shift is exact for subnormals everywhere, which
    the conversion of Triton's interpreter is not.
    """
    if x.dtype == tl.bfloat16:
        upper = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return upper.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def two_sum(a: tl.tensor, b: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the nearest sum and its error: ``a + b == high + low`` (Knuth; Moller).

    Exact unless something overflows, and then ``low`` is NaN or infinite.
    """
    high = a + b
    of_b = high - a
    return high, (a - (high - of_b)) + (b - of_b)


@triton.jit
def two_difference(a: tl.tensor, b: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the nearest difference and its error: ``a - b == high + low``.

    Not ``two_sum(a, -b)``: Triton negates by subtracting from zero, which loses the sign of zero.
    """
    high = a - b
    of_b = high - a
    return high, (a - (high - of_b)) - (b + of_b)


@triton.jit
def round_to_odd(high: tl.tensor, low: tl.tensor) -> tl.tensor:
    """Round ``high + low`` to the type of both by round-to-odd.

    ``high`` is finite and nearest to the sum, so the sum lies between it and a neighbour.
    """
    if high.dtype == tl.float64:
        bits = high.to(tl.int64, bitcast=True)
        inward = (bits ^ low.to(tl.int64, bitcast=True)) >> 63
    else:
        bits = high.to(tl.int32, bitcast=True)
        inward = (bits ^ low.to(tl.int32, bitcast=True)) >> 31
    # Signs differ: the sum is nearer to zero than `high`, and truncates to the number before it.
    odd = (bits + inward) | 1
    return tl.where(low != 0, odd, bits).to(high.dtype, bitcast=True)


@triton.jit
def round_once(high: tl.tensor, low: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round ``high + low`` to ``dtype``, to nearest, ties to even, once.

    Args:
        high: float32 (for 16-bit results; finite) or float64 (may be infinite or NaN, and then is
            the result).
        low: of the type of ``high``; of it only the sign matters, and whether it is zero.
        dtype: bfloat16, float16 or float32.
    """
    if high.dtype == tl.float32:
        return round_to_odd(high, low).to(dtype)
    else:
        finite = (high - high) == 0
        odd = round_to_odd(high, tl.where(finite, low, 0.0))
        nearest = odd.to(tl.float32)
        if dtype == tl.float32:
            return nearest
        else:
            # Once more to odd, in float32: GPUs before sm_90 have no conversion from float64 to
            # bfloat16. A value too large becomes the largest float32, and infinite below.
            back = nearest.to(tl.float64)
            bits = nearest.to(tl.int32, bitcast=True)
            inward = tl.where(tl.abs(odd) < tl.abs(back), -1, 0).to(tl.int32)
            bits = tl.where(odd != back, (bits + inward) | 1, bits)
            return bits.to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def magnitude(x: tl.tensor) -> tl.tensor:
    """Order float32 numbers by magnitude, zero last of all: uint32, one less than the pattern."""
    return (x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) - 1


@triton.jit
def may_be_inexact(lowest_a: tl.tensor, lowest_b: tl.tensor) -> tl.tensor:
    """Whether a product of two bfloat16 numbers might not be exact in float32.

    It is where it is zero, or at least 2^-126: 16 significant bits fit. With biased exponents e and
    f it is at least 2^(e + f - 254).

    Args:
        lowest_a: the smallest :func:`magnitude` of the one factor.
        lowest_b: the smallest :func:`magnitude` of the other.
    """
    return (lowest_a >> 23) + (lowest_b >> 23) < 128
