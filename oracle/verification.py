"""The order of things: cases, inputs, calls, guards, comparison, verdict.

:func:`verify` judges one candidate; a :class:`Judge` judges many and keeps a warm server process,
so that a further candidate costs a fork, not an import of torch.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from typing import Any, Self

from .budget import CONTRACTS, Contract
from .call import CallReply, CallRequest
from .caller import Caller
from .candidate import (
    BadCandidate,
    CandidateReference,
    check_candidate,
    load_candidate,
    parse_candidate,
    uses_triton,
)
from .claims import claim_hint
from .definition import STYLES, Case, Domain, Operator, Style
from .diagnosis import Failure, diagnose
from .domain import InvalidClaim, domain_cases, output_elements, read_domain
from .inputs import make_inputs
from .interpreter import InterpreterReport
from .machine import Device, DeviceUnavailable, choose_device, environment
from .operators import find_operator
from .trial import DIAGNOSED_ELEMENTS, Terms, Tried, describe, try_case
from .verdict import CaseResult, Diagnosis, Verdict, gravest, loosest
from .worker import CandidateProcess, WorkerError, WorkerServer

__all__ = [
    "DeviceUnavailable",
    "Interrupted",
    "Judge",
    "UsageError",
    "select_cases",
    "verify",
]

OnCase = Callable[[CaseResult, int, int], None]

FIRST_CALL_FACTOR = 5.0
"""The first call may compile, so it gets this many times the time limit."""

INTERPRETER_ELEMENTS = 1 << 22
"""Cases with more output elements are not run in the interpreter unless they are named: a kernel
of small programs takes about 4 ms per thousand elements there."""

INTERPRETER_TWICE = 1 << 20
"""Guarded cases with more output elements are called only once in the interpreter."""

_GUARDED_SUITE_CASES = 2

_DIAGNOSED_CASES = 3
"""From how many failing cases, the smallest ones, a fault is named."""

_ALONE_S = 5.0
"""A failure that took longer than this is not judged a second time."""

_REPEATED = ("crashed", "call_violation", "wrong_values", "below_contract")
"""Statuses of failures that are judged a second time, alone."""


class UsageError(ValueError):
    """An argument cannot be used; the message names it and what to use instead."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a verification; :attr:`verdict` holds what was judged so far."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__("interrupted")
        self.verdict = verdict


CASE_WORDS = ("all", "probes", "suite", "large")
"""What stands for several cases: all, the small ones, the official suites, those for a GPU."""


def select_cases(
    operator: Operator, cases: str | Sequence[str], domain: Domain | None = None
) -> tuple[Case, ...]:
    """Choose cases of a domain.

    Args:
        operator: the operator.
        cases: one of :data:`CASE_WORDS` or names of cases, several of them separated by commas or
            as a sequence.
        domain: the official one by default.

    Returns:
        The cases in the domain's order, each once.

    Raises:
        UsageError: for a name that is none of them, with close matches, or if there are none.
    """
    words = _case_words(cases)
    if not words:
        raise UsageError(f"no cases were given; use {_known_words()} or names of cases")
    offered = domain_cases(operator, domain or Domain())
    names = {case.name for case in offered}
    for word in words:
        if word not in CASE_WORDS and word not in names:
            raise _unknown_case(operator, word, sorted(names))
    chosen = tuple(case for case in offered if {"all", _case_word(case), case.name} & set(words))
    if not chosen:
        raise UsageError(f"{operator.id} has no cases {','.join(words)} in the domain {domain}")
    return chosen


def _case_word(case: Case) -> str:
    """Return which of the words stands for a case."""
    return case.group if case.group in CASE_WORDS else "suite"


def _known_words() -> str:
    return ", ".join(f"'{word}'" for word in CASE_WORDS)


