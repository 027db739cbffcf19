"""The process a candidate runs in, and the call itself.

The judge (the parent) makes inputs, truth and comparison; what is judged is called elsewhere::

    judge -- WorkerServer --> server process -- fork --> candidate's process

The server imports torch once, starts no threads and does not touch CUDA, so each further candidate
costs a fork of it, not an import. Candidates run one at a time, each in a session of its own; when
one ends, however it ends, the server kills whatever descends from it.

Messages are JSON, one to a packet of a SOCK_SEQPACKET socket: a candidate that writes garbage to
all its descriptors can spoil its own answer, but can neither block the judge with half a message
nor make it run anything. Tensors lie in two files that the judge makes and both map: the inputs,
and the outputs, each tensor at the place its :class:`TensorLayout` says. What the candidate prints
goes to a pipe of which the first and last 8 KiB are kept.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import dataclasses
import faulthandler
import fcntl
import gc
import hashlib
import json
import math
import mmap
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
import traceback
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from .candidate import (
    BadCandidate,
    CandidateReference,
    describe_exception,
    import_path,
    line_in,
    load_candidate,
)
from .interpreter import InterpreterReport, install

CallStyle = Literal["return", "out", "inplace"]
CallStatus = Literal["returned", "raised", "crashed", "timed_out", "out_of_memory"]

ITEMSIZE: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}
"""Bytes of one element of each dtype that crosses."""

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MESSAGE_BYTES = 2**17
_KEPT_BYTES = 2**13
_ITEMS_DESCRIBED = 32
_NAME_LIMIT = 200
_GRACE_S = 2.0
_SERVER_ANSWER_S = 15.0

# From linux/prctl.h and glibc's malloc.h: Python's standard library has no names for them.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_M_PERTURB = -6
# Small blocks from malloc's per-thread cache are handed out without the perturbation.
_NO_MALLOC_CACHE = "glibc.malloc.tcache_count=0"


class WorkerError(RuntimeError):
    """The judge's own machinery failed (not the candidate); the message holds what it said."""


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
    def footprint(self) -> Footprint:
        """The bytes of the file that its elements take."""
        return Footprint(self.offset, self.itemsize, self.shape, self.strides)


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
class CallRequest:
    """One call of the candidate.

    Attributes:
        case: the case's name, for messages.
        inputs_path: the file of the inputs; the candidate's process maps it and may change it, so
            the judge keeps the original elsewhere and compares.
        inputs_bytes: the size of that file.
        inputs: the inputs in call order.
        outputs_path: the file of the outputs. For ``out`` the outputs are given to the candidate
            where they lie in it, with the bytes around them; otherwise the bits of what it
            returned are written into it.
        outputs: the expected outputs in order.
        style: the calling style.
        inplace: for ``inplace``, pairs of an input's and an output's index: that input is written
            and becomes that output. The candidate returns the other outputs, or all of them.
        fill_byte: None, or a byte (not 255) that fresh memory is filled with during the call.
        keep_outputs: hold what is returned until the next call, whose reply then says whether it
            changed and where it lay.
        copy_back_inputs: on a GPU, copy the inputs with the bytes around them back into their
            file after the call, so that the judge sees what was written.
    """

    case: str
    inputs_path: str
    inputs_bytes: int
    inputs: tuple[TensorLayout, ...]
    outputs_path: str
    outputs: tuple[TensorLayout, ...]
    style: CallStyle = "return"
    inplace: tuple[tuple[int, int], ...] = ()
    fill_byte: int | None = None
    keep_outputs: bool = False
    copy_back_inputs: bool = False

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
        extent_bytes: bytes from the first element to the end of the last.
        is_contiguous: as torch says.
        requires_grad: whether autograd follows it.
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
    extent_bytes: int = 0
    is_contiguous: bool = False
    requires_grad: bool = False
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


@dataclass(frozen=True)
class ServerHello:
    """What a server process says of itself when it is ready.

    Attributes:
        pid: its process id.
        torch: torch's version.
        threads: how many threads candidates compute with, as torch chose.
        started_threads: how many threads run in the server; more than one would be a danger to
            the processes forked from it.
        interpreter: for device ``interpreter``, what became of Triton's interpreter.
    """

    pid: int
    torch: str
    threads: int
    started_threads: int
    interpreter: InterpreterReport | None


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


# --- the call -----------------------------------------------------------------------------------


