"""Triton's CPU interpreter, made faithful for bfloat16.

Triton 3.6 to 3.9, run with TRITON_INTERPRET=1, keep a bfloat16 tensor as its raw 16-bit patterns.
They truncate where compiled code rounds float32 to nearest even, convert subnormals to float32
wrongly, and add, compare, negate and reduce the patterns as if they were integers. `install`
replaces those operations, in this process, by ones that return what compiled code returns, and
proves it with `self_test`.

What compiled code does was read from the PTX that Triton emits for sm_80, sm_90 and sm_100:

- float64 to bfloat16 rounds once (`cvt.rn.bf16.f64`; sm_80 goes through a float32 rounded to odd).
- Integers round once from sm_90 on (`cvt.rn.bf16.s32`), and so they do here; sm_80 goes through a
  nearest float32, which differs for some integers beyond 2^24.
- Sums, products and fused multiply-adds of bfloat16 round once. A sum over an axis rounds after
  every addition, in bfloat16 and in float16. Maxima and comparisons are exact, `tl.dot`
  accumulates in float32.
- A bfloat16 constant is made from six decimals of the float32 value (LLVM parses
  `std::to_string(value)`): 1.5e-6 becomes 2e-6, and 1e-8 becomes 0.
- A NaN that goes to float32 and back keeps its sign and payload, because LLVM folds the two
  conversions away, and so it does here.

Kernels decorated with `triton.autotune` run with the first of their configurations: there is
nothing to time here, and Triton's own timing needs a GPU.

Not covered: the 8-bit formats, `tl.dot_scaled`, and NaN padding of descriptors and block pointers.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Operation = Callable[..., Any]

if TYPE_CHECKING:
    # The self-test's kernels name it. When they run they find it in globals that `_run` makes for
    # them: importing this module must not import triton.
    import triton.language as tl


@dataclass(frozen=True)
class InterpreterReport:
    """What `install` found and did.

    Attributes:
        triton_version: version of the imported Triton.
        faithful: whether every check of `self_test` passed.
        replaced: the interpreter's functions that are replaced in this process.
        reason: empty when faithful, else one sentence that says what failed, and that bfloat16
            could not be judged.
        remark: one sentence for every verdict made on this interpreter.
    """

    triton_version: str
    faithful: bool
    replaced: tuple[str, ...]
    reason: str
    remark: str


def prepare_environment() -> None:
    """Set TRITON_INTERPRET=1 for this process and its children, before triton is imported.

    Raises:
        RuntimeError: triton was imported without TRITON_INTERPRET=1: its library functions
            (`tl.sum`, `tl.max`, ...) are bound to the compiler and cannot be interpreted.
    """
    library = sys.modules.get("triton.language.standard")
    if library is not None and type(library.sum).__name__ != "InterpretedFunction":
        raise RuntimeError(
            "triton was imported without TRITON_INTERPRET=1, so its functions would be compiled, "
            "not interpreted; call prepare_environment() before anything imports triton"
        )
    os.environ["TRITON_INTERPRET"] = "1"


def install() -> InterpreterReport:
    """Make the installed Triton's interpreter faithful for bfloat16, in this process.

    Nothing is replaced if Triton passes `self_test` as it is. Calling it again changes nothing.

    Raises:
        RuntimeError: triton was imported without TRITON_INTERPRET=1.
        ModuleNotFoundError: triton is not installed.
    """
    prepare_environment()
    import triton

    version: str = triton.__version__
    # A kernel's arithmetic on infinities and NaN is not worth a warning: compiled code gives none,
    # and where warnings are errors the interpreter would fail.
    np.seterr(all="ignore")
    try:
        _choose_first_configurations()
        _accept_sized_indices()
        if not _replaced_operations() and next(_failures(), None) is not None:
            _replace_operations()
        replaced = _replaced_operations()
    except (ImportError, AttributeError) as error:
        return _report(version, (), (f"its internals are not as expected ({error})",))
    return _report(version, replaced, self_test())


def self_test() -> tuple[str, ...]:
    """Run every check of `_CHECKS` through real kernels in the interpreter.

    The expected values come from integer arithmetic and literals, not from the replacements. No
    thread is started, so the process may be forked afterwards.

    Returns:
        One clause for each check that failed; empty if all passed.

    Raises:
        RuntimeError: triton was imported without TRITON_INTERPRET=1.
    """
    prepare_environment()
    return tuple(_failures())


def _failures() -> Iterator[str]:
    for name, count_wrong in _CHECKS.items():
        try:
            wrong = count_wrong()
        except Exception as error:  # noqa: BLE001  an unknown interpreter may fail in any way
            yield f"{name}: {error!r}"
        else:
            if wrong:
                yield f"{name}: {wrong} wrong"


def _report(
    version: str, replaced: tuple[str, ...], failures: tuple[str, ...]
) -> InterpreterReport:
    name = f"Triton {version}'s interpreter"
    if failures:
        more = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
        reason = f"{name} is not faithful for bf16, which could not be judged: {failures[0]}{more}"
        return InterpreterReport(version, False, replaced, reason, remark=reason)
    if replaced:
        remark = (
            f"{name} converts and computes bf16 wrongly; these operations were replaced by correct "
            "ones and self-tested"
        )
    else:
        remark = f"{name} passed the bf16 self-test unchanged"
    return InterpreterReport(version, True, replaced, reason="", remark=remark)


# --- Rounding, in numpy ---------------------------------------------------------------------------


def widen_bfloat16(bits: Array) -> npt.NDArray[np.float32]:
    """The float32 values of bfloat16 patterns: exact, subnormals and NaN payloads included.

    Args:
        bits: uint16, any shape.
    """
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_to_bfloat16(values: Array, *, toward_zero: bool = False) -> npt.NDArray[np.uint16]:
    """The bfloat16 patterns of numbers, rounded once: to nearest even, or toward zero.

    A NaN stays one, with its sign and the upper part of its payload; it becomes quiet where that
    part is zero. Finite numbers that round beyond the largest bfloat16 become infinite, unless they
    are rounded toward zero.

    Args:
        values: bool, integer, float16, float32 or float64, any shape.
        toward_zero: truncate instead of rounding to nearest even.
    """
    bits = _float32_for_rounding(np.asarray(values)).view(np.uint32)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    upper = bits >> np.uint32(16)
    nan = np.where((upper & np.uint32(0x007F)) == 0, upper | np.uint32(0x0040), upper)
    if toward_zero:
        rounded = upper
    else:
        # Half a unit, less one in the last place unless the kept part is odd: ties go to even, and
        # a carry runs on into the exponent, up to infinity.
        half = np.uint32(0x7FFF) + (upper & np.uint32(1))
        rounded = (np.where(is_nan, np.uint32(0), bits) + half) >> np.uint32(16)
    return np.asarray(np.where(is_nan, nan, rounded), dtype=np.uint16)


def _float32_for_rounding(values: Array) -> npt.NDArray[np.float32]:
    """Float32 values that round to bfloat16 as `values` do: equal ones, or rounded to odd."""
    if values.dtype in (np.float16, np.float32):
        return values.astype(np.float32)
    if values.dtype == np.float64:
        return _round_to_odd_float32(values)
    return _round_to_odd_float32(_integers_to_odd_float64(values))


def _round_to_odd_float32(values: Array) -> npt.NDArray[np.float32]:
    """Truncate float64 to float32 and set the last bit if anything was lost.

    Rounding such a number again, to a format at least two bits shorter, gives what one rounding
    would have given (Boldo and Melquiond, Emulation of a FMA and correctly rounded sums, 2008).
    """
    truncated = _round_float(values, np.dtype(np.float32), toward_zero=True)
    inexact = (truncated.astype(np.float64) != values) & ~np.isnan(values)
    odd: npt.NDArray[np.float32] = (truncated.view(np.uint32) | inexact).view(np.float32)
    return odd


def _integers_to_odd_float64(values: Array) -> npt.NDArray[np.float64]:
    """Float64 of integers up to 64 bits: exact below 2^53, with 52 bits and a sticky bit beyond."""
    negative = values < 0
    pattern = values.astype(np.uint64)  # two's complement
    magnitude = np.where(negative, ~pattern + np.uint64(1), pattern)
    lost = (magnitude & np.uint64(0xFFF)) != 0
    odd = (magnitude & ~np.uint64(0xFFF)) | (lost.astype(np.uint64) << np.uint64(11))
    kept = np.where(magnitude < np.uint64(2**53), magnitude, odd).astype(np.float64)
    return np.where(negative, -kept, kept)


def _round_float(values: Array, dtype: np.dtype[Any], *, toward_zero: bool) -> Array:
    """Round numbers once to float16, float32 or float64; numpy itself rounds to nearest even."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        nearest = np.asarray(values).astype(dtype)
        if not toward_zero:
            return nearest
        overshot = np.abs(nearest.astype(np.float64)) > np.abs(values.astype(np.float64))
    pattern = np.dtype(f"uint{8 * dtype.itemsize}")
    truncated: Array = (nearest.view(pattern) - overshot.astype(pattern)).view(dtype)
    return truncated


