"""Generic corruptions: wrong outputs made from any right ones, without knowing the operator.

Most faults of kernels leave a mark that does not depend on what is computed: a row that still
holds the last call's answer, a last tile never written, one element off, a transposed pair of
axes. Applied to right outputs they give every operator a measured power of detection for free.
A corruption works on bits, so special values are damaged like others and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch

from .definition import Operator, TensorSpec
from .rounding import Format, format_of

TILES = (16, 32, 64, 128)
"""Usual block sizes, the last of which a kernel may forget."""

POISON_BYTE = 0x7F
"""What memory that was never written holds: a huge number in every floating type."""

Outputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Corruption:
    """A way to damage right outputs.

    Attributes:
        name: output, axis where there is one, and kind, joined by dots.
        description: one sentence: what the damaged outputs hold.
        outputs: the names of the outputs that it may change.
        apply: ``apply(outputs, earlier)`` returns all outputs, the damaged ones as new tensors;
            ``earlier`` are right outputs of the same shapes from another call, which stale parts
            hold. The bits may come out as they were, for instance where an axis has size one.
    """

    name: str
    description: str
    outputs: tuple[str, ...]
    apply: Callable[[Outputs, Outputs], dict[str, torch.Tensor]]


def corruptions(operator: Operator) -> tuple[Corruption, ...]:
    """Return every generic corruption of an operator's outputs, made from their axes alone."""
    found: list[Corruption] = []
    for spec in operator.outputs:
        found += _of_output(spec)
        for dimension, axis in enumerate(spec.axes):
            if axis != "1":
                found += _of_axis(spec, axis, dimension)
        found += _transpositions(spec)
    found += _swaps(operator)
    return tuple(found)


# A change takes the right output and an earlier call's, and returns the damaged output.
_Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _on(spec: TensorSpec, kind: str, description: str, change: _Change) -> Corruption:
    def apply(outputs: Outputs, earlier: Outputs) -> dict[str, torch.Tensor]:
        return {**outputs, spec.name: change(outputs[spec.name], earlier[spec.name])}

    return Corruption(f"{spec.name}.{kind}", f"{spec.name}: {description}.", (spec.name,), apply)


def _of_output(spec: TensorSpec) -> Iterator[Corruption]:
    yield _on(spec, "unwritten", "nothing is written, memory keeps what it held", _unwritten)
    yield _on(spec, "zero", "all elements are zero", lambda right, _: torch.zeros_like(right))
    yield _on(spec, "stale", "all elements are those of another call", lambda _, old: old.clone())
    yield _on(spec, "low-bit-lost", "the last bit of every significand is cleared", _clear_low_bit)
    yield _on(
        spec, "towards-zero", "every element is one ulp nearer to zero", partial(_step, ulps=-1)
    )
    yield _on(
        spec,
        "away-from-zero",
        "every element is two ulps larger in size",
        partial(_step, ulps=2),
    )
    yield _on(spec, "negated", "every element has the other sign", _negate)
    yield _on(spec, "nan-in-last-row", "the last row holds a NaN", _put_nan)
    for place in ("first", "middle", "last"):
        yield _on(
            spec,
            f"{place}-element-exponent",
            f"the {place} element has its lowest exponent bit flipped (twice or half the value)",
            partial(_flip_exponent, place=place),
        )
        yield _on(
            spec,
            f"{place}-element-ulps",
            f"the {place} element is three ulps further from zero",
            partial(_step_one, place=place),
        )


def _of_axis(spec: TensorSpec, axis: str, dimension: int) -> Iterator[Corruption]:
    def along(kind: str, description: str, change: Callable[..., torch.Tensor]) -> Corruption:
        bound = partial(change, dimension=dimension)
        return _on(spec, f"{axis}.{kind}", f"{description.format(axis=axis)}", bound)

    yield along("first-stale", "the first index along {axis} holds another call's", _first_stale)
    yield along("last-stale", "the last index along {axis} holds another call's", _last_stale)
    yield along("last-zero", "the last index along {axis} is zero", _last_zero)
    yield along("rolled", "everything is one index further along {axis}", _rolled)
    yield along("reversed", "{axis} runs backwards", _reversed)
    yield along("first-for-all", "index 0 along {axis} stands at every index", _first_for_all)
    yield along("half-negated", "the second half of {axis} has the other sign", _half_negated)
    for tile in TILES:
        yield along(
            f"last-tile-{tile}",
            f"the last of several tiles of {tile} along {{axis}} is never written",
            partial(_last_tile_unwritten, tile=tile),
        )


def _transpositions(spec: TensorSpec) -> Iterator[Corruption]:
    named = [(d, axis) for d, axis in enumerate(spec.axes) if axis != "1"]
    for (first, one), (second, other) in combinations(named, 2):
        yield _on(
            spec,
            f"{one}-{other}-transposed",
            f"the elements lie in memory as if {one} and {other} were exchanged",
            partial(_transposed, first=first, second=second),
        )


def _swaps(operator: Operator) -> Iterator[Corruption]:
    for one, other in combinations(operator.outputs, 2):
        if one.axes == other.axes:
            yield Corruption(
                f"{one.name}-{other.name}-swapped",
                f"{one.name} and {other.name} are returned in each other's place.",
                (one.name, other.name),
                partial(_swap, one=one.name, other=other.name),
            )


def _swap(outputs: Outputs, _earlier: Outputs, *, one: str, other: str) -> dict[str, torch.Tensor]:
    return {**outputs, one: outputs[other].clone(), other: outputs[one].clone()}


# Changes of a whole output.


