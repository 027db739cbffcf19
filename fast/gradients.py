# mypy: allow-untyped-decorators
"""Gradients of the new tokens: keys and values of each head, and cos and sin summed over heads.

The tables are shared by all heads, so one program takes some tokens of one batch entry through all
heads: it reads the cotangents and keys once, and needs neither atomics nor a second launch.

A head sum is carried as ``total + rest``: two-sum keeps what adding to ``total`` rounds away, and
``rest`` adds that up. The sum is exact as long as ``rest`` is, and then it is rounded once. Whether
it was is known: the errors of ``rest`` are looked at (exactly, none is dropped). There are three
ways, each taken only by the tiles that the one before could not settle:

1. float32, for 16-bit inputs. Terms must differ by a factor of about 2^26 within one sum, or be
   tiny, huge or not finite, for it not to do.
2. float64, which settles all but sums of terms that differ by 2^50 and more (float32 inputs: 2^56).
3. integers as wide as the products' whole range; see :mod:`fast.exact_sum`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .addressing import cache_row, load, offset, store, table_offset
from .exact_sum import exact_head_sums
from .rotation import HUGE, not_below, rotated
from .rounding import magnitude, may_be_inexact, round_once, two_sum, widen


@triton.jit
def _add(
    total: tl.tensor, rest: tl.tensor, lost: tl.tensor, term: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a term; ``lost`` collects the bits of all errors of ``rest``."""
    total, error = two_sum(total, term)
    rest, dropped = two_sum(rest, error)
    if total.dtype == tl.float64:
        # Nothing overflows here, so NaN comes of a term that is not finite: `total` says it all.
        dropped = tl.where((dropped - dropped) == 0, dropped, 0.0)
    return total, rest, lost | dropped.to(lost.dtype, bitcast=True)


