"""A backward that is a function of its own, such as a separate kernel, against its forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .budgets import Budget
from .evaluation import Arguments, Function, Point, copy_as_laid_out, same_bits
from .findings import Finding, GradientResult, ordered
from .graph import eager_gradients
from .judging import RESOLUTION, Judge, Judgement, Settings


def check_vjp(
    forward: Function,
    backward: Callable[..., Any],
    inputs: Any,
    *,
    wrt: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    budget: Budget | None = None,
    derivative: str = "auto",
    cotangent_dtype: torch.dtype | None = None,
    cotangents: int = 3,
    repeats: int = 20,
    nondet_tol: float | None = None,
    check_grad_dtypes: bool = True,
    eps: float | None = None,
    atol: float = 0.0,
    rtol: float = 0.0,
    resolution: float = RESOLUTION,
    seed: int = 0,
) -> GradientResult:
    """Check a backward (a vector-Jacobian product) against the derivative of its forward.

    The forward is differentiated in float64, whatever the inputs' type; the backward is called
    with the inputs as they are given, in their type and memory layout, and with cotangents that
    are contiguous, strided and expanded. A float64 backward is also called with every one-hot
    cotangent, and the whole Jacobian compared, entry by entry. A backward in bfloat16, float16 or
    float32 is judged element by element by a budget.

    Args:
        forward: called with the inputs, floating ones as float64; returns a tensor or a sequence
            of tensors and leaves its inputs alone.
        backward: called with one cotangent for each floating output of the forward, in order,
            then all inputs; returns one gradient for each differentiated input, or for each input
            (None for the others).
        inputs: a tensor, or a sequence of tensors and other arguments. Integer tensors and other
            arguments are passed on.
        wrt: places of the inputs to differentiate with respect to; None for all floating ones.
        names: a name for every input, for messages.
        budget: what a low-precision gradient may return: :class:`oracle.gradients.Terms`, or the
            measured :class:`oracle.gradients.NoiseFloor` that is the default. Not used in float64.
        derivative: ``numeric`` differences every input element, with at least six evaluations of
            the forward each; ``autograd`` differentiates the forward in float64 by autograd and
            cross-checks that along random directions; ``auto`` takes the first up to 2^24 entries
            of the Jacobian.
        cotangent_dtype: the cotangents' type; None for that of the first differentiated input.
        cotangents: how many contiguous random ones.
        repeats: how often the same call is made to see whether its bits are reproducible.
        nondet_tol: by how much repetitions may differ; None: it is reported and does not decide.
        check_grad_dtypes: whether each gradient must have its input's dtype.
        eps: the first and largest step of the differences; by default about the inputs' size.
        atol: an absolute difference allowed beyond the estimates.
        rtol: a difference allowed beyond the estimates, relative to the derivative.
        resolution: how well a derivative must be known, relative to the size of its input
            element's, to judge by it; else the entry is ``unresolved``.
        seed: of the cotangents and perturbations.

    Returns:
        The result; true if the check passed. Call its ``raise_for_failure()`` in a test.

    Raises:
        TypeError: for complex or sparse tensors.
        ValueError: if there is nothing to check, or an argument means nothing.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        >>> result = check_vjp(lambda x: x**2, lambda g, x: 2 * x * g, x)
        >>> result.status, result.inputs[0].entries
        ('passed', 14)
    """
    started = time.perf_counter()
    settings = Settings(
        step=eps,
        atol=atol,
        rtol=rtol,
        resolution=resolution,
        seed=seed,
        repeats=repeats,
        nondet_tol=nondet_tol,
        cotangents=cotangents,
        derivative=derivative,
        budget=budget,
        check_dtypes=check_grad_dtypes,
    )
    arguments = Arguments.read(inputs, wrt, names)
    point = Point(forward, arguments)
    dtype = cotangent_dtype or arguments.tensors[0].dtype
    call = _BackwardCall(backward, arguments)
    dtypes = [dtype] * len(point.outputs)
    eager = eager_gradients(forward, arguments)
    judge = Judge(point, call, call.nearby, lambda _: "missing", dtypes, settings, eager)
    judgement = judge.judge()
    findings = judgement.findings + call.findings
    return make_result("check_vjp", backward, judgement, findings, point, started)


def make_result(
    check: str,
    function: Any,
    judgement: Judgement,
    findings: list[Finding],
    point: Point,
    started: float,
) -> GradientResult:
    """Put a judgement and further findings together."""
    return GradientResult(
        check=check,
        function=name_of(function),
        method=judgement.method,
        budget=judgement.budget,
        cotangents=judgement.cotangents,
        inputs=judgement.inputs,
        findings=ordered(findings),
        remarks=tuple(judgement.remarks),
        evaluations=point.evaluations,
        seconds=time.perf_counter() - started,
    )


def name_of(function: Any) -> str:
    """Return a callable's name."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


class _BackwardCall:
    """Calls a backward with inputs as they lie in memory, and sees whether it changes them."""

    def __init__(self, backward: Callable[..., Any], arguments: Arguments) -> None:
        self._backward = backward
        self._arguments = arguments
        self._values = [_fresh(value) for value in arguments.values]
        self.findings: list[Finding] = []

    def __call__(self, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        fed = [copy_as_laid_out(cotangent) for cotangent in cotangents]
        returned = self._backward(*fed, *self._values)
        for number, (before, after) in enumerate(zip(cotangents, fed, strict=True)):
            if not same_bits(before, after):
                self._report(f"cotangent {number}")
        for place, (before, after) in enumerate(
            zip(self._arguments.values, self._values, strict=True)
        ):
            if isinstance(before, torch.Tensor) and not same_bits(before, after):
                self._report(self._arguments.names[place])
                self._values[place] = _fresh(before)
        return self._select(returned)

    def nearby(
        self, cotangents: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Call with other values of the differentiated inputs."""
        values = [_fresh(value) for value in self._arguments.values]
        for place, tensor in zip(self._arguments.checked, inputs, strict=True):
            if place in self._arguments.overlapping:
                values[place] = tensor.to(values[place].dtype)
            else:
                values[place].copy_(tensor)
        fed = [copy_as_laid_out(cotangent) for cotangent in cotangents]
        return self._select(self._backward(*fed, *values))

    def _report(self, name: str) -> None:
        if all(finding.input != name for finding in self.findings):
            message = f"the backward changes {name}; callers still need it, so write to new memory"
            self.findings.append(Finding("changes_inputs", name, message))

    def _select(self, returned: Any) -> list[torch.Tensor | None]:
        """Return one gradient for each differentiated input."""
        checked = self._arguments.checked
        gradients = (
            (returned,)
            if isinstance(returned, torch.Tensor) or returned is None
            else tuple(returned)
        )
        if len(gradients) == len(self._arguments.values):
            gradients = tuple(gradients[place] for place in checked)
        if len(gradients) != len(checked):
            raise ValueError(
                f"the backward returned {len(gradients)} gradients; expected one for each of the"
                f" {len(checked)} differentiated inputs, or for each of the"
                f" {len(self._arguments.values)} inputs"
            )
        for place, gradient in zip(checked, gradients, strict=True):
            if gradient is not None and not isinstance(gradient, torch.Tensor):
                raise TypeError(
                    f"the gradient of {self._arguments.names[place]} is"
                    f" {type(gradient).__name__}; return a tensor or None"
                )
        return list(gradients)


def _fresh(value: Any) -> Any:
    return copy_as_laid_out(value) if isinstance(value, torch.Tensor) else value
