from __future__ import annotations

import itertools
from dataclasses import replace
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle import guards
from oracle.call import (
    CallReply,
    CallRequest,
    EarlierOutput,
    Footprint,
    ReturnedTensor,
    TensorLayout,
)
from oracle.caller import Caller
from oracle.guards import (
    REMARK,
    Finding,
    judge_bounds,
    judge_earlier_outputs,
    judge_initialised,
    judge_inputs,
    judge_overlaps,
    judge_structure,
    overlap,
    remark_unexercised,
)
from oracle.verdict import STATUSES

BAND = 4096
KEYS = TensorLayout("keys", "bfloat16", (2, 3), (3, 1), BAND)
VALUES = TensorLayout("values", "bfloat16", (2, 3), (3, 1), 2 * BAND + 16)
NEW_KEYS = TensorLayout("new_keys", "bfloat16", (2, 3), (3, 1), BAND, axes=("batch", "head_dim"))
NEW_VALUES = replace(NEW_KEYS, name="new_values", offset=2 * BAND + 16)
SIZE = 3 * BAND + 32


@pytest.fixture
def request_(tmp_path: Path) -> CallRequest:
    for name in ("inputs", "outputs"):
        np.full(SIZE, 0x44, np.uint8).tofile(tmp_path / name)
    return CallRequest(
        inputs_path=str(tmp_path / "inputs"),
        inputs=(KEYS, VALUES),
        outputs_path=str(tmp_path / "outputs"),
        outputs=(NEW_KEYS, NEW_VALUES),
    )


def judged(request: CallRequest, function: Any, contiguous: bool = True) -> tuple[Finding, ...]:
    reply = Caller(function, "cpu").call(request)
    assert reply.status == "returned", reply.message
    return judge_structure(request, reply, contiguous)


def only(findings: tuple[Finding, ...]) -> Finding:
    (finding,) = findings
    assert finding.status in {*STATUSES, REMARK}
    assert bool(finding.violation) == (finding.status == "call_violation")
    assert finding.message.endswith(".")
    return finding


