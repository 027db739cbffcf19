"""The structure of an error: which rows, heads and columns are wrong, and what stands there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, pairwise

import torch

from .budget import Contract
from .certified import fill_output
from .comparison import Comparison
from .definition import Operator, TensorSpec
from .elements import (
    EXPLAINED,
    NEARER,
    SHARE,
    Judged,
    Tensors,
    WrongElements,
    bits_of,
    close,
    judge_elements,
    same_numbers,
    tolerance_of,
)
from .rounding import format_of

_MOST_LISTED = 4
_MOST_ULPS = 16
_FEWEST_MOVED = 8
"""Fewer right values in wrong places may be there by chance."""
_FILL_BYTES = (0x7F, 0xFE, 0xFF)
_MOST_SENTENCES = 2


def describe_structure(
    operator: Operator,
    inputs: Tensors,
    outputs: Tensors,
    comparison: Comparison,
    contract: Contract = "stored_intermediates",
) -> str:
    """Say where the wrong elements are and what stands there, in one or two sentences.

    Args:
        operator: what the outputs should be of.
        inputs: every input by name.
        outputs: every output by name.
        comparison: the comparison of these.
        contract: its contract.

    Returns:
        The sentences; empty where no element is wrong.
    """
    said: dict[str, list[str]] = {}
    for result in comparison.regions:
        if result.biased and result.mean is not None:
            text = (
                f"no element is wrong by itself, but their mean error is {result.mean.mean:+.3f}"
                f" ulp, outside {result.mean.low:+.3f} to {result.mean.high:+.3f}"
            )
            said.setdefault(text, []).append(f"{result.output} ({result.region})")
    for name in failing_outputs(comparison):
        spec = next(spec for spec in operator.outputs if spec.name == name)
        judged = judge_elements(operator, inputs, spec, outputs[name], contract)
        for region, text in _describe_output(operator, inputs, outputs, spec, judged):
            where = f"{name} ({region})" if len(judged.regions) > 1 else name
            said.setdefault(text, []).append(where)
    sentences = [f"{listed(places)}: {text}." for text, places in said.items()]
    left = len(sentences) - _MOST_SENTENCES
    if left > 0:
        rest = [place for places in list(said.values())[_MOST_SENTENCES:] for place in places]
        sentences[_MOST_SENTENCES:] = [f"Also wrong: {listed(rest)}."]
    return " ".join(sentences)


def _describe_output(
    operator: Operator, inputs: Tensors, outputs: Tensors, spec: TensorSpec, judged: Judged
) -> Iterator[tuple[str, str]]:
    """Yield region and sentence for each region with wrong elements."""
    for region, indices in judged.regions.items():
        wrong = _select(judged.wrong, indices)
        if not bool(wrong.any()):
            continue
        where = describe_places(spec, wrong, indices, _positions(operator, inputs))
        facts = _Part(
            spec=spec,
            actual=_select(outputs[spec.name], indices),
            truth=_select(judged.truth, indices),
            wrong=wrong,
            scale=judged.scale,
            indices=indices,
        )
        what = _describe_values(facts, operator, inputs, outputs, judged)
        yield region, f"{where}; {what}" if what else where


def _select(tensor: torch.Tensor, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the part of a tensor at the given indices along each dimension."""
    for dimension, index in enumerate(indices):
        if index.numel() != tensor.shape[dimension]:
            tensor = tensor.index_select(dimension, index)
    return tensor


def _positions(operator: Operator, inputs: Tensors) -> dict[str, tuple[str, list[int]]]:
    """Return, by the axis that counts its entries, each index tensor's name and entries."""
    return {
        spec.axes[0]: (spec.name, inputs[spec.name].tolist())
        for spec in operator.inputs
        if spec.indexes is not None
    }


def describe_places(
    spec: TensorSpec,
    wrong: torch.Tensor,
    indices: Sequence[torch.Tensor],
    positions: Mapping[str, tuple[str, list[int]]],
) -> str:
    """Say which elements of a region are wrong, by axis names and indices.

    Args:
        spec: the output's specification.
        wrong: bool, the shape of the region.
        indices: the region's indices along each dimension of the output.
        positions: axis name to the name and entries of the index tensor along it.

    Returns:
        A clause such as ``all 640 elements with head_dim from 64 on are wrong``.
    """
    count = int(wrong.sum())
    if count == 1:
        at = [int(i[k]) for i, k in zip(indices, wrong.nonzero()[0].tolist(), strict=True)]
        return f"one of {wrong.numel()} elements is wrong, at {at}"
    touched = [_touched(wrong, dimension) for dimension in range(wrong.dim())]
    dense = 2 * count >= math.prod(map(len, touched))
    reach, parts = 1, []
    for dimension, axis in enumerate(spec.axes):
        size = wrong.shape[dimension]
        # Few elements scattered by chance leave out some indices of a long axis: that says nothing.
        telling = dense or count > size * (math.log(size) + 3)
        if axis == "1" or not telling or len(touched[dimension]) == size:
            reach *= size
            continue
        reach *= len(touched[dimension])
        among = indices[dimension].tolist()
        parts.append(_describe_axis(axis, touched[dimension], among, positions))
    amount = f"all {count}" if count == reach else f"{count} of {reach}"
    where = f" with {listed(parts)}" if parts else ""
    return f"{amount} elements{where} are wrong"


