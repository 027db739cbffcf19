"""Compare the judge with the rules that kernels are usually judged by.

    python reports/comparison.py                 write comparison.json and comparison.md beside this
    python reports/comparison.py --out FOLDER    write them there
    python reports/comparison.py --every 8 --suite-cases 1 --suite-seeds 1 --processes 2
                                                 a small selection, for two cores

The wrong and legal variants of all four operators, in bfloat16, before four rules: ours and three
that compare with the eager reference in bfloat16. Every rule is tried on the smallest cases of the
suites, as such judges use them, and on our probes. Who catches what, who rejects what is legal?

It takes about two minutes on 16 cores.
Exit status 0: ours catches every wrong kind and rejects nothing legal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oracle.certified import truth
from oracle.comparison import compare
from oracle.definition import Case, Operator
from oracle.diagnosis import compute_variant, judge_elements
from oracle.domain import output_elements
from oracle.inputs import make_inputs
from oracle.machine import environment
from oracle.operators import find_operator
from oracle.operators.kv_rope.variants import arithmetic, caches, copies, heads, rotations, rows
from reports.detection import (
    CONTRACT,
    SEED,
    add_shared_arguments,
    digest,
    measured_on,
    run_tasks,
    table,
    write,
)

DTYPE = torch.bfloat16

Tensors = Mapping[str, torch.Tensor]
Place = Literal["suite", "probes"]
PLACES: tuple[Place, ...] = ("suite", "probes")
SELECTED = ("suite, selected", "probes, selected")
FOUR = ("suite", "suite, selected", "probes", "probes, selected")
OURS = "kernel-oracle"


# Rules: whether outputs are accepted, given those of the eager reference.


def accepted_by_assert_close(actual: Tensors, eager: Tensors) -> bool:
    """torch.testing.assert_close with its defaults: for bfloat16 1e-5 + 1.6e-2 |ref|, no NaN."""
    for name, expected in eager.items():
        try:
            torch.testing.assert_close(actual[name], expected)
        except AssertionError:
            return False
    return True


def accepted_by_sol_execbench(actual: Tensors, eager: Tensors) -> bool:
    """SOL-ExecBench's default: 99 % of each output within 1e-2 + 1e-2 |ref|, all finite."""
    for name, expected in eager.items():
        got, wanted = actual[name].to(torch.float32), expected.to(torch.float32)
        if not bool(got.isfinite().all() and wanted.isfinite().all()):
            return False
        within = (got - wanted).abs() <= 1e-2 + 1e-2 * wanted.abs()
        if within.numel() and int(within.sum()) < 0.99 * within.numel():
            return False
    return True


def accepted_by_kernelbench(actual: Tensors, eager: Tensors) -> bool:
    """KernelBench's for 16 bits: torch.allclose(reference, candidate, atol=1e-2, rtol=1e-2)."""
    return all(
        torch.allclose(expected, actual[name], atol=1e-2, rtol=1e-2)
        for name, expected in eager.items()
    )


RULES: Mapping[str, Callable[[Tensors, Tensors], bool]] = {
    "assert_close": accepted_by_assert_close,
    "SOL-ExecBench": accepted_by_sol_execbench,
    "KernelBench": accepted_by_kernelbench,
}

GROUPS: Mapping[str, frozenset[str]] = {
    title: frozenset(kind.name for kind in module.FAULTS)
    for title, module in (
        ("rotation and tables", rotations),
        ("rows and positions", rows),
        ("caches", caches),
        ("head sums and table gradients", heads),
        ("copies", copies),
        ("arithmetic", arithmetic),
    )
}
"""The kinds of faults, by the module that defines them."""


def group_of(variant: str) -> str:
    """Return the group of a wrong variant."""
    return next(group for group, names in GROUPS.items() if variant in names)


# Doing it


@dataclass(frozen=True)
class Task:
    """All variants before all rules on one case.

    Attributes:
        place: what the case belongs to.
        operator: the operator's id.
        case: the case.
        seed: of its inputs.
    """

    place: Place
    operator: str
    case: Case
    seed: int


def suite_cases(operator: Operator, count: int) -> list[Case]:
    """Return the smallest cases of the operator's suite."""
    cases = [case for suite in operator.suites for case in suite.cases]
    return sorted(cases, key=lambda case: output_elements(operator, case.sizes))[:count]


