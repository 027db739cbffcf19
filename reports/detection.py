"""Measure what the judge detects on sizes and seeds that its catalogue was not made with.

    python reports/detection.py                  write detection.json and detection.md beside this
    python reports/detection.py --out FOLDER     write them there
    python reports/detection.py --every 8 --legal-seeds 2 --honest-seeds 40 --processes 2
                                                 a small selection, for two cores

1. Every wrong variant and generic corruption of each operator, in each type, on cases of the
   general domain whose head_dim and num_kv_heads are tried nowhere else; in bfloat16 also on the
   official domain. Is it caught, and does the diagnosis name it?
2. Every legal variant on the inputs where rounding is hardest, under many seeds. Is any rejected?
3. The legal variants, among them kernels of every rounding scheme and order of heads, on random
   inputs with enough clusters for the mean test, under very many seeds. Any false alarm?

It takes about six minutes on 16 cores.
Exit status 0: all that is wrong was caught, and nothing legal was rejected.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oracle.comparison import Comparison, compare
from oracle.definition import FLOATING_DTYPES, Case, Operator
from oracle.detection import Catch, Detection, detect
from oracle.diagnosis import compute_variant
from oracle.domain import domain_cases, output_elements, read_domain
from oracle.inputs import make_inputs
from oracle.machine import environment
from oracle.operators import find_operator

OPERATORS = (
    "kv_rope.concat.forward",
    "kv_rope.concat.backward",
    "kv_rope.static.forward",
    "kv_rope.static.backward",
)
SEED = 20261201
UNSEEN: Mapping[str, tuple[int, ...]] = {"head_dim": (48, 80), "num_kv_heads": (4, 7)}
"""Sizes that no probe and no variety of the operators has."""

MOST_ELEMENTS = 60_000
"""Of a probe in several sizes, the first one with so few output elements is taken."""

MOST_ELEMENTS_OF_THE_SMALLEST = 500_000
"""A probe that is larger in all sizes is taken in its smallest one, up to this."""

LEGAL_KINDS = ("ties", "near_ties", "cancellation", "subnormal", "huge", "special_rotations")

HONEST_SIZES = {"batch_size": 1, "num_kv_heads": 4, "new_seq_len": 17, "head_dim": 80}
"""17 tokens times 40 pairs of columns: 680 clusters."""

HONEST_SEEDS_PER_TASK = 100
TRUNCATION = "truncated-instead-of-rounded"
CONTRACT: Literal["stored_intermediates"] = "stored_intermediates"

Part = Literal["general", "official", "legal", "honest"]
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Task:
    """What one process does at a time.

    Attributes:
        part: wrong variants on the ``general`` or ``official`` domain, or ``legal`` variants, or
            the ``honest`` kernels before the mean test.
        operator: the operator's id.
        dtype: the cases' type.
        cases: what is tried.
        seeds: of the inputs.
    """

    part: Part
    operator: str
    dtype: str
    cases: tuple[Case, ...]
    seeds: tuple[int, ...]

    @property
    def weight(self) -> int:
        """Roughly how long it takes, to start the long ones first."""
        return {"general": 2, "official": 3, "legal": 1, "honest": 0}[self.part]


# What is tried


def template(case: Case) -> str:
    """Return the name of the probe that a case of the general domain was made from."""
    return case.name.split(".")[0]


def unseen_cases(operator: Operator, dtype: str, every: int = 1) -> tuple[Case, ...]:
    """Return cases of sizes that are tried nowhere else, one for each probe.

    Args:
        operator: whose cases.
        dtype: their floating type.
        every: 1 for all of them, 2 for every second one, and so on.

    Returns:
        Cases with plain inputs. Those that differ from an earlier one in the random draws alone
        are left out, and so are those that are large in all sizes.
    """
    domain = read_domain(operator, "general", {**UNSEEN, "dtype": dtype})
    by_template: dict[str, list[Case]] = {}
    for case in domain_cases(operator, domain):
        if case.group == "probes" and not case.layouts:
            by_template.setdefault(template(case), []).append(case)
    chosen: dict[tuple[object, ...], Case] = {}
    for cases in by_template.values():
        small = _small_one(operator, cases)
        if small is not None:
            alike = (small.kind, *sorted(small.sizes.items()), *sorted(small.broadcast.items()))
            chosen.setdefault(alike, small)
    return tuple(chosen.values())[::every]


def _small_one(operator: Operator, cases: Sequence[Case]) -> Case | None:
    """Return the first small case, else the smallest one unless that is large."""

    def elements(case: Case) -> int:
        return output_elements(operator, case.sizes)

    smallest = min(cases, key=elements)
    for case in (*cases, smallest):
        limit = MOST_ELEMENTS_OF_THE_SMALLEST if case is smallest else MOST_ELEMENTS
        if elements(case) <= limit:
            return case
    return None


def official_cases(operator: Operator, every: int = 1) -> tuple[Case, ...]:
    """Return the probes of the official domain."""
    return operator.probes[::every]


def legal_cases(operator: Operator, dtype: str, every: int = 1) -> tuple[Case, ...]:
    """Return an unseen case of every kind where rounding is hardest, and a random one."""
    by_kind: dict[str, Case] = {}
    for case in unseen_cases(operator, dtype):
        is_hard = case.kind in LEGAL_KINDS or case.kind.startswith("head_")
        if is_hard or template(case) == "random":
            by_kind.setdefault(case.kind, case)
    return tuple(by_kind.values())[::every]


def honest_case(operator: Operator, dtype: str) -> Case:
    """Return the case of the mean test: independent random inputs."""
    cache = {"current_seq_len": 3} if "current_seq_len" in _free_axes(operator) else {}
    cache |= {"max_seq_len": 19} if "max_seq_len" in _free_axes(operator) else {}
    return Case(
        operator=operator.id,
        name="honest",
        group="reports",
        sizes=HONEST_SIZES | cache,
        kind=operator.case("random").kind,
        dtype=dtype,
        random=True,
        domain="general",
    )


def _free_axes(operator: Operator) -> set[str]:
    return {axis.name for axis in operator.axes if not axis.sum_of}


def make_tasks(arguments: argparse.Namespace) -> list[Task]:
    """Return all that is to be done, the long tasks first."""
    tasks: list[Task] = []
    legal_seeds = tuple(range(SEED, SEED + arguments.legal_seeds))
    honest_seeds = tuple(range(SEED, SEED + arguments.honest_seeds))
    for name in arguments.operators:
        operator = find_operator(name)
        for dtype in arguments.dtypes:
            cases = unseen_cases(operator, dtype, arguments.every)
            tasks.append(Task("general", name, dtype, cases, (SEED,)))
            tasks += (
                Task("legal", name, dtype, (case,), legal_seeds)
                for case in legal_cases(operator, dtype, arguments.every)
            )
            if dtype in arguments.honest_dtypes:
                case = honest_case(operator, dtype)
                starts = range(0, len(honest_seeds), HONEST_SEEDS_PER_TASK)
                chunks = [honest_seeds[at : at + HONEST_SEEDS_PER_TASK] for at in starts]
                tasks += (Task("honest", name, dtype, (case,), chunk) for chunk in chunks)
        if "bfloat16" in arguments.dtypes:
            cases = official_cases(operator, arguments.every)
            tasks.append(Task("official", name, "bfloat16", cases, (SEED,)))
    return sorted(tasks, key=lambda task: -task.weight)


# Doing it


def run_task(task: Task) -> dict[str, Any]:
    """Do a task and return plain data."""
    started = time.perf_counter()
    operator = find_operator(task.operator)
    if task.part == "honest":
        data: dict[str, Any] = {"kernels": judge_honest(operator, task.cases[0], task.seeds)}
    elif task.part == "legal":
        only_legal = replace(operator, variants=tuple(v for v in operator.variants if v.legal))
        detection = detect(only_legal, task.cases, (), legal_seeds=task.seeds, contract=CONTRACT)
        data = {"legal": [_legal_data(one) for one in detection.to_dict()["legal"]]}
    else:
        detection = detect(operator, task.cases, task.seeds, legal_seeds=(), contract=CONTRACT)
        data = wrong_data(detection)
    return {
        "part": task.part,
        "operator": task.operator,
        "dtype": task.dtype,
        "cases": [case.name for case in task.cases],
        "seeds": list(task.seeds),
        "seconds": round(time.perf_counter() - started, 1),
        **data,
    }


def wrong_data(detection: Detection) -> dict[str, Any]:
    """Return what became of wrong variants and corruptions, without what is alike everywhere."""
    whole = detection.to_dict()
    kinds = {variant.name for variant in detection.kinds}
    return {
        "kinds": whole["kinds"],
        "caught": whole["caught"],
        "named": whole["named"],
        "roughly_named": whole["roughly_named"],
        "variants": [
            {
                "name": variant.name,
                "kind_of_its_own": variant.name in kinds,
                "outcome": variant.outcome,
                "same_as": variant.same_as,
                "first": _catch_data(variant.first),
                "caught_in": len(variant.caught_in),
                "named": variant.named,
                "named_rightly": variant.named_rightly,
                "named_roughly": variant.named_roughly,
                "roughly_rightly": variant.roughly_rightly,
            }
            for variant in detection.variants
        ],
        "corruptions": dict(Counter(one.outcome for one in detection.corruptions)),
        "corruptions_not_caught": {
            one.name: one.outcome for one in detection.corruptions if one.outcome != "caught"
        },
    }


def _catch_data(catch: Catch | None) -> dict[str, Any] | None:
    return None if catch is None else dict(vars(catch))


def _legal_data(legal: Mapping[str, Any]) -> dict[str, Any]:
    return {name: legal[name] for name in ("name", "judged", "changed", "rejected")}


def judge_honest(operator: Operator, case: Case, seeds: Iterable[int]) -> dict[str, dict[str, int]]:
    """Judge every legal variant on random inputs, the mean test included.

    Returns:
        By variant: how often it was judged and rejected, how many means were tested, how many of
        these raised an alarm, and the fewest clusters of a mean.
    """
    variants = [variant for variant in operator.variants if variant.legal]
    counts = {variant.name: Counter[str]() for variant in variants}
    fewest: dict[str, int] = {}
    for seed in seeds:
        inputs = make_inputs(case, seed, operator=operator)
        known: dict[bytes, Comparison] = {}
        for variant in variants:
            outputs = compute_variant(operator, variant, inputs)
            # Equal outputs are judged alike, which is tested elsewhere.
            key = digest(outputs)
            if key not in known:
                known[key] = compare(operator, inputs, outputs, CONTRACT, random=True)
            means = [region.mean for region in known[key].regions if region.mean is not None]
            counts[variant.name].update(
                judged=1,
                rejected=known[key].status != "passed",
                means_tested=len(means),
                alarms=sum(mean.alarm for mean in means),
            )
            for mean in means:
                fewest[variant.name] = min(mean.clusters, fewest.get(variant.name, mean.clusters))
    return {
        name: {
            **{key: count[key] for key in ("judged", "rejected", "means_tested", "alarms")},
            "fewest_clusters": fewest.get(name, 0),
        }
        for name, count in counts.items()
    }


def digest(outputs: Mapping[str, torch.Tensor]) -> bytes:
    """Return a digest of all bits of all outputs."""
    result = hashlib.blake2b(digest_size=16)
    for tensor in outputs.values():
        result.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return result.digest()


def default_processes() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "process_cpu_count"):
        return os.process_cpu_count() or 1
    return len(os.sched_getaffinity(0))


def run_tasks(
    function: Callable[[_Task], _Result], tasks: Sequence[_Task], processes: int
) -> list[_Result]:
    """Do the tasks in several processes of one torch thread each, or here if one is enough.

    Returns:
        The results in the order of the tasks.
    """
    if processes == 1:
        _one_thread()
        results = []
        for done, task in enumerate(tasks):
            progress(done, len(tasks))
            results.append(function(task))
        progress(len(tasks), len(tasks))
        return results
    # Fresh interpreters, as a copy of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    by_place: dict[int, _Result] = {}
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_one_thread) as pool:
        places = {pool.submit(function, task): place for place, task in enumerate(tasks)}
        try:
            for future in as_completed(places):
                by_place[places[future]] = future.result()
                progress(len(by_place), len(tasks))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [by_place[place] for place in range(len(tasks))]


def _one_thread() -> None:
    torch.set_num_threads(1)


def progress(done: int, total: int) -> None:
    """Tell how far it is, on a terminal only."""
    if sys.stderr.isatty():
        print(
            f"\r{done} of {total} tasks done\033[K",
            end="\n" if done == total else "",
            file=sys.stderr,
            flush=True,
        )


# Putting it together


def merge(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Put the results of the tasks together: one entry for each part, operator and type."""
    wrong: list[dict[str, Any]] = []
    legal: dict[tuple[str, str], dict[str, Any]] = {}
    honest: dict[tuple[str, str], dict[str, Any]] = {}
    for result in results:
        key = (result["operator"], result["dtype"])
        if result["part"] in ("general", "official"):
            wrong.append(dict(result))
        elif result["part"] == "legal":
            _add_legal(legal.setdefault(key, _entry(key)), result)
        else:
            _add_honest(honest.setdefault(key, _entry(key)), result)
    wrong.sort(key=lambda one: (one["operator"], FLOATING_DTYPES.index(one["dtype"]), one["part"]))
    return {"wrong": wrong, "legal": list(legal.values()), "honest": list(honest.values())}


