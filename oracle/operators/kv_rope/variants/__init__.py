"""Known variants of the four operators: usual faults, and liberties that honest kernels take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ....definition import Variant
from . import arithmetic, caches, copies, heads, legal, parts, rotations, rows
from .parts import Kind, OperatorName, Outputs, Parts

_COMPUTE: Mapping[OperatorName, Callable[[Parts, Sequence[torch.Tensor]], Outputs]] = {
    "concat.forward": parts.concat_forward,
    "concat.backward": parts.concat_backward,
    "static.forward": parts.static_forward,
    "static.backward": parts.static_backward,
}

_FAULTS: tuple[Kind, ...] = (
    *rotations.FAULTS,
    *rows.FAULTS,
    *caches.FAULTS,
    *heads.FAULTS,
    *copies.FAULTS,
    *arithmetic.FAULTS,
)


def concat_forward_variants() -> tuple[Variant, ...]:
    """Return the variants of ``kv_rope.concat.forward``, the wrong ones first."""
    return _variants("concat.forward")


def concat_backward_variants() -> tuple[Variant, ...]:
    """Return the variants of ``kv_rope.concat.backward``, the wrong ones first."""
    return _variants("concat.backward")


def static_forward_variants() -> tuple[Variant, ...]:
    """Return the variants of ``kv_rope.static.forward``, the wrong ones first."""
    return _variants("static.forward")


def static_backward_variants() -> tuple[Variant, ...]:
    """Return the variants of ``kv_rope.static.backward``, the wrong ones first."""
    return _variants("static.backward")


def _variants(operator: OperatorName) -> tuple[Variant, ...]:
    compute = _COMPUTE[operator]
    return tuple(
        Variant(kind.name, kind.description, partial(compute, kind.parts), legal=is_legal)
        for kinds, is_legal in ((_FAULTS, False), (legal.LIBERTIES, True))
        for kind in kinds
        if operator in kind.operators
    )
