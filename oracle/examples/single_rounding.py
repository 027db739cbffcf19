"""Plain PyTorch in float32, rounded once at the end: what an honest fused kernel computes.

Only what is computed passes through float32; copies stay copies, so that NaN payloads survive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import eager

_Backward = Callable[..., tuple[torch.Tensor, ...]]


def concat_forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute ``kv_rope.concat.forward``."""
    key, value, cos, sin, key_cache, value_cache = inputs
    return (
        torch.cat((key_cache, _rotated(key, cos, sin)), dim=2),
        torch.cat((value_cache, value), dim=2),
    )


def concat_backward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute ``kv_rope.concat.backward``."""
    return _computed_wide(eager.concat_backward, inputs)


def static_forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute ``kv_rope.static.forward``."""
    key, value, cos, sin, key_cache, value_cache, position = inputs
    rotated = _rotated(key, cos.unsqueeze(1), sin.unsqueeze(1))
    return (
        key_cache.index_copy(2, position, rotated),
        value_cache.index_copy(2, position, value),
    )


def static_backward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute ``kv_rope.static.backward``."""
    return _computed_wide(eager.static_backward, inputs)


def _rotated(key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = key.float()
    return (wide * cos.float() + eager.rotate_half(wide) * sin.float()).to(key.dtype)


def _computed_wide(
    operator: _Backward, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Take the gradients of keys and tables from float32, everything else from the own type."""
    dtype = inputs[0].dtype
    wide = operator(*(x.float() if x.is_floating_point() else x for x in inputs))
    own = operator(*inputs)
    grad_key, _, grad_cos, grad_sin, *_ = (x.to(dtype) for x in wide)
    return grad_key, own[1], grad_cos, grad_sin, own[4], own[5]
