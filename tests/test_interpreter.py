"""The interpreter, made faithful: checked through kernels against exact rational arithmetic.

Whether kernels are interpreted or compiled is decided for a whole process, when triton is imported.
So this file is also a program: pytest runs it with the name of a scenario, and it prints what it
found as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle import interpreter
from tests.rational import BF16, FP16, FP32, Format, Value, decode, round_to_bits

Findings = dict[str, Any]

REPOSITORY = Path(__file__).parents[1]
EVERY_PATTERN = np.arange(65536, dtype=np.uint16)
CONSTANTS = [0.1, -1.5, 1e-8, 1.5e-6, 1.00390637, 257.0, 3e38]


# Numbers and patterns


def is_nan(patterns: np.ndarray) -> np.ndarray:
    return (patterns & 0x7FFF) > 0x7F80


def values(patterns: list[int], form: Format) -> list[Value]:
    return [decode(pattern, form) for pattern in patterns]


def correct(value: Value, form: Format) -> int:
    return round_to_bits(value, form)


def truncated(value: Value, form: Format) -> int:
    """The pattern of a value rounded toward zero."""
    nearest = correct(value, form)
    rounded = decode(nearest, form)
    if not isinstance(value, Fraction):
        return nearest
    overshot = not isinstance(rounded, Fraction) or abs(rounded) > abs(value)
    return nearest - overshot


# The conversions themselves, without triton


def test_every_bf16_pattern_widens_to_the_float32_that_has_it_as_upper_half() -> None:
    wide = interpreter.widen_bfloat16(EVERY_PATTERN)
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide.view(np.uint32), EVERY_PATTERN.astype(np.uint32) << 16)
    finite = ~is_nan(EVERY_PATTERN)
    sample = np.flatnonzero(finite)[::97]
    assert [float(x) for x in wide[sample] if np.isfinite(x)] == [
        float(v) for v in values(sample.tolist(), BF16) if isinstance(v, Fraction)
    ]


@given(st.integers(0, 2**32 - 1))
def test_float32_rounds_to_the_nearest_bf16_with_ties_to_even(pattern: int) -> None:
    source = np.array([pattern], dtype=np.uint32).view(np.float32)
    expected = correct(decode(pattern, FP32), BF16)
    result = int(interpreter.round_to_bfloat16(source)[0])
    if expected & 0x7FFF == 0x7FC0:  # the only NaN that rational arithmetic returns
        assert result == (pattern >> 16) | 0x40
    else:
        assert result == expected or result & 0x7FFF == expected == 0  # zeros keep their sign


@given(st.integers(0, 0xFFFF), st.integers(-2, 2), st.integers(0, 2**13), st.booleans())
def test_float64_rounds_once_beside_a_tie(
    neighbour: int, direction: int, distance: int, toward_zero: bool
) -> None:
    below, above = decode(neighbour, BF16), decode((neighbour + 1) & 0xFFFF, BF16)
    if not (isinstance(below, Fraction) and isinstance(above, Fraction)):
        return
    tie = np.float64((below + above) / 2)
    source = np.asarray(tie.view(np.int64) + direction * distance).view(np.float64)
    rounded = (truncated if toward_zero else correct)(Fraction(float(source)), BF16)
    result = interpreter.round_to_bfloat16(source, toward_zero=toward_zero)
    assert result.shape == ()
    assert int(result) & 0x7FFF == rounded & 0x7FFF
    assert bool(int(result) >> 15) == bool(np.signbit(source))


@pytest.mark.parametrize("name", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
@given(data=st.data())
def test_integers_round_once(name: str, data: st.DataObject) -> None:
    limits = np.iinfo(name)
    tie = st.builds(
        lambda upper, shift, offset: (upper * 2 + 1 << shift) + offset,
        st.integers(-(2**8), 2**8),
        st.integers(0, 54),
        st.integers(-1, 1),
    )
    number = data.draw(st.integers(int(limits.min), int(limits.max)) | tie)
    number = min(max(number, int(limits.min)), int(limits.max))
    result = interpreter.round_to_bfloat16(np.array([number], dtype=name))
    assert int(result[0]) == correct(Fraction(number), BF16)


def test_a_nan_stays_one_whichever_way_it_is_rounded() -> None:
    nans = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    expected = [0x7FC0, 0xFFC0, 0x7FFF, 0xFFFF]
    assert interpreter.round_to_bfloat16(nans).tolist() == expected
    assert interpreter.round_to_bfloat16(nans, toward_zero=True).tolist() == expected
    assert interpreter.round_to_bfloat16(nans[3]) == 0xFFFF
    for pattern, dtype in ((0x7FF0000000000001, np.uint64), (0x7C01, np.uint16)):
        signaling = np.array([pattern], dtype).view(f"f{np.dtype(dtype).itemsize}")
        assert is_nan(interpreter.round_to_bfloat16(signaling)).all()
        assert is_nan(interpreter.round_to_bfloat16(signaling, toward_zero=True)).all()


# The process that imports triton


def run_scenario(name: str, folder: Path, **environment: str) -> Findings:
    completed = subprocess.run(
        [sys.executable, "-P", "-W", "error", __file__, name],
        env={
            **{name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"},
            "PYTHONPATH": str(REPOSITORY),
            "TRITON_CACHE_DIR": str(folder),
            "TRITON_DEFAULT_FP_FUSION": "0",  # Triton 3.9 warns unless one is chosen
            "OPENBLAS_NUM_THREADS": "1",  # numpy's own threads would hide torch's
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    findings: Findings = json.loads(completed.stdout)
    return findings


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return run_scenario("interpreted", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return run_scenario("compiled", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tampered(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return run_scenario("tampered", tmp_path_factory.mktemp("cache"))


def test_the_installed_triton_is_wrong_unaided_and_faithful_once_installed(
    interpreted: Findings,
) -> None:
    report = interpreted["report"]
    assert any("bf16 patterns to fp32: 254 wrong" in clause for clause in interpreted["unaided"])
    assert report["faithful"], report["reason"]
    assert report["reason"] == ""
    assert "InterpreterBuilder.cast_impl" in report["replaced"]
    assert report["triton_version"] in report["remark"]
    assert "replaced by correct ones" in report["remark"]


def test_installing_twice_changes_nothing(interpreted: Findings) -> None:
    assert interpreted["second report"] == interpreted["report"]


def test_the_self_test_is_quick_and_leaves_the_process_fit_to_fork(interpreted: Findings) -> None:
    assert interpreted["self-test CPU seconds"] < 1
    assert interpreted["threads started"] == 0
    assert interpreted["torch threads before and after"] == [2, 2]
    assert interpreted["forked child"] == 0


def test_the_self_test_notices_each_replacement_that_is_taken_back(interpreted: Findings) -> None:
    # Before 3.9 the library itself casts bf16 to fp32 first, so that these are never reached.
    sheltered = {
        "InterpreterBuilder.create_clampf",
        "InterpreterBuilder.unary_op",
        "ReduceOps.min_max",
        "ScanOps.cumsum",
        "ScanOps.cumprod",
    }
    version = tuple(int(part) for part in interpreted["report"]["triton_version"].split(".")[:2])
    assert set(interpreted["unnoticed"]) <= (sheltered if version < (3, 9) else set())


def test_elementwise_arithmetic_on_bf16_is_rounded_once(interpreted: Findings) -> None:
    operands = (values(interpreted["operands"][name], BF16) for name in "abc")
    differing = 0
    for index, (a, b, c) in enumerate(zip(*operands, strict=True)):
        assert isinstance(a, Fraction)
        assert isinstance(b, Fraction)
        assert isinstance(c, Fraction)
        expected = {"a + b": a + b, "a - b": a - b, "a * b": a * b, "fma": a * b + c}
        for name, exact in expected.items():
            # An exact zero carries the sign that the operands decide.
            mask = 0x7FFF if exact == 0 else 0xFFFF
            result = interpreted["elementwise"][name][index]
            assert result & mask == correct(exact, BF16), (name, a, b, c)
        via_product = decode(correct(a * b, BF16), BF16)
        if isinstance(via_product, Fraction):
            differing += correct(via_product + c, BF16) != correct(a * b + c, BF16)
    assert differing > 100  # the fused results are not those of two roundings


def test_bf16_comparisons_and_selections_follow_the_values(interpreted: Findings) -> None:
    operands = (values(interpreted["operands"][name], BF16) for name in "ab")
    pairs = list(zip(*operands, strict=True))
    assert interpreted["elementwise"]["a < b"] == [float(a < b) for a, b in pairs]
    assert interpreted["elementwise"]["a == b"] == [float(a == b) for a, b in pairs]
    chosen = values(interpreted["elementwise"]["where(a < b)"], BF16)
    assert chosen == [min(a, b) for a, b in pairs]


def test_the_error_of_a_float32_product_comes_out_of_fma(interpreted: Findings) -> None:
    assert interpreted["fp32 fma"] == 2.0**-46


def test_special_values_keep_their_meaning(interpreted: Findings) -> None:
    assert interpreted["scalar 2.5 + 2.0"] == 4.5
    assert interpreted["scalar branch on -5 < -2"] == 1.0
    assert interpreted["inf - inf is NaN, max + max is inf"] == [True, True]


def test_a_nan_that_goes_to_fp32_and_back_keeps_sign_and_payload(interpreted: Findings) -> None:
    there_and_back = np.array(interpreted["every pattern to fp32 and back"])
    np.testing.assert_array_equal(there_and_back, EVERY_PATTERN)


def test_an_autotuned_kernel_runs_with_its_first_configuration(interpreted: Findings) -> None:
    assert interpreted["autotuned"] == [1.0, 1.0, 0.0, 0.0]


def test_a_loaded_scalar_bounds_a_loop(interpreted: Findings) -> None:
    assert interpreted["loop of 3"] == 3.0


@pytest.mark.parametrize(
    ("rounding", "source", "target"),
    [
        ("rtne", "float32", "float16"),
        ("rtne", "float64", "float16"),
        ("rtne", "float64", "bfloat16"),
        ("rtne", "float16", "bfloat16"),
        ("rtne", "bfloat16", "float16"),
        ("rtz", "float32", "float16"),
        ("rtz", "float64", "float16"),
        ("rtz", "float32", "bfloat16"),
        ("rtz", "float64", "bfloat16"),
        ("rtz", "float64", "float32"),
    ],
)
def test_casts_between_floats_round_once_as_asked(
    interpreted: Findings, rounding: str, source: str, target: str
) -> None:
    form = {"float16": FP16, "bfloat16": BF16, "float32": FP32}[target]
    round_as_asked = correct if rounding == "rtne" else truncated
    conversion = interpreted["casts"][f"{rounding} {source} {target}"]
    for number, result in zip(conversion["source"], conversion["target"], strict=True):
        exact = Fraction(number)
        sign = 1 << (form.width - 1)
        assert result & ~sign == round_as_asked(abs(exact), form), number
        assert exact == 0 or (result & sign != 0) == (exact < 0)


def test_bf16_casts_to_integers_and_back(interpreted: Findings) -> None:
    assert interpreted["bf16 to int32"] == [2, -5, 256, 0]
    assert interpreted["int32 to bf16"] == [correct(Fraction(n), BF16) for n in (257, 259, -5, 0)]
    assert interpreted["fp32 comparison to bf16"] == [0x3F80, 0, 0, 0x3F80]


def test_a_masked_load_gives_the_other_value_in_bf16(interpreted: Findings) -> None:
    assert interpreted["masked load"] == [1.0, 2.0, 2.5, 2.5]


@pytest.mark.parametrize(("name", "first"), [("bf16", 256), ("fp16", 2048)])
def test_sums_of_16_bit_floats_round_after_every_addition(
    interpreted: Findings, name: str, first: int
) -> None:
    # Ones are lost against the first term; in fp32, rounded once, the sum would be first + 8.
    total = first + 6
    sums = interpreted["sums"][name]
    assert sums["axis 0"] == [2.0 * first] + [2.0] * 7
    assert sums["axis 1"] == [total, total]
    assert sums["axis 1, kept"] == [[total], [total]]
    assert sums["all"] == 2.0 * total
    assert sums["custom combine"] == [first, first]


def test_extremes_and_their_indices_follow_the_values(interpreted: Findings) -> None:
    assert interpreted["extremes"] == {"max": -2.0, "argmax": 1, "min": -8.0, "argmin": 3}


def test_reversed_scans_accumulate_values(interpreted: Findings) -> None:
    assert interpreted["reversed cumsum"] == [-18.5, -13.5, -11.5, -8.0]


def test_bf16_constants_are_those_that_the_compiler_makes(
    interpreted: Findings, compiled: Findings
) -> None:
    made = values(interpreted["constants"], BF16)
    assert all(isinstance(value, Fraction) for value in made)
    for constant, mine, theirs in zip(CONSTANTS, made, compiled["constants"], strict=True):
        assert float(mine) == pytest.approx(theirs, rel=1e-5, abs=0), constant


def test_other_types_are_computed_as_before(interpreted: Findings) -> None:
    assert interpreted["other types"] == {
        "fp32 atomic add": [3.0, 3.0, 3.0, 3.0],
        "fp32 maximum": 8.0,
        "fp32 sum": 36.0,
        "fp32 cumulative sum": [1.0, 3.0, 6.0, 10.0],
        "fp64 fma": 2 + 2.0**-40,
        "fp8": [1.5, -0.25],
    }


def test_kernels_write_into_the_very_memory_of_their_arguments(interpreted: Findings) -> None:
    assert interpreted["in place through an offset view"] == [0, 0, 0, 1, 0, 1, 0, 0]
    assert interpreted["in place in a mapped file"] == [0, 0, 0, 1, 0, 1, 0, 0]


def test_triton_imported_for_compiling_is_refused_with_the_remedy(compiled: Findings) -> None:
    assert "TRITON_INTERPRET=1" in compiled["refusal"]
    assert "before anything imports triton" in compiled["refusal"]
    assert compiled["environment after the refusal"] is None


@pytest.mark.parametrize("scenario", ["no create_clampf", "no ScanOps"])
def test_an_interpreter_built_otherwise_is_reported_and_left_alone(
    tampered: Findings, scenario: str
) -> None:
    report = tampered[scenario]
    assert not report["faithful"]
    assert report["replaced"] == []
    assert report["reason"] == report["remark"]
    assert "bf16" in report["reason"]
    assert "could not be judged" in report["reason"]
    assert scenario.removeprefix("no ") in report["reason"]


def test_replacements_that_fail_the_self_test_are_reported(tampered: Findings) -> None:
    report = tampered["truncating"]
    assert not report["faithful"]
    assert "fp32 to bf16" in report["reason"]
    assert "could not be judged" in report["reason"]


def test_an_interpreter_that_is_right_already_is_left_as_it_is(tampered: Findings) -> None:
    report = tampered["right already"]
    assert report["faithful"]
    assert report["replaced"] == []
    assert "passed the bf16 self-test unchanged" in report["remark"]


# The scenarios: what runs in a process of its own


def _interpreted() -> Findings:
    unaided = interpreter.self_test()
    originals = _operations()
    threads, torch_threads = _count_threads(), torch.get_num_threads()
    started = time.process_time()
    report = interpreter.install()
    seconds = time.process_time() - started
    return {
        "unaided": unaided,
        "report": dataclasses.asdict(report),
        "threads started": _count_threads() - threads,
        "torch threads before and after": [torch_threads, torch.get_num_threads()],
        "self-test CPU seconds": seconds,
        "forked child": _run_forked(),
        "second report": dataclasses.asdict(interpreter.install()),
        "unnoticed": _unnoticed(report.replaced, originals),
        **_arithmetic(),
        **_conversions(),
        **_reductions(),
        **_other_types(),
        **_memory(),
    }


def _count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _run_forked() -> int:
    """The exit status of a forked child that uses torch's threads and runs a kernel."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        many = torch.ones(2**20) + 1
        increment[(1,)](many, 1)
        os._exit(0 if many[0] == 3 and many[1] == 2 else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _operations() -> dict[str, Any]:
    return {
        f"{owner}.{name}": operation
        for owner in ("InterpreterBuilder", "ReduceOps", "ScanOps")
        for name, operation in vars(getattr(triton_interpreter, owner)).items()
    }


def _unnoticed(replaced: tuple[str, ...], originals: dict[str, Any]) -> list[str]:
    """The operations that can be put back as Triton has them without failing the self-test."""
    ours = _operations()
    unnoticed = []
    for name in replaced:
        owner, attribute = name.split(".")
        holder = getattr(triton_interpreter, owner)
        if name in originals:
            setattr(holder, attribute, originals[name])
        else:
            delattr(holder, attribute)
        if not interpreter.self_test():
            unnoticed.append(name)
        setattr(holder, attribute, ours[name])
    return unnoticed


def _bfloat16(patterns: Any) -> Any:
    return torch.from_numpy(np.array(patterns, dtype=np.uint16)).view(torch.bfloat16)


def _patterns(tensor: Any) -> list[int]:
    return tensor.view(torch.uint16).tolist()


def _arithmetic() -> Findings:
    random = np.random.default_rng(1)
    # Half of them lie between 2^-4 and 2^5, so that sums meet ties; the others anywhere.
    near = (random.integers(123, 132, (3, 512)) << 7) + random.integers(0, 128, (3, 512))
    near += random.integers(0, 2, (3, 512)) << 15
    anything = random.integers(0, 0x7F80, (3, 512)) + (random.integers(0, 2, (3, 512)) << 15)
    # 7 * 37 is a tie, which 2^-60 breaks: beyond what float64 holds beside it.
    near[:, 0] = [0x40E0, 0x4214, 0xA180]
    a, b, c = (_bfloat16(row) for row in np.concatenate([near, anything], axis=1))
    names = ["a + b", "a - b", "a * b", "fma", "where(a < b)"]
    numbers = {name: torch.zeros(1024, dtype=torch.bfloat16) for name in names}
    truths = {name: torch.zeros(1024) for name in ("a < b", "a == b")}
    elementwise[(1,)](a, b, c, *numbers.values(), *truths.values())
    scalar = torch.zeros(2, dtype=torch.bfloat16)
    scalars[(1,)](torch.tensor([2.5, 2.0, -5.0, -2.0], dtype=torch.bfloat16), scalar)
    special = torch.zeros(2, dtype=torch.bfloat16)
    specials[(1,)](_bfloat16([0x7F80, 0x7F7F]), special)
    fused = torch.zeros(8)
    fuse[(1,)](torch.full((8,), 1 + 2**-23), torch.full((8,), -1 - 2**-22), fused)
    return {
        "fp32 fma": fused[0].item(),
        "operands": {
            name: _patterns(tensor) for name, tensor in zip("abc", (a, b, c), strict=True)
        },
        "elementwise": {
            **{name: _patterns(tensor) for name, tensor in numbers.items()},
            **{name: tensor.tolist() for name, tensor in truths.items()},
        },
        "scalar 2.5 + 2.0": scalar[0].item(),
        "scalar branch on -5 < -2": scalar[1].item(),
        "inf - inf is NaN, max + max is inf": [
            bool(special[0].isnan()),
            bool(special[1] == float("inf")),
        ],
    }


def _conversions() -> Findings:
    back = torch.zeros(65536, dtype=torch.bfloat16)
    there_and_back[(1,)](_bfloat16(EVERY_PATTERN), back)
    integers = torch.zeros(4, dtype=torch.int32)
    convert[(1,)](torch.tensor([2.5, -5.9, 256.0, 0.5], dtype=torch.bfloat16), integers, 4)
    floats = torch.zeros(4, dtype=torch.bfloat16)
    convert[(1,)](torch.tensor([257, 259, -5, 0], dtype=torch.int32), floats, 4)
    constants = []
    for constant in CONSTANTS:
        made = torch.zeros(8, dtype=torch.bfloat16)
        fill[(1,)](made, constant)
        constants.append(_patterns(made)[0])
    compared = torch.zeros(4, dtype=torch.bfloat16)
    compare[(1,)](torch.tensor([1.0, 3.0, 5.0, -2.0]), compared)
    return {
        "every pattern to fp32 and back": _patterns(back),
        "bf16 to int32": integers.tolist(),
        "int32 to bf16": _patterns(floats),
        "fp32 comparison to bf16": _patterns(compared),
        "constants": constants,
        "casts": {
            f"{kernel} {source} {target}": _cast(convert_with[kernel], source, target)
            for kernel in convert_with
            for source in ("float64", "float32", "float16", "bfloat16")
            for target in ("float32", "float16", "bfloat16")
            if torch.finfo(getattr(torch, source)).bits
            >= torch.finfo(getattr(torch, target)).bits + 16 * (kernel == "rtz")
            and source != target
        },
    }


def _cast(kernel: Any, source: str, target: str) -> Findings:
    """Cast numbers at, beside and between the ties of the target format, of every magnitude."""
    random = np.random.default_rng(2)
    target_type, source_type = getattr(torch, target), getattr(torch, source)
    units = torch.finfo(target_type).eps * torch.tensor([0.5, 1.5, 1.0], dtype=torch.float64)
    around = 1 + units[:, None] + torch.tensor([0, 2.0**-40, -(2.0**-40)], dtype=torch.float64)
    exponents = torch.from_numpy(random.integers(-150, 129, 600)).double()
    scaled = around.reshape(-1)[random.integers(0, 9, 600)] * 2.0**exponents
    signs = torch.from_numpy(random.choice([-1.0, 1.0], 600))
    numbers = (scaled * signs).to(source_type)
    numbers = numbers[numbers.isfinite()][:512]
    numbers = torch.cat([numbers, numbers.new_ones(512 - len(numbers))])
    result = torch.zeros(512, dtype=target_type)
    kernel[(1,)](numbers, result, 512)
    patterns = result.view({2: torch.uint16, 4: torch.uint32}[result.itemsize])
    return {"source": numbers.double().tolist(), "target": patterns.tolist()}


def _reductions() -> Findings:
    sums = {}
    for name, dtype, first in (("bf16", torch.bfloat16, 256), ("fp16", torch.float16, 2048)):
        terms = torch.ones((2, 8), dtype=dtype)
        terms[:, 0] = first
        results = [torch.zeros(size, dtype=dtype) for size in (8, 2, (2, 1), 1, 2)]
        add_up[(1,)](terms, *results)
        names = ("axis 0", "axis 1", "axis 1, kept", "all", "custom combine")
        sums[name] = {key: r.tolist() for key, r in zip(names, results, strict=True)}
        sums[name]["all"] = results[3].item()
    found, scanned = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)
    negatives = torch.tensor([-5.0, -2.0, -3.5, -8.0], dtype=torch.bfloat16)
    reduce_negatives[(1,)](negatives, found, scanned)
    return {
        "sums": sums,
        "extremes": dict(zip(("max", "argmax", "min", "argmin"), found.tolist(), strict=True)),
        "reversed cumsum": scanned.tolist(),
    }


