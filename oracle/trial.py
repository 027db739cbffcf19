"""One case on trial: inputs before the candidate, the call, the guards, the comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch

from . import guards
from .budget import Contract
from .call import CallReply, CallRequest
from .comparison import Comparison, compare
from .definition import Case, Operator, Style
from .diagnosis import Failure
from .domain import output_elements
from .exchange import Arena, Bytes, plan
from .guards import Finding
from .inputs import fill_inputs
from .machine import Device
from .verdict import STATUSES, CaseResult, MeanTest, loosest

FILL_BYTES = (0x7F, 0xFE)
"""What fresh memory is filled with in the two calls of a guarded case. Both read as huge numbers
in every floating type, of different signs."""

OUT_FILL_BYTES = (0xFF, 0x7F)
"""What the output tensors of style ``out`` are filled with: NaN, then a huge number."""

DIAGNOSED_ELEMENTS = 1 << 20
"""Failing outputs of at most so many elements are kept for diagnosis."""

# Far from any seed a user counts through, so that no two runs share inputs by accident.
_SECOND_SEED = 0x5EED_0000

_CALL_STATUS = {
    "raised": "crashed",
    "crashed": "crashed",
    "timed_out": "timed_out",
    "out_of_memory": "out_of_memory",
}


@dataclass(frozen=True)
class Terms:
    """On what terms a case is judged.

    Attributes:
        style: the calling style.
        contract: the numeric contract of computed elements.
        device: where the candidate runs.
        seed: of the inputs.
        timeout: seconds that a call may take.
        first_timeout: seconds that the first call of this trial may take.
        twice: whether the candidate is called twice and guarded in full: poisoned memory, kept
            outputs, other inputs the second time.
    """

    style: Style
    contract: Contract
    device: Device
    seed: int
    timeout: float
    first_timeout: float
    twice: bool


class Caller(Protocol):
    """Something that calls the candidate."""

    def call(self, request: CallRequest, timeout: float) -> CallReply:
        """Call it once, for at most ``timeout`` seconds."""
        ...


@dataclass(frozen=True)
class Tried:
    """What became of a case.

    Attributes:
        result: the result; its ``seconds`` are left to the caller.
        failure: the tensors, for diagnosis, where the comparison failed and they are few.
    """

    result: CaseResult
    failure: Failure | None = None


def try_case(operator: Operator, case: Case, caller: Caller, terms: Terms) -> Tried:
    """Call the candidate on a case and judge what comes back.

    Args:
        operator: the case's operator.
        case: the case.
        caller: calls the candidate.
        terms: on what terms it is judged.

    Returns:
        The result.
    """
    with _Trial(operator, case, terms) as trial:
        return Tried(trial.judge(caller), trial.failure)


def describe(case: Case) -> dict[str, Any]:
    """Return the fields of a result that come from the case itself."""
    return {
        "name": case.name,
        "group": case.group,
        "sizes": dict(case.sizes),
        "exposes": case.exposes,
    }


class _Trial:
    """A case's inputs, the memory shared with the candidate, and what was found."""

    def __init__(self, operator: Operator, case: Case, terms: Terms) -> None:
        self._operator = operator
        self._case = case
        self._terms = terms
        self._given = plan(operator, case, operator.inputs, case.layouts)
        self._contiguous = all(layout.is_contiguous for layout in self._given.layouts)
        self._due = plan(operator, case, operator.outputs, {})
        # The judge's own copy of the inputs file: truth is computed from it, and the shared one
        # is compared with it after the call.
        self._before: Bytes = np.empty(self._given.size, dtype=np.uint8)
        self._inputs = Arena(self._given.size)
        self._outputs = Arena(self._due.size)
        self._findings: list[Finding] = []
        self._comparison: Comparison | None = None
        # The seed of the second call's inputs, if the comparison is that call's.
        self._second_seed: int | None = None
        self._reply = CallReply("returned")
        self.failure: Failure | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._inputs.close()
        self._outputs.close()

    def judge(self, caller: Caller) -> CaseResult:
        """Call the candidate, once or twice, and judge what came back."""
        timeout = self._terms.first_timeout
        seeds = self._seeds()
        contents: list[tuple[Bytes, int]] = []
        fills = OUT_FILL_BYTES if self._terms.style == "out" else FILL_BYTES
        for number, (seed, fill) in enumerate(zip(seeds, fills, strict=False)):
            if number == 0 or seed != seeds[0]:
                self._draw(seed)
            request = self._request(number, fill)
            reply = caller.call(request, timeout)
            if number == 0:
                self._reply = reply
            if reply.status != "returned":
                status = _CALL_STATUS[reply.status]
                return self._result(status, detail=_sentence(reply.message))
            if not self._judge_call(request, reply):
                return self._conclude()
            self._compare(contents, seed)
            if self._terms.twice:
                contents.append((self._outputs.bytes.copy(), fill))
            timeout = self._terms.timeout
        if len(contents) == 2:
            self._findings += guards.judge_initialised(self._due.layouts, *contents)
        return self._conclude()

    def _seeds(self) -> tuple[int, ...]:
        """Return the seed of each call.

        Independent random inputs are drawn anew for the second call, at the same addresses: an
        answer remembered from the first call is then wrong.
        """
        seed = self._terms.seed
        if not self._terms.twice:
            return (seed,)
        return (seed, seed + _SECOND_SEED) if self._case.random else (seed, seed)

    def _draw(self, seed: int) -> None:
        self._given.fill_guards(self._before)
        arrays = self._given.contiguous_arrays(self._before)
        fill_inputs(self._operator, self._case, seed, arrays)
        self._given.store(arrays, self._before)

    def _request(self, number: int, fill: int) -> CallRequest:
        """Lay fresh inputs and poisoned outputs before the candidate."""
        self._inputs.bytes[:] = self._before
        self._outputs.bytes[:] = fill
        self._due.fill_guards(self._outputs.bytes)
        return CallRequest(
            inputs_path=self._inputs.path,
            inputs=self._given.layouts,
            outputs_path=self._outputs.path,
            outputs=self._due.layouts,
            style=self._terms.style,
            inplace=self._operator.inplace_indices() if self._terms.style == "inplace" else (),
            fill_byte=FILL_BYTES[number],
            keep_outputs=self._terms.twice,
        )

    def _judge_call(self, request: CallRequest, reply: CallReply) -> bool:
        """Apply the guards; return whether the outputs can be compared."""
        findings = [*guards.judge_structure(request, reply, self._contiguous)]
        findings += guards.judge_earlier_outputs(request, reply)
        findings += guards.judge_inputs(request, self._before, self._inputs.bytes)
        findings += guards.judge_bounds(self._given.layouts, self._before, self._inputs.bytes)
        clean = np.empty_like(self._outputs.bytes)
        self._due.fill_guards(clean)
        findings += guards.judge_bounds(self._due.layouts, clean, self._outputs.bytes)
        findings += guards.remark_unexercised(request, reply)
        self._findings += findings
        incomparable = {"wrong_shape", "wrong_dtype", "wrong_device"}
        uncounted = {"wrong_return_type", "wrong_output_count", "tensor_subclass"}
        return not any(
            finding.status in incomparable or finding.violation in uncounted for finding in findings
        )

    def _compare(self, earlier: list[tuple[Bytes, int]], seed: int) -> None:
        """Compare the outputs of a call; of two calls, the worse comparison is kept."""
        device = "cuda" if self._terms.device == "cuda" else "cpu"
        inputs = _on(device, self._given.tensors(self._before))
        outputs = _on(device, self._due.tensors(self._outputs.bytes))
        comparison = compare(
            self._operator, inputs, outputs, self._terms.contract, random=self._case.random
        )
        few = output_elements(self._operator, self._case.sizes) <= DIAGNOSED_ELEMENTS
        if self.failure is None and few and comparison.status in ("wrong_values", "below_contract"):
            self.failure = Failure(self._case.name, _cloned(inputs), _cloned(outputs), comparison)
        if self._comparison is None:
            self._comparison = comparison
        elif self._comparison.status == "passed" and comparison.status != "passed":
            self._comparison = comparison
            self._second_seed = seed
            self._findings += self._stale(earlier[0][0])

    def _stale(self, first: Bytes) -> list[Finding]:
        """Find that the second call repeated the right answer of the first to other inputs."""
        before, after = self._due.arrays(first), self._due.arrays(self._outputs.bytes)
        repeated = [name for name in before if np.array_equal(before[name], after[name])]
        if len(repeated) < len(before) or not self._case.random:
            return []
        return [
            Finding(
                "call_violation",
                "stale_answer",
                "A second call at the same addresses, with other inputs, returned the outputs of"
                " the first; compute from the inputs in every call.",
            )
        ]

    def _conclude(self) -> CaseResult:
        """Return the result: the gravest of the findings and the comparison."""
        judged = [finding for finding in self._findings if finding.status != guards.REMARK]
        comparison = self._comparison
        status = "passed" if comparison is None else comparison.status
        gravest_finding = min(
            judged, key=lambda finding: STATUSES.index(finding.status), default=None
        )
        if gravest_finding and STATUSES.index(gravest_finding.status) < STATUSES.index(status):
            return self._result(
                gravest_finding.status,
                violation=gravest_finding.violation,
                detail=gravest_finding.message,
            )
        return self._result(status, detail=self._describe_difference())

    def _describe_difference(self) -> str:
        """Say in one or two sentences what differs, if anything does."""
        if self._comparison is None:
            return ""
        failed = [region for region in self._comparison.regions if not region.passed]
        if not failed:
            return ""
        region = failed[0]
        if region.mean is not None and region.biased:
            return _describe_bias(region.output, region.region, region.mean)
        wrong = region.elements - region.within
        text = f"{wrong} of {region.elements} elements of {region.output}, {region.region}, "
        if region.meaning == "computed":
            text += f"are outside what {self._terms.contract} allows"
        else:
            text += "are not bit-identical" if region.meaning == "copied" else "are not zero"
        element = region.first_wrong
        if element is not None:
            text += f", first at {list(element.index)}: got {element.got}, expected"
            text += f" {element.expected}"
            if element.got == element.expected:
                text += f" (bits {element.got_bits} instead of {element.expected_bits})"
        if self._second_seed is not None:
            text += f" (in the second call of this case, on inputs of seed {self._second_seed})"
        others = len(failed) - 1
        if others:
            text += f"; so are some in {others} other region{'s' if others > 1 else ''}"
        return text + "."

    def _result(self, status: str, *, violation: str = "", detail: str = "") -> CaseResult:
        comparison = self._comparison
        remarks = [f.message for f in self._findings if f.status == guards.REMARK]
        remarks += comparison.remarks if comparison else ()
        passed = status == "passed" and comparison is not None
        return CaseResult(
            **describe(self._case),
            status=status,
            violation=violation,
            detail=detail,
            grade=loosest([region.grade for region in comparison.regions])
            if passed and comparison
            else None,
            elements=comparison.elements if comparison else 0,
            certified=comparison.certificate.total if comparison else 0,
            regions=comparison.regions if comparison else (),
            remarks=tuple(dict.fromkeys(remarks)),
            output_text=self._reply.output_text,
            call_seconds=self._reply.seconds,
        )


def _describe_bias(output: str, region: str, mean: MeanTest) -> str:
    return (
        f"{output}, {region}: every element is allowed, but their mean error is"
        f" {mean.mean:+.3f} ulp (away from zero is positive), and no mixture of honest roundings"
        f" has one outside {mean.low:+.3f} to {mean.high:+.3f} on these inputs but once in a"
        " million runs. Round to nearest, ties to even."
    )


def _cloned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _sentence(message: str) -> str:
    """Make a message a sentence: a capital letter at its start, a full stop at its end."""
    return message[:1].upper() + message[1:] if message else ""


def _on(device: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
