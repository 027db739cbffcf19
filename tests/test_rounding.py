"""Rounding against rational arithmetic: ties, near-ties, subnormals, overflow, both zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from oracle.rounding import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Format,
    format_of,
    round_float64,
    round_to_format,
    round_to_odd,
    two_sum,
    ulp,
)
from tests import rational
from tests.rational import bits_of, decode, power_of_two, round_to_bits

PAIRS = [
    pytest.param(BFLOAT16, rational.BF16, id="bfloat16"),
    pytest.param(FLOAT16, rational.FP16, id="float16"),
    pytest.param(FLOAT32, rational.FP32, id="float32"),
]
every_format = pytest.mark.parametrize(("fmt", "form"), PAIRS)
every_16_bit_format = pytest.mark.parametrize(("fmt", "form"), PAIRS[:2])

SMALLEST_FLOAT64 = math.ulp(0.0)


def infinity_bits(form: rational.Format) -> int:
    return round_to_bits("inf", form)


def finite_value(bits: int, form: rational.Format) -> Fraction:
    value = decode(bits, form)
    assert isinstance(value, Fraction)
    return value


def midpoint_above(bits: int, form: rational.Format) -> Fraction:
    """Halfway from a positive number to the next one, 2^(emax + 1) following the largest."""
    here = finite_value(bits, form)
    if bits + 1 == infinity_bits(form):
        return (here + power_of_two(form.emax + 1)) / 2
    return (here + finite_value(bits + 1, form)) / 2


def split(value: Fraction) -> tuple[float, float]:
    """(high, low) as the oracle takes them: the nearest float64, and what has the rest's sign."""
    high = float(value)
    rest = value - Fraction(high)
    low = float(rest)
    if rest != 0 and low == 0:
        low = math.copysign(SMALLEST_FLOAT64, rest)
    return high, low


def oracle_bits(values: Sequence[Fraction], fmt: Format) -> list[int]:
    pairs = torch.tensor([split(value) for value in values], dtype=torch.float64)
    return bits_of(round_to_format(pairs[:, 0], pairs[:, 1], fmt))


def assert_rounds_as_rational(
    values: Sequence[Fraction], fmt: Format, form: rational.Format
) -> None:
    for value, bits in zip(values, oracle_bits(values, fmt), strict=True):
        assert bits == round_to_bits(value, form), f"{value} rounded to {bits:#x}"


# Formats


@every_format
def test_a_format_has_the_parameters_that_its_name_stands_for(
    fmt: Format, form: rational.Format
) -> None:
    assert format_of(fmt.name) is fmt
    assert format_of(fmt.dtype) is fmt
    assert rational.FORMAT_OF_DTYPE[fmt.dtype] is form
    assert (fmt.precision, fmt.min_exponent, fmt.max_exponent) == (
        form.precision,
        form.emin,
        form.emax,
    )
    assert fmt.unit_roundoff == form.unit_roundoff
    assert 8 * fmt.width == form.width == 8 * fmt.bits_dtype.itemsize


@pytest.mark.parametrize("dtype", ["float64", torch.float64, torch.int16, "half"])
def test_a_type_without_rounding_is_refused_by_name(dtype: str | torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"{name}; known are bfloat16, float16, float32"):
        format_of(dtype)


# Rounding to a format


def test_the_designs_example_rounds_up_where_tensor_to_rounds_twice_and_goes_down() -> None:
    value = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert round_float64(value, BFLOAT16).item() == 1.0078125
    assert value.to(torch.bfloat16).item() == 1.0


@every_16_bit_format
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_midpoint_goes_to_even_and_any_remainder_to_its_own_side(
    fmt: Format, form: rational.Format, sign: float
) -> None:
    lower = list(range(infinity_bits(form)))
    midpoints = [float(midpoint_above(bits, form)) for bits in lower]
    assert all(
        Fraction(number) == midpoint_above(bits, form)
        for number, bits in zip(midpoints[::97], lower[::97], strict=True)
    )
    high = torch.tensor(midpoints, dtype=torch.float64) * sign
    below = torch.tensor(lower)
    even = below + below % 2
    for low, expected in (
        (0.0, even),
        (SMALLEST_FLOAT64, below + 1),
        (-SMALLEST_FLOAT64, below),
    ):
        rest = torch.full_like(high, low * sign)
        magnitude = torch.tensor(bits_of(round_to_format(high, rest, fmt)))
        sign_bit = 0 if sign > 0 else 1 << (form.width - 1)
        assert torch.equal(magnitude, expected + sign_bit)


