"""The general probes: what each is about, how it lies in memory, and what claims restrict."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from oracle.definition import Case, Operator
from oracle.inputs import bits_type, fill_inputs
from oracle.operators.kv_rope.angles import rope_tables
from oracle.rounding import format_of, round_float64
from tests.operators.test_kv_rope import (
    ALL_OPERATORS,
    BACKWARD,
    CONCAT_BACKWARD,
    FORWARDS,
    STATIC_FORWARD,
    cache_axis,
    every_operator,
    is_backward,
    is_static,
)

STATICS = (STATIC_FORWARD, BACKWARD)
every_static = pytest.mark.parametrize("operator", STATICS, ids=lambda operator: operator.id)
DTYPES = ("bfloat16", "float16", "float32")


def general(operator: Operator, name: str) -> Case:
    return next(case for case in operator.general_probes if case.name == name)


def size_of(case: Case, axis: str) -> int:
    return case.sizes[axis]


@every_operator
def test_general_probes_are_general_say_what_they_expose_and_start_from_bfloat16(
    operator: Operator,
) -> None:
    for case in operator.general_probes:
        assert case.domain == "general"
        assert case.dtype == "bfloat16"
        assert len(case.exposes.split()) >= 3
        outputs = [math.prod(operator.shape(spec, case.sizes)) for spec in operator.outputs]
        assert case.needs_gpu or sum(outputs) < 1_500_000, case.name


@every_operator
def test_sizes_around_powers_of_two_ones_and_odd_widths_are_tried(operator: Operator) -> None:
    def tried(axis: str) -> set[int]:
        return {size_of(case, axis) for case in operator.general_probes}

    assert {0, 1, 15, 16, 17, 31, 33} <= tried("new_seq_len")
    assert {1, 3, 5, 15, 16, 17, 31, 33} <= tried("num_kv_heads")
    assert {2, 6, 8, 10, 64, 96, 192, 256} <= tried("head_dim")
    assert {0, 1} <= tried("batch_size")
    assert 0 in tried(cache_axis(operator))
    reported = general(operator, "head-dim-6").sizes
    assert (reported["head_dim"], reported["num_kv_heads"], reported["batch_size"]) == (6, 8, 4)
    different = list(general(operator, "different-sizes").sizes.values())
    assert len(set(different)) == len(different)


@every_operator
def test_each_of_batch_heads_and_tokens_is_one_with_the_others_above(operator: Operator) -> None:
    axes = {
        "one-batch-entry": "batch_size",
        "one-head": "num_kv_heads",
        "one-new-token": "new_seq_len",
    }
    for name, axis in axes.items():
        sizes = general(operator, name).sizes
        assert [size for other, size in sizes.items() if other != axis and size < 2] == []
        assert sizes[axis] == 1


@every_operator
def test_every_floating_input_is_laid_out_in_every_way_and_all_together(
    operator: Operator,
) -> None:
    seen: dict[str, set[str]] = {}
    for case in operator.general_probes:
        if len(case.layouts) == 1 and not case.needs_gpu:
            ((name, layout),) = case.layouts.items()
            spec = next(spec for spec in operator.inputs if spec.name == name)
            shape = operator.case_shape(spec, case)
            strides = layout.strides(shape)
            if layout.expanded:
                assert strides[0] == 0
                assert shape[0] > 1
            if not layout.offset:
                assert not layout.is_contiguous(shape), case.name
            seen.setdefault(name, set()).add(case.name.removesuffix(f"-{name}"))
    floating = {spec.name for spec in operator.inputs if spec.indexes is None}
    ways = {"transposed", "every-second-row", "cut", "expanded", "unaligned"}
    assert {name: seen[name] for name in floating} == dict.fromkeys(floating, ways)
    for name in ("all-transposed", "all-cut", "all-every-second-column", "all-unaligned"):
        assert set(general(operator, name).layouts) == floating
    if is_static(operator):
        assert seen["cache_position"] == {"every-second-position", "position-inside"}


@every_operator
def test_a_transposed_input_is_memory_of_batch_tokens_heads_columns(operator: Operator) -> None:
    case = general(operator, "all-transposed")
    spec = next(spec for spec in operator.inputs if spec.name == "key_states")
    batch, heads, tokens, width = shape = operator.case_shape(spec, case)
    assert case.layouts["key_states"].strides(shape) == (
        tokens * heads * width,
        width,
        heads * width,
        1,
    )
    assert batch > 1


@every_operator
def test_expanded_inputs_are_no_independent_draws(operator: Operator) -> None:
    for case in operator.general_probes:
        if any(layout.expanded for layout in case.layouts.values()):
            assert not case.random
    assert general(operator, "all-transposed").random


@every_operator
def test_the_wide_stride_fits_32_bits_and_three_of_it_do_not(operator: Operator) -> None:
    case = general(operator, "wide-stride")
    ((name, layout),) = case.layouts.items()
    spec = next(spec for spec in operator.inputs if spec.name == name)
    shape = operator.case_shape(spec, case)
    assert layout.strides(shape)[0] == 2**30
    assert shape[0] == 4
    assert case.needs_gpu


@pytest.mark.parametrize("operator", FORWARDS, ids=lambda operator: operator.id)
def test_tables_of_one_row_are_tried_together_and_one_by_one(operator: Operator) -> None:
    shared = [case for case in operator.general_probes if case.broadcast]
    assert {frozenset(case.broadcast) for case in shared} == {
        frozenset({"cos"}),
        frozenset({"sin"}),
        frozenset({"cos", "sin"}),
    }
    for case in shared:
        assert case.sizes["batch_size"] > 1
        for name in case.broadcast:
            assert oracle.make_inputs(case)[name].shape[0] == 1


def test_backward_probes_have_a_table_row_for_every_batch_entry() -> None:
    for operator in (CONCAT_BACKWARD, BACKWARD):
        assert not any(case.broadcast for case in operator.general_probes)


@every_operator
def test_empty_probes_have_outputs_of_the_defined_shapes(operator: Operator) -> None:
    names = ["no-new-tokens", "no-tokens-at-all", "no-batch"]
    for name in names if is_static(operator) else [*names, "nothing-cached"]:
        case = general(operator, name)
        for dtype in DTYPES:
            inputs = oracle.make_inputs(replace(case, dtype=dtype))
            outputs = oracle.truth(operator, inputs).outputs
            for spec in operator.outputs:
                assert tuple(outputs[spec.name].shape) == operator.shape(spec, case.sizes)


# Angles


def test_rope_tables_are_cosines_and_sines_of_the_angles_in_both_halves() -> None:
    positions = (0, 1, 255, 260)
    cos, sin = rope_tables(positions, 8)
    for place, position in enumerate(positions):
        for j in range(4):
            angle = position * 10000 ** (-2 * j / 8)
            for table, value in ((cos, math.cos(angle)), (sin, math.sin(angle))):
                assert table[place, j] == table[place, j + 4]
                assert abs(table[place, j] - value) < 1e-12


def test_rope_tables_at_a_million_are_what_another_arbitrary_precision_library_says() -> None:
    mpmath = pytest.importorskip("mpmath")
    positions = (10**6 - 64, 999_999, 10**6)
    cos, sin = rope_tables(positions, 10)
    with mpmath.workdps(40):
        for place, position in enumerate(positions):
            for j in range(5):
                angle = position * mpmath.mpf(10000) ** (mpmath.mpf(-2 * j) / 10)
                assert cos[place, j] == float(mpmath.cos(angle))
                assert sin[place, j] == float(mpmath.sin(angle))


@every_operator
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_angles_are_tables_of_256_257_and_a_million_rounded_once(
    operator: Operator, dtype: str
) -> None:
    case = replace(general(operator, "large-angles"), dtype=dtype)
    inputs = oracle.make_inputs(case)
    positions = (*range(255, 261), *range(10**6 - 9, 10**6 + 1))
    expected = rope_tables(positions, case.sizes["head_dim"])
    for name, table in zip(("cos", "sin"), expected, strict=True):
        rounded = round_float64(torch.tensor(table), format_of(dtype))
        for entry in inputs[name]:
            assert torch.equal(entry.reshape(rounded.shape), rounded)
    cos = inputs["cos"].reshape(2, len(positions), -1)
    assert not torch.equal(cos[:, 1], cos[:, 2]), "positions 256 and 257 have one table"


# Constraints


def drawn_with(operator: Operator, case: Case, *constraints: str) -> dict[str, np.ndarray]:
    arrays = {
        spec.name: np.zeros(operator.case_shape(spec, case), bits_type(spec, case.dtype))
        for spec in operator.inputs
    }
    case = replace(case, constraints=constraints)
    fill_inputs(operator, case, 3, arrays)
    for name in constraints:
        operator.constraints[name].impose(case, arrays)
    return arrays


def test_the_constraints_of_the_family_are_those_promised() -> None:
    for operator in ALL_OPERATORS:
        positions = ["positions=ascending", "positions=consecutive"] if is_static(operator) else []
        assert list(operator.constraints) == ["tables=paired", *positions]


@every_operator
def test_paired_tables_have_equal_halves_and_keep_their_first_ones(operator: Operator) -> None:
    for case in operator.probes + operator.general_probes:
        if case.needs_gpu:
            continue
        half = case.sizes["head_dim"] // 2
        plain, paired = drawn_with(operator, case), drawn_with(operator, case, "tables=paired")
        for name in ("cos", "sin"):
            first, second = paired[name][..., :half], paired[name][..., half:]
            assert np.array_equal(first, second)
            if case.kind != "cancellation":
                assert np.array_equal(first, plain[name][..., :half])


@every_operator
def test_cancellation_still_cancels_with_paired_tables(operator: Operator) -> None:
    case = operator.case("cancellation")
    arrays = drawn_with(operator, case, "tables=paired")
    half = case.sizes["head_dim"] // 2
    flipped = 0x8000 if is_backward(operator) else 0
    assert np.array_equal(arrays["sin"][..., :half], arrays["cos"][..., :half] ^ flipped)


@every_static
def test_ascending_and_consecutive_positions_move_the_rows_of_the_caches_along(
    operator: Operator,
) -> None:
    caches = [spec.name for spec in operator.inputs if "cache" in spec.name and not spec.indexes]
    for case in operator.probes:
        plain = drawn_with(operator, case)
        before = plain["cache_position"]
        for name in ("positions=ascending", "positions=consecutive"):
            moved = drawn_with(operator, case, name)
            position = moved["cache_position"]
            assert np.all(np.diff(position) > 0)
            if name == "positions=consecutive":
                assert np.all(np.diff(position) == 1)
            else:
                assert np.array_equal(position, np.sort(before))
            for cache in caches:
                # Tokens keep what their rows hold, and the other rows their order.
                assert np.array_equal(moved[cache][:, :, position], plain[cache][:, :, before])
                others = np.delete(moved[cache], position, axis=2)
                assert np.array_equal(others, np.delete(plain[cache], before, axis=2))


@every_static
@given(new=st.integers(0, 5), spare=st.integers(0, 5), kind=st.sampled_from(("ends", "shuffled")))
def test_consecutive_positions_fit_into_every_cache(
    operator: Operator, new: int, spare: int, kind: str
) -> None:
    base = operator.case("shuffled")
    sizes = {**base.sizes, "new_seq_len": new, "max_seq_len": new + spare, "head_dim": 2}
    case = replace(base, kind=f"positions_{kind}", sizes={**sizes, "num_kv_heads": 1})
    position = drawn_with(operator, case, "positions=consecutive")["cache_position"]
    assert position.tolist() == list(range(new + spare))[position[0] if new else 0 :][:new]
