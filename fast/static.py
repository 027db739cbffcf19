# mypy: allow-untyped-decorators
"""Kernels for caches of fixed capacity, one launch for each operator.

The first programs take the new tokens, whose rows ``cache_position`` names; the others take rows of
the caches, and find out for themselves which of these are named. They write different places, so
neither waits for the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .addressing import load, offset, store
from .copying import copy_rows, named_rows
from .gradients import token_gradients
from .rotation import rotate_tile


@triton.jit
def _keep_tile(
    key_source: tl.tensor,
    value_source: tl.tensor,
    cache_position: tl.tensor,
    key_target: tl.tensor,
    value_target: tl.tensor,
    key_source_stride: tl.tuple,
    value_source_stride: tl.tuple,
    position_stride: tl.tensor,
    target_stride: tl.tuple,
    tile: tl.tensor,
    new_len: tl.tensor,
    max_len: tl.tensor,
    row_blocks: tl.tensor,
    head_groups: tl.tensor,
    group_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    POSITIONS: tl.constexpr,
    READ_ALL: tl.constexpr,
    ZERO_NAMED: tl.constexpr,
    STREAM: tl.constexpr,
) -> None:
    """Copy ROWS rows of a group of heads in both caches, but not those that cache_position names.

    These become zero (ZERO_NAMED) or are left to others.

    Args:
        key_source: ``[B,H,M,D]``; as are value_source, key_target and value_target.
        value_source: see key_source.
        cache_position: int64 ``[N]``.
        key_target: see key_source.
        value_target: see key_source.
        key_source_stride: strides of each tensor in elements.
        value_source_stride: likewise.
        position_stride: likewise.
        target_stride: of both targets.
        tile: number of the tile: batch entries, then groups of heads, then blocks of rows.
        new_len: N.
        max_len: M.
        row_blocks: how many blocks of ROWS there are.
        head_groups: how many groups of heads there are; a group shares the search through
            cache_position.
        group_heads: heads of a group.
        HEAD_DIM: D.
        BLOCK_DIM: D, rounded up to a power of two.
        ROWS: a power of two, at most 64.
        POSITIONS: see :func:`fast.copying.named_rows`.
        READ_ALL: read the first head's rows before it is known which are named, so that the two
            reads do not wait for each other; some bytes are then read for nothing.
        ZERO_NAMED: whether named rows become zero.
        STREAM: see :func:`fast.addressing.load`.
    """
    block = tile // row_blocks
    first_row = tile % row_blocks * ROWS
    first_head = block % head_groups * group_heads
    batch = (block // head_groups).to(tl.int64)
    row = (first_row + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    exists = row < max_len
    if READ_ALL:
        head = first_head.to(tl.int64)
        column = tl.arange(0, BLOCK_DIM)[None, :].to(tl.int64)
        inside = exists
        if BLOCK_DIM != HEAD_DIM:
            inside = inside & (column < HEAD_DIM)
        key_from = key_source + offset(batch, head, row, column, key_source_stride)
        value_from = value_source + offset(batch, head, row, column, value_source_stride)
        key = load(key_from, inside, STREAM)
        value = load(value_from, inside, STREAM)
    named = named_rows(cache_position, position_stride, new_len, first_row, ROWS, POSITIONS)
    kept = exists & (named == 0)
    writable = exists if ZERO_NAMED else kept
    if READ_ALL:
        target = offset(batch, head, row, column, target_stride)
        if ZERO_NAMED:
            key = tl.where(named, 0.0, key).to(key.dtype)
            value = tl.where(named, 0.0, value).to(value.dtype)
            store(key_target + target, key, inside, STREAM)
            store(value_target + target, value, inside, STREAM)
        else:
            store(key_target + target, key, inside & kept, STREAM)
            store(value_target + target, value, inside & kept, STREAM)
    i = 1 if READ_ALL else 0
    while i < group_heads:
        copy_rows(
            key_source,
            value_source,
            key_target,
            value_target,
            key_source_stride,
            value_source_stride,
            target_stride,
            target_stride,
            batch,
            (first_head + i).to(tl.int64),
            row,
            kept,
            writable,
            HEAD_DIM,
            BLOCK_DIM,
            STREAM,
        )
        i += 1


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "new_len",
        "max_len",
        "token_blocks",
        "head_blocks",
        "row_blocks",
        "head_groups",
        "group_heads",
        "token_programs",
    ]
)
def static_forward_kernel(
    key_states: tl.tensor,
    value_states: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    cache_position: tl.tensor,
    updated_key_cache: tl.tensor,
    updated_value_cache: tl.tensor,
    key_states_stride: tl.tuple,  # [B, H, N, D]
    value_states_stride: tl.tuple,  # [B, H, N, D]
    cos_stride: tl.tuple,  # [B, N, D]
    sin_stride: tl.tuple,  # [B, N, D]
    key_cache_stride: tl.tuple,  # [B, H, M, D]
    value_cache_stride: tl.tuple,  # [B, H, M, D]
    position_stride: tl.tensor,
    updated_key_cache_stride: tl.tuple,  # [B, H, M, D]
    updated_value_cache_stride: tl.tuple,  # [B, H, M, D]
    num_heads: tl.tensor,
    new_len: tl.tensor,
    max_len: tl.tensor,
    token_blocks: tl.tensor,
    head_blocks: tl.tensor,
    row_blocks: tl.tensor,
    head_groups: tl.tensor,
    group_heads: tl.tensor,
    token_programs: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PRECISE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    POSITIONS: tl.constexpr,
    READ_ALL: tl.constexpr,
    STREAM: tl.constexpr,
) -> None:
    """``kv_rope.static.forward``: rotate TOKENS tokens in HEADS heads, or keep ROWS rows.

    In place the caches are their own updates, and only token programs are launched.
    """
    program = tl.program_id(0)
    if program < token_programs:
        rotate_tile(
            key_states,
            value_states,
            cos,
            sin,
            cache_position,
            updated_key_cache,
            updated_value_cache,
            key_states_stride,
            value_states_stride,
            cos_stride,
            sin_stride,
            position_stride,
            updated_key_cache_stride,
            updated_value_cache_stride,
            program,
            num_heads,
            new_len,
            max_len,
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
        _keep_tile(
            key_cache,
            value_cache,
            cache_position,
            updated_key_cache,
            updated_value_cache,
            key_cache_stride,
            value_cache_stride,
            position_stride,
            updated_key_cache_stride,
            program - token_programs,
            new_len,
            max_len,
            row_blocks,
            head_groups,
            group_heads,
            HEAD_DIM,
            2 * BLOCK_HALF,
            ROWS,
            POSITIONS,
            READ_ALL,
            False,
            STREAM,
        )


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "new_len",
        "max_len",
        "token_blocks",
        "row_blocks",
        "head_groups",
        "group_heads",
        "token_programs",
    ]
)
def static_backward_kernel(
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
    grad_key_cache_input: tl.tensor,
    grad_value_cache_input: tl.tensor,
    grad_key_cache_stride: tl.tuple,  # [B, H, M, D]
    grad_value_cache_stride: tl.tuple,  # [B, H, M, D]
    key_states_stride: tl.tuple,  # [B, H, N, D]
    cos_stride: tl.tuple,  # [B, N, D]
    sin_stride: tl.tuple,  # [B, N, D]
    position_stride: tl.tensor,
    input_stride: tl.tuple,  # [B, H, M, D]
    num_heads: tl.tensor,
    new_len: tl.tensor,
    max_len: tl.tensor,
    token_blocks: tl.tensor,
    row_blocks: tl.tensor,
    head_groups: tl.tensor,
    group_heads: tl.tensor,
    token_programs: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    PRECISE_TOKENS: tl.constexpr,
    EXACT_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    POSITIONS: tl.constexpr,
    READ_ALL: tl.constexpr,
    STREAM: tl.constexpr,
) -> None:
    """``kv_rope.static.backward``: the gradients of TOKENS tokens, or of ROWS cache rows."""
    program = tl.program_id(0)
    if program < token_programs:
        token_gradients(
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
            program,
            new_len,
            max_len,
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
        _keep_tile(
            grad_key_cache,
            grad_value_cache,
            cache_position,
            grad_key_cache_input,
            grad_value_cache_input,
            grad_key_cache_stride,
            grad_value_cache_stride,
            position_stride,
            input_stride,
            program - token_programs,
            new_len,
            max_len,
            row_blocks,
            head_groups,
            group_heads,
            HEAD_DIM,
            2 * BLOCK_HALF,
            ROWS,
            POSITIONS,
            READ_ALL,
            True,
            STREAM,
        )
