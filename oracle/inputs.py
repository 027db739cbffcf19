"""How a case becomes tensors: the same bits on every machine, at memory speed.

Every tensor's bits are a pure function of (operator, case, sizes, dtype, seed, tensor name): word
``i`` of a tensor is ``splitmix64(key + (i + 1) * golden)`` (G. Steele, D. Lea, C. Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014), viewed as four 16-bit indices into a
table of 65,536 values. Tables are shipped bits with a digest, so no machine's mathematical
library has a say. No table holds a zero.

The shipped tables hold bfloat16 numbers. In the wider types each entry stands for the numbers of
the wider type around it, so that all bits of the significand are in use: float16 has a table of
its own, made from the shipped one, and float32 takes an index and 16 low bits from 32 bits of a
word.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .definition import Case, InvalidInput, Operator, TensorSpec
from .rounding import format_of, round_float64

Bits = NDArray[np.uint16]

TABLES_SHA256 = "9f9793b37746e4ea1638ff1beaa072e51d1c8f6409c5efdad0c0c5b2e4bfd390"
"""SHA-256 of the shipped tables."""

_TABLE_NAMES = ("normal", "cosine", "sine")
_TABLE_SIZE = 1 << 16
_CHUNK_WORDS = 1 << 15
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class CorruptTables(RuntimeError):
    """The shipped tables do not have their digest: the installation is damaged."""


@cache
def tables() -> Mapping[str, Bits]:
    """Return the shipped tables of bfloat16 bit patterns by name, 65,536 entries each.

    ``normal``: quantiles (i + 1/2) / 65536 of the standard normal distribution; ``cosine`` and
    ``sine``: cosine and sine of those quantiles clamped to [-pi, pi]. Each entry is rounded once.

    Raises:
        CorruptTables: if the shipped bits do not have their digest.
    """
    from hashlib import sha256

    if sys.byteorder != "little":
        raise CorruptTables("inputs are defined on little-endian machines only")
    raw = files(__package__).joinpath("tables.bin").read_bytes()
    digest = sha256(raw).hexdigest()
    if digest != TABLES_SHA256:
        raise CorruptTables(
            f"oracle/tables.bin has SHA-256 {digest}, expected {TABLES_SHA256}; reinstall"
            " kernel-oracle"
        )
    every = np.frombuffer(raw, dtype="<u2").reshape(len(_TABLE_NAMES), _TABLE_SIZE)
    return dict(zip(_TABLE_NAMES, every, strict=True))


class Draws:
    """The counter-based source of one case's inputs.

    Args:
        case: the case.
        seed: any integer.
    """

    def __init__(self, case: Case, seed: int) -> None:
        sizes = ",".join(f"{axis}={size}" for axis, size in sorted(case.sizes.items()))
        self._identity = f"{case.operator}|{case.name}|{case.kind}|{case.dtype}|{sizes}|{seed}"
        self._dtype = case.dtype

    def _key(self, name: str) -> int:
        digest = blake2b(f"{self._identity}|{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def words(self, name: str, start: int, count: int) -> NDArray[np.uint64]:
        """Return the 64-bit words ``start..start+count-1`` of the tensor ``name``."""
        first = (self._key(name) + (start + 1) * _GOLDEN) & _MASK
        words = np.arange(count, dtype=np.uint64)
        words *= np.uint64(_GOLDEN)
        words += np.uint64(first)
        return _mix(words)

    def table(self, name: str, into: NDArray[Any], table: str = "normal") -> None:
        """Fill a contiguous array with bit patterns of the case's type, drawn from a table.

        Args:
            name: the tensor's name.
            into: unsigned integers of the type's width, any shape, contiguous.
            table: which of :func:`tables`. In float16 and float32 the numbers of ``normal`` lie
                on both sides of the table's entries, those of ``cosine`` and ``sine`` between an
                entry and its neighbour nearer to zero, so that none exceeds one.
        """
        entries = _entries(table, self._dtype)
        flat = into.reshape(-1)
        per_word = 8 // flat.dtype.itemsize
        step = per_word * _CHUNK_WORDS
        for start in range(0, flat.size, step):
            part = flat[start : start + step]
            words = self.words(name, start // per_word, -(-part.size // per_word))
            if per_word == 4:
                np.take(entries, words.view(np.uint16)[: part.size], out=part, mode="wrap")
            else:
                pieces = words.view(np.uint32)[: part.size]
                np.take(entries, pieces >> np.uint32(16), out=part, mode="wrap")
                part += pieces & np.uint32(0xFFFF)

    def permutation(self, name: str, count: int) -> NDArray[np.int64]:
        """Return a random permutation of ``0..count-1`` as int64."""
        return np.argsort(self.words(name, 0, count), kind="stable").astype(np.int64)


def _entries(table: str, dtype: str) -> NDArray[Any]:
    """Return the table that 16 bits index in a type: its patterns, less what low bits may add."""
    shipped = tables()[table]
    return shipped if dtype == "bfloat16" else _refined(table, dtype)


@cache
def _refined(table: str, dtype: str) -> NDArray[Any]:
    """Return a table in float16 or float32; the low bits of float32 patterns are still to add.

    With b bits more of significand, low bits 0..2^b - 1 are added to an entry less an offset. The
    sine of pi, 1.2e-16, is below all float16 numbers and becomes the smallest one, as no input is
    zero.
    """
    fmt = format_of(dtype)
    span = 1 << (fmt.precision - format_of("bfloat16").precision)
    offset = span // 2 if table == "normal" else span - 1
    shipped = torch.from_numpy(tables()[table].view(np.int16).copy()).view(torch.bfloat16)
    # Exact in float32, and in float16 but for its subnormals, which are rounded once.
    widened = shipped.to(fmt.dtype).view(fmt.bits_dtype).numpy().view(np.dtype(f"u{fmt.width}"))
    sign_bit = 1 << (8 * fmt.width - 1)
    magnitude = (widened & (sign_bit - 1)).astype(np.int64) - offset
    if dtype == "float16":
        magnitude += (_mix(np.arange(1, _TABLE_SIZE + 1, dtype=np.uint64)) % span).astype(np.int64)
    entries: NDArray[Any] = magnitude.clip(min=1).astype(widened.dtype) | (widened & sign_bit)
    return entries


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64's output function in place."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def encode(values: Any, dtype: str) -> NDArray[Any]:
    """Return the bit patterns of numbers, each rounded once to a type.

    Args:
        values: anything numpy reads as float64.
        dtype: the floating type's name.

    Returns:
        Unsigned integers of the type's width and the shape of ``values``.
    """
    fmt = format_of(dtype)
    exact = torch.from_numpy(np.array(values, dtype=np.float64, order="C"))
    bits: NDArray[Any] = round_float64(exact, fmt).view(fmt.bits_dtype).numpy()
    return bits.view(np.dtype(f"u{fmt.width}"))


def bits_type(spec: TensorSpec, dtype: str) -> np.dtype[Any]:
    """Return the numpy type that holds a tensor's bits: unsigned for floats, int64 for indices."""
    return (
        np.dtype(np.int64) if spec.indexes is not None else np.dtype(f"u{format_of(dtype).width}")
    )


