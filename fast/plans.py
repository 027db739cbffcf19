"""From the inputs of an operator to its launch: checked shapes, the grid, strides, constants."""

from __future__ import annotations

from typing import Any

import torch
import triton

from .checks import check_index, check_new_rows, check_table, check_tensor, sizes_of
from .concat import concat_backward_kernel, concat_forward_kernel
from .launch import INTERPRETED, Plan, contiguous_strides, table_strides
from .launch_table import BackwardTile, ForwardTile, backward_tile, forward_tile
from .static import static_backward_kernel, static_forward_kernel

_WARP = 32
_MOST_ROWS_SEARCHED = 64
"""Cache rows that :func:`fast.copying.named_rows` asks about at once, at most."""
_MOST_POSITIONS = 1024
_FEW_POSITIONS = 64
"""Of so many rows one at most is named: reading all of them wastes less than waiting."""


def plan_concat_forward(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tile: ForwardTile | None = None,
) -> Plan:
    """Plan ``kv_rope.concat.forward``; the kernel takes the inputs and then the outputs.

    Args:
        key_states: ``[B,H,N,D]``.
        value_states: ``[B,H,N,D]``.
        cos: ``[B or 1,1,N,D]``.
        sin: ``[B or 1,1,N,D]``.
        key_cache: ``[B,H,C,D]``.
        value_cache: ``[B,H,C,D]``.
        tile: how to divide the work; by default as :mod:`fast.launch_table` says.

    Raises:
        ValueError: naming the tensor that does not fit.
    """
    sizes = sizes_of(key_states, "key_cache", key_cache)
    batch, num_heads, new_len, cached_len, head_dim = sizes
    check_tensor("value_states", value_states, (batch, num_heads, new_len, head_dim), key_states)
    check_table("cos", cos, (batch, 1, new_len, head_dim), key_states)
    check_table("sin", sin, (batch, 1, new_len, head_dim), key_states)
    check_tensor("key_cache", key_cache, (batch, num_heads, cached_len, head_dim), key_states)
    check_tensor("value_cache", value_cache, (batch, num_heads, cached_len, head_dim), key_states)

    updated = (batch, num_heads, cached_len + new_len, head_dim)
    moved = 4 * batch * num_heads * (cached_len + new_len) * head_dim * key_states.itemsize
    tile = tile or forward_tile(moved, interpreted=INTERPRETED)
    tokens, heads, token_blocks, head_blocks = _rotation_tile(tile, num_heads, new_len, head_dim)
    rows, row_blocks = _copy_tile(tile.copy_bytes, key_states, cached_len)
    token_programs = batch * head_blocks * token_blocks
    arguments = (
        key_states.stride(),
        value_states.stride(),
        table_strides(cos),
        table_strides(sin),
        key_cache.stride(),
        value_cache.stride(),
        contiguous_strides(updated),
        num_heads,
        new_len,
        cached_len,
        token_blocks,
        head_blocks,
        row_blocks,
        token_programs,
        head_dim,
        _block_half(head_dim),
        tokens,
        heads,
        _resort(tokens * heads, tile.warps, key_states)[0],
        rows,
        tile.stream,
    )
    programs = token_programs + batch * num_heads * row_blocks
    return Plan(concat_forward_kernel, programs, arguments, tile.warps, (updated, updated))


def plan_concat_backward(
    grad_updated_key_cache: torch.Tensor,
    grad_updated_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    tile: BackwardTile | None = None,
) -> Plan:
    """Plan ``kv_rope.concat.backward``; the kernel takes the inputs and then the outputs.

    Args:
        grad_updated_key_cache: ``[B,H,C+N,D]``.
        grad_updated_value_cache: ``[B,H,C+N,D]``.
        key_states: ``[B,H,N,D]``.
        cos: ``[B,1,N,D]``.
        sin: ``[B,1,N,D]``.
        tile: how to divide the work; by default as :mod:`fast.launch_table` says.

    Raises:
        ValueError: naming the tensor that does not fit.
    """
    sizes = sizes_of(key_states, "grad_updated_key_cache", grad_updated_key_cache)
    batch, num_heads, new_len, updated_len, head_dim = sizes
    check_new_rows("grad_updated_key_cache", updated_len, new_len)
    updated = (batch, num_heads, updated_len, head_dim)
    check_tensor("grad_updated_key_cache", grad_updated_key_cache, updated, key_states)
    check_tensor("grad_updated_value_cache", grad_updated_value_cache, updated, key_states)
    check_tensor("cos", cos, (batch, 1, new_len, head_dim), key_states)
    check_tensor("sin", sin, (batch, 1, new_len, head_dim), key_states)

    cached_len = updated_len - new_len
    states = (batch, num_heads, new_len, head_dim)
    table = (batch, 1, new_len, head_dim)
    cache = (batch, num_heads, cached_len, head_dim)
    tile = tile or backward_tile(batch * new_len, interpreted=INTERPRETED)
    tokens, token_blocks = _token_tile(tile, key_states)
    rows, row_blocks = _copy_tile(tile.copy_bytes, key_states, cached_len)
    token_programs = batch * token_blocks
    arguments = (
        grad_updated_key_cache.stride(),
        grad_updated_value_cache.stride(),
        key_states.stride(),
        table_strides(cos),
        table_strides(sin),
        contiguous_strides(cache),
        num_heads,
        new_len,
        cached_len,
        token_blocks,
        row_blocks,
        token_programs,
        head_dim,
        _block_half(head_dim),
        tokens,
        _divisor(num_heads, tile.heads_at_once),
        *_resort(tokens, tile.warps, key_states),
        rows,
        tile.stream,
    )
    programs = token_programs + batch * num_heads * row_blocks
    outputs = (states, states, table, table, cache, cache)
    return Plan(concat_backward_kernel, programs, arguments, tile.warps, outputs, tile.registers)


