"""Comparison against a plain elementwise one in rational arithmetic, and its evidence."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from oracle import comparison
from oracle.budget import CONTRACTS, Contract
from oracle.comparison import Comparison, compare, is_met
from oracle.definition import Operator
from oracle.verdict import GRADES, RegionResult
from tests import rational
from tests.operators.test_kv_rope import (
    BACKWARD,
    FORWARD,
    OPERATORS,
    SMALL_SIZES,
    in_order,
    random_inputs,
)
from tests.rational import BF16, Value, acceptance, bits_of, decode, exact_outputs, is_finite
from tests.test_blocks import region_of

Tensors = Mapping[str, torch.Tensor]
Index = tuple[int, ...]

every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.id)
every_contract = pytest.mark.parametrize("contract", CONTRACTS)
NEW_KEYS = ("updated_key_cache", "new rows")
RELAXED: tuple[Contract, ...] = ("single_rounding", "stored_intermediates", "bounded_error")


@pytest.fixture(params=[1, 13, None], ids=lambda limit: f"limit-{limit}")
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Elements of a block: one, few, or as they come."""
    set_limit(monkeypatch, request.param)
    return request.param


def set_limit(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    if size is not None:
        monkeypatch.setattr(comparison, "block_elements", lambda device: size)  # noqa: ARG005


def small_inputs(operator: Operator, kind: str, seed: int) -> dict[str, torch.Tensor]:
    return random_inputs(operator, SMALL_SIZES[operator.id], kind, random.Random(seed))


def named(operator: Operator, outputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    return dict(zip([spec.name for spec in operator.outputs], outputs, strict=True))


def eager(operator: Operator, inputs: Tensors) -> dict[str, torch.Tensor]:
    return named(operator, operator.reference(in_order(operator, inputs), torch.bfloat16))


def in_float32(operator: Operator, inputs: Tensors) -> dict[str, torch.Tensor]:
    outputs = operator.reference(in_order(operator, inputs), torch.float32)
    # Copies through float32 would change the bits of NaN; the truth's copies are taken instead.
    exact = truth(operator, inputs)
    return {
        name: output.to(torch.bfloat16) if is_computed(name) else exact[name]
        for name, output in named(operator, outputs).items()
    }


def is_computed(name: str) -> bool:
    return name in ("updated_key_cache", "grad_key_states", "grad_cos", "grad_sin")


def truth(operator: Operator, inputs: Tensors) -> dict[str, torch.Tensor]:
    return dict(oracle.truth(operator, inputs).outputs)


# A plain comparison, element by element.


@dataclass
class PlainRegion:
    """What a region's result must say, counted one element at a time."""

    meaning: str = ""
    elements: int = 0
    within: int = 0
    identical: int = 0
    other_zeros: int = 0
    worst: float | None = None
    met: dict[str, bool] = field(default_factory=lambda: dict.fromkeys(GRADES, True))
    first: Index | None = None

    @property
    def grade(self) -> str | None:
        names = GRADES[1:] if self.meaning == "computed" else GRADES[:1]
        return next((name for name in names if self.met[name]), None)


def ulp_of(value: Fraction) -> Fraction:
    exponent = rational.floor_log2(abs(value)) if value else BF16.emin
    return rational.power_of_two(max(exponent, BF16.emin) - BF16.precision + 1)


def plain_comparison(
    operator: Operator, inputs: Tensors, outputs: Tensors, contract: Contract
) -> dict[tuple[str, str], PlainRegion]:
    regions: dict[tuple[str, str], PlainRegion] = {}
    for name, output in exact_outputs(operator.id, in_order(operator, inputs)).items():
        for index, bits in zip(output.indices(), bits_of(outputs[name]), strict=True):
            key = (name, region_of(operator, inputs, name, index[-2]))
            region = regions.setdefault(key, PlainRegion())
            element = output.element(index)
            region.meaning = element.region
            region.elements += 1
            value = decode(bits, BF16)
            if element.region == "computed":
                within = judge_sum(region, element.terms, value, contract)
            else:
                within = bits == element.bits if element.region == "copied" else value == 0
                region.identical += bits == (element.bits or 0)
                region.other_zeros += element.region == "zeroed" and bits == 1 << 15
                region.met["exact"] &= within
            region.within += within
            if not within and region.first is None:
                region.first = index
    return regions


def judge_sum(
    region: PlainRegion, terms: tuple[Value, ...], value: Value, contract: Contract
) -> bool:
    exact = rational.total(terms)
    correct = rational.round_to(exact, BF16)
    if value == correct:  # which every contract accepts
        region.identical += 1
        return True
    accepted = {name: acceptance(name, terms, BF16).accepts(value) for name in CONTRACTS}
    for name, within in accepted.items():
        region.met[name] &= within
    if isinstance(exact, Fraction) and is_finite(value) and is_finite(correct):
        error = float(abs(value - exact) / ulp_of(correct))
        region.worst = error if region.worst is None else max(region.worst, error)
    return accepted[contract]


def assert_compares_plainly(
    operator: Operator, inputs: Tensors, outputs: Tensors, contract: Contract
) -> Comparison:
    found = compare(operator, inputs, outputs, contract)
    plain = plain_comparison(operator, inputs, outputs, contract)
    assert {(region.output, region.region) for region in found.regions} == set(plain)
    for region in found.regions:
        wanted = plain[region.output, region.region]
        assert region.meaning == wanted.meaning
        assert region.elements == region.certified == wanted.elements
        assert region.within == wanted.within, region
        assert region.identical == wanted.identical, region
        assert region.grade == wanted.grade, region
        assert (region.first_wrong and region.first_wrong.index) == wanted.first
        assert region.worst_error_ulp == (wanted.worst and pytest.approx(wanted.worst, rel=1e-12))
    others = {key: region.other_zeros for key, region in plain.items() if region.other_zeros}
    for (output, region_name), count in others.items():
        assert any(
            remark.startswith(f"{output}, {region_name}: {count} zeros") for remark in found.remarks
        )
    assert found.elements == found.certificate.total == sum(r.elements for r in plain.values())
    assert found.status == plain_status(plain)
    return found


def plain_status(regions: Mapping[tuple[str, str], PlainRegion]) -> str:
    failed = [region for region in regions.values() if region.within < region.elements]
    if not failed:
        return "passed"
    weaker = all(region.meaning == "computed" and region.grade is not None for region in failed)
    return "below_contract" if weaker else "wrong_values"


def disturbed(outputs: Tensors, rng: random.Random) -> dict[str, torch.Tensor]:
    """Outputs with a few elements moved by a few steps, negated, made zero, infinite or NaN."""
    changed = {name: output.clone() for name, output in outputs.items()}
    for _ in range(rng.choice((0, 1, 3, 20))):
        output = changed[rng.choice(list(changed))].view(torch.int16).view(-1)
        place = rng.randrange(output.numel())
        bits = output[place].item()
        output[place] = rng.choice(
            (bits ^ 1, bits ^ 3, bits ^ 0x10, bits ^ -0x8000, 0, -0x8000, 0x7F80, -0x80, 0x7FC0)
        )
    return changed


makers = st.sampled_from([truth, eager, in_float32])


@every_operator
@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    maker=makers,
    kind=st.sampled_from(["normal", "wide", "dyadic"]),
    contract=st.sampled_from(list(CONTRACTS)),
    size=st.sampled_from([1, 20, 100, None]),
)
def test_counts_grades_and_first_wrong_are_those_of_a_plain_comparison(
    operator: Operator,
    seed: int,
    maker: Callable[[Operator, Tensors], dict[str, torch.Tensor]],
    kind: str,
    contract: Contract,
    size: int | None,
) -> None:
    inputs = small_inputs(operator, kind, seed)
    outputs = disturbed(maker(operator, inputs), random.Random(seed))
    with pytest.MonkeyPatch.context() as patch:
        set_limit(patch, size)
        assert_compares_plainly(operator, inputs, outputs, contract)


@every_operator
@pytest.mark.parametrize("kind", ["special", "huge", "subnormal"])
@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**32 - 1),
    maker=makers,
    contract=st.sampled_from(["correctly_rounded", "single_rounding", "stored_intermediates"]),
    size=st.sampled_from([1, 20, None]),
)
def test_infinities_nan_overflow_and_subnormals_are_counted_as_a_plain_comparison_does(
    operator: Operator,
    kind: str,
    seed: int,
    maker: Callable[[Operator, Tensors], dict[str, torch.Tensor]],
    contract: Contract,
    size: int | None,
) -> None:
    inputs = small_inputs(operator, kind, seed)
    outputs = disturbed(maker(operator, inputs), random.Random(seed))
    with pytest.MonkeyPatch.context() as patch:
        set_limit(patch, size)
        assert_compares_plainly(operator, inputs, outputs, contract)