def _entry(key: tuple[str, str]) -> dict[str, Any]:
    return {"operator": key[0], "dtype": key[1], "cases": [], "seeds": [], "variants": {}}


def _add_places(entry: dict[str, Any], result: Mapping[str, Any]) -> None:
    for name in ("cases", "seeds"):
        entry[name] = list(dict.fromkeys((*entry[name], *result[name])))


def _add_legal(entry: dict[str, Any], result: Mapping[str, Any]) -> None:
    _add_places(entry, result)
    for one in result["legal"]:
        empty = {"judged": 0, "changed": 0, "rejected": []}
        known = entry["variants"].setdefault(one["name"], empty)
        known["judged"] += one["judged"]
        known["changed"] += one["changed"]
        known["rejected"] += one["rejected"]


def _add_honest(entry: dict[str, Any], result: Mapping[str, Any]) -> None:
    _add_places(entry, result)
    for name, counts in result["kernels"].items():
        known = entry["variants"].setdefault(name, dict.fromkeys(counts, 0))
        for key in ("judged", "rejected", "means_tested", "alarms"):
            known[key] += counts[key]
        found = [n for n in (known["fewest_clusters"], counts["fewest_clusters"]) if n]
        known["fewest_clusters"] = min(found, default=0)


def failures(record: Mapping[str, Any]) -> list[str]:
    """Return a line for everything that was missed or falsely rejected."""
    lines = []
    for one in record["wrong"]:
        where = f"{one['operator']}, {one['dtype']}, {one['part']} domain"
        lines += [
            f"{where}: wrong variant {variant['name']} missed"
            for variant in one["variants"]
            if variant["outcome"] == "missed"
        ]
        lines += [
            f"{where}: corruption {name} missed"
            for name, outcome in one["corruptions_not_caught"].items()
            if outcome == "missed"
        ]
    for one in record["legal"]:
        for name, counts in one["variants"].items():
            lines += [
                f"{one['operator']}, {one['dtype']}: legal variant {name} rejected in"
                f" {catch['case']}, seed {catch['seed']}: {catch['output']}, {catch['wrong']}"
                " elements"
                for catch in counts["rejected"]
            ]
    for one in record["honest"]:
        lines += [
            f"{one['operator']}, {one['dtype']}: honest kernel {name} rejected for"
            f" {counts['rejected']} of {counts['judged']} seeds, {counts['alarms']} mean alarms"
            for name, counts in one["variants"].items()
            if counts["rejected"] or counts["alarms"]
        ]
    return lines


