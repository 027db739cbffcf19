"""Numeric derivatives in float64: Jacobians and directional derivatives with error estimates.

A value is trusted to ``K * estimate + floor`` (:data:`K`): the estimate is of the truncation error
and no bound, so it is multiplied by a constant found by experiment (``reports/gradcheck.py``); the
floor covers rounding, in the function's values and in a gradient computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..certified import one_thread
from .differences import RATIO, ROWS, Best, Ladder
from .evaluation import Arguments, Function, Point
from .noise import nearby, noise_of, scales

K = 8.0
"""How many estimates a derivative may be off. Of 7,946 derivatives stopped early, where truncation
dominates, the worst is off by 5.3 estimates, one in a hundred by 1.1 (``reports/gradcheck.md``)."""

_GRADIENT_ROUNDINGS = 32
_UNIT = 2.0**-53
_BLOCK = 1 << 18
_FIRST_STEP = 0.75
_SMALL = 1 << 16


@dataclass(frozen=True)
class NumericDerivative:
    """Derivatives with what is known about their errors; all tensors have the same shape.

    Attributes:
        value: float64; NaN where there is none.
        estimate: of the truncation error, not a bound; infinity where there is no value.
        floor: what rounding can do, in the function and in a float64 gradient compared with it.
        step: the smallest step that the value was made with.
        kink: whether the function is not differentiable here: its slopes on both sides differ
            down to the smallest step, or it jumps.
    """

    value: torch.Tensor
    estimate: torch.Tensor
    floor: torch.Tensor
    step: torch.Tensor
    kink: torch.Tensor

    @property
    def allowed(self) -> torch.Tensor:
        """How far another value may be from this one: ``K * estimate + floor``."""
        return K * self.estimate + self.floor

    def reshape(self, *shape: int) -> NumericDerivative:
        """Return the same in another shape."""
        return NumericDerivative(*(getattr(self, name).reshape(shape) for name in _FIELDS))


_FIELDS = ("value", "estimate", "floor", "step", "kink")


def numeric_jacobian(
    func: Function,
    inputs: Any,
    *,
    wrt: Sequence[int] | None = None,
    step: float | None = None,
) -> tuple[tuple[NumericDerivative, ...], ...]:
    """Differentiate a function of tensors numerically, in float64.

    Args:
        func: called with the inputs, floating ones as float64; returns a tensor or a sequence of
            tensors, and leaves its inputs alone.
        inputs: a tensor, or a sequence of tensors and other arguments.
        wrt: the places of the inputs to differentiate with respect to; None for all floating ones.
        step: the first and largest step; by default about the size of the numbers in the input.

    Returns:
        ``jacobian[output][input]`` of shape ``[*output shape, *input shape]``, over the floating
        outputs and the differentiated inputs.

    Raises:
        TypeError: for complex or sparse tensors.
        ValueError: if there is nothing to differentiate, or ``func`` changes its inputs.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> ((jacobian,),) = numeric_jacobian(lambda x: x**2, x)
        >>> bool((jacobian.value - torch.diag(2 * x)).abs().max() < 1e-12)
        True
    """
    point = Point(func, Arguments.read(inputs, wrt))
    with few_threads(point):
        return _jacobian(point, step)


def _jacobian(point: Point, step: float | None) -> tuple[tuple[NumericDerivative, ...], ...]:
    noise = look_around(point).noise
    sizes = [math.prod(shape) for shape in point.shapes]
    result: list[list[NumericDerivative]] = [[] for _ in sizes]
    for number, tensor in enumerate(point.tensors):
        blocks = [block for _, block in columns(point, number, noise, step)]
        whole = _join(blocks, tensor.numel(), len(point.base))
        for output, shape in enumerate(point.shapes):
            start = sum(sizes[:output])
            part = NumericDerivative(
                *(
                    getattr(whole, name)[:, start : start + sizes[output]].T.contiguous()
                    for name in _FIELDS
                )
            )
            result[output].append(part.reshape(*shape, *tensor.shape))
    return tuple(tuple(row) for row in result)


def numeric_jvp(
    func: Function,
    inputs: Any,
    tangents: Any,
    *,
    wrt: Sequence[int] | None = None,
    step: float | None = None,
) -> tuple[NumericDerivative, ...]:
    """Differentiate a function along one direction numerically, in float64.

    Args:
        func: as in :func:`numeric_jacobian`.
        inputs: likewise.
        tangents: one tensor for each differentiated input, of its shape.
        wrt: the places of these inputs; None for all floating ones.
        step: the first and largest multiple of the tangents that is added; by default such that
            the inputs change by about their own size.

    Returns:
        The derivative of every floating output.

    Raises:
        TypeError: for complex or sparse tensors.
        ValueError: if the tangents do not fit the inputs.
    """
    point = Point(func, Arguments.read(inputs, wrt))
    given = (tangents,) if isinstance(tangents, torch.Tensor) else tuple(tangents)
    shapes = [tuple(tensor.shape) for tensor in point.tensors]
    if [tuple(tangent.shape) for tangent in given] != shapes:
        raise ValueError(
            f"tangents of shapes {[tuple(tangent.shape) for tangent in given]} were given for"
            f" inputs of shapes {shapes}"
        )
    direction = [tangent.detach().to(torch.float64) for tangent in given]
    with few_threads(point):
        whole = directional(point, direction, look_around(point).noise, step)
    parts = [point.split(getattr(whole, name)) for name in _FIELDS]
    return tuple(NumericDerivative(*fields) for fields in zip(*parts, strict=True))


@dataclass(frozen=True)
class Evaluations:
    """What values near a point tell about a function.

    Attributes:
        noise: float64 ``[outputs]``, the error of a value beyond a few roundings.
        largest: the largest finite absolute value of all outputs.
    """

    noise: torch.Tensor
    largest: float


def few_threads(point: Point) -> AbstractContextManager[None]:
    """Return a context in which torch computes small things on one CPU thread."""
    small = point.input_count + len(point.base) <= _SMALL
    return one_thread() if small and point.base.device.type == "cpu" else nullcontext()


def look_around(point: Point, seed: int = 0) -> Evaluations:
    """Measure the error of a function's values, and how large they are."""
    values = torch.stack([point.at(tensors) for tensors in nearby(point.tensors, seed)])
    finite = torch.where(torch.isfinite(values), values, 0.0)
    noise = noise_of(values)
    for part in point.split(noise):
        if part.numel():
            # Roundings that happened to show nowhere are hardly smaller than those beside them.
            part.clamp_(min=float(part.median()))
    return Evaluations(noise=noise, largest=float(finite.abs().max()) if finite.numel() else 0.0)


