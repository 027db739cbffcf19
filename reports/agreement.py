"""Judge the example kernels on this machine, and compare with what another machine said.

The right and the wrong example of both operators, and ``fast``, are judged on all probes; what
does not depend on the clock is written: status, grade, and for each case its status, its counts
and its first wrong element.

    cd reports
    python agreement.py --write agreement-interpreter.json
    python agreement.py --write agreement-h200.json          (on a GPU)
    python agreement.py --compare agreement-interpreter.json agreement-h200.json

Comparing exits with 1 if a verdict differs. Grades of single cases may: compiled code fuses
multiplications with additions, and so may round some elements better or worse.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import oracle
from oracle.machine import environment
from oracle.verdict import CaseResult

EXAMPLES = Path(oracle.__file__).parent / "examples"
CANDIDATES = {
    "kv_rope.concat.forward": {
        "right": f"{EXAMPLES}/right_concat_forward.py:concat_forward",
        "wrong": f"{EXAMPLES}/wrong_concat_forward.py:concat_forward",
        "fast": "fast.kv_rope:concat_forward",
    },
    "kv_rope.static.backward": {
        "right": f"{EXAMPLES}/right_static_backward.py:static_backward",
        "wrong": f"{EXAMPLES}/wrong_static_backward.py:static_backward",
        "fast": "fast.kv_rope:static_backward",
    },
}


def main() -> int:
    """Write or compare; return the exit status."""
    parser = argparse.ArgumentParser(description="Do two devices give the same verdicts?")
    parser.add_argument("--write", metavar="FILE", help="judge here and write the findings")
    parser.add_argument("--compare", metavar="FILE", nargs=2, help="compare two such files")
    arguments = parser.parse_args()
    if arguments.write:
        Path(arguments.write).write_text(json.dumps(judge(), indent=1) + "\n", encoding="utf-8")
    if arguments.compare:
        first, second = (json.loads(Path(file).read_text("utf-8")) for file in arguments.compare)
        return compare(first, second)
    return 0


def judge() -> dict[str, Any]:
    """Judge every candidate on the probes and return what does not depend on the clock."""
    verdicts: dict[str, Any] = {}
    for operator, candidates in CANDIDATES.items():
        with oracle.Judge(operator, cases="probes") as judge_of_operator:
            for name, candidate in candidates.items():
                verdict = judge_of_operator.verify(candidate)
                print(verdict.summary().splitlines()[0])
                verdicts[f"{operator} {name}"] = {
                    "status": verdict.status,
                    "grade": verdict.grade,
                    "device": verdict.device,
                    "elements": verdict.elements,
                    "certified": verdict.certified,
                    "cases": {case.name: _case(case) for case in verdict.cases},
                }
    return {"environment": environment(), "verdicts": verdicts}


def _case(case: CaseResult) -> dict[str, Any]:
    found = case.first_wrong
    wrong = None
    if found is not None:
        region, element = found
        wrong = {"output": region.output, "index": list(element.index), "got": element.got_bits}
    return {"status": case.status, "grade": case.grade, "first_wrong": wrong}


def compare(first: dict[str, Any], second: dict[str, Any]) -> int:
    """Print what differs; return 1 if a verdict, a case's status or a first wrong element does."""
    differences = 0
    for name, one in first["verdicts"].items():
        other = second["verdicts"][name]
        same = one["status"] == other["status"] and one["grade"] == other["grade"]
        differences += not same
        print(
            f"{name}: {one['status']} {one['grade']} on {one['device']}, {other['status']}"
            f" {other['grade']} on {other['device']}{'' if same else '  DIFFERS'}"
        )
        for case, details in one["cases"].items():
            mine = _outcome(details)
            theirs = _outcome(other["cases"][case])
            if mine != theirs:
                differences += 1
                print(f"  {case}: {mine} and {theirs}")
    print("the same verdicts" if not differences else f"{differences} differences")
    return 1 if differences else 0


def _outcome(case: dict[str, Any]) -> tuple[Any, ...]:
    """Return a case's status and first wrong element; a computed NaN's payload is the machine's."""
    found = case["first_wrong"]
    if found is None:
        return (case["status"],)
    is_nan = int(found["got"], 16) & 0x7FFF > 0x7F80
    got = "nan" if is_nan else found["got"]
    return case["status"], found["output"], tuple(found["index"]), got


if __name__ == "__main__":
    sys.exit(main())
