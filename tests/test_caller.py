from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle.call import CallReply
from oracle.caller import Caller
from tests.calls import BAND, SPECIAL, Call, make_call, make_copy_call
from tests.hostile import calls as hostile


@pytest.fixture
def call(tmp_path: Path) -> Call:
    return make_call(tmp_path)


def called(call: Call, function: Callable[..., Any]) -> CallReply:
    return Caller(function, "cpu").call(call.request)


class TestReturning:
    def test_returned_bits_arrive_unchanged(self, call: Call) -> None:
        reply = called(call, lambda a, _: a.clone())
        assert (reply.status, reply.message, reply.output_text) == ("returned", "", "")
        assert call.output == list(SPECIAL)

    def test_facts_of_the_returned_tensor(self, call: Call) -> None:
        reply = called(call, lambda a, _: a.t().contiguous().t())
        (fact,) = reply.tensors
        assert (fact.type_name, fact.is_tensor) == ("torch.Tensor", True)
        assert (fact.dtype, fact.device, fact.layout) == ("bfloat16", "cpu", "strided")
        assert (fact.shape, fact.strides, fact.is_contiguous) == ((2, 3), (1, 2), False)
        assert (fact.itemsize, fact.footprint.extent_bytes) == (2, 12)
        assert fact.copied
        assert fact.poisoned is None
        assert (reply.returned_type, reply.returned_count) == ("torch.Tensor", 1)
        assert reply.input_device == "cpu"
        assert call.output == list(SPECIAL)

    def test_a_tensor_that_autograd_follows_is_copied(self, call: Call) -> None:
        called(call, lambda a, _: a.clone().requires_grad_())
        assert call.output == list(SPECIAL)

    def test_of_a_tensor_that_torch_negates_only_when_it_is_read_the_value_is_copied(
        self, call: Call
    ) -> None:
        called(call, lambda _, b: torch._neg_view(b))
        assert call.output == [0xC000] * 6

    def test_arguments_lie_as_their_layouts_say(self, call: Call) -> None:
        first, second = call.request.inputs
        strided = replace(first, shape=(3, 2), strides=(1, 3))
        inside = replace(second, shape=(2, 2), storage_offset=5)

        def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            assert (a.stride(), a.storage_offset()) == ((1, 3), 0)
            assert a.view(torch.int16)[1, 0] == -0x8000
            assert (b.storage_offset(), b.tolist()) == (5, [[2, 2], [2, 2]])
            return a.t()

        reply = called(Call(replace(call.request, inputs=(strided, inside))), f)
        assert reply.message == ""
        assert call.output == list(SPECIAL)

    def test_tensors_without_elements_keep_their_shape(self, call: Call) -> None:
        empty = replace(call.request.inputs[0], shape=(2, 0, 3), strides=(0, 3, 1))
        output = replace(empty, name="output", strides=(3, 3, 1))
        request = replace(call.request, inputs=(empty, empty), outputs=(output,))
        (fact,) = called(Call(request), lambda a, b: a + b).tensors
        assert (fact.shape, fact.footprint.extent_bytes, fact.copied) == ((2, 0, 3), 0, True)

    def test_memory_facts_show_a_returned_input(self, call: Call) -> None:
        reply = called(call, hostile.returns_its_input)
        assert reply.tensors[0].footprint == reply.input_footprints[0]
        assert reply.tensors[0].footprint != reply.input_footprints[1]

    def test_a_changed_input_shows_in_the_file(self, call: Call) -> None:
        called(call, hostile.writes_its_input)
        assert call.first_input == [*SPECIAL[:3], 0x429A, *SPECIAL[4:]]

    @pytest.mark.parametrize("fill_byte", [0xA5, 0x00])
    def test_fresh_memory_is_filled_during_the_call(self, tmp_path: Path, fill_byte: int) -> None:
        request = make_copy_call(tmp_path, 100_000, fill_byte=fill_byte)
        reply = Caller(hostile.returns_uninitialised_memory, "cpu").call(request)
        assert reply.tensors[0].poisoned is True
        assert (np.fromfile(request.outputs_path, np.uint8) == fill_byte).all()


class TestOutStyle:
    def test_outputs_are_given_where_they_lie_between_their_bands(self, tmp_path: Path) -> None:
        call = make_call(tmp_path, style="out")

        def f(a: torch.Tensor, _: torch.Tensor, out: torch.Tensor) -> None:
            assert out.isnan().all()
            assert out.data_ptr() % 16 == 0
            out.copy_(a)
            out.as_strided((1,), (1,), 0).fill_(1)

        reply = called(call, f)
        assert (reply.returned_type, reply.returned_count, reply.tensors) == ("NoneType", 0, ())
        assert call.output == [0x3F80, *SPECIAL[1:]]
        content = np.fromfile(call.request.outputs_path, np.uint8)
        assert (content[:BAND] == 0xFF).all()
        assert (content[BAND + 12 :] == 0xFF).all()

    def test_a_write_beyond_an_output_reaches_the_file(self, tmp_path: Path) -> None:
        call = make_call(tmp_path, style="out")

        def f(_a: torch.Tensor, _b: torch.Tensor, out: torch.Tensor) -> None:
            ctypes.memset(out.data_ptr() + 12, 7, 3)

        called(call, f)
        content = np.fromfile(call.request.outputs_path, np.uint8)
        assert content[BAND + 12 : BAND + 16].tolist() == [7, 7, 7, 255]


