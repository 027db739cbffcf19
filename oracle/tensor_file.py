"""A file of tensors, as the process that calls the candidate sees it."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import torch

from .call import TensorLayout


class TensorFile:
    """A file of tensors: mapped, and for a GPU copied there whole, the bytes around them too.

    Every tensor gets a storage of its own that ends with its last element and begins with its
    first (or ``storage_offset`` before), as if it had been allocated alone: a kernel that looks at
    the storage finds what it would find in a model.

    Args:
        path: the file; it is unmapped when the last tensor over it is gone.
        device: where its tensors are asked for.
        upload: whether they are asked for at all, so that a GPU needs a copy of the file.
    """

    def __init__(self, path: str, device: torch.device, *, upload: bool) -> None:
        with Path(path).open("r+b") as file:
            self._host = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        self._gpu: torch.Tensor | None = None
        if upload and device.type == "cuda":  # pragma: gpu only
            self._gpu = torch.from_numpy(self._host).to(device)

    def tensor(self, layout: TensorLayout) -> torch.Tensor:
        """Build the tensor on the device."""
        if self._gpu is not None:  # pragma: gpu only
            return _on_storage(layout, _gpu_bytes(self._gpu, *_storage_range(layout)))
        return self.host_tensor(layout)

    def host_tensor(self, layout: TensorLayout) -> torch.Tensor:
        """Build the tensor over the mapped file."""
        low, high = _storage_range(layout)
        return _on_storage(layout, torch.from_numpy(self._host[low:high]))

    def write_back(self) -> None:
        """Copy a GPU's bytes into the file; on a CPU they are there."""
        if self._gpu is not None:  # pragma: gpu only
            torch.from_numpy(self._host).copy_(self._gpu)


def _storage_range(layout: TensorLayout) -> tuple[int, int]:
    low = layout.offset - layout.storage_offset * layout.itemsize
    return low, layout.offset + layout.footprint.extent_bytes


def _on_storage(layout: TensorLayout, memory: torch.Tensor) -> torch.Tensor:
    """Build a tensor whose storage is that of ``memory``, the bytes of its storage range."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), layout.storage_offset, layout.shape, layout.strides)


def _gpu_bytes(gpu: torch.Tensor, low: int, high: int) -> torch.Tensor:  # pragma: gpu only
    """View bytes of a GPU buffer as a tensor with a storage of just these bytes."""
    if low == high:
        return gpu.new_empty(0)
    return torch.as_tensor(_GpuBytes(gpu, low, high), device=gpu.device)


class _GpuBytes:  # pragma: gpu only
    """Part of a GPU buffer, by the CUDA array interface; keeps the buffer alive."""

    def __init__(self, gpu: torch.Tensor, low: int, high: int) -> None:
        self._gpu = gpu
        self.__cuda_array_interface__ = {
            "shape": (high - low,),
            "typestr": "|u1",
            "data": (gpu.data_ptr() + low, False),
            "version": 3,
        }