def _round_to_format(values: Array, name: str, *, toward_zero: bool = False) -> Array:
    """Numbers in the interpreter's storage of the format: uint16 patterns for bf16."""
    if name == "bf16":
        return round_to_bfloat16(values, toward_zero=toward_zero)
    return _round_float(values, _NUMPY_FLOATS[name], toward_zero=toward_zero)


_NUMPY_FLOATS: dict[str, np.dtype[Any]] = {
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
}


# --- The interpreter's operations -----------------------------------------------------------------


def _replace_operations() -> None:
    """Replace the operations that are wrong for bfloat16.

    Raises:
        ImportError, AttributeError: this Triton's interpreter is built otherwise. Nothing was
            replaced then.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    reduce, scan = interpreter.ReduceOps, interpreter.ScanOps
    replacements = {
        (builder, "cast_impl"): _casting(builder.cast_impl),
        (builder, "create_fp_to_fp"): _casting_with_rounding(builder.create_fp_to_fp),
        (builder, "binary_op"): _elementwise(builder.binary_op),
        (builder, "unary_op"): _elementwise(builder.unary_op),
        (builder, "create_clampf"): _elementwise(builder.create_clampf),
        (builder, "create_fma"): _multiplying_and_adding(builder.create_fma),
        (builder, "create_dot"): _accumulating_in_float32(builder.create_dot),
        (builder, "create_atomic_rmw"): _adding_atomically(builder.create_atomic_rmw),
        (reduce, "sum"): _summing(reduce.sum),
        (reduce, "min_max"): _finding_extremes(reduce.min_max),
        (scan, "cumsum"): _accumulating(scan.cumsum, np.add),
        (scan, "cumprod"): _accumulating(scan.cumprod, np.multiply),
        (builder, "get_bf16"): _bfloat16_constant,  # Triton has one only from 3.9 on
    }
    for (owner, name), replacement in replacements.items():
        setattr(owner, name, replacement)


def _choose_first_configurations() -> None:
    """Let an autotuned kernel run with its first configuration, without timing any."""
    from triton.runtime.autotuner import Autotuner

    def no_time(_tuner: Any, *_arguments: Any, **_meta: Any) -> list[float]:
        return [0.0, 0.0, 0.0]

    def not_cached(_tuner: Any, _key: Any, _configurations: Any, measure: Any) -> bool:
        measure()
        return False

    # `min` over equal times takes the first. The cache on disk asks the driver for a GPU.
    Autotuner._bench = no_time  # noqa: SLF001  Triton has no public way
    Autotuner.check_disk_cache = not_cached


def _accept_sized_indices() -> None:
    """Let a scalar of a kernel bound a range, which numpy 2.4 refuses Triton 3.6."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor  # noqa: SLF001  nor here
    if original.__module__ == __name__:
        return

    def patch_lang_tensor(tensor: Any, scope: Any, *rest: Any) -> None:
        original(tensor, scope, *rest)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_lang_tensor  # noqa: SLF001


