"""Claims suggested to a candidate that failed: those it meets, and none made up by chance."""

from __future__ import annotations

from dataclasses import replace

from oracle.claims import claim_hint
from oracle.definition import Case, Layout
from tests.other_family import ID, OPERATOR


def probe(number: int, **sizes: int) -> Case:
    axes = {"rows": 5 + number, "picked": 1 + number % 4, "width": 24} | sizes
    return Case(ID, f"p{number}", "probes", axes, "random")


def test_a_kernel_for_one_size_is_told_its_claim() -> None:
    results = [(probe(k), "passed") for k in range(5)]
    results += [(probe(k + 9, width=w), "wrong_values") for k, w in enumerate((1, 7, 64))]
    assert claim_hint(OPERATOR, results) == (
        "All 5 cases with width=24 passed, and 3 of the 3 others failed: it meets the contract"
        " under --where width=24."
    )


def test_a_kernel_for_contiguous_inputs_of_one_type_is_told_both_claims_and_no_more() -> None:
    strided = {"table": Layout(order=(1, 0))}
    results = [(probe(k), "passed") for k in range(5)]
    results += [(replace(probe(6), layouts=strided), "wrong_values")]
    results += [(replace(probe(7), dtype="float16"), "crashed")]
    assert "--where dtype=bfloat16 layout=contiguous." in claim_hint(OPERATOR, results)


def test_an_offset_alone_is_contiguous() -> None:
    offset = {"table": Layout(offset=64)}
    results = [(probe(1), "passed"), (probe(2), "passed")]
    results += [(replace(probe(3), layouts=offset), "wrong_values")]
    assert claim_hint(OPERATOR, results) == ""


def test_no_claim_is_made_up_from_sizes_that_every_case_varies() -> None:
    results = [(probe(k), "passed") for k in range(6)]
    results += [(probe(k, rows=50 + k), "wrong_values") for k in range(3)]
    assert claim_hint(OPERATOR, results) == ""


def test_a_kernel_for_single_rows_is_told_so() -> None:
    results = [(probe(k, picked=1), "passed") for k in range(4)]
    results += [(probe(k, picked=2 + k), "wrong_values") for k in range(3)]
    assert "--where picked=1." in claim_hint(OPERATOR, results)


def test_no_claim_where_a_failed_case_looks_like_those_that_passed() -> None:
    results = [(probe(k), "passed") for k in range(5)]
    results += [(probe(6, width=7), "wrong_values"), (probe(7), "wrong_values")]
    assert claim_hint(OPERATOR, results) == ""


def test_cases_that_were_not_judged_count_neither_way() -> None:
    results = [(probe(k), "passed") for k in range(2)]
    results += [(probe(5, width=7), "wrong_values"), (probe(6), "not_run"), (probe(7), "empty_ok")]
    assert "All 2 cases with width=24 passed, and 1 of the 1 others" in claim_hint(
        OPERATOR, results
    )
    assert claim_hint(OPERATOR, results[1:]) == ""
    assert claim_hint(OPERATOR, [(probe(1), "passed"), (probe(2), "passed")]) == ""
