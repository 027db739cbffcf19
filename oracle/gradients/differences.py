"""Central differences extrapolated to step zero, with an error estimate for every entry.

For one direction the function is evaluated at ``x +- h`` for ``h = h0, h0/4, h0/16, ...``. Row
``l`` of the tableau starts with the central difference ``D_l``, whose error is a series in
``h^2``; order ``q`` of a row has had the first ``q`` terms of that series removed (L. F.
Richardson, "The deferred approach to the limit", Phil. Trans. 1927). Every entry of the tableau is
a candidate with

* an *estimate* of its truncation error: its distance to its neighbours of one order less (as C. J.
  F. Ridders, "Accurate computation of F'(x)", Adv. Eng. Software 1982), for order 0 to the next
  finer difference; raised to the distance to every finer row of its own order, beyond the rounding
  noise of both, so that an agreement of coarse steps alone (a period of the function, a jump
  between two steps) is contradicted by finer ones (O. V. Lepskii's principle, 1990);
* a *floor*: what rounding in the function's values can do to it, the noise of a value over ``h``.

The candidate with the least sum of the two is taken, entry by entry: for a function that is linear
along the direction that is the largest step, and the derivative is exact up to rounding.

At a kink central differences converge too, to the mean of both slopes. There the gap between the
one-sided slopes does not shrink with the step; candidates of rows where it does not are refused,
and an entry without any other is reported as not differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

RATIO = 4
"""Each step is this much smaller than the one before."""

ROWS = 13
"""The smallest step is the first one over 4^12, about 2^-24 of it."""

ORDERS = 6
"""Terms of the error's series that are removed at most."""

_LEAST_ROWS = 3
_UNIT = 2.0**-53
_ROUNDINGS = 4
_AMPLIFICATION = 1.1
"""Bounds what removing all orders does to the noise of a row: (16 + 1/4)/15 (256 + 1/4)/255 ..."""


@dataclass(frozen=True)
class Best:
    """The best candidate of each entry; all of shape ``[directions, outputs]``.

    Attributes:
        value: the derivative, float64.
        estimate: of its truncation error, not a bound; infinity where there is no candidate.
        floor: what rounding of the function's values can do to it.
        step: the smallest step it was made with.
        kink: whether the slopes on both sides differ at every step, or there is a jump.
    """

    value: torch.Tensor
    estimate: torch.Tensor
    floor: torch.Tensor
    step: torch.Tensor
    kink: torch.Tensor

    def select(self, directions: torch.Tensor) -> Best:
        """Return some directions, by index or mask."""
        return Best(*(getattr(self, name)[directions] for name in _BEST))

    @classmethod
    def gather(cls, parts: Sequence[Best], order: torch.Tensor) -> Best:
        """Put parts one below the other and sort them by ``order``, their directions' numbers."""
        places = order.argsort()
        return cls(*(torch.cat([getattr(part, name) for part in parts])[places] for name in _BEST))


_BEST = ("value", "estimate", "floor", "step", "kink")


