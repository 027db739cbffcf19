"""The scheme named, and the mean test: sound for every honest kernel, and what they catch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import scheme
from oracle.budget import Contract, interval
from oracle.rounding import BFLOAT16, FLOAT16, FLOAT32, Format, round_float64
from oracle.scheme import (
    FALSE_ALARM,
    FEWEST_CLUSTERS,
    TOO_FEW_DECIDED,
    SchemeResult,
    SchemeTally,
    deviation_bound,
    mean_test,
    rounding_scheme,
    stored_sets,
)
from tests import rational
from tests.rational import Value, power_of_two, round_to, round_to_bits, tensor_of
from tests.test_budget import (
    KINDS,
    PAIRS,
    Factors,
    Overflowed,
    Style,
    honest_value,
    products,
    tensor_of_terms,
)

Stored = tuple[int, ...]
Kernel = Callable[[torch.Tensor, Format], torch.Tensor]

every_format = pytest.mark.parametrize(("fmt", "form"), PAIRS)
low_precision = pytest.mark.parametrize("fmt", [BFLOAT16, FLOAT16], ids=lambda fmt: fmt.name)
every_count = pytest.mark.parametrize("count", [1, 2, 3, 8])
seeds = st.integers(0, 2**32 - 1)

ONE_ROUNDING = "one rounding of a float32 sum"


# Kernels on the products of a block


def random_terms(count: int, elements: int, fmt: Format, seed: int = 0) -> torch.Tensor:
    """Exact products of normal numbers of the format, float64 ``[count, elements]``."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(2, count, elements, generator=generator, dtype=torch.float64)
    left, right = round_float64(factors, fmt).to(torch.float64)
    return left * right


def pairs(elements: int) -> torch.Tensor:
    """Clusters of two elements each."""
    return torch.arange(elements) // 2


def storing(*stored: int) -> Kernel:
    """The kernel that stores some products and adds in float32."""

    def kernel(terms: torch.Tensor, fmt: Format) -> torch.Tensor:
        parts = terms.to(torch.float32)
        for place in stored:
            parts[place] = parts[place].to(fmt.dtype).to(torch.float32)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(fmt.dtype)

    return kernel


def mixed(*kernels: Kernel) -> Kernel:
    """The kernel that takes them in turn from element to element."""

    def kernel(terms: torch.Tensor, fmt: Format) -> torch.Tensor:
        values = torch.empty(terms.shape[1:], dtype=fmt.dtype)
        for place, one in enumerate(kernels):
            part = slice(place, None, len(kernels))
            values[part] = one(terms[:, part], fmt)
        return values

    return kernel


def truncating(terms: torch.Tensor, fmt: Format) -> torch.Tensor:
    """A float32 sum, cut off."""
    total = terms.to(torch.float32).sum(dim=0)
    nearest = total.to(fmt.dtype)
    too_large = nearest.abs().to(torch.float32) > total.abs()
    bits = nearest.view(fmt.bits_dtype)
    return torch.where(too_large, bits - 1, bits).view(fmt.dtype)


