from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import worker
from oracle.call import CallReply
from oracle.caller import Caller
from oracle.candidate import BadCandidate, CandidateReference, parse_candidate
from oracle.channel import Channel
from oracle.exchange import Arena
from oracle.worker import WorkerError, WorkerServer
from tests.calls import (
    BAND,
    HOSTILE,
    NAMES,
    SPECIAL,
    Call,
    hostile,
    make_call,
    make_copy_call,
    written,
)
from tests.hostile import calls as hostile_calls
from tests.processes import below, wait_until_gone


@pytest.fixture(scope="module")
def server() -> Iterator[WorkerServer]:
    with WorkerServer("cpu") as running:
        yield running


@pytest.fixture
def call(tmp_path: Path) -> Call:
    return make_call(tmp_path)


def call_once(
    server: WorkerServer, reference: CandidateReference, call: Call, timeout: float = 20.0
) -> CallReply:
    with server.candidate(reference, NAMES) as process:
        return process.call(call.request, timeout)


def pid_of(server: WorkerServer) -> int:
    assert server._process is not None
    return server._process.pid


def check_that_the_next_works(server: WorkerServer, folder: Path) -> None:
    assert below(pid_of(server)) == set()
    call = make_call(folder)
    good = written(folder, "def f(a, b): return a.clone()")
    assert call_once(server, good, call).status == "returned"
    assert call.output == list(SPECIAL)


