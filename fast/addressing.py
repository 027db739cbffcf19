# mypy: allow-untyped-decorators
# ruff: noqa: RET505  Triton compiles what follows an `if`, also after a `return` in it
"""Where elements lie: offsets of any strides, rows named by ``cache_position``, tiles of rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def offset(
    batch: tl.tensor, head: tl.tensor, row: tl.tensor, column: tl.tensor, stride: tl.tuple
) -> tl.tensor:
    """Offset in elements into ``[B,H,rows,D]`` memory; the indices are 64-bit."""
    return batch * stride[0] + head * stride[1] + row * stride[2] + column * stride[3]


@triton.jit
def table_offset(
    batch: tl.tensor, row: tl.tensor, column: tl.tensor, stride: tl.tuple
) -> tl.tensor:
    """Offset in elements into a table without heads, ``[B,N,D]``; the indices are 64-bit."""
    return batch * stride[0] + row * stride[1] + column * stride[2]


@triton.jit
def cache_row(
    token: tl.tensor,
    new_len: tl.tensor,
    cached_len: tl.tensor,
    cache_position: tl.tensor,
    position_stride: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the cache row of new tokens, and whether there is one.

    Args:
        token: int64.
        new_len: N; tokens from there on have no row.
        cached_len: C, the row of token 0, or the capacity M where rows are named.
        cache_position: int64 ``[N]``, or None where new rows follow the cached ones.
        position_stride: its stride.
    """
    exists = token < new_len
    if cache_position is None:
        return token + cached_len, exists
    else:
        row = tl.load(cache_position + token * position_stride, mask=exists, other=-1)
        return row, exists & (row >= 0) & (row < cached_len)


@triton.jit
def load(pointer: tl.tensor, mask: tl.tensor, STREAM: tl.constexpr) -> tl.tensor:
    """Load what is needed once; zero where masked. STREAM: leave the L1 cache to others."""
    if STREAM == 1:
        return tl.load(pointer, mask=mask, other=0.0, eviction_policy="evict_first")
    elif STREAM == 2:
        return tl.load(pointer, mask=mask, other=0.0, cache_modifier=".cg")
    else:
        return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def store(pointer: tl.tensor, value: tl.tensor, mask: tl.tensor, STREAM: tl.constexpr) -> None:
    """Store what this call will not read. STREAM: let it leave the caches first."""
    if STREAM == 1:
        tl.store(pointer, value, mask=mask, eviction_policy="evict_first")
    elif STREAM == 2:
        tl.store(pointer, value, mask=mask, cache_modifier=".cs")
    else:
        tl.store(pointer, value, mask=mask)
