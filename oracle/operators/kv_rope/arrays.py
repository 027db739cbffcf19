"""A case's arrays of bit patterns, and where the operators find what in them.

All four operators rotate some rows by the tables ``cos`` and ``sin``: ``key_states`` in the forward
direction, the cotangents of the rows that new tokens were written to in the backward one. And all
of them leave other rows alone. Kinds of inputs that craft either work on these, whatever the
layout of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...definition import Case
from ...inputs import encode

Array = NDArray[Any]
Arrays = Mapping[str, Array]
"""By tensor name: bit patterns of the floating tensors, int64 of ``cache_position``."""

TABLES = ("cos", "sin")
POSITION = "cache_position"
KEY_CACHES = ("key_cache", "grad_key_cache", "grad_updated_key_cache")
VALUE_CACHES = ("value_cache", "grad_value_cache", "grad_updated_value_cache")
CACHES = KEY_CACHES + VALUE_CACHES

Selection = slice | Array


def caches(arrays: Arrays) -> list[str]:
    """Return the names of the caches and cotangents of caches among the inputs."""
    return [name for name in CACHES if name in arrays]


def is_backward(arrays: Arrays) -> bool:
    """Whether the operator is a gradient."""
    return "key_cache" not in arrays


def is_static(arrays: Arrays) -> bool:
    """Whether the caches have a fixed capacity."""
    return POSITION in arrays


def new_rows(arrays: Arrays, cache: str) -> Selection:
    """Return which rows of a cache belong to the new tokens, in the tokens' order."""
    if is_static(arrays):
        return arrays[POSITION]
    total = arrays[cache].shape[2]
    return slice(total - arrays["key_states"].shape[2] if is_backward(arrays) else total, total)


def old_rows(arrays: Arrays, cache: str) -> Selection:
    """Return which rows of a cache belong to no new token, in ascending order."""
    new = new_rows(arrays, cache)
    if isinstance(new, slice):
        return slice(0, new.start)
    return np.delete(np.arange(arrays[cache].shape[2]), new)


class Rotation:
    """The rows that a case rotates and the tables it rotates them by.

    Attributes:
        rows: a copy of the rotated rows, bit patterns ``[B,H,N,D]``; write back with ``store``.
        cos: the table's array, ``[B or 1,1,N,D]`` or ``[B or 1,N,D]``, filled in place.
        sin: likewise.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.cos, self.sin = arrays["cos"], arrays["sin"]
        if is_backward(arrays):
            name = next(name for name in KEY_CACHES if name in arrays)
            self._target, self._index = arrays[name], new_rows(arrays, name)
        else:
            self._target, self._index = arrays["key_states"], slice(None)
        self.rows = self._target[:, :, self._index].copy()

    def store(self) -> None:
        """Write ``rows`` back to where the operator reads them."""
        self._target[:, :, self._index] = self.rows


def fill(array: Array, value: float, dtype: str) -> None:
    """Fill an array with the pattern of one number."""
    array[...] = encode(value, dtype)


def sign_bit(array: Array) -> Any:
    """Return the pattern of -0.0 in the array's type."""
    return array.dtype.type(1 << (8 * array.dtype.itemsize - 1))


def half_width(case: Case) -> int:
    """Return D/2."""
    return case.sizes["head_dim"] // 2
