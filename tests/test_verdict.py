from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.verdict import (
    EXIT_STATUS,
    GRADES,
    SCHEMA_VERSION,
    STATUSES,
    CaseResult,
    Element,
    RegionResult,
    Verdict,
    VerificationFailed,
    gravest,
    loosest,
)

CASE = CaseResult(
    name="plain", group="probes", sizes={"head_dim": 128}, exposes="", status="passed"
)
VERDICT = Verdict(
    operator="kv_rope.concat.forward",
    candidate="kernel.py:forward",
    status="passed",
    violation="",
    detail="",
    grade="single_rounding",
    contract="stored_intermediates",
    domain="official",
    style="return",
    device="cpu",
    seed=0,
    cases=(CASE,),
)

counts = st.integers(0, 2**40)
finite = st.floats(allow_nan=False, allow_infinity=False)
maybe_finite = st.none() | finite
texts = st.text(max_size=12)
grades = st.none() | st.sampled_from(GRADES)
elements = st.builds(
    Element,
    index=st.lists(counts, max_size=4).map(tuple),
    got=texts,
    got_bits=texts,
    expected=texts,
    expected_bits=texts,
    exact=texts,
    error_ulp=maybe_finite,
    low=texts,
    high=texts,
)
regions = st.builds(
    RegionResult,
    output=texts,
    region=texts,
    meaning=st.sampled_from(["copied", "zeroed", "computed"]),
    elements=counts,
    within=counts,
    identical=counts,
    certified=counts,
    grade=grades,
    worst_error_ulp=maybe_finite,
    out_of_domain=counts,
    first_wrong=st.none() | elements,
)
cases = st.builds(
    CaseResult,
    name=texts,
    group=texts,
    sizes=st.dictionaries(texts, counts, max_size=3),
    exposes=texts,
    status=st.sampled_from(STATUSES),
    violation=texts,
    detail=texts,
    grade=grades,
    elements=counts,
    certified=counts,
    regions=st.lists(regions, max_size=2).map(tuple),
    remarks=st.lists(texts, max_size=2).map(tuple),
    output_text=texts,
    seconds=finite,
    call_seconds=maybe_finite,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
verdicts = st.builds(
    Verdict,
    operator=texts,
    candidate=texts,
    status=st.sampled_from(STATUSES),
    violation=texts,
    detail=texts,
    grade=grades,
    contract=texts,
    domain=texts,
    style=texts,
    device=texts,
    seed=counts,
    cases=st.lists(cases, max_size=2).map(tuple),
    remarks=st.lists(texts, max_size=2).map(tuple),
    environment=st.dictionaries(texts, json_values, max_size=3),
    reproduce=texts,
    seconds=finite,
    interrupted=st.booleans(),
)


@given(verdicts)
def test_a_verdict_survives_json_unchanged(verdict: Verdict) -> None:
    text = json.dumps(verdict.to_dict(), allow_nan=False)

    assert Verdict.from_dict(json.loads(text)) == verdict


def test_json_says_whether_it_passed() -> None:
    assert VERDICT.to_dict()["passed"] is True
    assert replace(VERDICT, status="crashed", grade=None).to_dict()["passed"] is False


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")]
)
def test_json_writes_numbers_it_lacks_as_text(value: float, text: str) -> None:
    verdict = replace(VERDICT, environment={"deep": [{"value": value}]}, seconds=value)
    data = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))

    assert data["environment"] == {"deep": [{"value": text}]}
    assert data["seconds"] == text


def test_a_record_of_another_schema_version_is_refused_by_number() -> None:
    data = VERDICT.to_dict() | {"schema_version": SCHEMA_VERSION + 1}

    with pytest.raises(
        ValueError, match=f"version {SCHEMA_VERSION + 1}.* version {SCHEMA_VERSION}"
    ):
        Verdict.from_dict(data)


def test_the_published_precedence_of_statuses() -> None:
    assert STATUSES == (
        "judge_error",
        "bad_candidate",
        "crashed",
        "timed_out",
        "out_of_memory",
        "call_violation",
        "wrong_shape",
        "wrong_dtype",
        "wrong_device",
        "wrong_layout",
        "wrong_values",
        "below_contract",
        "nothing_compared",
        "passed",
        "empty_ok",
        "not_run",
    )


@given(st.lists(st.sampled_from(STATUSES)))
def test_the_gravest_status_is_the_first_in_precedence_of_what_was_judged(
    statuses: list[str],
) -> None:
    judged = set(statuses) - {"empty_ok", "not_run"}
    expected = next((status for status in STATUSES if status in judged), "nothing_compared")

    assert gravest(statuses) == expected


