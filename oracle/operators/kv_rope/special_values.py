"""Inputs with NaNs, infinities, signed zeros and extremes: copied, rotated, overwritten."""

from __future__ import annotations

import numpy as np

from ...definition import Case
from ...inputs import Draws
from ...patterns import every_pattern, signalling_nans, specials
from .arrays import (
    CACHES,
    POSITION,
    Array,
    Arrays,
    Rotation,
    caches,
    fill,
    half_width,
    is_backward,
    is_static,
    old_rows,
)
from .distributions import start_in_the_middle, start_shuffled

_SHORT = 2048
"""Elements below which running through all patterns is unlikely to meet a NaN."""


def special_copies(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Put every 16-bit pattern into what is only copied: NaN payloads, subnormals, -0.0."""
    start_shuffled(case, draws, arrays)
    copied = (
        "value_states",
        "key_cache",
        "value_cache",
        "grad_value_cache",
        "grad_updated_value_cache",
    )
    for place, name in enumerate(copied):
        if name in arrays:
            step = 1 if place % 2 else 65535
            arrays[name][...] = _patterns(arrays[name].shape, case.dtype, 4099 * place, step)
    if is_static(arrays) or is_backward(arrays):
        # Here only some rows of a cache are copied to where it is, so these must hold all patterns.
        for name, step in zip(caches(arrays), (1, 65535), strict=True):
            rows = old_rows(arrays, name)
            shape = arrays[name][:, :, rows].shape
            arrays[name][:, :, rows] = _patterns(shape, case.dtype, 0, step)


def _patterns(shape: tuple[int, ...], dtype: str, start: int, step: int) -> Array:
    """Return every pattern in turn, with special values in every other place of a short array."""
    patterns = every_pattern(shape, dtype, start, step)
    if patterns.size < _SHORT:
        special = np.concatenate((signalling_nans((6,), dtype), specials(dtype)))
        flat = patterns.reshape(-1)
        flat[::2] = np.resize(special, flat[::2].shape)
    return patterns


def signalling_copies(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Put signalling NaNs of all payloads into everything that is only copied."""
    start_shuffled(case, draws, arrays)
    start = 0
    for name in ("value_states", *caches(arrays)):
        if name not in arrays:
            continue
        values = name == "value_states" or "value" in name
        rows = slice(None) if values else old_rows(arrays, name)
        shape = arrays[name][:, :, rows].shape
        arrays[name][:, :, rows] = signalling_nans(shape, case.dtype, start)
        start += 7


def special_rotations(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Put infinities, NaNs, zeros and extremes at scattered places of rows and tables.

    In the first columns every special value of the rows meets zeros in cos and in sin, as
    infinity times zero is NaN and a skipped term would hide it.
    """
    start_shuffled(case, draws, arrays)
    patterns = specials(case.dtype)
    half = half_width(case)
    rotation = Rotation(arrays)
    rows = rotation.rows.reshape(-1)
    rows[5::11] = np.resize(patterns, rows[5::11].shape)
    # A narrow head would hold nothing else, so every second token keeps its numbers there.
    tokens = slice(None) if 2 * half >= patterns.size else slice(0, None, 2)
    first = rotation.rows[:, :, tokens, : patterns.size]
    first[...] = np.resize(patterns, first.shape)
    rotation.store()
    zeros = min(patterns.size, half)
    for name, offset, stride, start in (("cos", 3, 29, 0), ("sin", 17, 31, half)):
        table = arrays[name].reshape(-1)
        table[offset::stride] = np.resize(patterns, table[offset::stride].shape)
        fill(arrays[name][..., start : start + zeros], 0.0, case.dtype)


def non_finite_new_rows(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Put NaN and infinities into the rows of static caches that are cleared or overwritten."""
    start_shuffled(case, draws, arrays)
    patterns = specials(case.dtype)
    for name in caches(arrays):
        for row in arrays[POSITION]:
            line = arrays[name][:, :, row]
            line[..., 1::3] = np.resize(patterns, line[..., 1::3].shape)


def non_finite_last_rows(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Put NaN into the last row of the values and of every cache (and its last old row)."""
    start_in_the_middle(case, draws, arrays)
    nan = specials(case.dtype)[1]
    for name in ("value_states", *CACHES):
        if name in arrays and arrays[name].shape[2]:
            arrays[name][:, :, -1, ::2] = nan
            rows = np.arange(arrays[name].shape[2])
            if name in CACHES and (old := rows[old_rows(arrays, name)]).size:
                arrays[name][:, :, old[-1], ::2] = nan
