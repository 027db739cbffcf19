"""A function of tensors at a point: checked arguments, and its values there as one float64 vector.

Differences are only ever taken in float64, whatever the types given, and on copies: memory that
several indices share (a tensor made by ``expand``) is copied first, so that every index can move
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Function = Callable[..., Any]
"""Takes tensors (and whatever else is passed on) and returns a tensor or a sequence of them."""


@dataclass(frozen=True)
class Arguments:
    """What a function is called with, and which of it is differentiated.

    Attributes:
        values: as given; everything that is not a floating tensor is passed on unchanged.
        checked: the places of the floating tensors that are differentiated.
        names: a name for every place, for messages.
        overlapping: the places of floating tensors several of whose indices share memory.
    """

    values: tuple[Any, ...]
    checked: tuple[int, ...]
    names: tuple[str, ...]
    overlapping: tuple[int, ...]

    @classmethod
    def read(
        cls,
        inputs: Any,
        wrt: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> Arguments:
        """Check and classify a function's inputs.

        Args:
            inputs: a tensor, or a sequence of tensors and other arguments.
            wrt: the places to differentiate; None for all floating tensors.
            names: a name for every input.

        Raises:
            TypeError: if an input is complex, sparse or of a type without derivatives.
            ValueError: if no floating tensor is given, or a place or the names do not fit.
        """
        values = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        labels = (
            tuple(names) if names is not None else tuple(f"input {i}" for i in range(len(values)))
        )
        if len(labels) != len(values):
            raise ValueError(f"{len(labels)} names {labels} were given for {len(values)} inputs")
        for label, value in zip(labels, values, strict=True):
            _check_tensor(label, value)
        floating = tuple(place for place, value in enumerate(values) if _is_floating(value))
        if not floating:
            raise ValueError(
                "nothing to check: no input is a floating-point tensor; got "
                + (", ".join(_describe(value) for value in values) or "no inputs")
            )
        checked = floating if wrt is None else tuple(wrt)
        if not checked:
            raise ValueError("nothing to check: wrt names no input")
        for place in checked:
            if place not in floating:
                what = _describe(values[place]) if 0 <= place < len(values) else "no input"
                raise ValueError(
                    f"input {place} cannot be differentiated: it is {what}; floating-point tensors"
                    f" are the inputs {', '.join(map(str, floating))}"
                )
        overlapping = tuple(place for place in floating if has_overlap(values[place]))
        return cls(values, checked, labels, overlapping)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The differentiated inputs, as given."""
        return tuple(self.values[place] for place in self.checked)

    def replaced(self, tensors: Sequence[torch.Tensor]) -> Arguments:
        """Return the same with other values of the differentiated inputs, in their types."""
        values = list(self.values)
        for place, tensor in zip(self.checked, tensors, strict=True):
            if place in self.overlapping:
                values[place] = tensor.to(self.values[place].dtype)
            else:
                values[place] = copy_as_laid_out(self.values[place]).copy_(tensor)
        return Arguments(tuple(values), self.checked, self.names, ())

    def remarks(self) -> tuple[str, ...]:
        """Say which inputs were copied."""
        return tuple(
            f"{self.names[place]} is expanded or overlaps itself (shape"
            f" {tuple(self.values[place].shape)}, strides {self.values[place].stride()}): it was"
            " copied, and every index is checked as memory of its own"
            for place in self.overlapping
        )


def has_overlap(tensor: torch.Tensor) -> bool:
    """Return whether several indices of a tensor share memory."""
    dimensions = [
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    ]
    if tensor.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(dimensions):
        if stride <= reach:
            # Nested strides never meet; others may or may not, so look at all places.
            return _repeats_places(tensor)
        reach += stride * (size - 1)
    return False


def _repeats_places(tensor: torch.Tensor) -> bool:
    places = torch.zeros((), dtype=torch.int64)
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        if stride == 0 and size > 1:
            return True
        places = places[..., None] + torch.arange(size) * stride
    ordered = places.reshape(-1).sort().values
    return bool((ordered[1:] == ordered[:-1]).any())


def copy_as_laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its strides, expanded dimensions included, into memory of its own."""
    if tensor.numel() == 0:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.detach().as_strided((last + 1,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride(), 0)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and type hold the same bits: a NaN equals itself."""
    if one.is_floating_point():
        integer = _INTEGERS[one.dtype.itemsize]
        return torch.equal(one.detach().view(integer), other.detach().view(integer))
    return torch.equal(one, other)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def read_outputs(returned: Any) -> tuple[torch.Tensor, ...]:
    """Return a function's floating outputs; outputs of integers and truth values are left out.

    Raises:
        TypeError: if something else than tensors is returned, or a complex one.
    """
    outputs = (returned,) if isinstance(returned, torch.Tensor) else returned
    if not isinstance(outputs, tuple | list):
        raise TypeError(
            f"the function returned {type(returned).__name__}; it must return a tensor or a tuple"
            " of tensors"
        )
    for place, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"output {place} is {type(output).__name__}; it must be a tensor")
        _check_tensor(f"output {place}", output)
    return tuple(output for output in outputs if _is_floating(output))


