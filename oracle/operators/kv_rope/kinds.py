"""The kinds of inputs by name, and which operators have them."""

from __future__ import annotations

from collections.abc import Mapping

from ...definition import InputKind
from . import distributions, head_sums, magnitudes, placement, roundings, special_values
from .positions import POSITIONS

_COMMON: Mapping[str, InputKind] = {
    "official": distributions.official,
    "codes_kept": placement.codes_with_tables(1.0, 0.0),
    "codes_turned": placement.codes_with_tables(0.0, 1.0),
    "halves_differ": placement.halves_differ,
    "tables_by_batch": placement.tables_by_batch,
    "tables_by_position": placement.tables_by_position,
    "paired_tables": placement.paired_tables,
    "large_angles": placement.large_angles,
    "small": magnitudes.small,
    "subnormal": magnitudes.subnormal,
    "huge": magnitudes.huge,
    "ties": roundings.ties,
    "near_ties": roundings.near_ties,
    "cancellation": roundings.cancellation,
    "special_copies": special_values.special_copies,
    "signalling_copies": special_values.signalling_copies,
    "special_rotations": special_values.special_rotations,
    "non_finite_last_rows": special_values.non_finite_last_rows,
}

_HEAD_SUMS: Mapping[str, InputKind] = {
    "head_codes": head_sums.head_codes,
    "head_powers": head_sums.head_powers,
    "head_large_first": head_sums.head_large_first,
    "head_absorption": head_sums.head_absorption,
    "head_cancellation": head_sums.head_cancellation,
    "head_ties": head_sums.head_ties,
}

_POSITIONS: Mapping[str, InputKind] = {
    f"positions_{name}": distributions.random_at(name) for name in POSITIONS
}

CONCAT_FORWARD_KINDS = _COMMON
CONCAT_BACKWARD_KINDS: Mapping[str, InputKind] = {**_COMMON, **_HEAD_SUMS}
STATIC_FORWARD_KINDS: Mapping[str, InputKind] = {
    **_COMMON,
    **_POSITIONS,
    "non_finite_overwritten_rows": special_values.non_finite_new_rows,
}
STATIC_BACKWARD_KINDS: Mapping[str, InputKind] = {
    **_COMMON,
    **_HEAD_SUMS,
    **_POSITIONS,
    "non_finite_cleared_rows": special_values.non_finite_new_rows,
}


def is_random(kind: str) -> bool:
    """Whether inputs of a kind are independent random draws, and so fit for statistics."""
    return kind == "official" or kind in _POSITIONS
