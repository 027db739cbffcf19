"""The judge's handles on the processes that candidates run in.

The judge makes inputs, truth and comparison; what is judged is called elsewhere::

    judge -- WorkerServer --> server process -- fork --> candidate's process

A :class:`WorkerServer` stands for the server (:mod:`oracle.server`), which costs an import of torch
once; a :class:`CandidateProcess` for a process with one candidate in it (:mod:`oracle.child`).
Messages go over channels (:mod:`oracle.channel`), tensors lie in two files that the judge makes and
both map. What the candidate prints goes to a pipe of which the first and last 8 KiB are kept.
Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from .call import CallReply, CallRequest, CallStatus
from .candidate import BadCandidate, CandidateReference
from .capture import HeadTail
from .channel import Channel, Gone, Malformed, TimedOut, channel_pair, decode
from .interpreter import InterpreterReport
from .machine import Device

_KEPT_BYTES = 2**13
_GRACE_S = 2.0
_SERVER_ANSWER_S = 15.0

# Small blocks from malloc's per-thread cache are handed out without the perturbation that fills
# fresh memory (see oracle.poison).
_NO_MALLOC_CACHE = "glibc.malloc.tcache_count=0"

# The package is loaded from the judge's own copy before anything is looked up on sys.path, where
# a file of the same name may come first.
_BOOTSTRAP = """
import importlib.util, json, sys
settings = json.loads(sys.argv[1])
sys.path[:] = settings["path"]
package, folder = settings["package"], settings["folder"]
spec = importlib.util.spec_from_file_location(
    package, folder + "/__init__.py", submodule_search_locations=[folder]
)
sys.modules[package] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[package])
if settings["device"] == "interpreter":
    importlib.import_module(package + ".interpreter").prepare_environment()
importlib.import_module(package + ".server").serve(settings)
"""


class WorkerError(RuntimeError):
    """The judge's own machinery failed (not the candidate); the message holds what it said."""


