"""The second opinion is itself checked: against other libraries, and by adjointness."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.rational import (
    BF16,
    CONTRACTS,
    FP16,
    FP32,
    FP64,
    OPERATORS,
    Acceptance,
    Array,
    Format,
    Index,
    Output,
    Outputs,
    Value,
    acceptance,
    correctly_rounded,
    decode,
    exact_outputs,
    gamma,
    is_finite,
    multiply,
    power_of_two,
    round_to,
    round_to_bits,
    summation_error,
    tensor_of,
    total,
)

NUMPY_DTYPES = {BF16: ml_dtypes.bfloat16, FP16: np.float16, FP32: np.float32, FP64: np.float64}
UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def value_of_float(number: float) -> Value:
    if math.isnan(number):
        return "nan"
    if math.isinf(number):
        return "inf" if number > 0 else "-inf"
    return Fraction(number)


# Formats and rounding


@pytest.mark.parametrize("form", [BF16, FP16], ids=lambda form: form.name)
def test_every_16_bit_pattern_decodes_as_ml_dtypes_or_numpy_does_and_rounds_back(
    form: Format,
) -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        expected = patterns.view(NUMPY_DTYPES[form]).astype(np.float64)
    for bits, number in zip(range(2**16), expected.tolist(), strict=True):
        value = decode(bits, form)
        assert value == value_of_float(number)
        if value not in ("nan", 0):
            assert round_to_bits(value, form) == bits


@pytest.mark.parametrize("target", [BF16, FP16], ids=lambda form: form.name)
def test_random_fp32_patterns_round_as_ml_dtypes_or_numpy_rounds_them(target: Format) -> None:
    patterns = np.random.default_rng(1).integers(0, 2**32, 8_000, dtype=np.uint32)
    # Small exponents for fp16: uniform fp32 patterns hardly ever land in its subnormal range.
    small = (patterns & np.uint32(0x807FFFFF)) | (
        (patterns >> np.uint32(8)) % np.uint32(48) + np.uint32(100) << np.uint32(23)
    )
    for chosen in (patterns, small):
        with np.errstate(over="ignore", invalid="ignore"):
            expected = chosen.view(np.float32).astype(NUMPY_DTYPES[target]).view(np.uint16)
        for bits, wanted in zip(chosen.tolist(), expected.tolist(), strict=True):
            value = decode(bits, FP32)
            if value in ("nan", 0):
                continue
            assert round_to_bits(value, target) == wanted, hex(bits)


def test_random_fp64_patterns_round_to_fp32_as_numpy_rounds_them() -> None:
    patterns = np.random.default_rng(2).integers(0, 2**64, 10_000, dtype=np.uint64)
    # Keep exponents near fp32's range, its subnormals and its overflow included.
    exponents = np.random.default_rng(3).integers(1023 - 160, 1023 + 130, 10_000, dtype=np.uint64)
    patterns = (patterns & np.uint64(0x800FFFFFFFFFFFFF)) | (exponents << np.uint64(52))
    with np.errstate(over="ignore", under="ignore"):
        expected = patterns.view(np.float64).astype(np.float32).view(np.uint32)
    for bits, wanted in zip(patterns.tolist(), expected.tolist(), strict=True):
        assert round_to_bits(decode(bits, FP64), FP32) == wanted


def test_fractions_round_to_fp64_as_python_divides() -> None:
    source = random.Random(4)
    for _ in range(5_000):
        scale = 2 ** source.randrange(0, 1100)
        number = Fraction(source.randrange(1, 2**80), source.randrange(1, 2**70) * scale)
        assert decode(round_to_bits(number, FP64), FP64) == Fraction(float(number))


def test_a_value_that_float32_would_round_twice_is_rounded_once() -> None:
    number = 1 + power_of_two(-8) + power_of_two(-40)
    assert round_to(number, BF16) == Fraction("1.0078125")
    through_float32 = torch.tensor(float(number), dtype=torch.float64).to(torch.bfloat16)
    assert through_float32.item() == 1.0


def test_ties_go_to_the_even_significand() -> None:
    half_ulp = power_of_two(-8)
    assert round_to(1 + half_ulp, BF16) == 1
    assert round_to(1 + 3 * half_ulp, BF16) == 1 + 4 * half_ulp
    assert round_to(-1 - 3 * half_ulp, BF16) == -1 - 4 * half_ulp
    assert round_to(2 - half_ulp, BF16) == 2


@pytest.mark.parametrize("form", [BF16, FP16, FP32, FP64], ids=lambda form: form.name)
def test_subnormals_are_kept_and_half_of_the_smallest_goes_to_a_signed_zero(form: Format) -> None:
    smallest = power_of_two(form.emin - form.precision + 1)
    sign_bit = 2 ** (form.width - 1)
    assert round_to_bits(smallest, form) == 1
    assert round_to_bits(smallest * 3 / 2, form) == 2
    assert round_to_bits(smallest / 2, form) == 0
    assert round_to_bits(-smallest / 2, form) == sign_bit
    assert round_to_bits(smallest / 2 + power_of_two(-2000), form) == 1
    largest_subnormal = power_of_two(form.emin) - smallest
    assert round_to(largest_subnormal, form) == largest_subnormal
    assert round_to(largest_subnormal + smallest / 2, form) == power_of_two(form.emin)


@pytest.mark.parametrize("form", [BF16, FP16, FP32, FP64], ids=lambda form: form.name)
def test_overflow_begins_half_an_ulp_past_the_largest_finite_number(form: Format) -> None:
    ulp = power_of_two(form.emax - form.precision + 1)
    largest = power_of_two(form.emax + 1) - ulp
    assert round_to(largest, form) == largest
    assert round_to(largest + ulp / 2 - power_of_two(-2000), form) == largest
    assert round_to(largest + ulp / 2, form) == "inf"
    assert round_to(-largest - ulp / 2, form) == "-inf"
    assert round_to(power_of_two(5000), form) == "inf"


def test_non_finite_products_and_sums_follow_ieee() -> None:
    specials = [-math.inf, -1.0, 0.0, 2.0, math.inf, math.nan]
    for left, right in itertools.product(specials, repeat=2):
        a, b = value_of_float(left), value_of_float(right)
        assert multiply(a, b) == value_of_float(left * right)
        assert total([a, b]) == value_of_float(left + right)


def test_tensor_of_places_patterns_in_order_and_shape() -> None:
    tensor = tensor_of([0x3F80, 0xC000, 0x7FC1, 0x8000], (2, 2), BF16)
    assert tensor.dtype == torch.bfloat16
    assert tensor[0].tolist() == [1.0, -2.0]
    assert tensor.view(torch.int16)[1].tolist() == [0x7FC1, -0x8000]


# Operators

B, H, N, C, M, D = 2, 3, 5, 7, 11, 8
POSITIONS = (7, 2, 9, 0, 4)


@dataclass(frozen=True)
class Problem:
    """A forward operator, its backward, and its inputs by name."""

    forward: Callable[..., Outputs]
    backward: Callable[..., Outputs]
    shapes: Mapping[str, tuple[int, ...]]
    output_shape: tuple[int, ...]
    trailing: tuple[Sequence[int], ...]

    def run_forward(self, inputs: Mapping[str, Array]) -> Outputs:
        return self.forward(*inputs.values(), *self.trailing)

    def run_backward(
        self, inputs: Mapping[str, Array], cotangents: Sequence[Array]
    ) -> dict[str, Output]:
        """The gradient of each input, under the input's name."""
        gradients = self.backward(
            *cotangents, inputs["key_states"], inputs["cos"], inputs["sin"], *self.trailing
        )
        return dict(zip(self.shapes, gradients.values(), strict=True))


