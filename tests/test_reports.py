"""The reports on detection: their pure parts, and a tiny run of each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.diagnosis import compute_variant
from oracle.domain import output_elements
from oracle.inputs import make_inputs
from oracle.operators import find_operator
from reports import comparison, detection

FORWARD = "kv_rope.concat.forward"


# Which cases


@pytest.mark.parametrize("identity", detection.OPERATORS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_unseen_cases_have_sizes_that_no_probe_and_no_variety_has(
    identity: str, dtype: str
) -> None:
    operator = find_operator(identity)
    cases = detection.unseen_cases(operator, dtype)
    everywhere = (*operator.cases, *operator.general_probes)
    for axis, sizes in detection.UNSEEN.items():
        assert not set(sizes) & set(operator.variety[axis])
        assert not {case.sizes[axis] for case in everywhere if axis == "head_dim"} & set(sizes)
        assert {case.sizes[axis] for case in cases} == set(sizes)
    assert {case.dtype for case in cases} == {dtype}
    assert not any(case.layouts for case in cases)
    assert max(output_elements(operator, case.sizes) for case in cases) <= 500_000
    # Each stands for a probe of its own, and the large caches and many batches are among them.
    names = [detection.template(case) for case in cases]
    assert len(names) == len(set(names)) > 40
    assert {"long-cache", "many-batches", "ties", "random"} <= set(names)


def test_every_second_case_is_half_of_the_cases() -> None:
    operator = find_operator(FORWARD)
    whole = detection.unseen_cases(operator, "float16")
    assert detection.unseen_cases(operator, "float16", every=2) == whole[::2]


def test_legal_cases_hold_the_hard_roundings_and_sums_over_heads_of_a_backward() -> None:
    backward = detection.legal_cases(find_operator("kv_rope.static.backward"), "bfloat16")
    names = {detection.template(case) for case in backward}
    assert {"random", "ties", "cancellation", "subnormal", "huge", "head-cancellation"} <= names
    assert not any(name.startswith("head-dim") for name in names)
    forward = detection.legal_cases(find_operator(FORWARD), "bfloat16")
    assert not any(case.kind.startswith("head_") for case in forward)


@pytest.mark.parametrize("identity", detection.OPERATORS)
def test_the_honest_case_has_enough_clusters_for_the_mean_test(identity: str) -> None:
    operator = find_operator(identity)
    counts = detection.judge_honest(operator, detection.honest_case(operator, "bfloat16"), (5,))
    legal = [variant.name for variant in operator.variants if variant.legal]
    assert list(counts) == legal
    assert {count["judged"] for count in counts.values()} == {1}
    # No scheme explains a kernel that stores every second token's products only.
    assert counts["odd-tokens-stored"]["means_tested"] > 0
    assert counts["odd-tokens-stored"]["fewest_clusters"] >= 640
    assert not any(count["rejected"] or count["alarms"] for count in counts.values())


def test_tasks_cover_all_that_was_asked_for_once() -> None:
    arguments = detection.parse(
        ["--operators", FORWARD, "--dtypes", "bfloat16", "float32", "--honest-seeds", "250"]
    )
    tasks = detection.make_tasks(arguments)
    assert [(t.part, t.dtype) for t in tasks if t.part in ("general", "official")] == [
        ("official", "bfloat16"),
        ("general", "bfloat16"),
        ("general", "float32"),
    ]
    honest = [task for task in tasks if task.part == "honest"]
    assert sorted(seed for task in honest for seed in task.seeds) == list(
        range(detection.SEED, detection.SEED + 250)
    )
    legal = [task for task in tasks if task.part == "legal"]
    assert {len(task.seeds) for task in legal} == {50}
    assert {task.dtype for task in legal} == {"bfloat16", "float32"}


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_the_order_of_the_tasks(processes: int) -> None:
    threads = torch.get_num_threads()
    try:
        assert detection.run_tasks(abs, [-3, 2, -1], processes) == [3, 2, 1]
    finally:
        torch.set_num_threads(threads)


# The page on detection


def variant(name: str, outcome: str = "caught", **changes: Any) -> dict[str, Any]:
    first = {"case": "random", "seed": 1, "status": "wrong_values", "output": "out"}
    return {
        "name": name,
        "kind_of_its_own": outcome in ("caught", "missed"),
        "outcome": outcome,
        "same_as": "",
        "first": {**first, "region": "all", "wrong": 12345} if outcome == "caught" else None,
        "caught_in": 4 if outcome == "caught" else 0,
        "named": name,
        "named_rightly": True,
        "named_roughly": name,
        "roughly_rightly": True,
        **changes,
    }


def wrong_part(*variants: Mapping[str, Any], **corruptions: str) -> dict[str, Any]:
    return {
        "part": "general",
        "operator": "some.operator",
        "dtype": "bfloat16",
        "cases": ["random", "ties"],
        "seeds": [1],
        "seconds": 1.0,
        "kinds": 3,
        "caught": 2,
        "named": 1,
        "roughly_named": 0,
        "variants": list(variants),
        "corruptions": {"caught": 7, "missed": len(corruptions)},
        "corruptions_not_caught": corruptions,
    }


def record(*results: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "environment": {"cpu": "a CPU", "torch": "2.0"},
        "processes": 3,
        "every": 1,
        "seconds": 7.0,
        **detection.merge(results),
    }


def legal_part(case: str, rejected: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    one = {"name": "eager", "judged": 2, "changed": 1, "rejected": list(rejected)}
    key = {"part": "legal", "operator": "some.operator", "dtype": "float16"}
    return {**key, "cases": [case], "seeds": [1, 2], "legal": [one]}


def honest_part(seed: int, **changes: int) -> dict[str, Any]:
    counts = {"judged": 1, "rejected": 0, "means_tested": 1, "alarms": 0, "fewest_clusters": 680}
    key = {"part": "honest", "operator": "some.operator", "dtype": "float16"}
    return {
        **key,
        "cases": ["honest"],
        "seeds": [seed],
        "kernels": {"eager": {**counts, **changes}},
    }


def test_all_that_is_missed_or_falsely_rejected_is_a_failure_by_name() -> None:
    catch = {"case": "ties", "seed": 2, "output": "out", "wrong": 3}
    whole = record(
        wrong_part(variant("one"), variant("other", "missed"), **{"out.stale": "missed"}),
        legal_part("ties", [catch]),
        honest_part(1, alarms=1, rejected=1),
    )
    lines = detection.failures(whole)
    assert len(lines) == 4
    text = "\n".join(lines)
    assert "other missed" in text
    assert "corruption out.stale missed" in text
    assert "eager rejected in ties, seed 2" in text
    assert "honest kernel eager rejected for 1 of 1 seeds, 1 mean alarms" in text
    assert all(f"- {line}" in detection.markdown(whole) for line in lines)


def test_nothing_missed_is_no_failure_whatever_changes_nothing() -> None:
    whole = record(
        wrong_part(variant("one"), variant("two", "unchanged"), **{"out.rolled": "unchanged"}),
        legal_part("ties"),
        honest_part(1),
    )
    assert detection.failures(whole) == []
    page = detection.markdown(whole)
    assert "`two` (unchanged)" in page
    assert "| some.operator | bfloat16 | general | 2 | 3 | 2 | 1 (33.3 %) | 0 (0.0 %) | 7 |" in page


def test_a_misnamed_kind_is_listed_with_what_it_was_named() -> None:
    wrong = variant("one", named="two", named_rightly=False)
    nothing = variant("three", named="", named_rightly=False)
    copy = variant("four", named="two", named_rightly=False, kind_of_its_own=False)
    lines = detection.misnamed(record(wrong_part(wrong, nothing, copy)))
    assert [line.split(": ", 1)[1] for line in lines] == [
        "`one` named `two`",
        "`three` named nothing",
    ]


def test_truncation_has_a_line_with_elements_case_and_name() -> None:
    caught = variant(detection.TRUNCATION, named="ties-to-zero")
    (line,) = detection.truncation(record(wrong_part(caught)))
    assert "caught by 12,345 elements of out in case random" in line
    assert line.endswith("named `ties-to-zero`")
    (line,) = detection.truncation(record(wrong_part(variant("one"))))
    assert line.endswith("not caught")


def test_results_of_several_tasks_add_up() -> None:
    whole = record(
        legal_part("ties"),
        legal_part("huge", [{"case": "huge", "seed": 1, "output": "out", "wrong": 1}]),
        honest_part(1, fewest_clusters=0, means_tested=0),
        honest_part(2, fewest_clusters=700),
        honest_part(3, fewest_clusters=650, alarms=1),
    )
    (legal,), (honest,) = whole["legal"], whole["honest"]
    assert (legal["cases"], legal["seeds"]) == (["ties", "huge"], [1, 2])
    assert legal["variants"]["eager"]["judged"] == 4
    assert len(legal["variants"]["eager"]["rejected"]) == 1
    assert honest["variants"]["eager"] == {
        "judged": 3,
        "rejected": 0,
        "means_tested": 2,
        "alarms": 1,
        "fewest_clusters": 650,
    }


def test_a_tiny_run_of_the_detection_report_writes_what_it_found(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    options = ["--operators", FORWARD, "--dtypes", "bfloat16", "--every", "60"]
    seeds = ["--legal-seeds", "1", "--honest-seeds", "1", "--processes", "1"]
    try:
        assert detection.main([*options, *seeds, "--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    data = json.loads((tmp_path / "detection.json").read_text(encoding="utf-8"))
    assert [one["part"] for one in data["wrong"]] == ["general", "official"]
    general = data["wrong"][0]
    assert 0 < general["kinds"] == general["caught"]
    assert data["legal"][0]["variants"]["eager"]["judged"] == 1
    page = (tmp_path / "detection.md").read_text(encoding="utf-8")
    assert page == detection.markdown(data)
    assert "A selection: one case in 60." in page


# The rules


def outputs(*values: float) -> dict[str, Tensor]:
    return {"out": torch.tensor(values, dtype=torch.bfloat16)}


RULES = [*comparison.RULES]


@pytest.mark.parametrize("rule", RULES)
def test_rules_accept_what_is_equal_but_not_nan(rule: str) -> None:
    accepts = comparison.RULES[rule]
    assert accepts(outputs(1.0, -2.0), outputs(1.0, -2.0))
    assert not accepts(outputs(1.0, float("nan")), outputs(1.0, float("nan")))
    assert not accepts(outputs(*[3.0] * 99, 0.0), outputs(*[4.0] * 100))


def test_only_sol_execbench_lets_one_element_in_a_hundred_be_wrong() -> None:
    wrong, right = outputs(*[1.0] * 99, 7.0), outputs(*[1.0] * 100)
    accepting = [rule for rule in RULES if comparison.RULES[rule](wrong, right)]
    assert accepting == ["SOL-ExecBench"]
    worse = outputs(*[1.0] * 98, 7.0, 7.0)
    assert not comparison.accepted_by_sol_execbench(worse, right)


def test_only_assert_close_sees_a_small_absolute_error() -> None:
    accepting = [r for r in RULES if comparison.RULES[r](outputs(0.0), outputs(0.008))]
    assert accepting == ["SOL-ExecBench", "KernelBench"]


def test_infinities_are_accepted_by_the_rules_that_compare_them_alone() -> None:
    infinite = outputs(float("inf"), 1.0)
    accepting = [rule for rule in RULES if comparison.RULES[rule](infinite, infinite)]
    assert accepting == ["assert_close", "KernelBench"]


def test_every_wrong_variant_belongs_to_one_group() -> None:
    for identity in detection.OPERATORS:
        for wrong in find_operator(identity).variants:
            if not wrong.legal:
                found = [group for group, names in comparison.GROUPS.items() if wrong.name in names]
                assert found == [comparison.group_of(wrong.name)]


def test_suite_cases_are_the_smallest_ones() -> None:
    operator = find_operator(FORWARD)
    sizes = [output_elements(operator, case.sizes) for case in comparison.suite_cases(operator, 16)]
    assert sizes == sorted(sizes)
    assert len(sizes) == 16


def test_eager_outputs_are_those_of_the_variant_called_eager() -> None:
    operator = find_operator(FORWARD)
    inputs = make_inputs(operator.case("random"), 3, operator=operator)
    eager = next(one for one in operator.variants if one.name == "eager")
    expected = compute_variant(operator, eager, inputs)
    for name, out in comparison.eager_outputs(operator, inputs).items():
        assert torch.equal(out, expected[name])


# The page on the comparison


def result(place: str, case: str, judged: Mapping[str, tuple[Sequence[str], bool]]) -> Any:
    """Return a result in which every variant of the forward has outputs of its own.

    ``judged`` gives for some variants the other rules that reject them, and whether ours does.
    """
    names = [one.name for one in find_operator(FORWARD).variants]
    return {
        "place": place,
        "operator": FORWARD,
        "case": case,
        "seed": 1,
        "usable": RULES[:2],
        "judged": {name: name for name in names},
        "outputs": {
            name: {
                "rejected_by": list(judged.get(name, ((), False))[0]),
                "rejected_by_ours": judged.get(name, ((), False))[1],
                "wrong": judged.get(name, ((), False))[1],
            }
            for name in names
        },
    }


def test_a_rule_that_rejects_legal_variants_catches_nothing_without_false_rejections() -> None:
    operator = find_operator(FORWARD)
    one, two, *_ = (v.name for v in operator.variants if not v.legal)
    everything = {one: (RULES[:1], True), two: (RULES[:2], True), "eager": (RULES[:1], False)}
    results = [result("suite", "small", everything), result("probes", "random", {one: ((), True)})]
    summary = comparison.summarize(operator, results)
    assert list(summary["kinds"]) == [one, two]
    close, sol, bench = (summary["rules"][rule] for rule in RULES)
    assert close["suite"]["caught"] == 2
    assert close["suite"]["legal_rejected"] == {"eager": 1}
    assert close["suite, selected"] == {
        "inputs": 0,
        "caught": 0,
        "missed": [one, two],
        "legal_rejected": {},
    }
    assert sol["suite, selected"]["missed"] == [one]
    assert bench["suite"]["inputs"] == 0
    ours = summary["rules"][comparison.OURS]
    assert ours["suite"]["caught"] == 2
    assert ours["probes"]["missed"] == [two]
    # Ours has to catch it on the probes.
    assert comparison.missed_by_all_others(summary, comparison.SELECTED) == [one]
    assert not comparison.is_sound({"operators": [summary]})


def test_variants_of_equal_outputs_are_one_kind() -> None:
    operator = find_operator(FORWARD)
    one, two, three, *_ = (v.name for v in operator.variants if not v.legal)
    single = result("probes", "random", dict.fromkeys((one, two, three), ((), True)))
    single["judged"][two] = one
    summary = comparison.summarize(operator, [single])
    assert list(summary["kinds"]) == [one, three]
    assert comparison.is_sound({"operators": [summary]})


def test_a_tiny_run_of_the_comparison_report_writes_what_it_found(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    few = ["--suite-cases", "1", "--suite-seeds", "1", "--probe-seeds", "1", "--every", "20"]
    options = ["--operators", FORWARD, "--processes", "1", "--out", str(tmp_path)]
    try:
        assert comparison.main([*few, *options]) == 0
    finally:
        torch.set_num_threads(threads)
    data = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    (one,) = data["operators"]
    ours, sol = one["rules"][comparison.OURS], one["rules"]["SOL-ExecBench"]
    assert ours["probes"]["caught"] == len(one["kinds"]) > 30
    assert ours["probes"]["legal_rejected"] == {}
    assert sol["suite"]["caught"] < ours["suite"]["caught"]
    page = (tmp_path / "comparison.md").read_text(encoding="utf-8")
    assert page == comparison.markdown(data)
