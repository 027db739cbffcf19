from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from oracle.call import CallRequest, TensorLayout
from oracle.caller import Caller
from oracle.definition import FLOATING_DTYPES, Case, Layout, Operator, TensorSpec
from oracle.exchange import GUARD_BYTES, GUARD_FILL, Arena, Plan, plan

OPERATORS = tuple(oracle.all_operators().values())


def case_of(operator: Operator, dtype: str = "bfloat16", size: int = 3) -> Case:
    """A case whose axes are all of one size."""
    sizes = dict.fromkeys(operator.probes[0].sizes, size)
    return Case(operator.id, "case", "probes", sizes, operator.probes[0].kind, dtype)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    operator = draw(st.sampled_from(OPERATORS))
    case = draw(st.sampled_from(operator.probes))
    sizes = {axis: draw(st.integers(0, 5)) for axis in case.sizes}
    case = replace(case, sizes=sizes, dtype=draw(st.sampled_from(FLOATING_DTYPES)))
    specs = draw(st.sampled_from([operator.inputs, operator.outputs]))
    chosen = draw(st.sets(st.sampled_from([spec.name for spec in specs])))
    layouts = {spec.name: draw(any_layout(spec)) for spec in specs if spec.name in chosen}
    return plan(operator, case, specs, layouts)


def any_layout(spec: TensorSpec) -> st.SearchStrategy[Layout]:
    """Layouts of all kinds for a tensor; one of an index tensor is not expanded."""
    dimensions = range(len(spec.axes))
    per_dimension = st.tuples(*(st.integers(1, 3) for _ in dimensions))
    gaps = st.tuples(*(st.integers(0, 3) for _ in dimensions))
    expanded = st.sets(st.sampled_from(dimensions), max_size=1).map(tuple)
    return st.builds(
        Layout,
        offset=st.integers(0, 5000),
        order=st.one_of(st.just(()), st.permutations(dimensions).map(tuple)),
        steps=st.one_of(st.just(()), per_dimension),
        gaps=st.one_of(st.just(()), gaps),
        expanded=st.just(()) if spec.indexes else expanded,
    )


def _distinct_elements(place: TensorLayout) -> int:
    """How many places in memory a tensor's elements have."""
    moving = (size for size, stride in zip(place.shape, place.strides, strict=True) if stride)
    return 0 if 0 in place.shape else math.prod(moving)


