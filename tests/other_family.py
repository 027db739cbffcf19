"""An operator of another family, in one file: rows of two tables, picked and blended.

``mixed[n, d] = table[pick[n], d] * scale[n] + other[pick[n], d] * gain[d]``, and ``left`` is the
table with the picked rows cleared. Nothing outside this file knows of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oracle.blocks import row_selections, tiles
from oracle.definition import (
    Axis,
    Block,
    Case,
    Constraint,
    Copied,
    Layout,
    Operator,
    Suite,
    Summed,
    TensorSpec,
    Variant,
    Zeroed,
)
from oracle.inputs import Draws, encode

ID = "blend.rows"
Arrays = Mapping[str, NDArray[Any]]
Inputs = Mapping[str, Tensor]


def reference(inputs: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    *floating, pick = inputs
    table, other, scale, gain = (tensor.to(dtype) for tensor in floating)
    mixed = table[pick] * scale + other[pick] * gain
    return mixed, table.index_fill(0, pick, 0)


def blocks(inputs: Inputs, output: str, limit: int) -> Iterator[Block]:
    table, pick = inputs["table"], inputs["pick"]
    if output == "mixed":
        for tile in tiles((pick.numel(), table.shape[1]), max(1, limit // 2)):
            meaning = Summed(partial(_terms, inputs, tile), 2, partial(_clusters, inputs, tile))
            yield Block("all rows", tile, meaning)
        return
    cleared = torch.zeros(table.shape[0], dtype=torch.bool, device=table.device)
    cleared[pick] = True
    for region, mask in (("picked rows", cleared), ("other rows", ~cleared)):
        for rows in row_selections(mask.nonzero().squeeze(1)):
            index = (rows, slice(0, table.shape[1]))
            yield Block(region, index, Zeroed() if mask is cleared else Copied(table[index]))


def _terms(inputs: Inputs, tile: tuple[slice, ...]) -> Tensor:
    row, column = tile
    rows = inputs["pick"][row]
    table, other = (inputs[name][rows][:, column].double() for name in ("table", "other"))
    scale, gain = inputs["scale"][row].double(), inputs["gain"][column].double()
    return torch.stack((table * scale, other * gain))


def _clusters(inputs: Inputs, tile: tuple[slice, ...]) -> Tensor:
    """One cluster a row would share gain with all others, so everything is one cluster."""
    row, column = tile
    device = inputs["table"].device
    return torch.zeros((row.stop - row.start, column.stop - column.start), dtype=torch.int64).to(
        device
    )


def _random(_case: Case, draws: Draws, arrays: Arrays) -> None:
    for name, array in arrays.items():
        if name != "pick":
            draws.table(name, array)
    rows = arrays["table"].shape[0]
    arrays["pick"][:] = draws.permutation("pick", rows)[: arrays["pick"].size]


def _marked(case: Case, draws: Draws, arrays: Arrays) -> None:
    _random(case, draws, arrays)
    size = arrays["table"].size
    shape = arrays["table"].shape
    arrays["table"][...] = encode(np.arange(1, size + 1).reshape(shape) % 251 + 1.0, case.dtype)
    arrays["scale"][...] = encode(1.0, case.dtype)
    arrays["gain"][...] = encode(0.0, case.dtype)


def _even_scale(case: Case, arrays: Arrays) -> None:
    arrays["scale"][...] = encode(2.0, case.dtype)


def _probe(name: str, kind: str, sizes: tuple[int, int, int], **more: Any) -> Case:
    named = dict(zip(("rows", "picked", "width"), sizes, strict=True))
    return Case(ID, name, "probes", named, kind, random=kind == "random", exposes=name, **more)


def _computed(mix: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    table, other, scale, gain, pick = inputs
    wide = (tensor.float() for tensor in (table[pick], other[pick], scale, gain))
    return mix(*wide).to(table.dtype), table.index_fill(0, pick, 0)


def _variant(name: str, description: str, mix: Any, legal: bool = False) -> Variant:
    return Variant(name, description, partial(_computed, mix), legal)


OPERATOR = Operator(
    id=ID,
    title="rows of two tables, picked and blended",
    formula="mixed = table[pick] * scale + other[pick] * gain; left = table, picked rows 0",
    source="made for the tests",
    axes=(
        Axis("rows", "rows of the tables"),
        Axis("picked", "rows read"),
        Axis("width", "columns"),
    ),
    inputs=(
        TensorSpec("table", ("rows", "width"), "one table"),
        TensorSpec("other", ("rows", "width"), "the other table"),
        TensorSpec("scale", ("picked", "1"), "factors of rows"),
        TensorSpec("gain", ("width",), "factors of columns"),
        TensorSpec("pick", ("picked",), "rows to read", indexes="rows"),
    ),
    outputs=(
        TensorSpec("mixed", ("picked", "width"), "the blend", regions=("all rows",)),
        TensorSpec(
            "left", ("rows", "width"), "what is left", regions=("picked rows", "other rows")
        ),
    ),
    dtypes=("bfloat16", "float16", "float32"),
    official={"width": 24},
    reference=reference,
    blocks=blocks,
    input_kinds={"random": _random, "marked": _marked},
    probes=(
        _probe("mark", "marked", (7, 3, 24)),
        _probe("random", "random", (11, 5, 24)),
        _probe("all-picked", "random", (5, 5, 24)),
    ),
    suites=(
        Suite(
            "blend/suite",
            "made for the tests",
            (Case(ID, "suite-1", "blend/suite", {"rows": 40, "picked": 9, "width": 24}, "random"),),
        ),
    ),
    inplace=(("table", "left"),),
    general_probes=(
        _probe("none-picked", "random", (5, 0, 24), domain="general"),
        _probe(
            "transposed",
            "random",
            (6, 3, 24),
            domain="general",
            layouts={"table": Layout(order=(1, 0))},
        ),
        _probe(
            "stepped", "random", (6, 3, 24), domain="general", layouts={"pick": Layout(steps=(2,))}
        ),
        _probe(
            "expanded",
            "random",
            (6, 3, 24),
            domain="general",
            layouts={"other": Layout(expanded=(0,))},
        ),
    ),
    variety={"width": (1, 7, 64)},
    constraints={"scale=two": Constraint("all scales are 2", _even_scale)},
    variants=(
        _variant("sign-turned", "subtracts the second product", lambda t, o, s, g: t * s - o * g),
        _variant("scale-missing", "leaves out the scale", lambda t, o, _s, g: t + o * g),
        _variant(
            "tables-swapped", "reads each table for the other", lambda t, o, s, g: o * s + t * g
        ),
        _variant("right", "fp32, one rounding", lambda t, o, s, g: t * s + o * g, legal=True),
    ),
)


def right(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    mixed, _ = reference(inputs, torch.float32)
    return mixed.to(inputs[0].dtype), inputs[0].index_fill(0, inputs[-1], 0)


def right_in_place(*inputs: Tensor) -> Tensor:
    mixed, _ = right(*inputs)
    inputs[0][inputs[-1]] = 0
    return mixed


def wrong_in_place(*inputs: Tensor) -> Tensor:
    """Clear one row too few, and change an input that is not to be written."""
    mixed, _ = right(*inputs)
    inputs[0][inputs[-1][1:]] = 0
    inputs[1][0] = 0
    return mixed


def only_for_width_24(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    mixed, left = right(*inputs)
    return (mixed, left) if mixed.shape[1] == 24 else (mixed * 2, left)


def only_for_contiguous_tables(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    table, *rest = inputs
    plain = torch.as_strided(table, table.shape, (table.shape[1], 1))
    return right(plain, *rest)


def only_for_scale_two(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    table, other, scale, gain, pick = inputs
    return right(table, other, torch.full_like(scale, 2.0), gain, pick)
