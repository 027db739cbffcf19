from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from oracle import report
from oracle.budget import CONTRACTS
from oracle.definition import Axis, Case, Operator, Suite, TensorSpec
from oracle.verdict import GRADES, CaseResult, Element, RegionResult, Verdict

SUITE = "sol-execbench/L1/071_kv_cache_update_with_rope"
WIDE = 100
ONE_SCREEN = 45

WRONG = Element(
    index=(1, 4, 7, 66),
    got="-1.0",
    got_bits="0xbf80",
    expected="-65.0",
    expected_bits="0xc282",
    exact="-65.015625",
    error_ulp=128.03125,
    low="-65.5",
    high="-64.5",
)


def region(**changes: Any) -> RegionResult:
    plain = RegionResult(
        output="updated_key_cache",
        region="new rows",
        meaning="computed",
        elements=2560,
        within=2560,
        identical=2550,
        certified=2560,
        grade="single_rounding",
        worst_error_ulp=0.5004,
    )
    return replace(plain, **changes)


def passing(name: str = "plain", **changes: Any) -> CaseResult:
    plain = CaseResult(
        name=name,
        group="probes",
        sizes={"batch_size": 2, "new_seq_len": 3, "head_dim": 128},
        exposes="which column is rotated with which",
        status="passed",
        grade="single_rounding",
        elements=2560,
        certified=2560,
        regions=(region(),),
        seconds=0.25,
    )
    return replace(plain, **changes)


def failing(name: str = "pairing", **changes: Any) -> CaseResult:
    wrong = region(within=60, identical=50, grade=None, worst_error_ulp=384.0, first_wrong=WRONG)
    plain = passing(
        name,
        status="wrong_values",
        grade=None,
        detail="2500 of 2560 elements of updated_key_cache, new rows, are not allowed.",
        regions=(wrong, region(output="updated_value_cache", meaning="copied", grade="exact")),
    )
    return replace(plain, **changes)


def verdict(*cases: CaseResult, **changes: Any) -> Verdict:
    plain = Verdict(
        operator="kv_rope.concat.forward",
        candidate="kernel.py:forward",
        status="passed",
        violation="",
        detail="",
        grade="single_rounding",
        contract="stored_intermediates",
        domain="official",
        style="return",
        device="interpreter",
        seed=17,
        cases=cases or (passing(),),
        reproduce="kernel-oracle verify kernel.py:forward --operator kv_rope.concat.forward",
        seconds=1.5,
    )
    return replace(plain, **changes)


def failed(*cases: CaseResult, **changes: Any) -> Verdict:
    return verdict(*(cases or (failing(),)), status="wrong_values", grade=None, **changes)


def text_of(shown: Verdict, width: int = WIDE, verbose: bool = False) -> str:
    return report.to_text(report.verdict_view(shown, verbose=verbose), width)


def many(count: int, **changes: Any) -> list[CaseResult]:
    """Return cases as many and as named as an operator's probes and suite."""
    sizes = [{"batch_size": i % 5 + 1, "new_seq_len": i, "head_dim": 128} for i in range(count)]
    return [passing(f"probe_{i}", sizes=sizes[i], **changes) for i in range(count)]


def test_a_pass_tells_status_grade_device_seed_counts_and_the_command() -> None:
    text = text_of(verdict(passing(), passing("suite_case", group=SUITE)))

    for part in (
        "PASSED  kv_rope.concat.forward",
        "kernel.py:forward",
        "single_rounding",
        "contract stored_intermediates, domain official, style return",
        "5,120 of 5,120 elements certified",
        "reproduce: kernel-oracle verify kernel.py:forward --operator kv_rope.concat.forward",
    ):
        assert part in text
    assert "seed       17" in text


