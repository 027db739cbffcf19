"""Shared memory between the judge and the candidate's process: inputs there, outputs back.

Each side of a call is one anonymous memory file (``memfd_create``): nothing touches a disk, and
nothing is left behind whatever happens to either process. Its size is sealed: a candidate that cut
it short would end the judge, at its next look, by SIGBUS. Tensors lie 4 KiB apart and the space
between them, the guard bands, is filled with 0xFF: read as floating numbers that is NaN, so a
kernel that reads past its tensor shows it, and a kernel that writes past it changes the band.
The judge keeps its own copy of the inputs, from which truth is computed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from .call import TensorLayout
from .definition import Case, Layout, Operator, TensorSpec
from .inputs import as_tensor, bits_type

GUARD_BYTES = 4096
GUARD_FILL = 0xFF

# The last one keeps anybody from sealing it against writing.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Plan:
    """Where the tensors of one side of a call lie.

    Attributes:
        specs: the tensors' specifications, in call order.
        layouts: their places, in the same order.
        dtype: the floating type's name.
        size: bytes of the whole file.
    """

    specs: tuple[TensorSpec, ...]
    layouts: tuple[TensorLayout, ...]
    dtype: str
    size: int

    def arrays(self, buffer: Bytes) -> dict[str, NDArray[Any]]:
        """Return every tensor's bits by name, as arrays over a buffer of ``size`` bytes."""
        arrays = {}
        for spec, place in zip(self.specs, self.layouts, strict=True):
            stop = place.offset + place.footprint.extent_bytes
            flat = buffer[place.offset : stop].view(bits_type(spec, self.dtype))
            if place.is_contiguous:
                arrays[spec.name] = flat.reshape(place.shape)
            else:
                strides = tuple(stride * place.itemsize for stride in place.strides)
                arrays[spec.name] = as_strided(flat, place.shape, strides)
        return arrays

    def contiguous_arrays(self, buffer: Bytes) -> dict[str, NDArray[Any]]:
        """Return arrays to be filled: of contiguous tensors their own, of others fresh ones."""
        arrays = self.arrays(buffer)
        for place in self.layouts:
            if not place.is_contiguous:
                arrays[place.name] = np.zeros(place.shape, arrays[place.name].dtype)
        return arrays

    def store(self, filled: Mapping[str, NDArray[Any]], buffer: Bytes) -> None:
        """Write what :meth:`contiguous_arrays` gave, filled, to where strided tensors lie.

        Along an expanded dimension all indices are one place, which gets what index 0 has.
        """
        arrays = self.arrays(buffer)
        for place in self.layouts:
            if not place.is_contiguous:
                first = tuple(slice(0, None if stride else 1) for stride in place.strides)
                arrays[place.name][first] = filled[place.name][first]

    def tensors(self, buffer: Bytes) -> dict[str, torch.Tensor]:
        """Return every tensor by name, over a buffer of ``size`` bytes."""
        arrays = self.arrays(buffer)
        return {spec.name: as_tensor(arrays[spec.name], spec, self.dtype) for spec in self.specs}

    def fill_guards(self, buffer: Bytes) -> None:
        """Fill the guard bands before, between and after the tensors.

        A tensor that is not contiguous is filled as well, for the gaps between its elements.
        """
        position = 0
        for place in self.layouts:
            end = place.offset + place.footprint.extent_bytes
            buffer[position : place.offset if place.is_contiguous else end] = GUARD_FILL
            position = end
        buffer[position:] = GUARD_FILL


def plan(
    operator: Operator, case: Case, specs: Sequence[TensorSpec], layouts: Mapping[str, Layout]
) -> Plan:
    """Lay out tensors with guard bands before, between and after them.

    Args:
        operator: the case's operator.
        case: gives the sizes and the floating type.
        specs: the tensors, in call order.
        layouts: by name, for tensors that are not plain contiguous ones.
    """
    places = []
    position = GUARD_BYTES
    for spec in specs:
        shape = operator.case_shape(spec, case)
        item = bits_type(spec, case.dtype).itemsize
        layout = layouts.get(spec.name, Layout())
        start = position + layout.offset * item
        place = TensorLayout(
            name=spec.name,
            dtype="int64" if spec.indexes is not None else case.dtype,
            shape=shape,
            strides=layout.strides(shape),
            offset=start,
            storage_offset=layout.offset,
            axes=spec.axes,
        )
        places.append(place)
        # The next tensor starts on a page of its own, at least one guard band further on.
        end = start + place.footprint.extent_bytes + GUARD_BYTES
        position = -(-end // GUARD_BYTES) * GUARD_BYTES
    return Plan(tuple(specs), tuple(places), case.dtype, position)


class Arena:
    """An anonymous memory file of fixed size that two processes map; a context manager.

    Args:
        size: in bytes.

    Attributes:
        bytes: its contents, uint8 ``[size]``.
    """

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("kernel-oracle", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, size)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self._file, size)
        self.bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)

    def __enter__(self) -> Self:
        """Return the arena."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give the memory back."""
        self.close()

    @property
    def path(self) -> str:
        """A path by which another process of the same user can map the memory."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Give the memory back; what still refers to it keeps it until it is gone itself."""
        if self._file < 0:
            return
        os.close(self._file)
        self._file = -1
        self.bytes = np.empty(0, dtype=np.uint8)
        # Not closed explicitly: an array over the memory may still be referenced, by a traceback
        # for instance, and must not lose it. The mapping goes with the last reference.
        del self._map
