"""Check `fast` on this GPU against certified truth, then time its launch-table alternatives.

    cd reports
    python fast_sweep.py OUTPUT_FOLDER [--minutes 7] [--seed 1] [--only static_backward,...]

Every operator first runs all cases of its suite on fresh random inputs; every element must equal
the certified, correctly rounded one, and the figures are written to ``check.json``. The tables of
the suite are then timed: for every case all alternatives, and copies of the same bytes beside them,
turn by turn, so that a drift of the clock meets all alike. Samples are raw: one launch each between
two CUDA events, after a flush that leaves the L2 full of dirty lines. The copies move as many bytes
as the case reads and writes; the fastest of them is what the others are compared with.

An alternative that fails is recorded with its error, and the others go on. Results are written
after every case, so nothing is lost when the time is up: cases not reached are listed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

import oracle
from fast import kv_rope, operators, plans
from fast.launch import Plan
from fast.launch_table import BackwardTile, ForwardTile, backward_tile, forward_tile
from oracle.machine import environment
from oracle.rounding import format_of

Tensors = tuple[torch.Tensor, ...]

FUNCTIONS = {
    "concat_forward": plans.plan_concat_forward,
    "static_backward": plans.plan_static_backward,
    "concat_backward": plans.plan_concat_backward,
    "static_forward": plans.plan_static_forward,
}
SAMPLES = 31
LARGE_BYTES = 1 << 29
"""Cases that move more get fewer samples: they vary less and take longer."""


@dataclass(frozen=True)
class Contender:
    """Something to time on a case: a name, what describes it, and a call."""

    name: str
    described: dict[str, Any]
    call: Callable[[], object]


def main() -> int:
    """Check, then time; return 1 if an element was wrong or could not be checked."""
    parser = argparse.ArgumentParser(description="Check and time fast's alternatives on a GPU.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(FUNCTIONS), metavar="FUNCTION,...")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here: torch.cuda.is_available() is false")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    functions = arguments.only.split(",")
    deadline = time.monotonic() + 60 * arguments.minutes

    compiled = compile_all(functions)
    print(f"compiled {compiled['kernels']} kernels in {compiled['seconds']:.0f} s", flush=True)
    write(arguments.folder / "compile.json", compiled)
    # At most half of the time that is left, shared evenly.
    share = (deadline - time.monotonic()) / 2 / len(functions)
    checked = {name: check(name, arguments.seed, time.monotonic() + share) for name in functions}
    write(arguments.folder / "check.json", {"environment": environment(), "checks": checked})
    for name, cases in checked.items():
        wrong = [case for case in cases if case.get("wrong") != 0]
        print(f"{name}: {len(cases) - len(wrong)} of {len(cases)} cases right", flush=True)
        for case in wrong[:3]:
            print("   ", json.dumps(case)[:400])

    write(arguments.folder / "host.json", host_times())
    flush = torch.ones(
        2 * torch.cuda.get_device_properties(0).L2_cache_size // 4, device="cuda", dtype=torch.int32
    )
    timed: dict[str, list[dict[str, Any]]] = {name: [] for name in functions}
    # Operators take turns, so that all have figures when the time is up.
    for name, case in _in_turn(functions):
        if time.monotonic() > deadline:
            timed[name].append({"case": case.name, "skipped": "the time is up"})
            continue
        timed[name].append(_guarded(case.name, lambda n=name, c=case: time_case(n, c, flush)))
        write(arguments.folder / f"sweep_{name}.json", timed[name])
    for name in functions:
        write(arguments.folder / f"sweep_{name}.json", timed[name])
        summarize(name, timed[name])
    return int(any(case.get("wrong") != 0 for cases in checked.values() for case in cases))


def write(path: Path, value: object) -> None:
    """Write JSON, without NaN."""
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _in_turn(functions: list[str]) -> Iterator[tuple[str, oracle.Case]]:
    suites = [[(name, case) for case in suite_cases(name)] for name in functions]
    for row in zip_longest(*suites):
        yield from (entry for entry in row if entry is not None)


def operator_of(function: str) -> oracle.Operator:
    """Return the operator of a function of ``fast.kv_rope``."""
    return oracle.find_operator(f"kv_rope.{function.replace('_', '.')}")


def suite_cases(function: str) -> tuple[oracle.Case, ...]:
    """Return the cases of the operator's suite."""
    return operator_of(function).suites[0].cases


