"""Judge honest implementations on all cases, and write which grade each of them gets.

    python reports/grades.py --write reports/grades-cpu.json --device cpu
    python reports/grades.py --write reports/grades-h200.json --device cuda

On two CPU cores it takes about four minutes.
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

CANDIDATES = {
    "kv_rope.concat.forward": {
        "oracle.examples.eager:concat_forward": "stored_intermediates",
        "tests.honest:forward_fp32": "single_rounding",
        "tests.honest:forward_for_head_dim_128": "single_rounding",
        "oracle.examples.certified:concat_forward": "correctly_rounded",
    },
    "kv_rope.static.backward": {
        "oracle.examples.eager:static_backward": "stored_intermediates",
        "tests.honest:backward_fp32": "single_rounding",
        "tests.honest:backward_for_head_dim_128": "single_rounding",
        "oracle.examples.certified:static_backward": "correctly_rounded",
    },
}


def main() -> int:
    """Judge, write, and return the exit status."""
    parser = argparse.ArgumentParser(description="Which grade do honest implementations get?")
    parser.add_argument("--write", metavar="FILE", required=True, help="where the grades go")
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--cases", default="all", help="which cases; all by default")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    rows: list[dict[str, Any]] = []
    good = True
    for operator, candidates in CANDIDATES.items():
        settings: dict[str, Any] = {"cases": arguments.cases, "device": arguments.device}
        with oracle.Judge(operator, **settings, timeout=120.0) as judge:
            for candidate, expected in candidates.items():
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
