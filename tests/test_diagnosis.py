"""Diagnosis names the fault it is, on other data than it was made for, and says where it is."""

from __future__ import annotations

import random as chance
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.certified import truth
from oracle.comparison import Comparison, compare
from oracle.definition import Case, Operator, Variant
from oracle.diagnosis import (
    Diagnosis,
    Failure,
    Matching,
    combine,
    combine_by_output,
    compute_variant,
    diagnose,
    match_variants,
    refute,
)
from oracle.elements import judge_elements
from oracle.inputs import make_inputs
from oracle.operators import find_operator
from oracle.structure import describe_structure, failing_outputs
from oracle.verdict import MeanTest
from tests.other_family import ID, OPERATOR

Outputs = dict[str, Tensor]
Mix = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# The blend of two tables, and faults of it.


def blend(mix: Mix, left: Callable[[Tensor, Tensor], Tensor], stored: bool = False) -> Variant:
    """A way to compute the blend; ``stored`` rounds both products to the output type."""

    def compute(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        table, other, scale, gain, pick = inputs
        kept = [x.float() for x in (table[pick], scale, other[pick], gain)]
        first, second = kept[0] * kept[1], kept[2] * kept[3]
        if stored:
            first, second = (x.to(table.dtype).float() for x in (first, second))
        return mix(first, second, *kept[:2]).to(table.dtype), left(table, pick)

    return Variant("", "", compute)


def cleared(table: Tensor, pick: Tensor) -> Tensor:
    return table.index_fill(0, pick, 0)


def named(name: str, mix: Mix, left: Callable[[Tensor, Tensor], Tensor] = cleared) -> Variant:
    return replace(blend(mix, left), name=name, description=f"does {name}")


def total(first: Tensor, second: Tensor, _row: Tensor, _scale: Tensor) -> Tensor:
    return first + second


def last_column_only_first(first: Tensor, second: Tensor, _r: Tensor, _s: Tensor) -> Tensor:
    kept = torch.ones(first.shape[-1])
    kept[-1] = 0
    return first + second * kept


MIXES: dict[str, Mix] = {
    "difference": lambda a, b, _r, _s: a - b,
    "first-only": lambda a, _b, _r, _s: a,
    "second-only": lambda _a, b, _r, _s: b,
    "scale-missing": lambda _a, b, row, _s: row + b,
    "halved": lambda a, b, _r, _s: (a + b) / 2,
    "rolled": lambda a, b, _r, _s: (a + b).roll(1, 0),
    "last-column": last_column_only_first,
}
LEFTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "not-cleared": lambda table, _pick: table.clone(),
    "first-row-cleared": lambda table, pick: cleared(table, pick[:1]),
    "all-cleared": lambda table, _pick: torch.zeros_like(table),
}
FAULTS = (
    *(named(name, mix) for name, mix in MIXES.items()),
    *(named(name, total, left) for name, left in LEFTS.items()),
    named("difference-not-cleared", MIXES["difference"], LEFTS["not-cleared"]),
)
BLEND = replace(OPERATOR, variants=FAULTS)

SHAPES = ((7, 3, 24), (40, 17, 8), (9, 9, 130), (30, 2, 66))


def case(sizes: tuple[int, int, int] = SHAPES[0], dtype: str = "bfloat16") -> Case:
    axes = dict(zip(("rows", "picked", "width"), sizes, strict=True))
    return Case(ID, "x" + "-".join(map(str, sizes)), "probes", axes, "random", dtype)


def judged(
    variant: Variant, of: Case, seed: int, operator: Operator = BLEND
) -> tuple[Outputs, Outputs, Comparison]:
    inputs = make_inputs(of, seed, operator=operator)
    outputs = dict(compute_variant(operator, variant, inputs))
    return inputs, outputs, compare(operator, inputs, outputs, "stored_intermediates")


def diagnosed(variant: Variant, cases: Sequence[Case], seed: int) -> Diagnosis:
    failures = []
    for of in cases:
        inputs, outputs, comparison = judged(variant, of, seed)
        if comparison.status != "passed":
            failures.append(Failure(of.name, inputs, outputs, comparison))
    assert failures
    return diagnose(BLEND, failures)


# Names.


