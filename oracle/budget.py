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
* ``bounded_error``: [y - B - d32, y + B + d32], B the sum of max(u_out abs(t), v) over the nonzero
  t: storing a product errs by at most u_out abs(t), or by v, half the smallest subnormal number of
  the output type.

All bounds are evaluated outward: what float64 cannot represent widens the interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from .certified import add_terms, round_down, round_up
from .rounding import Format, power_of_two, round_float64

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


class Budget:
    """The intervals of some elements; what the contracts have in common is computed once.

    Args:
        terms: float64 ``[count, elements]``, the exact finite terms.
        fmt: the output's format.
    """

    def __init__(self, terms: torch.Tensor, fmt: Format) -> None:
        self._terms = terms
        self._fmt = fmt

    def interval(self, contract: Contract) -> Interval:
        """Return what a contract accepts; bounds of shape ``[elements]``."""
        if contract == "correctly_rounded":
            value = add_terms(self._terms)
            low, high = round_down(value, self._fmt), round_up(value, self._fmt)
            return Interval(low, high, torch.ones_like(low, dtype=torch.bool))
        sizes = self._magnitudes
        # Out of the domain float32 sums may overflow before the last rounding.
        in_domain = sizes.reach * (1 + gamma(self._terms.shape[0])) < FLOAT32_LIMIT
        slack = sizes.sum_error[None]
        if contract == "single_rounding":
            return self._between(-slack, slack, in_domain)
        if contract == "bounded_error":
            # Scaling by a power of two is exact.
            largest = (self._fmt.unit_roundoff * self._terms.abs()).clamp(
                min=self._fmt.smallest / 2
            )
            spread = torch.cat((torch.where(self._terms == 0, 0.0, largest), slack))
            return self._between(-spread, spread, in_domain)
        direct, through = sizes.stored - self._terms, sizes.through - self._terms
        smallest = torch.minimum(direct, through).clamp(max=0.0)
        largest = torch.maximum(direct, through).clamp(min=0.0)
        below, above = torch.cat((smallest, -slack)), torch.cat((largest, slack))
        return self._between(below, above, in_domain & sizes.stores_finite)

    def _between(
        self, below: torch.Tensor, above: torch.Tensor, in_domain: torch.Tensor
    ) -> Interval:
        """Add corrections, ``[some, elements]`` each, to the terms and round outward."""
        low = round_down(add_terms(torch.cat((self._terms, below))), self._fmt)
        high = round_up(add_terms(torch.cat((self._terms, above))), self._fmt)
        return Interval(low, high, in_domain)

    def out_of_domain(self, contract: Contract) -> int:
        """Count the elements outside the domain of a contract."""
        if contract == "correctly_rounded":
            return 0
        # Nothing overflows if even the sum of as many of the largest terms does not.
        largest = float(self._terms.abs().max())
        if 2 * largest * self._terms.shape[0] < min(self._fmt.largest, FLOAT32_LIMIT):
            return 0
        return int((~self.interval(contract).in_domain).sum())

    @cached_property
    def _magnitudes(self) -> Magnitudes:
        return magnitudes(self._terms, self._fmt)


@dataclass(frozen=True)
class Magnitudes:
    """Quantities of the formulas above, float64.

    Attributes:
        stored: per term, RN_out(t); t itself where that is infinite.
        through: per term, RN_out(RN_32(t)); t itself where that is infinite.
        stores_finite: whether both are finite for all terms.
        reach: R.
        sum_error: d32.
    """

    stored: torch.Tensor
    through: torch.Tensor
    stores_finite: torch.Tensor
    reach: torch.Tensor
    sum_error: torch.Tensor


def interval(terms: torch.Tensor, contract: Contract, fmt: Format) -> Interval:
    """Return the interval of one contract.

    Args:
        terms: float64 ``[count, elements]``, the exact finite terms.
        contract: one of :data:`CONTRACTS`.
        fmt: the output's format.

    Returns:
        Bounds of shape ``[elements]``.
    """
    return Budget(terms, fmt).interval(contract)


def gamma(count: int) -> float:
    """Return gamma_n = n u / (1 - n u) for float32, rounded up."""
    product = count * UNIT_ROUNDOFF_32
    return product / (1 - product) * (1 + 4 * _OUTWARD_UNIT)


def _outward(operations: int) -> float:
    """Return the factor that covers the given number of float64 roundings of a positive bound."""
    return 1 + (operations + 8) * 2 * _OUTWARD_UNIT


def magnitudes(terms: torch.Tensor, fmt: Format) -> Magnitudes:
    """Return the quantities of the formulas above.

    Args:
        terms: float64 ``[count, elements]``, the exact finite terms.
        fmt: the output's format.
    """
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
    return Magnitudes(
        stored=stored,
        through=through,
        stores_finite=(finite & torch.isfinite(twice)).all(dim=0),
        reach=reach,
        sum_error=torch.where(_sums_exactly(reach, terms, stored), 0.0, error),
    )


def _sums_exactly(reach: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    """Return where every partial sum of the parts is a float32 number.

    That is where R <= 2^24 q for some power of two q >= 2^-149 that divides every part: it is
    enough to try the smallest one. (Where the parts are its multiples, R was summed without error.)
    """
    fraction, exponent = torch.frexp(reach)
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent) - 24
    # Adding 1.5 * 2^52 q rounds to a multiple of q; only multiples come back unchanged.
    shift = 1.5 * power_of_two(exponent.clamp(min=-149) + 52)
    exact = torch.ones_like(reach, dtype=torch.bool)
    for part in parts:
        exact &= ((part + shift) - shift == part).all(dim=0)
    return exact