def _touched(wrong: torch.Tensor, dimension: int) -> list[int]:
    """Return the ascending places along a dimension at which anything is wrong."""
    others = [other for other in range(wrong.dim()) if other != dimension]
    return (wrong.amax(others) if others else wrong).nonzero().squeeze(1).tolist()


def _describe_axis(
    axis: str,
    touched: list[int],
    among: list[int],
    positions: Mapping[str, tuple[str, list[int]]],
) -> str:
    """Describe some of the indices along an axis.

    Args:
        axis: its name.
        touched: ascending places in ``among``, not all of them.
        among: ascending indices along the axis.
        positions: as in :func:`describe_places`.
    """
    named = [among[place] for place in touched]
    missing = [among[place] for place in sorted(set(range(len(among))) - set(touched))]
    return (
        _describe_run(axis, touched, named, len(among) - 1)
        or _describe_threshold(axis, named, missing, positions)
        or _describe_scattered(axis, touched, named, missing)
    )


def _describe_run(axis: str, touched: Sequence[int], named: Sequence[int], last: int) -> str:
    """Describe one index or consecutive ones; empty for others."""
    if len(named) == 1:
        end = " (the last)" if touched[0] == last else " (the first)" if touched[0] == 0 else ""
        return f"{axis} {named[0]}{end}"
    if touched[-1] - touched[0] >= len(touched):
        return ""
    if touched[-1] == last:
        return f"{axis} from {named[0]} on"
    return f"{axis} up to {named[-1]}" if touched[0] == 0 else f"{axis} {named[0]}..{named[-1]}"


def _describe_scattered(
    axis: str, touched: Sequence[int], named: Sequence[int], missing: Sequence[int]
) -> str:
    steps = {b - a for a, b in pairwise(touched)}
    if len(steps) == 1 and len(named) > 2:
        return f"every {_ordinal(steps.pop())} {axis} from {named[0]} on"
    if len(named) <= _MOST_LISTED:
        return f"{axis} {', '.join(map(str, named))}"
    if len(missing) <= _MOST_LISTED:
        return f"{axis} other than {', '.join(map(str, missing))}"
    total = len(named) + len(missing)
    return f"{len(named)} of {total} indices along {axis}, the first {named[0]}"


def _describe_threshold(
    axis: str,
    named: Sequence[int],
    missing: Sequence[int],
    positions: Mapping[str, tuple[str, list[int]]],
) -> str:
    """Describe indices by the entries of an index tensor along the axis, if one bound does."""
    if axis not in positions or not missing:
        return ""
    name, entries = positions[axis]
    inside = [entries[index] for index in named]
    outside = [entries[index] for index in missing]
    if min(inside) > max(outside):
        return f"{name} at least {min(inside)}"
    if max(inside) < min(outside):
        return f"{name} at most {max(inside)}"
    return ""


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


# What stands at the wrong places.


@dataclass(frozen=True)
class _Part:
    """A region of an output: what is there, what should be, and where that differs."""

    spec: TensorSpec
    actual: torch.Tensor
    truth: torch.Tensor
    wrong: torch.Tensor
    scale: torch.Tensor
    indices: tuple[torch.Tensor, ...]
    picked: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        scale = _select(self.scale, self.indices[:-1]).expand(self.wrong.shape)
        picked = tuple(x[self.wrong] for x in (self.actual, self.truth, scale))
        object.__setattr__(self, "picked", picked)

    def holds(self, other: torch.Tensor) -> bool:
        """Whether the wrong elements are those of a tensor of the region's shape."""
        actual, truth, scale = self.picked
        if actual.dtype != other.dtype:
            return False
        given = other[self.wrong]
        if WrongElements(actual, truth).explained(given) < EXPLAINED:
            return False
        return _most(close(actual, given, scale))


