"""The operators on plain tensors: no autograd, one launch each, or plain torch without a GPU."""

from __future__ import annotations

import torch

from . import fallback
from .launch import INTERPRETED, Plan, Plans
from .plans import (
    plan_concat_backward,
    plan_concat_forward,
    plan_static_backward,
    plan_static_forward,
    plan_static_forward_,
)

Pair = tuple[torch.Tensor, torch.Tensor]
Six = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_CONCAT_FORWARD = Plans(plan_concat_forward)
_CONCAT_BACKWARD = Plans(plan_concat_backward)
_STATIC_FORWARD = Plans(plan_static_forward)
_STATIC_FORWARD_IN_PLACE = Plans(plan_static_forward_)
_STATIC_BACKWARD = Plans(plan_static_backward)


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether kernels run on a tensor's device, or Triton's interpreter runs them."""
    return tensor.is_cuda or INTERPRETED


def concat_forward(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> Pair:
    """``kv_rope.concat.forward``; see :func:`fast.kv_rope.concat_forward`."""
    inputs = (key_states, value_states, cos, sin, key_cache, value_cache)
    plan, aligned = _CONCAT_FORWARD.find(inputs)
    if not runs_triton(key_states):
        return fallback.concat_forward(*inputs)
    updated_key_cache = key_states.new_empty(plan.outputs[0])
    updated_value_cache = key_states.new_empty(plan.outputs[1])
    plan.launch((*inputs, updated_key_cache, updated_value_cache), aligned=aligned)
    return updated_key_cache, updated_value_cache


def concat_backward(
    grad_updated_key_cache: torch.Tensor,
    grad_updated_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> Six:
    """``kv_rope.concat.backward``; see :func:`fast.kv_rope.concat_backward`."""
    inputs = (grad_updated_key_cache, grad_updated_value_cache, key_states, cos, sin)
    plan, aligned = _CONCAT_BACKWARD.find(inputs)
    if not runs_triton(key_states):
        return fallback.concat_backward(*inputs)
    outputs = _allocate(key_states, plan)
    plan.launch((*inputs, *outputs), aligned=aligned)
    return outputs


def static_forward(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_position: torch.Tensor,
) -> Pair:
    """``kv_rope.static.forward``; see :func:`fast.kv_rope.static_forward`."""
    inputs = (key_states, value_states, cos, sin, key_cache, value_cache, cache_position)
    plan, aligned = _STATIC_FORWARD.find(inputs)
    if not runs_triton(key_states):
        return fallback.static_forward(*inputs)
    updated_key_cache = key_states.new_empty(plan.outputs[0])
    updated_value_cache = key_states.new_empty(plan.outputs[1])
    plan.launch((*inputs, updated_key_cache, updated_value_cache), aligned=aligned)
    return updated_key_cache, updated_value_cache


def static_forward_(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_position: torch.Tensor,
) -> None:
    """``kv_rope.static.forward`` in place; see :func:`fast.kv_rope.static_forward_`."""
    inputs = (key_states, value_states, cos, sin, key_cache, value_cache, cache_position)
    plan, aligned = _STATIC_FORWARD_IN_PLACE.find(inputs)
    if runs_triton(key_states):
        plan.launch((*inputs, key_cache, value_cache), aligned=aligned)
        # Autograd does not see a kernel write: a graph that saved a cache must not use it now.
        torch.autograd.graph.increment_version((key_cache, value_cache))
    else:
        fallback.static_forward_(*inputs)


def static_backward(
    grad_key_cache: torch.Tensor,
    grad_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache_position: torch.Tensor,
) -> Six:
    """``kv_rope.static.backward``; see :func:`fast.kv_rope.static_backward`."""
    inputs = (grad_key_cache, grad_value_cache, key_states, cos, sin, cache_position)
    plan, aligned = _STATIC_BACKWARD.find(inputs)
    if not runs_triton(key_states):
        return fallback.static_backward(*inputs)
    outputs = _allocate(key_states, plan)
    plan.launch((*inputs, *outputs), aligned=aligned)
    return outputs


def _allocate(like: torch.Tensor, plan: Plan) -> Six:
    first, second, third, fourth, fifth, sixth = (like.new_empty(shape) for shape in plan.outputs)
    return first, second, third, fourth, fifth, sixth