def concat_problem() -> Problem:
    shapes = {
        "key_states": (B, H, N, D),
        "value_states": (B, H, N, D),
        "cos": (B, 1, N, D),
        "sin": (B, 1, N, D),
        "key_cache": (B, H, C, D),
        "value_cache": (B, H, C, D),
    }
    operators = OPERATORS["kv_rope.concat.forward"], OPERATORS["kv_rope.concat.backward"]
    return Problem(*operators, shapes, (B, H, C + N, D), ())


def static_problem() -> Problem:
    shapes = {
        "key_states": (B, H, N, D),
        "value_states": (B, H, N, D),
        "cos": (B, N, D),
        "sin": (B, N, D),
        "key_cache": (B, H, M, D),
        "value_cache": (B, H, M, D),
    }
    operators = OPERATORS["kv_rope.static.forward"], OPERATORS["kv_rope.static.backward"]
    return Problem(*operators, shapes, (B, H, M, D), (POSITIONS,))


PROBLEMS = pytest.mark.parametrize(
    "problem", [concat_problem(), static_problem()], ids=["concat", "static"]
)


def random_array(
    shape: tuple[int, ...], source: random.Random, denominators: Sequence[int]
) -> Array:
    """Nonzero rationals, so that no entry can be missed."""
    values = [
        Fraction(source.choice((-1, 1)) * source.randrange(1, 100), source.choice(denominators))
        for _ in range(math.prod(shape))
    ]
    return Array(shape, values)


