"""Acceptance intervals: the rational formulas, sound for every honest evaluation, and tight."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.budget import (
    CONTRACTS,
    FLOAT32_LIMIT,
    Budget,
    Contract,
    Interval,
    gamma,
    interval,
)
from oracle.rounding import BFLOAT16, FLOAT16, FLOAT32, Format
from tests import rational
from tests.rational import (
    FP32,
    Acceptance,
    Value,
    acceptance,
    bits_of,
    decode,
    is_finite,
    power_of_two,
    round_to,
    round_to_bits,
    summation_error,
    tensor_of,
)

PAIRS = [
    pytest.param(BFLOAT16, rational.BF16, id="bfloat16"),
    pytest.param(FLOAT16, rational.FP16, id="float16"),
    pytest.param(FLOAT32, rational.FP32, id="float32"),
]
every_format = pytest.mark.parametrize(("fmt", "form"), PAIRS)
every_contract = pytest.mark.parametrize("contract", CONTRACTS)
seeds = st.integers(0, 2**32 - 1)

Factors = list[tuple[Fraction, Fraction]]


# Products to add up: each generator gives the factors of one element's terms.


def number(rng: random.Random, form: rational.Format, low: int, high: int) -> Fraction:
    """A number of the format with an exponent from ``low`` to ``high``, of either sign."""
    power = rng.randint(max(low, form.emin), min(high, form.emax))
    significand = rng.randrange(1 << (form.precision - 1), 1 << form.precision)
    return rng.choice((1, -1)) * significand * power_of_two(power - form.precision + 1)


def near_one(count: int, rng: random.Random, form: rational.Format) -> Factors:
    return [(number(rng, form, -3, 1), number(rng, form, -3, 1)) for _ in range(count)]


def any_exponent(count: int, rng: random.Random, form: rational.Format) -> Factors:
    half = form.emax // 2
    return [(number(rng, form, -half, half), number(rng, form, -half, half)) for _ in range(count)]


def dyadic(count: int, rng: random.Random, form: rational.Format) -> Factors:
    """Few significant bits, so that sums are exact and ties are common."""
    step = power_of_two(-(form.precision // 2))
    few = 1 << (form.precision // 2 + 1)
    return [(rng.randint(-few, few) * step, rng.randint(-few, few) * step) for _ in range(count)]


def ties(count: int, rng: random.Random, form: rational.Format) -> Factors:
    """Every product halfway between two numbers of the format, or a power of two."""
    one = Fraction(1)
    # 2^p + 1 is prime for p = 8; 2^8 + 3 = 7 * 37 is odd as well, and so a tie.
    odd, left = {8: (259, 7), 11: (2049, 3), 24: (2**24 + 1, 97)}[form.precision]
    pair = (Fraction(left), Fraction(odd // left) * power_of_two(-form.precision))
    return [
        (rng.choice((1, -1)) * factors[0], factors[1])
        for factors in rng.choices(
            [pair, (one, one), (one, 2 * one), (one, one / (1 << form.precision))], k=count
        )
    ]


def subnormal(count: int, rng: random.Random, form: rational.Format) -> Factors:
    """Products around and below the smallest numbers of the format, and of float32."""
    return [
        split_power(form.emin - rng.randint(-2, form.precision + 2), rng, form)
        for _ in range(count)
    ]


def near_overflow(count: int, rng: random.Random, form: rational.Format) -> Factors:
    """Products around the largest number of the format."""
    return [
        split_power(form.emax - rng.randint(-1, 3 + count.bit_length()), rng, form)
        for _ in range(count)
    ]


def split_power(power: int, rng: random.Random, form: rational.Format) -> tuple[Fraction, Fraction]:
    """Two numbers whose exponents add up to ``power``."""
    left, right = power // 2, power - power // 2
    return number(rng, form, left, left), number(rng, form, right, right)


KINDS = (near_one, any_exponent, dyadic, ties, subnormal, near_overflow)
counts = st.sampled_from([1, 2, 3, 8, 8, 64])
kinds = st.sampled_from(KINDS)


def products(factors: Factors) -> list[Fraction]:
    return [left * right for left, right in factors]


def tensor_of_terms(columns: Sequence[Sequence[Fraction]]) -> torch.Tensor:
    assert all(Fraction(float(term)) == term for column in columns for term in column)
    numbers = [[float(term) for term in column] for column in columns]
    return torch.tensor(numbers, dtype=torch.float64).T.contiguous()


def value_of(tensor: torch.Tensor, place: int, form: rational.Format) -> Value:
    return decode(bits_of(tensor)[place], form)


# The formulas


def assert_is_rational_interval(
    found: Interval,
    columns: Sequence[Sequence[Fraction]],
    contract: Contract,
    form: rational.Format,
) -> None:
    for place, column in enumerate(columns):
        wanted = acceptance(contract, column, form)
        assert wanted.in_domain == found.in_domain[place].item(), (contract, column)
        bounds = (value_of(found.low, place, form), value_of(found.high, place, form))
        assert bounds == (wanted.rounded_low, wanted.rounded_high), (contract, column)


@every_format
@every_contract
@settings(max_examples=25)
@given(count=counts, kind=kinds, seed=seeds)
def test_the_interval_is_the_rational_one(
    fmt: Format,
    form: rational.Format,
    contract: Contract,
    count: int,
    kind: Callable[..., Factors],
    seed: int,
) -> None:
    rng = random.Random(seed)
    columns = [products(kind(count, rng, form)) for _ in range(2)]
    found = interval(tensor_of_terms(columns), contract, fmt)
    assert_is_rational_interval(found, columns, contract, form)


@every_format
@every_contract
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_interval_is_the_rational_one_for_powers_of_two_their_neighbours_and_zero(
    fmt: Format, form: rational.Format, contract: Contract, count: int
) -> None:
    step = power_of_two(1 - form.precision)
    numbers = [
        Fraction(0),
        Fraction(1),
        -Fraction(1),
        1 + step / 2,
        step / 2,
        2 - step / 2,
        power_of_two(form.emin - form.precision),
    ]
    columns = [list(column) for column in itertools.product(numbers, repeat=count)]
    found = interval(tensor_of_terms(columns), contract, fmt)
    assert_is_rational_interval(found, columns, contract, form)


def test_a_product_stored_by_way_of_float32_may_be_rounded_twice() -> None:
    step = power_of_two(-7)
    above, below = 1 + step / 2 + power_of_two(-30), 1 + 3 * step / 2 - power_of_two(-30)
    # Float32 makes ties of both, which go down to 1 and up to 1 + 2 steps: away from where the
    # products lie, and so does the sum with half a step more, or less.
    columns = [[above, step / 2], [below, -step / 2]]
    found = interval(tensor_of_terms(columns), "stored_intermediates", BFLOAT16)
    assert_is_rational_interval(found, columns, "stored_intermediates", rational.BF16)
    assert value_of(found.low, 0, rational.BF16) == 1
    assert value_of(found.high, 1, rational.BF16) == 1 + 2 * step


def test_sums_count_as_exact_only_if_those_of_the_stored_products_are_too() -> None:
    """The terms add up to less than 2^24, their stored values to more, and y is a tie."""
    column = [Fraction(2**23 + 2**15 + 1), -Fraction(2**23 - 2**15 - 255)]
    assert sum(map(abs, column)) < 2**24 < rational.magnitude_sum(column, rational.BF16)
    found = interval(tensor_of_terms([column]), "single_rounding", BFLOAT16)
    assert_is_rational_interval(found, [column], "single_rounding", rational.BF16)
    assert value_of(found.low, 0, rational.BF16) == 2**16
    assert value_of(found.high, 0, rational.BF16) == 2**16 + 2**9


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64, 1000])
def test_gamma_is_the_rational_one_rounded_up(count: int) -> None:
    exact = rational.gamma(count)
    assert exact <= Fraction(gamma(count)) <= exact * (1 + power_of_two(-48))


def test_float32_sums_overflow_exactly_from_the_limit_on() -> None:
    limit = Fraction(FLOAT32_LIMIT)
    assert round_to(limit, FP32) == "inf"
    assert is_finite(round_to(limit - power_of_two(60), FP32))


@every_format
def test_the_domain_ends_where_a_term_or_its_stored_value_or_the_sum_overflows(
    fmt: Format, form: rational.Format
) -> None:
    largest = (2 - power_of_two(1 - form.precision)) * power_of_two(form.emax)
    half_step = power_of_two(form.emax - form.precision)
    stored = [
        [largest],
        [largest + half_step * Fraction(3, 4)],
        [largest + half_step],
        [-2 * largest],
    ]
    found = interval(tensor_of_terms(stored), "stored_intermediates", fmt)
    expected = [True, True, False, False]
    if form is not rational.FP16:
        # In float32 the sum, rounded with its own error, is past the limit before the term is.
        expected = [acceptance("stored_intermediates", column, form).in_domain for column in stored]
        assert expected[2:] == [False, False]
    assert found.in_domain.tolist() == expected
    assert interval(tensor_of_terms(stored), "correctly_rounded", fmt).in_domain.all()


@every_format
@every_contract
@settings(max_examples=25)
@given(count=st.sampled_from([1, 2, 3, 8]), kind=kinds, seed=seeds)
def test_elements_out_of_the_domain_are_counted_one_by_one(
    fmt: Format,
    form: rational.Format,
    contract: Contract,
    count: int,
    kind: Callable[..., Factors],
    seed: int,
) -> None:
    rng = random.Random(seed)
    for columns in ([products(kind(count, rng, form))], [products(kind(count, rng, form))] * 3):
        outside = sum(not acceptance(contract, column, form).in_domain for column in columns)
        assert Budget(tensor_of_terms(columns), fmt).out_of_domain(contract) == outside


def test_terms_in_the_domain_each_may_leave_it_together() -> None:
    column = [Fraction(2**127), Fraction(-(2**127))]
    for contract, outside in (("correctly_rounded", 0), ("single_rounding", 1)):
        assert acceptance(contract, column, rational.BF16).in_domain == (outside == 0)
        assert Budget(tensor_of_terms([column]), BFLOAT16).out_of_domain(contract) == outside


# Soundness: no honest evaluation is ever rejected


@dataclass(frozen=True)
class Style:
    """How an honest kernel evaluates a sum of products.

    ``stored``: which products go through the output type, and ``through_float32`` how; ``fused``:
    whether a product is added by FMA where it can be; ``float64``: everything in float64, and then
    rounded at once or by way of float32.
    """

    stored: tuple[bool, ...]
    through_float32: bool
    fused: bool
    float64: bool
    twice: bool


def draw_style(count: int, rng: random.Random, storing: bool) -> Style:
    share = rng.choice((0.0, 0.5, 1.0)) if storing else 0.0
    return Style(
        stored=tuple(rng.random() < share for _ in range(count)),
        through_float32=rng.random() < 0.5,
        fused=rng.random() < 0.5,
        float64=rng.random() < 0.25,
        twice=rng.random() < 0.5,
    )


@dataclass(frozen=True)
class Operand:
    """A value in a register, or a product that no instruction has rounded yet."""

    value: Fraction
    pending: bool = False


class Overflowed(Exception):
    """An intermediate became infinite: the element is out of the contract's domain."""


