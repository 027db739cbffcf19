"""Gradient checks of differentiable functions, to stand where torch.autograd.gradcheck stood."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad

from .budgets import Budget
from .cotangents import Cotangent, make_cotangents
from .derivative import directional, look_around
from .evaluation import Arguments, Function, Point, read_outputs
from .findings import Finding, GradientResult
from .graph import Graph, eager_gradients
from .judging import FAILURES, RESOLUTION, Judge, Settings
from .vjp import make_result

_FORWARD_MODE_DIRECTIONS = 3

# torch has no annotations for these.
_dual_level: Any = forward_ad.dual_level
_make_dual: Any = forward_ad.make_dual
_unpack_dual: Any = forward_ad.unpack_dual
_SLACK = 256


def gradcheck(
    func: Function,
    inputs: Any,
    *,
    eps: float | None = None,
    atol: float = 0.0,
    rtol: float = 0.0,
    raise_exception: bool = True,
    nondet_tol: float | None = None,
    check_undefined_grad: bool = True,
    check_grad_dtypes: bool = False,
    check_batched_grad: bool = False,
    check_batched_forward_grad: bool = False,
    check_forward_ad: bool = False,
    check_backward_ad: bool = True,
    fast_mode: bool = False,
    masked: bool | None = None,
    only_requires_grad: bool = False,
    names: Sequence[str] | None = None,
    reference: Function | None = None,
    budget: Budget | None = None,
    derivative: str = "auto",
    repeats: int = 20,
    resolution: float = RESOLUTION,
    seed: int = 0,
) -> GradientResult:
    """Check the gradients that autograd computes for a function.

    It is called as torch.autograd.gradcheck is. What differs: every floating input is checked,
    whether it requires a gradient or not; tolerances come from error estimates; inputs in
    bfloat16, float16 or float32 are judged by a budget against a float64 derivative; and what is
    returned says what was found (it is true if the check passed).

    Args:
        func: takes the inputs, returns a tensor or a sequence of tensors, and leaves its inputs
            alone. Without a ``reference`` it is also called with float64 copies of the inputs.
        inputs: a tensor, or a sequence of tensors and other arguments.
        eps: the first and largest step of the differences; by default about the inputs' size.
        atol: an absolute difference allowed beyond the estimates (torch's default is 1e-5).
        rtol: a difference allowed beyond the estimates, relative to the derivative (torch: 1e-3).
        raise_exception: raise where the check does not pass; else only return the result.
        nondet_tol: by how much repetitions of one backward may differ; None: differences are
            reported and do not decide (torch: 0.0, which decides).
        check_undefined_grad: also leave the cotangent of each output undefined.
        check_grad_dtypes: whether each gradient must have its input's dtype.
        check_batched_grad: also compute the gradients of a batch of cotangents through vmap.
        check_batched_forward_grad: not offered.
        check_forward_ad: also hold forward-mode derivatives against differences, all outputs along
            random directions.
        check_backward_ad: must be True: this is a check of backward gradients.
        fast_mode: not offered: one projection of the Jacobian misses single wrong entries.
        masked: must not be True: sparse tensors are not supported.
        only_requires_grad: check only the inputs that require a gradient, as torch does.
        names: a name for every input, for messages.
        reference: what is differentiated in float64, in place of ``func`` itself: the same function
            in plain torch operations, where ``func`` is a kernel that knows no float64.
        budget: as for :func:`oracle.gradients.check_vjp`.
        derivative: likewise.
        repeats: likewise.
        resolution: likewise.
        seed: likewise.

    Returns:
        The result.

    Raises:
        GradientCheckFailed: an AssertionError, if the check did not pass.
        GradientCheckInconclusive: a GradientCheckFailed, if nothing is wrong, but some entries
            could not be judged.
        TypeError: for complex or sparse tensors.
        ValueError: if there is nothing to check, or for an argument that is not offered.

    Example:
        >>> import torch
        >>> x = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
        >>> bool(gradcheck(torch.sin, x))
        True
    """
    _refuse(check_batched_forward_grad, check_backward_ad, fast_mode, masked)
    started = time.perf_counter()
    settings = Settings(
        step=eps,
        atol=atol,
        rtol=rtol,
        resolution=resolution,
        seed=seed,
        repeats=repeats,
        nondet_tol=nondet_tol,
        derivative=derivative,
        budget=budget,
        check_dtypes=check_grad_dtypes,
    )
    arguments = Arguments.read(inputs, _places(inputs, only_requires_grad), names)
    point = Point(reference or func, arguments)
    graph = Graph.build(func, arguments)
    _check_same_outputs(graph, point)
    dtypes = [output.dtype for output in graph.outputs]
    eager = None if reference is None else eager_gradients(reference, arguments)

    def nearby_gradients(
        cotangents: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        return Graph.build(func, arguments.replaced(tensors)).gradients(cotangents)

    judge = Judge(
        point, graph.gradients, nearby_gradients, graph.why_absent, dtypes, settings, eager
    )
    judgement = judge.judge()
    findings = list(judgement.findings)
    findings += _layout_findings(point, graph)
    first, *_ = make_cotangents(graph.outputs, dtypes, 1, seed)
    findings += _alone_findings(func, arguments, graph, first)
    if check_undefined_grad:
        findings += _undefined_findings(graph, first)
    if check_batched_grad:
        findings += _batched_findings(graph, dtypes, seed)
    if check_forward_ad:
        findings += _forward_mode_findings(point, func, settings)
    judgement.remarks.extend(
        f"output {number} does not require a gradient"
        for number, output in enumerate(graph.outputs)
        if not output.requires_grad
    )
    if only_requires_grad:
        judgement.remarks.extend(_unchecked(arguments))
    result = make_result("gradcheck", func, judgement, findings, point, started)
    if raise_exception:
        result.raise_for_failure()
    return result


def gradgradcheck(
    func: Function,
    inputs: Any,
    grad_outputs: Any = None,
    *,
    gen_non_contig_grad_outputs: bool = False,
    raise_exception: bool = True,
    seed: int = 0,
    **options: Any,
) -> GradientResult:
    """Check second derivatives: the gradients of what autograd computes as gradients.

    The function checked takes the inputs and one cotangent per output, and returns the gradients
    of the floating inputs.

    Args:
        func: as for :func:`gradcheck`; its gradients are differentiated.
        inputs: likewise, in float64.
        grad_outputs: a cotangent for each floating output; None for random ones.
        gen_non_contig_grad_outputs: make the random ones non-contiguous.
        raise_exception: raise where the check does not pass.
        seed: of all that is random.
        options: further arguments of :func:`gradcheck`.

    Returns:
        The result; its inputs are those of ``func``, then the cotangents.

    Raises:
        GradientCheckFailed: as :func:`gradcheck`.
        TypeError: for inputs that are not float64.
        ValueError: if no output depends on the inputs.
    """
    arguments = Arguments.read(inputs)
    for place in arguments.checked:
        if arguments.values[place].dtype != torch.float64:
            raise TypeError(
                f"{arguments.names[place]} is {arguments.values[place].dtype}; second derivatives"
                " are checked in float64 only"
            )
    outputs = Graph.build(func, arguments).outputs
    if grad_outputs is None:
        drawn = make_cotangents(outputs, [output.dtype for output in outputs], 1, seed)
        cotangents = drawn[1 if gen_non_contig_grad_outputs else 0].tensors
    elif isinstance(grad_outputs, torch.Tensor):
        cotangents = (grad_outputs,)
    else:
        cotangents = tuple(grad_outputs)
    if len(cotangents) != len(outputs):
        raise ValueError(
            f"{len(cotangents)} cotangents were given for {len(outputs)} floating outputs"
        )
    count = len(arguments.values)

    def gradient_of(*values: Any) -> tuple[torch.Tensor, ...]:
        given = list(values[:count])
        for place in arguments.checked:
            if not given[place].requires_grad:
                given[place] = given[place].detach().requires_grad_()
        leaves = [given[place] for place in arguments.checked]
        pairs = [
            (output, cotangent)
            for output, cotangent in zip(read_outputs(func(*given)), values[count:], strict=True)
            if output.requires_grad
        ]
        if not pairs:
            raise ValueError("no output is connected with the inputs; check gradcheck first")
        gradients = torch.autograd.grad(
            [output for output, _ in pairs],
            leaves,
            [cotangent for _, cotangent in pairs],
            create_graph=True,
            allow_unused=True,
        )
        return tuple(
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, gradients, strict=True)
        )

    gradient_of.__qualname__ = f"gradient of {getattr(func, '__qualname__', type(func).__name__)}"
    names = (*arguments.names, *(f"cotangent {number}" for number in range(len(cotangents))))
    values = (*arguments.values, *cotangents)
    return gradcheck(
        gradient_of, values, names=names, raise_exception=raise_exception, seed=seed, **options
    )


def _refuse(
    batched_forward: bool, check_backward: bool, fast_mode: bool, masked: bool | None
) -> None:
    if fast_mode:
        raise ValueError(
            "fast_mode compares one random projection of the Jacobian, which misses single wrong"
            " entries; leave it out, or use check_adjoint for large shapes"
        )
    if masked:
        raise ValueError("masked=True is for sparse tensors, which are not supported")
    if batched_forward:
        raise ValueError(
            "check_batched_forward_grad is not offered; use torch.autograd.gradcheck for it"
        )
    if not check_backward:
        raise ValueError(
            "check_backward_ad=False leaves nothing to check here; compare forward-mode derivatives"
            " with numeric_jvp"
        )


def _check_same_outputs(graph: Graph, point: Point) -> None:
    shapes = [tuple(output.shape) for output in graph.outputs]
    expected = [tuple(shape) for shape in point.shapes]
    if shapes != expected:
        raise ValueError(
            f"the function returns outputs of shapes {shapes}, in float64 of {expected}; they must"
            " be the same"
        )


def _places(inputs: Any, only_requires_grad: bool) -> tuple[int, ...] | None:
    if not only_requires_grad:
        return None
    values = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    places = tuple(
        place
        for place, value in enumerate(values)
        if isinstance(value, torch.Tensor) and value.requires_grad
    )
    if not places:
        raise ValueError("nothing to check: only_requires_grad=True, and no input requires one")
    return places


def _unchecked(arguments: Arguments) -> list[str]:
    return [
        f"{name} was not checked: it does not require a gradient, and only_requires_grad=True"
        for place, (name, value) in enumerate(zip(arguments.names, arguments.values, strict=True))
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and place not in arguments.checked
    ]


def _differs(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether two gradients differ by more than rounding in another order does.

    None is zero. What is not finite in one of them says nothing: 0 * inf is no number.
    """
    given = [gradient for gradient in (one, other) if gradient is not None]
    if not given or given[0].numel() == 0:
        return False
    first, second = given if len(given) == 2 else (given[0], torch.zeros_like(given[0]))
    finite = torch.isfinite(first) & torch.isfinite(second)
    first, second = torch.where(finite, first, 0), torch.where(finite, second, 0)
    largest = float(torch.maximum(first.abs(), second.abs()).max())
    limit = _SLACK * torch.finfo(first.dtype).eps * largest
    return not bool(((first - second).abs() <= limit).all())


def _layout_findings(point: Point, graph: Graph) -> list[Finding]:
    """Hold the outputs for inputs as they lie in memory against those for contiguous ones."""
    given = torch.cat([output.detach().reshape(-1).to(torch.float64) for output in graph.outputs])
    if any(tensor.dtype != torch.float64 for tensor in (*graph.outputs, *graph.leaves)):
        return []
    if all(leaf.is_contiguous() for leaf in graph.leaves):
        return []
    limit = look_around(point).noise + _SLACK * torch.finfo(torch.float64).eps * point.base.abs()
    wrong = ~((given - point.base).abs() <= limit) & torch.isfinite(point.base)
    if not bool(wrong.any()):
        return []
    output, index = point.place_of(int(wrong.to(torch.uint8).argmax()))
    return [
        Finding(
            "layout_dependent",
            "",
            f"{int(wrong.sum())} outputs differ between the inputs as they lie in memory and"
            f" contiguous copies, the first at output {output}{list(index)}: strides are ignored"
            " somewhere",
        )
    ]


def _alone_findings(
    func: Function, arguments: Arguments, graph: Graph, cotangent: Cotangent
) -> list[Finding]:
    """Let each input alone require a gradient: the others may not change it."""
    if len(graph.leaves) < 2:
        return []
    together = graph.gradients(cotangent.tensors)
    findings = []
    for number, place in enumerate(arguments.checked):
        name = arguments.names[place]
        try:
            alone = Graph.build(func, arguments, [number]).gradients(cotangent.tensors)[number]
        except FAILURES as error:
            problem = f"raises {type(error).__name__}: {error}"
        else:
            if not _differs(alone, together[number]):
                continue
            problem = "is None" if alone is None else "is another one"
        findings.append(
            Finding(
                "depends_on_requires_grad",
                name,
                f"the gradient of {name} {problem} where no other input requires one; look at what"
                " the backward makes of needs_input_grad",
            )
        )
    return findings


def _undefined_findings(graph: Graph, cotangent: Cotangent) -> list[Finding]:
    """Leave each output's cotangent undefined: that must mean zero."""
    findings = []
    for number, output in enumerate(graph.outputs):
        if not output.requires_grad:
            continue
        zeroed = list(cotangent.tensors)
        zeroed[number] = torch.zeros_like(zeroed[number])
        expected = graph.gradients(zeroed)
        try:
            found = graph.with_undefined(cotangent.tensors, number)
        except FAILURES as error:
            problem = f"raises {type(error).__name__}: {error}"
        else:
            if not any(_differs(f, e) for f, e in zip(found, expected, strict=True)):
                continue
            problem = "returns other gradients than for zeros"
        findings.append(
            Finding(
                "undefined_gradient",
                "",
                f"with the cotangent of output {number} left undefined the backward {problem}; it"
                " is given None then, which means zero",
            )
        )
    return findings


def _batched_findings(graph: Graph, dtypes: Sequence[torch.dtype], seed: int) -> list[Finding]:
    """Compute gradients for a batch of cotangents through vmap."""
    several = make_cotangents(graph.outputs, dtypes, 2, seed)[:2]
    stacked = [torch.stack(pair) for pair in zip(*(each.tensors for each in several), strict=True)]
    try:
        batch = graph.batched(stacked)
    except FAILURES as error:
        message = f"vmap over the backward raises {type(error).__name__}: {error}"
        return [Finding("batched_gradient", "", message)]
    for at, each in enumerate(several):
        single = graph.gradients(each.tensors)
        for found, expected in zip(batch, single, strict=True):
            if _differs(None if found is None else found[at], expected):
                message = "gradients of a batch of cotangents differ from those one by one"
                return [Finding("batched_gradient", "", message)]
    return []


@contextmanager
def _forward_mode() -> Iterator[None]:
    """Enter torch's forward mode."""
    with warnings.catch_warnings():
        # At the first time torch scripts some decompositions, and warns that it may not.
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        with _dual_level():
            yield


def _forward_mode_findings(point: Point, func: Function, settings: Settings) -> list[Finding]:
    """Hold forward-mode derivatives in float64 against differences."""
    noise = look_around(point, settings.seed).noise
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(_FORWARD_MODE_DIRECTIONS):
        direction = [
            torch.randn(tensor.shape, dtype=torch.float64, generator=generator).to(tensor.device)
            for tensor in point.tensors
        ]
        numeric = directional(point, direction, noise, settings.step)
        values = list(point.values)
        try:
            with _forward_mode():
                for place, tangent in zip(point.arguments.checked, direction, strict=True):
                    values[place] = _make_dual(values[place].clone(), tangent)
                tangents = [_unpack_dual(output).tangent for output in read_outputs(func(*values))]
        except FAILURES as error:
            message = f"forward mode raises {type(error).__name__}: {error}"
            return [Finding("forward_mode", "", message)]
        found = torch.cat(
            [
                torch.zeros(shape, dtype=torch.float64).reshape(-1)
                if tangent is None
                else tangent.detach().to(torch.float64).reshape(-1)
                for tangent, shape in zip(tangents, point.shapes, strict=True)
            ]
        )
        allowed = numeric.allowed + settings.atol + settings.rtol * numeric.value.abs()
        wrong = ~((found - numeric.value).abs() <= allowed) & ~numeric.kink
        if bool(wrong.any()):
            place = int(wrong.to(torch.uint8).argmax())
            output, index = point.place_of(place)
            return [
                Finding(
                    "forward_mode",
                    "",
                    f"along a random direction output {output}{list(index)} changes by"
                    f" {float(numeric.value[place]):.12g}, but forward mode says"
                    f" {float(found[place]):.12g} (allowed difference {float(allowed[place]):.2g})",
                )
            ]
    return []