def test_a_pass_of_all_cases_fits_one_screen_with_one_line_for_each_group() -> None:
    cases = [*many(35), *many(16, group=SUITE)]
    text = text_of(verdict(*cases), width=80)

    assert text.count("\n") <= ONE_SCREEN
    assert "35 passed" in text
    assert "16 passed" in text
    assert "probe_7" not in text


def test_verbose_lists_every_case_with_what_varies_between_them() -> None:
    text = text_of(verdict(*many(35)), verbose=True)

    assert all(f"probe_{i} " in text for i in range(35))
    assert "sizes: batch_size × new_seq_len; all with head_dim=128" in text
    assert "5 × 34" in text


@pytest.mark.parametrize("device", ["interpreter", "cpu"])
def test_a_verdict_from_elsewhere_says_that_it_was_not_run_on_a_gpu(device: str) -> None:
    assert f"{device} (not run on a GPU)" in text_of(verdict(device=device))


def test_a_verdict_from_a_gpu_does_not_say_that() -> None:
    assert "not run on a GPU" not in text_of(verdict(device="cuda"))


def test_a_failure_shows_the_evidence_of_the_first_wrong_element() -> None:
    text = text_of(failed(passing(), failing()))

    for part in (
        "FAILED: wrong_values",
        "First failure: case pairing of probes: wrong_values",
        "which column is rotated with which",
        "batch_size=2 new_seq_len=3 head_dim=128",
        "2500 of 2560 elements of updated_key_cache, new rows, are not allowed.",
        "updated_key_cache[1, 4, 7, 66], region new rows",
        "-1.0 (0xbf80)",
        "-65.0 (0xc282)",
        "-65.015625",
        "+128.031 ulp",
        "-65.5 to -64.5 under stored_intermediates",
        "1 other regions: every element is allowed",
    ):
        assert part in text
    row = next(line for line in text.splitlines() if line.startswith("  updated_key_cache"))
    assert row.split() == ["updated_key_cache", "new", "rows", "2,500", "2,560", "50", "384"]


def test_several_failures_are_listed_and_a_single_one_is_told_once() -> None:
    several = text_of(failed(failing("pairing"), passing("fine"), failing("signs")))
    single = text_of(failed(failing("pairing"), passing("fine")))

    assert "signs" in several
    assert "fine" not in several
    assert single.count("pairing") == 1


def test_a_failure_of_all_cases_fits_one_screen_and_counts_what_it_leaves_out() -> None:
    cases = [failing(f"probe_{i}") for i in range(35)]
    text = text_of(failed(*cases, remarks=tuple(f"remark {i}" for i in range(20))), width=WIDE)

    assert text.count("\n") <= ONE_SCREEN
    assert "and 29 more failed; --verbose shows all" in text
    assert "and 14 more remarks; --verbose shows all" in text


def test_the_allowed_values_of_copied_zeroed_and_not_finite_elements_are_said_in_words() -> None:
    bits = Element((0,), "1.0", "0x3f80", "2.0", "0x4000")

    def allowed(meaning: str) -> str:
        wrong = region(meaning=meaning, within=1, first_wrong=bits)
        return text_of(failed(failing(regions=(wrong,))))

    assert "only the expected bits, as the element is a copy" in allowed("copied")
    assert "only zero" in allowed("zeroed")
    assert "only the expected infinity or NaN, as a term is not finite" in allowed("computed")
    assert "ulp\n" not in allowed("copied").partition("First failure")[2].partition("output")[0]


def test_a_crash_shows_the_last_lines_of_what_the_candidate_printed() -> None:
    printed = "".join(f"line {i}\n" for i in range(30))
    crashed = passing("boom", status="crashed", grade=None, regions=(), output_text=printed)
    shown = verdict(crashed, status="crashed", grade=None)
    text = text_of(shown)

    assert "the candidate printed (the last 8 of 30 lines):" in text
    assert "line 22" in text
    assert "line 29" in text
    assert "line 21" not in text
    assert "line 0\n" in text_of(shown, verbose=True)