def truncating_where_allowed(terms: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Truncates every element whose interval contains the result."""
    cut = truncating(terms, fmt)
    accepted = interval(terms, "stored_intermediates", fmt).accepts(cut)
    return torch.where(accepted, cut, storing()(terms, fmt))


def rounding_ties_away(terms: torch.Tensor, fmt: Format) -> torch.Tensor:
    """A float32 sum, rounded to nearest, ties away from zero."""
    total = terms.to(torch.float32).sum(dim=0)
    # A part in 2^30 more settles ties, and moves nothing else that has 24 bits.
    return round_float64(total.to(torch.float64) * (1 + 2.0**-30), fmt)


def truncating_products(terms: torch.Tensor, fmt: Format) -> torch.Tensor:
    parts = torch.stack([truncating(part[None], fmt).to(torch.float32) for part in terms])
    return parts.sum(dim=0).to(fmt.dtype)


# Honest kernels are explained


def honest_columns(
    count: int, stored: Stored, rng: random.Random, form: rational.Format
) -> Iterator[tuple[list[Fraction], Value | None]]:
    """Terms of some elements, and what an honest kernel returns; None where it overflows."""
    for _ in range(6):
        factors: Factors = rng.choice(KINDS)(count, rng, form)
        style = Style(
            stored=tuple(place in stored for place in range(count)),
            through_float32=rng.random() < 0.5,
            fused=rng.random() < 0.5,
            float64=rng.random() < 0.25,
            twice=rng.random() < 0.5,
        )
        try:
            yield products(factors), honest_value(factors, style, rng, form)
        except Overflowed:
            yield products(factors), None


def tensor_of_values(values: Sequence[Value | None], form: rational.Format) -> torch.Tensor:
    bits = [round_to_bits("nan" if value is None else value, form) for value in values]
    return tensor_of(bits, (len(bits),), form)


@every_format
@every_count
@settings(max_examples=15)
@given(seed=seeds)
def test_a_kernel_of_a_scheme_never_disagrees_with_it(
    fmt: Format, form: rational.Format, count: int, seed: int
) -> None:
    rng = random.Random(seed)
    for place, stored in enumerate(stored_sets(count)):
        columns, values = zip(*honest_columns(count, stored, rng, form), strict=True)
        result = rounding_scheme(tensor_of_terms(columns), tensor_of_values(values, form), fmt)
        one = result.agreements[place]
        assert one.stored == stored
        assert one.disagreements == 0, (stored, columns, values)
        assert stored in result.explained_by
        assert one.elements <= sum(value is not None for value in values)


def ends(
    terms: Sequence[Fraction], stored: Stored, form: rational.Format, widened: Fraction
) -> tuple[Value, Value]:
    """A scheme's least and greatest result, by the formula, with d32 widened by a factor."""
    ways = []
    for place, term in enumerate(terms):
        direct, through = round_to(term, form), round_to(rational_32(term), form)
        assert isinstance(direct, Fraction)
        assert isinstance(through, Fraction)
        ways.append((direct, through) if place in stored else (term, term))
    slack = rational.summation_error(terms, form) * widened
    low, high = sum(map(min, ways), Fraction(0)), sum(map(max, ways), Fraction(0))
    return round_to(low - slack, form), round_to(high + slack, form)


def rational_32(term: Fraction) -> Fraction:
    value = round_to(term, rational.FP32)
    assert isinstance(value, Fraction)
    return value


@every_format
@every_count
@settings(max_examples=15)
@given(seed=seeds, kind=st.sampled_from(KINDS[:5]))
def test_what_is_decided_and_what_disagrees_is_what_rational_arithmetic_says(
    fmt: Format, form: rational.Format, count: int, seed: int, kind: Callable[..., Factors]
) -> None:
    rng = random.Random(seed)
    terms = products(kind(count, rng, form))
    column = tensor_of_terms([terms])
    if not interval(column, "stored_intermediates", fmt).in_domain.item():
        return
    for place, stored in enumerate(stored_sets(count)):
        # Outward by one part in 2^20, so that between these two all is right.
        tight = ends(terms, stored, form, Fraction(1))
        wide = ends(terms, stored, form, 1 + power_of_two(-19))
        for value in {tight[0], wide[0], wide[1], round_to(sum(terms, Fraction(0)), form)}:
            one = rounding_scheme(column, tensor_of_values([value], form), fmt).agreements[place]
            assert one.elements == 1
            assert (wide[0] == wide[1]) <= one.decided <= (tight[0] == tight[1])
            assert one.disagreements <= (not within(value, tight))
            assert one.disagreements >= (not within(value, wide))


def within(value: Value, bounds: tuple[Value, Value]) -> bool:
    low, high = map(ordered, bounds)
    return low <= ordered(value) <= high


def ordered(value: Value) -> Fraction:
    if isinstance(value, Fraction):
        return value
    return {"inf": power_of_two(1000), "-inf": -power_of_two(1000)}[value]


@low_precision
@pytest.mark.parametrize(
    ("count", "stored", "name"),
    [
        (1, (), ONE_ROUNDING),
        (2, (), ONE_ROUNDING),
        (2, (0,), "first product stored"),
        (2, (1,), "second product stored"),
        (2, (0, 1), "both products stored"),
        (3, (), ONE_ROUNDING),
        (3, (0, 1, 2), "all products stored"),
        (8, (), ONE_ROUNDING),
        (8, tuple(range(8)), "all products stored"),
    ],
)
def test_each_scheme_gets_its_name(fmt: Format, count: int, stored: Stored, name: str) -> None:
    terms = random_terms(count, 2000, fmt)
    result = rounding_scheme(terms, storing(*stored)(terms, fmt), fmt, clusters=pairs(2000))
    if count == 1:
        # A stored product is the result: there is nothing to tell apart.
        assert result.name == TOO_FEW_DECIDED
        assert result.explained_by == ((), (0,))
        return
    assert result.name == name
    assert result.explained_by == (stored,)
    assert result.mean is not None
    assert not result.mean.alarm
    assert result.biased is None


@low_precision
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("kernel", [truncating, truncating_where_allowed, truncating_products])
def test_no_scheme_explains_another_rounding(fmt: Format, count: int, kernel: Kernel) -> None:
    terms = random_terms(count, 20_000, fmt)
    result = rounding_scheme(terms, kernel(terms, fmt), fmt)
    assert result.name is None
    assert result.explained_by == ()
    assert all(one.disagreements for one in result.agreements)


@low_precision
@pytest.mark.parametrize("count", [2, 8])
def test_no_scheme_explains_ties_that_are_rounded_away_from_zero(fmt: Format, count: int) -> None:
    terms = torch.zeros(count, 200, dtype=torch.float64)
    # Integers of one bit more than the format holds: every other one is a tie, and every other
    # tie has its even neighbour nearer to zero.
    terms[0] = 2**fmt.precision + torch.arange(200) % 2**fmt.precision
    result = rounding_scheme(terms, rounding_ties_away(terms, fmt), fmt)
    assert [(one.decided, one.disagreements) for one in result.agreements[:1]] == [(200, 50)]
    assert rounding_scheme(terms, storing()(terms, fmt), fmt).name is not None
    assert result.name is None


@pytest.mark.parametrize("count", [2, 8])
def test_no_scheme_explains_a_mixture(count: int) -> None:
    terms = random_terms(count, 2000, BFLOAT16)
    values = mixed(storing(), storing(*range(count)))(terms, BFLOAT16)
    assert rounding_scheme(terms, values, BFLOAT16).name is None


@pytest.mark.parametrize("stored", stored_sets(2))
def test_float32_schemes_are_not_told_apart(stored: Stored) -> None:
    terms = random_terms(2, 2000, FLOAT32)
    values = storing(*stored)(terms, FLOAT32)
    result = rounding_scheme(terms, values, FLOAT32, clusters=pairs(2000))
    assert result.name == TOO_FEW_DECIDED
    assert result.biased is None


def test_schemes_that_coincide_on_the_data_are_named_together() -> None:
    terms = random_terms(2, 2000, BFLOAT16)
    terms[0] = round_float64(terms[0], BFLOAT16).to(torch.float64)
    values = storing()(terms, BFLOAT16)
    result = rounding_scheme(terms, values, BFLOAT16)
    assert result.name == f"{ONE_ROUNDING} or first product stored"
    terms[1] = 0.0
    assert rounding_scheme(terms, storing()(terms, BFLOAT16), BFLOAT16).name == TOO_FEW_DECIDED


def test_schemes_that_are_decided_nowhere_name_nothing_where_others_are_ruled_out() -> None:
    step = 2.0**-7
    # The sum is too near a tie for float32; with the first product stored it is below.
    terms = torch.tensor([[1 + step / 8], [3 * step / 8 + 2.0**-40]], dtype=torch.float64)
    result = rounding_scheme(terms, torch.tensor([1 + step], dtype=torch.bfloat16), BFLOAT16)
    assert [one.decided for one in result.agreements] == [0, 1, 0, 1]
    assert result.explained_by == ((), (1,))
    assert result.name == TOO_FEW_DECIDED


def test_an_undecided_element_disagrees_with_a_value_out_of_its_enclosure() -> None:
    terms = torch.tensor([[1.0 + 2.0**-8 + 2.0**-40], [2.0**-50]], dtype=torch.float64)
    for value, name in ((1.0, TOO_FEW_DECIDED), (1.0078125, TOO_FEW_DECIDED), (1.015625, None)):
        actual = torch.tensor([value], dtype=torch.bfloat16)
        result = rounding_scheme(terms, actual, BFLOAT16)
        assert [one.decided for one in result.agreements] == [0, 0, 0, 0]
        assert result.name == name


def test_a_product_may_be_stored_directly_or_by_way_of_float32() -> None:
    step = 2.0**-7
    near = [1 + step / 2 + 2.0**-30, 1 + 3 * step / 2 - 2.0**-30]
    terms = torch.tensor([near], dtype=torch.float64)
    for values in ([1 + step, 1 + step], [1.0, 1 + 2 * step]):
        stored = torch.tensor(values, dtype=torch.bfloat16)
        assert rounding_scheme(terms, stored, BFLOAT16).agreements[1].disagreements == 0
    for values in ([1.0 - step, 1 + step], [1.0, 1 + 3 * step]):
        neither = torch.tensor(values, dtype=torch.bfloat16)
        assert rounding_scheme(terms, neither, BFLOAT16).agreements[1].disagreements == 1


# What is left out


def test_elements_with_a_term_that_is_not_finite_or_out_of_the_domain_are_left_out() -> None:
    terms = torch.tensor([[1.0, 0.0, 2.0**128, 1.0], [2.0, 3.0, 1.0, 2.0]], dtype=torch.float64)
    finite = torch.tensor([True, False, True, True])
    values = torch.tensor([3.0, math.inf, -7.0, 5.0], dtype=torch.bfloat16)
    result = rounding_scheme(terms, values, BFLOAT16, finite=finite)
    assert {(one.elements, one.disagreements) for one in result.agreements} == {(2, 1)}


def test_a_nan_disagrees_with_every_scheme_and_has_the_score_zero() -> None:
    terms = random_terms(2, 2000, BFLOAT16)
    values = torch.full((2000,), math.nan, dtype=torch.bfloat16)
    result = rounding_scheme(terms, values, BFLOAT16, clusters=pairs(2000))
    assert result.name is None
    assert [one.disagreements for one in result.agreements] == [2000] * 4
    assert result.mean is not None
    assert result.mean.mean == 0.0


def test_nothing_is_said_of_nothing() -> None:
    empty = SchemeTally(BFLOAT16).result(1)
    assert empty == SchemeResult((), None)
    assert empty.name == TOO_FEW_DECIDED
    assert empty.biased is None
    none = torch.zeros(2, 0, dtype=torch.float64)
    result = rounding_scheme(none, none[0].to(torch.bfloat16), BFLOAT16, clusters=pairs(0))
    assert result.name == TOO_FEW_DECIDED
    assert result.mean is None


def test_blocks_of_different_numbers_of_terms_are_refused() -> None:
    tally = SchemeTally(BFLOAT16)
    value = torch.zeros(4, dtype=torch.bfloat16)
    tally.add(torch.zeros(2, 4, dtype=torch.float64), value)
    with pytest.raises(ValueError, match=r"3 terms per element, those before it 2"):
        tally.add(torch.zeros(3, 4, dtype=torch.float64), value)


# Streaming


def assert_same(one: SchemeResult, other: SchemeResult) -> None:
    assert one.agreements == other.agreements
    assert one.mean is not None
    assert other.mean is not None
    for field in ("mean", "low", "high", "tau", "clusters"):
        assert getattr(one.mean, field) == pytest.approx(getattr(other.mean, field), abs=1e-12)


@pytest.mark.parametrize("count", [2, 8])
def test_blocks_give_what_the_whole_gives(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (3, 1, 20, 64)
    terms = random_terms(count, math.prod(shape), BFLOAT16).reshape(count, *shape)
    values = truncating(terms, BFLOAT16)
    # Tokens from the last to the first, so that the clusters' numbers do not grow; a token's two
    # halves share a cluster, its heads (the first axis) do as well.
    clusters = 32 * torch.arange(20).flip(0)[:, None] + torch.arange(64) % 32
    whole = rounding_scheme(terms, values, BFLOAT16, clusters=clusters)
    monkeypatch.setattr(scheme, "_CHUNK", 100)
    tally = SchemeTally(BFLOAT16)
    for row in (slice(19, 20), slice(0, 7), slice(7, 7), slice(7, 19)):
        tally.add(terms[..., row, :], values[..., row, :], None, clusters[row])
    assert_same(tally.result(1), whole)


def test_without_clusters_in_a_single_block_no_mean_is_tested() -> None:
    terms = random_terms(2, 4000, BFLOAT16)
    values = truncating(terms, BFLOAT16)
    tally = SchemeTally(BFLOAT16)
    for part, clusters in ((slice(0, 3000), pairs(3000)), (slice(3000, None), None)):
        tally.add(terms[:, part], values[part], None, clusters)
    assert tally.result(1).mean is None
    assert tally.result(1).biased is None


def test_the_mean_is_tested_over_the_first_clusters_only(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = random_terms(2, 4000, BFLOAT16)
    values = mixed(storing(), storing(0))(terms, BFLOAT16)
    clusters = pairs(4000)
    first = slice(0, 1400)
    part = rounding_scheme(terms[:, first], values[first], BFLOAT16, clusters=clusters[first])
    monkeypatch.setattr(scheme, "MOST_CLUSTERS", 700)
    result = rounding_scheme(terms, values, BFLOAT16, clusters=clusters)
    assert result.mean is not None
    assert part.mean is not None
    assert result.mean.clusters == 700
    assert result.mean == part.mean


def test_a_scheme_ruled_out_is_not_followed_beyond_the_mean_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheme, "_CHUNK", 200)
    terms = random_terms(2, 1000, BFLOAT16)
    values = storing(0)(terms, BFLOAT16)
    result = rounding_scheme(terms, values, BFLOAT16)
    assert [one.elements for one in result.agreements] == [50, 1000, 50, 50]
    assert result.name == "first product stored"
    # A late fault is seen where the scheme is still in question.
    values[990] += 1
    assert rounding_scheme(terms, values, BFLOAT16).name is None


# The mean test's bound


def test_the_inequality_that_the_bound_rests_on() -> None:
    for rate in scheme._RATES:
        penalty = -math.log1p(-rate) - rate
        for step in range(-1000, 5000):
            x = step / 1000
            assert math.exp(rate * x - penalty * x * x) <= (1 + rate * x) * (1 + 1e-12)


def log_probability(successes: int, trials: int, probability: float) -> float:
    ways = math.lgamma(trials + 1)
    ways -= math.lgamma(successes + 1) + math.lgamma(trials - successes + 1)
    failures = trials - successes
    return ways + successes * math.log(probability) + failures * math.log1p(-probability)


@pytest.mark.parametrize("clusters", [600, 5000])
@pytest.mark.parametrize("fall", [0.02, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("rise", [0.001, 0.02, 0.3, 1.0, 2.0])
def test_differences_of_two_values_and_mean_zero_raise_no_alarm_by_exact_probability(
    clusters: int, fall: float, rise: float
) -> None:
    probability = fall / (rise + fall)
    alarm = [0.0, 0.0]
    for rises in range(clusters + 1):
        falls = clusters - rises
        mean = (rises * rise - falls * fall) / clusters
        square = (rises * rise**2 + falls * fall**2) / clusters
        if abs(mean) > deviation_bound(square, clusters, 1):
            alarm[mean > 0] += math.exp(log_probability(rises, clusters, probability))
    assert max(alarm) <= FALSE_ALARM / 2


def test_tau_is_what_the_formula_gives() -> None:
    exponent = math.log(2 * 3 * 7 / 1e-6)
    # At the rate 1/4 that is best here: psi(1/4) = log(4/3) - 1/4.
    wanted = (math.log(4 / 3) - 1 / 4) / (1 / 2) * 0.3 + 2 * exponent / (2000 / 4)
    assert deviation_bound(0.3, 2000, 3) == pytest.approx(wanted)
    hoeffding = math.sqrt(math.log(2 * 3 / 1e-6) / (2 * 2000))
    assert deviation_bound(0.3, 2000, 3) < 2 * hoeffding
    assert deviation_bound(0.3, 2000, 4) > deviation_bound(0.3, 2000, 3)
    assert deviation_bound(0.4, 2000, 3) > deviation_bound(0.3, 2000, 3)
    assert deviation_bound(0.3, 2001, 3) < deviation_bound(0.3, 2000, 3)


def test_the_mean_is_compared_with_the_extremes_of_the_schemes_and_tau() -> None:
    tested = torch.full((1000,), -0.5, dtype=torch.float64)
    low = torch.tensor([[-0.3], [-0.2]], dtype=torch.float64).expand(2, 1000)
    found = mean_test(tested, low, low + 0.1, 2, share=0.5)
    tau = deviation_bound(0.4**2, 1000, 2)
    assert found is not None
    assert (found.mean, found.clusters) == (-1.0, 1000)
    assert found.tau == pytest.approx(2 * tau)
    assert found.low == pytest.approx(2 * (-0.3 - tau))
    assert found.high == pytest.approx(2 * (-0.1 + tau))
    assert found.alarm == (tau < 0.2)


@pytest.mark.parametrize("sign", [1, -1])
def test_where_schemes_are_not_decided_their_means_are_intervals(sign: int) -> None:
    terms = sign * random_terms(2, 2000, FLOAT32).abs()
    values = storing()(terms, FLOAT32)
    mean = rounding_scheme(terms, values, FLOAT32, clusters=pairs(2000)).mean
    assert mean is not None
    assert mean.low + mean.tau < -0.5
    assert mean.high - mean.tau > 0.5


@pytest.mark.parametrize("clusters", [FEWEST_CLUSTERS - 1, FEWEST_CLUSTERS])
def test_no_mean_is_tested_with_too_few_clusters(clusters: int) -> None:
    terms = random_terms(2, 2 * clusters, BFLOAT16)
    values = truncating(terms, BFLOAT16)
    result = rounding_scheme(terms, values, BFLOAT16, clusters=pairs(2 * clusters))
    assert (result.mean is None) == (clusters < FEWEST_CLUSTERS)
    assert result.biased == (None if clusters < FEWEST_CLUSTERS else True)


def test_no_mean_is_tested_where_no_element_has_a_score() -> None:
    terms = random_terms(2, 2000, BFLOAT16)
    terms[1] = -terms[0]
    values = torch.ones(2000, dtype=torch.bfloat16)
    result = rounding_scheme(terms, values, BFLOAT16, clusters=pairs(2000))
    assert result.name is None
    assert result.mean is None


# What it catches, and what not


@low_precision
@pytest.mark.parametrize("count", [2, 8])
def test_mixtures_of_schemes_raise_no_alarm(fmt: Format, count: int) -> None:
    everything = storing(*range(count))
    mixtures = {
        "two": mixed(storing(), everything),
        "mostly one": mixed(storing(), storing(), storing(), everything),
        "all": mixed(*(storing(*stored) for stored in stored_sets(count))),
        "some heads": storing(*range(0, count, 2)),
    }
    for seed in range(15):
        terms = random_terms(count, 1280, fmt, seed)
        for name, kernel in mixtures.items():
            values = kernel(terms, fmt)
            result = rounding_scheme(terms, values, fmt, clusters=pairs(1280))
            assert result.mean is not None
            assert not result.mean.alarm, (name, seed, result.mean)


@low_precision
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("kernel", [truncating, truncating_where_allowed, truncating_products])
def test_truncation_is_biased(fmt: Format, count: int, kernel: Kernel) -> None:
    terms = random_terms(count, 4000, fmt)
    result = rounding_scheme(terms, kernel(terms, fmt), fmt, clusters=pairs(4000), outputs_tested=3)
    assert result.biased is True
    assert result.mean is not None
    assert result.mean.mean < result.mean.low


@low_precision
@pytest.mark.parametrize(
    ("kernel", "contract"),
    [(truncating_where_allowed, "stored_intermediates"), (truncating, "bounded_error")],
)
def test_the_mean_catches_a_truncated_sum_of_8_heads_that_an_interval_accepts(
    fmt: Format, kernel: Kernel, contract: Contract
) -> None:
    terms = random_terms(8, 4000, fmt)
    values = kernel(terms, fmt)
    assert interval(terms, contract, fmt).accepts(values).all()
    assert rounding_scheme(terms, values, fmt, clusters=pairs(4000)).biased is True


def test_the_mean_of_rounding_up_is_biased_too() -> None:
    terms = random_terms(2, 4000, BFLOAT16)
    exact = terms.sum(dim=0)
    nearest = round_float64(exact, BFLOAT16)
    bits = nearest.view(torch.int16)
    away = torch.where(nearest.to(torch.float64).abs() < exact.abs(), bits + 1, bits)
    values = away.view(torch.bfloat16)
    result = rounding_scheme(terms, values, BFLOAT16, clusters=pairs(4000))
    assert result.biased is True
    assert result.mean is not None
    assert result.mean.mean > result.mean.high


def test_the_mean_of_a_truncating_kernel_is_half_an_ulp() -> None:
    terms = random_terms(2, 40_000, BFLOAT16)
    values = truncating(terms, BFLOAT16)
    result = rounding_scheme(terms, values, BFLOAT16, clusters=pairs(40_000))
    assert result.mean is not None
    assert result.mean.mean == pytest.approx(-0.495, abs=0.01)


def test_the_score_is_taken_of_normal_values_without_much_cancellation() -> None:
    """By exact arithmetic: the mean over those elements, clipped, in units of RN y's last place."""
    terms = random_terms(2, 1400, BFLOAT16)
    terms[:, ::7] *= 2.0**-130
    values = truncating(terms, BFLOAT16)
    values[5] = 1e6
    scores = []
    for column, value in zip(terms.T.tolist(), values.to(torch.float64).tolist(), strict=True):
        parts = [Fraction(term) for term in column]
        exact = sum(parts, Fraction(0))
        if abs(exact) < power_of_two(-126) or sum(map(abs, parts)) > 4 * abs(exact):
            continue
        nearest = round_to(exact, rational.BF16)
        assert isinstance(nearest, Fraction)
        unit = power_of_two(rational.floor_log2(abs(nearest)) - 7)
        error = (Fraction(value) - exact) / unit * (1 if exact > 0 else -1)
        scores.append(min(max(error, Fraction(-1)), Fraction(1)))
    result = rounding_scheme(terms, values, BFLOAT16, clusters=torch.arange(1400))
    assert result.mean is not None
    assert 700 < len(scores) < 1200
    assert result.mean.mean == pytest.approx(float(sum(scores) / len(scores)), abs=1e-12)
