"""Inputs for sums over heads: heads missing or averaged, and sums that are hard to round."""

from __future__ import annotations

import numpy as np

from ...definition import Case
from ...inputs import Draws, encode
from ...rounding import format_of
from .arrays import Array, Arrays, Rotation, fill, sign_bit
from .distributions import start_shuffled

_CODED_HEADS = 8
"""How many heads get different powers of two at once: their sum fits the significand."""


def _gradients_by_head(case: Case, draws: Draws, arrays: Arrays, values: Array) -> None:
    """Give all keys 1 and the heads gradients ``values``, which broadcasts to ``[H,N,D]``."""
    start_shuffled(case, draws, arrays)
    rotation = Rotation(arrays)
    rotation.rows[...] = encode(values, case.dtype)
    rotation.store()
    fill(arrays["key_states"], 1.0, case.dtype)


def _grid(arrays: Arrays) -> tuple[Array, Array, Array]:
    """Return the numbers of head, token and column, to be broadcast against each other."""
    _, heads, count, width = arrays["key_states"].shape
    head, row, column = np.ogrid[:heads, :count, :width]
    return head, row, column


def head_codes(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Give head h the gradient 2^(h mod 8) and all keys 1: the sum names the heads that were added.

    With more than eight heads, eight are coded at a time, in turn along the columns and tokens,
    and the others are zero.
    """
    head, row, column = _grid(arrays)
    groups = -(-head.size // _CODED_HEADS)
    coded = head // _CODED_HEADS == (row + column) % groups
    values = np.where(coded, 2.0 ** (head % _CODED_HEADS), 0.0)
    _gradients_by_head(case, draws, arrays, values)


def head_powers(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Give the heads gradients 1, 16, 256 in turn and all keys 1: sum, mean and one head differ."""
    head, _, _ = _grid(arrays)
    _gradients_by_head(case, draws, arrays, 16.0 ** (head % 3))


def head_large_first(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Give head 0 the gradient 2^p and the others 1: added one by one in the type, they vanish."""
    head, _, _ = _grid(arrays)
    large = 2.0 ** format_of(case.dtype).precision
    _gradients_by_head(case, draws, arrays, np.where(head == 0, large, 1.0))


def head_absorption(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Let one head hold 2^p and the others about 1, which a low-precision sum absorbs.

    Which head is large differs from column to column, so that no order of summation escapes; rows
    alternate between 1, which single additions lose, and 3/4, which rounded half sums lose.
    """
    head, row, column = _grid(arrays)
    large = 2.0 ** format_of(case.dtype).precision
    little = np.where(row % 2 == 0, 1.0, 0.75)
    chosen = (column + column // head.size + row) % head.size == head
    _gradients_by_head(case, draws, arrays, np.where(chosen, large, little))


def head_cancellation(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Let pairs of heads cancel but for their last bits; both heads of a pair have one key.

    Of an odd number of heads the last one is zero.
    """
    start_shuffled(case, draws, arrays)
    rotation = Rotation(arrays)
    heads = rotation.rows.shape[1]
    paired = heads // 2 * 2
    first = rotation.rows[:, 0:paired:2]
    rotation.rows[:, 1:paired:2] = (first + 1) ^ sign_bit(first)
    if 1 < heads != paired:
        rotation.rows[:, -1] = 0
    rotation.store()
    key = arrays["key_states"]
    key[:, 1:paired:2] = key[:, 0:paired:2]


def head_ties(case: Case, draws: Draws, arrays: Arrays) -> None:
    """Make every sum over two or more heads an exact tie.

    It is 1 + j ulp, half an ulp, and pairs that cancel; of an odd number of heads the last one is
    zero.
    """
    precision = format_of(case.dtype).precision
    head, row, column = _grid(arrays)
    steps = 2 ** (precision - 1)
    running = 1.0 + ((steps - 1 - column) % steps) / steps
    # Below 1.0 the numbers lie twice as close, so half an ulp less would be no tie there.
    upward = ((row + column) % 2 == 0) | (running == 1.0)
    half_ulp = np.where(upward, 2.0**-precision, -(2.0**-precision))
    # The powers start anew before float16 runs out of them.
    rest = np.where(head % 2 == 0, 1.0, -1.0) * 2.0 ** -(head // 2 % 8)
    rest = np.where((head == head.size - 1) & (head.size % 2 == 1), 0.0, rest)
    values = np.where(head == 0, running, np.where(head == 1, half_ulp, rest))
    _gradients_by_head(case, draws, arrays, values)