@pytest.mark.parametrize("contract", RELAXED)
def test_out_of_domain_counts_every_element_of_the_region_that_is(contract: Contract) -> None:
    inputs = small_inputs(FORWARD, "huge", 3)
    keys = exact_outputs(FORWARD.id, in_order(FORWARD, inputs))["updated_key_cache"]
    elements = [keys.element(index) for index in keys.indices()]
    wanted = sum(
        not acceptance(contract, element.terms, BF16).in_domain
        for element in elements
        if element.region == "computed"
    )
    assert wanted > 10
    for outputs in (truth(FORWARD, inputs), eager(FORWARD, inputs)):
        found = compare(FORWARD, inputs, outputs, contract)
        assert one_region(found, *NEW_KEYS).out_of_domain == wanted


@every_operator
@every_contract
def test_results_do_not_depend_on_the_block_size(
    operator: Operator, contract: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, kind in enumerate(("normal", "wide", "special", "huge", "subnormal", "dyadic")):
        inputs = small_inputs(operator, kind, seed)
        outputs = disturbed(eager(operator, inputs), random.Random(seed))
        whole = compare(operator, inputs, outputs, contract)
        for size in (1, 40):
            with monkeypatch.context() as patch:
                set_limit(patch, size)
                assert compare(operator, inputs, outputs, contract) == whole, (kind, size)


def test_a_grade_is_met_by_every_element_whatever_block_it_lies_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One element stores subnormal products, and another has the classical error only."""
    sizes = {**SMALL_SIZES[FORWARD.id], "current_seq_len": 0}
    inputs = random_inputs(FORWARD, sizes, "dyadic", random.Random(0))
    key, cos, sin = (inputs[name].fill_(1.0) for name in ("key_states", "cos", "sin"))
    # Two products of 5/8 of the smallest number: 5/4 of it together, 2 when each is stored.
    key[0, 0, 0, 0], key[0, 0, 0, 4] = 5 * 2.0**-68, -5 * 2.0**-68
    cos[0, 0, 0, 0] = sin[0, 0, 0, 0] = 2.0**-68
    # 1 - (1 - 2^-7), where half as much more is less than 2^-8 of the terms together.
    key[1, 2, 4, 3] = -(1 - 2.0**-7)
    outputs = truth(FORWARD, inputs)
    keys = outputs["updated_key_cache"]
    assert (keys[0, 0, 0, 0].item(), keys[1, 2, 4, 7].item()) == (2.0**-133, 2.0**-7)
    keys[0, 0, 0, 0], keys[1, 2, 4, 7] = 2.0**-132, 1.5 * 2.0**-7
    found = {}
    for size in (1, None):
        with monkeypatch.context() as patch:
            set_limit(patch, size)
            comparison_found = compare(FORWARD, inputs, outputs, "stored_intermediates")
            found[size] = one_region(comparison_found, *NEW_KEYS).grade
    assert found[1] == found[None]


# Evidence: the first wrong element


def places_of(
    operator: Operator, inputs: Tensors, rng: random.Random
) -> Iterator[tuple[str, Index]]:
    """For every output: two opposite corners, and a random place in every row."""
    for name, output in truth(operator, inputs).items():
        yield name, (0,) * output.dim()
        yield name, tuple(size - 1 for size in output.shape)
        for row in range(output.shape[-2]):
            before = [rng.randrange(size) for size in output.shape]
            before[-2] = row
            yield name, tuple(before)


@every_operator
def test_one_wrong_element_at_any_place_is_found_there_and_nowhere_else(
    operator: Operator, limit: int | None
) -> None:
    rng = random.Random(limit)
    inputs = small_inputs(operator, "normal", 11)
    right = truth(operator, inputs)
    tried: set[tuple[str, str]] = set()
    for name, index in places_of(operator, inputs, rng):
        where = (name, region_of(operator, inputs, name, index[-2]))
        tried.add(where)
        outputs = dict(right)
        outputs[name] = right[name].clone()
        was = right[name][index]
        outputs[name][index] = wrong = torch.full_like(was, 1e4)
        found = compare(operator, inputs, outputs, "stored_intermediates")
        assert found.status == "wrong_values"
        for region in found.regions:
            if (region.output, region.region) != where:
                assert region.within == region.identical == region.elements
                assert region.first_wrong is None
                continue
            assert region.within == region.elements - 1
            assert region.grade is None
            element = region.first_wrong
            assert element is not None
            assert element.index == index
            assert (float(element.got), float(element.expected)) == (float(wrong), float(was))
            assert element.got_bits == f"0x{bits_of(wrong)[0]:04x}"
            assert element.expected_bits == f"0x{bits_of(was)[0]:04x}"
    assert tried == {(spec.name, region) for spec in operator.outputs for region in spec.regions}


@every_operator
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([1, 10, 50, None]))
def test_the_first_of_several_wrong_elements_in_index_order_is_shown(
    operator: Operator, seed: int, size: int | None
) -> None:
    rng = random.Random(seed)
    inputs = small_inputs(operator, "normal", seed)
    outputs = {name: output.clone() for name, output in truth(operator, inputs).items()}
    wrong: dict[tuple[str, str], list[Index]] = {}
    for _ in range(8):
        name = rng.choice(list(outputs))
        index = tuple(rng.randrange(axis) for axis in outputs[name].shape)
        outputs[name][index] = 100.0
        wrong.setdefault((name, region_of(operator, inputs, name, index[-2])), []).append(index)
    with pytest.MonkeyPatch.context() as patch:
        set_limit(patch, size)
        found = compare(operator, inputs, outputs, "stored_intermediates")
    for region in found.regions:
        indices = wrong.get((region.output, region.region), [])
        assert region.within == region.elements - len(set(indices))
        assert (region.first_wrong and region.first_wrong.index) == min(indices, default=None)


def test_a_wrong_element_in_rows_named_by_index_is_found_at_its_own_row() -> None:
    sizes = {**SMALL_SIZES[BACKWARD.id], "new_seq_len": 80, "max_seq_len": 200}
    inputs = random_inputs(BACKWARD, sizes, "normal", random.Random(0))
    order = torch.randperm(80, generator=torch.Generator().manual_seed(1))
    inputs["cache_position"] = 2 * order + 1
    right = truth(BACKWARD, inputs)
    for name, row in (("grad_key_cache_input", 101), ("grad_value_cache_input", 150)):
        outputs = {**right, name: right[name].clone()}
        outputs[name][1, 2, row, 3] = 7.0
        region = "zeroed rows" if row % 2 else "untouched rows"
        for result in compare(BACKWARD, inputs, outputs, "stored_intermediates").regions:
            at = result.first_wrong and result.first_wrong.index
            assert at == (
                (1, 2, row, 3) if (result.output, result.region) == (name, region) else None
            )


@every_operator
@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_evidence_gives_the_exact_value_the_error_and_the_contracts_interval(
    operator: Operator, contract: Contract
) -> None:
    name = "updated_key_cache" if operator is FORWARD else "grad_sin"
    inputs = small_inputs(operator, "normal", 4)
    index = (1, 2, 9, 3) if operator is FORWARD else (1, 4, 3)
    outputs = truth(operator, inputs)
    outputs[name][index] += 64.0
    (region,) = (
        region
        for region in compare(operator, inputs, outputs, contract).regions
        if region.first_wrong is not None
    )
    element = region.first_wrong
    assert element is not None
    exact = exact_outputs(operator.id, in_order(operator, inputs))[name].element(index)
    wanted = acceptance(contract, exact.terms, BF16)
    assert element.index == index
    assert isinstance(wanted.exact, Fraction)
    assert float(element.exact) == float(wanted.exact)
    got = Fraction(float(element.got))
    correct = rational.round_to(wanted.exact, BF16)
    assert Fraction(float(element.expected)) == correct
    assert element.error_ulp == pytest.approx(
        float((got - wanted.exact) / ulp_of(correct)), rel=1e-12
    )
    assert Fraction(float(element.low)) == wanted.rounded_low
    assert Fraction(float(element.high)) == wanted.rounded_high
    assert repr(float(element.got)) == element.got
    assert region.worst_error_ulp == element.error_ulp


# Single rules


def one_region(found: Comparison, output: str, region: str) -> RegionResult:
    (result,) = (r for r in found.regions if (r.output, r.region) == (output, region))
    return result


@every_operator
@every_contract
def test_a_nan_is_rejected_everywhere_where_nan_is_not_the_answer(
    operator: Operator, contract: Contract
) -> None:
    inputs = small_inputs(operator, "normal", 6)
    right = truth(operator, inputs)
    for name, output in right.items():
        for row in range(output.shape[-2]):
            outputs = {**right, name: output.clone()}
            outputs[name][..., row, 1] = math.nan
            found = compare(operator, inputs, outputs, contract)
            assert found.status == "wrong_values"
            region = one_region(found, name, region_of(operator, inputs, name, row))
            assert region.within == region.elements - output[..., row, 1].numel()
            assert region.first_wrong is not None
            assert region.first_wrong.got == "nan"
            assert region.first_wrong.error_ulp is None


def test_an_all_nan_result_has_nothing_within() -> None:
    inputs = small_inputs(FORWARD, "normal", 6)
    outputs = {name: torch.full_like(x, math.nan) for name, x in truth(FORWARD, inputs).items()}
    found = compare(FORWARD, inputs, outputs, "bounded_error")
    assert all(region.within == region.identical == 0 for region in found.regions)
    assert found.status == "wrong_values"


@pytest.mark.parametrize(
    ("term", "right", "wrong"),
    [
        (math.inf, math.inf, (-math.inf, math.nan, 3e38, 0.0)),
        (-math.inf, -math.inf, (math.inf, math.nan, -3e38, 0.0)),
        (math.nan, math.nan, (math.inf, -math.inf, 3e38, 0.0)),
    ],
)
@every_contract
def test_the_class_of_a_non_finite_result_must_match(
    term: float, right: float, wrong: tuple[float, ...], contract: Contract
) -> None:
    inputs = small_inputs(FORWARD, "normal", 7)
    for name in ("cos", "sin"):
        inputs[name].fill_(1.0)
    inputs["key_states"][1, 1, 3, 6] = term
    outputs = truth(FORWARD, inputs)
    index = (1, 1, 7 + 3, 6)
    keys = outputs["updated_key_cache"]
    assert str(float(keys[index])) == str(right)
    assert compare(FORWARD, inputs, outputs, contract).status == "passed"
    what_is_left = float(inputs["key_states"][1, 1, 3, 2])
    for value in (*wrong, what_is_left):
        changed = {**outputs, "updated_key_cache": keys.clone()}
        changed["updated_key_cache"][index] = value
        found = compare(FORWARD, inputs, changed, contract)
        assert found.status == "wrong_values"
        element = one_region(found, *NEW_KEYS).first_wrong
        assert element is not None
        assert (element.index, element.exact, element.low) == (index, "", "")
    # Any payload of NaN will do in what is computed.
    if math.isnan(right):
        keys.view(torch.int16)[index] = 0x7FE1
        assert compare(FORWARD, inputs, outputs, contract).status == "passed"


def test_beside_a_product_that_overflows_any_infinity_or_nan_will_do_and_no_number() -> None:
    inputs = small_inputs(FORWARD, "normal", 7)
    inputs["key_states"][1, 1, 3, 6] = math.inf
    inputs["key_states"][1, 1, 3, 2] = inputs["sin"][1, 0, 3, 6] = 3e38
    inputs["cos"][1, 0, 3, 6] = 1.0
    inputs["sin"][1, 0, 3, 2] = 1.0
    outputs = truth(FORWARD, inputs)
    index = (1, 1, 7 + 3, 6)
    assert float(outputs["updated_key_cache"][index]) == math.inf
    for contract in RELAXED:
        for value, within in ((math.inf, 1), (-math.inf, 1), (math.nan, 1), (3e38, 0), (0.0, 0)):
            outputs["updated_key_cache"][index] = value
            region = one_region(compare(FORWARD, inputs, outputs, contract), *NEW_KEYS)
            assert region.within == region.elements - 1 + within
    for value in (-math.inf, math.nan):
        outputs["updated_key_cache"][index] = value
        assert compare(FORWARD, inputs, outputs, "correctly_rounded").status != "passed"


def test_a_zero_of_the_other_sign_is_remarked_on_and_not_judged() -> None:
    inputs = small_inputs(BACKWARD, "normal", 8)
    inputs["key_states"].zero_()
    outputs = truth(BACKWARD, inputs)
    rows = inputs["cache_position"]
    outputs["grad_cos"] = -outputs["grad_cos"]
    outputs["grad_key_cache_input"][1, 0, rows[2], 3] = -0.0
    found = compare(BACKWARD, inputs, outputs, "correctly_rounded")
    assert found.status == "passed"
    assert len(found.remarks) == 2
    count = outputs["grad_cos"].numel()
    assert found.remarks[0].startswith(f"grad_cos, all rows: {count} zeros have the other sign")
    assert found.remarks[1].startswith("grad_key_cache_input, zeroed rows: 1 zeros have the other")


def test_a_copied_zero_of_the_other_sign_is_wrong() -> None:
    inputs = small_inputs(FORWARD, "normal", 9)
    inputs["value_states"][0, 0, 0, 0] = 0.0
    outputs = truth(FORWARD, inputs)
    outputs["updated_value_cache"][0, 0, 7, 0] = -0.0
    found = compare(FORWARD, inputs, outputs, "bounded_error")
    element = one_region(found, "updated_value_cache", "new rows").first_wrong
    assert found.status == "wrong_values"
    assert element is not None
    assert (element.got, element.expected) == ("-0.0", "0.0")
    assert (element.got_bits, element.expected_bits) == ("0x8000", "0x0000")


def test_the_payload_and_sign_of_a_copied_nan_are_judged() -> None:
    inputs = small_inputs(FORWARD, "normal", 9)
    inputs["key_cache"].view(torch.int16)[1, 2, 6, 7] = 0x7FC1
    outputs = truth(FORWARD, inputs)
    assert compare(FORWARD, inputs, outputs, "correctly_rounded").status == "passed"
    for payload in (0x7FC0, -0x3F, -1):
        outputs["updated_key_cache"].view(torch.int16)[1, 2, 6, 7] = payload
        found = compare(FORWARD, inputs, outputs, "bounded_error")
        assert found.status == "wrong_values"
        region = one_region(found, "updated_key_cache", "old rows")
        assert region.first_wrong is not None
        assert region.first_wrong.expected_bits == "0x7fc1"
        assert region.first_wrong.index == (1, 2, 6, 7)


def test_a_nan_in_a_row_to_be_zeroed_must_become_zero() -> None:
    inputs = small_inputs(BACKWARD, "normal", 10)
    inputs["grad_value_cache"][:, :, inputs["cache_position"][0]] = math.nan
    outputs = truth(BACKWARD, inputs)
    assert compare(BACKWARD, inputs, outputs, "correctly_rounded").status == "passed"
    kept = torch.ones(11).index_fill(0, inputs["cache_position"], 0)
    outputs["grad_value_cache_input"] = (
        inputs["grad_value_cache"] * kept.view(1, 1, 11, 1).bfloat16()
    )
    region = one_region(
        compare(BACKWARD, inputs, outputs, "bounded_error"), "grad_value_cache_input", "zeroed rows"
    )
    assert region.within == region.elements - 2 * 3 * 8


# Grades and status


def grades(found: Comparison) -> set[str | None]:
    return {region.grade for region in found.regions if region.meaning == "computed"}


@every_operator
def test_the_lattice_of_grades_on_random_data(operator: Operator) -> None:
    inputs = oracle.make_inputs(operator.case("random"), 0)
    certified = compare(operator, inputs, truth(operator, inputs), "correctly_rounded")
    assert certified.status == "passed"
    assert grades(certified) == {"correctly_rounded"}
    assert {region.grade for region in certified.regions} == {"exact", "correctly_rounded"}

    single = compare(operator, inputs, in_float32(operator, inputs), "single_rounding")
    assert single.status == "passed"
    assert grades(single) <= {"correctly_rounded", "single_rounding"}

    stored = compare(operator, inputs, eager(operator, inputs), "stored_intermediates")
    assert stored.status == "passed"
    assert grades(stored) == {"stored_intermediates"}
    tighter = compare(operator, inputs, eager(operator, inputs), "single_rounding")
    assert tighter.status == "below_contract"
    assert grades(tighter) == {"stored_intermediates"}


def test_a_head_sum_accumulated_in_bfloat16_is_below_the_default_contract() -> None:
    inputs = oracle.make_inputs(BACKWARD.case("random"), 0)
    outputs = truth(BACKWARD, inputs)
    rows = inputs["grad_key_cache"][:, :, inputs["cache_position"]]
    products = rows * inputs["key_states"]
    total = products[:, 0]
    for head in range(1, products.shape[1]):
        total = total + products[:, head]
    outputs["grad_cos"] = total
    found = compare(BACKWARD, inputs, outputs, "stored_intermediates")
    region = one_region(found, "grad_cos", "all rows")
    assert region.grade in (None, "bounded_error")
    assert region.within < region.elements
    assert found.status == ("wrong_values" if region.grade is None else "below_contract")


@every_operator
def test_truncation_is_rejected(operator: Operator) -> None:
    inputs = oracle.make_inputs(operator.case("random"), 0)
    outputs = truth(operator, inputs)
    name = "updated_key_cache" if operator is FORWARD else "grad_key_states"
    index = 0
    full = operator.reference(in_order(operator, inputs), torch.float32)[index]
    cut = (full.view(torch.int32) & -0x10000).view(torch.float32).to(torch.bfloat16)
    outputs[name] = cut
    found = compare(operator, inputs, outputs, "stored_intermediates")
    region = one_region(found, name, "new rows" if operator is FORWARD else "rows read")
    share = 1 - region.within / region.elements
    # The design measured 28 % of the elements of a truncating forward kernel.
    assert 0.2 < share < 0.4


def test_below_contract_needs_every_failed_region_to_meet_a_weaker_contract() -> None:
    inputs = oracle.make_inputs(FORWARD.case("random"), 0)
    outputs = eager(FORWARD, inputs)
    assert compare(FORWARD, inputs, outputs, "single_rounding").status == "below_contract"
    outputs["updated_value_cache"][0, 0, 0, 0] += 1
    assert compare(FORWARD, inputs, outputs, "single_rounding").status == "wrong_values"


@every_operator
def test_a_case_without_elements_is_empty_ok(operator: Operator) -> None:
    sizes = {**SMALL_SIZES[operator.id], "batch_size": 0}
    inputs = random_inputs(operator, sizes, "normal", random.Random(0))
    found = compare(operator, inputs, truth(operator, inputs), "correctly_rounded")
    assert found.status == "empty_ok"
    assert found.elements == 0
    assert found.regions == ()


def test_regions_without_elements_are_left_out() -> None:
    sizes = {**SMALL_SIZES[FORWARD.id], "current_seq_len": 0}
    inputs = random_inputs(FORWARD, sizes, "normal", random.Random(0))
    found = compare(FORWARD, inputs, truth(FORWARD, inputs), "correctly_rounded")
    assert [(region.output, region.region) for region in found.regions] == [
        ("updated_key_cache", "new rows"),
        ("updated_value_cache", "new rows"),
    ]


@every_operator
def test_outputs_and_inputs_are_read_with_any_strides_and_left_as_they_are(
    operator: Operator,
) -> None:
    inputs = small_inputs(operator, "special", 12)
    outputs = eager(operator, inputs)
    strided = {
        name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in outputs.items()
    }
    before = {name: bits_of(x) for name, x in strided.items()}
    plain = compare(operator, inputs, outputs, "stored_intermediates")
    assert compare(operator, inputs, strided, "stored_intermediates") == plain
    assert {name: bits_of(x) for name, x in strided.items()} == before


def test_a_grade_meets_a_contract_exactly_if_it_is_as_tight() -> None:
    order = ["exact", *CONTRACTS]
    assert order == list(GRADES)
    for contract in CONTRACTS:
        assert not is_met(None, contract)
        for grade in GRADES:
            assert is_met(grade, contract) == (order.index(grade) <= order.index(contract))