def _replaced_operations() -> tuple[str, ...]:
    """The names of the interpreter's operations that are ours, as `Class.function`."""
    from triton.runtime import interpreter

    return tuple(
        f"{owner}.{name}"
        for owner in ("InterpreterBuilder", "ReduceOps", "ScanOps")
        for name, function in vars(getattr(interpreter, owner)).items()
        if getattr(function, "__module__", None) == __name__
    )


def _is_bfloat16(value: Any) -> bool:
    """Whether an operand is a handle that holds bfloat16 patterns.

    The interpreter labels the bools of a comparison with the type of its operands, so the label
    alone does not tell.
    """
    from triton.runtime.interpreter import TensorHandle

    return (
        isinstance(value, TensorHandle)
        and value.dtype.scalar.name == "bf16"
        and value.data.dtype == np.uint16
    )


def _values(handle: Any) -> Array:
    """The numbers that a handle holds: float32 for bfloat16, the handle's own array else."""
    data: Array = handle.data
    return widen_bfloat16(data) if _is_bfloat16(handle) else data


def _widened(operand: Any) -> Any:
    """A bfloat16 handle as a float32 one; any other operand as it is."""
    from triton.language import float32

    if not _is_bfloat16(operand):
        return operand
    return type(operand)(widen_bfloat16(operand.data), float32)