class Caller:
    """Calls one candidate, request by request, in this process.

    Args:
        function: the candidate.
        device: ``cpu``, ``interpreter`` or ``cuda``.
        files: the candidate's source files, to say on which of their lines it raised.
    """

    def __init__(
        self, function: Callable[..., Any], device: str, files: Sequence[str] = ()
    ) -> None:
        self._function = function
        self._device = torch.device("cuda" if device == "cuda" else "cpu")
        code = getattr(function, "__code__", None)
        self._files = (*files, code.co_filename) if code else tuple(files)
        self._held: list[tuple[int, torch.Tensor, bytes]] = []
        self.broken = False
        """Whether the device can no longer be used in this process (a CUDA fault)."""

    def call(self, request: CallRequest) -> CallReply:
        """Call the candidate once.

        What the candidate raises becomes a reply, but for KeyboardInterrupt: that may be the
        user's.
        """
        try:
            return self._call(request)
        except torch.OutOfMemoryError as error:  # pragma: gpu only
            message = (
                "The GPU has too little memory for the tensors of the call beside what the"
                f" candidate holds: {describe_exception(error)}."
            )
            return CallReply(status="out_of_memory", message=message)

    def _call(self, request: CallRequest) -> CallReply:
        inputs = _Arena(request.inputs_path, self._device, upload=True)
        outputs = _Arena(request.outputs_path, self._device, upload=request.style == "out")
        arguments = [inputs.tensor(layout) for layout in request.inputs]
        footprints = tuple(_footprint(tensor) for tensor in arguments)
        device = str(arguments[0].device) if arguments else str(self._device)
        if request.style == "out":
            arguments += [outputs.tensor(layout) for layout in request.outputs]
        started = time.perf_counter()
        try:
            with _poisoned_memory(self._device, request) as is_poisoned:
                started = time.perf_counter()
                result = self._function(*arguments)
                self._synchronize()
                seconds = time.perf_counter() - started
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a candidate may raise anything
            return self._failure(error, time.perf_counter() - started)
        items = _items(result)
        facts = tuple(_describe(item, is_poisoned) for item in items[:_ITEMS_DESCRIBED])
        facts = _copy_returned(request, items, facts, outputs)
        _copy_in_place(request, inputs, outputs)
        if request.style == "out":
            outputs.write_back()
        if request.copy_back_inputs:
            inputs.write_back()
        earlier = tuple(
            EarlierOutput(output, _footprint(tensor), _digest(tensor) != digest)
            for output, tensor, digest in self._held
        )
        self._held = _hold(request, items, facts) if request.keep_outputs else []
        return CallReply(
            status="returned",
            returned_type=_type_name(result),
            returned_count=len(items),
            tensors=facts,
            input_footprints=footprints,
            input_device=device,
            earlier=earlier,
            seconds=seconds,
        )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":  # pragma: gpu only
            torch.cuda.synchronize()

    def _failure(self, error: BaseException, seconds: float) -> CallReply:
        message = f"The candidate raised {describe_exception(error)}"
        line = line_in(error, self._files)
        if line:
            message += f" ({line})"
        status: CallStatus = "out_of_memory" if _is_out_of_memory(error) else "raised"
        if self._device.type == "cuda":  # pragma: gpu only
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                # A fault of the GPU stays with the process: nothing more can run in it.
                self.broken = True
                status = "crashed"
        return CallReply(status=status, message=message + ".", seconds=seconds)


def call_in_process(
    function: Callable[..., Any], request: CallRequest, *, device: str = "cpu"
) -> CallReply:
    """Call a candidate in this process, without isolation and without a time limit.

    Exceptions become replies, as in a worker; a crash takes the caller along. To let a later call
    see the outputs of an earlier one (``keep_outputs``), use one :class:`Caller` for both.
    """
    return Caller(function, device).call(request)


class _Arena:
    """A file of tensors: mapped, and for a GPU copied there whole, the bytes around them too.

    Every tensor gets a storage of its own that ends with its last element and begins with its
    first (or ``storage_offset`` before), as if it had been allocated alone: a kernel that looks at
    the storage finds what it would find in a model.
    """

    def __init__(self, path: str, device: torch.device, *, upload: bool) -> None:
        self._host = _map(path)
        self._gpu: torch.Tensor | None = None
        if upload and device.type == "cuda":  # pragma: gpu only
            self._gpu = torch.from_numpy(self._host).to(device)

    def tensor(self, layout: TensorLayout) -> torch.Tensor:
        """Build the tensor on the device."""
        if self._gpu is not None:  # pragma: gpu only
            return _on_storage(layout, _gpu_bytes(self._gpu, *_storage_range(layout)))
        return self.host_tensor(layout)

    def host_tensor(self, layout: TensorLayout) -> torch.Tensor:
        """Build the tensor over the mapped file."""
        low, high = _storage_range(layout)
        return _on_storage(layout, torch.from_numpy(self._host[low:high]))

    def write_back(self) -> None:
        """Copy a GPU's bytes into the file; on a CPU they are there."""
        if self._gpu is not None:  # pragma: gpu only
            torch.from_numpy(self._host).copy_(self._gpu)


def _map(path: str) -> npt.NDArray[np.uint8]:
    """Map a file, shared and writable; unmapped when the last tensor over it is gone."""
    if Path(path).stat().st_size == 0:
        return np.empty(0, np.uint8)
    with Path(path).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


def _storage_range(layout: TensorLayout) -> tuple[int, int]:
    low = layout.offset - layout.storage_offset * layout.itemsize
    return low, layout.offset + layout.footprint.extent_bytes


