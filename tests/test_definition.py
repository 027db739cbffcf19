"""Definitions and inputs that contradict themselves are refused, by a message that says where."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from oracle.definition import (
    Axis,
    Case,
    Domain,
    InvalidDefinition,
    InvalidInput,
    Layout,
    Operator,
    TensorSpec,
    Variant,
    check_positions,
)
from oracle.operators import UnknownOperator, all_operators, find_operator
from tests.operators.test_kv_rope import BACKWARD, FORWARD, OPERATORS, SMALL_SIZES, random_inputs

Inputs = dict[str, torch.Tensor]


def inputs_of(operator: Operator) -> Inputs:
    return random_inputs(operator, SMALL_SIZES[operator.id], "normal", random.Random(0))


def with_positions(*rows: int) -> Callable[[Inputs], None]:
    def change(inputs: Inputs) -> None:
        inputs["cache_position"] = torch.tensor(rows)

    return change


def with_shape(name: str, *shape: int) -> Callable[[Inputs], None]:
    def change(inputs: Inputs) -> None:
        inputs[name] = torch.ones(shape, dtype=inputs[name].dtype)

    return change


def with_dtype(name: str, dtype: torch.dtype) -> Callable[[Inputs], None]:
    def change(inputs: Inputs) -> None:
        inputs[name] = inputs[name].to(dtype)

    return change


def with_head_dim(size: int) -> Callable[[Inputs], None]:
    def change(inputs: Inputs) -> None:
        for name, tensor in inputs.items():
            if name != "cache_position":
                inputs[name] = torch.ones((*tensor.shape[:-1], size), dtype=tensor.dtype)

    return change


def without(*names: str) -> Callable[[Inputs], None]:
    def change(inputs: Inputs) -> None:
        for name in names:
            del inputs[name]

    return change


def without_heads(inputs: Inputs) -> None:
    for name, tensor in inputs.items():
        if tensor.dim() == 4 and name not in ("cos", "sin"):
            inputs[name] = tensor[:, :0]


WRONG_INPUTS: Mapping[str, tuple[Operator, Callable[[Inputs], None], str]] = {
    "missing tensors": (FORWARD, without("cos", "key_cache"), r"needs cos, key_cache, which were"),
    "too few dimensions": (
        BACKWARD,
        with_shape("key_states", 2, 3, 5),
        r"key_states .* shape \(2, 3, 5\); expected 4 dimensions, \[batch_size, num_kv_heads, new",
    ),
    "too many dimensions": (
        BACKWARD,
        with_shape("cos", 2, 1, 5, 8),
        r"cos .* shape \(2, 1, 5, 8\); expected 3 dimensions, \[batch_size, new_seq_len, head",
    ),
    "positions of two dimensions": (
        BACKWARD,
        with_shape("cache_position", 2, 5),
        r"cache_position .* shape \(2, 5\); expected 1 dimensions, \[new_seq_len\]",
    ),
    "heads disagree": (
        FORWARD,
        with_shape("value_states", 2, 4, 5, 8),
        r"axis num_kv_heads .* is 3 in key_states but 4 in value_states",
    ),
    "lengths disagree": (
        BACKWARD,
        with_shape("cos", 2, 6, 8),
        r"axis new_seq_len .* is 5 in key_states but 6 in cos",
    ),
    "capacities disagree": (
        BACKWARD,
        with_shape("grad_value_cache", 2, 3, 12, 8),
        r"axis max_seq_len .* is 11 in grad_key_cache but 12 in grad_value_cache",
    ),
    "cached lengths disagree": (
        FORWARD,
        with_shape("value_cache", 2, 3, 6, 8),
        r"axis current_seq_len .* is 7 in key_cache but 6 in value_cache",
    ),
    "positions of another length": (
        BACKWARD,
        with_positions(0, 1, 2, 3),
        r"axis new_seq_len .* is 5 in key_states but 4 in cache_position",
    ),
    "a table with heads": (
        FORWARD,
        with_shape("cos", 2, 3, 5, 8),
        r"dimension 1 of cos .* has size 3; it must be 1",
    ),
    "a table without heads": (
        FORWARD,
        with_shape("sin", 2, 0, 5, 8),
        r"dimension 1 of sin .* has size 0; it must be 1",
    ),
    "table rows neither 1 nor the batch": (
        FORWARD,
        with_shape("sin", 3, 1, 5, 8),
        r"axis batch_size .* is 2 in key_states but 3 in sin",
    ),
    "one table row in the backward": (
        BACKWARD,
        with_shape("cos", 1, 5, 8),
        r"axis batch_size .* is 2 in grad_key_cache but 1 in cos",
    ),
    "odd head_dim": (
        FORWARD,
        with_head_dim(7),
        r"axis head_dim .* is 7; it must be at least 2 and a multiple of 2",
    ),
    "no head_dim": (
        BACKWARD,
        with_head_dim(0),
        r"axis head_dim .* is 0; it must be at least 2 and a multiple of 2",
    ),
    "no heads": (BACKWARD, without_heads, r"axis num_kv_heads .* is 0; it must be at least 1$"),
    "unsupported type": (
        FORWARD,
        with_dtype("key_states", torch.float64),
        r"key_states .* is float64; supported are bfloat16",
    ),
    "mixed types": (
        BACKWARD,
        with_dtype("sin", torch.float32),
        r"sin .* is float32; it must be bfloat16, like grad_key_cache",
    ),
    "a name that is none": (
        FORWARD,
        lambda inputs: inputs.update(key_state=inputs["key_states"]),
        r"has no input key_state; its inputs are key_states, value_states, cos",
    ),
    "two devices": (
        BACKWARD,
        lambda inputs: inputs.update(sin=inputs["sin"].to("meta")),
        r"sin .* is on meta, but grad_key_cache is on cpu; put all inputs on one device",
    ),
    "positions of 32 bits": (
        BACKWARD,
        with_dtype("cache_position", torch.int32),
        r"cache_position .* is int32; it must be int64, as it indexes max_seq_len",
    ),
    "a negative position": (
        BACKWARD,
        with_positions(7, 2, -1, 0, 4),
        r"cache_position\[2\] is -1, outside 0\.\.10 \(max_seq_len is 11\); negative",
    ),
    "a position equal to the capacity": (
        BACKWARD,
        with_positions(7, 2, 9, 0, 11),
        r"cache_position\[4\] is 11, outside 0\.\.10",
    ),
    "a position past 32 bits": (
        BACKWARD,
        with_positions(2**40 + 17, 2, 9, 0, 4),
        r"cache_position\[0\] is 1099511627793, outside 0\.\.10",
    ),
    "a repeated position": (
        BACKWARD,
        with_positions(7, 2, 9, 7, 2),
        r"cache_position\[3\] is 7, which cache_position\[0\] names already; rows of max_seq_len",
    ),
    "the first of several bad positions": (
        BACKWARD,
        with_positions(7, 7, -1, 99, 4),
        r"cache_position\[1\] is 7",
    ),
}


@pytest.mark.parametrize("fault", WRONG_INPUTS)
def test_wrong_inputs_are_refused_naming_tensor_axis_or_position(fault: str) -> None:
    operator, change, message = WRONG_INPUTS[fault]
    inputs = inputs_of(operator)
    change(inputs)
    with pytest.raises(InvalidInput, match=message) as caught:
        operator.bind(inputs)
    assert operator.id in str(caught.value) or "cache_position[" in str(caught.value)


def test_more_positions_than_rows_are_refused_before_any_position_is_read() -> None:
    inputs = random_inputs(
        BACKWARD, {**SMALL_SIZES[BACKWARD.id], "max_seq_len": 5}, "normal", random.Random(0)
    )
    for name in ("grad_key_cache", "grad_value_cache"):
        inputs[name] = inputs[name][:, :, :4]
    message = r"cache_position .* would name 5 distinct rows of max_seq_len, which has only 4"
    with pytest.raises(InvalidInput, match=message):
        BACKWARD.bind(inputs)


@given(
    rows=st.integers(1, 12),
    positions=st.lists(
        st.integers(-2, 13) | st.sampled_from([2**40 + 17, -(2**63), 2**63 - 1]), max_size=10
    ),
)
def test_exactly_the_first_bad_position_is_named(rows: int, positions: list[int]) -> None:
    bad = [
        place
        for place, row in enumerate(positions)
        if not 0 <= row < rows or row in positions[:place]
    ]
    given_positions = torch.tensor(positions, dtype=torch.int64)
    if not bad:
        check_positions("cache_position", given_positions, "max_seq_len", rows)
        return
    named = re.escape(f"cache_position[{bad[0]}] is {positions[bad[0]]}, ")
    with pytest.raises(InvalidInput, match=f"^{named}"):
        check_positions("cache_position", given_positions, "max_seq_len", rows)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.id)
def test_bind_returns_the_sizes_of_all_axes_derived_ones_included(operator: Operator) -> None:
    sizes = operator.bind(inputs_of(operator))
    derived = {"updated_seq_len": 12} if operator is FORWARD else {}
    assert sizes == {**SMALL_SIZES[operator.id], **derived}


@pytest.mark.parametrize("rows", [1, 2])
def test_forward_tables_may_have_one_row_or_one_for_each_batch_entry(rows: int) -> None:
    inputs = inputs_of(FORWARD)
    inputs["cos"] = inputs["cos"][:rows]
    assert FORWARD.bind(inputs)["batch_size"] == 2


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.id)
def test_empty_axes_are_legal_where_the_operator_is_defined_for_them(operator: Operator) -> None:
    sizes = {**SMALL_SIZES[operator.id], "batch_size": 0, "new_seq_len": 0}
    sizes["current_seq_len" if operator is FORWARD else "max_seq_len"] = 0
    bound = operator.bind(random_inputs(operator, sizes, "normal", random.Random(0)))
    assert bound["batch_size"] == bound["new_seq_len"] == 0


# Cases and operators


def a_case(**changes: object) -> Case:
    values: dict[str, object] = {
        "operator": FORWARD.id,
        "name": "new",
        "group": "probes",
        "sizes": SMALL_SIZES[FORWARD.id],
        "kind": "official",
    }
    return Case(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "two words", "a/b", "-x", "x,y", "é", "a\n"])
def test_a_case_name_unfit_for_a_command_line_is_refused(name: str) -> None:
    with pytest.raises(InvalidDefinition, match=re.escape(f"case name {name!r} of {FORWARD.id}")):
        a_case(name=name)


def test_a_case_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(
        InvalidDefinition, match=r"case new .* 'float64'; known are bfloat16, float16"
    ):
        a_case(dtype="float64")


def test_a_cases_sizes_and_layouts_cannot_be_changed_from_outside() -> None:
    sizes = dict(SMALL_SIZES[FORWARD.id])
    case = a_case(sizes=sizes, layouts={"cos": Layout(offset=4)}, published={"sol_us": 1.0})
    sizes["head_dim"] = 3
    assert case.sizes["head_dim"] == 8


def with_probe(**changes: object) -> Callable[[], Operator]:
    return lambda: replace(FORWARD, probes=(*FORWARD.probes, a_case(**changes)))


def with_axes(*axes: Axis) -> Callable[[], Operator]:
    return lambda: replace(FORWARD, axes=(*FORWARD.axes, *axes))


def with_input(**changes: object) -> Callable[[], Operator]:
    spec = TensorSpec(
        **{"name": "extra", "axes": ("batch_size",), "description": "", **changes}  # type: ignore[arg-type]
    )
    return lambda: replace(FORWARD, inputs=(*FORWARD.inputs, spec))


CONTRADICTIONS: Mapping[str, tuple[Callable[[], Operator], str]] = {
    "unknown axis of a tensor": (
        with_input(axes=("batch_size", "pages")),
        r"tensor extra .* unknown axis 'pages'; known are batch_size, current_seq_len, head_dim",
    ),
    "unknown part of a derived axis": (
        with_axes(Axis("total", "", sum_of=("new_seq_len", "pages"))),
        r"axis total .* unknown axis 'pages'",
    ),
    "one name for two tensors": (with_input(name="updated_key_cache"), r"updated_key_cache twice"),
    "two cases of one name": (with_probe(name="random"), r"two cases named random"),
    "an axis without a size": (
        with_probe(sizes={"batch_size": 1}),
        r"case new .* sizes of \['batch_size'\], but the free axes are \['batch_size', 'current",
    ),
    "a size of a derived axis": (
        with_probe(sizes={**SMALL_SIZES[FORWARD.id], "updated_seq_len": 12}),
        r"case new .* 'updated_seq_len'",
    ),
    "an unknown kind of inputs": (with_probe(kind="lognormal"), r"case new .* kind 'lognormal'"),
    "a broadcast input that may not": (
        with_probe(broadcast={"key_states": ("batch_size",)}),
        r"case new .* broadcasts key_states along batch_size; it may along no axis",
    ),
    "an unknown constraint": (
        with_probe(constraints=("tables=odd",)),
        r"case new .* unknown constraints tables=odd",
    ),
    "variety of a free axis": (
        lambda: replace(FORWARD, variety={"batch_size": (1,)}),
        r"varies 'batch_size' over \(1,\); give sizes of an axis that has an official one",
    ),
    "two variants of one name": (
        lambda: replace(FORWARD, variants=(Variant("x", "", tuple), Variant("x", "", tuple))),
        r"variants of one name: x",
    ),
    "a size the operator is not defined for": (
        with_probe(sizes={**SMALL_SIZES[FORWARD.id], "head_dim": 7}),
        r"case new .*head_dim .* is 7",
    ),
    "a type the operator is not judged in": (
        lambda: replace(FORWARD, dtypes=("bfloat16",), general_probes=(a_case(dtype="float16"),)),
        r"case new .*float16",
    ),
    "a layout of no input": (
        with_probe(layouts={"positions": Layout(offset=1)}),
        r"case new .*positions",
    ),
    "a case of another operator": (with_probe(operator=BACKWARD.id), rf"case new .*{BACKWARD.id}"),
    "an index of no axis": (
        with_input(axes=("new_seq_len",), indexes="pages"),
        r"extra .*'pages'",
    ),
    "a broadcast axis that the tensor lacks": (
        with_input(may_broadcast=("new_seq_len",)),
        r"extra .*'?new_seq_len",
    ),
    "an official size of no axis": (
        lambda: replace(FORWARD, official={"num_heads": 10}),
        r"num_heads",
    ),
    "an inplace pair of no tensors": (
        lambda: replace(FORWARD, inplace=(("key_caches", "updated_key_cache"),)),
        r"key_caches",
    ),
}


@pytest.mark.parametrize("fault", CONTRADICTIONS)
def test_a_definition_that_contradicts_itself_is_refused_naming_what_does_not_fit(
    fault: str,
) -> None:
    build, message = CONTRADICTIONS[fault]
    with pytest.raises(InvalidDefinition, match=message):
        build()


def test_the_probes_that_contradictions_start_from_are_themselves_accepted() -> None:
    assert with_probe()().case("new").name == "new"
    assert with_input()().inputs[-1].name == "extra"
    derived = with_axes(Axis("total", "", sum_of=("new_seq_len", "head_dim")))()
    assert derived.all_sizes(SMALL_SIZES[FORWARD.id])["total"] == 13


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.id)
def test_cases_are_probes_first_and_an_unknown_one_is_refused_with_those_there_are(
    operator: Operator,
) -> None:
    (suite,) = operator.suites
    assert operator.cases == (*operator.probes, *suite.cases, *operator.large)
    for case in operator.cases:
        assert operator.case(case.name) is case
    with pytest.raises(KeyError, match=r"no case 'no-such'; it has keep, turn, .*suite-16"):
        operator.case("no-such")


def test_operators_are_found_by_id_and_an_unknown_one_is_refused_with_those_there_are() -> None:
    assert list(all_operators()) == [
        "kv_rope.concat.backward",
        "kv_rope.concat.forward",
        "kv_rope.static.backward",
        "kv_rope.static.forward",
    ]
    assert find_operator("kv_rope.concat.forward") is oracle.find_operator("kv_rope.concat.forward")
    with pytest.raises(UnknownOperator, match=r"'kv_rope'; there are kv_rope.concat.backward, kv_"):
        find_operator("kv_rope")


class TestLayout:
    def test_the_plain_one_is_contiguous(self) -> None:
        assert Layout(offset=3).strides((2, 3, 5, 4)) == (60, 20, 4, 1)
        assert Layout(offset=3).is_contiguous((2, 3, 5, 4))

    @pytest.mark.parametrize(
        ("layout", "made"),
        [
            (Layout(order=(0, 2, 1, 3)), lambda: torch.empty(2, 5, 3, 4).transpose(1, 2)),
            (Layout(steps=(1, 1, 2, 1)), lambda: torch.empty(2, 3, 10, 4)[:, :, ::2]),
            (Layout(gaps=(0, 0, 0, 3)), lambda: torch.empty(2, 3, 5, 7)[..., :4]),
            (Layout(expanded=(0,)), lambda: torch.empty(1, 3, 5, 4).expand(2, 3, 5, 4)),
            (
                Layout(order=(2, 0, 1, 3), steps=(1, 1, 3, 1), gaps=(1, 0, 0, 2)),
                lambda: torch.empty(15, 3, 3, 6).permute(1, 2, 0, 3)[:2, :, ::3, :4],
            ),
        ],
    )
    def test_its_strides_are_those_of_the_view_it_describes(
        self, layout: Layout, made: Callable[[], torch.Tensor]
    ) -> None:
        view = made()
        assert layout.strides(view.shape) == view.stride()
        assert layout.is_contiguous(view.shape) == view.is_contiguous()

    def test_one_of_another_number_of_dimensions_is_refused(self) -> None:
        with pytest.raises(InvalidDefinition, match="is for 2 dimensions, not for shape"):
            Layout(order=(1, 0)).strides((2, 3, 4))


def test_a_domain_writes_its_claims_as_they_are_given() -> None:
    domain = Domain(
        "general", {"head_dim": (64, 128)}, ("float16",), contiguous=True, constraints=("a=b",)
    )
    text = "general where head_dim=64,128 dtype=float16 layout=contiguous a=b"
    assert str(domain) == text
    assert str(Domain()) == "official"


def test_a_case_may_broadcast_an_input_that_may() -> None:
    case = a_case(broadcast={"cos": ("batch_size",)})
    operator = replace(FORWARD, general_probes=(case,))
    shapes = {spec.name: operator.case_shape(spec, case) for spec in operator.inputs}
    batch = case.sizes["batch_size"]
    assert shapes["cos"] == (1, *shapes["sin"][1:])
    assert shapes["sin"][0] == batch != 1


def test_a_size_that_only_a_sum_tells_is_found() -> None:
    operator = find_operator("kv_rope.concat.backward")
    inputs = oracle.make_inputs(operator.case("random"))
    sizes = operator.bind(inputs)
    assert sizes["current_seq_len"] == sizes["updated_seq_len"] - sizes["new_seq_len"] > 0
    inputs["grad_updated_key_cache"] = inputs["grad_updated_key_cache"][:, :, :1]
    inputs["grad_updated_value_cache"] = inputs["grad_updated_value_cache"][:, :, :1]
    with pytest.raises(
        InvalidInput, match=r"updated_seq_len .* is 1; it must be current_seq_len \(\?\) \+ new_seq"
    ):
        operator.bind(inputs)
