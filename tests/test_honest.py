"""Every honest kernel is inside the rational interval of the contract it claims, everywhere."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from tests import honest
from tests.honest import CONCAT_FORWARD, HONEST, STATIC_BACKWARD, HonestKernel
from tests.rational import (
    BF16,
    Acceptance,
    Element,
    acceptance,
    bits_of,
    decode,
    exact_outputs,
    tensor_of,
)

Values = Callable[[torch.Generator, tuple[int, ...]], Tensor]

# Values


def normal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=generator).bfloat16()


def exponents_between(lowest: int, highest: int) -> Values:
    """Values of either sign, of all significand bits, with exponents in lowest..highest."""

    def values(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        significand = torch.randint(128, 256, shape, generator=generator) / 128
        exponent = torch.randint(lowest, highest + 1, shape, generator=generator)
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        return torch.ldexp((sign * significand).double(), exponent).bfloat16()

    return values


def patterns(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Finite bit patterns, all equally likely: products overflow and underflow at random."""
    drawn = torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16)
    values = drawn.view(torch.bfloat16)
    return torch.where(values.isfinite(), values, 1.0)


def few_bits(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Values whose products meet in ties and cancel to small rests."""
    ulp = 2.0**-7
    choices = torch.tensor([1, 1 - ulp / 2, 1 + ulp, ulp / 2, 1.5, ulp**2, 0, 1 + 3 * ulp])
    choices = torch.cat((choices, -choices)).bfloat16()
    return choices[torch.randint(0, len(choices), shape, generator=generator)]


def with_specials(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Normal values, one in twelve of which is an infinity, a NaN, a zero or a subnormal."""
    specials = tensor_of([0x7F80, 0xFF80, 0x7FC1, 0xFFC0, 0, 0x8000, 1, 0x807F], (8,), BF16)
    chosen = specials[torch.randint(0, len(specials), shape, generator=generator)]
    is_special = torch.rand(shape, generator=generator) < 1 / 12
    return torch.where(is_special, chosen, normal(generator, shape))


VALUES: dict[str, Values] = {
    "normal": normal,
    "wide": exponents_between(-20, 20),
    "tiny": exponents_between(-76, -60),
    "huge": exponents_between(58, 63),
    "patterns": patterns,
    "few_bits": few_bits,
    "specials": with_specials,
}


# Cases


@dataclass(frozen=True)
class Sizes:
    batch: int
    heads: int
    tokens: int
    rows: int
    head_dim: int


SMALL = Sizes(batch=2, heads=3, tokens=5, rows=7, head_dim=8)
MANY_HEADS = Sizes(batch=1, heads=17, tokens=3, rows=4, head_dim=6)
OFFICIAL_WIDTH = Sizes(batch=1, heads=2, tokens=1, rows=2, head_dim=128)
CASES = [
    *((SMALL, name) for name in VALUES),
    *((MANY_HEADS, name) for name in ("normal", "few_bits", "huge")),
    *((OFFICIAL_WIDTH, name) for name in ("normal", "patterns")),
]


def inputs_of(operator: str, sizes: Sizes, values: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    B, H, N, R, D = sizes.batch, sizes.heads, sizes.tokens, sizes.rows, sizes.head_dim
    new, cache = (B, H, N, D), (B, H, R, D)

    def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [VALUES[values](generator, shape) for shape in shapes]

    if operator == CONCAT_FORWARD:
        return draw(new, new, (B, 1, N, D), (B, 1, N, D), cache, cache)
    positions = torch.randperm(R, generator=generator)[:N]
    return [*draw(cache, cache, new, (B, N, D), (B, N, D)), positions]


@dataclass(frozen=True)
class Judged:
    """One output element with the acceptance of both contracts, where it is computed."""

    element: Element
    accepted: dict[str, Acceptance]

    def accepts(self, contract: str, bits: int) -> bool:
        if self.element.region == "copied":
            return bits == self.element.bits
        value = decode(bits, BF16)
        if self.element.region == "zeroed":
            return value == 0
        return self.accepted[contract].accepts(value)


@cache
def judged_outputs(operator: str, sizes: Sizes, values: str) -> list[list[Judged]]:
    exact = exact_outputs(operator, inputs_of(operator, sizes, values))
    return [
        [judged(output.element(index)) for index in output.indices()] for output in exact.values()
    ]


def judged(element: Element) -> Judged:
    contracts = ("single_rounding", "stored_intermediates")
    if element.region != "computed":
        return Judged(element, {})
    return Judged(element, {name: acceptance(name, element.terms, BF16) for name in contracts})


def call(kernel: HonestKernel, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    if kernel.style == "return":
        outputs = kernel.function(*inputs)
        assert isinstance(outputs, tuple)
        return outputs
    like = (
        honest.forward_fp32(*inputs)
        if kernel.operator == CONCAT_FORWARD
        else honest.backward_fp32(*inputs)
    )
    given = tuple(torch.full_like(output, torch.nan) for output in like)
    assert kernel.function(*inputs, *given) is None
    return given


def accepted_everywhere(kernel: HonestKernel, contract: str, sizes: Sizes, values: str) -> bool:
    outputs = call(kernel, inputs_of(kernel.operator, sizes, values))
    return all(
        element.accepts(contract, bits)
        for output, elements in zip(
            outputs, judged_outputs(kernel.operator, sizes, values), strict=True
        )
        for bits, element in zip(bits_of(output), elements, strict=True)
    )


# The tests

each_kernel = pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: kernel.name)


def works_for(kernel: HonestKernel, sizes: Sizes) -> bool:
    return kernel.head_dim in (None, sizes.head_dim)


@pytest.mark.parametrize(
    ("kernel", "sizes", "values"),
    [
        pytest.param(kernel, sizes, values, id=f"{kernel.name}-{sizes.head_dim}-{values}")
        for kernel, (sizes, values) in itertools.product(HONEST, CASES)
        if works_for(kernel, sizes)
    ],
)
def test_an_honest_kernel_meets_the_contract_of_its_grade_in_every_element(
    kernel: HonestKernel, sizes: Sizes, values: str
) -> None:
    assert accepted_everywhere(kernel, kernel.grade, sizes, values)


@pytest.mark.parametrize(
    "kernel",
    [kernel for kernel in HONEST if kernel.grade == "stored_intermediates"],
    ids=lambda kernel: kernel.name,
)
def test_a_kernel_that_stores_products_does_not_meet_single_rounding(kernel: HonestKernel) -> None:
    assert not accepted_everywhere(kernel, "single_rounding", SMALL, "normal")


@each_kernel
def test_an_honest_kernel_returns_fresh_contiguous_bfloat16_and_leaves_its_inputs_alone(
    kernel: HonestKernel,
) -> None:
    sizes = OFFICIAL_WIDTH
    inputs = inputs_of(kernel.operator, sizes, "normal")
    before = [x.clone() for x in inputs]
    outputs = call(kernel, inputs)
    assert all(map(torch.equal, inputs, before))
    addresses = [x.untyped_storage().data_ptr() for x in (*inputs, *outputs)]
    assert len(addresses) == len(set(addresses))
    for output, truth in zip(outputs, exact_outputs(kernel.operator, inputs).values(), strict=True):
        assert output.shape == truth.shape
        assert output.dtype == torch.bfloat16
        assert output.is_contiguous()


def test_the_kernels_for_one_head_dim_refuse_others() -> None:
    narrow = [kernel for kernel in HONEST if kernel.head_dim is not None]
    assert {kernel.operator for kernel in narrow} == {CONCAT_FORWARD, STATIC_BACKWARD}
    for kernel in narrow:
        with pytest.raises(AssertionError, match="head_dim is 8"):
            call(kernel, inputs_of(kernel.operator, SMALL, "normal"))


def test_every_honest_kernel_is_in_the_table_once() -> None:
    written = {
        name
        for name, _ in inspect.getmembers(honest, inspect.isfunction)
        if name.startswith(("forward_", "backward_"))
    }
    names = [kernel.name for kernel in HONEST]
    assert len(names) == len(set(names))
    assert set(names) == written