@pytest.mark.parametrize("dtype", BLEND.dtypes)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named_from_its_own_outputs(fault: Variant, dtype: str) -> None:
    diagnosis = diagnosed(fault, [case(sizes, dtype) for sizes in SHAPES], seed=5)
    assert diagnosis.name == fault.name
    assert diagnosis.description == fault.description
    assert "bit for bit" in diagnosis.evidence


@pytest.mark.parametrize("dtype", BLEND.dtypes)
@pytest.mark.parametrize("name", MIXES)
def test_a_fault_is_named_from_a_kernel_that_rounds_otherwise(name: str, dtype: str) -> None:
    stored = blend(MIXES[name], cleared, stored=True)
    for seed in range(3):
        diagnosis = diagnosed(stored, [case(sizes, dtype) for sizes in SHAPES], seed)
        assert diagnosis.name == name


def test_two_outputs_with_faults_of_their_own_are_named_both() -> None:
    both = blend(MIXES["first-only"], LEFTS["first-row-cleared"])
    diagnosis = diagnosed(both, [case(), case(SHAPES[1])], seed=0)
    assert diagnosis.name == "first-only + first-row-cleared"
    assert "mixed in the 2 failing cases looked at: first-only." in diagnosis.evidence


def test_one_fault_in_several_outputs_is_preferred_to_several_faults() -> None:
    both = blend(MIXES["difference"], LEFTS["not-cleared"])
    assert diagnosed(both, [case()], seed=0).name == "difference-not-cleared"


def test_a_variant_that_would_fail_where_the_outputs_are_right_comes_after_one_that_would_not() -> (
    None
):
    inputs, outputs, comparison = judged(named("", MIXES["difference"]), case(), 0)
    matches = match_variants(BLEND, inputs, outputs, comparison).matches
    assert [(m.variant, m.contradicted) for m in matches] == [
        ("difference", ()),
        ("difference-not-cleared", ("left",)),
    ]


def test_an_output_that_nothing_explains_is_told_and_the_other_one_still_named() -> None:
    odd = blend(lambda a, b, _r, _s: 3 * a + 5 * b, LEFTS["not-cleared"])
    diagnosis = diagnosed(odd, [case()], seed=0)
    assert diagnosis.name == "not-cleared"
    assert "No known fault explains mixed." in diagnosis.evidence


def test_an_unknown_fault_has_no_name_and_its_structure_is_told() -> None:
    odd = blend(lambda a, b, _r, _s: 3 * a + 5 * b, cleared)
    diagnosis = diagnosed(odd, [case()], seed=0)
    assert (diagnosis.name, diagnosis.description) == ("", "")
    assert diagnosis.evidence.startswith("In case x7-3-24: mixed: ")


def test_outputs_that_are_right_match_nothing() -> None:
    for dtype in BLEND.dtypes:
        for seed in range(5):
            for honest in (blend(total, cleared), blend(total, cleared, stored=True)):
                inputs, outputs, comparison = judged(honest, case(SHAPES[1], dtype), seed)
                assert match_variants(BLEND, inputs, outputs, comparison) == Matching((), ())


def test_honest_roundings_are_not_taken_for_a_fault_when_one_element_is_wrong() -> None:
    # Nearly right outputs are near every variant that changes little.
    for seed in range(5):
        inputs, outputs, _ = judged(blend(total, cleared, stored=True), case(SHAPES[1]), seed)
        outputs["mixed"][3, 3] += 4 * outputs["mixed"][3, 3] + 1
        comparison = compare(BLEND, inputs, outputs, "stored_intermediates")
        assert match_variants(BLEND, inputs, outputs, comparison) == Matching(("mixed",), ())


def test_random_outputs_match_nothing() -> None:
    inputs, outputs, _ = judged(FAULTS[0], case(SHAPES[2]), 0)
    generator = torch.Generator().manual_seed(0)
    for name, output in outputs.items():
        outputs[name] = torch.randn(output.shape, generator=generator).to(output.dtype)
    comparison = compare(BLEND, inputs, outputs, "stored_intermediates")
    assert match_variants(BLEND, inputs, outputs, comparison).matches == ()