@pytest.mark.parametrize("statuses", [[], ["empty_ok"], ["not_run", "empty_ok"]])
def test_a_run_that_compared_nothing_has_not_passed(statuses: list[str]) -> None:
    assert gravest(statuses) == "nothing_compared"


def test_an_empty_case_takes_nothing_away_from_a_pass() -> None:
    assert gravest(["passed", "empty_ok"]) == "passed"


@given(st.lists(st.sampled_from(GRADES), min_size=1))
def test_the_loosest_grade_is_met_by_all(found: list[str]) -> None:
    assert GRADES.index(loosest(list(found)) or "") == max(GRADES.index(grade) for grade in found)


@pytest.mark.parametrize("found", [[], [None], ["exact", None, "bounded_error"]])
def test_there_is_no_grade_where_one_is_missing(found: list[str | None]) -> None:
    assert loosest(found) is None


@pytest.mark.parametrize("status", STATUSES)
def test_the_exit_status_of_every_status(status: str) -> None:
    expected = {"passed": 0, "judge_error": 3, "bad_candidate": 2, "nothing_compared": 2}

    assert replace(VERDICT, status=status).exit_status == expected.get(status, 1)
    assert set(EXIT_STATUS) <= set(STATUSES)


@pytest.mark.parametrize("status", ["passed", "wrong_values", "judge_error"])
def test_an_interrupted_run_exits_with_130_and_has_not_passed(status: str) -> None:
    verdict = replace(VERDICT, status=status, interrupted=True)

    assert verdict.exit_status == 130
    assert not verdict.passed


def test_elements_and_certified_are_summed_over_cases() -> None:
    verdict = replace(
        VERDICT,
        cases=(replace(CASE, elements=5, certified=4), replace(CASE, elements=7, certified=7)),
    )

    assert (verdict.elements, verdict.certified) == (12, 11)


def test_the_first_failure_is_the_first_case_of_the_gravest_status() -> None:
    wrong, crash = replace(CASE, name="w", status="wrong_values"), replace(CASE, status="crashed")
    verdict = replace(VERDICT, status="crashed", cases=(CASE, wrong, crash, crash))

    assert verdict.first_failure is crash
    assert VERDICT.first_failure is None
    assert replace(VERDICT, status="nothing_compared").first_failure is None


def _region(output: str, region: str, first: tuple[int, ...] | None) -> RegionResult:
    element = None if first is None else Element(first, "1.0", "0x3f80", "2.0", "0x4000")
    return RegionResult(output, region, "copied", 8, 7, 7, 8, None, first_wrong=element)


def test_the_first_wrong_element_is_the_lowest_index_of_the_first_wrong_output() -> None:
    case = replace(
        CASE,
        regions=(
            _region("a", "old", None),
            _region("b", "old", (1, 0)),
            _region("b", "new", (0, 7)),
            _region("c", "old", (0, 0)),
        ),
    )
    found = case.first_wrong

    assert found is not None
    assert (found[0].output, found[0].region, found[1].index) == ("b", "new", (0, 7))


def test_there_is_no_first_wrong_element_where_all_are_right() -> None:
    assert replace(CASE, regions=(_region("a", "old", None),)).first_wrong is None


def test_raise_for_failure_is_silent_on_a_pass() -> None:
    VERDICT.raise_for_failure()


def test_raise_for_failure_tells_what_failed_and_how_to_repeat_it() -> None:
    verdict = replace(
        VERDICT,
        status="call_violation",
        violation="input_mutated",
        detail="key_cache was changed at [0, 0, 1, 2].",
        reproduce="kernel-oracle verify kernel.py:forward --cases plain",
        grade=None,
    )

    with pytest.raises(VerificationFailed) as failed:
        verdict.raise_for_failure()
    text = str(failed.value)
    for part in (
        "call_violation (input_mutated)",
        "kernel.py:forward",
        "key_cache was changed at [0, 0, 1, 2].",
        "reproduce: kernel-oracle verify kernel.py:forward --cases plain",
    ):
        assert part in text


def test_raise_for_failure_refuses_an_interrupted_run_that_passed_so_far() -> None:
    with pytest.raises(VerificationFailed, match="interrupted before all cases were judged"):
        replace(VERDICT, interrupted=True).raise_for_failure()


def test_the_summary_of_a_pass_names_grade_device_and_counts() -> None:
    summary: Any = replace(VERDICT, cases=(replace(CASE, elements=5),)).summary()

    assert "passed on cpu, grade single_rounding, 5 elements in 1 cases" in summary