def rounded(value: Fraction, form: rational.Format) -> Fraction:
    result = round_to(value, form)
    if not isinstance(result, Fraction):
        raise Overflowed
    return result


def honest_value(
    factors: Factors, style: Style, rng: random.Random, form: rational.Format
) -> Value:
    """What a kernel of that style returns, adding in a random order (any binary tree)."""
    working = rational.FP64 if style.float64 else FP32

    def settled(operand: Operand) -> Fraction:
        return rounded(operand.value, working) if operand.pending else operand.value

    def add(one: Operand, other: Operand) -> Operand:
        if style.fused and (one.pending or other.pending):
            product, addend = (one, other) if one.pending else (other, one)
            return Operand(rounded(product.value + settled(addend), working))
        return Operand(rounded(settled(one) + settled(other), working))

    operands = []
    for (left, right), store in zip(factors, style.stored, strict=True):
        product = left * right
        if store:
            exact = rounded(product, FP32) if style.through_float32 else product
            operands.append(Operand(rounded(exact, form)))
        else:
            operands.append(Operand(product, pending=True))
    sequential = rng.random() < 0.3
    rng.shuffle(operands)
    while len(operands) > 1:
        one = operands.pop(0 if sequential else rng.randrange(len(operands)))
        other = operands.pop(0 if sequential else rng.randrange(len(operands)))
        operands.insert(0, add(one, other))
    last = settled(operands[0]) if rng.random() < 0.5 or style.fused else operands[0].value
    if style.float64 and style.twice:
        last = rounded(last, FP32)
    return round_to(last, form)


