"""Corruptions damage right outputs as they say, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle.corruption import Corruption, corruptions
from oracle.definition import Axis, Operator, TensorSpec

Outputs = dict[str, torch.Tensor]

AXES = ("batch_size", "num_kv_heads", "head_dim")


def operator(*outputs: TensorSpec) -> Operator:
    """An operator of which only the outputs' names and axes matter."""
    return Operator(
        id="test.shapes",
        title="",
        formula="",
        source="",
        axes=tuple(Axis(name, "") for name in AXES),
        inputs=(TensorSpec("a", AXES, ""),),
        outputs=outputs,
        dtypes=("bfloat16", "float16", "float32"),
        official={},
        reference=lambda inputs, dtype: (inputs[0].to(dtype),),
        blocks=lambda _inputs, _output, _limit: iter(()),
        input_kinds={},
        probes=(),
        suites=(),
    )


ONE = operator(TensorSpec("y", AXES, ""))
TWO = operator(TensorSpec("y", AXES, ""), TensorSpec("z", AXES, ""))


def numbered(*shape: int, start: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count).reshape(shape).to(dtype)


def named(name: str, of: Operator = ONE) -> Corruption:
    return next(corruption for corruption in corruptions(of) if corruption.name == name)


def damaged(name: str, right: torch.Tensor, earlier: torch.Tensor | None = None) -> torch.Tensor:
    old = torch.full_like(right, -1) if earlier is None else earlier
    return named(name).apply({"y": right}, {"y": old})["y"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def test_names_are_unique_and_every_named_axis_has_corruptions_but_not_the_axis_of_size_one() -> (
    None
):
    spec = TensorSpec("y", ("batch_size", "1", "head_dim"), "")
    names = [corruption.name for corruption in corruptions(operator(spec))]
    assert len(names) == len(set(names))
    assert "y.batch_size.rolled" in names
    assert "y.head_dim.rolled" in names
    assert not any(".1." in name or "-1-" in name for name in names)


def test_the_first_and_last_index_hold_another_calls_values() -> None:
    right, old = numbered(2, 3, 4), numbered(2, 3, 4, start=100)
    first = damaged("y.num_kv_heads.first-stale", right, old)
    assert torch.equal(first[:, 0], old[:, 0])
    assert torch.equal(first[:, 1:], right[:, 1:])
    last = damaged("y.head_dim.last-stale", right, old)
    assert torch.equal(last[..., -1], old[..., -1])
    assert torch.equal(last[..., :-1], right[..., :-1])


@pytest.mark.parametrize(
    ("size", "unwritten"), [(16, 0), (17, 1), (31, 15), (32, 16), (33, 1), (5, 0)]
)
def test_the_last_of_several_tiles_keeps_poison(size: int, unwritten: int) -> None:
    right = numbered(1, 1, size)
    got = damaged("y.head_dim.last-tile-16", right)
    assert torch.equal(got[..., : size - unwritten], right[..., : size - unwritten])
    assert (bits(got[..., size - unwritten :]) == 0x7F7F7F7F).all()


def test_rolled_values_come_from_the_index_before() -> None:
    right = numbered(2, 3, 4)
    assert torch.equal(damaged("y.num_kv_heads.rolled", right)[:, 1], right[:, 0])


def test_reversed_first_for_all_and_zero_do_what_they_say() -> None:
    right = numbered(2, 3, 4)
    assert torch.equal(damaged("y.head_dim.reversed", right), right.flip(2))
    assert torch.equal(damaged("y.batch_size.first-for-all", right)[1], right[0])
    zero = damaged("y.num_kv_heads.last-zero", right)
    assert (zero[:, -1] == 0).all()
    assert torch.equal(zero[:, :-1], right[:, :-1])


def test_the_second_half_of_an_axis_is_negated() -> None:
    right = numbered(2, 3, 4)
    got = damaged("y.head_dim.half-negated", right)
    assert torch.equal(got[..., :2], right[..., :2])
    assert torch.equal(got[..., 2:], -right[..., 2:])


def test_transposed_axes_keep_the_shape_and_the_memory_order_of_the_other_one() -> None:
    right = numbered(2, 3, 4)
    got = damaged("y.batch_size-num_kv_heads-transposed", right)
    assert got.shape == right.shape
    assert torch.equal(got.reshape(3, 2, 4), right.transpose(0, 1))


def test_two_outputs_of_equal_axes_are_swapped() -> None:
    outputs = {"y": numbered(2, 1, 2), "z": numbered(2, 1, 2, start=9)}
    got = named("y-z-swapped", TWO).apply(outputs, outputs)
    assert torch.equal(got["y"], outputs["z"])
    assert torch.equal(got["z"], outputs["y"])


def test_outputs_of_different_axes_are_not_swapped() -> None:
    other = operator(TensorSpec("y", AXES, ""), TensorSpec("z", AXES[:2], ""))
    assert not any("swapped" in corruption.name for corruption in corruptions(other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ulps_are_counted_in_the_outputs_type_and_stop_at_infinity_and_zero(
    dtype: torch.dtype,
) -> None:
    largest = torch.finfo(dtype).max
    right = torch.tensor([[[1.0, -1.0, 0.0, largest, torch.inf, torch.nan]]], dtype=dtype)
    up = damaged("y.away-from-zero", right)[0, 0]
    step = torch.finfo(dtype).eps
    assert up[:2].tolist() == [1 + 2 * step, -1 - 2 * step]
    assert bits(up[2:3]).item() == 2
    assert up[3:5].tolist() == [torch.inf, torch.inf]
    assert torch.equal(bits(up[5:]), bits(right[0, 0, 5:]))
    down = damaged("y.towards-zero", right)[0, 0]
    assert down[:3].tolist() == [1 - step / 2, -1 + step / 2, 0.0]
    assert down[4].item() == largest


@pytest.mark.parametrize(("place", "index"), [("first", 0), ("middle", 12), ("last", 23)])
def test_one_element_changes_and_no_other(place: str, index: int) -> None:
    right = numbered(2, 3, 4, dtype=torch.bfloat16)
    for kind in ("exponent", "ulps"):
        got = damaged(f"y.{place}-element-{kind}", right)
        assert (got != right).reshape(-1).nonzero().tolist() == [[index]]


def test_a_flipped_exponent_bit_doubles_or_halves() -> None:
    right = torch.tensor([[[2.0, 3.0, 1.0]]], dtype=torch.bfloat16)
    assert damaged("y.first-element-exponent", right)[0, 0, 0] in (1.0, 4.0)


def test_a_nan_appears_in_the_last_row_only() -> None:
    got = damaged("y.nan-in-last-row", numbered(2, 3, 4, dtype=torch.float16))
    assert torch.isnan(got).reshape(-1, 4).nonzero()[:, 0].tolist() == [5]


def test_nothing_written_is_poison_and_low_bits_are_cleared() -> None:
    right = numbered(1, 1, 3, dtype=torch.bfloat16)
    assert (bits(damaged("y.unwritten", right)) == 0x7F7F).all()
    odd = torch.tensor([[[1 + 2**-7]]], dtype=torch.bfloat16)
    assert damaged("y.low-bit-lost", odd).item() == 1.0


shapes = st.tuples(st.integers(0, 3), st.integers(0, 18), st.sampled_from([0, 1, 2, 33]))


@given(shapes, st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), st.booleans())
def test_every_corruption_keeps_shape_and_type_and_leaves_the_given_outputs_alone(
    shape: tuple[int, int, int], dtype: torch.dtype, strided: bool
) -> None:
    def make(start: int) -> torch.Tensor:
        tensor = numbered(*shape, start=start, dtype=dtype)
        return tensor.transpose(0, 1).contiguous().transpose(0, 1) if strided else tensor

    outputs, earlier = ({"y": make(k), "z": make(k + 7)} for k in (1, 1000))
    before = {name: tensor.clone() for name, tensor in outputs.items()}
    for corruption in corruptions(TWO):
        got: Mapping[str, torch.Tensor] = corruption.apply(outputs, earlier)
        assert list(got) == ["y", "z"]
        for name, tensor in got.items():
            assert tensor.shape == outputs[name].shape
            assert tensor.dtype == dtype
            assert torch.equal(outputs[name], before[name])
            if name not in corruption.outputs:
                assert tensor is outputs[name]
            elif tensor.numel():
                assert tensor.data_ptr() != outputs[name].data_ptr()
