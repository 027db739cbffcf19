"""What the KV-cache update with rotary position embedding means, exactly.

``rotate_half(x) = concat(-x[..., D/2:], x[..., :D/2])`` (the half-split layout of GPT-NeoX, not
GPT-J's neighbour pairs; J. Su et al., "RoFormer", arXiv:2104.09864, section 3.4.2), and its
transpose ``rotate_half_T(y) = concat(y[..., D/2:], -y[..., :D/2])``.

Each operator has two descriptions here: ``reference``, one differentiable torch expression, and
``blocks``, which says of every output element whether it is copied, zero, or the exact sum of
which products. Products of two numbers of at most 24 significant bits are exact in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ...blocks import row_selections, selection_size, tiles, within
from ...definition import Block, Copied, Summed, Zeroed

Tensors = Mapping[str, torch.Tensor]


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Return ``concat(-x[..., D/2:], x[..., :D/2])`` for ``x`` of shape ``[..., D]``, D even."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_half_transposed(y: torch.Tensor) -> torch.Tensor:
    """Return ``concat(y[..., D/2:], -y[..., :D/2])``, the adjoint of :func:`rotate_half`."""
    half = y.shape[-1] // 2
    return torch.cat((y[..., half:], -y[..., :half]), dim=-1)


def _products(*pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the exact products of pairs of low-precision tensors as float64 ``[count, ...]``."""
    return torch.stack([a.to(torch.float64) * b.to(torch.float64) for a, b in pairs])


# kv_rope.concat.forward


def concat_forward(
    inputs: Sequence[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute both updated caches in one precision.

    Args:
        inputs: key_states, value_states ``[B,H,N,D]``; cos, sin ``[B,1,N,D]``; key_cache,
            value_cache ``[B,H,C,D]``.
        dtype: the type everything is computed and returned in.

    Returns:
        updated_key_cache, updated_value_cache ``[B,H,C+N,D]``.
    """
    key, value, cos, sin, key_cache, value_cache = (tensor.to(dtype) for tensor in inputs)
    rotated = key * cos + rotate_half(key) * sin
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


def _table_tile(table: torch.Tensor, batch: slice, row: slice) -> torch.Tensor:
    """Return a tile of a table ``[B or 1,1,N,D]``."""
    return table[batch if table.shape[0] > 1 else slice(0, 1), :, row]


def _rotation(inputs: Tensors, tile: tuple[slice, ...]) -> Summed:
    def terms() -> torch.Tensor:
        batch, _, row = tile
        key = inputs["key_states"][tile]
        cos = _table_tile(inputs["cos"], batch, row)
        sin = _table_tile(inputs["sin"], batch, row)
        return _products((key, cos), (rotate_half(key), sin))

    return Summed(terms, 2)


# kv_rope.static.backward


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
    rows = grad_key[:, :, position]
    table_cos, table_sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (
        rows * table_cos + rotate_half_transposed(rows * table_sin),
        grad_value[:, :, position],
        (rows * key).sum(dim=1),
        (rows * rotate_half(key)).sum(dim=1),
        grad_key.index_fill(2, position, 0),
        grad_value.index_fill(2, position, 0),
    )


def static_backward_blocks(inputs: Tensors, output: str, limit: int) -> Iterator[Block]:
    """Yield the blocks of one output of ``kv_rope.static.backward``."""
    if output in ("grad_key_cache_input", "grad_value_cache_input"):
        yield from _cleared_cache(inputs, output.removesuffix("_input"), limit * 8)
    elif output == "grad_value_states":
        source, position = inputs["grad_value_cache"], inputs["cache_position"]
        for tile in tiles(inputs["key_states"].shape, limit):
            batch, head, row, column = tile
            rows = source[batch, head].index_select(2, position[row])
            yield Block("rows read", tile, Copied(rows[..., column]))
    elif output == "grad_key_states":
        shape = inputs["key_states"].shape
        for tile in tiles(shape[:-1], max(1, limit // (2 * shape[-1]))):
            whole = (*tile, slice(0, shape[-1]))
            yield Block("rows read", whole, _adjoint_rotation(inputs, tile))
    else:
        batches, heads, tokens, width = inputs["key_states"].shape
        for tile in tiles((batches, tokens), max(1, limit // (heads * width))):
            whole = (*tile, slice(0, width))
            yield Block("all rows", whole, _head_sum(inputs, tile, output == "grad_sin"))


def _cleared_cache(inputs: Tensors, name: str, limit: int) -> Iterator[Block]:
    source, position = inputs[name], inputs["cache_position"]
    batches, heads, capacity, width = source.shape
    cleared = torch.zeros(capacity, dtype=torch.bool, device=source.device)
    cleared[position] = True
    for region, mask in (("zeroed rows", cleared), ("untouched rows", ~cleared)):
        for selection in row_selections(mask.nonzero().squeeze(1)):
            shape = (batches, heads, selection_size(selection), width)
            for batch, head, row, column in tiles(shape, limit):
                rows = within(selection, row)
                index = (batch, head, rows, column)
                meaning = Zeroed() if region == "zeroed rows" else Copied(source[index])
                yield Block(region, index, meaning)


def _gathered(inputs: Tensors, batch: slice, head: slice, row: slice) -> torch.Tensor:
    """Return the rows of grad_key_cache that a slice of cache_position names."""
    position = inputs["cache_position"][row]
    return inputs["grad_key_cache"][batch, head].index_select(2, position)


def _adjoint_rotation(inputs: Tensors, tile: tuple[slice, ...]) -> Summed:
    def terms() -> torch.Tensor:
        batch, head, row = tile
        rows = _gathered(inputs, batch, head, row)
        cos = inputs["cos"][batch, row].unsqueeze(1)
        sin = inputs["sin"][batch, row].unsqueeze(1).expand_as(rows)
        half = rows.shape[-1] // 2
        turned = torch.cat((sin[..., half:], -sin[..., :half]), dim=-1)
        swapped = torch.cat((rows[..., half:], rows[..., :half]), dim=-1)
        return _products((rows, cos), (swapped, turned))

    return Summed(terms, 2)


def _head_sum(inputs: Tensors, tile: tuple[slice, ...], rotated: bool) -> Summed:
    heads = inputs["key_states"].shape[1]

    def terms() -> torch.Tensor:
        batch, row = tile
        rows = _gathered(inputs, batch, slice(0, heads), row)
        key = inputs["key_states"][batch, :, row]
        factor = rotate_half(key) if rotated else key
        return (rows.to(torch.float64) * factor.to(torch.float64)).transpose(0, 1).contiguous()

    return Summed(terms, heads)