def misnamed(record: Mapping[str, Any]) -> list[str]:
    """Return a line for every caught kind that its diagnosis does not name rightly."""
    return [
        f"{one['operator']}, {one['dtype']}, {one['part']} domain: `{variant['name']}`"
        f" named {_quoted(variant['named'])}"
        for one in record["wrong"]
        for variant in one["variants"]
        if variant["kind_of_its_own"]
        and variant["outcome"] == "caught"
        and not variant["named_rightly"]
    ]


def truncation(record: Mapping[str, Any]) -> list[str]:
    """Return a line for each operator and type: how truncation was caught."""
    lines = []
    for one in record["wrong"]:
        variant = next((v for v in one["variants"] if v["name"] == TRUNCATION), None)
        where = f"{one['operator']}, {one['dtype']}, {one['part']} domain"
        if variant is None or variant["first"] is None:
            lines.append(f"{where}: not caught")
            continue
        first = variant["first"]
        lines.append(
            f"{where}: caught by {first['wrong']:,} elements of {first['output']} in case"
            f" {first['case']}, the first of {variant['caught_in']} cases that catch it, named"
            f" {_quoted(variant['named'])}"
        )
    return lines


def _quoted(name: str) -> str:
    return f"`{name}`" if name else "nothing"


# Writing