def _other_types() -> Findings:
    x, added, results = torch.arange(1.0, 9.0), torch.zeros(4), torch.zeros(6)
    doubles, small = torch.full((1,), 1 + 2.0**-40, dtype=torch.float64), torch.tensor([1.5, -0.25])
    compute_other_types[(1,)](x, added, results, doubles, small)
    return {
        "other types": {
            "fp32 atomic add": added.tolist(),
            "fp32 maximum": results[0].item(),
            "fp32 sum": results[1].item(),
            "fp32 cumulative sum": results[2:].tolist(),
            "fp64 fma": doubles.item(),
            "fp8": small.tolist(),
        }
    }


def _memory() -> Findings:
    base = torch.zeros(8, dtype=torch.bfloat16)
    increment[(1,)](base[3:].view(-1)[::2], 2)
    path = Path(os.environ["TRITON_CACHE_DIR"], "tensor")
    path.write_bytes(bytes(16))
    mapped = torch.from_numpy(np.memmap(path, dtype=np.uint16, mode="r+")).view(torch.bfloat16)
    increment[(1,)](mapped[3:][::2], 2)
    on_disk = _bfloat16(np.fromfile(path, dtype=np.uint16))
    masked = torch.zeros(4, dtype=torch.bfloat16)
    load_masked[(1,)](torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16), masked)
    return {
        "in place through an offset view": base.tolist(),
        "in place in a mapped file": on_disk.tolist(),
        "masked load": masked.tolist(),
        "autotuned": _autotuned().tolist(),
        "loop of 3": _loop(3).item(),
    }


