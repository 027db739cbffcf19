"""Fresh memory filled with a byte while a candidate runs, so that what it never writes shows.

On a CPU glibc fills every block it hands out (``mallopt(M_PERTURB)``, with the complement of the
value it is given), whoever asks for it: torch, numpy or C. numpy's own store of blocks under 1 KiB
is not reached. On a GPU blocks of the outputs' sizes are filled and freed, and torch's allocator
will hand them out unless the candidate takes them for something else, or has an allocator of its
own.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence

import torch

IsPoisoned = Callable[[int, int], bool | None]
"""Says of an address and an extent in bytes whether that memory was filled; None where no filling
was asked for."""

# From glibc's malloc.h: Python's standard library has no name for it.
_M_PERTURB = -6


@contextlib.contextmanager
def poisoned_memory(
    device: torch.device, fill_byte: int | None, sizes: Sequence[int]
) -> Iterator[IsPoisoned]:
    """Fill fresh memory with a byte while the block runs.

    Args:
        device: where the candidate allocates.
        fill_byte: 0 to 254, or None for no filling.
        sizes: bytes of the blocks to fill on a GPU.
    """
    if fill_byte is None:
        yield lambda _address, _extent: None
    elif device.type == "cuda":  # pragma: gpu only
        blocks = _fill_gpu_blocks(device, fill_byte, sizes)
        yield lambda address, extent: any(
            low <= address and address + extent <= high for low, high in blocks
        )
    else:
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_PERTURB, fill_byte ^ 0xFF)
        try:
            small = _malloc_fills(2**10, fill_byte)
            # A block of the heap, and one so large that it is mapped on its own.
            large = all(_malloc_fills(size, fill_byte) for size in (2**12, 2**18))
            yield lambda _address, extent: large if extent > 2**11 else small
        finally:
            mallopt(_M_PERTURB, 0)


def _malloc_fills(size: int, byte: int) -> bool:
    """Whether torch's fresh memory does hold the byte.

    It does not under another malloc; small blocks may not where the C library keeps some for each
    thread, which the server's process is started without.
    """
    fresh = torch.empty(size, dtype=torch.uint8, device="cpu")
    return fresh.numpy().tobytes().count(byte) == size


def _fill_gpu_blocks(  # pragma: gpu only
    device: torch.device, byte: int, sizes: Sequence[int]
) -> list[tuple[int, int]]:
    """Leave blocks of the given sizes, filled with the byte, to torch's allocator."""
    # Without other free blocks, these are the ones it will hand out.
    torch.cuda.empty_cache()
    blocks = [torch.full((size,), byte, dtype=torch.uint8, device=device) for size in sizes if size]
    torch.cuda.synchronize()
    return [(block.data_ptr(), block.data_ptr() + block.numel()) for block in blocks]
