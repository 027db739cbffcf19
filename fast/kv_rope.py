"""The KV-cache update with rotary position embedding (RoPE), forward and backward, in Triton.

Each operator is one launch that reads its inputs and writes its outputs once. Every computed
element is correctly rounded: it is the number of its type nearest to the exact result, ties to
even (the numeric contract ``correctly_rounded``). Rows that are copied keep every bit. There are no
atomics: results repeat bit for bit. Inputs may have any strides; none is copied.

The functions take part in autograd, and in ``torch.compile``, by way of the operators
``torch.ops.kernel_oracle.kv_rope_*``; on tensors that need neither they launch directly, which
costs less time in Python. CPU tensors are computed in plain PyTorch, to the same bits, unless
Triton's interpreter is on (``TRITON_INTERPRET=1`` when triton is first imported): then the kernels
themselves run there.

Axes: B batch, H key/value heads, N new tokens, C cached tokens, M cache capacity, D head dim, even.
``rotate_half(x) = concat(-x[..., D/2:], x[..., :D/2])`` is the half-split (NeoX) layout, and
``rotate_half_T(y) = concat(y[..., D/2:], -y[..., :D/2])`` its transpose.
"""

from __future__ import annotations

import torch

from . import operators
from .checks import check_positions
from .operators import Pair, Six
from .registration import OPS

__all__ = [
    "concat_backward",
    "concat_forward",
    "static_backward",
    "static_forward",
    "static_forward_",
]