@triton.jit
def _normalized(total: tl.tensor, rest: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return ``total + rest`` as the nearest number and the remainder."""
    high, low = two_sum(total, rest)
    if total.dtype == tl.float64:
        # Where `total` is infinite, `rest` is NaN.
        high = tl.where((total - total) == 0, high, total)
    return high, low


@triton.jit
def _token_gradients(  # noqa: C901, PLR0915  one loop; what it calls would take 20 tensors
    grad_key_cache: tl.tensor,
    grad_value_cache: tl.tensor,
    key_states: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    cache_position: tl.tensor,
    grad_key_states: tl.tensor,
    grad_value_states: tl.tensor,
    grad_cos: tl.tensor,
    grad_sin: tl.tensor,
    grad_key_cache_stride: tl.tuple,
    grad_value_cache_stride: tl.tuple,
    key_states_stride: tl.tuple,
    cos_stride: tl.tuple,
    sin_stride: tl.tuple,
    position_stride: tl.tensor,
    batch: tl.tensor,
    first_token: tl.tensor,
    new_len: tl.tensor,
    cached_len: tl.tensor,
    num_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    STREAM: tl.constexpr,
    PRECISE: tl.constexpr,
    VALUES: tl.constexpr,
) -> tl.tensor:
    """Write the gradients of some tokens; say whether a more precise way is needed."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = key_states.dtype.element_ty
    number: tl.constexpr = tl.float64 if PRECISE else tl.float32
    bits: tl.constexpr = tl.int64 if PRECISE else tl.int32
    token = (first_token + tl.arange(0, TOKENS)[:, None]).to(tl.int64)
    row, readable = cache_row(token, new_len, cached_len, cache_position, position_stride)
    column = tl.arange(0, BLOCK_HALF)[None, :].to(tl.int64)
    mask = token < new_len
    if BLOCK_HALF != HALF:
        mask = mask & (column < HALF)
        readable = readable & (column < HALF)

    cos_source = cos + table_offset(batch, token, column, cos_stride)
    sin_source = sin + table_offset(batch, token, column, sin_stride)
    c1 = widen(load(cos_source, mask, STREAM))
    c2 = widen(load(cos_source + HALF * cos_stride[2], mask, STREAM))
    s1 = widen(load(sin_source, mask, STREAM))
    s2 = widen(load(sin_source + HALF * sin_stride[2], mask, STREAM))

    total_cos1 = tl.zeros([TOKENS, BLOCK_HALF], number)
    total_cos2 = tl.zeros([TOKENS, BLOCK_HALF], number)
    total_sin1 = tl.zeros([TOKENS, BLOCK_HALF], number)
    total_sin2 = tl.zeros([TOKENS, BLOCK_HALF], number)
    rest_cos1 = tl.zeros([TOKENS, BLOCK_HALF], number)
    rest_cos2 = tl.zeros([TOKENS, BLOCK_HALF], number)
    rest_sin1 = tl.zeros([TOKENS, BLOCK_HALF], number)
    rest_sin2 = tl.zeros([TOKENS, BLOCK_HALF], number)
    lost = tl.zeros([TOKENS, BLOCK_HALF], bits)
    size = tl.zeros([TOKENS, BLOCK_HALF], tl.float32)
    lowest_g = tl.full([TOKENS, BLOCK_HALF], 0xFFFFFFFF, tl.uint32)
    lowest_k = tl.full([TOKENS, BLOCK_HALF], 0xFFFFFFFF, tl.uint32)

    # A loop with a known number of heads would be unrolled, and its code be slow to fetch.
    first_head = 0
    while first_head < num_heads:
        # All loads of a step come before its first store: the compiler cannot know that they do not
        # overlap.
        loaded = ()
        for i in tl.static_range(HEADS_AT_ONCE):
            head = tl.cast(first_head + i, tl.int64)
            g_source = grad_key_cache + offset(batch, head, row, column, grad_key_cache_stride)
            k_source = key_states + offset(batch, head, token, column, key_states_stride)
            loaded += (  # type: ignore[assignment]
                load(g_source, readable, STREAM),
                load(g_source + HALF * grad_key_cache_stride[3], readable, STREAM),
                load(k_source, mask, STREAM),
                load(k_source + HALF * key_states_stride[3], mask, STREAM),
            )
        if VALUES:
            values = ()
            for i in tl.static_range(HEADS_AT_ONCE):
                head = tl.cast(first_head + i, tl.int64)
                v_source = grad_value_cache + offset(
                    batch, head, row, column, grad_value_cache_stride
                )
                values += (  # type: ignore[assignment]
                    load(v_source, readable, STREAM),
                    load(v_source + HALF * grad_value_cache_stride[3], readable, STREAM),
                )
        for i in tl.static_range(HEADS_AT_ONCE):
            head = tl.cast(first_head + i, tl.int64)
            target = ((batch * num_heads + head) * new_len + token) * HEAD_DIM + column
            if VALUES:
                store(grad_value_states + target, values[2 * i], mask, STREAM)
                store(grad_value_states + target + HALF, values[2 * i + 1], mask, STREAM)
            g1 = widen(loaded[4 * i])
            g2 = widen(loaded[4 * i + 1])
            k1 = widen(loaded[4 * i + 2])
            k2 = widen(loaded[4 * i + 3])
            if not PRECISE and dtype == tl.bfloat16:
                lowest_g = tl.minimum(lowest_g, tl.minimum(magnitude(g1), magnitude(g2)))
                lowest_k = tl.minimum(lowest_k, tl.minimum(magnitude(k1), magnitude(k2)))
            g1 = g1.to(number)
            g2 = g2.to(number)
            k1 = k1.to(number)
            k2 = k2.to(number)
            grad_k1, grad_k2, magnitudes = rotated(
                g1,
                g2,
                c1.to(number),
                c2.to(number),
                s1.to(number),
                s2.to(number),
                dtype,
                TRANSPOSED=True,
            )
            store(grad_key_states + target, grad_k1, mask, STREAM)
            store(grad_key_states + target + HALF, grad_k2, mask, STREAM)
            if not PRECISE:
                size += magnitudes
            total_cos1, rest_cos1, lost = _add(total_cos1, rest_cos1, lost, g1 * k1)
            total_cos2, rest_cos2, lost = _add(total_cos2, rest_cos2, lost, g2 * k2)
            total_sin1, rest_sin1, lost = _add(total_sin1, rest_sin1, lost, -(g1 * k2))
            total_sin2, rest_sin2, lost = _add(total_sin2, rest_sin2, lost, g2 * k1)
        first_head += HEADS_AT_ONCE

    high_cos1, low_cos1 = _normalized(total_cos1, rest_cos1)
    high_cos2, low_cos2 = _normalized(total_cos2, rest_cos2)
    high_sin1, low_sin1 = _normalized(total_sin1, rest_sin1)
    high_sin2, low_sin2 = _normalized(total_sin2, rest_sin2)
    table_target = (batch * new_len + token) * HEAD_DIM + column
    store(grad_cos + table_target, round_once(high_cos1, low_cos1, dtype), mask, STREAM)
    store(grad_cos + table_target + HALF, round_once(high_cos2, low_cos2, dtype), mask, STREAM)
    store(grad_sin + table_target, round_once(high_sin1, low_sin1, dtype), mask, STREAM)
    store(grad_sin + table_target + HALF, round_once(high_sin2, low_sin2, dtype), mask, STREAM)

    # An error of -0.0 is none.
    doubtful = (lost << 1) != 0
    if not PRECISE:
        size += tl.abs(high_cos1) + tl.abs(high_cos2) + tl.abs(high_sin1) + tl.abs(high_sin2)
        doubtful = doubtful | not_below(size, HUGE)
        if dtype == tl.bfloat16:
            lowest_table = tl.minimum(
                tl.minimum(magnitude(c1), magnitude(c2)), tl.minimum(magnitude(s1), magnitude(s2))
            )
            lowest = tl.minimum(lowest_k, lowest_table)
            doubtful = doubtful | may_be_inexact(lowest_g, lowest)
    return tl.max(doubtful.to(tl.int32))


@triton.jit
def token_gradients(
    grad_key_cache: tl.tensor,
    grad_value_cache: tl.tensor,
    key_states: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    cache_position: tl.tensor,
    grad_key_states: tl.tensor,
    grad_value_states: tl.tensor,
    grad_cos: tl.tensor,
    grad_sin: tl.tensor,
    grad_key_cache_stride: tl.tuple,
    grad_value_cache_stride: tl.tuple,
    key_states_stride: tl.tuple,
    cos_stride: tl.tuple,
    sin_stride: tl.tuple,
    position_stride: tl.tensor,
    tile: tl.tensor,
    new_len: tl.tensor,
    cached_len: tl.tensor,
    token_blocks: tl.tensor,
    num_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    PRECISE_TOKENS: tl.constexpr,
    EXACT_TOKENS: tl.constexpr,
    STREAM: tl.constexpr,
) -> None:
    """Write the gradients of TOKENS tokens of one batch entry, all heads.

    Args:
        grad_key_cache: cotangents ``[B,H,rows,D]``; as are grad_value_cache.
        grad_value_cache: see grad_key_cache.
        key_states: ``[B,H,N,D]``.
        cos: ``[B,N,D]``; as is sin.
        sin: see cos.
        cache_position: int64 ``[N]``; None: token n stands in row ``cached_len + n``. The
            cotangents of a token whose position is not in 0..M-1 are taken as 0.
        grad_key_states: ``[B,H,N,D]``, contiguous; as is grad_value_states.
        grad_value_states: see grad_key_states.
        grad_cos: ``[B,N,D]``, contiguous; as is grad_sin.
        grad_sin: see grad_cos.
        grad_key_cache_stride: strides of each tensor in elements.
        grad_value_cache_stride: likewise.
        key_states_stride: likewise.
        cos_stride: likewise.
        sin_stride: likewise.
        position_stride: likewise.
        tile: number of the tile: batch entries, then blocks of tokens.
        new_len: N.
        cached_len: C, or M with cache_position.
        token_blocks: how many blocks of TOKENS there are.
        num_heads: H.
        HEAD_DIM: D.
        BLOCK_HALF: D / 2, rounded up to a power of two.
        TOKENS: a power of two.
        HEADS_AT_ONCE: heads loaded together; divides H.
        PRECISE_TOKENS: tokens at a time in float64; divides TOKENS.
        EXACT_TOKENS: tokens at a time in integers; divides PRECISE_TOKENS.
        STREAM: see :func:`fast.addressing.load`.
    """
    batch = (tile // token_blocks).to(tl.int64)
    first_token = tile % token_blocks * TOKENS
    wide: tl.constexpr = key_states.dtype.element_ty == tl.float32
    doubtful = 1
    if not wide:
        doubtful = _token_gradients(
            grad_key_cache,
            grad_value_cache,
            key_states,
            cos,
            sin,
            cache_position,
            grad_key_states,
            grad_value_states,
            grad_cos,
            grad_sin,
            grad_key_cache_stride,
            grad_value_cache_stride,
            key_states_stride,
            cos_stride,
            sin_stride,
            position_stride,
            batch,
            first_token,
            new_len,
            cached_len,
            num_heads,
            HEAD_DIM,
            BLOCK_HALF,
            TOKENS,
            HEADS_AT_ONCE,
            STREAM,
            PRECISE=False,
            VALUES=True,
        )
    if doubtful != 0:
        for start in range(0, TOKENS, PRECISE_TOKENS):
            undecided = _token_gradients(
                grad_key_cache,
                grad_value_cache,
                key_states,
                cos,
                sin,
                cache_position,
                grad_key_states,
                grad_value_states,
                grad_cos,
                grad_sin,
                grad_key_cache_stride,
                grad_value_cache_stride,
                key_states_stride,
                cos_stride,
                sin_stride,
                position_stride,
                batch,
                first_token + start,
                new_len,
                cached_len,
                num_heads,
                HEAD_DIM,
                BLOCK_HALF,
                PRECISE_TOKENS,
                1,
                STREAM,
                PRECISE=True,
                VALUES=wide,
            )
            if undecided != 0:
                for place in range(0, PRECISE_TOKENS, EXACT_TOKENS):
                    exact_head_sums(
                        grad_key_cache,
                        key_states,
                        cache_position,
                        grad_cos,
                        grad_sin,
                        grad_key_cache_stride,
                        key_states_stride,
                        position_stride,
                        batch,
                        first_token + start + place,
                        new_len,
                        cached_len,
                        num_heads,
                        HEAD_DIM,
                        BLOCK_HALF,
                        EXACT_TOKENS,
                    )
