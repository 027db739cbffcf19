"""What each probe promises: the property by which it exposes a fault, in every type.

The probes of the official domain are drawn in the three types, at their own sizes and at narrow
ones, as the general domain does.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

import oracle
from oracle.budget import interval
from oracle.definition import Case, Operator
from oracle.rounding import format_of, round_float64, two_sum
from tests.operators.test_kv_rope import (
    ALL_OPERATORS,
    BACKWARD,
    CONCAT_BACKWARD,
    FORWARD,
    STATIC_FORWARD,
    cache_axis,
    is_backward,
    is_static,
)
from tests.rational import BF16, power_of_two, round_to

Tensors = Mapping[str, torch.Tensor]

BACKWARDS = (CONCAT_BACKWARD, BACKWARD)
STATICS = (STATIC_FORWARD, BACKWARD)
DTYPES = ("bfloat16", "float16", "float32")
NARROW = {"head_dim": 6, "num_kv_heads": 3}
NARROWEST = {"head_dim": 2, "num_kv_heads": 1}


def named(operators: Sequence[Operator]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("operator", operators, ids=lambda operator: operator.id)


every_operator = named(ALL_OPERATORS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_probe = pytest.mark.parametrize(
    ("operator", "case"),
    [
        pytest.param(operator, case, id=f"{operator.id}-{case.name}")
        for operator in ALL_OPERATORS
        for case in operator.probes
    ],
)


def probe(
    operator: Operator,
    name: str,
    dtype: str = "bfloat16",
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, torch.Tensor]:
    case = operator.case(name)
    return oracle.make_inputs(
        replace(case, dtype=dtype, sizes={**case.sizes, **(sizes or {})}), seed
    )


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def key_cache_name(operator: Operator) -> str:
    return next(spec.name for spec in operator.inputs if spec.name.endswith("key_cache"))


def new_rows(operator: Operator, inputs: Tensors, name: str) -> torch.Tensor:
    """The new tokens' rows of a cache or of its cotangent, ``[B,H,N,D]``."""
    if is_static(operator):
        return inputs[name][:, :, inputs["cache_position"]]
    return inputs[name][:, :, inputs[name].shape[2] - inputs["key_states"].shape[2] :]


def rotated_rows(operator: Operator, inputs: Tensors) -> torch.Tensor:
    """The rows that the operator rotates, ``[B,H,N,D]``."""
    if is_backward(operator):
        return new_rows(operator, inputs, key_cache_name(operator))
    return inputs["key_states"]


def tables(operator: Operator, inputs: Tensors) -> list[torch.Tensor]:
    """cos and sin as ``[B,1,N,D]``."""
    pair = [inputs["cos"], inputs["sin"]]
    return [table.unsqueeze(1) for table in pair] if is_static(operator) else pair


