"""The dot-product test of an adjoint: <J v, w> = <v, J^T w>, for shapes of any size.

It takes one call of each side per trial and input, whatever the size. Products and sums are formed
without loss (T. Ogita, S. M. Rump, S. Oishi, "Accurate sum and dot product", SIAM J. Sci. Comput.
2005), so what remains is the rounding inside both sides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..rounding import two_sum
from .derivative import NumericDerivative
from .findings import GradientCheckFailed, plain

_UNIT = 2.0**-53
_SPLIT = 2.0**27 + 1


@dataclass(frozen=True)
class AdjointTrial:
    """One comparison of the two products.

    Attributes:
        input: the input that the tangent moves; all others stay.
        trial: the number of the trial.
        forward: <J v, w>.
        backward: <v, J^T w>.
        allowed: how far apart they may be.
        elements: how many elements of the gradient take part.
    """

    input: str
    trial: int
    forward: float
    backward: float
    allowed: float
    elements: int

    @property
    def difference(self) -> float:
        """The backward product less the forward one."""
        return self.backward - self.forward

    @property
    def passed(self) -> bool:
        """Whether they agree (a NaN does not)."""
        return abs(self.difference) <= self.allowed

    def __str__(self) -> str:
        """Say it in one line."""
        return (
            f"{self.input}, trial {self.trial}: <J v, w> = {self.forward:.15g}, <v, J^T w> ="
            f" {self.backward:.15g}, difference {self.difference:.3g}, allowed {self.allowed:.3g}"
        )


@dataclass(frozen=True)
class AdjointResult:
    """The outcome of an adjoint test. It is true if and only if the test passed.

    Attributes:
        trials: every comparison.
        seconds: wall time.
    """

    trials: tuple[AdjointTrial, ...]
    seconds: float = field(default=0.0, compare=False)

    @property
    def status(self) -> str:
        """``passed``, ``failed``, or ``nothing_checked`` where an input has no trial."""
        if not self.trials or any(not trial.elements for trial in self.trials):
            return "nothing_checked"
        return "passed" if all(trial.passed for trial in self.trials) else "failed"

    @property
    def passed(self) -> bool:
        """Whether all trials agree."""
        return self.status == "passed"

    def __bool__(self) -> bool:
        """Return ``passed``."""
        return self.passed

    def raise_for_failure(self) -> None:
        """Do nothing when passed.

        Raises:
            GradientCheckFailed: with the summary of what failed.
        """
        if not self.passed:
            raise GradientCheckFailed(self)

    def summary(self) -> str:
        """Say the outcome in a few plain lines."""
        elements = sum({trial.input: trial.elements for trial in self.trials}.values())
        head = f"check_adjoint: {self.status}; {len(self.trials)} products over"
        lines = [f"{head} {elements} gradient elements"]
        if self.status == "nothing_checked":
            empty = sorted({trial.input for trial in self.trials if not trial.elements})
            lines.append(f"no element of {', '.join(empty) or 'any input'} takes part")
        lines += [str(trial) for trial in self.trials if trial.elements and not trial.passed]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data fit for JSON: no NaN, no infinity, no tuples."""
        data = plain(asdict(self))
        assert isinstance(data, dict)
        return data | {"status": self.status, "passed": self.passed}


def check_adjoint(
    jvp: Callable[..., Any],
    vjp: Callable[..., Any],
    tangents: Any,
    cotangents: Any,
    *,
    names: Sequence[str] | None = None,
    terms: int = 16,
    trials: int = 3,
    seed: int = 0,
) -> AdjointResult:
    """Test in float64 that a vector-Jacobian product is the adjoint of a Jacobian-vector product.

    For each input in turn random numbers are drawn for its tangent ``v`` (zeros for the others)
    and for the cotangents ``w``. The two products may differ by

        terms * u * (sum of abs(w J v) + sum of abs(v J^T w)),   u = 2^-53,

    the roundings of ``terms`` operations per element on each side. Errors that are larger in a
    single element show, but not where they are; :func:`oracle.gradients.check_vjp` tells where.

    Args:
        jvp: called with one tangent per input; returns the tangents of the outputs: float64
            tensors, or what :func:`oracle.gradients.numeric_jvp` returns, whose error estimates
            are then allowed too.
        vjp: called with one cotangent per output; returns the gradients of the inputs in float64
            (None for zero).
        tangents: a tensor of each input's shape, on its device; their values are not used.
        cotangents: a tensor of each output's shape.
        names: a name for every input, for messages.
        terms: how many roundings an element of either side has; more for sums over long axes.
        trials: how many draws for each input.
        seed: of the draws.

    Returns:
        The result; true if the test passed.

    Raises:
        TypeError: if one side returns another type than float64.
        ValueError: if shapes or counts do not fit, or there is nothing to test.

    Example:
        >>> import torch
        >>> a = torch.randn(5, 3, dtype=torch.float64)
        >>> v, w = torch.empty(3), torch.empty(5)
        >>> bool(check_adjoint(lambda v: a @ v, lambda w: a.T @ w, v, w))
        True
    """
    started = time.perf_counter()
    domain, codomain = _as_tuple(tangents), _as_tuple(cotangents)
    labels = tuple(names) if names is not None else tuple(f"input {i}" for i in range(len(domain)))
    if not domain or not codomain or trials < 1 or len(labels) != len(domain):
        raise ValueError(
            f"nothing to test: {len(domain)} tangents, {len(codomain)} cotangents, {trials} trials,"
            f" {len(labels)} names"
        )
    generator = torch.Generator().manual_seed(seed)
    results = []
    for trial in range(1, trials + 1):
        w = [_draw(like, generator) for like in codomain]
        gradients = _read_gradients(vjp(*(each.clone() for each in w)), domain)
        for number, like in enumerate(domain):
            v = _draw(like, generator)
            moved = [
                v.clone() if place == number else torch.zeros_like(_draw_shape(other))
                for place, other in enumerate(domain)
            ]
            values, slack = _read_outputs(jvp(*moved), codomain)
            forward, forward_size = dot(values, w)
            backward, backward_size = dot([gradients[number]], [v])
            allowed = terms * _UNIT * (forward_size + backward_size)
            allowed += float(sum((s * each.abs()).sum() for s, each in zip(slack, w, strict=True)))
            results.append(
                AdjointTrial(labels[number], trial, forward, backward, allowed, like.numel())
            )
    return AdjointResult(tuple(results), time.perf_counter() - started)