def _guarded(case: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do work; turn a failure into a record of it."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001  one failure must not lose the rest
        torch.cuda.empty_cache()
        last = traceback.format_exc().strip().splitlines()[-1]
        return {"case": case, "error": f"{type(error).__name__}: {error}"[:500], "traceback": last}


# Checking


def check(function: str, seed: int, deadline: float) -> list[dict[str, Any]]:
    """Compare every element of every case with the certified truth."""
    results = []
    # Small cases first: what is not reached in time counts as wrong.
    for case in sorted(suite_cases(function), key=_elements):
        if time.monotonic() > deadline:
            results.append({"case": case.name, "skipped": "the time is up"})
            continue
        results.append(_guarded(case.name, lambda c=case: check_case(function, c, seed)))
    return results


def check_case(function: str, case: oracle.Case, seed: int) -> dict[str, Any]:
    """Return how many elements of a case are not the correctly rounded ones."""
    operator = operator_of(function)
    inputs = inputs_of(case, seed)
    outputs = getattr(kv_rope, function)(*inputs.values())
    again = getattr(kv_rope, function)(*inputs.values())
    repeated = all(map(_same_bits, outputs, again))
    del again
    truth = oracle.truth(case, inputs)
    wrong = {}
    for spec, output in zip(operator.outputs, outputs, strict=True):
        wrong[spec.name] = int(_differences(output, truth.outputs[spec.name]))
    torch.cuda.synchronize()
    return {
        "case": case.name,
        "elements": sum(output.numel() for output in outputs),
        "certified": truth.certificate.total,
        "wrong": sum(wrong.values()) + int(not repeated),
        "wrong_by_output": wrong,
        "two_runs_identical": repeated,
    }


def _elements(case: oracle.Case) -> int:
    sizes = case.sizes
    rows = sizes["new_seq_len"] + sizes.get("max_seq_len", sizes.get("current_seq_len", 0))
    return sizes["batch_size"] * rows


def inputs_of(case: oracle.Case, seed: int) -> dict[str, torch.Tensor]:
    """Make a case's inputs and put them on the GPU."""
    made = oracle.make_inputs(case, seed)
    return {name: tensor.cuda() for name, tensor in made.items()}


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(format_of(a.dtype).bits_dtype), b.view(format_of(b.dtype).bits_dtype))