class TestInplaceStyle:
    def test_an_input_written_in_place_becomes_the_output(self, tmp_path: Path) -> None:
        call = make_call(tmp_path, style="inplace", inplace=((1, 0),))

        def f(a: torch.Tensor, b: torch.Tensor) -> None:
            b.copy_(a)
            b.data = torch.zeros(2, 3)

        assert called(call, f).returned_type == "NoneType"
        assert call.output == list(SPECIAL)

    def test_an_input_written_in_place_may_be_returned(self, tmp_path: Path) -> None:
        call = make_call(tmp_path, style="inplace", inplace=((1, 0),))
        reply = called(call, lambda a, b: b.copy_(a))
        assert not reply.tensors[0].copied
        assert call.output == list(SPECIAL)


class TestHeldOutputs:
    def test_a_reused_buffer_shows_as_a_changed_earlier_output(self, tmp_path: Path) -> None:
        request = make_call(tmp_path, keep_outputs=True).request
        caller = Caller(hostile.returns_one_buffer_always, "cpu")
        first, second = (caller.call(request) for _ in range(2))
        assert first.earlier == ()
        assert [(held.output, held.changed) for held in second.earlier] == [(0, True)]
        assert second.earlier[0].footprint == second.tensors[0].footprint

    def test_an_honest_output_is_no_changed_earlier_output(self, tmp_path: Path) -> None:
        request = make_call(tmp_path, keep_outputs=True).request
        caller = Caller(lambda a, b: a + b, "cpu")
        replies = [caller.call(request) for _ in range(3)]
        last = caller.call(replace(request, keep_outputs=False))
        after = caller.call(request)
        assert [held.changed for reply in (*replies, last) for held in reply.earlier] == [False] * 3
        assert replies[1].earlier[0].footprint != replies[1].tensors[0].footprint
        assert after.earlier == ()


class TestWhatIsNoOutput:
    @pytest.mark.parametrize(
        ("function", "returned_type", "item_type"),
        [
            (hostile.returns_none, "NoneType", None),
            (hostile.returns_a_list, "list", None),
            (hostile.returns_an_array, "numpy.ndarray", None),
            (hostile.returns_a_tuple_with_none, "tuple", "NoneType"),
            (hostile.returns_many_items, "tuple", "torch.Tensor"),
            (hostile.returns_float32, "torch.Tensor", "torch.Tensor"),
            (hostile.returns_another_shape, "torch.Tensor", "torch.Tensor"),
            (hostile.returns_a_sparse_tensor, "torch.Tensor", "torch.Tensor"),
            (hostile.returns_a_tensor_without_memory, "torch.Tensor", "torch.Tensor"),
            (hostile.returns_a_tensor_of_torch_func, "torch.Tensor", "torch.Tensor"),
        ],
    )
    def test_it_is_a_fact_and_not_copied(
        self,
        call: Call,
        function: Callable[..., Any],
        returned_type: str,
        item_type: str | None,
    ) -> None:
        reply = called(call, function)
        assert (reply.status, reply.returned_type) == ("returned", returned_type)
        assert not any(item.copied for item in reply.tensors)
        assert len(reply.tensors) <= 32
        assert [item.type_name for item in reply.tensors[-1:]] == ([item_type] if item_type else [])
        assert call.output == [0xFFFF] * 6

    def test_nothing_is_asked_of_a_subclass(self, call: Call) -> None:
        (fact,) = called(call, hostile.returns_a_subclass).tensors
        assert fact.is_tensor
        assert fact.type_name.endswith(".Liar")
        assert (fact.dtype, fact.shape, fact.copied) == ("", (), False)

    @pytest.mark.parametrize("pretended", [torch.Tensor, tuple])
    def test_an_object_that_says_it_is_of_another_class_is_not_believed(
        self, call: Call, pretended: type
    ) -> None:
        class Pretender:
            __class__ = pretended

        reply = called(call, lambda *_: Pretender())
        assert (reply.status, reply.returned_count) == ("returned", 0)
        assert reply.returned_type.endswith(".Pretender")
        (fact,) = called(call, lambda *_: (Pretender(),)).tensors
        assert not fact.is_tensor


class TestRaising:
    @pytest.mark.parametrize(
        ("function", "message"),
        [
            (
                hostile.raises,
                r"^The candidate raised ValueError: the kernel does not like these sizes \(.*\)\.$",
            ),
            (hostile.raises_at_length, r"The candidate raised ValueError: x{500}\.\.\. \(.*\)\."),
            (hostile.raises_without_text, r"raised BadText: \(its text cannot be shown\)"),
            (hostile.raises_base_exception, "raised BaseException: not even an Exception"),
            (hostile.calls_sys_exit, "raised SystemExit: 5"),
            (hostile.recurses_for_ever, r"raised RecursionError: .*calls\.py:\d+"),
        ],
    )
    def test_what_it_raises_is_told_with_its_line(
        self, call: Call, function: Callable[..., Any], message: str
    ) -> None:
        reply = called(call, function)
        assert reply.status == "raised"
        assert re.search(message, reply.message), reply.message

    @pytest.mark.parametrize(
        ("function", "message"),
        [
            (hostile.allocates_too_much, "you tried to allocate 4611686018427387904 bytes"),
            (hostile.allocates_too_much_for_numpy, "Unable to allocate 2.00 EiB"),
        ],
    )
    def test_too_large_an_allocation_is_out_of_memory(
        self, call: Call, function: Callable[..., Any], message: str
    ) -> None:
        reply = called(call, function)
        assert reply.status == "out_of_memory"
        assert message in reply.message

    def test_an_interrupt_is_the_users(self, call: Call) -> None:
        with pytest.raises(KeyboardInterrupt):
            called(call, hostile.raises_keyboard_interrupt)

    def test_a_candidate_without_a_line_of_python_is_told_without_one(self, call: Call) -> None:
        reply = called(call, divmod)
        assert reply.status == "raised"
        assert "oracle" not in reply.message
