"""Certified sums against rational arithmetic, with every method of proof exercised and counted."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from oracle import certified
from oracle.certified import (
    BLOCK_ELEMENTS,
    GPU_BLOCK_ELEMENTS,
    Certificate,
    DoubleDouble,
    add_terms,
    block_elements,
    evaluate,
    round_down,
    round_up,
    sum_class,
)
from oracle.definition import InvalidInput
from oracle.rounding import BFLOAT16, FLOAT16, FLOAT32, Format
from tests import rational
from tests.operators.test_kv_rope import OPERATORS, SMALL_SIZES, random_inputs
from tests.rational import bits_of, power_of_two, round_to_bits, total

every_format = pytest.mark.parametrize(
    ("fmt", "form"),
    [
        pytest.param(BFLOAT16, rational.BF16, id="bfloat16"),
        pytest.param(FLOAT16, rational.FP16, id="float16"),
        pytest.param(FLOAT32, rational.FP32, id="float32"),
    ],
)
every_count = pytest.mark.parametrize("count", [1, 2, 3, 8, 64])

Column = list[float]


# Terms that are hard to add up: each generator gives the terms of one element.


def plain(count: int, rng: random.Random, form: rational.Format) -> Column:
    """Products of two numbers of the format near one, as kernels mostly see them."""
    width = 2 * form.precision
    return [rng.choice((1, -1)) * rng.getrandbits(width) * 2.0**-width for _ in range(count)]


def wide(count: int, rng: random.Random, form: rational.Format) -> Column:
    """Products over the whole range of exponents that products of float32 numbers can have."""
    width = 2 * form.precision
    return [
        math.ldexp(rng.choice((1, -1)) * rng.getrandbits(width), rng.randint(-298, 200))
        for _ in range(count)
    ]


def tied(count: int, rng: random.Random, form: rational.Format) -> Column:
    """A tie of the format, hidden below terms that cancel over 2^250, broken by 2^-290 or not."""
    significand = 2 * rng.randrange(1 << (form.precision - 1), 1 << form.precision) + 1
    tie = math.ldexp(significand, rng.randint(-8, 4) - form.precision)
    column = [tie, rng.choice((0.0, 2.0**-290, -(2.0**-290)))]
    while len(column) + 2 <= count:
        large = math.ldexp(rng.getrandbits(30) + 1.0, rng.randint(-250, 200))
        column += [large, -large]
    column = (column + [0.0] * count)[:count]
    rng.shuffle(column)
    return column


def nearly_cancelling(count: int, rng: random.Random, form: rational.Format) -> Column:
    """Pairs that cancel but for their last bit, at any scale."""
    column: Column = []
    while len(column) < count:
        significand = rng.getrandbits(2 * form.precision) | 1
        power = rng.randint(-290, 150)
        column += [math.ldexp(significand, power), -math.ldexp(significand + 1, power)]
    column = column[:count]
    rng.shuffle(column)
    return column


def zeros(count: int, rng: random.Random, form: rational.Format) -> Column:
    """Zeros of both signs and one number of the format, or none."""
    number = math.ldexp(rng.getrandbits(form.precision), rng.randint(form.emin - 40, 4))
    return [*(rng.choice((0.0, -0.0)) for _ in range(count - 1)), rng.choice((0.0, -0.0, number))]


def near_overflow(count: int, rng: random.Random, form: rational.Format) -> Column:
    """A sum at an overflow threshold of the format, moved to either side by as little as 2^-290."""
    threshold = math.ldexp(2.0 - 2.0**-form.precision, form.emax)
    column = [threshold * rng.choice((1, -1)), rng.choice((0.0, 2.0**-290, -(2.0**-290), 1.0))]
    column = (column + tied(count, rng, form)[2:] + [0.0] * count)[:count]
    rng.shuffle(column)
    return column


HARD = (plain, wide, tied, nearly_cancelling, zeros, near_overflow)
hard_columns = st.lists(
    st.tuples(st.sampled_from(HARD), st.integers(0, 2**32 - 1)), min_size=1, max_size=6
)


def tensor_of_columns(columns: Sequence[Column]) -> torch.Tensor:
    return torch.tensor(columns, dtype=torch.float64).T.contiguous()


def exact_sum(column: Column) -> Fraction:
    return sum(map(Fraction, column), Fraction(0))


def assert_correctly_rounded(
    rounded: torch.Tensor, columns: Sequence[Column], form: rational.Format
) -> None:
    for bits, column in zip(bits_of(rounded), columns, strict=True):
        exact = exact_sum(column)
        if exact == 0:
            assert bits % (1 << (form.width - 1)) == 0
        else:
            assert bits == round_to_bits(exact, form), f"{column} gave {bits:#x}"


# Sums with a bound


@every_count
@settings(max_examples=50)
@given(drawn=hard_columns)
def test_add_terms_always_encloses_the_exact_sum(
    count: int, drawn: list[tuple[Callable[..., Column], int]]
) -> None:
    columns = [make(count, random.Random(seed), rational.FP32) for make, seed in drawn]
    value = add_terms(tensor_of_columns(columns))
    for column, high, low, error in zip(
        columns, value.high.tolist(), value.low.tolist(), value.error.tolist(), strict=True
    ):
        exact = exact_sum(column)
        assert error >= 0
        assert abs(exact - Fraction(high) - Fraction(low)) <= Fraction(error)
        assert high == high + low
    if count <= 2:
        assert not value.error.any()


@every_format
@given(
    high=st.floats(-4, 4),
    share=st.floats(-0.5, 0.5),
    power=st.integers(50, 320),
    side=st.sampled_from((-1, 0, 1)),
)
def test_rounding_down_and_up_enclose_the_rounding_of_every_value_within_the_error(
    fmt: Format,
    form: rational.Format,
    high: float,
    share: float,
    power: int,
    side: int,
) -> None:
    low = math.ulp(high) * share
    high, low = high + low, low - ((high + low) - high)
    error = 2.0**-power
    parts = (torch.tensor([part], dtype=torch.float64) for part in (high, low, error))
    enclosure = DoubleDouble(*parts)
    down, up = round_down(enclosure, fmt), round_up(enclosure, fmt)
    value = Fraction(high) + Fraction(low) + side * Fraction(error)
    wanted = rational.round_to(value, form)
    assert Fraction(down.item()) <= wanted <= Fraction(up.item())


@every_format
def test_rounding_down_and_up_without_error_are_the_correctly_rounded_value(
    fmt: Format, form: rational.Format
) -> None:
    tie = 1 + 2.0**-form.precision
    high = torch.tensor([tie] * 3, dtype=torch.float64)
    low = torch.tensor([0.0, 2.0**-300, -(2.0**-300)], dtype=torch.float64)
    value = DoubleDouble(high, low, torch.zeros_like(high))
    down, up = round_down(value, fmt), round_up(value, fmt)
    step = 2.0 ** (1 - form.precision)
    assert down.tolist() == up.tolist() == [1.0, 1.0 + step, 1.0]


# Certified rounding


@every_format
@every_count
@settings(max_examples=50)
@given(drawn=hard_columns)
def test_evaluate_rounds_every_sum_as_rational_arithmetic_does_and_certifies_each(
    fmt: Format,
    form: rational.Format,
    count: int,
    drawn: list[tuple[Callable[..., Column], int]],
) -> None:
    columns = [make(count, random.Random(seed), form) for make, seed in drawn]
    values = evaluate(tensor_of_columns(columns), fmt)
    assert_correctly_rounded(values.rounded, columns, form)
    assert values.certificate.total == len(columns)
    assert values.certificate.copied == 0
    assert values.finite is None


def hidden(value: float, breaker: float) -> Column:
    """Terms that sum to ``value + breaker``, the breaker lost at the second level of two-sum."""
    return [2.0**100, value, breaker, -(2.0**100)]


@every_format
def test_each_method_of_proof_is_used_where_it_must_be_and_only_there(
    fmt: Format, form: rational.Format
) -> None:
    tie = 1 + 2.0**-form.precision
    columns = [
        [1.0, 2.0**-form.precision, 0.0, 0.0],
        hidden(tie, 0.0),
        hidden(1.0, 2.0**-290),
        hidden(-1.0, 2.0**-290),
        hidden(tie, 2.0**-290),
        hidden(tie, -(2.0**-290)),
        hidden(-tie, 2.0**-290),
    ]
    values = evaluate(tensor_of_columns(columns), fmt)
    assert values.certificate == Certificate(exact=2, bounded=2, rational=3)
    step = 2.0 ** (1 - form.precision)
    assert values.rounded.tolist() == [1.0, 1.0, 1.0, -1.0, 1.0 + step, 1.0, -1.0]
    for column, high, low in zip(columns, values.high.tolist(), values.low.tolist(), strict=True):
        rest = exact_sum(column) - Fraction(high)
        if column[2] != 0 and abs(high) == tie:
            assert low != 0
            assert (low > 0) == (rest > 0)


@every_count
def test_one_or_two_terms_never_need_a_bound_and_longer_sums_do_at_times(count: int) -> None:
    rng = random.Random(count)
    columns = [make(count, rng, rational.BF16) for make in HARD for _ in range(100)]
    values = evaluate(tensor_of_columns(columns), BFLOAT16)
    assert_correctly_rounded(values.rounded, columns, rational.BF16)
    certificate = values.certificate
    assert certificate.total == len(columns)
    if count <= 2:
        assert certificate == Certificate(exact=len(columns))
    elif count >= 8:
        assert min(certificate.exact, certificate.bounded, certificate.rational) > 50


@every_format
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_combination_of_non_finite_and_finite_terms_has_the_class_of_its_sum(
    fmt: Format, form: rational.Format, count: int
) -> None:
    numbers = (math.inf, -math.inf, math.nan, 0.0, -1.5, 2.0**250, -(2.0**-290))
    columns = [list(column) for column in itertools.product(numbers, repeat=count)]
    values = evaluate(tensor_of_columns(columns), fmt)
    assert values.finite is not None
    assert values.certificate.total == len(columns)
    classes = {math.inf: "inf", -math.inf: "-inf"}
    for column, finite, rounded, bits in zip(
        columns,
        values.finite.tolist(),
        values.rounded.tolist(),
        bits_of(values.rounded),
        strict=True,
    ):
        terms = [
            "nan" if math.isnan(t) else Fraction(t) if math.isfinite(t) else classes[t]
            for t in column
        ]
        wanted = total(terms)
        assert finite == all(map(math.isfinite, column))
        if wanted == "nan":
            assert math.isnan(rounded)
        elif wanted != 0:
            assert bits == round_to_bits(wanted, form)
    assert torch.isfinite(values.terms).all()


def test_finite_terms_that_overflow_float64_together_do_not_pass_for_an_infinity() -> None:
    terms = torch.tensor([[math.inf], [-1.7e308], [-1.7e308]], dtype=torch.float64)
    assert sum_class(terms, FLOAT16).tolist() == [math.inf]


def test_evaluate_keeps_the_shape_of_a_block_and_takes_blocks_without_elements() -> None:
    terms = torch.ones(3, 2, 0, 4, dtype=torch.float64)
    values = evaluate(terms, FLOAT16)
    assert values.rounded.shape == (2, 0, 4)
    assert values.certificate == Certificate()
    assert evaluate(torch.ones(2, 5, 1, 4, dtype=torch.float64), FLOAT16).rounded.shape == (5, 1, 4)


@given(
    st.lists(st.builds(Certificate, *[st.integers(0, 2**40)] * 4), min_size=1, max_size=4),
)
def test_certificates_add_by_method(certificates: list[Certificate]) -> None:
    added = sum(certificates, Certificate())
    for method in ("copied", "exact", "bounded", "rational", "total"):
        assert getattr(added, method) == sum(getattr(each, method) for each in certificates)


def test_blocks_are_small_on_a_cpu_and_large_on_a_gpu() -> None:
    assert block_elements(torch.device("cpu")) == BLOCK_ELEMENTS
    assert block_elements(torch.device("cuda")) == GPU_BLOCK_ELEMENTS


# Whole outputs


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.id)
def test_truth_has_every_output_fresh_contiguous_and_fully_certified(
    operator: oracle.Operator,
) -> None:
    inputs = random_inputs(operator, SMALL_SIZES[operator.id], "special", random.Random(5))
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    found = oracle.truth(operator, inputs)
    assert list(found.outputs) == [spec.name for spec in operator.outputs]
    sizes = operator.bind(inputs)
    for spec in operator.outputs:
        output = found.outputs[spec.name]
        assert output.dtype == torch.bfloat16
        assert output.shape == operator.shape(spec, sizes)
        assert output.is_contiguous()
    pointers = {tensor.data_ptr() for tensor in (*found.outputs.values(), *inputs.values())}
    assert len(pointers) == len(found.outputs) + len(inputs)
    assert found.certificate.total == sum(output.numel() for output in found.outputs.values())
    for name, tensor in inputs.items():
        assert torch.equal(tensor.view(torch.int16), before[name].view(torch.int16))


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.id)
def test_truth_of_a_case_is_that_of_its_operator(operator: oracle.Operator) -> None:
    case = operator.case("batch-tables")
    inputs = oracle.make_inputs(case, 3)
    by_case, by_operator = oracle.truth(case, inputs), oracle.truth(operator, inputs)
    assert by_case.certificate == by_operator.certificate
    assert_same_bits(by_case.outputs, by_operator.outputs)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.id)
@pytest.mark.parametrize("limit", [1, 7, 100])
@pytest.mark.parametrize("kind", ["normal", "special"])
def test_truth_and_certificate_do_not_depend_on_the_block_size(
    operator: oracle.Operator, limit: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = random_inputs(operator, SMALL_SIZES[operator.id], kind, random.Random(limit))
    whole = oracle.truth(operator, inputs)
    monkeypatch.setattr(certified, "block_elements", lambda device: limit)  # noqa: ARG005
    pieces = oracle.truth(operator, inputs)
    assert pieces.certificate == whole.certificate
    assert_same_bits(pieces.outputs, whole.outputs)


@pytest.mark.parametrize("count", [1, 8, 15, 16, 33, 1000])
def test_a_computed_nan_has_one_bit_pattern_whatever_the_block_and_the_machine(count: int) -> None:
    terms = torch.full((2, count), math.nan, dtype=torch.float64)
    assert set(bits_of(evaluate(terms, BFLOAT16).rounded)) == {0x7FC0}


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.id)
def test_truth_refuses_inputs_that_do_not_fit(operator: oracle.Operator) -> None:
    inputs = random_inputs(operator, SMALL_SIZES[operator.id], "normal", random.Random(1))
    del inputs["cos"]
    with pytest.raises(InvalidInput, match="cos"):
        oracle.truth(operator, inputs)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.id)
def test_inputs_that_require_gradients_are_only_read(operator: oracle.Operator) -> None:
    inputs = random_inputs(operator, SMALL_SIZES[operator.id], "normal", random.Random(2))
    leaves = {
        name: tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor
        for name, tensor in inputs.items()
    }
    found = oracle.truth(operator, leaves).outputs
    assert not any(output.requires_grad for output in found.values())
    assert_same_bits(found, oracle.truth(operator, inputs).outputs)


def assert_same_bits(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name].view(torch.int16), tensor.view(torch.int16)), name


PEAK_MEMORY_SCRIPT = """
import json, resource, sys
import torch
import oracle
from oracle.certified import fill_output

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