@every_format
def test_every_tie_moved_by_any_power_of_two_goes_to_the_side_it_lies_on(
    fmt: Format, form: rational.Format
) -> None:
    one = round_to_bits(Fraction(1), form)
    smallest_normal = 1 << (form.precision - 1)
    places = {
        "even below": one,
        "odd below": one + 1,
        "carry into the next binade": one + smallest_normal - 1,
        "smallest subnormal or zero": 0,
        "odd subnormal": 1,
        "largest subnormal": smallest_normal - 1,
        "overflow": infinity_bits(form) - 1,
    }
    for bits in places.values():
        tie = midpoint_above(bits, form)
        moved = [
            sign * tie * (1 + side * power_of_two(-k))
            for k in range(form.precision, 1001)
            for side in (-1, 1)
            for sign in (-1, 1)
        ]
        assert_rounds_as_rational([tie, -tie, *moved], fmt, form)


@st.composite
def hard_values(draw: st.DrawFn, form: rational.Format) -> Fraction:
    """A number of the format, or a point between it and the next, moved a little or not at all."""
    bits = draw(st.integers(0, infinity_bits(form) - 1))
    here = finite_value(bits, form)
    step = 2 * (midpoint_above(bits, form) - here)
    value = here + step * Fraction(draw(st.integers(0, 8)), 8)
    moved = step * power_of_two(-draw(st.integers(0, 1000))) * draw(st.integers(-1, 1))
    # Sums of products never lie between zero and the smallest float64.
    if 0 < abs(value + moved) < Fraction(SMALLEST_FLOAT64):
        moved = Fraction(0)
    return draw(st.sampled_from([1, -1])) * (value + moved)


finite_float64 = st.floats(allow_nan=False, allow_infinity=False)
moderate_float64 = st.floats(-(2.0**1000), 2.0**1000, allow_subnormal=False)


@every_format
@given(data=st.data())
def test_points_on_and_around_numbers_quarters_and_ties_round_as_rational(
    fmt: Format, form: rational.Format, data: st.DataObject
) -> None:
    values = data.draw(st.lists(hard_values(form), min_size=1, max_size=30))
    assert_rounds_as_rational(values, fmt, form)


@every_format
@given(numbers=st.lists(finite_float64, min_size=1, max_size=30), shift=st.integers(-1100, 1000))
def test_any_float64_rounds_as_rational(
    fmt: Format, form: rational.Format, numbers: list[float], shift: int
) -> None:
    values = [Fraction(number) for number in numbers]
    values += [Fraction(math.ldexp(math.frexp(number)[0], shift)) for number in numbers]
    finite = torch.tensor([float(value) for value in values], dtype=torch.float64)
    for value, bits in zip(values, bits_of(round_float64(finite, fmt)), strict=True):
        if value != 0:
            assert bits == round_to_bits(value, form)


@every_format
@given(number=moderate_float64, share=st.floats(-0.5, 0.5))
def test_any_float64_with_any_remainder_rounds_as_their_exact_sum(
    fmt: Format, form: rational.Format, number: float, share: float
) -> None:
    value = Fraction(number) + Fraction(math.ulp(number)) * Fraction(share)
    # Sums of products never lie between zero and the smallest float64.
    if abs(value) > Fraction(SMALLEST_FLOAT64):
        assert_rounds_as_rational([value], fmt, form)


@every_format
def test_both_overflow_thresholds_are_met_exactly(fmt: Format, form: rational.Format) -> None:
    largest = finite_value(infinity_bits(form) - 1, form)
    threshold = midpoint_above(infinity_bits(form) - 1, form)
    tiny = power_of_two(-900)
    values = [largest, threshold - tiny, threshold, threshold + tiny, power_of_two(1000)]
    bits = [infinity_bits(form) - 1] * 2 + [infinity_bits(form)] * 3
    assert oracle_bits(values, fmt) == bits
    sign = 1 << (form.width - 1)
    assert oracle_bits([-value for value in values], fmt) == [pattern + sign for pattern in bits]


@every_format
def test_zeros_keep_their_sign_and_underflow_takes_that_of_the_value(
    fmt: Format, form: rational.Format
) -> None:
    high = torch.tensor([0.0, -0.0, SMALLEST_FLOAT64, -SMALLEST_FLOAT64], dtype=torch.float64)
    rounded = round_float64(high, fmt)
    assert bits_of(rounded) == [0, 1 << (form.width - 1)] * 2


