"""The processes below one, and what becomes of them."""

from __future__ import annotations

import time
from pathlib import Path


def below(root: int) -> set[int]:
    """Every process below one that is not a zombie."""
    parents = _parents()
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def wait_until_gone(pids: set[int], seconds: float = 10.0) -> set[int]:
    """Wait for processes to end; what is left of them after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := pids & set(_parents())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def command_of(pid: int) -> str:
    """The command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def _parents() -> dict[int, int]:
    """Every process that is not a zombie, and its parent."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                found[int(entry.name)] = int(parent)
    return found