def _case_words(cases: str | Sequence[str]) -> tuple[str, ...]:
    """Return the words a choice of cases consists of.

    Raises:
        UsageError: for an empty one.
    """
    words = tuple(word.strip() for word in (cases.split(",") if isinstance(cases, str) else cases))
    if not all(words):
        raise UsageError(f"cases {cases!r} has an empty name between its commas")
    return words


def _unknown_case(operator: Operator, name: str, names: Sequence[str]) -> UsageError:
    # In the general domain a case tried at other sizes carries them behind its name.
    close = [other for other in names if other.startswith(f"{name}.")][:3]
    close = close or get_close_matches(name, names, 3)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    return UsageError(
        f"{operator.id} has no case {name!r} in this domain{hint} Use {_known_words()}, or a name"
        f" from 'kernel-oracle show {operator.id}'"
    )


def verify(
    candidate: str | Callable[..., Any],
    operator: str | Operator,
    *,
    cases: str | Sequence[str] = "all",
    style: Style = "return",
    contract: Contract = "stored_intermediates",
    domain: str = "official",
    where: Mapping[str, object] | None = None,
    device: str | None = None,
    seed: int = 0,
    timeout: float = 60.0,
    isolate: bool = True,
    fail_fast: bool = False,
    diagnose: bool = True,
    on_case: OnCase | None = None,
) -> Verdict:
    """Judge one candidate.

    Args:
        candidate: ``"package.module:function"`` or ``"file.py:function"``; with
            ``isolate=False`` also a callable. It is called with the operator's inputs,
            positionally, in definition order.
        operator: an operator or its id.
        cases: ``"all"``, ``"probes"``, ``"suite"``, ``"large"`` or names of cases, separated by
            commas or as a sequence.
        style: ``"return"`` (a tensor or a tuple is returned), ``"out"`` (output tensors follow
            the inputs and are written) or ``"inplace"`` (inputs that the operator declares are
            written and become outputs; the other outputs, or all, are returned).
        contract: the numeric contract that computed elements must meet; see
            :data:`oracle.budget.CONTRACTS`.
        domain: ``"official"`` (the suite's constants hold) or ``"general"`` (all that the operator
            is defined for).
        where: claims that narrow the general domain, which they imply; see
            :func:`oracle.domain.read_domain`. ``{"head_dim": (64, 128), "dtype": "float16"}``.
        device: ``"cuda"``, ``"cpu"`` or ``"interpreter"``; None for cuda where there is one,
            else the interpreter for a candidate that uses Triton, else cpu.
        seed: of the inputs, 0 or more.
        timeout: seconds a call may take; the first one, which may compile, five times as long.
        isolate: run the candidate in a process of its own. Without isolation there is no time
            limit, and a crash takes the caller along.
        fail_fast: stop at the first case that fails.
        diagnose: compare what failed with the operator's known faults, and judge the first failure
            once more alone; about half a second that a program which only wants to know whether a
            candidate passes can save.
        on_case: called after every case with its result, how many are done, and how many there are.

    Returns:
        The verdict. Whatever is wrong with the candidate is a status in it, not an exception.

    Raises:
        UsageError: if an argument cannot be used.
        UnknownOperator: if there is no such operator.
        DeviceUnavailable: if the device is not on this machine.
        Interrupted: on Ctrl-C, with the verdict on what was judged so far.
    """
    with Judge(
        operator,
        cases=cases,
        style=style,
        contract=contract,
        domain=domain,
        where=where,
        device=device,
        seed=seed,
        timeout=timeout,
        isolate=isolate,
        fail_fast=fail_fast,
        diagnose=diagnose,
        on_case=on_case,
    ) as judge:
        return judge.verify(candidate)


