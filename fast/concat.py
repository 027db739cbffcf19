# mypy: allow-untyped-decorators
"""Kernels for caches grown by concatenation, one launch for each operator.

The first programs take the new tokens, the others copy rows of the caches. They write different
places, so neither waits for the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .copying import copy_rows
from .gradients import token_gradients
from .rotation import rotate_tile


@triton.jit
def _copy_tile(
    key_source: tl.tensor,
    value_source: tl.tensor,
    key_target: tl.tensor,
    value_target: tl.tensor,
    key_source_stride: tl.tuple,
    value_source_stride: tl.tuple,
    key_target_stride: tl.tuple,
    value_target_stride: tl.tuple,
    tile: tl.tensor,
    num_heads: tl.tensor,
    num_rows: tl.tensor,
    row_blocks: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    STREAM: tl.constexpr,
) -> None:
    """Copy ROWS of the first ``num_rows`` rows of one head in both caches."""
    sequence = tile // row_blocks
    row = (tile % row_blocks * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    exists = row < num_rows
    copy_rows(
        key_source,
        value_source,
        key_target,
        value_target,
        key_source_stride,
        value_source_stride,
        key_target_stride,
        value_target_stride,
        (sequence // num_heads).to(tl.int64),
        (sequence % num_heads).to(tl.int64),
        row,
        exists,
        exists,
        HEAD_DIM,
        BLOCK_DIM,
        STREAM,
    )


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "new_len",
        "cached_len",
        "token_blocks",
        "head_blocks",
        "row_blocks",
        "token_programs",
    ]
)
def concat_forward_kernel(
    key_states: tl.tensor,
    value_states: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    updated_key_cache: tl.tensor,
    updated_value_cache: tl.tensor,
    key_states_stride: tl.tuple,  # [B, H, N, D]
    value_states_stride: tl.tuple,  # [B, H, N, D]
    cos_stride: tl.tuple,  # [B, N, D]
    sin_stride: tl.tuple,  # [B, N, D]
    key_cache_stride: tl.tuple,  # [B, H, C, D]
    value_cache_stride: tl.tuple,  # [B, H, C, D]
    updated_stride: tl.tuple,  # [B, H, C + N, D]
    num_heads: tl.tensor,
    new_len: tl.tensor,
    cached_len: tl.tensor,
    token_blocks: tl.tensor,
    head_blocks: tl.tensor,
    row_blocks: tl.tensor,
    token_programs: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PRECISE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    STREAM: tl.constexpr,
) -> None:
    """``kv_rope.concat.forward``: rotate TOKENS tokens in HEADS heads, or copy ROWS rows."""
    program = tl.program_id(0)
    if program < token_programs:
        rotate_tile(
            key_states,
            value_states,
            cos,
            sin,
            None,
            updated_key_cache,
            updated_value_cache,
            key_states_stride,
            value_states_stride,
            cos_stride,
            sin_stride,
            None,
            updated_stride,
            updated_stride,
            program,
            num_heads,
            new_len,
            cached_len,
            token_blocks,
            head_blocks,
            HEAD_DIM,
            BLOCK_HALF,
            TOKENS,
            HEADS,
            PRECISE_ROWS,
            STREAM,
        )
    else:
        _copy_tile(
            key_cache,
            value_cache,
            updated_key_cache,
            updated_value_cache,
            key_cache_stride,
            value_cache_stride,
            updated_stride,
            updated_stride,
            program - token_programs,
            num_heads,
            cached_len,
            row_blocks,
            HEAD_DIM,
            2 * BLOCK_HALF,
            ROWS,
            STREAM,
        )


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "new_len",
        "cached_len",
        "token_blocks",
        "row_blocks",
        "token_programs",
    ]
)
def concat_backward_kernel(
    grad_updated_key_cache: tl.tensor,
    grad_updated_value_cache: tl.tensor,
    key_states: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    grad_key_states: tl.tensor,
    grad_value_states: tl.tensor,
    grad_cos: tl.tensor,
    grad_sin: tl.tensor,
    grad_key_cache: tl.tensor,
    grad_value_cache: tl.tensor,
    grad_updated_key_cache_stride: tl.tuple,  # [B, H, C + N, D]
    grad_updated_value_cache_stride: tl.tuple,  # [B, H, C + N, D]
    key_states_stride: tl.tuple,  # [B, H, N, D]
    cos_stride: tl.tuple,  # [B, N, D]
    sin_stride: tl.tuple,  # [B, N, D]
    cache_stride: tl.tuple,  # [B, H, C, D]
    num_heads: tl.tensor,
    new_len: tl.tensor,
    cached_len: tl.tensor,
    token_blocks: tl.tensor,
    row_blocks: tl.tensor,
    token_programs: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    PRECISE_TOKENS: tl.constexpr,
    EXACT_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STREAM: tl.constexpr,
) -> None:
    """``kv_rope.concat.backward``: the gradients of TOKENS tokens, or a copy of ROWS rows."""
    program = tl.program_id(0)
    if program < token_programs:
        token_gradients(
            grad_updated_key_cache,
            grad_updated_value_cache,
            key_states,
            cos,
            sin,
            None,
            grad_key_states,
            grad_value_states,
            grad_cos,
            grad_sin,
            grad_updated_key_cache_stride,
            grad_updated_value_cache_stride,
            key_states_stride,
            cos_stride,
            sin_stride,
            None,
            program,
            new_len,
            cached_len,
            token_blocks,
            num_heads,
            HEAD_DIM,
            BLOCK_HALF,
            TOKENS,
            HEADS_AT_ONCE,
            PRECISE_TOKENS,
            EXACT_TOKENS,
            STREAM,
        )
    else:
        _copy_tile(
            grad_updated_key_cache,
            grad_updated_value_cache,
            grad_key_cache,
            grad_value_cache,
            grad_updated_key_cache_stride,
            grad_updated_value_cache_stride,
            cache_stride,
            cache_stride,
            program - token_programs,
            num_heads,
            cached_len,
            row_blocks,
            HEAD_DIM,
            2 * BLOCK_HALF,
            ROWS,
            STREAM,
        )
