"""The judge as a whole: honest kernels pass with their grade, wrong ones fail with evidence."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import oracle
from oracle.examples import single_rounding
from oracle.verdict import CaseResult
from oracle.verification import Interrupted, UsageError, select_cases
from tests.wrong import concat_forward, static_backward

FORWARD = "kv_rope.concat.forward"
BACKWARD = "kv_rope.static.backward"
MODULES = {FORWARD: concat_forward, BACKWARD: static_backward}
WRONG = [(operator, kernel) for operator, module in MODULES.items() for kernel in module.WRONG]


# Honest kernels.


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        (FORWARD, "forward_eager"),
        (FORWARD, "forward_fp32"),
        (BACKWARD, "backward_eager"),
        (BACKWARD, "backward_heads_forward"),
        (BACKWARD, "backward_products_stored"),
    ],
)
def test_fp32_and_stored_products_both_pass_over_fifty_seeds(operator: str, name: str) -> None:
    function = getattr(importlib.import_module("tests.honest"), name)
    cases = ["one-token", "uneven-short", "cancellation"]
    if operator == BACKWARD:
        cases = ["shuffled", "cancellation", "head-cancellation"]
    for seed in range(50):
        verdict = oracle.verify(function, operator, cases=cases, seed=seed, isolate=False)
        assert verdict.passed, verdict.summary()


@pytest.mark.parametrize("operator", MODULES)
def test_a_candidate_that_calls_the_certified_oracle_is_correctly_rounded(operator: str) -> None:
    definition = oracle.find_operator(operator)

    def certified(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = {spec.name: x for spec, x in zip(definition.inputs, inputs, strict=True)}
        return tuple(oracle.truth(definition, named).outputs.values())

    verdict = oracle.verify(
        certified, operator, cases="probes", contract="correctly_rounded", isolate=False
    )
    assert verdict.passed, verdict.summary()
    assert verdict.grade == "correctly_rounded"


@pytest.mark.parametrize(
    ("operator", "name"), [(FORWARD, "forward_eager"), (BACKWARD, "backward_eager")]
)
def test_a_small_suite_case_passes_beside_the_probes(operator: str, name: str) -> None:
    smallest = min(
        (case for suite in oracle.find_operator(operator).suites for case in suite.cases),
        key=lambda case: math.prod(case.sizes[axis] + 1 for axis in case.sizes),
    )
    verdict = oracle.verify(f"tests.honest:{name}", operator, cases=smallest.name, device="cpu")
    assert verdict.passed
    assert verdict.grade == "stored_intermediates"
    assert verdict.cases[0].group.startswith("sol-execbench/")


def test_eager_is_below_a_tighter_contract_and_says_so() -> None:
    verdict = oracle.verify(
        "tests.honest:forward_eager",
        FORWARD,
        cases="random",
        contract="single_rounding",
        device="cpu",
    )
    assert verdict.status == "below_contract"
    assert verdict.grade is None
    region = verdict.cases[0].regions[1]
    assert region.grade == "stored_intermediates"
    assert "single_rounding" in verdict.detail


# Bad input.


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        ("no_such_file.py:f", "no_such_file.py"),
        ("tests.honest:no_such_function", "no_such_function"),
        ("tests.no_such_module:f", "tests.no_such_module"),
        ("tests.honest", ":"),
        ("tests.honest:rotate_half", "6"),
        ("tests.honest:HONEST", "HONEST"),
    ],
)
def test_what_cannot_be_called_is_a_bad_candidate_and_says_why(candidate: str, words: str) -> None:
    verdict = oracle.verify(candidate, FORWARD, cases="random", device="cpu")
    assert verdict.status == "bad_candidate"
    assert words in verdict.detail
    assert verdict.exit_status == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cases": "no-such"}, "no-such"),
        ({"cases": "rando"}, "did you mean random"),
        ({"cases": ()}, "no cases"),
        ({"contract": "nearly"}, "nearly"),
        ({"style": "write"}, "write"),
        ({"domain": "special"}, "special"),
        ({"where": {"head_dim": 65}}, "head_dim=65"),
        ({"cases": "keep,,turn"}, "empty name"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": True}, "seed is True"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": math.nan}, "timeout"),
        ({"isolate": False, "device": "interpreter"}, "isolate"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        oracle.verify("tests.honest:forward_fp32", FORWARD, **arguments)


def test_a_callable_needs_isolate_false() -> None:
    with pytest.raises(UsageError, match="isolate=False"):
        oracle.verify(lambda *_inputs: None, FORWARD, cases="random", device="cpu")


def test_an_unknown_operator_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match=FORWARD):
        oracle.verify("tests.honest:forward_fp32", "kv_rope.concat.sideways")


def test_a_crash_in_one_case_leaves_the_others_judged() -> None:
    verdict = oracle.verify(
        "tests.hostile.by_case:crashes_on_three_batches",
        FORWARD,
        cases=["one-token", "random", "keep"],
        device="cpu",
    )
    statuses = {case.name: case.status for case in verdict.cases}
    assert statuses == {"keep": "passed", "one-token": "crashed", "random": "passed"}
    assert verdict.status == "crashed"


def test_a_hang_in_one_case_times_out_and_leaves_the_others_judged() -> None:
    verdict = oracle.verify(
        "tests.hostile.by_case:hangs_on_three_batches",
        FORWARD,
        cases=["one-token", "random", "keep"],
        device="cpu",
        timeout=1.0,
    )
    statuses = {case.name: case.status for case in verdict.cases}
    assert statuses == {"keep": "passed", "one-token": "timed_out", "random": "passed"}
    assert verdict.exit_status == 1


def test_a_candidate_that_cannot_be_loaded_again_fails_its_cases_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADS_ONCE", str(tmp_path / "crashed"))
    verdict = oracle.verify(
        "tests.hostile.by_case:loads_once",
        FORWARD,
        cases=["keep", "one-token", "random"],
        device="cpu",
    )
    statuses = {case.name: case.status for case in verdict.cases}
    assert statuses == {"keep": "passed", "one-token": "crashed", "random": "crashed"}
    assert "imported twice" in verdict.cases[-1].detail


def test_the_first_call_of_a_process_after_a_crash_has_time_to_compile_too() -> None:
    verdict = oracle.verify(
        "tests.hostile.by_case:compiles_for_two_seconds_then_crashes_on_three_batches",
        FORWARD,
        cases="keep,one-token,random",
        device="cpu",
        timeout=1.0,
    )
    statuses = {case.name: case.status for case in verdict.cases}
    assert statuses == {"keep": "passed", "one-token": "crashed", "random": "passed"}


@pytest.mark.parametrize("name", ["breaks_torch", "spends_its_files"])
def test_damage_done_by_a_candidate_in_its_process_is_its_crash_and_no_fault_of_ours(
    name: str,
) -> None:
    verdict = oracle.verify(
        f"tests.hostile.by_case:{name}_on_three_batches",
        FORWARD,
        cases="keep,one-token,random",
        device="cpu",
    )
    statuses = {case.name: case.status for case in verdict.cases}
    assert statuses == {"keep": "passed", "one-token": "crashed", "random": "passed"}
    assert "changed something in its process" in verdict.detail


def test_a_failure_that_does_not_recur_alone_is_repeated_by_the_whole_run() -> None:
    verdict = oracle.verify(
        "tests.hostile.by_case:wrong_from_the_fourth_call_on",
        FORWARD,
        cases="keep,turn,random",
        device="cpu",
    )
    assert verdict.status == "wrong_values"
    assert "--cases keep,turn,random" in verdict.reproduce
    assert any("depends on the calls before" in remark for remark in verdict.remarks)


@pytest.mark.parametrize("candidate", [None, 3, lambda x: x])
def test_what_cannot_be_called_is_a_bad_candidate_without_isolation_too(candidate: Any) -> None:
    verdict = oracle.verify(candidate, FORWARD, cases="keep", isolate=False)
    assert verdict.status == "bad_candidate"
    assert verdict.detail
    assert verdict.cases == ()


def test_the_repetition_of_a_callable_is_told_in_python() -> None:
    verdict = oracle.verify(
        concat_forward.key_not_rotated, FORWARD, cases="turn", seed=3, isolate=False
    )
    assert verdict.reproduce.startswith("oracle.verify(key_not_rotated, 'kv_rope.concat.forward'")
    again = eval(
        verdict.reproduce, {"oracle": oracle, "key_not_rotated": concat_forward.key_not_rotated}
    )
    assert again.detail == verdict.detail


def test_a_triton_candidate_asked_onto_a_cpu_is_told_of_the_interpreter() -> None:
    verdict = oracle.verify(
        "oracle.examples.right_concat_forward:concat_forward", FORWARD, cases="keep", device="cpu"
    )
    assert verdict.status == "crashed"
    assert any("interpreter" in remark for remark in verdict.remarks)


def test_a_function_inside_a_class_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(
        "from tests.honest import forward_fp32\n\n\n"
        "class Kernels:\n    forward = staticmethod(forward_fp32)\n"
    )
    verdict = oracle.verify(f"{path}:Kernels.forward", FORWARD, cases="keep", device="cpu")
    assert verdict.passed, verdict.summary()


def test_control_characters_of_an_exception_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text('def forward(*_):\n    raise ValueError("\\x1b[2J\\x07wiped")\n')
    verdict = oracle.verify(f"{path}:forward", FORWARD, cases="keep", device="cpu")
    assert "\x1b" not in verdict.detail
    assert r"\x1b[2J\x07wiped" in verdict.detail


def test_an_output_never_written_is_found_in_a_large_case_too() -> None:
    verdict = oracle.verify(
        "tests.hostile.by_case:leaves_zeroed_rows_unwritten",
        BACKWARD,
        cases="suite-04-B2-N211-M1024",
        device="cpu",
    )
    assert verdict.status == "wrong_values", verdict.summary()


def test_style_out_by_name_works_without_isolation() -> None:
    verdict = oracle.verify(
        "tests.honest:forward_fp32_out", FORWARD, cases="keep", style="out", isolate=False
    )
    assert verdict.passed, verdict.summary()


def test_fail_fast_stops_after_the_first_failure() -> None:
    verdict = oracle.verify(
        "tests.wrong.concat_forward:key_not_rotated",
        FORWARD,
        cases=["turn", "random", "ties"],
        device="cpu",
        fail_fast=True,
    )
    assert [case.name for case in verdict.cases] == ["turn"]


def test_an_interrupted_run_keeps_what_it_has_judged() -> None:
    def stop(result: CaseResult, done: int, total: int) -> None:
        assert (result.status, total) == ("passed", 3)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        oracle.verify(
            "tests.honest:forward_fp32",
            FORWARD,
            cases=["keep", "turn", "random"],
            device="cpu",
            on_case=stop,
        )
    verdict = caught.value.verdict
    assert [case.name for case in verdict.cases] == ["keep", "turn"]
    assert verdict.interrupted
    assert not verdict.passed
    assert verdict.exit_status == 130


def test_a_fault_of_the_judge_is_its_own_and_loses_no_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from oracle import trial

    compare = trial.compare
    calls = []

    def failing(*arguments: Any, **settings: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise ZeroDivisionError("planted")
        return compare(*arguments, **settings)

    monkeypatch.setattr(trial, "compare", failing)
    verdict = oracle.verify(
        "tests.honest:forward_fp32", FORWARD, cases=["keep", "turn"], device="cpu"
    )
    assert [case.status for case in verdict.cases] == ["judge_error", "passed"]
    assert "planted" in verdict.cases[0].detail
    assert verdict.exit_status == 3


# Cases, grades, seeds.


def test_cases_are_selected_by_group_and_name_in_the_operators_order() -> None:
    operator = oracle.find_operator(FORWARD)
    everything = select_cases(operator, "all")
    assert everything == operator.cases
    assert select_cases(operator, ["large", "suite", "probes"]) == everything
    assert len(select_cases(operator, "suite")) == 16
    assert [case.name for case in select_cases(operator, ["random", "keep"])] == ["keep", "random"]
    assert select_cases(operator, "random, keep") == select_cases(operator, ["random", "keep"])


def test_another_seed_draws_other_inputs_and_the_verdict_names_it() -> None:
    case = oracle.find_operator(FORWARD).case("random")
    first, second = (oracle.make_inputs(case, seed)["key_states"] for seed in (0, 1))
    assert not torch.equal(first, second)
    verdict = oracle.verify(
        "tests.honest:forward_fp32", FORWARD, cases="random", seed=7, device="cpu"
    )
    assert verdict.seed == 7
    assert "--seed 7" in verdict.reproduce


def test_a_verdict_survives_json() -> None:
    import json

    verdict = oracle.verify(
        "tests.wrong.concat_forward:nan_in_the_last_row", FORWARD, cases="random", device="cpu"
    )
    text = json.dumps(verdict.to_dict(), allow_nan=False)
    again = oracle.Verdict.from_dict(json.loads(text))
    assert again.to_dict() == verdict.to_dict()
    assert again.status == "wrong_values"


# Claims of real kernels.


def reads_first_halves(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Right where both halves of the tables are equal, as popular kernels are."""
    key, value, cos, sin, *caches = inputs
    half = cos.shape[-1] // 2
    tables = (torch.cat((table[..., :half],) * 2, dim=-1) for table in (cos, sin))
    return single_rounding.concat_forward(key, value, *tables, *caches)


