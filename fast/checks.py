"""Arguments checked once for each set of shapes, types and devices; positions where asked for."""

from __future__ import annotations

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Sizes = tuple[int, int, int, int, int]
"""B, H, N, rows of the cache (C, C + N or M), D."""


def sizes_of(key_states: torch.Tensor, cache_name: str, cache: torch.Tensor) -> Sizes:
    """Check the keys and the cache's number of dimensions; return all sizes.

    Raises:
        ValueError: naming the tensor and what does not fit.
    """
    if key_states.dim() != 4 or key_states.shape[1] < 1:
        raise ValueError(
            f"key_states must be [B, H, N, D] with H >= 1, but has shape {list(key_states.shape)}"
        )
    batch, num_heads, new_len, head_dim = key_states.shape
    if head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"key_states: the head dim D must be even and at least 2, but is {head_dim}"
        )
    if key_states.dtype not in DTYPES:
        raise ValueError(
            f"key_states must be bfloat16, float16 or float32, but is {key_states.dtype}"
        )
    if cache.dim() != 4:
        raise ValueError(f"{cache_name} must have 4 dimensions, but has shape {list(cache.shape)}")
    return batch, num_heads, new_len, cache.shape[2], head_dim


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], key_states: torch.Tensor
) -> None:
    """Check a floating tensor against the keys.

    Raises:
        ValueError: naming the tensor, and its shape, dtype or device.
    """
    if tensor.shape != shape:
        raise ValueError(
            f"{name} must have shape {list(shape)} to go with key_states "
            f"{list(key_states.shape)}, but has {list(tensor.shape)}"
        )
    if tensor.dtype != key_states.dtype:
        raise ValueError(f"{name} is {tensor.dtype}, but key_states is {key_states.dtype}")
    if tensor.device != key_states.device:
        raise ValueError(f"{name} is on {tensor.device}, but key_states is on {key_states.device}")


def check_table(
    name: str, table: torch.Tensor, shape: tuple[int, ...], key_states: torch.Tensor
) -> None:
    """Check a table that may have one row for all batch entries.

    Raises:
        ValueError: as :func:`check_tensor`.
    """
    shared = table.shape[:1] == (1,)
    check_tensor(name, table, (1, *shape[1:]) if shared else shape, key_states)


def check_new_rows(name: str, rows: int, new_len: int) -> None:
    """Check that a concatenated cache has room for the new rows.

    Raises:
        ValueError: naming the tensor and both numbers.
    """
    if rows < new_len:
        raise ValueError(
            f"{name} has {rows} rows, fewer than the {new_len} new tokens of key_states"
        )


def check_index(cache_position: torch.Tensor, new_len: int, device: torch.device) -> None:
    """Check type, shape and device of cache_position, not what it holds.

    Raises:
        ValueError: saying what it must be, and is.
    """
    if cache_position.shape != (new_len,) or cache_position.dtype != torch.int64:
        raise ValueError(
            f"cache_position must be int64 of shape [{new_len}], but is {cache_position.dtype} of "
            f"shape {list(cache_position.shape)}"
        )
    if cache_position.device != device:
        raise ValueError(
            f"cache_position is on {cache_position.device}, but key_states on {device}"
        )


def check_positions(cache_position: torch.Tensor, max_len: int) -> None:
    """Check that cache_position holds distinct rows. On a GPU this waits for its stream.

    Raises:
        ValueError: naming the first bad entry.
    """
    seen: set[int] = set()
    for index, position in enumerate(cache_position.tolist()):
        if not 0 <= position < max_len or position in seen:
            raise ValueError(
                f"cache_position must hold distinct rows in 0..{max_len - 1}, but entry {index} is "
                f"{position}{', a repetition' if position in seen else ''}"
            )
        seen.add(position)