def _autotuned() -> torch.Tensor:
    """Two configurations write different lengths; the first writes two elements."""
    configurations = [triton.Config({"length": 2}), triton.Config({"length": 4})]
    tuned = triton.autotune(configs=configurations, key=["n"])(write_ones)
    target = torch.zeros(4)
    tuned[(1,)](target, 4)
    return target


def _loop(count: int) -> torch.Tensor:
    target = torch.zeros(1)
    count_up[(1,)](torch.tensor([count], dtype=torch.int32), target)
    return target


def _tampered() -> Findings:
    findings = {}
    for scenario, owner, name in (
        ("no create_clampf", triton_interpreter.InterpreterBuilder, "create_clampf"),
        ("no ScanOps", triton_interpreter, "ScanOps"),
    ):
        removed = getattr(owner, name)
        delattr(owner, name)
        findings[scenario] = dataclasses.asdict(interpreter.install())
        setattr(owner, name, removed)

    rounding = interpreter.round_to_bfloat16
    interpreter.round_to_bfloat16 = lambda values, toward_zero=True: rounding(  # noqa: ARG005
        values, toward_zero=True
    )
    findings["truncating"] = dataclasses.asdict(interpreter.install())
    interpreter.round_to_bfloat16 = rounding

    for name in interpreter.install().replaced:
        owner, attribute = name.split(".")
        getattr(getattr(triton_interpreter, owner), attribute).__module__ = "triton"
    findings["right already"] = dataclasses.asdict(interpreter.install())
    return findings


