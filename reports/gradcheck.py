"""Compare the gradient checks with torch.autograd.gradcheck, and measure what they rest on.

    python reports/gradcheck.py                    write gradcheck.json and gradcheck.md beside this
    python reports/gradcheck.py --write FOLDER     write them there
    python reports/gradcheck.py --functions 50     fewer random functions

1. Right and wrong gradients before torch's check (slow and fast mode) and before ours: who catches
   what, who raises a false alarm, and how long it takes.
2. Random smooth functions composed by hypothesis: false alarms, and how far numeric derivatives are
   from autograd's in terms of their estimates, which is what K is chosen by.
3. Both backward operators of kv_rope against the derivatives of their forwards.
4. PyTorch's own low-precision gradients in terms of the measured noise: what its factor allows for.

It takes about four minutes on one core.
Exit status 0: ours catches every fault and raises no false alarm, and the operators agree to 1e-12.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oracle.certified import one_thread
from oracle.gradients import (
    K,
    check_operator_gradients,
    check_operator_vjp,
    gradcheck,
    numeric_jacobian,
)
from oracle.gradients.budgets import measure_noise
from oracle.gradients.derivative import look_around
from oracle.gradients.differences import RATIO, Ladder
from oracle.gradients.evaluation import Arguments, Point
from oracle.gradients.findings import severity
from oracle.gradients.noise import scales
from oracle.machine import environment
from oracle.operators import find_operator
from oracle.rounding import format_of
from tests import gradient_cases as cases
from tests.smooth_functions import SmoothFunction, draw_inputs, smooth_functions

AGREEMENT = 1e-12
NO_DERIVATIVE = 1e-12
STOPPED_AFTER = (3, 4, 5)
# The function hides the module of the same name.
GradcheckError: type[Exception] = sys.modules["torch.autograd.gradcheck"].GradcheckError
JACOBIAN_GIB = 8.0


def torch_check(case: cases.GradientCase, fast: bool) -> dict[str, Any]:
    """Put a case to torch.autograd.gradcheck with its default tolerances."""
    inputs = sum(t.numel() for t in case.inputs if t.requires_grad)
    with torch.no_grad():
        returned = case.function(*(tensor.detach() for tensor in case.inputs))
    outputs = sum(
        out.numel() for out in ((returned,) if isinstance(returned, torch.Tensor) else returned)
    )
    gib = 2 * inputs * outputs * 8 / 2**30
    if not fast and gib > JACOBIAN_GIB:
        return {"outcome": "not run", "why": f"its Jacobians would take {gib:,.0f} GiB"}
    started = time.perf_counter()
    try:
        with warnings.catch_warnings():
            # Torch warns that it is meant for float64, and then runs.
            warnings.simplefilter("ignore")
            torch.autograd.gradcheck(case.function, case.inputs, fast_mode=fast)
        outcome, why = "passes", ""
    except GradcheckError as error:
        outcome, why = "fails", str(error).strip().splitlines()[0]
    except RuntimeError as error:
        outcome, why = "refuses", str(error).strip().splitlines()[0]
    return {"outcome": outcome, "why": why, "seconds": time.perf_counter() - started}


def our_check(check: Callable[[], Any]) -> dict[str, Any]:
    """Run one of ours."""
    started = time.perf_counter()
    result = check()
    return {
        "outcome": "passes" if result.passed else "fails",
        "why": "; ".join(sorted({found.kind for found in result.findings if found.decides})),
        "seconds": time.perf_counter() - started,
        "entries": result.entries,
        "status": result.status,
    }


def comparison() -> Iterator[dict[str, Any]]:
    """Yield a row for every case."""
    for case in cases.float64_cases():
        yield {
            "case": case.name,
            "dtype": "float64",
            "right": case.right,
            "slow": torch_check(case, fast=False),
            "fast": torch_check(case, fast=True),
            "ours": our_check(
                lambda case=case: gradcheck(case.function, case.inputs, raise_exception=False)
            ),
        }
    small, *_ = cases.bfloat16_cases(cases.SMALL)
    yield _bfloat16_row(replace(small, name="right, small"), None)
    for case, (_, change) in zip(cases.bfloat16_cases(), cases.BFLOAT16_CHANGES, strict=True):
        yield _bfloat16_row(replace(case, name=f"{case.name}, large"), change)


def _bfloat16_row(case: cases.GradientCase, change: cases.Change | None) -> dict[str, Any]:
    named = dict(zip(cases.NAMES, (t.detach() for t in case.inputs), strict=True))
    backward = cases.operator_backward(change)
    return {
        "case": case.name,
        "dtype": "bfloat16",
        "right": case.right,
        "slow": torch_check(case, fast=False),
        "fast": torch_check(case, fast=True),
        "ours": our_check(
            lambda: check_operator_gradients(cases.FORWARD, cases.BACKWARD, backward, named)
        ),
        "ours, measured noise floor": our_check(
            lambda: gradcheck(
                case.function, case.inputs, raise_exception=False, reference=cases.update
            )
        ),
    }


def random_functions(count: int) -> dict[str, Any]:
    """Check random smooth functions, and compare their numeric derivatives with autograd's."""
    alarms: list[str] = []
    known: list[float] = []
    limits: list[float] = []
    needed: dict[int, list[torch.Tensor]] = {rows: [] for rows in STOPPED_AFTER}
    entries = functions = 0

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(smooth_functions(), st.integers(0, 10**6))
    def run(function: SmoothFunction, seed: int) -> None:
        nonlocal entries, functions
        inputs = draw_inputs(seed)
        result = gradcheck(function, inputs, raise_exception=False)
        entries += result.entries
        functions += 1
        if not result.passed:
            alarms.append(f"{function.text}, seed {seed}: {result.status}")
        (numeric,) = numeric_jacobian(function, inputs)
        exact = torch.autograd.functional.jacobian(function, inputs)
        for found, expected in zip(numeric, exact, strict=True):
            scale = float(expected.abs().max())
            if scale > NO_DERIVATIVE:
                known.append(float(found.allowed.max()) / scale)
        limits.extend(severity(each.worst) for each in result.inputs if each.worst)
        for rows, ratios in stopped_early(function, inputs, exact):
            needed[rows].append(ratios)

    run()
    allowed = torch.tensor(known, dtype=torch.float64)
    return {
        "functions": functions,
        "entries": entries,
        "alarms": alarms,
        "K": K,
        "stopped_early": [_quantiles(rows, torch.cat(found)) for rows, found in needed.items()],
        "largest_difference_in_what_is_allowed": max(limits),
        "allowed_relative_to_largest_derivative": {
            "median": float(allowed.median()),
            "99 %": float(allowed.quantile(0.99)),
            "largest": float(allowed.max()),
        },
    }


