"""The family's meaning against rational arithmetic and differences, its blocks and its suites."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from importlib.resources import files

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from oracle import certified
from oracle.definition import InvalidInput, Operator, Summed
from oracle.inputs import Draws
from tests import rational
from tests.rational import (
    BF16,
    FORMAT_OF_DTYPE,
    FP16,
    FP32,
    Format,
    bits_of,
    correct_bits,
    exact_outputs,
    round_to,
    round_to_bits,
)

FORWARD = oracle.find_operator("kv_rope.concat.forward")
CONCAT_BACKWARD = oracle.find_operator("kv_rope.concat.backward")
STATIC_FORWARD = oracle.find_operator("kv_rope.static.forward")
BACKWARD = oracle.find_operator("kv_rope.static.backward")
ALL_OPERATORS = (FORWARD, CONCAT_BACKWARD, STATIC_FORWARD, BACKWARD)
FORWARDS = (FORWARD, STATIC_FORWARD)
# The two that have a published suite.
OPERATORS = (FORWARD, BACKWARD)

# Pairwise different, so that no swapped pair of axes fits.
_CONCAT_SIZES = {
    "batch_size": 2,
    "num_kv_heads": 3,
    "new_seq_len": 5,
    "current_seq_len": 7,
    "head_dim": 8,
}
_STATIC_SIZES = {
    "batch_size": 2,
    "num_kv_heads": 3,
    "new_seq_len": 5,
    "max_seq_len": 11,
    "head_dim": 8,
}
SMALL_SIZES: Mapping[str, dict[str, int]] = {
    FORWARD.id: _CONCAT_SIZES,
    CONCAT_BACKWARD.id: _CONCAT_SIZES,
    STATIC_FORWARD.id: _STATIC_SIZES,
    BACKWARD.id: _STATIC_SIZES,
}
KINDS = ("normal", "wide", "subnormal", "special", "dyadic", "huge", "edge")
FORMS = {"bfloat16": BF16, "float16": FP16, "float32": FP32}

seeds = st.integers(0, 2**32 - 1)
every_operator = pytest.mark.parametrize(
    "operator", ALL_OPERATORS, ids=lambda operator: operator.id
)
every_dtype = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def is_backward(operator: Operator) -> bool:
    return operator.id.endswith(".backward")


def is_static(operator: Operator) -> bool:
    return ".static." in operator.id


def cache_axis(operator: Operator) -> str:
    return "max_seq_len" if is_static(operator) else "current_seq_len"


def random_pattern(kind: str, rng: random.Random, form: Format = BF16) -> int:
    """One pattern: magnitudes near one, over half the exponents, subnormal, any bits at all, one of
    few dyadic numbers, so large that products overflow, or at the edges of the range."""
    low, last = form.precision - 1, 2 * form.emax + 1

    def of_exponents(first: int, stop: int) -> int:
        """Any number of 2^first <= x < 2^stop, of the normal ones."""
        biased = range(max(1, first + form.emax), min(last, stop + form.emax))
        return rng.choice(biased) << low | rng.getrandbits(low)

    quarter = form.emax // 2 + 7
    infinity = last << low
    magnitude = {
        "normal": lambda: of_exponents(-8, 2),
        "wide": lambda: of_exponents(-quarter, quarter),
        "subnormal": lambda: rng.choice((rng.getrandbits(low), of_exponents(-quarter, 3))),
        "special": lambda: rng.getrandbits(form.width - 1),
        "dyadic": lambda: round_to_bits(
            rng.choice([Fraction(n, 4) for n in (2, 4, 7, 8, 12)]), form
        ),
        "huge": lambda: rng.choice((of_exponents(form.emax // 2, form.emax + 1), form.emax << low)),
        "edge": lambda: rng.choice(
            (0, 1, (1 << low) - 1, 1 << low, form.emax << low, infinity - 1, infinity)
        ),
    }[kind]()
    return magnitude | rng.getrandbits(1) << (form.width - 1)


def random_inputs(
    operator: Operator,
    sizes: Mapping[str, int],
    kind: str,
    rng: random.Random,
    form: Format = BF16,
) -> dict[str, torch.Tensor]:
    """Inputs of any sizes: random bits of a kind, and positions in any order."""
    inputs = {}
    for spec in operator.inputs:
        shape = operator.shape(spec, sizes)
        if spec.indexes is not None:
            rows = rng.sample(range(sizes[spec.indexes]), shape[0])
            inputs[spec.name] = torch.tensor(rows, dtype=torch.int64)
        else:
            patterns = [random_pattern(kind, rng, form) for _ in range(math.prod(shape))]
            inputs[spec.name] = rational.tensor_of(patterns, shape, form)
    return inputs


def in_order(operator: Operator, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [inputs[spec.name] for spec in operator.inputs]


def assert_truth_is_rational(operator: Operator, inputs: Mapping[str, torch.Tensor]) -> int:
    """Compare every element of every output; return how many were computed sums."""
    form = FORMAT_OF_DTYPE[in_order(operator, inputs)[0].dtype]
    found = oracle.truth(operator, inputs).outputs
    computed = 0
    expected = exact_outputs(operator.id, in_order(operator, inputs))
    assert list(found) == list(expected)
    for name, output in expected.items():
        assert tuple(found[name].shape) == output.shape
        for index, bits in zip(output.indices(), bits_of(found[name]), strict=True):
            element = output.element(index)
            if element.region != "computed":
                assert bits == correct_bits(element, form), (name, index)
                continue
            computed += 1
            value = rational.decode(bits, form)
            assert value == round_to(element.exact, form), (name, index)
    return computed


# Truth


@every_operator
@every_dtype
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=3)
@given(seed=seeds)
def test_truth_is_the_rational_answer_at_every_element(
    operator: Operator, form: Format, kind: str, seed: int
) -> None:
    sizes = SMALL_SIZES[operator.id]
    inputs = random_inputs(operator, sizes, kind, random.Random(seed), form)
    computed = assert_truth_is_rational(operator, inputs)
    rotated = 2 * 3 * 5 * 8
    assert computed == rotated + (2 * (2 * 5 * 8) if is_backward(operator) else 0)


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
        axis = cache_axis(operator)
        if is_static(operator):
            sizes["new_seq_len"] = size
    sizes[axis] = size
    assert_truth_is_rational(operator, random_inputs(operator, sizes, "normal", random.Random(1)))


@every_operator
@every_dtype
def test_truth_is_the_rational_answer_when_nothing_or_everything_is_new(
    operator: Operator, form: Format
) -> None:
    for new, rows in ((0, 4), (0, 0), (4, 4), (4, 0)):
        if is_static(operator) and new > rows:
            continue
        sizes = {**SMALL_SIZES[operator.id], "new_seq_len": new, cache_axis(operator): rows}
        inputs = random_inputs(operator, sizes, "special", random.Random(8), form)
        assert_truth_is_rational(operator, inputs)


@pytest.mark.parametrize("operator", FORWARDS, ids=lambda operator: operator.id)
@pytest.mark.parametrize("limit", [1, None])
def test_forward_tables_of_one_row_serve_every_batch_entry(
    operator: Operator, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is not None:
        monkeypatch.setattr(certified, "block_elements", lambda device: limit)  # noqa: ARG005
    inputs = random_inputs(operator, SMALL_SIZES[operator.id], "normal", random.Random(2))
    for rows in ({"cos"}, {"sin"}, {"cos", "sin"}):
        narrow = {name: x[:1] if name in rows else x for name, x in inputs.items()}
        assert_truth_is_rational(operator, narrow)


@pytest.mark.parametrize("operator", [CONCAT_BACKWARD, BACKWARD], ids=lambda operator: operator.id)
@pytest.mark.parametrize("name", ["cos", "sin"])
def test_backward_tables_of_one_row_are_refused(operator: Operator, name: str) -> None:
    inputs = random_inputs(operator, SMALL_SIZES[operator.id], "normal", random.Random(2))
    inputs[name] = inputs[name][:1]
    with pytest.raises(InvalidInput, match=f"axis batch_size .* is 2 .* but 1 in {name}"):
        oracle.truth(operator, inputs)


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


def test_a_cotangent_with_fewer_rows_than_new_tokens_is_refused_by_its_axis() -> None:
    inputs = random_inputs(
        CONCAT_BACKWARD, SMALL_SIZES[CONCAT_BACKWARD.id], "normal", random.Random(2)
    )
    for kind in ("key", "value"):
        inputs[f"grad_updated_{kind}_cache"] = inputs[f"grad_updated_{kind}_cache"][:, :, :4]
    with pytest.raises(InvalidInput, match="axis updated_seq_len "):
        oracle.truth(CONCAT_BACKWARD, inputs)


# Blocks


def region_of(operator: Operator, inputs: Mapping[str, torch.Tensor], name: str, row: int) -> str:
    """The region of an output's row, from the definition."""
    if name in ("grad_cos", "grad_sin"):
        return "all rows"
    if name in ("grad_key_states", "grad_value_states"):
        return "rows read" if is_static(operator) else "new rows"
    if not is_static(operator):
        old = name in ("grad_key_cache", "grad_value_cache")
        return "old rows" if old or row < inputs["key_cache"].shape[2] else "new rows"
    new, others = (
        ("zeroed rows", "untouched rows")
        if is_backward(operator)
        else ("rows written", "untouched rows")
    )
    return new if row in inputs["cache_position"].tolist() else others


