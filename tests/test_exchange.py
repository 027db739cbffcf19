from __future__ import annotations

import fcntl
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
from oracle.call import CallRequest
from oracle.caller import Caller
from oracle.definition import FLOATING_DTYPES, Case, Layout, Operator
from oracle.exchange import GUARD_BYTES, GUARD_FILL, Arena, Plan, contiguous_strides, plan

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
    offsets = st.integers(0, 5000).map(lambda offset: Layout(offset=offset))
    layouts = draw(st.dictionaries(st.sampled_from([spec.name for spec in specs]), offsets))
    return plan(operator, case, specs, layouts)


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
            assert (found == number + 1).all()

    @given(plans())
    def test_guards_are_all_bytes_but_the_elements(self, drawn: Plan) -> None:
        buffer = np.zeros(drawn.size, np.uint8)
        drawn.fill_guards(buffer)
        for array in drawn.arrays(buffer).values():
            assert not array.view(f"u{array.itemsize}").any()
            array.view(f"u{array.itemsize}")[...] = np.iinfo(f"u{array.itemsize}").max
        assert (buffer == GUARD_FILL).all()

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


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((), ()), ((5,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 0, 4), (4, 4, 1)), ((0,), (1,))],
)
def test_contiguous_strides_are_those_of_torch(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    assert contiguous_strides(shape) == strides == torch.empty(shape).stride()


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
