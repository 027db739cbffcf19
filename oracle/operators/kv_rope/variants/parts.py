"""The four operators, each computed once from parts that can be replaced one at a time.

A variant is :class:`Parts` with one part changed, so one fault serves every operator that has the
part. Two views make the operators alike: concatenating writes new rows into a cache that has grown
by zero rows, and its backward reads the rows behind the cached ones. What forward and backward
have in common is that some rows are *rotated* (``key_states`` there, the gathered rows of the key
cache's gradient here) while others are only copied.

The default parts are right: products and sums in float32, one rounding to nearest even, heads
added in their order, copies bit by bit. They are the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..rotation import rotate_half, rotate_half_transposed

OperatorName = Literal["concat.forward", "concat.backward", "static.forward", "static.backward"]
CONCAT_FORWARD: frozenset[OperatorName] = frozenset({"concat.forward"})
CONCAT_BACKWARD: frozenset[OperatorName] = frozenset({"concat.backward"})
STATIC_FORWARD: frozenset[OperatorName] = frozenset({"static.forward"})
STATIC_BACKWARD: frozenset[OperatorName] = frozenset({"static.backward"})
FORWARD = CONCAT_FORWARD | STATIC_FORWARD
BACKWARD = CONCAT_BACKWARD | STATIC_BACKWARD
CONCAT = CONCAT_FORWARD | CONCAT_BACKWARD
STATIC = STATIC_FORWARD | STATIC_BACKWARD
EVERY = FORWARD | BACKWARD

Outputs = tuple[torch.Tensor, ...]
Pair = tuple[torch.Tensor, torch.Tensor]
Unary = Callable[[torch.Tensor], torch.Tensor]


class Tokens(NamedTuple):
    """The new tokens of one call.

    Attributes:
        keys: what is rotated ``[B,H,N,D]``: key_states, or gradients gathered from the key cache.
        values: what is copied ``[B,H,N,D]``: value_states, or gradients from the value cache.
        key_states: the factor of the sums over heads ``[B,H,N,D]``.
        cos: ``[B or 1,1,N,D]``.
        sin: likewise.
        positions: the tokens' rows in the updated cache, int64 ``[N]``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_states: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor


