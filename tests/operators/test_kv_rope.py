"""The family's meaning against rational arithmetic and differences, and what its probes promise."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from importlib.resources import files

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from oracle import certified
from oracle.budget import interval
from oracle.definition import Case, Operator
from oracle.rounding import BFLOAT16, round_float64
from tests import rational
from tests.rational import BF16, bits_of, correct_bits, exact_outputs, power_of_two, round_to

FORWARD = oracle.find_operator("kv_rope.concat.forward")
BACKWARD = oracle.find_operator("kv_rope.static.backward")
OPERATORS = (FORWARD, BACKWARD)

# Pairwise different, so that no swapped pair of axes fits.
SMALL_SIZES: Mapping[str, dict[str, int]] = {
    FORWARD.id: {
        "batch_size": 2,
        "num_kv_heads": 3,
        "new_seq_len": 5,
        "current_seq_len": 7,
        "head_dim": 8,
    },
    BACKWARD.id: {
        "batch_size": 2,
        "num_kv_heads": 3,
        "new_seq_len": 5,
        "max_seq_len": 11,
        "head_dim": 8,
    },
}
KINDS = ("normal", "wide", "subnormal", "special", "dyadic", "huge")

seeds = st.integers(0, 2**32 - 1)
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.id)
every_probe = pytest.mark.parametrize(
    ("operator", "case"),
    [
        pytest.param(operator, case, id=f"{operator.id}-{case.name}")
        for operator in OPERATORS
        for case in operator.probes
    ],
)


def random_pattern(kind: str, rng: random.Random) -> int:
    """One bfloat16 pattern: magnitudes near one, from 2^-70 to 2^60, subnormal, any bits at all,
    one of few dyadic numbers, or past 2^53, where products overflow."""
    magnitude = {
        "normal": lambda: rng.randrange(119 << 7, 129 << 7),
        "wide": lambda: rng.randrange(57 << 7, 187 << 7),
        "subnormal": lambda: rng.choice((rng.getrandbits(7), rng.randrange(60 << 7, 130 << 7))),
        "special": lambda: rng.getrandbits(15),
        "dyadic": lambda: rng.choice((0x3F80, 0x4000, 0x3F00, 0x4040, 0x3FE0)),
        "huge": lambda: rng.choice((rng.randrange(180 << 7, 255 << 7), 0x3F80, 0x3F7F)),
    }[kind]()
    return magnitude | rng.getrandbits(1) << 15


def random_inputs(
    operator: Operator, sizes: Mapping[str, int], kind: str, rng: random.Random
) -> dict[str, torch.Tensor]:
    """Inputs of any sizes: random bits of a kind, and positions in any order."""
    inputs = {}
    for spec in operator.inputs:
        shape = operator.shape(spec, sizes)
        if spec.indexes is not None:
            rows = rng.sample(range(sizes[spec.indexes]), shape[0])
            inputs[spec.name] = torch.tensor(rows, dtype=torch.int64)
        else:
            patterns = [random_pattern(kind, rng) for _ in range(math.prod(shape))]
            inputs[spec.name] = rational.tensor_of(patterns, shape, BF16)
    return inputs


def in_order(operator: Operator, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [inputs[spec.name] for spec in operator.inputs]


def assert_truth_is_rational(operator: Operator, inputs: Mapping[str, torch.Tensor]) -> int:
    """Compare every element of every output; return how many were computed sums."""
    found = oracle.truth(operator, inputs).outputs
    computed = 0
    expected = exact_outputs(operator.id, in_order(operator, inputs))
    assert list(found) == list(expected)
    for name, output in expected.items():
        assert tuple(found[name].shape) == output.shape
        for index, bits in zip(output.indices(), bits_of(found[name]), strict=True):
            element = output.element(index)
            if element.region != "computed":
                assert bits == correct_bits(element, BF16), (name, index)
                continue
            computed += 1
            value = rational.decode(bits, BF16)
            assert value == round_to(element.exact, BF16), (name, index)
    return computed


# Truth


@every_operator
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4)
@given(seed=seeds)
def test_truth_is_the_rational_answer_at_every_element(
    operator: Operator, kind: str, seed: int
) -> None:
    sizes = SMALL_SIZES[operator.id]
    inputs = random_inputs(operator, sizes, kind, random.Random(seed))
    computed = assert_truth_is_rational(operator, inputs)
    assert computed == {FORWARD.id: 2 * 3 * 5 * 8, BACKWARD.id: 2 * 5 * 8 * (3 + 2)}[operator.id]


@every_operator
@pytest.mark.parametrize(
    "axis", ["batch_size", "num_kv_heads", "new_seq_len", "cached", "head_dim"]
)
@pytest.mark.parametrize("smallest", [True, False], ids=["smallest", "next"])
def test_truth_is_the_rational_answer_at_the_smallest_sizes(
    operator: Operator, axis: str, smallest: bool
) -> None:
    sizes = dict(SMALL_SIZES[operator.id])
    least = {"num_kv_heads": 1, "head_dim": 2}.get(axis, 0)
    size = least if smallest else least + (2 if axis == "head_dim" else 1)
    if axis == "cached":
        axis = "current_seq_len" if operator is FORWARD else "max_seq_len"
        if operator is BACKWARD:
            sizes["new_seq_len"] = size
    sizes[axis] = size
    assert_truth_is_rational(operator, random_inputs(operator, sizes, "normal", random.Random(1)))


@pytest.mark.parametrize("limit", [1, None])
def test_forward_tables_of_one_row_serve_every_batch_entry(
    limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is not None:
        monkeypatch.setattr(certified, "block_elements", lambda device: limit)  # noqa: ARG005
    inputs = random_inputs(FORWARD, SMALL_SIZES[FORWARD.id], "normal", random.Random(2))
    for rows in ({"cos"}, {"sin"}, {"cos", "sin"}):
        narrow = {name: x[:1] if name in rows else x for name, x in inputs.items()}
        assert_truth_is_rational(FORWARD, narrow)


@every_operator
def test_truth_reads_inputs_with_any_strides(operator: Operator) -> None:
    inputs = random_inputs(operator, SMALL_SIZES[operator.id], "special", random.Random(3))
    strided = {}
    for name, tensor in inputs.items():
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 1, dtype=tensor.dtype)
        view = wide[..., ::2]
        view.copy_(tensor)
        strided[name] = (
            view.transpose(0, -1).contiguous().transpose(0, -1) if view.dim() == 4 else view
        )
        assert tensor.dim() < 3 or not strided[name].is_contiguous()
    assert_truth_is_rational(operator, strided)


# Reference


@every_operator
@settings(max_examples=5)
@given(seed=seeds)
def test_reference_in_float64_is_exact_on_dyadic_inputs(operator: Operator, seed: int) -> None:
    inputs = in_order(
        operator, random_inputs(operator, SMALL_SIZES[operator.id], "dyadic", random.Random(seed))
    )
    outputs = operator.reference(inputs, torch.float64)
    expected = exact_outputs(operator.id, inputs)
    assert len(outputs) == len(expected)
    for output, exact in zip(outputs, expected.values(), strict=True):
        assert output.dtype == torch.float64
        assert tuple(output.shape) == exact.shape
        values = [Fraction(value) for value in output.flatten().tolist()]
        assert values == [exact.element(index).exact for index in exact.indices()]


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def static_forward(
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward that ``kv_rope.static.backward`` is the derivative of."""
    rotated = key * cos[:, None] + rotate_half(key) * sin[:, None]
    return (
        key_cache.index_copy(2, position, rotated),
        value_cache.index_copy(2, position, value),
    )