def plan_static_forward(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_position: torch.Tensor,
    tile: ForwardTile | None = None,
) -> Plan:
    """Plan ``kv_rope.static.forward``; the kernel takes the inputs and then the outputs.

    Args:
        key_states: ``[B,H,N,D]``.
        value_states: ``[B,H,N,D]``.
        cos: ``[B or 1,N,D]``.
        sin: ``[B or 1,N,D]``.
        key_cache: ``[B,H,M,D]``.
        value_cache: ``[B,H,M,D]``.
        cache_position: int64 ``[N]``.
        tile: how to divide the work; by default as :mod:`fast.launch_table` says.

    Raises:
        ValueError: naming the tensor that does not fit.
    """
    inputs = (key_states, value_states, cos, sin, key_cache, value_cache, cache_position)
    return _plan_static_forward(inputs, tile, in_place=False)


def plan_static_forward_(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_position: torch.Tensor,
    tile: ForwardTile | None = None,
) -> Plan:
    """Plan ``kv_rope.static.forward`` in place: the caches are the outputs too.

    Args and errors as for :func:`plan_static_forward`.
    """
    inputs = (key_states, value_states, cos, sin, key_cache, value_cache, cache_position)
    return _plan_static_forward(inputs, tile, in_place=True)


def _plan_static_forward(
    inputs: tuple[torch.Tensor, ...], tile: ForwardTile | None, *, in_place: bool
) -> Plan:
    key_states, value_states, cos, sin, key_cache, value_cache, cache_position = inputs
    sizes = sizes_of(key_states, "key_cache", key_cache)
    batch, num_heads, new_len, max_len, head_dim = sizes
    check_tensor("value_states", value_states, (batch, num_heads, new_len, head_dim), key_states)
    check_table("cos", cos, (batch, new_len, head_dim), key_states)
    check_table("sin", sin, (batch, new_len, head_dim), key_states)
    check_tensor("key_cache", key_cache, (batch, num_heads, max_len, head_dim), key_states)
    check_tensor("value_cache", value_cache, (batch, num_heads, max_len, head_dim), key_states)
    check_index(cache_position, new_len, key_states.device)

    caches = (batch, num_heads, max_len, head_dim)
    moved_rows = new_len if in_place else max_len
    moved = 4 * batch * num_heads * moved_rows * head_dim * key_states.itemsize
    tile = tile or forward_tile(moved, interpreted=INTERPRETED)
    tokens, heads, token_blocks, head_blocks = _rotation_tile(tile, num_heads, new_len, head_dim)
    rows, row_blocks = _copy_tile(tile.copy_bytes, key_states, max_len, _MOST_ROWS_SEARCHED)
    copy_heads = _copy_heads(tile.copy_programs, batch * row_blocks, num_heads, new_len)
    token_programs = batch * head_blocks * token_blocks
    fresh = contiguous_strides(caches)
    arguments = (
        key_states.stride(),
        value_states.stride(),
        table_strides(cos),
        table_strides(sin),
        key_cache.stride(),
        value_cache.stride(),
        cache_position.stride(0),
        key_cache.stride() if in_place else fresh,
        value_cache.stride() if in_place else fresh,
        num_heads,
        new_len,
        max_len,
        token_blocks,
        head_blocks,
        row_blocks,
        num_heads // copy_heads,
        copy_heads,
        token_programs,
        head_dim,
        _block_half(head_dim),
        tokens,
        heads,
        _resort(tokens * heads, tile.warps, key_states)[0],
        rows,
        _positions(new_len),
        new_len * _FEW_POSITIONS <= max_len,
        tile.stream,
    )
    copies = 0 if in_place else batch * (num_heads // copy_heads) * row_blocks
    outputs = () if in_place else (caches, caches)
    return Plan(static_forward_kernel, token_programs + copies, arguments, tile.warps, outputs)


def plan_static_backward(
    grad_key_cache: torch.Tensor,
    grad_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache_position: torch.Tensor,
    tile: BackwardTile | None = None,
) -> Plan:
    """Plan ``kv_rope.static.backward``; the kernel takes the inputs and then the outputs.

    Args:
        grad_key_cache: ``[B,H,M,D]``.
        grad_value_cache: ``[B,H,M,D]``.
        key_states: ``[B,H,N,D]``.
        cos: ``[B,N,D]``.
        sin: ``[B,N,D]``.
        cache_position: int64 ``[N]``.
        tile: how to divide the work; by default as :mod:`fast.launch_table` says.

    Raises:
        ValueError: naming the tensor that does not fit.
    """
    sizes = sizes_of(key_states, "grad_key_cache", grad_key_cache)
    batch, num_heads, new_len, max_len, head_dim = sizes
    caches = (batch, num_heads, max_len, head_dim)
    states = (batch, num_heads, new_len, head_dim)
    table = (batch, new_len, head_dim)
    check_tensor("grad_key_cache", grad_key_cache, caches, key_states)
    check_tensor("grad_value_cache", grad_value_cache, caches, key_states)
    check_tensor("cos", cos, table, key_states)
    check_tensor("sin", sin, table, key_states)
    check_index(cache_position, new_len, key_states.device)

    tile = tile or backward_tile(batch * new_len, interpreted=INTERPRETED)
    tokens, token_blocks = _token_tile(tile, key_states)
    rows, row_blocks = _copy_tile(tile.copy_bytes, key_states, max_len, _MOST_ROWS_SEARCHED)
    copy_heads = _copy_heads(tile.copy_programs, batch * row_blocks, num_heads, new_len)
    token_programs = batch * token_blocks
    arguments = (
        grad_key_cache.stride(),
        grad_value_cache.stride(),
        key_states.stride(),
        table_strides(cos),
        table_strides(sin),
        cache_position.stride(0),
        contiguous_strides(caches),
        num_heads,
        new_len,
        max_len,
        token_blocks,
        row_blocks,
        num_heads // copy_heads,
        copy_heads,
        token_programs,
        head_dim,
        _block_half(head_dim),
        tokens,
        _divisor(num_heads, tile.heads_at_once),
        *_resort(tokens, tile.warps, key_states),
        rows,
        _positions(new_len),
        new_len * _FEW_POSITIONS <= max_len,
        tile.stream,
    )
    programs = token_programs + batch * (num_heads // copy_heads) * row_blocks
    outputs = (states, states, table, table, caches, caches)
    return Plan(static_backward_kernel, programs, arguments, tile.warps, outputs, tile.registers)


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is no smaller, 1 at least."""
    power: Any = triton.next_power_of_2(max(1, size))
    return int(power)


def _divisor(number: int, limit: int) -> int:
    """Return the largest divisor up to a limit."""
    return next(part for part in range(min(number, limit), 0, -1) if number % part == 0)


def _block_half(head_dim: int) -> int:
    return _power_of_two(head_dim // 2)


def _rotation_tile(
    tile: ForwardTile, num_heads: int, new_len: int, head_dim: int
) -> tuple[int, int, int, int]:
    """Return tokens and heads of a tile, and how many blocks there are of either."""
    rows = max(1, tile.rotate_elements // _block_half(head_dim))
    tokens = min(rows, _power_of_two(new_len))
    heads = min(rows // tokens, _power_of_two(num_heads))
    return tokens, heads, triton.cdiv(new_len, tokens), triton.cdiv(num_heads, heads)


def _token_tile(tile: BackwardTile, key_states: torch.Tensor) -> tuple[int, int]:
    """Return the tokens of a tile, and how many blocks of them there are."""
    _, _, new_len, head_dim = key_states.shape
    elements = tile.token_elements * 2 // key_states.itemsize
    tokens = min(max(1, elements // _block_half(head_dim)), _power_of_two(new_len))
    return tokens, triton.cdiv(new_len, tokens)


def _copy_tile(
    copy_bytes: int, like: torch.Tensor, num_rows: int, limit: int = 1 << 30
) -> tuple[int, int]:
    """Return the rows that a copying program takes, and how many blocks of them there are."""
    row_bytes = 2 * _block_half(like.shape[3]) * like.itemsize
    rows = min(max(1, copy_bytes // row_bytes), _power_of_two(num_rows), limit)
    return rows, triton.cdiv(num_rows, rows)


def _copy_heads(programs: int, blocks: int, num_heads: int, new_len: int) -> int:
    """Return how many heads share one search through cache_position."""
    if new_len <= _FEW_POSITIONS and not INTERPRETED:
        return 1
    enough = (
        heads
        for heads in range(num_heads, 0, -1)
        if num_heads % heads == 0 and blocks * (num_heads // heads) >= programs
    )
    return next(enough, 1)


def _positions(new_len: int) -> int:
    return min(_MOST_POSITIONS, _power_of_two(new_len))


def _resort(rows: int, warps: int, like: torch.Tensor) -> tuple[int, int]:
    """Return how many rows, of a tile's, to work on at a time in float64, and in integers.

    These are rare, and must not take registers from the usual way: one element of a thread. For
    float32 inputs float64 is the usual way, so all rows.
    """
    if INTERPRETED:
        return rows, rows
    few = max(1, warps * _WARP // _block_half(like.shape[3]))
    precise = rows if like.dtype == torch.float32 else min(rows, few)
    return precise, min(precise, few)
