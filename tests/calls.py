"""Calls over small files, and candidates to be called."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from oracle.call import CallRequest, TensorLayout
from oracle.candidate import CandidateReference, parse_candidate

HOSTILE = Path(__file__).parent / "hostile"
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
        return self._bits(self.request.outputs[0], self.request.outputs_path)

    @property
    def first_input(self) -> list[int]:
        """The bits of the first input."""
        return self._bits(self.request.inputs[0], self.request.inputs_path)

    @staticmethod
    def _bits(layout: TensorLayout, path: str) -> list[int]:
        data = np.fromfile(path, np.uint8)[layout.offset :]
        count = math.prod(layout.shape)
        return data[: count * layout.itemsize].view(f"u{layout.itemsize}").tolist()


def make_call(folder: Path, **options: Any) -> Call:
    """Write the files of a call: bfloat16 [2, 3] of special values and of twos; NaN."""
    first = TensorLayout("first", "bfloat16", (2, 3), (3, 1), BAND)
    second = replace(first, name="second", offset=2 * BAND + 12)
    content = np.full(3 * BAND + 24, 0xEE, np.uint8)
    for layout, values in ((first, SPECIAL), (second, [0x4000] * 6)):
        content[layout.offset : layout.offset + 12] = np.array(values, np.uint16).view(np.uint8)
    inputs, outputs = folder / "inputs", folder / "outputs"
    content.tofile(inputs)
    np.full(2 * BAND + 12, 0xFF, np.uint8).tofile(outputs)
    request = CallRequest(
        inputs_path=str(inputs),
        inputs=(first, second),
        outputs_path=str(outputs),
        outputs=(replace(first, name="output"),),
    )
    return Call(replace(request, **options))


def make_copy_call(folder: Path, elements: int, **options: Any) -> CallRequest:
    """Write the files of a call whose inputs and output have so many bfloat16 elements."""
    layout = TensorLayout("first", "bfloat16", (elements,), (1,), 0)
    for name in ("inputs", "outputs"):
        np.full(2 * elements, 0x33, np.uint8).tofile(folder / name)
    request = CallRequest(
        inputs_path=str(folder / "inputs"),
        inputs=(layout, layout),
        outputs_path=str(folder / "outputs"),
        outputs=(layout,),
    )
    return replace(request, **options)


def hostile(function: str, file: str = "calls") -> CandidateReference:
    """Name a candidate of tests/hostile."""
    return parse_candidate(f"{HOSTILE / file}.py:{function}")


def written(folder: Path, source: str, function: str = "f") -> CandidateReference:
    """Write a candidate's file, which has imported torch, and name the candidate."""
    path = folder / "kernel.py"
    path.write_text("import torch\n\n" + textwrap.dedent(source))
    return parse_candidate(f"{path}:{function}")
