from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle import worker
from oracle.candidate import BadCandidate, CandidateReference, parse_candidate
from oracle.worker import (
    Caller,
    CallReply,
    CallRequest,
    TensorLayout,
    WorkerError,
    WorkerServer,
    call_in_process,
)

HOSTILE = Path(__file__).parent / "hostile"
ROOT = Path(__file__).parent.parent
BAND = 4096
NAMES = ("first", "second")
NEGATIVE_ZERO, PAYLOAD_NAN, SIGNALLING_NAN, SUBNORMAL = 0x8000, 0x7FC5, 0xFF81, 0x0001
SPECIAL = (0x3F80, NEGATIVE_ZERO, PAYLOAD_NAN, SIGNALLING_NAN, SUBNORMAL, 0x7F80)


@dataclass(frozen=True)
class Call:
    """A request over files in a folder: two inputs, one output, each between bands."""

    request: CallRequest

    @property
    def output(self) -> list[int]:
        """The bits of the first output."""
        return self.bits(self.request.outputs[0], self.request.outputs_path)

    @property
    def first_input(self) -> list[int]:
        return self.bits(self.request.inputs[0], self.request.inputs_path)

    @staticmethod
    def bits(layout: TensorLayout, path: str) -> list[int]:
        data = np.fromfile(path, np.uint8)[layout.offset :]
        count = math.prod(layout.shape)
        return data[: count * layout.itemsize].view(f"u{layout.itemsize}").tolist()


def make_call(folder: Path, **options: Any) -> Call:
    first = TensorLayout("first", "bfloat16", (2, 3), (3, 1), BAND)
    second = replace(first, name="second", offset=2 * BAND + 12)
    content = np.full(3 * BAND + 24, 0xEE, np.uint8)
    for layout, values in ((first, SPECIAL), (second, [0x4000] * 6)):
        content[layout.offset : layout.offset + 12] = np.array(values, np.uint16).view(np.uint8)
    inputs, outputs = folder / "inputs.tensors", folder / "outputs.tensors"
    content.tofile(inputs)
    np.full(2 * BAND + 12, 0xFF, np.uint8).tofile(outputs)
    request = CallRequest(
        case="case",
        inputs_path=str(inputs),
        inputs_bytes=content.size,
        inputs=(first, second),
        outputs_path=str(outputs),
        outputs=(replace(first, name="output"),),
    )
    return Call(replace(request, **options))


def hostile(function: str, file: str = "calls") -> CandidateReference:
    return parse_candidate(f"{HOSTILE / file}.py:{function}")


def written(folder: Path, source: str, function: str = "f") -> CandidateReference:
    path = folder / "kernel.py"
    path.write_text("import torch\n\n" + textwrap.dedent(source))
    return parse_candidate(f"{path}:{function}")


def processes() -> dict[int, int]:
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


