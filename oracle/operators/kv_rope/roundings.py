"""Inputs whose results lie where rounding is hardest: ties, near-ties, cancellation."""

from __future__ import annotations

import numpy as np

from ...definition import Case
from ...inputs import Draws, encode
from ...rounding import format_of
from .arrays import Array, Arrays, Rotation, fill, half_width, is_backward, sign_bit
from .constraints import TABLES_PAIRED
from .distributions import start_shuffled


def ties(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Make half of all rotated elements exact ties, of both parities, up to carries.

    In even heads the first half of a row runs through the significands 1 + j / 2^(p-1) and the
    second half is +-1; in odd heads the other way round. With cos = 1 and sin = half an ulp of
    1, each running element gets exactly half an ulp more or less. Rows differ by powers of two.
    """
    start_shuffled(case, draws, arrays)
    _tie_tables(arrays, case, 1.0)
    rotation = Rotation(arrays)
    rotation.rows[...] = _tie_rows(rotation.rows.shape, case.dtype, 1.0)
    rotation.store()


def near_ties(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Miss the same ties by one part in 2^(2p-2) of the half ulp: inexact, and decided by it."""
    start_shuffled(case, draws, arrays)
    ulp = 2.0 ** (1 - format_of(case.dtype).precision)
    _tie_tables(arrays, case, 1.0 - ulp)
    rotation = Rotation(arrays)
    rotation.rows[...] = _tie_rows(rotation.rows.shape, case.dtype, 1.0 + ulp)
    rotation.store()


def _tie_tables(arrays: Arrays, case: Case, factor: float) -> None:
    fill(arrays["cos"], 1.0, case.dtype)
    fill(arrays["sin"], factor * 2.0 ** -format_of(case.dtype).precision, case.dtype)


def _tie_rows(shape: tuple[int, ...], dtype: str, unit: float) -> Array:
    _, heads, count, width = shape
    half = width // 2
    steps = 2 ** (format_of(dtype).precision - 1)
    head, row, column = np.ogrid[:heads, :count, :half]
    # The last significand, of which half an ulp more carries into the exponent, comes first.
    running = 1.0 + ((steps - 1 - column - head // 2 * half) % steps) / steps
    sign = np.where((column + row) % 2 == 0, unit, -unit)
    first = np.where(head % 2 == 0, running, sign)
    second = np.where(head % 2 == 0, sign, running)
    rows = np.concatenate(np.broadcast_arrays(first, second), axis=-1)
    signed = np.where(row // 2 % 2 == 0, rows, -rows)
    return np.broadcast_to(encode(np.ldexp(signed, row % 16 - 8), dtype), shape)


def cancellation(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Make both products of the first half agree but for their last bits."""
    start_shuffled(case, draws, arrays)
    half = half_width(case)
    rotation = Rotation(arrays)
    nudge = np.asarray(draws.permutation("nudge", half) % 3, dtype=rotation.rows.dtype)
    if not nudge.any():
        # So few columns may draw no nudge at all, and would then cancel to zero everywhere.
        nudge += 1
    rotation.rows[..., half:] = rotation.rows[..., :half] + nudge
    rotation.store()
    # Forward: k1 cos1 - k2 sin1; backward: g1 cos1 + g2 sin2 with its sign turned.
    if not is_backward(arrays):
        arrays["sin"][..., :half] = arrays["cos"][..., :half]
        return
    turned = arrays["cos"][..., :half] ^ sign_bit(arrays["cos"])
    arrays["sin"][..., half:] = turned
    if TABLES_PAIRED in case.constraints:
        # The first halves are about to be copied over the second ones.
        arrays["sin"][..., :half] = turned
