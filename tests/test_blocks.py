"""Blocks: every element in exactly one, none too large, in its region, whatever the limit."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.blocks import row_selections, selection_size, tiles, within
from oracle.definition import Block, Copied, Operator, Summed, Zeroed
from tests.operators.test_kv_rope import FORWARD, OPERATORS, random_inputs

# Copies are not widened to float64, so their blocks hold eight times as many elements.
COPIES = 8

shapes = st.lists(st.integers(0, 5), min_size=1, max_size=5)
limits = st.integers(1, 300)
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.id)


@given(shape=shapes, limit=limits)
def test_tiles_cover_every_element_once_in_index_order(shape: list[int], limit: int) -> None:
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    pieces = [numbers[tile] for tile in tiles(shape, limit)]
    assert all(0 < piece.numel() <= limit for piece in pieces)
    flat = torch.cat([piece.flatten() for piece in pieces]) if pieces else numbers.flatten()
    assert torch.equal(flat, numbers.flatten())


@given(shape=shapes, limit=limits)
def test_tiles_are_as_few_as_can_be_in_one_dimension_and_where_all_fits(
    shape: list[int], limit: int
) -> None:
    total = math.prod(shape)
    count = len(list(tiles(shape, limit)))
    if total and total <= limit:
        assert count == 1
    if len(shape) == 1:
        assert count == -(-total // limit)


@given(rows=st.sets(st.integers(0, 400), max_size=300).map(sorted), limit=st.integers(1, 50))
def test_row_selections_name_every_row_once_in_order_and_can_be_cut(
    rows: list[int], limit: int
) -> None:
    everything = torch.arange(401)
    selections = row_selections(torch.tensor(rows, dtype=torch.int64))
    named = [everything[selection] for selection in selections]
    assert [row for part in named for row in part.tolist()] == rows
    for selection, part in zip(selections, named, strict=True):
        assert selection_size(selection) == part.numel() > 0
        cut = [
            everything[within(selection, slice(start, min(start + limit, part.numel())))]
            for start in range(0, part.numel(), limit)
        ]
        assert torch.equal(torch.cat(cut), part)


def test_rows_in_up_to_64_runs_are_slices_and_in_more_an_index() -> None:
    for runs in (1, 2, 63, 64):
        selections = row_selections(torch.arange(runs) * 2)
        assert selections == [slice(2 * row, 2 * row + 1) for row in range(runs)]
    rows = torch.arange(65) * 2
    (selection,) = row_selections(rows)
    assert isinstance(selection, torch.Tensor)
    assert torch.equal(selection, rows)


def draw_sizes(operator: Operator, rng: random.Random) -> dict[str, int]:
    sizes = {
        "batch_size": rng.choice((0, 1, 2, 3)),
        "num_kv_heads": rng.choice((1, 2, 3)),
        "new_seq_len": rng.choice((0, 1, 2, 5)),
        "head_dim": rng.choice((2, 4, 6)),
    }
    cached = rng.choice((0, 1, 4, 150 if sizes["new_seq_len"] else 1))
    if operator is FORWARD:
        return {**sizes, "current_seq_len": cached}
    return {**sizes, "max_seq_len": sizes["new_seq_len"] + cached}


def region_of(operator: Operator, inputs: Mapping[str, torch.Tensor], name: str, row: int) -> str:
    """The region of an output's row, from the definition."""
    if operator is FORWARD:
        return "old rows" if row < inputs["key_cache"].shape[2] else "new rows"
    if name in ("grad_cos", "grad_sin"):
        return "all rows"
    if name in ("grad_key_states", "grad_value_states"):
        return "rows read"
    return "zeroed rows" if row in inputs["cache_position"].tolist() else "untouched rows"


def check_block(block: Block, piece: torch.Tensor, limit: int, unit: int) -> None:
    meaning = block.meaning
    if isinstance(meaning, Summed):
        terms = meaning.terms()
        assert terms.dtype == torch.float64
        assert tuple(terms.shape) == (meaning.count, *piece.shape)
        assert terms.numel() <= max(limit, unit)
    elif isinstance(meaning, Copied):
        assert meaning.source.shape == piece.shape
        assert piece.numel() <= COPIES * limit
    else:
        assert isinstance(meaning, Zeroed)
        assert piece.numel() <= COPIES * limit
    index = [entry for entry in block.index if isinstance(entry, torch.Tensor)]
    assert len(index) <= 1
    assert all(bool((entry.diff() > 0).all()) for entry in index)


@every_operator
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), limit=limits)
def test_every_element_lies_in_one_block_of_its_region_and_blocks_respect_the_limit(
    operator: Operator, seed: int, limit: int
) -> None:
    rng = random.Random(seed)
    sizes = draw_sizes(operator, rng)
    inputs = random_inputs(operator, sizes, "normal", rng)
    full = operator.bind(inputs)
    # The least that a sum can be cut to: one row of both terms, or of every head.
    unit = max(2, sizes["num_kv_heads"]) * sizes["head_dim"]
    for spec in operator.outputs:
        shape = operator.shape(spec, full)
        visits = torch.zeros(shape, dtype=torch.int64)
        regions = [""] * shape[-2]
        for block in operator.blocks(inputs, spec.name, limit):
            assert block.region in spec.regions
            check_block(block, visits[block.index], limit, unit)
            visits[block.index] += 1
            rows = torch.arange(shape[-2])[block.index[-2]].tolist()
            for row in rows:
                assert regions[row] in ("", block.region)
                regions[row] = block.region
        assert bool((visits == 1).all())
        if visits.numel():
            expected = [region_of(operator, inputs, spec.name, row) for row in range(shape[-2])]
            assert regions == expected


@every_operator
def test_many_scattered_positions_are_selected_by_index_and_still_partition(
    operator: Operator,
) -> None:
    sizes = {"batch_size": 2, "num_kv_heads": 1, "new_seq_len": 100, "head_dim": 2}
    rows = "current_seq_len" if operator is FORWARD else "max_seq_len"
    inputs = random_inputs(operator, {**sizes, rows: 260}, "normal", random.Random(4))
    if operator is not FORWARD:
        inputs["cache_position"] = (
            torch.randperm(130, generator=torch.Generator().manual_seed(0))[:100] * 2
        )
    for limit in (1, 10, 1000):
        for spec in operator.outputs:
            visits = torch.zeros(operator.shape(spec, operator.bind(inputs)), dtype=torch.int64)
            for block in operator.blocks(inputs, spec.name, limit):
                visits[block.index] += 1
            assert bool((visits == 1).all())


@every_operator
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), limit=limits)
def test_what_an_element_is_does_not_depend_on_the_limit(
    operator: Operator, seed: int, limit: int
) -> None:
    rng = random.Random(seed)
    sizes = draw_sizes(operator, rng)
    inputs = random_inputs(operator, sizes, "normal", rng)
    full = operator.bind(inputs)
    for spec in operator.outputs:
        described = []
        for size in (limit, 10**6):
            terms = torch.full((3, *operator.shape(spec, full)), math.nan, dtype=torch.float64)
            for block in operator.blocks(inputs, spec.name, size):
                target = terms[(slice(None), *block.index)]
                if isinstance(block.meaning, Summed):
                    target = torch.zeros_like(target)
                    target[: block.meaning.count] = block.meaning.terms()
                elif isinstance(block.meaning, Copied):
                    target = block.meaning.source.double().expand_as(target)
                else:
                    target = torch.zeros_like(target)
                terms[(slice(None), *block.index)] = target
            described.append(terms)
        assert torch.equal(*described)
