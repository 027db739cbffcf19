"""One call of a candidate as facts: what is asked, and what came of it.

A :class:`CallRequest` says where the tensors lie and how to call; a :class:`CallReply` says what
happened and what was returned. Both are plain data, so that they cross between processes as JSON
and can be judged (:mod:`oracle.guards`) without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .definition import Style

CallStatus = Literal["returned", "raised", "crashed", "timed_out", "out_of_memory"]

ITEMSIZE: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}
"""Bytes of one element of each dtype that crosses."""


@dataclass(frozen=True)
class Footprint:
    """The bytes of memory that a tensor's elements take.

    Attributes:
        address: of the first element, in bytes; for a layout, the offset in its file.
        itemsize: bytes of one element.
        shape: sizes.
        strides: in elements, none negative.
    """

    address: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent_bytes(self) -> int:
        """Bytes from the first element to the end of the last; 0 without elements."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.itemsize


@dataclass(frozen=True)
class TensorLayout:
    """Where a tensor lies in a file of tensors.

    Attributes:
        name: of the operator's input or output.
        dtype: one of :data:`ITEMSIZE`.
        shape: its sizes.
        strides: in elements.
        offset: bytes from the start of the file to the first element; a multiple of the item size.
        storage_offset: elements between the start of the tensor's storage and its first element,
            for a tensor that starts inside a larger buffer; they lie in the file before it.
        axes: the names of its axes, for messages; may be left out.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage_offset: int = 0
    axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no tensor can be built from."""
        if self.dtype not in ITEMSIZE:
            raise ValueError(
                f"{self.name} has dtype {self.dtype!r}; known are {', '.join(ITEMSIZE)}"
            )
        if len(self.shape) != len(self.strides):
            raise ValueError(
                f"{self.name} has shape {self.shape} but strides {self.strides}: give one stride"
                " an axis"
            )
        before = self.storage_offset * self.itemsize
        if self.offset % self.itemsize or not 0 <= before <= self.offset:
            raise ValueError(
                f"{self.name} starts at byte {self.offset} with storage_offset"
                f" {self.storage_offset}: the byte must be a multiple of {self.itemsize}, and"
                " leave room for the storage before it"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in index order without gaps."""
        count = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != count:
                return 0 in self.shape
            count *= size
        return True

    @property
    def footprint(self) -> Footprint:
        """The bytes of the file that its elements take."""
        return Footprint(self.offset, self.itemsize, self.shape, self.strides)


@dataclass(frozen=True)
class CallRequest:
    """One call of the candidate.

    Attributes:
        inputs_path: the absolute path of the file of the inputs. The candidate's process maps it,
            and what it changes there is changed; on a GPU the inputs with the bytes around them
            are copied back after the call. The judge keeps the original elsewhere and compares.
        inputs: the inputs in call order.
        outputs_path: the absolute path of the file of the outputs. For ``out`` the outputs are
            given to the candidate where they lie in it, with the bytes around them; otherwise the
            bits of what it returned are written into it.
        outputs: the expected outputs in order.
        style: the calling style.
        inplace: for ``inplace``, pairs of an input's and an output's index: that input is written
            and becomes that output. The candidate returns the other outputs, or all of them.
        fill_byte: None, or a byte (not 255) that fresh memory is filled with during the call.
        keep_outputs: hold what is returned until the next call, whose reply then says whether it
            changed and where it lay.
    """

    inputs_path: str
    inputs: tuple[TensorLayout, ...]
    outputs_path: str
    outputs: tuple[TensorLayout, ...]
    style: Style = "return"
    inplace: tuple[tuple[int, int], ...] = ()
    fill_byte: int | None = None
    keep_outputs: bool = False

    def __post_init__(self) -> None:
        """Refuse a fill byte that the C library takes for "no filling"."""
        if self.fill_byte is not None and not 0 <= self.fill_byte < 255:
            raise ValueError(f"fill_byte is {self.fill_byte}; it must be None or in 0..254")


@dataclass(frozen=True)
class ReturnedTensor:
    """One item that the candidate returned, as facts.

    Attributes:
        type_name: the item's type; all but the next is left at its default unless it is a plain
            ``torch.Tensor``.
        is_tensor: whether it is a tensor, a subclass of ``torch.Tensor`` included.
        dtype: such as ``bfloat16``.
        shape: its sizes.
        strides: in elements; empty for a sparse tensor.
        device: such as ``cpu`` or ``cuda:0``.
        layout: ``strided``, or a kind of sparse.
        address: of the first element.
        itemsize: bytes of one element.
        is_contiguous: as torch says.
        copied: whether its bits were written to the outputs file: it fits the expected output,
            and that is not an input written in place.
        poisoned: whether its memory is known to have been filled with the request's byte when it
            was allocated; None where no filling was asked for.
    """

    type_name: str
    is_tensor: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    device: str = ""
    layout: str = ""
    address: int = 0
    itemsize: int = 0
    is_contiguous: bool = False
    copied: bool = False
    poisoned: bool | None = None

    @property
    def footprint(self) -> Footprint:
        """The bytes of memory that its elements take."""
        return Footprint(self.address, self.itemsize, self.shape, self.strides)


@dataclass(frozen=True)
class EarlierOutput:
    """What became of an output that the call before returned and the worker held.

    Attributes:
        output: the output's index.
        footprint: the memory it takes.
        changed: whether its bits changed during this call.
    """

    output: int
    footprint: Footprint
    changed: bool


@dataclass(frozen=True)
class CallReply:
    """What became of one call.

    Attributes:
        status: ``returned`` says only that the call came back, not that anything is right.
        message: one or two sentences on what happened; empty when it returned.
        returned_type: the type of the object returned.
        returned_count: how many items it holds: 1 for a tensor, the length of a tuple, else 0.
        tensors: the items (the first 32) as facts.
        input_footprints: the memory of each input during the call.
        input_device: the device the inputs were on.
        earlier: for outputs held from the call before.
        output_text: what was printed during the call, its first and last 8 KiB; empty for a call
            in the judge's own process.
        seconds: wall time of the call, on a GPU up to the end of its work; for a call that did not
            return, until it ended.
    """

    status: CallStatus
    message: str = ""
    returned_type: str = ""
    returned_count: int = 0
    tensors: tuple[ReturnedTensor, ...] = ()
    input_footprints: tuple[Footprint, ...] = ()
    input_device: str = ""
    earlier: tuple[EarlierOutput, ...] = ()
    output_text: str = ""
    seconds: float = 0.0


def returned_outputs(request: CallRequest, count: int) -> tuple[int, ...] | None:
    """Say which outputs ``count`` returned items stand for, by index; None if the count is wrong.

    ``return`` needs all outputs, ``out`` none, ``inplace`` those not written in place, or all.
    """
    everything = tuple(range(len(request.outputs)))
    if request.style == "out":
        wanted: tuple[tuple[int, ...], ...] = ((),)
    elif request.style == "inplace":
        written = {output for _, output in request.inplace}
        wanted = (tuple(i for i in everything if i not in written), everything)
    else:
        wanted = (everything,)
    return next((indices for indices in wanted if len(indices) == count), None)