@every_operator
@settings(max_examples=20)
@given(
    seed=seeds,
    limit=st.sampled_from((1, 7, 40, 10**6)),
    new=st.sampled_from((0, 1, 5, 70)),
    rows=st.sampled_from((0, 1, 4, 150)),
)
def test_every_element_lies_in_one_block_of_its_region_whatever_the_limit(
    operator: Operator, seed: int, limit: int, new: int, rows: int
) -> None:
    rng = random.Random(seed)
    sizes = {
        "batch_size": rng.choice((0, 1, 2)),
        "num_kv_heads": rng.choice((1, 3)),
        "new_seq_len": new,
        cache_axis(operator): rows + (new if is_static(operator) else 0),
        "head_dim": rng.choice((2, 4)),
    }
    inputs = random_inputs(operator, sizes, "dyadic", rng)
    for spec in operator.outputs:
        shape = operator.shape(spec, sizes)
        visits = torch.zeros(shape, dtype=torch.int64)
        for block in operator.blocks(inputs, spec.name, limit):
            visits[block.index] += 1
            part = visits[block.index].shape
            if isinstance(block.meaning, Summed):
                assert tuple(block.meaning.terms().shape) == (block.meaning.count, *part)
            rows_of_block = torch.arange(shape[-2])[block.index[-2]].tolist()
            regions = {region_of(operator, inputs, spec.name, row) for row in rows_of_block}
            assert regions == {block.region}
        assert bool((visits == 1).all())