def inner_product(outputs: Sequence[Output], weights: Sequence[Array]) -> Fraction:
    return sum(
        (
            finite(output.element(index).exact) * finite(weight.value(index))
            for output, weight in zip(outputs, weights, strict=True)
            for index in output.indices()
        ),
        Fraction(0),
    )


def finite(value: Value) -> Fraction:
    assert isinstance(value, Fraction)
    return value


def shifted(
    inputs: Mapping[str, Array], direction: Mapping[str, Array], step: int
) -> dict[str, Array]:
    return {
        name: Array(
            array.shape,
            [
                finite(x) + step * finite(v)
                for x, v in zip(array.values, direction[name].values, strict=True)
            ],
        )
        for name, array in inputs.items()
    }


@PROBLEMS
def test_backward_is_the_adjoint_of_forward_exactly(problem: Problem) -> None:
    source = random.Random(5)
    point = {
        name: random_array(shape, source, (1, 2, 3, 7)) for name, shape in problem.shapes.items()
    }
    direction = {
        name: random_array(shape, source, (1, 2, 3, 5)) for name, shape in problem.shapes.items()
    }
    cotangents = [random_array(problem.output_shape, source, (1, 3, 4)) for _ in range(2)]
    # The forward is a polynomial of degree two, whose central difference along a line is the
    # derivative, exactly.
    ahead = inner_product(
        list(problem.run_forward(shifted(point, direction, +1)).values()), cotangents
    )
    behind = inner_product(
        list(problem.run_forward(shifted(point, direction, -1)).values()), cotangents
    )
    gradients = problem.run_backward(point, cotangents)
    pulled_back = inner_product(list(gradients.values()), list(direction.values()))
    assert (ahead - behind) / 2 == pulled_back
    assert pulled_back != 0


@dataclass(frozen=True)
class ObservedArray(Array):
    """An array that notes which of its entries are read."""

    reads: set[Index] = field(default_factory=set)

    def value(self, index: Index) -> Value:
        self.reads.add(index)
        return super().value(index)


def readers(
    problem: Problem, inputs: Mapping[str, Array]
) -> dict[tuple[str, Index], list[tuple[str, Index]]]:
    """{entry of an input: output elements that read it}; no other element can change with it."""
    observed = {name: ObservedArray(x.shape, x.values) for name, x in inputs.items()}
    found: dict[tuple[str, Index], list[tuple[str, Index]]] = {}
    for output_name, output in problem.run_forward(observed).items():
        for index in output.indices():
            output.element(index)
            for name, array in observed.items():
                for entry in array.reads:
                    found.setdefault((name, entry), []).append((output_name, index))
                array.reads.clear()
    return found


def entries(shape: tuple[int, ...]) -> Iterator[Index]:
    return itertools.product(*map(range, shape))


@PROBLEMS
def test_central_differences_of_the_forward_equal_the_backward_for_every_entry_of_every_input(
    problem: Problem,
) -> None:
    source = random.Random(6)
    inputs = {name: random_array(shape, source, (1, 4)) for name, shape in problem.shapes.items()}
    cotangents = [random_array(problem.output_shape, source, (1, 2)) for _ in range(2)]
    weights = dict(zip(problem.run_forward(inputs), cotangents, strict=True))
    gradients = problem.run_backward(inputs, cotangents)
    affected = readers(problem, inputs)
    checked = 0
    for name, shape in problem.shapes.items():
        for flat, entry in enumerate(entries(shape)):
            difference = Fraction(0)
            for step in (+1, -1):
                values = list(inputs[name].values)
                values[flat] = finite(values[flat]) + step
                outputs = problem.run_forward(
                    {**inputs, name: replace(inputs[name], values=values)}
                )
                for output_name, index in affected.get((name, entry), []):
                    exact = finite(outputs[output_name].element(index).exact)
                    difference += step * exact * finite(weights[output_name].value(index))
            assert gradients[name].element(entry).exact == difference / 2, (name, entry)
            checked += 1
    assert checked == sum(map(math.prod, problem.shapes.values()))