def _most(mask: torch.Tensor) -> bool:
    return int(mask.sum()) >= SHARE * mask.numel()


def _describe_values(
    part: _Part, operator: Operator, inputs: Tensors, outputs: Tensors, judged: Judged
) -> str:
    """Say what the wrong elements are, if it can be said simply."""
    actual, truth, scale = part.picked
    plain = (
        _describe_constant(actual, truth)
        or _describe_sign(actual, truth)
        or _describe_ulps(actual, truth)
    )
    if plain or actual.numel() < _FEWEST_MOVED:
        return plain
    return (
        _describe_moved(part, judged)
        or _describe_source(part, operator, inputs, outputs)
        or _describe_factor(part)
        or _describe_nearness(actual, truth, scale)
        or _describe_remainder(actual, truth)
    )


def _describe_constant(actual: torch.Tensor, truth: torch.Tensor) -> str:
    """Say that all are one value, or that numbers are right and their bits are not."""
    bits = bits_of(actual)
    single = actual.numel() == 1
    byte = int(bits[0]) & 0xFF
    fill = int.from_bytes(bytes([byte]) * bits.dtype.itemsize, "little", signed=True)
    facts: tuple[tuple[torch.Tensor, str], ...] = (
        (torch.isnan(actual) & torch.isnan(truth), "NaNs whose bits changed"),
        ((actual == 0) & (truth == 0), "zeros whose sign changed"),
        (same_numbers(actual, truth), "NaNs and zeros whose bits changed"),
        (
            (bits == fill) if byte in _FILL_BYTES else torch.zeros_like(bits, dtype=torch.bool),
            f"all hold what fresh memory was filled with (0x{byte:02X})",
        ),
        (torch.isnan(actual), "it is NaN" if single else "all are NaN"),
        (actual == 0, "it is zero" if single else "all are zero"),
        (torch.isinf(actual), "it is infinite" if single else "all are infinite"),
        (
            (bits == bits[0]) if not single else torch.zeros_like(bits, dtype=torch.bool),
            f"all are {float(actual[0]):.6g}",
        ),
    )
    return next((text for mask, text in facts if bool(mask.all())), "")


def _describe_sign(actual: torch.Tensor, truth: torch.Tensor) -> str:
    flipped = (actual == -truth) & (actual != 0)
    return "the sign is flipped" if _most(flipped) else ""


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers in the order of the numbers, one apart for neighbours."""
    bits = bits_of(tensor).to(torch.int64)
    top = 1 << (8 * tensor.dtype.itemsize - 1)
    return torch.where(bits < 0, -(bits + top), bits)


def _describe_ulps(actual: torch.Tensor, truth: torch.Tensor) -> str:
    if bool((torch.isnan(actual) | torch.isnan(truth)).any()):
        return ""
    apart = _ordered(actual) - _ordered(truth)
    most = int(apart.abs().max())
    if most > _MOST_ULPS:
        return ""
    outward = torch.where(truth < 0, -apart, apart)
    direction = ""
    if actual.numel() > 1:
        if bool((outward < 0).all()):
            direction = ", always towards zero"
        elif bool((outward > 0).all()):
            direction = ", always away from zero"
        elif bool((apart < 0).all()):
            direction = ", always down"
        elif bool((apart > 0).all()):
            direction = ", always up"
        else:
            direction = ", in both directions"
    return f"off by {'at most ' if most > 1 else ''}{most} ulp{direction}"


def _describe_moved(part: _Part, judged: Judged) -> str:
    """Say that right values stand in the wrong place, if they do."""
    for text, move in _moves(part.spec):
        moved = move(judged.truth)
        if part.holds(_select(moved, part.indices)):
            return text
        if part.truth.shape != judged.truth.shape and part.holds(move(part.truth)):
            return f"{text}, within these rows"
    return ""


_Move = Callable[[torch.Tensor], torch.Tensor]


def _moves(spec: TensorSpec) -> Iterator[tuple[str, _Move]]:
    """Yield ways in which right values come to stand in wrong places."""
    axes = [(dimension, axis) for dimension, axis in enumerate(spec.axes) if axis != "1"]
    for dimension, axis in axes:
        moves: tuple[tuple[str, Callable[..., torch.Tensor]], ...] = (
            ("of one index before along {axis}", _rolled),
            ("of one index further along {axis}", _rolled_back),
            ("of index 0 along {axis}", _first),
            ("with {axis} reversed", _reversed),
            ("with the halves of {axis} exchanged", _halves_exchanged),
            ("with neighbours along {axis} exchanged", _neighbours_exchanged),
        )
        for text, move in moves:
            sentence = f"they are the right values {text.format(axis=axis)}"
            yield sentence, partial(move, dimension=dimension)
    for (one, a), (other, b) in combinations(axes, 2):
        text = f"they are the right values as if {a} and {b} were exchanged in memory"
        yield text, partial(_transposed, one=one, other=other)


def _rolled(tensor: torch.Tensor, *, dimension: int) -> torch.Tensor:
    return tensor.roll(1, dimension)


def _rolled_back(tensor: torch.Tensor, *, dimension: int) -> torch.Tensor:
    return tensor.roll(-1, dimension)


def _reversed(tensor: torch.Tensor, *, dimension: int) -> torch.Tensor:
    return tensor.flip(dimension)


def _halves_exchanged(tensor: torch.Tensor, *, dimension: int) -> torch.Tensor:
    return tensor.roll(tensor.shape[dimension] // 2, dimension)


def _neighbours_exchanged(tensor: torch.Tensor, *, dimension: int) -> torch.Tensor:
    size = tensor.shape[dimension]
    places = torch.arange(size, device=tensor.device)
    return tensor.index_select(dimension, (places ^ 1).clamp(max=size - 1))


def _transposed(tensor: torch.Tensor, *, one: int, other: int) -> torch.Tensor:
    return tensor.transpose(one, other).reshape(tensor.shape)


def _first(tensor: torch.Tensor, *, dimension: int) -> torch.Tensor:
    return tensor.narrow(dimension, 0, 1).expand_as(tensor)


def _describe_source(part: _Part, operator: Operator, inputs: Tensors, outputs: Tensors) -> str:
    """Say that another tensor's values stand there, if they do."""
    shape = outputs[part.spec.name].shape
    for spec in operator.inputs:
        source = inputs[spec.name]
        if spec.indexes is not None:
            continue
        if source.shape == shape and part.holds(_select(source, part.indices)):
            return f"they are the input {spec.name} at the same places"
        if source.shape == part.truth.shape and part.holds(source):
            return f"they are the input {spec.name}"
    for spec in operator.outputs:
        if spec.name != part.spec.name and outputs[spec.name].shape == shape:
            other = torch.empty_like(part.actual.new_empty(shape))
            fill_output(operator, inputs, spec.name, other)
            if part.holds(_select(other, part.indices)):
                return f"they are the right values of {spec.name}"
    return ""