class Ladder:
    """The differences of some directions at ever smaller steps.

    Args:
        base: float64 ``[outputs]``, the function's values at the point.
        noise: float64 ``[outputs]``, the absolute error of a value beyond a few roundings.
    """

    def __init__(self, base: torch.Tensor, noise: torch.Tensor) -> None:
        self._base = base
        self._noise = noise
        self._tableau: list[list[torch.Tensor]] = []
        self._steps: list[torch.Tensor] = []
        self._noises: list[torch.Tensor] = []
        self._gaps: list[torch.Tensor] = []

    @property
    def rows(self) -> int:
        """How many steps were taken."""
        return len(self._steps)

    def add(
        self, plus: torch.Tensor, minus: torch.Tensor, ahead: torch.Tensor, behind: torch.Tensor
    ) -> None:
        """Add a row.

        Args:
            plus: float64 ``[directions, outputs]``, the values at ``x + h``.
            minus: the values at ``x - h``.
            ahead: float64 ``[directions]``, the step to ``x + h`` as it was really taken.
            behind: the step to ``x - h``.
        """
        ahead, behind = ahead[:, None], behind[:, None]
        step = (ahead + behind) / 2
        row = [(plus - minus) / (ahead + behind)]
        for order in range(1, min(self.rows, ORDERS) + 1):
            finer, coarser = row[-1], self._tableau[-1][order - 1]
            row.append(finer + (finer - coarser) / (RATIO ** (2 * order) - 1))
        size = torch.maximum(plus.abs(), minus.abs())
        self._tableau.append(row)
        self._steps.append(step)
        self._noises.append((_ROUNDINGS * _UNIT * size + self._noise) / step)
        self._gaps.append((plus - self._base) / ahead - (self._base - minus) / behind)

    def keep(self, directions: torch.Tensor) -> None:
        """Drop all directions but those of the mask."""
        self._tableau = [[value[directions] for value in row] for row in self._tableau]
        for rows in (self._steps, self._noises, self._gaps):
            rows[:] = [value[directions] for value in rows]

    def best(self) -> Best:
        """Return the best candidate of each entry."""
        shape = self._gaps[0].shape
        total = torch.full(shape, torch.inf, dtype=torch.float64, device=self._base.device)
        value, estimate = torch.full_like(total, torch.nan), total.clone()
        floor, step = torch.zeros_like(total), torch.zeros_like(total)
        plateaus = self._plateaus()
        for row in range(self.rows):
            for order in range(len(self._tableau[row])):
                error = torch.where(plateaus[row], torch.inf, self._estimate(row, order))
                noise = self._noise_of(row, order)
                better = error + noise < total
                if not bool(better.any()):
                    continue
                total = torch.where(better, error + noise, total)
                value = torch.where(better, self._tableau[row][order], value)
                estimate = torch.where(better, error, estimate)
                floor = torch.where(better, noise, floor)
                step = torch.where(better, self._steps[row].expand(shape), step)
        kink = plateaus[-1] & torch.isinf(total) | self._diverges()
        return Best(value, estimate, floor, step, kink)

    def finished(self, best: Best) -> torch.Tensor:
        """Return, per direction, whether no smaller step can improve any entry."""
        if self.rows < _LEAST_ROWS:
            return torch.zeros(len(best.value), dtype=torch.bool, device=self._base.device)
        if self.rows >= ROWS:
            return torch.ones(len(best.value), dtype=torch.bool, device=self._base.device)
        total = best.estimate + best.floor
        hopeless = ~torch.isfinite(self._base)
        return ((RATIO * self._noises[-1] >= total) | hopeless).all(dim=1)

    def _noise_of(self, row: int, order: int) -> torch.Tensor:
        return self._noises[row] * (_AMPLIFICATION if order else 1.0)

    def _estimate(self, row: int, order: int) -> torch.Tensor:
        """Estimate a candidate's truncation error; infinity where it cannot be told."""
        value = self._tableau[row][order]
        if order:
            lesser = (self._tableau[row][order - 1], self._tableau[row - 1][order - 1])
            error = torch.maximum((value - lesser[0]).abs(), (value - lesser[1]).abs())
        else:
            neighbour = row + 1 if row + 1 < self.rows else row - 1
            error = (value - self._tableau[neighbour][0]).abs()
        for finer in range(row + 1, self.rows):
            allowed = self._noise_of(row, order) + self._noise_of(finer, order)
            error = torch.maximum(error, (value - self._tableau[finer][order]).abs() - allowed)
        return torch.where(torch.isfinite(error), error, torch.inf)

    def _plateaus(self) -> list[torch.Tensor]:
        """Return, per row, where the gap of the one-sided slopes does not shrink with the step.

        It is proportional to the step where the function is twice differentiable: a quarter of
        the row before. A gap within the noise says nothing.
        """
        plateaus = []
        for row in range(1, self.rows):
            gap = self._gaps[row].abs()
            shrinks = gap <= self._gaps[row - 1].abs() / 2
            plateaus.append(~shrinks & (gap > 4 * self._noises[row]))
        return [plateaus[0], *plateaus]

    def _diverges(self) -> torch.Tensor:
        """Return where the last differences grow like a jump over the step, or a root of it."""
        if self.rows < ROWS:
            return torch.zeros_like(self._gaps[0], dtype=torch.bool)
        last = [row[0].abs() for row in self._tableau[-3:]]
        grows = (last[2] > 1.5 * last[1]) & (last[1] > 1.5 * last[0])
        return grows & (last[2] > 4 * self._noises[-1])