def dot(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Multiply float64 tensors elementwise and add everything up, as if without rounding.

    Each product is split into its float64 value and its error (T. J. Dekker's product), and all
    are added by two-sums in a tree whose errors are added up again; what is lost is of second
    order: below n^2 u^2 times the sum of magnitudes.

    Returns:
        The sum, and the sum of the products' magnitudes.
    """
    sums, size = [], 0.0
    for a, b in zip(left, right, strict=True):
        value, error = _two_product(a.reshape(-1), b.reshape(-1))
        size += float(value.abs().sum())
        sums += [*_add_up(value), float(error.sum())]
    return math.fsum(sums), size


def _two_product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    value = a * b
    a_high, b_high = ((x * _SPLIT) - ((x * _SPLIT) - x) for x in (a, b))
    a_low, b_low = a - a_high, b - b_high
    return value, a_low * b_low - (((value - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _add_up(values: torch.Tensor) -> list[float]:
    """Return a few numbers that add up to the sum of a vector."""
    parts = []
    while values.numel() > 1:
        half = values.numel() // 2
        if values.numel() % 2:
            parts.append(float(values[-1]))
        values, errors = two_sum(values[:half], values[half : 2 * half])
        parts.append(float(errors.sum()))
    return [*parts, *values.tolist()]


def _as_tuple(tensors: Any) -> tuple[torch.Tensor, ...]:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)


def _draw(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    random = torch.randn(like.shape, dtype=torch.float64, generator=generator)
    return random.to(like.device)


def _draw_shape(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=torch.float64, device=like.device)


def _read_gradients(returned: Any, domain: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    gradients = _as_tuple(returned) if returned is not None else (None,)
    if len(gradients) != len(domain):
        raise ValueError(
            f"the vjp returned {len(gradients)} gradients for {len(domain)} inputs; return one for"
            " each (None for zero)"
        )
    result = []
    for number, (gradient, like) in enumerate(zip(gradients, domain, strict=True)):
        if gradient is None:
            result.append(torch.zeros_like(_draw_shape(like)))
            continue
        _check_side("vjp", number, gradient, like)
        result.append(gradient.detach())
    return result


def _read_outputs(
    returned: Any, codomain: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the output tangents and what is allowed for the error of each."""
    single = isinstance(returned, torch.Tensor | NumericDerivative)
    outputs = (returned,) if single else tuple(returned)
    if len(outputs) != len(codomain):
        raise ValueError(f"the jvp returned {len(outputs)} outputs for {len(codomain)} cotangents")
    values, slack = [], []
    for number, (output, like) in enumerate(zip(outputs, codomain, strict=True)):
        numeric = isinstance(output, NumericDerivative)
        value = output.value if numeric else output
        _check_side("jvp", number, value, like)
        values.append(value.detach())
        slack.append(output.allowed if numeric else torch.zeros_like(value))
    return values, slack


def _check_side(side: str, number: int, value: torch.Tensor, like: torch.Tensor) -> None:
    if value.dtype != torch.float64:
        raise TypeError(
            f"result {number} of the {side} is {value.dtype}; the adjoint test is in float64: judge"
            " low precision with check_vjp"
        )
    if value.shape != like.shape:
        raise ValueError(
            f"result {number} of the {side} has shape {tuple(value.shape)}; expected"
            f" {tuple(like.shape)}"
        )
