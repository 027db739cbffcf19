"""Wrong rotations: the pairing, the signs, the terms, and the tables they are taken from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..rotation import rotate_half, rotate_half_transposed
from .parts import (
    BACKWARD,
    CONCAT,
    FORWARD,
    RIGHT,
    STATIC,
    Kind,
    Pair,
    Parts,
    Tokens,
    Unary,
    add_in_order,
    rotated,
    unchanged,
    unrotated,
)

# Pairing and signs.


def rotate_neighbours(x: torch.Tensor) -> torch.Tensor:
    """Return ``(-x1, x0, -x3, x2, ...)``: the pairing of GPT-J."""
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def _neighbours_transposed(y: torch.Tensor) -> torch.Tensor:
    return -rotate_neighbours(y)


def _swapped(x: torch.Tensor) -> torch.Tensor:
    return x.roll(x.shape[-1] // 2, dims=-1)


def _swapped_and_negated(x: torch.Tensor) -> torch.Tensor:
    return -_swapped(x)


def _interleaved(x: torch.Tensor) -> torch.Tensor:
    """Turn ``(a0, a1, ..., b0, b1, ...)`` into ``(a0, b0, a1, b1, ...)``."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)


def _deinterleaved(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def _signed(x: torch.Tensor) -> torch.Tensor:
    """Return ``concat(-x[..., :D/2], x[..., D/2:])``."""
    return _swapped(rotate_half_transposed(x))


_PAIRING = (
    Kind(
        "interleaved-pairing",
        "Neighbours are rotated with each other (GPT-J), not d with d + D/2.",
        Parts(turn=rotate_neighbours, unturn=_neighbours_transposed),
    ),
    Kind(
        "interleaved-result",
        "The halves are rotated rightly and their results stored as neighbours.",
        Parts(new_keys=lambda rows, _given: _interleaved(rows)),
    ),
    Kind(
        "deinterleaved-input",
        "Even columns are gathered before odd ones, then the halves are rotated.",
        Parts(read=lambda t: t._replace(keys=_deinterleaved(t.keys))),
    ),
    Kind(
        "interleaved-pairing-in-grad-sin",
        "Neighbours are paired in grad_sin only.",
        Parts(turn=rotate_neighbours),
        BACKWARD,
    ),
    Kind(
        "interleaved-pairing-in-grad-keys",
        "Neighbours are paired in grad_key_states only.",
        Parts(unturn=_neighbours_transposed),
        BACKWARD,
    ),
    Kind(
        "minus-on-the-wrong-half",
        "The second half gets the minus sign, which rotates the other way round.",
        Parts(turn=rotate_half_transposed, unturn=rotate_half),
    ),
    Kind(
        "rotated-forward-instead-of-back",
        "grad_key_states takes rotate_half instead of its transpose.",
        Parts(unturn=rotate_half),
        BACKWARD,
    ),
    Kind(
        "grad-sin-negated",
        "grad_sin takes the transpose of rotate_half and so has the opposite sign.",
        Parts(turn=rotate_half_transposed),
        BACKWARD,
    ),
    Kind(
        "minus-missing",
        "The halves are swapped without a minus sign.",
        Parts(turn=_swapped, unturn=_swapped),
    ),
    Kind(
        "minus-missing-in-grad-sin",
        "grad_sin swaps the halves of the key without a minus sign.",
        Parts(turn=_swapped),
        BACKWARD,
    ),
    Kind(
        "minus-on-both-halves",
        "The halves are swapped and both negated.",
        Parts(turn=_swapped_and_negated, unturn=_swapped_and_negated),
    ),
    Kind(
        "halves-not-swapped",
        "The term with sin takes the half at hand instead of the other one, signs as they were.",
        Parts(turn=_signed, unturn=lambda y: -_signed(y)),
    ),
    Kind(
        "grad-sin-without-rotation",
        "grad_sin sums g * k, as grad_cos does.",
        Parts(turn=unchanged),
        BACKWARD,
    ),
)

# Terms.


def _zeros(x: torch.Tensor, _factor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, dtype=torch.float32)


def _twice(parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return rotated(parts, rotated(parts, x, tokens).to(x.dtype), tokens)


def _back_twice(parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return unrotated(parts, unrotated(parts, x, tokens).to(x.dtype), tokens)


def _sin_before_swap(parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return parts.add(parts.cos_product(x, tokens.cos), parts.turn(parts.sin_product(x, tokens.sin)))


def _sin_after_swap(parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return parts.add(
        parts.cos_product(x, tokens.cos), parts.sin_product(parts.unturn(x), tokens.sin)
    )


def _rotated_in_place(parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Rotate the second half with the first one's result, as an update in place does."""
    half = x.shape[-1] // 2
    whole = rotated(parts, x, tokens)
    changed = torch.cat((whole[..., :half].to(x.dtype), x[..., half:]), dim=-1)
    return torch.cat((whole[..., :half], rotated(parts, changed, tokens)[..., half:]), dim=-1)


def _unrotated_in_place(parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    half = x.shape[-1] // 2
    whole = unrotated(parts, x, tokens)
    changed = torch.cat((whole[..., :half].to(x.dtype), x[..., half:]), dim=-1)
    return torch.cat((whole[..., :half], unrotated(parts, changed, tokens)[..., half:]), dim=-1)


def _only(select: Callable[[torch.Tensor], torch.Tensor]) -> Parts:
    """Return parts that rotate only the places ``select`` says, given a tensor ``[B,H,N,D]``."""
    return Parts(new_keys=lambda rows, given: torch.where(select(rows), rows, given))


def _index(x: torch.Tensor, dimension: int) -> torch.Tensor:
    """Return the index along a dimension, shaped to broadcast with ``x``."""
    shape = [1] * x.dim()
    shape[dimension] = -1
    return torch.arange(x.shape[dimension], device=x.device).view(shape)


def _values_rotated(parts: Parts, tokens: Tokens) -> torch.Tensor:
    return rotated(parts, tokens.values, tokens).to(tokens.values.dtype)


def _values_unrotated(parts: Parts, tokens: Tokens) -> torch.Tensor:
    return unrotated(parts, tokens.values, tokens).to(tokens.values.dtype)


def _cached_again(
    rotate: Callable[[Parts, torch.Tensor, Tokens], torch.Tensor],
) -> Callable[[Pair, Tokens], Pair]:
    def caches(pair: Pair, tokens: Tokens) -> Pair:
        if tokens.positions.numel() == 0:
            return pair
        first = tokens._replace(cos=tokens.cos[:, :, :1], sin=tokens.sin[:, :, :1])
        return rotate(RIGHT, pair[0], first).to(pair[0].dtype), pair[1]

    return caches


_TERMS = (
    Kind(
        "cos-term-missing",
        "The product with cos is left out.",
        Parts(cos_product=_zeros),
    ),
    Kind(
        "sin-term-missing",
        "The product with sin is left out.",
        Parts(sin_product=_zeros),
    ),
    Kind(
        "not-rotated",
        "The keys, or their gradients, are passed on as they came.",
        Parts(new_keys=lambda _rows, given: given),
    ),
    Kind(
        "rotated-twice",
        "The rotation is applied to its own result.",
        Parts(rotate=_twice, unrotate=_back_twice),
    ),
    Kind(
        "rotated-in-place",
        "The second half is rotated with the first half's result instead of its input.",
        Parts(rotate=_rotated_in_place, unrotate=_unrotated_in_place),
    ),
    Kind(
        "sin-applied-before-the-swap",
        "sin is multiplied before the halves are swapped: rotate_half(k * sin).",
        Parts(rotate=_sin_before_swap),
        FORWARD,
    ),
    Kind(
        "sin-applied-after-the-swap",
        "sin is multiplied after the halves are swapped back: rotate_half_T(g) * sin.",
        Parts(unrotate=_sin_after_swap),
        BACKWARD,
    ),
    Kind(
        "second-half-not-rotated",
        "Only the first half of the columns is rotated; the rest is passed on.",
        _only(lambda x: _index(x, 3) < x.shape[3] // 2),
    ),
    Kind(
        "last-head-not-rotated",
        "The last head is passed on unrotated.",
        _only(lambda x: _index(x, 1) < x.shape[1] - 1),
    ),
    Kind(
        "last-token-not-rotated",
        "The last new token is passed on unrotated.",
        _only(lambda x: _index(x, 2) < x.shape[2] - 1),
    ),
    Kind(
        "only-batch-0-rotated",
        "All batch entries but the first are passed on unrotated.",
        _only(lambda x: _index(x, 0) == 0),
    ),
    Kind(
        "values-rotated-as-well",
        "The values are rotated like the keys.",
        Parts(carry=_values_rotated),
        FORWARD,
    ),
    Kind(
        "values-rotated-as-well",
        "The values' gradients are rotated back like those of the keys.",
        Parts(carry=_values_unrotated),
        BACKWARD,
    ),
    Kind(
        "cached-keys-rotated-again",
        "The rows already cached are rotated too, by the tables of the first token.",
        Parts(caches=_cached_again(rotated)),
        FORWARD,
    ),
    Kind(
        "cached-keys-rotated-again",
        "The gradients of the rows already cached are rotated back too.",
        Parts(caches=_cached_again(unrotated)),
        BACKWARD,
    ),
)

# Tables.


def _tables(change: Unary) -> Parts:
    """Return parts that read both tables ``[B or 1,1,N,D]`` wrongly in one way."""
    return Parts(read=lambda t: t._replace(cos=change(t.cos), sin=change(t.sin)))


def _cos(change: Unary) -> Parts:
    return Parts(read=lambda t: t._replace(cos=change(t.cos)))


def _sin(change: Unary) -> Parts:
    return Parts(read=lambda t: t._replace(sin=change(t.sin)))


def _batch_0(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand_as(x)


def _first_token(table: torch.Tensor) -> torch.Tensor:
    return table[:, :, :1].expand_as(table)


def _first_half(table: torch.Tensor) -> torch.Tensor:
    return table.chunk(2, dim=-1)[0].repeat(1, 1, 1, 2)


def _second_half(table: torch.Tensor) -> torch.Tensor:
    return table.chunk(2, dim=-1)[1].repeat(1, 1, 1, 2)


def _summed_over_batch(table: torch.Tensor) -> torch.Tensor:
    if table.shape[0] == 0:
        return table
    total = add_in_order(table.to(torch.float32).unbind(0))
    return total.to(table.dtype).expand_as(table)


def _token_major(table: torch.Tensor) -> torch.Tensor:
    """Read ``[B,1,N,D]`` as if it were laid out ``[N,1,B,D]``."""
    batches, _, tokens, width = table.shape
    return table.reshape(tokens, batches, width).transpose(0, 1)[:, None]


def _by_cache_row(tokens: Tokens) -> Tokens:
    count = tokens.positions.numel()
    if count == 0:
        return tokens
    row = tokens.positions % count
    return tokens._replace(cos=tokens.cos[:, :, row], sin=tokens.sin[:, :, row])


def _by_flat_head(tokens: Tokens) -> Tokens:
    """Take table row ``b * H + h``, modulo B, for batch entry b and head h."""
    batches, heads = tokens.keys.shape[:2]
    rows = torch.arange(batches * heads, device=tokens.cos.device).view(batches, heads)

    def by_head(table: torch.Tensor) -> torch.Tensor:
        return table[:, 0][rows % max(1, table.shape[0])]

    return tokens._replace(cos=by_head(tokens.cos), sin=by_head(tokens.sin))


def _rebuilt_cos(tokens: Tokens) -> Tokens:
    sine = tokens.sin.to(torch.float32)
    cosine = (1 - sine * sine).clamp(min=0).sqrt()
    cosine = torch.where(tokens.cos < 0, -cosine, cosine)
    return tokens._replace(cos=cosine.to(tokens.cos.dtype))


def _paired_as_neighbours(tokens: Tokens) -> Tokens:
    cos, sin = (table.chunk(2, dim=-1)[0] for table in (tokens.cos, tokens.sin))
    return tokens._replace(cos=cos.repeat_interleave(2, -1), sin=sin.repeat_interleave(2, -1))


_TABLES = (
    Kind(
        "cos-and-sin-swapped",
        "cos is used as sin, and sin as cos.",
        Parts(read=lambda t: t._replace(cos=t.sin, sin=t.cos)),
    ),
    Kind(
        "interleaved-pairing-and-tables",
        "Neighbours are rotated with each other, by the repeated first halves of the tables.",
        Parts(turn=rotate_neighbours, unturn=_neighbours_transposed, read=_paired_as_neighbours),
    ),
    Kind(
        "tables-of-batch-0",
        "cos and sin of the first batch entry serve all.",
        _tables(_batch_0),
    ),
    Kind("cos-of-batch-0", "cos of the first batch entry serves all.", _cos(_batch_0)),
    Kind("sin-of-batch-0", "sin of the first batch entry serves all.", _sin(_batch_0)),
    Kind(
        "tables-summed-over-the-batch",
        "cos and sin are summed over the batch.",
        _tables(_summed_over_batch),
    ),
    Kind(
        "tables-read-token-major",
        "cos and sin are read as if tokens were the outer axis, batch entries the inner one.",
        _tables(_token_major),
    ),
    Kind(
        "tables-indexed-by-batch-and-head",
        "The tables' batch entry is b * H + h modulo B: the heads were not divided out.",
        Parts(read=_by_flat_head),
    ),
    Kind(
        "tables-of-the-first-token",
        "cos and sin of the first token serve all tokens.",
        _tables(_first_token),
    ),
    Kind(
        "tables-of-the-previous-token",
        "Every token is rotated by the tables of the one before it, the first by the last one's.",
        _tables(lambda table: table.roll(1, dims=2)),
    ),
    Kind(
        "tables-in-reverse",
        "The tables' tokens are read from last to first.",
        _tables(lambda table: table.flip(2)),
    ),
    Kind(
        "tables-indexed-by-position",
        "The tables are indexed by the token's row in the cache, modulo their length.",
        Parts(read=_by_cache_row),
        STATIC,
    ),
    Kind(
        "tables-offset-by-the-cached-length",
        "The tables are indexed by the token's row in the updated cache, modulo their length.",
        Parts(read=_by_cache_row),
        CONCAT,
    ),
    Kind(
        "first-half-of-the-tables",
        "Only the first halves of cos and sin are read, for both halves of the columns.",
        _tables(_first_half),
    ),
    Kind(
        "second-half-of-the-tables",
        "Only the second halves of cos and sin are read, for both halves of the columns.",
        _tables(_second_half),
    ),
    Kind("first-half-of-cos", "Only the first half of cos is read.", _cos(_first_half)),
    Kind("first-half-of-sin", "Only the first half of sin is read.", _sin(_first_half)),
    Kind(
        "halves-of-the-tables-swapped",
        "Each half of the columns takes the other half of cos and sin.",
        _tables(_swapped),
    ),
    Kind(
        "cos-rebuilt-from-sin",
        "Of cos only the sign is read; its magnitude is taken to be sqrt(1 - sin^2).",
        Parts(read=_rebuilt_cos),
    ),
)

FAULTS: tuple[Kind, ...] = _PAIRING + _TERMS + _TABLES
