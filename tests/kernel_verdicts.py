"""What the tests of verdicts on whole collections of kernels share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import pytest
import torch

import oracle
from oracle.definition import Case, Operator
from oracle.rounding import format_of
from oracle.verdict import GRADES, CaseResult, Element, RegionResult
from oracle.verification import Judge
from tests import rational
from tests.honest import HonestKernel
from tests.wrong.catalogue import WrongKernel


@contextmanager
def judges_of(operator: str) -> Iterator[dict[str, Judge]]:
    """A judge for each style; each keeps one server process for all tests."""
    with ExitStack() as stack:
        yield {
            style: stack.enter_context(
                Judge(
                    operator,
                    cases="probes",
                    style=style,
                    device="cpu",
                    fail_fast=True,
                    diagnose=False,
                )
            )
            for style in ("return", "out")
        }


def check_honest(judges: Mapping[str, Judge], kernel: HonestKernel) -> None:
    """Check that an honest kernel passes all probes with its grade, or a tighter one."""
    verdict = judges[kernel.style].verify(f"tests.honest:{kernel.name}")
    assert verdict.passed, verdict.summary()
    assert verdict.grade is not None
    assert GRADES.index(verdict.grade) <= GRADES.index(kernel.grade)
    assert verdict.certified == verdict.elements > 0


def check_wrong(judges: Mapping[str, Judge], module: str, kernel: WrongKernel) -> None:
    """Check that a wrong kernel is rejected for the right reason at the right element."""
    verdict = judges[kernel.style].verify(f"{module}:{kernel.name}")
    assert not verdict.passed
    assert verdict.status in kernel.status, verdict.summary()
    if verdict.status == "call_violation":
        assert verdict.violation in kernel.violations, verdict.summary()
    if verdict.status in ("wrong_values", "below_contract"):
        failure = verdict.first_failure
        assert failure is not None
        found = failure.first_wrong
        assert found is not None
        operator = oracle.find_operator(verdict.operator)
        check_first_wrong(operator, kernel, failure, *found)


def check_first_wrong(
    operator: Operator, kernel: WrongKernel, failure: CaseResult, region: RegionResult, it: Element
) -> None:
    """Check against rational arithmetic that the element is wrong and all before it are not."""
    case = operator.case(failure.name)
    second = re.search(r"on inputs of seed (\d+)", failure.detail)
    seed = int(second.group(1)) if second else 0
    inputs, true_outputs = truth_of(operator.id, case.name, seed)
    outputs = run(operator, case, kernel, inputs)
    exact = rational.exact_outputs(operator.id, list(inputs.values()))
    for name, actual in outputs.items():
        true = true_outputs[name]
        bits = format_of(case.dtype).bits_dtype
        differing = (actual.view(bits) != true.view(bits)).nonzero().tolist()
        for place in map(tuple, differing):
            if name == region.output and place >= it.index:
                break
            assert is_accepted(exact[name].element(place), actual[place]), (name, place)
        if name == region.output:
            assert not is_accepted(exact[name].element(it.index), actual[it.index])
            assert it.got_bits == f"0x{int(actual.view(bits)[it.index]) & 0xFFFF:04x}"
            return
    pytest.fail(f"{region.output} is no output of {operator.id}")


@cache
def truth_of(
    operator_id: str, case: str, seed: int
) -> tuple[dict[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """The inputs and certified outputs of a case."""
    operator = oracle.find_operator(operator_id)
    inputs = oracle.make_inputs(operator.case(case), seed)
    return inputs, oracle.truth(operator, inputs).outputs


def run(
    operator: Operator, case: Case, kernel: WrongKernel, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Call a kernel on fresh copies of the inputs."""
    arguments = [tensor.clone() for tensor in inputs.values()]
    if kernel.style == "out":
        shapes = [operator.shape(spec, case.sizes) for spec in operator.outputs]
        results: Any = [torch.full(shape, math.nan, dtype=torch.bfloat16) for shape in shapes]
        kernel.function(*arguments, *results)
    else:
        results = kernel.function(*arguments)
    return {spec.name: x for spec, x in zip(operator.outputs, results, strict=True)}


def is_accepted(element: rational.Element, actual: torch.Tensor) -> bool:
    """Whether rational arithmetic accepts a value for an element, by the default contract."""
    (got,) = rational.bits_of(actual.reshape(1))
    if element.region == "copied":
        return got == element.bits
    if element.region == "zeroed":
        return got & 0x7FFF == 0
    acceptance = rational.acceptance("stored_intermediates", element.terms, rational.BF16)
    return acceptance.accepts(rational.decode(got, rational.BF16))