class Judge:
    """Judges many candidates of one operator; a context manager.

    The arguments are those of :func:`verify`. The server process is started with the first
    candidate that needs it and kept until the end.

    Raises:
        UsageError: if an argument cannot be used.
        UnknownOperator: if there is no such operator.
    """

    def __init__(
        self,
        operator: str | Operator,
        *,
        cases: str | Sequence[str] = "all",
        style: Style = "return",
        contract: Contract = "stored_intermediates",
        domain: str = "official",
        where: Mapping[str, object] | None = None,
        device: str | None = None,
        seed: int = 0,
        timeout: float = 60.0,
        isolate: bool = True,
        fail_fast: bool = False,
        diagnose: bool = True,
        on_case: OnCase | None = None,
    ) -> None:
        self.operator = find_operator(operator) if isinstance(operator, str) else operator
        _check_choices(self.operator, style, contract, seed, timeout)
        if not isolate and device not in (None, "cpu"):
            raise UsageError(f"device {device!r} needs isolate=True; without isolation use 'cpu'")
        self.domain = _read_domain(self.operator, domain, where)
        self.cases = select_cases(self.operator, cases, self.domain)
        self._named = _named_cases(cases)
        self._cases_text = ",".join(_case_words(cases))
        self._settings = _Settings(
            style, contract, self.domain, seed, timeout, isolate, fail_fast, diagnose
        )
        self._device = device
        self._on_case = on_case
        self._servers: dict[Device, WorkerServer] = {}
        self._triton: dict[str, bool] = {}

    def __enter__(self) -> Self:
        """Return the judge."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the server processes."""
        self.close()

    def close(self) -> None:
        """End the server processes."""
        while self._servers:
            _, server = self._servers.popitem()
            server.close()

    def verify(self, candidate: str | Callable[..., Any]) -> Verdict:
        """Judge a candidate; see :func:`verify`."""
        started = time.monotonic()
        settings = self._settings
        run = _Run(
            operator=self.operator,
            settings=settings,
            candidate=candidate if isinstance(candidate, str) else _callable_name(candidate),
            named_by_text=isinstance(candidate, str),
            cases=self.cases,
            cases_text=self._cases_text,
            named=self._named,
            on_case=self._on_case,
        )
        try:
            with self._caller_for(candidate, run) as source:
                run.judge(source)
        except BadCandidate as error:
            run.refuse(str(error))
        except KeyboardInterrupt:
            try:
                self.close()
            except KeyboardInterrupt:
                # Typed once more meanwhile; the first one is being obeyed.
                self.close()
            raise Interrupted(run.verdict(started, interrupted=True)) from None
        return run.verdict(started)

    @contextlib.contextmanager
    def _caller_for(
        self, candidate: str | Callable[..., Any], run: _Run
    ) -> Iterator[_Isolated | _Local]:
        """Yield what calls the candidate, and say in the run where it runs.

        Raises:
            BadCandidate: if there is no such candidate.
        """
        if not self._settings.isolate:
            run.device = "cpu"
            yield _Local(candidate, self.operator, self._settings.style)
            return
        if not isinstance(candidate, str):
            raise UsageError(
                f"{_callable_name(candidate)} is no name, and only what is named can be isolated;"
                " write 'package.module:function' or 'file.py:function', or pass a callable with"
                " isolate=False"
            )
        # The device decides what is asked of the candidate, so it comes first.
        run.device = choose_device(self._device, triton_candidate=False)
        reference = parse_candidate(candidate)
        if self._device is None:
            run.device = choose_device(None, uses_triton(reference))
        elif run.device == "cpu" and self._names_triton(reference):
            run.remark(
                "this candidate uses Triton, whose kernels do not run on a CPU: to judge those, use"
                " the device 'interpreter', or 'cuda' where there is a GPU"
            )
        source = _Isolated(self._server(run.device), reference, self.operator, run)
        try:
            yield source
        finally:
            source.close()

    def _names_triton(self, reference: CandidateReference) -> bool:
        """Whether a candidate uses Triton; only a remark depends on it, so files are read once."""
        if reference.location not in self._triton:
            self._triton[reference.location] = uses_triton(reference)
        return self._triton[reference.location]

    def _server(self, device: Device) -> WorkerServer:
        if device not in self._servers:
            server = WorkerServer(device)
            server.__enter__()
            self._servers[device] = server
        return self._servers[device]


