"""Right and wrong gradients on which gradient checks are compared, each with its fault by name.

Most are the static cache update in float64, as an autograd function with a backward of its own. All
sizes are pairwise different, so that no swapped pair of axes fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oracle.operators import find_operator

FORWARD = find_operator("kv_rope.static.forward")
BACKWARD = find_operator("kv_rope.static.backward")
NAMES = tuple(spec.name for spec in FORWARD.inputs)

Gradients = tuple[Any, ...]
Change = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class GradientCase:
    """A function whose gradients are right or wrong.

    Attributes:
        name: what is wrong with it, or that it is right.
        function: called with the inputs.
        inputs: tensors, those that require gradients marked.
        right: whether its gradients are right.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    right: bool = False


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, *inputs):
        ctx.save_for_backward(*inputs)
        ctx.formula = backward
        return forward(*inputs)

    @staticmethod
    def backward(ctx, *cotangents):
        gradients = ctx.formula(*cotangents, *ctx.saved_tensors)
        return (None, None, *gradients)


def with_backward(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` with ``backward(*cotangents, *inputs)`` for its gradients."""
    return lambda *inputs: _Custom.apply(forward, backward, *inputs)


def update(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute the static cache update in its inputs' type."""
    return FORWARD.reference(inputs, inputs[0].dtype)


def update_backward(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
    """Compute its gradients from two cotangents and all inputs."""
    grad_key, grad_value, key, _, cos, sin, _, _, position = tensors
    given = (grad_key, grad_value, key, cos, sin, position)
    return [*BACKWARD.reference(given, key.dtype), None]


def update_inputs(
    batch: int, heads: int, new: int, rows: int, width: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Draw the update's inputs, positions shuffled; all floating ones require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    floating = (
        draw(batch, heads, new, width),
        draw(batch, heads, new, width),
        draw(batch, new, width),
        draw(batch, new, width),
        draw(batch, heads, rows, width),
        draw(batch, heads, rows, width),
    )
    position = torch.randperm(rows, generator=generator)[:new]
    return (*(tensor.requires_grad_() for tensor in floating), position)


def changed(change: Change) -> Callable[..., Any]:
    """Return the backward of the update with its gradients changed."""

    def backward(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
        return [*change([g for g in update_backward(*tensors) if g is not None]), None]

    return backward


def scaled_element(factor: float) -> Change:
    """Scale one element of grad_cos."""

    def change(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        gradients[2][-1, -1, -1] *= factor
        return gradients

    return change


def first_head_only(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
    """Leave out the sum over the heads that share cos."""
    grad_key, _, key, *_, position = tensors
    gradients = update_backward(*tensors)
    gradients[2] = (grad_key[:, :, position] * key)[:, 0]
    return gradients


def wrong_sign(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
    """Rotate forth instead of back: sin has the wrong sign in grad_key_states."""
    grad_key, grad_value, key, value, cos, sin, *rest = tensors
    gradients = update_backward(*tensors)
    gradients[0] = update_backward(grad_key, grad_value, key, value, cos, -sin, *rest)[0]
    return gradients


def reads_contiguously(tensor: torch.Tensor) -> torch.Tensor:
    """Read a tensor's memory as a kernel does that takes it for contiguous."""
    count = tensor.numel()
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    memory = memory[tensor.storage_offset() :]
    return memory.repeat(-(-count // memory.numel()))[:count].view(tensor.shape)


def ignores_strides(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
    """Take the cotangents for contiguous."""
    return update_backward(*(reads_contiguously(g) for g in tensors[:2]), *tensors[2:])


def detached_cos(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute the update with cos cut off from the graph."""
    return update(*inputs[:2], inputs[2].detach(), *inputs[3:])


def only_key_requires(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return copies of the inputs of which only key_states requires a gradient."""
    return (inputs[0], *(tensor.detach() for tensor in inputs[1:]))


def expanded_cos(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the inputs with one row of cos seen by all batch entries."""
    cos = inputs[2].detach()[:1].expand(inputs[2].shape).requires_grad_()
    return (*inputs[:2], cos, *inputs[3:])


def doubling_backward(gradient: torch.Tensor, _x: torch.Tensor) -> list[torch.Tensor]:
    """Compute the gradient of 2 x with one entry of 1000 off by 10 %."""
    result = (2 * gradient).contiguous()
    result.view(-1)[617] *= 1.1
    return [result]


def zeroed_head(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Zero the gradient of one head."""
    gradients[0][:, -1] = 0
    return gradients


def rolled_rows(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Shift the rows of grad_key_states by one."""
    gradients[0] = gradients[0].roll(1, dims=2)
    return gradients


def zeroed_element(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Zero one element of grad_key_states."""
    gradients[0][-1, -1, -1, -1] = 0
    return gradients


Sizes = tuple[int, int, int, int, int]
"""Batch entries, heads, new tokens, rows of the caches, head_dim."""

SMALL: Sizes = (2, 3, 5, 11, 8)
LARGE: Sizes = (2, 8, 64, 128, 128)


def float64_cases(sizes: Sizes = SMALL) -> tuple[GradientCase, ...]:
    """Return the cases in float64."""
    inputs = update_inputs(*sizes, torch.float64)
    right = with_backward(update, update_backward)

    def wrong(backward: Callable[..., Any]) -> Callable[..., Any]:
        return with_backward(update, backward)

    thousand = torch.linspace(-1, 1, 1000, dtype=torch.float64).view(8, 125).requires_grad_()
    return (
        GradientCase("right", right, inputs, right=True),
        GradientCase("one entry off by 0.1 %", wrong(changed(scaled_element(1.001))), inputs),
        GradientCase("one entry off by 1e-6", wrong(changed(scaled_element(1 + 1e-6))), inputs),
        GradientCase(
            "one entry of 1000 off by 10 %",
            with_backward(lambda x: 2 * x, doubling_backward),
            (thousand,),
        ),
        GradientCase("no sum over a broadcast axis", wrong(first_head_only), inputs),
        GradientCase("wrong sign", wrong(wrong_sign), inputs),
        GradientCase(
            "cos detached, only key_states requires grad", detached_cos, only_key_requires(inputs)
        ),
        GradientCase("right, expanded input", right, expanded_cos(inputs), right=True),
        GradientCase(
            "expanded input, no sum over a broadcast axis",
            wrong(first_head_only),
            expanded_cos(inputs),
        ),
        GradientCase("strides of the cotangent ignored", wrong(ignores_strides), inputs),
    )


BFLOAT16_CHANGES: tuple[tuple[str, Change | None], ...] = (
    ("right", None),
    ("one head zeroed", zeroed_head),
    ("rows rolled by one", rolled_rows),
    ("one element zeroed", zeroed_element),
)


def bfloat16_cases(sizes: Sizes = LARGE) -> tuple[GradientCase, ...]:
    """Return the cases in bfloat16."""
    inputs = update_inputs(*sizes, torch.bfloat16)
    return tuple(
        GradientCase(
            name,
            with_backward(update, update_backward if change is None else changed(change)),
            inputs,
            right=change is None,
        )
        for name, change in BFLOAT16_CHANGES
    )


def operator_backward(change: Change | None) -> Callable[..., Any]:
    """Return the backward operator in its inputs' type, with its gradients changed."""

    def backward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients = list(BACKWARD.reference(tensors, tensors[0].dtype))
        return tuple(gradients if change is None else change(gradients))

    return backward