def _elementwise(original: Operation) -> Operation:
    """Compute on float32, and round the result once if it is a number.

    Rounding twice, to float32 and then to bfloat16, is harmless for one addition, subtraction,
    multiplication or division: 24 bits are more than twice 8 bits and two.
    """

    def elementwise(builder: Any, *operands: Any) -> Any:
        from triton.language import bfloat16, int1

        result = original(builder, *map(_widened, operands))
        if not _is_bfloat16(operands[0]):
            return result
        if result.data.dtype == np.bool_:
            return type(result)(result.data, int1)
        return type(result)(round_to_bfloat16(result.data), bfloat16)

    return elementwise


def _casting(original: Operation) -> Operation:
    """Casts with the default rounding, to nearest even."""

    def cast_impl(builder: Any, source: Any, target_type: Any) -> Any:
        if target_type.scalar.name == "bf16":
            return type(source)(round_to_bfloat16(_values(source)), target_type.scalar)
        return original(builder, _widened(source), target_type)

    return cast_impl


def _casting_with_rounding(original: Operation) -> Operation:
    """Casts with an explicit rounding mode, and those between bfloat16 and float16."""

    def create_fp_to_fp(builder: Any, source: Any, target_type: Any, rounding_mode: Any) -> Any:
        names = {source.dtype.scalar.name, target_type.scalar.name}
        if not names <= {"bf16", *_NUMPY_FLOATS}:
            return original(builder, source, target_type, rounding_mode)
        target = target_type.scalar
        toward_zero = rounding_mode is not None and rounding_mode.name == "RTZ"
        data = _round_to_format(_values(source), target.name, toward_zero=toward_zero)
        return type(source)(data, target)

    return create_fp_to_fp


def _bfloat16_constant(_builder: Any, value: float) -> Any:
    """A bfloat16 constant as the compiler makes it, from six decimals of the float32 value."""
    from triton.language import bfloat16
    from triton.runtime.interpreter import TensorHandle

    with np.errstate(over="ignore"):
        six_decimals = f"{float(np.float32(value)):f}"
    return TensorHandle(round_to_bfloat16(np.array([float(six_decimals)])), bfloat16)


def _multiplying_and_adding(original: Operation) -> Operation:
    """Fused multiply-add with one rounding, in bfloat16, float16 and float32.

    The product is exact in float64; the sum's error is found by two-sum and turns it into a sum
    rounded to odd.
    """

    def create_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
        scalar = z.dtype.scalar
        if scalar.name not in ("bf16", "fp16", "fp32"):
            return original(builder, x, y, z)
        with np.errstate(all="ignore"):
            product = _values(x).astype(np.float64) * _values(y)
            total = _add_rounding_to_odd(product, _values(z).astype(np.float64))
        return type(z)(_round_to_format(total, scalar.name), scalar)

    return create_fma