def accepted(found: Interval, place: int, value: Value, form: rational.Format) -> bool:
    one = tensor_of([round_to_bits(value, form)], (1,), form)
    part = slice(place, place + 1)
    return bool(
        Interval(found.low[part], found.high[part], found.in_domain[part]).accepts(one).item()
    )


def assert_honest_values_are_accepted(
    factors: Factors,
    contract: Contract,
    fmt: Format,
    form: rational.Format,
    rng: random.Random,
    storing: bool,
) -> None:
    terms = products(factors)
    found = interval(tensor_of_terms([terms]), contract, fmt)
    for _ in range(6):
        style = draw_style(len(factors), rng, storing)
        try:
            value = honest_value(factors, style, rng, form)
        except Overflowed:
            assert not found.in_domain.item(), (style, terms)
            continue
        assert accepted(found, 0, value, form), (style, value, terms)
    exact = round_to(sum(terms, Fraction(0)), form)
    assert accepted(found, 0, exact, form)


@every_format
@settings(max_examples=40)
@given(count=counts, kind=kinds, seed=seeds)
def test_single_rounding_accepts_float32_and_float64_sums_in_any_order_fused_or_not(
    fmt: Format, form: rational.Format, count: int, kind: Callable[..., Factors], seed: int
) -> None:
    rng = random.Random(seed)
    factors = kind(count, rng, form)
    assert_honest_values_are_accepted(factors, "single_rounding", fmt, form, rng, storing=False)


