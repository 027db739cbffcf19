# mypy: allow-untyped-decorators
"""Head sums without any error: the last resort, for sums that float64 cannot hold.

Every product is an integer of at most 48 bits times a power of two between 2^-298 and 2^208. The
sum is taken as one integer in units of 2^-298, 32 bits at a time from the lowest up, with a carry
(U. Kulisch's long accumulator, cut into windows so that it needs no memory). The leading digits are
kept, with one bit that says whether anything lies below; its sign comes out last, as the carry.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .addressing import cache_row, offset
from .rounding import round_once, widen

# 32-bit windows from 2^-298 up: 576 bits hold the products (554 bits) of 2^21 heads, and a sign.
WINDOWS = tl.constexpr(18)
LOWEST_EXPONENT = tl.constexpr(-298)


@triton.jit
def _significand(x: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Split float32 into significand (int64), biased exponent from 1 up, and sign (1 or -1)."""
    bits = x.to(tl.int32, bitcast=True)
    field = (bits >> 23) & 0xFF
    hidden = tl.where(field > 0, 0x800000, 0)
    sign = tl.where(bits < 0, -1, 1)
    return ((bits & 0x7FFFFF) | hidden).to(tl.int64), tl.maximum(field, 1), sign.to(tl.int64)


@triton.jit
def _window(product: tl.tensor, place: tl.tensor, window: tl.tensor) -> tl.tensor:
    """Return 32 bits of ``product * 2^place``, from bit ``32 * window`` on."""
    shift = place - 32 * window
    up = product << tl.minimum(tl.maximum(shift, 0), 31).to(tl.int64)
    down = product >> tl.minimum(tl.maximum(-shift, 0), 63).to(tl.int64)
    part = tl.where(shift > 31, 0, tl.where(shift >= 0, up, down))
    return part & 0xFFFFFFFF


