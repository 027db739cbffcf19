from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from click.testing import CliRunner, Result

from oracle import __version__, cli, machine, verification
from oracle.candidate import BadCandidate
from oracle.verdict import Verdict
from tests.test_report import failed, failing, passing, verdict

FORWARD = "kv_rope.concat.forward"
VERIFY = ["verify", "kernel.py:forward", "--operator", FORWARD]

Call = dict[str, Any]


class FakeJudge:
    """Stands where ``oracle.verification.Judge`` stands: answers as told, remembers calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.answers: list[Verdict | BaseException | Callable[[], Verdict]] = [verdict()]
        self._settings: dict[str, Any] = {}

    def __call__(self, **settings: Any) -> FakeJudge:
        self._settings = settings
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def verify(self, candidate: str) -> Verdict:
        self.calls.append({"candidate": candidate, **self._settings})
        answer = self.answers[min(len(self.calls), len(self.answers)) - 1]
        if isinstance(answer, BaseException):
            raise answer
        if callable(answer):
            return answer()
        for done, case in enumerate(answer.cases, start=1):
            self._settings["on_case"](case, done, len(answer.cases))
        return answer


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeJudge:
    double = FakeJudge()
    monkeypatch.setattr(verification, "Judge", double)
    return double


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.program, list(arguments), prog_name="kernel-oracle")


def interrupted(so_far: Verdict) -> verification.Interrupted:
    return verification.Interrupted(replace(so_far, interrupted=True))


# Exit statuses


@pytest.mark.parametrize(
    ("status", "exit_status"),
    [
        ("passed", 0),
        ("wrong_values", 1),
        ("below_contract", 1),
        ("call_violation", 1),
        ("crashed", 1),
        ("timed_out", 1),
        ("out_of_memory", 1),
        ("bad_candidate", 2),
        ("nothing_compared", 2),
        ("judge_error", 3),
    ],
)
def test_the_exit_status_follows_the_verdict(
    fake: FakeJudge, status: str, exit_status: int
) -> None:
    fake.answers = [verdict(passing(status=status), status=status)]

    assert run(*VERIFY).exit_code == exit_status


def test_an_interrupted_run_shows_and_writes_what_was_judged_and_exits_with_130(
    fake: FakeJudge, tmp_path: Path
) -> None:
    fake.answers = [interrupted(verdict(passing("done"), passing("later", status="not_run")))]
    target = tmp_path / "verdict.json"
    result = run(*VERIFY, "--json", str(target))

    assert result.exit_code == 130
    assert "INTERRUPTED" in result.stderr
    written = Verdict.from_dict(json.loads(target.read_text()))
    assert written.interrupted
    assert [case.name for case in written.cases] == ["done", "later"]


def test_ctrl_c_before_anything_was_judged_exits_with_130_and_no_traceback(
    fake: FakeJudge,
) -> None:
    fake.answers = [KeyboardInterrupt()]
    result = run(*VERIFY)

    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_ends_a_run_like_ctrl_c_and_its_handler_is_put_back(
    fake: FakeJudge, number: signal.Signals
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)

    def stopped() -> Verdict:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise interrupted(verdict()) from None
        return verdict()

    fake.answers = [stopped]

    assert run(*VERIFY).exit_code == 130
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_that_comes_out_as_another_exception_is_no_fault_of_ours(
    fake: FakeJudge, number: signal.Signals
) -> None:
    def broken_import() -> Verdict:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as stop:
            raise RuntimeError("Error calling __set_name__") from stop
        return verdict()

    fake.answers = [broken_import]
    result = run(*VERIFY)

    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"


def test_a_stop_signal_that_the_caller_ignores_stays_ignored(fake: FakeJudge) -> None:
    def hung_up() -> Verdict:
        signal.raise_signal(signal.SIGHUP)
        return verdict()

    fake.answers = [hung_up]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(*VERIFY).exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_fault_of_ours_is_a_judge_error_that_asks_for_a_report(fake: FakeJudge) -> None:
    fake.answers = [RuntimeError("the judge stumbled")]
    result = run(*VERIFY)

    assert result.exit_code == 3
    assert "RuntimeError: the judge stumbled" in result.stderr
    assert f"judge_error: this is a fault of kernel-oracle {__version__}" in result.stderr
    assert "please report it" in result.stderr


def test_a_device_that_is_not_there_exits_with_3_and_says_what_to_do(fake: FakeJudge) -> None:
    fake.answers = [machine.DeviceUnavailable("device cuda was asked for; use --device cpu")]
    result = run(*VERIFY)

    assert result.exit_code == 3
    assert result.stderr.endswith("Error: device cuda was asked for; use --device cpu\n")
    assert "judge_error" not in result.stderr


# What the user got wrong


@pytest.mark.parametrize(
    "error",
    [
        BadCandidate("there is no file 'kernel.py'"),
        verification.UsageError("no case 'nope'; there are plain, turn"),
    ],
)
def test_what_the_user_can_put_right_is_a_usage_error_without_traceback(
    fake: FakeJudge, error: Exception
) -> None:
    fake.answers = [error]
    result = run(*VERIFY)

    assert result.exit_code == 2
    assert f"Error: {error}" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify"], "Missing argument 'CANDIDATE'"),
        (["verify", "k.py:f"], "Missing option '--operator'"),
        ([*VERIFY, "--style", "write"], "'write' is not one of"),
        ([*VERIFY, "--contract", "exact"], "'exact' is not one of"),
        ([*VERIFY, "--domain", "special"], "'special' is not one of"),
        ([*VERIFY, "--domain", "official", "--where", "head_dim=64"], "narrows the general"),
        ([*VERIFY, "--where", "head_dim"], "'head_dim' is no claim; write AXIS=VALUE"),
        ([*VERIFY, "--where", "a=1", "--where", "a=2"], "claims a twice; write a=VALUE,VALUE"),
        ([*VERIFY, "other.py:f"], "give one candidate"),
        ([*VERIFY, "head_dim=64"], "give one candidate"),
        ([*VERIFY, "--device", "gpu"], "'gpu' is not one of"),
        ([*VERIFY, "--seed", "-1"], "'-1' is neither a number 0, 1, 2, ... nor 'random'"),
        ([*VERIFY, "--seed", "1.5"], "'1.5' is neither a number"),
        ([*VERIFY, "--timeout", "0"], "0 is not in the range"),
        (["show", "kv_rope.nope"], "'kv_rope.nope'; there are kv_rope."),
        (["demo", "--operator", "kv_rope.nope"], "'kv_rope.nope'; there are kv_rope."),
        (["judge"], "No such command 'judge'"),
        ([*VERIFY, "--json", "no/such/folder/v.json"], "there is no folder 'no/such/folder'"),
        ([*VERIFY, "--json", "."], "'.' is a folder"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_judged(
    fake: FakeJudge, arguments: Sequence[str], message: str
) -> None:
    result = run(*arguments)

    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not fake.calls


def test_a_file_that_may_not_be_written_is_refused_before_anything_is_judged(
    fake: FakeJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever runs the tests may be root, whom no permission stops.
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.W_OK)
    result = run(*VERIFY, "--json", str(tmp_path / "v.json"))

    assert result.exit_code == 2
    assert "cannot be written; check its permissions" in result.stderr
    assert not fake.calls


# What the judge is called with


def test_the_defaults_are_those_of_the_design(fake: FakeJudge) -> None:
    run(*VERIFY)
    (call,) = fake.calls
    call.pop("on_case")

    assert call == {
        "candidate": "kernel.py:forward",
        "operator": FORWARD,
        "cases": "all",
        "style": "return",
        "contract": "stored_intermediates",
        "domain": "official",
        "where": {},
        "device": None,
        "seed": 0,
        "timeout": 60.0,
        "fail_fast": False,
        "diagnose": True,
    }


def test_every_option_reaches_the_verification(fake: FakeJudge) -> None:
    options = (
        "--cases keep,turn --style out --contract single_rounding --device cpu --seed 5"
        " --timeout 2.5 --fail-fast"
    )
    run(*VERIFY, *options.split())
    (call,) = fake.calls

    assert call["cases"] == "keep,turn"
    assert call["style"] == "out"
    assert call["contract"] == "single_rounding"
    assert call["device"] == "cpu"
    assert call["seed"] == 5
    assert call["timeout"] == 2.5
    assert call["fail_fast"] is True


@pytest.mark.parametrize(
    "words",
    [
        ["--where", "head_dim=64,128", "dtype=float16"],
        ["--where", "head_dim=64,128", "--where", "dtype=float16"],
        ["--where", "head_dim=64,128 dtype=float16"],
        ["--domain", "general", "--where", "head_dim=64,128", "dtype=float16"],
    ],
)
def test_claims_may_follow_one_another(fake: FakeJudge, words: Sequence[str]) -> None:
    assert run(*VERIFY, *words).exit_code == 0
    (call,) = fake.calls
    assert call["where"] == {"head_dim": "64,128", "dtype": "float16"}
    assert call["candidate"] == VERIFY[1]


def test_a_random_seed_is_printed_and_used(fake: FakeJudge) -> None:
    first, second = run(*VERIFY, "--seed", "random", "-q"), run(*VERIFY, "--seed", "random", "-q")
    seeds = [call["seed"] for call in fake.calls]

    assert f"seed {seeds[0]} " in first.stderr
    assert f"--seed {seeds[1]}" in second.stderr
    # One chance in 2^32 to be equal.
    assert seeds[0] != seeds[1]


# Where output goes


@pytest.mark.parametrize("command", [VERIFY, ["list"], ["show", FORWARD], ["env"]])
def test_tables_go_to_standard_error_and_nothing_to_standard_output(
    fake: FakeJudge, command: Sequence[str]
) -> None:
    result = run(*command)

    assert result.exit_code == 0
    assert result.stdout == ""
    assert result.stderr.strip()
    assert len(fake.calls) <= 1


@pytest.mark.parametrize("command", [VERIFY, ["list"], ["show", FORWARD], ["env"], ["demo"]])
def test_json_alone_goes_to_standard_output(fake: FakeJudge, command: Sequence[str]) -> None:
    fake.answers = [verdict(), failed()]
    result = run(*command, "--json", "-")

    assert result.exit_code == 0
    assert json.loads(result.stdout)


def test_the_verdict_written_is_the_verdict_reached(fake: FakeJudge, tmp_path: Path) -> None:
    fake.answers = [failed(passing(), failing())]
    target = tmp_path / "v.json"
    target.write_text("an older verdict")
    to_file = run(*VERIFY, "--json", str(target))
    to_output = run(*VERIFY, "--json", "-")

    assert Verdict.from_dict(json.loads(target.read_text())) == fake.answers[0]
    assert Verdict.from_dict(json.loads(to_output.stdout)) == fake.answers[0]
    assert to_file.exit_code == to_output.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["v.json"]


def test_a_link_to_a_file_is_written_through(fake: FakeJudge, tmp_path: Path) -> None:
    link, real = tmp_path / "link.json", tmp_path / "real.json"
    real.write_text("old")
    link.symlink_to(real)
    run(*VERIFY, "--json", str(link))

    assert link.is_symlink()
    assert Verdict.from_dict(json.loads(real.read_text())) == fake.answers[0]


def test_json_may_go_to_a_device(fake: FakeJudge) -> None:
    assert run(*VERIFY, "--json", os.devnull).exit_code == 0
    assert not Path(os.devnull).is_file()
    assert fake.calls


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_standard_output_that_is_full_is_told_without_a_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-c", "from oracle.cli import main; main()", "list", "--json", "-"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert result.returncode == 3
    assert "could not be written to standard output" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


def test_a_file_that_cannot_be_written_after_all_is_told_and_leaves_the_old_one(
    fake: FakeJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "v.json"
    target.write_text("an older verdict")

    def full(_self: Path, _text: str, **_settings: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    result = run(*VERIFY, "--json", str(target))

    assert result.exit_code == 3
    assert f"could not be written to {target}" in result.stderr
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.output
    assert target.read_text() == "an older verdict"
    assert fake.calls


def test_quiet_prints_nothing_and_the_exit_status_still_tells(fake: FakeJudge) -> None:
    fake.answers = [failed()]
    verified, shown = run(*VERIFY, "--quiet"), run("demo", "--quiet")

    assert verified.exit_code == shown.exit_code == 1
    assert verified.output == shown.output == ""


@pytest.mark.parametrize("status", ["bad_candidate", "judge_error"])
def test_quiet_still_says_why_nothing_was_judged(fake: FakeJudge, status: str) -> None:
    fake.answers = [replace(verdict(status=status), detail="it is a folder\x1b[2J")]
    result = run(*VERIFY, "--quiet")

    assert result.stdout == ""
    assert result.stderr == f"{status}: it is a folder\\x1b[2J\n"


def test_verbose_lists_every_case(fake: FakeJudge) -> None:
    fake.answers = [verdict(passing("first"), passing("second"))]

    assert "second" not in run(*VERIFY).stderr
    assert "second" in run(*VERIFY, "--verbose").stderr


def test_progress_is_shown_on_a_terminal_only(
    fake: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answers = [verdict(passing("first"), passing("second"))]
    assert "second" not in run(*VERIFY).stderr

    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert "second: passed" in run(*VERIFY).stderr
    assert "second: passed" not in run(*VERIFY, "--quiet").stderr


def test_a_log_file_gets_lines_of_100_columns(
    fake: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    fake.answers = [verdict(remarks=("word " * 60,))]
    longest = max(len(line.rstrip()) for line in run(*VERIFY).stderr.splitlines())

    assert 90 <= longest <= 100


# The demo


def test_the_demo_passes_when_the_right_kernel_passes_and_the_wrong_one_is_rejected(
    fake: FakeJudge,
) -> None:
    fake.answers = [verdict(), failed()]
    result = run("demo", "--json", "-")
    data = json.loads(result.stdout)
    right, wrong = fake.calls

    assert result.exit_code == 0
    assert data["as_expected"] is True
    assert Verdict.from_dict(data["right"]) == fake.answers[0]
    assert Verdict.from_dict(data["wrong"]) == fake.answers[1]
    assert right["candidate"].endswith("examples/right_concat_forward.py:concat_forward")
    assert wrong["candidate"].endswith("examples/wrong_concat_forward.py:concat_forward")
    assert right["cases"] == wrong["cases"] == "probes"
    assert "A right Triton kernel for" in result.stderr
    assert "A wrong Triton kernel for" in result.stderr
    assert "the right kernel passed, and the wrong one was rejected" in result.stderr


@pytest.mark.parametrize(
    ("right", "wrong", "exit_status"),
    [
        (verdict(), verdict(), 1),
        (failed(), failed(), 1),
        (verdict(), replace(failed(), status="crashed"), 1),
        (verdict(), replace(failed(), status="bad_candidate"), 2),
        (replace(failed(), status="judge_error"), failed(), 3),
    ],
)
def test_the_demo_fails_when_the_judge_does_not_do_as_it_should(
    fake: FakeJudge, right: Verdict, wrong: Verdict, exit_status: int
) -> None:
    fake.answers = [right, wrong]
    result = run("demo")

    assert result.exit_code == exit_status
    assert "NOT as it should be" in result.stderr


def test_an_interrupted_demo_keeps_what_it_has_and_goes_no_further(fake: FakeJudge) -> None:
    fake.answers = [interrupted(verdict())]
    result = run("demo", "--json", "-")

    assert result.exit_code == 130
    assert len(fake.calls) == 1
    assert set(json.loads(result.stdout)) == {"right", "as_expected"}
    assert json.loads(result.stdout)["as_expected"] is False


def test_the_demo_of_another_operator_judges_its_examples(fake: FakeJudge) -> None:
    fake.answers = [verdict(), failed()]
    run("demo", "--operator", "kv_rope.static.backward")

    assert [call["candidate"].rpartition("/")[2] for call in fake.calls] == [
        "right_static_backward.py:static_backward",
        "wrong_static_backward.py:static_backward",
    ]


def test_the_demo_of_an_operator_without_examples_says_so(
    fake: FakeJudge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "_EXAMPLES", tmp_path)
    result = run("demo")

    assert result.exit_code == 2
    assert f"operator {FORWARD} has no example kernels" in result.stderr
    assert not fake.calls


def test_the_demo_names_its_examples_so_that_a_copied_command_finds_them(
    fake: FakeJudge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = [Path(cli.__file__).parent.parent, tmp_path]
    for folder in folders:
        monkeypatch.chdir(folder)
        run("demo")
        named = fake.calls[-1]["candidate"].rpartition(":")[0]
        assert (folder / named).is_file()
        assert Path(named).is_absolute() == (folder == tmp_path)


def test_the_demo_runs_in_the_interpreter_without_a_gpu_and_nowhere_else_unasked(
    fake: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_has_gpu", lambda: False)
    run("demo")
    refused = run("demo", "--device", "cuda")

    assert {call["device"] for call in fake.calls} == {"interpreter"}
    assert refused.exit_code == 3
    assert "device cuda was asked for" in refused.stderr


# Help and start-up


def test_help_of_verify_explains_the_candidate_with_an_example_and_the_exit_statuses() -> None:
    result = run("verify", "--help")

    assert result.exit_code == 0
    for part in ("file.py:function", "Examples:", "--operator kv_rope.concat.forward",
                 "Exit status: 0 passed", "--contract single_rounding"):  # fmt: skip
        assert part in result.stdout


def test_the_version_is_printed() -> None:
    assert run("--version").stdout == f"kernel-oracle, version {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["verify", "--help"], ["--version"]])
def test_help_imports_neither_torch_nor_numpy_nor_triton(arguments: Sequence[str]) -> None:
    program = (
        "import sys\n"
        "from oracle.cli import program\n"
        "try:\n"
        f"    program.main({list(arguments)!r}, prog_name='kernel-oracle')\n"
        "except SystemExit as stop:\n"
        "    heavy = {'torch', 'numpy', 'triton'} & set(sys.modules)\n"
        "    sys.exit(f'imported {heavy}' if heavy or stop.code else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


# End to end, with the real judge

CANDIDATES = """
import os
import time
from pathlib import Path

