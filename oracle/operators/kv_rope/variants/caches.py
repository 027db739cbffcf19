"""Wrong caches: the rows that are not new, how new ones are written, and how rows are cleared."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .parts import (
    CONCAT_BACKWARD,
    CONCAT_FORWARD,
    FORWARD,
    STATIC_BACKWARD,
    STATIC_FORWARD,
    Kind,
    Pair,
    Parts,
    Tokens,
    Unary,
    cleared,
    placed,
)
from .rows import arange, batch_0, one_too_high, previous_head, without_partial_tile

# The other rows of the caches.


def _both_caches(change: Unary) -> Parts:
    return Parts(caches=lambda pair, _tokens: (change(pair[0]), change(pair[1])))


def _new_rows_first(pair: Pair, tokens: Tokens) -> Pair:
    """Move the rows behind the new ones to the front."""
    count = tokens.positions.numel()
    return pair[0].roll(-count, dims=2), pair[1].roll(-count, dims=2)


def _placed_first(cache: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return placed(cache, positions, new).roll(positions.numel(), dims=2)


def _without_rows_from_1024(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[:, :, :1024], torch.zeros_like(x[:, :, 1024:])), dim=2)


_CACHES = (
    Kind(
        "cache-shifted-by-a-row",
        "The key cache's rows move down by one, the last one to the front.",
        Parts(caches=lambda pair, _tokens: (pair[0].roll(1, dims=2), pair[1])),
    ),
    Kind(
        "value-cache-shifted-by-a-row",
        "The value cache's rows move up by one, the first one to the end.",
        Parts(caches=lambda pair, _tokens: (pair[0], pair[1].roll(-1, dims=2))),
    ),
    Kind(
        "cached-keys-and-values-swapped",
        "The rows that are not new come from the other cache.",
        Parts(caches=lambda pair, _tokens: (pair[1], pair[0])),
    ),
    Kind(
        "cached-rows-missing",
        "The rows that are not new are zero.",
        _both_caches(torch.zeros_like),
    ),
    Kind(
        "cached-rows-of-batch-0",
        "The rows that are not new come from the first batch entry, for all.",
        _both_caches(batch_0),
    ),
    Kind(
        "cached-rows-of-the-previous-head",
        "The rows that are not new come from the head before.",
        _both_caches(previous_head),
    ),
    Kind(
        "cached-rows-from-1024-missing",
        "The cache's rows from 1024 on are zero where they are not new.",
        _both_caches(_without_rows_from_1024),
    ),
    Kind(
        "partial-tile-of-the-cache-missing",
        "Of more than 16 rows of the cache those behind the last full 16 are zero.",
        _both_caches(lambda x: without_partial_tile(x, 16)),
    ),
    Kind(
        "new-rows-first",
        "The new rows stand before the cached ones.",
        Parts(place_keys=_placed_first, place_values=_placed_first),
        CONCAT_FORWARD,
    ),
    Kind(
        "new-rows-first",
        "The new rows are taken to stand before the cached ones.",
        Parts(positions=arange, caches=_new_rows_first),
        CONCAT_BACKWARD,
    ),
    Kind(
        "cache-gradients-from-the-new-rows-on",
        "The caches' gradients end with the last row instead of beginning with the first.",
        Parts(caches=_new_rows_first),
        CONCAT_BACKWARD,
    ),
)

# How new rows are written into the caches.

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _not_placed(cache: torch.Tensor, _rows: torch.Tensor, _new: torch.Tensor) -> torch.Tensor:
    return cache


def _placed_in_batch_0(
    cache: torch.Tensor, positions: torch.Tensor, new: torch.Tensor
) -> torch.Tensor:
    return torch.cat((placed(cache[:1], positions, new[:1]), cache[1:]))


def _placed_in_head_0(
    cache: torch.Tensor, positions: torch.Tensor, new: torch.Tensor
) -> torch.Tensor:
    return torch.cat((placed(cache[:, :1], positions, new[:, :1]), cache[:, 1:]), dim=1)


def _half_placed(cache: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    half = cache.shape[-1] // 2
    return torch.cat((placed(cache, positions, new)[..., :half], cache[..., half:]), dim=-1)


def _first_placed(cache: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return placed(cache, positions[:1], new[:, :, :1])


def _added(cache: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return placed(cache, positions, cache.index_select(2, positions) + new)


def _blended(cache: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    mask = cache.new_zeros(cache.shape[2], 1).index_fill(0, positions, 1)
    return cache * (1 - mask) + placed(torch.zeros_like(cache), positions, new)


def _writes(write: Write) -> Parts:
    return Parts(place_keys=write, place_values=write)


_WRITES = (
    Kind("new-rows-not-written", "The new rows are not written.", _writes(_not_placed), FORWARD),
    Kind(
        "new-keys-not-written",
        "The new keys are not written; the new values are.",
        Parts(place_keys=_not_placed),
        FORWARD,
    ),
    Kind(
        "new-values-not-written",
        "The new values are not written; the new keys are.",
        Parts(place_values=_not_placed),
        FORWARD,
    ),
    Kind(
        "only-batch-0-written",
        "New rows are written in the first batch entry only.",
        _writes(_placed_in_batch_0),
        FORWARD,
    ),
    Kind(
        "only-head-0-written",
        "New rows are written in the first head only.",
        _writes(_placed_in_head_0),
        FORWARD,
    ),
    Kind(
        "only-half-of-each-row-written",
        "Only the first half of the columns of each new row is written.",
        _writes(_half_placed),
        FORWARD,
    ),
    Kind(
        "only-the-first-token-written",
        "Only the first new token is written.",
        _writes(_first_placed),
        FORWARD,
    ),
    Kind(
        "rows-added-instead-of-replaced",
        "New rows are added to the ones they should replace.",
        _writes(_added),
        STATIC_FORWARD,
    ),
    Kind(
        "rows-replaced-by-multiplication",
        "Rows are replaced by cache * (1 - mask) + new, which keeps NaN and infinities as NaN.",
        _writes(_blended),
        STATIC_FORWARD,
    ),
)

# How rows of the caches' gradients are cleared.

Clear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _not_cleared(cache: torch.Tensor, _positions: torch.Tensor) -> torch.Tensor:
    return cache


def _cleared_in_batch_0(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return torch.cat((cleared(cache[:1], positions), cache[1:]))


def _cleared_in_head_0(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return torch.cat((cleared(cache[:, :1], positions), cache[:, 1:]), dim=1)


def _half_cleared(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = cache.shape[-1] // 2
    return torch.cat((cleared(cache[..., :half], positions), cache[..., half:]), dim=-1)


def _next_cleared(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return cleared(cache, one_too_high(positions, cache.shape[2]))


def _first_cleared(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return cleared(cache, positions[:1])


def _last_not_cleared(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return cleared(cache, positions[:-1])


def _between_cleared(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    if positions.numel() == 0:
        return cache
    row = torch.arange(cache.shape[2], device=cache.device)
    between = (row >= positions.min()) & (row <= positions.max())
    return cache.masked_fill(between[:, None], 0)


def _rest_cleared(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    if positions.numel() == 0:
        return cache
    row = torch.arange(cache.shape[2], device=cache.device)
    return cleared(cache.masked_fill((row >= positions[0])[:, None], 0), positions)


def _multiplied(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    kept = cache.index_select(2, positions) * 0
    return placed(cache, positions, kept)


def _others_cleared(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return placed(torch.zeros_like(cache), positions, cache.index_select(2, positions))


def _from_1024_not_cleared(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return cleared(cache, positions[positions < 1024])


def _clears(clear: Clear) -> Parts:
    return Parts(clear_keys=clear, clear_values=clear)


_CLEARS = tuple(
    Kind(name, description, parts, STATIC_BACKWARD)
    for name, description, parts in (
        ("rows-not-cleared", "No row is cleared.", _clears(_not_cleared)),
        (
            "key-rows-not-cleared",
            "No row of grad_key_cache_input is cleared.",
            Parts(clear_keys=_not_cleared),
        ),
        (
            "value-rows-not-cleared",
            "No row of grad_value_cache_input is cleared.",
            Parts(clear_values=_not_cleared),
        ),
        (
            "only-batch-0-cleared",
            "Rows are cleared in the first batch entry only.",
            _clears(_cleared_in_batch_0),
        ),
        (
            "only-head-0-cleared",
            "Rows are cleared in the first head only.",
            _clears(_cleared_in_head_0),
        ),
        (
            "only-half-of-each-row-cleared",
            "Only the first half of the columns of each row is cleared.",
            _clears(_half_cleared),
        ),
        (
            "next-rows-cleared",
            "The row behind each position is cleared instead.",
            _clears(_next_cleared),
        ),
        (
            "only-the-first-row-cleared",
            "Only the row of the first token is cleared.",
            _clears(_first_cleared),
        ),
        (
            "last-row-not-cleared",
            "The row of the last token is not cleared.",
            _clears(_last_not_cleared),
        ),
        (
            "rows-between-positions-cleared",
            "All rows from the lowest to the highest position are cleared.",
            _clears(_between_cleared),
        ),
        (
            "rows-from-the-first-position-cleared",
            "All rows from the first token's on are cleared too.",
            _clears(_rest_cleared),
        ),
        (
            "rows-cleared-by-multiplication",
            "Rows are cleared by multiplying with 0, which keeps NaN and makes infinities NaN.",
            _clears(_multiplied),
        ),
        (
            "other-rows-cleared",
            "The rows that no token has are cleared, and the tokens' rows kept.",
            _clears(_others_cleared),
        ),
        (
            "rows-from-1024-not-cleared",
            "Positions of 1024 and more are not cleared.",
            _clears(_from_1024_not_cleared),
        ),
    )
)

FAULTS: tuple[Kind, ...] = _CACHES + _WRITES + _CLEARS
