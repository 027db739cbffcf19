"""The certified oracle itself as a candidate: what ``correctly_rounded`` looks like from outside.

It is no kernel, and slow; it shows that the judge accepts the one right answer everywhere.
"""

from __future__ import annotations

import torch

import oracle


def concat_forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute ``kv_rope.concat.forward``, correctly rounded."""
    return _certified("kv_rope.concat.forward", inputs)


def concat_backward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute ``kv_rope.concat.backward``, correctly rounded."""
    return _certified("kv_rope.concat.backward", inputs)


def static_forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute ``kv_rope.static.forward``, correctly rounded."""
    return _certified("kv_rope.static.forward", inputs)


def static_backward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute ``kv_rope.static.backward``, correctly rounded."""
    return _certified("kv_rope.static.backward", inputs)


def _certified(operator_id: str, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    operator = oracle.find_operator(operator_id)
    names = [spec.name for spec in operator.inputs]
    outputs = oracle.truth(operator, dict(zip(names, inputs, strict=True))).outputs
    return tuple(outputs[spec.name] for spec in operator.outputs)
