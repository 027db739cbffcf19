"""Measure what judging costs: time and peak memory of suites, probes and further candidates.

The candidate is PyTorch eager (``oracle.examples.eager``) on the CPU. Memory is the proportional
set size of this process and all its descendants together, sampled every 50 ms, so that memory
shared between judge and candidate counts once.

    python reports/judge_cost.py                  print a table
    python reports/judge_cost.py --json FILE      write the figures as well

The whole run takes about three minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import oracle
from oracle.machine import environment

CANDIDATES = {
    "kv_rope.concat.forward": "oracle.examples.eager:concat_forward",
    "kv_rope.static.backward": "oracle.examples.eager:static_backward",
}
FURTHER_CANDIDATES = 5


class PeakMemory:
    """Samples the memory of a process tree in a thread."""

    def __init__(self, interval_s: float = 0.05) -> None:
        self.bytes = 0
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.bytes = max(self.bytes, sum(map(_memory, _tree("self"))))


def _tree(process: str) -> Iterator[str]:
    yield process
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        children = " ".join((task / "children").read_text() for task in tasks).split()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return
    for child in children:
        yield from _tree(child)


def _memory(process: str) -> int:
    """Return a process's proportional set size in bytes; 0 if it has just ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


@contextmanager
def measured(name: str, figures: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Enter the seconds and the peak memory of a block under a name."""
    started = time.perf_counter()
    with PeakMemory() as memory:
        yield
    figures[name] = {
        "seconds": round(time.perf_counter() - started, 2),
        "peak_GiB": round(memory.bytes / 2**30, 2),
    }
    print(f"{name:58} {figures[name]['seconds']:8.2f} s {figures[name]['peak_GiB']:7.2f} GiB")


def main() -> int:
    """Measure, print, and return 0 if every verdict was the one expected."""
    parser = argparse.ArgumentParser(description="Measure what judging costs.")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    arguments = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    good = True
    with measured("both official suites, eager", figures):
        for operator, candidate in CANDIDATES.items():
            verdict = oracle.verify(candidate, operator, cases="suite", device="cpu")
            good &= _expected(verdict)
    for operator, candidate in CANDIDATES.items():
        with measured(f"probes, {operator}", figures):
            good &= _expected(oracle.verify(candidate, operator, cases="probes", device="cpu"))
    for operator, candidate in CANDIDATES.items():
        with oracle.Judge(operator, cases="probes", device="cpu") as judge:
            judge.verify(candidate)
            with measured(f"{FURTHER_CANDIDATES} further candidates, {operator}", figures):
                for _ in range(FURTHER_CANDIDATES):
                    good &= _expected(judge.verify(candidate))
    if arguments.json:
        record = {"environment": environment(), "figures": figures}
        Path(arguments.json).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if good else 1


def _expected(verdict: oracle.Verdict) -> bool:
    if verdict.passed and verdict.grade == "stored_intermediates":
        return True
    print(verdict.summary(), file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main())
