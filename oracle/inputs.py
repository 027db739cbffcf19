"""How a case becomes tensors: the same bits on every machine, at memory speed.

Every tensor's bits are a pure function of (operator, case, sizes, dtype, seed, tensor name): word
``i`` of a tensor is ``splitmix64(key + (i + 1) * golden)`` (G. Steele, D. Lea, C. Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014), viewed as four 16-bit indices into a
table of 65,536 values. Tables are shipped bits with a digest, so no machine's mathematical
library has a say. No table holds a zero.
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
        """Fill a contiguous array of bfloat16 bit patterns with entries of a table.

        Args:
            name: the tensor's name.
            into: uint16, any shape, contiguous.
            table: which of :func:`tables`.
        """
        entries = tables()[table]
        flat = into.reshape(-1)
        step = 4 * _CHUNK_WORDS
        for start in range(0, flat.size, step):
            part = flat[start : start + step]
            words = self.words(name, start // 4, -(-part.size // 4))
            np.take(entries, words.view(np.uint16)[: part.size], out=part, mode="wrap")

    def permutation(self, name: str, count: int) -> NDArray[np.int64]:
        """Return a random permutation of ``0..count-1`` as int64."""
        return np.argsort(self.words(name, 0, count), kind="stable").astype(np.int64)


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
