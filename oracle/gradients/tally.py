"""Counting the compared numbers of one input, and keeping the worst of them as evidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .evaluation import unravel
from .findings import Entry, Finding, InputResult


@dataclass(frozen=True)
class Compared:
    """Numbers side by side; all tensors have one shape, whose first axis is the input's elements.

    Attributes:
        numeric: float64, the derivatives.
        analytic: float64, what the backward returned.
        accepted: bool, whether ``analytic`` is allowed.
        allowed: float64, how far it may be from ``numeric``.
        estimate: of the truncation error of ``numeric``.
        floor: what rounding is allowed.
        step: the smallest step; 0 where no differences were taken.
        kink: bool, where there is no derivative.
        unresolved: bool, where ``numeric`` is not known well enough.
    """

    numeric: torch.Tensor
    analytic: torch.Tensor
    accepted: torch.Tensor
    allowed: torch.Tensor
    estimate: torch.Tensor
    floor: torch.Tensor
    step: torch.Tensor
    kink: torch.Tensor
    unresolved: torch.Tensor


class Tally:
    """Running counts of one input while its entries go by.

    Args:
        name: the input's name.
        shape: its shape.
    """

    def __init__(self, name: str, shape: torch.Size) -> None:
        self.name = name
        self.shape = shape
        self.dtype = "float64"
        self.absent = ""
        """Why there is no gradient: ``missing`` or ``detached``; empty where there is one."""
        self._entries = self._agreeing = self._kinks = self._unresolved = 0
        self._worst: Entry | None = None
        self._severity = -1.0
        self._largest = 0.0
        self._squares = [0.0, 0.0, 0.0]
        self._wrong_elements: set[int] = set()
        self._kink_at: tuple[int, ...] | None = None
        self._unresolved_at: tuple[tuple[int, ...], float] | None = None
        self._nonzero = False

    def add(self, first: int, compared: Compared, cotangent: Callable[[int], str]) -> None:
        """Count some numbers.

        Args:
            first: the flat place in the input of the first element.
            compared: the numbers, ``[elements]`` or ``[elements, cotangents]``.
            cotangent: names a cotangent by its number.
        """
        kink = compared.kink
        unresolved = compared.unresolved & ~kink
        judged = ~(kink | unresolved)
        agreeing = judged & compared.accepted
        self._entries += judged.numel()
        self._agreeing += int(agreeing.sum())
        self._kinks += int(kink.sum())
        self._unresolved += int(unresolved.sum())
        self._nonzero |= bool((compared.analytic != 0).any())
        self._keep_undecided(first, compared, kink, unresolved)
        wrong = judged & ~agreeing
        if bool(wrong.any()):
            elements = wrong if wrong.dim() == 1 else wrong.any(dim=1)
            self._wrong_elements.update((first + elements.nonzero().view(-1)).tolist())
        if bool(judged.any()):
            self._measure(first, compared, judged, wrong, cotangent)

    def _keep_undecided(
        self, first: int, compared: Compared, kink: torch.Tensor, unresolved: torch.Tensor
    ) -> None:
        width = 1 if kink.dim() == 1 else kink.shape[1]
        if self._kink_at is None and bool(kink.any()):
            place = int(kink.reshape(-1).to(torch.uint8).argmax())
            self._kink_at = unravel(first + place // width, self.shape)
        if self._unresolved_at is None and bool(unresolved.any()):
            place = int(unresolved.reshape(-1).to(torch.uint8).argmax())
            allowed = float(compared.allowed.reshape(-1)[place])
            self._unresolved_at = unravel(first + place // width, self.shape), allowed

    def _measure(
        self,
        first: int,
        compared: Compared,
        judged: torch.Tensor,
        wrong: torch.Tensor,
        cotangent: Callable[[int], str],
    ) -> None:
        """Keep the worst entry, and the sums that tell a constant factor."""
        difference = (compared.analytic - compared.numeric).abs()
        severity = difference / compared.allowed
        severity = torch.where(difference == 0, 0.0, severity)
        severity = torch.where(wrong & ~torch.isfinite(severity), torch.inf, severity)
        # An accepted entry is never worse than a wrong one, whatever rounding does to the ratio.
        severity = torch.where(wrong, severity.clamp(min=1.0) + 1.0, severity.clamp(max=1.0))
        severity = torch.where(judged, severity, -1.0)
        place = int(severity.reshape(-1).argmax())
        worst = float(severity.reshape(-1)[place])
        if worst > self._severity:
            self._severity = worst
            self._worst = self._entry(first, compared, place, cotangent)
        finite = judged & torch.isfinite(compared.analytic)
        largest = torch.where(finite, difference, 0.0).max()
        self._largest = max(self._largest, float(largest))
        a = torch.where(finite, compared.analytic, 0.0)
        n = torch.where(finite, compared.numeric, 0.0)
        for at, value in enumerate(((a * a).sum(), (a * n).sum(), (n * n).sum())):
            self._squares[at] += float(value)

    def _entry(
        self, first: int, compared: Compared, place: int, cotangent: Callable[[int], str]
    ) -> Entry:
        width = 1 if compared.numeric.dim() == 1 else compared.numeric.shape[1]
        element, number = divmod(place, width)

        def at(tensor: torch.Tensor) -> float:
            return float(tensor.reshape(-1)[place])

        return Entry(
            index=unravel(first + element, self.shape),
            cotangent=cotangent(number),
            numeric=at(compared.numeric),
            analytic=at(compared.analytic),
            difference=at(compared.analytic) - at(compared.numeric),
            estimate=at(compared.estimate),
            floor=at(compared.floor),
            allowed=at(compared.allowed),
            step=at(compared.step),
        )

    def result(self) -> InputResult:
        """Return the counts."""
        return InputResult(
            name=self.name,
            shape=tuple(self.shape),
            dtype=self.dtype,
            elements=math.prod(self.shape),
            entries=self._entries,
            agreeing=self._agreeing,
            not_differentiable=self._kinks,
            unresolved=self._unresolved,
            worst=self._worst,
            largest_difference=self._largest,
        )

    def findings(self) -> list[Finding]:
        """Say what is wrong and what could not be judged."""
        found = []
        result = self.result()
        if result.disagreeing:
            kind = self.absent or ("wrong_values" if self._nonzero else "zeros")
            found.append(Finding(kind, self.name, self._text(kind, result)))
        if self._kink_at is not None:
            found.append(
                Finding(
                    "not_differentiable",
                    self.name,
                    f"{self.name}: {self._kinks} of {self._entries} entries have no derivative"
                    f" here, the first at index {list(self._kink_at)}: the slopes on both sides"
                    " differ, or there is a jump; move the inputs away from it",
                )
            )
        if self._unresolved_at is not None:
            index, allowed = self._unresolved_at
            why = (
                f"the numeric derivative is known to {allowed:.2g} only; give a forward that is"
                " smooth and computes in float64, or other inputs"
                if math.isfinite(allowed)
                else "differences at no step agree, or the function is not finite on both sides;"
                " give other inputs"
            )
            found.append(
                Finding(
                    "unresolved",
                    self.name,
                    f"{self.name}: {self._unresolved} of {self._entries} entries could not be"
                    f" judged, the first at index {list(index)}, where {why}",
                )
            )
        return found

    def _text(self, kind: str, result: InputResult) -> str:
        largest = f"; worst {result.worst}" if result.worst is not None else ""
        if kind == "detached":
            return (
                f"{self.name}: no path leads from the outputs back to it, though they depend on"
                f" it{largest}; look for detach(), no_grad() or a kernel called outside its"
                " autograd function"
            )
        if kind == "missing":
            return (
                f"{self.name}: its gradient is None, though the outputs depend on it{largest};"
                " return the gradient from the backward"
            )
        if kind == "zeros":
            return f"{self.name}: all of its gradient is zero, and it should not be{largest}"
        return (
            f"{self.name}: {len(self._wrong_elements)} of {result.elements} elements"
            f" ({result.disagreeing} of {result.entries} entries) differ by more than is allowed"
            f"{self._factor()}; worst {result.worst}"
        )

    def _factor(self) -> str:
        """Say so where the gradient is a multiple of the derivative."""
        aa, an, nn = self._squares
        if nn == 0 or an == 0:
            return ""
        factor = an / nn
        # What a constant factor does not explain must be small beside what it does.
        if abs(factor - 1) < 1e-4 or abs(aa - factor * an) > 1e-6 * (factor - 1) ** 2 * nn:
            return ""
        sign = ", a wrong sign" if abs(factor + 1) < 1e-9 else ""
        return f": it is {factor:.6g} times the derivative everywhere{sign}"