def _differences(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Count elements that differ in value or in being NaN."""
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return (~same).sum()


# Timing


def forward_alternatives(moved: int) -> dict[str, ForwardTile]:
    """Return the tiles to try for a forward operator."""
    base = forward_tile(moved, interpreted=False)
    return {
        "default": base,
        "copy-2k": replace(base, copy_bytes=2048),
        "copy-4k": replace(base, copy_bytes=4096),
        "copy-16k": replace(base, copy_bytes=16384),
        "copy-16k-8-warps": replace(base, copy_bytes=16384, rotate_elements=2048, warps=8),
        "copy-4k-2-warps": replace(base, copy_bytes=4096, rotate_elements=512, warps=2),
        "rotate-512": replace(base, rotate_elements=512),
        "rotate-256": replace(base, rotate_elements=256),
        "evict-first": replace(base, stream=1),
        "cg-cs": replace(base, stream=2),
    }


def backward_alternatives(tokens: int) -> dict[str, BackwardTile]:
    """Return the tiles to try for a backward operator."""
    base = backward_tile(tokens, interpreted=False)
    return {
        "default": base,
        "tokens-1-heads-8": replace(base, token_elements=64, heads_at_once=8),
        "tokens-2-heads-4": replace(base, token_elements=128, heads_at_once=4),
        "tokens-4-heads-4": replace(base, token_elements=256, heads_at_once=4),
        "tokens-4-heads-2": replace(base, token_elements=256, heads_at_once=2),
        "tokens-8-heads-1": replace(base, token_elements=512, heads_at_once=1, registers=128),
        "tokens-8-heads-2": replace(base, token_elements=512, heads_at_once=2, registers=168),
        "tokens-16-heads-1": replace(base, token_elements=1024, heads_at_once=1, registers=255),
        "2-warps": replace(base, token_elements=128, heads_at_once=2, copy_bytes=4096, warps=2),
        "copy-4k": replace(base, copy_bytes=4096),
        "copy-16k": replace(base, copy_bytes=16384),
        "many-searches": replace(base, copy_programs=1 << 20),
        "evict-first": replace(base, stream=1),
        "cg-cs": replace(base, stream=2),
    }


def _alternatives(
    function: str, inputs: Tensors
) -> dict[str, ForwardTile] | dict[str, BackwardTile]:
    if function == "concat_forward":
        return forward_alternatives(4 * (inputs[0].nbytes + inputs[4].nbytes))
    if function == "static_forward":
        return forward_alternatives(4 * inputs[4].nbytes)
    key_states = inputs[2]
    return backward_alternatives(key_states.shape[0] * key_states.shape[2])


def compile_all(functions: list[str]) -> dict[str, Any]:
    """Compile all alternatives into Triton's cache, in as many processes as there are cores."""
    start = time.monotonic()
    work: dict[Any, tuple[str, str, str]] = {}
    for function, case in _in_turn(functions):
        inputs = empty_inputs(case, "meta")
        for name, tile in _alternatives(function, inputs).items():
            plan = FUNCTIONS[function](*inputs, tile=tile)
            work.setdefault(_specialization(plan), (function, case.name, name))
    workers = max(1, min(len(work), (os.cpu_count() or 1) - 1))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        errors = [error for error in pool.map(_compile, work.values()) if error]
    return {"kernels": len(work), "errors": errors, "seconds": time.monotonic() - start}


def _specialization(plan: Plan) -> Any:
    """Return what a plan's kernel is compiled for, roughly: constants, and divisibility."""
    constants = {parameter.name for parameter in plan.kernel.params if parameter.is_constexpr}
    names = plan.kernel.arg_names[-len(plan.arguments) :]
    described: list[object] = []
    for name, value in zip(names, plan.arguments, strict=True):
        if name in constants:
            described.append(value)
        elif isinstance(value, tuple):
            described.append(tuple((part % 16 == 0, part == 1) for part in value))
    return (plan.kernel.__name__, plan.warps, plan.registers, tuple(described))


def _compile(work: tuple[str, str, str]) -> str:
    """Compile one alternative; return what went wrong."""
    function, case_name, name = work
    case = next(case for case in suite_cases(function) if case.name == case_name)
    inputs = empty_inputs(case, "meta")
    plan = FUNCTIONS[function](*inputs, tile=_alternatives(function, inputs)[name])
    types = [tensor.dtype for tensor in inputs] + [inputs[0].dtype] * len(plan.outputs)
    try:
        plan.kernel.warmup(*types, *plan.arguments, grid=(1,), **plan.options())
    except Exception as error:  # noqa: BLE001  one failure must not lose the rest
        return f"{work}: {type(error).__name__}: {error}"[:500]
    return ""


def empty_inputs(case: oracle.Case, device: str) -> Tensors:
    """Return uninitialised inputs of a case."""
    operator = oracle.find_operator(case.operator)
    return tuple(
        torch.empty(
            operator.case_shape(spec, case),
            dtype=torch.int64 if spec.indexes else getattr(torch, case.dtype),
            device=device,
        )
        for spec in operator.inputs
    )


def random_inputs(case: oracle.Case) -> Tensors:
    """Return random inputs, made on the GPU; positions ascend from 0, as in the suites."""
    return tuple(
        tensor.copy_(torch.arange(tensor.numel(), device="cuda"))
        if tensor.dtype == torch.int64
        else tensor.normal_()
        for tensor in empty_inputs(case, "cuda")
    )


def shuffled_positions(case: oracle.Case) -> torch.Tensor:
    """Return positions all over the cache in random order."""
    order = torch.randperm(case.sizes["max_seq_len"], device="cuda")
    return order[: case.sizes["new_seq_len"]].contiguous()


def time_case(function: str, case: oracle.Case, flush: torch.Tensor) -> dict[str, Any]:
    """Time all alternatives and copies on one case, turn by turn."""
    inputs = random_inputs(case)
    outputs = getattr(kv_rope, function)(*inputs)
    moved = moved_bytes(function, inputs, outputs)
    alternatives: dict[str, Any] = dict(_alternatives(function, inputs))
    contenders = copies(moved)
    plan_of = FUNCTIONS[function]
    for name, tile in alternatives.items():
        call = _launcher(plan_of(*inputs, tile=tile), (*inputs, *outputs))
        contenders.append(Contender(name, asdict(tile), call))
    if function.startswith("static"):
        shuffled = (*inputs[:-1], shuffled_positions(case))
        tile = alternatives["default"]
        call = _launcher(plan_of(*shuffled, tile=tile), (*shuffled, *outputs))
        contenders.append(Contender("default, shuffled positions", asdict(tile), call))
    failures = {}
    for contender in list(contenders):
        try:
            contender.call()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  one failure must not lose the rest
            failures[contender.name] = f"{type(error).__name__}: {error}"[:300]
            contenders.remove(contender)
    samples = _samples(contenders, flush, 11 if moved > LARGE_BYTES else SAMPLES)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    copy = min(median for name, median in medians.items() if name.startswith("copy:"))
    return {
        "case": case.name,
        "sizes": dict(case.sizes),
        "moved_bytes": moved,
        "copy_us": copy,
        "failures": failures,
        "tiles": {contender.name: contender.described for contender in contenders},
        "median_us": medians,
        "ratio_to_copy": {name: median / copy for name, median in medians.items()},
        "samples_us": samples,
    }


def copies(moved: int) -> list[Contender]:
    """Return plain copies that move so many bytes: torch's, and Triton's in four tile sizes."""
    source = torch.randint(0, 1 << 20, (max(1, moved // 16),), device="cuda")
    target = torch.empty_like(source)
    contenders = [Contender("copy: torch", {}, lambda: target.copy_(source))]
    # The concatenation of a cache and nothing is a copy of both caches: four times these bytes.
    rows = max(1, moved // (4 * 256))
    cache = [torch.randn(1, 1, rows, 128, device="cuda").to(torch.bfloat16) for _ in range(2)]
    nothing = [torch.empty(1, 1, 0, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    outputs = [torch.empty_like(part) for part in cache]
    inputs = (*nothing, *cache)
    for copy_bytes, warps in ((2048, 4), (4096, 4), (8192, 4), (16384, 8)):
        tile = ForwardTile(1024, copy_bytes, 1, warps, 0)
        plan = plans.plan_concat_forward(*inputs, tile=tile)
        name = f"copy: Triton, {copy_bytes} bytes, {warps} warps"
        contenders.append(Contender(name, asdict(tile), _launcher(plan, (*inputs, *outputs))))
    return contenders


def _launcher(plan: Any, tensors: Tensors) -> Callable[[], None]:
    return lambda: plan.launch(tensors, aligned=True)


def moved_bytes(function: str, inputs: Tensors, outputs: Tensors) -> int:
    """Return the bytes that a call must read and write: each once, overwritten rows not read."""
    total = sum(tensor.nbytes for tensor in (*inputs, *outputs))
    if function == "static_forward":
        # The rows that are replaced need not be read.
        total -= 2 * inputs[0].nbytes
    return total


def _samples(
    contenders: list[Contender], flush: torch.Tensor, count: int
) -> dict[str, list[float]]:
    """Time one launch of each in turn, ``count`` times, in microseconds between events."""
    events = {
        contender.name: [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(count)
        ]
        for contender in contenders
    }
    for contender in contenders:
        contender.call()
    for turn in range(count):
        order = contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]
        for contender in order:
            start, end = events[contender.name][turn]
            # Dirties the L2, and keeps the GPU busy while the launch is queued.
            flush.add_(1)
            start.record()
            contender.call()
            end.record()
        torch.cuda.synchronize()
    return {
        name: [1000 * start.elapsed_time(end) for start, end in pairs]
        for name, pairs in events.items()
    }


def host_times() -> dict[str, Any]:
    """Time one call from Python on the smallest forward case, in microseconds, by stage."""
    case = min(suite_cases("concat_forward"), key=lambda c: sum(c.sizes.values()))
    inputs = tuple(inputs_of(case, 0).values())
    plan = plans.plan_concat_forward(*inputs)
    outputs = operators.concat_forward(*inputs)
    found = operators._CONCAT_FORWARD.find  # noqa: SLF001
    shape = plan.outputs[0]
    stages: dict[str, Callable[[], object]] = {
        "kv_rope.concat_forward": lambda: kv_rope.concat_forward(*inputs),
        "operators.concat_forward": lambda: operators.concat_forward(*inputs),
        "torch.ops": lambda: torch.ops.kernel_oracle.kv_rope_concat_forward(*inputs),
        "finding the plan": lambda: found(inputs),
        "two allocations": lambda: (inputs[0].new_empty(shape), inputs[0].new_empty(shape)),
        "the launch": lambda: plan.launch((*inputs, *outputs), aligned=True),
        "torch copy_": lambda: outputs[0].copy_(outputs[1]),
    }
    return {"case": case.name} | {name: _host_time(call) for name, call in stages.items()}


def _host_time(call: Callable[[], object]) -> float:
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            call()
        times.append((time.perf_counter() - start) / 50 * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def summarize(function: str, cases: list[dict[str, Any]]) -> None:
    """Print the geometric mean of every alternative's ratio, and the best one of each case."""
    timed = [case for case in cases if "ratio_to_copy" in case]
    print(f"\n{function}: {len(timed)} of {len(cases)} cases timed")
    if not timed:
        print("   ", json.dumps(cases[:1])[:400])
        return
    names = set.intersection(*(set(case["ratio_to_copy"]) for case in timed))
    means = {n: statistics.geometric_mean(c["ratio_to_copy"][n] for c in timed) for n in names}
    for name, mean in sorted(means.items(), key=lambda item: item[1]):
        print(f"    {mean:6.3f} x copy  {name}")
    for case in timed:
        ratios = {n: r for n, r in case["ratio_to_copy"].items() if not n.startswith("copy:")}
        best = min(ratios, key=lambda name: ratios[name])
        print(
            f"    {case['case']:30} copy {case['copy_us']:8.2f} us  default"
            f" {ratios.get('default', 0):.3f}  best {ratios[best]:.3f} {best}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