def central_differences(
    forward: Callable[..., tuple[torch.Tensor, ...]],
    inputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], int]:
    """Derivatives of <forward(inputs), cotangents> by every entry, with step 1, and their number.

    The forward is linear in each entry, so this step has no truncation error.
    """
    inputs = [tensor.clone() for tensor in inputs]
    checked = 0

    def inner() -> float:
        pairs = zip(forward(*inputs), cotangents, strict=True)
        return sum(float((output * weight).sum()) for output, weight in pairs)

    gradients = []
    for tensor in inputs:
        gradient = torch.full_like(tensor, math.nan)
        entries, slopes = tensor.view(-1), gradient.view(-1)
        for place, kept in enumerate(entries.tolist()):
            entries[place] = kept + 1
            above = inner()
            entries[place] = kept - 1
            below = inner()
            entries[place] = kept
            slopes[place] = (above - below) / 2
            checked += 1
        gradients.append(gradient)
    return gradients, checked


# Entries of key_states, value_states, cos, sin and the two caches at B2 H3 N5 M11 D8.
ENTRIES = 2 * (2 * 3 * 5 * 8) + 2 * (2 * 5 * 8) + 2 * (2 * 3 * 11 * 8)
POSITION = torch.tensor([7, 2, 9, 0, 4])


def shapes_of_static_forward() -> list[tuple[int, ...]]:
    return [(2, 3, 5, 8), (2, 3, 5, 8), (2, 5, 8), (2, 5, 8), (2, 3, 11, 8), (2, 3, 11, 8)]