@dataclass(frozen=True)
class _Settings:
    style: Style
    contract: Contract
    domain: Domain
    seed: int
    timeout: float
    isolate: bool
    fail_fast: bool
    diagnose: bool


def _read_domain(operator: Operator, domain: str, where: Mapping[str, object] | None) -> Domain:
    try:
        return read_domain(operator, domain, where)
    except InvalidClaim as error:
        raise UsageError(str(error)) from error


def _check_choices(
    operator: Operator, style: str, contract: str, seed: object, timeout: float
) -> None:
    if style not in STYLES:
        raise UsageError(f"style {style!r} is not one of {', '.join(STYLES)}")
    if style == "inplace" and not operator.inplace:
        raise UsageError(f"{operator.id} writes nothing in place; use the style 'return' or 'out'")
    if contract not in CONTRACTS:
        raise UsageError(f"contract {contract!r} is not one of {', '.join(CONTRACTS)}")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise UsageError(f"seed is {seed!r}; it must be a whole number, 0 or more")
    if not (timeout > 0 and math.isfinite(timeout)):
        raise UsageError(f"timeout is {timeout}; it must be a positive number of seconds")


def _named_cases(cases: str | Sequence[str]) -> frozenset[str]:
    """Return the cases that were asked for by their own names."""
    return frozenset(_case_words(cases)) - set(CASE_WORDS)


def _callable_name(function: object) -> str:
    """Name an object given in place of a candidate's name."""
    if not callable(function):
        return f"{function!r} of type {type(function).__qualname__}"
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{module}:{name}" if module else name


class _Isolated:
    """Calls a candidate in a process of its own; makes another when that one dies."""

    def __init__(
        self,
        server: WorkerServer,
        reference: CandidateReference,
        operator: Operator,
        run: _Run,
    ) -> None:
        self._server = server
        self._reference = reference
        self._operator = operator
        self._style = run.settings.style
        self._process: CandidateProcess | None = None
        self._load_timeout = 0.0
        self._call_timeout = run.settings.timeout
        self.interpreter = server.interpreter

    def load(self, timeout: float) -> None:
        """Load the candidate for the first time.

        Raises:
            BadCandidate: if it cannot be loaded.
        """
        self._load_timeout = timeout
        self._process = self._server.candidate(
            self._reference, _parameters(self._operator, self._style), timeout, self._operator.id
        )

    def call(self, request: CallRequest, timeout: float) -> CallReply:
        """Call the candidate, in a new process if its last one has died."""
        if self._process is None or not self._process.alive:
            try:
                self.load(self._load_timeout)
            except BadCandidate as error:
                # It was loaded before, so this is something it does, not something it is: the case
                # fails, and the next one tries again.
                return CallReply("crashed", message=f"It could not be loaded again: {error}")
            # The first call of any process may compile.
            timeout = max(timeout, FIRST_CALL_FACTOR * self._call_timeout)
        assert self._process is not None
        try:
            return self._process.call(request, timeout)
        except WorkerError as error:
            if not self._works_for_another(request, timeout):
                raise
            return CallReply("crashed", message=_damage(str(error)))

    def _works_for_another(self, request: CallRequest, timeout: float) -> bool:
        """Whether a call that failed around the candidate works with one that does nothing."""
        self.close()
        control = CandidateReference(
            "oracle.control:return_nothing", "module", "oracle.control", "return_nothing"
        )
        try:
            with self._server.candidate(control, (), self._load_timeout) as process:
                return process.call(request, timeout).status == "returned"
        except (BadCandidate, WorkerError):
            return False

    def close(self) -> None:
        """End the candidate's process; the next call starts another."""
        if self._process is not None:
            self._process.close()
            self._process = None