def rotation(
    operator: Operator, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two terms of every rotated element, float64."""
    rows, cos, sin = (tensor.to(torch.float64) for tensor in (rows, cos, sin))
    if is_backward(operator):
        # The transposed rotation is the rotation with its sign turned, of the product.
        return rows * cos, -rotate_half(rows * sin)
    return rows * cos, rotate_half(rows) * sin


def rotated_terms(operator: Operator, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    return rotation(operator, rotated_rows(operator, inputs), *tables(operator, inputs))


def computed_outputs(operator: Operator) -> list[str]:
    if is_backward(operator):
        return ["grad_key_states", "grad_cos", "grad_sin"]
    return ["updated_key_cache"]


def floating(inputs: Tensors) -> dict[str, torch.Tensor]:
    return {name: x for name, x in inputs.items() if x.is_floating_point()}


def states_and_caches(inputs: Tensors) -> dict[str, torch.Tensor]:
    return {name: x for name, x in floating(inputs).items() if name not in ("cos", "sin")}


def patterns(tensor: torch.Tensor) -> torch.Tensor:
    fmt = format_of(tensor.dtype)
    return tensor.view(fmt.bits_dtype).to(torch.int64) & ((1 << 8 * fmt.width) - 1)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(patterns(one), patterns(other))


def share(where: torch.Tensor) -> float:
    return float(where.double().mean())


# All probes


@every_probe
def test_every_probe_is_small_bound_and_says_what_it_exposes(
    operator: Operator, case: Case
) -> None:
    inputs = oracle.make_inputs(case, 0)
    sizes = operator.bind(inputs)
    assert {name: sizes[name] for name in case.sizes} == {**case.sizes}
    assert {name: sizes[name] for name in operator.official} == operator.official
    assert case.sizes["batch_size"] >= 1
    assert case.sizes["new_seq_len"] >= 1
    assert len(case.exposes.split()) >= 3
    assert sum(math.prod(operator.shape(spec, sizes)) for spec in operator.outputs) < 3_000_000


@every_operator
@every_dtype
@pytest.mark.parametrize(
    ("width", "heads"), [(2, 1), (6, 3), (64, 5), (192, 8), (128, 33)], ids=str
)
def test_every_kind_draws_at_every_size_and_type_and_with_empty_axes(
    operator: Operator, dtype: str, width: int, heads: int
) -> None:
    base = operator.probes[0]
    narrow = {"head_dim": width, "num_kv_heads": heads}
    for kind in operator.input_kinds:
        for batch, new, rows in ((2, 2, 3), (1, 1, 1), (2, 0, 3), (2, 2, 2), (0, 1, 2), (2, 0, 0)):
            sizes = {"batch_size": batch, "new_seq_len": new, cache_axis(operator): rows}
            case = replace(base, kind=kind, dtype=dtype, sizes={**sizes, **narrow})
            inputs = oracle.make_inputs(case, 1)
            assert operator.bind(inputs)["head_dim"] == width
            assert {x.dtype for x in floating(inputs).values()} == {getattr(torch, dtype)}


@every_operator
@every_dtype
@pytest.mark.parametrize(
    "narrow", [NARROWEST, NARROW, {"head_dim": 96, "num_kv_heads": 5}], ids=str
)
def test_every_probe_draws_in_every_type_at_other_sizes(
    operator: Operator, dtype: str, narrow: Mapping[str, int]
) -> None:
    for case in operator.probes + operator.general_probes:
        if not case.needs_gpu:
            other = replace(case, dtype=dtype, sizes={**case.sizes, **narrow})
            operator.bind(oracle.make_inputs(other, 0))


@every_operator
@every_dtype
def test_random_probes_hold_no_zero_and_use_all_bits_of_the_significand(
    operator: Operator, dtype: str
) -> None:
    for name, tensor in floating(probe(operator, "random", dtype)).items():
        assert bool((tensor != 0).all()), name
        bits = patterns(tensor)
        for place in range(format_of(dtype).precision - 1):
            assert 0.3 < share((bits >> place) & 1 == 1) < 0.7, (name, place)


@pytest.mark.parametrize(
    ("operator", "name", "batch", "new", "rows"),
    [
        (FORWARD, "first-token", 1, 1, 0),
        (FORWARD, "no-cache", 2, 5, 0),
        (FORWARD, "one-token", 3, 1, 7),
        (FORWARD, "uneven", 1, 31, 33),
        (FORWARD, "uneven-short", 3, 17, 15),
        (FORWARD, "many-batches", 33, 1, 1),
        (FORWARD, "long-prompt", 1, 131, 3),
        (FORWARD, "long-cache", 1, 2, 1030),
        (CONCAT_BACKWARD, "first-token", 1, 1, 0),
        (CONCAT_BACKWARD, "no-cache", 2, 5, 0),
        (CONCAT_BACKWARD, "one-token", 3, 1, 7),
        (CONCAT_BACKWARD, "uneven", 1, 31, 33),
        (CONCAT_BACKWARD, "uneven-short", 3, 17, 15),
        (CONCAT_BACKWARD, "many-batches", 33, 1, 1),
        (CONCAT_BACKWARD, "long-prompt", 1, 131, 3),
        (CONCAT_BACKWARD, "long-cache", 1, 2, 1030),
        *(
            (operator, *probe_sizes)
            for operator in STATICS
            for probe_sizes in (
                ("last-row", 3, 1, 7),
                ("full", 2, 9, 9),
                ("single", 1, 1, 1),
                ("uneven", 1, 31, 33),
                ("many-batches", 33, 1, 2),
                ("long-prompt", 1, 131, 140),
                ("long-cache", 1, 3, 1030),
            )
        ),
    ],
    ids=lambda value: value.id if isinstance(value, Operator) else str(value),
)
def test_probes_of_sizes_have_them(
    operator: Operator, name: str, batch: int, new: int, rows: int
) -> None:
    sizes = operator.case(name).sizes
    assert sizes["batch_size"] == batch
    assert sizes["new_seq_len"] == new
    assert sizes[cache_axis(operator)] == rows


# Which element went where


@every_operator
@every_dtype
def test_keep_and_turn_move_codes_unchanged_that_tell_elements_apart(
    operator: Operator, dtype: str
) -> None:
    smallest = 2.0 ** format_of(dtype).min_exponent
    # float16 has too few patterns for the longest tensors; codes repeat after 16,384.
    distinct = 16_384 if dtype == "float16" else 1 << 30
    for name, cos, sin in (("keep", 1, 0), ("turn", 0, 1)):
        inputs = probe(operator, name, dtype)
        assert bool((inputs["cos"] == cos).all())
        assert bool((inputs["sin"] == sin).all())
        coded = list(states_and_caches(inputs).values())
        for tensor in coded:
            codes = patterns(tensor).flatten()[:distinct]
            assert codes.unique().numel() == codes.numel()
            assert torch.isfinite(tensor).all()
            assert bool((tensor.abs() >= smallest).all())
        for one, other in itertools.combinations(coded, 2):
            count = min(one.numel(), other.numel())
            assert not bool((one.flatten()[:count] == other.flatten()[:count]).any())
        rows = rotated_rows(operator, inputs)
        turned = -rotate_half(rows) if is_backward(operator) else rotate_half(rows)
        wanted = rows if name == "keep" else turned
        output = next(iter(oracle.truth(operator, inputs).outputs.values()))
        found = (
            output
            if is_backward(operator)
            else new_rows(operator, {**inputs, "out": output}, "out")
        )
        assert torch.equal(found, wanted)
        assert not bool((rows == turned).any())


@every_operator
@every_dtype
@pytest.mark.parametrize("narrow", [{}, NARROW, NARROWEST], ids=str)
def test_halves_tells_every_misreading_of_a_half_by_every_element(
    operator: Operator, dtype: str, narrow: Mapping[str, int]
) -> None:
    inputs = probe(operator, "halves", dtype, sizes=narrow)
    rows, (cos, sin) = rotated_rows(operator, inputs), tables(operator, inputs)
    exact = sum(rotation(operator, rows, cos, sin))
    half = rows.shape[-1] // 2
    for table in (cos, sin):
        first, second = table[..., :half], table[..., half:]
        assert first.unique().numel() == second.unique().numel() == 1
    values = [float(table[..., place].flatten()[0]) for table in (cos, sin) for place in (0, -1)]
    assert len(set(values)) == 4
    misread = {
        "first for both": lambda t: torch.cat((t[..., :half], t[..., :half]), dim=-1),
        "second for both": lambda t: torch.cat((t[..., half:], t[..., half:]), dim=-1),
        "swapped": lambda t: torch.cat((t[..., half:], t[..., :half]), dim=-1),
    }
    for how, read in misread.items():
        for wrong in (
            sum(rotation(operator, rows, read(cos), sin)),
            sum(rotation(operator, rows, cos, read(sin))),
        ):
            assert share(wrong != exact) == (1.0 if how == "swapped" else 0.5)


@every_operator
@every_dtype
@pytest.mark.parametrize("narrow", [{}, NARROW], ids=str)
def test_batch_tables_and_position_tables_tell_every_misplaced_table(
    operator: Operator, dtype: str, narrow: Mapping[str, int]
) -> None:
    fmt = format_of(dtype)
    for name, axis in (("batch-tables", 0), ("position-tables", 2)):
        inputs = probe(operator, name, dtype, sizes=narrow)
        rows, (cos, sin) = rotated_rows(operator, inputs), tables(operator, inputs)
        exact = round_float64(sum(rotation(operator, rows, cos, sin)), fmt)
        for shift in range(1, rows.shape[axis]):
            moved = [table.roll(shift, dims=axis) for table in (cos, sin)]
            wrong = round_float64(sum(rotation(operator, rows, *moved)), fmt)
            assert share(wrong != exact) > 0.97


@every_operator
@every_dtype
def test_paired_has_equal_halves_of_random_tables(operator: Operator, dtype: str) -> None:
    for table in tables(operator, probe(operator, "paired", dtype)):
        first, second = table.chunk(2, dim=-1)
        assert torch.equal(first, second)
        assert first.unique().numel() > 100


# Magnitudes


@every_operator
@every_dtype
def test_small_values_has_inputs_and_results_that_an_absolute_tolerance_mistakes_for_zero(
    operator: Operator, dtype: str
) -> None:
    inputs = probe(operator, "small-values", dtype)
    outputs = oracle.truth(operator, inputs).outputs.values()
    for tensor in states_and_caches(inputs).values():
        assert bool((tensor != 0).all())
        assert float(tensor.abs().max()) < 0.01
    for output in outputs:
        assert share(output.abs() < 0.01) > 0.98
        assert bool(output.any())


@every_operator
@every_dtype
@pytest.mark.parametrize("narrow", [{}, NARROW], ids=str)
def test_subnormal_has_subnormal_inputs_products_and_results(
    operator: Operator, dtype: str, narrow: Mapping[str, int]
) -> None:
    inputs = probe(operator, "subnormal", dtype, sizes=narrow)
    fmt = format_of(dtype)
    rows = rotated_rows(operator, inputs).to(torch.float64)
    one, other = rotated_terms(operator, inputs)
    smallest_normal = 2.0**fmt.min_exponent
    for values in (rows, one, other, one + other):
        assert share((values != 0) & (values.abs() < smallest_normal)) > 0.25
    results = round_float64(one + other, fmt)
    assert share((results != 0) & (results.abs() < smallest_normal)) > 0.25


@every_operator
@every_dtype
def test_huge_overflows_in_some_results_and_not_in_others(operator: Operator, dtype: str) -> None:
    fmt = format_of(dtype)
    one, other = rotated_terms(operator, probe(operator, "huge", dtype))
    results = round_float64(one + other, fmt)
    infinite = torch.isinf(results)
    assert 0.02 < share(infinite) < 0.9
    limit = 2.0 ** (fmt.max_exponent + 1)
    early = ((one.abs() >= limit) | (other.abs() >= limit)) & ~infinite
    if is_static(operator):
        # The other layout's tables are at most one, so that no product is larger than its key.
        assert bool(early.any()), "no element overflows early only"
    assert bool((infinite & (one.abs() < limit) & (other.abs() < limit)).any())


# Rounding


def below(value: torch.Tensor, dtype: str) -> torch.Tensor:
    """The bits of a float64 that a type does not keep, of its normal numbers."""
    return value.view(torch.int64) & ((1 << (53 - format_of(dtype).precision)) - 1)


def is_tie(value: torch.Tensor, dtype: str) -> torch.Tensor:
    """Where a float64 lies halfway between two normal numbers of a type: 1000... below."""
    return below(value, dtype) == 1 << (52 - format_of(dtype).precision)


def kept(value: torch.Tensor, dtype: str) -> torch.Tensor:
    """The significand bits that a type keeps, the leading one left out."""
    precision = format_of(dtype).precision
    return (value.view(torch.int64) >> (53 - precision)) & ((1 << (precision - 1)) - 1)


def assert_ties_of_both_kinds(value: torch.Tensor, dtype: str, least: float) -> None:
    tie = is_tie(value, dtype)
    assert share(tie) >= least
    significands = kept(value, dtype)
    assert 1 / 3 < share(significands[tie] & 1 == 1) < 2 / 3
    carries = significands == (1 << (format_of(dtype).precision - 1)) - 1
    assert bool((tie & carries).any())


@every_operator
@every_dtype
@pytest.mark.parametrize("narrow", [{}, NARROW], ids=str)
def test_ties_makes_nearly_half_of_the_rotated_elements_exact_ties(
    operator: Operator, dtype: str, narrow: Mapping[str, int]
) -> None:
    high, low = two_sum(*rotated_terms(operator, probe(operator, "ties", dtype, sizes=narrow)))
    assert not bool(low.any())
    if narrow:
        assert share(is_tie(high, dtype)) >= 0.45
    else:
        assert_ties_of_both_kinds(high, dtype, 0.45)


@every_operator
@every_dtype
def test_near_ties_has_no_tie_and_nearly_half_of_its_elements_just_beside_one(
    operator: Operator, dtype: str
) -> None:
    fmt = format_of(dtype)
    high, low = two_sum(*rotated_terms(operator, probe(operator, "near-ties", dtype)))
    tie = is_tie(high, dtype)
    assert not bool((tie & (low == 0)).any())
    from_tie = (below(high, dtype) - (1 << (52 - fmt.precision))).double()
    # Of the half ulp, one part in 2^(2p-2) is missing; for float32 only `low` shows it.
    distance = from_tie + low / torch.where(high == 0, 1.0, high).abs() * 2.0**52
    near = distance.abs() < 2.0 ** (56 - 3 * fmt.precision)
    assert share(near) > 0.45
    for side in (distance > 0, distance < 0):
        assert share(near & side) > 0.15


@every_operator
@every_dtype
@pytest.mark.parametrize("narrow", [{}, NARROW, NARROWEST], ids=str)
def test_cancellation_leaves_little_of_every_element_of_the_first_half(
    operator: Operator, dtype: str, narrow: Mapping[str, int]
) -> None:
    one, other = rotated_terms(operator, probe(operator, "cancellation", dtype, sizes=narrow))
    half = one.shape[-1] // 2
    value, size = (one + other)[..., :half].abs(), (one.abs() + other.abs())[..., :half]
    assert bool((size > 0).all())
    assert bool((value < size * 2.0 ** (4 - format_of(dtype).precision)).all())
    assert share(value > 0) > 0.3


# Special values


@every_operator
@every_dtype
def test_special_copies_lets_every_pattern_be_copied(operator: Operator, dtype: str) -> None:
    inputs = probe(operator, "special-copies", dtype)
    shift = 16 if dtype == "float32" else 0
    for kind in ("key", "value"):
        name = key_cache_name(operator).replace("key", kind)
        cache = inputs[name]
        kept_rows = torch.ones(cache.shape[2], dtype=torch.bool)
        if is_static(operator):
            kept_rows[inputs["cache_position"]] = False
        elif is_backward(operator):
            kept_rows[cache.shape[2] - inputs["key_states"].shape[2] :] = False
        found = (patterns(cache[:, :, kept_rows]) >> shift).unique()
        assert 65536 - found.numel() == 0, kind
        for pattern in (math.inf, -math.inf):
            assert bool((cache[:, :, kept_rows] == pattern).any())


@every_operator
@every_dtype
@pytest.mark.parametrize("narrow", [NARROW, NARROWEST], ids=str)
def test_special_copies_has_nans_and_a_negative_zero_in_narrow_copies_too(
    operator: Operator, dtype: str, narrow: Mapping[str, int]
) -> None:
    inputs = probe(operator, "special-copies", dtype, sizes=narrow)
    outputs = oracle.truth(operator, inputs).outputs
    sign = 1 << (8 * format_of(dtype).width - 1)
    copied = [
        name for name in outputs if "cache" in name and (is_backward(operator) or "value" in name)
    ]
    for name in copied:
        assert bool(torch.isnan(outputs[name]).any()), name
        assert bool((patterns(outputs[name]) == sign).any()), name


@every_operator
@every_dtype
@pytest.mark.parametrize("narrow", [{}, NARROW, NARROWEST], ids=str)
def test_signalling_nan_copies_are_of_signalling_nans_only(
    operator: Operator, dtype: str, narrow: Mapping[str, int]
) -> None:
    case = next(case for case in operator.general_probes if case.name == "signalling-nan-copies")
    inputs = oracle.make_inputs(replace(case, dtype=dtype, sizes={**case.sizes, **narrow}), 0)
    quiet = 1 << (format_of(dtype).precision - 2)
    outputs = oracle.truth(operator, inputs).outputs
    seen = 0
    for spec in operator.outputs:
        for block in operator.blocks(inputs, spec.name, 10**6):
            if hasattr(block.meaning, "source"):
                found = outputs[spec.name][block.index]
                assert bool(torch.isnan(found).all())
                assert bool((patterns(found) & quiet == 0).all())
                seen += found.numel()
    assert seen
    assert not bool(torch.isnan(inputs["key_states"]).any())


@every_operator
@every_dtype
@pytest.mark.parametrize("narrow", [{}, NARROW], ids=str)
def test_special_rotations_has_every_class_of_result(
    operator: Operator, dtype: str, narrow: Mapping[str, int]
) -> None:
    inputs = probe(operator, "special-rotations", dtype, sizes=narrow)
    outputs = oracle.truth(operator, inputs).outputs
    for name in computed_outputs(operator):
        assert bool(torch.isnan(outputs[name]).any())
        assert 0.1 < share(torch.isfinite(outputs[name])) < 0.99
    rotated = sum(rotated_terms(operator, inputs))
    for value in (math.inf, -math.inf):
        assert bool((rotated == value).any())


@every_operator
@every_dtype
@pytest.mark.parametrize("narrow", [{}, NARROWEST], ids=str)
def test_last_row_nan_puts_nan_into_the_last_rows_and_the_last_old_rows_only(
    operator: Operator, dtype: str, narrow: Mapping[str, int]
) -> None:
    inputs = probe(operator, "last-row-nan", dtype, sizes=narrow)
    for name, tensor in states_and_caches(inputs).items():
        if name == "key_states":
            assert not bool(torch.isnan(tensor).any())
            continue
        with_nan = {row for row in range(tensor.shape[2]) if tensor[:, :, row].isnan().any()}
        last = {tensor.shape[2] - 1}
        if operator is CONCAT_BACKWARD:
            last.add(tensor.shape[2] - inputs["key_states"].shape[2] - 1)
        assert with_nan == last
    if is_static(operator):
        last_row = inputs[key_cache_name(operator)].shape[2] - 1
        assert last_row not in inputs["cache_position"].tolist(), "the last row is not copied"


@named(STATICS)
@every_dtype
@pytest.mark.parametrize("narrow", [{}, NARROW], ids=str)
def test_every_row_to_be_zeroed_or_overwritten_holds_non_finite_numbers(
    operator: Operator, dtype: str, narrow: Mapping[str, int]
) -> None:
    name = "cleared-nan" if is_backward(operator) else "overwritten-nan"
    inputs = probe(operator, name, dtype, sizes=narrow)
    for kind in ("key", "value"):
        cache = key_cache_name(operator).replace("key", kind)
        for row in inputs["cache_position"].tolist():
            line = inputs[cache][:, :, row]
            assert bool(torch.isnan(line).any())
            assert bool(torch.isinf(line).any())
    # Multiplying with zero, or adding to what was there, would show.
    outputs = oracle.truth(operator, inputs).outputs
    if is_backward(operator):
        for output in ("grad_key_cache_input", "grad_value_cache_input"):
            assert not bool(outputs[output][:, :, inputs["cache_position"]].any())
    else:
        assert all(bool(torch.isfinite(output).all()) for output in outputs.values())


# Layout and positions


@every_operator
def test_offset_starts_every_input_inside_a_larger_buffer(operator: Operator) -> None:
    case = operator.case("offset")
    assert set(case.layouts) == {spec.name for spec in operator.inputs}
    assert all(layout.offset > 0 for layout in case.layouts.values())
    others = [other for other in operator.probes if other is not case]
    assert not any(other.layouts for other in others)


@named(STATICS)
@pytest.mark.parametrize("seed", range(4))
def test_position_probes_have_the_orders_they_are_named_for(operator: Operator, seed: int) -> None:
    def positions(name: str) -> list[int]:
        return probe(operator, name, seed=seed)["cache_position"].tolist()

    def steps(name: str) -> list[int]:
        rows = positions(name)
        return [after - before for before, after in itertools.pairwise(rows)]

    assert positions("arange") == [0, 1, 2]
    assert min(steps("shuffled")) < 0 < max(steps("shuffled"))
    assert set(steps("offset-positions")) == {1}
    assert positions("offset-positions")[0] > 0
    assert positions("offset-positions")[-1] < 10
    assert set(steps("descending")) == {-1}
    assert min(steps("gaps")) > 1
    assert min(steps("rising-gaps")) > 0
    assert len(set(steps("rising-gaps"))) > 1, "evenly spaced: the ends would tell all"
    assert positions("last-row") == [6]
    assert sorted(positions("full")) == list(range(9))
    assert min(steps("full")) < 0
    assert positions("single") == [0]


@named(STATICS)
def test_the_random_probe_has_other_positions_for_every_seed(operator: Operator) -> None:
    drawn = {
        tuple(probe(operator, "random", seed=seed)["cache_position"].tolist()) for seed in range(20)
    }
    assert len(drawn) == 20


@named(STATICS)
@pytest.mark.parametrize(("new", "rows"), [(0, 0), (0, 3), (1, 1), (2, 2), (3, 4), (5, 9)])
def test_every_order_of_positions_names_distinct_rows_at_every_size(
    operator: Operator, new: int, rows: int
) -> None:
    base = replace(operator.case("shuffled"), dtype="float16")
    sizes = {**base.sizes, **NARROWEST, "new_seq_len": new, "max_seq_len": rows}
    for kind in operator.input_kinds:
        inputs = oracle.make_inputs(replace(base, kind=kind, sizes=sizes), 0)
        operator.bind(inputs)


# Sums over heads


def head_terms(operator: Operator, inputs: Tensors) -> dict[str, torch.Tensor]:
    """The terms of grad_cos and grad_sin, float64 ``[H,B,N,D]``."""
    rows = rotated_rows(operator, inputs).to(torch.float64)
    key = inputs["key_states"].to(torch.float64)
    return {
        "grad_cos": (rows * key).transpose(0, 1),
        "grad_sin": (rows * rotate_half(key)).transpose(0, 1),
    }


@named(BACKWARDS)
@every_dtype
@pytest.mark.parametrize("heads", [1, 3, 8, 10, 33])
def test_head_codes_names_the_heads_that_were_added(
    operator: Operator, dtype: str, heads: int
) -> None:
    narrow = {"num_kv_heads": heads, "head_dim": 6}
    for values in head_terms(operator, probe(operator, "head-codes", dtype, sizes=narrow)).values():
        per_column = values.flatten(1).abs()
        fmt = format_of(dtype)
        total = per_column.sum(0)
        assert torch.equal(round_float64(total, fmt).double(), total)
        for head in range(heads):
            # The sum without any one head, or with it twice, differs somewhere.
            assert bool((per_column[head] > 0).any())
        for column in per_column.T[:24].tolist():
            present = [value for value in column if value]
            assert len(set(present)) == len(present), "two heads have one code"


def sum_in_type(terms: torch.Tensor, order: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros_like(terms[0], dtype=dtype)
    for head in order:
        total = total + terms[head].to(dtype)
    return total


@named(BACKWARDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_head_absorption_shows_every_order_of_adding_in_the_type(
    operator: Operator, dtype: str
) -> None:
    rng = random.Random(9)
    kind = getattr(torch, dtype)
    inputs = probe(operator, "head-absorption", dtype)
    heads = inputs["key_states"].shape[1]
    for name, terms in head_terms(operator, inputs).items():
        flat = terms.flatten(1)
        bounds = interval(flat, "stored_intermediates", format_of(dtype))
        orders = [list(range(heads)), list(reversed(range(heads)))]
        orders += [rng.sample(range(heads), heads) for _ in range(20)]
        for order in orders:
            half = heads // 2
            halves = sum_in_type(flat, order[:half], kind) + sum_in_type(flat, order[half:], kind)
            for total in (sum_in_type(flat, order, kind), halves):
                rejected = ~bounds.accepts(total)
                assert share(rejected) > 0.05, (name, order)
        honest = flat.to(torch.float32).sum(0).to(kind)
        assert bool(bounds.accepts(honest).all())


@named(BACKWARDS)
@every_dtype
@pytest.mark.parametrize("narrow", [{}, NARROW, {"num_kv_heads": 33, "head_dim": 10}], ids=str)
def test_head_cancellation_leaves_little_of_every_sum(
    operator: Operator, dtype: str, narrow: Mapping[str, int]
) -> None:
    inputs = probe(operator, "head-cancellation", dtype, sizes=narrow)
    for terms in head_terms(operator, inputs).values():
        total, size = terms.sum(0).abs(), terms.abs().sum(0)
        assert bool((total < size / 16).all())
        assert share(total > 0) > 0.9


@named(BACKWARDS)
@every_dtype
@pytest.mark.parametrize("heads", [2, 3, 8, 10, 33])
def test_head_ties_makes_every_sum_over_heads_an_exact_tie(
    operator: Operator, dtype: str, heads: int
) -> None:
    inputs = probe(operator, "head-ties", dtype, sizes={"num_kv_heads": heads})
    for terms in head_terms(operator, inputs).values():
        assert_ties_of_both_kinds(terms.sum(0), dtype, 1.0)


@named(BACKWARDS)
def test_head_powers_tell_the_sum_from_a_mean_and_from_every_single_head(
    operator: Operator,
) -> None:
    case = next(case for case in operator.general_probes if case.name == "head-powers")
    outputs = oracle.truth(operator, oracle.make_inputs(case, 0)).outputs
    assert outputs["grad_cos"].unique().tolist() == [273 - 1]  # 273 is a tie; even is 272
    assert outputs["grad_sin"].abs().unique().tolist() == [272]


@named(BACKWARDS)
def test_head_large_first_is_absorbed_when_heads_are_added_one_by_one_in_bfloat16(
    operator: Operator,
) -> None:
    case = next(case for case in operator.general_probes if case.name == "head-large-first")
    inputs = oracle.make_inputs(case, 0)
    assert oracle.truth(operator, inputs).outputs["grad_cos"].unique().tolist() == [288]
    terms = head_terms(operator, inputs)["grad_cos"].flatten(1)
    assert terms.sum(0).unique().tolist() == [287]
    absorbed = sum_in_type(terms, range(32), torch.bfloat16)
    assert absorbed.unique().tolist() == [256]
    assert not bool(interval(terms, "bounded_error", format_of("bfloat16")).accepts(absorbed).any())


def test_ties_are_ties_by_rational_arithmetic_too() -> None:
    """The bit test above, checked on one number of each kind."""
    values = torch.tensor([1 + 2.0**-8, 1 + 2.0**-7, 1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert is_tie(values, "bfloat16").tolist() == [True, False, False]
    half_ulp = power_of_two(-8)
    assert round_to(1 + half_ulp, BF16) == 1
    assert round_to(1 + 3 * half_ulp, BF16) == 1 + 4 * half_ulp
