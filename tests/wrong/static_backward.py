"""Wrong kernels for ``kv_rope.static.backward``: the right one below, altered in one place each.

Usable as candidates by path: ``tests/wrong/static_backward.py:heads_averaged``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING or __package__ == "tests.wrong":
    from . import catalogue as c
    from . import faults
    from .catalogue import WrongKernel
else:  # loaded by path, as a candidate is, with this folder on the path and no package around it
    import catalogue as c
    import faults
    from catalogue import WrongKernel

LARGE = 2**20
"""Elements of an output from which the faults of large cases set in."""


class Inputs(NamedTuple):
    """[B,H,M,D] twice, [B,H,N,D], [B,N,D] twice, int64 [N]."""

    grad_key_cache: Tensor
    grad_value_cache: Tensor
    key_states: Tensor
    cos: Tensor
    sin: Tensor
    cache_position: Tensor


class Outputs(NamedTuple):
    """[B,H,N,D] twice, [B,N,D] twice, [B,H,M,D] twice."""

    grad_key_states: Tensor
    grad_value_states: Tensor
    grad_cos: Tensor
    grad_sin: Tensor
    grad_key_cache_input: Tensor
    grad_value_cache_input: Tensor


# The right kernel: float32 arithmetic, one rounding, copies of bits


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_half_transposed(y: Tensor) -> Tensor:
    first, second = y.chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1)


def gradient_of_new_keys(x: Inputs) -> Tensor:
    return x.grad_key_cache[:, :, x.cache_position].float()


def key_gradient(
    x: Inputs,
    transposed: Callable[[Tensor], Tensor] = rotate_half_transposed,
    store: Callable[[Tensor], Tensor] = faults.nearest,
) -> Tensor:
    gradient = gradient_of_new_keys(x)
    cos, sin = x.cos.float()[:, None], x.sin.float()[:, None]
    return store(gradient * cos + transposed(gradient * sin))


def value_gradient(x: Inputs) -> Tensor:
    return x.grad_value_cache[:, :, x.cache_position]


def sum_over_heads(products: Tensor) -> Tensor:
    return products.sum(dim=1).to(torch.bfloat16)


def table_gradients(
    x: Inputs,
    half: Callable[[Tensor], Tensor] = rotate_half,
    reduce: Callable[[Tensor], Tensor] = sum_over_heads,
) -> tuple[Tensor, Tensor]:
    """grad_cos and grad_sin; ``reduce`` takes float32 products [B,H,N,D] to bfloat16 [B,N,D]."""
    gradient, key = gradient_of_new_keys(x), x.key_states.float()
    return reduce(gradient * key), reduce(gradient * half(key))


def zeroed(cache: Tensor, cache_position: Tensor) -> Tensor:
    result = cache.clone()
    result[:, :, cache_position] = 0
    return result


def right(*inputs: Tensor) -> Outputs:
    x = Inputs(*inputs)
    return Outputs(
        key_gradient(x),
        value_gradient(x),
        *table_gradients(x),
        zeroed(x.grad_key_cache, x.cache_position),
        zeroed(x.grad_value_cache, x.cache_position),
    )


def with_key_gradient(x: Inputs, gradient: Tensor) -> Outputs:
    """The right outputs, but for grad_key_states."""
    return right(*x)._replace(grad_key_states=gradient)


def with_table_gradients(x: Inputs, gradients: tuple[Tensor, Tensor]) -> Outputs:
    """The right outputs, but for grad_cos and grad_sin."""
    return right(*x)._replace(grad_cos=gradients[0], grad_sin=gradients[1])


def with_caches(x: Inputs, zero: Callable[[Tensor, Tensor], Tensor]) -> Outputs:
    """The right outputs, but for the two grad caches, which come from zero(cache, position)."""
    return right(*x)._replace(
        grad_key_cache_input=zero(x.grad_key_cache, x.cache_position),
        grad_value_cache_input=zero(x.grad_value_cache, x.cache_position),
    )


def with_rows_at(x: Inputs, gathered: Tensor, cleared: Tensor) -> Outputs:
    """Gradients gathered from the rows ``gathered``, and the rows ``cleared`` set to zero."""
    return right(*x._replace(cache_position=gathered))._replace(
        grad_key_cache_input=zeroed(x.grad_key_cache, cleared),
        grad_value_cache_input=zeroed(x.grad_value_cache, cleared),
    )


# The rotation


def rotate_neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def rotate_neighbours_transposed(y: Tensor) -> Tensor:
    return -rotate_neighbours(y)


def swap_halves(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, dims=-1)


def interleaved_pairs(*inputs: Tensor) -> Outputs:
    """Neighbours are paired (GPT-J), not the two halves, in grad_key_states and grad_sin."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, half=rotate_neighbours))._replace(
        grad_key_states=key_gradient(x, transposed=rotate_neighbours_transposed)
    )


def interleaved_pairs_and_tables(*inputs: Tensor) -> Outputs:
    """Neighbours are unrotated with each other, by the entries of the tables' first half."""
    x = Inputs(*inputs)
    cos, sin = (table.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1) for table in (x.cos, x.sin))
    paired = x._replace(cos=cos, sin=sin)
    return with_key_gradient(x, key_gradient(paired, transposed=rotate_neighbours_transposed))


def interleaved_pairs_in_grad_sin(*inputs: Tensor) -> Outputs:
    """Neighbours are paired in grad_sin only."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, half=rotate_neighbours))


def forward_rotation(*inputs: Tensor) -> Outputs:
    """grad_key_states is rotated by rotate_half instead of its transpose."""
    x = Inputs(*inputs)
    return with_key_gradient(x, key_gradient(x, transposed=rotate_half))


def minus_missing(*inputs: Tensor) -> Outputs:
    """grad_key_states swaps the halves without a minus sign."""
    x = Inputs(*inputs)
    return with_key_gradient(x, key_gradient(x, transposed=swap_halves))


def minus_missing_in_grad_sin(*inputs: Tensor) -> Outputs:
    """grad_sin swaps the halves of the key without a minus sign."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, half=swap_halves))


def grad_sin_with_the_wrong_sign(*inputs: Tensor) -> Outputs:
    """grad_sin takes the transpose of rotate_half, and so has the opposite sign."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, half=rotate_half_transposed))


def grad_sin_without_rotation(*inputs: Tensor) -> Outputs:
    """grad_sin sums g * k, as grad_cos does."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, half=lambda key: key))


def grad_sin_with_the_gradient_rotated(*inputs: Tensor) -> Outputs:
    """grad_sin sums rotate_half(g) * k: the rotation is on the wrong factor."""
    x = Inputs(*inputs)
    products = rotate_half(gradient_of_new_keys(x)) * x.key_states.float()
    return right(*inputs)._replace(grad_sin=sum_over_heads(products))


def sin_multiplied_after_the_rotation(*inputs: Tensor) -> Outputs:
    """grad_key_states multiplies by sin after the halves are swapped: rotate_half_T(g) * sin."""
    x = Inputs(*inputs)
    gradient = gradient_of_new_keys(x)
    cos, sin = x.cos.float()[:, None], x.sin.float()[:, None]
    rotated = gradient * cos + rotate_half_transposed(gradient) * sin
    return with_key_gradient(x, faults.nearest(rotated))


def cos_and_sin_swapped(*inputs: Tensor) -> Outputs:
    """cos is used as sin, and sin as cos."""
    x = Inputs(*inputs)
    return right(*x._replace(cos=x.sin, sin=x.cos))


def key_gradient_not_unrotated(*inputs: Tensor) -> Outputs:
    """grad_key_states is the gathered gradient as it came."""
    x = Inputs(*inputs)
    return with_key_gradient(x, gradient_of_new_keys(x).bfloat16())


def cos_term_only(*inputs: Tensor) -> Outputs:
    """grad_key_states lacks the term with sin."""
    x = Inputs(*inputs)
    return with_key_gradient(x, key_gradient(x._replace(sin=torch.zeros_like(x.sin))))


