"""Laws that the four operators obey, for both of their descriptions.

Inputs of a few bits make every float64 operation exact, so laws of arithmetic hold without any
tolerance: in ``reference``, and in the sums of the terms that ``blocks`` gives. Laws about which
element goes where hold for the certified truth, bit for bit, in every type and for any bits.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from oracle.definition import Copied, Operator, Summed
from tests.operators.test_kv_rope import (
    ALL_OPERATORS,
    BACKWARD,
    CONCAT_BACKWARD,
    FORWARD,
    FORWARDS,
    KINDS,
    PAIRS,
    STATIC_FORWARD,
    cache_axis,
    every_dtype,
    every_operator,
    every_pair,
    is_backward,
    is_static,
    random_inputs,
    seeds,
)
from tests.rational import Format, bits_of

Tensors = dict[str, torch.Tensor]

BACKWARD_OF = {forward.id: backward for forward, backward in PAIRS}
every_forward = pytest.mark.parametrize("operator", FORWARDS, ids=lambda operator: operator.id)
any_kind = st.sampled_from(KINDS)


@st.composite
def any_sizes(draw: st.DrawFn, operator: Operator) -> dict[str, int]:
    new = draw(st.integers(0, 4))
    rows = draw(st.integers(0, 4))
    return {
        "batch_size": draw(st.integers(1, 3)),
        "num_kv_heads": draw(st.integers(1, 4)),
        "new_seq_len": new,
        cache_axis(operator): rows + (new if is_static(operator) else 0),
        "head_dim": draw(st.sampled_from((2, 4, 6))),
    }


def few_bits(operator: Operator, sizes: Mapping[str, int], rng: random.Random) -> Tensors:
    """Float64 inputs of six bits: sums of a thousand products of four of them are exact."""
    inputs = {}
    for spec in operator.inputs:
        shape = operator.shape(spec, sizes)
        if spec.indexes is not None:
            rows = rng.sample(range(sizes[spec.indexes]), shape[0])
            inputs[spec.name] = torch.tensor(rows, dtype=torch.int64)
        else:
            inputs[spec.name] = small_numbers(shape, rng)
    return inputs


def small_numbers(shape: Sequence[int], rng: random.Random) -> torch.Tensor:
    count = torch.Size(shape).numel()
    values = [rng.randint(-31, 31) / 8 for _ in range(count)]
    return torch.tensor(values, dtype=torch.float64).reshape(tuple(shape))


def floating(operator: Operator) -> list[str]:
    return [spec.name for spec in operator.inputs if spec.indexes is None]


def exact(operator: Operator, inputs: Tensors) -> Tensors:
    """The outputs in float64, by the reference and by the blocks, which must agree."""
    arguments = [inputs[spec.name] for spec in operator.inputs]
    outputs = operator.reference(arguments, torch.float64)
    found = {spec.name: out for spec, out in zip(operator.outputs, outputs, strict=True)}
    for name, output in found.items():
        described = torch.full_like(output, torch.nan)
        for block in operator.blocks(inputs, name, 50):
            if isinstance(block.meaning, Summed):
                described[block.index] = block.meaning.terms().sum(dim=0)
            elif isinstance(block.meaning, Copied):
                described[block.index] = block.meaning.source
            else:
                described[block.index] = 0.0
        assert torch.equal(described, output)
    return found


def inner(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Fraction:
    """The inner product of several tensors, in rational arithmetic."""
    total = Fraction(0)
    for one, other in pairs:
        values = zip(one.flatten().tolist(), other.flatten().tolist(), strict=True)
        total += sum((Fraction(a) * Fraction(b) for a, b in values), Fraction(0))
    return total


def per_head(operator: Operator, table: torch.Tensor) -> torch.Tensor:
    return table.unsqueeze(1) if is_static(operator) else table


def new_keys(operator: Operator, inputs: Tensors, keys: torch.Tensor) -> torch.Tensor:
    if is_static(operator):
        return keys[:, :, inputs["cache_position"]]
    return keys[:, :, inputs["key_cache"].shape[2] :]


# Arithmetic, without any rounding


@every_forward
@settings(max_examples=25)
@given(data=st.data(), seed=seeds)
def test_turning_back_by_swapped_cosines_and_negated_sines_leaves_a_multiple_of_the_keys(
    operator: Operator, data: st.DataObject, seed: int
) -> None:
    """The rotation's inverse times its determinant, cos1 cos2 + sin1 sin2, for free halves; with
    paired tables that is the rotation by the opposite angle."""
    inputs = few_bits(operator, data.draw(any_sizes(operator)), random.Random(seed))
    half = inputs["cos"].shape[-1] // 2
    turned = new_keys(operator, inputs, exact(operator, inputs)["updated_key_cache"])
    back = {
        **inputs,
        "key_states": turned,
        "cos": inputs["cos"].roll(half, dims=-1),
        "sin": -inputs["sin"],
    }
    found = new_keys(operator, inputs, exact(operator, back)["updated_key_cache"])
    cos, sin = (per_head(operator, inputs[name]) for name in ("cos", "sin"))
    factor = cos[..., :half] * cos[..., half:] + sin[..., :half] * sin[..., half:]
    assert torch.equal(found, inputs["key_states"] * torch.cat((factor, factor), dim=-1))


@every_pair
@settings(max_examples=25)
@given(data=st.data(), seed=seeds)
def test_the_backward_turns_rotated_keys_back_where_tables_are_paired(
    forward: Operator, backward: Operator, data: st.DataObject, seed: int
) -> None:
    inputs = few_bits(forward, data.draw(any_sizes(forward)), random.Random(seed))
    half = inputs["cos"].shape[-1] // 2
    for name in ("cos", "sin"):
        inputs[name][..., half:] = inputs[name][..., :half]
    outputs = exact(forward, inputs)
    cotangents = dict(zip(floating(backward)[:2], outputs.values(), strict=True))
    kept = {spec.name: inputs[spec.name] for spec in backward.inputs if spec.name in inputs}
    gradient = exact(backward, {**kept, **cotangents})["grad_key_states"]
    cos, sin = (per_head(forward, inputs[name]) for name in ("cos", "sin"))
    assert torch.equal(gradient, inputs["key_states"] * (cos**2 + sin**2))


@every_operator
@settings(max_examples=15)
@given(data=st.data(), seed=seeds, factor=st.integers(-4, 4))
def test_every_operator_is_linear_in_each_input_and_constant_in_what_it_does_not_use(
    operator: Operator, data: st.DataObject, seed: int, factor: int
) -> None:
    rng = random.Random(seed)
    sizes = data.draw(any_sizes(operator))
    inputs = few_bits(operator, sizes, rng)
    for name in floating(operator):
        x, y = inputs[name], small_numbers(inputs[name].shape, rng)
        at = {
            key: exact(operator, {**inputs, name: value})
            for key, value in {
                "zero": torch.zeros_like(x),
                "x": x,
                "y": y,
                "combined": factor * x + y,
            }.items()
        }
        for output in at["x"]:
            zero, of_x, of_y, combined = (at[key][output] for key in ("zero", "x", "y", "combined"))
            assert torch.equal(combined - zero, factor * (of_x - zero) + (of_y - zero))


@every_pair
@settings(max_examples=25)
@given(data=st.data(), seed=seeds)
def test_the_backward_is_the_adjoint_of_the_forwards_derivative(
    forward: Operator, backward: Operator, data: st.DataObject, seed: int
) -> None:
    """<J v, w> = <v, J^T w>, exactly: the forward is quadratic, so central differences are J v."""
    rng = random.Random(seed)
    sizes = data.draw(any_sizes(forward))
    inputs = few_bits(forward, sizes, rng)
    names = floating(forward)
    direction = {name: small_numbers(inputs[name].shape, rng) for name in names}
    ahead, behind = (
        exact(
            forward, {**inputs, **{name: inputs[name] + sign * direction[name] for name in names}}
        )
        for sign in (1, -1)
    )
    derivative = [(ahead[name] - behind[name]) / 2 for name in ahead]
    weights = [small_numbers(value.shape, rng) for value in derivative]
    kept = {spec.name: inputs[spec.name] for spec in backward.inputs if spec.name in inputs}
    cotangents = dict(zip(floating(backward)[:2], weights, strict=True))
    gradients = exact(backward, {**kept, **cotangents}).values()
    left = inner(list(zip(derivative, weights, strict=True)))
    # Gradients come in the order of the forward's inputs.
    right = inner([(direction[n], g) for n, g in zip(names, gradients, strict=True)])
    assert left == right


@every_pair
@settings(max_examples=15)
@given(data=st.data(), seed=seeds)
def test_the_gradient_of_a_table_shared_by_all_batch_entries_is_the_sum_over_them(
    forward: Operator, backward: Operator, data: st.DataObject, seed: int
) -> None:
    rng = random.Random(seed)
    inputs = few_bits(forward, data.draw(any_sizes(forward)), rng)
    for name in ("cos", "sin"):
        inputs[name] = inputs[name][:1]
    direction = {name: small_numbers(inputs[name].shape, rng) for name in ("cos", "sin")}
    ahead, behind = (
        exact(forward, {**inputs, **{n: inputs[n] + sign * direction[n] for n in direction}})
        for sign in (1, -1)
    )
    derivative = [(ahead[name] - behind[name]) / 2 for name in ahead]
    weights = [small_numbers(value.shape, rng) for value in derivative]
    batches = inputs["key_states"].shape[0]
    whole = {n: x.expand(batches, *x.shape[1:]) if n in direction else x for n, x in inputs.items()}
    kept = {spec.name: whole[spec.name] for spec in backward.inputs if spec.name in whole}
    cotangents = dict(zip(floating(backward)[:2], weights, strict=True))
    gradients = exact(backward, {**kept, **cotangents})
    right = [(direction[n], gradients[f"grad_{n}"].sum(dim=0, keepdim=True)) for n in direction]
    assert inner(list(zip(derivative, weights, strict=True))) == inner(right)


# Places, bit for bit


def truth(operator: Operator, inputs: Tensors) -> Tensors:
    ordered = {spec.name: inputs[spec.name] for spec in operator.inputs}
    return dict(oracle.truth(operator, ordered).outputs)


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.shape == expected[name].shape, name
        assert bits_of(tensor) == bits_of(expected[name]), name


def drawn(
    operator: Operator, data: st.DataObject, form: Format, *, new: int | None = None
) -> Tensors:
    sizes = data.draw(any_sizes(operator))
    if new is not None and is_static(operator):
        sizes[cache_axis(operator)] += new - sizes["new_seq_len"]
    sizes["new_seq_len"] = sizes["new_seq_len"] if new is None else new
    rng = random.Random(data.draw(seeds))
    return random_inputs(operator, sizes, data.draw(any_kind), rng, form)


def tokens_of(operator: Operator, inputs: Tensors, part: slice) -> Tensors:
    """The inputs that belong to new tokens, of some of the tokens only."""
    axes = {spec.name: spec.axes for spec in operator.inputs}
    cut = {}
    for name, tensor in inputs.items():
        if "new_seq_len" in axes[name]:
            place = axes[name].index("new_seq_len")
            cut[name] = tensor[(*(slice(None),) * place, part)]
    return {**inputs, **cut}


@every_forward
@every_dtype
@settings(max_examples=12)
@given(data=st.data(), first=st.integers(0, 4))
def test_two_small_updates_equal_one_big_one(
    operator: Operator, form: Format, data: st.DataObject, first: int
) -> None:
    inputs = drawn(operator, data, form, new=4)
    once = truth(operator, tokens_of(operator, inputs, slice(0, first)))
    caches = dict(zip(("key_cache", "value_cache"), once.values(), strict=True))
    rest = tokens_of(operator, inputs, slice(first, 4))
    assert_same_bits(truth(operator, {**rest, **caches}), truth(operator, inputs))


@every_dtype
@settings(max_examples=12)
@given(data=st.data(), first=st.integers(0, 4))
def test_the_gradients_of_two_small_concatenations_are_those_of_one_big_one(
    form: Format, data: st.DataObject, first: int
) -> None:
    inputs = drawn(CONCAT_BACKWARD, data, form, new=4)
    second = truth(CONCAT_BACKWARD, tokens_of(CONCAT_BACKWARD, inputs, slice(first, 4)))
    between = {
        f"grad_updated_{kind}_cache": second[f"grad_{kind}_cache"] for kind in ("key", "value")
    }
    earlier = {**tokens_of(CONCAT_BACKWARD, inputs, slice(0, first)), **between}
    assert_gradients_join(CONCAT_BACKWARD, truth(CONCAT_BACKWARD, earlier), second, inputs)


@every_dtype
@settings(max_examples=12)
@given(data=st.data(), first=st.integers(0, 4))
def test_the_gradients_of_two_small_static_updates_are_those_of_one_big_one(
    form: Format, data: st.DataObject, first: int
) -> None:
    inputs = drawn(BACKWARD, data, form, new=4)
    second = truth(BACKWARD, tokens_of(BACKWARD, inputs, slice(first, 4)))
    between = {
        f"grad_{kind}_cache": second[f"grad_{kind}_cache_input"] for kind in ("key", "value")
    }
    earlier = {**tokens_of(BACKWARD, inputs, slice(0, first)), **between}
    assert_gradients_join(BACKWARD, truth(BACKWARD, earlier), second, inputs)


def assert_gradients_join(
    operator: Operator, first: Tensors, second: Tensors, inputs: Tensors
) -> None:
    """The big update has the tokens' gradients of both, and the cache's of the earlier one."""
    joined = {}
    for spec in operator.outputs:
        if "new_seq_len" in spec.axes:
            both = (first[spec.name], second[spec.name])
            joined[spec.name] = torch.cat(both, dim=spec.axes.index("new_seq_len"))
        else:
            joined[spec.name] = first[spec.name]
    assert_same_bits(joined, truth(operator, inputs))


@every_dtype
@settings(max_examples=15)
@given(data=st.data())
def test_a_static_update_behind_the_cached_tokens_equals_the_concatenation(
    form: Format, data: st.DataObject
) -> None:
    inputs = drawn(FORWARD, data, form)
    new = inputs["key_states"].shape[2]
    old = inputs["key_cache"].shape[2]
    static = {name: x.squeeze(1) if name in ("cos", "sin") else x for name, x in inputs.items()}
    for kind in ("key", "value"):
        # What the rows held before is overwritten.
        room = torch.full_like(inputs[f"{kind}_states"], torch.nan)
        static[f"{kind}_cache"] = torch.cat((inputs[f"{kind}_cache"], room), dim=2)
    static["cache_position"] = torch.arange(old, old + new)
    assert_same_bits(truth(STATIC_FORWARD, static), truth(FORWARD, inputs))


@every_dtype
@settings(max_examples=15)
@given(data=st.data())
def test_the_gradients_of_a_static_update_behind_the_cached_tokens_are_the_concatenations(
    form: Format, data: st.DataObject
) -> None:
    inputs = drawn(CONCAT_BACKWARD, data, form)
    new = inputs["key_states"].shape[2]
    old = inputs["grad_updated_key_cache"].shape[2] - new
    static = {
        "grad_key_cache": inputs["grad_updated_key_cache"],
        "grad_value_cache": inputs["grad_updated_value_cache"],
        "key_states": inputs["key_states"],
        "cos": inputs["cos"].squeeze(1),
        "sin": inputs["sin"].squeeze(1),
        "cache_position": torch.arange(old, old + new),
    }
    found = truth(BACKWARD, static)
    renamed = {
        "grad_key_states": found["grad_key_states"],
        "grad_value_states": found["grad_value_states"],
        "grad_cos": found["grad_cos"].unsqueeze(1),
        "grad_sin": found["grad_sin"].unsqueeze(1),
        "grad_key_cache": found["grad_key_cache_input"][:, :, :old],
        "grad_value_cache": found["grad_value_cache_input"][:, :, :old],
    }
    assert_same_bits(renamed, truth(CONCAT_BACKWARD, inputs))
    for name in ("grad_key_cache_input", "grad_value_cache_input"):
        assert not any(bits_of(found[name][:, :, old:]))


@pytest.mark.parametrize("operator", [STATIC_FORWARD, BACKWARD], ids=lambda operator: operator.id)
@every_dtype
@settings(max_examples=12)
@given(data=st.data())
def test_static_updates_do_not_depend_on_the_order_in_which_tokens_are_named(
    operator: Operator, form: Format, data: st.DataObject
) -> None:
    inputs = drawn(operator, data, form)
    count = inputs["key_states"].shape[2]
    order = torch.tensor(data.draw(st.permutations(range(count))), dtype=torch.int64)
    shuffled = dict(inputs)
    for spec in operator.inputs:
        if "new_seq_len" in spec.axes:
            place = spec.axes.index("new_seq_len")
            shuffled[spec.name] = inputs[spec.name].index_select(place, order)
    expected = truth(operator, inputs)
    for spec in operator.outputs:
        if "new_seq_len" in spec.axes:
            place = spec.axes.index("new_seq_len")
            expected[spec.name] = expected[spec.name].index_select(place, order)
    assert_same_bits(truth(operator, shuffled), expected)


@every_operator
@every_dtype
@settings(max_examples=10)
@given(data=st.data())
def test_batch_entries_do_not_touch_each_other(
    operator: Operator, form: Format, data: st.DataObject
) -> None:
    inputs = drawn(operator, data, form)
    expected = truth(operator, inputs)
    for entry in range(inputs["key_states"].shape[0]):
        alone = {
            n: x[entry : entry + 1] if n in floating(operator) else x for n, x in inputs.items()
        }
        one = {name: output[entry : entry + 1] for name, output in expected.items()}
        assert_same_bits(truth(operator, alone), one)


def test_laws_are_tried_on_all_four_operators() -> None:
    assert {operator.id for pair in PAIRS for operator in pair} == {o.id for o in ALL_OPERATORS}
    assert {operator.id for operator in ALL_OPERATORS if is_backward(operator)} == {
        backward.id for backward in BACKWARD_OF.values()
    }