def for_head_dim_128(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    outputs = single_rounding.concat_forward(*inputs)
    return outputs if inputs[0].shape[-1] == 128 else tuple(x + 1 for x in outputs)


def test_a_kernel_that_reads_one_half_of_the_tables_passes_under_its_claim_only() -> None:
    settings: dict[str, Any] = {"cases": "probes", "isolate": False}
    claimed = oracle.verify(reads_first_halves, FORWARD, where={"tables": "paired"}, **settings)
    assert claimed.passed, claimed.summary()
    assert claimed.domain == "general where tables=paired"
    assert claimed.grade == "single_rounding"
    free = oracle.verify(reads_first_halves, FORWARD, **settings)
    assert free.status == "wrong_values"
    assert free.diagnosis is not None
    assert free.diagnosis.name == "first-half-of-the-tables"


def test_a_kernel_for_head_dim_128_is_rejected_in_general_and_told_its_claim() -> None:
    verdict = oracle.verify(
        for_head_dim_128, FORWARD, cases="probes", domain="general", isolate=False
    )
    assert verdict.status == "wrong_values"
    assert "it meets the contract under --where head_dim=128." in verdict.claim


def test_float16_of_head_dim_64_and_32_heads_is_judged_under_a_claim() -> None:
    verdict = oracle.verify(
        single_rounding.concat_forward,
        FORWARD,
        cases="probes",
        where={"head_dim": 64, "num_kv_heads": 32, "dtype": "float16"},
        isolate=False,
    )
    assert verdict.passed, verdict.summary()
    assert verdict.domain == "general where head_dim=64 num_kv_heads=32 dtype=float16"
    shapes = {(case.sizes["head_dim"], case.sizes["num_kv_heads"]) for case in verdict.cases}
    assert shapes == {(64, 32)}


@pytest.mark.gpu
def test_offsets_of_32_bits_fail_past_2_to_the_31_elements() -> None:
    verdict = oracle.verify(
        "tests/hostile/offsets_in_32_bits.py:concat_forward", FORWARD, cases="large", device="cuda"
    )
    assert verdict.status in ("crashed", "wrong_values")
