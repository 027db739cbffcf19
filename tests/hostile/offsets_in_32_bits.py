"""The right example with offsets of 32 bits: wrong past 2^31 elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _copy_cache_kernel(
    key_cache,
    value_cache,
    updated_key_cache,
    updated_value_cache,
    num_rows,
    cached_len,
    updated_len,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, HEAD_DIM)
    updated_row = row // cached_len * updated_len + row % cached_len

    source = row[:, None] * HEAD_DIM + column[None, :]
    target = updated_row[:, None] * HEAD_DIM + column[None, :]
    mask = (row < num_rows)[:, None]
    # No arithmetic touches what is loaded, so every bit survives: NaN payloads and -0.0 too.
    tl.store(updated_key_cache + target, tl.load(key_cache + source, mask=mask), mask=mask)
    tl.store(updated_value_cache + target, tl.load(value_cache + source, mask=mask), mask=mask)


@triton.jit
def _append_kernel(
    key_states,
    value_states,
    cos,
    sin,
    updated_key_cache,
    updated_value_cache,
    num_rows,
    num_heads,
    new_len,
    cached_len,
    updated_len,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    sequence = row // new_len  # one for each batch entry and head
    token = row % new_len
    table_row = sequence // num_heads * new_len + token  # cos and sin are shared by all heads
    updated_row = sequence * updated_len + cached_len + token

    column = tl.arange(0, HALF)
    first = row[:, None] * HEAD_DIM + column[None, :]
    second = first + HALF
    table_first = table_row[:, None] * HEAD_DIM + column[None, :]
    table_second = table_first + HALF
    target_first = updated_row[:, None] * HEAD_DIM + column[None, :]
    target_second = target_first + HALF
    mask = (row < num_rows)[:, None]

    k1 = tl.load(key_states + first, mask=mask).to(tl.float32)
    k2 = tl.load(key_states + second, mask=mask).to(tl.float32)
    cos1 = tl.load(cos + table_first, mask=mask).to(tl.float32)
    cos2 = tl.load(cos + table_second, mask=mask).to(tl.float32)
    sin1 = tl.load(sin + table_first, mask=mask).to(tl.float32)
    sin2 = tl.load(sin + table_second, mask=mask).to(tl.float32)

    # float32 throughout, and one rounding to the output type at the end.
    rotated1 = (k1 * cos1 - k2 * sin1).to(updated_key_cache.dtype.element_ty)
    rotated2 = (k2 * cos2 + k1 * sin2).to(updated_key_cache.dtype.element_ty)
    tl.store(updated_key_cache + target_first, rotated1, mask=mask)
    tl.store(updated_key_cache + target_second, rotated2, mask=mask)

    v1 = tl.load(value_states + first, mask=mask)
    v2 = tl.load(value_states + second, mask=mask)
    tl.store(updated_value_cache + target_first, v1, mask=mask)
    tl.store(updated_value_cache + target_second, v2, mask=mask)


def concat_forward(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append the rotated keys and the values to the cache.

    Args:
        key_states: new keys, contiguous, [B, H, N, D]; D is a power of two.
        value_states: new values, contiguous, [B, H, N, D].
        cos: cosine table, contiguous, [B, 1, N, D].
        sin: sine table, contiguous, [B, 1, N, D].
        key_cache: cached keys, contiguous, [B, H, C, D]; C may be 0.
        value_cache: cached values, contiguous, [B, H, C, D].

    Returns:
        ``updated_key_cache`` and ``updated_value_cache``, both [B, H, C + N, D].
    """
    batch, num_heads, new_len, head_dim = key_states.shape
    cached_len = key_cache.shape[2]
    updated_len = cached_len + new_len
    updated_key_cache = key_states.new_empty(batch, num_heads, updated_len, head_dim)
    updated_value_cache = torch.empty_like(updated_key_cache)
    # Triton's interpreter, on a CPU, pays by the program: give it few, large ones.
    block_rows = 32 if key_states.is_cuda else 256

    cached_rows = batch * num_heads * cached_len
    if cached_rows:
        _copy_cache_kernel[(triton.cdiv(cached_rows, block_rows),)](
            key_cache,
            value_cache,
            updated_key_cache,
            updated_value_cache,
            cached_rows,
            cached_len,
            updated_len,
            HEAD_DIM=head_dim,
            BLOCK_ROWS=block_rows,
        )
    new_rows = batch * num_heads * new_len
    _append_kernel[(triton.cdiv(new_rows, block_rows),)](
        key_states,
        value_states,
        cos,
        sin,
        updated_key_cache,
        updated_value_cache,
        new_rows,
        num_heads,
        new_len,
        cached_len,
        updated_len,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=block_rows,
    )
    return updated_key_cache, updated_value_cache
