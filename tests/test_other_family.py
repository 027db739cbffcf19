"""An operator of another family, defined in one file, gets all of the judge without a change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oracle
from oracle.certified import truth
from oracle.corruption import corruptions
from oracle.definition import Domain
from oracle.detection import detect
from oracle.detection_view import detection_view
from oracle.domain import domain_cases
from oracle.report import operator_page, to_text, verdict_view
from tests import other_family
from tests.other_family import OPERATOR

PROBES = tuple(case for case in domain_cases(OPERATOR, Domain("general")) if case.group == "probes")


def judge(candidate: Any, **settings: Any) -> oracle.Verdict:
    return oracle.verify(candidate, OPERATOR, isolate=False, **settings)


def test_the_eager_reference_passes_as_a_kernel_that_stores_its_products() -> None:
    def eager(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return OPERATOR.reference(inputs, inputs[0].dtype)

    verdict = judge(eager)
    assert verdict.passed, verdict.summary()
    assert verdict.grade == "stored_intermediates"
    assert verdict.rounding == {"mixed": "both products stored"}
    assert "mixed: both products stored" in to_text(verdict_view(verdict))


def test_the_certified_truth_is_correctly_rounded() -> None:
    def certified(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = {spec.name: x for spec, x in zip(OPERATOR.inputs, inputs, strict=True)}
        return tuple(truth(OPERATOR, named).outputs.values())

    verdict = judge(certified, domain="general", contract="correctly_rounded")
    assert verdict.passed, verdict.summary()


@pytest.mark.parametrize(
    "variant", [v for v in OPERATOR.variants if not v.legal], ids=lambda variant: variant.name
)
def test_a_wrong_variant_is_rejected_and_named(variant: Any) -> None:
    verdict = judge(lambda *inputs: variant.compute(inputs), seed=11, cases="probes")
    assert verdict.status == "wrong_values"
    assert verdict.diagnosis is not None
    assert verdict.diagnosis.name == variant.name
    shown = " ".join(to_text(verdict_view(verdict)).split())
    assert f"matches {variant.name}" in shown
    assert variant.description in shown
    assert f"matches: {variant.name}. {variant.description}" in verdict.summary()
    assert oracle.Verdict.from_dict(verdict.to_dict()) == verdict


def test_a_fault_in_no_catalogue_is_told_by_where_it_is() -> None:
    def wrong_in_the_last_columns(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mixed, left = other_family.right(*inputs)
        mixed[:, 16:] = 3
        return mixed, left

    verdict = judge(wrong_in_the_last_columns, cases="random")
    assert verdict.diagnosis is not None
    assert verdict.diagnosis.name == ""
    assert "width" in verdict.diagnosis.evidence
    assert "16" in verdict.diagnosis.evidence


def test_a_kernel_for_one_width_is_told_the_claim_it_meets() -> None:
    verdict = judge(other_family.only_for_width_24, domain="general", cases="probes")
    assert not verdict.passed
    assert "it meets the contract under --where width=24" in verdict.claim
    assert verdict.claim in verdict.summary()
    assert "--where width=24" in " ".join(to_text(verdict_view(verdict)).split())
    assert judge(other_family.only_for_width_24, where={"width": 24}).passed


def test_everything_wrong_is_detected_and_named_and_everything_legal_accepted() -> None:
    detection = detect(OPERATOR, PROBES, seeds=(3,), legal_seeds=range(5))
    assert detection.complete
    assert len(detection.kinds) == detection.caught == detection.named == 3
    assert [legal.judged for legal in detection.legal] == [5 * len(PROBES)]
    outcomes = {corruption.outcome for corruption in detection.corruptions}
    assert outcomes <= {"caught", "unchanged"}
    assert len(detection.corruptions) == len(corruptions(OPERATOR)) > 40
    shown = to_text(detection_view(detection, verbose=True))
    assert shown.startswith("COMPLETE  detection of blend.rows")
    assert "3 of 3 wrong kinds caught, 3 named rightly" in shown
    assert all(variant.name in shown for variant in OPERATOR.variants)


def test_what_no_probe_shows_is_told_apart_from_what_is_missed() -> None:
    """With all rows picked nothing is left, so that faults of what is left change nothing."""
    case = next(case for case in OPERATOR.probes if case.name == "all-picked")
    detection = detect(OPERATOR, (case,), diagnosed=0)
    outcomes = {corruption.name: corruption.outcome for corruption in detection.corruptions}
    assert outcomes["left.rows.rolled"] == "unchanged"
    assert outcomes["mixed.width.rolled"] == "caught"
    assert "unchanged" in to_text(detection_view(detection))


def test_its_page_shows_what_can_be_claimed() -> None:
    shown = to_text(operator_page(OPERATOR))
    for word in ("scale=two", "width", "none-picked", "sign-turned", "table -> left"):
        assert word in shown, word
