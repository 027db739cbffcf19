r"""A right Triton kernel for ``kv_rope.static.backward``: the gradients of a static cache update.

With ``rotate_half(x) = concat(-x[..., D/2:], x[..., :D/2])``, its transpose ``rotate_half_T(y) =
concat(y[..., D/2:], -y[..., :D/2])`` and ``g = grad_key_cache[:, :, cache_position]``::

    grad_key_states = g * cos + rotate_half_T(g * sin)
    grad_value_states = grad_value_cache[:, :, cache_position]
    grad_cos = sum over heads of g * k
    grad_sin = sum over heads of g * rotate_half(k)
    grad_key_cache_input, grad_value_cache_input = the grad caches with rows cache_position set to 0

Judge it with::

    kernel-oracle verify --operator kv_rope.static.backward \
        oracle/examples/right_static_backward.py:static_backward
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _static_backward_kernel(
    grad_key_cache,
    grad_value_cache,
    key_states,
    cos,
    sin,
    cache_position,
    grad_key_states,
    grad_value_states,
    grad_cos,
    grad_sin,
    grad_key_cache_input,
    grad_value_cache_input,
    num_rows,
    new_len,
    max_len,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    batch = row // new_len
    token = row % new_len
    column = tl.arange(0, HALF)
    mask = (row < num_rows)[:, None]
    position = tl.load(cache_position + token)

    first = row[:, None] * HEAD_DIM + column[None, :]
    second = first + HALF
    cos1 = tl.load(cos + first, mask=mask).to(tl.float32)
    cos2 = tl.load(cos + second, mask=mask).to(tl.float32)
    sin1 = tl.load(sin + first, mask=mask).to(tl.float32)
    sin2 = tl.load(sin + second, mask=mask).to(tl.float32)

    # The tables are shared by all heads, so their gradients are sums over the heads.
    sum_cos1 = tl.zeros([BLOCK_ROWS, HALF], tl.float32)
    sum_cos2 = tl.zeros([BLOCK_ROWS, HALF], tl.float32)
    sum_sin1 = tl.zeros([BLOCK_ROWS, HALF], tl.float32)
    sum_sin2 = tl.zeros([BLOCK_ROWS, HALF], tl.float32)
    zero = tl.zeros([BLOCK_ROWS, HALF], grad_key_cache.dtype.element_ty)
    for head in range(NUM_HEADS):
        sequence = batch * NUM_HEADS + head
        state_first = (sequence * new_len + token)[:, None] * HEAD_DIM + column[None, :]
        state_second = state_first + HALF
        cache_first = (sequence * max_len + position)[:, None] * HEAD_DIM + column[None, :]
        cache_second = cache_first + HALF

        g1 = tl.load(grad_key_cache + cache_first, mask=mask).to(tl.float32)
        g2 = tl.load(grad_key_cache + cache_second, mask=mask).to(tl.float32)
        k1 = tl.load(key_states + state_first, mask=mask).to(tl.float32)
        k2 = tl.load(key_states + state_second, mask=mask).to(tl.float32)
        sum_cos1 += g1 * k1
        sum_cos2 += g2 * k2
        sum_sin1 -= g1 * k2
        sum_sin2 += g2 * k1

        # float32 throughout, and one rounding to the output type at the end.
        grad_k1 = (g1 * cos1 + g2 * sin2).to(grad_key_states.dtype.element_ty)
        grad_k2 = (g2 * cos2 - g1 * sin1).to(grad_key_states.dtype.element_ty)
        tl.store(grad_key_states + state_first, grad_k1, mask=mask)
        tl.store(grad_key_states + state_second, grad_k2, mask=mask)

        v1 = tl.load(grad_value_cache + cache_first, mask=mask)
        v2 = tl.load(grad_value_cache + cache_second, mask=mask)
        tl.store(grad_value_states + state_first, v1, mask=mask)
        tl.store(grad_value_states + state_second, v2, mask=mask)

        # The update overwrote these cache rows: nothing flows back to what they held before.
        tl.store(grad_key_cache_input + cache_first, zero, mask=mask)
        tl.store(grad_key_cache_input + cache_second, zero, mask=mask)
        tl.store(grad_value_cache_input + cache_first, zero, mask=mask)
        tl.store(grad_value_cache_input + cache_second, zero, mask=mask)

    tl.store(grad_cos + first, sum_cos1.to(grad_cos.dtype.element_ty), mask=mask)
    tl.store(grad_cos + second, sum_cos2.to(grad_cos.dtype.element_ty), mask=mask)
    tl.store(grad_sin + first, sum_sin1.to(grad_sin.dtype.element_ty), mask=mask)
    tl.store(grad_sin + second, sum_sin2.to(grad_sin.dtype.element_ty), mask=mask)


def static_backward(
    grad_key_cache: torch.Tensor,
    grad_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache_position: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Send the gradients of the updated caches back to all inputs of the update.

    Args:
        grad_key_cache: gradient of the updated key cache, contiguous, [B, H, M, D]; D is a power
            of two.
        grad_value_cache: gradient of the updated value cache, contiguous, [B, H, M, D].
        key_states: the keys that were rotated, contiguous, [B, H, N, D].
        cos: cosine table, contiguous, [B, N, D].
        sin: sine table, contiguous, [B, N, D].
        cache_position: int64 [N], the distinct cache rows that were written, in any order.

    Returns:
        ``grad_key_states`` and ``grad_value_states`` [B, H, N, D], ``grad_cos`` and ``grad_sin``
        [B, N, D], ``grad_key_cache_input`` and ``grad_value_cache_input`` [B, H, M, D].
    """
    batch, num_heads, new_len, head_dim = key_states.shape
    max_len = grad_key_cache.shape[2]
    grad_key_states = torch.empty_like(key_states)
    grad_value_states = torch.empty_like(key_states)
    grad_cos = torch.empty_like(cos)
    grad_sin = torch.empty_like(sin)
    grad_key_cache_input = grad_key_cache.clone()
    grad_value_cache_input = grad_value_cache.clone()
    # Triton's interpreter, on a CPU, pays by the program: give it few, large ones.
    block_rows = 8 if key_states.is_cuda else 256

    num_rows = batch * new_len
    _static_backward_kernel[(triton.cdiv(num_rows, block_rows),)](
        grad_key_cache,
        grad_value_cache,
        key_states,
        cos,
        sin,
        cache_position,
        grad_key_states,
        grad_value_states,
        grad_cos,
        grad_sin,
        grad_key_cache_input,
        grad_value_cache_input,
        num_rows,
        new_len,
        max_len,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=block_rows,
    )
    return (
        grad_key_states,
        grad_value_states,
        grad_cos,
        grad_sin,
        grad_key_cache_input,
        grad_value_cache_input,
    )