def _bits(tensor: torch.Tensor) -> tuple[torch.Tensor, Format]:
    """Return a copy of a tensor's bits, and its format."""
    fmt = format_of(tensor.dtype)
    return tensor.contiguous().clone().view(fmt.bits_dtype), fmt


def _poison(fmt: Format) -> int:
    return int.from_bytes(bytes([POISON_BYTE]) * fmt.width, "little", signed=True)


def _sign_bit(fmt: Format) -> int:
    return -(1 << (8 * fmt.width - 1))


def _infinity(fmt: Format) -> int:
    """Return the pattern of infinity; larger magnitudes are NaNs."""
    exponent_bits = 8 * fmt.width - fmt.precision
    return ((1 << exponent_bits) - 1) << (fmt.precision - 1)


def _unwritten(right: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    bits, fmt = _bits(right)
    return bits.fill_(_poison(fmt)).view(fmt.dtype)


def _clear_low_bit(right: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    bits, fmt = _bits(right)
    return (bits & ~1).view(fmt.dtype)


def _negate(right: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    bits, fmt = _bits(right)
    return (bits ^ _sign_bit(fmt)).view(fmt.dtype)


def _moved(bits: torch.Tensor, fmt: Format, ulps: int) -> torch.Tensor:
    """Move magnitudes by some ulps, between zero and infinity; NaNs stay."""
    infinity = _infinity(fmt)
    magnitude = bits & ~_sign_bit(fmt)
    moved = (magnitude + ulps).clamp(min=0, max=infinity)
    return torch.where(magnitude > infinity, magnitude, moved) | (bits & _sign_bit(fmt))


def _step(right: torch.Tensor, _: torch.Tensor, *, ulps: int) -> torch.Tensor:
    bits, fmt = _bits(right)
    return _moved(bits, fmt, ulps).view(fmt.dtype)


def _put_nan(right: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    bits, fmt = _bits(right)
    bits.view(-1)[-1:] = _infinity(fmt) | (1 << (fmt.precision - 2))
    return bits.view(fmt.dtype)


def _place(bits: torch.Tensor, place: str) -> slice:
    """Return where the first, middle or last element is; an empty slice if there is none."""
    index = {"first": 0, "middle": bits.numel() // 2, "last": max(0, bits.numel() - 1)}[place]
    return slice(index, index + 1)


def _flip_exponent(right: torch.Tensor, _: torch.Tensor, *, place: str) -> torch.Tensor:
    bits, fmt = _bits(right)
    bits.view(-1)[_place(bits, place)] ^= 1 << (fmt.precision - 1)
    return bits.view(fmt.dtype)


def _step_one(right: torch.Tensor, _: torch.Tensor, *, place: str) -> torch.Tensor:
    bits, fmt = _bits(right)
    where = _place(bits, place)
    bits.view(-1)[where] = _moved(bits.view(-1)[where], fmt, 3)
    return bits.view(fmt.dtype)


# Changes along an axis.


def _with_part(
    right: torch.Tensor, part: torch.Tensor | int, dimension: int, start: int, stop: int
) -> torch.Tensor:
    """Return a copy with the indices start..stop-1 along a dimension replaced by bits."""
    bits, fmt = _bits(right)
    target = bits.narrow(dimension, start, stop - start)
    if isinstance(part, int):
        target.fill_(part)
    else:
        target.copy_(part.view(fmt.bits_dtype))
    return bits.view(fmt.dtype)


def _first_stale(right: torch.Tensor, earlier: torch.Tensor, *, dimension: int) -> torch.Tensor:
    stop = min(1, right.shape[dimension])
    stale = earlier.contiguous().narrow(dimension, 0, stop)
    return _with_part(right, stale, dimension, 0, stop)


def _last_stale(right: torch.Tensor, earlier: torch.Tensor, *, dimension: int) -> torch.Tensor:
    size = right.shape[dimension]
    start = max(0, size - 1)
    stale = earlier.contiguous().narrow(dimension, start, size - start)
    return _with_part(right, stale, dimension, start, size)


def _last_zero(right: torch.Tensor, _: torch.Tensor, *, dimension: int) -> torch.Tensor:
    size = right.shape[dimension]
    return _with_part(right, 0, dimension, max(0, size - 1), size)


def _last_tile_unwritten(
    right: torch.Tensor, _: torch.Tensor, *, dimension: int, tile: int
) -> torch.Tensor:
    size = right.shape[dimension]
    # With a single tile nothing would be written at all, which is another corruption.
    start = (size - 1) // tile * tile if size > tile else size
    return _with_part(right, _poison(format_of(right.dtype)), dimension, start, size)


def _rolled(right: torch.Tensor, _: torch.Tensor, *, dimension: int) -> torch.Tensor:
    return right.roll(1, dimension)


def _reversed(right: torch.Tensor, _: torch.Tensor, *, dimension: int) -> torch.Tensor:
    return right.flip(dimension)


def _first_for_all(right: torch.Tensor, _: torch.Tensor, *, dimension: int) -> torch.Tensor:
    first = right.narrow(dimension, 0, min(1, right.shape[dimension]))
    return first.expand_as(right).clone(memory_format=torch.contiguous_format)


def _half_negated(right: torch.Tensor, _: torch.Tensor, *, dimension: int) -> torch.Tensor:
    bits, fmt = _bits(right)
    size = bits.shape[dimension]
    half = bits.narrow(dimension, size // 2, size - size // 2)
    half.bitwise_xor_(_sign_bit(fmt))
    return bits.view(fmt.dtype)


def _transposed(right: torch.Tensor, _: torch.Tensor, *, first: int, second: int) -> torch.Tensor:
    return right.transpose(first, second).reshape(right.shape).clone()