def stopped_early(
    function: SmoothFunction, inputs: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield errors in estimates after few steps, where truncation and not rounding dominates."""
    point = Point(function, Arguments.read(inputs))
    noise = look_around(point).noise
    for number, (tensor, jacobian) in enumerate(zip(point.tensors, exact, strict=True)):
        here = tensor.view(-1).clone()
        expected = jacobian.reshape(len(point.base), -1).T
        ladder = Ladder(point.base, noise)
        for row in range(max(STOPPED_AFTER)):
            step = 0.75 * scales(tensor) / float(RATIO**row)
            plus, minus = (
                torch.stack([point.moved(number, at, x) for at, x in enumerate(end.tolist())])
                for end in (here + step, here - step)
            )
            ladder.add(plus, minus, here + step - here, here - (here - step))
            if row + 1 not in STOPPED_AFTER:
                continue
            best = ladder.best()
            rounding = best.floor + 2.0**-50 * expected.abs().amax(dim=1, keepdim=True)
            matters = torch.isfinite(best.estimate) & (best.estimate > 100 * rounding)
            yield row + 1, ((best.value - expected).abs() / best.estimate)[matters]


def _quantiles(rows: int, ratios: torch.Tensor) -> dict[str, Any]:
    # torch.quantile takes no more than 2^24 numbers; sorting has no such limit.
    ordered = ratios.sort().values
    return {
        "steps": rows,
        "entries": len(ordered),
        **{
            name: float(ordered[min(int(share * len(ordered)), len(ordered) - 1)])
            for name, share in (("median", 0.5), ("99 %", 0.99), ("99.9 %", 0.999), ("largest", 1))
        },
        "beyond K": int((ordered > K).sum()),
    }


def operators() -> Iterator[dict[str, Any]]:
    """Yield the agreement of both backward operators with their forwards' derivatives."""
    for layout, axis, rows in (("concat", "current_seq_len", 7), ("static", "max_seq_len", 11)):
        forward = find_operator(f"kv_rope.{layout}.forward")
        backward = find_operator(f"kv_rope.{layout}.backward")
        sizes = {"batch_size": 2, "num_kv_heads": 3, "new_seq_len": 5, axis: rows, "head_dim": 8}
        generator = torch.Generator().manual_seed(0)
        inputs = {
            spec.name: torch.randperm(rows, generator=generator)[:5]
            if spec.indexes is not None
            else torch.randn(
                forward.shape(spec, sizes), dtype=torch.float64, generator=generator
            ).to(torch.bfloat16)
            for spec in forward.inputs
        }
        result = check_operator_vjp(forward, backward, inputs)
        yield {"operator": backward.id, "sizes": sizes, "result": result.to_dict()}


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def noise() -> Iterator[dict[str, Any]]:
    """Yield what PyTorch's gradients err beyond their last rounding, in noises."""
    functional = torch.nn.functional
    torch.manual_seed(0)
    functions: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
        "softmax": (lambda x: x.softmax(-1), (_normal(64, 256),)),
        "log_softmax, one class": (lambda x: x.log_softmax(-1)[:, 3], (_normal(64, 256),)),
        "layer_norm": (
            lambda x, w, b: functional.layer_norm(x, (256,), w, b),
            (_normal(64, 256), _normal(256), _normal(256)),
        ),
        "rms_norm": (_rms_norm, (_normal(64, 256), _normal(256))),
        "gelu MLP": (
            lambda x, a, b: functional.gelu(x @ a) @ b,
            (_normal(32, 64), _normal(64, 128) / 8, _normal(128, 64) / 11),
        ),
        "attention": (
            functional.scaled_dot_product_attention,
            tuple(_normal(2, 4, 33, 32) for _ in range(3)),
        ),
        "swiglu": (lambda a, b: functional.silu(a) * b, (_normal(64, 256), _normal(64, 256))),
        "sum over 32 heads": (torch.mul, (_normal(2, 32, 16, 64), _normal(2, 1, 16, 64))),
        "kv_rope.static": (
            cases.update,
            tuple(t.detach() for t in cases.update_inputs(2, 8, 16, 32, 64, torch.float64)),
        ),
    }
    for name, (function, inputs) in functions.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield {"function": name, "dtype": str(dtype), **_noise_of(function, inputs, dtype)}


