"""The cases of the family: the official suites, and the probes of the official domain.

Official means that the suite's constants hold (head_dim 128, 10 or 8 heads, bfloat16, contiguous
inputs), at any batch size and length of at least one new token. Probes are small, as Triton's
interpreter takes about 4 ms for a thousand elements. Sizes within a probe differ pairwise where
they can, so that no swapped pair of axes fits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from ...definition import Case, Layout, Suite

Probe = tuple[str, str, tuple[int, int, int], str]
"""Name, kind of inputs, (batch_size, new_seq_len, rows of the cache), what it exposes."""

_FORWARD: tuple[Probe, ...] = (
    ("keep", "codes_kept", (2, 3, 5), "with cos 1, sin 0: which element went where, bit for bit"),
    ("turn", "codes_turned", (2, 5, 3), "with cos 0, sin 1: pairing of d with d + D/2, and signs"),
    ("halves", "halves_differ", (2, 2, 1), "reading one half of cos or sin for both, or swapped"),
    ("batch-tables", "tables_by_batch", (2, 2, 3), "using the tables of one batch entry for all"),
    ("position-tables", "tables_by_position", (2, 6, 1), "using the tables of another position"),
    ("paired", "paired_tables", (1, 4, 2), "tables as real models have them, equal halves"),
    ("first-token", "official", (1, 1, 0), "N = 1 and no cache: sizes of one, empty inputs"),
    ("no-cache", "official", (2, 5, 0), "no cached tokens: value_states returned as the output"),
    ("one-token", "official", (3, 1, 7), "a decoding step: the new row misplaced or missing"),
    ("random", "official", (2, 5, 7), "roundings other than the contract's, on random data"),
    ("uneven", "official", (1, 31, 33), "lengths just below and above a power of two"),
    ("uneven-short", "official", (3, 17, 15), "lengths just above and below sixteen"),
    ("many-batches", "official", (33, 1, 1), "batch entries beyond 16 and 32"),
    ("long-prompt", "official", (1, 131, 3), "new tokens beyond 128: tiles and their tails"),
    (
        "long-cache",
        "official",
        (1, 2, 1030),
        "rows beyond 1024; one new row hidden in a long cache",
    ),
    ("small-values", "small", (2, 3, 2), "everything within 0.01 of zero: absolute tolerances"),
    ("ties", "ties", (1, 16, 1), "truncation, and ties rounded away from zero or up"),
    ("near-ties", "near_ties", (1, 16, 1), "rounding twice, or dropping low bits before rounding"),
    ("cancellation", "cancellation", (2, 4, 1), "a small term lost where large ones cancel"),
    ("subnormal", "subnormal", (1, 4, 1), "flushing subnormal inputs, products or results to zero"),
    ("huge", "huge", (1, 4, 1), "overflow to infinity, early or missing"),
    ("special-copies", "special_copies", (1, 3, 52), "copies that change NaNs, subnormals or -0.0"),
    ("special-rotations", "special_rotations", (2, 3, 1), "infinities and NaNs lost or spread"),
    ("last-row-nan", "non_finite_last_rows", (2, 3, 4), "NaN in the last rows lost or spread"),
    ("offset", "official", (2, 3, 4), "ignoring that a tensor starts inside a larger buffer"),
)

_BACKWARD: tuple[Probe, ...] = (
    ("keep", "codes_kept", (2, 3, 7), "with cos 1, sin 0: which element went where, bit for bit"),
    ("turn", "codes_turned", (2, 5, 7), "with cos 0, sin 1: the transposed rotation and its signs"),
    ("halves", "halves_differ", (2, 2, 3), "reading one half of cos or sin for both, or swapped"),
    ("batch-tables", "tables_by_batch", (2, 2, 5), "using the tables of one batch entry for all"),
    ("position-tables", "tables_by_position", (2, 6, 7), "using the tables of another position"),
    ("paired", "paired_tables", (1, 4, 6), "tables as real models have them, equal halves"),
    ("arange", "official", (2, 3, 5), "positions 0, 1, 2: the official order"),
    ("shuffled", "positions_shuffled", (2, 5, 11), "assuming that cache_position ascends"),
    (
        "offset-positions",
        "positions_offset",
        (2, 5, 11),
        "assuming that cache_position starts at 0",
    ),
    ("descending", "positions_descending", (1, 5, 9), "assuming that cache_position ascends"),
    ("gaps", "positions_gaps", (1, 4, 13), "assuming that cache_position has no gaps"),
    ("rising-gaps", "positions_ascending_gaps", (1, 6, 17), "using only its first and last entry"),
    ("last-row", "positions_last", (3, 1, 7), "one new token in the last row"),
    ("full", "positions_shuffled", (2, 9, 9), "every row is new: nothing is left untouched"),
    ("single", "official", (1, 1, 1), "all sizes one"),
    ("random", "positions_shuffled", (2, 37, 41), "roundings other than the contract's"),
    ("uneven", "positions_shuffled", (1, 31, 33), "lengths just below and above a power of two"),
    ("many-batches", "positions_shuffled", (33, 1, 2), "batch entries beyond 16 and 32"),
    ("long-prompt", "positions_shuffled", (1, 131, 140), "new tokens beyond 128: tiles and tails"),
    ("long-cache", "positions_ends", (1, 3, 1030), "rows and positions beyond 1024; few new rows"),
    ("small-values", "small", (2, 3, 5), "everything within 0.01 of zero: absolute tolerances"),
    ("ties", "ties", (1, 16, 17), "truncation, and ties rounded away from zero or up"),
    ("near-ties", "near_ties", (1, 16, 17), "rounding twice, or dropping bits before rounding"),
    ("cancellation", "cancellation", (2, 4, 5), "a small term lost where large ones cancel"),
    ("subnormal", "subnormal", (1, 4, 5), "flushing subnormal inputs, products or results"),
    ("huge", "huge", (1, 4, 5), "overflow to infinity, early or missing"),
    ("cleared-nan", "non_finite_cleared_rows", (2, 3, 5), "clearing rows by multiplying with zero"),
    ("special-copies", "special_copies", (1, 2, 66), "copies that change NaNs, subnormals or -0.0"),
    ("special-rotations", "special_rotations", (2, 3, 4), "infinities and NaNs lost or spread"),
    ("last-row-nan", "non_finite_last_rows", (2, 3, 8), "NaN in the last rows lost or spread"),
    ("head-codes", "head_codes", (1, 3, 4), "heads missing from the sum, or a mean"),
    ("head-absorption", "head_absorption", (2, 9, 10), "adding up heads in low precision"),
    ("head-cancellation", "head_cancellation", (2, 5, 6), "heads that nearly cancel"),
    ("head-ties", "head_ties", (1, 5, 6), "head sums truncated, or ties rounded away from zero"),
    ("offset", "positions_shuffled", (2, 3, 4), "ignoring that a tensor starts inside a buffer"),
)

OFFSET = 128
"""Elements before the first one in the ``offset`` probes: 256 bytes, so alignment is kept."""


def probes(
    operator: str, table: tuple[Probe, ...], cache_axis: str, inputs: tuple[str, ...]
) -> tuple[Case, ...]:
    """Return the probes of an operator as cases."""
    cases = []
    for name, kind, (batch, new, rows), exposes in table:
        offsets = {tensor: Layout(offset=OFFSET) for tensor in inputs} if name == "offset" else {}
        cases.append(
            Case(
                operator=operator,
                name=name,
                group="probes",
                sizes=_sizes(operator, batch, new, cache_axis, rows),
                kind=kind,
                exposes=exposes,
                layouts=offsets,
                random=kind == "official" or kind.startswith("positions_"),
            )
        )
    return tuple(cases)


def forward_probes() -> tuple[Case, ...]:
    """Return the probes of ``kv_rope.concat.forward``."""
    inputs = ("key_states", "value_states", "cos", "sin", "key_cache", "value_cache")
    return probes("kv_rope.concat.forward", _FORWARD, "current_seq_len", inputs)


def backward_probes() -> tuple[Case, ...]:
    """Return the probes of ``kv_rope.static.backward``."""
    inputs = ("grad_key_cache", "grad_value_cache", "key_states", "cos", "sin", "cache_position")
    return probes("kv_rope.static.backward", _BACKWARD, "max_seq_len", inputs)


HEADS = {"kv_rope.concat.forward": 10, "kv_rope.static.backward": 8}
HEAD_DIM = 128


def _sizes(operator: str, batch: int, new: int, cache_axis: str, rows: int) -> dict[str, int]:
    return {
        "batch_size": batch,
        "num_kv_heads": HEADS[operator],
        "new_seq_len": new,
        cache_axis: rows,
        "head_dim": HEAD_DIM,
    }


def official_suite(operator: str, suite_id: str, cache_axis: str) -> Suite:
    """Read one of the published suites, shipped as data."""
    shipped: dict[str, Any] = json.loads(
        files("oracle").joinpath("suites/sol_execbench.json").read_text("utf-8")
    )
    published = next(suite for suite in shipped["suites"] if suite["id"] == suite_id)
    cases = tuple(
        _suite_case(operator, suite_id, cache_axis, number, entry)
        for number, entry in enumerate(published["cases"], start=1)
    )
    return Suite(
        id=suite_id,
        source="SOL-ExecBench, public problem page",
        cases=cases,
        published=published["published_b200_geomean_us"],
    )


def _suite_case(
    operator: str, suite_id: str, cache_axis: str, number: int, entry: Mapping[str, float]
) -> Case:
    batch, new = int(entry["batch_size"]), int(entry["new_seq_len"])
    rows = int(entry[cache_axis])
    letter = "C" if cache_axis == "current_seq_len" else "M"
    return Case(
        operator=operator,
        name=f"suite-{number:02d}-B{batch}-N{new}-{letter}{rows}",
        group=suite_id,
        sizes=_sizes(operator, batch, new, cache_axis, rows),
        kind="official",
        random=True,
        published={
            "scoring_baseline_us": entry["scoring_baseline_us"],
            "sol_us": entry["sol_us"],
        },
    )