def concat_forward(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> Pair:
    """Append rotated keys, and values, to the caches (``kv_rope.concat.forward``).

    ``updated_key_cache = concat(key_cache, k * cos + rotate_half(k) * sin)`` and
    ``updated_value_cache = concat(value_cache, value_states)``, along the sequence.

    All tensors have one dtype (bfloat16, float16 or float32) and one device, and any strides.

    Args:
        key_states: keys of the new tokens, [B, H, N, D]; D is even, B and N may be 0.
        value_states: values of the new tokens, [B, H, N, D].
        cos: cosine table, [B, 1, N, D] or [1, 1, N, D]; its two halves are independent.
        sin: sine table, [B, 1, N, D] or [1, 1, N, D]; its two halves are independent.
        key_cache: rotated keys of the cached tokens, [B, H, C, D]; C may be 0.
        value_cache: values of the cached tokens, [B, H, C, D].

    Returns:
        ``updated_key_cache`` and ``updated_value_cache``, [B, H, C + N, D], contiguous, fresh.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the tensor.
    """
    inputs = (key_states, value_states, cos, sin, key_cache, value_cache)
    if _dispatched(inputs):
        return OPS.concat_forward(*inputs)
    return operators.concat_forward(*inputs)


def concat_backward(
    grad_updated_key_cache: torch.Tensor,
    grad_updated_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> Six:
    """Send gradients back through a concatenating KV-cache update (``kv_rope.concat.backward``).

    With ``g = grad_updated_key_cache[:, :, C:]``: ``grad_key_states = g * cos +
    rotate_half_T(g * sin)``, ``grad_value_states = grad_updated_value_cache[:, :, C:]``,
    ``grad_cos = sum over heads of g * k``, ``grad_sin = sum over heads of g * rotate_half(k)``, and
    the first C rows of both are the gradients of the caches.

    All tensors have one dtype (bfloat16, float16 or float32) and one device, and any strides.

    Args:
        grad_updated_key_cache: gradient of the updated key cache, [B, H, C + N, D]; D is even.
        grad_updated_value_cache: gradient of the updated value cache, [B, H, C + N, D].
        key_states: the keys that were rotated, [B, H, N, D]; B, N and C may be 0.
        cos: cosine table, [B, 1, N, D]; its two halves are independent.
        sin: sine table, [B, 1, N, D]; its two halves are independent.

    Returns:
        ``grad_key_states``, ``grad_value_states`` [B, H, N, D], ``grad_cos``, ``grad_sin``
        [B, 1, N, D], ``grad_key_cache``, ``grad_value_cache`` [B, H, C, D]; all contiguous, fresh.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the tensor.
    """
    inputs = (grad_updated_key_cache, grad_updated_value_cache, key_states, cos, sin)
    if _dispatched(inputs):
        return OPS.concat_backward(*inputs)
    return operators.concat_backward(*inputs)


def static_forward(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_position: torch.Tensor,
    *,
    check: bool = False,
) -> Pair:
    """Return the caches with rotated keys, and values, in given rows (``kv_rope.static.forward``).

    ``updated_key_cache`` is ``key_cache`` with the rows ``cache_position`` replaced by ``k * cos +
    rotate_half(k) * sin``, and ``updated_value_cache`` is ``value_cache`` with these rows replaced
    by ``value_states``.

    All floating tensors have one dtype (bfloat16, float16 or float32), all tensors one device, and
    any strides.

    Args:
        key_states: keys of the new tokens, [B, H, N, D]; D is even, B and N may be 0.
        value_states: values of the new tokens, [B, H, N, D].
        cos: cosine table, [B, N, D] or [1, N, D]; its two halves are independent.
        sin: sine table, [B, N, D] or [1, N, D]; its two halves are independent.
        key_cache: rotated keys, [B, H, M, D].
        value_cache: values, [B, H, M, D].
        cache_position: int64 [N], distinct rows in 0..M-1, in any order. Unless they are checked, a
            token whose row is not in 0..M-1 is left out, and of tokens with one row any may win.
        check: refuse positions that are not distinct rows. On a GPU this waits for its stream.

    Returns:
        ``updated_key_cache`` and ``updated_value_cache``, [B, H, M, D], contiguous, fresh.

    Raises:
        ValueError: a shape, dtype or device does not fit, or a position that is checked; the
            message names the tensor, and the first bad position.
    """
    if check:
        check_positions(cache_position, key_cache.shape[2])
    inputs = (key_states, value_states, cos, sin, key_cache, value_cache, cache_position)
    if _dispatched(inputs):
        return OPS.static_forward(*inputs)
    return operators.static_forward(*inputs)


def static_forward_(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_position: torch.Tensor,
    *,
    check: bool = False,
) -> Pair:
    """Write rotated keys, and values, into given rows of the caches, and nothing else.

    As :func:`static_forward`, in place, for decoding: only the rows ``cache_position`` are written,
    and the caches are not read. It cannot be differentiated.

    Args:
        key_states: see :func:`static_forward`, as for all that is not explained here.
        value_states: see there.
        cos: see there.
        sin: see there.
        key_cache: [B, H, M, D], written; it overlaps no other tensor.
        value_cache: [B, H, M, D], written; it overlaps no other tensor.
        cache_position: see there.
        check: see there.

    Returns:
        ``key_cache`` and ``value_cache``.

    Raises:
        ValueError: as there.
    """
    if check:
        check_positions(cache_position, key_cache.shape[2])
    inputs = (key_states, value_states, cos, sin, key_cache, value_cache, cache_position)
    if _dispatched(inputs):
        OPS.static_forward_(*inputs)
    else:
        operators.static_forward_(*inputs)
    return key_cache, value_cache


def static_backward(
    grad_key_cache: torch.Tensor,
    grad_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache_position: torch.Tensor,
    *,
    check: bool = False,
) -> Six:
    """Send gradients back through a static KV-cache update (``kv_rope.static.backward``).

    With ``g = grad_key_cache[:, :, cache_position]``: ``grad_key_states = g * cos +
    rotate_half_T(g * sin)``, ``grad_value_states = grad_value_cache[:, :, cache_position]``,
    ``grad_cos = sum over heads of g * k``, ``grad_sin = sum over heads of g * rotate_half(k)``, and
    the two grad caches come back with the rows ``cache_position`` set to 0.

    All floating tensors have one dtype (bfloat16, float16 or float32), all tensors one device, and
    any strides.

    Args:
        grad_key_cache: gradient of the updated key cache, [B, H, M, D]; D is even.
        grad_value_cache: gradient of the updated value cache, [B, H, M, D].
        key_states: the keys that were rotated, [B, H, N, D]; B and N may be 0.
        cos: cosine table, [B, N, D]; its two halves are independent.
        sin: sine table, [B, N, D]; its two halves are independent.
        cache_position: int64 [N], distinct rows in 0..M-1, in any order. Unless they are checked, a
            row not in 0..M-1 counts as a gradient of 0, and a repeated row is taken each time.
        check: refuse positions that are not distinct rows. On a GPU this waits for its stream.

    Returns:
        ``grad_key_states``, ``grad_value_states`` [B, H, N, D], ``grad_cos``, ``grad_sin``
        [B, N, D], ``grad_key_cache_input``, ``grad_value_cache_input`` [B, H, M, D]; all
        contiguous, fresh.

    Raises:
        ValueError: a shape, dtype or device does not fit, or a position that is checked; the
            message names the tensor, and the first bad position.
    """
    if check:
        check_positions(cache_position, grad_key_cache.shape[2])
    inputs = (grad_key_cache, grad_value_cache, key_states, cos, sin, cache_position)
    if _dispatched(inputs):
        return OPS.static_backward(*inputs)
    return operators.static_backward(*inputs)


def _dispatched(inputs: tuple[torch.Tensor, ...]) -> bool:
    """Whether to call by torch's dispatcher: for autograd, a compiler, or a tensor subclass."""
    if torch.compiler.is_compiling():
        return True
    differentiable = torch.is_grad_enabled()
    for tensor in inputs:
        if type(tensor) is not torch.Tensor or (differentiable and tensor.requires_grad):
            return True
    return False