WRONG_COLUMNS = (
    "operator",
    "type",
    "domain",
    "cases",
    "wrong kinds",
    "caught",
    "named rightly",
    "named rightly when rounded otherwise",
    "corruptions caught",
    "unchanged",
    "within the contract",
    "missed",
)
LEGAL_COLUMNS = (
    "operator",
    "type",
    "legal variants",
    "cases",
    "seeds",
    "judged",
    "not correctly rounded",
    "rejected",
)
HONEST_COLUMNS = (
    "operator",
    "type",
    "honest kernels",
    "seeds",
    "judged",
    "rejected",
    "means tested",
    "mean alarms",
    "fewest clusters",
)


def table(columns: Sequence[str], texts: int, rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table whose first columns are texts, the others numbers."""
    rule = ["---"] * texts + ["---:"] * (len(columns) - texts)
    return [f"| {' | '.join(map(str, cells))} |" for cells in (columns, rule, *rows)]


def markdown(record: Mapping[str, Any]) -> str:
    """Return the page, a function of the record alone."""
    sizes = ", ".join(f"{axis} {' or '.join(map(str, n))}" for axis, n in UNSEEN.items())
    lines = [
        "# What the judge detects",
        "",
        "Written by `python reports/detection.py`; the raw figures are in `detection.json`.",
        measured_on(record),
        "",
        "## Wrong variants and generic corruptions",
        "",
        f"*General*: {sizes}, sizes that no probe and no variety has.",
        f"*Official*: the probes of the official domain. Seed {SEED}.",
        "A wrong kind differs from the right outputs beyond the contract `stored_intermediates`",
        "and from all other kinds. *Rounded otherwise*: its computed elements were given errors",
        "as another implementation of the same fault would have. A corruption that is unchanged",
        "equals the right outputs in all cases; one within the contract differs, but legally.",
        "",
        *table(WRONG_COLUMNS, 3, map(_wrong_row, record["wrong"])),
        "",
        "## Truncation",
        "",
        *(f"- {line}" for line in truncation(record)),
        "",
        "## Legal variants",
        "",
        *table(LEGAL_COLUMNS, 2, map(_legal_row, record["legal"])),
        "",
        "## Honest kernels before the mean test",
        "",
        "The legal variants on independent random inputs. A mean is tested where no rounding",
        "scheme explains a kernel.",
        "",
        *table(HONEST_COLUMNS, 2, map(_honest_row, record["honest"])),
        "",
        "## Missed, or falsely rejected",
        "",
        *(f"- {line}" for line in failures(record) or ["nothing"]),
        "",
        "## Caught, but not named rightly",
        "",
        *(f"- {line}" for line in misnamed(record) or ["nothing"]),
        "",
        "## Wrong variants that these cases do not expose",
        "",
        "They are right, or within the contract, in all cases here, and count nowhere above.",
        "",
        *(f"- {line}" for line in _unexposed(record) or ["none"]),
        "",
    ]
    return "\n".join(lines)


def measured_on(record: Mapping[str, Any]) -> str:
    """Return a line: how long it took, where, and whether cases were left out."""
    every, machine = record["every"], record["environment"]
    selection = "" if every == 1 else f" A selection: one case in {every}."
    return (
        f"{record['seconds']:.0f} seconds in {record['processes']} processes, {machine['cpu']},"
        f" torch {machine['torch']}.{selection}"
    )


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / whole:.1f} %)" if whole else "0"


def _wrong_row(one: Mapping[str, Any]) -> list[object]:
    outcomes = [
        one["corruptions"].get(name, 0)
        for name in ("caught", "unchanged", "within_contract", "missed")
    ]
    return [
        one["operator"],
        one["dtype"],
        one["part"],
        len(one["cases"]),
        one["kinds"],
        one["caught"],
        _share(one["named"], one["kinds"]),
        _share(one["roughly_named"], one["kinds"]),
        *outcomes,
    ]


def _legal_row(one: Mapping[str, Any]) -> list[object]:
    counts = one["variants"].values()
    return [
        one["operator"],
        one["dtype"],
        len(counts),
        len(one["cases"]),
        len(one["seeds"]),
        f"{sum(count['judged'] for count in counts):,}",
        f"{sum(count['changed'] for count in counts):,}",
        sum(len(count["rejected"]) for count in counts),
    ]


def _honest_row(one: Mapping[str, Any]) -> list[object]:
    counts = one["variants"].values()
    sums = {
        key: sum(count[key] for count in counts)
        for key in ("judged", "rejected", "means_tested", "alarms")
    }
    fewest = min((c["fewest_clusters"] for c in counts if c["fewest_clusters"]), default="-")
    return [
        one["operator"],
        one["dtype"],
        len(counts),
        f"{len(one['seeds']):,}",
        *(f"{sums[key]:,}" for key in sums),
        fewest,
    ]


def _unexposed(record: Mapping[str, Any]) -> list[str]:
    lines = []
    for one in record["wrong"]:
        names = [
            f"`{variant['name']}` ({variant['outcome'].replace('_', ' ')})"
            for variant in one["variants"]
            if variant["outcome"] in ("unchanged", "within_contract")
        ]
        if names:
            lines.append(
                f"{one['operator']}, {one['dtype']}, {one['part']} domain: {', '.join(names)}"
            )
    return lines


def write(folder: Path, name: str, record: Mapping[str, Any], page: str) -> None:
    """Write the raw figures and the page; the folder is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, allow_nan=False)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(page, encoding="utf-8")


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what both reports on detection take."""
    parser.add_argument("--out", metavar="FOLDER", default=str(Path(__file__).parent))
    parser.add_argument("--processes", type=int, default=default_processes(), metavar="N")
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=OPERATORS)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one case in N")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="What the judge detects on unseen sizes.")
    add_shared_arguments(parser)
    parser.add_argument("--dtypes", nargs="+", choices=FLOATING_DTYPES, default=FLOATING_DTYPES)
    parser.add_argument("--legal-seeds", type=int, default=50, metavar="N")
    parser.add_argument("--honest-seeds", type=int, default=2000, metavar="N")
    # In float32 no scheme can be told from another: their means are hardly ever tested.
    parser.add_argument(
        "--honest-dtypes", nargs="+", choices=FLOATING_DTYPES, default=("bfloat16",)
    )
    return parser.parse_args(arguments)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do everything and return the record."""
    started = time.perf_counter()
    results = run_tasks(run_task, make_tasks(arguments), arguments.processes)
    return {
        "environment": environment(),
        "processes": arguments.processes,
        "every": arguments.every,
        "seconds": round(time.perf_counter() - started, 1),
        "contract": CONTRACT,
        "seed": SEED,
        **merge(results),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write, and return 0 if nothing was missed or falsely rejected."""
    parsed = parse(arguments)
    record = measure(parsed)
    write(Path(parsed.out), "detection", record, markdown(record))
    found = failures(record)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