def _damage(report: str) -> str:
    """Say that a candidate broke what calls depend on, by the last line of a traceback."""
    last = report.strip().splitlines()[-1]
    return (
        "The candidate changed something in its process that every call depends on, such as torch"
        f" or a resource limit: reading its outputs failed with {last.rstrip('.')}. With another"
        " candidate the same call works."
    )


class _Local:
    """Calls a candidate in this process."""

    interpreter = None

    def __init__(
        self, candidate: str | Callable[..., Any], operator: Operator, style: Style
    ) -> None:
        parameters = _parameters(operator, style)
        if isinstance(candidate, str):
            candidate = load_candidate(parse_candidate(candidate), parameters, operator.id)
        else:
            check_candidate(_callable_name(candidate), candidate, parameters, operator.id)
        self._caller = Caller(candidate, "cpu")

    def load(self, timeout: float) -> None:
        """Do nothing: it is loaded."""

    def call(self, request: CallRequest, timeout: float) -> CallReply:  # noqa: ARG002
        """Call the candidate; no time limit can be kept in this process."""
        return self._caller.call(request)


def _parameters(operator: Operator, style: Style) -> tuple[str, ...]:
    """Return the names of the arguments a candidate is called with."""
    specs = operator.inputs + (operator.outputs if style == "out" else ())
    return tuple(spec.name for spec in specs)


