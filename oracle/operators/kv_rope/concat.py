"""Caches grown by concatenation: the new tokens' rows follow those already cached.

Each operator has two descriptions: a ``reference``, one differentiable torch expression, and
``blocks``, which says of every output element whether it is copied or the exact sum of which
products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ...blocks import tiles
from ...definition import Block, Copied, Summed
from .gradients import TokenGradients, table_gradients
from .rotation import pair_clusters, rotate, rotate_transposed, rotation_terms, table_tile

Tensors = Mapping[str, torch.Tensor]


def concat_forward(
    inputs: Sequence[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute both updated caches in one precision.

    Args:
        inputs: key_states, value_states ``[B,H,N,D]``; cos, sin ``[B or 1,1,N,D]``; key_cache,
            value_cache ``[B,H,C,D]``.
        dtype: the type everything is computed and returned in.

    Returns:
        updated_key_cache, updated_value_cache ``[B,H,C+N,D]``.
    """
    key, value, cos, sin, key_cache, value_cache = (tensor.to(dtype) for tensor in inputs)
    rotated = rotate(key, cos, sin)
    return torch.cat((key_cache, rotated), dim=2), torch.cat((value_cache, value), dim=2)


def concat_forward_blocks(inputs: Tensors, output: str, limit: int) -> Iterator[Block]:
    """Yield the blocks of one output of ``kv_rope.concat.forward``."""
    kind = "key" if output == "updated_key_cache" else "value"
    cache, states = inputs[f"{kind}_cache"], inputs[f"{kind}_states"]
    old = cache.shape[2]
    for tile in tiles(cache.shape, limit * 8):
        yield Block("old rows", tile, Copied(cache[tile]))
    if kind == "value":
        for tile in tiles(states.shape, limit * 8):
            yield Block("new rows", _shifted(tile, old), Copied(states[tile]))
        return
    # A tile spans all of D, as rotate_half pairs d with d + D/2.
    for tile in tiles(states.shape[:-1], max(1, limit // (2 * states.shape[-1]))):
        whole = (*tile, slice(0, states.shape[-1]))
        yield Block("new rows", _shifted(whole, old), _rotation(inputs, tile))


def _shifted(tile: tuple[slice, ...], rows: int) -> tuple[slice, ...]:
    """Move a tile of ``[B,H,N,D]`` down by a number of rows."""
    batch, head, row, column = tile
    return batch, head, slice(row.start + rows, row.stop + rows), column


def _rotation(inputs: Tensors, tile: tuple[slice, ...]) -> Summed:
    batch, _, row = tile
    key, cos, sin = (inputs[name] for name in ("key_states", "cos", "sin"))
    return Summed(
        lambda: rotation_terms(key[tile], table_tile(cos, batch, row), table_tile(sin, batch, row)),
        2,
        lambda: pair_clusters(key.shape, cos, sin, batch, row),
    )


def concat_backward(inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of the concatenating update in one precision.

    Args:
        inputs: grad_updated_key_cache, grad_updated_value_cache ``[B,H,C+N,D]``; key_states
            ``[B,H,N,D]``; cos, sin ``[B,1,N,D]``.
        dtype: the type everything is computed and returned in.

    Returns:
        grad_key_states, grad_value_states ``[B,H,N,D]``; grad_cos, grad_sin ``[B,1,N,D]``;
        grad_key_cache, grad_value_cache ``[B,H,C,D]``.
    """
    grad_key, grad_value, key, cos, sin = (tensor.to(dtype) for tensor in inputs)
    old = grad_key.shape[2] - key.shape[2]
    g = grad_key[:, :, old:]
    return (
        rotate_transposed(g, cos, sin),
        _fresh(grad_value[:, :, old:]),
        *table_gradients(g, key, keepdim=True),
        _fresh(grad_key[:, :, :old]),
        _fresh(grad_value[:, :, :old]),
    )


def _fresh(part: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy that shares no memory with the tensor it was cut from."""
    return part.clone(memory_format=torch.contiguous_format)


def concat_backward_blocks(inputs: Tensors, output: str, limit: int) -> Iterator[Block]:
    """Yield the blocks of one output of ``kv_rope.concat.backward``."""
    key = inputs["key_states"]
    grad_key, grad_value = (inputs[f"grad_updated_{kind}_cache"] for kind in ("key", "value"))
    old = grad_key.shape[2] - key.shape[2]
    if output in ("grad_key_cache", "grad_value_cache"):
        source = (grad_key if output == "grad_key_cache" else grad_value)[:, :, :old]
        for tile in tiles(source.shape, limit * 8):
            yield Block("old rows", tile, Copied(source[tile]))
        return
    new_key, new_value = grad_key[:, :, old:], grad_value[:, :, old:]
    yield from TokenGradients(
        key=key,
        cos=inputs["cos"],
        sin=inputs["sin"],
        key_rows=lambda *tile: new_key[tile],
        value_rows=lambda *tile: new_value[tile],
        region="new rows",
        keepdim=True,
    ).blocks(output, limit)
