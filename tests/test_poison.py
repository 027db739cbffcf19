from __future__ import annotations

import ctypes

import pytest
import torch

from oracle import poison
from oracle.poison import poisoned_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize("fill_byte", [0xA5, 0x5A, 0x00])
@pytest.mark.parametrize("size", [4000, 200_000, 2**24])
def test_fresh_memory_holds_the_byte(size: int, fill_byte: int) -> None:
    with poisoned_memory(CPU, fill_byte, ()) as is_poisoned:
        fresh = torch.empty(size, dtype=torch.uint8)
        assert is_poisoned(fresh.data_ptr(), size)
        assert (fresh == fill_byte).all()


def test_memory_of_another_allocator_is_said_not_to_be_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = torch.zeros(2**18, dtype=torch.uint8)
    with monkeypatch.context() as patched:
        patched.setattr(poison.torch, "empty", lambda size, **_: buffer[:size])
        with poisoned_memory(CPU, 0xA5, ()) as is_poisoned:
            assert is_poisoned(buffer.data_ptr(), 2**18) is False
            assert is_poisoned(buffer.data_ptr(), 64) is False


def test_nothing_is_known_where_nothing_is_filled() -> None:
    with poisoned_memory(CPU, None, ()) as is_poisoned:
        assert is_poisoned(0, 4096) is None


@pytest.mark.parametrize("error", [None, ValueError])
def test_filling_ends_with_the_block(error: type[Exception] | None) -> None:
    def end() -> None:
        if error:
            raise error

    with poisoned_memory(CPU, 3, ()):
        assert reused() == {3}
    assert 7 in reused()
    try:
        with poisoned_memory(CPU, 3, ()):
            end()
    except ValueError:
        pass
    assert 7 in reused()


def reused() -> set[int]:
    """What is in the midst of blocks after some that held sevens were freed."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    blocks, between = [], []
    for _ in range(8):
        blocks.append(libc.malloc(5000))
        # In use, so that no free block grows into the next and is given back to the system.
        between.append(libc.malloc(5000))
        ctypes.memset(blocks[-1], 7, 5000)
    for block in blocks:
        libc.free(block)
    again = [libc.malloc(5000) for _ in blocks]
    found = {ctypes.string_at(block, 5000)[2500] for block in again}
    for block in again + between:
        libc.free(block)
    return found
