"""The checks around a call: from facts about it to findings.

Nothing here calls anything or touches a file. The facts are a :class:`~oracle.call.CallRequest`
with its :class:`~oracle.call.CallReply`, and the bytes of the two files of tensors before and
after the call, as flat arrays of uint8. Each ``judge_`` function answers one question and returns
what is wrong, nothing where all is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from .call import (
    CallReply,
    CallRequest,
    Footprint,
    ReturnedTensor,
    TensorLayout,
    returned_outputs,
)

Bytes = npt.NDArray[np.uint8]

MOST_RUNS = 2**24
"""Up to how many contiguous runs a strided tensor's memory is followed exactly; see
:func:`overlap`."""

REMARK = "remark"
"""The status of a finding that is worth knowing and not judged."""

_CHUNK = 2**26


@dataclass(frozen=True)
class Finding:
    """Something found about a call.

    Attributes:
        status: a verdict's status, or :data:`REMARK`.
        violation: for ``call_violation``, which rule was broken; else empty.
        message: one or two sentences: what was found, and what to do.
    """

    status: str
    violation: str
    message: str


def judge_structure(
    request: CallRequest, reply: CallReply, input_contiguous: bool
) -> tuple[Finding, ...]:
    """Judge what was returned, without its values: count, types, shapes, dtypes, devices, memory.

    Args:
        request: the call.
        reply: its reply, of status ``returned``.
        input_contiguous: whether all inputs were contiguous; then the outputs have to be.

    Returns:
        Findings in the order of the outputs. When the items cannot be matched with the outputs,
        just the one that says so.
    """
    unmatched = _judge_items(request, reply)
    if unmatched:
        return unmatched
    findings: list[Finding] = []
    for layout, item in _matched(request, reply):
        findings += _judge_tensor(layout, item, reply.input_device, input_contiguous)
    return (*findings, *judge_overlaps(request, reply))


def judge_overlaps(request: CallRequest, reply: CallReply) -> tuple[Finding, ...]:
    """Judge whether an output shares memory with an input, another output or an earlier one.

    An input that is declared to be written in place may be returned as its output.
    """
    pairs = [(layout, item) for layout, item in _matched(request, reply) if item.itemsize]
    declared = {
        (request.inputs[source].name, request.outputs[target].name)
        for source, target in request.inplace
    }
    findings = []
    for number, (layout, item) in enumerate(pairs):
        for given, memory in zip(request.inputs, reply.input_footprints, strict=True):
            if (given.name, layout.name) not in declared and overlap(item.footprint, memory):
                findings.append(_aliases(layout.name, "input", f"the input {given.name}"))
        for other, earlier in pairs[:number]:
            if overlap(item.footprint, earlier.footprint):
                findings.append(_aliases(layout.name, "output", f"the output {other.name}"))
        for held in reply.earlier:
            if overlap(item.footprint, held.footprint):
                what = "an output that an earlier call returned and that is still in use"
                findings.append(_aliases(layout.name, "earlier_output", what))
                break
    return tuple(findings)


def judge_earlier_outputs(request: CallRequest, reply: CallReply) -> tuple[Finding, ...]:
    """Judge whether the outputs held from the call before are still what they were.

    Args:
        request: the later call, with the same outputs.
        reply: its reply.
    """
    return tuple(
        Finding(
            "call_violation",
            "earlier_output_changed",
            f"This call changed the {request.outputs[held.output].name} that the call before"
            " returned and that is still in use; return fresh memory from every call.",
        )
        for held in reply.earlier
        if held.changed
    )


def judge_inputs(request: CallRequest, before: Bytes, after: Bytes) -> tuple[Finding, ...]:
    """Judge whether the inputs are unchanged, bit for bit.

    Args:
        request: the call; inputs it declares to be written in place are left out.
        before: the bytes of the inputs file, as the judge made it.
        after: its bytes after the call.
    """
    _check_alike(before, after)
    in_place = {source for source, _ in request.inplace}
    findings = []
    for number, layout in enumerate(request.inputs):
        if number in in_place or not _range_differs(layout, before, after):
            continue
        old, new = _bits(layout, before), _bits(layout, after)
        changed = old != new
        count = int(np.count_nonzero(changed))
        if count:
            index = _first_index(changed)
            findings.append(
                Finding(
                    "call_violation",
                    "input_mutated",
                    f"The input {layout.name} was changed in {count} of {changed.size} elements,"
                    f" first at {index}: {_show(old[index], layout)} became"
                    f" {_show(new[index], layout)}. Write to fresh memory.",
                )
            )
    return tuple(findings)


def judge_bounds(
    layouts: Sequence[TensorLayout], before: Bytes, after: Bytes
) -> tuple[Finding, ...]:
    """Judge whether the bytes outside the tensors' elements are unchanged.

    They are the bands before and after each tensor and the gaps of a strided one. What happened to
    the elements themselves is not looked at.

    Args:
        layouts: the tensors of the file.
        before: the bytes of the file before the call.
        after: its bytes after it.
    """
    _check_alike(before, after)
    count, first = 0, -1
    for low, unowned in _unowned(layouts, before.size):
        high = low + unowned.size
        changed = (before[low:high] != after[low:high]) & unowned
        if changed.any():
            first = first if count else low + int(np.argmax(changed))
            count += int(np.count_nonzero(changed))
    if not count:
        return ()
    return (
        Finding(
            "call_violation",
            "out_of_bounds_write",
            f"{_count(count, 'byte')} outside the tensors changed, the first"
            f" {_whereabouts(first, layouts)}. Check the kernel's masks and offsets.",
        ),
    )


def judge_initialised(
    layouts: Sequence[TensorLayout], first: tuple[Bytes, int], second: tuple[Bytes, int]
) -> tuple[Finding, ...]:
    """Judge whether every element of every output was written.

    An element that holds the fill pattern of each of two calls was not: the calls had the same
    inputs, and different fills.

    Args:
        layouts: the outputs.
        first: the bytes of the outputs file after one call, and the byte that memory was filled
            with before it.
        second: the same of the other call.

    Raises:
        ValueError: if both calls had the same fill.
    """
    if first[1] == second[1]:
        raise ValueError(f"both calls filled memory with {first[1]}; use two different bytes")
    findings = []
    for layout in layouts:
        unwritten = np.ones(layout.shape, bool)
        for content, fill in (first, second):
            pattern = int.from_bytes(bytes([fill]) * layout.itemsize, "little")
            unwritten &= _bits(layout, content) == pattern
        count = int(np.count_nonzero(unwritten))
        if count:
            findings.append(
                Finding(
                    "call_violation",
                    "uninitialised_output",
                    f"{count} of {unwritten.size} elements of {layout.name} were never written, the"
                    f" first at {_first_index(unwritten)}: they hold what fresh memory"
                    " held. Write every element, zeros too.",
                )
            )
    return tuple(findings)


def remark_unexercised(request: CallRequest, reply: CallReply) -> tuple[Finding, ...]:
    """Remark on outputs whose fresh memory could not be filled, so that nothing is known of it."""
    names = [layout.name for layout, item in _matched(request, reply) if item.poisoned is False]
    if not names:
        return ()
    message = (
        f"Whether {', '.join(names)} {'is' if len(names) == 1 else 'are'} written completely was"
        " not exercised: the memory did not come from the blocks that were filled for it."
    )
    return (Finding(REMARK, "", message),)


def overlap(one: Footprint, other: Footprint) -> bool:
    """Whether two tensors share a byte of memory.

    Exact for contiguous and permuted tensors, and for strided ones of up to :data:`MOST_RUNS`
    contiguous runs each. Beyond that two tensors whose ranges cross are taken to overlap.
    """
    low = max(one.address, other.address)
    high = min(one.address + one.extent_bytes, other.address + other.extent_bytes)
    if low >= high:
        return False
    axes = [_run_axes(footprint) for footprint in (one, other)]
    if any(math.prod(size for size, _ in outer) > MOST_RUNS for _, outer in axes):
        return True
    starts, others = (
        _run_starts(footprint.address, outer)
        for footprint, (_, outer) in zip((one, other), axes, strict=True)
    )
    length, other_length = axes[0][0], axes[1][0]
    # The first run of `one` that ends after a run of `other` begins; they share a byte if and only
    # if it begins before that run ends.
    nearest = np.searchsorted(starts, others - length, side="right")
    found = nearest < starts.size
    return bool(np.any(starts[nearest[found]] < others[found] + other_length))


def _run_axes(footprint: Footprint) -> tuple[int, list[tuple[int, int]]]:
    """Split a tensor into runs of contiguous bytes: their length, and the axes that repeat them.

    An axis is a size and a stride in bytes, the smallest stride first. Axes along which nothing
    moves are left out.
    """
    axes = sorted(
        (stride * footprint.itemsize, size)
        for size, stride in zip(footprint.shape, footprint.strides, strict=True)
        if size > 1 and stride > 0
    )
    length = footprint.itemsize
    outer: list[tuple[int, int]] = []
    for stride, size in axes:
        if stride <= length and not outer:
            length = (size - 1) * stride + length
        else:
            outer.append((size, stride))
    return length, outer


def _run_starts(address: int, axes: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
    starts = np.array([address], np.int64)
    for size, stride in axes:
        steps = np.arange(size, dtype=np.int64) * stride
        starts = (steps[:, None] + starts[None, :]).ravel()
    return np.unique(starts)


def _is_dense(footprint: Footprint) -> bool:
    return not _run_axes(footprint)[1]


def _judge_items(request: CallRequest, reply: CallReply) -> tuple[Finding, ...]:
    """Judge whether what was returned are plain tensors, as many as are due."""
    indices = returned_outputs(request, reply.returned_count)
    returned_none = reply.returned_type == "NoneType"
    if request.style == "out" and not returned_none:
        return _violation(
            "wrong_return_type",
            f"The candidate returned {_article(reply.returned_type)}; in the style 'out' the"
            " results go into the output tensors and None is returned.",
        )
    if returned_none and indices == ():
        return ()
    due = ", ".join(layout.name for layout in _due(request))
    if not reply.tensors and reply.returned_type != "tuple":
        return _violation(
            "wrong_return_type",
            f"The candidate returned {_article(reply.returned_type)}; return a tensor or a tuple"
            f" of tensors: {due}.",
        )
    if indices is None:
        return _violation(
            "wrong_output_count",
            f"The candidate returned {_count(reply.returned_count, 'output')}, expected"
            f" {len(_due(request))}: {due}; return them as a tuple in this order.",
        )
    return _judge_types(request, reply)


def _judge_types(request: CallRequest, reply: CallReply) -> tuple[Finding, ...]:
    for layout, item in _matched(request, reply):
        name = layout.name
        if not item.is_tensor:
            return _violation(
                "wrong_return_type", f"{name} is {_article(item.type_name)}; return a tensor."
            )
        if item.type_name != "torch.Tensor":
            return _violation(
                "tensor_subclass",
                f"{name} is of the tensor subclass {item.type_name}, whose memory cannot be"
                " trusted to hold its values; return a plain torch.Tensor.",
            )
    return ()


def _judge_tensor(
    layout: TensorLayout, item: ReturnedTensor, device: str, input_contiguous: bool
) -> Iterator[Finding]:
    name = layout.name
    if item.shape != layout.shape:
        yield Finding(
            "wrong_shape",
            "",
            f"{name} has shape {item.shape}, expected {layout.shape}: {_first_axis(layout, item)}.",
        )
    if item.dtype != layout.dtype:
        yield Finding("wrong_dtype", "", f"{name} has dtype {item.dtype}, expected {layout.dtype}.")
    if item.device != device:
        yield Finding(
            "wrong_device",
            "",
            f"{name} is on the device {item.device}, expected {device}, where the inputs are.",
        )
    if item.layout != "strided":
        yield Finding("wrong_layout", "", f"{name} is {item.layout}; return a strided tensor.")
    elif not item.itemsize and item.device == device:
        yield Finding("wrong_layout", "", f"{name} has no memory of its own; return a copy.")
    elif item.itemsize and not item.is_contiguous:
        strides = f"{name} is not contiguous: its strides are {item.strides}"
        if input_contiguous:
            yield Finding("wrong_layout", "", f"{strides}, while all inputs are contiguous.")
        else:
            yield Finding(REMARK, "", f"{strides}.")


def _first_axis(layout: TensorLayout, item: ReturnedTensor) -> str:
    if len(item.shape) != len(layout.shape):
        return f"it has {len(item.shape)} axes instead of {len(layout.shape)}"
    pairs = enumerate(zip(item.shape, layout.shape, strict=True))
    axis, got, expected = next((axis, a, b) for axis, (a, b) in pairs if a != b)
    name = f" ({layout.axes[axis]})" if layout.axes else ""
    return f"axis {axis}{name} is {got} instead of {expected}"


def _violation(rule: str, message: str) -> tuple[Finding, ...]:
    return (Finding("call_violation", rule, message),)


def _aliases(name: str, rule: str, what: str) -> Finding:
    return Finding(
        "call_violation",
        f"output_aliases_{rule}",
        f"{name} shares memory with {what}; return memory of its own, a copy if need be.",
    )


def _due(request: CallRequest) -> list[TensorLayout]:
    """List the outputs that must be returned, in a style that returns any."""
    in_place = {target for _, target in request.inplace}
    return [layout for index, layout in enumerate(request.outputs) if index not in in_place]


def _matched(request: CallRequest, reply: CallReply) -> list[tuple[TensorLayout, ReturnedTensor]]:
    """Pair the returned items with the outputs they stand for."""
    indices = returned_outputs(request, reply.returned_count) or ()
    return [
        (request.outputs[index], item) for index, item in zip(indices, reply.tensors, strict=False)
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _article(type_name: str) -> str:
    return "None" if type_name == "NoneType" else f"an object of type {type_name}"


def _check_alike(before: Bytes, after: Bytes) -> None:
    if before.shape != after.shape:
        raise ValueError(
            f"the file had {before.size} bytes before the call and {after.size} after it; pass"
            " both contents whole"
        )


def _bits(layout: TensorLayout, content: Bytes) -> npt.NDArray[Any]:
    """View a tensor of a file as unsigned integers, one an element."""
    kind = np.dtype(f"u{layout.itemsize}")
    if 0 in layout.shape:
        return np.empty(layout.shape, kind)
    flat = content[layout.offset : layout.offset + layout.footprint.extent_bytes].view(kind)
    strides = tuple(stride * layout.itemsize for stride in layout.strides)
    return as_strided(flat, layout.shape, strides, writeable=False)


def _range_differs(layout: TensorLayout, before: Bytes, after: Bytes) -> bool:
    """Whether anything between a tensor's first and last byte changed, gaps included."""
    end = layout.offset + layout.footprint.extent_bytes
    edges = range(layout.offset, end, _CHUNK)
    pieces = (slice(low, min(low + _CHUNK, end)) for low in edges)
    return any(not np.array_equal(before[piece], after[piece]) for piece in pieces)


