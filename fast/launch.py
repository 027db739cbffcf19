"""Launching a kernel with little work in Python.

What depends on shapes, strides and types alone is worked out once and kept: a plan. Calling it
again with tensors of the same description skips the checks, the choice of tiles, and Triton's own
search for the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels; decided when triton was imported."""

_MOST_PLANS = 4096


class Plan:
    """One launch, but for its tensors.

    Attributes:
        kernel: the ``triton.jit`` function.
        programs: how many programs to launch; with 0 nothing is.
        arguments: all arguments that follow the tensors, in order, constants included.
        warps: warps of a program.
        outputs: shapes of the outputs to allocate.
        registers: of a thread, at most; None: as the compiler likes.
    """

    __slots__ = ("_runner", "arguments", "kernel", "outputs", "programs", "registers", "warps")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        arguments: tuple[Any, ...],
        warps: int,
        outputs: tuple[tuple[int, ...], ...] = (),
        registers: int | None = None,
    ) -> None:
        self.kernel = kernel
        self.programs = programs
        self.arguments = arguments
        self.warps = warps
        self.outputs = outputs
        self.registers = registers
        self._runner: Callable[..., None] | None = None

    def options(self) -> dict[str, Any]:
        """Return Triton's options for the kernel; without fusion, as two-sum needs."""
        return {
            "num_warps": self.warps,
            "maxnreg": self.registers,
            "enable_fp_fusion": False,
        }

    def launch(self, tensors: tuple[torch.Tensor, ...], *, aligned: bool) -> None:
        """Launch the kernel on the current stream of the tensors' device.

        Args:
            tensors: the kernel's first arguments, all on one device.
            aligned: whether all start at multiples of 16 bytes. Only then is the compiled kernel
                kept: Triton compiles others for other alignments.
        """
        if not self.programs:
            return
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            # Triton launches on the current device. # pragma: gpu only
            with torch.cuda.device(device):
                self._launch(tensors, aligned=aligned)
        else:
            self._launch(tensors, aligned=aligned)

    def _launch(self, tensors: tuple[torch.Tensor, ...], *, aligned: bool) -> None:
        if aligned and self._runner is not None:  # pragma: gpu only
            self._runner(*tensors, *self.arguments)
            return
        compiled = self.kernel[(self.programs,)](*tensors, *self.arguments, **self.options())
        if aligned and not INTERPRETED:  # pragma: gpu only
            self._runner = compiled[(self.programs, 1, 1)]


class Plans:
    """The plans of one operator, by the description of its inputs.

    Attributes:
        make: makes a plan from the inputs, or raises where they do not fit.
    """

    def __init__(self, make: Callable[..., Plan]) -> None:
        self._make = make
        self._plans: dict[Hashable, Plan] = {}

    def find(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Plan, bool]:
        """Return the plan for inputs, and whether all of them start at multiples of 16 bytes."""
        pointers = 0
        key: list[Hashable] = []
        for tensor in tensors:
            pointers |= tensor.data_ptr()
            key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        description = tuple(key)
        plan = self._plans.get(description)
        if plan is None:
            plan = self._make(*tensors)
            if len(self._plans) >= _MOST_PLANS:
                # A decoding loop over growing caches needs a new plan for each step.
                self._plans.clear()
            self._plans[description] = plan
        return plan, pointers % 16 == 0


def table_strides(table: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides of a table as ``[B,N,D]``; 0 along B where it has one row."""
    stride = table.stride()
    return (0 if table.shape[0] == 1 else stride[0], stride[-2], stride[-1])


def contiguous_strides(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return the strides of a contiguous ``[B,H,rows,D]`` tensor."""
    _, heads, rows, width = shape
    return (heads * rows * width, rows * width, width, 1)