import torch


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def right(k, v, cos, sin, key_cache, value_cache):
    rotated = k * cos + rotate_half(k) * sin
    return torch.cat((key_cache, rotated), dim=2), torch.cat((value_cache, v), dim=2)


def right_out(k, v, cos, sin, key_cache, value_cache, out_keys, out_values):
    keys, values = right(k, v, cos, sin, key_cache, value_cache)
    out_keys.copy_(keys)
    out_values.copy_(values)


def swapped(k, v, cos, sin, key_cache, value_cache):
    return right(k, v, sin, cos, key_cache, value_cache)


def exits_on_five_tokens(k, v, cos, sin, key_cache, value_cache):
    if k.shape[2] == 5:
        os._exit(7)
    return right(k, v, cos, sin, key_cache, value_cache)


def hangs_on_five_tokens(k, v, cos, sin, key_cache, value_cache):
    if k.shape[2] == 5:
        Path(__file__).with_name("hanging").write_text(str(os.getpid()))
        time.sleep(300)
    return right(k, v, cos, sin, key_cache, value_cache)


def takes_one(k):
    return k
"""


@pytest.fixture(scope="module")
def candidates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("candidates") / "kernels.py"
    path.write_text(CANDIDATES)
    return path


def verify(candidate: str, *options: str) -> Result:
    return run("verify", candidate, "--operator", FORWARD, "--device", "cpu", *options)


def read(path: Path) -> Verdict:
    return Verdict.from_dict(json.loads(path.read_text()))


@pytest.mark.parametrize(("function", "style"), [("right", "return"), ("right_out", "out")])
def test_a_right_kernel_passes_with_every_element_certified(
    candidates: Path, tmp_path: Path, function: str, style: str
) -> None:
    target = tmp_path / "v.json"
    options = ("--cases", "keep,random", "--style", style, "--seed", "3", "--json", str(target))
    result = verify(f"{candidates}:{function}", *options)
    found = read(target)

    assert result.exit_code == 0
    assert found.passed
    assert (found.style, found.seed, found.device) == (style, 3, "cpu")
    assert found.grade == "stored_intermediates"
    assert found.certified == found.elements > 0
    assert found.environment["torch"] == torch.__version__
    assert f"{found.elements:,} of {found.elements:,} elements certified" in result.stderr


def test_the_command_a_failure_prints_repeats_exactly_that_failure(
    candidates: Path, tmp_path: Path
) -> None:
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    options = ("--cases", "keep,turn", "--seed", "7", "--json", str(first))
    result = verify(f"{candidates}:swapped", *options)
    program, *arguments = shlex.split(read(first).reproduce)
    repeated = run(*arguments, "--json", str(again))
    failures = [read(path).first_failure for path in (first, again)]

    assert program == "kernel-oracle"
    assert f"reproduce: {read(first).reproduce}\n" in result.stderr
    assert result.exit_code == repeated.exit_code == 1
    assert failures[0] is not None
    assert failures[1] is not None
    assert failures[0].first_wrong == failures[1].first_wrong
    assert failures[0].first_wrong is not None
    assert len(read(again).cases) == 1


def test_a_kernel_that_ends_its_process_is_crashed_and_the_other_cases_still_run(
    candidates: Path,
) -> None:
    result = verify(
        f"{candidates}:exits_on_five_tokens", "--cases", "keep,turn,halves", "--json", "-"
    )
    found = Verdict.from_dict(json.loads(result.stdout))

    assert result.exit_code == 1
    assert [case.status for case in found.cases] == ["passed", "crashed", "passed"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nowhere", "has no function 'nowhere'"),
        ("takes_one", "takes 1 positional parameter, but kv_rope.concat.forward passes 6"),
    ],
)
def test_a_candidate_that_cannot_be_called_exits_with_2_and_says_why(
    candidates: Path, function: str, message: str
) -> None:
    result = verify(f"{candidates}:{function}", "--cases", "keep", "--json", "-")
    found = Verdict.from_dict(json.loads(result.stdout))

    assert result.exit_code == 2
    assert found.status == "bad_candidate"
    assert message in found.detail
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_file_that_is_not_there_exits_with_2_and_names_it(tmp_path: Path) -> None:
    result = verify(f"{tmp_path}/nothing.py:forward", "--cases", "keep")

    assert result.exit_code == 2
    assert "nothing.py" in "".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_case_that_is_not_there_exits_with_2_and_names_it(candidates: Path) -> None:
    result = verify(f"{candidates}:right", "--cases", "keep,trun")

    assert result.exit_code == 2
    assert "no case 'trun' in this domain; did you mean turn?" in " ".join(result.stderr.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_cuda_where_there_is_none_exits_with_3(candidates: Path) -> None:
    result = verify(f"{candidates}:right", "--cases", "keep", "--device", "cuda")

    assert result.exit_code == 3
    assert "device cuda was asked for" in result.stderr


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, f"waited 60 s in vain for {what}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "to_group", "times"),
    [
        (signal.SIGINT, False, 1),
        (signal.SIGINT, True, 1),
        (signal.SIGINT, True, 4),
        (signal.SIGTERM, False, 1),
    ],
    ids=["SIGINT", "Ctrl-C in a terminal", "Ctrl-C by an impatient user", "SIGTERM"],
)
def test_a_stopped_run_keeps_what_it_has_judged_and_leaves_no_process_behind(
    candidates: Path, tmp_path: Path, number: signal.Signals, to_group: bool, times: int
) -> None:
    marker, target = candidates.with_name("hanging"), tmp_path / "v.json"
    marker.unlink(missing_ok=True)
    arguments = [
        *("verify", f"{candidates}:hangs_on_five_tokens", "--operator", FORWARD),
        *("--device", "cpu", "--cases", "keep,turn", "--json", str(target)),
    ]
    program = "from oracle.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            wait_until(
                lambda: (
                    running.poll() is not None or (marker.exists() and marker.read_text() != "")
                ),
                "the second case",
            )
            for _ in range(times):
                (os.killpg if to_group else os.kill)(running.pid, number)
                time.sleep(0.05)
            _, errors = running.communicate(timeout=60)
        finally:
            running.kill()

    assert running.returncode == 130
    assert "INTERRUPTED, passed so far" in errors
    assert "Traceback" not in errors
    found = read(target)
    assert found.interrupted
    assert [(case.name, case.status) for case in found.cases] == [("keep", "passed")]
    wait_until(lambda: not alive(int(marker.read_text())), "the candidate's process to end")


@pytest.mark.parametrize("operator", [FORWARD, "kv_rope.static.backward"])
def test_the_demo_tells_the_right_example_from_the_wrong_one(operator: str) -> None:
    result = run("demo", "--operator", operator, "--json", "-")

    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["as_expected"] is True
    right, wrong = (Verdict.from_dict(data[which]) for which in ("right", "wrong"))
    assert (right.status, right.grade) == ("passed", "single_rounding")
    assert wrong.status == "wrong_values"
    for found in (right, wrong):
        assert found.certified == found.elements > 0