@triton.jit
def _product(
    g_source: tl.tensor,
    k_source: tl.tensor,
    g_mask: tl.tensor,
    k_mask: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Load and multiply: return the significand with its sign (int64), its place, and finiteness.

    The product is ``significand * 2^(place - 298)``.
    """
    g = widen(tl.load(g_source, mask=g_mask, other=0.0))
    k = widen(tl.load(k_source, mask=k_mask, other=0.0))
    g_significand, g_exponent, g_sign = _significand(g)
    k_significand, k_exponent, k_sign = _significand(k)
    finite = (g_exponent < 255) & (k_exponent < 255)
    product = tl.where(finite, g_significand * k_significand, 0)
    return product * (g_sign * k_sign), g_exponent + k_exponent - 2, finite


@triton.jit
def _exact_sum(  # noqa: PLR0915  one loop over ten running values
    g_source: tl.tensor,
    k_source: tl.tensor,
    g_mask: tl.tensor,
    k_mask: tl.tensor,
    g_head_stride: tl.tensor,
    k_head_stride: tl.tensor,
    num_heads: tl.tensor,
    dtype: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the sum over heads of g * k, rounded once, and where it is one of finite terms."""
    # Only the windows between the lowest and the highest product of the tile hold anything.
    low_place = tl.full([TOKENS, BLOCK_HALF], 32 * WINDOWS, tl.int32)
    high_place = tl.zeros([TOKENS, BLOCK_HALF], tl.int32)
    all_finite = tl.full([TOKENS, BLOCK_HALF], 1, tl.int32)
    head = tl.cast(0, tl.int64)
    while head < num_heads:
        product, place, finite = _product(
            g_source + head * g_head_stride, k_source + head * k_head_stride, g_mask, k_mask
        )
        low_place = tl.where(product != 0, tl.minimum(low_place, place), low_place)
        high_place = tl.where(product != 0, tl.maximum(high_place, place), high_place)
        all_finite = all_finite & finite.to(tl.int32)
        head += 1
    first_window = tl.min(low_place) // 32
    # 48 bits of a product, 21 more for the sum of so many heads, and a sign.
    last_window = tl.minimum((tl.max(high_place) + 70) // 32, WINDOWS - 1)

    # Digits come in two's complement, and the sign last. So those of the opposite are kept as well:
    # the complement, once a digit was not zero.
    carry = tl.zeros([TOKENS, BLOCK_HALF], tl.int64)
    below = tl.zeros([TOKENS, BLOCK_HALF], tl.int64)
    opposite_below = tl.zeros([TOKENS, BLOCK_HALF], tl.int64)
    nonzero = tl.zeros([TOKENS, BLOCK_HALF], tl.int64)  # whether any digit before `below` is
    top = tl.zeros([TOKENS, BLOCK_HALF], tl.int64)
    second = tl.zeros([TOKENS, BLOCK_HALF], tl.int64)
    rest = tl.zeros([TOKENS, BLOCK_HALF], tl.int64)
    place_of_top = tl.zeros([TOKENS, BLOCK_HALF], tl.int64)
    opposite_top = tl.zeros([TOKENS, BLOCK_HALF], tl.int64)
    opposite_second = tl.zeros([TOKENS, BLOCK_HALF], tl.int64)
    opposite_rest = tl.zeros([TOKENS, BLOCK_HALF], tl.int64)
    opposite_place = tl.zeros([TOKENS, BLOCK_HALF], tl.int64)
    window = first_window
    while window <= last_window:
        head = tl.cast(0, tl.int64)
        while head < num_heads:
            product, place, _ = _product(
                g_source + head * g_head_stride, k_source + head * k_head_stride, g_mask, k_mask
            )
            part = _window(tl.abs(product), place, window)
            carry += tl.where(product < 0, -part, part)
            head += 1
        digit = carry & 0xFFFFFFFF
        carry = carry >> 32
        seen = (below | nonzero) != 0
        opposite = tl.where(seen, 0xFFFFFFFF - digit, -digit) & 0xFFFFFFFF
        here = tl.cast(32 * window, tl.int64)
        top = tl.where(digit != 0, digit, top)
        second = tl.where(digit != 0, below, second)
        rest = tl.where(digit != 0, nonzero, rest)
        place_of_top = tl.where(digit != 0, here, place_of_top)
        opposite_top = tl.where(opposite != 0, opposite, opposite_top)
        opposite_second = tl.where(opposite != 0, opposite_below, opposite_second)
        opposite_rest = tl.where(opposite != 0, nonzero, opposite_rest)
        opposite_place = tl.where(opposite != 0, here, opposite_place)
        nonzero = nonzero | (below != 0).to(tl.int64)
        below = digit
        opposite_below = opposite
        window += 1
    negative = carry < 0
    top = tl.where(negative, opposite_top, top)
    second = tl.where(negative, opposite_second, second)
    rest = tl.where(negative, opposite_rest, rest)
    place_of_top = tl.where(negative, opposite_place, place_of_top)
    # 32 to 63 significant bits, the last of which says whether anything lies below; then at most
    # 53, so that the conversion to float64 is exact.
    leading = (top << 31) | (second >> 1) | (second & 1) | rest
    long = leading >= (1 << 53)
    leading = tl.where(long, (leading >> 10) | ((leading & 1023) != 0).to(tl.int64), leading)
    exponent = place_of_top + (LOWEST_EXPONENT - 31) + tl.where(long, 10, 0)
    unit = ((exponent + 1023) << 52).to(tl.float64, bitcast=True)
    value = tl.where(negative, -leading, leading).to(tl.float64) * unit
    return round_once(value, tl.zeros_like(value), dtype), all_finite != 0


@triton.jit
def exact_head_sums(
    grad_key_cache: tl.tensor,
    key_states: tl.tensor,
    cache_position: tl.tensor,
    grad_cos: tl.tensor,
    grad_sin: tl.tensor,
    grad_key_cache_stride: tl.tuple,
    key_states_stride: tl.tuple,
    position_stride: tl.tensor,
    batch: tl.tensor,
    first_token: tl.tensor,
    new_len: tl.tensor,
    cached_len: tl.tensor,
    num_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Write grad_cos and grad_sin of TOKENS tokens of one batch entry, where all terms are finite.

    See :func:`fast.gradients.token_gradients` for the arguments.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = key_states.dtype.element_ty
    token = (first_token + tl.arange(0, TOKENS)[:, None]).to(tl.int64)
    row, readable = cache_row(token, new_len, cached_len, cache_position, position_stride)
    column = tl.arange(0, BLOCK_HALF)[None, :].to(tl.int64)
    k_mask = (column < HALF) & (token < new_len)
    g_mask = (column < HALF) & readable
    for half in range(2):
        here = tl.cast(half, tl.int64) * HALF + column
        opposite = tl.cast(1 - half, tl.int64) * HALF + column
        target = (batch * new_len + token) * HEAD_DIM + here
        g_source = grad_key_cache + offset(batch, 0, row, here, grad_key_cache_stride)
        for table in tl.static_range(2):
            k_column = here if table == 0 else opposite
            k_source = key_states + offset(batch, 0, token, k_column, key_states_stride)
            value, finite = _exact_sum(
                g_source,
                k_source,
                g_mask,
                k_mask,
                grad_key_cache_stride[1],
                key_states_stride[1],
                num_heads,
                dtype,
                TOKENS,
                BLOCK_HALF,
            )
            if table == 0:
                tl.store(grad_cos + target, value, mask=k_mask & finite)
            else:
                # The first half of rotate_half(k) is minus the second half of k.
                value = tl.where(half == 0, -value, value)
                tl.store(grad_sin + target, value, mask=k_mask & finite)