def make_tasks(arguments: argparse.Namespace) -> list[Task]:
    """Return all that is to be done, the long tasks first."""
    tasks = []
    for name in arguments.operators:
        operator = find_operator(name)
        places: tuple[tuple[Place, Sequence[Case], int], ...] = (
            ("suite", suite_cases(operator, arguments.suite_cases), arguments.suite_seeds),
            ("probes", operator.probes[:: arguments.every], arguments.probe_seeds),
        )
        for place, cases, seeds in places:
            tasks += [
                (output_elements(operator, case.sizes), Task(place, name, case, SEED + number))
                for case in cases
                for number in range(seeds)
            ]
    return [task for _, task in sorted(tasks, key=lambda pair: -pair[0])]


def run_task(task: Task) -> dict[str, Any]:
    """Put all variants of an operator to all rules and return plain data."""
    operator = find_operator(task.operator)
    inputs = make_inputs(task.case, task.seed, operator=operator)
    eager = eager_outputs(operator, inputs)
    usable = [name for name, accepts in RULES.items() if accepts(eager, eager)]
    right = digest(truth(operator, inputs).outputs)
    known: dict[str, dict[str, Any]] = {}
    judged: dict[str, str] = {}
    for variant in operator.variants:
        outputs = compute_variant(operator, variant, inputs)
        key = digest(outputs)
        judged[variant.name] = key.hex()
        if key.hex() not in known:
            known[key.hex()] = {
                "rejected_by": [name for name in usable if not RULES[name](outputs, eager)],
                **judge(operator, task.case, inputs, outputs, is_right=key == right),
            }
    return {
        "place": task.place,
        "operator": task.operator,
        "case": task.case.name,
        "seed": task.seed,
        "usable": usable,
        "judged": judged,
        "outputs": known,
    }


def eager_outputs(operator: Operator, inputs: Tensors) -> dict[str, torch.Tensor]:
    """Return what PyTorch makes of the definition in bfloat16, without compiling."""
    outputs = operator.reference([inputs[spec.name] for spec in operator.inputs], DTYPE)
    return {spec.name: out for spec, out in zip(operator.outputs, outputs, strict=True)}


def judge(
    operator: Operator, case: Case, inputs: Tensors, outputs: Tensors, is_right: bool
) -> dict[str, bool]:
    """Return whether ours rejects the outputs, and whether they are beyond the contract."""
    if is_right:
        return {"rejected_by_ours": False, "wrong": False}
    comparison = compare(operator, inputs, outputs, CONTRACT, random=case.random)
    if comparison.status not in ("passed", "empty_ok"):
        return {"rejected_by_ours": True, "wrong": True}
    # What the comparison accepts is judged a second time, by other code.
    beyond = any(
        bool(judge_elements(operator, inputs, spec, outputs[spec.name], CONTRACT).wrong.any())
        for spec in operator.outputs
    )
    return {"rejected_by_ours": False, "wrong": beyond}


# Putting it together