class TestPlan:
    @given(plans())
    def test_storages_lie_in_order_with_a_band_before_between_and_after_them(
        self, drawn: Plan
    ) -> None:
        end = 0
        for place in drawn.layouts:
            start = place.offset - place.storage_offset * place.itemsize
            assert start - end >= GUARD_BYTES
            assert start % GUARD_BYTES == 0
            end = place.offset + place.footprint.extent_bytes
        assert drawn.size - end >= GUARD_BYTES
        assert drawn.size % GUARD_BYTES == 0

    @given(plans())
    def test_arrays_are_the_bytes_of_their_layouts_and_share_none(self, drawn: Plan) -> None:
        buffer = np.zeros(drawn.size, np.uint8)
        arrays = drawn.arrays(buffer)
        assert list(arrays) == [spec.name for spec in drawn.specs]
        for number, (array, place) in enumerate(zip(arrays.values(), drawn.layouts, strict=True)):
            assert array.shape == place.shape
            assert array.itemsize == place.itemsize
            array.view(f"u{array.itemsize}")[...] = number + 1
        for number, place in enumerate(drawn.layouts):
            stop = place.offset + place.footprint.extent_bytes
            found = buffer[place.offset : stop].view(f"u{place.itemsize}")
            # Gaps between the elements of a strided tensor stay as they were.
            owned = _distinct_elements(place)
            assert np.count_nonzero(found == number + 1) == owned
            assert np.count_nonzero(found == 0) == found.size - owned

    @given(plans())
    def test_guards_are_all_bytes_but_the_elements(self, drawn: Plan) -> None:
        buffer = np.zeros(drawn.size, np.uint8)
        drawn.fill_guards(buffer)
        for place, array in zip(drawn.layouts, drawn.arrays(buffer).values(), strict=True):
            if place.is_contiguous:
                assert not array.view(f"u{array.itemsize}").any()
            array.view(f"u{array.itemsize}")[...] = np.iinfo(f"u{array.itemsize}").max
        assert (buffer == GUARD_FILL).all()

    @given(plans(), st.integers(0, 255))
    def test_what_is_stored_is_read_back_and_nothing_else_changes(
        self, drawn: Plan, byte: int
    ) -> None:
        buffer = np.full(drawn.size, byte, np.uint8)
        filled = drawn.contiguous_arrays(buffer)
        for number, array in enumerate(filled.values()):
            assert array.flags.c_contiguous
            array.view(f"u{array.itemsize}")[...] = np.arange(array.size).reshape(array.shape) + 7
            array.view(f"u{array.itemsize}")[...] += number
        wanted = {name: array.copy() for name, array in filled.items()}
        drawn.store(filled, buffer)
        for place, (name, array) in zip(drawn.layouts, drawn.arrays(buffer).items(), strict=True):
            first = tuple(slice(0, None if stride else 1) for stride in place.strides)
            expected = np.broadcast_to(wanted[name][first], place.shape)
            if place.is_contiguous:
                expected = wanted[name]
            assert np.array_equal(array, expected)
            array.view(f"u{array.itemsize}")[...] = int.from_bytes(
                bytes([byte] * place.itemsize), "little"
            )
        assert (buffer == byte).all()

    @pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.id)
    def test_layouts_are_those_of_the_operator(self, operator: Operator) -> None:
        case = case_of(operator)
        drawn = plan(operator, case, operator.inputs, {})
        for spec, place in zip(operator.inputs, drawn.layouts, strict=True):
            assert (place.name, place.axes) == (spec.name, spec.axes)
            assert place.shape == operator.shape(spec, case.sizes)
            assert place.dtype == ("bfloat16" if spec.indexes is None else "int64")
            assert place.storage_offset == 0

    @pytest.mark.parametrize("dtype", FLOATING_DTYPES)
    def test_tensors_share_the_buffers_memory(self, dtype: str) -> None:
        operator = oracle.find_operator("kv_rope.static.backward")
        drawn = plan(operator, case_of(operator, dtype), operator.inputs, {})
        buffer = np.zeros(drawn.size, np.uint8)
        drawn.arrays(buffer)["cache_position"][...] = 7
        tensors = drawn.tensors(buffer)
        assert tensors["key_states"].dtype is getattr(torch, dtype)
        assert tensors["cache_position"].tolist() == [7, 7, 7]
        tensors["key_states"].fill_(1)
        assert buffer.any()

    def test_a_tensor_that_starts_inside_a_larger_buffer_has_that_buffer_before_it(self) -> None:
        operator = oracle.find_operator("kv_rope.concat.forward")
        case = case_of(operator)
        name = operator.inputs[1].name
        plain = plan(operator, case, operator.inputs, {}).layouts[1]
        moved = plan(operator, case, operator.inputs, {name: Layout(offset=11)}).layouts[1]
        assert (moved.storage_offset, moved.offset) == (11, plain.offset + 11 * 2)

    def test_tensors_without_elements_have_places_of_their_own(self) -> None:
        operator = oracle.find_operator("kv_rope.concat.forward")
        drawn = plan(operator, case_of(operator, size=0), operator.inputs, {})
        buffer = np.zeros(drawn.size, np.uint8)
        assert all(array.size == 0 for array in drawn.arrays(buffer).values())
        offsets = [place.offset for place in drawn.layouts]
        assert offsets == [GUARD_BYTES * number for number in range(1, len(offsets) + 1)]
        drawn.fill_guards(buffer)
        assert (buffer == GUARD_FILL).all()


class TestArena:
    SIZE = 3 * GUARD_BYTES

    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        with Arena(self.SIZE) as arena:
            yield arena

    def test_another_mapping_shows_the_same_bytes(self, arena: Arena) -> None:
        arena.bytes[5] = 9
        mapped = np.memmap(arena.path, np.uint8, "r+")
        assert (mapped.size, mapped[5]) == (self.SIZE, 9)
        mapped[6] = 8
        assert arena.bytes[6] == 8

    @pytest.mark.parametrize("size", [0, GUARD_BYTES, SIZE + 1, 2**40])
    def test_a_candidate_cannot_change_its_size(self, arena: Arena, size: int) -> None:
        operator = oracle.find_operator("kv_rope.concat.forward")
        specs = operator.inputs[:1]
        drawn = plan(operator, case_of(operator, size=2), specs, {})
        assert drawn.size == self.SIZE
        request = CallRequest(arena.path, drawn.layouts, arena.path, drawn.layouts)

        def by_path(_: torch.Tensor) -> None:
            os.truncate(arena.path, size)

        def by_descriptor(_: torch.Tensor) -> None:
            with Path(arena.path).open("r+b") as file:
                os.ftruncate(file.fileno(), size)

        for candidate in (by_path, by_descriptor):
            reply = Caller(candidate, "cpu").call(request)
            # Looked at before the bytes: they would be the end of this process.
            assert Path(arena.path).stat().st_size == self.SIZE
            assert reply.status == "raised"
            assert "PermissionError" in reply.message
        assert not arena.bytes.any()

    @pytest.mark.parametrize("seal", [fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK, 0x10])
    def test_nobody_can_seal_it_any_further(self, arena: Arena, seal: int) -> None:
        # 0x10 is F_SEAL_FUTURE_WRITE, for which Python 3.11 has no name.
        with Path(arena.path).open("r+b") as file, pytest.raises(PermissionError):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seal)

    def test_what_refers_to_it_keeps_its_memory_when_it_is_closed(self) -> None:
        arena = Arena(self.SIZE)
        contents = arena.bytes
        contents[0] = 3
        path = arena.path
        arena.close()
        arena.close()
        assert contents[0] == 3
        assert arena.bytes.size == 0
        assert not Path(path).exists()