class _Run:
    """One verification: the results as they come in, and the verdict on them."""

    def __init__(
        self,
        *,
        operator: Operator,
        settings: _Settings,
        candidate: str,
        named_by_text: bool,
        cases: tuple[Case, ...],
        cases_text: str,
        named: frozenset[str],
        on_case: OnCase | None,
    ) -> None:
        self.operator = operator
        self.settings = settings
        self.device: Device = "cpu"
        self._candidate = candidate
        self._named_by_text = named_by_text
        self._cases = cases
        self._cases_text = cases_text
        self._named = named
        self._on_case = on_case
        self._results: list[CaseResult] = []
        self._failures: list[Failure] = []
        self._diagnosis: Diagnosis | None = None
        self._remarks: list[str] = []
        self._refusal = ""
        self._guarded = _guarded(domain_cases(operator, settings.domain), operator)
        self._recurs = True
        self._claim = ""

    def judge(self, source: _Isolated | _Local) -> None:
        """Judge every case in turn.

        Raises:
            BadCandidate: if the candidate cannot be loaded.
        """
        self._note_interpreter(source.interpreter)
        source.load(FIRST_CALL_FACTOR * self.settings.timeout)
        for case in self._cases:
            tried = self._skip(case) or self._judge_case(source, case)
            result = tried.result
            self._results.append(result)
            if tried.failure is not None and self.settings.diagnose:
                self._failures.append(tried.failure)
            if self._on_case is not None:
                self._on_case(result, len(self._results), len(self._cases))
            if self.settings.fail_fast and result.status not in ("passed", "empty_ok", "not_run"):
                self._remarks.append(f"stopped after {result.name}, as fail-fast was asked for")
                break
        if self.settings.diagnose:
            self._diagnose()
            if isinstance(source, _Isolated):
                self._judge_alone(source)

    def _diagnose(self) -> None:
        """Say which fault the smallest failing cases show, and what claim would rule it out."""
        results = {case.name: case for case in self._results}
        failure = self._first_failure()
        if failure is None:
            return
        smallest = sorted(self._failures, key=lambda failure: results[failure.case].elements)
        if smallest:
            passed = (
                make_inputs(case, self.settings.seed, operator=self.operator)
                for case in self._cases
                if case.name in results
                and results[case.name].status == "passed"
                and output_elements(self.operator, case.sizes) <= DIAGNOSED_ELEMENTS
            )
            self._diagnosis = diagnose(
                self.operator,
                smallest[:_DIAGNOSED_CASES],
                contract=self.settings.contract,
                passed=islice(passed, _DIAGNOSED_CASES),
            )
        if self.settings.domain.name == "general":
            judged = [
                (case, results[case.name].status) for case in self._cases if case.name in results
            ]
            self._claim = claim_hint(self.operator, judged)

    def _judge_alone(self, source: _Isolated) -> None:
        """Judge the first failure again, alone in a fresh process: its command is to repeat it.

        What does not recur depends on the calls before it, or on chance.
        """
        failure = self._first_failure()
        if failure is None or failure is self._results[0] or failure.seconds > _ALONE_S:
            return
        if failure.status not in _REPEATED:
            return
        source.close()
        case = next(case for case in self._cases if case.name == failure.name)
        alone = self._judge_case(source, case).result
        if alone.status in ("passed", "empty_ok"):
            self._recurs = False
            self._remarks.append(
                f"alone in a fresh process {failure.name} passes: the candidate depends on the"
                " calls before, or on chance; the command repeats the whole run"
            )

    def _first_failure(self) -> CaseResult | None:
        """Return the first case of the gravest status, if that is one of failure."""
        status = gravest([case.status for case in self._results])
        if status in ("passed", "nothing_compared"):
            return None
        return next(case for case in self._results if case.status == status)

    def refuse(self, reason: str) -> None:
        """Note that the candidate cannot be judged at all."""
        self._refusal = reason

    def remark(self, text: str) -> None:
        """Note what is worth knowing about the run as a whole."""
        self._remarks.append(text)

    def _note_interpreter(self, report: InterpreterReport | None) -> None:
        """Remark on the interpreter; refuse to judge bfloat16 where it is not faithful.

        Raises:
            DeviceUnavailable: where it is not, and a case needs it.
        """
        if report is None:
            return
        if report.faithful:
            self._remarks.append(report.remark)
        elif any(case.dtype == "bfloat16" for case in self._cases):
            raise DeviceUnavailable(f"{report.reason} Use another version of Triton, or a GPU.")

    def _skip(self, case: Case) -> Tried | None:
        if case.needs_gpu and self.device != "cuda":
            return _not_run(case, "it needs a GPU: its tensors take gigabytes")
        if case.name in self._named or not self._slow(case, INTERPRETER_ELEMENTS):
            return None
        elements = output_elements(self.operator, case.sizes)
        return _not_run(
            case,
            f"{elements:,} output elements are more than the {INTERPRETER_ELEMENTS:,} that the"
            " interpreter is given; name the case to run it all the same, or use a GPU",
        )

    def _slow(self, case: Case, elements: int) -> bool:
        """Whether a case runs in the interpreter and has more output elements than a number."""
        if self.device != "interpreter":
            return False
        return output_elements(self.operator, case.sizes) > elements

    def _judge_case(self, source: _Isolated | _Local, case: Case) -> Tried:
        started = time.monotonic()
        settings = self.settings
        called = any(result.status != "not_run" for result in self._results)
        terms = Terms(
            style=settings.style,
            contract=settings.contract,
            device=self.device,
            seed=settings.seed,
            timeout=settings.timeout,
            first_timeout=settings.timeout * (1.0 if called else FIRST_CALL_FACTOR),
            twice=case.name in self._guarded and not self._slow(case, INTERPRETER_TWICE),
        )
        try:
            tried = try_case(self.operator, case, source, terms)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not lose other cases
            tried = Tried(_judge_error(case, error))
        return replace(tried, result=replace(tried.result, seconds=time.monotonic() - started))

    def verdict(self, started: float, interrupted: bool = False) -> Verdict:
        """Return the verdict on the cases judged so far."""
        status = (
            "bad_candidate" if self._refusal else gravest([case.status for case in self._results])
        )
        failure = None if self._refusal else self._first_failure()
        detail = self._refusal
        if failure is not None:
            detail = f"{failure.name}: {failure.detail}"
        return Verdict(
            operator=self.operator.id,
            candidate=self._candidate,
            status=status,
            violation=failure.violation if failure else "",
            detail=detail,
            grade=self._grade(status),
            contract=self.settings.contract,
            domain=str(self.settings.domain),
            style=self.settings.style,
            device=self.device,
            seed=self.settings.seed,
            cases=tuple(self._results),
            remarks=tuple(self._remarks + self._coverage_remarks(interrupted)),
            environment=environment(),
            diagnosis=self._diagnosis,
            claim=self._claim,
            reproduce=self._command(failure.name if failure and self._recurs else self._cases_text),
            seconds=time.monotonic() - started,
            interrupted=interrupted,
        )

    def _grade(self, status: str) -> str | None:
        if status != "passed":
            return None
        return loosest([case.grade for case in self._results if case.status == "passed"])

    def _coverage_remarks(self, interrupted: bool) -> list[str]:
        unfit = {case.name for case in self._cases if case.needs_gpu and self.device != "cuda"}
        skipped = [
            case.name
            for case in self._results
            if case.status == "not_run" and case.name not in unfit
        ]
        remarks = []
        if interrupted:
            remarks.append(f"interrupted after {len(self._results)} of {len(self._cases)} cases")
        if skipped:
            remarks.append(
                f"{len(skipped)} of {len(self._cases)} cases were not run in the interpreter,"
                f" being too large for it: {', '.join(skipped)}"
            )
        if unfit:
            remarks.append(f"not run, as they need a GPU: {', '.join(sorted(unfit))}")
        if self.device == "interpreter":
            remarks.append("not run on a GPU: an interpreted run never stands for a compiled one")
        return remarks

    def _command(self, cases: str) -> str:
        settings = self.settings
        if not self._named_by_text:
            return (
                f"oracle.verify({self._candidate.rpartition(':')[2]}, {self.operator.id!r},"
                f" cases={cases!r}, style={settings.style!r}, contract={settings.contract!r},"
                f"{_domain_arguments(settings.domain)} seed={settings.seed}, isolate=False)"
            )
        words = ["kernel-oracle", "verify", self._candidate, "--operator", self.operator.id]
        words += ["--cases", cases, "--seed", str(settings.seed), "--device", self.device]
        if settings.style != "return":
            words += ["--style", settings.style]
        if settings.contract != "stored_intermediates":
            words += ["--contract", settings.contract]
        if settings.domain.name != "official":
            words += ["--domain", settings.domain.name]
        for claim in settings.domain.claims():
            words += ["--where", claim]
        return shlex.join(words)


