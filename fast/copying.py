# mypy: allow-untyped-decorators
"""Copying rows of caches: bits, not values, in vectors of 16 bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from .addressing import load, offset, store


@triton.jit
def copy_rows(
    key_source: tl.tensor,
    value_source: tl.tensor,
    key_target: tl.tensor,
    value_target: tl.tensor,
    key_source_stride: tl.tuple,
    value_source_stride: tl.tuple,
    key_target_stride: tl.tuple,
    value_target_stride: tl.tuple,
    batch: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,  # [rows, 1]
    readable: tl.tensor,  # [rows, 1]
    writable: tl.tensor,  # [rows, 1]
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STREAM: tl.constexpr,
) -> None:
    """Copy rows of one head in both caches ``[B,H,rows,D]``.

    Rows that are writable but not readable become zero.
    """
    column = tl.arange(0, BLOCK_DIM)[None, :].to(tl.int64)
    if BLOCK_DIM != HEAD_DIM:
        readable = readable & (column < HEAD_DIM)
        writable = writable & (column < HEAD_DIM)
    key_from = key_source + offset(batch, head, row, column, key_source_stride)
    value_from = value_source + offset(batch, head, row, column, value_source_stride)
    key = load(key_from, readable, STREAM)
    value = load(value_from, readable, STREAM)
    key_to = key_target + offset(batch, head, row, column, key_target_stride)
    value_to = value_target + offset(batch, head, row, column, value_target_stride)
    store(key_to, key, writable, STREAM)
    store(value_to, value, writable, STREAM)


@triton.jit
def _or(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return a | b


@triton.jit
def named_rows(
    cache_position: tl.tensor,
    position_stride: tl.tensor,
    new_len: tl.tensor,
    first_row: tl.tensor,
    ROWS: tl.constexpr,
    POSITIONS: tl.constexpr,
) -> tl.tensor:
    """Which of the rows from ``first_row`` on does cache_position name?

    Every program looks through all positions for its own rows, so that no other launch has to build
    the inverse of cache_position first. A position sets one bit of a word, whatever the order.

    Args:
        cache_position: int64 ``[N]``, any values.
        position_stride: its stride.
        new_len: N.
        first_row: the first row asked about.
        ROWS: how many; at most 64.
        POSITIONS: entries looked at together.

    Returns:
        int1 ``[ROWS, 1]``.
    """
    entry = tl.arange(0, POSITIONS)
    word = tl.zeros([POSITIONS], tl.int64)
    start = 0
    # Not `range(0, new_len, ...)`: Triton 3.6's interpreter cannot do that under NumPy 2.4.
    while start < new_len:
        index = (start + entry).to(tl.int64)
        row = tl.load(cache_position + index * position_stride, mask=index < new_len, other=-1)
        place = row - first_row
        here = (place >= 0) & (place < ROWS)
        word = word | tl.where(here, tl.full([POSITIONS], 1, tl.int64) << (place & 63), 0)
        start += POSITIONS
    named = tl.reduce(word, 0, _or)
    return ((named >> tl.arange(0, ROWS).to(tl.int64)) & 1)[:, None] != 0
