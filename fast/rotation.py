# mypy: allow-untyped-decorators
"""Rotating rows: the new keys of a forward operator, and beside them the new values.

The sum of two products is exact: bfloat16 and float16 products are exact in float32 (bfloat16 ones
unless tiny), all are in float64, and two-sum keeps what an addition rounds away. So each element is
rounded once.

16-bit inputs are rotated in float32. A program that meets a product too small for that, or a result
that is huge or not finite, does its tile again in float64, from memory: that is rare, and so costs
the others neither time nor registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .addressing import cache_row, load, offset, store, table_offset
from .rounding import magnitude, may_be_inexact, round_once, two_difference, two_sum, widen

HUGE = tl.constexpr(2.0**127)


@triton.jit
def rotated(
    x1: tl.tensor,
    x2: tl.tensor,
    cos1: tl.tensor,
    cos2: tl.tensor,
    sin1: tl.tensor,
    sin2: tl.tensor,
    dtype: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Rotate the halves of rows, or rotate them back (TRANSPOSED), rounded once to ``dtype``.

    ``x * cos + rotate_half(x) * sin``, or ``x * cos + rotate_half_T(x * sin)``.

    Returns:
        Both halves, and the sum of the magnitudes of both, which is not below HUGE where something
        overflowed or was not finite: what is returned is wrong there unless computed in float64.
    """
    if TRANSPOSED:
        high1, low1 = two_sum(x1 * cos1, x2 * sin2)
        high2, low2 = two_difference(x2 * cos2, x1 * sin1)
    else:
        high1, low1 = two_difference(x1 * cos1, x2 * sin1)
        high2, low2 = two_sum(x2 * cos2, x1 * sin2)
    y1 = round_once(high1, low1, dtype)
    y2 = round_once(high2, low2, dtype)
    return y1, y2, tl.abs(high1) + tl.abs(high2)


@triton.jit
def _rotate_rows(
    key_states: tl.tensor,
    value_states: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    cache_position: tl.tensor,
    key_target: tl.tensor,
    value_target: tl.tensor,
    key_states_stride: tl.tuple,
    value_states_stride: tl.tuple,
    cos_stride: tl.tuple,
    sin_stride: tl.tuple,
    position_stride: tl.tensor,
    key_target_stride: tl.tuple,
    value_target_stride: tl.tuple,
    batch: tl.tensor,
    head: tl.tensor,  # [rows, 1]
    token: tl.tensor,  # [rows, 1]
    num_heads: tl.tensor,
    new_len: tl.tensor,
    cached_len: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    STREAM: tl.constexpr,
    PRECISE: tl.constexpr,
    VALUES: tl.constexpr,
) -> tl.tensor:
    """Rotate some rows and, if VALUES, copy the values; say whether float64 is needed."""
    HALF: tl.constexpr = HEAD_DIM // 2
    row, exists = cache_row(token, new_len, cached_len, cache_position, position_stride)
    exists = exists & (head < num_heads)
    column = tl.arange(0, BLOCK_HALF)[None, :].to(tl.int64)
    mask = exists
    table_mask = token < new_len
    if BLOCK_HALF != HALF:
        mask = mask & (column < HALF)
        table_mask = table_mask & (column < HALF)

    # All loads come before the first store: the compiler cannot know that they do not overlap.
    key_source = key_states + offset(batch, head, token, column, key_states_stride)
    k1 = load(key_source, mask, STREAM)
    k2 = load(key_source + HALF * key_states_stride[3], mask, STREAM)
    if VALUES:
        value_source = value_states + offset(batch, head, token, column, value_states_stride)
        v1 = load(value_source, mask, STREAM)
        v2 = load(value_source + HALF * value_states_stride[3], mask, STREAM)
    cos_source = cos + table_offset(batch, token, column, cos_stride)
    sin_source = sin + table_offset(batch, token, column, sin_stride)
    # The heads share these, so they stay in the caches.
    c1 = widen(tl.load(cos_source, mask=table_mask, other=0.0))
    c2 = widen(tl.load(cos_source + HALF * cos_stride[2], mask=table_mask, other=0.0))
    s1 = widen(tl.load(sin_source, mask=table_mask, other=0.0))
    s2 = widen(tl.load(sin_source + HALF * sin_stride[2], mask=table_mask, other=0.0))
    k1 = widen(k1)
    k2 = widen(k2)

    dtype: tl.constexpr = key_states.dtype.element_ty
    key_place = key_target + offset(batch, head, row, column, key_target_stride)
    if VALUES:
        value_place = value_target + offset(batch, head, row, column, value_target_stride)
        store(value_place, v1, mask, STREAM)
        store(value_place + HALF * value_target_stride[3], v2, mask, STREAM)
    if PRECISE:
        y1, y2, _ = rotated(
            k1.to(tl.float64),
            k2.to(tl.float64),
            c1.to(tl.float64),
            c2.to(tl.float64),
            s1.to(tl.float64),
            s2.to(tl.float64),
            dtype,
            TRANSPOSED=False,
        )
        doubtful = 0
    else:
        y1, y2, size = rotated(k1, k2, c1, c2, s1, s2, dtype, TRANSPOSED=False)
        in_doubt = not_below(size, HUGE)
        if dtype == tl.bfloat16:
            lowest_key = tl.minimum(magnitude(k1), magnitude(k2))
            lowest_table = tl.minimum(
                tl.minimum(magnitude(c1), magnitude(c2)), tl.minimum(magnitude(s1), magnitude(s2))
            )
            in_doubt = in_doubt | may_be_inexact(lowest_key, lowest_table)
        doubtful = in_doubt.to(tl.int32)
    store(key_place, y1, mask, STREAM)
    store(key_place + HALF * key_target_stride[3], y2, mask, STREAM)
    if not PRECISE:
        doubtful = tl.max(doubtful)
    return doubtful