def test_a_fault_of_few_elements_is_told_from_one_that_agrees_on_them() -> None:
    # Where the last column is wrong, the variant that drops the term everywhere agrees.
    diagnosis = diagnosed(named("", MIXES["last-column"]), [case(SHAPES[2])], seed=1)
    assert diagnosis.name == "last-column"


def test_faults_alike_in_the_failing_cases_are_told_apart_by_a_case_that_passed() -> None:
    def wide_only(first: Tensor, second: Tensor, _r: Tensor, _s: Tensor) -> Tensor:
        return first - second if first.shape[-1] > 16 else first + second

    operator = replace(
        BLEND, variants=(named("always", MIXES["difference"]), named("wide-only", wide_only))
    )
    inputs, outputs, comparison = judged(named("", wide_only), case(), 0, operator)
    failure = Failure("x", inputs, outputs, comparison)
    alike = diagnose(operator, [failure])
    assert alike.name == "always"
    assert "wide-only would look the same there." in alike.evidence
    passed = make_inputs(case(SHAPES[1]), 0, operator=operator)
    assert refute(operator, passed, ["always", "wide-only"]) == ("wide-only",)
    assert diagnose(operator, [failure], passed=[passed]).name == "wide-only"


def test_more_failures_are_looked_at_only_while_several_variants_fit() -> None:
    looked: list[str] = []

    def failures(mix: str, operator: Operator) -> Iterator[Failure]:
        for number, sizes in enumerate((SHAPES[0], SHAPES[2], SHAPES[0], SHAPES[3])):
            looked.append(str(number))
            yield Failure(str(number), *judged(named("", MIXES[mix]), case(sizes), 0, operator))

    assert diagnose(BLEND, failures("difference", BLEND), enough=1).name == "difference"
    assert looked == ["0", "1"]
    looked.clear()
    narrow = named("narrow", lambda a, b, _r, _s: a - b if a.shape[-1] < 100 else a + b)
    operator = replace(BLEND, variants=(*FAULTS, narrow))
    assert diagnose(operator, failures("difference", operator), enough=1).name == "difference"
    assert looked == ["0", "1", "2"]


def test_without_failures_there_is_nothing_to_say() -> None:
    assert diagnose(BLEND, []) == Diagnosis("", "", "")
    assert combine([]) == ()
    assert combine_by_output([]) == ()


def test_a_variant_must_fit_every_case_to_be_named() -> None:
    first = judged(named("", MIXES["difference"]), case(), 0)
    second = judged(named("", MIXES["first-only"]), case(), 0)
    matchings = [match_variants(BLEND, *one) for one in (first, second)]
    assert [m.matches[0].variant for m in matchings] == ["difference", "first-only"]
    assert combine(matchings) == ()
    assert combine_by_output(matchings) == ()


def test_a_case_that_nothing_explains_is_left_aside_while_most_are_explained() -> None:
    known = judged(named("", MIXES["difference"]), case(), 0)
    odd = judged(blend(lambda a, b, _r, _s: 3 * a + 5 * b, cleared), case(), 0)
    for failing, name in (([known, odd, known], "difference"), ([known, odd], "")):
        failures = [Failure(str(k), *one) for k, one in enumerate(failing)]
        diagnosis = diagnose(BLEND, failures)
        assert diagnosis.name == name
        assert ("mixed in 2 of the 3 failing cases" in diagnosis.evidence) == bool(name)


def test_a_fault_in_fewer_outputs_than_the_known_one_is_named_and_the_right_ones_are_told() -> None:
    operator = replace(BLEND, variants=(FAULTS[-1],))
    inputs, outputs, comparison = judged(named("", MIXES["difference"]), case(), 0, operator)
    diagnosis = diagnose(operator, [Failure("x", inputs, outputs, comparison)])
    assert diagnosis.name == "difference-not-cleared"
    assert "It would also show in left, where all is right." in diagnosis.evidence


