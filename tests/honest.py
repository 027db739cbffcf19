"""Honest kernels of both operators: every one must pass, with at least the grade stated.

They differ in what real kernels differ in: where they round, in which order they add, whether a
product is kept or stored. Rounding products to bfloat16, as PyTorch does in bfloat16, is honest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ForwardOutputs = tuple[Tensor, Tensor]
BackwardOutputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

CONCAT_FORWARD = "kv_rope.concat.forward"
STATIC_BACKWARD = "kv_rope.static.backward"


@dataclass(frozen=True)
class HonestKernel:
    """A kernel that must pass.

    Attributes:
        function: takes the operator's inputs positionally; with style ``out`` the output tensors
            follow them and nothing is returned.
        operator: the operator's id.
        grade: the loosest grade it may get: ``single_rounding`` or ``stored_intermediates``.
        style: ``return`` or ``out``.
        head_dim: the only head_dim it works for; None for any.
    """

    function: Callable[..., object]
    operator: str
    grade: str
    style: str = "return"
    head_dim: int | None = None

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_half_transposed(y: Tensor) -> Tensor:
    first, second = y.chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1)


def stored(product: Tensor) -> Tensor:
    """A float32 product after a stay in bfloat16."""
    return product.to(torch.bfloat16).to(torch.float32)


def fused_multiply_add(a: Tensor, b: Tensor, addend: Tensor) -> Tensor:
    """a * b + addend in float32 without a rounding of the product.

    Products of two bfloat16 numbers are exact in float64; the sum there is rounded, to 53 bits,
    before it is rounded to float32.
    """
    return (a.double() * b.double() + addend.double()).float()


# kv_rope.concat.forward


def append(cache: Tensor, new: Tensor) -> Tensor:
    return torch.cat((cache, new), dim=2)


def forward_eager(
    key_states: Tensor,
    value_states: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> ForwardOutputs:
    """PyTorch in bfloat16: both products and their sum are rounded to bfloat16."""
    keys = key_states * cos + rotate_half(key_states) * sin
    return append(key_cache, keys), append(value_cache, value_states)


def _forward(
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], inputs: tuple[Tensor, ...]
) -> ForwardOutputs:
    """``rotate`` gets key, rotate_half(key), cos and sin in float32, and gives the new keys."""
    key_states, value_states, cos, sin, key_cache, value_cache = inputs
    key = key_states.float()
    keys = rotate(key, rotate_half(key), cos.float(), sin.float()).to(torch.bfloat16)
    return append(key_cache, keys), append(value_cache, value_states)


def forward_fp32(*inputs: Tensor) -> ForwardOutputs:
    """float32 with one rounding."""
    return _forward(lambda key, half, cos, sin: key * cos + half * sin, inputs)


def forward_fp64(*inputs: Tensor) -> ForwardOutputs:
    """float64, rounded by torch, which goes through float32."""
    return _forward(
        lambda key, half, cos, sin: key.double() * cos.double() + half.double() * sin.double(),
        inputs,
    )


def forward_products_stored(*inputs: Tensor) -> ForwardOutputs:
    """Both products are stored in bfloat16 and added in float32, as eager does."""
    return _forward(lambda key, half, cos, sin: stored(key * cos) + stored(half * sin), inputs)


def forward_cos_product_stored(*inputs: Tensor) -> ForwardOutputs:
    """The product with cos is stored in bfloat16, the other one kept."""
    return _forward(lambda key, half, cos, sin: stored(key * cos) + half * sin, inputs)


def forward_sin_product_stored(*inputs: Tensor) -> ForwardOutputs:
    """The product with sin is stored in bfloat16, the other one kept."""
    return _forward(lambda key, half, cos, sin: key * cos + stored(half * sin), inputs)


def forward_addcmul(*inputs: Tensor) -> ForwardOutputs:
    """torch.addcmul in float32, which may fuse."""
    return _forward(lambda key, half, cos, sin: torch.addcmul(key * cos, half, sin), inputs)


def forward_fused(*inputs: Tensor) -> ForwardOutputs:
    """A fused multiply-add on the product with cos, in float32."""
    return _forward(
        lambda key, half, cos, sin: fused_multiply_add(half, sin, key * cos),
        inputs,
    )


def forward_fused_onto_a_stored_product(*inputs: Tensor) -> ForwardOutputs:
    """A fused multiply-add on the product with cos after its stay in bfloat16."""
    return _forward(
        lambda key, half, cos, sin: fused_multiply_add(half, sin, stored(key * cos)),
        inputs,
    )


def forward_by_halves(*inputs: Tensor) -> ForwardOutputs:
    """The two halves are worked out apart, as a fused kernel does; float32, one rounding."""
    key_states, value_states, cos, sin, key_cache, value_cache = inputs
    (k1, k2), (c1, c2), (s1, s2) = (x.float().chunk(2, dim=-1) for x in (key_states, cos, sin))
    keys = torch.cat((k1 * c1 - k2 * s1, k2 * c2 + k1 * s2), dim=-1).to(torch.bfloat16)
    return append(key_cache, keys), append(value_cache, value_states)


def forward_for_head_dim_128(*inputs: Tensor) -> ForwardOutputs:
    """float32 with one rounding, for head_dim 128 alone."""
    key_states = inputs[0]
    assert key_states.shape[-1] == 128, f"head_dim is {key_states.shape[-1]}, not 128"
    return forward_fp32(*inputs)


def forward_fp32_out(*tensors: Tensor) -> None:
    """float32 with one rounding, into outputs given after the inputs."""
    *inputs, key_out, value_out = tensors
    keys, values = forward_fp32(*inputs)
    key_out.copy_(keys)
    value_out.copy_(values)


def forward_written_in_parts_out(*tensors: Tensor) -> None:
    """float32 with one rounding, each region written straight into the outputs."""
    key_states, value_states, cos, sin, key_cache, value_cache, key_out, value_out = tensors
    cached = key_cache.shape[2]
    key = key_states.float()
    key_out[:, :, :cached] = key_cache
    key_out[:, :, cached:] = key * cos.float() + rotate_half(key) * sin.float()
    value_out[:, :, :cached] = value_cache
    value_out[:, :, cached:] = value_states


# kv_rope.static.backward


def zeroed(cache: Tensor, cache_position: Tensor) -> Tensor:
    result = cache.clone()
    result[:, :, cache_position] = 0
    return result


def zeroed_by_selection(cache: Tensor, cache_position: Tensor) -> Tensor:
    """The same without an indexed write: a choice by row between 0 and the cache."""
    rows = torch.arange(cache.shape[2], device=cache.device)
    is_new = torch.isin(rows, cache_position)[:, None]
    return torch.where(is_new, torch.zeros((), dtype=cache.dtype, device=cache.device), cache)


def backward_eager(
    grad_key_cache: Tensor,
    grad_value_cache: Tensor,
    key_states: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache_position: Tensor,
) -> BackwardOutputs:
    """PyTorch in bfloat16: products are rounded; sums over heads accumulate in float32."""
    gradient = grad_key_cache[:, :, cache_position]
    return (
        gradient * cos[:, None] + rotate_half_transposed(gradient * sin[:, None]),
        grad_value_cache[:, :, cache_position],
        (gradient * key_states).sum(dim=1),
        (gradient * rotate_half(key_states)).sum(dim=1),
        zeroed(grad_key_cache, cache_position),
        zeroed(grad_value_cache, cache_position),
    )


def backward_autograd(
    grad_key_cache: Tensor,
    grad_value_cache: Tensor,
    key_states: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache_position: Tensor,
) -> BackwardOutputs:
    """What autograd makes of the forward operator written in bfloat16."""
    with torch.enable_grad():
        key, table_cos, table_sin = (
            x.detach().clone().requires_grad_() for x in (key_states, cos, sin)
        )
        # The gradients of these do not depend on their values.
        value = torch.zeros_like(key_states, requires_grad=True)
        key_cache = torch.zeros_like(grad_key_cache, requires_grad=True)
        value_cache = torch.zeros_like(grad_value_cache, requires_grad=True)
        rotated = key * table_cos[:, None] + rotate_half(key) * table_sin[:, None]
        updated_key_cache = key_cache.index_copy(2, cache_position, rotated)
        updated_value_cache = value_cache.index_copy(2, cache_position, value)
        gradients = torch.autograd.grad(
            [updated_key_cache, updated_value_cache],
            [key, value, table_cos, table_sin, key_cache, value_cache],
            [grad_key_cache, grad_value_cache],
        )
    grad_key, grad_value, grad_cos, grad_sin, grad_key_input, grad_value_input = gradients
    return grad_key, grad_value, grad_cos, grad_sin, grad_key_input, grad_value_input


Unrotate = Callable[[Tensor, Tensor, Tensor], Tensor]
Reduce = Callable[[Tensor, Tensor], Tensor]


def unrotate_fp32(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return gradient * cos + rotate_half_transposed(gradient * sin)


def reduce_fp32(gradient: Tensor, key: Tensor) -> Tensor:
    return (gradient * key).sum(dim=1)


def _backward(
    inputs: tuple[Tensor, ...],
    unrotate: Unrotate = unrotate_fp32,
    reduce: Reduce = reduce_fp32,
    zero: Callable[[Tensor, Tensor], Tensor] = zeroed,
) -> BackwardOutputs:
    """``unrotate`` gets g, cos, sin and ``reduce`` gets g, k or rotate_half(k), all in float32."""
    grad_key_cache, grad_value_cache, key_states, cos, sin, cache_position = inputs
    gradient = grad_key_cache[:, :, cache_position].float()
    key = key_states.float()
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    return (
        unrotate(gradient, cos, sin).to(torch.bfloat16),
        grad_value_cache[:, :, cache_position],
        reduce(gradient, key).to(torch.bfloat16),
        reduce(gradient, rotate_half(key)).to(torch.bfloat16),
        zero(grad_key_cache, cache_position),
        zero(grad_value_cache, cache_position),
    )


def backward_fp32(*inputs: Tensor) -> BackwardOutputs:
    """float32 with one rounding."""
    return _backward(inputs)


def backward_fp64(*inputs: Tensor) -> BackwardOutputs:
    """float64, rounded by torch, which goes through float32."""

    def unrotate(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return unrotate_fp32(gradient.double(), cos.double(), sin.double())

    def reduce(gradient: Tensor, key: Tensor) -> Tensor:
        return reduce_fp32(gradient.double(), key.double())

    return _backward(inputs, unrotate, reduce)


def backward_products_stored(*inputs: Tensor) -> BackwardOutputs:
    """All products are stored in bfloat16 and added in float32, as eager does."""

    def unrotate(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return stored(gradient * cos) + rotate_half_transposed(stored(gradient * sin))

    def reduce(gradient: Tensor, key: Tensor) -> Tensor:
        return stored(gradient * key).sum(dim=1)

    return _backward(inputs, unrotate, reduce)


def backward_cos_product_stored(*inputs: Tensor) -> BackwardOutputs:
    """In the key gradient the product with cos is stored in bfloat16, the other one kept."""

    def unrotate(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return stored(gradient * cos) + rotate_half_transposed(gradient * sin)

    return _backward(inputs, unrotate)


def backward_sin_product_stored(*inputs: Tensor) -> BackwardOutputs:
    """In the key gradient the product with sin is stored in bfloat16, the other one kept."""

    def unrotate(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return gradient * cos + rotate_half_transposed(stored(gradient * sin))

    return _backward(inputs, unrotate)


def backward_half_of_the_heads_stored(*inputs: Tensor) -> BackwardOutputs:
    """The products of the even heads are stored in bfloat16, those of the odd heads kept."""

    def reduce(gradient: Tensor, key: Tensor) -> Tensor:
        products = gradient * key
        products[:, 0::2] = stored(products[:, 0::2])
        return products.sum(dim=1)

    return _backward(inputs, reduce=reduce)


def _add_in_order(products: list[Tensor]) -> Tensor:
    total = products[0]
    for product in products[1:]:
        total = total + product
    return total


def backward_heads_forward(*inputs: Tensor) -> BackwardOutputs:
    """Heads are added one by one, first head first, in float32."""
    return _backward(inputs, reduce=lambda g, k: _add_in_order(list((g * k).unbind(1))))


def backward_heads_reversed(*inputs: Tensor) -> BackwardOutputs:
    """Heads are added one by one, last head first, in float32."""
    return _backward(inputs, reduce=lambda g, k: _add_in_order(list((g * k).unbind(1))[::-1]))


def backward_heads_pairwise(*inputs: Tensor) -> BackwardOutputs:
    """Heads are added as a tree, in float32."""

    def reduce(gradient: Tensor, key: Tensor) -> Tensor:
        level = list((gradient * key).unbind(1))
        while len(level) > 1:
            pairs = [left + right for left, right in zip(level[0::2], level[1::2], strict=False)]
            level = pairs + level[len(pairs) * 2 :]
        return level[0]

    return _backward(inputs, reduce=reduce)


def backward_heads_einsum(*inputs: Tensor) -> BackwardOutputs:
    """Heads are added by torch.einsum in float32, in whatever order a matrix product takes."""
    return _backward(inputs, reduce=lambda g, k: torch.einsum("bhnd,bhnd->bnd", g, k))


def backward_fused(*inputs: Tensor) -> BackwardOutputs:
    """Fused multiply-adds in float32 throughout."""

    def unrotate(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return fused_multiply_add(gradient, cos, rotate_half_transposed(gradient * sin))

    def reduce(gradient: Tensor, key: Tensor) -> Tensor:
        total = torch.zeros_like(gradient[:, 0])
        for head in range(gradient.shape[1]):
            total = fused_multiply_add(gradient[:, head], key[:, head], total)
        return total

    return _backward(inputs, unrotate, reduce)


def backward_addcmul(*inputs: Tensor) -> BackwardOutputs:
    """torch.addcmul in float32 throughout, which may fuse."""

    def unrotate(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.addcmul(rotate_half_transposed(gradient * sin), gradient, cos)

    def reduce(gradient: Tensor, key: Tensor) -> Tensor:
        total = torch.zeros_like(gradient[:, 0])
        for head in range(gradient.shape[1]):
            total = torch.addcmul(total, gradient[:, head], key[:, head])
        return total

    return _backward(inputs, unrotate, reduce)


def backward_rows_selected(*inputs: Tensor) -> BackwardOutputs:
    """float32 with one rounding; rows are zeroed by a choice, without an indexed write."""
    return _backward(inputs, zero=zeroed_by_selection)


def backward_for_head_dim_128(*inputs: Tensor) -> BackwardOutputs:
    """float32 with one rounding, for head_dim 128 alone."""
    key_states = inputs[2]
    assert key_states.shape[-1] == 128, f"head_dim is {key_states.shape[-1]}, not 128"
    return backward_fp32(*inputs)


def backward_fp32_out(*tensors: Tensor) -> None:
    """float32 with one rounding, into outputs given after the inputs."""
    for output, result in zip(tensors[6:], backward_fp32(*tensors[:6]), strict=True):
        output.copy_(result)


HONEST: tuple[HonestKernel, ...] = (
    HonestKernel(forward_eager, CONCAT_FORWARD, "stored_intermediates"),
    HonestKernel(forward_fp32, CONCAT_FORWARD, "single_rounding"),
    HonestKernel(forward_fp64, CONCAT_FORWARD, "single_rounding"),
    HonestKernel(forward_products_stored, CONCAT_FORWARD, "stored_intermediates"),
    HonestKernel(forward_cos_product_stored, CONCAT_FORWARD, "stored_intermediates"),
    HonestKernel(forward_sin_product_stored, CONCAT_FORWARD, "stored_intermediates"),
    HonestKernel(forward_addcmul, CONCAT_FORWARD, "single_rounding"),
    HonestKernel(forward_fused, CONCAT_FORWARD, "single_rounding"),
    HonestKernel(forward_fused_onto_a_stored_product, CONCAT_FORWARD, "stored_intermediates"),
    HonestKernel(forward_by_halves, CONCAT_FORWARD, "single_rounding"),
    HonestKernel(forward_for_head_dim_128, CONCAT_FORWARD, "single_rounding", head_dim=128),
    HonestKernel(forward_fp32_out, CONCAT_FORWARD, "single_rounding", style="out"),
    HonestKernel(forward_written_in_parts_out, CONCAT_FORWARD, "single_rounding", style="out"),
    HonestKernel(backward_eager, STATIC_BACKWARD, "stored_intermediates"),
    HonestKernel(backward_autograd, STATIC_BACKWARD, "stored_intermediates"),
    HonestKernel(backward_fp32, STATIC_BACKWARD, "single_rounding"),
    HonestKernel(backward_fp64, STATIC_BACKWARD, "single_rounding"),
    HonestKernel(backward_products_stored, STATIC_BACKWARD, "stored_intermediates"),
    HonestKernel(backward_cos_product_stored, STATIC_BACKWARD, "stored_intermediates"),
    HonestKernel(backward_sin_product_stored, STATIC_BACKWARD, "stored_intermediates"),
    HonestKernel(backward_half_of_the_heads_stored, STATIC_BACKWARD, "stored_intermediates"),
    HonestKernel(backward_heads_forward, STATIC_BACKWARD, "single_rounding"),
    HonestKernel(backward_heads_reversed, STATIC_BACKWARD, "single_rounding"),
    HonestKernel(backward_heads_pairwise, STATIC_BACKWARD, "single_rounding"),
    HonestKernel(backward_heads_einsum, STATIC_BACKWARD, "single_rounding"),
    HonestKernel(backward_fused, STATIC_BACKWARD, "single_rounding"),
    HonestKernel(backward_addcmul, STATIC_BACKWARD, "single_rounding"),
    HonestKernel(backward_rows_selected, STATIC_BACKWARD, "single_rounding"),
    HonestKernel(backward_for_head_dim_128, STATIC_BACKWARD, "single_rounding", head_dim=128),
    HonestKernel(backward_fp32_out, STATIC_BACKWARD, "single_rounding", style="out"),
)
"""Every honest kernel, of both operators."""