class TestCall:
    @pytest.mark.parametrize(
        "function",
        [
            "returns_its_input",
            "returns_a_tuple_with_none",
            "returns_many_items",
            "returns_float32",
            "returns_none",
            "raises",
            "calls_sys_exit",
            "allocates_too_much",
        ],
    )
    def test_it_gives_the_same_reply_as_a_call_in_this_process(
        self, server: WorkerServer, tmp_path: Path, call: Call, function: str
    ) -> None:
        isolated = call_once(server, hostile(function), call)
        output = call.output
        direct = Caller(getattr(hostile_calls, function), "cpu").call(make_call(tmp_path).request)

        def plain(reply: CallReply) -> dict[str, Any]:
            facts = asdict(reply)
            del facts["seconds"]
            for memory in (*facts["tensors"], *facts["input_footprints"]):
                del memory["address"]
            return facts

        assert plain(isolated) == plain(direct)
        assert call.output == output

    def test_calls_after_one_that_raised_are_served(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        source = """
            calls = []

            def f(a, b):
                calls.append(a)
                if len(calls) == 1:
                    raise ValueError("the first time only")
                return a.clone()
        """
        with server.candidate(written(tmp_path, source), NAMES) as process:
            statuses = [process.call(call.request, 20.0).status for _ in range(3)]
            assert process.alive
        assert statuses == ["raised", "returned", "returned"]
        assert call.output == list(SPECIAL)

    def test_outputs_held_from_the_call_before_are_in_the_candidates_process(
        self, server: WorkerServer, tmp_path: Path
    ) -> None:
        request = make_call(tmp_path, keep_outputs=True).request
        with server.candidate(hostile("returns_one_buffer_always"), NAMES) as process:
            replies = [process.call(request, 20.0) for _ in range(2)]
        assert [held.changed for reply in replies for held in reply.earlier] == [True]

    def test_an_interrupt_that_the_candidate_raises_is_its_own(
        self, server: WorkerServer, call: Call
    ) -> None:
        reply = call_once(server, hostile("raises_keyboard_interrupt"), call)
        assert (reply.status, reply.message) == (
            "raised",
            "The candidate raised KeyboardInterrupt.",
        )

    def test_the_judges_memory_cannot_be_cut_short(
        self, server: WorkerServer, tmp_path: Path
    ) -> None:
        given, due = make_call(tmp_path).request, 3 * BAND
        with Arena(Path(given.inputs_path).stat().st_size) as inputs, Arena(due) as outputs:
            inputs.bytes[:] = np.fromfile(given.inputs_path, np.uint8)
            request = replace(given, inputs_path=inputs.path, outputs_path=outputs.path)
            reply = call_once(server, hostile("cuts_the_judges_files_short"), Call(request))
            # Before a look at the bytes, which would be the end of this process.
            assert [Path(arena.path).stat().st_size for arena in (inputs, outputs)] == [
                inputs.bytes.size,
                due,
            ]
        assert reply.status == "raised"
        assert "PermissionError" in reply.message


class TestCrashes:
    @pytest.mark.parametrize(
        ("function", "message"),
        [
            ("exits_with_0", "its process ended with exit status 0 instead of returning"),
            ("exits_with_3", "its process ended with exit status 3 instead of returning"),
            ("segfaults", "its process was ended by SIGSEGV"),
            ("aborts", "its process was ended by SIGABRT"),
            ("kills_itself", "its process was ended by SIGKILL"),
            ("leaves_a_child_and_exits", "its process ended with exit status 0"),
            ("closes_all_descriptors", "its process ended with exit status 1"),
            ("closes_all_descriptors_and_sleeps", "it closed its connection to the judge"),
            ("writes_garbage_to_all_descriptors", "it sent the judge a message that is not JSON"),
            ("writes_nested_json_to_all_descriptors", "a message that is not JSON"),
            ("writes_a_number_to_all_descriptors", "a message that is no JSON object"),
            ("writes_a_broken_reply_to_all_descriptors", "a CallReply with the fields"),
            ("sends_too_much", "a message of more than 131072 bytes"),
        ],
    )
    def test_one_is_a_reply_and_the_next_candidate_works(
        self,
        server: WorkerServer,
        tmp_path: Path,
        call: Call,
        monkeypatch: pytest.MonkeyPatch,
        function: str,
        message: str,
    ) -> None:
        monkeypatch.setattr(worker, "_GRACE_S", 0.5)
        with server.candidate(hostile(function), NAMES) as process:
            reply = process.call(call.request, 20.0)
            assert not process.alive
            with pytest.raises(RuntimeError, match=f"{function} has ended; ask for another"):
                process.call(call.request, 20.0)
        assert reply.status == "crashed"
        assert message in reply.message, reply.message
        check_that_the_next_works(server, tmp_path)

    def test_a_signal_without_a_name_is_told_by_its_number(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        source = "import os\n\ndef f(a, b): os.kill(os.getpid(), 40)"
        reply = call_once(server, written(tmp_path, source), call)
        assert reply.status == "crashed"
        assert reply.message == "The candidate crashed: its process was ended by signal 40."

    def test_one_leaves_a_traceback_and_what_was_printed_before(
        self, server: WorkerServer, call: Call
    ) -> None:
        reply = call_once(server, hostile("prints_and_crashes"), call)
        assert reply.status == "crashed"
        assert reply.output_text.startswith("about to crash\nFatal Python error: Segmentation")
        assert "in prints_and_crashes" in reply.output_text

    def test_a_kill_by_the_kernel_for_memory_is_out_of_memory(
        self, server: WorkerServer, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counts = iter([7, 8])
        monkeypatch.setattr(worker, "_oom_kills", lambda: next(counts))
        reply = call_once(server, hostile("kills_itself"), call)
        assert reply.status == "out_of_memory"
        assert "memory ran out" in reply.message

    def test_a_killed_server_is_started_again(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        with server.candidate(hostile("kills_its_parent"), NAMES) as process:
            first = pid_of(server)
            family = below(first)
            reply = process.call(call.request, 20.0)
        assert reply.status == "crashed"
        assert "the server of its process was ended" in reply.message
        assert wait_until_gone({first, *family}) == set()
        good = written(tmp_path, "def f(a, b): return a.clone()")
        assert call_once(server, good, call).status == "returned"
        assert pid_of(server) != first


class TestTimeLimits:
    @pytest.mark.parametrize(
        ("function", "where"),
        [
            ("loops_for_ever", True),
            ("sleeps_in_c", True),
            ("ignores_signals_and_sleeps", False),
        ],
    )
    def test_a_call_without_end_is_stopped(
        self, server: WorkerServer, call: Call, function: str, where: bool
    ) -> None:
        started = time.monotonic()
        with server.candidate(hostile(function), NAMES) as process:
            reply = process.call(call.request, 0.2)
            assert not process.alive
        assert time.monotonic() - started < 5.0
        assert reply.status == "timed_out"
        assert 0.2 <= reply.seconds < 5.0
        at = rf" at {HOSTILE}/calls\.py:\d+" if where else ""
        expected = rf"The candidate did not return within 0\.2 s and was stopped{at}\."
        assert re.fullmatch(expected, reply.message), reply.message
        assert below(pid_of(server)) == set()

    def test_where_a_module_was_stopped(
        self, server: WorkerServer, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        path = tmp_path / "package" / "slow.py"
        path.parent.mkdir()
        path.write_text("def f(a, b):\n    while True:\n        pass\n")
        with server.candidate(parse_candidate("package.slow:f"), NAMES) as process:
            reply = process.call(call.request, 0.2)
        assert re.search(rf"was stopped at {path}:[23]\.$", reply.message), reply.message

    def test_an_import_without_end_is_stopped(self, server: WorkerServer) -> None:
        with pytest.raises(BadCandidate, match=r"was not imported within 0\.2 s") as caught:
            server.candidate(hostile("f", "import_hangs"), NAMES, load_timeout=0.2)
        assert "import_hangs.py" in caught.value.output_text
        assert below(pid_of(server)) == set()


class TestOutputText:
    def test_gigabytes_cost_little_and_keep_both_ends(
        self, server: WorkerServer, call: Call
    ) -> None:
        reply = call_once(server, hostile("prints_two_gigabytes"), call, timeout=60.0)
        assert reply.status == "returned"
        head, gap, tail = reply.output_text.partition("[2147467285 bytes left out]")
        assert gap
        assert head.startswith("first line\n0123456789abcde\n")
        assert tail.endswith("0123456789abcde\nlast line\n")
        assert 2 * 8192 <= len(reply.output_text) < 2 * 8192 + 100

    def test_it_belongs_to_the_call_that_printed_it(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        source = """
            import sys

            print("importing")
            calls = []

            def f(a, b):
                calls.append(a)
                print("call", len(calls), end="")
                print(" \\udc80", file=sys.stderr)
                return a.clone()
        """
        with server.candidate(written(tmp_path, source), NAMES) as process:
            texts = [process.call(call.request, 20.0).output_text for _ in range(2)]
        assert texts[1] == " \\udc80\ncall 2"
        assert texts[0].endswith(" \\udc80\ncall 1")


class TestLoading:
    @pytest.mark.parametrize(
        ("file", "message"),
        [
            ("import_raises", r"RuntimeError: no such accelerator \(.*/import_raises\.py:3\)"),
            ("import_exits", "its process ended with exit status 0"),
            ("import_crashes", "its process was ended by SIGSEGV"),
        ],
    )
    def test_an_import_that_fails_is_a_bad_candidate(
        self, server: WorkerServer, tmp_path: Path, file: str, message: str
    ) -> None:
        with pytest.raises(BadCandidate, match=message) as caught:
            server.candidate(hostile("f", file), NAMES)
        assert file in str(caught.value)
        if file == "import_crashes":
            assert caught.value.output_text.startswith("importing\nFatal Python error")
        check_that_the_next_works(server, tmp_path)

    def test_an_import_that_answers_in_the_judges_place_is_a_bad_candidate(
        self, server: WorkerServer, tmp_path: Path
    ) -> None:
        source = """
            import os

            for entry in os.listdir("/proc/self/fd"):
                try:
                    os.write(int(entry), b'{"reply": {}}')
                except OSError:
                    pass
        """
        with pytest.raises(BadCandidate, match="it sent the judge a message that is no answer"):
            server.candidate(written(tmp_path, source), NAMES)
        check_that_the_next_works(server, tmp_path)

    def test_the_operator_is_named_where_the_parameters_do_not_fit(
        self, server: WorkerServer, tmp_path: Path
    ) -> None:
        reference = written(tmp_path, "def f(a): return a")
        expected = r"f takes 1 positional parameter, but some\.operator passes 2: first, second"
        with pytest.raises(BadCandidate, match=expected):
            server.candidate(reference, NAMES, operator="some.operator")

    def test_one_candidate_at_a_time(self, server: WorkerServer, tmp_path: Path) -> None:
        reference = written(tmp_path, "def f(a, b): return a")
        with (
            server.candidate(reference, NAMES),
            pytest.raises(RuntimeError, match="is still loaded; close it first"),
        ):
            server.candidate(reference, NAMES)

    def test_a_rewritten_file_is_what_is_called(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        for value, bits in ((1, 0x3F80), (2, 0x4000), (4, 0x4080)):
            # Alike in size, and within one second: Python's cache of bytecode would not notice.
            reference = written(tmp_path, f"def f(a, b): return torch.full_like(a, {value})")
            call_once(server, reference, call)
            assert call.output == [bits] * 6
        assert not (tmp_path / "__pycache__").exists()

    def test_a_module_in_the_current_folder(
        self, server: WorkerServer, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        written(tmp_path, "import helper\n\ndef f(a, b): return helper.work(a)")
        (tmp_path / "helper.py").write_text("def work(a):\n    raise ValueError('here')\n")
        reply = call_once(server, parse_candidate("kernel:f"), call)
        assert reply.message == (
            f"The candidate raised ValueError: here ({tmp_path / 'kernel.py'}:5)."
        )


class TestJudgesFaults:
    def test_a_missing_file(self, server: WorkerServer, tmp_path: Path, call: Call) -> None:
        request = replace(call.request, inputs_path=str(tmp_path / "nowhere"))
        with server.candidate(hostile("returns_none"), NAMES) as process:
            with pytest.raises(WorkerError, match="around the call") as caught:
                process.call(request, 20.0)
            assert not process.alive
        assert re.search("FileNotFoundError.*nowhere", str(caught.value))

    def test_a_tensor_beyond_its_file(self, server: WorkerServer, call: Call) -> None:
        beyond = replace(call.request.inputs[0], offset=2**20)
        request = replace(call.request, inputs=(beyond, beyond))
        with (
            server.candidate(hostile("returns_none"), NAMES) as process,
            pytest.raises(WorkerError, match="the worker failed around the call"),
        ):
            process.call(request, 20.0)


class TestInterrupts:
    @pytest.mark.parametrize(
        "reference",
        [hostile("f", "import_hangs"), hostile("loops_for_ever")],
        ids=["import", "call"],
    )
    def test_after_one_the_server_works_on(
        self, server: WorkerServer, tmp_path: Path, call: Call, reference: CandidateReference
    ) -> None:
        with pytest.raises(KeyboardInterrupt), interrupted(after=0.2):
            call_once(server, reference, call)
        check_that_the_next_works(server, tmp_path)


@contextmanager
def interrupted(after: float) -> Iterator[None]:
    """Send this process an interrupt, as a terminal does, after so many seconds."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGINT, handler)


class TestStarting:
    def test_a_server_that_takes_too_long_is_an_error_and_is_gone(self) -> None:
        before = below(os.getpid())
        with (
            pytest.raises(WorkerError, match=r"not ready within 0\.01 s"),
            WorkerServer("cpu", start_timeout=0.01),
        ):
            pytest.fail("it started")
        assert below(os.getpid()) == before

    def test_a_server_that_cannot_start_says_what_it_printed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = tmp_path / "python"
        broken.write_text("#!/bin/sh\necho no torch here >&2\nexit 1\n")
        broken.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(broken))
        with (
            pytest.raises(WorkerError, match=r"ended while starting\. It printed:\nno torch here"),
            WorkerServer("cpu"),
        ):
            pytest.fail("it started")

    def test_an_interrupted_start_leaves_nothing_behind(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        before = below(os.getpid())
        monkeypatch.setattr(Channel, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt), WorkerServer("cpu"):
            pytest.fail("it started")
        assert below(os.getpid()) == before


class TestAnotherServer:
    """With a script in the server's place, which starts without torch."""

    START = """
        import json, os, socket, sys

        server = socket.socket(fileno=json.loads(sys.argv[1])["descriptor"])
        server.send(b'{"interpreter": null}')
    """
    SERVE = """
        while data := server.recv(2**17, socket.MSG_PEEK):
            _, descriptors, _, _ = socket.recv_fds(server, 2**17, 2)
            order = json.loads(data)
            answer = {"id": order["id"], "pid": 0, "returncode": 0, "killed": False}
            if descriptors:
                candidate = socket.socket(fileno=descriptors[0])
                candidate.send(b'{"loaded": true}')
            server.send(json.dumps(answer).encode())
    """

    @pytest.fixture
    def started(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., WorkerServer]:
        def start(*parts: str) -> WorkerServer:
            script = "".join(textwrap.dedent(part) for part in parts)
            monkeypatch.setattr(worker, "_BOOTSTRAP", script)
            return WorkerServer("cpu")

        return start

    def test_one_that_was_killed_while_idle_is_started_again(
        self, started: Callable[..., WorkerServer]
    ) -> None:
        with started(self.START, self.SERVE) as server:
            first = pid_of(server)
            os.kill(first, signal.SIGKILL)
            with server.candidate(hostile("returns_none"), NAMES) as process:
                assert process.alive
            assert pid_of(server) != first

    def test_one_that_ends_again_and_again_is_an_error(
        self, started: Callable[..., WorkerServer]
    ) -> None:
        with (
            started(self.START) as server,
            pytest.raises(WorkerError, match="ended again as soon as it was started"),
        ):
            server.candidate(hostile("returns_none"), NAMES)

    def test_one_that_does_not_answer_is_stopped(
        self, started: Callable[..., WorkerServer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker, "_SERVER_ANSWER_S", 0.05)
        before = below(os.getpid())
        with started(self.START, "import time; time.sleep(1000)") as server:
            with pytest.raises(WorkerError, match="ended again"):
                server.candidate(hostile("returns_none"), NAMES)
            assert below(os.getpid()) == before

    def test_closing_is_harmless_in_any_order_and_twice(
        self, started: Callable[..., WorkerServer]
    ) -> None:
        with started(self.START, self.SERVE) as server:
            process = server.candidate(hostile("returns_none"), NAMES)
            server.close()
            process.close()
            assert not process.alive
            server.close()


def test_the_judges_side_needs_no_torch() -> None:
    script = "import sys, oracle.worker, oracle.guards; print('torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        cwd=Path(worker.__file__).parent.parent,
    )  # fmt: skip
    assert ended.stdout == "False\n"


@pytest.fixture(scope="module")
def gpu_server() -> Iterator[WorkerServer]:
    with WorkerServer("cuda") as running:
        yield running


@pytest.mark.gpu
class TestOnGpu:
    def test_returned_bits_arrive_unchanged(
        self, gpu_server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        source = """
            def f(a, b):
                assert a.is_cuda and a.storage_offset() == 0 and a.data_ptr() % 16 == 0
                assert a.untyped_storage().nbytes() == 12
                return a.t().clone(memory_format=torch.contiguous_format).t()
        """
        reply = call_once(gpu_server, written(tmp_path, source), call, timeout=120.0)
        assert reply.message == ""
        assert (reply.input_device, reply.tensors[0].device) == ("cuda:0", "cuda:0")
        assert call.output == list(SPECIAL)

    def test_a_write_beyond_an_input_comes_back(
        self, gpu_server: WorkerServer, tmp_path: Path
    ) -> None:
        call = make_call(tmp_path)
        source = """
            class Beyond:
                def __init__(self, address):
                    self.__cuda_array_interface__ = {
                        "shape": (4,), "typestr": "|u1", "data": (address, False), "version": 3
                    }

            def f(a, b):
                torch.as_tensor(Beyond(a.data_ptr() + 12), device="cuda").fill_(7)
                a[0, 0] = 2
                return a.clone()
        """
        reply = call_once(gpu_server, written(tmp_path, source), call, timeout=120.0)
        assert reply.message == ""
        content = np.fromfile(call.request.inputs_path, np.uint8)
        assert content[BAND + 10 : BAND + 18].tolist() == [0x80, 0x7F, 7, 7, 7, 7, 0xEE, 0xEE]
        assert call.first_input[0] == 0x4000

    def test_outputs_are_given_with_their_bands(
        self, gpu_server: WorkerServer, tmp_path: Path
    ) -> None:
        call = make_call(tmp_path, style="out")
        source = "def f(a, b, out):\n    assert out.isnan().all()\n    out.copy_(a)"
        with gpu_server.candidate(written(tmp_path, source), (*NAMES, "output")) as process:
            reply = process.call(call.request, 120.0)
        assert reply.message == ""
        assert call.output == list(SPECIAL)

    @pytest.mark.parametrize("elements", [6, 2**20, 2**24])
    def test_fresh_memory_is_filled_or_said_not_to_be(
        self, gpu_server: WorkerServer, tmp_path: Path, elements: int
    ) -> None:
        request = make_copy_call(tmp_path, elements, fill_byte=0xA5)
        source = """
            def f(a, b): return torch.empty_like(a)

            buffer = []

            def g(a, b):
                buffer.append(torch.zeros_like(a)) if not buffer else None
                return buffer[0]
        """
        reference = written(tmp_path, source)
        with gpu_server.candidate(reference, NAMES) as process:
            for _ in range(2):
                assert process.call(request, 120.0).tensors[0].poisoned is True
                assert (np.fromfile(request.outputs_path, np.uint8) == 0xA5).all()
        with gpu_server.candidate(replace(reference, function="g"), NAMES) as process:
            process.call(replace(request, fill_byte=None), 120.0)
            assert process.call(request, 120.0).tensors[0].poisoned is False

    def test_a_fault_of_the_gpu_is_a_crash_and_the_next_candidate_works(
        self, gpu_server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        source = """
            def f(a, b):
                return a.view(-1)[torch.full((6,), 2**40, device="cuda")].view(2, 3)
        """
        with gpu_server.candidate(written(tmp_path, source), NAMES) as process:
            reply = process.call(call.request, 120.0)
            assert not process.alive
        assert reply.status == "crashed", reply
        assert "CUDA error" in reply.message
        good = written(tmp_path, "def f(a, b): return a.clone()")
        assert call_once(gpu_server, good, call, timeout=120.0).status == "returned"

    def test_too_large_an_allocation_is_out_of_memory(
        self, gpu_server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        source = "def f(a, b): return torch.empty(2**50, dtype=torch.uint8, device='cuda')"
        with gpu_server.candidate(written(tmp_path, source), NAMES) as process:
            reply = process.call(call.request, 120.0)
            assert process.alive
        assert reply.status == "out_of_memory"
