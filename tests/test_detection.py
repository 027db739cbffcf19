"""Detection tells caught, missed, unchanged and allowed apart, and counts each kind once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle import detection as module
from oracle.comparison import compare
from oracle.definition import Case, Operator, Variant
from oracle.detection import Detection, detect, rounded_otherwise
from oracle.elements import judge_elements
from oracle.inputs import make_inputs
from oracle.operators import find_operator
from tests.other_family import ID, OPERATOR

Mix = Callable[[Tensor, Tensor], Tensor]


def blend(
    name: str, mix: Mix, *, legal: bool = False, left: Callable[[Tensor], Tensor] = Tensor.clone
) -> Variant:
    """The blend of two tables with one step replaced."""

    def compute(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        table, other, scale, gain, pick = (
            x.float() if x.is_floating_point() else x for x in inputs
        )
        mixed = mix(table[pick] * scale, other[pick] * gain).to(inputs[0].dtype)
        return mixed, left(inputs[0].index_fill(0, pick, 0))

    return Variant(name, f"does {name}", compute, legal)


def truncated(first: Tensor, second: Tensor) -> Tensor:
    return ((first + second).view(torch.int32) & -0x10000).view(torch.float32)


def stored(first: Tensor, second: Tensor) -> Tensor:
    return first.bfloat16().float() + second.bfloat16().float()


VARIANTS = (
    blend("difference", torch.sub),
    blend("minus-second", lambda a, b: a + -b),
    blend("first-only", lambda a, _b: a),
    blend("truncated", truncated),
    blend("wide-only", lambda a, b: a - b if a.shape[1] > 100 else a + b),
    blend("stored-but-called-wrong", stored),
    blend("fp32", torch.add, legal=True),
    blend("stored", stored, legal=True),
    blend("doubled", lambda a, b: 2 * (a + b), legal=True),
)
BLEND = replace(OPERATOR, variants=VARIANTS)


def case(name: str, rows: int, picked: int, width: int, dtype: str = "bfloat16") -> Case:
    sizes = {"rows": rows, "picked": picked, "width": width}
    return Case(ID, name, "probes", sizes, "random", dtype, random=True)


CASES = (case("small", 9, 5, 24), case("other", 20, 7, 40))


@pytest.fixture(scope="module")
def detected() -> Detection:
    return detect(BLEND, CASES, (0, 1), legal_seeds=range(4))


def variant(of: Detection, name: str) -> module.VariantDetection:
    return next(one for one in of.variants if one.name == name)


def corruption(of: Detection, name: str) -> module.CorruptionDetection:
    return next(one for one in of.corruptions if one.name == name)


# An operator of another kind.


def test_a_wrong_variant_is_caught_by_the_first_case_and_named(detected: Detection) -> None:
    one = variant(detected, "difference")
    assert (one.outcome, one.caught_in) == ("caught", ("small", "other"))
    assert one.first is not None
    assert (one.first.case, one.first.seed, one.first.status) == ("small", 0, "wrong_values")
    assert (one.first.output, one.first.region) == ("mixed", "all rows")
    assert 100 < one.first.wrong <= 120
    assert (one.named, one.named_rightly) == ("difference", True)
    assert (one.named_roughly, one.roughly_rightly) == ("difference", True)


def test_variants_with_equal_outputs_everywhere_count_once(detected: Detection) -> None:
    assert variant(detected, "minus-second").same_as == "difference"
    assert variant(detected, "minus-second").named_rightly
    assert [one.name for one in detected.kinds] == ["difference", "first-only", "truncated"]
    assert [one.name for one in detected.unexposed] == ["wide-only", "stored-but-called-wrong"]


def test_truncation_is_caught_by_elements_and_by_name(detected: Detection) -> None:
    one = variant(detected, "truncated")
    assert (one.outcome, one.named) == ("caught", "truncated")


def test_a_variant_that_changes_nothing_in_these_cases_is_unchanged(detected: Detection) -> None:
    one = variant(detected, "wide-only")
    assert (one.outcome, one.first, one.named) == ("unchanged", None, "")
    wide = detect(BLEND, (case("wide", 3, 2, 130),))
    assert variant(wide, "wide-only").outcome == "caught"


def test_a_variant_within_the_contract_is_told_from_one_that_is_missed(
    detected: Detection,
) -> None:
    one = variant(detected, "stored-but-called-wrong")
    assert (one.outcome, one.first) == ("within_contract", None)
    strict = detect(BLEND, CASES[:1], contract="single_rounding")
    assert variant(strict, "stored-but-called-wrong").outcome == "caught"


def test_legal_variants_are_accepted_on_every_seed_and_false_alarms_are_told(
    detected: Detection,
) -> None:
    by_name = {one.name: one for one in detected.legal}
    assert {one.judged for one in detected.legal} == {8}
    assert by_name["fp32"].rejected == ()
    assert by_name["stored"].rejected == ()
    assert by_name["stored"].changed == 8
    assert len(by_name["doubled"].rejected) == 8
    assert detected.false_alarms == 1
    assert not detected.complete


def test_totals_and_outcomes_add_up(detected: Detection) -> None:
    assert (detected.caught, detected.named) == (3, 3)
    assert [one.outcome for one in detected.variants] == [
        "caught",
        "caught",
        "caught",
        "caught",
        "unchanged",
        "within_contract",
    ]


def test_corruptions_of_an_unknown_operator_are_caught_or_change_nothing(
    detected: Detection,
) -> None:
    assert corruption(detected, "mixed.picked.rolled").outcome == "caught"
    assert corruption(detected, "left.rows.last-tile-16").outcome == "caught"
    first = corruption(detected, "left.rows.last-tile-16").first
    assert first is not None
    # The smaller case has one tile only.
    assert first.case == "other"
    assert corruption(detected, "left.width.last-tile-64").outcome == "unchanged"
    assert corruption(detected, "mixed.first-element-exponent").outcome == "caught"
    assert not [one.name for one in detected.corruptions if one.outcome == "missed"]


def test_what_the_comparison_lets_through_beyond_the_contract_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blind(
        operator: Operator,
        inputs: Mapping[str, Tensor],
        _outputs: Mapping[str, Tensor],
        *_: object,
        **__: object,
    ) -> Any:
        right = make_right(operator, inputs)
        return compare(operator, inputs, right, "stored_intermediates")

    monkeypatch.setattr(module, "compare_outputs", blind)
    detection = detect(BLEND, CASES[:1])
    assert variant(detection, "difference").outcome == "missed"
    assert corruption(detection, "left.negated").outcome == "missed"
    assert variant(detection, "stored-but-called-wrong").outcome == "within_contract"
    assert not detection.complete


def make_right(operator: Operator, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    from oracle.certified import truth

    return truth(operator, inputs).outputs


def test_a_complete_detection_says_so() -> None:
    sound = replace(BLEND, variants=(VARIANTS[0], VARIANTS[2], VARIANTS[6], VARIANTS[7]))
    detection = detect(sound, CASES)
    assert detection.complete
    assert (len(detection.kinds), detection.caught, detection.named) == (2, 2, 2)
    assert detection.roughly_named == 2


def test_the_data_are_plain_json_and_the_same_every_time(detected: Detection) -> None:
    data = detected.to_dict()
    text = json.dumps(data, allow_nan=False)
    again = detect(BLEND, CASES, (0, 1), legal_seeds=range(4)).to_dict()
    assert json.dumps(again, allow_nan=False) == text
    assert (data["kinds"], data["caught"], data["named"], data["unexposed"]) == (3, 3, 3, 2)
    assert data["variants"][0]["first"]["case"] == "small"


def test_steps_are_told_up_to_the_total() -> None:
    told: list[tuple[int, int, str]] = []
    detection = detect(
        BLEND,
        CASES,
        (0,),
        legal_seeds=(0, 1),
        diagnosed=0,
        on_step=lambda done, total, name: told.append((done, total, name)),
    )
    total = 2 * (6 + len(detection.corruptions)) + 2 * 2 * 3
    assert [done for done, _, _ in told] == list(range(1, total + 1))
    assert {all_of for _, all_of, _ in told} == {total}
    assert "difference" in {name for _, _, name in told}


def test_a_case_that_passes_tells_apart_faults_that_are_alike_where_they_fail() -> None:
    narrow = blend("a-narrow-only", lambda a, b: a - b if a.shape[1] < 30 else a + b)
    both = replace(BLEND, variants=(VARIANTS[0], narrow))
    alike = detect(both, CASES[:1])
    assert variant(alike, "a-narrow-only").same_as == "difference"
    apart = detect(both, CASES)
    assert [(one.named, one.same_as) for one in apart.variants] == [
        ("difference", ""),
        ("a-narrow-only", ""),
    ]


def test_without_diagnosis_nothing_is_named() -> None:
    detection = detect(BLEND, CASES[:1], diagnosed=0)
    assert {one.named for one in detection.variants} == {""}
    assert detection.named == 0


def test_rounding_otherwise_keeps_right_outputs_within_the_contract() -> None:
    inputs = make_inputs(CASES[1], 0, operator=BLEND)
    right = make_right(BLEND, inputs)
    rough = rounded_otherwise(BLEND, inputs, right, 0, "stored_intermediates")
    assert not torch.equal(rough["mixed"], right["mixed"])
    assert torch.equal(rough["left"], right["left"])
    spec = BLEND.outputs[0]
    assert not judge_elements(BLEND, inputs, spec, rough["mixed"]).wrong.any()


# The first family, on sizes that no catalogue or probe was made with.

UNSEEN = {
    "kv_rope.concat.forward": {
        "batch_size": 2,
        "num_kv_heads": 3,
        "new_seq_len": 18,
        "current_seq_len": 19,
        "head_dim": 20,
    },
    "kv_rope.static.backward": {
        "batch_size": 2,
        "num_kv_heads": 5,
        "new_seq_len": 7,
        "max_seq_len": 18,
        "head_dim": 20,
    },
}


def unseen(operator: Operator, dtype: str) -> Case:
    kind = operator.case("random").kind
    return Case(operator.id, "unseen", "probes", UNSEEN[operator.id], kind, dtype, random=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("identity", UNSEEN)
def test_every_corruption_that_changes_anything_beyond_the_contract_is_caught(
    identity: str, dtype: str
) -> None:
    operator = replace(find_operator(identity), variants=())
    detection = detect(operator, (unseen(operator, dtype),), (17,))
    by_outcome: dict[str, set[str]] = {}
    for one in detection.corruptions:
        by_outcome.setdefault(one.outcome, set()).add(one.name)
    assert set(by_outcome) <= {"caught", "unchanged", "within_contract"}
    # Of most widths these sizes have a single tile, and a cache's last row may be a zeroed one.
    assert all(
        ".last-tile-" in name or "_cache_input.max_seq_len.last-" in name
        for name in by_outcome["unchanged"]
    )
    # A few ulps of float32 are what sums in another order may err by.
    small = ["-element-ulps"]
    if dtype == "float32":
        small += [".low-bit-lost", ".towards-zero", ".away-from-zero"]
    allowed = by_outcome.get("within_contract", set())
    computed = ("updated_key_cache", "grad_key_states", "grad_cos", "grad_sin")
    assert all(name.startswith(computed) and name.endswith(tuple(small)) for name in allowed)
    tiles = {one.name for one in detection.corruptions if ".last-tile-" in one.name}
    assert len(by_outcome["caught"] - tiles) > 0.9 * (len(detection.corruptions) - len(tiles))


@pytest.mark.parametrize("identity", UNSEEN)
def test_the_catalogue_is_named_on_sizes_and_seeds_it_was_not_made_with(identity: str) -> None:
    operator = find_operator(identity)
    wrong = [one for one in operator.variants if not one.legal]
    # Every fault is a candidate answer; every sixth is tried here, all of them by `detect`.
    tried = {one.name for one in wrong[::6]}
    outcome: dict[str, bool] = {}
    inputs = make_inputs(unseen(operator, "bfloat16"), 23, operator=operator)
    for fault in wrong[::6]:
        outputs = dict(module.compute_variant(operator, fault, inputs))
        comparison = compare(operator, inputs, outputs, "stored_intermediates")
        if comparison.status == "passed":
            continue
        matching = module.match_variants(operator, inputs, outputs, comparison)
        outcome[fault.name] = fault.name == module.combine([matching])[0].variant
    assert len(outcome) > 0.7 * len(tried)
    assert sum(outcome.values()) >= 0.9 * len(outcome)