@every_format
@settings(max_examples=40)
@given(count=counts, kind=kinds, seed=seeds)
def test_stored_intermediates_accepts_any_subset_of_products_stored_directly_or_through_float32(
    fmt: Format, form: rational.Format, count: int, kind: Callable[..., Factors], seed: int
) -> None:
    rng = random.Random(seed)
    factors = kind(count, rng, form)
    assert_honest_values_are_accepted(factors, "stored_intermediates", fmt, form, rng, storing=True)


@every_format
@settings(max_examples=25)
@given(count=counts, kind=kinds, seed=seeds)
def test_bounded_error_accepts_what_stored_intermediates_accepts_so_that_grades_are_ordered(
    fmt: Format, form: rational.Format, count: int, kind: Callable[..., Factors], seed: int
) -> None:
    rng = random.Random(seed)
    columns = [products(kind(count, rng, form)) for _ in range(4)]
    terms = tensor_of_terms(columns)
    tight, loose = (
        interval(terms, "stored_intermediates", fmt),
        interval(terms, "bounded_error", fmt),
    )
    for bound in (tight.low, tight.high):
        assert bool(loose.accepts(bound).all()), columns


@every_format
@settings(max_examples=25)
@given(count=counts, kind=kinds, seed=seeds)
def test_contracts_up_to_the_default_accept_what_tighter_ones_accept(
    fmt: Format, form: rational.Format, count: int, kind: Callable[..., Factors], seed: int
) -> None:
    rng = random.Random(seed)
    terms = tensor_of_terms([products(kind(count, rng, form)) for _ in range(4)])
    names: tuple[Contract, ...] = ("correctly_rounded", "single_rounding", "stored_intermediates")
    intervals = [interval(terms, name, fmt) for name in names]
    for tight, loose in itertools.pairwise(intervals):
        for bound in (tight.low, tight.high):
            assert bool(loose.accepts(bound).all())
        assert bool((tight.in_domain | ~loose.in_domain).all())