def below(root: int) -> set[int]:
    parents = processes()
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def wait_until_gone(pids: set[int], seconds: float = 10.0) -> set[int]:
    deadline = time.monotonic() + seconds
    while (left := pids & set(processes())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


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
    assert server.hello is not None
    return server.hello.pid


class TestCall:
    def test_returned_bits_arrive_unchanged(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        reply = call_once(server, written(tmp_path, "def f(a, b): return a.clone()"), call)
        assert (reply.status, reply.message) == ("returned", "")
        assert call.output == list(SPECIAL)

    def test_facts_of_the_returned_tensor(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        source = "def f(a, b): return a.t().contiguous().t()"
        reply = call_once(server, written(tmp_path, source), call)
        (fact,) = reply.tensors
        assert (fact.type_name, fact.dtype, fact.device) == ("torch.Tensor", "bfloat16", "cpu")
        assert (fact.shape, fact.strides, fact.is_contiguous) == ((2, 3), (1, 2), False)
        assert (fact.extent_bytes, fact.itemsize, fact.layout) == (12, 2, "strided")
        assert fact.copied
        assert fact.poisoned is None
        assert (reply.returned_type, reply.returned_count) == ("torch.Tensor", 1)
        assert call.output == list(SPECIAL)

    def test_tensors_lie_as_their_layouts_say(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        first, second = call.request.inputs
        strided = replace(first, shape=(3, 2), strides=(1, 3))
        inside = replace(second, shape=(2, 2), storage_offset=5)
        request = replace(call.request, inputs=(strided, inside))
        source = """
            def f(a, b):
                assert a.stride() == (1, 3) and a.storage_offset() == 0
                assert a.untyped_storage().nbytes() == 12
                assert a.view(torch.int16)[1, 0] == -0x8000
                assert b.storage_offset() == 5 and b.untyped_storage().nbytes() == 2 * 5 + 10
                assert b.tolist() == [[2, 2], [2, 2]]
                assert not a._is_view()
                return a.t()
        """
        reply = call_once(server, written(tmp_path, source), Call(request))
        assert reply.message == ""
        assert call.output == list(SPECIAL)

    def test_tensors_without_elements_keep_their_shape(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        empty = replace(call.request.inputs[0], shape=(2, 0, 3), strides=(0, 3, 1))
        output = replace(empty, name="output", strides=(3, 3, 1))
        request = replace(call.request, inputs=(empty, empty), outputs=(output,))
        reply = call_once(server, written(tmp_path, "def f(a, b): return a + b"), Call(request))
        assert reply.tensors[0].shape == (2, 0, 3)
        assert reply.tensors[0].extent_bytes == 0
        assert reply.tensors[0].copied

    def test_files_without_bytes(self, server: WorkerServer, tmp_path: Path, call: Call) -> None:
        empty = TensorLayout("first", "bfloat16", (0,), (1,), 0)
        (tmp_path / "none.tensors").touch()
        path = str(tmp_path / "none.tensors")
        request = replace(
            call.request, inputs=(empty, empty), inputs_path=path, inputs_bytes=0,
            outputs=(empty,), outputs_path=path,
        )  # fmt: skip
        reply = call_once(server, written(tmp_path, "def f(a, b): return a + b"), Call(request))
        assert reply.tensors[0].copied

    def test_outputs_are_given_where_they_lie_between_their_bands(
        self, server: WorkerServer, tmp_path: Path
    ) -> None:
        call = make_call(tmp_path, style="out")
        source = """
            def f(a, b, out):
                assert out.isnan().all() and out.data_ptr() % 16 == 0
                out.copy_(a)
                out.as_strided((1,), (1,), 0).fill_(1)
        """
        with server.candidate(written(tmp_path, source), (*NAMES, "output")) as process:
            reply = process.call(call.request, 20.0)
        assert (reply.returned_type, reply.returned_count, reply.tensors) == ("NoneType", 0, ())
        assert call.output == [0x3F80, *SPECIAL[1:]]
        content = np.fromfile(call.request.outputs_path, np.uint8)
        assert (content[:BAND] == 0xFF).all()
        assert (content[BAND + 12 :] == 0xFF).all()

    def test_a_write_beyond_an_output_reaches_the_file(
        self, server: WorkerServer, tmp_path: Path
    ) -> None:
        call = make_call(tmp_path, style="out")
        source = """
            import ctypes

            def f(a, b, out):
                ctypes.memset(out.data_ptr() + 12, 7, 3)
        """
        with server.candidate(written(tmp_path, source), (*NAMES, "output")) as process:
            process.call(call.request, 20.0)
        content = np.fromfile(call.request.outputs_path, np.uint8)
        assert content[BAND + 12 : BAND + 16].tolist() == [7, 7, 7, 255]

    def test_an_input_written_in_place_becomes_the_output(
        self, server: WorkerServer, tmp_path: Path
    ) -> None:
        call = make_call(tmp_path, style="inplace", inplace=((1, 0),))
        source = "def f(a, b): b.copy_(a); b.data = torch.zeros(2, 3)"
        reply = call_once(server, written(tmp_path, source), call)
        assert reply.returned_type == "NoneType"
        assert call.output == list(SPECIAL)

    def test_an_input_written_in_place_may_be_returned(
        self, server: WorkerServer, tmp_path: Path
    ) -> None:
        call = make_call(tmp_path, style="inplace", inplace=((1, 0),))
        reply = call_once(server, written(tmp_path, "def f(a, b): return b.copy_(a)"), call)
        assert not reply.tensors[0].copied
        assert call.output == list(SPECIAL)

    @pytest.mark.parametrize("copy_back_inputs", [False, True])
    def test_a_changed_input_shows_in_the_file(
        self, server: WorkerServer, tmp_path: Path, copy_back_inputs: bool
    ) -> None:
        call = make_call(tmp_path, copy_back_inputs=copy_back_inputs)
        call_once(server, hostile("writes_its_input"), call)
        assert call.first_input == [*SPECIAL[:3], 0x429A, *SPECIAL[4:]]

    def test_memory_facts_show_a_returned_input(self, server: WorkerServer, call: Call) -> None:
        reply = call_once(server, hostile("returns_its_input"), call)
        assert reply.tensors[0].footprint == reply.input_footprints[0]
        assert reply.tensors[0].footprint != reply.input_footprints[1]

    def test_a_reused_buffer_shows_as_a_changed_earlier_output(
        self, server: WorkerServer, tmp_path: Path
    ) -> None:
        request = make_call(tmp_path, keep_outputs=True).request
        with server.candidate(hostile("returns_one_buffer_always"), NAMES) as process:
            first, second = (process.call(request, 20.0) for _ in range(2))
        assert first.earlier == ()
        assert [(held.output, held.changed) for held in second.earlier] == [(0, True)]
        assert second.earlier[0].footprint == second.tensors[0].footprint

    def test_an_honest_output_is_no_changed_earlier_output(
        self, server: WorkerServer, tmp_path: Path
    ) -> None:
        request = make_call(tmp_path, keep_outputs=True).request
        reference = written(tmp_path, "def f(a, b): return a + b")
        with server.candidate(reference, NAMES) as process:
            replies = [process.call(request, 20.0) for _ in range(3)]
            last = process.call(replace(request, keep_outputs=False), 20.0)
            after = process.call(request, 20.0)
        assert [held.changed for reply in (*replies, last) for held in reply.earlier] == [False] * 3
        assert replies[1].earlier[0].footprint != replies[1].tensors[0].footprint
        assert after.earlier == ()

    @pytest.mark.parametrize("elements", [1, 8, 60, 500, 2000, 100_000, 2**23])
    @pytest.mark.parametrize("fill_byte", [0xA5, 0x5A, 0x00])
    def test_fresh_memory_of_any_size_holds_the_fill_byte(
        self, server: WorkerServer, tmp_path: Path, elements: int, fill_byte: int
    ) -> None:
        layout = TensorLayout("first", "bfloat16", (elements,), (1,), 0)
        for name in ("inputs", "outputs"):
            np.full(2 * elements, 0x33, np.uint8).tofile(tmp_path / f"{name}.tensors")
        request = CallRequest(
            case="case",
            inputs_path=str(tmp_path / "inputs.tensors"),
            inputs_bytes=2 * elements,
            inputs=(layout, layout),
            outputs_path=str(tmp_path / "outputs.tensors"),
            outputs=(layout,),
            fill_byte=fill_byte,
        )
        # Memory used and freed before, so that there is something else to find in it.
        source = """
            warm = [torch.full((n,), 7.0) for n in (1, 4, 30, 250, 1000) for _ in range(20)]
            del warm

            def f(a, b): return torch.empty_like(a)
        """
        reply = call_once(server, written(tmp_path, source), Call(request))
        assert reply.tensors[0].poisoned is True
        found = np.fromfile(request.outputs_path, np.uint8)
        assert found.size == 2 * elements
        assert (found == fill_byte).all()

    def test_filling_ends_with_the_call(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        # What a block held before it was freed and handed out again is there, or filled over.
        source = """
            import ctypes

            libc = ctypes.CDLL(None)
            libc.malloc.restype = ctypes.c_void_p
            libc.free.argtypes = [ctypes.c_void_p]

            def f(a, b):
                first = libc.malloc(5000)
                ctypes.memset(first, 7, 5000)
                libc.free(first)
                again = libc.malloc(5000)
                found = ctypes.string_at(again, 5000)[2500]
                libc.free(again)
                return torch.full((2, 3), found, dtype=torch.bfloat16)
        """
        with server.candidate(written(tmp_path, source), NAMES) as process:
            process.call(replace(call.request, fill_byte=3), 20.0)
            assert call.output == [0x4040] * 6
            process.call(call.request, 20.0)
        assert call.output == [0x40E0] * 6

    def test_calls_after_one_that_raised_are_served(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        source = """
            calls = []

            def f(a, b):
                calls.append(a)
                if len(calls) == 1:
                    raise ValueError("the first time only")
                return a + b
        """
        with server.candidate(written(tmp_path, source), NAMES) as process:
            statuses = [process.call(call.request, 20.0).status for _ in range(3)]
            assert process.alive
        assert statuses == ["raised", "returned", "returned"]

    def test_candidates_compute_with_as_many_threads_as_torch_chose(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        source = """
            def f(a, b):
                threads = torch.get_num_threads()
                torch.randn(2**20).to(torch.bfloat16).sum()
                return torch.full((2, 3), threads, dtype=torch.bfloat16)
        """
        call_once(server, written(tmp_path, source), call)
        assert server.hello is not None
        expected = torch.tensor(float(server.hello.threads), dtype=torch.bfloat16)
        assert call.output[0] == expected.view(torch.int16).item()
        assert server.hello.threads == torch.get_num_threads()

    def test_the_environment_is_the_users(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        source = """
            import os
            import pathlib

            assert "GLIBC_TUNABLES" not in os.environ
            assert pathlib.Path("/proc/self/oom_score_adj").read_text() == "1000\\n"
            assert os.read(0, 1) == b""

            def f(a, b): return a
        """
        assert call_once(server, written(tmp_path, source), call).status == "returned"


class TestHostileCalls:
    @pytest.mark.parametrize(
        ("function", "returned_type", "item_type"),
        [
            ("returns_none", "NoneType", None),
            ("returns_a_list", "list", None),
            ("returns_an_array", "numpy.ndarray", None),
            ("returns_a_tuple_with_none", "tuple", "NoneType"),
            ("returns_many_items", "tuple", "torch.Tensor"),
            ("returns_float32", "torch.Tensor", "torch.Tensor"),
            ("returns_another_shape", "torch.Tensor", "torch.Tensor"),
            ("returns_a_sparse_tensor", "torch.Tensor", "torch.Tensor"),
            ("returns_a_tensor_without_memory", "torch.Tensor", "torch.Tensor"),
            ("returns_a_tensor_of_torch_func", "torch.Tensor", "torch.Tensor"),
        ],
    )
    def test_what_is_no_output_is_a_fact_and_not_copied(
        self,
        server: WorkerServer,
        call: Call,
        function: str,
        returned_type: str,
        item_type: str | None,
    ) -> None:
        reply = call_once(server, hostile(function), call)
        assert (reply.status, reply.returned_type) == ("returned", returned_type)
        assert not any(item.copied for item in reply.tensors)
        assert len(reply.tensors) <= 32
        assert [item.type_name for item in reply.tensors[-1:]] == ([item_type] if item_type else [])
        assert call.output == [0xFFFF] * 6

    def test_nothing_is_asked_of_a_subclass(self, server: WorkerServer, call: Call) -> None:
        reply = call_once(server, hostile("returns_a_subclass"), call)
        (fact,) = reply.tensors
        assert fact.is_tensor
        assert fact.type_name.endswith(".Liar")
        assert (fact.dtype, fact.shape, fact.copied) == ("", (), False)

    @pytest.mark.parametrize(
        ("function", "message"),
        [
            (
                "raises",
                r"^The candidate raised ValueError: the kernel does not like these sizes \(.*\)\.$",
            ),
            ("raises_at_length", r"The candidate raised ValueError: x{500}\.\.\. \(.*\)\."),
            ("raises_without_text", r"The candidate raised BadText: \(its text cannot be shown\)"),
            ("raises_base_exception", "raised BaseException: not even an Exception"),
            ("raises_keyboard_interrupt", "raised KeyboardInterrupt"),
            ("calls_sys_exit", "raised SystemExit: 5"),
            ("recurses_for_ever", r"raised RecursionError: .*calls\.py:\d+"),
        ],
    )
    def test_what_it_raises_is_told_with_its_line(
        self, server: WorkerServer, call: Call, function: str, message: str
    ) -> None:
        reply = call_once(server, hostile(function), call)
        assert reply.status == "raised"
        assert re.search(message, reply.message), reply.message

    @pytest.mark.parametrize(
        ("function", "message"),
        [
            ("allocates_too_much", "you tried to allocate 4611686018427387904 bytes"),
            ("allocates_too_much_for_numpy", "Unable to allocate 2.00 EiB"),
        ],
    )
    def test_too_large_an_allocation_is_out_of_memory(
        self, server: WorkerServer, call: Call, function: str, message: str
    ) -> None:
        with server.candidate(hostile(function), NAMES) as process:
            reply = process.call(call.request, 20.0)
            assert process.alive
        assert reply.status == "out_of_memory"
        assert message in reply.message

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
            ("writes_garbage_to_all_descriptors", "a message that is not JSON"),
            ("writes_nested_json_to_all_descriptors", "a message that is not JSON"),
            ("writes_a_number_to_all_descriptors", "a message that is no JSON object"),
            ("writes_a_broken_reply_to_all_descriptors", "a CallReply with the fields"),
            ("sends_too_much", "a message of more than 131072 bytes"),
        ],
    )
    def test_a_crash_is_a_reply_and_the_next_candidate_works(
        self, server: WorkerServer, tmp_path: Path, call: Call, function: str, message: str
    ) -> None:
        with server.candidate(hostile(function), NAMES) as process:
            reply = process.call(call.request, 20.0)
            assert not process.alive
            with pytest.raises(RuntimeError, match=f"{function} has ended; ask for another"):
                process.call(call.request, 20.0)
        assert reply.status == "crashed"
        assert message in reply.message, reply.message
        assert below(pid_of(server)) == set()
        good = written(tmp_path, "def f(a, b): return a.clone()")
        assert call_once(server, good, call).status == "returned"

    def test_a_crash_leaves_a_traceback_and_what_was_printed_before(
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
            reply = process.call(call.request, 0.3)
            assert not process.alive
        assert time.monotonic() - started < 5.0
        assert reply.status == "timed_out"
        assert 0.3 <= reply.seconds < 5.0
        at = rf" at {HOSTILE}/calls\.py:\d+" if where else ""
        expected = rf"The candidate did not return within 0\.3 s and was stopped{at}\."
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

    def test_gigabytes_of_output_cost_little_and_keep_both_ends(
        self, server: WorkerServer, call: Call
    ) -> None:
        reply = call_once(server, hostile("prints_two_gigabytes"), call, timeout=60.0)
        assert reply.status == "returned"
        head, gap, tail = reply.output_text.partition("[2147467285 bytes left out]")
        assert gap
        assert head.startswith("first line\n0123456789abcde\n")
        assert tail.endswith("0123456789abcde\nlast line\n")
        assert 2 * 8192 <= len(reply.output_text) < 2 * 8192 + 100

    def test_output_belongs_to_the_call_that_printed_it(
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

    @pytest.mark.parametrize(
        "function",
        ["leaves_a_child", "leaves_a_daemon", "leaves_a_chatty_child", "returns_twice"],
    )
    def test_no_descendant_outlives_its_candidate(
        self, server: WorkerServer, call: Call, function: str
    ) -> None:
        with server.candidate(hostile(function), NAMES) as process:
            reply = process.call(call.request, 20.0)
            seen = below(pid_of(server))
            again = process.call(call.request, 20.0)
        assert (reply.status, again.status) == ("returned", "returned")
        assert call.output == list(SPECIAL)
        assert function == "returns_twice" or len(seen) >= 2
        assert below(pid_of(server)) == set()
        assert wait_until_gone(seen, 0.0) == set()

    @pytest.mark.parametrize(
        "function",
        [
            "changes_the_current_folder",
            "changes_torchs_defaults",
            "replaces_its_streams",
            "interrupts_its_group",
        ],
    )
    def test_changes_to_its_own_process_do_not_disturb_the_judge(
        self, server: WorkerServer, call: Call, function: str
    ) -> None:
        with server.candidate(hostile(function), NAMES) as process:
            request = replace(call.request, keep_outputs=True, fill_byte=1)
            replies = [process.call(request, 20.0) for _ in range(2)]
        assert [reply.status for reply in replies] == ["returned", "returned"]
        assert call.output == list(SPECIAL)

    def test_deleting_the_judges_files_is_a_crash(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        with server.candidate(hostile("deletes_the_mapped_files"), NAMES) as process:
            assert process.call(call.request, 20.0).status == "returned"
            assert not Path(call.request.inputs_path).exists()
            reply = process.call(call.request, 20.0)
        assert reply.status == "crashed"
        assert f"it deleted the judge's file {call.request.inputs_path}" in reply.message
        assert call_once(server, hostile("returns_its_input"), make_call(tmp_path)).status == (
            "returned"
        )

    def test_a_killed_server_is_started_again(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        pids = [pid_of(server)]
        # Killed from outside while nothing runs: the next candidate does not notice.
        os.kill(pids[0], signal.SIGKILL)
        with server.candidate(hostile("kills_its_parent"), NAMES) as process:
            pids.append(pid_of(server))
            family = below(pids[1])
            reply = process.call(call.request, 20.0)
        assert reply.status == "crashed"
        assert "the server of its process was ended" in reply.message
        assert wait_until_gone({*pids, *family}) == set()
        good = written(tmp_path, "def f(a, b): return a.clone()")
        assert call_once(server, good, call).status == "returned"
        assert len({*pids, pid_of(server)}) == 3


class TestLoading:
    @pytest.mark.parametrize(
        ("file", "message"),
        [
            ("import_raises", r"RuntimeError: no such accelerator \(.*/import_raises\.py:3\)"),
            ("import_calls_sys_exit", r"SystemExit: usage: this is a script \(.*exit\.py:5\)"),
            ("import_exits", "its process ended with exit status 0"),
            ("import_crashes", "its process was ended by SIGSEGV"),
            ("import_interrupts", "KeyboardInterrupt"),
        ],
    )
    def test_an_import_that_fails_is_a_bad_candidate(
        self, server: WorkerServer, call: Call, tmp_path: Path, file: str, message: str
    ) -> None:
        with pytest.raises(BadCandidate, match=message) as caught:
            server.candidate(hostile("f", file), NAMES)
        assert file in str(caught.value)
        assert below(pid_of(server)) == set()
        if file == "import_crashes":
            assert caught.value.output_text.startswith("importing\nFatal Python error")
        good = written(tmp_path, "def f(a, b): return a.clone()")
        assert call_once(server, good, call).status == "returned"

    def test_an_import_without_end_is_stopped(self, server: WorkerServer) -> None:
        with pytest.raises(BadCandidate, match=r"was not imported within 0\.3 s") as caught:
            server.candidate(hostile("f", "import_hangs"), NAMES, load_timeout=0.3)
        assert "import_hangs.py" in caught.value.output_text
        assert below(pid_of(server)) == set()

    def test_a_copy_of_its_process_is_no_candidate(self, server: WorkerServer, call: Call) -> None:
        reply = call_once(server, hostile("add", "import_forks"), call)
        assert reply.status == "returned"
        assert below(pid_of(server)) == set()

    def test_a_wrong_number_of_parameters_is_told_in_the_operators_name(
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

    def test_imports_of_sibling_files_work_during_the_call_too(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        (tmp_path / "sibling.py").write_text("def work(a):\n    return a.clone()\n")
        source = """
            def f(a, b):
                from sibling import work
                return work(a)
        """
        assert call_once(server, written(tmp_path, source), call).status == "returned"

    def test_files_named_like_our_packages_do_not_shadow_them(
        self, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("oracle", "fast"):
            (tmp_path / f"{name}.py").write_text("raise RuntimeError('shadowed')\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        source = "import oracle.candidate\n\ndef f(a, b): return a.clone()"
        written(tmp_path, source)
        with WorkerServer("cpu") as server:
            for name in ("kernel:f", f"{tmp_path}/kernel.py:f"):
                assert call_once(server, parse_candidate(name), call).status == "returned"
            with pytest.raises(BadCandidate, match=r"fast/__init__\.py has no|fast has no"):
                server.candidate(parse_candidate("fast:nothing"), NAMES)


class TestServer:
    def test_hello(self, server: WorkerServer) -> None:
        assert server.hello is not None
        assert server.hello.torch == str(torch.__version__)
        assert server.hello.interpreter is None
        # OpenBLAS's may be there, which numpy starts and which end before a fork. OpenMP's not.
        assert server.hello.started_threads <= max(2, server.hello.threads)

    def test_the_server_leads_a_session_of_its_own(self, server: WorkerServer) -> None:
        assert os.getsid(pid_of(server)) == pid_of(server)

    def test_a_triton_candidate_runs_in_the_faithful_interpreter(
        self, tmp_path: Path, call: Call
    ) -> None:
        path = tmp_path / "kernel.py"
        path.write_text(
            textwrap.dedent("""
                import torch
                import triton
                import triton.language as tl

                @triton.jit
                def kernel(source, target, n, BLOCK: tl.constexpr):
                    place = tl.arange(0, BLOCK)
                    x = tl.load(source + place, mask=place < n).to(tl.float32)
                    tl.store(target + place, (x * 1.00390625).to(tl.bfloat16), mask=place < n)

                def f(a, b):
                    result = torch.empty_like(a)
                    kernel[(1,)](a, result, a.numel(), BLOCK=8)
                    return result
            """)
        )
        with WorkerServer("interpreter") as server:
            reply = call_once(server, parse_candidate(f"{path}:f"), call)
            with pytest.raises(BadCandidate, match="kernel is a Triton kernel"):
                server.candidate(parse_candidate(f"{path}:kernel"), NAMES)
        assert reply.status == "returned", reply.message
        assert server.hello is not None
        assert server.hello.interpreter is not None
        assert server.hello.interpreter.faithful
        # 1 + 2^-8 lies midway between 1 and 1 + 2^-7, and goes to the even one.
        assert call.output[0] == 0x3F80

    def test_a_server_that_takes_too_long_to_start_is_an_error_and_is_gone(self) -> None:
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

    def test_users_own_tunables_of_malloc_are_kept(
        self, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
        source = """
            import os

            assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2"

            def f(a, b): return a.clone()
        """
        with WorkerServer("cpu") as server:
            request = replace(call.request, fill_byte=9)
            reply = call_once(server, written(tmp_path, source), Call(request))
            process = server.candidate(written(tmp_path, source), NAMES)
            # Closing is harmless in any order, and twice.
            server.close()
            process.close()
        assert reply.tensors[0].poisoned is True
        assert not process.alive

    def test_a_missing_file_is_the_judges_error(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        request = replace(call.request, inputs_path=str(tmp_path / "nowhere"))
        with server.candidate(hostile("returns_none"), NAMES) as process:
            with pytest.raises(FileNotFoundError, match="nowhere"):
                process.call(request, 20.0)
            assert not process.alive

    def test_a_failure_around_the_call_is_the_judges_error(
        self, server: WorkerServer, call: Call
    ) -> None:
        beyond = replace(call.request.inputs[0], offset=2**20)
        request = replace(call.request, inputs=(beyond, beyond))
        with (
            server.candidate(hostile("returns_none"), NAMES) as process,
            pytest.raises(WorkerError, match="the worker failed around the call"),
        ):
            process.call(request, 20.0)

    def test_an_interrupted_start_leaves_nothing_behind(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        before = below(os.getpid())
        monkeypatch.setattr(worker, "_wait_readable", interrupt)
        with pytest.raises(KeyboardInterrupt), WorkerServer("cpu"):
            pytest.fail("it started")
        assert below(os.getpid()) == before

    @pytest.mark.parametrize(
        "reference",
        [hostile("f", "import_hangs"), hostile("loops_for_ever")],
        ids=["import", "call"],
    )
    def test_after_an_interrupt_the_server_works_on(
        self, server: WorkerServer, tmp_path: Path, call: Call, reference: CandidateReference
    ) -> None:
        with pytest.raises(KeyboardInterrupt), interrupted(after=0.3):
            call_once(server, reference, call)
        assert below(pid_of(server)) == set()
        good = written(tmp_path, "def f(a, b): return a.clone()")
        assert call_once(server, good, call).status == "returned"

    def test_an_interrupted_judge_leaves_nothing_behind(self, tmp_path: Path, call: Call) -> None:
        judge = start_judge(tmp_path, call, "loops_for_ever")
        family = below(judge.pid)
        assert len(family) >= 2
        os.killpg(judge.pid, signal.SIGINT)
        output, _ = judge.communicate(timeout=20.0)
        assert judge.returncode in {-signal.SIGINT, 1}
        assert output.count("Traceback") == 1
        assert output.rstrip().endswith("KeyboardInterrupt")
        assert wait_until_gone(family, 0.0) == set()

    def test_a_killed_judge_leaves_nothing_behind(self, tmp_path: Path, call: Call) -> None:
        # Not even where a copy of it lives on, which holds the channel to the server open.
        judge = start_judge(tmp_path, call, "loops_for_ever", before="os.fork() or time.sleep(6)")
        copies = {pid for pid in below(judge.pid) if "judge.py" in command_of(pid)}
        family = below(judge.pid) - copies
        assert (len(copies), len(family) >= 2) == (1, True)
        judge.kill()
        assert wait_until_gone(family, 5.0) == set()
        for pid in copies:
            os.kill(pid, signal.SIGKILL)
        judge.communicate(timeout=20.0)


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


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def start_judge(
    folder: Path, call: Call, function: str, before: str = "pass"
) -> subprocess.Popen[str]:
    """Start a script that judges a candidate, and wait until the call runs."""
    script = folder / "judge.py"
    script.write_text(
        textwrap.dedent(f"""
            import os
            import sys
            import time

            sys.path.insert(0, {str(ROOT)!r})
            from oracle.candidate import parse_candidate
            from oracle.worker import *

            request = {call.request!r}
            with WorkerServer("cpu") as server:
                {before}
                reference = parse_candidate({str(HOSTILE / "calls.py")!r} + ":{function}")
                with server.candidate(reference, ("a", "b")) as process:
                    print("calling", flush=True)
                    process.call(request, 100.0)
        """)
    )
    judge = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert judge.stdout is not None
    assert judge.stdout.readline() == "calling\n"
    time.sleep(0.1)
    return judge


class TestInProcess:
    def test_it_returns_the_same_facts_as_a_worker(
        self, server: WorkerServer, tmp_path: Path, call: Call
    ) -> None:
        reference = written(tmp_path, "def f(a, b): return (a + b).t()")
        isolated = call_once(server, reference, call)
        output = call.output
        direct = call_in_process(lambda a, b: (a + b).t(), make_call(tmp_path).request)

        def plain(reply: CallReply) -> dict[str, Any]:
            facts = asdict(reply)
            del facts["seconds"]
            for memory in (*facts["tensors"], *facts["input_footprints"]):
                del memory["address"]
            return facts

        assert plain(direct) == plain(isolated)
        assert call.output == output

    def test_what_it_raises_is_a_reply(self, call: Call) -> None:
        def f(*_: torch.Tensor) -> None:
            raise ValueError("no")

        reply = call_in_process(f, call.request)
        assert reply.status == "raised"
        assert re.search(rf"ValueError: no \({__file__}:\d+\)", reply.message)

    def test_an_interrupt_is_the_users(self, call: Call) -> None:
        def f(*_: torch.Tensor) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            call_in_process(f, call.request)

    def test_one_caller_remembers_held_outputs(self, tmp_path: Path) -> None:
        request = make_call(tmp_path, keep_outputs=True).request
        buffer = torch.zeros(2, 3, dtype=torch.bfloat16)
        caller = Caller(lambda a, _: buffer.add_(a.nan_to_num(1.0)), "cpu")
        caller.call(request)
        assert caller.call(request).earlier[0].changed

    def test_a_candidate_without_a_line_of_python_is_told_without_one(self, call: Call) -> None:
        reply = call_in_process(divmod, call.request)
        assert reply.status == "raised"
        assert "oracle" not in reply.message


class TestMessages:
    @pytest.mark.parametrize(
        "change",
        [
            {"status": "perfect"},
            {"status": None},
            {"seconds": "1"},
            {"seconds": math.nan},
            {"seconds": math.inf},
            {"seconds": True},
            {"returned_count": 1.5},
            {"returned_count": True},
            {"message": 1},
            {"tensors": None},
            {"tensors": [1]},
            {"tensors": [{"type_name": "torch.Tensor"}]},
            {"input_footprints": [{"address": 0}]},
            {"unknown": 1},
        ],
    )
    def test_a_reply_is_read_strictly(self, change: dict[str, Any]) -> None:
        plain = asdict(CallReply(status="returned"))
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}
        assert worker._decode(CallReply, plain) == CallReply(status="returned")
        with pytest.raises(worker._Malformed):
            worker._decode(CallReply, plain | change)

    def test_a_whole_number_of_seconds_is_a_time(self) -> None:
        plain = {k: [] if v == () else v for k, v in asdict(CallReply("returned")).items()}
        assert worker._decode(CallReply, plain | {"seconds": 2}).seconds == 2.0

    @pytest.mark.parametrize("value", [None, [], 3, "text", {}])
    def test_what_is_no_reply_at_all(self, value: object) -> None:
        with pytest.raises(worker._Malformed):
            worker._decode(CallReply, value)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"dtype": "float8"}, "has dtype 'float8'; known are bfloat16"),
            ({"strides": (1,)}, "give one stride an axis"),
            ({"offset": 3}, "must be a multiple of 2"),
            ({"offset": -2}, "leave room"),
            ({"offset": 4, "storage_offset": 3}, "leave room"),
        ],
    )
    def test_a_layout_that_cannot_be_built_is_refused(
        self, change: dict[str, Any], message: str
    ) -> None:
        layout = TensorLayout("first", "bfloat16", (2, 3), (3, 1), 0)
        with pytest.raises(ValueError, match=message):
            replace(layout, **change)

    @pytest.mark.parametrize("fill_byte", [-1, 255, 256])
    def test_a_fill_byte_that_malloc_does_not_know_is_refused(
        self, tmp_path: Path, fill_byte: int
    ) -> None:
        with pytest.raises(ValueError, match=f"fill_byte is {fill_byte}"):
            make_call(tmp_path, fill_byte=fill_byte)


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
        call = make_call(tmp_path, copy_back_inputs=True)
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
        layout = TensorLayout("first", "bfloat16", (elements,), (1,), 0)
        for name in ("inputs", "outputs"):
            np.full(2 * elements, 0x33, np.uint8).tofile(tmp_path / f"{name}.tensors")
        request = CallRequest(
            case="case",
            inputs_path=str(tmp_path / "inputs.tensors"),
            inputs_bytes=2 * elements,
            inputs=(layout, layout),
            outputs_path=str(tmp_path / "outputs.tensors"),
            outputs=(layout,),
            fill_byte=0xA5,
        )
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
