"""What a gradient in bfloat16, float16 or float32 may return, element by element.

Such a gradient is never differenced: it is compared with the float64 derivative of the forward,
and may differ from it by what its roundings can do. Either the caller supplies the exact terms of
every element, and an interval of :mod:`oracle.budget` decides; or a noise floor is measured, and
the result says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..budget import Contract, interval
from ..rounding import Format, round_float64

TermsOf = Callable[
    [Sequence[torch.Tensor], Sequence[torch.Tensor]], Sequence["torch.Tensor | None"]
]
"""``terms(cotangents, inputs)`` returns, for each differentiated input, a float64 tensor
``[count, *input shape]`` whose sum over the first axis is the gradient, exactly; None for an input
whose gradient the caller has no terms for, which is judged by the measured noise floor."""

Gradient = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""``gradient(cotangents, inputs)``: the float64 gradients of the differentiated inputs."""


@dataclass(frozen=True)
class Terms:
    """A budget from the exact terms of every gradient element.

    Attributes:
        terms: see :data:`TermsOf`; it gets the cotangents and the differentiated inputs as given.
        contract: one of :data:`oracle.budget.CONTRACTS`.
    """

    terms: TermsOf
    contract: Contract = "stored_intermediates"

    def __str__(self) -> str:
        """Name it."""
        return f"the contract {self.contract} on the terms supplied"


@dataclass(frozen=True)
class NoiseFloor:
    """A budget measured on the forward itself, where nothing is known about the backward.

    Inputs and cotangents are perturbed, each number by its own random sign times a small relative
    amount; the root mean square of what that does to an element of the float64 gradient, scaled
    to the unit roundoff of the type, is its noise. This is what one rounding of each number does,
    so it is a measurement and no bound. Some multiple of it is allowed, and the last rounding.

    Attributes:
        factor: how many root mean squares are allowed. None: twice the largest that PyTorch's own
            gradient of the forward has in the same type, within 4 to 32; 32 where the forward
            cannot tell (it is not another function than the one checked, or computes in another
            type). In ``reports/gradcheck.md`` PyTorch's have up to 15.
        perturbations: how many random ones.
    """

    factor: float | None = None
    perturbations: int = 32

    def __post_init__(self) -> None:
        """Refuse numbers that measure nothing."""
        if (self.factor is not None and self.factor <= 0) or self.perturbations < 2:
            raise ValueError(
                f"a noise floor of factor {self.factor} from {self.perturbations} perturbations"
                " measures nothing; use a positive factor and at least 2 perturbations"
            )

    def __str__(self) -> str:
        """Name it."""
        times = "some times" if self.factor is None else f"{self.factor:g} times"
        return (
            f"a measured noise floor ({times} the root mean square over"
            f" {self.perturbations} perturbations by one unit roundoff)"
        )


LEAST_FACTOR = 4.0
LARGEST_FACTOR = 32.0


def factor_beside(error: torch.Tensor, noise: torch.Tensor) -> float:
    """Return the factor to allow, from the error that PyTorch's gradient has.

    Args:
        error: of each element, beyond the last rounding.
        noise: what one rounding of each number does to it.
    """
    matters = (noise > 0) & torch.isfinite(error)
    if not bool(matters.any()):
        return LEAST_FACTOR
    largest = float((error[matters] / noise[matters]).max())
    return min(max(2 * largest, LEAST_FACTOR), LARGEST_FACTOR)


Budget = Terms | NoiseFloor

_PERTURBATION = 2.0**-20
"""Relative; far above float64's rounding, small enough that the gradient changes linearly."""


@dataclass(frozen=True)
class Allowed:
    """What is accepted for each element of one gradient, ends included; in float64.

    Attributes:
        low: the smallest value.
        high: the largest value.
    """

    low: torch.Tensor
    high: torch.Tensor

    def accepts(self, value: torch.Tensor) -> torch.Tensor:
        """Return where a value is accepted (NaN compares false)."""
        wide = value.to(torch.float64)
        return (wide >= self.low) & (wide <= self.high)


def within(value: torch.Tensor, radius: torch.Tensor, fmt: Format | None) -> Allowed:
    """Accept what lies around a value, the ends rounded to a format (None: float64)."""
    low, high = value - radius, value + radius
    if fmt is None:
        return Allowed(low, high)
    return Allowed(*(round_float64(end, fmt).to(torch.float64) for end in (low, high)))


def from_terms(terms: torch.Tensor, contract: Contract, fmt: Format) -> Allowed:
    """Accept what a contract allows; terms ``[count, *shape]``."""
    shape = terms.shape[1:]
    bounds = interval(terms.to(torch.float64).reshape(len(terms), -1), contract, fmt)
    return Allowed(*(end.to(torch.float64).view(shape) for end in (bounds.low, bounds.high)))


def measure_noise(
    gradient: Gradient,
    cotangents: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    perturbations: int,
    seed: int,
) -> tuple[torch.Tensor, ...]:
    """Measure what relative perturbations of size one do to each gradient element.

    Args:
        gradient: the float64 gradients.
        cotangents: float64.
        inputs: float64, the differentiated ones.
        perturbations: how many.
        seed: of the signs.

    Returns:
        For each input the root mean square change over the perturbation's relative size.
    """
    generator = torch.Generator().manual_seed(seed)

    def perturb(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        signs = (
            torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2.0 - 1.0
            for tensor in tensors
        )
        return [
            tensor * (1 + _PERTURBATION * sign) for tensor, sign in zip(tensors, signs, strict=True)
        ]

    base = gradient(cotangents, inputs)
    squares = [torch.zeros_like(part) for part in base]
    for _ in range(perturbations):
        changed = gradient(perturb(cotangents), perturb(inputs))
        for square, new, old in zip(squares, changed, base, strict=True):
            square.add_(((new - old) / _PERTURBATION).square())
    return tuple((square / perturbations).sqrt() for square in squares)