def _compiled() -> Findings:
    try:
        interpreter.prepare_environment()
    except RuntimeError as error:
        refusal = str(error)
    return {
        "refusal": refusal,
        "environment after the refusal": os.environ.get("TRITON_INTERPRET"),
        "constants": [_compiled_constant(constant) for constant in CONSTANTS],
    }


def _compiled_constant(constant: float) -> float:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fill, {"target": "*bf16", "value": "constexpr"}, {"value": constant})
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    (found,) = [line for line in text.splitlines() if "xbf16>" in line and "dense<" in line]
    return float(found.split("dense<")[1].split(">")[0])


if __name__ == "__main__":
    scenario: Callable[[], Findings] = globals()[f"_{sys.argv[1]}"]
    if scenario is not _compiled:
        interpreter.prepare_environment()

    import torch
    import triton
    import triton.language as tl
    from triton.runtime import interpreter as triton_interpreter

    torch.set_num_threads(2)

    @triton.jit
    def elementwise(a_ptr, b_ptr, c_ptr, added, subtracted, multiplied, fused, chosen, less, equal):
        i = tl.arange(0, 1024)
        a = tl.load(a_ptr + i)
        b = tl.load(b_ptr + i)
        tl.store(added + i, a + b)
        tl.store(subtracted + i, a - b)
        tl.store(multiplied + i, a * b)
        tl.store(fused + i, tl.fma(a, b, tl.load(c_ptr + i)))
        tl.store(chosen + i, tl.where(a < b, a, b))
        tl.store(less + i, a < b)
        tl.store(equal + i, a == b)

    @triton.jit
    def fuse(a_ptr, b_ptr, target):
        i = tl.arange(0, 8)
        a = tl.load(a_ptr + i)
        tl.store(target + i, tl.fma(a, a, tl.load(b_ptr + i)))

    @triton.jit
    def scalars(source, target):
        tl.store(target, tl.load(source) + tl.load(source + 1))
        if tl.load(source + 2) < tl.load(source + 3):
            tl.store(target + 1, 1.0)

    @triton.jit
    def specials(source, target):
        infinity = tl.load(source)
        largest = tl.load(source + 1)
        tl.store(target, infinity - infinity)
        tl.store(target + 1, largest + largest)

    @triton.jit
    def there_and_back(source, target):
        i = tl.arange(0, 65536)
        tl.store(target + i, tl.load(source + i).to(tl.float32).to(tl.bfloat16))

    @triton.jit
    def convert(source, target, n: tl.constexpr):
        i = tl.arange(0, n)
        tl.store(target + i, tl.load(source + i))

    @triton.jit
    def convert_toward_zero(source, target, n: tl.constexpr):
        i = tl.arange(0, n)
        x = tl.load(source + i)
        tl.store(target + i, x.to(target.dtype.element_ty, fp_downcast_rounding="rtz"))

    convert_with = {"rtne": convert, "rtz": convert_toward_zero}

    @triton.jit
    def compare(source, target):
        i = tl.arange(0, 4)
        x = tl.load(source + i)
        tl.store(target + i, (x < 2.0).to(tl.bfloat16))

    @triton.jit
    def fill(target, value: tl.constexpr):
        i = tl.arange(0, 8)
        tl.store(target + i, tl.full((8,), value, tl.bfloat16))

    @triton.jit
    def add(a, b):
        return a + b

    @triton.jit
    def add_up(source, columns, rows, kept, everything, combined):
        i = tl.arange(0, 2)
        j = tl.arange(0, 8)
        x = tl.load(source + i[:, None] * 8 + j[None, :])
        tl.store(columns + j, tl.sum(x, axis=0))
        tl.store(rows + i, tl.sum(x, axis=1))
        tl.store(kept + i[:, None], tl.sum(x, axis=1, keep_dims=True))
        tl.store(everything, tl.sum(x))
        tl.store(combined + i, tl.reduce(x, 1, add))

    @triton.jit
    def reduce_negatives(source, found, scanned):
        i = tl.arange(0, 4)
        x = tl.load(source + i)
        largest, where_largest = tl.max(x, axis=0, return_indices=True)
        smallest, where_smallest = tl.min(x, axis=0, return_indices=True)
        tl.store(found, largest)
        tl.store(found + 1, where_largest)
        tl.store(found + 2, smallest)
        tl.store(found + 3, where_smallest)
        tl.store(scanned + i, tl.cumsum(x, axis=0, reverse=True))

    @triton.jit
    def compute_other_types(source, added, results, doubles, small):
        i = tl.arange(0, 8)
        j = tl.arange(0, 4)
        k = tl.arange(0, 2)
        x = tl.load(source + i)
        tl.atomic_add(added + i % 4, tl.where(i < 4, 1.0, 2.0))
        tl.store(results, tl.max(x, axis=0))
        tl.store(results + 1, tl.sum(x, axis=0))
        tl.store(results + 2 + j, tl.cumsum(tl.load(source + j), axis=0))
        d = tl.load(doubles)
        tl.store(doubles, tl.fma(d, tl.full((), 1.0, tl.float64), tl.full((), 1.0, tl.float64)))
        tl.store(small + k, tl.load(small + k).to(tl.float8e5).to(tl.float32))

    @triton.jit
    def increment(target, step: tl.constexpr):
        i = tl.arange(0, 2) * step
        x = tl.load(target + i, mask=i < 3 * step - step, other=0.0)
        tl.store(target + i, x + 1, mask=(i < 1) | (step > 1))

    @triton.jit
    def load_masked(source, target):
        i = tl.arange(0, 4)
        tl.store(target + i, tl.load(source + i, mask=i < 2, other=2.5))

    @triton.jit
    def write_ones(target, n, length: tl.constexpr):
        i = tl.arange(0, length)
        tl.store(target + i, 1.0, mask=i < n)

    @triton.jit
    def count_up(bound, target):
        total = 0.0
        for _ in range(tl.load(bound)):
            total += 1.0
        tl.store(target, total)

    with np.errstate(all="ignore"):  # infinities and NaNs are among the operands
        sys.stdout.write(json.dumps(scenario()))
