"""Wrong rows: which rows the tokens have, what is moved there, and what happens to the others."""

from __future__ import annotations

import torch

from .parts import (
    BACKWARD,
    CONCAT,
    FORWARD,
    STATIC,
    STATIC_BACKWARD,
    Kind,
    Outputs,
    Parts,
    Unary,
    carried,
)

# Which rows the new tokens have.


def arange(rows: torch.Tensor, _capacity: int) -> torch.Tensor:
    """Return ``0, 1, 2, ...`` for as many tokens."""
    return torch.arange(rows.numel(), device=rows.device)


def _ascending(rows: torch.Tensor, _capacity: int) -> torch.Tensor:
    return rows.sort().values


def _ranks(rows: torch.Tensor, _capacity: int) -> torch.Tensor:
    return rows.argsort().argsort()


def _run(rows: torch.Tensor, capacity: int) -> torch.Tensor:
    return (rows[:1] + arange(rows, capacity)) % max(1, capacity)


def _at_the_end(rows: torch.Tensor, capacity: int) -> torch.Tensor:
    return arange(rows, capacity) + capacity - rows.numel()


def one_too_high(rows: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return the rows behind the given ones, around the end."""
    return (rows + 1) % max(1, capacity)


def _one_too_low(rows: torch.Tensor, capacity: int) -> torch.Tensor:
    return (rows - 1) % max(1, capacity)


def _modulo_half(rows: torch.Tensor, capacity: int) -> torch.Tensor:
    return rows % max(1, (capacity + 1) // 2)


_POSITIONS = (
    Kind(
        "positions-assumed-arange",
        "cache_position is taken to be 0, 1, 2, ...",
        Parts(positions=arange),
        STATIC,
    ),
    Kind(
        "cached-length-ignored",
        "The new tokens are taken to have the rows 0, 1, 2, ... of the updated cache.",
        Parts(positions=arange),
        CONCAT,
    ),
    Kind(
        "positions-assumed-ascending",
        "cache_position is taken to be sorted.",
        Parts(positions=_ascending),
        STATIC,
    ),
    Kind(
        "positions-assumed-consecutive",
        "The rows are taken to follow the first position without gaps, around the end.",
        Parts(positions=_run),
        STATIC,
    ),
    Kind(
        "positions-replaced-by-their-ranks",
        "Each position is replaced by its rank among the positions.",
        Parts(positions=_ranks),
        STATIC,
    ),
    Kind(
        "positions-at-the-end",
        "The new tokens are taken to have the last rows of the cache.",
        Parts(positions=_at_the_end),
        STATIC,
    ),
    Kind(
        "positions-one-too-high",
        "The row behind each token's row is used, around the end.",
        Parts(positions=one_too_high),
    ),
    Kind(
        "positions-one-too-low",
        "The row before each token's row is used, around the end.",
        Parts(positions=_one_too_low),
    ),
    Kind(
        "positions-modulo-half-the-rows",
        "Rows are taken modulo half the cache, as in a sliding window.",
        Parts(positions=_modulo_half),
    ),
    Kind(
        "positions-in-8-bits",
        "Only the low eight bits of a row are used.",
        Parts(positions=lambda rows, _capacity: rows & 0xFF),
    ),
    Kind(
        "first-position-for-all",
        "All tokens use the first token's row; of those written there the last stays.",
        Parts(positions=lambda rows, _capacity: rows[:1].expand_as(rows)),
    ),
    Kind(
        "positions-in-reverse",
        "The tokens take their rows in reverse order.",
        Parts(positions=lambda rows, _capacity: rows.flip(0)),
    ),
    Kind(
        "gathered-from-arange",
        "Gradients are gathered from the rows 0, 1, 2, ...; the right rows are cleared.",
        Parts(gathered_positions=arange),
        STATIC_BACKWARD,
    ),
    Kind(
        "arange-cleared",
        "The rows 0, 1, 2, ... are cleared; gradients are gathered from the right ones.",
        Parts(cleared_positions=arange),
        STATIC_BACKWARD,
    ),
)

# Which rows are moved: new tokens of another head, batch entry or tensor.


def _moved(change: Unary) -> Parts:
    """Return parts that read the rows to move ``[B,H,N,D]``, keys and values, wrongly."""
    return Parts(read=lambda t: t._replace(keys=change(t.keys), values=change(t.values)))


def _keys(change: Unary) -> Parts:
    return Parts(read=lambda t: t._replace(keys=change(t.keys)))


def _values(change: Unary) -> Parts:
    return Parts(read=lambda t: t._replace(values=change(t.values)))


def _key_states(change: Unary) -> Parts:
    return Parts(read=lambda t: t._replace(key_states=change(t.key_states)))


def previous_head(x: torch.Tensor) -> torch.Tensor:
    """Give every head of ``[B,H,...]`` what the head before it has."""
    return x.roll(1, dims=1)


def batch_0(x: torch.Tensor) -> torch.Tensor:
    """Give every batch entry what the first one has."""
    return x[:1].expand_as(x)


def _head_0(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1].expand_as(x)


def _grouped_heads(x: torch.Tensor) -> torch.Tensor:
    return x[:, torch.arange(x.shape[1], device=x.device) // 2]


def _head_major(x: torch.Tensor) -> torch.Tensor:
    """Read ``[B,H,N,D]`` as if it were laid out ``[H,B,N,D]``."""
    batches, heads, tokens, width = x.shape
    return x.reshape(heads, batches, tokens, width).transpose(0, 1)


def _token_major(x: torch.Tensor) -> torch.Tensor:
    """Read ``[B,H,N,D]`` as if it were laid out ``[B,N,H,D]``."""
    batches, heads, tokens, width = x.shape
    return x.reshape(batches, tokens, heads, width).transpose(1, 2)


_MOVED = (
    Kind(
        "new-keys-and-values-swapped",
        "What belongs to the new keys is taken from the new values, and the other way round.",
        Parts(read=lambda t: t._replace(keys=t.values, values=t.keys)),
    ),
    Kind(
        "heads-shifted-by-one",
        "Every head moves the new rows of the head before it.",
        _moved(previous_head),
    ),
    Kind(
        "keys-of-batch-0",
        "What is rotated comes from the first batch entry, for all.",
        _keys(batch_0),
    ),
    Kind(
        "values-of-batch-0",
        "The new rows of the values come from the first batch entry, for all.",
        _values(batch_0),
    ),
    Kind(
        "keys-of-head-0",
        "What is rotated comes from the first head, for all.",
        _keys(_head_0),
    ),
    Kind(
        "heads-in-groups-of-two",
        "Head h moves the new rows of head h // 2, as if queries were grouped.",
        _moved(_grouped_heads),
    ),
    Kind(
        "batch-and-head-swapped",
        "New rows are read as if heads were the outer axis, batch entries the inner one.",
        _moved(_head_major),
    ),
    Kind(
        "head-and-token-swapped",
        "New rows are read as if laid out [B,N,H,D].",
        _moved(_token_major),
    ),
    Kind(
        "key-states-of-the-previous-head",
        "In grad_cos and grad_sin a head's gradient meets the key of the head before it.",
        _key_states(previous_head),
        BACKWARD,
    ),
    Kind(
        "key-states-of-batch-0",
        "In grad_cos and grad_sin the keys of the first batch entry serve all.",
        _key_states(batch_0),
        BACKWARD,
    ),
    Kind(
        "key-states-of-head-0",
        "In grad_cos and grad_sin the keys of the first head serve all.",
        _key_states(_head_0),
        BACKWARD,
    ),
    Kind(
        "key-states-read-token-major",
        "In grad_cos and grad_sin key_states is read as if laid out [B,N,H,D].",
        _key_states(_token_major),
        BACKWARD,
    ),
    Kind(
        "keys-and-values-swapped",
        "The two caches are returned in the wrong order.",
        Parts(finish=lambda outputs: outputs[::-1]),
        FORWARD,
    ),
    Kind(
        "keys-and-values-swapped",
        "grad_key_states and grad_value_states are returned in the wrong order.",
        Parts(finish=lambda outputs: (outputs[1], outputs[0], *outputs[2:])),
        BACKWARD,
    ),
)

# New rows that do not arrive. Tokens are the last axis but one of every output for new tokens.


def _arriving(change: Unary) -> Parts:
    """Return parts that damage what leaves for the new tokens, tables' gradients included."""
    return Parts(
        new_keys=lambda rows, _given: change(rows),
        carry=lambda parts, tokens: change(carried(parts, tokens)),
        new_tables=change,
    )


def _without_last_token(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[..., :-1, :], torch.zeros_like(x[..., -1:, :])), dim=-2)


