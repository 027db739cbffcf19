from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from oracle import child
from oracle.call import CallReply, CallRequest
from oracle.candidate import CandidateReference, parse_candidate
from oracle.channel import Channel, decode
from oracle.child import serve_candidate
from tests.calls import HOSTILE, NAMES, SPECIAL, Call, hostile, make_call, written


@pytest.fixture(autouse=True)
def restored_modules(tmp_path: Path) -> Iterator[None]:
    """Forget the candidates that were loaded into this process."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = str(getattr(sys.modules[name], "__file__", None))
        if file.startswith((str(tmp_path), str(HOSTILE))):
            del sys.modules[name]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    return make_call(tmp_path)


def answers(reference: CandidateReference, *requests: CallRequest) -> list[dict[str, Any]]:
    """Serve a candidate in this process: what it says, first of loading, then to each request."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours)
    for request in requests:
        channel.send(asdict(request))
    # The requests stand in the socket, and after them its end.
    ours.shutdown(socket.SHUT_WR)
    order = {
        "reference": asdict(reference),
        "parameters": list(NAMES),
        "operator": "some.operator",
        "device": "cpu",
    }
    with ours, theirs:
        serve_candidate(Channel(theirs), order)
        return [channel.receive()[0] for _ in range(len(requests) + 1) if channel.is_readable()]


def test_calls_are_answered_in_turn(tmp_path: Path, call: Call) -> None:
    source = """
        calls = []

        def f(a, b):
            calls.append(a)
            if len(calls) == 1:
                raise ValueError("the first time only")
            return a.clone()
    """
    loaded, *said = answers(written(tmp_path, source), call.request, call.request, call.request)
    assert loaded == {"loaded": True}
    statuses = [decode(CallReply, message["reply"]).status for message in said]
    assert statuses == ["raised", "returned", "returned"]
    assert call.output == list(SPECIAL)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("import_raises", r"RuntimeError: no such accelerator \(.*/import_raises\.py:3\)"),
        ("import_calls_sys_exit", r"SystemExit: usage: this is a script \(.*exit\.py:5\)"),
        ("import_interrupts", "KeyboardInterrupt"),
    ],
)
def test_an_import_that_fails_is_refused(file: str, message: str) -> None:
    (said,) = answers(hostile("f", file))
    assert file in said["bad"]
    assert re.search(message, said["bad"])


def test_a_wrong_number_of_parameters_is_told_in_the_operators_name(tmp_path: Path) -> None:
    (said,) = answers(written(tmp_path, "def f(a): return a"))
    expected = "f takes 1 positional parameter, but some.operator passes 2: first, second."
    assert said["bad"].endswith(expected)


def test_an_interrupt_that_the_candidate_raises_is_its_own(call: Call) -> None:
    _, said = answers(hostile("raises_keyboard_interrupt"), call.request)
    reply = decode(CallReply, said["reply"])
    assert (reply.status, reply.message) == (
        "raised",
        "The candidate raised KeyboardInterrupt.",
    )


def test_a_failure_around_the_call_is_no_reply(tmp_path: Path) -> None:
    nowhere = CallRequest(str(tmp_path / "nowhere"), (), str(tmp_path / "nowhere"), ())
    _, said = answers(hostile("returns_none"), nowhere)
    assert said.keys() == {"failed"}
    assert re.search(r"FileNotFoundError: .*nowhere", said["failed"])


def test_after_a_fault_of_the_device_nothing_more_is_called(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(child.Caller):
        def call(self, request: CallRequest) -> CallReply:
            self.broken = True
            return super().call(request)

    monkeypatch.setattr(child, "Caller", Broken)
    said = answers(hostile("returns_none"), call.request, call.request)
    assert [list(message) for message in said] == [["loaded"], ["reply"]]


def test_imports_of_sibling_files_work_during_the_call_too(tmp_path: Path, call: Call) -> None:
    (tmp_path / "sibling_of_kernel.py").write_text("def work(a):\n    return a.clone()\n")
    source = """
        def f(a, b):
            from sibling_of_kernel import work
            return work(a)
    """
    _, said = answers(written(tmp_path, source), call.request)
    assert decode(CallReply, said["reply"]).status == "returned"


def test_a_line_of_a_module_is_told(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "module_that_raises.py"
    path.write_text("import json\n\ndef f(a, b):\n    json.loads('{')\n")
    _, said = answers(parse_candidate("module_that_raises:f"), call.request)
    assert decode(CallReply, said["reply"]).message.endswith(f"({path}:4).")