def test_a_product_below_the_smallest_subnormal_may_be_stored_as_zero_or_as_it() -> None:
    smallest = power_of_two(-133)
    columns = [
        [Fraction(1, 2) * smallest],
        [Fraction(3, 4) * smallest],
        [Fraction(5, 4) * smallest],
    ]
    found = interval(tensor_of_terms(columns), "stored_intermediates", BFLOAT16)
    for place, column in enumerate(columns):
        assert accepted(found, place, round_to(column[0], rational.BF16), rational.BF16)


def test_float32_sums_that_absorb_small_terms_are_accepted_at_64_heads() -> None:
    """The worst order: the large term first, then 63 that it absorbs one by one."""
    tiny = power_of_two(-25)
    terms = [Fraction(1)] + [tiny] * 63
    one_by_one = Fraction(1)
    for term in terms[1:]:
        one_by_one = rounded(one_by_one + term, FP32)
    assert one_by_one == 1
    found = interval(tensor_of_terms([terms]), "single_rounding", FLOAT32)
    assert accepted(found, 0, one_by_one, FP32)
    assert round_to(sum(terms, Fraction(0)), FP32) != 1


# Tightness


def neighbours(low: Value, high: Value, form: rational.Format) -> list[int]:
    """The patterns of the number before ``low`` and of the one after ``high``, where finite."""
    infinity = round_to_bits("inf", form)
    sign = 1 << (form.width - 1)

    def ordinal(value: Value) -> int:
        bits = round_to_bits(value, form)
        return -(bits - sign) if bits >= sign else bits

    steps = [ordinal(low) - 1, ordinal(high) + 1]
    return [step if step >= 0 else sign - step for step in steps if abs(step) < infinity]


@every_format
@every_contract
@settings(max_examples=25)
@given(count=counts, kind=kinds, seed=seeds)
def test_one_step_beyond_either_bound_is_rejected_in_and_out_of_the_domain(
    fmt: Format,
    form: rational.Format,
    contract: Contract,
    count: int,
    kind: Callable[..., Factors],
    seed: int,
) -> None:
    terms = products(kind(count, random.Random(seed), form))
    found = interval(tensor_of_terms([terms]), contract, fmt)
    low, high = value_of(found.low, 0, form), value_of(found.high, 0, form)
    assert accepted(found, 0, low, form)
    assert accepted(found, 0, high, form)
    for bits in neighbours(low, high, form):
        beyond = decode(bits, form)
        assert not accepted(found, 0, beyond, form), (contract, terms, beyond)


def attaining(
    terms: Sequence[Fraction], form: rational.Format, side: Callable[..., Value]
) -> Value:
    """What a kernel returns that keeps or stores each product as lowers (raises) it the most."""
    total = Fraction(0)
    for term in terms:
        images = [term, round_to(term, form), round_to(round_to(term, FP32), form)]
        total += side(image for image in images if isinstance(image, Fraction))
    return round_to(total, form)


