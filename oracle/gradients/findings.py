"""What a gradient check found, as data: counts, worst entries and findings, to and from nothing.

Entries that *agree* are counted and all are required; a NaN agrees with nothing, so it can never
pass. An entry that could not be judged does not pass either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

FINDINGS: Mapping[str, str] = {
    "detached": "the outputs are not connected with the input, though they depend on it",
    "missing": "the backward returned None for an input that the outputs depend on",
    "zeros": "all gradients of an input are zero, though the outputs depend on it",
    "wrong_shape": "a gradient has another shape than its input",
    "wrong_dtype": "a gradient has another dtype than its input",
    "wrong_device": "a gradient is on another device than its input",
    "wrong_values": "entries differ by more than is allowed",
    "raises": "the backward raises an exception for a cotangent of another memory layout",
    "terms_disagree": "the terms supplied as a budget do not add up to the derivative",
    "reference_gradient": "autograd through the forward is not the forward's derivative",
    "layout_dependent": "the function returns something else for inputs of another memory layout",
    "depends_on_requires_grad": "a gradient changes with which other inputs require gradients",
    "undefined_gradient": "a gradient changes when zero cotangents are left undefined",
    "batched_gradient": "gradients of a batch of cotangents differ from those one by one",
    "forward_mode": "forward-mode derivatives differ from the numeric ones",
    "changes_inputs": "the backward changes what it is given",
    "not_reproducible": "the same call returned other bits",
    "not_differentiable": "the slopes on both sides differ, or there is a jump",
    "unresolved": "the numeric derivative is not known well enough to judge the entry",
}
"""The kinds of findings, the first ones the gravest, with what each means."""

_INCONCLUSIVE = ("not_differentiable", "unresolved")


class GradientCheckFailed(AssertionError):
    """A gradient check did not pass; ``result`` has the evidence.

    Attributes:
        result: the :class:`GradientResult` or :class:`oracle.gradients.AdjointResult`.
    """

    def __init__(self, result: Any) -> None:
        super().__init__(result.summary())
        self.result = result


class GradientCheckInconclusive(GradientCheckFailed):
    """No gradient was found wrong, but some could not be judged."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, undecided, or worth knowing.

    Attributes:
        kind: one of :data:`FINDINGS`.
        input: the input it is about; empty for all.
        message: what was seen, and what to do.
        decides: whether it keeps the check from passing.
    """

    kind: str
    input: str
    message: str
    decides: bool = True


@dataclass(frozen=True)
class Entry:
    """One compared number as evidence.

    Attributes:
        index: the index in the input (and in its gradient).
        cotangent: what the gradient was taken for: ``output 0[1, 2]`` for an entry of the
            Jacobian, else the name of a cotangent such as ``random 1``.
        numeric: the derivative found without the backward.
        analytic: what the backward returned.
        difference: analytic - numeric.
        estimate: the truncation error estimated for ``numeric``.
        floor: what rounding is allowed.
        allowed: how large the difference may be.
        step: the smallest step of the differences; 0 where none were taken.
    """

    index: tuple[int, ...]
    cotangent: str
    numeric: float
    analytic: float
    difference: float
    estimate: float
    floor: float
    allowed: float
    step: float

    def __str__(self) -> str:
        """Say it in one line."""
        place = f"[{', '.join(map(str, self.index))}]"
        return (
            f"at {place} for cotangent {self.cotangent}: numeric {self.numeric:.12g}, analytic"
            f" {self.analytic:.12g}, difference {self.difference:.3g}, allowed {self.allowed:.3g}"
            f" (estimate {self.estimate:.2g}, floor {self.floor:.2g})"
        )


@dataclass(frozen=True)
class InputResult:
    """How the gradient of one input compared.

    Attributes:
        name: the input's name.
        shape: its shape.
        dtype: the type that its gradient was judged in.
        elements: how many elements it has.
        entries: how many numbers were compared: entries of the Jacobian, and elements of the
            gradients for the other cotangents.
        agreeing: how many agree; all are required.
        not_differentiable: how many were not judged because the function has no derivative there.
        unresolved: how many were not judged because the numeric derivative is not known well
            enough.
        worst: the entry whose difference is largest beside what is allowed.
        largest_difference: the largest difference of all judged entries.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    entries: int
    agreeing: int
    not_differentiable: int = 0
    unresolved: int = 0
    worst: Entry | None = None
    largest_difference: float = 0.0

    @property
    def disagreeing(self) -> int:
        """How many entries were judged and do not agree."""
        return self.entries - self.agreeing - self.not_differentiable - self.unresolved


