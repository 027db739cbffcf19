"""What an operator is: its axes, tensors, meaning, cases and suites, as plain validated data.

An :class:`Operator` is the left end of every verification. It names its axes and tensors, holds
one differentiable expression (``reference``), and says *exactly* what every output element is:
``blocks`` cuts each output into blocks of bounded size whose elements are copied from an input,
zero, or the exact sum of a few terms. Everything else (truth, budgets, comparison, guards) is
derived from that and knows no operator by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .inputs import Draws

FLOATING_DTYPES = ("bfloat16", "float16", "float32")
"""The element types an operator can be judged in, the first one first."""

DomainName = Literal["official", "general"]
DOMAINS: tuple[DomainName, ...] = ("official", "general")
"""``official``: the constants of the official suite hold, as real kernels hard-code them.
``general``: all that the operator is defined for."""

Style = Literal["return", "out", "inplace"]
STYLES: tuple[Style, ...] = ("return", "out", "inplace")


class InvalidDefinition(ValueError):
    """An operator, case or suite contradicts itself; the message names the tensor and axis."""


class InvalidInput(ValueError):
    """Inputs do not fit an operator; the message names the tensor, the axis or the position."""


@dataclass(frozen=True)
class Axis:
    """A named axis.

    Attributes:
        name: the axis, a word of the field such as ``head_dim``.
        description: what it counts.
        minimum: the smallest size the operator is defined for.
        multiple_of: every size must be a multiple of this.
        sum_of: for a derived axis, the axes whose sizes add up to its own; empty otherwise.
    """

    name: str
    description: str
    minimum: int = 0
    multiple_of: int = 1
    sum_of: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorSpec:
    """A named input or output.

    Attributes:
        name: the parameter's name, in call order.
        axes: one axis name per dimension; ``"1"`` is a dimension of size one.
        description: what the tensor holds.
        may_broadcast: axes that may also have size one.
        indexes: for an int64 index tensor, the axis whose rows it names: its entries must be
            distinct and lie in ``0..size-1``. None for a tensor of floating values.
        regions: for an output, the names of the regions it is judged in, in the order shown.
    """

    name: str
    axes: tuple[str, ...]
    description: str
    may_broadcast: tuple[str, ...] = ()
    indexes: str | None = None
    regions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Copied:
    """Elements that must be bit-identical to ``source``, a tensor of the block's shape."""

    source: torch.Tensor


@dataclass(frozen=True)
class Zeroed:
    """Elements that must equal zero."""


@dataclass(frozen=True)
class Summed:
    """Elements that are the sum of the same number of exact terms each.

    Attributes:
        terms: called without arguments, gives a float64 tensor ``[count, *block shape]`` whose
            entries are *exactly* the terms (products of two numbers of at most 24 significant
            bits are exact in float64). It is called once per block, so memory stays bounded.
        count: the number of terms of every element, at least one.
        clusters: called without arguments, gives an int64 tensor that broadcasts to the block's
            shape: equal numbers for elements that share an input, different ones for elements
            that share none, counted from 0 over the whole output. None where that is not known;
            the mean of the rounding errors is then not tested.
    """

    terms: Callable[[], torch.Tensor]
    count: int
    clusters: Callable[[], torch.Tensor] | None = None


@dataclass(frozen=True)
class Block:
    """A part of one output and what its elements are.

    Attributes:
        region: the region of the output that the block belongs to.
        index: one entry per output dimension, a slice of step one or an ascending int64 tensor of
            positions (at most one of these); together they select the block.
        meaning: what the selected elements must be.
    """

    region: str
    index: tuple[slice | torch.Tensor, ...]
    meaning: Copied | Zeroed | Summed


