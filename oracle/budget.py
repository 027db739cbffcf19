"""Numeric contracts: which values an honest implementation may return, as an interval.

A contract says which roundings may happen before the last one, and so bounds the value that is
finally rounded: it lies in ``[low, high]``. An element is accepted if and only if
``round(low) <= value <= round(high)`` in the output type. Rounding is monotone, so no honest
implementation of the contract is ever rejected; nothing is fitted or guessed.

With the exact terms ``t`` of an element, ``n`` of them, their exact sum ``y``, RN_out and RN_32
rounding to nearest even in the output type and in float32, u32 = 2^-24 and
gamma_n = n u32 / (1 - n u32) (N. J. Higham, "Accuracy and Stability of Numerical Algorithms",
2nd ed., section 3.1):

* d32 = gamma_n R + n 2^-150 with R = sum of max(abs(t), abs(RN_out t)) bounds float32 sums in
  any order, fused or not: each addition errs by at most u32 relatively, each product that
  underflows by at most 2^-150. It is 0 where R <= 2^24 q, q >= 2^-149 being the largest power of
  two that divides every t and RN_out(t): then every partial sum is a float32 number.
* ``correctly_rounded``: {y}.
* ``single_rounding``: [y - d32, y + d32].
* ``stored_intermediates``: each product kept, or stored once in the output type (directly or by
  way of float32): [y + sum of min e(t) - d32, y + sum of max e(t) + d32] with e(t) in
  {0, RN_out(t) - t, RN_out(RN_32(t)) - t}.
* ``bounded_error``: [y - u_out S - d32, y + u_out S + d32], S the sum of abs(t).

All bounds are evaluated outward: what float64 cannot represent widens the interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .certified import DoubleDouble, add_terms, round_down, round_up
from .rounding import Format, round_float64

Contract = Literal["correctly_rounded", "single_rounding", "stored_intermediates", "bounded_error"]

CONTRACTS: dict[Contract, str] = {
    "correctly_rounded": "the exact value, rounded once: one answer per element",
    "single_rounding": "exact or float32 products, float32 sums in any order, FMA or not, one"
    " final rounding",
    "stored_intermediates": "as above, and each product may be stored once in the output type"
    " (PyTorch eager, compiled mixtures)",
    "bounded_error": "the classical bound u * sum of |terms|: names how far a rejected kernel is",
}
"""The contracts of computed elements, the tightest first, with what each means."""

UNIT_ROUNDOFF_32 = 2.0**-24
FLOAT32_LIMIT = 2.0**128 * (1 - 2.0**-25)
"""Sums below this do not overflow when rounded to float32."""

# Widening that covers every rounding made in evaluating a bound in float64: a bound is a sum of
# n positive terms followed by a few products, so its relative error is below (n + 8) 2^-53.
_OUTWARD_UNIT = 2.0**-53


@dataclass(frozen=True)
class Interval:
    """What a contract accepts, per element.

    Attributes:
        low: smallest accepted value, in the output's format.
        high: largest accepted value, in the output's format.
        in_domain: bool; where False, infinities and NaN are accepted as well.
    """

    low: torch.Tensor
    high: torch.Tensor
    in_domain: torch.Tensor

    def accepts(self, value: torch.Tensor) -> torch.Tensor:
        """Return where a value of the output's format is accepted (NaN compares false)."""
        inside = (value >= self.low) & (value <= self.high)
        return inside | (~self.in_domain & ~torch.isfinite(value))


@dataclass(frozen=True)
class _Magnitudes:
    """Quantities of the formulas above: float64 per term (stored, through) or per element."""

    stored: torch.Tensor
    through: torch.Tensor
    stores_finite: torch.Tensor
    sum_abs: torch.Tensor
    reach: torch.Tensor
    sum_error: torch.Tensor