def test_a_broken_rule_of_the_call_is_named() -> None:
    case = passing("plain", status="call_violation", violation="input_mutated", grade=None)
    text = text_of(verdict(case, status="call_violation", violation="input_mutated", grade=None))

    assert "FAILED: call_violation (input_mutated)" in text
    assert "First failure: case plain of probes: call_violation (input_mutated)" in text


@pytest.mark.parametrize("status", ["bad_candidate", "judge_error", "nothing_compared"])
def test_what_could_not_be_judged_is_not_called_a_failure_of_the_kernel(status: str) -> None:
    shown = replace(verdict(), status=status, grade=None, cases=(), detail="No file 'kernel.py'.")
    text = text_of(shown)

    assert f"NOT JUDGED: {status}" in text
    assert "No file 'kernel.py'." in text
    assert "no element was compared" in text
    assert "certified" not in text
    assert "FAILED" not in text


def test_an_interrupted_run_says_so_and_counts_what_was_not_run() -> None:
    cases = (passing(), passing("later", status="not_run", grade=None, elements=0, certified=0))
    text = text_of(verdict(*cases, interrupted=True))

    assert "INTERRUPTED, passed so far" in text
    assert "1 passed, 1 not_run" in text
    assert "PASSED" not in text


def test_a_pass_that_left_cases_out_says_so_in_its_first_line() -> None:
    left_out = passing("large", status="not_run", grade=None, elements=0, certified=0)

    assert text_of(verdict(passing(), left_out)).startswith("PASSED, 1 of 2 cases not run")


def test_the_group_line_shows_the_loosest_grade_and_the_largest_error_of_its_cases() -> None:
    tight = passing(grade="correctly_rounded", regions=(region(worst_error_ulp=None),))
    loose = passing("b", grade="stored_intermediates", regions=(region(worst_error_ulp=1.25),))
    text = text_of(verdict(tight, loose))
    row = next(line for line in text.splitlines() if line.startswith("probes"))

    assert row.split() == ["probes", "2", "passed", "stored_intermediates", "5,120", "5,120",
                           "1.25", "0.5"]  # fmt: skip


def test_elements_outside_the_domain_are_counted() -> None:
    text = text_of(verdict(passing(regions=(region(out_of_domain=12),))))

    assert "12 outside the domain of the contract" in " ".join(text.split())


def test_equal_remarks_of_many_cases_take_one_line() -> None:
    cases = [passing(f"c{i}", remarks=("zeros have the other sign",)) for i in range(9)]
    text = text_of(verdict(*cases, remarks=("conversions replaced",)))

    assert "remark: conversions replaced" in text
    assert "remark: c0 and 8 more cases: zeros have the other sign" in text
    assert text.count("other sign") == 1


def test_the_command_is_never_broken_into_lines() -> None:
    command = "kernel-oracle verify " + "a" * 90 + " --operator kv_rope.concat.forward --seed 3"
    text = text_of(verdict(reproduce=command), width=60)

    assert f"reproduce: {command}\n" in text


def test_escape_sequences_and_markup_of_a_candidate_are_shown_not_obeyed() -> None:
    case = failing(detail="[red]bad\x1b[2J\x07", output_text="\x1b[32mPASSED\x1b[0m [bold]x\r\n")
    text = text_of(failed(case, candidate="[bold]k\x1b[31m.py:f"))

    assert "\x1b" not in text
    assert "\r" not in text
    for part in (r"[red]bad\x1b[2J\x07", r"\x1b[32mPASSED\x1b[0m [bold]x", r"[bold]k\x1b[31m.py:f"):
        assert part in text


