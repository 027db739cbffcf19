"""The orders of ``cache_position``: which rows the new tokens are written to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ...inputs import Draws

Positions = Callable[[int, int, Draws], NDArray[np.int64]]
"""Given the number of new tokens, the rows of the cache (at least as many) and a source of random
numbers, distinct rows."""


def _first(count: int, _rows: int, _draws: Draws) -> NDArray[np.int64]:
    return np.arange(count)


def _shuffled(count: int, rows: int, draws: Draws) -> NDArray[np.int64]:
    chosen = draws.permutation("cache_position", rows)[:count]
    # A few rows may come out in order by chance, which would expose nothing.
    ascends = count > 1 and bool(np.all(np.diff(chosen) > 0))
    return chosen[::-1].copy() if ascends else chosen


def _offset(count: int, rows: int, _draws: Draws) -> NDArray[np.int64]:
    return np.arange(count) + (rows - count) // 2


def _last(count: int, rows: int, _draws: Draws) -> NDArray[np.int64]:
    return np.arange(rows - count, rows)


def _descending(count: int, rows: int, _draws: Draws) -> NDArray[np.int64]:
    return np.arange(count)[::-1] + (rows - count) // 2


def _gaps(count: int, rows: int, _draws: Draws) -> NDArray[np.int64]:
    step = rows // max(1, count)
    start = min(1, rows - 1 - step * (count - 1)) if count else 0
    return np.arange(count) * step + start


def _ascending_gaps(count: int, rows: int, draws: Draws) -> NDArray[np.int64]:
    return np.sort(_shuffled(count, rows, draws))


def _ends(count: int, rows: int, _draws: Draws) -> NDArray[np.int64]:
    step = np.arange(count) // 2
    return np.where(np.arange(count) % 2 == 0, rows - 1 - step, step)


POSITIONS: Mapping[str, Positions] = {
    "first": _first,
    "ends": _ends,
    "shuffled": _shuffled,
    "offset": _offset,
    "last": _last,
    "descending": _descending,
    "gaps": _gaps,
    "ascending_gaps": _ascending_gaps,
}
"""By name. ``first`` is 0, 1, 2, ...; ``offset`` and ``descending`` lie in the middle of the cache,
``last`` at its end; ``ends`` takes rows from both ends in turn."""