class TestStructure:
    def test_honest_outputs_have_no_findings(self, request_: CallRequest) -> None:
        assert judged(request_, lambda k, v: (k.clone(), v.clone())) == ()

    @pytest.mark.parametrize(
        ("function", "violation", "message"),
        [
            (
                lambda *_: None,
                "wrong_return_type",
                (
                    "The candidate returned None; return a tensor or a tuple of tensors:"
                    " new_keys, new_values."
                ),
            ),
            (
                lambda k, v: [k.clone(), v.clone()],
                "wrong_return_type",
                (
                    "The candidate returned an object of type list; return a tensor or a tuple of"
                    " tensors: new_keys, new_values."
                ),
            ),
            (
                lambda k, _: k.float().numpy(),
                "wrong_return_type",
                (
                    "The candidate returned an object of type numpy.ndarray; return a tensor or a"
                    " tuple of tensors: new_keys, new_values."
                ),
            ),
            (
                lambda k, _: (k.clone(), None),
                "wrong_return_type",
                "new_values is None; return a tensor.",
            ),
            (
                lambda k, _: (3.0, k.clone()),
                "wrong_return_type",
                "new_keys is an object of type float; return a tensor.",
            ),
            (
                lambda k, _: k.clone(),
                "wrong_output_count",
                (
                    "The candidate returned 1 output, expected 2: new_keys, new_values; return"
                    " them as a tuple in this order."
                ),
            ),
            (
                lambda *_: (),
                "wrong_output_count",
                (
                    "The candidate returned 0 outputs, expected 2: new_keys, new_values; return"
                    " them as a tuple in this order."
                ),
            ),
            (
                lambda k, v: (k.clone(), torch.nn.Parameter(v.clone())),
                "tensor_subclass",
                (
                    "new_values is of the tensor subclass torch.nn.parameter.Parameter, whose"
                    " memory cannot be trusted to hold its values; return a plain torch.Tensor."
                ),
            ),
        ],
    )
    def test_items_that_are_no_outputs(
        self, request_: CallRequest, function: Any, violation: str, message: str
    ) -> None:
        finding = only(judged(request_, function))
        assert finding == Finding("call_violation", violation, message)

    @pytest.mark.parametrize(
        ("change", "status", "message"),
        [
            (
                lambda k: k[:, :1].clone(),
                "wrong_shape",
                "new_keys has shape (2, 1), expected (2, 3): axis 1 (head_dim) is 1 instead of 3.",
            ),
            (
                lambda k: k[None].clone(),
                "wrong_shape",
                "new_keys has shape (1, 2, 3), expected (2, 3): it has 3 axes instead of 2.",
            ),
            (
                lambda k: k.float(),
                "wrong_dtype",
                "new_keys has dtype float32, expected bfloat16.",
            ),
            (
                lambda k: torch.empty_like(k, device="meta"),
                "wrong_device",
                "new_keys is on the device meta, expected cpu, where the inputs are.",
            ),
            (
                lambda k: k.t().contiguous().t(),
                "wrong_layout",
                (
                    "new_keys is not contiguous: its strides are (1, 2), while all inputs are"
                    " contiguous."
                ),
            ),
            (
                lambda k: k.to_sparse(),
                "wrong_layout",
                "new_keys is sparse_coo; return a strided tensor.",
            ),
        ],
    )
    def test_tensors_that_are_not_what_is_due(
        self, request_: CallRequest, change: Any, status: str, message: str
    ) -> None:
        finding = only(judged(request_, lambda k, v: (change(k), v.clone())))
        assert finding == Finding(status, "", message)

    def test_every_fault_of_a_tensor_is_found(self, request_: CallRequest) -> None:
        findings = judged(request_, lambda k, v: (k.float().t().contiguous().t()[:1], v.clone()))
        statuses = [finding.status for finding in findings]
        assert statuses == ["wrong_shape", "wrong_dtype", "wrong_layout"]

    def test_a_shape_without_named_axes(self, request_: CallRequest) -> None:
        request = replace(request_, outputs=(replace(NEW_KEYS, axes=()),))
        finding = only(judged(request, lambda k, _: k[:1].clone()))
        assert finding.message.endswith(": axis 0 is 1 instead of 2.")

    def test_a_tensor_without_memory(self, request_: CallRequest) -> None:
        def f(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen = []
            torch.func.vmap(lambda x: (seen.append(x), x.sum())[1])(torch.stack([keys, keys]))
            return seen[0], values.clone()

        finding = only(judged(request_, f))
        assert finding.status == "wrong_layout"
        assert finding.message == "new_keys has no memory of its own; return a copy."

    def test_a_layout_is_a_remark_where_inputs_are_not_contiguous(
        self, request_: CallRequest
    ) -> None:
        strided = lambda k, v: (k.t().contiguous().t(), v.clone())  # noqa: E731
        finding = only(judged(request_, strided, contiguous=False))
        assert finding == Finding(REMARK, "", "new_keys is not contiguous: its strides are (1, 2).")

    def test_the_out_style_returns_nothing(self, request_: CallRequest) -> None:
        request = replace(request_, style="out")
        assert judged(request, lambda *_: None) == ()
        finding = only(judged(request, lambda *tensors: tensors[2]))
        assert finding.violation == "wrong_return_type"
        assert finding.message == (
            "The candidate returned an object of type torch.Tensor; in the style 'out' the results"
            " go into the output tensors and None is returned."
        )

    def test_the_inplace_style_returns_what_is_not_written_in_place(
        self, request_: CallRequest
    ) -> None:
        both = replace(request_, style="inplace", inplace=((0, 0), (1, 1)))
        assert judged(both, lambda *_: None) == ()
        assert judged(both, lambda k, v: (k, v)) == ()
        one = replace(request_, style="inplace", inplace=((0, 0),))
        assert judged(one, lambda _, v: v.clone()) == ()
        assert judged(one, lambda k, v: (k, v.clone())) == ()
        assert only(judged(one, lambda *_: None)).message.endswith(": new_values.")
        assert only(judged(one, lambda _, v: v)).violation == "output_aliases_input"
        # It is the first input that may become the first output.
        assert only(judged(one, lambda _, v: (v, v.clone()))).violation == "output_aliases_input"


class TestOverlaps:
    @pytest.mark.parametrize(
        ("function", "violation", "names"),
        [
            (lambda k, v: (k, v.clone()), "output_aliases_input", ("new_keys", "input keys")),
            (lambda k, _: (k.clone(), k), "output_aliases_input", ("new_values", "input keys")),
            (lambda _, v: (v.view(2, 3), v.clone()), "output_aliases_input", ("values",)),
            (lambda k, _: (k.clone(),) * 2, "output_aliases_output", ("new_values", "new_keys")),
        ],
    )
    def test_shared_memory(
        self, request_: CallRequest, function: Any, violation: str, names: tuple[str, ...]
    ) -> None:
        finding = only(judged(request_, function))
        assert (finding.status, finding.violation) == ("call_violation", violation)
        assert all(name in finding.message for name in names)

    def test_overlapping_parts_of_one_buffer(self, request_: CallRequest) -> None:
        def f(*_: torch.Tensor, gap: int) -> tuple[torch.Tensor, torch.Tensor]:
            buffer = torch.zeros(20, dtype=torch.bfloat16)
            return buffer[:6].view(2, 3), buffer[gap : gap + 6].view(2, 3)

        assert judged(request_, lambda k, v: f(k, v, gap=6)) == ()
        finding = only(judged(request_, lambda k, v: f(k, v, gap=5)))
        assert finding.violation == "output_aliases_output"

    def test_interleaved_outputs_share_no_memory(self, request_: CallRequest) -> None:
        def f(*_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            buffer = torch.zeros(2, 2, 3, dtype=torch.bfloat16)
            return buffer[:, 0], buffer[:, 1]

        findings = judged(request_, f, contiguous=False)
        assert [finding.status for finding in findings] == [REMARK, REMARK]

    def test_an_output_of_the_call_before(self, request_: CallRequest) -> None:
        request = replace(request_, keep_outputs=True)
        buffer = torch.zeros(2, 3, dtype=torch.bfloat16)

        def f(keys: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return keys.clone(), buffer.add_(1)

        caller = Caller(f, "cpu")
        first, second = caller.call(request), caller.call(request)
        assert judge_structure(request, first, True) == ()
        assert judge_earlier_outputs(request, first) == ()
        finding = only(judge_structure(request, second, True))
        assert finding.violation == "output_aliases_earlier_output"
        assert finding.message.startswith("new_values shares memory with an output that an earlier")
        finding = only(judge_earlier_outputs(request, second))
        assert finding.violation == "earlier_output_changed"
        assert finding.message.startswith("This call changed the new_values that the call before")

    def test_an_earlier_output_may_be_changed_without_being_returned(
        self, request_: CallRequest
    ) -> None:
        held = EarlierOutput(0, Footprint(64, 2, (2, 3), (3, 1)), changed=True)
        reply = CallReply("returned", returned_type="NoneType", earlier=(held,))
        assert judge_overlaps(replace(request_, inputs=()), reply) == ()
        assert "new_keys" in only(judge_earlier_outputs(request_, reply)).message

    def test_tensors_without_elements_share_nothing(self) -> None:
        empty = Footprint(64, 2, (2, 0), (1, 1))
        assert not overlap(empty, Footprint(0, 2, (200,), (1,)))
        assert not overlap(empty, empty)

    @given(st.data())
    def test_it_equals_the_intersection_of_all_bytes(self, data: st.DataObject) -> None:
        def footprint() -> Footprint:
            rank = data.draw(st.integers(0, 4))
            shape = tuple(data.draw(st.integers(0, 4)) for _ in range(rank))
            strides = tuple(data.draw(st.integers(0, 9)) for _ in range(rank))
            itemsize = data.draw(st.sampled_from([1, 2, 4]))
            return Footprint(data.draw(st.integers(0, 60)), itemsize, shape, strides)

        one, other = footprint(), footprint()
        expected = not all_bytes(one).isdisjoint(all_bytes(other))
        assert overlap(one, other) == overlap(other, one) == expected

    def test_beyond_the_limit_crossing_ranges_are_taken_to_overlap(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        even, odd = Footprint(0, 2, (8, 4), (64, 2)), Footprint(2, 2, (8, 4), (64, 2))
        assert not overlap(even, odd)
        monkeypatch.setattr(guards, "MOST_RUNS", 31)
        assert overlap(even, odd)
        assert not overlap(even, replace(odd, address=10_000))

    def test_large_permuted_tensors_are_followed_exactly(self) -> None:
        # Four GiB each, one after the other: in memory [B, S, H, D], as models pass them.
        first = Footprint(0, 2, (2, 8, 2**20, 128), (2**30, 128, 1024, 1))
        assert first.extent_bytes == 2**32
        assert not overlap(first, replace(first, address=2**32))
        assert overlap(first, replace(first, address=2**32 - 2))


def all_bytes(footprint: Footprint) -> set[int]:
    places = itertools.product(*(range(size) for size in footprint.shape))
    starts = (
        footprint.address + footprint.itemsize * sum(map(mul, place, footprint.strides))
        for place in places
    )
    return {start + byte for start in starts for byte in range(footprint.itemsize)}


def content(size: int = SIZE) -> npt.NDArray[np.uint8]:
    return (np.arange(size) % 251).astype(np.uint8)


class TestInputs:
    def test_unchanged(self, request_: CallRequest) -> None:
        assert judge_inputs(request_, content(), content()) == ()

    def test_the_first_changed_element_of_each_input(self, request_: CallRequest) -> None:
        before, after = content(), content()
        before[KEYS.offset + 8 : KEYS.offset + 10] = (0x80, 0x3F)
        after[KEYS.offset + 8 : KEYS.offset + 10] = (0x00, 0xC0)
        after[KEYS.offset + 11] ^= 1
        after[VALUES.offset] ^= 128
        first, second = judge_inputs(request_, before, after)
        assert first == Finding(
            "call_violation",
            "input_mutated",
            "The input keys was changed in 2 of 6 elements, first at (1, 1): 0x3f80 (1) became"
            " 0xc000 (-2). Write to fresh memory.",
        )
        assert second.message.startswith(
            "The input values was changed in 1 of 6 elements, first at (0, 0)"
        )

    def test_a_changed_sign_of_zero_or_nan_payload_is_a_change(self, request_: CallRequest) -> None:
        for old, new in ((0x0000, 0x8000), (0x7FC0, 0x7FC1)):
            before, after = content(), content()
            before[KEYS.offset : KEYS.offset + 2] = np.array([old], "<u2").view(np.uint8)
            after[KEYS.offset : KEYS.offset + 2] = np.array([new], "<u2").view(np.uint8)
            assert only(judge_inputs(request_, before, after)).violation == "input_mutated"

    @pytest.mark.parametrize(
        ("dtype", "old", "new", "text"),
        [
            ("bfloat16", [0x3F81], [0x7FC0], "0x3f81 (1.0078125) became 0x7fc0 (nan)"),
            ("float16", [0x3C01], [0xFC00], "0x3c01 (1.00097656) became 0xfc00 (-inf)"),
            ("float32", [0x3F800001], [1], "0x3f800001 (1.00000012) became 0x00000001 (1.4"),
            ("int64", [5], [2**64 - 1], "0x0000000000000005 (5) became 0xffffffffffffffff (-1)"),
        ],
    )
    def test_elements_are_shown_as_bits_and_values(
        self, request_: CallRequest, dtype: str, old: list[int], new: list[int], text: str
    ) -> None:
        layout = TensorLayout("keys", dtype, (1,), (1,), 8)
        kind = f"u{layout.itemsize}"
        before, after = content(), content()
        before[8 : 8 + layout.itemsize] = np.array(old, kind).view(np.uint8)
        after[8 : 8 + layout.itemsize] = np.array(new, kind).view(np.uint8)
        finding = only(judge_inputs(replace(request_, inputs=(layout,)), before, after))
        assert text in finding.message

    def test_inputs_written_in_place_are_left_out(self, request_: CallRequest) -> None:
        after = content()
        after[KEYS.offset] ^= 1
        request = replace(request_, style="inplace", inplace=((0, 0),))
        assert judge_inputs(request, content(), after) == ()

    def test_gaps_and_bands_are_not_inputs(self, request_: CallRequest) -> None:
        strided = replace(KEYS, strides=(6, 2))
        request = replace(request_, inputs=(strided,))
        after = content()
        after[KEYS.offset + 2] ^= 1
        after[KEYS.offset - 1] ^= 1
        assert judge_inputs(request, content(), after) == ()
        after[KEYS.offset + 16] ^= 1
        assert "first at (1, 1)" in only(judge_inputs(request, content(), after)).message

    def test_inputs_of_more_than_one_chunk(
        self, request_: CallRequest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(guards, "_CHUNK", 4)
        after = content()
        after[KEYS.offset + 11] ^= 1
        assert "first at (1, 2)" in only(judge_inputs(request_, content(), after)).message

    def test_an_input_without_elements(self, request_: CallRequest) -> None:
        empty = replace(KEYS, shape=(0, 3))
        request = replace(request_, inputs=(empty,))
        assert judge_inputs(request, content(), content() ^ 1) == ()

    def test_contents_of_different_sizes_are_refused(self, request_: CallRequest) -> None:
        with pytest.raises(ValueError, match="had 10 bytes before the call and 12 after it"):
            judge_inputs(request_, content(10), content(12))


class TestBounds:
    @pytest.mark.parametrize(
        ("place", "where"),
        [
            (0, "4096 bytes before the start of keys"),
            (KEYS.offset - 1, "1 byte before the start of keys"),
            (KEYS.offset + 12, "1 byte after the end of keys"),
            (VALUES.offset - 3, "3 bytes before the start of values"),
            (VALUES.offset + 12, "1 byte after the end of values"),
            (SIZE - 1, f"{SIZE - VALUES.offset - 12} bytes after the end of values"),
        ],
    )
    def test_a_byte_outside_the_tensors(self, place: int, where: str) -> None:
        after = content()
        after[place] ^= 1
        finding = only(judge_bounds((VALUES, KEYS), content(), after))
        assert finding == Finding(
            "call_violation",
            "out_of_bounds_write",
            f"1 byte outside the tensors changed, the first {where}."
            " Check the kernel's masks and offsets.",
        )

    def test_elements_may_change(self) -> None:
        after = content()
        for layout in (KEYS, VALUES):
            after[layout.offset : layout.offset + 12] ^= 0xFF
        assert judge_bounds((KEYS, VALUES), content(), after) == ()

    def test_all_changed_bytes_are_counted(self) -> None:
        finding = only(judge_bounds((KEYS, VALUES), content(), content() ^ 1))
        assert finding.message.startswith(f"{SIZE - 24} bytes outside")

    def test_a_gap_of_a_strided_tensor(self) -> None:
        rows = replace(KEYS, strides=(6, 1))
        after = content()
        after[KEYS.offset : KEYS.offset + 6] ^= 1
        after[KEYS.offset + 12 : KEYS.offset + 18] ^= 1
        assert judge_bounds((rows, VALUES), content(), after) == ()
        after[KEYS.offset + 11] ^= 1
        finding = only(judge_bounds((rows, VALUES), content(), after))
        assert "in a gap between the elements of keys" in finding.message

    def test_a_gap_filled_by_another_tensor_is_none(self) -> None:
        rows = replace(KEYS, strides=(6, 1))
        between = replace(rows, name="between", offset=KEYS.offset + 6)
        after = content()
        after[KEYS.offset : KEYS.offset + 24] ^= 1
        assert judge_bounds((rows, between), content(), after) == ()
        after[KEYS.offset + 24] ^= 1
        assert only(judge_bounds((rows, between), content(), after))

    def test_a_permuted_tensor_has_no_gaps(self) -> None:
        turned = replace(KEYS, shape=(3, 2), strides=(1, 3))
        after = content()
        after[KEYS.offset : KEYS.offset + 12] ^= 1
        assert judge_bounds((turned,), content(), after) == ()

    def test_tensors_without_elements_own_nothing(self) -> None:
        empty = replace(KEYS, shape=(2, 0))
        after = content()
        after[KEYS.offset] ^= 1
        assert (
            "1 byte after the end of keys" in only(judge_bounds((empty,), content(), after)).message
        )

    @given(st.data())
    def test_it_equals_the_complement_of_all_bytes(self, data: st.DataObject) -> None:
        layouts = []
        for name in ("a", "b", "c")[: data.draw(st.integers(1, 3))]:
            shape = tuple(data.draw(st.integers(0, 3)) for _ in range(2))
            strides = tuple(data.draw(st.integers(0, 7)) for _ in range(2))
            offset = 2 * data.draw(st.integers(0, 30))
            layouts.append(TensorLayout(name, "bfloat16", shape, strides, offset))
        place = data.draw(st.integers(0, 149))
        before = content(150)
        after = before.copy()
        after[place] ^= 1
        owned = any(place in all_bytes(layout.footprint) for layout in layouts)
        assert (judge_bounds(layouts, before, after) == ()) == owned


class TestInitialised:
    def outputs(self, fill: int, *written: int) -> npt.NDArray[np.uint8]:
        """The bytes of an outputs file in which all elements but some were written."""
        data = content()
        data[NEW_KEYS.offset : NEW_KEYS.offset + 12] = fill
        for element in written:
            start = NEW_KEYS.offset + 2 * element
            data[start : start + 2] = (0x80, 0x3F)
        return data

    def test_all_written(self) -> None:
        contents = (self.outputs(fill, *range(6)) for fill in (0xA5, 0x5A))
        first, second = zip(contents, (0xA5, 0x5A), strict=True)
        assert judge_initialised((NEW_KEYS,), first, second) == ()

    def test_the_first_that_was_not_written(self) -> None:
        contents = (self.outputs(fill, 0, 1, 2, 4) for fill in (0xA5, 0x5A))
        first, second = zip(contents, (0xA5, 0x5A), strict=True)
        finding = only(judge_initialised((NEW_VALUES, NEW_KEYS), first, second))
        assert finding == Finding(
            "call_violation",
            "uninitialised_output",
            "2 of 6 elements of new_keys were never written, the first at (1, 0): they hold what"
            " fresh memory held. Write every element, zeros too.",
        )

    def test_a_value_that_equals_one_fill_is_no_proof(self) -> None:
        # The right answer may be the pattern of one call, but not that of both.
        first = (self.outputs(0xA5, 0), 0xA5)
        second = (self.outputs(0xA5, 0), 0x5A)
        assert judge_initialised((NEW_KEYS,), first, second) == ()

    def test_an_output_without_elements_is_written(self) -> None:
        empty = replace(NEW_KEYS, shape=(0, 3))
        contents = (self.outputs(fill) for fill in (0xA5, 0x5A))
        first, second = zip(contents, (0xA5, 0x5A), strict=True)
        assert judge_initialised((empty,), first, second) == ()

    def test_two_calls_of_one_fill_prove_nothing_and_are_refused(self) -> None:
        with pytest.raises(ValueError, match="both calls filled memory with 165"):
            judge_initialised((NEW_KEYS,), (content(), 165), (content(), 165))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int64"])
    def test_unwritten_memory_of_a_real_call(self, tmp_path: Path, dtype: str) -> None:
        layout = TensorLayout("new_keys", dtype, (400, 100), (100, 1), 0)
        size = layout.footprint.extent_bytes
        for name in ("inputs", "outputs"):
            np.zeros(size, np.uint8).tofile(tmp_path / name)
        request = CallRequest(
            inputs_path=str(tmp_path / "inputs"),
            inputs=(layout,),
            outputs_path=str(tmp_path / "outputs"),
            outputs=(layout,),
        )

        def f(source: torch.Tensor) -> torch.Tensor:
            result = torch.empty_like(source)
            result[:, :99] = source[:, :99]
            return result

        facts = []
        for fill in (0x3C, 0xC3):
            reply = Caller(f, "cpu").call(replace(request, fill_byte=fill))
            assert remark_unexercised(request, reply) == ()
            facts.append((np.fromfile(request.outputs_path, np.uint8), fill))
        finding = only(judge_initialised((layout,), *facts))
        assert "400 of 40000 elements of new_keys were never written" in finding.message
        assert "first at (0, 99)" in finding.message

    def test_memory_that_was_not_filled_is_remarked_on(self, request_: CallRequest) -> None:
        filled = ReturnedTensor("torch.Tensor", poisoned=True)
        reply = CallReply(
            "returned",
            returned_count=2,
            tensors=(filled, replace(filled, poisoned=False)),
        )
        finding = only(remark_unexercised(request_, reply))
        assert finding.status == REMARK
        assert finding.message.startswith("Whether new_values is written completely was not")
        unfilled = replace(reply, tensors=(reply.tensors[1],) * 2)
        assert (
            "new_keys, new_values are written"
            in only(remark_unexercised(request_, unfilled)).message
        )
        unasked = replace(reply, tensors=(replace(filled, poisoned=None),) * 2)
        assert remark_unexercised(request_, unasked) == ()