@every_format
def test_infinities_and_nan_pass_through(fmt: Format, form: rational.Format) -> None:
    high = torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.float64)
    rounded = round_float64(high, fmt)
    assert bits_of(rounded)[:2] == [round_to_bits("inf", form), round_to_bits("-inf", form)]
    assert torch.isnan(rounded[2])


@every_format
def test_every_number_of_a_16_bit_format_or_of_a_sweep_rounds_to_itself(
    fmt: Format, form: rational.Format
) -> None:
    step = 1 if form.width == 16 else 8_388_593
    patterns = [bits for bits in range(0, 1 << form.width, step) if decode(bits, form) != "nan"]
    numbers = rational.tensor_of(patterns, (len(patterns),), form)
    assert bits_of(round_float64(numbers.to(torch.float64), fmt)) == patterns


def test_any_shape_and_strides_are_rounded_elementwise() -> None:
    value = torch.linspace(-3, 3, 24, dtype=torch.float64).reshape(2, 3, 4)
    expected = round_float64(value.reshape(-1), BFLOAT16)
    turned = value.permute(2, 0, 1)
    assert torch.equal(round_float64(turned, BFLOAT16), expected.reshape(2, 3, 4).permute(2, 0, 1))
    assert round_float64(value[0, 0, 0], FLOAT16).shape == ()
    assert round_float64(value[:, :0], FLOAT32).shape == (2, 0, 4)


# Error-free transformations


@given(number=moderate_float64, share=st.floats(-0.5, 0.5))
@example(number=1.0, share=-0.25)
@example(number=-1.0, share=0.25)
@example(number=2.0**-1022, share=-0.5)
def test_round_to_odd_gives_that_neighbour_of_an_inexact_value_whose_last_bit_is_one(
    number: float, share: float
) -> None:
    exact = Fraction(number) + Fraction(math.ulp(number)) * Fraction(share)
    if 0 < abs(exact) < Fraction(SMALLEST_FLOAT64):
        return
    high, low = split(exact)
    odd = round_to_odd(*torch.tensor([[high], [low]], dtype=torch.float64))
    result = odd.item()
    if Fraction(high) == exact:
        assert result == high
        return
    assert odd.view(torch.int64).item() % 2 == 1
    across = math.nextafter(result, math.inf if Fraction(result) < exact else -math.inf)
    assert min(Fraction(result), Fraction(across)) < exact < max(Fraction(result), Fraction(across))


@given(pairs=st.lists(st.tuples(moderate_float64, moderate_float64), min_size=1, max_size=40))
@example(pairs=[(1.0, 2.0**-53), (1.0, -(2.0**-54)), (2.0**1000, 2.0**-1074), (0.1, -0.1)])
def test_two_sum_is_exact_and_its_leading_part_is_the_float64_sum(
    pairs: list[tuple[float, float]],
) -> None:
    a, b = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    high, low = two_sum(a, b)
    for (x, y), h, rest in zip(pairs, high.tolist(), low.tolist(), strict=True):
        assert Fraction(h) + Fraction(rest) == Fraction(x) + Fraction(y)
        assert h == x + y


# Units


@every_16_bit_format
def test_ulp_of_every_number_is_its_distance_to_the_next_in_its_binade(
    fmt: Format, form: rational.Format
) -> None:
    patterns = list(range(infinity_bits(form)))
    units = ulp(rational.tensor_of(patterns, (len(patterns),), form), fmt)
    assert units.dtype == torch.float64
    spacing = [2 * (midpoint_above(bits, form) - finite_value(bits, form)) for bits in patterns]
    assert [Fraction(unit) for unit in units.tolist()] == spacing
    negative = rational.tensor_of([bits + (1 << 15) for bits in patterns], (len(patterns),), form)
    assert torch.equal(ulp(negative, fmt), units)


@given(bits=st.integers(0, (0xFF << 23) - 1))
def test_ulp_of_any_float32_is_its_distance_to_the_next_in_its_binade(bits: int) -> None:
    number = rational.tensor_of([bits], (1,), rational.FP32)
    spacing = 2 * (midpoint_above(bits, rational.FP32) - finite_value(bits, rational.FP32))
    assert Fraction(ulp(number, FLOAT32).item()) == spacing
