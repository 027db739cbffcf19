r"""Judge honest implementations on all cases, and write which grade each of them gets.

    python reports/grades.py --write reports/grades-cpu.json --device cpu
    python reports/grades.py --write reports/grades-h200.json --device cuda
    python reports/grades.py --write reports/grades-large-h200.json --device cuda --cases large \\
        --candidates eager

Exit status 0: each passed with the grade expected or a tighter one, every element certified.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import oracle
from oracle.machine import environment
from oracle.verdict import GRADES

OPERATORS = (
    "kv_rope.concat.forward",
    "kv_rope.concat.backward",
    "kv_rope.static.forward",
    "kv_rope.static.backward",
)

EXPECTED = {
    "eager": "stored_intermediates",
    "single_rounding": "single_rounding",
    "certified": "correctly_rounded",
}
"""The example modules, and the loosest grade that each may get."""

FOR_HEAD_DIM_128 = {
    "kv_rope.concat.forward": "tests.honest:forward_for_head_dim_128",
    "kv_rope.static.backward": "tests.honest:backward_for_head_dim_128",
}


def candidates(operator: str, modules: list[str]) -> dict[str, str]:
    """Return the candidates of an operator, with the loosest grade each may get."""
    function = "_".join(operator.split(".")[1:])
    chosen = {f"oracle.examples.{name}:{function}": EXPECTED[name] for name in modules}
    if operator in FOR_HEAD_DIM_128 and "single_rounding" in modules:
        chosen[FOR_HEAD_DIM_128[operator]] = "single_rounding"
    return chosen


def main() -> int:
    """Judge, write, and return the exit status."""
    parser = argparse.ArgumentParser(description="Which grade do honest implementations get?")
    parser.add_argument("--write", metavar="FILE", required=True, help="where the grades go")
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--cases", default="probes,suite", help="which; probes,suite by default")
    parser.add_argument("--domain", choices=["official", "general"], default="official")
    parser.add_argument(
        "--candidates", default=",".join(EXPECTED), help=f"some of {','.join(EXPECTED)}"
    )
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    rows: list[dict[str, Any]] = []
    good = True
    settings: dict[str, Any] = {
        name: getattr(arguments, name) for name in ("cases", "device", "domain")
    }
    for operator in OPERATORS:
        chosen = candidates(operator, arguments.candidates.split(","))
        with oracle.Judge(operator, **settings, timeout=120.0) as judge:
            for candidate, expected in chosen.items():
                verdict = judge.verify(candidate)
                print(verdict.summary(), f"in {verdict.seconds:.0f} s", flush=True)
                good &= _is_good(verdict, expected)
                rows.append(_row(verdict, expected))
    record = {"environment": environment(), "verdicts": rows}
    Path(arguments.write).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


def _is_good(verdict: oracle.Verdict, expected: str) -> bool:
    grade = verdict.grade
    tight = grade is not None and GRADES.index(grade) <= GRADES.index(expected)
    return verdict.passed and tight and verdict.certified == verdict.elements


def _row(verdict: oracle.Verdict, expected: str) -> dict[str, Any]:
    return {
        "operator": verdict.operator,
        "candidate": verdict.candidate,
        "device": verdict.device,
        "domain": verdict.domain,
        "cases_asked": verdict.reproduce.partition("--cases ")[2].partition(" ")[0],
        "rounding": verdict.rounding,
        "status": verdict.status,
        "grade": verdict.grade,
        "expected_at_least": expected,
        "cases": len(verdict.cases),
        "elements": verdict.elements,
        "certified": verdict.certified,
        "seconds": round(verdict.seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