def _noise_of(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], dtype: torch.dtype
) -> dict[str, Any]:
    def floating(tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point()

    def gradients(
        given: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        waiting = iter(given)
        leaves = [
            next(waiting).detach().clone().requires_grad_() if floating(t) else t for t in inputs
        ]
        returned = function(*leaves)
        outputs = (returned,) if isinstance(returned, torch.Tensor) else returned
        return torch.autograd.grad(outputs, [t for t in leaves if floating(t)], cotangents)

    low = [t.to(dtype) for t in inputs if floating(t)]
    wide = [t.to(torch.float64) for t in low]
    values = iter(wide)
    returned = function(*(next(values) if floating(t) else t for t in inputs))
    outputs = (returned,) if isinstance(returned, torch.Tensor) else returned
    cotangents = [torch.randn_like(out).to(dtype) for out in outputs]
    wide_cotangents = [w.to(torch.float64) for w in cotangents]
    exact = gradients(wide, wide_cotangents)
    found = gradients(low, cotangents)
    sizes = measure_noise(lambda w, x: gradients(x, w), wide_cotangents, wide, 32, 0)
    fmt = format_of(dtype)
    worst, elements = 0.0, 0
    for gradient, value, size in zip(found, exact, sizes, strict=True):
        error = (gradient.to(torch.float64) - value).abs()
        error -= fmt.unit_roundoff * value.abs() + fmt.smallest
        inside = size > 0
        worst = max(worst, float((error[inside] / (fmt.unit_roundoff * size[inside])).max()))
        elements += value.numel()
    return {"elements": elements, "largest": worst}


def _cell(outcome: dict[str, Any], right: bool) -> str:
    if outcome["outcome"] == "not run":
        return f"not run: {outcome['why']}"
    if outcome["outcome"] == "refuses":
        return "refused"
    passes = outcome["outcome"] == "passes"
    seconds = f"{outcome['seconds']:.2g} s"
    if right:
        return f"passes, {seconds}" if passes else f"**false alarm**, {seconds}"
    return f"**missed**, {seconds}" if passes else f"caught, {seconds}"


def _paragraph(text: str) -> list[str]:
    """Wrap a paragraph, and leave a line after it."""
    return [*textwrap.wrap(" ".join(text.split()), 98), ""]


def markdown(record: dict[str, Any]) -> str:
    """Write the record as a page."""
    lines = [
        "# Gradient checks: what they catch, and what they rest on",
        "",
        *_paragraph(
            "Written by `python reports/gradcheck.py`; the raw figures are in `gradcheck.json`."
        ),
        *_comparison_section(record["comparison"]),
        *_false_alarm_section(record["random_functions"]),
        *_operator_section(record["operators"]),
        *_noise_section(record["noise"]),
    ]
    return "\n".join(lines) + "\n"


def _comparison_section(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "## Beside torch.autograd.gradcheck",
        "",
        *_paragraph(
            """torch's with its default tolerances, in slow and in fast mode. The functions are the
            static cache update with RoPE (1,696 input and 1,056 output elements; 802,816 and
            262,144 where large) and a doubling of 1,000 elements. Ours is `gradcheck`; in bfloat16
            `check_operator_gradients` and, in brackets, `gradcheck` with a measured noise floor.
            Refused: an input with a stride of 0."""
        ),
        "| gradients | type | torch, slow | torch, fast | ours | found |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ours = _cell(row["ours"], row["right"])
        measured = row.get("ours, measured noise floor")
        if measured:
            ours += f" ({_cell(measured, row['right'])})"
        lines.append(
            f"| {row['case']} | {row['dtype']} | {_cell(row['slow'], row['right'])} |"
            f" {_cell(row['fast'], row['right'])} | {ours} | {row['ours']['why']} |"
        )
    return [*lines, ""]


def _false_alarm_section(found: dict[str, Any]) -> list[str]:
    relative = found["allowed_relative_to_largest_derivative"]
    return [
        "## False alarms, and K",
        "",
        *_paragraph(
            f"""{found["functions"]} smooth functions composed by hypothesis,
            {found["entries"]:,} entries: **{len(found["alarms"])} alarms**."""
        ),
        *_paragraph(
            f"""The largest difference of all entries was
            {found["largest_difference_in_what_is_allowed"]:.2g} of what was allowed:
            K = {found["K"]:g} estimates and the rounding floor. Derivatives are known to
            {relative["median"]:.1g} of the largest of their input in the median, to
            {relative["99 %"]:.1g} in 99 %, to {relative["largest"]:.1g} at worst."""
        ),
        *_paragraph(
            """The steps go down until rounding stops them, so that estimates hardly matter. Stopped
            early, truncation is what is left: the error of the same derivatives in estimates, where
            the estimate is 100 times above rounding:"""
        ),
        "| steps | entries | median | 99 % | 99.9 % | largest | beyond K |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {row['steps']} | {row['entries']:,} | {row['median']:.2g} | {row['99 %']:.2g} |"
            f" {row['99.9 %']:.2g} | {row['largest']:.2g} | {row['beyond K']} |"
            for row in found["stopped_early"]
        ),
        "",
    ]


def _operator_section(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "## The backward operators of kv_rope",
        "",
        *_paragraph(
            """Both references in float64 against central differences of the forward's: the whole
            Jacobian, and five further cotangents (random, strided, expanded)."""
        ),
        "| operator | input | elements | entries | agree | largest difference |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines += [
            f"| {row['operator']} | {each['name']} | {each['elements']:,} | {each['entries']:,} |"
            f" {each['agreeing']:,} | {each['largest_difference']:.1e} |"
            for each in row["result"]["inputs"]
        ]
    return [*lines, ""]


def _noise_section(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "## The measured noise floor",
        "",
        *_paragraph(
            """What PyTorch's own gradients err on this machine beyond their last rounding, as a
            multiple of the root mean square over 32 perturbations of all inputs and cotangents by
            one unit roundoff: the largest of all elements. The noise floor allows twice what the
            forward's own gradient has, within 4 to 32, or 32 where that is not known."""
        ),
        "| function | bfloat16 | float16 | float32 |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in dict.fromkeys(row["function"] for row in rows):
        found = [f"{row['largest']:.2f}" for row in rows if row["function"] == name]
        lines.append(f"| {name} | {' | '.join(found)} |")
    return lines


def is_good(record: dict[str, Any]) -> bool:
    """Whether all is as it should be."""
    caught = all(
        row[ours]["outcome"] == ("passes" if row["right"] else "fails")
        for row in record["comparison"]
        for ours in ("ours", "ours, measured noise floor")
        if ours in row
    )
    agree = all(
        row["result"]["passed"]
        and all(each["largest_difference"] <= AGREEMENT for each in row["result"]["inputs"])
        for row in record["operators"]
    )
    factors = all(math.isfinite(row["largest"]) for row in record["noise"])
    return caught and agree and factors and not record["random_functions"]["alarms"]


def main() -> int:
    """Measure, write, and return the exit status."""
    parser = argparse.ArgumentParser(description="Gradient checks beside torch's.")
    parser.add_argument("--write", metavar="FOLDER", default=str(Path(__file__).parent))
    parser.add_argument("--functions", type=int, default=200, help="random smooth functions")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with one_thread():
        record = {
            "environment": environment(),
            "comparison": list(comparison()),
            "random_functions": random_functions(arguments.functions),
            "operators": list(operators()),
            "noise": list(noise()),
        }
    page = markdown(record)
    print(page)
    folder = Path(arguments.write)
    (folder / "gradcheck.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "gradcheck.md").write_text(page, encoding="utf-8")
    return 0 if is_good(record) else 1


if __name__ == "__main__":
    sys.exit(main())
