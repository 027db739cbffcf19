"""Calling a candidate in this process: arguments from files, facts and bits of what it returns.

Whatever a candidate returns or raises becomes a :class:`~oracle.call.CallReply`. Isolation and time
limits are those of the process this runs in (:mod:`oracle.server`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .call import (
    CallReply,
    CallRequest,
    CallStatus,
    EarlierOutput,
    Footprint,
    ReturnedTensor,
    returned_outputs,
)
from .candidate import describe_exception, line_in
from .poison import IsPoisoned, poisoned_memory
from .tensor_file import TensorFile

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A reply must stay far below the size of a message, whatever was returned.
_ITEMS_DESCRIBED = 32
_NAME_LIMIT = 200


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
        inputs = TensorFile(request.inputs_path, self._device, upload=True)
        outputs = TensorFile(request.outputs_path, self._device, upload=request.style == "out")
        arguments = [inputs.tensor(layout) for layout in request.inputs]
        footprints = tuple(_footprint(tensor) for tensor in arguments)
        device = str(arguments[0].device) if arguments else str(self._device)
        if request.style == "out":
            arguments += [outputs.tensor(layout) for layout in request.outputs]
        sizes = [layout.footprint.extent_bytes for layout in request.outputs]
        started = time.perf_counter()
        try:
            with poisoned_memory(self._device, request.fill_byte, sizes) as is_poisoned:
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


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch's CPU allocator and Triton's driver raise a bare RuntimeError.
    text = describe_exception(error) if isinstance(error, RuntimeError) else ""
    return "can't allocate memory" in text or "out of memory" in text


def _items(result: Any) -> tuple[Any, ...]:
    if _is_a(result, torch.Tensor):
        return (result,)
    if _is_a(result, tuple):
        return tuple(tuple.__iter__(result))
    return ()


def _is_a(item: object, kind: type) -> bool:
    """Do as ``isinstance`` without asking the item for its ``__class__``, which may be anything."""
    return issubclass(type(item), kind)


def _type_name(item: object) -> str:
    kind = type(item)
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{home}{kind.__qualname__}"[:_NAME_LIMIT]


def _describe(item: object, is_poisoned: IsPoisoned) -> ReturnedTensor:
    """State the facts of an item; nothing is asked of a subclass, which may answer anything."""
    if type(item) is not torch.Tensor:
        return ReturnedTensor(_type_name(item), is_tensor=_is_a(item, torch.Tensor))
    facts = ReturnedTensor(
        type_name="torch.Tensor",
        is_tensor=True,
        dtype=str(item.dtype).removeprefix("torch."),
        shape=tuple(item.shape),
        device=str(item.device),
        layout=str(item.layout).removeprefix("torch."),
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
    outputs: TensorFile,
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


def _copy_in_place(request: CallRequest, inputs: TensorFile, outputs: TensorFile) -> None:
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