class WorkerServer:
    """The judge's handle on a server process; a context manager. Not for several threads at once.

    Args:
        device: what candidates are called on.
        start_timeout: seconds in which the server must be ready.

    Attributes:
        device: likewise.
        interpreter: for the device ``interpreter``, what became of Triton's interpreter in the
            server's process; else None.

    Raises:
        WorkerError: on entry, if the server cannot start.
    """

    def __init__(self, device: Device, start_timeout: float = 120.0) -> None:
        self.device = device
        self.interpreter: InterpreterReport | None = None
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._log: IO[bytes] | None = None
        self._serial = 0
        self._current: CandidateProcess | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def candidate(
        self,
        reference: CandidateReference,
        parameters: Sequence[str],
        load_timeout: float = 60.0,
        operator: str = "the operator",
    ) -> CandidateProcess:
        """Load a candidate in a fresh process; use the result as a context manager.

        One at a time. A server that a candidate has killed is started again.

        Args:
            reference: the candidate.
            parameters: names of its positional arguments, in order.
            load_timeout: seconds in which it must be imported.
            operator: who calls it, for the message about a wrong number of parameters.

        Raises:
            BadCandidate: if it cannot be loaded, also where its import crashes, exits or hangs.
            WorkerError: if the server cannot start.
        """
        if self._current is not None and self._current.alive:
            raise RuntimeError(f"{self._current.reference.text} is still loaded; close it first")
        order = {
            "reference": dataclasses.asdict(reference),
            "parameters": list(parameters),
            "operator": operator,
            "device": self.device,
            "cwd": str(Path.cwd()),
            "path": _import_path(),
        }
        try:
            process = CandidateProcess(self, reference, order)
        except Gone:
            process = self._restarted(reference, order)
        self._current = process
        process.load(load_timeout)
        return process

    def _restarted(
        self, reference: CandidateReference, order: Mapping[str, Any]
    ) -> CandidateProcess:
        """Start the server again, which a candidate has killed, and load the next one."""
        self._start()
        try:
            return CandidateProcess(self, reference, order)
        except Gone as error:
            raise WorkerError("the worker server ended again as soon as it was started") from error

    def close(self) -> None:
        """End the server and whatever runs below it."""
        try:
            if self._current is not None:
                self._current.close()
        finally:
            self._stop(patience=5.0)

    def ask(
        self, order: Mapping[str, Any], descriptors: Sequence[int] = (), timeout: float = 0.0
    ) -> dict[str, Any]:
        """Give the server an order and wait for its answer (for :class:`CandidateProcess`).

        Raises:
            Gone: if it does not answer; it is then stopped.
        """
        channel = self.channel
        self._serial += 1
        deadline = time.monotonic() + timeout + _SERVER_ANSWER_S
        try:
            channel.send({**order, "id": self._serial}, descriptors)
            while True:
                channel.wait(deadline)
                answer, _ = channel.receive()
                # Others are news of a process's end, or the answer to an interrupted order.
                if answer.get("id") == self._serial:
                    return answer
        except (Gone, TimedOut) as error:
            self._stop(patience=0.0)
            raise Gone from error

    @property
    def channel(self) -> Channel:
        """The channel to the server.

        Raises:
            Gone: if the server has ended.
        """
        if self._channel is None:
            raise Gone
        return self._channel

    def _start(self) -> None:
        self._channel, theirs = channel_pair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        try:
            with theirs:
                self._process = subprocess.Popen(
                    self._command(theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=(theirs.fileno(),),
                    # Its own session: an interrupt typed at the terminal is for the judge.
                    start_new_session=True,
                    env=os.environ | {"GLIBC_TUNABLES": _tunables()},
                )
            self._channel.wait(time.monotonic() + self._start_timeout)
            report = self._channel.receive()[0]["interpreter"]
            self.interpreter = decode(InterpreterReport, report) if report else None
        except TimedOut as error:
            raise WorkerError(
                f"the worker server was not ready within {self._start_timeout:g} s.{self._stop()}"
            ) from error
        except Gone as error:
            raise WorkerError(f"the worker server ended while starting.{self._stop()}") from error
        except BaseException:
            self._stop()
            raise

    def _command(self, descriptor: int) -> list[str]:
        settings = {
            "package": __package__,
            "folder": str(Path(__file__).absolute().parent),
            "path": _import_path(),
            "device": self.device,
            "descriptor": descriptor,
            "judge": os.getpid(),
            "tunables": os.environ.get("GLIBC_TUNABLES"),
        }
        return [sys.executable, "-P", "-c", _BOOTSTRAP, json.dumps(settings)]

    def _stop(self, patience: float = 0.0) -> str:
        """End the server, by force after so many seconds; return what it printed, if anything."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        printed = ""
        try:
            if self._process is not None:
                _end_process(self._process, patience)
        finally:
            self._process = None
            if self._log is not None:
                self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _KEPT_BYTES))
                printed = self._log.read().decode(errors="replace").strip()
                self._log.close()
            self._log = None
        return f" It printed:\n{printed}" if printed else ""


class CandidateProcess:
    """A process with one candidate loaded; made by :meth:`WorkerServer.candidate`.

    A context manager. When a call crashes or times out the process is gone: ``alive`` is false,
    and the server makes another.
    """

    def __init__(
        self, server: WorkerServer, reference: CandidateReference, order: Mapping[str, Any]
    ) -> None:
        self.reference = reference
        self.alive = True
        self._server = server
        self._oom_kills = _oom_kills()
        self._printed = HeadTail(_KEPT_BYTES)
        self._channel, theirs = channel_pair()
        self._output, output = os.pipe2(os.O_CLOEXEC)
        try:
            with theirs:
                answer = server.ask({"op": "fork", **order}, (theirs.fileno(), output))
            self._pid = answer["pid"]
        except BaseException:
            self._end()
            raise
        finally:
            os.close(output)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, timeout: float) -> None:
        """Wait until the candidate is imported (for :class:`WorkerServer`).

        Raises:
            BadCandidate: if it cannot be loaded.
        """
        name = self.reference.text
        try:
            message = self._receive(time.monotonic() + timeout)
            if message == {"loaded": True}:
                return
            refusal = message.get("bad")
            if not isinstance(refusal, str):
                raise Malformed("a message that is no answer")  # noqa: TRY301
            self.close()
        except TimedOut:
            self._end(dump=True)
            refusal = (
                f"{name} was not imported within {timeout:g} s and was stopped; keep long work out"
                " of the import."
            )
        except (Gone, Malformed) as error:
            refusal = f"{name} cannot be imported: {self._death(error)[1]}."
        except BaseException:
            self._end()
            raise
        raise BadCandidate(refusal, self._printed.text())

    def call(self, request: CallRequest, timeout: float) -> CallReply:
        """Call the candidate once, for at most ``timeout`` seconds.

        Raises:
            RuntimeError: if the process is no longer alive.
            WorkerError: if the judge's part of the process fails, for want of a file for instance.
        """
        if not self.alive:
            raise RuntimeError(f"the process of {self.reference.text} has ended; ask for another")
        self._printed = HeadTail(_KEPT_BYTES)
        started = time.monotonic()
        try:
            self._channel.send(dataclasses.asdict(request))
            reply = self._reply(self._receive(started + timeout))
        except TimedOut:
            self._end(dump=True)
            where = _stopped_at(self._printed.text(), self.reference)
            message = f"The candidate did not return within {timeout:g} s and was stopped{where}."
            reply = CallReply(status="timed_out", message=message)
        except (Gone, Malformed) as error:
            status, reason = self._death(error)
            reply = CallReply(status=status, message=f"The candidate crashed: {reason}.")
        except BaseException:
            # Interrupted, or the judge's own failure: the next message would answer this call.
            self._end()
            raise
        if reply.status == "crashed":
            self._end()
        return dataclasses.replace(
            reply,
            output_text=self._printed.text(),
            seconds=reply.seconds or time.monotonic() - started,
        )

    def close(self) -> None:
        """End the process, and all processes that the candidate started."""
        # The process ends by itself when it finds the channel closed.
        self._end(grace=_GRACE_S)

    def _receive(self, deadline: float) -> dict[str, Any]:
        """Wait for the candidate's process to answer, keeping what it prints meanwhile."""
        server = self._server.channel
        poll = select.poll()
        for descriptor in (self._channel.fileno(), server.fileno(), self._output):
            poll.register(descriptor, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut
            ready = [descriptor for descriptor, _ in poll.poll(math.ceil(min(left, 3600) * 1000))]
            if self._output in ready and not self._printed.read(self._output):
                poll.unregister(self._output)
            if self._channel.fileno() in ready:
                message, _ = self._channel.receive()
                self._printed.read_all(self._output)
                return message
            # Its end is news only if it left no answer. Its channel alone does not tell: a process
            # that it started may hold the other end.
            if (
                server.fileno() in ready
                and server.receive()[0].get("ended") == self._pid
                and not self._channel.is_readable()
            ):
                raise Gone

    def _reply(self, message: dict[str, Any]) -> CallReply:
        if isinstance(message.get("failed"), str):
            raise WorkerError(f"the worker failed around the call:\n{message['failed']}")
        return decode(CallReply, message.get("reply"))

    def _death(self, error: Exception) -> tuple[CallStatus, str]:
        """End the process after a failed exchange; say what became of it."""
        malformed = isinstance(error, Malformed)
        # Its end of the channel closes a little before a dying process is dead.
        ending = self._end(grace=0.0 if malformed else _GRACE_S)
        if malformed:
            return "crashed", f"it sent the judge {error}"
        if ending is None:
            return "crashed", "the server of its process was ended, which only the judge may do"
        if ending["killed"]:
            return "crashed", "it closed its connection to the judge and ran on, and was stopped"
        code = ending["returncode"]
        if code >= 0:
            return "crashed", f"its process ended with exit status {code} instead of returning"
        name = _signal_name(-code)
        if name == "SIGKILL" and _oom_kills() > self._oom_kills:
            return "out_of_memory", "the kernel ended its process because memory ran out (SIGKILL)"
        return "crashed", f"its process was ended by {name}"

    def _end(self, grace: float = 0.0, *, dump: bool = False) -> dict[str, Any] | None:
        """End the process, by force after so many seconds; None if the server cannot say how."""
        if not self.alive:
            return None
        self.alive = False
        self._channel.close()
        try:
            return self._server.ask({"op": "end", "grace": grace, "dump": dump}, timeout=grace)
        except Gone:
            return None
        finally:
            self._printed.read_all(self._output)
            os.close(self._output)


def _stopped_at(printed: str, reference: CandidateReference) -> str:
    """Say on which of its lines a stopped candidate was, by the traceback it left."""
    name = reference.location
    if reference.kind == "module":
        name = "/" + name.replace(".", "/") + ".py"
    lines = re.findall(r'File "([^"]+)", line (\d+) in', printed)
    return next((f" at {path}:{line}" for path, line in lines if path.endswith(name)), "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # Python has no names for most of the real-time signals.
        return f"signal {number}"


def _oom_kills() -> int:
    """How many processes the kernel has ended for want of memory since the machine started."""
    try:
        text = Path("/proc/vmstat").read_text()
    except FileNotFoundError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _import_path() -> list[str]:
    # The empty entry, the current folder, is the candidates' (see import_path).
    return [entry for entry in sys.path if entry and isinstance(entry, str)]


def _tunables() -> str:
    users = os.environ.get("GLIBC_TUNABLES")
    return f"{users}:{_NO_MALLOC_CACHE}" if users else _NO_MALLOC_CACHE


def _end_process(process: subprocess.Popen[bytes], patience: float) -> None:
    try:
        process.wait(patience)
    except BaseException as error:
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