def _add_rounding_to_odd(a: Array, b: Array) -> npt.NDArray[np.float64]:
    """Float64 sums, truncated, with the last bit set if anything was lost."""
    nearest = np.asarray(a + b)
    virtual_b = nearest - a
    error = (a - (nearest - virtual_b)) + (b - virtual_b)  # two-sum (Knuth): exact
    inexact = np.isfinite(error) & (error != 0)
    overshot = inexact & (np.signbit(error) != np.signbit(nearest))
    truncated = nearest.view(np.uint64) - overshot.astype(np.uint64)
    odd: npt.NDArray[np.float64] = (truncated | inexact.astype(np.uint64)).view(np.float64)
    return odd


def _accumulating_in_float32(original: Operation) -> Operation:
    """Matrix products of bfloat16 blocks; their accumulator is float32 already."""

    def create_dot(builder: Any, *operands: Any) -> Any:
        return original(builder, *map(_widened, operands))

    return create_dot


def _adding_atomically(original: Operation) -> Operation:
    """Atomic addition to bfloat16 memory, one element after the other: pointers may repeat.

    Programs run one after the other in the interpreter, so a load and a store are atomic.
    """

    def create_atomic_rmw(
        builder: Any, operation: Any, pointer: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        if not _is_bfloat16(value) or operation.name != "FADD":
            return original(builder, operation, pointer, value, mask, *rest)
        shape = pointer.data.shape
        previous = np.zeros(shape, dtype=np.uint16)
        addends = np.broadcast_to(_values(value), shape)
        for index in zip(*np.nonzero(np.broadcast_to(mask.data, shape)), strict=True):
            previous[index] = _add_to_memory(pointer.data[index], addends[index])
        return type(value)(previous, value.dtype.scalar)

    return create_atomic_rmw


def _add_to_memory(address: np.uint64, addend: np.float32) -> np.uint16:
    """Add to the bfloat16 at an address and return the pattern that was there."""
    from triton.runtime.interpreter import _interpreter as memory

    pointers, mask = np.array([address]), np.array([True])
    before: Array = memory.load(pointers, mask, np.zeros(1, dtype=np.uint16), np.dtype(np.uint16))
    memory.store(pointers, round_to_bfloat16(widen_bfloat16(before) + addend), mask)
    pattern: np.uint16 = before[0]
    return pattern


def _summing(original: Operation) -> Operation:
    """Sums over an axis in bfloat16 and float16, rounded after every addition.

    The order is that of a warp's butterfly shuffles: the upper half is added to the lower half
    until one term is left. The order of compiled code also depends on the layout.
    """

    def total(reduction: Any, operand: Any) -> Any:
        name = operand.dtype.name
        if name not in ("bf16", "fp16"):
            return original(reduction, operand)
        data = operand.handle.data
        terms = data.reshape(-1) if reduction.axis is None else np.moveaxis(data, reduction.axis, 0)
        while len(terms) > 1:
            half = len(terms) // 2
            pairs = _as_float32(terms[:half], name) + _as_float32(terms[half : 2 * half], name)
            terms = np.concatenate([_round_to_format(pairs, name), terms[2 * half :]])
        if reduction.keep_dims:
            axes = range(data.ndim) if reduction.axis is None else reduction.axis
            return reduction.to_tensor(np.expand_dims(terms[0], axes), operand.dtype)
        return reduction.to_tensor(terms[0], operand.dtype)

    return total


def _as_float32(data: Array, name: str) -> npt.NDArray[np.float32]:
    return widen_bfloat16(data) if name == "bf16" else data.astype(np.float32)


def _finding_extremes(original: Operation) -> Operation:
    """Minima and maxima over an axis, with or without their indices: exact."""

    def min_max(reduction: Any, operand: Any, *operations: Any, **named_operations: Any) -> Any:
        from triton.language import bfloat16, float32

        first = operand[0] if isinstance(operand, tuple) else operand
        if not _is_bfloat16(first.handle):
            return original(reduction, operand, *operations, **named_operations)
        wide = type(first)(_widened(first.handle), first.type.with_element_ty(float32))
        found = original(reduction, wide, *operations, **named_operations)
        extreme, *indices = found if isinstance(found, tuple) else (found,)
        patterns = type(first.handle)(round_to_bfloat16(extreme.handle.data), bfloat16)
        narrow = type(first)(patterns, extreme.type.with_element_ty(bfloat16))
        return (narrow, *indices) if indices else narrow

    return min_max


def _accumulating(original: Operation, operation: np.ufunc) -> Operation:
    """Cumulative sums or products in bfloat16, in order, rounded after every step."""

    def accumulate(scan: Any, operand: Any) -> Any:
        if not _is_bfloat16(operand.handle):
            return original(scan, operand)
        terms = np.moveaxis(operand.handle.data, scan.axis, 0).copy()
        for i in range(1, len(terms)):
            exact = operation(widen_bfloat16(terms[i - 1]), widen_bfloat16(terms[i]))
            terms[i] = round_to_bfloat16(exact)
        return [scan.to_tensor(np.moveaxis(terms, 0, scan.axis), operand.dtype)]

    return accumulate


# --- The self-test --------------------------------------------------------------------------------


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Keep torch from starting its thread pool, which a forked child would lack."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run(body: Callable[..., None], *arrays: Array) -> None:
    """Run a kernel's body as one program over the memory of numpy arrays, uint16 being bfloat16."""
    import torch
    import triton
    import triton.language

    visible = {"__name__": __name__, "tl": triton.language}
    kernel = triton.jit(types.FunctionType(body.__code__, visible, body.__name__))
    tensors = [torch.from_numpy(array) for array in arrays]
    with _one_torch_thread(), np.errstate(all="ignore"):
        kernel[(1,)](*(t.view(torch.bfloat16) if t.dtype == torch.uint16 else t for t in tensors))


def _widen_all_kernel(source: Any, target: Any) -> None:
    i = tl.arange(0, 65536)
    tl.store(target + i, tl.load(source + i).to(tl.float32))


def _narrow_all_kernel(source: Any, explicit: Any, implicit: Any, toward_zero: Any) -> None:
    i = tl.arange(0, 65536)
    x = tl.load(source + i)
    tl.store(explicit + i, x.to(tl.bfloat16))
    tl.store(implicit + i, x)
    tl.store(toward_zero + i, x.to(tl.bfloat16, fp_downcast_rounding="rtz"))


def _narrow_kernel(source: Any, target: Any) -> None:
    i = tl.arange(0, 8)
    tl.store(target + i, tl.load(source + i))


def _arithmetic_kernel(a_pointer: Any, b_pointer: Any, target: Any) -> None:
    i = tl.arange(0, 8)
    a = tl.load(a_pointer + i)
    b = tl.load(b_pointer + i)
    tl.store(target + i, a + b)
    tl.store(target + 8 + i, a - b)
    tl.store(target + 16 + i, a * b)
    tl.store(target + 24 + i, tl.fma(a, b, a))
    tl.store(target + 32 + i, a + 1.5)
    tl.store(target + 40 + i, -a)
    tl.store(target + 48 + i, tl.abs(a))
    tl.store(target + 56 + i, tl.maximum(a, b))
    tl.store(target + 64 + i, tl.where(a < b, a, b))
    tl.store(target + 72 + i, a < b)
    tl.store(target + 80 + i, (a >= b).to(tl.bfloat16))
    tl.store(target + 88 + i, (a.to(tl.float32) == b.to(tl.float32)).to(tl.bfloat16))
    tl.store(target + 96 + i, tl.load(a_pointer + i, mask=i < 4, other=2.5))
    tl.store(target + 104 + i, tl.clamp(a, b - 4.0, b, tl.PropagateNan.ALL))
    tl.store(target + 112 + i, a + tl.full((8,), 1e-8, tl.bfloat16))


def _reduction_kernel(source: Any, counters: Any, target: Any) -> None:
    i = tl.arange(0, 8)
    x = tl.load(source + i)
    tl.atomic_add(counters + i % 4, x)
    tl.store(target + i, tl.sum(x, axis=0))
    tl.store(target + 8 + i, tl.max(x, axis=0))
    tl.store(target + 16 + i, tl.min(x, axis=0))
    tl.store(target + 24 + i, tl.argmax(x, axis=0))
    tl.store(target + 32 + i, tl.cumsum(x, axis=0))
    tl.store(target + 40 + i, tl.cumprod(x, axis=0))
    tl.store(target + 48 + i, tl.load(counters + i % 4))
    tl.store(target + 56 + i, tl.sum(tl.dot(x[:, None] + x[None, :], x[:, None] - x[None, :]), 0))


def _wrong_widened() -> int:
    """All 2^16 patterns to float32: bit-exact, and NaN for NaN."""
    patterns = np.arange(65536, dtype=np.uint16)
    actual = np.zeros(65536, dtype=np.float32)
    _run(_widen_all_kernel, patterns, actual)
    expected = patterns.astype(np.uint32) * 65536
    is_nan = (patterns & 0x7FFF) > 0x7F80
    return int(np.sum(np.where(is_nan, ~np.isnan(actual), actual.view(np.uint32) != expected)))


def _wrong_narrowed() -> int:
    """Float32 with every upper half, and lower halves at, beside and between the ties."""
    random = np.random.default_rng(0)
    lower_halves = (0x8000, 0x7FFF, 0x8001, 0xFFFF, 0x0000, random.integers(0, 65536, 65536))
    return sum(_wrong_narrowed_with(np.asarray(lower)) for lower in lower_halves)


def _wrong_narrowed_with(lower_half: Array) -> int:
    pattern = np.arange(65536) * 65536 + lower_half
    truncated = pattern // 65536
    is_nan = (pattern & 0x7FFFFFFF) > 0x7F800000
    # The nearer neighbour by the distance of patterns, which is proportional to that of values
    # between two neighbours, and between the largest finite one and infinity.
    below, above = pattern - truncated * 65536, (truncated + 1) * 65536 - pattern
    up = (above < below) | ((above == below) & (truncated % 2 == 1))
    explicit, implicit, toward_zero = (np.zeros(65536, dtype=np.uint16) for _ in range(3))
    source = pattern.astype(np.uint32).view(np.float32)
    _run(_narrow_all_kernel, source, explicit, implicit, toward_zero)
    return (
        _count_differences(explicit, truncated + up, is_nan)
        + _count_differences(implicit, truncated + up, is_nan)
        + _count_differences(toward_zero, truncated, is_nan)
    )


def _count_differences(actual: Array, expected: Array, is_nan: Array) -> int:
    """Count patterns that are not the expected ones; any NaN is right for a NaN."""
    still_nan = (actual & 0x7FFF) > 0x7F80
    return int(np.sum(np.where(is_nan, ~still_nan, actual != expected)))


def _wrong_casts() -> int:
    """Casts from float64, integers and float16, by hand: pairs of a number and its pattern."""
    tables: dict[str, list[tuple[float, int]]] = {
        # Just above a tie by less than float32 resolves; overflow; the subnormals' tie.
        "float64": [(1 + 2**-8 + 2**-40, 0x3F81), (-3e39, 0xFF80), (1.5 * 2**-133, 0x0002)],
        "int32": [(257, 0x4380), (259, 0x4382), (-5, 0xC0A0), (2**24 + 2**16 + 1, 0x4B81)],
        "int64": [(2**62 + 2**54 + 1, 0x5E81), (-(2**63), 0xDF00)],
        "float16": [(2.5, 0x4020), (2**-24, 0x3380), (1 + 2**-8, 0x3F80)],
    }
    wrong = 0
    for name, pairs in tables.items():
        numbers, patterns = zip(*pairs, strict=True)
        source, target = np.zeros(8, dtype=name), np.zeros(8, dtype=np.uint16)
        source[: len(numbers)] = numbers
        _run(_narrow_kernel, source, target)
        wrong += int(np.sum(target[: len(patterns)] != patterns))
    return wrong


def _wrong_float16() -> int:
    """Float32 to float16: ties both ways, subnormals, overflow."""
    units = [1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 3 * 2**-25, 2**-25 + 2**-40, 65519, 65520, -65504]
    patterns = [0x3C00, 0x3C02, 0x0000, 0x0002, 0x0001, 0x7BFF, 0x7C00, 0xFBFF]
    target = np.zeros(8, dtype=np.float16)
    _run(_narrow_kernel, np.array(units, dtype=np.float32), target)
    return int(np.sum(target.view(np.uint16) != patterns))


def _wrong_arithmetic() -> int:
    """Elementwise operations on values whose results were rounded by hand."""
    a = [2.5, -5.0, 256.0, 258.0, 1.0078125, -2.0, 0.5, 0.0]
    b = [2.0, -2.0, 1.0, 1.0, 1.0078125, -5.0, -0.5, 4.0]
    expected = [
        [4.5, -7.0, 256.0, 260.0, 2.015625, -7.0, 0.0, 4.0],
        [0.5, -3.0, 255.0, 256.0, 0.0, 3.0, 1.0, -4.0],
        [5.0, 10.0, 256.0, 258.0, 1.015625, 10.0, -0.25, 0.0],
        [7.5, 5.0, 512.0, 516.0, 2.03125, 8.0, 0.25, 0.0],
        [4.0, -3.5, 258.0, 260.0, 2.5, -0.5, 2.0, 1.5],
        [-2.5, 5.0, -256.0, -258.0, -1.0078125, 2.0, -0.5, 0.0],
        [2.5, 5.0, 256.0, 258.0, 1.0078125, 2.0, 0.5, 0.0],
        [2.5, -2.0, 256.0, 258.0, 1.0078125, -2.0, 0.5, 4.0],
        [2.0, -5.0, 1.0, 1.0, 1.0078125, -5.0, -0.5, 0.0],
        [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
        [1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
        [2.5, -5.0, 256.0, 258.0, 2.5, 2.5, 2.5, 2.5],
        [2.0, -5.0, 1.0, 1.0, 1.0078125, -5.0, -0.5, 0.0],
        [2.5, -5.0, 256.0, 258.0, 1.0078125, -2.0, 0.5, 0.0],
    ]
    target = np.full((15, 8), np.nan, dtype=np.float32)
    _run(_arithmetic_kernel, _upper_halves(a), _upper_halves(b), target)
    return int(np.sum(target != np.array(expected, dtype=np.float32)))


def _wrong_reductions() -> int:
    """Sums, extremes, scans, atomic additions and a matrix product, all of them exact."""
    x = np.array([-5.0, -2.0, 1.5, 4.0, -0.5, 2.0, -8.0, 3.0])
    outer_sum, outer_difference = np.add.outer(x, x), np.subtract.outer(x, x)
    expected = [
        np.full(8, x.sum()),
        np.full(8, x.max()),
        np.full(8, x.min()),
        np.full(8, x.argmax()),
        np.cumsum(x),
        np.cumprod(x),
        np.tile(x[:4] + x[4:], 2),
        (outer_sum @ outer_difference).sum(axis=0),
    ]
    target = np.full((8, 8), np.nan, dtype=np.float32)
    _run(_reduction_kernel, _upper_halves(x), np.zeros(4, dtype=np.uint16), target)
    return int(np.sum(target != np.array(expected)))


def _upper_halves(values: Any) -> Array:
    """The patterns of values that are bfloat16 numbers already."""
    return (np.asarray(values, dtype=np.float32).view(np.uint32) // 65536).astype(np.uint16)


_CHECKS: dict[str, Callable[[], int]] = {
    "all 65536 bf16 patterns to fp32": _wrong_widened,
    "fp32 to bf16": _wrong_narrowed,
    "fp64, integers and fp16 to bf16": _wrong_casts,
    "fp32 to fp16": _wrong_float16,
    "bf16 arithmetic and comparisons": _wrong_arithmetic,
    "bf16 sums, extremes, scans, atomics and tl.dot": _wrong_reductions,
}
