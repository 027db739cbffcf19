"""The command line: arguments in, a verdict out, and an exit status that tells what happened.

JSON goes to standard output or to the file named; tables, progress and messages go to standard
error. Exit statuses: 0 passed; 1 judged and failed; 2 usage, bad_candidate or nothing_compared;
3 judge_error or no such device; 130 interrupted.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from . import __version__, machine, report
from .definition import DOMAINS, STYLES
from .verdict import GRADES, CaseResult, Verdict

if TYPE_CHECKING:
    from .definition import Operator

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_JUDGE_ERROR = 3
EXIT_INTERRUPTED = 130

# In help texts, a line of its own that holds a backspace keeps the lines after it as they are.
_START_HELP = """\b
Start with:  kernel-oracle demo
Then judge:  kernel-oracle verify my_kernel.py:forward --operator kv_rope.concat.forward

Exit status: 0 passed; 1 judged and failed; 2 usage, bad_candidate, nothing_compared; 3
judge_error or no such device; 130 interrupted.
"""
_VERIFY_HELP = """\b
Examples:
  kernel-oracle verify my_kernel.py:forward --operator kv_rope.concat.forward
  kernel-oracle verify my_kernel.py:forward --operator kv_rope.concat.forward \\
      --cases probes --contract single_rounding --json verdict.json

Exit status: 0 passed; 1 judged and failed (a crash and a time limit included); 2 usage,
bad_candidate, nothing_compared; 3 judge_error or no such device; 130 interrupted, with what was
judged so far shown and written.
"""

_DETECT_HELP = """\b
Examples:
  kernel-oracle detect --operator kv_rope.concat.forward
  kernel-oracle detect --operator kv_rope.static.backward --where head_dim=64 dtype=float16 \\
      --legal-seeds 10 --json detection.json
