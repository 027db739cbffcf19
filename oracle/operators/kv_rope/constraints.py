"""What inputs may be restricted to, as a kernel's author may claim after ``--where``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...definition import Case, Constraint
from .arrays import POSITION, TABLES, Array, Arrays, caches, half_width

TABLES_PAIRED = "tables=paired"


def pair_tables(case: Case, arrays: Arrays) -> None:
    """Copy the first half of cos, and of sin, over the second."""
    half = half_width(case)
    for name in TABLES:
        arrays[name][..., half:] = arrays[name][..., :half]


def sort_positions(_case: Case, arrays: Arrays) -> None:
    """Put the positions in ascending order."""
    _move_rows(arrays, np.sort(arrays[POSITION]))


def join_positions(_case: Case, arrays: Arrays) -> None:
    """Let the positions follow each other, from the smallest one on or as near as there is room."""
    position = arrays[POSITION]
    if position.size:
        capacity = arrays[caches(arrays)[0]].shape[2]
        first = min(int(position.min()), capacity - position.size)
        _move_rows(arrays, np.arange(first, first + position.size))


def _move_rows(arrays: Arrays, position: Array) -> None:
    """Change the positions, and move the rows of the caches with them.

    What a kind of inputs put into a token's row, or into a row that is no token's, stays there.
    """
    before = arrays[POSITION].copy()
    if np.array_equal(before, position):
        return
    arrays[POSITION][:] = position
    for name in caches(arrays):
        rows = np.arange(arrays[name].shape[2])
        source = np.empty_like(rows)
        source[position] = before
        source[np.delete(rows, position)] = np.delete(rows, before)
        arrays[name][...] = arrays[name][:, :, source]


_PAIRED: Mapping[str, Constraint] = {
    TABLES_PAIRED: Constraint(
        "both halves of cos, and of sin, are equal, as in real models", pair_tables
    )
}

CONCAT_CONSTRAINTS = _PAIRED

STATIC_CONSTRAINTS: Mapping[str, Constraint] = {
    **_PAIRED,
    "positions=ascending": Constraint(
        "cache_position ascends, with or without gaps", sort_positions
    ),
    "positions=consecutive": Constraint(
        "cache_position counts up by one, from any row on", join_positions
    ),
}
