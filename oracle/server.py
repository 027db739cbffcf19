"""The server process: it forks a process for each candidate and leaves nothing of one behind.

The server imports torch once, starts no threads and does not touch CUDA, so each further candidate
costs a fork of it, not an import. Candidates run one at a time, each in a session of its own; when
one ends, however it ends, the server kills whatever descends from it.

The judge's handle on it is :class:`~oracle.worker.WorkerServer`, which sends two orders: ``fork``,
with the candidate's ends of a channel and of a pipe for what it prints, and ``end``. An answer
carries the order's ``id``. That a candidate's process has ended, the server says unasked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import select
import signal
import socket
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from .channel import Channel, Gone
from .child import run_candidate
from .interpreter import install
from .prctl import PR_SET_CHILD_SUBREAPER, prctl


def serve(settings: Mapping[str, Any]) -> None:
    """Be the server process until the judge goes away.

    Args:
        settings: those of :class:`~oracle.worker.WorkerServer`, which starts this process.
    """
    if settings["tunables"] is None:
        del os.environ["GLIBC_TUNABLES"]
    else:
        os.environ["GLIBC_TUNABLES"] = settings["tunables"]
    end = socket.socket(fileno=settings["descriptor"])
    end.set_inheritable(False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    threads = torch.get_num_threads()
    # A process forked from one with OpenMP threads hangs at its first parallel region.
    torch.set_num_threads(1)
    interpreter = install() if settings["device"] == "interpreter" else None
    # Fork copies no page that only the garbage collector would have touched.
    gc.collect()
    gc.freeze()
    channel = Channel(end)
    channel.send({"interpreter": dataclasses.asdict(interpreter) if interpreter else None})
    _Server(channel, threads, settings["judge"]).run()


class _Server:
    """Forks a process for a candidate, says when it ends, and leaves nothing of it behind."""

    def __init__(self, channel: Channel, threads: int, judge: int) -> None:
        self._channel = channel
        self._threads = threads
        self._judge = judge
        self._pid: int | None = None
        self._returncode = 0
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Obey until the judge closes the channel or is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while os.getppid() == self._judge:
                # Now and then without an event, to see whether the judge is still there: a copy
                # of it, forked, could keep the channel open.
                ready = [descriptor for descriptor, _ in poll.poll(1000)]
                if self._wake in ready:
                    os.read(self._wake, 2**12)
                    self._note_end()
                if self._channel.fileno() in ready:
                    self._obey(*self._channel.receive(descriptors=2))
        except Gone:
            return
        finally:
            self._end_candidate(grace=0.0, dump=False)

    def _obey(self, order: dict[str, Any], descriptors: list[int]) -> None:
        if order["op"] == "fork":
            self._end_candidate(grace=0.0, dump=False)
            self._fork(order, descriptors)
            self._channel.send({"id": order["id"], "pid": self._pid})
        else:
            killed = self._end_candidate(order["grace"], order["dump"])
            self._channel.send(
                {"id": order["id"], "returncode": self._returncode, "killed": killed}
            )

    def _fork(self, order: dict[str, Any], descriptors: list[int]) -> None:
        server = os.getpid()
        with warnings.catch_warnings():
            # Python warns of forks beside other threads. Those there are, OpenBLAS's, know how to.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._become_candidate(order, descriptors, server)
        for descriptor in descriptors:
            os.close(descriptor)
        self._pid = pid

    def _become_candidate(
        self, order: dict[str, Any], descriptors: list[int], server: int
    ) -> NoReturn:
        """Drop what is the server's from a process just forked, and go on as the candidate's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._channel.close()
        os.close(self._wake)
        os.close(self._waker)
        run_candidate(order, descriptors, self._threads, server)

    def _note_end(self) -> None:
        """Reap what has ended; tell the judge if it was the candidate's process."""
        before = self._pid
        self._reap()
        if before is not None and self._pid is None:
            self._channel.send({"ended": before})

    def _reap(self) -> bool:
        """Reap what has ended, orphans too. Whether any process is left below this one."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._pid:
                self._pid = None
                self._returncode = os.waitstatus_to_exitcode(status)

    def _end_candidate(self, grace: float, dump: bool) -> bool:
        """End the candidate's process and all below it; whether it had to be killed."""
        self._wait(grace)
        killed = self._pid is not None
        if self._pid is not None and dump:
            os.kill(self._pid, signal.SIGUSR1)
            self._wait(0.05)
        # Orphans become children of this process, so that none can hide. A kill can race with a
        # fork; the next round finds what was born meanwhile.
        while self._reap():
            for pid in _descendants(os.getpid()):
                # One that changed its user cannot be killed; the judge will not wait for it long.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
        return killed

    def _wait(self, seconds: float) -> None:
        """Wait until the candidate's process has ended, not longer than so many seconds."""
        deadline = time.monotonic() + seconds
        while self._reap() and self._pid is not None and time.monotonic() < deadline:
            time.sleep(0.001)


def _descendants(root: int) -> list[int]:
    """List the processes below one, zombies left out."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            # It ended since the folder was listed.
            continue
        # The command's name, in parentheses, may hold anything.
        state, parent = text.rpartition(")")[2].split()[:2]
        children.setdefault(int(parent), []).append(int(entry.name))
        if state == "Z":
            zombies.add(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return [pid for pid in found if pid not in zombies]
