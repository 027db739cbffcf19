"""How the cases' inputs are drawn: the official distributions, and one kind for each fault.

Every kind fills the arrays of bit patterns it is given. What forward and backward have in common
is that some rows are *rotated* (``key_states`` there, the rows of ``grad_key_cache`` that
``cache_position`` names here) by the tables ``cos`` and ``sin``; kinds that craft a rotation work
on those, through :class:`Rotation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...definition import Case, InputKind
from ...inputs import Draws, encode
from ...patterns import codes, every_pattern, scaled, specials
from ...rounding import format_of

Array = NDArray[Any]
Arrays = Mapping[str, Array]

CACHES = ("key_cache", "value_cache", "grad_key_cache", "grad_value_cache")
TABLES = ("cos", "sin")


class Rotation:
    """The rows that a case rotates and the tables it rotates them by.

    Attributes:
        rows: a copy of the rotated rows, bit patterns ``[B,H,N,D]``; write back with ``store``.
        cos: the table's array, ``[B,1,N,D]`` or ``[B,N,D]``, filled in place.
        sin: likewise.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self.cos, self.sin = arrays["cos"], arrays["sin"]
        if "grad_key_cache" in arrays:
            self.rows = arrays["grad_key_cache"][:, :, arrays["cache_position"]]
        else:
            self.rows = arrays["key_states"].copy()

    def store(self) -> None:
        """Write ``rows`` back to where the operator reads them."""
        if "grad_key_cache" in self._arrays:
            self._arrays["grad_key_cache"][:, :, self._arrays["cache_position"]] = self.rows
        else:
            self._arrays["key_states"][...] = self.rows


def _fill(array: Array, value: float, dtype: str) -> None:
    array[...] = encode(value, dtype)


# The official distributions.


def _normal(draws: Draws, arrays: Arrays) -> None:
    for name, array in arrays.items():
        if name != "cache_position":
            draws.table(name, array)


def official_forward(_case: Case, draws: Draws, arrays: Arrays) -> None:
    """Draw states and caches from N(0,1), cos and sin of independent clamped normal angles."""
    for name, array in arrays.items():
        table = {"cos": "cosine", "sin": "sine"}.get(name, "normal")
        draws.table(name, array, table)