def _on_storage(layout: TensorLayout, memory: torch.Tensor) -> torch.Tensor:
    """Build a tensor whose storage is that of ``memory``, the bytes of its storage range."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), layout.storage_offset, layout.shape, layout.strides)


def _gpu_bytes(gpu: torch.Tensor, low: int, high: int) -> torch.Tensor:  # pragma: gpu only
    """View bytes of a GPU buffer as a tensor with a storage of just these bytes."""
    if low == high:
        return gpu.new_empty(0)
    return torch.as_tensor(_GpuBytes(gpu, low, high), device=gpu.device)


class _GpuBytes:  # pragma: gpu only
    """Part of a GPU buffer, by the CUDA array interface; keeps the buffer alive."""

    def __init__(self, gpu: torch.Tensor, low: int, high: int) -> None:
        self._gpu = gpu
        self.__cuda_array_interface__ = {
            "shape": (high - low,),
            "typestr": "|u1",
            "data": (gpu.data_ptr() + low, False),
            "version": 3,
        }


@contextlib.contextmanager
def _poisoned_memory(
    device: torch.device, request: CallRequest
) -> Iterator[Callable[[int, int], bool | None]]:
    """Fill fresh memory with the request's byte while the block runs.

    Yields a function that says of an address and an extent whether that memory was filled.

    On a CPU glibc fills every block it hands out (with the complement of the value it is given),
    whoever asks for it: torch, numpy or C. numpy's own store of blocks under 1 KiB is not reached.
    On a GPU blocks of the outputs' sizes are filled and freed, and torch's allocator will hand
    them out unless the candidate takes them for something else, or has an allocator of its own.
    """
    if request.fill_byte is None:
        yield lambda _address, _extent: None
    elif device.type == "cuda":  # pragma: gpu only
        blocks = _fill_gpu_blocks(device, request)
        yield lambda address, extent: any(
            low <= address and address + extent <= high for low, high in blocks
        )
    else:
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_PERTURB, request.fill_byte ^ 0xFF)
        try:
            small = _malloc_fills(2**10, request.fill_byte)
            # A block of the heap, and one so large that it is mapped on its own.
            large = all(_malloc_fills(size, request.fill_byte) for size in (2**12, 2**18))
            yield lambda _address, extent: large if extent > 2**11 else small
        finally:
            mallopt(_M_PERTURB, 0)


def _malloc_fills(size: int, byte: int) -> bool:
    """Whether torch's fresh memory does hold the byte.

    It does not under another malloc; small blocks may not where the C library keeps some for each
    thread, which the server's process is started without.
    """
    fresh = torch.empty(size, dtype=torch.uint8, device="cpu")
    return fresh.numpy().tobytes().count(byte) == size


def _fill_gpu_blocks(  # pragma: gpu only
    device: torch.device, request: CallRequest
) -> list[tuple[int, int]]:
    """Leave blocks of the outputs' sizes, filled with the byte, to torch's allocator."""
    # Without other free blocks, these are the ones it will hand out.
    torch.cuda.empty_cache()
    sizes = [math.prod(layout.shape) * layout.itemsize for layout in request.outputs]
    blocks = [
        torch.full((size,), request.fill_byte or 0, dtype=torch.uint8, device=device)
        for size in sizes
        if size
    ]
    torch.cuda.synchronize()
    return [(block.data_ptr(), block.data_ptr() + block.numel()) for block in blocks]


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch's CPU allocator and Triton's driver raise a bare RuntimeError.
    text = describe_exception(error) if isinstance(error, RuntimeError) else ""
    return "can't allocate memory" in text or "out of memory" in text


def _items(result: object) -> tuple[Any, ...]:
    if isinstance(result, torch.Tensor):
        return (result,)
    if isinstance(result, tuple):
        return tuple(tuple.__iter__(result))
    return ()


def _type_name(item: object) -> str:
    kind = type(item)
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{home}{kind.__qualname__}"[:_NAME_LIMIT]


def _describe(item: object, is_poisoned: Callable[[int, int], bool | None]) -> ReturnedTensor:
    """State the facts of an item; nothing is asked of a subclass, which may answer anything."""
    if type(item) is not torch.Tensor:
        return ReturnedTensor(_type_name(item), is_tensor=isinstance(item, torch.Tensor))
    facts = ReturnedTensor(
        type_name="torch.Tensor",
        is_tensor=True,
        dtype=str(item.dtype).removeprefix("torch."),
        shape=tuple(item.shape),
        device=str(item.device),
        layout=str(item.layout).removeprefix("torch."),
        requires_grad=item.requires_grad,
    )
    if item.layout is not torch.strided or item.device.type not in ("cpu", "cuda"):
        return facts
    try:
        footprint = _footprint(item)
    except RuntimeError:
        # A tensor that torch.func made and the candidate let out has no memory of its own.
        return facts
    return dataclasses.replace(
        facts,
        strides=footprint.strides,
        address=footprint.address,
        itemsize=footprint.itemsize,
        extent_bytes=footprint.extent_bytes,
        is_contiguous=item.is_contiguous(),
        poisoned=is_poisoned(footprint.address, footprint.extent_bytes),
    )


def _footprint(tensor: torch.Tensor) -> Footprint:
    return Footprint(
        tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride())
    )


def _copy_returned(
    request: CallRequest,
    items: tuple[Any, ...],
    facts: tuple[ReturnedTensor, ...],
    outputs: _Arena,
) -> tuple[ReturnedTensor, ...]:
    """Write the bits of every returned tensor that fits its output, and note which did."""
    indices = returned_outputs(request, len(items))
    if indices is None:
        return facts
    in_place = {output for _, output in request.inplace}
    noted = []
    for item, fact, index in zip(items, facts, indices, strict=False):
        layout = request.outputs[index]
        # An item size is known of tensors with memory to look at, and of no others.
        fits = fact.itemsize > 0 and (fact.dtype, fact.shape) == (layout.dtype, layout.shape)
        copied = fits and index not in in_place
        if copied:
            _copy_bits(item, outputs.host_tensor(layout))
        noted.append(dataclasses.replace(fact, copied=copied))
    return tuple(noted)


def _copy_in_place(request: CallRequest, inputs: _Arena, outputs: _Arena) -> None:
    """Write the bits of inputs that were to be written in place as the outputs they became.

    They are read from memory anew: what was the argument may have been pointed elsewhere.
    """
    if request.style == "inplace":
        for source, target in request.inplace:
            layout = request.outputs[target]
            _copy_bits(inputs.tensor(request.inputs[source]), outputs.host_tensor(layout))


def _copy_bits(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy as integers, so that NaN payloads and -0.0 survive."""
    target.view(_INTEGER[target.element_size()]).copy_(_bits(source))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_neg().view(_INTEGER[tensor.element_size()])


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.blake2b(_bits(tensor).cpu().numpy().tobytes()).digest()


