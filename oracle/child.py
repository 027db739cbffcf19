"""The candidate's process: forked from the server, it loads the candidate and answers calls."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from .call import CallReply, CallRequest
from .caller import Caller
from .candidate import (
    BadCandidate,
    CandidateReference,
    describe_exception,
    import_path,
    load_candidate,
)
from .channel import Channel, Gone, decode
from .prctl import PR_SET_PDEATHSIG, prctl

_TRACEBACK_LIMIT = 2**13


def run_candidate(
    order: Mapping[str, Any], descriptors: Sequence[int], threads: int, server_pid: int
) -> NoReturn:
    """Serve one candidate in a process just forked, then end it.

    Args:
        order: the judge's order, as :class:`~oracle.worker.CandidateProcess` sends it.
        descriptors: of the channel to the judge, and of the pipe for what is printed.
        threads: how many threads torch computes with.
        server_pid: the server, without which this process is not to live.
    """
    status = 1
    try:
        control, output = descriptors
        _leave_server(server_pid, output)
        torch.set_num_threads(threads)
        os.chdir(order["cwd"])
        sys.path[:] = order["path"]
        serve_candidate(Channel(socket.socket(fileno=control)), order)
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is ends this process, and is printed
        traceback.print_exc()
    finally:
        # The candidate's own exit handlers are not to run, nor what else is on the server's stack.
        os._exit(status)


def _leave_server(server_pid: int, output: int) -> None:
    """Make a forked process the candidate's own: session, streams, limits."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server_pid:
        # The server ended before the line above could bind this process to it.
        os._exit(1)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    # New ones, because the server's keep what they know of the file they were opened on.
    sys.stdout, sys.stderr = (
        os.fdopen(stream, "w", buffering=1, errors="backslashreplace", closefd=False)
        for stream in (1, 2)
    )
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # Where memory runs out, the kernel takes this process. Not every sandbox has the file.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    faulthandler.enable()
    # The judge asks for this before it stops a call that takes too long.
    faulthandler.register(signal.SIGUSR1)
    sys.dont_write_bytecode = True


def serve_candidate(channel: Channel, order: Mapping[str, Any]) -> None:
    """Load the candidate and answer calls until the judge closes the channel.

    Says ``{"loaded": true}`` or ``{"bad": why}``, and then for each request ``{"reply": ...}``, or
    ``{"failed": traceback}`` where the fault is ours.
    """
    reference = decode(CandidateReference, order["reference"])
    pid = os.getpid()
    with import_path(reference):
        caller, refusal = _load(reference, order)
        _flush_output()
        _end_if_copied(pid)
        channel.send({"bad": refusal} if caller is None else {"loaded": True})
        while caller is not None and not caller.broken:
            try:
                message, _ = channel.receive()
            except Gone:
                return
            answer = _answer(caller, message)
            _flush_output()
            _end_if_copied(pid)
            channel.send(answer)


def _end_if_copied(pid: int) -> None:
    """End a copy that the candidate made of its process, which got this far as the original did."""
    if os.getpid() != pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _load(reference: CandidateReference, order: Mapping[str, Any]) -> tuple[Caller | None, str]:
    try:
        function = load_candidate(reference, order["parameters"], order["operator"])
    except BadCandidate as error:
        return None, str(error)
    except BaseException as error:  # noqa: BLE001 - import code may raise anything
        return None, f"{reference.text} cannot be loaded: {describe_exception(error)}."
    files = [reference.location]
    if reference.kind == "module":
        files = [str(getattr(sys.modules.get(reference.location), "__file__", ""))]
    return Caller(function, order["device"], files), ""


def _answer(caller: Caller, message: dict[str, Any]) -> dict[str, Any]:
    try:
        reply = caller.call(decode(CallRequest, message))
    except KeyboardInterrupt as error:
        # Nobody else sends it here: this process is in no terminal's group.
        text = f"The candidate raised {describe_exception(error)}."
        reply = CallReply(status="raised", message=text)
    except Exception:  # noqa: BLE001 - reported as the judge's own failure, and raised there
        return {"failed": traceback.format_exc()[-_TRACEBACK_LIMIT:]}
    return {"reply": dataclasses.asdict(reply)}


def _flush_output() -> None:
    """Bring what was printed into the pipe before the reply."""
    for text in (sys.stdout, sys.stderr):
        # The candidate may have closed them, or put anything in their place.
        with contextlib.suppress(Exception):
            text.flush()
    ctypes.CDLL(None).fflush(None)