def test_concat_forward_rotates_one_known_vector() -> None:
    """rotate_half of 0..7 with cos = 0 and sin = 1, by hand."""
    key = torch.arange(8, dtype=torch.bfloat16).reshape(1, 1, 1, 8)
    cache = torch.empty(1, 1, 0, 8, dtype=torch.bfloat16)
    cos, sin = torch.zeros_like(key), torch.ones_like(key)
    outputs = exact_outputs("kv_rope.concat.forward", [key, key, cos, sin, cache, cache])
    rotated = correctly_rounded(outputs["updated_key_cache"], BF16)
    assert rotated.flatten().tolist() == [-4, -5, -6, -7, 0, 1, 2, 3]


def test_static_backward_unrotates_one_known_vector_and_sums_heads() -> None:
    gradient = torch.arange(8, dtype=torch.bfloat16).reshape(1, 1, 1, 8)
    gradient = torch.cat((gradient, 16 * gradient), 1)
    key = torch.ones_like(gradient)
    cos, sin = torch.zeros(2, 1, 1, 8, dtype=torch.bfloat16)
    sin = sin + torch.arange(1, 9)
    inputs = [gradient, gradient, key, cos, sin.to(torch.bfloat16), torch.tensor([0])]
    outputs = exact_outputs("kv_rope.static.backward", inputs)
    unrotated = correctly_rounded(outputs["grad_key_states"], BF16)
    assert unrotated[0, 0, 0].tolist() == [20, 30, 42, 56, 0, -2, -6, -12]
    assert correctly_rounded(outputs["grad_cos"], BF16).flatten().tolist() == [
        17 * d for d in range(8)
    ]
    assert correctly_rounded(outputs["grad_sin"], BF16).flatten().tolist() == [
        -17 * d if d < 4 else 17 * d for d in range(8)
    ]
    assert correctly_rounded(outputs["grad_key_cache_input"], BF16).count_nonzero() == 0


def test_tables_of_one_row_serve_every_batch_row() -> None:
    generator = torch.Generator().manual_seed(7)
    for operator, table_shape, trailing in (
        ("kv_rope.concat.forward", (1, 1, 2, 4), []),
        ("kv_rope.static.forward", (1, 2, 4), [torch.tensor([2, 0])]),
    ):
        key, value, key_cache, value_cache = (
            torch.randn(3, 2, rows, 4, generator=generator).bfloat16() for rows in (2, 2, 3, 3)
        )
        cos, sin = (torch.randn(table_shape, generator=generator).bfloat16() for _ in range(2))
        repeated = [torch.cat([table] * 3) for table in (cos, sin)]
        shared, separate = (
            exact_outputs(operator, [key, value, *tables, key_cache, value_cache, *trailing])
            for tables in ((cos, sin), repeated)
        )
        for name, output in shared.items():
            expected = correctly_rounded(separate[name], BF16)
            assert torch.equal(correctly_rounded(output, BF16), expected)


def test_copies_keep_nan_payloads_and_signed_zeros() -> None:
    cache = tensor_of([0x7FC1, 0x8000, 0xFF81, 0x0001], (1, 1, 2, 2), BF16)
    new = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16)
    outputs = exact_outputs("kv_rope.concat.forward", [new, new, new, new, cache, cache])
    copied = correctly_rounded(outputs["updated_value_cache"], BF16)[:, :, :2]
    assert torch.equal(copied.view(torch.int16), cache.view(torch.int16))


@pytest.mark.parametrize("positions", [[0, 3], [1, 1], [-1, 0]])
def test_bad_cache_positions_are_refused(positions: list[int]) -> None:
    cache = torch.ones(1, 1, 3, 2, dtype=torch.bfloat16)
    new = torch.ones(1, 1, 2, 2, dtype=torch.bfloat16)
    table = torch.ones(1, 2, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"cache_position\[\d\] = -?\d"):
        exact_outputs(
            "kv_rope.static.backward", [cache, cache, new, table, table, torch.tensor(positions)]
        )


# Contracts


def random_number(form: Format, source: random.Random, exponents: range) -> Fraction:
    significand = source.randrange(2 ** (form.precision - 1), 2**form.precision)
    exponent = source.choice(exponents) - form.precision + 1
    return source.choice((-1, 1)) * significand * power_of_two(exponent)


def random_terms(
    form: Format, source: random.Random, count: int, exponents: range
) -> list[Fraction]:
    """Products of two numbers of the format, of like size so that some cancel."""
    return [
        random_number(form, source, exponents) * random_number(form, source, exponents)
        for _ in range(count)
    ]


