"""Caches of fixed capacity: ``cache_position`` names the row of each new token.

Each operator has two descriptions: a ``reference``, one differentiable torch expression, and
``blocks``, which says of every output element whether it is copied, zero, or the exact sum of
which products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ...blocks import row_selections, selection_size, tiles, within
from ...definition import Block, Copied, Summed, Zeroed
from .gradients import Rows, TokenGradients, table_gradients
from .rotation import pair_clusters, rotate, rotate_transposed, rotation_terms, table_tile

Tensors = Mapping[str, torch.Tensor]


def static_forward(
    inputs: Sequence[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute both updated caches in one precision.

    Args:
        inputs: key_states, value_states ``[B,H,N,D]``; cos, sin ``[B or 1,N,D]``; key_cache,
            value_cache ``[B,H,M,D]``; cache_position int64 ``[N]``, distinct rows.
        dtype: the type everything is computed and returned in.

    Returns:
        updated_key_cache, updated_value_cache ``[B,H,M,D]``.
    """
    *floating, position = inputs
    key, value, cos, sin, key_cache, value_cache = (tensor.to(dtype) for tensor in floating)
    rotated = rotate(key, cos.unsqueeze(1), sin.unsqueeze(1))
    return (
        key_cache.index_copy(2, position, rotated),
        value_cache.index_copy(2, position, value),
    )


def static_forward_blocks(inputs: Tensors, output: str, limit: int) -> Iterator[Block]:
    """Yield the blocks of one output of ``kv_rope.static.forward``."""
    kind = "key" if output == "updated_key_cache" else "value"
    cache, states = inputs[f"{kind}_cache"], inputs[f"{kind}_states"]
    batches, heads, _, width = states.shape
    # A tile spans all of D, as rotate_half pairs d with d + D/2.
    limit_rows = max(1, (limit if kind == "value" else limit // 2) // width)
    position = inputs["cache_position"]
    order = torch.argsort(position)
    written = 0
    for selection in row_selections(position[order]):
        tokens = order[written : written + selection_size(selection)]
        written += tokens.numel()
        for batch, head, part in tiles((batches, heads, tokens.numel()), limit_rows):
            index = (batch, head, within(selection, part), slice(0, width))
            if kind == "value":
                meaning: Copied | Summed = Copied(states[batch, head, tokens[part]])
            else:
                meaning = _rotation(inputs, batch, head, tokens[part])
            yield Block("rows written", index, meaning)
    yield from _untouched_rows(cache, position, limit * 8)


def _rotation(inputs: Tensors, batch: slice, head: slice, tokens: torch.Tensor) -> Summed:
    key = inputs["key_states"]
    cos, sin = inputs["cos"].unsqueeze(1), inputs["sin"].unsqueeze(1)
    return Summed(
        lambda: rotation_terms(
            key[batch, head, tokens], table_tile(cos, batch, tokens), table_tile(sin, batch, tokens)
        ),
        2,
        lambda: pair_clusters(key.shape, cos, sin, batch, tokens),
    )


def _untouched_rows(cache: torch.Tensor, position: torch.Tensor, limit: int) -> Iterator[Block]:
    """Yield the blocks of the rows that no new token is written to: copies."""
    batches, heads, capacity, width = cache.shape
    untouched = torch.ones(capacity, dtype=torch.bool, device=cache.device)
    untouched[position] = False
    for selection in row_selections(untouched.nonzero().squeeze(1)):
        shape = (batches, heads, selection_size(selection), width)
        for batch, head, row, column in tiles(shape, limit):
            index = (batch, head, within(selection, row), column)
            yield Block("untouched rows", index, Copied(cache[index]))


def static_backward(inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of the static-cache update in one precision.

    Args:
        inputs: grad_key_cache, grad_value_cache ``[B,H,M,D]``; key_states ``[B,H,N,D]``; cos,
            sin ``[B,N,D]``; cache_position int64 ``[N]``, distinct rows.
        dtype: the type everything is computed and returned in.

    Returns:
        grad_key_states, grad_value_states ``[B,H,N,D]``; grad_cos, grad_sin ``[B,N,D]``;
        grad_key_cache_input, grad_value_cache_input ``[B,H,M,D]``.
    """
    *floating, position = inputs
    grad_key, grad_value, key, cos, sin = (tensor.to(dtype) for tensor in floating)
    g = grad_key[:, :, position]
    return (
        rotate_transposed(g, cos.unsqueeze(1), sin.unsqueeze(1)),
        grad_value[:, :, position],
        *table_gradients(g, key, keepdim=False),
        grad_key.index_fill(2, position, 0),
        grad_value.index_fill(2, position, 0),
    )


def static_backward_blocks(inputs: Tensors, output: str, limit: int) -> Iterator[Block]:
    """Yield the blocks of one output of ``kv_rope.static.backward``."""
    position = inputs["cache_position"]
    if output in ("grad_key_cache_input", "grad_value_cache_input"):
        cache = inputs[output.removesuffix("_input")]
        yield from _zeroed_rows(cache, position, limit * 8)
        yield from _untouched_rows(cache, position, limit * 8)
        return
    yield from TokenGradients(
        key=inputs["key_states"],
        cos=inputs["cos"].unsqueeze(1),
        sin=inputs["sin"].unsqueeze(1),
        key_rows=_gathered(inputs["grad_key_cache"], position),
        value_rows=_gathered(inputs["grad_value_cache"], position),
        region="rows read",
        keepdim=False,
    ).blocks(output, limit)


def _zeroed_rows(cache: torch.Tensor, position: torch.Tensor, limit: int) -> Iterator[Block]:
    batches, heads, _, width = cache.shape
    for selection in row_selections(position.sort().values):
        shape = (batches, heads, selection_size(selection), width)
        for batch, head, row, column in tiles(shape, limit):
            yield Block("zeroed rows", (batch, head, within(selection, row), column), Zeroed())


def _gathered(cache: torch.Tensor, position: torch.Tensor) -> Rows:
    """Return what picks the rows of a cache that a slice of ``cache_position`` names."""
    return lambda batch, head, row: cache[batch, head].index_select(2, position[row])
