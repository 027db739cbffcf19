"""Compile the kernels of a plan for a GPU that is not there, and look at what came out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


@dataclass(frozen=True)
class Request:
    """A launch to compile.

    Attributes:
        function: of ``fast.kv_rope``.
        sizes: B, H, N, rows of the cache (C or M), D.
        dtype: name of the floating type.
        arch: compute capability, 80, 90 or 100.
    """

    function: str
    sizes: tuple[int, int, int, int, int]
    dtype: str = "bfloat16"
    arch: int = 90


@dataclass(frozen=True)
class Compiled:
    """What the compiler made.

    Attributes:
        registers: of a thread.
        stack_bytes: of a thread, spills included.
        local_bytes: of a thread.
        accesses: how often each global load and store occurs in the machine code.
        local_accesses: loads and stores of local memory in the machine code.
        fused: fused multiply-adds on floating-point numbers in the PTX.
        flushing: floating-point instructions in the PTX that flush subnormals to zero.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    accesses: dict[str, int]
    local_accesses: int
    fused: int
    flushing: int


def compile_ahead(requests: Sequence[Request]) -> list[Compiled]:
    """Compile in a process of its own: in this one Triton may be interpreting."""
    with tempfile.TemporaryDirectory() as cache:
        completed = subprocess.run(
            [sys.executable, "-P", __file__],
            input=json.dumps([asdict(request) for request in requests]),
            env={
                **os.environ,
                "TRITON_INTERPRET": "0",
                "TRITON_CACHE_DIR": cache,
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert completed.returncode == 0, completed.stderr
    return [Compiled(**fields) for fields in json.loads(completed.stdout)]


def _plan(request: Request) -> tuple[Any, list[str]]:
    """Return the plan of a request, and Triton's types of the tensors."""
    from fast import plans

    batch, heads, new, rows, width = request.sizes
    dtype = getattr(torch, request.dtype)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    states = [empty(batch, heads, new, width) for _ in range(2)]
    static = request.function.startswith("static")
    table = (batch, new, width) if static else (batch, 1, new, width)
    tables = [empty(*table) for _ in range(2)]
    grown = rows + new if request.function == "concat_backward" else rows
    caches = [empty(batch, heads, grown, width) for _ in range(2)]
    position = [torch.empty(new, dtype=torch.int64, device="meta")] if static else []
    if request.function.endswith("backward"):
        inputs = [*caches, states[0], *tables, *position]
    else:
        inputs = [*states, *tables, *caches, *position]
    plan = getattr(plans, f"plan_{request.function}")(*inputs)
    pointers = ["*i64" if t.dtype == torch.int64 else POINTERS[dtype] for t in inputs]
    outputs = len(plan.outputs) or 2
    return plan, pointers + [POINTERS[dtype]] * outputs


def _source(plan: Any, pointers: list[str]) -> Any:
    """Describe the arguments as Triton's launcher would."""
    from triton.compiler import ASTSource

    aligned = [["tt.divisibility", 16]]
    constant = {parameter.name for parameter in plan.kernel.params if parameter.is_constexpr}
    plain = {parameter.name for parameter in plan.kernel.params if parameter.do_not_specialize}
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def integer(place: tuple[int, ...], value: int) -> str:
        if value == 1:
            constants[place] = 1
            return "constexpr"
        if value % 16 == 0:
            attributes[place] = aligned
        return "i32" if value < 2**31 else "i64"

    values = [*pointers, *plan.arguments]
    for index, (name, value) in enumerate(zip(plan.kernel.arg_names, values, strict=True)):
        if name in constant:
            signature[name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, str):
            signature[name] = value
            attributes[(index,)] = aligned
        elif isinstance(value, tuple):
            signature[name] = tuple(integer((index, i), part) for i, part in enumerate(value))
        else:
            signature[name] = "i32" if name in plain else integer((index,), value)
    return ASTSource(plan.kernel, signature, constants, attributes)


def _compile(request: Request) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget

    plan, pointers = _plan(request)
    compiled = triton.compile(
        _source(plan, pointers),
        target=GPUTarget("cuda", request.arch, 32),
        options=plan.options(),
    )
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tools = triton.knobs.nvidia
        usage = _output(tools.cuobjdump.path, "--dump-resource-usage", file.name)
        code = _output(tools.nvdisasm.path, file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert found, usage
    accesses: dict[str, int] = {}
    for access in re.findall(r"\b(?:LDG|STG)\.\S+", code):
        accesses[access] = accesses.get(access, 0) + 1
    return Compiled(
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        local_bytes=int(found[3]),
        accesses=accesses,
        local_accesses=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        fused=len(re.findall(r"\b(?:fma\.\S*|mad\.\S*)f(?:16|32|64)", ptx)),
        flushing=len(re.findall(r"\.ftz\.", ptx)),
    )


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    described = [Request(**fields) for fields in json.load(sys.stdin)]
    json.dump([asdict(_compile(request)) for request in described], sys.stdout)