def _hold(
    request: CallRequest, items: tuple[Any, ...], facts: tuple[ReturnedTensor, ...]
) -> list[tuple[int, torch.Tensor, bytes]]:
    matched = zip(returned_outputs(request, len(items)) or (), items, facts, strict=False)
    return [(output, item, _digest(item)) for output, item, fact in matched if fact.copied]


# --- messages -----------------------------------------------------------------------------------


class _Malformed(ValueError):
    """A message that is none of ours."""


class _Gone(WorkerError):
    """The other end of a channel is closed, or its process has ended."""


class _TimedOut(Exception):
    """No message came in time."""


class _Channel:
    """One end of a SOCK_SEQPACKET socket pair; a packet is a message, so none comes in halves."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message, with file descriptors.

        Raises:
            _Gone: if nobody is there to receive it.
        """
        data = json.dumps(message, allow_nan=False).encode()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            self._socket.sendmsg([data], ancillary if descriptors else [], socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _Gone from error

    def receive(self, descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
        """Wait for the next message, and up to so many file descriptors with it.

        Raises:
            _Gone: if the other end is closed.
            _Malformed: if what came is no JSON object, or longer than a message may be.
        """
        room = socket.CMSG_SPACE(descriptors * array.array("i").itemsize) if descriptors else 0
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                _MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError as error:
            raise _Gone from error
        if not data:
            raise _Gone
        if flags & socket.MSG_TRUNC:
            raise _Malformed(f"a message of more than {_MESSAGE_BYTES} bytes")
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _Malformed("a message that is not JSON") from error
        if not isinstance(message, dict):
            raise _Malformed("a message that is no JSON object")
        received = array.array("i")
        for _level, _kind, payload in ancillary:
            received.frombytes(payload)
        return message, list(received)


def _channel_pair() -> tuple[_Channel, socket.socket]:
    """Make a pair: the judge's end, and the end to hand over."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return _Channel(ours), theirs


_T = TypeVar("_T")


def _decode(kind: type[_T], value: object) -> _T:
    """Read plain JSON data as a dataclass of this module, strictly.

    Raises:
        _Malformed: if a field is missing, unknown, or of another type than declared.
    """
    if not isinstance(value, dict):
        raise _Malformed(f"no {kind.__name__}: {type(value).__name__}")
    hints = typing.get_type_hints(kind)
    if set(value) != set(hints):
        raise _Malformed(f"a {kind.__name__} with the fields {sorted(value)}")
    try:
        return kind(**{name: _decode_value(hint, value[name]) for name, hint in hints.items()})
    except ValueError as error:
        raise _Malformed(str(error)) from error


def _decode_value(hint: Any, value: Any) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list):
        kinds = options[:1] * len(value) if options[-1] is Ellipsis else options
        return tuple(_decode_value(k, v) for k, v in zip(kinds, value, strict=True))
    if origin is types.UnionType:
        return None if value is None else _decode_value(options[0], value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _decode(hint, value)
    if hint is float and type(value) is int:
        return float(value)
    # True equals 1, and a NaN is a float, but neither is sent.
    fits = value in options if origin is Literal else type(value) is (origin or hint)
    if not fits or (hint is float and not math.isfinite(value)):
        raise _Malformed(f"{value!r:.80} where {hint} is due")
    return value


# --- the candidate's process --------------------------------------------------------------------


def _run_candidate(
    order: dict[str, Any], descriptors: list[int], threads: int, server_pid: int
) -> NoReturn:
    """Serve one candidate in a process just forked, then end it."""
    status = 1
    try:
        control, output = descriptors
        _leave_server(server_pid, output)
        torch.set_num_threads(threads)
        os.chdir(order["cwd"])
        sys.path[:] = order["path"]
        _serve_candidate(_Channel(socket.socket(fileno=control)), order)
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is ends this process, and is printed
        traceback.print_exc()
    finally:
        # The candidate's own exit handlers are not to run, nor what else is on the server's stack.
        os._exit(status)


def _leave_server(server_pid: int, output: int) -> None:
    """Make a forked process the candidate's own: session, streams, limits."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server_pid:
        # The server ended before the line above could bind this process to it.
        os._exit(1)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    # New ones, because the server's keep what they know of the file they were opened on.
    sys.stdout, sys.stderr = (
        os.fdopen(stream, "w", buffering=1, errors="backslashreplace", closefd=False)
        for stream in (1, 2)
    )
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # Where memory runs out, the kernel takes this process. Not every sandbox has the file.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    faulthandler.enable()
    # The judge asks for this before it stops a call that takes too long.
    faulthandler.register(signal.SIGUSR1)
    sys.dont_write_bytecode = True


def _serve_candidate(channel: _Channel, order: dict[str, Any]) -> None:
    """Load the candidate and answer calls until the judge closes the channel."""
    reference = _decode(CandidateReference, order["reference"])
    pid = os.getpid()
    with import_path(reference):
        caller, refusal = _load(reference, order)
        _flush_output()
        _end_if_copied(pid)
        channel.send({"bad": refusal} if caller is None else {"loaded": True})
        while caller is not None and not caller.broken:
            try:
                message, _ = channel.receive()
            except _Gone:
                return
            answer = _answer(caller, message)
            _flush_output()
            _end_if_copied(pid)
            channel.send(answer)


def _end_if_copied(pid: int) -> None:
    """End a copy that the candidate made of its process, which got this far as the original did."""
    if os.getpid() != pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _load(reference: CandidateReference, order: dict[str, Any]) -> tuple[Caller | None, str]:
    try:
        function = load_candidate(reference, order["parameters"], order["operator"])
    except BadCandidate as error:
        return None, str(error)
    except BaseException as error:  # noqa: BLE001 - import code may raise anything
        return None, f"{reference.text} cannot be loaded: {describe_exception(error)}."
    files = [reference.location]
    if reference.kind == "module":
        files = [str(getattr(sys.modules.get(reference.location), "__file__", ""))]
    return Caller(function, order["device"], files), ""


def _answer(caller: Caller, message: dict[str, Any]) -> dict[str, Any]:
    try:
        reply = caller.call(_decode(CallRequest, message))
    except KeyboardInterrupt as error:
        # Nobody else sends it here: this process is in no terminal's group.
        text = f"The candidate raised {describe_exception(error)}."
        reply = CallReply(status="raised", message=text)
    except Exception:  # noqa: BLE001 - reported as the judge's own failure, and raised there
        return {"failed": traceback.format_exc()[-_KEPT_BYTES:]}
    return {"reply": dataclasses.asdict(reply)}


def _flush_output() -> None:
    """Bring what was printed into the pipe before the reply."""
    for text in (sys.stdout, sys.stderr):
        # The candidate may have closed them, or put anything in their place.
        with contextlib.suppress(Exception):
            text.flush()
    ctypes.CDLL(None).fflush(None)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


# --- the server process -------------------------------------------------------------------------

# The package is loaded from the judge's own copy before anything is looked up on sys.path, where
# a file of the same name may come first.
_BOOTSTRAP = """
import importlib.util, json, sys
settings = json.loads(sys.argv[1])
sys.path[:] = settings["path"]
package, folder = settings["package"], settings["folder"]
spec = importlib.util.spec_from_file_location(
    package, folder + "/__init__.py", submodule_search_locations=[folder]
)
sys.modules[package] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[package])
if settings["device"] == "interpreter":
    importlib.import_module(package + ".interpreter").prepare_environment()
importlib.import_module(package + ".worker").serve(settings)
"""


def serve(settings: Mapping[str, Any]) -> None:
    """Be the server process until the judge goes away; what :data:`_BOOTSTRAP` calls."""
    if settings["tunables"] is None:
        del os.environ["GLIBC_TUNABLES"]
    else:
        os.environ["GLIBC_TUNABLES"] = settings["tunables"]
    end = socket.socket(fileno=settings["descriptor"])
    end.set_inheritable(False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    threads = torch.get_num_threads()
    # A process forked from one with OpenMP threads hangs at its first parallel region.
    torch.set_num_threads(1)
    interpreter = install() if settings["device"] == "interpreter" else None
    # Fork copies no page that only the garbage collector would have touched.
    gc.collect()
    gc.freeze()
    started = sum(1 for _ in Path("/proc/self/task").iterdir())
    hello = ServerHello(os.getpid(), str(torch.__version__), threads, started, interpreter)
    channel = _Channel(end)
    channel.send(dataclasses.asdict(hello))
    _Server(channel, threads, settings["judge"]).run()


class _Server:
    """Forks a process for a candidate, says when it ends, and leaves nothing of it behind."""

    def __init__(self, channel: _Channel, threads: int, judge: int) -> None:
        self._channel = channel
        self._threads = threads
        self._judge = judge
        self._pid: int | None = None
        self._returncode = 0
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Obey until the judge closes the channel or is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while os.getppid() == self._judge:
                # Now and then without an event, to see whether the judge is still there: a copy
                # of it, forked, could keep the channel open.
                ready = [descriptor for descriptor, _ in poll.poll(1000)]
                if self._wake in ready:
                    os.read(self._wake, 2**12)
                    self._note_end()
                if self._channel.fileno() in ready:
                    self._obey(*self._channel.receive(descriptors=2))
        except _Gone:
            return
        finally:
            self._end_candidate(grace=0.0, dump=False)

    def _obey(self, order: dict[str, Any], descriptors: list[int]) -> None:
        if order["op"] == "fork":
            self._end_candidate(grace=0.0, dump=False)
            self._fork(order, descriptors)
            self._channel.send({"id": order["id"], "pid": self._pid})
        else:
            killed = self._end_candidate(order["grace"], order["dump"])
            self._channel.send(
                {"id": order["id"], "returncode": self._returncode, "killed": killed}
            )

    def _fork(self, order: dict[str, Any], descriptors: list[int]) -> None:
        server = os.getpid()
        with warnings.catch_warnings():
            # Python warns of forks beside other threads. Those there are, OpenBLAS's, know how to.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            os.close(self._wake)
            os.close(self._waker)
            _run_candidate(order, descriptors, self._threads, server)
        for descriptor in descriptors:
            os.close(descriptor)
        self._pid = pid

    def _note_end(self) -> None:
        """Reap what has ended; tell the judge if it was the candidate's process."""
        before = self._pid
        self._reap()
        if before is not None and self._pid is None:
            self._channel.send({"ended": before})

    def _reap(self) -> bool:
        """Reap what has ended, orphans too. Whether any process is left below this one."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._pid:
                self._pid = None
                self._returncode = os.waitstatus_to_exitcode(status)

    def _end_candidate(self, grace: float, dump: bool) -> bool:
        """End the candidate's process and all below it; whether it had to be killed."""
        self._wait(grace)
        killed = self._pid is not None
        if self._pid is not None and dump:
            os.kill(self._pid, signal.SIGUSR1)
            self._wait(0.05)
        # Orphans become children of this process, so that none can hide. A kill can race with a
        # fork; the next round finds what was born meanwhile.
        while self._reap():
            for pid in _descendants(os.getpid()):
                # One that changed its user cannot be killed; the judge will not wait for it long.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
        return killed

    def _wait(self, seconds: float) -> None:
        """Wait until the candidate's process has ended, not longer than so many seconds."""
        deadline = time.monotonic() + seconds
        while self._reap() and self._pid is not None and time.monotonic() < deadline:
            time.sleep(0.001)


def _descendants(root: int) -> list[int]:
    """List the processes below one, zombies left out."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            # It ended since the folder was listed.
            continue
        # The command's name, in parentheses, may hold anything.
        state, parent = text.rpartition(")")[2].split()[:2]
        children.setdefault(int(parent), []).append(int(entry.name))
        if state == "Z":
            zombies.add(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return [pid for pid in found if pid not in zombies]


# --- the judge's side ---------------------------------------------------------------------------


class WorkerServer:
    """The judge's handle on a server process; a context manager. Not for several threads at once.

    Args:
        device: ``cpu``, ``interpreter`` or ``cuda``: what candidates are called on.
        start_timeout: seconds in which the server must be ready.

    Raises:
        WorkerError: on entry, if the server cannot start.
    """

    def __init__(
        self, device: Literal["cpu", "interpreter", "cuda"], start_timeout: float = 120.0
    ) -> None:
        self.device = device
        self.hello: ServerHello | None = None
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: _Channel | None = None
        self._log: IO[bytes] | None = None
        self._serial = 0
        self._current: CandidateProcess | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def candidate(
        self,
        reference: CandidateReference,
        parameters: Sequence[str],
        load_timeout: float = 60.0,
        operator: str = "the operator",
    ) -> CandidateProcess:
        """Load a candidate in a fresh process; use the result as a context manager.

        One at a time. A server that a candidate has killed is started again.

        Args:
            reference: the candidate.
            parameters: names of its positional arguments, in order.
            load_timeout: seconds in which it must be imported.
            operator: who calls it, for the message about a wrong number of parameters.

        Raises:
            BadCandidate: if it cannot be loaded, also where its import crashes, exits or hangs.
            WorkerError: if the server cannot start.
        """
        if self._current is not None and self._current.alive:
            raise RuntimeError(f"{self._current.reference.text} is still loaded; close it first")
        try:
            process = CandidateProcess(self, reference, parameters, operator)
        except _Gone:
            self._start()
            process = CandidateProcess(self, reference, parameters, operator)
        self._current = process
        process.load(load_timeout)
        return process

    def close(self) -> None:
        """End the server and whatever runs below it."""
        try:
            if self._current is not None:
                self._current.close()
        finally:
            self._stop(patience=5.0)

    def ask(
        self, order: Mapping[str, Any], descriptors: Sequence[int] = (), timeout: float = 0.0
    ) -> dict[str, Any]:
        """Give the server an order and wait for its answer (for :class:`CandidateProcess`).

        Raises:
            _Gone: if it does not answer; it is then stopped.
        """
        channel = self.channel
        self._serial += 1
        deadline = time.monotonic() + timeout + _SERVER_ANSWER_S
        try:
            channel.send({**order, "id": self._serial}, descriptors)
            while True:
                _wait_readable(channel, deadline)
                answer, _ = channel.receive()
                # Others are news of a process's end, or the answer to an interrupted order.
                if answer.get("id") == self._serial:
                    return answer
        except (_Gone, _TimedOut) as error:
            self._stop(patience=0.0)
            raise _Gone from error

    @property
    def channel(self) -> _Channel:
        """The channel to the server.

        Raises:
            _Gone: if the server has ended.
        """
        if self._channel is None:
            raise _Gone
        return self._channel

    def _start(self) -> None:
        self._channel, theirs = _channel_pair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        try:
            with theirs:
                self._process = subprocess.Popen(
                    self._command(theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=(theirs.fileno(),),
                    # Its own session: an interrupt typed at the terminal is for the judge.
                    start_new_session=True,
                    env=os.environ | {"GLIBC_TUNABLES": _tunables()},
                )
            _wait_readable(self._channel, time.monotonic() + self._start_timeout)
            self.hello = _decode(ServerHello, self._channel.receive()[0])
        except _TimedOut as error:
            raise WorkerError(
                f"the worker server was not ready within {self._start_timeout:g} s.{self._stop()}"
            ) from error
        except _Gone as error:
            raise WorkerError(f"the worker server ended while starting.{self._stop()}") from error
        except BaseException:
            self._stop()
            raise

    def _command(self, descriptor: int) -> list[str]:
        settings = {
            "package": __package__,
            "folder": str(Path(__file__).absolute().parent),
            # The empty entry, the current folder, is the candidates' (see import_path).
            "path": [entry for entry in sys.path if entry and isinstance(entry, str)],
            "device": self.device,
            "descriptor": descriptor,
            "judge": os.getpid(),
            "tunables": os.environ.get("GLIBC_TUNABLES"),
        }
        return [sys.executable, "-P", "-c", _BOOTSTRAP, json.dumps(settings)]

    def _stop(self, patience: float = 0.0) -> str:
        """End the server, by force after so many seconds; return what it printed, if anything."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        printed = ""
        try:
            if self._process is not None:
                _end_process(self._process, patience)
        finally:
            self._process = None
            if self._log is not None:
                self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _KEPT_BYTES))
                printed = self._log.read().decode(errors="replace").strip()
                self._log.close()
            self._log = None
        return f" It printed:\n{printed}" if printed else ""


class CandidateProcess:
    """A process with one candidate loaded; made by :meth:`WorkerServer.candidate`.

    A context manager. When a call crashes or times out the process is gone: ``alive`` is false,
    and the server makes another.
    """

    def __init__(
        self,
        server: WorkerServer,
        reference: CandidateReference,
        parameters: Sequence[str],
        operator: str,
    ) -> None:
        self.reference = reference
        self.alive = True
        self._server = server
        self._oom_kills = _oom_kills()
        self._printed = _HeadTail(_KEPT_BYTES)
        self._files: set[str] = set()
        self._channel, theirs = _channel_pair()
        self._output, output = os.pipe2(os.O_CLOEXEC)
        order = {
            "op": "fork",
            "reference": dataclasses.asdict(reference),
            "parameters": list(parameters),
            "operator": operator,
            "device": server.device,
            "cwd": str(Path.cwd()),
            "path": [entry for entry in sys.path if entry and isinstance(entry, str)],
        }
        try:
            with theirs:
                self._pid = server.ask(order, (theirs.fileno(), output))["pid"]
        except BaseException:
            self._end()
            raise
        finally:
            os.close(output)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, timeout: float) -> None:
        """Wait until the candidate is imported (for :class:`WorkerServer`).

        Raises:
            BadCandidate: if it cannot be loaded.
        """
        name = self.reference.text
        try:
            message = self._receive(time.monotonic() + timeout)
            if message == {"loaded": True}:
                return
            refusal = message.get("bad")
            if not isinstance(refusal, str):
                raise _Malformed("a message that is no answer")  # noqa: TRY301
            self.close()
        except _TimedOut:
            self._end(dump=True)
            refusal = (
                f"{name} was not imported within {timeout:g} s and was stopped; keep long work out"
                " of the import."
            )
        except (_Gone, _Malformed) as error:
            refusal = f"{name} cannot be imported: {self._death(error)[1]}."
        except BaseException:
            self._end()
            raise
        raise BadCandidate(refusal, self._printed.text())

    def call(self, request: CallRequest, timeout: float) -> CallReply:
        """Call the candidate once, for at most ``timeout`` seconds.

        Raises:
            RuntimeError: if the process is no longer alive.
            FileNotFoundError: if a file of the request is missing. Where an earlier call had it,
                the candidate deleted it: that is a crash, not an error of the judge.
            WorkerError: if the judge's part of the process fails.
        """
        if not self.alive:
            raise RuntimeError(f"the process of {self.reference.text} has ended; ask for another")
        request = dataclasses.replace(
            request,
            inputs_path=str(Path(request.inputs_path).absolute()),
            outputs_path=str(Path(request.outputs_path).absolute()),
        )
        self._printed = _HeadTail(_KEPT_BYTES)
        started = time.monotonic()
        try:
            self._check_files(request)
            self._channel.send(dataclasses.asdict(request))
            reply = self._reply(self._receive(started + timeout))
        except _TimedOut:
            self._end(dump=True)
            where = _stopped_at(self._printed.text(), self.reference)
            message = f"The candidate did not return within {timeout:g} s and was stopped{where}."
            reply = CallReply(status="timed_out", message=message)
        except (_Gone, _Malformed) as error:
            status, reason = self._death(error)
            reply = CallReply(status=status, message=f"The candidate crashed: {reason}.")
        except BaseException:
            # Interrupted, or the judge's own failure: the next message would answer this call.
            self._end()
            raise
        if reply.status == "crashed":
            self._end()
        return dataclasses.replace(
            reply,
            output_text=self._printed.text(),
            seconds=reply.seconds or time.monotonic() - started,
        )

    def close(self) -> None:
        """End the process, and all processes that the candidate started."""
        # The process ends by itself when it finds the channel closed.
        self._end(grace=_GRACE_S)

    def _check_files(self, request: CallRequest) -> None:
        for path in (request.inputs_path, request.outputs_path):
            if path in self._files and not Path(path).exists():
                raise _Malformed(f"it deleted the judge's file {path}")
            # Raises for a file that never was there.
            Path(path).stat()
            self._files.add(path)

    def _receive(self, deadline: float) -> dict[str, Any]:
        """Wait for the candidate's process to answer, keeping what it prints meanwhile."""
        server = self._server.channel
        poll = select.poll()
        for descriptor in (self._channel.fileno(), server.fileno(), self._output):
            poll.register(descriptor, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _TimedOut
            ready = [descriptor for descriptor, _ in poll.poll(math.ceil(min(left, 3600) * 1000))]
            if self._output in ready and not self._printed.read(self._output):
                poll.unregister(self._output)
            if self._channel.fileno() in ready:
                message, _ = self._channel.receive()
                self._printed.read_all(self._output)
                return message
            # Its end is news only if it left no answer. Its channel alone does not tell: a process
            # that it started may hold the other end.
            if (
                server.fileno() in ready
                and server.receive()[0].get("ended") == self._pid
                and not _is_readable(self._channel, 0.0)
            ):
                raise _Gone

    def _reply(self, message: dict[str, Any]) -> CallReply:
        if isinstance(message.get("failed"), str):
            raise WorkerError(f"the worker failed around the call:\n{message['failed']}")
        return _decode(CallReply, message.get("reply"))

    def _death(self, error: Exception) -> tuple[CallStatus, str]:
        """End the process after a failed exchange; say what became of it."""
        malformed = isinstance(error, _Malformed)
        # Its end of the channel closes a little before a dying process is dead.
        ending = self._end(grace=0.0 if malformed else _GRACE_S)
        if malformed:
            return "crashed", str(error)
        if ending is None:
            return "crashed", "the server of its process was ended, which only the judge may do"
        if ending["killed"]:
            return "crashed", "it closed its connection to the judge and ran on, and was stopped"
        code = ending["returncode"]
        if code >= 0:
            return "crashed", f"its process ended with exit status {code} instead of returning"
        name = signal.Signals(-code).name
        if name == "SIGKILL" and _oom_kills() > self._oom_kills:
            return "out_of_memory", "the kernel ended its process because memory ran out (SIGKILL)"
        return "crashed", f"its process was ended by {name}"

    def _end(self, grace: float = 0.0, *, dump: bool = False) -> dict[str, Any] | None:
        """End the process, by force after so many seconds; None if the server cannot say how."""
        if not self.alive:
            return None
        self.alive = False
        self._channel.close()
        try:
            return self._server.ask({"op": "end", "grace": grace, "dump": dump}, timeout=grace)
        except _Gone:
            return None
        finally:
            self._printed.read_all(self._output)
            os.close(self._output)


class _HeadTail:
    """Keeps the first and the last bytes of a stream, and counts those between."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head = b""
        self._tail = b""
        self._left_out = 0

    def read(self, descriptor: int) -> bool:
        """Take what is there to read, up to a pipe's usual capacity; False at the end.

        There must be something, or it waits: what stands in the pipe is read here only.
        """
        chunk = os.read(descriptor, 2**16)
        room = self._limit - len(self._head)
        self._head += chunk[:room]
        tail = self._tail + chunk[room:]
        self._left_out += max(0, len(tail) - self._limit)
        self._tail = tail[-self._limit :]
        return bool(chunk)

    def read_all(self, descriptor: int) -> None:
        """Take what was there at the time of the call, and not what is written meanwhile."""
        waiting = array.array("i", [0])
        fcntl.ioctl(descriptor, termios.FIONREAD, waiting)
        for _ in range(-(-waiting[0] // 2**16)):
            self.read(descriptor)

    def text(self) -> str:
        """Decode what was kept."""
        gap = f"\n[{self._left_out} bytes left out]\n".encode() if self._left_out else b""
        return (self._head + gap + self._tail).decode(errors="replace")


def _stopped_at(printed: str, reference: CandidateReference) -> str:
    """Say on which of its lines a stopped candidate was, by the traceback it left."""
    name = reference.location
    if reference.kind == "module":
        name = "/" + name.replace(".", "/") + ".py"
    lines = re.findall(r'File "([^"]+)", line (\d+) in', printed)
    return next((f" at {path}:{line}" for path, line in lines if path.endswith(name)), "")


def _oom_kills() -> int:
    """How many processes the kernel has ended for want of memory since the machine started."""
    try:
        text = Path("/proc/vmstat").read_text()
    except FileNotFoundError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _tunables() -> str:
    users = os.environ.get("GLIBC_TUNABLES")
    return f"{users}:{_NO_MALLOC_CACHE}" if users else _NO_MALLOC_CACHE


def _is_readable(channel: _Channel, seconds: float) -> bool:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    return bool(poll.poll(math.ceil(seconds * 1000)))


def _wait_readable(channel: _Channel, deadline: float) -> None:
    if not _is_readable(channel, max(0.0, deadline - time.monotonic())):
        raise _TimedOut


def _end_process(process: subprocess.Popen[bytes], patience: float) -> None:
    try:
        process.wait(patience)
    except BaseException as error:
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