def test_backward_reference_is_the_central_difference_of_the_forward_at_every_entry() -> None:
    generator = torch.Generator().manual_seed(20)
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in shapes_of_static_forward()
    ]
    weights = [torch.randn(2, 3, 11, 8, generator=generator, dtype=torch.float64) for _ in range(2)]

    slopes, checked = central_differences(
        lambda *args: static_forward(*args, POSITION), inputs, weights
    )
    assert checked == ENTRIES

    key, _, cos, sin, _, _ = inputs
    gradients = BACKWARD.reference([*weights, key, cos, sin, POSITION], torch.float64)
    assert sum(gradient.numel() for gradient in gradients) == ENTRIES
    for gradient, slope in zip(gradients, slopes, strict=True):
        assert gradient.shape == slope.shape
        assert float((gradient - slope).abs().max()) < 1e-12


def test_backward_truth_is_the_rounded_central_difference_of_the_forward_at_every_entry() -> None:
    generator = torch.Generator().manual_seed(21)

    def dyadic(shape: tuple[int, ...]) -> torch.Tensor:
        # 8 bits at most: bfloat16 numbers whose differences float64 takes without rounding.
        return torch.randint(-127, 128, shape, generator=generator).to(torch.float64) / 8

    inputs = [dyadic(shape) for shape in shapes_of_static_forward()]
    weights = [dyadic((2, 3, 11, 8)) for _ in range(2)]
    slopes, checked = central_differences(
        lambda *args: static_forward(*args, POSITION), inputs, weights
    )
    assert checked == ENTRIES

    key, _, cos, sin, _, _ = inputs
    given_inputs = [tensor.to(torch.bfloat16) for tensor in (*weights, key, cos, sin)]
    names = [spec.name for spec in BACKWARD.inputs]
    truth = oracle.truth(BACKWARD, dict(zip(names, [*given_inputs, POSITION], strict=True)))
    rounded = 0
    for output, slope in zip(truth.outputs.values(), slopes, strict=True):
        assert output.shape == slope.shape
        for value, exact in zip(output.flatten().tolist(), slope.flatten().tolist(), strict=True):
            assert Fraction(value) == round_to(Fraction(exact), BF16)
            rounded += value != exact
    assert rounded > 100


def test_the_gradient_of_the_forward_reference_is_the_exact_backward() -> None:
    inputs = in_order(
        FORWARD, random_inputs(FORWARD, SMALL_SIZES[FORWARD.id], "dyadic", random.Random(22))
    )
    leaves = [tensor.to(torch.float64).requires_grad_() for tensor in inputs]
    outputs = FORWARD.reference(leaves, torch.float64)
    weights = [
        random_inputs(
            FORWARD, {**SMALL_SIZES[FORWARD.id], "current_seq_len": 12}, "dyadic", random.Random(n)
        )["key_cache"]
        for n in (23, 24)
    ]
    torch.autograd.backward(outputs, [weight.to(torch.float64) for weight in weights])
    key, _, cos, sin, _, _ = inputs
    exact = exact_outputs("kv_rope.concat.backward", [*weights, key, cos, sin])
    assert len(exact) == len(leaves)
    for leaf, output in zip(leaves, exact.values(), strict=True):
        assert leaf.grad is not None
        found = [Fraction(value) for value in leaf.grad.flatten().tolist()]
        assert found == [output.element(index).exact for index in output.indices()]


# Official suites