def fill_inputs(
    operator: Operator, case: Case, seed: int, arrays: Mapping[str, NDArray[Any]]
) -> None:
    """Draw a case's inputs into given arrays.

    Args:
        operator: the case's operator.
        case: the case.
        seed: the seed.
        arrays: by input name, contiguous arrays of the right shape and :func:`bits_type`.

    Raises:
        InvalidInput: if the operator is not judged in the case's dtype.
    """
    if case.dtype not in operator.dtypes:
        raise InvalidInput(
            f"case {case.name} has dtype {case.dtype}; {operator.id} is judged in"
            f" {', '.join(operator.dtypes)}"
        )
    operator.input_kinds[case.kind](case, Draws(case, seed), arrays)
    for name in case.constraints:
        operator.constraints[name].impose(case, arrays)


def make_inputs(
    case: Case, seed: int = 0, *, operator: Operator | None = None
) -> dict[str, torch.Tensor]:
    """Make the inputs of a case, contiguous on the CPU.

    Args:
        case: the case.
        seed: any integer; the same case and seed give the same bits everywhere.
        operator: the case's operator, if it is not one of :func:`oracle.all_operators`.

    Returns:
        Every input by name, in call order.
    """
    if operator is None:
        from .operators import find_operator

        operator = find_operator(case.operator)
    arrays = {
        spec.name: np.zeros(operator.case_shape(spec, case), dtype=bits_type(spec, case.dtype))
        for spec in operator.inputs
    }
    fill_inputs(operator, case, seed, arrays)
    return {spec.name: as_tensor(arrays[spec.name], spec, case.dtype) for spec in operator.inputs}


def as_tensor(array: NDArray[Any], spec: TensorSpec, dtype: str) -> torch.Tensor:
    """View an array of bits as the tensor it stands for, sharing its memory."""
    if spec.indexes is not None:
        return torch.from_numpy(array)
    fmt = format_of(dtype)
    return torch.from_numpy(array.view(np.dtype(f"i{fmt.width}"))).view(fmt.dtype)