"""

_EXAMPLES = Path(__file__).parent / "examples"
_LOG_WIDTH = 100
_DEAF_S = 5.0
"""Seconds after a stop signal in which others are taken for its repetitions."""


class _Program(click.Group):
    """The commands; :meth:`main` turns whatever happens into one of the exit statuses."""

    def main(self, *args: Any, **settings: Any) -> NoReturn:
        """Run a command and exit with its status."""
        settings["standalone_mode"] = False
        try:
            with _stop_signals():
                status = super().main(*args, **settings)
        except click.ClickException as error:
            error.show()
            status = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            status = EXIT_INTERRUPTED
        except machine.DeviceUnavailable as error:
            click.echo(f"Error: {error}", err=True)
            status = EXIT_JUDGE_ERROR
        except Exception:  # noqa: BLE001 - our faults must not look like the candidate's
            traceback.print_exc()
            click.echo(
                f"judge_error: this is a fault of kernel-oracle {__version__}, not of what it"
                " judges; please report it with the lines above and the command",
                err=True,
            )
            status = EXIT_JUDGE_ERROR
        sys.exit(status)


class _CannotWrite(click.ClickException):
    """The result could not be written where it was asked for."""

    exit_code = EXIT_JUDGE_ERROR


def _read_seed(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    """Return the seed asked for; for ``random``, one that is drawn and printed."""
    if value == "random":
        drawn = secrets.randbelow(2**32)
        click.echo(f"seed {drawn} (drawn; repeat with --seed {drawn})", err=True)
        return drawn
    if not (value.isascii() and value.isdecimal()):
        raise click.BadParameter(f"{value!r} is neither a number 0, 1, 2, ... nor 'random'")
    return int(value)


def _check_json_target(
    _ctx: click.Context, _param: click.Parameter, value: str | None
) -> str | None:
    """Refuse a file that could not be written, before anything is judged."""
    if value is None or value == "-":
        return value
    path = Path(value)
    if path.is_dir():
        raise click.BadParameter(f"{value!r} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(path.parent)!r}; create it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"{value!r} cannot be written; check its permissions")
    return value


_json_option = click.option(
    "--json",
    "json_target",
    metavar="FILE|-",
    callback=_check_json_target,
    help="Also write the result as JSON to FILE, or to standard output for '-'.",
)
_domain_option = click.option(
    "--domain",
    type=click.Choice(DOMAINS),
    help="official keeps the suite's head_dim, head count, bfloat16 and contiguous inputs; general"
    " is all that the operator is defined for. Default: official, or general with --where.",
)
_where_option = click.option(
    "--where",
    metavar="AXIS=VALUES",
    multiple=True,
    help="Narrow the general domain to what the kernel claims: 'head_dim=64,128', 'dtype=float16',"
    " 'layout=contiguous', 'tables=paired'. More claims may follow it.",
)
_device_option = click.option(
    "--device",
    type=click.Choice(machine.DEVICES),
    help="Where to run. Default: cuda where there is one, else interpreter for a candidate that"
    " uses triton.jit, else cpu.",
)
_verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="Show every case, region and remark."
)
_quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="Show no tables and no progress; errors are still shown."
)


@click.group(
    cls=_Program,
    epilog=_START_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _LOG_WIDTH},
)
@click.version_option(__version__, prog_name="kernel-oracle")
def program() -> None:
    """Judge GPU kernels: right or wrong, how right, what is wrong, and the evidence."""


@program.command("list")
@_json_option
def list_operators(json_target: str | None) -> int:
    """List the operators, their suites and cases."""
    from .operators import all_operators

    operators = list(all_operators().values())
    _show(report.operators_table(operators))
    _write_json([report.operator_summary(operator) for operator in operators], json_target)
    return 0


@program.command()
@click.argument("operator", metavar="OPERATOR")
@_json_option
def show(operator: str, json_target: str | None) -> int:
    """Show an operator: meaning, contracts and cases.

    OPERATOR is an id that 'list' shows.
    """
    definition = _find_operator(operator)
    _show(report.operator_page(definition))
    _write_json(report.operator_data(definition), json_target)
    return 0


@program.command()
@_json_option
def env(json_target: str | None) -> int:
    """Show this machine and the versions that a verdict depends on."""
    environment = machine.environment()
    _show(report.environment_table(environment))
    _write_json(environment, json_target)
    return 0


@program.command(epilog=_VERIFY_HELP)
@click.argument("words", nargs=-1, required=True, metavar="CANDIDATE")
@click.option("--operator", metavar="ID", required=True, help="What it should compute: see 'list'.")
@click.option(
    "--cases",
    metavar="WHICH",
    default="all",
    show_default=True,
    help="'suite', 'probes', 'large' (for a GPU), 'all', or names of cases separated by commas: see"
    " 'show'.",
)
@click.option(
    "--style",
    type=click.Choice(STYLES),
    default="return",
    show_default=True,
    help="return: it returns a tensor or a tuple. out: output tensors follow the inputs as"
    " arguments, are written, and nothing is returned. inplace: inputs that 'show' names are"
    " written and become outputs, the others are returned.",
)
@click.option(
    "--contract",
    # `exact` is no choice: copied and zeroed regions must meet it anyway, computed ones cannot.
    type=click.Choice(GRADES[1:]),
    default=report.DEFAULT_CONTRACT,
    show_default=True,
    help="The numeric contract that every computed element must meet: see 'show'.",
)
@_domain_option
@_where_option
@_device_option
@click.option(
    "--seed",
    callback=_read_seed,
    metavar="INT|random",
    default="0",
    show_default=True,
    help="The seed of the inputs; 'random' draws one and prints it.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    default=60.0,
    show_default=True,
    help="Seconds that a call may take.",
)
@click.option("--fail-fast", is_flag=True, help="Stop at the first case that fails.")
@click.option(
    "--diagnosis/--no-diagnosis",
    "diagnose",
    default=True,
    help="Whether to name the fault behind a failure: about half a second.",
)
@_json_option
@_verbose_option
@_quiet_option
def verify(
    words: tuple[str, ...],
    domain: str | None,
    where: tuple[str, ...],
    json_target: str | None,
    verbose: bool,
    quiet: bool,
    **settings: Any,
) -> int:
    """Judge CANDIDATE, an implementation of the operator ID.

    CANDIDATE is 'path/to/file.py:function' or 'package.module:function'. The function is called
    with the operator's inputs, in the order that 'show ID' lists them. It runs in a process of its
    own: a crash, a hang or an out-of-memory is a verdict, and the other cases still run.
    """
    candidate, claims = _split_claims(words, where)
    settings["where"] = _read_claims(claims)
    if claims and domain == "official":
        raise click.UsageError("--where narrows the general domain; leave out --domain official")
    settings["domain"] = domain or "official"
    with _user_errors():
        (verdict,) = _judge([candidate], settings, quiet)
        _write_json(verdict.to_dict(), json_target)
    if not quiet:
        _show(report.verdict_view(verdict, verbose))
    elif verdict.exit_status not in (0, EXIT_FAILED, EXIT_INTERRUPTED):
        # Nothing was judged, and the exit status alone does not say why.
        _show(report.refusal_line(verdict))
    return verdict.exit_status


@program.command()
@click.option(
    "--operator",
    metavar="ID",
    default="kv_rope.concat.forward",
    show_default=True,
    help="Whose example kernels to judge: see 'list'.",
)
@_device_option
@_json_option
@_verbose_option
@_quiet_option
def demo(
    operator: str, device: str | None, json_target: str | None, verbose: bool, quiet: bool
) -> int:
    """Judge a right and a wrong example kernel.

    Both are written in Triton and judged on the probes, on the GPU where there is one, else in
    Triton's interpreter. Exit status 0: the right
    kernel passed and the wrong one was rejected.
    """
    examples = _examples(_find_operator(operator))
    settings = {
        "operator": operator,
        "cases": "probes",
        "device": machine.choose_device(device, triton_candidate=True),
    }
    with _user_errors():
        reached = _judge(examples.values(), settings, quiet)
        verdicts = dict(zip(examples, reached, strict=False))
        status = _demo_status(verdicts)
        data = {which: verdict.to_dict() for which, verdict in verdicts.items()}
        _write_json({**data, "as_expected": status == 0}, json_target)
    if not quiet:
        for which, verdict in verdicts.items():
            _show(Text(f"\n{_title(examples[which])}\n", style="bold"))
            _show(report.verdict_view(verdict, verbose))
        _show(Text(f"\n{_demo_outcome(status)}"))
    return status


@program.command(epilog=_DETECT_HELP)
@click.argument("more", nargs=-1, metavar="")
@click.option("--operator", metavar="ID", required=True, help="Whose faults: see 'list'.")
@click.option(
    "--cases",
    metavar="WHICH",
    default="probes",
    show_default=True,
    help="'probes', 'suite' or names of cases separated by commas: see 'show'.",
)
@_domain_option
@_where_option
@click.option("--seed", callback=_read_seed, metavar="INT|random", default="0", show_default=True)
@click.option(
    "--legal-seeds",
    type=click.IntRange(min=0),
    metavar="N",
    default=1,
    show_default=True,
    help="Legal variants are judged on N seeds, from --seed on.",
)
@_json_option
@click.option("-v", "--verbose", is_flag=True, help="Show every corruption and variant.")
@_quiet_option
def detect(
    more: tuple[str, ...],
    operator: str,
    cases: str,
    domain: str | None,
    where: tuple[str, ...],
    seed: int,
    legal_seeds: int,
    json_target: str | None,
    verbose: bool,
    quiet: bool,
) -> int:
    """Measure what the judge detects: known faults of ID, generic corruptions, legal variants.

    Every known wrong way to compute the operator must be caught, and should be named by its
    diagnosis; every legal one must be accepted. Exit status 0: so it is; 1: something was missed
    or falsely rejected.
    """
    from .detection import detect as run
    from .detection_view import detection_view
    from .domain import read_domain
    from .verification import select_cases

    definition = _find_operator(operator)
    with _user_errors(), _steps(quiet) as on_step:
        claims = _read_claims((*where, *more) if where else _no_more(more))
        chosen = select_cases(
            definition, cases, read_domain(definition, domain or "official", claims)
        )
        detection = run(
            definition,
            chosen,
            (seed,),
            legal_seeds=range(seed, seed + legal_seeds),
            on_step=on_step,
        )
    _write_json(detection.to_dict(), json_target)
    if not quiet:
        _show(detection_view(detection, verbose))
    return 0 if detection.complete else EXIT_FAILED


def main() -> NoReturn:
    """Run the console command ``kernel-oracle``."""
    program.main(prog_name="kernel-oracle")


def _judge(candidates: Iterable[str], settings: Mapping[str, Any], quiet: bool) -> list[Verdict]:
    """Judge candidates in turn, with progress.

    An interruption ends it; the last verdict is then on what was judged so far.
    """
    from . import verification

    verdicts: list[Verdict] = []
    with _progress(quiet) as on_case, verification.Judge(**settings, on_case=on_case) as judge:
        for candidate in candidates:
            try:
                verdicts.append(judge.verify(candidate))
            except verification.Interrupted as stop:
                _ignore_stop_signals()
                return [*verdicts, stop.verdict]
    return verdicts


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[CaseResult, int, int], None]]:
    """Show a bar on standard error, if that is a terminal; yields what to call after a case."""
    with _steps(quiet) as on_step:
        yield lambda result, done, total: on_step(done, total, f"{result.name}: {result.status}")


@contextmanager
def _steps(quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar as :func:`_progress`; yields what to call after a step."""
    console = _console()
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bar:
        task = bar.add_task("starting", total=None)

        yield lambda done, total, name: bar.update(
            task, completed=done, total=total, description=name
        )