def unchanged(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself."""
    return x


def rotated(parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Return ``x * cos + rotate_half(x) * sin``, not yet rounded."""
    return parts.add(parts.cos_product(x, tokens.cos), parts.sin_product(parts.turn(x), tokens.sin))


def unrotated(parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Return ``x * cos + rotate_half_T(x * sin)``, not yet rounded."""
    return parts.add(
        parts.cos_product(x, tokens.cos), parts.unturn(parts.sin_product(x, tokens.sin))
    )


def product(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return the product in float32."""
    return x.to(torch.float32) * factor.to(torch.float32)


def add_in_order(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add one term after the other, in the terms' type."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def sum_heads(products: torch.Tensor) -> torch.Tensor:
    """Add ``[B,H,N,D]`` over the heads, the first one first, to ``[B,N,D]``."""
    return add_in_order(products.unbind(1))


def head_sums(parts: Parts, tokens: Tokens) -> Pair:
    """Return grad_cos and grad_sin ``[B,N,D]``, not yet rounded."""
    gradient, key = tokens.keys, tokens.key_states
    return (
        parts.reduce(parts.head_product(gradient, key)),
        parts.reduce(parts.head_product(gradient, parts.turn(key))),
    )


def stored(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round once to nearest even."""
    return total.to(dtype)


def carried(parts: Parts, tokens: Tokens) -> torch.Tensor:
    """Return the copied rows."""
    return parts.copy(tokens.values)


def placed(cache: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the cache with its rows at ``positions`` replaced; of equal positions the last wins.

    Args:
        cache: ``[B,H,R,D]``.
        positions: int64 ``[N]``, in range.
        new: ``[B,H,N,D]``.
    """
    count = positions.numel()
    if count == 0:
        return cache
    source = torch.full((cache.shape[2],), -1, device=cache.device)
    token = torch.arange(count, device=cache.device)
    source = source.scatter_reduce(0, positions, token, "amax")
    return torch.where((source >= 0)[:, None], new.index_select(2, source.clamp(min=0)), cache)


def cleared(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the cache with its rows at ``positions`` set to zero."""
    return cache.index_fill(2, positions, 0)


@dataclass(frozen=True)
class Parts:
    """What the four computations are made of; the defaults are right.

    Attributes:
        positions: which rows the new tokens are taken to have, of so many rows.
        gathered_positions: the rows that gradients are gathered from, made from ``positions``.
        cleared_positions: the rows that are cleared, made from ``positions``.
        read: how the new tokens, their tables included, are read.
        turn: rotate_half.
        unturn: its transpose.
        rotate: the rotation, before rounding.
        unrotate: the transposed rotation, before rounding.
        cos_product: x times cos.
        sin_product: x times sin.
        head_product: one term of a sum over heads.
        add: the sum of the two terms of a rotation.
        reduce: the sum over heads, ``[B,H,N,D]`` to ``[B,N,D]``.
        table_gradients: grad_cos and grad_sin before rounding.
        store: the rounding of rotated rows to the output type.
        store_sums: the rounding of sums over heads.
        copy: how rows are copied.
        carry: the rows that are only copied.
        new_keys: the rotated rows as they leave, made from them and from what was rotated.
        new_tables: grad_cos or grad_sin as it leaves, ``[B,N,D]``.
        place_keys: how new rows are written into the key cache.
        place_values: how new rows are written into the value cache.
        clear_keys: how rows of the key cache's gradient are cleared.
        clear_values: how rows of the value cache's gradient are cleared.
        caches: the caches before new rows are written, or the gradients of the caches.
        finish: the outputs as they are returned.
    """

    positions: Callable[[torch.Tensor, int], torch.Tensor] = lambda rows, _capacity: rows
    gathered_positions: Callable[[torch.Tensor, int], torch.Tensor] = lambda rows, _capacity: rows
    cleared_positions: Callable[[torch.Tensor, int], torch.Tensor] = lambda rows, _capacity: rows
    read: Callable[[Tokens], Tokens] = lambda tokens: tokens
    turn: Unary = rotate_half
    unturn: Unary = rotate_half_transposed
    rotate: Callable[[Parts, torch.Tensor, Tokens], torch.Tensor] = rotated
    unrotate: Callable[[Parts, torch.Tensor, Tokens], torch.Tensor] = unrotated
    cos_product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = product
    sin_product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = product
    head_product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = product
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add
    reduce: Unary = sum_heads
    table_gradients: Callable[[Parts, Tokens], Pair] = head_sums
    store: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = stored
    store_sums: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = stored
    copy: Unary = unchanged
    carry: Callable[[Parts, Tokens], torch.Tensor] = carried
    new_keys: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda rows, _given: rows
    new_tables: Unary = unchanged
    place_keys: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = placed
    place_values: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = placed
    clear_keys: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cleared
    clear_values: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cleared
    caches: Callable[[Pair, Tokens], Pair] = lambda pair, _tokens: pair
    finish: Callable[[Outputs], Outputs] = lambda outputs: outputs


RIGHT = Parts()


@dataclass(frozen=True)
class Kind:
    """A fault or a liberty of one or several operators.

    Attributes:
        name: words with hyphens.
        description: one sentence.
        parts: the computation.
        operators: the operators that it is a variant of.
    """

    name: str
    description: str
    parts: Parts
    operators: frozenset[OperatorName] = EVERY


def concat_forward(parts: Parts, inputs: Sequence[torch.Tensor]) -> Outputs:
    """Compute ``kv_rope.concat.forward`` from the inputs in call order."""
    key, value, cos, sin, key_cache, value_cache = inputs
    old, new = key_cache.shape[2], key.shape[2]
    positions = torch.arange(old, old + new, device=key.device)
    room = key.new_zeros(key.shape)
    grown = (torch.cat((key_cache, room), dim=2), torch.cat((value_cache, room), dim=2))
    return _forward(parts, Tokens(key, value, key, cos, sin, positions), grown)


def static_forward(parts: Parts, inputs: Sequence[torch.Tensor]) -> Outputs:
    """Compute ``kv_rope.static.forward`` from the inputs in call order."""
    *floating, positions = inputs
    key, value, cos, sin, key_cache, value_cache = floating
    tokens = Tokens(key, value, key, cos[:, None], sin[:, None], positions)
    return _forward(parts, tokens, (key_cache, value_cache))


def _forward(parts: Parts, tokens: Tokens, caches: Pair) -> Outputs:
    positions = parts.positions(tokens.positions, caches[0].shape[2])
    tokens = parts.read(tokens._replace(positions=positions))
    key = tokens.keys
    keys = parts.new_keys(parts.store(parts.rotate(parts, key, tokens), key.dtype), key)
    key_cache, value_cache = parts.caches((parts.copy(caches[0]), parts.copy(caches[1])), tokens)
    return _fresh(
        parts,
        parts.place_keys(key_cache, tokens.positions, keys),
        parts.place_values(value_cache, tokens.positions, parts.carry(parts, tokens)),
    )


def concat_backward(parts: Parts, inputs: Sequence[torch.Tensor]) -> Outputs:
    """Compute ``kv_rope.concat.backward`` from the inputs in call order."""
    grad_key, grad_value, key, cos, sin = inputs
    rows, new = grad_key.shape[2], key.shape[2]
    positions = parts.positions(torch.arange(rows - new, rows, device=key.device), rows)
    tokens = _gathered(parts, (grad_key, grad_value), key, (cos, sin), positions)
    grad_rows, grad_values, grad_cos, grad_sin = _token_gradients(parts, tokens)
    key_cache, value_cache = parts.caches((parts.copy(grad_key), parts.copy(grad_value)), tokens)
    return _fresh(
        parts,
        grad_rows,
        grad_values,
        grad_cos[:, None],
        grad_sin[:, None],
        key_cache[:, :, : rows - new],
        value_cache[:, :, : rows - new],
    )


def static_backward(parts: Parts, inputs: Sequence[torch.Tensor]) -> Outputs:
    """Compute ``kv_rope.static.backward`` from the inputs in call order."""
    *floating, positions = inputs
    grad_key, grad_value, key, cos, sin = floating
    rows = grad_key.shape[2]
    positions = parts.positions(positions, rows)
    tables = (cos[:, None], sin[:, None])
    tokens = _gathered(parts, (grad_key, grad_value), key, tables, positions)
    target = parts.cleared_positions(positions, rows)
    caches = (
        parts.clear_keys(parts.copy(grad_key), target),
        parts.clear_values(parts.copy(grad_value), target),
    )
    return _fresh(parts, *_token_gradients(parts, tokens), *parts.caches(caches, tokens))


def _gathered(
    parts: Parts, caches: Pair, key: torch.Tensor, tables: Pair, positions: torch.Tensor
) -> Tokens:
    source = parts.gathered_positions(positions, caches[0].shape[2])
    keys, values = (cache.index_select(2, source) for cache in caches)
    return parts.read(Tokens(keys, values, key, *tables, positions))


def _token_gradients(parts: Parts, tokens: Tokens) -> Outputs:
    """Return the gradients of key_states, value_states, cos and sin, the last two ``[B,N,D]``."""
    dtype = tokens.keys.dtype
    rows = parts.store(parts.unrotate(parts, tokens.keys, tokens), dtype)
    grad_cos, grad_sin = (
        parts.new_tables(parts.store_sums(total, dtype))
        for total in parts.table_gradients(parts, tokens)
    )
    return parts.new_keys(rows, tokens.keys), parts.carry(parts, tokens), grad_cos, grad_sin


def _fresh(parts: Parts, *outputs: torch.Tensor) -> Outputs:
    """Return the outputs as contiguous tensors that share memory with nothing."""
    finished = parts.finish(outputs)
    return tuple(x.clone(memory_format=torch.contiguous_format) for x in finished)