@dataclass(frozen=True)
class Layout:
    """How an input lies in memory.

    Attributes:
        offset: elements between the start of the tensor's storage and its first element. A
            positive offset is a tensor that starts inside a larger buffer.
        order: the dimensions from the slowest to the fastest in memory; empty for the natural
            order. ``(0, 2, 1, 3)`` is a ``[B, S, H, D]`` buffer seen as ``[B, H, S, D]``.
        steps: per dimension, places in memory from one index to the next (2: every second row);
            empty for 1 everywhere.
        gaps: per dimension, places after its last index that belong to nobody (the tensor is cut
            from a wider one); empty for none.
        expanded: dimensions of stride 0: all indices along them are the same memory.
    """

    offset: int = 0
    order: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()
    expanded: tuple[int, ...] = ()

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the strides, in elements, of a tensor of that shape.

        Raises:
            InvalidDefinition: if the layout has another number of dimensions.
        """
        for name in ("order", "steps", "gaps"):
            given = getattr(self, name)
            if given and len(given) != len(shape):
                raise InvalidDefinition(
                    f"a layout with {name}={given} is for {len(given)} dimensions, not for shape"
                    f" {tuple(shape)}"
                )
        strides = [0] * len(shape)
        places = 1
        for dimension in reversed(self.order or range(len(shape))):
            if dimension in self.expanded:
                continue
            step = self.steps[dimension] if self.steps else 1
            strides[dimension] = places * step
            gap = self.gaps[dimension] if self.gaps else 0
            places *= max(1, shape[dimension] * step + gap)
        return tuple(strides)

    def is_contiguous(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of that shape is contiguous in this layout, wherever it starts."""
        if 0 in shape:
            return True
        plain = Layout().strides(shape)
        return all(
            size == 1 or stride == expected
            for size, stride, expected in zip(shape, self.strides(shape), plain, strict=True)
        )


@dataclass(frozen=True)
class Case:
    """One set of sizes and one way of drawing inputs for an operator.

    Attributes:
        operator: the operator's id.
        name: unique among the operator's cases, fit for a command line and a test id.
        group: the suite's id, or ``"probes"``.
        sizes: the size of every axis that is not derived.
        dtype: the type of all floating tensors, one of :data:`FLOATING_DTYPES`.
        kind: which of the operator's ``input_kinds`` draws the values.
        exposes: for a probe, one line saying which fault it brings to light.
        layouts: input name to layout, for inputs that are not plain contiguous tensors.
        random: whether the inputs are independent random draws (and so fit for statistics).
        published: published figures of the case, such as ``scoring_baseline_us``.
        domain: the domain the case belongs to.
        broadcast: input name to the axes along which it has size one, of those that may.
        constraints: names of the operator's constraints that its inputs meet.
        needs_gpu: whether it is too large to be run without a GPU.
    """

    operator: str
    name: str
    group: str
    sizes: Mapping[str, int]
    kind: str
    dtype: str = "bfloat16"
    exposes: str = ""
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    random: bool = False
    published: Mapping[str, float] = field(default_factory=dict)
    domain: DomainName = "official"
    broadcast: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    constraints: tuple[str, ...] = ()
    needs_gpu: bool = False

    def __post_init__(self) -> None:
        """Refuse names that a command line or a test id cannot hold; copy the mappings."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", self.name):
            raise InvalidDefinition(
                f"case name {self.name!r} of {self.operator}: use letters, digits, '_', '.', '+'"
                " and '-' only"
            )
        if self.dtype not in FLOATING_DTYPES:
            raise InvalidDefinition(
                f"case {self.name} of {self.operator} has dtype {self.dtype!r}; known are "
                + ", ".join(FLOATING_DTYPES)
            )
        for name in ("sizes", "layouts", "published", "broadcast"):
            object.__setattr__(self, name, dict(getattr(self, name)))


@dataclass(frozen=True)
class Suite:
    """A published set of cases.

    Attributes:
        id: the suite's public id.
        source: where it was published.
        cases: its cases, in the published order.
        published: published figures of the suite as a whole.
    """

    id: str
    source: str
    cases: tuple[Case, ...]
    published: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Domain:
    """Which cases a candidate is judged on, and so what a verdict is about.

    Claims narrow the general domain to what a kernel is made for.

    Attributes:
        name: ``official`` or ``general``.
        sizes: claimed axis to its allowed sizes; axes not named may have any.
        dtypes: the claimed floating types; empty for all of the operator's.
        contiguous: whether all inputs are contiguous.
        constraints: names of the operator's constraints that all inputs meet.
    """

    name: DomainName = "official"
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    contiguous: bool = False
    constraints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Copy the mapping."""
        object.__setattr__(self, "sizes", dict(self.sizes))

    def claims(self) -> tuple[str, ...]:
        """Return the claims as they are written after ``--where``."""
        texts = [f"{axis}={','.join(map(str, sizes))}" for axis, sizes in self.sizes.items()]
        if self.dtypes:
            texts.append(f"dtype={','.join(self.dtypes)}")
        if self.contiguous:
            texts.append("layout=contiguous")
        return (*texts, *self.constraints)

    def __str__(self) -> str:
        """Return the name and the claims, as in ``general where head_dim=64``."""
        claims = self.claims()
        return f"{self.name} where {' '.join(claims)}" if claims else self.name