def summarize(operator: Operator, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what each rule caught, missed and falsely rejected for one operator.

    A wrong variant is a kind if it is beyond the contract on some input and its outputs differ
    from those of all earlier variants. A rule is used only on inputs where it accepts the eager
    reference compared with itself. ``probes, selected`` are the probes where it also accepts every
    legal variant, and ``suite, selected`` such cases of the suite.
    """
    wrong = [variant.name for variant in operator.variants if not variant.legal]
    legal = [variant.name for variant in operator.variants if variant.legal]
    kinds = _kinds(wrong, results)
    by_place = {
        place: [result for result in results if result["place"] == place] for place in PLACES
    }
    rules: dict[str, dict[str, Any]] = {}
    for rule in (*RULES, OURS):
        rules[rule] = {}
        for place, chosen in by_place.items():
            selected = _without_false_alarms(chosen, rule, legal)
            rules[rule][place] = _outcome(chosen, rule, kinds, legal)
            rules[rule][f"{place}, selected"] = _outcome(selected, rule, kinds, legal)
    return {
        "operator": operator.id,
        "wrong_variants": len(wrong),
        "legal": legal,
        "kinds": {name: group_of(name) for name in kinds},
        "inputs": {place: len(chosen) for place, chosen in by_place.items()},
        "cases": {
            place: list(dict.fromkeys(result["case"] for result in chosen))
            for place, chosen in by_place.items()
        },
        "seeds": {
            place: sorted({result["seed"] for result in chosen})
            for place, chosen in by_place.items()
        },
        "rules": rules,
    }


def _kinds(wrong: Iterable[str], results: Sequence[Mapping[str, Any]]) -> list[str]:
    kinds: dict[tuple[str, ...], str] = {}
    for name in wrong:
        if any(_judged(result, name)["wrong"] for result in results):
            kinds.setdefault(tuple(result["judged"][name] for result in results), name)
    return list(kinds.values())


def _judged(result: Mapping[str, Any], variant: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = result["outputs"][result["judged"][variant]]
    return found


def _rejects(result: Mapping[str, Any], rule: str, variant: str) -> bool:
    judged = _judged(result, variant)
    return judged["rejected_by_ours"] if rule == OURS else rule in judged["rejected_by"]


def _is_usable(result: Mapping[str, Any], rule: str) -> bool:
    return rule == OURS or rule in result["usable"]


def _without_false_alarms(
    results: Iterable[Mapping[str, Any]], rule: str, legal: Sequence[str]
) -> list[Mapping[str, Any]]:
    """Return the results of cases where the rule accepts every legal variant with every seed."""
    results = list(results)
    alarming = {
        result["case"]
        for result in results
        if any(_rejects(result, rule, variant) for variant in legal)
    }
    return [result for result in results if result["case"] not in alarming]


def _outcome(
    results: Sequence[Mapping[str, Any]], rule: str, kinds: Sequence[str], legal: Sequence[str]
) -> dict[str, Any]:
    used = [result for result in results if _is_usable(result, rule)]

    def rejected(names: Sequence[str]) -> list[str]:
        return [name for name in names if any(_rejects(result, rule, name) for result in used)]

    caught = rejected(kinds)
    return {
        "inputs": len(used),
        "caught": len(caught),
        "missed": [name for name in kinds if name not in caught],
        "legal_rejected": {
            name: sum(_rejects(result, rule, name) for result in used) for name in rejected(legal)
        },
    }


def missed_by_all_others(one: Mapping[str, Any], places: Sequence[str]) -> list[str]:
    """Return the kinds that ours catches on the probes and no other rule in any of the places."""
    ours = set(one["rules"][OURS]["probes"]["missed"])
    return [
        name
        for name in one["kinds"]
        if name not in ours
        and all(name in one["rules"][rule][place]["missed"] for rule in RULES for place in places)
    ]


def is_sound(record: Mapping[str, Any]) -> bool:
    """Whether ours caught every kind and rejected nothing legal, anywhere."""
    return all(
        not ours["probes"]["missed"] and not any(ours[place]["legal_rejected"] for place in PLACES)
        for ours in (one["rules"][OURS] for one in record["operators"])
    )


# Writing

COLUMNS = (
    "operator",
    "rule",
    "wrong kinds",
    "caught on the suite",
    "without false rejections",
    "caught on our probes",
    "without false rejections",
    "legal variants",
    "rejected on the suite",
    "rejected on our probes",
    "inputs used: suite",
    "without false rejections",
    "our probes",
    "without false rejections",
)
INTRODUCTION = """
- *assert_close*: `torch.testing.assert_close` with its defaults (bfloat16: 1e-5 + 1.6e-2 |ref|;
  NaN equals nothing).
- *SOL-ExecBench*: its published default, 99 % of the elements of each output within
  1e-2 + 1e-2 |ref|, and all finite.
- *KernelBench*: `torch.allclose` with atol = rtol = 1e-2.
- *kernel-oracle*: every element within `stored_intermediates` of the exact answer, and the mean
  test.

The first three compare with the eager reference in bfloat16. *Suite*: the smallest cases of the
operator's suite. *Our probes*: those of the official domain. A rule is used only on inputs where it
accepts the reference compared with itself (not where the right answer is NaN). Where a rule rejects
right kernels too, catching a wrong one says little: *without false rejections* counts only the
cases on which the rule accepts every legal variant with every seed.

A wrong kind differs from the right answer beyond the contract on some of these inputs, and from all
other kinds. Caught or rejected: on one input at least."""


def markdown(record: Mapping[str, Any]) -> str:
    """Return the page, a function of the record alone."""
    lines = [
        "# The judge beside usual rules",
        "",
        "Written by `python reports/comparison.py`; the raw figures are in `comparison.json`.",
        measured_on(record),
        *INTRODUCTION.splitlines(),
        "",
        "## Caught and falsely rejected",
        "",
        *table(COLUMNS, 2, _rule_rows(record)),
        "",
        "## By kind of fault",
        "",
        "Kinds caught, all operators together: on the suite / on its cases without false",
        "rejections / on our probes / on those without false rejections.",
        "",
        *table(("fault", "wrong kinds", *RULES, OURS), 1, _group_rows(record)),
        "",
        "## Missed by every other rule on the suite, caught by ours on our probes",
        "",
        "On the cases of the suite where the rule rejects no legal variant.",
        "",
        *_list_lines(record, SELECTED[:1]),
        "",
        "## Missed by every other rule on the suite and on our probes, caught by ours",
        "",
        "On the cases and probes where the rule rejects no legal variant.",
        "",
        *_list_lines(record, SELECTED),
        "",
        "## Legal variants rejected",
        "",
        *_rejection_lines(record),
        "",
        "## Missed by ours",
        "",
        *_own_misses(record),
        "",
    ]
    return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / whole:.0f} %)" if whole else "0"


def _rule_rows(record: Mapping[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = []
    for one in record["operators"]:
        kinds = len(one["kinds"])
        for rule, found in one["rules"].items():
            rows.append(
                [
                    one["operator"],
                    rule,
                    kinds,
                    *(_share(found[place]["caught"], kinds) for place in FOUR),
                    len(one["legal"]),
                    *(len(found[place]["legal_rejected"]) for place in PLACES),
                    *(
                        f"{found[place]['inputs']} of {one['inputs'][place.split(',')[0]]}"
                        for place in FOUR
                    ),
                ]
            )
    return rows


def _group_rows(record: Mapping[str, Any]) -> list[list[object]]:
    return [_group_row(record, group) for group in GROUPS]


def _group_row(record: Mapping[str, Any], group: str) -> list[object]:
    def caught(rule: str, place: str) -> int:
        return sum(
            of == group and name not in one["rules"][rule][place]["missed"]
            for one in record["operators"]
            for name, of in one["kinds"].items()
        )

    kinds = sum(of == group for one in record["operators"] for of in one["kinds"].values())
    cells = [" / ".join(str(caught(rule, place)) for place in FOUR) for rule in (*RULES, OURS)]
    return [group, kinds, *cells]


def _list_lines(record: Mapping[str, Any], places: Sequence[str]) -> list[str]:
    lines = []
    for one in record["operators"]:
        names = missed_by_all_others(one, places)
        listed = ", ".join(f"`{name}`" for name in names)
        lines.append(
            f"- {one['operator']}: {len(names)} of {len(one['kinds'])} kinds"
            + (f": {listed}" if names else "")
        )
    return lines


def _rejection_lines(record: Mapping[str, Any]) -> list[str]:
    return [
        f"- {one['operator']}, {rule}, {place}: {_rejected(one['legal'], found[place])}"
        for one in record["operators"]
        for rule, found in one["rules"].items()
        for place in PLACES
        if found[place]["legal_rejected"]
    ] or ["- none"]


def _rejected(legal: Sequence[str], found: Mapping[str, Any]) -> str:
    """Name the rejected variants, or those that are not if that is shorter."""
    rejected = found["legal_rejected"]
    accepted = [name for name in legal if name not in rejected]
    exceptions = 2 * len(accepted) < len(legal)
    names = ", ".join(f"`{name}`" for name in (accepted if exceptions else rejected))
    prefix = "all but " if exceptions and accepted else "all" if exceptions else ""
    most = max(rejected.values())
    return f"{prefix}{names} (one of them on {most} of {found['inputs']} inputs)"


def _own_misses(record: Mapping[str, Any]) -> list[str]:
    return [
        f"- {one['operator']}: `{name}`"
        for one in record["operators"]
        for name in one["rules"][OURS]["probes"]["missed"]
    ] or ["- nothing"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="The judge beside usual rules.")
    add_shared_arguments(parser)
    parser.add_argument("--suite-cases", type=int, default=3, metavar="N", help="the N smallest")
    parser.add_argument("--suite-seeds", type=int, default=5, metavar="N")
    parser.add_argument("--probe-seeds", type=int, default=2, metavar="N")
    return parser.parse_args(arguments)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do everything and return the record."""
    started = time.perf_counter()
    results = run_tasks(run_task, make_tasks(arguments), arguments.processes)
    summaries = [
        summarize(find_operator(name), [result for result in results if result["operator"] == name])
        for name in arguments.operators
    ]
    return {
        "environment": environment(),
        "processes": arguments.processes,
        "every": arguments.every,
        "seconds": round(time.perf_counter() - started, 1),
        "contract": CONTRACT,
        "seed": SEED,
        "operators": summaries,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write, and return 0 if ours missed nothing and rejected nothing legal."""
    parsed = parse(arguments)
    record = measure(parsed)
    write(Path(parsed.out), "comparison", record, markdown(record))
    return 0 if is_sound(record) else 1


if __name__ == "__main__":
    sys.exit(main())
