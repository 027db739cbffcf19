"""The heart of the checks: gradients held against derivatives, every element of every input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..rounding import format_of
from .budgets import (
    LARGEST_FACTOR,
    Allowed,
    Budget,
    NoiseFloor,
    Terms,
    factor_beside,
    from_terms,
    measure_noise,
    within,
)
from .cotangents import Cotangent, make_cotangents, one_hot
from .derivative import (
    K,
    NumericDerivative,
    columns,
    directional,
    few_threads,
    look_around,
)
from .evaluation import Point
from .findings import Finding, InputResult
from .noise import nearby, noise_of, scales
from .tally import Compared, Tally

Gradients = Callable[[Sequence[torch.Tensor]], Sequence["torch.Tensor | None"]]
"""Given one cotangent per output, the gradient of each differentiated input, or None."""

NearbyGradients = Callable[
    [Sequence[torch.Tensor], Sequence[torch.Tensor]], Sequence["torch.Tensor | None"]
]
"""Given the cotangents and the differentiated inputs, likewise."""

JACOBIAN_ENTRIES = 1 << 24
"""Up to so many entries the derivative is found numerically, and compared entry by entry."""

RESOLUTION = 1e-7
"""A numeric derivative must be known this well, relative to the largest one of its input element
(or the outputs over the element's size), to judge a gradient by it."""

FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    AssertionError,
)
"""What code raises when it meets a case that it was not written for."""

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_UNIT = 2.0**-53
_HOPELESS = 1e-3
_NOISE_LIMIT = 1e-10
_ADJOINT_DIRECTIONS = 3
_FLOAT64_DEVIATIONS = 16.0