@triton.jit
def not_below(x: tl.tensor, limit: tl.constexpr) -> tl.tensor:
    """Whether a number is at least a limit, or NaN."""
    return (x < limit) == 0


@triton.jit
def rotate_tile(
    key_states: tl.tensor,
    value_states: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    cache_position: tl.tensor,
    key_target: tl.tensor,
    value_target: tl.tensor,
    key_states_stride: tl.tuple,
    value_states_stride: tl.tuple,
    cos_stride: tl.tuple,
    sin_stride: tl.tuple,
    position_stride: tl.tensor,
    key_target_stride: tl.tuple,
    value_target_stride: tl.tuple,
    tile: tl.tensor,
    num_heads: tl.tensor,
    new_len: tl.tensor,
    cached_len: tl.tensor,
    token_blocks: tl.tensor,
    head_blocks: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PRECISE_ROWS: tl.constexpr,
    STREAM: tl.constexpr,
) -> None:
    """Rotate the new keys, and copy the new values, of TOKENS tokens in HEADS heads.

    Args:
        key_states: ``[B,H,N,D]``; as are value_states.
        value_states: see key_states.
        cos: ``[B,N,D]`` (stride 0 along B where it has one row); as is sin.
        sin: see cos.
        cache_position: int64 ``[N]``; None: token n belongs in row ``cached_len + n``.
        key_target: ``[B,H,rows,D]``, of which the tokens' rows are written; as is value_target.
        value_target: see key_target.
        key_states_stride: strides of each tensor in elements.
        value_states_stride: likewise.
        cos_stride: likewise.
        sin_stride: likewise.
        position_stride: likewise.
        key_target_stride: likewise.
        value_target_stride: likewise.
        tile: number of the tile: batch entries, then blocks of heads, then blocks of tokens.
        num_heads: H.
        new_len: N.
        cached_len: C, or M with cache_position; tokens whose position is not in 0..M-1 are left.
        token_blocks: how many blocks of TOKENS there are.
        head_blocks: how many blocks of HEADS there are.
        HEAD_DIM: D.
        BLOCK_HALF: D / 2, rounded up to a power of two.
        TOKENS: a power of two.
        HEADS: a power of two.
        PRECISE_ROWS: rows at a time in float64.
        STREAM: see :func:`fast.addressing.load`.
    """
    ROWS: tl.constexpr = TOKENS * HEADS
    block = tile // token_blocks
    first_token = tile % token_blocks * TOKENS
    first_head = block % head_blocks * HEADS
    batch = (block // head_blocks).to(tl.int64)
    wide: tl.constexpr = key_states.dtype.element_ty == tl.float32
    doubtful = 1
    if not wide:
        index = tl.arange(0, ROWS)[:, None]
        doubtful = _rotate_rows(
            key_states,
            value_states,
            cos,
            sin,
            cache_position,
            key_target,
            value_target,
            key_states_stride,
            value_states_stride,
            cos_stride,
            sin_stride,
            position_stride,
            key_target_stride,
            value_target_stride,
            batch,
            (first_head + index // TOKENS).to(tl.int64),
            (first_token + index % TOKENS).to(tl.int64),
            num_heads,
            new_len,
            cached_len,
            HEAD_DIM,
            BLOCK_HALF,
            STREAM,
            PRECISE=False,
            VALUES=True,
        )
    if doubtful != 0:
        for start in range(0, ROWS, PRECISE_ROWS):
            part = start + tl.arange(0, PRECISE_ROWS)[:, None]
            _rotate_rows(
                key_states,
                value_states,
                cos,
                sin,
                cache_position,
                key_target,
                value_target,
                key_states_stride,
                value_states_stride,
                cos_stride,
                sin_stride,
                position_stride,
                key_target_stride,
                value_target_stride,
                batch,
                (first_head + part // TOKENS).to(tl.int64),
                (first_token + part % TOKENS).to(tl.int64),
                num_heads,
                new_len,
                cached_len,
                HEAD_DIM,
                BLOCK_HALF,
                STREAM,
                PRECISE=True,
                VALUES=wide,
            )