@pytest.mark.parametrize(
    ("operator", "shared"),
    [(operator, ()) for operator in ALL_OPERATORS]
    + [(operator, ("cos", "sin")[:count]) for operator in FORWARDS for count in (1, 2)],
    ids=lambda value: value.id if isinstance(value, Operator) else "+".join(value) or "none",
)
@pytest.mark.parametrize("limit", [1, 60, 10**6])
def test_clusters_are_equal_for_a_pair_over_all_heads_and_differ_where_nothing_is_shared(
    operator: Operator, shared: tuple[str, ...], limit: int
) -> None:
    sizes = SMALL_SIZES[operator.id]
    inputs = random_inputs(operator, sizes, "normal", random.Random(4))
    inputs = {name: x[:1] if name in shared else x for name, x in inputs.items()}
    batches, _, tokens, width = (2, 3, 5, 8)
    computed = 0
    for spec in operator.outputs:
        shape = operator.shape(spec, operator.bind(inputs))
        numbers = torch.full(shape, -1)
        for block in operator.blocks(inputs, spec.name, limit):
            if isinstance(block.meaning, Summed):
                assert block.meaning.clusters is not None
                clusters = block.meaning.clusters()
                assert clusters.dtype == torch.int64
                numbers[block.index] = clusters.expand_as(numbers[block.index])
        if not bool((numbers >= 0).any()):
            continue
        computed += 1
        for index in itertools.product(*map(range, shape)):
            number = int(numbers[index])
            if number < 0:
                continue
            token = index[-2]
            if spec.name == "updated_key_cache":
                first = token - sizes["current_seq_len"] if not is_static(operator) else None
                token = inputs["cache_position"].tolist().index(token) if first is None else first
            entry = 0 if shared else index[0]
            assert number == (entry * tokens + token) * (width // 2) + index[-1] % (width // 2)
        groups = numbers[numbers >= 0].unique()
        assert groups.tolist() == list(range((1 if shared else batches) * tokens * width // 2))
    assert computed == (3 if is_backward(operator) else 1)


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


@every_operator
@pytest.mark.parametrize(("new", "rows"), [(5, 7), (0, 7), (5, 5), (0, 0)])
def test_reference_returns_fresh_contiguous_tensors(
    operator: Operator, new: int, rows: int
) -> None:
    sizes = {"batch_size": 1, "num_kv_heads": 1, "new_seq_len": new, cache_axis(operator): rows}
    sizes["head_dim"] = 8
    inputs = in_order(operator, random_inputs(operator, sizes, "normal", random.Random(6)))
    outputs = operator.reference(inputs, torch.bfloat16)
    memory = [tensor.untyped_storage().data_ptr() for tensor in (*inputs, *outputs)]
    filled = [place for place in memory if place]
    assert len(set(filled)) == len(filled)
    for spec, output in zip(operator.outputs, outputs, strict=True):
        assert tuple(output.shape) == operator.shape(spec, sizes)
        assert output.is_contiguous()


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


PAIRS = ((FORWARD, CONCAT_BACKWARD), (STATIC_FORWARD, BACKWARD))
every_pair = pytest.mark.parametrize(("forward", "backward"), PAIRS, ids=["concat", "static"])
POSITION = torch.tensor([7, 2, 9, 0, 4])

# Entries of key_states, value_states, cos, sin and the two caches at B2 H3 N5 D8, C7 or M11.
ENTRIES = {
    FORWARD.id: 2 * (2 * 3 * 5 * 8) + 2 * (2 * 5 * 8) + 2 * (2 * 3 * 7 * 8),
    STATIC_FORWARD.id: 2 * (2 * 3 * 5 * 8) + 2 * (2 * 5 * 8) + 2 * (2 * 3 * 11 * 8),
}


def differentiate(
    forward: Operator, draw: Callable[[tuple[int, ...]], torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Draw float64 inputs and cotangents of a forward operator; return both and the slopes of
    <forward(inputs), cotangents> by every entry."""
    sizes = SMALL_SIZES[forward.id]
    shapes = [forward.shape(spec, sizes) for spec in forward.inputs if spec.indexes is None]
    inputs = [draw(shape) for shape in shapes]
    cotangents = [draw(forward.shape(spec, sizes)) for spec in forward.outputs]
    position = [POSITION] if is_static(forward) else []
    slopes, checked = central_differences(
        lambda *args: forward.reference([*args, *position], torch.float64), inputs, cotangents
    )
    assert checked == ENTRIES[forward.id]
    return inputs, cotangents, slopes


def backward_inputs(
    backward: Operator, inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    key, _, cos, sin, _, _ = inputs
    return [*cotangents, key, cos, sin, *([POSITION] if is_static(backward) else [])]


@every_pair
def test_backward_reference_is_the_central_difference_of_the_forward_at_every_entry(
    forward: Operator, backward: Operator
) -> None:
    generator = torch.Generator().manual_seed(20)
    inputs, cotangents, slopes = differentiate(
        forward, lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    )
    gradients = backward.reference(backward_inputs(backward, inputs, cotangents), torch.float64)
    assert sum(gradient.numel() for gradient in gradients) == ENTRIES[forward.id]
    for gradient, slope in zip(gradients, slopes, strict=True):
        assert gradient.shape == slope.shape
        assert float((gradient - slope).abs().max()) < 1e-12


@every_pair
@every_dtype
def test_backward_truth_is_the_rounded_central_difference_of_the_forward_at_every_entry(
    forward: Operator, backward: Operator, form: Format
) -> None:
    generator = torch.Generator().manual_seed(21)
    # Numbers of the type whose differences float64 takes without rounding, and the type does not.
    bits = min(form.precision, 22)

    def dyadic(shape: tuple[int, ...]) -> torch.Tensor:
        numbers = torch.randint(1 - 2**bits, 2**bits, shape, generator=generator)
        return numbers.to(torch.float64) / 2 ** (bits - 4)

    inputs, cotangents, slopes = differentiate(forward, dyadic)
    dtype = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32}[form]
    names = [spec.name for spec in backward.inputs]
    tensors = [
        tensor.to(dtype) if tensor.is_floating_point() else tensor
        for tensor in backward_inputs(backward, inputs, cotangents)
    ]
    truth = oracle.truth(backward, dict(zip(names, tensors, strict=True)))
    rounded = 0
    for output, slope in zip(truth.outputs.values(), slopes, strict=True):
        assert output.shape == slope.shape
        for value, exact in zip(output.flatten().tolist(), slope.flatten().tolist(), strict=True):
            assert Fraction(value) == round_to(Fraction(exact), form)
            rounded += value != exact
    assert rounded > 100


@every_pair
def test_the_gradient_of_the_forward_reference_is_the_exact_backward(
    forward: Operator, backward: Operator
) -> None:
    sizes = SMALL_SIZES[forward.id]
    drawn = in_order(forward, random_inputs(forward, sizes, "dyadic", random.Random(22)))
    leaves = [x.to(torch.float64).requires_grad_() for x in drawn if x.is_floating_point()]
    position = [x for x in drawn if not x.is_floating_point()]
    outputs = forward.reference([*leaves, *position], torch.float64)
    cotangents = in_order(backward, random_inputs(backward, sizes, "dyadic", random.Random(23)))[:2]
    torch.autograd.backward(outputs, [x.to(torch.float64) for x in cotangents])
    key, _, cos, sin, _, _, *position = drawn
    exact = exact_outputs(backward.id, [*cotangents, key, cos, sin, *position])
    assert len(exact) == len(leaves)
    for leaf, output in zip(leaves, exact.values(), strict=True):
        assert leaf.grad is not None
        found = [Fraction(value) for value in leaf.grad.flatten().tolist()]
        assert found == [output.element(index).exact for index in output.indices()]


# Official suites


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.id)
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


@pytest.mark.parametrize(("operator", "sibling"), [PAIRS[0][::-1], PAIRS[1]], ids=lambda o: o.id)
def test_the_derived_suite_has_the_shapes_of_its_published_sibling_and_no_figures(
    operator: Operator, sibling: Operator
) -> None:
    (suite,), (published,) = operator.suites, sibling.suites
    assert suite.id == f"derived/{operator.id}"
    assert published.id in suite.source
    assert "derived" in suite.source
    assert not suite.published
    assert len(suite.cases) == 16
    for case, original in zip(suite.cases, published.cases, strict=True):
        assert case == replace(original, operator=operator.id, group=suite.id, published={})
        assert original.published


@every_operator
def test_every_operator_is_judged_in_three_types_and_its_official_cases_in_bfloat16(
    operator: Operator,
) -> None:
    assert operator.dtypes == ("bfloat16", "float16", "float32")
    assert all(case.dtype == "bfloat16" for case in operator.cases)
    assert all(case.domain == "official" for case in operator.cases)


def test_only_the_static_forward_may_write_in_place() -> None:
    for operator in ALL_OPERATORS:
        pairs = [("key_cache", "updated_key_cache"), ("value_cache", "updated_value_cache")]
        assert list(operator.inplace) == (pairs if operator is STATIC_FORWARD else [])


@every_operator
def test_the_large_case_has_outputs_past_two_to_the_31_elements_with_new_rows_on_both_sides(
    operator: Operator,
) -> None:
    (case,) = operator.large
    assert case.needs_gpu
    assert case.random
    assert not case.layouts
    assert {axis: case.sizes[axis] for axis in operator.official} == dict(operator.official)
    big = [
        math.prod(operator.shape(spec, case.sizes))
        for spec in operator.outputs
        if math.prod(operator.shape(spec, case.sizes)) > 2**31
    ]
    assert len(big) == 2
    # Few rows lie past it, so that only looking there shows the fault.
    assert all(size - 2**31 < 200 * case.sizes["head_dim"] for size in big)
    if is_static(operator):
        arrays = {"cache_position": np.zeros(case.sizes["new_seq_len"], np.int64)}
        operator.input_kinds[case.kind](case, Draws(case, 0), arrays)
        past = case.sizes["max_seq_len"] - (max(big) - 2**31) // case.sizes["head_dim"]
        position = arrays["cache_position"]
        assert 0 < int((position >= past).sum()) < position.size