InputKind = Callable[[Case, "Draws", Mapping[str, "np.ndarray[Any, Any]"]], None]
"""Fills the given arrays (bit patterns of the floating tensors, int64 of index tensors)."""


@dataclass(frozen=True)
class Constraint:
    """Something that inputs may be restricted to, as ``--where name`` claims.

    Attributes:
        description: what the inputs have in common, as a phrase.
        impose: changes drawn inputs, given as to an :data:`InputKind`, so that they meet it.
    """

    description: str
    impose: Callable[[Case, Mapping[str, np.ndarray[Any, Any]]], None]


@dataclass(frozen=True)
class Variant:
    """A known way to compute something like an operator: a usual fault, or a legal liberty.

    Attributes:
        name: words with hyphens, such as ``interleaved-pairing``.
        description: one sentence: what it does.
        compute: ``compute(inputs)`` returns the outputs, fresh tensors of the inputs' dtype and
            device, from the inputs in call order; all shapes, dtypes and layouts of the general
            domain are possible. Nothing that is a mere copy of an input passes through arithmetic.
        legal: whether an honest kernel may compute this.
    """

    name: str
    description: str
    compute: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
    legal: bool = False


@dataclass(frozen=True)
class Operator:
    """An operator: names, exact meaning, and the cases it is judged on.

    Attributes:
        id: ``family.layout.direction``, such as ``kv_rope.concat.forward``.
        title: one line for lists.
        formula: the definition of every output, as text.
        source: where the definition comes from.
        axes: all axes; derived ones after those they are made of.
        inputs: in call order.
        outputs: in the order they are returned.
        dtypes: the floating types the operator is judged in.
        official: the constants of the official suite (axis name to size), which real kernels
            hard-code: the domain ``official``.
        reference: ``reference(inputs, dtype)`` computes the outputs by one differentiable torch
            expression in the given torch dtype from the inputs in call order.
        blocks: ``blocks(inputs, output, limit)`` yields the blocks of one output. Every element
            of the output lies in exactly one block. A block of sums has about ``limit`` elements
            times terms (at least what belongs together, such as a row and its heads), one that is
            copied or zeroed a few times as many, so that memory stays bounded.
        input_kinds: name to the function that draws such inputs.
        probes: small cases, each made to expose one kind of fault.
        suites: the official suites.
        inplace: pairs (input name, output name) that style ``inplace`` may write.
        general_probes: further probes, of the general domain only.
        large: cases that only a GPU can run.
        variety: for axes that the official domain fixes, the sizes that the general domain tries.
        constraints: by name, such as ``tables=paired``, what inputs may be restricted to.
        variants: usual faults and legal liberties, for diagnosis and detection.
    """

    id: str
    title: str
    formula: str
    source: str
    axes: tuple[Axis, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dtypes: tuple[str, ...]
    official: Mapping[str, int]
    reference: Callable[[Sequence[torch.Tensor], torch.dtype], tuple[torch.Tensor, ...]]
    blocks: Callable[[Mapping[str, torch.Tensor], str, int], Iterator[Block]]
    input_kinds: Mapping[str, InputKind]
    probes: tuple[Case, ...]
    suites: tuple[Suite, ...]
    inplace: tuple[tuple[str, str], ...] = ()
    general_probes: tuple[Case, ...] = ()
    large: tuple[Case, ...] = ()
    variety: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    constraints: Mapping[str, Constraint] = field(default_factory=dict)
    variants: tuple[Variant, ...] = ()

    def __post_init__(self) -> None:
        """Check that axes, tensors and cases refer to each other correctly.

        Raises:
            InvalidDefinition: naming the tensor and axis, or the case, that does not fit.
        """
        known = {axis.name for axis in self.axes}
        for axis in self.axes:
            for part in axis.sum_of:
                if part not in known:
                    raise InvalidDefinition(
                        f"axis {axis.name} of {self.id} is a sum of unknown axis {part!r}"
                    )
        for spec in self.inputs + self.outputs:
            for axis_name in spec.axes:
                if axis_name != "1" and axis_name not in known:
                    raise InvalidDefinition(
                        f"tensor {spec.name} of {self.id} has unknown axis {axis_name!r}; known"
                        f" are {', '.join(sorted(known))}"
                    )
        repeated = _repeated([spec.name for spec in self.inputs + self.outputs])
        if repeated:
            raise InvalidDefinition(f"{self.id} names {', '.join(repeated)} twice")
        self._check_references(known)
        self._check_choices()
        self._check_cases()

    def _check_references(self, known: set[str]) -> None:
        for spec in self.inputs + self.outputs:
            if spec.indexes is not None and spec.indexes not in known:
                raise InvalidDefinition(
                    f"{spec.name} of {self.id} indexes unknown axis {spec.indexes!r}"
                )
            for axis in spec.may_broadcast:
                if axis not in spec.axes:
                    raise InvalidDefinition(
                        f"{spec.name} of {self.id} may broadcast along {axis!r}, which is none of"
                        f" its axes [{', '.join(spec.axes)}]"
                    )
        for axis in self.official:
            if axis not in known:
                raise InvalidDefinition(f"{self.id} has an official size of unknown axis {axis!r}")
        inputs = {spec.name for spec in self.inputs}
        outputs = {spec.name for spec in self.outputs}
        for source, target in self.inplace:
            if source not in inputs or target not in outputs:
                raise InvalidDefinition(
                    f"{self.id} writes {target!r} in place of {source!r}, which are no output and"
                    " input of it"
                )

    def _check_choices(self) -> None:
        for axis, sizes in self.variety.items():
            if axis not in self.official or not sizes:
                raise InvalidDefinition(
                    f"{self.id} varies {axis!r} over {sizes}; give sizes of an axis that has an"
                    " official one"
                )
        repeated = _repeated([variant.name for variant in self.variants])
        if repeated:
            raise InvalidDefinition(f"{self.id} has variants of one name: {', '.join(repeated)}")

    def _check_cases(self) -> None:
        seen: set[str] = set()
        free = {axis.name for axis in self.axes if not axis.sum_of}
        for case in self.cases + self.general_probes:
            if case.name in seen:
                raise InvalidDefinition(f"{self.id} has two cases named {case.name}")
            seen.add(case.name)
            if set(case.sizes) != free:
                raise InvalidDefinition(
                    f"case {case.name} of {self.id} gives sizes of {sorted(case.sizes)}, but the"
                    f" free axes are {sorted(free)}"
                )
            if case.kind not in self.input_kinds:
                raise InvalidDefinition(
                    f"case {case.name} of {self.id} asks for inputs of unknown kind {case.kind!r}"
                )
            self._check_case(case)

    def _check_case(self, case: Case) -> None:
        if case.operator != self.id:
            raise InvalidDefinition(f"case {case.name} of {self.id} is one of {case.operator}")
        if case.dtype not in self.dtypes:
            raise InvalidDefinition(
                f"case {case.name} of {self.id} has dtype {case.dtype}, which is none of"
                f" {', '.join(self.dtypes)}"
            )
        unknown = set(case.layouts) - {spec.name for spec in self.inputs}
        if unknown:
            raise InvalidDefinition(
                f"case {case.name} of {self.id} lays out {', '.join(sorted(unknown))}, no inputs"
            )
        for name, axes in case.broadcast.items():
            allowed = next((s.may_broadcast for s in self.inputs if s.name == name), ())
            if not set(axes) <= set(allowed):
                raise InvalidDefinition(
                    f"case {case.name} of {self.id} broadcasts {name} along {', '.join(axes)}; it"
                    f" may along {', '.join(allowed) or 'no axis'}"
                )
        unknown = set(case.constraints) - set(self.constraints)
        if unknown:
            raise InvalidDefinition(
                f"case {case.name} of {self.id} meets unknown constraints"
                f" {', '.join(sorted(unknown))}; known are {', '.join(self.constraints) or 'none'}"
            )
        try:
            self.check_sizes(case.sizes)
        except InvalidInput as error:
            raise InvalidDefinition(f"case {case.name} of {self.id}: {error}") from error

    @property
    def cases(self) -> tuple[Case, ...]:
        """All cases of the official domain: probes, the suites in order, the large ones."""
        suites = tuple(case for suite in self.suites for case in suite.cases)
        return self.probes + suites + self.large

    def case(self, name: str) -> Case:
        """Return the case of that name.

        Raises:
            KeyError: listing what there is.
        """
        for case in self.cases:
            if case.name == name:
                return case
        raise KeyError(
            f"{self.id} has no case {name!r}; it has {', '.join(c.name for c in self.cases)}"
        )

    def inplace_indices(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs of ``inplace`` as indices of an input and an output."""
        inputs = [spec.name for spec in self.inputs]
        outputs = [spec.name for spec in self.outputs]
        return tuple((inputs.index(source), outputs.index(out)) for source, out in self.inplace)

    def all_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of all axes, the derived ones included."""
        result = dict(sizes)
        for axis in self.axes:
            if axis.sum_of:
                result[axis.name] = sum(result[part] for part in axis.sum_of)
        return result

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Refuse sizes that the operator is not defined for.

        Raises:
            InvalidInput: naming the axis and its size.
        """
        full = self.all_sizes(sizes)
        for axis in self.axes:
            size = full[axis.name]
            if size < axis.minimum or size % axis.multiple_of:
                even = f" and a multiple of {axis.multiple_of}" if axis.multiple_of > 1 else ""
                raise InvalidInput(
                    f"axis {axis.name} of {self.id} is {size}; it must be at least"
                    f" {axis.minimum}{even}"
                )
        for spec in self.inputs:
            if spec.indexes is not None:
                rows, count = full[spec.indexes], full[spec.axes[0]]
                if count > rows:
                    raise InvalidInput(
                        f"{spec.name} of {self.id} would name {count} distinct rows of"
                        f" {spec.indexes}, which has only {rows}"
                    )

    def shape(self, spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return a tensor's shape for the sizes of the free axes."""
        full = self.all_sizes(sizes)
        return tuple(1 if axis == "1" else full[axis] for axis in spec.axes)

    def case_shape(self, spec: TensorSpec, case: Case) -> tuple[int, ...]:
        """Return a tensor's shape in a case, with size one where the case broadcasts it."""
        ones = case.broadcast.get(spec.name, ())
        shape = self.shape(spec, case.sizes)
        return tuple(
            1 if axis in ones else size for axis, size in zip(spec.axes, shape, strict=True)
        )

    def bind(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Check the inputs and return the sizes of all axes.

        Args:
            inputs: every input by name.

        Returns:
            The size of every axis, the derived ones included.

        Raises:
            InvalidInput: naming the tensors and axes that disagree, a wrong type, or the first
                bad entry of an index tensor.
        """
        missing = [spec.name for spec in self.inputs if spec.name not in inputs]
        if missing:
            raise InvalidInput(f"{self.id} needs {', '.join(missing)}, which were not given")
        unknown = sorted(set(inputs) - {spec.name for spec in self.inputs})
        if unknown:
            raise InvalidInput(
                f"{self.id} has no input {', '.join(unknown)}; its inputs are"
                f" {', '.join(spec.name for spec in self.inputs)}"
            )
        _check_devices(self, inputs)
        sizes: dict[str, int] = {}
        origin: dict[str, str] = {}
        for spec in self.inputs:
            _bind_shape(self.id, spec, tuple(inputs[spec.name].shape), sizes, origin)
        _solve_sums(self, sizes)
        _check_dtypes(self, inputs)
        free = {axis.name: sizes[axis.name] for axis in self.axes if not axis.sum_of}
        self.check_sizes(free)
        for spec in self.inputs:
            if spec.indexes is not None:
                check_positions(spec.name, inputs[spec.name], spec.indexes, sizes[spec.indexes])
        return self.all_sizes(free)


def _repeated(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _bind_shape(
    operator: str,
    spec: TensorSpec,
    shape: tuple[int, ...],
    sizes: dict[str, int],
    origin: dict[str, str],
) -> None:
    """Match one shape against its axes, entering what is new into ``sizes`` and ``origin``."""
    if len(shape) != len(spec.axes):
        raise InvalidInput(
            f"{spec.name} of {operator} has shape {shape}; expected {len(spec.axes)} dimensions,"
            f" [{', '.join(spec.axes)}]"
        )
    for dimension, (axis, size) in enumerate(zip(spec.axes, shape, strict=True)):
        if size == 1 and (axis == "1" or axis in spec.may_broadcast):
            continue
        if axis == "1":
            raise InvalidInput(
                f"dimension {dimension} of {spec.name} of {operator} has size {size}; it must be 1"
            )
        if axis not in sizes:
            sizes[axis], origin[axis] = size, spec.name
        elif sizes[axis] != size:
            raise InvalidInput(
                f"axis {axis} of {operator} is {sizes[axis]} in {origin[axis]} but {size} in"
                f" {spec.name} (dimension {dimension} of shape {shape})"
            )


def _solve_sums(operator: Operator, sizes: dict[str, int]) -> None:
    """Enter the one free axis that only the size of a derived axis tells."""
    for axis in operator.axes:
        if not axis.sum_of or axis.name not in sizes:
            continue
        unknown = [part for part in axis.sum_of if part not in sizes]
        rest = sizes[axis.name] - sum(sizes[part] for part in axis.sum_of if part in sizes)
        if len(unknown) == 1 and rest >= 0:
            sizes[unknown[0]] = rest
        elif unknown or rest:
            parts = " + ".join(f"{part} ({sizes.get(part, '?')})" for part in axis.sum_of)
            raise InvalidInput(
                f"axis {axis.name} of {operator.id} is {sizes[axis.name]}; it must be {parts}"
            )


def _check_devices(operator: Operator, inputs: Mapping[str, torch.Tensor]) -> None:
    first = operator.inputs[0].name
    for spec in operator.inputs:
        if inputs[spec.name].device != inputs[first].device:
            raise InvalidInput(
                f"{spec.name} of {operator.id} is on {inputs[spec.name].device}, but {first} is on"
                f" {inputs[first].device}; put all inputs on one device"
            )


def _check_dtypes(operator: Operator, inputs: Mapping[str, torch.Tensor]) -> None:
    """Refuse a mixture of floating types, a type the operator lacks, or an index not int64."""
    first = next(spec.name for spec in operator.inputs if spec.indexes is None)
    dtype = str(inputs[first].dtype).removeprefix("torch.")
    if dtype not in operator.dtypes:
        raise InvalidInput(
            f"{first} of {operator.id} is {dtype}; supported are {', '.join(operator.dtypes)}"
        )
    for spec in operator.inputs:
        found = str(inputs[spec.name].dtype).removeprefix("torch.")
        wanted = dtype if spec.indexes is None else "int64"
        if found != wanted:
            because = f"like {first}" if spec.indexes is None else f"as it indexes {spec.indexes}"
            raise InvalidInput(
                f"{spec.name} of {operator.id} is {found}; it must be {wanted}, {because}"
            )


def check_positions(name: str, positions: torch.Tensor, axis: str, rows: int) -> None:
    """Check that an index tensor holds distinct rows in ``0..rows-1``.

    Args:
        name: the tensor's name, for messages.
        positions: int64 ``[count]``.
        axis: the axis whose rows are named.
        rows: that axis's size.

    Raises:
        InvalidInput: naming the first entry that is negative, too large, or a repetition.
    """
    seen: dict[int, int] = {}
    for place, row in enumerate(positions.tolist()):
        if row < 0 or row >= rows:
            raise InvalidInput(
                f"{name}[{place}] is {row}, outside 0..{rows - 1} ({axis} is {rows}); negative"
                " positions do not count from the end"
            )
        if row in seen:
            raise InvalidInput(
                f"{name}[{place}] is {row}, which {name}[{seen[row]}] names already; rows of"
                f" {axis} must be distinct"
            )
        seen[row] = place