@contextmanager
def _stop_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP stop a run the way Ctrl-C does, so that its results are kept.

    Raises:
        KeyboardInterrupt: also where the interruption came out as another exception: an import
            that is broken off may raise what it likes.
    """
    stopped = -math.inf

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        # A key held down must not break off what obeys the first stroke. Later ones count again,
        # as the first may have been lost, in a finalizer for instance.
        if time.monotonic() - stopped > _DEAF_S:
            stopped = time.monotonic()
            raise KeyboardInterrupt

    # A signal that whoever started us chose to ignore (nohup) stays ignored.
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    except Exception as error:
        if stopped > -math.inf:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _ignore_stop_signals() -> None:
    """Let nothing break off the writing of what was judged; :func:`_stop_signals` ends this."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turn what the user can put right into a usage message."""
    from .candidate import BadCandidate
    from .domain import InvalidClaim
    from .operators import UnknownOperator
    from .verification import UsageError

    try:
        yield
    except (BadCandidate, InvalidClaim, UnknownOperator, UsageError) as error:
        raise click.UsageError(str(error)) from error


def _find_operator(operator: str) -> Operator:
    from .operators import UnknownOperator, find_operator

    try:
        return find_operator(operator)
    except UnknownOperator as error:
        raise click.UsageError(str(error)) from error