class Point:
    """A function at a point, in float64.

    Args:
        function: what is differentiated.
        arguments: its arguments; floating tensors are converted to float64 and copied.

    Raises:
        TypeError: if it returns something without derivatives.
        ValueError: if it changes its inputs, or returns no floating value.
    """

    def __init__(self, function: Function, arguments: Arguments) -> None:
        self._function = function
        self.arguments = arguments
        self.values = tuple(
            value.detach().to(torch.float64, memory_format=torch.contiguous_format, copy=True)
            if _is_floating(value)
            else value
            for value in arguments.values
        )
        self.evaluations = 0
        before = [_snapshot(value) for value in self.values]
        self.outputs = tuple(out.detach().clone() for out in read_outputs(self._call(self.values)))
        for name, old, new in zip(arguments.names, before, self.values, strict=True):
            if old is not None and not same_bits(old, new):
                raise ValueError(
                    f"the function changes {name} in place, so it cannot be differentiated by"
                    " calling it again; let it work on a clone"
                )
        if not self.outputs:
            raise ValueError("nothing to check: the function returns no floating-point tensor")
        self.shapes = tuple(out.shape for out in self.outputs)
        self.base = torch.cat([out.to(torch.float64).reshape(-1) for out in self.outputs])

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The differentiated inputs, contiguous float64 copies."""
        return tuple(self.values[place] for place in self.arguments.checked)

    @property
    def input_count(self) -> int:
        """How many numbers are differentiated with respect to."""
        return sum(tensor.numel() for tensor in self.tensors)

    def at(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Evaluate with other values of the differentiated inputs.

        Returns:
            float64 ``[outputs]``, all outputs one after the other, a copy.
        """
        values = list(self.values)
        for place, tensor in zip(self.arguments.checked, tensors, strict=True):
            values[place] = tensor
        return self._flat(values)

    def moved(self, number: int, place: int, value: float) -> torch.Tensor:
        """Evaluate with one element of one differentiated input replaced, and put it back."""
        flat = self.tensors[number].view(-1)
        before = flat[place].clone()
        flat[place] = value
        try:
            return self._flat(self.values)
        finally:
            flat[place] = before

    def outputs_at(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the floating outputs for other differentiated inputs, connected to them."""
        values = list(self.values)
        for place, tensor in zip(self.arguments.checked, tensors, strict=True):
            values[place] = tensor
        return read_outputs(self._call(values))

    def _flat(self, values: Sequence[Any]) -> torch.Tensor:
        outputs = read_outputs(self._call(values))
        shapes = tuple(out.shape for out in outputs)
        if shapes != self.shapes:
            raise ValueError(
                f"the function returned shapes {[tuple(s) for s in shapes]} near the point, but"
                f" {[tuple(s) for s in self.shapes]} at it"
            )
        return torch.cat([out.detach().to(torch.float64).reshape(-1) for out in outputs])

    def _call(self, values: Sequence[Any]) -> Any:
        self.evaluations += 1
        return self._function(*values)

    def split(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cut ``[outputs]`` into tensors of the outputs' shapes."""
        parts = torch.split(flat, [math.prod(shape) for shape in self.shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))

    def place_of(self, flat: int) -> tuple[int, tuple[int, ...]]:
        """Return which output a place in ``[outputs]`` belongs to, and its index there."""
        for number, shape in enumerate(self.shapes):
            size = math.prod(shape)
            if flat < size:
                return number, unravel(flat, shape)
            flat -= size
        raise IndexError(f"there is no output element {flat}")


def unravel(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Turn a flat place into an index."""
    index: list[int] = []
    for size in reversed(shape):
        place, coordinate = divmod(place, size)
        index.append(coordinate)
    return tuple(reversed(index))


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        return
    if value.is_complex():
        raise TypeError(
            f"{name} is {value.dtype}; gradient checks are for real tensors: pass real and"
            " imaginary part as a real tensor (torch.view_as_real) and build the complex one in the"
            " function"
        )
    if value.layout != torch.strided:
        raise TypeError(f"{name} has layout {value.layout}; gradient checks are for dense tensors")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__} {value!r}"


def _snapshot(value: Any) -> torch.Tensor | None:
    return value.clone() if isinstance(value, torch.Tensor) else None
