"""The operators registered with torch, namespace ``kernel_oracle``.

Each has a fake implementation, so that compilers know its outputs without running it, and the
forward ones have their gradients, which are the backward operators. The gradients of those are not
defined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import operators
from .operators import Pair, Six

NAMESPACE = "kernel_oracle"

_PAIR = "(Tensor, Tensor)"
_SIX = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
_STATES = "Tensor key_states, Tensor value_states, Tensor cos, Tensor sin"
_SCHEMAS = {
    "concat_forward": f"({_STATES}, Tensor key_cache, Tensor value_cache) -> {_PAIR}",
    "concat_backward": "(Tensor grad_updated_key_cache, Tensor grad_updated_value_cache, "
    f"Tensor key_states, Tensor cos, Tensor sin) -> {_SIX}",
    "static_forward": f"({_STATES}, Tensor key_cache, Tensor value_cache, "
    f"Tensor cache_position) -> {_PAIR}",
    "static_forward_": f"({_STATES}, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor cache_position) -> ()",
    "static_backward": "(Tensor grad_key_cache, Tensor grad_value_cache, Tensor key_states, "
    f"Tensor cos, Tensor sin, Tensor cache_position) -> {_SIX}",
}


# Shapes of the outputs, for compilers


def _fake_concat_forward(
    key_states: torch.Tensor,
    _value_states: torch.Tensor,
    _cos: torch.Tensor,
    _sin: torch.Tensor,
    key_cache: torch.Tensor,
    _value_cache: torch.Tensor,
) -> Pair:
    batch, num_heads, new_len, head_dim = key_states.shape
    updated = (batch, num_heads, key_cache.shape[2] + new_len, head_dim)
    return key_states.new_empty(updated), key_states.new_empty(updated)


def _fake_concat_backward(
    grad_updated_key_cache: torch.Tensor,
    _grad_updated_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    _cos: torch.Tensor,
    _sin: torch.Tensor,
) -> Six:
    batch, num_heads, new_len, head_dim = key_states.shape
    cache = (batch, num_heads, grad_updated_key_cache.shape[2] - new_len, head_dim)
    return _fake_gradients(key_states, (batch, 1, new_len, head_dim), cache)


def _fake_static_forward(
    key_states: torch.Tensor,
    _value_states: torch.Tensor,
    _cos: torch.Tensor,
    _sin: torch.Tensor,
    key_cache: torch.Tensor,
    _value_cache: torch.Tensor,
    _cache_position: torch.Tensor,
) -> Pair:
    return key_states.new_empty(key_cache.shape), key_states.new_empty(key_cache.shape)


def _fake_static_forward_(*_inputs: torch.Tensor) -> None:
    return None


def _fake_static_backward(
    grad_key_cache: torch.Tensor,
    _grad_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    _cos: torch.Tensor,
    _sin: torch.Tensor,
    _cache_position: torch.Tensor,
) -> Six:
    batch, _, new_len, head_dim = key_states.shape
    return _fake_gradients(key_states, (batch, new_len, head_dim), tuple(grad_key_cache.shape))


def _fake_gradients(
    key_states: torch.Tensor, table: tuple[int, ...], cache: tuple[int, ...]
) -> Six:
    states = tuple(key_states.shape)
    return (
        key_states.new_empty(states),
        key_states.new_empty(states),
        key_states.new_empty(table),
        key_states.new_empty(table),
        key_states.new_empty(cache),
        key_states.new_empty(cache),
    )


# Gradients


def _save_concat(ctx: Any, inputs: tuple[torch.Tensor, ...], output: Pair) -> None:
    del output
    key_states, _, cos, sin, _, _ = inputs
    ctx.save_for_backward(key_states, cos, sin)


def _concat_gradient(
    ctx: Any, grad_key: torch.Tensor, grad_value: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    key_states, cos, sin = ctx.saved_tensors
    tables = _rows_for_all(key_states, cos, sin)
    grads = OPS.concat_backward(grad_key, grad_value, key_states, *tables)
    return (
        grads[0],
        grads[1],
        _to_rows_of(cos, grads[2]),
        _to_rows_of(sin, grads[3]),
        grads[4],
        grads[5],
    )


def _save_static(ctx: Any, inputs: tuple[torch.Tensor, ...], output: Pair) -> None:
    del output
    key_states, _, cos, sin, _, _, cache_position = inputs
    ctx.save_for_backward(key_states, cos, sin, cache_position)


def _static_gradient(
    ctx: Any, grad_key: torch.Tensor, grad_value: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    key_states, cos, sin, cache_position = ctx.saved_tensors
    tables = _rows_for_all(key_states, cos, sin)
    grads = OPS.static_backward(grad_key, grad_value, key_states, *tables, cache_position)
    return (
        grads[0],
        grads[1],
        _to_rows_of(cos, grads[2]),
        _to_rows_of(sin, grads[3]),
        grads[4],
        grads[5],
        None,
    )


def _rows_for_all(key_states: torch.Tensor, *tables: torch.Tensor) -> list[torch.Tensor]:
    """Give every batch entry its row of a table, without copying it."""
    return [table.expand(key_states.shape[0], *table.shape[1:]) for table in tables]


def _to_rows_of(table: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Sum a gradient over the batch where the table has one row for all of it.

    The sums over heads are rounded before they are added, in float32: not correctly rounded.
    """
    if table.shape[0] == gradient.shape[0]:
        return gradient
    return gradient.sum(dim=0, keepdim=True, dtype=torch.float32).to(gradient.dtype)