def columns(
    point: Point, number: int, noise: torch.Tensor, step: float | None = None
) -> Iterator[tuple[range, NumericDerivative]]:
    """Yield the Jacobian with respect to one input, some of its elements at a time.

    Args:
        point: the function and where.
        number: which of the differentiated inputs.
        noise: from :func:`look_around`.
        step: the first step; None for 3/4 of the numbers' own size.

    Yields:
        The elements' flat places, and derivatives ``[elements, outputs]``.
    """
    if not len(point.base):
        return
    flat = point.tensors[number].view(-1)
    first = scales(flat) * _FIRST_STEP if step is None else torch.full_like(flat, step)
    at_once = max(1, _BLOCK // max(1, len(point.base)))
    for start in range(0, flat.numel(), at_once):
        places = range(start, min(start + at_once, flat.numel()))
        yield places, _block(point, number, places, first, noise)


def _block(
    point: Point, number: int, places: range, first: torch.Tensor, noise: torch.Tensor
) -> NumericDerivative:
    here = point.tensors[number].view(-1)[places.start : places.stop].clone()
    first = first[places.start : places.stop]
    active = torch.arange(len(places), device=here.device)
    ladder = Ladder(point.base, noise)
    done: list[Best] = []
    order: list[torch.Tensor] = []
    for row in range(ROWS):
        step = first[active] / float(RATIO**row)
        above, below = here[active] + step, here[active] - step
        ends = [
            torch.stack(
                [
                    point.moved(number, places.start + place, value)
                    for place, value in zip(active.tolist(), end.tolist(), strict=True)
                ]
            )
            for end in (above, below)
        ]
        ladder.add(ends[0], ends[1], above - here[active], here[active] - below)
        if row < 2:
            continue
        best = ladder.best()
        finished = ladder.finished(best)
        if bool(finished.any()):
            done.append(best.select(finished))
            order.append(active[finished])
            active = active[~finished]
            if not active.numel():
                break
            ladder.keep(~finished)
    return _derivative(Best.gather(done, torch.cat(order)), point)


def directional(
    point: Point,
    direction: Sequence[torch.Tensor],
    noise: torch.Tensor,
    step: float | None = None,
) -> NumericDerivative:
    """Return the derivative along a direction, ``[outputs]``; arguments as in :func:`columns`."""
    if step is None:
        sizes = [scales(tensor) for tensor in point.tensors]
        reach = torch.cat([part.reshape(-1) for part in direction]).abs()
        moved = reach > 0
        ratio = torch.cat(sizes)[moved] / reach[moved]
        # The geometric mean of the steps that change each number by its own size.
        step = float(torch.exp2(ratio.log2().mean().round())) * _FIRST_STEP if len(ratio) else 1.0
    ladder = Ladder(point.base, noise)
    best = None
    for row in range(ROWS):
        length = step / float(RATIO**row)
        ends = [
            point.at([x + sign * length * v for x, v in zip(point.tensors, direction, strict=True)])
            for sign in (1, -1)
        ]
        taken = torch.tensor([length], dtype=torch.float64, device=point.base.device)
        ladder.add(ends[0][None], ends[1][None], taken, taken)
        if row >= 2:
            best = ladder.best()
            if bool(ladder.finished(best).all()):
                break
    assert best is not None
    return _derivative(best, point).reshape(-1)


def _derivative(best: Best, point: Point) -> NumericDerivative:
    """Mark what is not finite, and add a gradient's own roundings to the floor."""
    lost = ~torch.isfinite(point.base) | ~torch.isfinite(best.value)
    value = torch.where(lost, torch.nan, best.value)
    largest = torch.where(torch.isfinite(value), value, 0.0).abs().amax(dim=1, keepdim=True)
    floor = best.floor + _GRADIENT_ROUNDINGS * _UNIT * largest
    estimate = torch.where(lost, torch.inf, best.estimate)
    return NumericDerivative(value, estimate, floor, best.step, best.kink)


def _join(blocks: Sequence[NumericDerivative], elements: int, outputs: int) -> NumericDerivative:
    if not blocks:
        empty = torch.zeros(elements, outputs, dtype=torch.float64)
        return NumericDerivative(empty, empty, empty, empty, empty.bool())
    return NumericDerivative(
        *(torch.cat([getattr(block, name) for block in blocks]) for name in _FIELDS)
    )