@dataclass(frozen=True)
class Settings:
    """How to judge; see :func:`oracle.gradients.check_vjp`."""

    step: float | None = None
    atol: float = 0.0
    rtol: float = 0.0
    resolution: float = RESOLUTION
    seed: int = 0
    repeats: int = 20
    nondet_tol: float | None = None
    cotangents: int = 3
    derivative: str = "auto"
    budget: Budget | None = None
    check_dtypes: bool = True

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if self.derivative not in ("auto", "numeric", "autograd"):
            raise ValueError(
                f"derivative is {self.derivative!r}; use 'auto', 'numeric' or 'autograd'"
            )
        for name in ("cotangents", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.step is not None and not self.step > 0:
            raise ValueError(f"the step is {self.step}; it must be positive")
        for name in ("atol", "rtol", "resolution"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")


@dataclass(frozen=True)
class Judgement:
    """What came of it; the parts of a :class:`oracle.gradients.GradientResult`."""

    method: str
    budget: str
    cotangents: dict[str, int]
    inputs: tuple[InputResult, ...]
    findings: list[Finding]
    remarks: list[str]


@dataclass(frozen=True)
class _Fed:
    """A cotangent and the gradients that came back, float64 and flat, NaN where unusable."""

    cotangent: Cotangent
    gradients: tuple[torch.Tensor, ...]


class Judge:
    """Holds gradients against the derivatives of a function at a point.

    Args:
        point: the function and where.
        gradients: what is judged.
        nearby_gradients: the same for other values of the differentiated inputs.
        absent: why the gradient of a differentiated input is None: ``missing`` or ``detached``.
        cotangent_dtypes: the type of each output's cotangent.
        settings: how to judge.
        eager: computes other gradients of the same function in the inputs' type, None where it
            cannot: what they err tells what is to be allowed.
    """

    def __init__(
        self,
        point: Point,
        gradients: Gradients,
        nearby_gradients: NearbyGradients,
        absent: Callable[[int], str],
        cotangent_dtypes: Sequence[torch.dtype],
        settings: Settings,
        eager: Callable[[Sequence[torch.Tensor]], list[torch.Tensor | None] | None] | None,
    ) -> None:
        self._eager = eager
        self._factors: dict[int, float] = {}
        self._point = point
        self._gradients = gradients
        self._nearby_gradients = nearby_gradients
        self._own_noise: list[float] = [0.0] * len(point.tensors)
        self._absent = absent
        self._dtypes = tuple(cotangent_dtypes)
        self._settings = settings
        self._findings: list[Finding] = []
        self._seen: set[tuple[str, int]] = set()
        self._noises: dict[tuple[str, int], tuple[torch.Tensor, ...]] = {}
        names = [point.arguments.names[place] for place in point.arguments.checked]
        self._tallies = [
            Tally(name, tensor.shape) for name, tensor in zip(names, point.tensors, strict=True)
        ]

    def judge(self) -> Judgement:
        """Feed the cotangents and compare."""
        with few_threads(self._point):
            return self._judge()

    def _judge(self) -> Judgement:
        point, settings = self._point, self._settings
        cotangents = make_cotangents(
            point.outputs, self._dtypes, settings.cotangents, settings.seed
        )
        fed = self._feed(cotangents)
        self._check_reproducible(fed[0])
        low = [tally.dtype for tally in self._tallies if tally.dtype != "float64"]
        kinds: dict[str, int] = {}
        for cotangent in cotangents:
            kinds[cotangent.kind] = kinds.get(cotangent.kind, 0) + 1
        budget = settings.budget or NoiseFloor()
        entries = point.input_count * len(point.base)
        numeric = settings.derivative == "numeric" or (
            settings.derivative == "auto" and entries <= JACOBIAN_ENTRIES
        )
        if numeric:
            jacobian = not low and entries <= JACOBIAN_ENTRIES
            if jacobian:
                kinds["one-hot"] = len(point.base)
            self._judge_numerically(fed, budget, jacobian)
        else:
            self._judge_by_autograd(fed, budget)
        for tally in self._tallies:
            self._findings += tally.findings()
        method = (
            "central differences in float64, extrapolated, of every entry"
            if numeric
            else "autograd through the forward in float64, cross-checked by central differences"
            f" along {_ADJOINT_DIRECTIONS} random directions"
        )
        text = f"{K:g} estimates and the rounding floor" + (f", and {budget}" if low else "")
        remarks = list(point.arguments.remarks())
        if settings.atol or settings.rtol:
            text += f", and atol {settings.atol:g} + rtol {settings.rtol:g}"
            remarks.append("atol and rtol were given: differences are allowed beyond the estimates")
        if self._factors:
            factors = ", ".join(
                f"{self._tallies[number].name} {factor:.3g}"
                for number, factor in self._factors.items()
            )
            remarks.append(f"the noise floor's factors: {factors}")
        remarks += [
            f"{tally.name}: its gradient is None, which agrees with a derivative of zero"
            for tally in self._tallies
            if tally.absent and not tally.result().disagreeing
        ]
        results = tuple(tally.result() for tally in self._tallies)
        return Judgement(method, text, kinds, results, self._findings, remarks)

    def _feed(self, cotangents: Sequence[Cotangent]) -> list[_Fed]:
        """Run the backward on each cotangent.

        What it raises for the first one is the caller's to see; if it raises for another layout
        of the same shape, that is a finding.
        """
        first, *others = cotangents
        fed = [_Fed(first, tuple(self._call(first.tensors)))]
        for cotangent in others:
            try:
                fed.append(_Fed(cotangent, tuple(self._call(cotangent.tensors))))
            except FAILURES as error:
                message = (
                    f"for the {cotangent.name} cotangent the backward raises"
                    f" {type(error).__name__}: {error}; real programs pass such ones"
                )
                self._findings.append(Finding("raises", "", message))
        return fed

    def _call(self, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients flat and in float64, noting what is wrong with their form."""
        returned = self._gradients(cotangents)
        flat = []
        for number, (tally, tensor, given, gradient) in enumerate(
            zip(
                self._tallies,
                self._point.tensors,
                self._point.arguments.tensors,
                returned,
                strict=True,
            )
        ):
            if gradient is None:
                tally.absent = tally.absent or self._absent(number)
                flat.append(torch.zeros_like(tensor).reshape(-1))
                continue
            self._check_form(number, given, gradient)
            if gradient.dtype != torch.float64:
                tally.dtype = str(gradient.dtype).removeprefix("torch.")
            flat.append(
                gradient.detach().to(tensor.device, torch.float64).reshape(-1)
                if gradient.shape == tensor.shape
                else torch.full_like(tensor, torch.nan).reshape(-1)
            )
        return flat

    def _check_form(self, number: int, given: torch.Tensor, gradient: torch.Tensor) -> None:
        name = self._tallies[number].name
        if gradient.shape != given.shape:
            self._note(
                "wrong_shape",
                number,
                f"{name} has shape {tuple(given.shape)}, its gradient"
                f" {tuple(gradient.shape)}{_missing_sum(gradient.shape, given.shape)}",
            )
        if gradient.device != given.device:
            self._note(
                "wrong_device",
                number,
                f"{name} is on {given.device}, its gradient on {gradient.device}",
            )
        if gradient.dtype not in _DTYPES:
            raise TypeError(
                f"the gradient of {name} is {gradient.dtype}; known are"
                f" {', '.join(str(dtype) for dtype in _DTYPES)}"
            )
        if gradient.dtype != given.dtype and self._settings.check_dtypes:
            self._note(
                "wrong_dtype",
                number,
                f"{name} is {given.dtype}, its gradient {gradient.dtype}; return the input's type,"
                " or pass check_grad_dtypes=False if another one is meant",
            )

    def _note(self, kind: str, number: int, message: str) -> None:
        """Keep a finding once per input."""
        if (kind, number) not in self._seen:
            self._seen.add((kind, number))
            self._findings.append(Finding(kind, self._tallies[number].name, message))

    def _check_reproducible(self, first: _Fed) -> None:
        """Call again with the same cotangent and compare bits."""
        settings = self._settings
        differing = [0] * len(self._tallies)
        largest = [0.0] * len(self._tallies)
        for _ in range(settings.repeats - 1):
            again = self._call(first.cotangent.tensors)
            for number, (old, new) in enumerate(zip(first.gradients, again, strict=True)):
                if not torch.equal(old.view(torch.int64), new.view(torch.int64)):
                    differing[number] += 1
                    change = float((new - old).abs().max())
                    largest[number] = max(
                        largest[number], math.inf if math.isnan(change) else change
                    )
        for number, count in enumerate(differing):
            if not count:
                continue
            tolerance = settings.nondet_tol
            decides = tolerance is not None and not largest[number] <= tolerance
            self._findings.append(
                Finding(
                    "not_reproducible",
                    self._tallies[number].name,
                    f"{self._tallies[number].name}: {count} of {settings.repeats - 1} repetitions"
                    f" returned other bits, by up to {largest[number]:.3g}"
                    + (f" (nondet_tol is {tolerance:g})" if tolerance is not None else ""),
                    decides=decides,
                )
            )

    # By differences -----------------------------------------------------------------------------

    def _judge_numerically(self, fed: Sequence[_Fed], budget: Budget, jacobian: bool) -> None:
        point = self._point
        seen = look_around(point, self._settings.seed)
        if jacobian:
            # A backward may take another path where memory lies otherwise, and round otherwise.
            for each in fed:
                if each.cotangent.name in ("random 1", "strided"):
                    measured = self._measure_own_noise(each.cotangent, seen.largest)
                    self._own_noise = list(map(max, self._own_noise, measured))
        rows = self._jacobian_rows() if jacobian else None
        weights = torch.stack([each.cotangent.flat for each in fed], dim=1)
        for number, tally in enumerate(self._tallies):
            natural = seen.largest / scales(point.tensors[number])
            parts = []
            for places, derivative in columns(point, number, seen.noise, self._settings.step):
                scale = natural[places.start : places.stop]
                if rows is not None:
                    analytic = rows[number][:, places.start : places.stop].T
                    compared = self._compare(number, derivative, analytic, scale)
                    tally.add(places.start, compared, self._output_name)
                parts.append(_contract(derivative, weights, scale))
            if parts:
                target = _Target.join(parts)
                self._judge_gradients(number, fed, target, budget)

    def _measure_own_noise(self, cotangent: Cotangent, largest: float) -> list[float]:
        """Measure what rounding does to the gradients themselves, for each input.

        It is not seen in the function's values: the gradient of f - f is made of roundings only.
        No more than a small part of the gradient's size is believed to be rounding.
        """
        tensors = self._point.tensors
        seen: list[list[torch.Tensor]] = [[] for _ in tensors]
        try:
            for moved in nearby((*tensors, *cotangent.tensors), self._settings.seed):
                inputs, cotangents = moved[: len(tensors)], moved[len(tensors) :]
                returned = self._nearby_gradients(cotangents, inputs)
                for values, gradient, tensor in zip(seen, returned, tensors, strict=True):
                    fits = gradient is not None and gradient.shape == tensor.shape
                    values.append(gradient if fits else torch.zeros_like(tensor))  # type: ignore[arg-type]
        except FAILURES:
            # The point itself is what the gradient is asked for; it need not exist beside it.
            return [0.0] * len(tensors)
        noises = []
        for values, tensor in zip(seen, tensors, strict=True):
            if not tensor.numel():
                noises.append(0.0)
                continue
            stacked = torch.stack([value.detach().to(torch.float64) for value in values])
            size = float(torch.where(torch.isfinite(stacked), stacked, 0.0).abs().max())
            natural = (largest or 1.0) / float(scales(tensor).max())
            noise = float(noise_of(stacked).max())
            noises.append(min(noise, _NOISE_LIMIT * max(size, natural)))
        return noises

    def _jacobian_rows(self) -> list[torch.Tensor]:
        """Run the backward on every one-hot cotangent: per input ``[outputs, elements]``."""
        point = self._point
        rows = [
            torch.empty(len(point.base), tensor.numel(), dtype=torch.float64, device=tensor.device)
            for tensor in point.tensors
        ]
        at = 0
        for output, shape in enumerate(point.shapes):
            for place in range(math.prod(shape)):
                # All cotangents have one type here, as low precision has no Jacobian.
                cotangent = one_hot(point.outputs, self._dtypes[output], output, place)
                for matrix, gradient in zip(rows, self._call(cotangent), strict=True):
                    matrix[at] = gradient
                at += 1
        return rows

    def _output_name(self, flat: int) -> str:
        output, index = self._point.place_of(flat)
        return f"output {output}{list(index)}"

    def _compare(
        self,
        number: int,
        derivative: NumericDerivative,
        analytic: torch.Tensor,
        natural: torch.Tensor,
    ) -> Compared:
        numeric = derivative.value
        known = derivative.allowed
        own = self._own_noise[number]
        allowed = known + own + self._settings.atol + self._settings.rtol * numeric.abs()
        accepted = (analytic - numeric).abs() <= allowed
        # Where an element has no derivative, 0 * inf may spoil its other entries as well.
        lost = ~torch.isfinite(numeric).all(dim=1, keepdim=True) & ~torch.isfinite(analytic)
        finite = torch.where(torch.isfinite(numeric), numeric, 0.0).abs()
        scale = torch.maximum(finite.amax(dim=1), natural)[:, None]
        return Compared(
            numeric,
            analytic,
            accepted,
            allowed,
            derivative.estimate,
            derivative.floor + own,
            derivative.step,
            derivative.kink,
            self._unresolved(known, accepted, scale) | lost,
        )

    def _unresolved(
        self, known: torch.Tensor, accepted: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        """Return where agreement says too little, or disagreement may be the derivative's fault."""
        vague = ~(known <= self._settings.resolution * scale)
        return vague & (accepted | ~(known <= _HOPELESS * scale))

    def _judge_gradients(
        self, number: int, fed: Sequence[_Fed], target: _Target, budget: Budget
    ) -> None:
        """Compare the gradients of one input for all cotangents with what they should be."""
        tally = self._tallies[number]
        for at, each in enumerate(fed):
            analytic = each.gradients[number]
            known = target.estimate[:, at] * K + target.floor[:, at]
            own = self._own_noise[number]
            accepts = self._accepted(
                number, each.cotangent, target.value[:, at], known + own, budget
            )
            accepted = accepts.accepts(analytic)
            numeric = target.value[:, at]
            compared = Compared(
                numeric,
                analytic,
                accepted,
                torch.maximum(accepts.high - numeric, numeric - accepts.low),
                target.estimate[:, at],
                target.floor[:, at] + own,
                target.step,
                target.kink[:, at],
                self._unresolved(known, accepted, target.scale[:, at]),
            )
            name = each.cotangent.name
            tally.add(0, compared, lambda _, name=name: name)  # type: ignore[misc]

    def _accepted(
        self,
        number: int,
        cotangent: Cotangent,
        value: torch.Tensor,
        known: torch.Tensor,
        budget: Budget,
    ) -> Allowed:
        """Return what is accepted as the gradient of one input, flat."""
        settings = self._settings
        tally = self._tallies[number]
        radius = known + settings.atol + settings.rtol * value.abs()
        if tally.dtype == "float64":
            return within(value, radius, None)
        fmt = format_of(tally.dtype)
        if isinstance(budget, Terms):
            supplied = budget.terms(cotangent.tensors, self._point.arguments.tensors)[number]
            if supplied is not None:
                self._check_terms(number, supplied, value, known)
                return from_terms(supplied.reshape(len(supplied), -1), budget.contract, fmt)
            budget = NoiseFloor()
        noise = fmt.unit_roundoff * self._noise(cotangent, budget)[number].reshape(-1)
        if number not in self._factors:
            self._factors[number] = budget.factor or self._measure_factor(
                number, cotangent, value, noise
            )
        radius = radius + self._factors[number] * noise + fmt.smallest
        return within(value, radius, fmt)

    def _measure_factor(
        self, number: int, cotangent: Cotangent, value: torch.Tensor, noise: torch.Tensor
    ) -> float:
        """Return how many times the noise to allow, from the error of eager gradients."""
        if self._eager is None:
            return LARGEST_FACTOR
        try:
            gradients = self._eager(cotangent.tensors)
        except FAILURES:
            # The forward does not know this type; that is no fault of what is judged.
            return LARGEST_FACTOR
        gradient = None if gradients is None else gradients[number]
        if gradient is None or gradient.dtype == torch.float64:
            return LARGEST_FACTOR
        fmt = format_of(gradient.dtype)
        error = (gradient.detach().to(torch.float64).reshape(-1) - value).abs()
        return factor_beside(error - fmt.unit_roundoff * value.abs() - fmt.smallest, noise)

    def _check_terms(
        self, number: int, terms: torch.Tensor, value: torch.Tensor, known: torch.Tensor
    ) -> None:
        """Make sure that the supplied terms are those of the derivative."""
        flat = terms.to(torch.float64).reshape(len(terms), -1)
        if flat.shape[1] != value.numel():
            raise ValueError(
                f"the terms of {self._tallies[number].name} have shape {tuple(terms.shape)};"
                f" expected [count, *{tuple(self._tallies[number].shape)}]"
            )
        error = (flat.sum(dim=0) - value).abs()
        allowed = known + len(flat) * 2 * _UNIT * flat.abs().sum(dim=0)
        wrong = ~(error <= allowed) & torch.isfinite(value)
        if bool(wrong.any()):
            place = int(wrong.to(torch.uint8).argmax())
            self._note(
                "terms_disagree",
                number,
                f"{self._tallies[number].name}: the terms supplied add up to"
                f" {float(flat[:, place].sum()):.12g} at flat place {place}, where the derivative"
                f" is {float(value[place]):.12g} +- {float(known[place]):.2g}",
            )

    def _noise(self, cotangent: Cotangent, budget: NoiseFloor) -> tuple[torch.Tensor, ...]:
        """Measure the noise of all gradients, once for each cotangent."""
        key = (cotangent.name, budget.perturbations)
        if key not in self._noises:
            self._noises[key] = measure_noise(
                lambda cotangents, inputs: autograd_gradients(self._point, cotangents, inputs),
                tuple(tensor.to(torch.float64) for tensor in cotangent.tensors),
                self._point.tensors,
                budget.perturbations,
                self._settings.seed,
            )
        return self._noises[key]

    # By autograd --------------------------------------------------------------------------------

    def _judge_by_autograd(self, fed: Sequence[_Fed], budget: Budget) -> None:
        point = self._point
        targets = []
        for at, each in enumerate(fed):
            wide = tuple(tensor.to(torch.float64) for tensor in each.cotangent.tensors)
            gradients = autograd_gradients(point, wide, point.tensors)
            noise = self._noise(each.cotangent, NoiseFloor())
            targets.append((gradients, noise))
            if at == 0:
                self._cross_check(each.cotangent.flat, gradients)
        for number in range(len(self._tallies)):
            values = torch.stack([gradient[number].reshape(-1) for gradient, _ in targets], dim=1)
            floors = torch.stack([noise[number].reshape(-1) for _, noise in targets], dim=1)
            target = _Target(
                value=values,
                estimate=torch.zeros_like(values),
                floor=_FLOAT64_DEVIATIONS * _UNIT * floors,
                scale=values.abs().amax(dim=0, keepdim=True).expand(values.shape),
                kink=torch.zeros_like(values, dtype=torch.bool),
                step=torch.zeros(len(values), dtype=torch.float64, device=values.device),
            )
            self._judge_gradients(number, fed, target, budget)

    def _cross_check(self, weights: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """Hold autograd's gradient against differences of the forward along random directions."""
        point = self._point
        noise = look_around(point, self._settings.seed).noise
        generator = torch.Generator().manual_seed(self._settings.seed)
        for _ in range(_ADJOINT_DIRECTIONS):
            direction = [
                torch.randn(tensor.shape, dtype=torch.float64, generator=generator).to(
                    tensor.device
                )
                for tensor in point.tensors
            ]
            along = directional(point, direction, noise)
            products = torch.cat(
                [(v * g).reshape(-1) for v, g in zip(direction, gradients, strict=True)]
            )
            forward, backward = float(along.value @ weights), float(products.sum())
            allowed = float(along.allowed @ weights.abs())
            allowed += 32 * _UNIT * float(products.abs().sum())
            if not abs(forward - backward) <= allowed:
                self._findings.append(
                    Finding(
                        "reference_gradient",
                        "",
                        f"along a random direction the forward changes by {forward:.12g}, but its"
                        f" gradient by autograd in float64 says {backward:.12g} (allowed difference"
                        f" {allowed:.2g}): a backward of its own is wrong somewhere; compare with a"
                        " reference in plain torch operations to see where, or use smaller shapes",
                    )
                )
                return


@dataclass(frozen=True)
class _Target:
    """What the gradient of one input should be; ``[elements, cotangents]``, step ``[elements]``."""

    value: torch.Tensor
    estimate: torch.Tensor
    floor: torch.Tensor
    scale: torch.Tensor
    kink: torch.Tensor
    step: torch.Tensor

    @classmethod
    def join(cls, parts: Sequence[_Target]) -> _Target:
        """Put the elements of several parts one after the other."""
        names = ("value", "estimate", "floor", "scale", "kink", "step")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def _contract(
    derivative: NumericDerivative, weights: torch.Tensor, natural: torch.Tensor
) -> _Target:
    """Weigh rows of the Jacobian, ``[elements, outputs]``, with ``[outputs, cotangents]``."""
    size = weights.abs()
    known = torch.isfinite(derivative.value) & torch.isfinite(derivative.estimate)
    value = torch.where(known, derivative.value, 0.0)
    magnitude = value.abs() @ size
    # No sum of so many products errs by more in practice, whatever its order.
    rounding = (8 + 2 * math.sqrt(len(weights))) * _UNIT * magnitude
    lost = (~known).to(torch.float64) @ size > 0
    estimate = torch.where(known, derivative.estimate, 0.0) @ size
    return _Target(
        value=torch.where(lost, torch.nan, value @ weights),
        estimate=torch.where(lost, torch.inf, estimate),
        floor=derivative.floor @ size + rounding,
        scale=torch.maximum(magnitude, natural[:, None]),
        kink=derivative.kink.to(torch.float64) @ size > 0,
        step=torch.where(derivative.step > 0, derivative.step, torch.inf).amin(dim=1),
    )


def autograd_gradients(
    point: Point, cotangents: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Differentiate a point's function by autograd, in float64.

    Raises:
        ValueError: if autograd cannot.
    """
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    outputs = point.outputs_at(leaves)
    pairs = [
        (output, cotangent)
        for output, cotangent in zip(outputs, cotangents, strict=True)
        if output.requires_grad
    ]
    if not pairs:
        raise ValueError(
            "autograd does not reach the inputs through the forward, so no noise floor can be"
            " measured and no large gradient computed; write the forward in differentiable torch"
            " operations, or supply Terms and use derivative='numeric'"
        )
    gradients = torch.autograd.grad(
        [output for output, _ in pairs],
        leaves,
        [cotangent.to(output.dtype) for output, cotangent in pairs],
        allow_unused=True,
    )
    return tuple(
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
    )


def _missing_sum(got: Sequence[int], wanted: Sequence[int]) -> str:
    """Say so where a shape looks like one that was not summed over a broadcast axis."""
    padded = (1,) * (len(got) - len(wanted)) + tuple(wanted)
    if len(padded) != len(got):
        return ""
    axes = [axis for axis, (g, w) in enumerate(zip(got, padded, strict=True)) if w == 1 and g != 1]
    rest = all(w in (g, 1) for g, w in zip(got, padded, strict=True))
    extra = [*range(len(got) - len(wanted)), *axes]
    if not rest or not extra:
        return ""
    return f": the sum over the broadcast axes {sorted(set(extra))} is missing"