def _save_nothing(ctx: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
    del ctx, inputs, output


def _no_second_gradient(ctx: Any, *grads: torch.Tensor) -> None:
    del ctx, grads
    raise NotImplementedError(
        "the backward operators of kv_rope have no gradients of their own; differentiate twice "
        "through a reference in plain PyTorch instead"
    )


class _Ops:
    """The registered operators, by the names of :mod:`fast.operators`."""

    def __init__(self) -> None:
        ops = getattr(torch.ops, NAMESPACE)
        self.concat_forward: Callable[..., Pair] = ops.kv_rope_concat_forward.default
        self.concat_backward: Callable[..., Six] = ops.kv_rope_concat_backward.default
        self.static_forward: Callable[..., Pair] = ops.kv_rope_static_forward.default
        self.static_forward_: Callable[..., None] = ops.kv_rope_static_forward_.default
        self.static_backward: Callable[..., Six] = ops.kv_rope_static_backward.default


def _register() -> Any:
    """Define the operators; they last as long as the returned library."""
    # PyTorch does not annotate this class.
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    fakes: dict[str, Callable[..., Any]] = {
        "concat_forward": _fake_concat_forward,
        "concat_backward": _fake_concat_backward,
        "static_forward": _fake_static_forward,
        "static_forward_": _fake_static_forward_,
        "static_backward": _fake_static_backward,
    }
    for name, schema in _SCHEMAS.items():
        library.define(f"kv_rope_{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        implementation = getattr(operators, name)
        for key in ("CPU", "CUDA"):
            library.impl(f"kv_rope_{name}", implementation, key)
        torch.library.register_fake(f"{NAMESPACE}::kv_rope_{name}", fakes[name], lib=library)
    gradients: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
        "concat_forward": (_concat_gradient, _save_concat),
        "concat_backward": (_no_second_gradient, _save_nothing),
        "static_forward": (_static_gradient, _save_static),
        "static_backward": (_no_second_gradient, _save_nothing),
    }
    for name, (backward, setup_context) in gradients.items():
        torch.library.register_autograd(
            f"{NAMESPACE}::kv_rope_{name}", backward, setup_context=setup_context, lib=library
        )
    return library


_LIBRARY = _register()

OPS = _Ops()
