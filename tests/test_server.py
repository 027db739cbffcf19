from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from oracle.candidate import BadCandidate, parse_candidate
from oracle.worker import WorkerServer
from tests.calls import HOSTILE, NAMES, SPECIAL, Call, hostile, make_call, make_copy_call, written
from tests.processes import below, command_of, wait_until_gone

ROOT = Path(__file__).parent.parent
TUNABLES = "glibc.malloc.arena_max=2"


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A current folder, on sys.path too, with files named like our packages; and tunables."""
    folder = tmp_path_factory.mktemp("surroundings")
    for name in ("oracle", "fast"):
        (folder / f"{name}.py").write_text("raise RuntimeError('shadowed')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setenv("GLIBC_TUNABLES", TUNABLES)
        yield folder


@pytest.fixture(scope="module")
def server(surroundings: Path) -> Iterator[WorkerServer]:  # noqa: ARG001 - it starts in them
    with WorkerServer("cpu") as running:
        yield running


@pytest.fixture
def call(tmp_path: Path) -> Call:
    return make_call(tmp_path)


def pid_of(server: WorkerServer) -> int:
    assert server._process is not None
    return server._process.pid


def run(server: WorkerServer, folder: Path, source: str) -> None:
    """Call a candidate whose source asserts something."""
    with server.candidate(written(folder, source), NAMES) as process:
        reply = process.call(make_call(folder).request, 20.0)
    assert reply.status == "returned", reply


class TestServer:
    def test_it_leads_a_session_of_its_own(self, server: WorkerServer) -> None:
        assert os.getsid(pid_of(server)) == pid_of(server)

    def test_it_runs_no_threads_that_a_fork_would_lose(self, server: WorkerServer) -> None:
        # OpenBLAS's may be there, which numpy starts and which end before a fork. OpenMP's not.
        threads = len(list(Path(f"/proc/{pid_of(server)}/task").iterdir()))
        assert threads <= max(2, torch.get_num_threads())

    def test_it_has_no_interpreter_on_another_device(self, server: WorkerServer) -> None:
        assert server.interpreter is None

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
            with server.candidate(parse_candidate(f"{path}:f"), NAMES) as process:
                reply = process.call(call.request, 20.0)
            with pytest.raises(BadCandidate, match="kernel is a Triton kernel"):
                server.candidate(parse_candidate(f"{path}:kernel"), NAMES)
        assert reply.status == "returned", reply.message
        assert server.interpreter is not None
        assert server.interpreter.faithful
        # 1 + 2^-8 lies midway between 1 and 1 + 2^-7, and goes to the even one.
        assert call.output[0] == 0x3F80


class TestSurroundings:
    """What a candidate finds around it, as it would without the judge."""

    def test_files_named_like_our_packages_do_not_shadow_them(
        self, server: WorkerServer, surroundings: Path, call: Call
    ) -> None:
        source = "import oracle.candidate\n\ndef f(a, b): return a.clone()"
        written(surroundings, source)
        for name in ("kernel:f", f"{surroundings}/kernel.py:f"):
            with server.candidate(parse_candidate(name), NAMES) as process:
                assert process.call(call.request, 20.0).status == "returned"
        with pytest.raises(BadCandidate, match=r"fast/__init__\.py has no|fast has no"):
            server.candidate(parse_candidate("fast:nothing"), NAMES)

    def test_the_environment_is_the_users(self, server: WorkerServer, tmp_path: Path) -> None:
        source = f"""
            import os
            import pathlib

            assert os.environ["GLIBC_TUNABLES"] == {TUNABLES!r}
            assert pathlib.Path("/proc/self/oom_score_adj").read_text() == "1000\\n"
            assert os.read(0, 1) == b""

            def f(a, b): return a
        """
        run(server, tmp_path, source)

    def test_candidates_compute_with_as_many_threads_as_torch_chooses(
        self, server: WorkerServer, tmp_path: Path
    ) -> None:
        source = f"""
            def f(a, b):
                assert torch.get_num_threads() == {torch.get_num_threads()}
                torch.randn(2**20).to(torch.bfloat16).sum()
                return a
        """
        run(server, tmp_path, source)

    @pytest.mark.parametrize("elements", [1, 8, 60, 500, 2000, 2**23])
    @pytest.mark.parametrize("fill_byte", [0xA5, 0x5A, 0x00])
    def test_fresh_memory_of_any_size_holds_the_fill_byte(
        self, server: WorkerServer, tmp_path: Path, elements: int, fill_byte: int
    ) -> None:
        request = make_copy_call(tmp_path, elements, fill_byte=fill_byte)
        # Memory used and freed before, so that there is something else to find in it.
        source = """
            warm = [torch.full((n,), 7.0) for n in (1, 4, 30, 250, 1000) for _ in range(20)]
            del warm

            def f(a, b): return torch.empty_like(a)
        """
        with server.candidate(written(tmp_path, source), NAMES) as process:
            reply = process.call(request, 20.0)
        assert reply.tensors[0].poisoned is True
        found = np.fromfile(request.outputs_path, np.uint8)
        assert found.size == 2 * elements
        assert (found == fill_byte).all()


class TestContainment:
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

    def test_a_copy_of_its_process_is_no_candidate(self, server: WorkerServer, call: Call) -> None:
        with server.candidate(hostile("add", "import_forks"), NAMES) as process:
            assert process.call(call.request, 20.0).status == "returned"
        assert below(pid_of(server)) == set()

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


class TestEndOfTheJudge:
    def test_an_interrupted_judge_leaves_nothing_behind(self, tmp_path: Path, call: Call) -> None:
        with started_judge(tmp_path, call) as judge:
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
        before = "os.fork() or time.sleep(60)"
        with started_judge(tmp_path, call, before) as judge:
            copies = {pid for pid in below(judge.pid) if "judge.py" in command_of(pid)}
            family = below(judge.pid) - copies
            assert (len(copies), len(family) >= 2) == (1, True)
            judge.kill()
            assert wait_until_gone(family, 5.0) == set()


@contextmanager
def started_judge(
    folder: Path, call: Call, before: str = "pass"
) -> Iterator[subprocess.Popen[str]]:
    """Start a script that judges a candidate without end, and wait until the call runs."""
    script = folder / "judge.py"
    script.write_text(
        textwrap.dedent(f"""
            import os
            import sys
            import time

            sys.path.insert(0, {str(ROOT)!r})
            from oracle.call import *
            from oracle.candidate import parse_candidate
            from oracle.worker import WorkerServer

            request = {call.request!r}
            with WorkerServer("cpu") as server:
                {before}
                reference = parse_candidate({str(HOSTILE / "calls.py")!r} + ":loops_for_ever")
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
    try:
        assert judge.stdout is not None
        assert judge.stdout.readline() == "calling\n"
        time.sleep(0.1)
        yield judge
    finally:
        # The judge and its copies; what else it leaves is what the tests look for.
        with suppress(ProcessLookupError):
            os.killpg(judge.pid, signal.SIGKILL)
        judge.communicate(timeout=20.0)
