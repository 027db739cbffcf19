"""Triton work done in a process of its own.

Whether kernels are interpreted or compiled, Triton decides for a whole process, at its import.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Kernel:
    """A kernel and the types to compile it for.

    Attributes:
        name: ``package.module:kernel``.
        types: Triton's type of each parameter that is no constant, in order: ``"*bf16"``,
            ``"i32"``, or ``"strides"`` for the four strides of a tensor whose last axis is
            contiguous.
        constants: the value of each ``tl.constexpr`` parameter.
    """

    name: str
    types: tuple[str, ...]
    constants: Mapping[str, int]


@dataclass(frozen=True)
class Resources:
    """What a cubin needs: registers of a thread, and its bytes of local memory, spills included."""

    registers: int
    stack_bytes: int
    local_bytes: int


def call_triton(calls: Mapping[str, Sequence[Tensors]], *, device: str) -> dict[str, list[Tensors]]:
    """Call functions on tensors that are given, and returned, on the CPU.

    Args:
        calls: argument tuples by ``package.module:function``.
        device: "interpreter" (Triton's own, made faithful for bfloat16) or "cuda".
    """
    with tempfile.TemporaryDirectory() as folder:
        calls_file, results_file = Path(folder, "calls.pt"), Path(folder, "results.pt")
        torch.save({target: list(arguments) for target, arguments in calls.items()}, calls_file)
        environment = {"TRITON_INTERPRET": str(int(device == "interpreter"))}
        _run(device, calls_file, results_file, environment=environment)
        results: dict[str, list[Tensors]] = torch.load(results_file, weights_only=True)
    return results


def compile_for_sm90(kernels: Sequence[Kernel]) -> list[Resources]:
    """Compile kernels ahead of time for compute capability 9.0; no GPU is needed."""
    with tempfile.TemporaryDirectory() as folder:
        kernels_file, results_file = Path(folder, "kernels.pt"), Path(folder, "results.pt")
        described = [(kernel.name, kernel.types, dict(kernel.constants)) for kernel in kernels]
        torch.save(described, kernels_file)
        environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(Path(folder, "cache"))}
        _run("compile", kernels_file, results_file, environment=environment)
        results: list[tuple[int, int, int]] = torch.load(results_file, weights_only=True)
    return [Resources(*numbers) for numbers in results]


def _run(verb: str, source: Path, target: Path, environment: Mapping[str, str]) -> None:
    completed = subprocess.run(
        [sys.executable, "-P", "-W", "error", __file__, verb, str(source), str(target)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr


def _interpreter(calls: Mapping[str, Sequence[Tensors]]) -> dict[str, list[Tensors]]:
    from oracle.interpreter import install

    report = install()
    assert report.faithful, report.reason
    with np.errstate(all="ignore"):  # infinities and NaNs are among the inputs
        return _call(calls, device="cpu")


def _cuda(calls: Mapping[str, Sequence[Tensors]]) -> dict[str, list[Tensors]]:
    return _call(calls, device="cuda")


def _call(calls: Mapping[str, Sequence[Tensors]], *, device: str) -> dict[str, list[Tensors]]:
    return {
        target: [
            tuple(output.cpu() for output in _resolve(target)(*_moved(arguments, device)))
            for arguments in argument_tuples
        ]
        for target, argument_tuples in calls.items()
    }


def _moved(tensors: Tensors, device: str) -> Tensors:
    """The tensors on the device, with the strides that they have here."""
    return tuple(
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(
            tensor
        )
        for tensor in tensors
    )


def _compile(
    kernels: Sequence[tuple[str, tuple[str, ...], dict[str, int]]],
) -> list[tuple[int, int, int]]:
    return [
        _resources(_cubin(_resolve(name), types, constants)) for name, types, constants in kernels
    ]


def _cubin(kernel: Any, types: tuple[str, ...], constants: Mapping[str, int]) -> bytes:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, Any] = {}
    constexprs: dict[tuple[int, ...], int] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    aligned: list[list[object]] = [["tt.divisibility", 16]]
    remaining = iter(types)
    for index, parameter in enumerate(kernel.arg_names):
        if parameter in constants:
            signature[parameter] = "constexpr"
            constexprs[(index,)] = constants[parameter]
            continue
        kind = next(remaining)
        if kind == "strides":
            signature[parameter] = ("i64", "i64", "i64", "constexpr")
            constexprs[(index, 3)] = 1
            attributes.update({(index, axis): aligned for axis in range(3)})
        else:
            signature[parameter] = kind
            if kind.startswith("*"):
                attributes[(index,)] = aligned
    assert not list(remaining), f"more types than parameters: {kernel.arg_names}"
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": False},
    )
    cubin = compiled.asm["cubin"]
    assert isinstance(cubin, bytes)
    return cubin


def _resources(cubin: bytes) -> tuple[int, int, int]:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = (int(number) for number in found.groups())
    return registers, stack, local


def _resolve(target: str) -> Any:
    module, name = target.split(":")
    return getattr(import_module(module), name)


def _main() -> None:
    verb, source, target = sys.argv[1:]
    work = {"interpreter": _interpreter, "cuda": _cuda, "compile": _compile}[verb]
    torch.save(work(torch.load(source, weights_only=True)), target)


if __name__ == "__main__":
    _main()