def _domain_arguments(domain: Domain) -> str:
    """Write a domain as arguments of :func:`verify`, if it is not the usual one."""
    if domain.name == "official":
        return ""
    where = dict(claim.split("=", 1) for claim in domain.claims())
    return f" domain={domain.name!r}," + (f" where={where!r}," if where else "")


def _guarded(cases: Sequence[Case], operator: Operator) -> frozenset[str]:
    """Return the cases that get the expensive guards: the probes, two small ones of each suite."""
    names = [case.name for case in cases if _case_word(case) == "probes"]
    by_size = sorted(cases, key=lambda case: output_elements(operator, case.sizes))
    for group in {case.group for case in cases if _case_word(case) == "suite"}:
        small = [case.name for case in by_size if case.group == group]
        names += small[:_GUARDED_SUITE_CASES]
    return frozenset(names)


def _not_run(case: Case, reason: str) -> Tried:
    return Tried(CaseResult(**describe(case), status="not_run", detail=reason))


def _judge_error(case: Case, error: Exception) -> CaseResult:
    return CaseResult(
        **describe(case),
        status="judge_error",
        detail=f"The judge failed, not the candidate: {type(error).__name__}: {error}. Please"
        " report this with the traceback below.",
        output_text="".join(traceback.format_exception(error)),
    )