def test_a_changed_nan_payload_is_named_only_where_the_variant_changes_it() -> None:
    def quieted(table: Tensor, pick: Tensor) -> Tensor:
        return cleared(torch.where(table.isnan(), torch.nan, table), pick)

    operator = replace(BLEND, variants=(*FAULTS, named("nan-bits-lost", total, quieted)))
    inputs = make_inputs(case(), 0, operator=operator)
    row = next(row for row in range(7) if row not in inputs["pick"].tolist())
    inputs["table"].view(torch.int16)[row, 5] = 0x7FC1
    outputs = dict(compute_variant(operator, operator.variants[-1], inputs))
    comparison = compare(operator, inputs, outputs, "stored_intermediates")
    diagnosis = diagnose(operator, [Failure("x", inputs, outputs, comparison)])
    assert diagnosis.name == "nan-bits-lost"
    assert f"one of 96 elements is wrong, at [{row}, 5]; NaNs whose bits" in diagnosis.evidence


def test_a_variant_of_the_wrong_number_of_outputs_is_refused_by_name() -> None:
    short = Variant("short", "", lambda inputs: (inputs[0],))
    inputs = make_inputs(case(), 0, operator=BLEND)
    with pytest.raises(ValueError, match=r"variant short of blend\.rows returned 1 outputs"):
        compute_variant(BLEND, short, inputs)


def test_a_bias_without_a_wrong_element_is_matched_on_all_elements_not_rounded_correctly() -> None:
    def truncate(first: Tensor, second: Tensor, _r: Tensor, _s: Tensor) -> Tensor:
        return ((first + second).view(torch.int32) & -0x10000).view(torch.float32)

    operator = replace(BLEND, variants=(*FAULTS, named("truncated", truncate)))
    inputs, outputs, comparison = judged(operator.variants[-1], case(SHAPES[1]), 0, operator)
    allowed = judge_elements(
        operator, inputs, operator.outputs[0], outputs["mixed"], "stored_intermediates"
    )
    right = truth(operator, inputs).outputs["mixed"]
    within = torch.where(allowed.wrong, right, outputs["mixed"])
    # The comparison still says that the output failed: what the test of means finds is no element.
    biased = {**outputs, "mixed": within}
    matching = match_variants(operator, inputs, biased, comparison)
    assert [match.variant for match in matching.matches] == ["truncated"]


# Elements.


@pytest.mark.parametrize("identity", ["kv_rope.concat.forward", "kv_rope.static.backward"])
def test_elements_are_judged_as_the_comparison_judges_them(identity: str) -> None:
    operator = find_operator(identity)
    generator = chance.Random(0)
    for name in ("random", "special-copies", "special-rotations", "huge", "cancellation"):
        inputs = make_inputs(operator.case(name), 0, operator=operator)
        outputs = dict(truth(operator, inputs).outputs)
        for output in outputs.values():
            flat = output.reshape(-1)
            for _ in range(200):
                place = generator.randrange(flat.numel())
                bits = flat.view(torch.int16)
                bits[place] ^= generator.choice([1, 2, 16, 64, 128, -(2**15)])
        for contract in ("stored_intermediates", "single_rounding", "correctly_rounded"):
            comparison = compare(operator, inputs, outputs, contract)
            for spec in operator.outputs:
                got = judge_elements(operator, inputs, spec, outputs[spec.name], contract)
                wrong = sum(
                    region.elements - region.within
                    for region in comparison.regions
                    if region.output == spec.name
                )
                assert int(got.wrong.sum()) == wrong
                assert torch.equal(
                    got.truth.view(torch.int16),
                    truth(operator, inputs).outputs[spec.name].view(torch.int16),
                )


# Structure.


FORWARD = find_operator("kv_rope.concat.forward")
BACKWARD = find_operator("kv_rope.static.backward")
Edit = Callable[[Tensor], object]


def per_head(factor: float, *heads: int) -> Tensor:
    """Factors of ten heads, 1 for those not named."""
    factors = torch.ones(10, 1, 1, dtype=torch.bfloat16)
    factors[list(heads)] = factor
    return factors


def structure(operator: Operator, name: str, **edits: Edit) -> str:
    """What is said of right outputs, edited in place."""
    inputs = make_inputs(operator.case(name), 3, operator=operator)
    outputs = dict(truth(operator, inputs).outputs)
    for output, edit in edits.items():
        edit(outputs[output])
    comparison = compare(operator, inputs, outputs, "stored_intermediates")
    return describe_structure(operator, inputs, outputs, comparison)