def bounds(interval: Acceptance) -> tuple[Fraction, Fraction]:
    """The bounds before the last rounding, of an element whose exact sum is finite."""
    assert interval.low is not None
    assert interval.high is not None
    return interval.low, interval.high


def fp32_sums(addends: Sequence[Fraction], source: random.Random) -> Iterator[Fraction]:
    """Sums with every partial sum rounded to fp32: in a random order, and as a random tree."""
    order = source.sample(list(addends), len(addends))
    running = Fraction(0)
    for addend in order:
        running = finite(round_to(running + addend, FP32))
    yield running
    while len(order) > 1:
        left = order.pop(source.randrange(len(order)))
        right = order.pop(source.randrange(len(order)))
        order.append(finite(round_to(left + right, FP32)))
    yield order[0]


EXPONENT_RANGES = {
    BF16: [range(-2, 3), range(-70, -50), range(50, 62)],
    FP16: [range(-2, 3), range(-13, -6), range(6)],
    FP32: [range(-2, 3), range(-74, -60), range(50, 62)],
}


@pytest.mark.parametrize("form", [BF16, FP16, FP32], ids=lambda form: form.name)
@pytest.mark.parametrize("count", [2, 5])
def test_honest_evaluations_are_accepted_by_their_contract(form: Format, count: int) -> None:
    source = random.Random(8)
    for exponents in EXPONENT_RANGES[form] * 20:
        terms = random_terms(form, source, count, exponents)
        in_fp32 = [finite(round_to(term, FP32)) for term in terms]
        stored = [
            finite(round_to(source.choice((term, image)), form)) if source.random() < 0.7 else image
            for term, image in zip(terms, in_fp32, strict=True)
        ]
        for contract, addends in (
            ("single_rounding", terms),
            ("single_rounding", in_fp32),
            ("stored_intermediates", stored),
            ("stored_intermediates", in_fp32),
        ):
            interval = acceptance(contract, terms, form)
            low, high = bounds(interval)
            assert interval.in_domain
            for value in fp32_sums(addends, source):
                assert low <= value <= high
                assert interval.accepts(round_to(value, form))
        assert acceptance("correctly_rounded", terms, form).accepts(round_to(total(terms), form))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_one_step_past_either_rounded_bound_is_rejected(contract: str) -> None:
    source = random.Random(9)
    for form in (BF16, FP16, FP32):
        for _ in range(50):
            interval = acceptance(contract, random_terms(form, source, 4, range(-2, 3)), form)
            for bound, outward in zip(bounds(interval), (-1, +1), strict=True):
                rounded = round_to(bound, form)
                assert interval.accepts(rounded)
                assert not interval.accepts(neighbour(finite(rounded), outward, form))


def neighbour(value: Fraction, direction: int, form: Format) -> Value:
    """The next number of the format above (+1) or below (-1)."""
    if value == 0:
        return direction * power_of_two(form.emin - form.precision + 1)
    away_from_zero = (value > 0) == (direction > 0)
    return decode(round_to_bits(value, form) + (1 if away_from_zero else -1), form)


def test_each_contract_contains_the_stricter_one() -> None:
    source = random.Random(10)
    for _ in range(100):
        terms = random_terms(BF16, source, 3, range(-3, 3))
        intervals = [bounds(acceptance(contract, terms, BF16)) for contract in CONTRACTS]
        for stricter, weaker in itertools.pairwise(intervals):
            assert weaker[0] <= stricter[0]
            assert stricter[1] <= weaker[1]


def test_the_fp32_error_is_gamma_times_the_magnitudes_plus_an_underflow_each() -> None:
    terms = [1 + power_of_two(-14), power_of_two(-30)]
    stored_first = Fraction(1)  # RN_bf16(1 + 2^-14); the larger of the two counts
    magnitude = max(terms[0], stored_first) + terms[1]
    unit = power_of_two(-24)
    expected = 2 * unit / (1 - 2 * unit) * magnitude + 2 * power_of_two(-150)
    assert summation_error(terms, BF16) == expected
    assert gamma(2) == 2 * unit / (1 - 2 * unit)