@dataclass(frozen=True)
class GradientResult:
    """The outcome of a gradient check. It is true if and only if the check passed.

    Attributes:
        check: which check it was, such as ``check_vjp``.
        function: the name of what was checked.
        method: how the derivatives were found.
        budget: what a difference is held against.
        cotangents: how many of each kind were fed.
        inputs: the differentiated inputs, in order.
        findings: the gravest first.
        remarks: what is worth knowing and not judged.
        evaluations: how often the forward was evaluated.
        seconds: wall time.
    """

    check: str
    function: str
    method: str
    budget: str
    cotangents: Mapping[str, int]
    inputs: tuple[InputResult, ...]
    findings: tuple[Finding, ...] = ()
    remarks: tuple[str, ...] = ()
    evaluations: int = 0
    seconds: float = field(default=0.0, compare=False)

    @property
    def entries(self) -> int:
        """How many numbers were compared."""
        return sum(each.entries for each in self.inputs)

    @property
    def status(self) -> str:
        """``failed``, ``nothing_checked``, ``inconclusive`` or ``passed``; the first that holds."""
        deciding = {finding.kind for finding in self.findings if finding.decides}
        if deciding - set(_INCONCLUSIVE):
            return "failed"
        # An input without elements has no entries; one that has elements must have some.
        if not self.entries or any(each.elements and not each.entries for each in self.inputs):
            return "nothing_checked"
        if deciding:
            return "inconclusive"
        return "passed" if all(each.agreeing == each.entries for each in self.inputs) else "failed"

    @property
    def passed(self) -> bool:
        """Whether every entry was judged and agrees, and no finding decides against it."""
        return self.status == "passed"

    def __bool__(self) -> bool:
        """Return ``passed``, as torch.autograd.gradcheck would."""
        return self.passed

    @property
    def worst(self) -> tuple[InputResult, Entry] | None:
        """The entry whose difference is largest beside what is allowed, and its input."""
        candidates = [(each, each.worst) for each in self.inputs if each.worst is not None]
        return max(candidates, key=lambda pair: severity(pair[1]), default=None)

    def finding(self, kind: str) -> Finding | None:
        """Return the first finding of a kind; None where there is none."""
        return next((each for each in self.findings if each.kind == kind), None)

    def raise_for_failure(self) -> None:
        """Do nothing when passed.

        Raises:
            GradientCheckFailed: with the summary of what failed.
            GradientCheckInconclusive: if nothing is wrong, but some entries were not judged.
        """
        if self.status == "inconclusive":
            raise GradientCheckInconclusive(self)
        if not self.passed:
            raise GradientCheckFailed(self)

    def summary(self) -> str:
        """Say the outcome in a few plain lines."""
        head = f"{self.check} of {self.function}: {self.status}; {self.entries} entries of"
        lines = [f"{head} {len(self.inputs)} inputs compared"]
        if self.status == "nothing_checked":
            empty = [f"{each.name} {each.shape}" for each in self.inputs if not each.entries]
            lines.append(
                f"no entry was compared for {', '.join(empty)}: give inputs and outputs that have"
                " elements"
            )
        lines += [f"{each.kind}: {each.message}" for each in self.findings if each.decides]
        if self.passed:
            lines[0] += f", every one within {self.budget}"
        if self.passed and self.worst is not None:
            lines.append(f"nearest to its limit: {self.worst[0].name} {self.worst[1]}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data fit for JSON: no NaN, no infinity, no tuples.

        Beside the fields there are ``status``, ``passed`` and ``entries``.
        """
        data = plain(asdict(self))
        assert isinstance(data, dict)
        return data | {"status": self.status, "passed": self.passed, "entries": self.entries}


def severity(entry: Entry) -> float:
    """Return a difference beside what is allowed; infinity for a NaN."""
    if not math.isfinite(entry.difference):
        return math.inf
    if entry.allowed == 0:
        return math.inf if entry.difference else 0.0
    return abs(entry.difference) / entry.allowed


def ordered(findings: list[Finding]) -> tuple[Finding, ...]:
    """Sort findings, the gravest first."""
    kinds = tuple(FINDINGS)
    return tuple(sorted(findings, key=lambda each: (not each.decides, kinds.index(each.kind))))


def plain(value: Any) -> Any:
    """Turn tuples and mappings into lists and dicts, and numbers JSON lacks into text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
