"""Inputs that show which element, and which part of which table, went where."""

from __future__ import annotations

import numpy as np

from ...definition import Case, InputKind
from ...inputs import Draws, encode
from ...patterns import codes
from .angles import rope_tables
from .arrays import POSITION, TABLES, Arrays, fill, half_width
from .distributions import start_shuffled


def _code_all(case: Case, arrays: Arrays) -> None:
    """Give the states and caches codes: elements of one tensor tell where they came from.

    Tensors start at different codes, so that equal places of two tensors differ.
    """
    start = 0
    for name, array in arrays.items():
        if name in TABLES or name == POSITION:
            continue
        array[...] = codes(array.shape, case.dtype, start)
        start += array.size + 4099


def codes_with_tables(cos: float, sin: float) -> InputKind:
    """Return a kind with codes everywhere and constant tables."""

    def draw(case: Case, draws: Draws, arrays: Arrays) -> None:
        start_shuffled(case, draws, arrays)
        _code_all(case, arrays)
        fill(arrays["cos"], cos, case.dtype)
        fill(arrays["sin"], sin, case.dtype)

    return draw


def halves_differ(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Give the two halves of cos, and of sin, four different powers of two."""
    start_shuffled(case, draws, arrays)
    _code_all(case, arrays)
    half = half_width(case)
    for name, first, second in (("cos", 1.0, 2.0), ("sin", 0.5, 4.0)):
        fill(arrays[name][..., :half], first, case.dtype)
        fill(arrays[name][..., half:], second, case.dtype)


def tables_by_batch(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Turn even batch entries by 0 degrees and odd ones by 90."""
    start_shuffled(case, draws, arrays)
    for name, even, odd in (("cos", 1.0, 0.0), ("sin", 0.0, 1.0)):
        fill(arrays[name][0::2], even, case.dtype)
        fill(arrays[name][1::2], odd, case.dtype)


def tables_by_position(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Scale every new position by its own power of two, without turning it."""
    start_shuffled(case, draws, arrays)
    _code_all(case, arrays)
    count = case.sizes["new_seq_len"]
    powers = encode(2.0 ** (np.arange(count) % 16 - 8.0), case.dtype)
    arrays["cos"][...] = powers[:, None]
    fill(arrays["sin"], 0.0, case.dtype)


def paired_tables(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Make both halves of cos, and of sin, equal, as real models do."""
    start_shuffled(case, draws, arrays)
    half = half_width(case)
    for name in TABLES:
        arrays[name][..., half:] = arrays[name][..., :half]


def large_angles(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Give the tokens the tables of positions 255..260, and of positions up to a million.

    Half precision cannot tell 256 from 257, and float32 is off by 0.06 rad at a million: a kernel
    that makes tables of its own, or reads another row, shows.
    """
    start_shuffled(case, draws, arrays)
    count = case.sizes["new_seq_len"]
    early = min(6, -(-count // 2))
    positions = (*range(255, 255 + early), *range(10**6 - count + early + 1, 10**6 + 1))
    for name, table in zip(TABLES, rope_tables(positions, case.sizes["head_dim"]), strict=True):
        arrays[name][...] = encode(table, case.dtype)
