"""Inputs of unusual size: near zero, subnormal, near overflow."""

from __future__ import annotations

from ...definition import Case
from ...inputs import Draws
from ...patterns import scaled
from ...rounding import format_of
from .arrays import POSITION, TABLES, Arrays, Rotation
from .distributions import start_shuffled


def small(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Scale states and caches so that everything lies within 0.01 of zero.

    The factor is 2^-12, in float16 2^-9, where 2^-12 would make zeros of some numbers.
    """
    start_shuffled(case, draws, arrays)
    exponent = -9 if case.dtype == "float16" else -12
    for name, array in arrays.items():
        if name not in TABLES and name != POSITION:
            array[...] = scaled(array, exponent, case.dtype)


def _scale_rows(case: Case, arrays: Arrays, exponents: tuple[int, ...]) -> None:
    """Scale the rotated rows by powers of two in turn."""
    rotation = Rotation(arrays)
    for row in range(rotation.rows.shape[2]):
        exponent = exponents[row % len(exponents)]
        rotation.rows[:, :, row] = scaled(rotation.rows[:, :, row], exponent, case.dtype)
    rotation.store()


def subnormal(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Bring the rotated rows to the smallest normal and to subnormal numbers of the type."""
    start_shuffled(case, draws, arrays)
    fmt = format_of(case.dtype)
    below = (0, -2, -4, 1 - fmt.precision)
    _scale_rows(case, arrays, tuple(fmt.min_exponent + step for step in below))


def huge(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Bring the rotated rows to the largest numbers of the type and past them."""
    start_shuffled(case, draws, arrays)
    top = format_of(case.dtype).max_exponent
    _scale_rows(case, arrays, (top - 7, top - 2, top - 1, top))
