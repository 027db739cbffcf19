"""The backward of an operator family against the derivative of its forward.

A pair of operators is matched by names and order: inputs of the backward that are no inputs of the
forward are the cotangents of the forward's outputs, in order; outputs of the backward are the
gradients of the forward's floating inputs, in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..budget import Contract
from ..comparison import compare
from ..definition import InvalidInput, Operator, TensorSpec
from ..verdict import RegionResult
from .adjoint import check_adjoint
from .cotangents import make_cotangents
from .derivative import numeric_jvp
from .findings import Entry, Finding, GradientResult, InputResult, ordered
from .vjp import check_vjp, name_of


@dataclass(frozen=True)
class OperatorPair:
    """A forward operator and the operator that is its backward.

    Attributes:
        forward: the forward.
        backward: the backward.

    Raises:
        InvalidInput: if the two do not belong together.
    """

    forward: Operator
    backward: Operator

    def __post_init__(self) -> None:
        """Check that the counts fit."""
        cotangents, outputs = len(self.cotangents), len(self.forward.outputs)
        gradients, inputs = len(self.backward.outputs), len(self.floating)
        if cotangents != outputs or gradients != inputs:
            raise InvalidInput(
                f"{self.backward.id} is no backward of {self.forward.id}: it takes {cotangents}"
                f" cotangents for {outputs} outputs, and returns {gradients} gradients for"
                f" {inputs} floating inputs"
            )

    @property
    def cotangents(self) -> tuple[TensorSpec, ...]:
        """The backward's inputs that are cotangents."""
        known = {spec.name for spec in self.forward.inputs}
        return tuple(spec for spec in self.backward.inputs if spec.name not in known)

    @property
    def floating(self) -> tuple[TensorSpec, ...]:
        """The forward's inputs that have gradients."""
        return tuple(spec for spec in self.forward.inputs if spec.indexes is None)

    def backward_inputs(
        self, cotangents: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the backward's inputs by name, in call order.

        Args:
            cotangents: one for each output of the forward.
            inputs: all inputs of the forward, in order.
        """
        given = dict(zip([spec.name for spec in self.forward.inputs], inputs, strict=True))
        given |= dict(zip([spec.name for spec in self.cotangents], cotangents, strict=True))
        return {spec.name: given[spec.name] for spec in self.backward.inputs}

    def backward_function(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``compute``, which takes the backward's inputs, as :func:`check_vjp` calls it."""
        outputs = len(self.forward.outputs)

        def backward(*tensors: torch.Tensor) -> Any:
            named = self.backward_inputs(tensors[:outputs], tensors[outputs:])
            return compute(*named.values())

        backward.__qualname__ = name_of(compute)
        return backward


def check_operator_vjp(
    forward: Operator, backward: Operator, inputs: Mapping[str, torch.Tensor], **options: Any
) -> GradientResult:
    """Check the reference of a backward operator against the derivative of the forward's.

    Both are computed in float64, and every entry of the Jacobian is compared.

    Args:
        forward: the forward operator.
        backward: its backward.
        inputs: the forward's inputs by name, of any floating type.
        options: further arguments of :func:`oracle.gradients.check_vjp`.

    Returns:
        The result, with the forward's floating inputs.

    Raises:
        InvalidInput: if the inputs do not fit, or the two operators do not belong together.
    """
    pair = OperatorPair(forward, backward)
    forward.bind(inputs)
    ordered_inputs = _in_order(forward, inputs)

    def compute(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return backward.reference(tensors, torch.float64)

    compute.__qualname__ = f"{backward.id} (reference)"
    wide = [
        tensor.to(torch.float64) if tensor.is_floating_point() else tensor
        for tensor in ordered_inputs
    ]
    return check_vjp(
        lambda *tensors: forward.reference(tensors, torch.float64),
        pair.backward_function(compute),
        wide,
        names=[spec.name for spec in forward.inputs],
        **options,
    )


def check_operator_gradients(
    forward: Operator,
    backward: Operator,
    candidate: Callable[..., Any],
    inputs: Mapping[str, torch.Tensor],
    *,
    contract: Contract = "stored_intermediates",
    seed: int = 0,
) -> GradientResult:
    """Judge a low-precision backward kernel by what its operator says every element is.

    The kernel is called with random, strided and expanded cotangents and compared, element by
    element, with the interval that the contract allows around the exact gradient
    (:func:`oracle.comparison.compare`). That the operator's meaning is the derivative of the
    forward is cross-checked for these inputs by :func:`oracle.gradients.check_adjoint`.

    Args:
        forward: the forward operator.
        backward: its backward.
        candidate: called with the backward's inputs in order; returns its outputs.
        inputs: the forward's inputs by name, in bfloat16, float16 or float32.
        contract: what a gradient is held against.
        seed: of the cotangents.

    Returns:
        The result; its inputs are named after the backward's outputs.

    Raises:
        InvalidInput: if the inputs do not fit, or the two operators do not belong together.
    """
    started = time.perf_counter()
    pair = OperatorPair(forward, backward)
    forward.bind(inputs)
    given = _in_order(forward, inputs)
    dtype = next(tensor.dtype for tensor in given if tensor.is_floating_point())
    device = given[0].device
    shapes = [
        torch.empty(t.shape, device=t.device) for t in forward.reference(given, torch.float64)
    ]
    findings = _cross_check(pair, given, shapes, seed)
    tallies = {spec.name: _OutputTally(spec.name) for spec in backward.outputs}
    kinds: dict[str, int] = {}
    for cotangent in make_cotangents(shapes, [dtype] * len(shapes), 1, seed):
        kinds[cotangent.kind] = kinds.get(cotangent.kind, 0) + 1
        named = pair.backward_inputs(cotangent.tensors, given)
        sizes = backward.bind(named)
        returned = candidate(*named.values())
        outputs = (returned,) if isinstance(returned, torch.Tensor) else tuple(returned)
        if len(outputs) != len(backward.outputs):
            raise ValueError(
                f"{name_of(candidate)} returned {len(outputs)} outputs; {backward.id} has"
                f" {len(backward.outputs)}: " + ", ".join(spec.name for spec in backward.outputs)
            )
        usable: dict[str, torch.Tensor] = {}
        for spec, output in zip(backward.outputs, outputs, strict=True):
            shape = backward.shape(spec, sizes)
            tally = tallies[spec.name]
            tally.see(shape, dtype, device, output, findings)
            usable[spec.name] = (
                output
                if output is not None
                and (output.shape, output.dtype, output.device) == (shape, dtype, device)
                else torch.full(shape, torch.nan, dtype=dtype, device=device)
            )
        for region in compare(backward, named, usable, contract).regions:
            tallies[region.output].add(region, cotangent.name)
    findings += [found for tally in tallies.values() for found in tally.findings()]
    return GradientResult(
        check="check_operator_gradients",
        function=name_of(candidate),
        method=f"the exact meaning of {backward.id}, cross-checked by central differences of"
        f" {forward.id} along random directions",
        budget=f"the contract {contract} of {backward.id}",
        cotangents=kinds,
        inputs=tuple(tally.result() for tally in tallies.values()),
        findings=ordered(findings),
        seconds=time.perf_counter() - started,
    )


def _in_order(operator: Operator, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [inputs[spec.name].detach() for spec in operator.inputs]


def _cross_check(
    pair: OperatorPair,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    seed: int,
) -> list[Finding]:
    floating = [tensor for tensor in inputs if tensor.is_floating_point()]

    def jvp(*tangents: torch.Tensor) -> Any:
        return numeric_jvp(
            lambda *tensors: pair.forward.reference(tensors, torch.float64), inputs, tangents
        )

    def vjp(*cotangents: torch.Tensor) -> Any:
        named = pair.backward_inputs(cotangents, inputs)
        return pair.backward.reference(tuple(named.values()), torch.float64)

    names = [spec.name for spec in pair.floating]
    result = check_adjoint(jvp, vjp, floating, outputs, names=names, trials=1, seed=seed)
    if result.status != "failed":
        return []
    return [Finding("reference_gradient", "", result.summary())]


class _OutputTally:
    """What became of one output of the backward, over all cotangents."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._shape: tuple[int, ...] = ()
        self._dtype = ""
        self._entries = self._agreeing = 0
        self._worst: Entry | None = None
        self._nonzero = False
        self._missing = False
        self._regions: list[str] = []

    def see(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        output: torch.Tensor | None,
        findings: list[Finding],
    ) -> None:
        """Note what is wrong with an output's form."""
        self._shape, self._dtype = shape, str(dtype).removeprefix("torch.")
        if output is None:
            self._missing = True
            return
        self._nonzero |= bool((output != 0).any())
        for kind, got, wanted in (
            ("wrong_shape", tuple(output.shape), shape),
            ("wrong_dtype", output.dtype, dtype),
            ("wrong_device", output.device, device),
        ):
            known = any(each.kind == kind and each.input == self._name for each in findings)
            if got != wanted and not known:
                message = f"{self._name} is {got}; it must be {wanted}"
                findings.append(Finding(kind, self._name, message))

    def add(self, region: RegionResult, cotangent: str) -> None:
        """Count a region."""
        self._entries += region.elements
        self._agreeing += region.within
        if region.within < region.elements:
            self._regions.append(f"{region.elements - region.within} in {region.region}")
        element = region.first_wrong
        if element is None or self._worst is not None:
            return
        exact = float(element.exact or element.expected)
        ends = [float(end) for end in (element.low, element.high) if end]
        got = float(element.got)
        self._worst = Entry(
            index=element.index,
            cotangent=cotangent,
            numeric=exact,
            analytic=got,
            difference=got - exact,
            estimate=0.0,
            floor=0.0,
            allowed=max((abs(end - exact) for end in ends), default=0.0),
            step=0.0,
        )

    def result(self) -> InputResult:
        """Return the counts."""
        largest = 0.0 if self._worst is None else abs(self._worst.difference)
        elements = 1
        for size in self._shape:
            elements *= size
        return InputResult(
            name=self._name,
            shape=self._shape,
            dtype=self._dtype,
            elements=elements,
            entries=self._entries,
            agreeing=self._agreeing,
            worst=self._worst,
            largest_difference=largest,
        )

    def findings(self) -> list[Finding]:
        """Say what is wrong."""
        wrong = self._entries - self._agreeing
        if not wrong:
            return []
        kind = "missing" if self._missing else "wrong_values" if self._nonzero else "zeros"
        message = (
            f"{self._name}: {wrong} of {self._entries} elements are outside the contract"
            f" ({', '.join(self._regions)}); the first: {self._worst}"
        )
        return [Finding(kind, self._name, message)]