def sin_term_only(*inputs: Tensor) -> Outputs:
    """grad_key_states lacks the term with cos."""
    x = Inputs(*inputs)
    return with_key_gradient(x, key_gradient(x._replace(cos=torch.zeros_like(x.cos))))


def value_gradient_unrotated_as_well(*inputs: Tensor) -> Outputs:
    """grad_value_states is unrotated like the gradient of the keys."""
    x = Inputs(*inputs)
    unrotated = key_gradient(x._replace(grad_key_cache=x.grad_value_cache))
    return right(*inputs)._replace(grad_value_states=unrotated)


# Which entry of the tables


def tables_of_batch_zero(*inputs: Tensor) -> Outputs:
    """cos and sin of the first batch row serve all."""
    x = Inputs(*inputs)
    return right(*x._replace(cos=x.cos[:1], sin=x.sin[:1]))


def cos_of_batch_zero(*inputs: Tensor) -> Outputs:
    """cos of the first batch row serves all."""
    x = Inputs(*inputs)
    return right(*x._replace(cos=x.cos[:1]))


def sin_of_batch_zero(*inputs: Tensor) -> Outputs:
    """sin of the first batch row serves all."""
    x = Inputs(*inputs)
    return right(*x._replace(sin=x.sin[:1]))


def tables_of_the_first_token(*inputs: Tensor) -> Outputs:
    """The tables of the first token serve all tokens."""
    x = Inputs(*inputs)
    return right(*x._replace(cos=x.cos[:, :1], sin=x.sin[:, :1]))


def _repeated(table: Tensor, half: int) -> Tensor:
    chosen = table.chunk(2, dim=-1)[half]
    return torch.cat((chosen, chosen), dim=-1)


def first_half_of_the_tables(*inputs: Tensor) -> Outputs:
    """Only the first half of cos and of sin is read, and serves both halves."""
    x = Inputs(*inputs)
    return right(*x._replace(cos=_repeated(x.cos, 0), sin=_repeated(x.sin, 0)))


def second_half_of_the_tables(*inputs: Tensor) -> Outputs:
    """Only the second half of cos and of sin is read, and serves both halves."""
    x = Inputs(*inputs)
    return right(*x._replace(cos=_repeated(x.cos, 1), sin=_repeated(x.sin, 1)))


def first_half_of_sin(*inputs: Tensor) -> Outputs:
    """Only the first half of sin is read; cos is read rightly."""
    x = Inputs(*inputs)
    return right(*x._replace(sin=_repeated(x.sin, 0)))


def table_gradients_shared_by_both_halves(*inputs: Tensor) -> Outputs:
    """The gradients of the tables are summed over both halves, as if these were one entry."""
    x = Inputs(*inputs)

    def reduce(products: Tensor) -> Tensor:
        over_heads = products.sum(dim=1)
        return (over_heads + swap_halves(over_heads)).bfloat16()

    return with_table_gradients(x, table_gradients(x, reduce=reduce))


# Which gradient


def cache_gradients_swapped(*inputs: Tensor) -> Outputs:
    """The gradients of the key cache and of the value cache are exchanged on the way in."""
    x = Inputs(*inputs)
    return right(*x._replace(grad_key_cache=x.grad_value_cache, grad_value_cache=x.grad_key_cache))


def key_and_value_gradients_swapped(*inputs: Tensor) -> Outputs:
    """grad_key_states and grad_value_states are returned in the wrong order."""
    outputs = right(*inputs)
    return outputs._replace(
        grad_key_states=outputs.grad_value_states, grad_value_states=outputs.grad_key_states
    )


def returned_caches_swapped(*inputs: Tensor) -> Outputs:
    """grad_key_cache_input and grad_value_cache_input are returned in the wrong order."""
    outputs = right(*inputs)
    return outputs._replace(
        grad_key_cache_input=outputs.grad_value_cache_input,
        grad_value_cache_input=outputs.grad_key_cache_input,
    )


def grad_cos_and_grad_sin_swapped(*inputs: Tensor) -> Outputs:
    """grad_cos and grad_sin are returned in the wrong order."""
    outputs = right(*inputs)
    return outputs._replace(grad_cos=outputs.grad_sin, grad_sin=outputs.grad_cos)


def head_and_token_swapped(*inputs: Tensor) -> Outputs:
    """key_states is read as if laid out [B,N,H,D]."""
    x = Inputs(*inputs)
    batch, heads, tokens, head_dim = x.key_states.shape
    key = x.key_states.reshape(batch, tokens, heads, head_dim).transpose(1, 2)
    return right(*x._replace(key_states=key))


def batch_and_head_swapped(*inputs: Tensor) -> Outputs:
    """The grad caches are read as if heads were the outer axis: at h*B + b, not b*H + h."""
    x = Inputs(*inputs)
    batch, heads, rows, head_dim = x.grad_key_cache.shape
    key, value = (
        cache.reshape(heads, batch, rows, head_dim).transpose(0, 1).contiguous()
        for cache in (x.grad_key_cache, x.grad_value_cache)
    )
    return right(*x._replace(grad_key_cache=key, grad_value_cache=value))


# Which rows


def _arange(x: Inputs) -> Tensor:
    return torch.arange(len(x.cache_position), device=x.cache_position.device)


def _capacity(x: Inputs) -> int:
    return x.grad_key_cache.shape[2]


def positions_taken_for_arange(*inputs: Tensor) -> Outputs:
    """cache_position is taken to be 0, 1, 2, ..."""
    x = Inputs(*inputs)
    return with_rows_at(x, gathered=_arange(x), cleared=_arange(x))


def gathered_from_arange(*inputs: Tensor) -> Outputs:
    """Gradients are gathered from rows 0, 1, 2, ...; the right rows are zeroed."""
    x = Inputs(*inputs)
    return with_rows_at(x, gathered=_arange(x), cleared=x.cache_position)


def arange_zeroed(*inputs: Tensor) -> Outputs:
    """Rows 0, 1, 2, ... are zeroed; gradients are gathered from the right ones."""
    x = Inputs(*inputs)
    return with_rows_at(x, gathered=x.cache_position, cleared=_arange(x))


def positions_taken_for_ascending(*inputs: Tensor) -> Outputs:
    """The tokens are taken to lie in the cache in ascending order of their positions."""
    x = Inputs(*inputs)
    return with_rows_at(x, gathered=x.cache_position.sort().values, cleared=x.cache_position)


def positions_taken_for_a_run(*inputs: Tensor) -> Outputs:
    """The positions are taken to follow the first one without gaps, around the end if need be."""
    x = Inputs(*inputs)
    run = (x.cache_position[:1] + _arange(x)) % _capacity(x)
    return with_rows_at(x, gathered=run, cleared=run)


def positions_one_too_high(*inputs: Tensor) -> Outputs:
    """Gradients are gathered from the row behind each position."""
    x = Inputs(*inputs)
    behind = (x.cache_position + 1) % _capacity(x)
    return with_rows_at(x, gathered=behind, cleared=x.cache_position)


def positions_one_too_low(*inputs: Tensor) -> Outputs:
    """Gradients are gathered from the row before each position."""
    x = Inputs(*inputs)
    before = (x.cache_position - 1) % _capacity(x)
    return with_rows_at(x, gathered=before, cleared=x.cache_position)


