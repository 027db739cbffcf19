"""Domains: claims are read strictly, and a domain's cases meet them, all of them and only them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import oracle
from oracle.definition import Domain
from oracle.domain import InvalidClaim, domain_cases, has_contiguous_inputs, read_domain
from oracle.verification import UsageError
from tests import other_family
from tests.other_family import OPERATOR

FAMILY = "tests.other_family"


@pytest.mark.parametrize(
    ("where", "domain"),
    [
        ({}, Domain()),
        ({"width": 7}, Domain("general", {"width": (7,)})),
        ({"width": "7, 64,7"}, Domain("general", {"width": (7, 64)})),
        ({"rows": (5, 6), "dtype": "float16"}, Domain("general", {"rows": (5, 6)}, ("float16",))),
        ({"layout": "contiguous"}, Domain("general", contiguous=True)),
        ({"scale": "two"}, Domain("general", constraints=("scale=two",))),
    ],
)
def test_claims_are_read(where: Mapping[str, object], domain: Domain) -> None:
    assert read_domain(OPERATOR, "official", where) == domain


@pytest.mark.parametrize(
    ("name", "where", "message"),
    [
        ("special", {}, "domain 'special' is not one of official, general"),
        (
            "general",
            {"depth": 3},
            r"knows no claim depth=3; claim sizes of rows, picked, width, or",
        ),
        ("general", {"width": "x"}, r"width=x is no size of blend.rows: it must be at least 0"),
        ("general", {"width": "-1"}, r"width=-1 is no size"),
        ("general", {"width": ""}, r"claim width has no value"),
        ("general", {"width": ()}, r"claim width has no value"),
        ("general", {"dtype": "float64"}, r"dtype=float64 is none of blend.rows"),
        ("general", {"layout": "strided"}, r"no claim layout=strided; .*layout=contiguous"),
        ("general", {"scale": "three"}, r"no claim scale=three; .*scale=two"),
    ],
)
def test_claims_that_mean_nothing_are_refused_with_what_can_be_claimed(
    name: str, where: Mapping[str, object], message: str
) -> None:
    with pytest.raises(InvalidClaim, match=message):
        read_domain(OPERATOR, name, where)


def test_the_official_domain_is_the_operators_own_cases() -> None:
    assert domain_cases(OPERATOR, Domain()) == OPERATOR.cases


def test_the_general_domain_tries_every_probe_in_every_type_and_every_varied_size() -> None:
    cases = domain_cases(OPERATOR, Domain("general"))
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    for base in OPERATOR.probes + OPERATOR.general_probes:
        own = [case for case in cases if case.name.partition(".")[0] == base.name]
        assert {case.dtype for case in own} == set(OPERATOR.dtypes)
        assert {case.kind for case in own} == {base.kind}
        assert base.name in {case.name for case in own}
    assert {case.sizes["width"] for case in cases} == {1, 7, 24, 64}
    assert all(case.domain == "general" for case in cases)
    assert [case.name for case in cases if case.group == "blend/suite"] == ["suite-1"]


claims = st.fixed_dictionaries(
    {},
    optional={
        "width": st.sets(st.integers(1, 40), min_size=1, max_size=4).map(tuple),
        "rows": st.sets(st.integers(1, 12), min_size=1, max_size=3).map(tuple),
        "picked": st.sets(st.integers(0, 6), min_size=1, max_size=3).map(tuple),
        "dtype": st.sets(st.sampled_from(OPERATOR.dtypes), min_size=1).map(tuple),
        "layout": st.just("contiguous"),
        "scale": st.just("two"),
    },
)


@given(claims)
def test_all_cases_of_a_domain_meet_its_claims_and_can_be_drawn(where: dict[str, Any]) -> None:
    rows, picked = where.get("rows", (99,)), where.get("picked", (0,))
    assume(min(picked) <= max(rows))
    cases = domain_cases(OPERATOR, read_domain(OPERATOR, "general", where))
    for case in cases:
        for axis in ("width", "rows", "picked"):
            assert axis not in where or case.sizes[axis] in where[axis]
        assert case.dtype in where.get("dtype", OPERATOR.dtypes)
        assert "layout" not in where or has_contiguous_inputs(OPERATOR, case)
        inputs = oracle.make_inputs(case, operator=OPERATOR)
        assert "scale" not in where or bool((inputs["scale"] == 2).all())
        OPERATOR.bind(inputs)


@given(claims.filter(lambda where: "width" in where))
def test_every_claimed_size_and_type_is_tried(where: dict[str, Any]) -> None:
    where.pop("picked", None)
    where.pop("rows", None)
    cases = domain_cases(OPERATOR, read_domain(OPERATOR, "general", where))
    tried = {(case.dtype, case.sizes["width"]) for case in cases}
    dtypes = where.get("dtype", OPERATOR.dtypes)
    assert tried >= {(dtype, width) for dtype in dtypes for width in where["width"]}


def test_claims_that_no_case_meets_are_refused() -> None:
    with pytest.raises(InvalidClaim, match=r"no case of blend.rows meets rows=2 picked=5"):
        domain_cases(OPERATOR, read_domain(OPERATOR, "general", {"rows": 2, "picked": 5}))


# Judged.


def judge(name: str, **settings: Any) -> oracle.Verdict:
    return oracle.verify(f"{FAMILY}:{name}", OPERATOR, device="cpu", **settings)


def test_a_right_kernel_passes_in_both_domains_and_the_verdict_says_which() -> None:
    for domain in ("official", "general"):
        verdict = judge("right", domain=domain)
        assert verdict.passed, verdict.summary()
        assert verdict.domain == domain
        assert verdict.certified == verdict.elements > 0


@pytest.mark.parametrize(
    ("name", "where", "failing"),
    [
        ("only_for_width_24", {"width": 24}, "width"),
        ("only_for_contiguous_tables", {"layout": "contiguous"}, "transposed"),
        ("only_for_scale_two", {"scale": "two"}, "mark"),
    ],
)
def test_a_kernel_passes_under_its_claim_and_fails_without_it(
    name: str, where: Mapping[str, object], failing: str
) -> None:
    claimed = judge(name, where=where)
    assert claimed.passed, claimed.summary()
    assert claimed.domain.startswith("general where ")
    free = judge(name, domain="general")
    assert free.status == "wrong_values"
    assert failing in next(case.name for case in free.cases if case.status == "wrong_values")


def test_a_command_repeats_a_failure_with_its_domain_and_claims() -> None:
    verdict = judge("only_for_width_24", where={"width": (7, 24), "dtype": ("float16",)})
    words = "--domain general --where width=7,24 --where dtype=float16"
    assert words in verdict.reproduce
    case = verdict.first_failure
    assert case is not None
    again = judge(
        "only_for_width_24", where={"width": (7, 24), "dtype": "float16"}, cases=case.name
    )
    assert again.cases[0].detail == case.detail


@pytest.mark.parametrize("domain", ["official", "general"])
def test_inputs_written_in_place_become_outputs(domain: str) -> None:
    verdict = judge("right_in_place", style="inplace", domain=domain)
    assert verdict.passed, verdict.summary()


def test_what_is_wrong_in_place_is_found() -> None:
    verdict = judge("wrong_in_place", style="inplace", cases="mark")
    assert (verdict.status, verdict.violation) == ("call_violation", "input_mutated")
    assert "other" in verdict.detail
    found = {region.region: region.within for region in verdict.cases[0].regions}
    assert found["picked rows"] < 3 * 24


def test_writing_in_place_is_an_offence_where_it_is_not_asked_for() -> None:
    verdict = judge("right_in_place", cases="mark")
    assert verdict.status == "call_violation"


def test_style_inplace_is_refused_where_nothing_is_written_in_place() -> None:
    with pytest.raises(UsageError, match=r"kv_rope\.concat\.forward writes nothing in place"):
        oracle.verify("tests.honest:forward_fp32", "kv_rope.concat.forward", style="inplace")


def test_inputs_reach_the_candidate_in_the_layout_of_the_case() -> None:
    seen: list[tuple[int, ...]] = []

    def candidate(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(inputs[0].stride())
        return other_family.right(*inputs)

    verdict = oracle.verify(
        candidate, OPERATOR, domain="general", cases="transposed", isolate=False
    )
    assert verdict.passed
    assert set(seen) == {(1, 6)}


def test_a_case_tried_at_other_sizes_only_is_offered_by_its_own_name() -> None:
    with pytest.raises(UsageError, match=r"no case 'random' .* did you mean random\.width-7"):
        judge("right", where={"width": 7}, cases="random")