def test_nothing_is_said_of_right_outputs() -> None:
    assert structure(FORWARD, "random") == ""


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda y: y[:, :, 7:].fill_(torch.nan),
            "(new rows): all 12800 elements are wrong; all are NaN.",
        ),
        (
            lambda y: y[:, :, :7, 64:].zero_(),
            "(old rows): all 8960 elements with head_dim from 64 on are wrong; all are zero.",
        ),
        (
            lambda y: y[:, 1::2, :7].neg_(),
            (
                "(old rows): all 8960 elements with every second num_kv_heads from 1 on are wrong;"
                " the sign is flipped."
            ),
        ),
        (
            lambda y: y[1:, :, 10:].view(torch.int16).fill_(0x7F7F),
            (
                "all 2560 elements with batch_size 1 (the last) and updated_seq_len from"
                " 10 on are wrong; all hold what fresh memory was filled with (0x7F)."
            ),
        ),
        (
            lambda y: y[:, :, :7].mul_(per_head(8, 2, 3, 7)),
            (
                "all 5376 elements with num_kv_heads 2, 3, 7 are wrong; they are the right"
                " values times 8."
            ),
        ),
        (
            lambda y: y[:, :, :7].mul_(per_head(0.125, 0, 1, 2, 3, 4, 5, 6, 8, 9)),
            (
                "all 16128 elements with num_kv_heads other than 7 are wrong; they are the"
                " right values times 1/8."
            ),
        ),
        (
            lambda y: y[0, 4, 5, 77:78].view(torch.int16).bitwise_xor_(1 << 14),
            "(old rows): one of 17920 elements is wrong, at [0, 4, 5, 77].",
        ),
        (
            lambda y: y[:, :, 3:5].view(torch.int16).sub_(1),
            (
                "(old rows): all 5120 elements with updated_seq_len 3..4 are wrong; off by 1 ulp,"
                " always towards zero."
            ),
        ),
        (
            lambda y: y[:, :, :7].copy_(y[:, :, :7].flip(2)),
            (
                "15346 of 15360 elements with updated_seq_len other than 3 are wrong; they"
                " are the right values with updated_seq_len reversed, within these rows."
            ),
        ),
        (
            lambda y: y.copy_(y[:, 0:1]),
            "they are the right values of index 0 along num_kv_heads",
        ),
        (
            lambda y: y.copy_(y.roll(1, 1)),
            "they are the right values of one index before along num_kv_heads",
        ),
        (
            lambda y: y[:, :, 0, :3].fill_(2.5),
            (
                "all 60 elements with updated_seq_len 0 (the first) and head_dim up to 2 are wrong;"
                " all are 2.5."
            ),
        ),
    ],
)
def test_where_and_what_is_said_of_the_updated_key_cache(edit: Edit, said: str) -> None:
    text = structure(FORWARD, "random", updated_key_cache=edit)
    assert text.startswith("updated_key_cache (")
    assert said in text


def half_ulps(y: Tensor) -> None:
    """Move old rows by one ulp, up for even columns and down for odd ones, in value."""
    bits = y[:, :, :7].view(torch.int16)
    bits[..., 0::2] += 1
    bits[..., 1::2] -= 1


def up(y: Tensor) -> None:
    old = y[:, :, :7]
    old.view(torch.int16).add_(torch.where(old > 0, 1, -1).to(torch.int16))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (half_ulps, "off by 1 ulp, in both directions"),
        (up, "off by 1 ulp, always up"),
        (lambda y: y[:, :, :7].fill_(torch.inf), "all are infinite"),
        (lambda y: y[0, 0, 0, :1].fill_(torch.inf), "it is infinite"),
        (
            lambda y: y.copy_(y.transpose(1, 2).reshape(y.shape)),
            "the right values as if num_kv_heads and updated_seq_len were exchanged in memory",
        ),
        (
            lambda y: y.copy_(y.roll(64, 3)),
            "the right values with the halves of head_dim exchanged",
        ),
        (
            lambda y: y.copy_(y.unflatten(3, (64, 2)).flip(4).flatten(3)),
            "the right values with neighbours along head_dim exchanged",
        ),
        (
            lambda y: y[:, :, 7:].copy_(y[:, :, 7:] * 0.3),
            "(new rows): 12792 of 12800 elements are wrong; they are the right values times 0.3.",
        ),
        (
            lambda y: y[:, :, 7:].add_(0.02 * torch.linspace(-1, 1, 128).bfloat16()),
            "near the right values, as with intermediate results of low precision",
        ),
        (
            lambda y: y[:, :, :7].mul_(torch.tensor([2, torch.nan, 3, 5]).repeat(32)),
            "of them are NaN",
        ),
    ],
)
def test_what_stands_there_is_said(edit: Edit, said: str) -> None:
    assert said in structure(FORWARD, "random", updated_key_cache=edit)