def positions_modulo_half_the_capacity(*inputs: Tensor) -> Outputs:
    """Positions are taken modulo half the capacity, as in a sliding window."""
    x = Inputs(*inputs)
    window = x.cache_position % max(1, (_capacity(x) + 1) // 2)
    return with_rows_at(x, gathered=window, cleared=window)


def low_byte_of_the_positions(*inputs: Tensor) -> Outputs:
    """Only the low eight bits of a position are used."""
    x = Inputs(*inputs)
    low = x.cache_position & 0xFF
    return with_rows_at(x, gathered=low, cleared=low)


def positions_modulo_1024(*inputs: Tensor) -> Outputs:
    """Gradients are gathered from the positions modulo 1024."""
    x = Inputs(*inputs)
    return with_rows_at(x, gathered=x.cache_position % 1024, cleared=x.cache_position)


def first_position_for_all_tokens(*inputs: Tensor) -> Outputs:
    """All tokens get the gradient of the first position's row."""
    x = Inputs(*inputs)
    first = x.cache_position[:1].expand_as(x.cache_position)
    return with_rows_at(x, gathered=first, cleared=x.cache_position)


def positions_reversed(*inputs: Tensor) -> Outputs:
    """Gradients are gathered in reverse order of the tokens."""
    x = Inputs(*inputs)
    return with_rows_at(x, gathered=x.cache_position.flip(0), cleared=x.cache_position)


def last_token_left_zero(*inputs: Tensor) -> Outputs:
    """The last token is missing from the four gradients of the new tokens: its entries are zero."""
    outputs = right(*inputs)
    outputs.grad_key_states[:, :, -1] = 0
    outputs.grad_value_states[:, :, -1] = 0
    outputs.grad_cos[:, -1] = 0
    outputs.grad_sin[:, -1] = 0
    return outputs


def last_token_stale(*inputs: Tensor) -> Outputs:
    """The last token's gradients repeat those of the token before it."""
    x = Inputs(*inputs)
    outputs = right(*inputs)
    before = max(len(x.cache_position) - 2, 0)
    outputs.grad_key_states[:, :, -1] = outputs.grad_key_states[:, :, before]
    outputs.grad_value_states[:, :, -1] = outputs.grad_value_states[:, :, before]
    return outputs


def last_row_not_zeroed(*inputs: Tensor) -> Outputs:
    """The row of the last token is not zeroed."""
    x = Inputs(*inputs)
    return with_rows_at(x, gathered=x.cache_position, cleared=x.cache_position[:-1])


# The sum over heads


def head_zero_alone(*inputs: Tensor) -> Outputs:
    """grad_cos and grad_sin are those of head 0 alone."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, reduce=lambda t: t[:, 0].bfloat16()))


def last_head_alone(*inputs: Tensor) -> Outputs:
    """grad_cos and grad_sin are those of the last head alone: each head overwrites the others."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, reduce=lambda t: t[:, -1].bfloat16()))


def last_head_missing(*inputs: Tensor) -> Outputs:
    """grad_cos and grad_sin lack the last head."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, reduce=lambda t: sum_over_heads(t[:, :-1])))


def heads_averaged(*inputs: Tensor) -> Outputs:
    """grad_cos and grad_sin are means over the heads."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, reduce=lambda t: t.mean(1).bfloat16()))


def summed_over_the_batch_too(*inputs: Tensor) -> Outputs:
    """grad_cos and grad_sin are summed over the batch as well, as for tables of one row."""
    x = Inputs(*inputs)

    def reduce(products: Tensor) -> Tensor:
        return products.sum(dim=(0, 1)).bfloat16().expand_as(products[:, 0]).contiguous()

    return with_table_gradients(x, table_gradients(x, reduce=reduce))


def heads_misaligned(*inputs: Tensor) -> Outputs:
    """In grad_cos and grad_sin the gradient of a head meets the key of the head before it."""
    x = Inputs(*inputs)
    return with_table_gradients(
        x, table_gradients(x._replace(key_states=x.key_states.roll(1, dims=1)))
    )


def _running_sum_in_bf16(products: Tensor) -> Tensor:
    total = products[:, 0].bfloat16()
    for head in range(1, products.shape[1]):
        total = (total.float() + products[:, head]).bfloat16()
    return total


def _half_sums_in_bf16(products: Tensor) -> Tensor:
    half = products.shape[1] // 2
    first, second = products[:, :half].sum(1).bfloat16(), products[:, half:].sum(1).bfloat16()
    return (first.float() + second.float()).bfloat16()


def _tree_sum_in_bf16(products: Tensor) -> Tensor:
    level = [product.bfloat16() for product in products.unbind(1)]
    while len(level) > 1:
        pairs = [left + right for left, right in zip(level[0::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def heads_summed_in_bf16(*inputs: Tensor) -> Outputs:
    """The sum over heads is rounded to bfloat16 after every head."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, reduce=_running_sum_in_bf16))


def heads_summed_in_bf16_reversed(*inputs: Tensor) -> Outputs:
    """The sum over heads, last head first, is rounded to bfloat16 after every head."""
    x = Inputs(*inputs)
    return with_table_gradients(
        x, table_gradients(x, reduce=lambda t: _running_sum_in_bf16(t.flip(1)))
    )


def half_sums_of_heads_in_bf16(*inputs: Tensor) -> Outputs:
    """The sums over each half of the heads are rounded to bfloat16 before they are added."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, reduce=_half_sums_in_bf16))


def heads_summed_pairwise_in_bf16(*inputs: Tensor) -> Outputs:
    """The heads are added as a tree whose every node is rounded to bfloat16."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, reduce=_tree_sum_in_bf16))


# Zeroed and untouched rows


def rows_not_zeroed(*inputs: Tensor) -> Outputs:
    """Both grad caches are returned whole."""
    return with_caches(Inputs(*inputs), lambda cache, _: cache.clone())


def key_rows_not_zeroed(*inputs: Tensor) -> Outputs:
    """The grad key cache is returned whole."""
    x = Inputs(*inputs)
    return right(*inputs)._replace(grad_key_cache_input=x.grad_key_cache.clone())


def value_rows_not_zeroed(*inputs: Tensor) -> Outputs:
    """The grad value cache is returned whole."""
    x = Inputs(*inputs)
    return right(*inputs)._replace(grad_value_cache_input=x.grad_value_cache.clone())


def only_batch_zero_zeroed(*inputs: Tensor) -> Outputs:
    """Rows are zeroed in the first batch row only."""

    def zero(cache: Tensor, position: Tensor) -> Tensor:
        return torch.cat((zeroed(cache[:1], position), cache[1:]))

    return with_caches(Inputs(*inputs), zero)


def only_head_zero_zeroed(*inputs: Tensor) -> Outputs:
    """Rows are zeroed in the first head only."""

    def zero(cache: Tensor, position: Tensor) -> Tensor:
        return torch.cat((zeroed(cache[:, :1], position), cache[:, 1:]), dim=1)

    return with_caches(Inputs(*inputs), zero)


def next_rows_zeroed(*inputs: Tensor) -> Outputs:
    """The row behind each position is zeroed instead."""
    return with_caches(
        Inputs(*inputs), lambda cache, position: zeroed(cache, (position + 1) % cache.shape[2])
    )


def only_the_first_row_zeroed(*inputs: Tensor) -> Outputs:
    """Only the row of the first token is zeroed."""
    return with_caches(Inputs(*inputs), lambda cache, position: zeroed(cache, position[:1]))


def only_half_of_each_row_zeroed(*inputs: Tensor) -> Outputs:
    """Only the first half of each row is zeroed."""

    def zero(cache: Tensor, position: Tensor) -> Tensor:
        half = cache.shape[-1] // 2
        return torch.cat((zeroed(cache[..., :half], position), cache[..., half:]), dim=-1)

    return with_caches(Inputs(*inputs), zero)


def rows_between_positions_zeroed(*inputs: Tensor) -> Outputs:
    """All rows from the lowest to the highest position are zeroed."""

    def zero(cache: Tensor, position: Tensor) -> Tensor:
        between = torch.arange(int(position.min()), int(position.max()) + 1, device=cache.device)
        return zeroed(cache, between)

    return with_caches(Inputs(*inputs), zero)


def rows_from_the_first_position_zeroed(*inputs: Tensor) -> Outputs:
    """All rows from the first token's position on are zeroed."""

    def zero(cache: Tensor, position: Tensor) -> Tensor:
        result = zeroed(cache, position)
        result[:, :, int(position[0]) :] = 0
        return result

    return with_caches(Inputs(*inputs), zero)


def rows_zeroed_by_a_mask(*inputs: Tensor) -> Outputs:
    """Rows are zeroed by multiplication with 0, which keeps NaN and makes infinities NaN."""

    def zero(cache: Tensor, position: Tensor) -> Tensor:
        mask = torch.ones(cache.shape[2], 1, dtype=cache.dtype, device=cache.device)
        mask[position] = 0
        return cache * mask

    return with_caches(Inputs(*inputs), zero)


def rows_subtracted_from_themselves(*inputs: Tensor) -> Outputs:
    """Rows are zeroed by subtraction from themselves, which keeps NaN and makes infinities NaN."""

    def zero(cache: Tensor, position: Tensor) -> Tensor:
        result = cache.clone()
        result[:, :, position] -= cache[:, :, position]
        return result

    return with_caches(Inputs(*inputs), zero)


def every_row_zeroed(*inputs: Tensor) -> Outputs:
    """Both grad caches are zero everywhere."""
    return with_caches(Inputs(*inputs), lambda cache, _: torch.zeros_like(cache))


def cache_shifted_by_a_row(*inputs: Tensor) -> Outputs:
    """The returned grad key cache is shifted down by a row, the last row to the front."""
    outputs = right(*inputs)
    return outputs._replace(grad_key_cache_input=outputs.grad_key_cache_input.roll(1, dims=2))


def all_zeros(*inputs: Tensor) -> Outputs:
    """All outputs are zero."""
    return Outputs(*(torch.zeros_like(output) for output in right(*inputs)))


def table_gradients_zero(*inputs: Tensor) -> Outputs:
    """grad_cos and grad_sin are zero: the tables are taken for constants."""
    x = Inputs(*inputs)
    return with_table_gradients(x, (torch.zeros_like(x.cos), torch.zeros_like(x.sin)))


def key_gradient_zero(*inputs: Tensor) -> Outputs:
    """grad_key_states is zero."""
    x = Inputs(*inputs)
    return with_key_gradient(x, torch.zeros_like(x.key_states))


def copies_of_the_inputs(*inputs: Tensor) -> Outputs:
    """Every output is a copy of an input of its shape."""
    x = Inputs(*inputs)
    return Outputs(
        x.key_states.clone(),
        x.key_states.clone(),
        x.cos.clone(),
        x.sin.clone(),
        x.grad_key_cache.clone(),
        x.grad_value_cache.clone(),
    )


# Faults of some elements only


def one_copied_element_in_a_large_case(*inputs: Tensor) -> Outputs:
    """One element of the grad key cache is wrong, if it has 2^20 elements or more."""
    outputs = right(*inputs)
    if outputs.grad_key_cache_input.numel() >= LARGE:
        faults.flip_a_bit(outputs.grad_key_cache_input, (-1, 0, -1, 1))
    return outputs


def one_key_gradient_in_a_large_case(*inputs: Tensor) -> Outputs:
    """One element of grad_key_states is wrong, if the cache has 2^20 elements or more."""
    x = Inputs(*inputs)
    outputs = right(*inputs)
    if x.grad_key_cache.numel() >= LARGE:
        faults.flip_a_bit(outputs.grad_key_states, (0, -1, -1, 1))
    return outputs


def batches_from_16_with_tables_of_16_before(*inputs: Tensor) -> Outputs:
    """Batch row b is unrotated by the tables of row b modulo 16."""
    x = Inputs(*inputs)
    row = torch.arange(x.cos.shape[0], device=x.cos.device) % 16
    return right(*x._replace(cos=x.cos[row], sin=x.sin[row]))


def batches_from_16_zero(*inputs: Tensor) -> Outputs:
    """Batch rows from 16 on of the gradients of the new tokens are left zero."""
    outputs = right(*inputs)
    for output in outputs[:4]:
        output[16:] = 0
    return outputs


def rows_from_1024_lost(*inputs: Tensor) -> Outputs:
    """Rows from 1024 on are left zero in the returned caches."""
    outputs = right(*inputs)
    outputs.grad_key_cache_input[:, :, 1024:] = 0
    outputs.grad_value_cache_input[:, :, 1024:] = 0
    return outputs


def rows_from_1024_not_zeroed(*inputs: Tensor) -> Outputs:
    """Positions of 1024 and more are not zeroed."""
    return with_caches(
        Inputs(*inputs), lambda cache, position: zeroed(cache, position[position < 1024])
    )


def partial_token_block_missing(*inputs: Tensor) -> Outputs:
    """Of more than 16 tokens, those past the last full block of 16 get no key gradient."""
    x = Inputs(*inputs)
    outputs = right(*inputs)
    tokens = len(x.cache_position)
    if tokens > 16:
        outputs.grad_key_states[:, :, tokens - tokens % 16 :] = 0
    return outputs


def partial_row_block_missing(*inputs: Tensor) -> Outputs:
    """Of more than 64 rows, those past the last full block of 64 are left zero."""
    outputs = right(*inputs)
    rows = outputs.grad_value_cache_input.shape[2]
    if rows > 64:
        outputs.grad_value_cache_input[:, :, rows - rows % 64 :] = 0
    return outputs


def last_head_not_unrotated(*inputs: Tensor) -> Outputs:
    """The last head of grad_key_states is the gathered gradient as it came."""
    outputs = right(*inputs)
    outputs.grad_key_states[:, -1] = gradient_of_new_keys(Inputs(*inputs))[:, -1]
    return outputs


def last_token_not_unrotated(*inputs: Tensor) -> Outputs:
    """The last token of grad_key_states is the gathered gradient as it came."""
    outputs = right(*inputs)
    outputs.grad_key_states[:, :, -1] = gradient_of_new_keys(Inputs(*inputs))[:, :, -1]
    return outputs


def last_element_wrong(*inputs: Tensor) -> Outputs:
    """The very last element of grad_value_cache_input is wrong."""
    outputs = right(*inputs)
    faults.flip_a_bit(outputs.grad_value_cache_input, (-1, -1, -1, -1))
    return outputs


def last_element_of_grad_cos_wrong(*inputs: Tensor) -> Outputs:
    """The very last element of grad_cos is wrong."""
    outputs = right(*inputs)
    faults.flip_a_bit(outputs.grad_cos, (-1, -1, -1))
    return outputs


def nan_in_the_last_row(*inputs: Tensor) -> Outputs:
    """One element of the last row of grad_key_cache_input is NaN."""
    outputs = right(*inputs)
    outputs.grad_key_cache_input[-1, -1, -1, 0] = torch.nan
    return outputs


# Copies


def _copied_by(copy: Callable[[Tensor], Tensor], inputs: tuple[Tensor, ...]) -> Outputs:
    x = Inputs(*inputs)
    outputs = with_caches(x, lambda cache, position: zeroed(copy(cache), position))
    return outputs._replace(grad_value_states=copy(outputs.grad_value_states))


def copies_with_nan_as_zero(*inputs: Tensor) -> Outputs:
    """Copies turn NaN into zero."""
    return _copied_by(faults.with_nan_as_zero, inputs)


def copies_with_canonical_nan(*inputs: Tensor) -> Outputs:
    """Copies lose sign and payload of NaN."""
    return _copied_by(faults.with_canonical_nan, inputs)


def copies_through_fp32(*inputs: Tensor) -> Outputs:
    """Copies go through float32 and are rounded back, which loses the payload of NaN."""
    return _copied_by(faults.through_fp32, inputs)


def copies_through_fp16(*inputs: Tensor) -> Outputs:
    """Copies go through float16."""
    return _copied_by(faults.through_fp16, inputs)


def copies_without_subnormals(*inputs: Tensor) -> Outputs:
    """Copies flush subnormals to zero."""
    return _copied_by(faults.without_subnormals, inputs)


def copies_without_negative_zero(*inputs: Tensor) -> Outputs:
    """Copies turn -0.0 into 0.0."""
    return _copied_by(faults.without_negative_zero, inputs)


def copies_with_finite_bounds(*inputs: Tensor) -> Outputs:
    """Copies turn infinities into the largest finite number."""
    return _copied_by(faults.with_finite_bounds, inputs)


def copies_without_the_last_bit(*inputs: Tensor) -> Outputs:
    """Copies lose the lowest bit of the significand."""
    return _copied_by(faults.without_last_bit, inputs)


def value_gradient_without_the_last_bit(*inputs: Tensor) -> Outputs:
    """grad_value_states loses the lowest bit of the significand; the caches are copied rightly."""
    outputs = right(*inputs)
    return outputs._replace(grad_value_states=faults.without_last_bit(outputs.grad_value_states))


# Arithmetic and rounding


def key_gradient_truncated(*inputs: Tensor) -> Outputs:
    """grad_key_states is truncated toward zero by dropping the low half of the float32 pattern."""
    x = Inputs(*inputs)
    return with_key_gradient(x, key_gradient(x, store=faults.toward_zero))


def table_gradients_truncated(*inputs: Tensor) -> Outputs:
    """grad_cos and grad_sin are truncated toward zero."""
    x = Inputs(*inputs)
    return with_table_gradients(
        x, table_gradients(x, reduce=lambda t: faults.toward_zero(t.sum(1)))
    )


def key_gradient_rounded_away_from_zero(*inputs: Tensor) -> Outputs:
    """grad_key_states is rounded away from zero."""
    x = Inputs(*inputs)
    return with_key_gradient(x, key_gradient(x, store=faults.away_from_zero))


def key_gradient_ties_rounded_away(*inputs: Tensor) -> Outputs:
    """grad_key_states is rounded to nearest, but ties away from zero instead of to even."""
    x = Inputs(*inputs)
    return with_key_gradient(x, key_gradient(x, store=faults.ties_away))


def table_gradients_ties_rounded_away(*inputs: Tensor) -> Outputs:
    """grad_cos and grad_sin are rounded to nearest, but ties away from zero."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, reduce=lambda t: faults.ties_away(t.sum(1))))


def head_products_in_fp16(*inputs: Tensor) -> Outputs:
    """The products under the sum over heads are rounded to float16."""
    x = Inputs(*inputs)
    return with_table_gradients(
        x, table_gradients(x, reduce=lambda t: sum_over_heads(t.half().float()))
    )


def key_gradient_products_in_fp16(*inputs: Tensor) -> Outputs:
    """The two products of grad_key_states are rounded to float16."""
    x = Inputs(*inputs)
    gradient = gradient_of_new_keys(x)
    cos, sin = x.cos.float()[:, None], x.sin.float()[:, None]
    cos_term, sin_term = (gradient * cos).half(), rotate_half_transposed(gradient * sin).half()
    return with_key_gradient(x, faults.nearest(cos_term.float() + sin_term.float()))


def key_gradient_scaled(*inputs: Tensor) -> Outputs:
    """grad_key_states is too large by the factor 1 + 2^-7."""
    x = Inputs(*inputs)
    return with_key_gradient(x, key_gradient(x, store=faults.scaled))


def table_gradients_scaled(*inputs: Tensor) -> Outputs:
    """grad_cos and grad_sin are too large by the factor 1 + 2^-7."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, reduce=lambda t: faults.scaled(t.sum(1))))


def key_gradient_flushed(*inputs: Tensor) -> Outputs:
    """Subnormal results in grad_key_states are flushed to zero."""
    x = Inputs(*inputs)
    return with_key_gradient(x, key_gradient(x, store=faults.flushed))


def table_gradients_flushed(*inputs: Tensor) -> Outputs:
    """Subnormal results in grad_cos and grad_sin are flushed to zero."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, reduce=lambda t: faults.flushed(t.sum(1))))


def results_clamped(*inputs: Tensor) -> Outputs:
    """Infinite results in grad_key_states become the largest finite number."""
    x = Inputs(*inputs)
    return with_key_gradient(x, key_gradient(x, store=faults.clamped))


def results_without_nan(*inputs: Tensor) -> Outputs:
    """NaN results in grad_key_states become zero."""
    x = Inputs(*inputs)
    return with_key_gradient(x, key_gradient(x, store=faults.without_nan))


def table_gradients_without_nan(*inputs: Tensor) -> Outputs:
    """NaN products are left out of the sums over heads."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, reduce=lambda t: t.nansum(dim=1).bfloat16()))


def terms_with_a_zero_table_skipped(*inputs: Tensor) -> Outputs:
    """A term whose table entry is zero is skipped, though infinity times zero is NaN."""
    x = Inputs(*inputs)
    gradient = gradient_of_new_keys(x)
    cos, sin = x.cos.float()[:, None], x.sin.float()[:, None]
    cos_term = torch.where(cos == 0, 0.0, gradient * cos)
    sin_term = torch.where(sin == 0, 0.0, gradient * sin)
    return with_key_gradient(x, faults.nearest(cos_term + rotate_half_transposed(sin_term)))


def small_heads_skipped(*inputs: Tensor) -> Outputs:
    """Products below 2^-6 of the largest one are left out of the sums over heads."""
    x = Inputs(*inputs)

    def reduce(products: Tensor) -> Tensor:
        largest = products.abs().amax(dim=1, keepdim=True)
        return sum_over_heads(torch.where(products.abs() < 2.0**-6 * largest, 0.0, products))

    return with_table_gradients(x, table_gradients(x, reduce=reduce))


def small_rest_lost_when_terms_cancel(*inputs: Tensor) -> Outputs:
    """A sum over heads below 2^-6 of its largest product is taken to be zero."""
    x = Inputs(*inputs)

    def reduce(products: Tensor) -> Tensor:
        total = products.sum(dim=1)
        cancels = total.abs() < 2.0**-6 * products.abs().amax(dim=1)
        return torch.where(cancels, 0.0, total).bfloat16()

    return with_table_gradients(x, table_gradients(x, reduce=reduce))


# Shape, dtype, layout and memory of the outputs


def grad_cos_with_a_head_axis(*inputs: Tensor) -> Outputs:
    """grad_cos has shape [B,1,N,D]."""
    outputs = right(*inputs)
    return outputs._replace(grad_cos=outputs.grad_cos[:, None])


def tables_broadcast_over_the_batch(*inputs: Tensor) -> Outputs:
    """grad_cos and grad_sin have shape [1,N,D], which would broadcast."""
    outputs = right(*inputs)
    return outputs._replace(grad_cos=outputs.grad_cos[:1], grad_sin=outputs.grad_sin[:1])


def grad_cos_broadcast_over_the_batch(*inputs: Tensor) -> Outputs:
    """grad_cos has shape [N,D], which would broadcast."""
    outputs = right(*inputs)
    return outputs._replace(grad_cos=outputs.grad_cos[0])


def key_gradient_broadcast_over_heads(*inputs: Tensor) -> Outputs:
    """grad_key_states has shape [B,1,N,D], which would broadcast."""
    outputs = right(*inputs)
    return outputs._replace(grad_key_states=outputs.grad_key_states[:, :1].contiguous())


def table_gradients_not_summed(*inputs: Tensor) -> Outputs:
    """grad_cos and grad_sin keep the head axis: [B,H,N,D]."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, reduce=lambda t: t.bfloat16()))


def table_gradients_in_float32(*inputs: Tensor) -> Outputs:
    """grad_cos and grad_sin are float32, as they were accumulated."""
    x = Inputs(*inputs)
    return with_table_gradients(x, table_gradients(x, reduce=lambda t: t.sum(dim=1)))


def key_gradient_in_float16(*inputs: Tensor) -> Outputs:
    """grad_key_states is float16."""
    outputs = right(*inputs)
    return outputs._replace(grad_key_states=outputs.grad_key_states.half())


def key_gradient_transposed_in_memory(*inputs: Tensor) -> Outputs:
    """grad_key_states is laid out [B,N,H,D] in memory, so it is not contiguous."""
    outputs = right(*inputs)
    transposed = outputs.grad_key_states.transpose(1, 2).contiguous().transpose(1, 2)
    return outputs._replace(grad_key_states=transposed)


def grad_cos_cut_from_wider_rows(*inputs: Tensor) -> Outputs:
    """grad_cos is cut from rows of twice the length, so it is not contiguous."""
    outputs = right(*inputs)
    wide = torch.cat((outputs.grad_cos, outputs.grad_sin), dim=-1)
    return outputs._replace(grad_cos=wide.chunk(2, dim=-1)[0])


def grad_sin_never_written(*inputs: Tensor) -> Outputs:
    """grad_sin is allocated and never written."""
    outputs = right(*inputs)
    return outputs._replace(grad_sin=torch.empty_like(outputs.grad_sin))


def zeroed_rows_never_written(*inputs: Tensor) -> Outputs:
    """The rows to be zeroed are left unwritten in freshly allocated memory."""

    def zero(cache: Tensor, position: Tensor) -> Tensor:
        untouched = torch.ones(cache.shape[2], dtype=torch.bool, device=cache.device)
        untouched[position] = False
        result = torch.empty_like(cache)
        result[:, :, untouched] = cache[:, :, untouched]
        return result

    return with_caches(Inputs(*inputs), zero)


def rows_zeroed_in_place(*inputs: Tensor) -> Outputs:
    """The rows are zeroed in the grad caches given, which are returned themselves."""
    x = Inputs(*inputs)
    outputs = right(*inputs)
    for cache in (x.grad_key_cache, x.grad_value_cache):
        cache[:, :, x.cache_position] = 0
    return outputs._replace(
        grad_key_cache_input=x.grad_key_cache, grad_value_cache_input=x.grad_value_cache
    )


def rows_zeroed_in_place_then_copied(*inputs: Tensor) -> Outputs:
    """The result is right, but the rows are zeroed in the grad key cache given as well."""
    x = Inputs(*inputs)
    outputs = right(*inputs)
    x.grad_key_cache[:, :, x.cache_position] = 0
    return outputs


def key_rotated_in_place(*inputs: Tensor) -> Outputs:
    """The result is right, but key_states is rotated by half a head_dim afterwards."""
    x = Inputs(*inputs)
    outputs = right(*inputs)
    x.key_states.copy_(rotate_half(x.key_states))
    return outputs


def positions_sorted_in_place(*inputs: Tensor) -> Outputs:
    """The result is right, but cache_position is sorted afterwards."""
    x = Inputs(*inputs)
    outputs = right(*inputs)
    x.cache_position.copy_(x.cache_position.sort().values)
    return outputs


def value_cache_returned_itself(*inputs: Tensor) -> Outputs:
    """grad_value_cache itself is returned, without a copy and without zeroed rows."""
    x = Inputs(*inputs)
    return right(*inputs)._replace(grad_value_cache_input=x.grad_value_cache)


def value_gradient_is_the_cache_when_every_row_is_new(*inputs: Tensor) -> Outputs:
    """Where tokens fill the cache in order, grad_value_cache itself is grad_value_states."""
    x = Inputs(*inputs)
    if _capacity(x) == len(x.cache_position) and torch.equal(x.cache_position, _arange(x)):
        return right(*inputs)._replace(grad_value_states=x.grad_value_cache)
    return right(*inputs)


def value_gradient_is_a_view_of_a_run(*inputs: Tensor) -> Outputs:
    """Where positions are consecutive, grad_value_states is a view of grad_value_cache."""
    x = Inputs(*inputs)
    first = int(x.cache_position[0])
    if torch.equal(x.cache_position, first + _arange(x)):
        run = x.grad_value_cache[:, :, first : first + len(x.cache_position)]
        return right(*inputs)._replace(grad_value_states=run)
    return right(*inputs)


def one_tensor_twice(*inputs: Tensor) -> Outputs:
    """grad_cos is returned as grad_sin too, the same tensor."""
    outputs = right(*inputs)
    return outputs._replace(grad_sin=outputs.grad_cos)


_BUFFERS: dict[tuple[object, ...], Tensor] = {}


def one_buffer_for_all_calls(*inputs: Tensor) -> Outputs:
    """grad_cos of every call lies in one buffer, which the next call overwrites."""
    outputs = right(*inputs)
    grad_cos = outputs.grad_cos
    buffer = _BUFFERS.setdefault((grad_cos.shape, grad_cos.device), torch.empty_like(grad_cos))
    return outputs._replace(grad_cos=buffer.copy_(grad_cos))


_ANSWERS: dict[tuple[object, ...], Outputs] = {}


def answer_remembered_by_shape(*inputs: Tensor) -> Outputs:
    """The answer to the first call with inputs of these shapes is given to all later ones."""
    key = ("shape", *(tensor.shape for tensor in inputs), inputs[0].device)
    return _ANSWERS.setdefault(key, right(*inputs))


def answer_remembered_by_address(*inputs: Tensor) -> Outputs:
    """The answer to the first call with inputs at these addresses is given to all later ones."""
    key = ("address", *((tensor.shape, tensor.data_ptr()) for tensor in inputs))
    return _ANSWERS.setdefault(key, right(*inputs))


def caches_missing(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Only the first four outputs are returned."""
    return right(*inputs)[:4]


def bare_key_gradient(*inputs: Tensor) -> Tensor:
    """Only grad_key_states is returned, as a tensor."""
    return right(*inputs).grad_key_states


def one_output_too_many(*inputs: Tensor) -> tuple[Tensor, ...]:
    """The gathered gradient is returned as a seventh output."""
    return *right(*inputs), gradient_of_new_keys(Inputs(*inputs)).bfloat16()


def table_gradients_are_none(*inputs: Tensor) -> tuple[Tensor | None, ...]:
    """grad_cos and grad_sin are None."""
    outputs = right(*inputs)
    return *outputs[:2], None, None, *outputs[4:]


def nothing_returned(*inputs: Tensor) -> None:
    """The outputs are computed and not returned."""
    right(*inputs)


# Style "out": the six output tensors follow the inputs


def _split(tensors: tuple[Tensor, ...]) -> tuple[Inputs, Outputs]:
    return Inputs(*tensors[:6]), Outputs(*tensors[6:])


def _write(outputs: Outputs, results: Outputs) -> None:
    for output, result in zip(outputs, results, strict=True):
        output.copy_(result)


def heads_averaged_out(*tensors: Tensor) -> None:
    """grad_cos and grad_sin are means over the heads."""
    x, outputs = _split(tensors)
    _write(outputs, heads_averaged(*x))


def grad_sin_never_written_out(*tensors: Tensor) -> None:
    """grad_sin is never written."""
    x, outputs = _split(tensors)
    _write(outputs, right(*x)._replace(grad_sin=outputs.grad_sin.clone()))


def zeroed_rows_never_written_out(*tensors: Tensor) -> None:
    """The rows to be zeroed are never written: the outputs are taken to be zero before."""
    x, outputs = _split(tensors)
    results = right(*x)
    for output, result in zip(outputs[:4], results[:4], strict=True):
        output.copy_(result)
    untouched = torch.ones(_capacity(x), dtype=torch.bool, device=x.cache_position.device)
    untouched[x.cache_position] = False
    for output, result in zip(outputs[4:], results[4:], strict=True):
        output[:, :, untouched] = result[:, :, untouched]


def table_gradients_added_out(*tensors: Tensor) -> None:
    """grad_cos and grad_sin are added to the outputs, which are taken to be zero before."""
    x, outputs = _split(tensors)
    results = right(*x)
    _write(
        outputs,
        results._replace(
            grad_cos=outputs.grad_cos + results.grad_cos,
            grad_sin=outputs.grad_sin + results.grad_sin,
        ),
    )


def results_returned_out(*tensors: Tensor) -> Outputs:
    """Results are returned, and the outputs given are never written."""
    x, _ = _split(tensors)
    return right(*x)


def written_past_the_end_out(*tensors: Tensor) -> None:
    """64 elements behind grad_cos are overwritten with zeros."""
    x, outputs = _split(tensors)
    _write(outputs, right(*x))
    faults.clear_behind(outputs.grad_cos)


def rows_zeroed_in_place_out(*tensors: Tensor) -> None:
    """The result is right, but the rows are zeroed in the grad key cache given as well."""
    x, outputs = _split(tensors)
    _write(outputs, rows_zeroed_in_place_then_copied(*x))


WRONG: tuple[WrongKernel, ...] = (
    WrongKernel(interleaved_pairs, c.ANY),
    WrongKernel(interleaved_pairs_and_tables, c.ANY),
    WrongKernel(interleaved_pairs_in_grad_sin, c.ANY),
    WrongKernel(forward_rotation, c.ANY),
    WrongKernel(minus_missing, c.ANY),
    WrongKernel(minus_missing_in_grad_sin, c.ANY),
    WrongKernel(grad_sin_with_the_wrong_sign, c.ANY),
    WrongKernel(grad_sin_without_rotation, c.ANY),
    WrongKernel(grad_sin_with_the_gradient_rotated, c.ANY),
    WrongKernel(sin_multiplied_after_the_rotation, c.UNPAIRED_TABLES),
    WrongKernel(cos_and_sin_swapped, c.ANY),
    WrongKernel(key_gradient_not_unrotated, c.ANY),
    WrongKernel(cos_term_only, c.ANY),
    WrongKernel(sin_term_only, c.ANY),
    WrongKernel(value_gradient_unrotated_as_well, c.ANY),
    WrongKernel(tables_of_batch_zero, c.TWO_BATCHES),
    WrongKernel(cos_of_batch_zero, c.TWO_BATCHES),
    WrongKernel(sin_of_batch_zero, c.TWO_BATCHES),
    WrongKernel(tables_of_the_first_token, c.TWO_TOKENS),
    WrongKernel(first_half_of_the_tables, c.UNPAIRED_TABLES),
    WrongKernel(second_half_of_the_tables, c.UNPAIRED_TABLES),
    WrongKernel(first_half_of_sin, c.UNPAIRED_TABLES),
    WrongKernel(table_gradients_shared_by_both_halves, c.ANY),
    WrongKernel(cache_gradients_swapped, c.ANY),
    WrongKernel(key_and_value_gradients_swapped, c.ANY),
    WrongKernel(returned_caches_swapped, c.UNTOUCHED_ROWS),
    WrongKernel(grad_cos_and_grad_sin_swapped, c.ANY),
    WrongKernel(head_and_token_swapped, c.HEADS_AND_TOKENS),
    WrongKernel(batch_and_head_swapped, c.TWO_BATCHES_AND_HEADS),
    WrongKernel(positions_taken_for_arange, c.POSITIONS_NOT_ARANGE),
    WrongKernel(gathered_from_arange, c.POSITIONS_NOT_ARANGE),
    WrongKernel(arange_zeroed, c.POSITIONS_NOT_ARANGE),
    WrongKernel(positions_taken_for_ascending, c.POSITIONS_NOT_ASCENDING),
    WrongKernel(positions_taken_for_a_run, c.POSITIONS_WITH_GAPS),
    WrongKernel(positions_one_too_high, c.TWO_ROWS),
    WrongKernel(positions_one_too_low, c.TWO_ROWS),
    WrongKernel(positions_modulo_half_the_capacity, c.POSITIONS_PAST_HALF),
    WrongKernel(low_byte_of_the_positions, c.POSITIONS_FROM_256),
    WrongKernel(positions_modulo_1024, c.POSITIONS_FROM_1024),
    WrongKernel(first_position_for_all_tokens, c.TWO_TOKENS),
    WrongKernel(positions_reversed, c.TWO_TOKENS),
    WrongKernel(last_token_left_zero, c.ANY),
    WrongKernel(last_token_stale, c.TWO_TOKENS),
    WrongKernel(last_row_not_zeroed, c.ANY),
    WrongKernel(head_zero_alone, c.TWO_HEADS),
    WrongKernel(last_head_alone, c.TWO_HEADS),
    WrongKernel(last_head_missing, c.ANY),
    WrongKernel(heads_averaged, c.TWO_HEADS),
    WrongKernel(summed_over_the_batch_too, c.TWO_BATCHES),
    WrongKernel(heads_misaligned, c.TWO_HEADS),
    WrongKernel(heads_summed_in_bf16, c.THREE_HEADS, c.INACCURATE),
    WrongKernel(heads_summed_in_bf16_reversed, c.THREE_HEADS, c.INACCURATE),
    WrongKernel(half_sums_of_heads_in_bf16, c.FOUR_HEADS, c.INACCURATE),
    WrongKernel(heads_summed_pairwise_in_bf16, c.THREE_HEADS, c.INACCURATE),
    WrongKernel(rows_not_zeroed, c.ANY),
    WrongKernel(key_rows_not_zeroed, c.ANY),
    WrongKernel(value_rows_not_zeroed, c.ANY),
    WrongKernel(only_batch_zero_zeroed, c.TWO_BATCHES),
    WrongKernel(only_head_zero_zeroed, c.TWO_HEADS),
    WrongKernel(next_rows_zeroed, c.UNTOUCHED_ROWS),
    WrongKernel(only_the_first_row_zeroed, c.TWO_TOKENS),
    WrongKernel(only_half_of_each_row_zeroed, c.ANY),
    WrongKernel(rows_between_positions_zeroed, c.POSITIONS_WITH_GAPS),
    WrongKernel(rows_from_the_first_position_zeroed, c.ROWS_BEHIND_THE_FIRST_POSITION),
    WrongKernel(rows_zeroed_by_a_mask, c.ZEROED_NON_FINITE),
    WrongKernel(rows_subtracted_from_themselves, c.ZEROED_NON_FINITE),
    WrongKernel(every_row_zeroed, c.UNTOUCHED_ROWS),
    WrongKernel(cache_shifted_by_a_row, c.UNTOUCHED_ROWS),
    WrongKernel(all_zeros, c.ANY),
    WrongKernel(table_gradients_zero, c.ANY),
    WrongKernel(key_gradient_zero, c.ANY),
    WrongKernel(copies_of_the_inputs, c.ANY),
    WrongKernel(one_copied_element_in_a_large_case, c.LARGE),
    WrongKernel(one_key_gradient_in_a_large_case, c.LARGE),
    WrongKernel(batches_from_16_with_tables_of_16_before, c.BATCHES_FROM_16),
    WrongKernel(batches_from_16_zero, c.BATCHES_FROM_16),
    WrongKernel(rows_from_1024_lost, c.ROWS_FROM_1024),
    WrongKernel(rows_from_1024_not_zeroed, c.POSITIONS_FROM_1024),
    WrongKernel(partial_token_block_missing, c.PARTIAL_TOKEN_BLOCK),
    WrongKernel(partial_row_block_missing, c.PARTIAL_ROW_BLOCK),
    WrongKernel(last_head_not_unrotated, c.ANY),
    WrongKernel(last_token_not_unrotated, c.ANY),
    WrongKernel(last_element_wrong, c.ANY),
    WrongKernel(last_element_of_grad_cos_wrong, c.ANY),
    WrongKernel(nan_in_the_last_row, c.ANY),
    WrongKernel(copies_with_nan_as_zero, c.COPIED_NAN),
    WrongKernel(copies_with_canonical_nan, c.COPIED_NAN_PAYLOAD),
    WrongKernel(copies_through_fp32, c.COPIED_NAN_PAYLOAD),
    WrongKernel(copies_through_fp16, c.COPIED_OUTSIDE_FP16),
    WrongKernel(copies_without_subnormals, c.COPIED_SUBNORMAL),
    WrongKernel(copies_without_negative_zero, c.COPIED_NEGATIVE_ZERO),
    WrongKernel(copies_with_finite_bounds, c.COPIED_INFINITY),
    WrongKernel(copies_without_the_last_bit, c.ANY),
    WrongKernel(value_gradient_without_the_last_bit, c.ANY),
    WrongKernel(key_gradient_truncated, c.ANY, c.INACCURATE),
    WrongKernel(table_gradients_truncated, c.ANY, c.INACCURATE),
    WrongKernel(key_gradient_rounded_away_from_zero, c.ANY, c.INACCURATE),
    WrongKernel(key_gradient_ties_rounded_away, c.TIES, c.INACCURATE),
    WrongKernel(table_gradients_ties_rounded_away, c.TIES, c.INACCURATE),
    WrongKernel(head_products_in_fp16, c.PRODUCTS_OUTSIDE_FP16),
    WrongKernel(key_gradient_products_in_fp16, c.PRODUCTS_OUTSIDE_FP16),
    WrongKernel(key_gradient_scaled, c.ANY),
    WrongKernel(table_gradients_scaled, c.ANY, c.INACCURATE),
    WrongKernel(key_gradient_flushed, c.SUBNORMAL_RESULTS),
    WrongKernel(table_gradients_flushed, c.SUBNORMAL_RESULTS),
    WrongKernel(results_clamped, c.COMPUTED_INFINITY),
    WrongKernel(results_without_nan, c.COMPUTED_NAN),
    WrongKernel(table_gradients_without_nan, c.COMPUTED_NAN),
    WrongKernel(terms_with_a_zero_table_skipped, c.ZERO_TIMES_INFINITY),
    WrongKernel(small_heads_skipped, c.CANCELLATION, c.INACCURATE),
    WrongKernel(small_rest_lost_when_terms_cancel, c.CANCELLATION, c.INACCURATE),
    WrongKernel(grad_cos_with_a_head_axis, c.ANY, c.WRONG_SHAPE),
    WrongKernel(tables_broadcast_over_the_batch, c.TWO_BATCHES, c.WRONG_SHAPE),
    WrongKernel(grad_cos_broadcast_over_the_batch, c.ANY, c.WRONG_SHAPE),
    WrongKernel(key_gradient_broadcast_over_heads, c.TWO_HEADS, c.WRONG_SHAPE),
    WrongKernel(table_gradients_not_summed, c.ANY, c.WRONG_SHAPE),
    WrongKernel(table_gradients_in_float32, c.ANY, c.WRONG_DTYPE),
    WrongKernel(key_gradient_in_float16, c.ANY, c.WRONG_DTYPE),
    WrongKernel(key_gradient_transposed_in_memory, c.HEADS_AND_TOKENS, c.WRONG_LAYOUT),
    WrongKernel(grad_cos_cut_from_wider_rows, c.TWO_TABLE_ROWS, c.WRONG_LAYOUT),
    WrongKernel(grad_sin_never_written, c.ANY, c.CALL_OR_VALUES, (c.UNINITIALISED_OUTPUT,)),
    WrongKernel(zeroed_rows_never_written, c.ANY, c.CALL_OR_VALUES, (c.UNINITIALISED_OUTPUT,)),
    WrongKernel(
        rows_zeroed_in_place,
        c.ANY,
        c.CALL_VIOLATION,
        (c.INPUT_MUTATED, c.OUTPUT_ALIASES_INPUT),
    ),
    WrongKernel(rows_zeroed_in_place_then_copied, c.ANY, c.CALL_VIOLATION, (c.INPUT_MUTATED,)),
    WrongKernel(key_rotated_in_place, c.ANY, c.CALL_VIOLATION, (c.INPUT_MUTATED,)),
    WrongKernel(
        positions_sorted_in_place,
        c.POSITIONS_NOT_ASCENDING,
        c.CALL_VIOLATION,
        (c.INPUT_MUTATED,),
    ),
    WrongKernel(value_cache_returned_itself, c.ANY, c.CALL_VIOLATION, (c.OUTPUT_ALIASES_INPUT,)),
    WrongKernel(
        value_gradient_is_the_cache_when_every_row_is_new,
        c.EVERY_ROW_NEW,
        c.CALL_VIOLATION,
        (c.OUTPUT_ALIASES_INPUT,),
    ),
    WrongKernel(
        value_gradient_is_a_view_of_a_run,
        c.POSITIONS_IN_A_RUN,
        c.CALL_VIOLATION,
        (c.OUTPUT_ALIASES_INPUT,),
    ),
    WrongKernel(one_tensor_twice, c.ANY, c.CALL_OR_VALUES, (c.OUTPUT_ALIASES_OUTPUT,)),
    WrongKernel(
        one_buffer_for_all_calls,
        c.TWO_CALLS,
        c.CALL_VIOLATION,
        (c.OUTPUT_ALIASES_EARLIER_OUTPUT, c.EARLIER_OUTPUT_CHANGED),
    ),
    WrongKernel(
        answer_remembered_by_shape,
        c.TWO_CALLS,
        c.CALL_OR_VALUES,
        (c.STALE_ANSWER, c.OUTPUT_ALIASES_EARLIER_OUTPUT),
    ),
    WrongKernel(
        answer_remembered_by_address,
        c.SAME_MEMORY_TWICE,
        c.CALL_OR_VALUES,
        (c.STALE_ANSWER, c.OUTPUT_ALIASES_EARLIER_OUTPUT),
    ),
    WrongKernel(caches_missing, c.ANY, c.CALL_VIOLATION, (c.WRONG_OUTPUT_COUNT,)),
    WrongKernel(bare_key_gradient, c.ANY, c.CALL_VIOLATION, (c.WRONG_OUTPUT_COUNT,)),
    WrongKernel(one_output_too_many, c.ANY, c.CALL_VIOLATION, (c.WRONG_OUTPUT_COUNT,)),
    WrongKernel(table_gradients_are_none, c.ANY, c.CALL_VIOLATION, (c.WRONG_RETURN_TYPE,)),
    WrongKernel(nothing_returned, c.ANY, c.CALL_VIOLATION, (c.WRONG_RETURN_TYPE,)),
    WrongKernel(heads_averaged_out, c.TWO_HEADS, style="out"),
    WrongKernel(
        grad_sin_never_written_out,
        c.ANY,
        c.CALL_OR_VALUES,
        (c.UNINITIALISED_OUTPUT,),
        style="out",
    ),
    WrongKernel(
        zeroed_rows_never_written_out,
        c.ANY,
        c.CALL_OR_VALUES,
        (c.UNINITIALISED_OUTPUT,),
        style="out",
    ),
    WrongKernel(
        table_gradients_added_out,
        c.ANY,
        c.CALL_OR_VALUES,
        (c.UNINITIALISED_OUTPUT,),
        style="out",
    ),
    WrongKernel(
        results_returned_out,
        c.ANY,
        c.CALL_VIOLATION,
        (c.WRONG_RETURN_TYPE, c.UNINITIALISED_OUTPUT),
        style="out",
    ),
    WrongKernel(
        written_past_the_end_out,
        c.CPU_OUTPUTS,
        c.CALL_VIOLATION,
        (c.OUT_OF_BOUNDS_WRITE,),
        style="out",
    ),
    WrongKernel(rows_zeroed_in_place_out, c.ANY, c.CALL_VIOLATION, (c.INPUT_MUTATED,), style="out"),
)
"""Every wrong kernel of the operator."""
