"""Tables of real rotation angles, the same bits on every machine.

``cos(p f_j)`` and ``sin(p f_j)`` with ``f_j = 10000^(-2j/D)``, j = 0..D/2-1, in both halves
(RoFormer, arXiv:2104.09864, section 3.2.2). Mathematical libraries differ in their last bits, and
an angle in float32 is wrong by far more than that at large positions, so angles are formed and
their series summed in 50 decimal digits.
"""

from __future__ import annotations

from decimal import Context, Decimal, localcontext
from functools import cache

import numpy as np
from numpy.typing import NDArray

BASE = 10000
_DIGITS = 50
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628621")


@cache
def rope_tables(
    positions: tuple[int, ...], head_dim: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return cos and sin of the angles of some positions, each rounded once to float64.

    Args:
        positions: the tokens' positions.
        head_dim: D, even.

    Returns:
        Two arrays ``[positions, D]``, not writable.
    """
    half = head_dim // 2
    tables = np.empty((2, len(positions), head_dim))
    with localcontext(Context(prec=_DIGITS)):
        frequencies = [Decimal(BASE) ** (Decimal(-2 * j) / head_dim) for j in range(half)]
        for place, position in enumerate(positions):
            for j, frequency in enumerate(frequencies):
                cos, sin = _cos_and_sin(position * frequency)
                tables[0, place, j::half] = float(cos)
                tables[1, place, j::half] = float(sin)
    tables.flags.writeable = False
    return tables[0], tables[1]


def _cos_and_sin(angle: Decimal) -> tuple[Decimal, Decimal]:
    """Sum both Taylor series at an angle reduced to [-pi, pi], in the current precision."""
    angle = angle.remainder_near(2 * _PI)
    totals = [Decimal(0), Decimal(0)]
    term, order = Decimal(1), 0
    smallest = Decimal(10) ** -_DIGITS
    while abs(term) > smallest:
        totals[order % 2] += term if order % 4 < 2 else -term
        order += 1
        term = term * angle / order
    return totals[0], totals[1]
