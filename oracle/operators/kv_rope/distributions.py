"""Independent random inputs, as the official suites draw them, and what crafted kinds start from.

The suite of the concatenating update draws states and caches from N(0,1), and cos and sin as
cosine and sine of clamped normal angles, independently; the suite of the static one draws all
tensors from N(0,1), cos and sin too, with cache_position = 0, 1, 2, ... The operators that have no
published suite are drawn like the other direction of their layout.
"""

from __future__ import annotations

from ...definition import Case, InputKind
from ...inputs import Draws
from .arrays import POSITION, Arrays, is_static
from .positions import POSITIONS

_CONCAT_TABLES = {"cos": "cosine", "sin": "sine"}


def random_at(positions: str) -> InputKind:
    """Return the kind that draws as the suite does, with the rows of that name in static caches."""

    def draw(case: Case, draws: Draws, arrays: Arrays) -> None:
        static = is_static(arrays)
        if static:
            sizes = case.sizes
            arrays[POSITION][:] = POSITIONS[positions](
                sizes["new_seq_len"], sizes["max_seq_len"], draws
            )
        for name, array in arrays.items():
            if name != POSITION:
                table = "normal" if static else _CONCAT_TABLES.get(name, "normal")
                draws.table(name, array, table)

    return draw


official = random_at("first")
start_shuffled = random_at("shuffled")
start_in_the_middle = random_at("offset")
