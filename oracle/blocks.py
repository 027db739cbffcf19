"""Cutting outputs into blocks of bounded size: what operators use to stream their meaning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import torch

Selection = slice | torch.Tensor

_MOST_RUNS = 64


def tiles(shape: Sequence[int], limit: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices that cut a shape into tiles of at most ``limit`` elements, in index order.

    Args:
        shape: the sizes; a shape without elements has no tiles.
        limit: the most elements of a tile; a tile holds one element at least.

    Yields:
        One slice of step one per dimension.
    """
    if math.prod(shape) == 0:
        return
    cut = 0
    while cut < len(shape) - 1 and math.prod(shape[cut + 1 :]) > limit:
        cut += 1
    step = max(1, limit // math.prod(shape[cut + 1 :]))
    leading = [[slice(i, i + 1) for i in range(size)] for size in shape[:cut]]
    stepped = [slice(i, min(i + step, shape[cut])) for i in range(0, shape[cut], step)]
    trailing = tuple(slice(0, size) for size in shape[cut + 1 :])
    for prefix in product(*leading, stepped):
        yield prefix + trailing


def row_selections(rows: torch.Tensor) -> list[Selection]:
    """Return selections that together name ascending rows: slices where runs are few.

    A slice selects without copying; rows scattered in more than 64 runs are selected by index.

    Args:
        rows: int64 ``[count]``, strictly ascending.
    """
    if rows.numel() == 0:
        return []
    breaks = (torch.diff(rows) != 1).nonzero().squeeze(1) + 1
    if breaks.numel() >= _MOST_RUNS:
        return [rows]
    ends = [0, *breaks.tolist(), rows.numel()]
    firsts = [int(rows[start]) for start in ends[:-1]]
    return [
        slice(first, first + stop - start)
        for first, start, stop in zip(firsts, ends[:-1], ends[1:], strict=True)
    ]


def selection_size(selection: Selection) -> int:
    """Return how many rows a selection names."""
    if isinstance(selection, slice):
        return int(selection.stop - selection.start)
    return selection.numel()


def within(selection: Selection, part: slice) -> Selection:
    """Return the part of a selection that a slice of it names."""
    if isinstance(selection, slice):
        return slice(selection.start + part.start, selection.start + part.stop)
    return selection[part]