operator = oracle.find_operator(sys.argv[1])

def fill(sizes):
    inputs = {}
    for spec in operator.inputs:
        if spec.indexes is None:
            inputs[spec.name] = torch.ones(operator.shape(spec, sizes), dtype=torch.bfloat16)
        else:
            inputs[spec.name] = torch.arange(sizes["new_seq_len"]) * 3
    outputs = {
        spec.name: torch.ones(operator.shape(spec, sizes), dtype=torch.bfloat16)
        for spec in operator.outputs
    }
    before = peak()
    for name, output in outputs.items():
        fill_output(operator, inputs, name, output)
    extra = peak() - before
    return extra, sum(output.nbytes for output in outputs.values())

small, large = json.loads(sys.argv[2])
fill(small)
print(json.dumps(fill(large)))
"""


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.id)
def test_truth_streams_its_peak_memory_beside_the_outputs_is_a_few_blocks(
    operator: oracle.Operator,
) -> None:
    rows = "max_seq_len" if "static" in operator.id else "current_seq_len"
    small = {"batch_size": 1, "num_kv_heads": 8, "head_dim": 128, "new_seq_len": 300, rows: 900}
    large = {**small, "new_seq_len": 3000, rows: 9000}
    run = subprocess.run(
        [sys.executable, "-c", PEAK_MEMORY_SCRIPT, operator.id, json.dumps([small, large])],
        capture_output=True,
        text=True,
        check=True,
    )
    extra, outputs = json.loads(run.stdout)
    block = 8 * BLOCK_ELEMENTS
    assert outputs > 40 * block
    # The rotated elements alone have 47 MiB of terms, and several times that in temporaries.
    assert extra < 24 * block


def test_a_tie_is_decided_by_the_sum_and_not_by_closeness() -> None:
    columns = [[1.0, 2.0**-8], [1.0, 2.0**-8 + 2.0**-60], [1.0, 2.0**-8 - 2.0**-60]]
    values = evaluate(tensor_of_columns(columns), BFLOAT16)
    assert values.rounded.tolist() == [1.0, 1.0078125, 1.0]
    assert values.certificate == Certificate(exact=3)
    assert exact_sum(columns[1]) - 1 - power_of_two(-8) == power_of_two(-60)