def _describe_factor(part: _Part) -> str:
    """Say that the values are the right ones times a constant, if they are."""
    picked, right, scale = part.picked
    actual, truth = picked.to(torch.float64), right.to(torch.float64)
    squares = float((truth * truth).sum())
    if actual.numel() < 2 or not math.isfinite(squares) or squares == 0:
        return ""
    factor = float((actual * truth).sum()) / squares
    if not math.isfinite(factor) or abs(factor - 1) < 0.02 or abs(factor) < 1e-3:
        return ""
    fmt = format_of(picked.dtype)
    off = (actual - factor * truth).abs()
    allowed = tolerance_of(scale.to(torch.float64) * max(1.0, abs(factor)), factor * truth, fmt)
    nearer = off <= NEARER * (actual - truth).abs()
    if not _most(off <= allowed) or float(nearer.float().mean()) < EXPLAINED:
        return ""
    return f"they are the right values times {_fraction(factor)}"


def _fraction(factor: float) -> str:
    for text, number in ((f"{round(factor)}", factor), (f"1/{round(1 / factor)}", 1 / factor)):
        if round(number) != 0 and abs(number / round(number) - 1) < 0.01:
            return text
    return f"{factor:.3g}"


def _describe_nearness(actual: torch.Tensor, truth: torch.Tensor, scale: torch.Tensor) -> str:
    if _most(close(actual, truth, scale)):
        return "they are near the right values, as with intermediate results of low precision"
    return ""


def _describe_remainder(actual: torch.Tensor, truth: torch.Tensor) -> str:
    """Say at least which of them are no numbers, or should be none."""
    lost = torch.isnan(actual) & ~torch.isnan(truth)
    if bool(lost.any()):
        return f"{int(lost.sum())} of them are NaN"
    kept = torch.isnan(truth) | torch.isinf(truth)
    if bool(kept.all()):
        return "all should be NaN or infinite"
    return ""


def failing_outputs(comparison: Comparison) -> tuple[str, ...]:
    """Return the names of the outputs with a region that does not pass, in order."""
    names = [region.output for region in comparison.regions if not region.passed]
    return tuple(dict.fromkeys(names))


def listed(names: Sequence[str]) -> str:
    """Join names by commas and an "and"."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