def interval(terms: torch.Tensor, contract: Contract, fmt: Format) -> Interval:
    """Return the interval of a contract.

    Args:
        terms: float64 ``[count, elements]``, the exact finite terms.
        contract: one of :data:`CONTRACTS`.
        fmt: the output's format.

    Returns:
        Bounds of shape ``[elements]``.
    """
    if contract == "correctly_rounded":
        exact = add_terms(terms)
        low, high = round_down(exact, fmt), round_up(exact, fmt)
        return Interval(low, high, torch.ones_like(low, dtype=torch.bool))
    sizes = _magnitudes(terms, fmt)
    # Out of the domain float32 sums may overflow, so the bound may be unbounded too.
    in_domain = sizes.reach * (1 + gamma(terms.shape[0])) < FLOAT32_LIMIT
    below, above = -sizes.sum_error, sizes.sum_error
    if contract == "bounded_error":
        classical = fmt.unit_roundoff * sizes.sum_abs
        below, above = below - classical, above + classical
        widened = _outward(terms.shape[0] + 2)
        low = round_down(_plus(terms, below[None] * widened), fmt)
        high = round_up(_plus(terms, above[None] * widened), fmt)
        return Interval(low, high, in_domain)
    if contract == "single_rounding":
        low = round_down(_plus(terms, below[None]), fmt)
        high = round_up(_plus(terms, above[None]), fmt)
        return Interval(low, high, in_domain)
    smallest, largest = _storage_errors(terms, sizes)
    low = round_down(_plus(terms, smallest, below[None]), fmt)
    high = round_up(_plus(terms, largest, above[None]), fmt)
    return Interval(low, high, in_domain & sizes.stores_finite)


def gamma(count: int) -> float:
    """Return gamma_n = n u / (1 - n u) for float32, rounded up."""
    product = count * UNIT_ROUNDOFF_32
    return product / (1 - product) * (1 + 4 * _OUTWARD_UNIT)


def _outward(operations: int) -> float:
    """Return the factor that covers the given number of float64 roundings of a positive bound."""
    return 1 + (operations + 8) * 2 * _OUTWARD_UNIT


def _plus(terms: torch.Tensor, *corrections: torch.Tensor) -> DoubleDouble:
    """Add terms and corrections, each ``[some, elements]``, with an error bound."""
    return add_terms(torch.cat((terms, *corrections)))


def _magnitudes(terms: torch.Tensor, fmt: Format) -> _Magnitudes:
    count = terms.shape[0]
    rounded = round_float64(terms, fmt).to(torch.float64)
    in_float32 = terms.to(torch.float32).to(torch.float64)
    # Products of two bfloat16 or float16 numbers are float32 numbers, unless they underflow.
    representable = torch.equal(in_float32, terms)
    twice = rounded if representable else round_float64(in_float32, fmt).to(torch.float64)
    finite = torch.isfinite(rounded)
    stored = torch.where(finite, rounded, terms)
    through = torch.where(torch.isfinite(twice), twice, terms)
    reach = torch.maximum(terms.abs(), stored.abs()).sum(dim=0)
    error = (gamma(count) * reach + count * 2.0**-150) * _outward(count + 3)
    return _Magnitudes(
        stored=stored,
        through=through,
        stores_finite=(finite & torch.isfinite(twice)).all(dim=0),
        sum_abs=terms.abs().sum(dim=0),
        reach=reach,
        sum_error=torch.where(_sums_exactly(reach, terms, stored), 0.0, error),
    )


def _sums_exactly(reach: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    """Return where every partial sum of the parts is a float32 number.

    That is where R <= 2^24 q for a power of two q >= 2^-149 that divides every part: the smallest
    q with R <= 2^24 q will do. (Where the parts are its multiples, R was summed without error.)
    """
    fraction, exponent = torch.frexp(reach)
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent) - 24
    # Adding 1.5 * 2^52 q rounds to a multiple of q; only multiples come back unchanged.
    shift = torch.ldexp(torch.full_like(reach, 1.5), exponent + 52)
    exact = exponent >= -149
    for part in parts:
        exact &= ((part + shift) - shift == part).all(dim=0)
    return exact


def _storage_errors(terms: torch.Tensor, sizes: _Magnitudes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and largest e(t) of every term, both exact, ``[count, elements]``."""
    direct, through = sizes.stored - terms, sizes.through - terms
    smallest = torch.minimum(direct, through).clamp(max=0.0)
    largest = torch.maximum(direct, through).clamp(min=0.0)
    return smallest, largest