@every_operator
def test_the_official_suite_is_the_published_one_in_its_order(operator: Operator) -> None:
    shipped = json.loads(files("oracle").joinpath("suites/sol_execbench.json").read_text("utf-8"))
    (suite,) = operator.suites
    (published,) = (each for each in shipped["suites"] if each["id"] == suite.id)
    assert len(suite.cases) == len(published["cases"]) == 16
    constants = {axis: published["constants"][axis] for axis in ("num_kv_heads", "head_dim")}
    assert operator.official == constants
    assert [spec.name for spec in operator.inputs] == list(published["inputs"])
    assert [spec.name for spec in operator.outputs] == list(published["outputs"])
    for spec in (*operator.inputs, *operator.outputs):
        axes = {**published["inputs"], **published["outputs"]}[spec.name]
        assert list(spec.axes) == axes
    for case, entry in zip(suite.cases, published["cases"], strict=True):
        times = {"scoring_baseline_us", "sol_us"}
        assert {**case.sizes} == {
            **constants,
            **{name: size for name, size in entry.items() if name not in times},
        }
        assert {**case.published} == {name: entry[name] for name in times}
        assert case.random
        assert case.dtype == published["dtype"]


# Probes: each must have the property that it is said to expose faults by.


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
    assert sum(operator_output_sizes(operator, sizes)) < 3_000_000


def operator_output_sizes(operator: Operator, sizes: Mapping[str, int]) -> list[int]:
    return [math.prod(operator.shape(spec, sizes)) for spec in operator.outputs]


@pytest.mark.parametrize(
    ("name", "batch", "new", "rows"),
    [
        ("first-token", 1, 1, 0),
        ("no-cache", 2, 5, 0),
        ("one-token", 3, 1, 7),
        ("uneven", 1, 31, 33),
        ("uneven-short", 3, 17, 15),
        ("many-batches", 33, 1, 1),
        ("long-prompt", 1, 131, 3),
        ("long-cache", 1, 2, 1030),
    ],
)
def test_forward_probes_of_sizes_have_them(name: str, batch: int, new: int, rows: int) -> None:
    sizes = FORWARD.case(name).sizes
    assert (sizes["batch_size"], sizes["new_seq_len"], sizes["current_seq_len"]) == (
        batch,
        new,
        rows,
    )


@pytest.mark.parametrize(
    ("name", "batch", "new", "rows"),
    [
        ("last-row", 3, 1, 7),
        ("full", 2, 9, 9),
        ("single", 1, 1, 1),
        ("uneven", 1, 31, 33),
        ("many-batches", 33, 1, 2),
        ("long-prompt", 1, 131, 140),
        ("long-cache", 1, 3, 1030),
    ],
)
def test_backward_probes_of_sizes_have_them(name: str, batch: int, new: int, rows: int) -> None:
    sizes = BACKWARD.case(name).sizes
    assert (sizes["batch_size"], sizes["new_seq_len"], sizes["max_seq_len"]) == (batch, new, rows)