SIZES = {"batch_size": 2, "head_dim": 128}
TENSOR = TensorSpec("keys", ("batch_size", "head_dim"), "new keys", may_broadcast=("batch_size",))
POSITIONS = TensorSpec("positions", ("batch_size",), "rows to write", indexes="head_dim")
OPERATOR = Operator(
    id="toy.copy.forward",
    title="copies the keys",
    formula="copied_keys = keys\n",
    source="a test",
    axes=(
        Axis("batch_size", "sequences", minimum=1),
        Axis("head_dim", "columns of a head", minimum=2, multiple_of=2),
        Axis("total", "both", sum_of=("batch_size", "head_dim")),
    ),
    inputs=(TENSOR, POSITIONS),
    outputs=(
        TensorSpec("copied_keys", ("batch_size", "head_dim"), "the keys", regions=("a", "b")),
    ),
    dtypes=("bfloat16",),
    official={"head_dim": 128},
    reference=lambda inputs, _dtype: (inputs[0],),
    blocks=lambda _inputs, _output, _limit: iter(()),
    input_kinds={"plain": lambda _case, _draws, _arrays: None},
    probes=(
        Case("toy.copy.forward", "codes", "probes", SIZES, "plain", exposes="which went where"),
        Case("toy.copy.forward", "one", "probes", SIZES | {"batch_size": 1}, "plain"),
    ),
    suites=(
        Suite(
            "toy/suite",
            "a paper",
            (Case("toy.copy.forward", "b2", "toy/suite", SIZES, "plain"),),
        ),
    ),
)


def test_the_list_names_every_operator_group_and_case() -> None:
    text = report.to_text(report.operators_table([OPERATOR]))

    for part in ("toy.copy.forward", "copies the keys", "probes (2): codes, one",
                 "toy/suite (1): b2"):  # fmt: skip
        assert part in text


def test_the_page_of_an_operator_shows_all_that_defines_it() -> None:
    text = report.to_text(report.operator_page(OPERATOR))

    for part in (
        "copied_keys = keys",
        "source: a test",
        "domain official: head_dim=128",
        "at least 2, a multiple of 2",
        "batch_size + head_dim",
        "[batch_size, head_dim]",
        "(batch_size may be 1)",
        "[batch_size] int64",
        "a, b",
        "which went where",
        "Suite toy/suite (a paper)",
        "sizes: batch_size; all with head_dim=128",
    ):
        assert part in text
    assert all(contract in text for contract in GRADES)
    assert text.count("(the default)") == 1


def test_the_page_of_an_operator_without_probes_has_no_section_for_them() -> None:
    text = report.to_text(report.operator_page(replace(OPERATOR, probes=())))

    assert "Probes" not in text
    assert "Suite toy/suite" in text


def test_the_page_explains_exactly_the_contracts_that_can_be_graded() -> None:
    data = report.operator_data(OPERATOR)

    assert tuple(data["contracts"]) == GRADES
    assert tuple(CONTRACTS) == GRADES[1:]
    assert data["default_contract"] in CONTRACTS


def test_an_operator_as_json_holds_its_tensors_and_cases() -> None:
    data = json.loads(json.dumps(report.operator_data(OPERATOR), allow_nan=False))

    assert data["outputs"][0]["regions"] == ["a", "b"]
    assert data["inputs"][1]["indexes"] == "head_dim"
    assert [case["name"] for case in data["probes"]] == ["codes", "one"]
    assert data["suites"][0]["cases"][0]["sizes"] == SIZES
    assert report.operator_summary(OPERATOR)["cases"] == {
        "probes": ["codes", "one"],
        "toy/suite": ["b2"],
    }


def test_the_environment_is_listed_with_its_gpus() -> None:
    gpu = {"name": "H200", "memory_GiB": 139.8, "compute_capability": "9.0", "driver": None}
    base = {"torch": "2.13.0", "triton": None, "triton_interpret": False}
    text = report.to_text(report.environment_table(base | {"gpus": [gpu]}))

    assert "H200, 139.8 GiB, compute capability 9.0, driver none" in text
    assert "triton            none" in text
    assert "triton_interpret  no" in text
    assert "none" in report.to_text(report.environment_table({"gpus": []}))