def _split_claims(words: tuple[str, ...], where: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Tell the candidate from the claims that follow ``--where`` after its first one."""
    claims = list(where)
    if where:
        claims += [word for word in words if re.match(r"\w+=", word)]
    candidates = [word for word in words if word not in claims]
    if len(candidates) != 1:
        found = " ".join(candidates) or "none"
        raise click.UsageError(f"give one candidate, module:function or file.py:function: {found}")
    return candidates[0], tuple(claims)


def _no_more(words: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse words that are no option's; returns none."""
    if words:
        raise click.UsageError(f"Got unexpected extra argument ({' '.join(words)})")
    return ()


def _read_claims(claims: tuple[str, ...]) -> dict[str, str]:
    """Split claims at their first ``=``."""
    read: dict[str, str] = {}
    for claim in (part for text in claims for part in text.split()):
        name, equals, values = claim.partition("=")
        if not equals:
            raise click.UsageError(f"--where {claim!r} is no claim; write AXIS=VALUE[,VALUE...]")
        if name in read:
            raise click.UsageError(f"--where claims {name} twice; write {name}=VALUE,VALUE")
        read[name] = values
    return read


def _examples(operator: Operator) -> dict[str, str]:
    """Return the right and the wrong example kernel of an operator, as candidates.

    Paths are relative where the file lies below the current folder, else absolute, so that the
    commands shown work when they are copied.
    """
    function = "_".join(operator.id.split(".")[-2:])
    candidates = {}
    for which in ("right", "wrong"):
        path = _EXAMPLES / f"{which}_{function}.py"
        if not path.exists():
            raise click.UsageError(f"operator {operator.id} has no example kernels; see 'list'")
        here = Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        candidates[which] = f"{shown}:{function}"
    return candidates


def _title(candidate: str) -> str:
    """Return the first line of an example's docstring: what it is, and what is wrong with it."""
    source = Path(candidate.rpartition(":")[0]).read_text(encoding="utf-8")
    first, _, _ = (ast.get_docstring(ast.parse(source)) or candidate).partition("\n")
    return first.replace("``", "")


def _demo_status(verdicts: Mapping[str, Verdict]) -> int:
    """Return 0 if the right kernel passed and the wrong one was found to give wrong values."""
    if any(verdict.interrupted for verdict in verdicts.values()):
        return EXIT_INTERRUPTED
    if verdicts["right"].passed and verdicts["wrong"].status == "wrong_values":
        return 0
    statuses = {verdict.exit_status for verdict in verdicts.values()}
    return next((s for s in (EXIT_JUDGE_ERROR, EXIT_USAGE) if s in statuses), EXIT_FAILED)


def _demo_outcome(status: int) -> str:
    if status == 0:
        return "As it should be: the right kernel passed, and the wrong one was rejected."
    if status == EXIT_INTERRUPTED:
        return "Interrupted."
    return "NOT as it should be: the right kernel must pass, and the wrong one give wrong_values."


def _write_json(data: object, target: str | None) -> None:
    """Write to standard output or to a file; a file appears complete or not at all."""
    if target is None:
        return
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    try:
        if target == "-":
            click.echo(text, nl=False)
        else:
            _replace(Path(target), text)
    except OSError as error:
        where = "standard output" if target == "-" else target
        if target == "-":
            # Else Python would try again to write what is left when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise _CannotWrite(f"the JSON could not be written to {where}: {error}") from error


def _replace(path: Path, text: str) -> None:
    """Write a file under another name, then rename it; pipes and devices are written directly."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _show(renderable: RenderableType) -> None:
    """Print on standard error; a log gets plain text without trailing blanks."""
    console = _console()
    if console.is_terminal:
        console.print(renderable, crop=False)
    else:
        click.echo(report.to_text(renderable, console.width), err=True, nl=False)


def _console() -> Console:
    """Return a console on standard error; a log file gets lines of a fixed, generous width."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _LOG_WIDTH
    return console