def rotated_rows(operator: Operator, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The rows that the operator rotates, ``[B,H,N,D]``."""
    if operator is FORWARD:
        return inputs["key_states"]
    return inputs["grad_key_cache"][:, :, inputs["cache_position"]]


def tables(operator: Operator, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """cos and sin as ``[B,1,N,D]``."""
    pair = [inputs["cos"], inputs["sin"]]
    return pair if operator is FORWARD else [table.unsqueeze(1) for table in pair]


def rotation(
    operator: Operator, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two terms of every rotated element, float64."""
    rows, cos, sin = (tensor.to(torch.float64) for tensor in (rows, cos, sin))
    if operator is FORWARD:
        return rows * cos, rotate_half(rows) * sin
    # The transposed rotation is the rotation with its sign turned, of the product.
    return rows * cos, -rotate_half(rows * sin)


def rotated_terms(
    operator: Operator, inputs: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return rotation(operator, rotated_rows(operator, inputs), *tables(operator, inputs))


def probe(operator: Operator, name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return oracle.make_inputs(operator.case(name), seed)


def sixteen_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16).to(torch.int64) & 0xFFFF


@every_operator
def test_keep_and_turn_move_codes_unchanged_that_tell_elements_apart(operator: Operator) -> None:
    for name, cos, sin in (("keep", 1, 0), ("turn", 0, 1)):
        inputs = probe(operator, name)
        assert bool((inputs["cos"] == cos).all())
        assert bool((inputs["sin"] == sin).all())
        coded = [
            tensor
            for tensor_name, tensor in inputs.items()
            if tensor_name not in ("cos", "sin", "cache_position")
        ]
        for tensor in coded:
            codes = sixteen_bits(tensor).flatten()
            assert codes.unique().numel() == codes.numel()
            assert torch.isfinite(tensor).all()
            assert bool((tensor.abs() >= 2.0**-126).all())
        for first, one in enumerate(coded):
            for other in coded[first + 1 :]:
                count = min(one.numel(), other.numel())
                assert not torch.equal(
                    one.flatten()[:count].view(torch.int16),
                    other.flatten()[:count].view(torch.int16),
                )
                same = one.flatten()[:count] == other.flatten()[:count]
                assert not same.any()
        rows = rotated_rows(operator, inputs)
        turned = -rotate_half(rows) if operator is BACKWARD else rotate_half(rows)
        wanted = rows if name == "keep" else turned
        output = next(iter(oracle.truth(operator, inputs).outputs.values()))
        found = output[:, :, -rows.shape[2] :] if operator is FORWARD else output
        assert torch.equal(found, wanted)
        assert not bool((rows == turned).any())


@every_operator
def test_halves_tells_every_misreading_of_a_half_by_every_element(operator: Operator) -> None:
    inputs = probe(operator, "halves")
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
            share = float((wrong != exact).double().mean())
            assert share == (1.0 if how == "swapped" else 0.5)


@every_operator
def test_batch_tables_and_position_tables_tell_every_misplaced_table(operator: Operator) -> None:
    for name, axis in (("batch-tables", 0), ("position-tables", 2)):
        inputs = probe(operator, name)
        rows, (cos, sin) = rotated_rows(operator, inputs), tables(operator, inputs)
        exact = round_float64(sum(rotation(operator, rows, cos, sin)), BFLOAT16)
        for shift in range(1, rows.shape[axis]):
            moved = [table.roll(shift, dims=axis) for table in (cos, sin)]
            wrong = round_float64(sum(rotation(operator, rows, *moved)), BFLOAT16)
            assert float((wrong != exact).double().mean()) > 0.99


@every_operator
def test_paired_has_equal_halves_of_random_tables(operator: Operator) -> None:
    for table in tables(operator, probe(operator, "paired")):
        first, second = table.chunk(2, dim=-1)
        assert torch.equal(first, second)
        assert first.unique().numel() > 100


@every_operator
def test_small_values_has_inputs_and_results_that_an_absolute_tolerance_mistakes_for_zero(
    operator: Operator,
) -> None:
    inputs = probe(operator, "small-values")
    scaled = [
        tensor for name, tensor in inputs.items() if name not in ("cos", "sin", "cache_position")
    ]
    outputs = oracle.truth(operator, inputs).outputs.values()
    for tensor in (*scaled, *outputs):
        assert float(tensor.abs().max()) < 0.02
    for output in outputs:
        assert bool(output.any())


def is_tie(value: torch.Tensor) -> torch.Tensor:
    """Where a normal float64 lies halfway between two bfloat16 numbers: 45 bits more, 1000..."""
    return (value.view(torch.int64) & ((1 << 45) - 1)) == 1 << 44


def last_kept_bit(value: torch.Tensor) -> torch.Tensor:
    return (value.view(torch.int64) >> 45) & 1


def carries(value: torch.Tensor) -> torch.Tensor:
    """Where all significand bits that bfloat16 keeps are ones."""
    return ((value.view(torch.int64) >> 45) & 0x7F) == 0x7F


def assert_ties_of_both_kinds(value: torch.Tensor, share: float) -> None:
    tie = is_tie(value)
    assert float(tie.double().mean()) >= share
    odd = last_kept_bit(value)[tie].double().mean()
    assert 0.4 < float(odd) < 0.6
    assert bool((tie & carries(value)).any())


@every_operator
def test_ties_makes_nearly_half_of_the_rotated_elements_exact_ties(operator: Operator) -> None:
    assert_ties_of_both_kinds(sum(rotated_terms(operator, probe(operator, "ties"))), 0.45)


@every_operator
def test_near_ties_has_no_tie_and_nearly_half_of_its_elements_within_2_to_minus_20_of_one(
    operator: Operator,
) -> None:
    value = sum(rotated_terms(operator, probe(operator, "near-ties")))
    assert not bool(is_tie(value).any())
    below_tie = (value.view(torch.int64) & ((1 << 45) - 1)) - (1 << 44)
    # In units of 2^-52 of the binade, so 2^32 is 2^-20 of at least half the value.
    near = below_tie.abs() < 1 << 32
    assert float(near.double().mean()) > 0.45
    for side in (below_tie > 0, below_tie < 0):
        assert float((near & side).double().mean()) > 0.15
    twice = value.to(torch.float32).to(torch.bfloat16)
    assert torch.equal(value.to(torch.float32).to(torch.float64), value)
    assert torch.equal(twice, round_float64(value, BFLOAT16))


@every_operator
def test_cancellation_leaves_little_of_every_element_of_the_first_half(operator: Operator) -> None:
    one, other = rotated_terms(operator, probe(operator, "cancellation"))
    half = one.shape[-1] // 2
    value, size = (one + other)[..., :half].abs(), (one.abs() + other.abs())[..., :half]
    assert bool((size > 0).all())
    assert bool((value < size / 16).all())
    assert float((value > 0).double().mean()) > 0.5


@every_operator
def test_subnormal_has_subnormal_inputs_products_and_results(operator: Operator) -> None:
    inputs = probe(operator, "subnormal")
    rows = rotated_rows(operator, inputs).to(torch.float64)
    one, other = rotated_terms(operator, inputs)
    smallest_normal = 2.0**-126
    for values in (rows, one, other, one + other):
        share = ((values != 0) & (values.abs() < smallest_normal)).double().mean()
        assert float(share) > 0.25
    results = round_float64(one + other, BFLOAT16)
    kept = (results != 0) & (results.abs() < smallest_normal)
    assert float(kept.double().mean()) > 0.25


@every_operator
def test_huge_overflows_in_some_results_and_not_in_others(operator: Operator) -> None:
    one, other = rotated_terms(operator, probe(operator, "huge"))
    results = round_float64(one + other, BFLOAT16)
    infinite = torch.isinf(results)
    assert 0.02 < float(infinite.double().mean()) < 0.9
    limit = 2.0**128
    early = ((one.abs() >= limit) | (other.abs() >= limit)) & ~infinite
    assert bool(early.any()), "no element overflows early only"
    assert bool((infinite & (one.abs() < limit) & (other.abs() < limit)).any())


@every_operator
def test_special_copies_lets_every_pattern_be_copied(operator: Operator) -> None:
    inputs = probe(operator, "special-copies")
    for kind in ("key", "value"):
        if operator is FORWARD:
            copied = [inputs[f"{kind}_cache"]]
        else:
            cache, position = inputs[f"grad_{kind}_cache"], inputs["cache_position"]
            kept = torch.ones(cache.shape[2], dtype=torch.bool)
            kept[position] = False
            copied = [cache[:, :, kept]]
            if kind == "value":
                copied.append(cache[:, :, position])
        patterns = torch.cat([sixteen_bits(tensor).flatten() for tensor in copied]).unique()
        missing = 65536 - patterns.numel()
        assert missing == 0, kind


@every_operator
def test_special_rotations_has_every_class_of_result(operator: Operator) -> None:
    inputs = probe(operator, "special-rotations")
    outputs = oracle.truth(operator, inputs).outputs
    rotated_and_summed = {
        FORWARD.id: ["updated_key_cache"],
        BACKWARD.id: ["grad_key_states", "grad_cos", "grad_sin"],
    }[operator.id]
    for name in rotated_and_summed:
        assert bool(torch.isnan(outputs[name]).any())
        assert 0.1 < float(torch.isfinite(outputs[name]).double().mean()) < 0.99
    rotated = sum(rotated_terms(operator, inputs))
    for value in (math.inf, -math.inf):
        assert bool((rotated == value).any())


def test_last_row_nan_puts_nan_into_the_last_rows_only() -> None:
    inputs = probe(FORWARD, "last-row-nan")
    for name in ("value_states", "key_cache", "value_cache"):
        assert bool(torch.isnan(inputs[name][:, :, -1]).any())
        assert not bool(torch.isnan(inputs[name][:, :, :-1]).any())
    backward = probe(BACKWARD, "last-row-nan")
    for name in ("grad_key_cache", "grad_value_cache"):
        assert bool(torch.isnan(backward[name][:, :, -1]).any())
        assert not bool(torch.isnan(backward[name][:, :, :-1]).any())
    last = backward["grad_key_cache"].shape[2] - 1
    assert last not in backward["cache_position"].tolist(), "the last row is zeroed, not copied"


def test_cleared_nan_puts_non_finite_numbers_into_every_row_to_be_zeroed() -> None:
    inputs = probe(BACKWARD, "cleared-nan")
    for name in ("grad_key_cache", "grad_value_cache"):
        for row in inputs["cache_position"].tolist():
            line = inputs[name][:, :, row]
            assert bool(torch.isnan(line).any())
            assert bool(torch.isinf(line).any())
    # Multiplying with zero would show.
    outputs = oracle.truth(BACKWARD, inputs).outputs
    for name in ("grad_key_cache_input", "grad_value_cache_input"):
        assert not bool(outputs[name][:, :, inputs["cache_position"]].any())


@every_operator
def test_offset_starts_every_input_inside_a_larger_buffer(operator: Operator) -> None:
    case = operator.case("offset")
    assert set(case.layouts) == {spec.name for spec in operator.inputs}
    assert all(layout.offset > 0 for layout in case.layouts.values())
    others = [other for other in operator.probes if other is not case]
    assert not any(other.layouts for other in others)


@pytest.mark.parametrize("seed", range(4))
def test_position_probes_have_the_orders_they_are_named_for(seed: int) -> None:
    def positions(name: str) -> list[int]:
        return probe(BACKWARD, name, seed)["cache_position"].tolist()

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


def test_the_random_probe_has_other_positions_for_every_seed() -> None:
    drawn = {
        tuple(probe(BACKWARD, "random", seed)["cache_position"].tolist()) for seed in range(20)
    }
    assert len(drawn) == 20


# Sums over heads


def head_terms(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The terms of grad_cos and grad_sin, float64 ``[H,B,N,D]``."""
    rows = rotated_rows(BACKWARD, inputs).to(torch.float64)
    key = inputs["key_states"].to(torch.float64)
    return {
        "grad_cos": (rows * key).transpose(0, 1),
        "grad_sin": (rows * rotate_half(key)).transpose(0, 1),
    }


def test_head_codes_names_the_heads_that_were_added() -> None:
    terms = head_terms(probe(BACKWARD, "head-codes"))
    for values in terms.values():
        per_head = values.flatten(1).abs()
        assert bool((per_head == per_head[:, :1]).all())
        assert per_head[:, 0].tolist() == [2.0**head for head in range(8)]
    # Every subset of heads has another sum, and all are bfloat16 numbers.
    assert float(terms["grad_cos"].sum(0).unique()) == 255


def bfloat16_sum(terms: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    total = torch.zeros_like(terms[0], dtype=torch.bfloat16)
    for head in order:
        total = total + terms[head].to(torch.bfloat16)
    return total


def test_head_absorption_shows_every_order_of_adding_in_bfloat16() -> None:
    rng = random.Random(9)
    for name, terms in head_terms(probe(BACKWARD, "head-absorption")).items():
        flat = terms.flatten(1)
        bounds = interval(flat, "stored_intermediates", BFLOAT16)
        orders = [list(range(8)), list(reversed(range(8)))]
        orders += [rng.sample(range(8), 8) for _ in range(20)]
        for order in orders:
            halves = bfloat16_sum(flat, order[:4]) + bfloat16_sum(flat, order[4:])
            for total in (bfloat16_sum(flat, order), halves):
                rejected = ~bounds.accepts(total)
                assert float(rejected.double().mean()) > 0.05, (name, order)
        honest = flat.to(torch.float32).sum(0).to(torch.bfloat16)
        assert bool(bounds.accepts(honest).all())


def test_head_cancellation_leaves_little_of_every_sum() -> None:
    for terms in head_terms(probe(BACKWARD, "head-cancellation")).values():
        total, size = terms.sum(0).abs(), terms.abs().sum(0)
        assert bool((total < size / 16).all())
        assert float((total > 0).double().mean()) > 0.9


def test_head_ties_makes_every_sum_over_heads_an_exact_tie() -> None:
    for terms in head_terms(probe(BACKWARD, "head-ties")).values():
        assert_ties_of_both_kinds(terms.sum(0), 1.0)


def test_ties_are_ties_by_rational_arithmetic_too() -> None:
    """The bit test above, checked on one number of each kind."""
    values = torch.tensor([1 + 2.0**-8, 1 + 2.0**-7, 1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert is_tie(values).tolist() == [True, False, False]
    half_ulp = power_of_two(-8)
    assert round_to(1 + half_ulp, BF16) == 1
    assert round_to(1 + 3 * half_ulp, BF16) == 1 + 4 * half_ulp