def _unowned(
    layouts: Sequence[TensorLayout], size: int
) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
    """Go through the stretches of a file that hold bytes of no tensor, in order.

    Yields where a stretch begins, and for each of its bytes whether it belongs to no tensor.
    """
    end = 0
    for group in _crossing(layouts):
        low = min(layout.offset for layout in group)
        high = max(layout.offset + layout.footprint.extent_bytes for layout in group)
        yield end, np.ones(low - end, bool)
        if not all(_is_dense(layout.footprint) for layout in group):
            unowned = np.ones(high - low, bool)
            for layout in group:
                strides = [stride * layout.itemsize for stride in layout.strides]
                start = unowned[layout.offset - low :]
                as_strided(start, (*layout.shape, layout.itemsize), (*strides, 1))[...] = False
            yield low, unowned
        end = high
    yield end, np.ones(size - end, bool)


def _crossing(layouts: Sequence[TensorLayout]) -> Iterator[list[TensorLayout]]:
    """Group tensors whose ranges of bytes cross, in the order of the file."""
    group: list[TensorLayout] = []
    end = 0
    with_elements = (layout for layout in layouts if layout.footprint.extent_bytes)
    for layout in sorted(with_elements, key=lambda layout: layout.offset):
        if group and layout.offset >= end:
            yield group
            group = []
        group.append(layout)
        end = max(end, layout.offset + layout.footprint.extent_bytes)
    if group:
        yield group


def _whereabouts(position: int, layouts: Sequence[TensorLayout]) -> str:
    """Say where a byte of a file lies, from the tensor that is nearest."""
    places = []
    for layout in layouts:
        start, end = layout.offset, layout.offset + layout.footprint.extent_bytes
        if position < start:
            places.append((start - position, f"before the start of {layout.name}"))
        elif position >= end:
            places.append((position - end + 1, f"after the end of {layout.name}"))
        else:
            return f"in a gap between the elements of {layout.name}"
    distance, place = min(places)
    return f"{_count(distance, 'byte')} {place}"


def _first_index(changed: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(np.argmax(changed), changed.shape))


def _show(bits: Any, layout: TensorLayout) -> str:
    """Show an element as bits and value, as in ``0x3f80 (1)``."""
    text = f"0x{int(bits):0{2 * layout.itemsize}x}"
    if layout.dtype == "bfloat16":
        value = np.uint32(int(bits) << 16).view(np.float32)
    else:
        value = bits.view(layout.dtype)
    return f"{text} ({value:.9g})" if layout.dtype != "int64" else f"{text} ({value})"