def test_numbers_where_none_should_be_are_said() -> None:
    def number(y: Tensor) -> None:
        numbers = torch.arange(y.numel()).reshape(y.shape).bfloat16()
        y.copy_(torch.where(y.isfinite(), y, numbers))

    text = structure(FORWARD, "last-row-nan", updated_key_cache=number)
    assert "all should be NaN or infinite" in text


def test_a_mean_error_without_a_wrong_element_is_said() -> None:
    inputs, outputs, comparison = judged(blend(total, cleared), case(), 0)
    first, *rest = comparison.regions
    biased = replace(first, mean=MeanTest(mean=-0.49, low=-0.1, high=0.1, tau=0.05, clusters=900))
    comparison = replace(comparison, regions=(biased, *rest))
    assert describe_structure(BLEND, inputs, outputs, comparison) == (
        "mixed (all rows): no element is wrong by itself, but their mean error is -0.490 ulp,"
        " outside -0.100 to +0.100."
    )


def test_a_variant_of_another_shape_or_type_explains_nothing() -> None:
    double = Variant("double", "", lambda inputs: (inputs[0].double(), inputs[0]))
    operator = replace(BLEND, variants=(double,))
    inputs, outputs, comparison = judged(named("", MIXES["difference"]), case(), 0, operator)
    assert match_variants(operator, inputs, outputs, comparison).matches == ()


def test_values_of_an_input_are_recognised() -> None:
    inputs = make_inputs(FORWARD.case("random"), 3, operator=FORWARD)
    text = structure(
        FORWARD, "random", updated_key_cache=lambda y: y[:, :, 7:].copy_(inputs["key_states"])
    )
    assert "they are the input key_states" in text


def test_values_of_another_output_are_recognised() -> None:
    inputs = make_inputs(BACKWARD.case("random"), 3, operator=BACKWARD)
    right = truth(BACKWARD, inputs).outputs
    text = structure(BACKWARD, "random", grad_sin=lambda y: y.copy_(right["grad_cos"]))
    assert "they are the right values of grad_cos" in text


def test_tokens_are_told_by_their_position_where_that_is_simpler() -> None:
    inputs = make_inputs(BACKWARD.case("random"), 3, operator=BACKWARD)
    far = inputs["cache_position"] >= 20

    def clear_far(y: Tensor) -> None:
        y[:, :, far] = 0

    said = structure(BACKWARD, "random", grad_value_states=clear_far)
    first = int(inputs["cache_position"][far].min())
    assert f"with cache_position at least {first} are wrong; all are zero." in said


def test_errors_scattered_by_chance_are_not_given_a_place() -> None:
    def spoil(y: Tensor) -> None:
        generator = torch.Generator().manual_seed(1)
        places = torch.randperm(y.numel(), generator=generator)[:300]
        y.view(torch.int16).view(-1)[places] += 2

    text = structure(BACKWARD, "random", grad_value_states=spoil)
    assert text == (
        "grad_value_states: 300 of 75776 elements are wrong; off by at most 2 ulp, always away"
        " from zero."
    )


def test_outputs_with_the_same_error_share_a_sentence_and_no_more_than_three_are_said() -> None:
    every = {spec.name: Tensor.zero_ for spec in BACKWARD.outputs}
    text = structure(BACKWARD, "gaps", **every)
    assert "grad_cos and grad_sin: all 512 elements" in text or "Also wrong: " in text
    assert text.count(". ") <= 2


def test_failing_outputs_are_named_once_and_in_order() -> None:
    both = blend(MIXES["difference"], LEFTS["not-cleared"])
    _, _, comparison = judged(both, case(), 0)
    assert failing_outputs(comparison) == ("mixed", "left")
