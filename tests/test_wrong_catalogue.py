"""Every wrong kernel has the fault it claims, shows it where it says, and has no other.

A small judge of its own looks at a kernel here: rational arithmetic for values, plain checks for
the rest. Each kernel is called on a case with what it needs to be exposed, and must show exactly
its fault; then on a case without, and must be right.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import Tensor

from oracle.verdict import STATUSES
from tests.rational import BF16, Element, Outputs, acceptance, bits_of, decode, exact_outputs
from tests.wrong import catalogue as c
from tests.wrong import concat_forward, static_backward
from tests.wrong.catalogue import WrongKernel

Inputs = list[Tensor]
Builder = Callable[[], Inputs]

# Inputs


def random_values(*shape: int, seed: int) -> Tensor:
    """bfloat16 values of either sign in [1/2, 2) that use all significand bits."""
    generator = torch.Generator().manual_seed(seed)
    significand = torch.randint(128, 256, shape, generator=generator) / 128
    exponent = torch.randint(-1, 1, shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (sign * significand * 2.0**exponent).bfloat16()


def short_values(*shape: int, seed: int) -> Tensor:
    """Values in [1/2, 2) of four significand bits: their products are exact in float16."""
    bits = random_values(*shape, seed=seed).view(torch.int16) & -0x10
    return bits.view(torch.bfloat16)


def forward_inputs(
    B: int = 2,
    H: int = 3,
    N: int = 5,
    C: int = 7,
    D: int = 8,
    values: Callable[..., Tensor] = random_values,
) -> Inputs:
    shapes = [(B, H, N, D)] * 2 + [(B, 1, N, D)] * 2 + [(B, H, C, D)] * 2
    return [values(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def backward_inputs(
    B: int = 2,
    H: int = 3,
    N: int = 5,
    M: int = 11,
    D: int = 8,
    positions: Sequence[int] = (7, 2, 9, 0, 4),
    values: Callable[..., Tensor] = random_values,
) -> Inputs:
    shapes = [(B, H, M, D)] * 2 + [(B, H, N, D)] + [(B, N, D)] * 2
    floats = [values(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    return [*floats, torch.tensor(positions)]


FORWARD = ("key_states", "value_states", "cos", "sin", "key_cache", "value_cache")
BACKWARD = ("grad_key_cache", "grad_value_cache", "key_states", "cos", "sin", "cache_position")


def named(inputs: Inputs) -> dict[str, Tensor]:
    names = BACKWARD if inputs[-1].dtype == torch.int64 else FORWARD
    return dict(zip(names, inputs, strict=True))


def edited(inputs: Inputs, **edits: Callable[[Tensor], Tensor]) -> Inputs:
    """The inputs with each tensor named replaced by what its function makes of it."""
    return [edits.get(name, Tensor.clone)(tensor) for name, tensor in named(inputs).items()]


def paired(inputs: Inputs) -> Inputs:
    def repeat_first_half(table: Tensor) -> Tensor:
        half = table.chunk(2, dim=-1)[0]
        return torch.cat((half, half), dim=-1)

    return edited(inputs, cos=repeat_first_half, sin=repeat_first_half)


def quarter_turns(inputs: Inputs) -> Inputs:
    """Tables of angles that are multiples of 90 degrees, where cos^2 + sin^2 is exactly 1."""
    cos = named(inputs)["cos"]
    upright = torch.arange(cos.numel()).reshape(cos.shape) % 2
    sign = cos.sign()
    return edited(
        inputs,
        cos=lambda _: (sign * upright).abs().copysign(sign).bfloat16(),
        sin=lambda _: (sign * (1 - upright)).bfloat16(),
    )


def holding(pattern: int, *index: int) -> Callable[[Tensor], Tensor]:
    """An edit that puts a 16-bit pattern at an index."""

    def edit(tensor: Tensor) -> Tensor:
        result = tensor.clone()
        result.view(torch.int16)[index] = pattern if pattern < 2**15 else pattern - 2**16
        return result

    return edit


def scaled_by(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor * factor


def filled(number: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, number)


def halves(first: float, second: float) -> Callable[[Tensor], Tensor]:
    """An edit that fills the two halves of the last axis with a number each."""

    def edit(tensor: Tensor) -> Tensor:
        parts = tensor.chunk(2, dim=-1)
        numbers = (first, second)
        return torch.cat([torch.full_like(p, x) for p, x in zip(parts, numbers, strict=True)], -1)

    return edit


def per_head(*numbers: float) -> Callable[[Tensor], Tensor]:
    """An edit that fills the heads with a number each."""
    column = torch.tensor(numbers, dtype=torch.bfloat16).reshape(1, -1, 1, 1)
    return lambda tensor: column.expand_as(tensor).contiguous()


INFINITY, NAN, NAN_1, NEGATIVE_NAN_1 = 0x7F80, 0x7FC0, 0x7FC1, 0xFFC1
SUBNORMAL, NEGATIVE_ZERO = 0x0001, 0x8000
HALF_ULP = 2.0**-8
ALMOST_ONE = 1 - 2.0**-8


@dataclass(frozen=True)
class Exposure:
    """A case that has what a need names, and one that lacks it (None where none can)."""

    exposing: Builder
    harmless: Builder | None


def forward_with(pattern: int, name: str, *index: int) -> Builder:
    return lambda: edited(forward_inputs(), **{name: holding(pattern, *index)})


FORWARD_EXPOSURES: dict[str, Exposure] = {
    c.ANY: Exposure(forward_inputs, None),
    c.TWO_BATCHES: Exposure(forward_inputs, lambda: forward_inputs(B=1)),
    c.TWO_HEADS: Exposure(forward_inputs, lambda: forward_inputs(H=1)),
    c.TWO_BATCHES_AND_HEADS: Exposure(forward_inputs, lambda: forward_inputs(B=1)),
    c.TWO_TOKENS: Exposure(forward_inputs, lambda: forward_inputs(N=1)),
    c.HEADS_AND_TOKENS: Exposure(forward_inputs, lambda: forward_inputs(N=1)),
    c.OLD_ROWS: Exposure(forward_inputs, lambda: forward_inputs(C=0)),
    c.TWO_ROWS: Exposure(forward_inputs, lambda: forward_inputs(C=0, N=1)),
    c.UNPAIRED_TABLES: Exposure(forward_inputs, lambda: paired(forward_inputs())),
    c.TABLES_OFF_THE_CIRCLE: Exposure(forward_inputs, lambda: quarter_turns(forward_inputs())),
    c.EMPTY_CACHE: Exposure(lambda: forward_inputs(C=0), forward_inputs),
    c.LARGE: Exposure(lambda: forward_inputs(B=1, H=2, N=1, C=4100, D=128), forward_inputs),
    c.BATCHES_FROM_16: Exposure(lambda: forward_inputs(B=18, H=2, N=2, C=2), forward_inputs),
    c.HEADS_FROM_8: Exposure(lambda: forward_inputs(H=10), lambda: forward_inputs(H=8)),
    c.ROWS_FROM_1024: Exposure(lambda: forward_inputs(B=1, H=1, C=1030, D=4), forward_inputs),
    c.LONG_CACHE: Exposure(lambda: forward_inputs(H=1, C=256, D=4), forward_inputs),
    c.PARTIAL_TOKEN_BLOCK: Exposure(lambda: forward_inputs(N=17), lambda: forward_inputs(N=32)),
    c.PARTIAL_ROW_BLOCK: Exposure(lambda: forward_inputs(C=70), lambda: forward_inputs(C=128)),
    c.COPIED_NAN: Exposure(forward_with(NAN, "key_cache", 0, 0, 1, 0), forward_inputs),
    c.COPIED_NAN_PAYLOAD: Exposure(
        forward_with(NAN_1, "value_cache", 0, 0, 1, 0),
        forward_inputs,
    ),
    c.COPIED_SUBNORMAL: Exposure(
        forward_with(SUBNORMAL, "value_states", 0, 0, 1, 0), forward_inputs
    ),
    c.COPIED_NEGATIVE_ZERO: Exposure(
        forward_with(NEGATIVE_ZERO, "key_cache", 0, 0, 1, 0), forward_inputs
    ),
    c.COPIED_INFINITY: Exposure(forward_with(INFINITY, "key_cache", 0, 0, 1, 0), forward_inputs),
    c.COPIED_OUTSIDE_FP16: Exposure(
        lambda: edited(forward_inputs(), value_cache=scaled_by(2.0**-20)), forward_inputs
    ),
    c.PRODUCTS_OUTSIDE_FP16: Exposure(
        lambda: edited(forward_inputs(), key_states=scaled_by(2.0**20)),
        lambda: forward_inputs(values=short_values),
    ),
    c.TIES: Exposure(
        lambda: edited(
            forward_inputs(),
            key_states=filled(1),
            cos=filled(1),
            sin=halves(-HALF_ULP, HALF_ULP),
        ),
        lambda: edited(
            forward_inputs(), key_states=filled(1), cos=filled(1), sin=halves(-0.5, 0.5)
        ),
    ),
    c.CANCELLATION: Exposure(
        lambda: edited(
            forward_inputs(),
            key_states=filled(1),
            cos=filled(1),
            sin=halves(ALMOST_ONE, -ALMOST_ONE),
        ),
        lambda: edited(
            forward_inputs(),
            key_states=filled(1),
            cos=filled(1),
            sin=halves(-ALMOST_ONE, ALMOST_ONE),
        ),
    ),
    c.SUBNORMAL_RESULTS: Exposure(
        lambda: edited(
            forward_inputs(),
            key_states=scaled_by(2.0**-68),
            cos=scaled_by(2.0**-60),
            sin=scaled_by(2.0**-60),
        ),
        forward_inputs,
    ),
    c.COMPUTED_INFINITY: Exposure(forward_with(INFINITY, "key_states", 0, 0, 1, 0), forward_inputs),
    c.COMPUTED_NAN: Exposure(forward_with(NAN, "key_states", 0, 0, 1, 0), forward_inputs),
    c.ZERO_TIMES_INFINITY: Exposure(
        lambda: edited(
            forward_inputs(),
            key_states=holding(INFINITY, 0, 0, 1, 0),
            cos=holding(0, 0, 0, 1, 0),
        ),
        forward_with(0, "cos", 0, 0, 1, 0),
    ),
    c.CPU_OUTPUTS: Exposure(forward_inputs, None),
    c.TWO_CALLS: Exposure(forward_inputs, None),
    c.SAME_MEMORY_TWICE: Exposure(forward_inputs, None),
}


def backward_with(pattern: int, name: str, *index: int) -> Builder:
    return lambda: edited(backward_inputs(), **{name: holding(pattern, *index)})


def run_of_positions() -> Inputs:
    return backward_inputs(positions=range(3, 8))


def filled_cache() -> Inputs:
    return backward_inputs(M=5, positions=range(5))


BACKWARD_EXPOSURES: dict[str, Exposure] = {
    c.ANY: Exposure(backward_inputs, None),
    c.TWO_BATCHES: Exposure(backward_inputs, lambda: backward_inputs(B=1)),
    c.TWO_HEADS: Exposure(backward_inputs, lambda: backward_inputs(H=1)),
    c.THREE_HEADS: Exposure(lambda: backward_inputs(H=8), lambda: backward_inputs(H=1)),
    c.FOUR_HEADS: Exposure(
        lambda: backward_inputs(H=8), lambda: backward_inputs(H=2, values=short_values)
    ),
    c.TWO_BATCHES_AND_HEADS: Exposure(backward_inputs, lambda: backward_inputs(B=1)),
    c.TWO_TOKENS: Exposure(backward_inputs, lambda: backward_inputs(N=1, positions=[7])),
    c.HEADS_AND_TOKENS: Exposure(backward_inputs, lambda: backward_inputs(N=1, positions=[7])),
    c.TWO_TABLE_ROWS: Exposure(backward_inputs, lambda: backward_inputs(B=1, N=1, positions=[7])),
    c.TWO_ROWS: Exposure(backward_inputs, lambda: backward_inputs(M=1, N=1, positions=[0])),
    c.UNTOUCHED_ROWS: Exposure(backward_inputs, filled_cache),
    c.UNPAIRED_TABLES: Exposure(backward_inputs, lambda: paired(backward_inputs())),
    c.LARGE: Exposure(
        lambda: backward_inputs(B=1, H=2, N=2, M=4100, D=128, positions=[4000, 5]),
        backward_inputs,
    ),
    c.BATCHES_FROM_16: Exposure(
        lambda: backward_inputs(B=18, H=2, N=2, M=3, positions=[2, 0]), backward_inputs
    ),
    c.ROWS_FROM_1024: Exposure(lambda: backward_inputs(B=1, H=2, M=1030, D=4), backward_inputs),
    c.POSITIONS_FROM_1024: Exposure(
        lambda: backward_inputs(B=1, H=2, M=1030, D=4, positions=[1025, 2, 9, 0, 4]),
        backward_inputs,
    ),
    c.POSITIONS_FROM_256: Exposure(
        lambda: backward_inputs(B=1, H=2, M=300, D=4, positions=[7, 256, 299, 0, 4]),
        backward_inputs,
    ),
    c.PARTIAL_TOKEN_BLOCK: Exposure(
        lambda: backward_inputs(N=17, M=20, positions=range(17)),
        lambda: backward_inputs(N=32, M=32, positions=range(32)),
    ),
    c.PARTIAL_ROW_BLOCK: Exposure(lambda: backward_inputs(M=70), lambda: backward_inputs(M=128)),
    c.POSITIONS_NOT_ARANGE: Exposure(backward_inputs, lambda: backward_inputs(positions=range(5))),
    c.POSITIONS_NOT_ASCENDING: Exposure(
        backward_inputs, lambda: backward_inputs(positions=[0, 2, 4, 7, 9])
    ),
    c.POSITIONS_WITH_GAPS: Exposure(
        lambda: backward_inputs(positions=[0, 2, 4, 7, 9]), run_of_positions
    ),
    c.POSITIONS_IN_A_RUN: Exposure(run_of_positions, backward_inputs),
    c.POSITIONS_PAST_HALF: Exposure(
        backward_inputs, lambda: backward_inputs(positions=[4, 2, 5, 0, 1])
    ),
    c.ROWS_BEHIND_THE_FIRST_POSITION: Exposure(
        backward_inputs, lambda: backward_inputs(positions=[6, 7, 10, 9, 8])
    ),
    c.EVERY_ROW_NEW: Exposure(filled_cache, backward_inputs),
    c.ZEROED_NON_FINITE: Exposure(
        lambda: edited(
            backward_inputs(),
            grad_key_cache=holding(NAN, 0, 0, 7, 0),
            grad_value_cache=holding(INFINITY, 1, 2, 4, 3),
        ),
        backward_inputs,
    ),
    c.COPIED_NAN: Exposure(backward_with(NAN, "grad_key_cache", 0, 0, 1, 0), backward_inputs),
    c.COPIED_NAN_PAYLOAD: Exposure(
        backward_with(NEGATIVE_NAN_1, "grad_value_cache", 0, 0, 1, 0),
        backward_inputs,
    ),
    c.COPIED_SUBNORMAL: Exposure(
        backward_with(SUBNORMAL, "grad_value_cache", 0, 0, 7, 0), backward_inputs
    ),
    c.COPIED_NEGATIVE_ZERO: Exposure(
        backward_with(NEGATIVE_ZERO, "grad_key_cache", 0, 0, 1, 0), backward_inputs
    ),
    c.COPIED_INFINITY: Exposure(
        backward_with(INFINITY, "grad_key_cache", 0, 0, 1, 0), backward_inputs
    ),
    c.COPIED_OUTSIDE_FP16: Exposure(
        lambda: edited(backward_inputs(), grad_value_cache=scaled_by(2.0**-20)), backward_inputs
    ),
    c.PRODUCTS_OUTSIDE_FP16: Exposure(
        lambda: edited(backward_inputs(), grad_key_cache=scaled_by(2.0**20)),
        lambda: backward_inputs(values=short_values),
    ),
    c.TIES: Exposure(
        lambda: edited(
            backward_inputs(),
            grad_key_cache=filled(1),
            key_states=per_head(1, HALF_ULP, 0),
            cos=filled(1),
            sin=halves(-HALF_ULP, HALF_ULP),
        ),
        lambda: edited(
            backward_inputs(),
            grad_key_cache=filled(1),
            key_states=per_head(1, 0.5, 0),
            cos=filled(1),
            sin=halves(-0.5, 0.5),
        ),
    ),
    c.CANCELLATION: Exposure(
        lambda: edited(
            backward_inputs(), grad_key_cache=filled(1), key_states=per_head(1, -1, HALF_ULP)
        ),
        lambda: edited(backward_inputs(), grad_key_cache=filled(1), key_states=per_head(1, 1, 0.5)),
    ),
    c.SUBNORMAL_RESULTS: Exposure(
        lambda: edited(
            backward_inputs(),
            grad_key_cache=scaled_by(2.0**-68),
            key_states=scaled_by(2.0**-60),
            cos=scaled_by(2.0**-60),
            sin=scaled_by(2.0**-60),
        ),
        backward_inputs,
    ),
    c.COMPUTED_INFINITY: Exposure(
        backward_with(INFINITY, "grad_key_cache", 0, 0, 7, 0), backward_inputs
    ),
    c.COMPUTED_NAN: Exposure(backward_with(NAN, "grad_key_cache", 0, 0, 7, 0), backward_inputs),
    c.ZERO_TIMES_INFINITY: Exposure(
        lambda: edited(
            backward_inputs(),
            grad_key_cache=holding(INFINITY, 0, 0, 7, 0),
            cos=holding(0, 0, 0, 0),
        ),
        backward_with(0, "cos", 0, 0, 0),
    ),
    c.CPU_OUTPUTS: Exposure(backward_inputs, None),
    c.TWO_CALLS: Exposure(backward_inputs, None),
    c.SAME_MEMORY_TWICE: Exposure(backward_inputs, None),
}


@dataclass(frozen=True)
class Family:
    """The wrong kernels of one operator and the cases that expose them."""

    operator: str
    module: ModuleType
    exposures: dict[str, Exposure]
    negated: tuple[str, ...]

    def right(self, inputs: Inputs) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.module.right(*inputs)
        return outputs

    def with_other_answers(self, inputs: Inputs) -> Inputs:
        """Inputs whose right outputs are all negated."""
        return edited(inputs, **dict.fromkeys(self.negated, Tensor.neg))


FAMILIES = (
    Family(
        "kv_rope.concat.forward",
        concat_forward,
        FORWARD_EXPOSURES,
        ("key_states", "value_states", "key_cache", "value_cache"),
    ),
    Family(
        "kv_rope.static.backward",
        static_backward,
        BACKWARD_EXPOSURES,
        ("grad_key_cache", "grad_value_cache"),
    ),
)


# A small judge

POISONS = (float("nan"), 7.0)
GUARD = 128  # elements on both sides of an output tensor


@dataclass(frozen=True)
class Call:
    """What one call returned or wrote; ``snapshots`` are copies made right after it."""

    returned: object
    outputs: tuple[Tensor, ...] | None
    snapshots: list[Tensor]
    guards_intact: bool


def call(kernel: WrongKernel, inputs: Inputs, like: Sequence[Tensor], poison: float) -> Call:
    """Call a kernel with fresh memory, and with style "out" its outputs, full of ``poison``."""

    def poisoned(tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, poison)

    buffers = [torch.full((x.numel() + 2 * GUARD,), poison, dtype=x.dtype) for x in like]
    given = [buffer[GUARD:-GUARD].view(x.shape) for buffer, x in zip(buffers, like, strict=True)]
    style_out = kernel.style == "out"
    with mock.patch.object(torch, "empty_like", poisoned):
        returned = kernel.function(*inputs, *(given if style_out else ()))
    outputs = tuple(given) if style_out else _as_outputs(returned, len(like))
    guards = torch.cat([part for b in buffers for part in (b[:GUARD], b[-GUARD:])])
    intact = same_bits([guards], [poisoned(guards)])
    return Call(returned, outputs, [x.clone() for x in outputs or ()], intact)


def _as_outputs(returned: object, count: int) -> tuple[Tensor, ...] | None:
    if not isinstance(returned, tuple) or len(returned) != count:
        return None
    return returned if all(isinstance(x, Tensor) for x in returned) else None


def share_memory(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return any(
        x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() and x.numel() and y.numel()
        for x in left
        for y in right
    )


def same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(
        x.shape == y.shape
        and x.dtype == y.dtype
        and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(left, right, strict=True)
    )


@dataclass
class Findings:
    """What the small judge saw: statuses and violations, and how bad the values were."""

    faults: set[str] = field(default_factory=set)
    outside_bounded_error: bool = False
    equal_up_to_zero_signs: bool = True


def judge(family: Family, kernel: WrongKernel, inputs: Inputs) -> Findings:
    """Call a kernel twice alike, but for the poison, and then on other values in place."""
    findings = Findings()
    original = [x.clone() for x in inputs]
    expected = family.right(inputs)
    first = call(kernel, inputs, expected, POISONS[0])
    # A kernel that changed its inputs gets fresh ones; others may recognise their addresses.
    again = inputs
    if not same_bits(inputs, original):
        findings.faults.add(c.INPUT_MUTATED)
        again = [x.clone() for x in original]
    second = call(kernel, again, expected, POISONS[1])
    for tensor, other in zip(again, family.with_other_answers(original), strict=True):
        tensor.copy_(other)
    other_expected = family.right(again)
    third = call(kernel, again, expected, POISONS[0])
    if not first.guards_intact:
        findings.faults.add(c.OUT_OF_BOUNDS_WRITE)
    if kernel.style == "out" and first.returned is not None:
        findings.faults.add(c.WRONG_RETURN_TYPE)
    if first.outputs is None or second.outputs is None:
        findings.faults.add(return_fault(first.returned))
        return findings
    findings.faults |= memory_faults(first.outputs, inputs)
    if not findings.faults and share_memory(first.outputs, second.outputs):
        findings.faults.add(c.OUTPUT_ALIASES_EARLIER_OUTPUT)
    if not same_bits(first.snapshots, second.snapshots):
        findings.faults.add(c.UNINITIALISED_OUTPUT)
    elif same_bits(third.snapshots, expected) and not same_bits(expected, other_expected):
        findings.faults.add(c.STALE_ANSWER)
    form = form_faults(first.outputs, expected)
    findings.faults |= form
    if not form & {"wrong_shape", "wrong_dtype"}:
        exact = exact_outputs(family.operator, original)
        compare_values(first.snapshots, expected, exact, findings)
    return findings


def return_fault(returned: object) -> str:
    """What is wrong with a returned object that is not the right number of tensors in a tuple."""
    items = returned if isinstance(returned, tuple) else (returned,)
    all_tensors = all(isinstance(item, Tensor) for item in items)
    return c.WRONG_OUTPUT_COUNT if all_tensors else c.WRONG_RETURN_TYPE


def memory_faults(outputs: Sequence[Tensor], inputs: Inputs) -> set[str]:
    faults = set()
    if share_memory(outputs, inputs):
        faults.add(c.OUTPUT_ALIASES_INPUT)
    if any(share_memory([x], outputs[:i]) for i, x in enumerate(outputs)):
        faults.add(c.OUTPUT_ALIASES_OUTPUT)
    return faults


def form_faults(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> set[str]:
    faults = set()
    for output, wanted in zip(outputs, expected, strict=True):
        if output.shape != wanted.shape:
            faults.add("wrong_shape")
        if output.dtype != wanted.dtype:
            faults.add("wrong_dtype")
        if not output.is_contiguous():
            faults.add("wrong_layout")
    return faults


SAMPLES = 100


def compare_values(
    outputs: Sequence[Tensor], expected: Sequence[Tensor], exact: Outputs, findings: Findings
) -> None:
    """Ask rational arithmetic about elements, of each output, that differ from the right kernel."""
    for output, wanted, truth in zip(outputs, expected, exact.values(), strict=True):
        differs = output.view(torch.int16) != wanted.view(torch.int16)
        alike = (output == wanted) | (output.isnan() & wanted.isnan())
        indices = differs.nonzero()
        for index in indices[:: max(1, len(indices) // SAMPLES)].tolist():
            element = truth.element(tuple(index))
            bits = bits_of(output[tuple(index)].reshape(1))[0]
            if element.region == "copied" or not alike[tuple(index)]:
                findings.equal_up_to_zero_signs = False
            if rejected("stored_intermediates", element, bits):
                findings.faults.add("wrong_values")
                if rejected("bounded_error", element, bits):
                    findings.outside_bounded_error = True
                    break


def rejected(contract: str, element: Element, bits: int) -> bool:
    if element.region == "copied":
        return bits != element.bits
    value = decode(bits, BF16)
    if element.region == "zeroed":
        return value != 0
    return not acceptance(contract, element.terms, BF16).accepts(value)


# The tests

KERNELS = [(family, kernel) for family in FAMILIES for kernel in family.module.WRONG]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.operator)


def each(kernels: Sequence[tuple[Family, WrongKernel]]) -> pytest.MarkDecorator:
    ids = [f"{family.operator}:{kernel.name}" for family, kernel in kernels]
    return pytest.mark.parametrize(("family", "kernel"), kernels, ids=ids)


@each(KERNELS)
def test_a_wrong_kernel_shows_its_fault_and_no_other_on_a_case_with_what_it_needs(
    family: Family, kernel: WrongKernel
) -> None:
    findings = judge(family, kernel, family.exposures[kernel.needs].exposing())
    if kernel.status[0] != "call_violation":
        assert findings.faults == {kernel.status[0]}
        # A kernel whose values meet the weakest contract may be judged "below_contract".
        if kernel.status == c.WRONG_VALUES:
            assert findings.outside_bounded_error
        return
    assert findings.faults & set(kernel.violations)
    # Statuses less grave than the violation, which then decides.
    assert findings.faults - set(kernel.violations) <= {"wrong_values", "wrong_layout"}
    if kernel.status == c.CALL_OR_VALUES and c.STALE_ANSWER not in kernel.violations:
        assert "wrong_values" in findings.faults


@each([pair for pair in KERNELS if pair[0].exposures[pair[1].needs].harmless is not None])
def test_a_wrong_kernel_is_right_on_a_case_without_what_it_needs(
    family: Family, kernel: WrongKernel
) -> None:
    harmless = family.exposures[kernel.needs].harmless
    assert harmless is not None
    findings = judge(family, kernel, harmless())
    assert findings.faults == set()
    assert findings.equal_up_to_zero_signs


@each_family
def test_the_right_kernel_the_faults_are_made_from_rounds_once_on_every_case(
    family: Family,
) -> None:
    builders = [b for e in family.exposures.values() for b in (e.exposing, e.harmless) if b]
    for builder in dict.fromkeys(builders):
        inputs = builder()
        exact = exact_outputs(family.operator, inputs)
        for output, truth in zip(family.right(inputs), exact.values(), strict=True):
            assert output.shape == truth.shape
            for index in sampled(truth.shape):
                bits = bits_of(output[index].reshape(1))[0]
                assert not rejected("single_rounding", truth.element(index), bits), index


def sampled(shape: Sequence[int], count: int = 15) -> list[tuple[int, ...]]:
    """The first and the last index, and random ones between."""
    generator = torch.Generator().manual_seed(0)
    axes = [torch.randint(0, size, (count,), generator=generator).tolist() for size in shape]
    return [(0,) * len(shape), tuple(size - 1 for size in shape), *zip(*axes, strict=True)]


@each([pair for pair in KERNELS if "broadcast" in pair[1].name])
def test_shapes_said_to_broadcast_do(family: Family, kernel: WrongKernel) -> None:
    inputs = family.exposures[kernel.needs].exposing()
    outputs = kernel.function(*inputs)
    assert isinstance(outputs, tuple)
    for output, wanted in zip(outputs, family.right(inputs), strict=True):
        assert output.expand(wanted.shape).shape == wanted.shape


@each_family
def test_every_wrong_kernel_is_in_the_table_once_and_says_what_is_wrong(family: Family) -> None:
    written = {
        name
        for name, function in inspect.getmembers(family.module, inspect.isfunction)
        if not name.startswith("_")
        and name != "right"
        and any(
            parameter.kind is parameter.VAR_POSITIONAL
            for parameter in inspect.signature(function).parameters.values()
        )
    }
    names = [kernel.name for kernel in family.module.WRONG]
    assert len(names) == len(set(names))
    assert set(names) == written
    for kernel in family.module.WRONG:
        assert kernel.description.endswith(".")


@each_family
def test_the_expected_verdicts_are_ones_the_judge_can_give(family: Family) -> None:
    for kernel in family.module.WRONG:
        assert set(kernel.status) <= set(STATUSES)
        assert bool(kernel.violations) == ("call_violation" in kernel.status)
        assert kernel.style == ("out" if kernel.name.endswith("_out") else "return")


@each_family
def test_every_case_is_needed_by_a_kernel_and_every_need_has_a_case(family: Family) -> None:
    assert {kernel.needs for kernel in family.module.WRONG} == set(family.exposures)


@each_family
def test_the_module_loads_by_path_as_a_candidate_does(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(str(family.module.__file__))
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    specification = importlib.util.spec_from_file_location("a_candidate", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    loaded = [kernel.name for kernel in module.WRONG]
    assert loaded == [kernel.name for kernel in family.module.WRONG]