@every_format
def test_both_bounds_of_stored_intermediates_are_attained_where_float32_sums_are_exact(
    fmt: Format, form: rational.Format
) -> None:
    rng = random.Random(form.precision)
    attained = apart = 0
    for _ in range(150):
        terms = products(rng.choice((dyadic, ties, near_one))(rng.choice((1, 2, 3, 8)), rng, form))
        if summation_error(terms, form) != 0:
            continue
        attained += 1
        found = interval(tensor_of_terms([terms]), "stored_intermediates", fmt)
        low, high = value_of(found.low, 0, form), value_of(found.high, 0, form)
        assert low == attaining(terms, form, min)
        assert high == attaining(terms, form, max)
        apart += low != high
        single = interval(tensor_of_terms([terms]), "single_rounding", fmt)
        exact = round_to(sum(terms, Fraction(0)), form)
        assert value_of(single.low, 0, form) == value_of(single.high, 0, form) == exact
    assert attained > 30
    assert apart > 10 or form is FP32


def test_where_float32_is_exact_it_is_so_in_any_order() -> None:
    """What lets d32 vanish: all terms and stored terms are multiples of q, up to 2^24 q."""
    rng = random.Random(6)
    exact = 0
    for _ in range(300):
        factors = dyadic(rng.choice((2, 3, 8, 64)), rng, rational.BF16)
        if summation_error(products(factors), rational.BF16) != 0:
            continue
        exact += 1
        style = Style((False,) * len(factors), False, rng.random() < 0.5, False, False)
        value = honest_value(factors, style, rng, rational.BF16)
        assert value == round_to(sum(products(factors), Fraction(0)), rational.BF16)
    assert exact > 200


# Accepting


def test_nan_is_never_inside_and_infinities_and_nan_are_accepted_only_out_of_the_domain() -> None:
    low, high = (torch.tensor([x] * 4, dtype=torch.bfloat16) for x in (1.0, 2.0))
    values = torch.tensor([math.nan, math.inf, -math.inf, 1.5], dtype=torch.bfloat16)
    inside = torch.ones(4, dtype=torch.bool)
    assert Interval(low, high, inside).accepts(values).tolist() == [False, False, False, True]
    assert Interval(low, high, ~inside).accepts(values).tolist() == [True] * 4
    wide = Interval(-torch.full_like(low, math.inf), torch.full_like(low, math.inf), inside)
    assert wide.accepts(values).tolist() == [False, True, True, True]


@every_format
@every_contract
@settings(max_examples=20)
@given(count=st.sampled_from([1, 2, 3, 8]), seed=seeds)
def test_accepts_agrees_with_rational_acceptance_on_any_value(
    fmt: Format, form: rational.Format, contract: Contract, count: int, seed: int
) -> None:
    rng = random.Random(seed)
    terms = products(rng.choice((near_one, near_overflow, subnormal))(count, rng, form))
    wanted: Acceptance = acceptance(contract, terms, form)
    # A point where the rational bound and its outward float64 image round apart is not a number.
    found = interval(tensor_of_terms([terms]), contract, fmt)
    close = [value_of(found.low, 0, form), value_of(found.high, 0, form), "inf", "-inf", "nan"]
    near = [decode(bits, form) for bits in neighbours(close[0], close[1], form)]
    for value in (*close, *near, Fraction(0), round_to(sum(terms, Fraction(0)), form)):
        assert accepted(found, 0, value, form) == wanted.accepts(value), (contract, terms, value)


def test_zeros_of_either_sign_are_the_same_value() -> None:
    zero = torch.zeros(2, 1, dtype=torch.float64)
    for contract in CONTRACTS:
        found = interval(zero, contract, BFLOAT16)
        assert accepted(found, 0, Fraction(0), rational.BF16)
        assert bool(found.accepts(torch.tensor([-0.0], dtype=torch.bfloat16)).all())
        smallest = torch.tensor([2.0**-133], dtype=torch.bfloat16)
        assert not bool(found.accepts(smallest).any())