def _with_stale_last_token(x: torch.Tensor) -> torch.Tensor:
    return x if x.shape[-2] < 2 else torch.cat((x[..., :-1, :], x[..., -2:-1, :]), dim=-2)


def _without_last_column(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[..., :-1], torch.zeros_like(x[..., -1:])), dim=-1)


def without_partial_tile(x: torch.Tensor, tile: int) -> torch.Tensor:
    """Zero the rows behind the last full tile, if there is a full one."""
    rows = x.shape[-2]
    whole = rows - rows % tile if rows > tile else rows
    return torch.cat((x[..., :whole, :], torch.zeros_like(x[..., whole:, :])), dim=-2)


def _without_batches_from_16(outputs: Outputs) -> Outputs:
    return tuple(torch.cat((x[:16], torch.zeros_like(x[16:]))) for x in outputs)


_MISSING = (
    Kind(
        "last-token-missing",
        "What leaves for the last new token is zero.",
        _arriving(_without_last_token),
    ),
    Kind(
        "last-token-stale",
        "What leaves for the last new token repeats the token before it.",
        _arriving(_with_stale_last_token),
    ),
    Kind(
        "last-key-missing",
        "The last new token's key, or its gradient, is zero; all else is there.",
        Parts(new_keys=lambda rows, _given: _without_last_token(rows)),
    ),
    Kind(
        "last-value-missing",
        "The last new token's value, or its gradient, is zero; all else is there.",
        Parts(carry=lambda parts, tokens: _without_last_token(carried(parts, tokens))),
    ),
    Kind(
        "last-column-missing",
        "The last column of what leaves for the new tokens is zero.",
        _arriving(_without_last_column),
    ),
    Kind(
        "partial-tile-of-tokens-missing",
        "Of more than 16 new tokens those behind the last full 16 are zero.",
        _arriving(lambda x: without_partial_tile(x, 16)),
    ),
    Kind(
        "batches-from-16-missing",
        "Batch entries from 16 on are zero in every output.",
        Parts(finish=_without_batches_from_16),
    ),
    Kind(
        "all-zeros",
        "Every output is zero.",
        Parts(finish=lambda outputs: tuple(map(torch.zeros_like, outputs))),
    ),
)

FAULTS: tuple[Kind, ...] = _POSITIONS + _MOVED + _MISSING