def official_backward(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Draw every floating tensor from N(0,1), cos and sin too; cache_position = 0, 1, ..."""
    arrays["cache_position"][:] = np.arange(case.sizes["new_seq_len"])
    _normal(draws, arrays)


# Positions.

Positions = Callable[[int, int, Draws], NDArray[np.int64]]


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
    return np.arange(count) * (rows // max(1, count)) + 1


def _ascending_gaps(count: int, rows: int, draws: Draws) -> NDArray[np.int64]:
    return np.sort(_shuffled(count, rows, draws))


def _ends(count: int, rows: int, _draws: Draws) -> NDArray[np.int64]:
    step = np.arange(count) // 2
    return np.where(np.arange(count) % 2 == 0, rows - 1 - step, step)


POSITIONS: Mapping[str, Positions] = {
    "ends": _ends,
    "shuffled": _shuffled,
    "offset": _offset,
    "last": _last,
    "descending": _descending,
    "gaps": _gaps,
    "ascending_gaps": _ascending_gaps,
}


def _start(case: Case, draws: Draws, arrays: Arrays, positions: str = "shuffled") -> None:
    """Draw everything as the suite does, with shuffled positions: what crafted kinds start from."""
    if "cache_position" in arrays:
        sizes = case.sizes
        chosen = POSITIONS[positions](sizes["new_seq_len"], sizes["max_seq_len"], draws)
        arrays["cache_position"][:] = chosen
        _normal(draws, arrays)
    else:
        official_forward(case, draws, arrays)


def random_at(positions: str) -> InputKind:
    """Return the kind that draws as the suite does, at the given positions."""

    def draw(case: Case, draws: Draws, arrays: Arrays) -> None:
        _start(case, draws, arrays, positions)

    return draw


# Which element went where.


def _code_all(case: Case, arrays: Arrays) -> None:
    """Give the states and caches codes: elements of one tensor tell where they came from.

    Tensors start at different codes, so that equal places of two tensors differ.
    """
    start = 0
    for name, array in arrays.items():
        if name in TABLES or name == "cache_position":
            continue
        array[...] = codes(array.shape, case.dtype, start)
        start += array.size + 4099


def code_with_tables(cos: float, sin: float) -> InputKind:
    """Return a kind with codes everywhere and constant tables."""

    def draw(case: Case, draws: Draws, arrays: Arrays) -> None:
        _start(case, draws, arrays)
        _code_all(case, arrays)
        _fill(arrays["cos"], cos, case.dtype)
        _fill(arrays["sin"], sin, case.dtype)

    return draw


def halves_differ(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Give the two halves of cos, and of sin, four different powers of two."""
    _start(case, draws, arrays)
    _code_all(case, arrays)
    half = case.sizes["head_dim"] // 2
    for name, first, second in (("cos", 1.0, 2.0), ("sin", 0.5, 4.0)):
        _fill(arrays[name][..., :half], first, case.dtype)
        _fill(arrays[name][..., half:], second, case.dtype)


def tables_by_batch(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Turn even batch entries by 0 degrees and odd ones by 90."""
    _start(case, draws, arrays)
    for name, even, odd in (("cos", 1.0, 0.0), ("sin", 0.0, 1.0)):
        _fill(arrays[name][0::2], even, case.dtype)
        _fill(arrays[name][1::2], odd, case.dtype)


def tables_by_position(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Scale every new position by its own power of two, without turning it."""
    _start(case, draws, arrays)
    _code_all(case, arrays)
    count = case.sizes["new_seq_len"]
    powers = encode(2.0 ** (np.arange(count) % 16 - 8.0), case.dtype)
    arrays["cos"][...] = powers[:, None]
    _fill(arrays["sin"], 0.0, case.dtype)


def paired_tables(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Make both halves of cos, and of sin, equal, as real models do."""
    _start(case, draws, arrays)
    half = case.sizes["head_dim"] // 2
    for name in TABLES:
        arrays[name][..., half:] = arrays[name][..., :half]


# Magnitudes.


def small(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Scale states and caches by 2^-12: everything lies within 0.01 of zero."""
    _start(case, draws, arrays)
    for name, array in arrays.items():
        if name not in TABLES and name != "cache_position":
            array[...] = scaled(array, -12, case.dtype)


def scaled_rows(*exponents: int) -> InputKind:
    """Return a kind whose rotated rows are scaled by the given powers of two in turn."""

    def draw(case: Case, draws: Draws, arrays: Arrays) -> None:
        _start(case, draws, arrays)
        rotation = Rotation(arrays)
        for row in range(rotation.rows.shape[2]):
            exponent = exponents[row % len(exponents)]
            rotation.rows[:, :, row] = scaled(rotation.rows[:, :, row], exponent, case.dtype)
        rotation.store()

    return draw


# Rounding.


def ties(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Make half of all rotated elements exact ties, of both parities, up to carries.

    In even heads the first half of a row runs through the significands 1 + j / 2^(p-1) and the
    second half is +-1; in odd heads the other way round. With cos = 1 and sin = half an ulp of
    1, each running element gets exactly half an ulp more or less. Rows differ by powers of two.
    """
    _start(case, draws, arrays)
    _tie_tables(arrays, case, 1.0)
    rotation = Rotation(arrays)
    rotation.rows[...] = _tie_rows(rotation.rows.shape, case.dtype, 1.0)
    rotation.store()


def near_ties(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Miss the same ties by one part in 2^14 of the half ulp: inexact, and decided by it."""
    _start(case, draws, arrays)
    ulp = 2.0 ** (1 - format_of(case.dtype).precision)
    _tie_tables(arrays, case, 1.0 - ulp)
    rotation = Rotation(arrays)
    rotation.rows[...] = _tie_rows(rotation.rows.shape, case.dtype, 1.0 + ulp)
    rotation.store()


def _tie_tables(arrays: Arrays, case: Case, factor: float) -> None:
    _fill(arrays["cos"], 1.0, case.dtype)
    _fill(arrays["sin"], factor * 2.0 ** -format_of(case.dtype).precision, case.dtype)


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
    _start(case, draws, arrays)
    half = case.sizes["head_dim"] // 2
    rotation = Rotation(arrays)
    backward = "grad_key_cache" in arrays
    nudge = np.asarray(draws.permutation("nudge", half) % 3, dtype=rotation.rows.dtype)
    rotation.rows[..., half:] = rotation.rows[..., :half] + nudge
    rotation.store()
    # Forward: k1 cos1 - k2 sin1; backward: g1 cos1 + g2 sin2 with its sign turned.
    if backward:
        arrays["sin"][..., half:] = arrays["cos"][..., :half] ^ _sign_bit(arrays["cos"])
    else:
        arrays["sin"][..., :half] = arrays["cos"][..., :half]


def _sign_bit(array: Array) -> Any:
    return array.dtype.type(1 << (8 * array.dtype.itemsize - 1))


# Special values.


def special_copies(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Put every 16-bit pattern into what is only copied: NaN payloads, subnormals, -0.0."""
    _start(case, draws, arrays)
    copied = ("value_states", "key_cache", "value_cache", "grad_value_cache")
    for place, name in enumerate(copied):
        if name in arrays:
            step = 1 if place % 2 else 65535
            arrays[name][...] = every_pattern(arrays[name].shape, 4099 * place, step)
    if "cache_position" in arrays:
        for step, name in ((1, "grad_key_cache"), (65535, "grad_value_cache")):
            untouched = np.delete(arrays[name], arrays["cache_position"], axis=2).shape
            _fill_untouched_rows(arrays, name, every_pattern(untouched, 0, step))


def _fill_untouched_rows(arrays: Arrays, name: str, patterns: Array) -> None:
    """Fill the rows of a cache that cache_position does not name."""
    rows = np.delete(np.arange(arrays[name].shape[2]), arrays["cache_position"])
    arrays[name][:, :, rows] = patterns


def special_rotations(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Put infinities, NaNs, zeros and extremes at scattered places of rows and tables.

    In the first columns every special value of the rows meets zeros in cos and in sin, as
    infinity times zero is NaN and a skipped term would hide it.
    """
    _start(case, draws, arrays)
    patterns = specials(case.dtype)
    rotation = Rotation(arrays)
    rows = rotation.rows.reshape(-1)
    rows[5::11] = np.resize(patterns, rows[5::11].shape)
    rotation.rows = rows.reshape(rotation.rows.shape)
    rotation.rows[..., : patterns.size] = patterns
    rotation.store()
    half = case.sizes["head_dim"] // 2
    for name, first, stride, zeros in (("cos", 3, 29, 0), ("sin", 17, 31, half)):
        table = arrays[name].reshape(-1)
        table[first::stride] = np.resize(patterns, table[first::stride].shape)
        _fill(arrays[name][..., zeros : zeros + patterns.size], 0.0, case.dtype)


def non_finite_cleared_rows(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Put NaN and infinities into the rows that must become zero."""
    _start(case, draws, arrays)
    patterns = specials(case.dtype)
    for name in ("grad_key_cache", "grad_value_cache"):
        for row in arrays["cache_position"]:
            line = arrays[name][:, :, row]
            line[..., 1::3] = np.resize(patterns, line[..., 1::3].shape)


def non_finite_last_rows(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Put NaN into the last row of every cache and of the values, which are copied."""
    _start(case, draws, arrays, "offset")
    nan = specials(case.dtype)[1]
    for name in ("value_states", *CACHES):
        if name in arrays and arrays[name].shape[2]:
            arrays[name][:, :, -1, ::2] = nan


# Sums over heads.


def head_codes(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Give head h the gradient 2^h and all keys 1: the sum names the heads that were added."""
    _start(case, draws, arrays)
    rotation = Rotation(arrays)
    heads = rotation.rows.shape[1]
    rotation.rows[...] = encode(2.0 ** (np.arange(heads) % 8), case.dtype)[:, None, None]
    rotation.store()
    _fill(arrays["key_states"], 1.0, case.dtype)


def head_absorption(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Let one head hold 2^p and the others about 1, which a low-precision sum absorbs.

    Which head is large differs from column to column, so that no order of summation escapes; rows
    alternate between 1, which single additions lose, and 3/4, which rounded half sums lose.
    """
    _start(case, draws, arrays)
    rotation = Rotation(arrays)
    large = 2.0 ** format_of(case.dtype).precision
    _, heads, count, width = rotation.rows.shape
    head, row, column = np.ogrid[:heads, :count, :width]
    little = np.where(row % 2 == 0, 1.0, 0.75)
    chosen = (column + column // heads + row) % heads == head
    rotation.rows[...] = encode(np.where(chosen, large, little), case.dtype)
    rotation.store()
    _fill(arrays["key_states"], 1.0, case.dtype)


def head_cancellation(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Let pairs of heads cancel but for their last bits; both heads of a pair have one key."""
    _start(case, draws, arrays)
    rotation = Rotation(arrays)
    pairs = rotation.rows.shape[1] // 2
    first = rotation.rows[:, 0 : 2 * pairs : 2]
    rotation.rows[:, 1 : 2 * pairs : 2] = (first + 1) ^ _sign_bit(first)
    rotation.store()
    key = arrays["key_states"]
    key[:, 1 : 2 * pairs : 2] = key[:, 0 : 2 * pairs : 2]


def head_ties(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Make every sum over heads an exact tie: 1 + j ulp, half an ulp, and pairs that cancel."""
    _start(case, draws, arrays)
    rotation = Rotation(arrays)
    precision = format_of(case.dtype).precision
    _, heads, count, width = rotation.rows.shape
    steps = 2 ** (precision - 1)
    head, row, column = np.ogrid[:heads, :count, :width]
    running = 1.0 + ((steps - 1 - column) % steps) / steps
    # Below 1.0 the numbers lie twice as close, so half an ulp less would be no tie there.
    upward = ((row + column) % 2 == 0) | (running == 1.0)
    half_ulp = np.where(upward, 2.0**-precision, -(2.0**-precision))
    rest = np.where(head % 2 == 0, 1.0, -1.0) * 2.0 ** -(head // 2)
    values = np.where(head == 0, running, np.where(head == 1, half_ulp, rest))
    rotation.rows[...] = encode(values, case.dtype)
    rotation.store()
    _fill(arrays["key_states"], 1.0, case.dtype)


_COMMON: Mapping[str, InputKind] = {
    "codes_kept": code_with_tables(1.0, 0.0),
    "codes_turned": code_with_tables(0.0, 1.0),
    "halves_differ": halves_differ,
    "tables_by_batch": tables_by_batch,
    "tables_by_position": tables_by_position,
    "paired_tables": paired_tables,
    "small": small,
    "subnormal": scaled_rows(-126, -128, -130, -133),
    "huge": scaled_rows(120, 125, 126, 127),
    "ties": ties,
    "near_ties": near_ties,
    "cancellation": cancellation,
    "special_copies": special_copies,
    "special_rotations": special_rotations,
    "non_finite_last_rows": non_finite_last_rows,
}

FORWARD_KINDS: Mapping[str, InputKind] = {**_COMMON, "official": official_forward}

BACKWARD_KINDS: Mapping[str, InputKind] = {
    **_COMMON,
    "official": official_backward,
    "non_finite_cleared_rows": non_finite_cleared_rows,
    "head_codes": head_codes,
    "head_absorption": head_absorption,
    "head_cancellation": head_cancellation,
    "head_ties": head_ties,
    **{f"positions_{name}": random_at(name) for name in POSITIONS},
}
