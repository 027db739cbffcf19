"""PyTorch eager in the inputs' own type: what a model's source code computes without a kernel.

Every product is stored in bfloat16 before the sum, so these meet ``stored_intermediates`` and not
``single_rounding``.
"""

from __future__ import annotations

import torch


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Return ``concat(-x[..., D/2:], x[..., :D/2])`` for ``x`` of shape ``[..., D]``."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_half_transposed(y: torch.Tensor) -> torch.Tensor:
    """Return ``concat(y[..., D/2:], -y[..., :D/2])`` for ``y`` of shape ``[..., D]``."""
    half = y.shape[-1] // 2
    return torch.cat((y[..., half:], -y[..., :half]), dim=-1)


def concat_forward(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``kv_rope.concat.forward``."""
    rotated = key_states * cos + rotate_half(key_states) * sin
    return (
        torch.cat((key_cache, rotated), dim=2),
        torch.cat((value_cache, value_states), dim=2),
    )


def concat_backward(
    grad_updated_key_cache: torch.Tensor,
    grad_updated_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Compute ``kv_rope.concat.backward``."""
    old = grad_updated_key_cache.shape[2] - key_states.shape[2]
    rows = grad_updated_key_cache[:, :, old:]
    return (
        rows * cos + rotate_half_transposed(rows * sin),
        grad_updated_value_cache[:, :, old:].clone(memory_format=torch.contiguous_format),
        (rows * key_states).sum(dim=1, keepdim=True),
        (rows * rotate_half(key_states)).sum(dim=1, keepdim=True),
        grad_updated_key_cache[:, :, :old].clone(memory_format=torch.contiguous_format),
        grad_updated_value_cache[:, :, :old].clone(memory_format=torch.contiguous_format),
    )


def static_forward(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``kv_rope.static.forward``."""
    rotated = key_states * cos.unsqueeze(1) + rotate_half(key_states) * sin.unsqueeze(1)
    return (
        key_cache.index_copy(2, cache_position, rotated),
        value_cache.index_copy(2, cache_position, value_states),
    )


def static_backward(
    grad_key_cache: torch.Tensor,
    grad_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache_position: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Compute ``kv_rope.static.backward``."""
    rows = grad_key_cache[:, :, cache_position]
    grad_key = rows * cos.unsqueeze(1) + rotate_half_transposed(rows * sin.unsqueeze(1))
    grad_value = grad_value_cache[:, :, cache_position]
    grad_cos = (rows * key_states).sum(dim=1)
    grad_sin = (rows * rotate_half(key_states)).sum(dim=1)
    cleared = (
        grad_key_cache.index_fill(2, cache_position, 0),
        grad_value_cache.index_fill(2, cache_position, 0),
    )
    return grad_key, grad_value, grad_cos, grad_sin, *cleared