def test_the_fp32_error_vanishes_exactly_where_every_partial_sum_is_exact() -> None:
    one = Fraction(1)
    assert summation_error([power_of_two(24) - 2**17, one], BF16) == 0
    assert summation_error([power_of_two(24) - 1, one], FP32) == 0
    assert summation_error([power_of_two(24) - 1, one], BF16) > 0  # stored, the first is 2^24
    assert summation_error([power_of_two(24) - 1, one, one], FP32) > 0
    assert summation_error([power_of_two(-149), -power_of_two(-148)], BF16) == 0
    assert summation_error([power_of_two(-150)], FP32) > 0
    assert summation_error([Fraction(0), Fraction(0)], BF16) == 0


def test_stored_intermediates_let_each_product_keep_or_lose_its_own_rounding_error() -> None:
    terms = [1 + 3 * power_of_two(-9), -power_of_two(-10)]  # stored, the first becomes 1 + 2^-7
    interval = acceptance("stored_intermediates", terms, BF16)
    assert interval.low == sum(terms)
    assert interval.high == sum(terms) + power_of_two(-9)


def test_bounded_error_allows_one_unit_roundoff_of_the_sum_of_magnitudes() -> None:
    interval = acceptance("bounded_error", [Fraction(3), Fraction(-2)], BF16)
    assert (interval.low, interval.high) == (1 - 5 * power_of_two(-8), 1 + 5 * power_of_two(-8))


def test_a_head_sum_that_stays_at_256_in_bf16_is_rejected_and_288_is_required() -> None:
    terms = [Fraction(256)] + [Fraction(1)] * 31
    for contract in CONTRACTS[:3]:
        interval = acceptance(contract, terms, BF16)
        assert interval.exact == 287
        assert interval.accepts(Fraction(288))
        assert not interval.accepts(Fraction(286))
        assert not interval.accepts(Fraction(256))
    assert not acceptance("bounded_error", terms, BF16).accepts(Fraction(256))


def test_the_class_of_a_non_finite_sum_must_match() -> None:
    one = Fraction(1)
    expected: list[tuple[list[Value], Value]] = [
        (["inf", one], "inf"),
        (["-inf", one], "-inf"),
        (["inf", "-inf"], "nan"),
        (["nan", one], "nan"),
    ]
    returned: list[Value] = ["inf", "-inf", "nan", one]
    for terms, wanted in expected:
        for contract in CONTRACTS:
            interval = acceptance(contract, terms, BF16)
            for value in returned:
                assert interval.accepts(value) == (value == wanted)


def test_nan_is_never_accepted_for_a_finite_sum_in_the_domain() -> None:
    for contract in CONTRACTS:
        assert not acceptance(contract, [Fraction(1), Fraction(2)], BF16).accepts("nan")


def test_a_sum_that_rounds_to_infinity_in_the_domain_must_be_infinite() -> None:
    largest = power_of_two(128) - power_of_two(120)
    terms = [largest, power_of_two(119)]
    for contract in CONTRACTS:
        interval = acceptance(contract, terms, BF16)
        assert interval.in_domain
        assert interval.accepts("inf")
        assert not interval.accepts("-inf")
        assert not interval.accepts("nan")
    assert not acceptance("stored_intermediates", terms, BF16).accepts(largest)


def test_out_of_the_domain_overflow_is_excused_and_wrong_finite_values_are_not() -> None:
    terms = [power_of_two(127), power_of_two(127), -power_of_two(127)]
    for contract in CONTRACTS[1:]:
        interval = acceptance(contract, terms, BF16)
        assert not interval.in_domain
        for value in ("inf", "-inf", "nan", power_of_two(127)):
            assert interval.accepts(value)
        assert not interval.accepts(power_of_two(126))
    assert not acceptance("correctly_rounded", terms, BF16).accepts("inf")


def test_a_product_that_only_storing_overflows_bounds_stored_intermediates_alone() -> None:
    terms = [Fraction(70_000), Fraction(-30_000)]
    stored = acceptance("stored_intermediates", terms, FP16)
    assert not stored.in_domain
    assert stored.accepts("inf")
    assert stored.accepts(Fraction(40_000))
    assert not stored.accepts(Fraction(39_000))
    kept = acceptance("single_rounding", terms, FP16)
    assert kept.in_domain
    assert kept.accepts(Fraction(40_000))
    assert not kept.accepts("inf")


def test_an_unknown_contract_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="allclose"):
        acceptance("allclose", [Fraction(1)], BF16)


def test_is_finite_tells_numbers_from_the_rest() -> None:
    specials: list[Value] = ["inf", "-inf", "nan"]
    assert is_finite(Fraction(0))
    assert not any(map(is_finite, specials))
