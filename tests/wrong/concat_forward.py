"""Wrong kernels for ``kv_rope.concat.forward``: the right one below, altered in one place each.

Usable as candidates by path: ``tests/wrong/concat_forward.py:interleaved_pairs``.
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

Outputs = tuple[Tensor, Tensor]

LARGE = 2**20
"""Elements of an output from which the faults of large cases set in."""


class Inputs(NamedTuple):
    """[B,H,N,D] twice, [B,1,N,D] twice, [B,H,C,D] twice."""

    key_states: Tensor
    value_states: Tensor
    cos: Tensor
    sin: Tensor
    key_cache: Tensor
    value_cache: Tensor


# The right kernel: float32 arithmetic, one rounding, copies of bits


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotated_keys(
    x: Inputs,
    half: Callable[[Tensor], Tensor] = rotate_half,
    store: Callable[[Tensor], Tensor] = faults.nearest,
) -> Tensor:
    key, cos, sin = x.key_states.float(), x.cos.float(), x.sin.float()
    return store(key * cos + half(key) * sin)


def append(cache: Tensor, new: Tensor) -> Tensor:
    return torch.cat((cache, new), dim=2)


def right(*inputs: Tensor) -> Outputs:
    x = Inputs(*inputs)
    return append(x.key_cache, rotated_keys(x)), append(x.value_cache, x.value_states)


def with_keys(x: Inputs, keys: Tensor) -> Outputs:
    """The right outputs, but for the new keys."""
    return append(x.key_cache, keys), append(x.value_cache, x.value_states)


# The rotation


def rotate_neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def swap_halves(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, dims=-1)


def interleaved_pairs(*inputs: Tensor) -> Outputs:
    """Neighbours are rotated with each other (GPT-J), not the two halves."""
    x = Inputs(*inputs)
    return with_keys(x, rotated_keys(x, half=rotate_neighbours))


def interleaved_pairs_and_tables(*inputs: Tensor) -> Outputs:
    """Neighbours are rotated with each other, by the entries of the tables' first half."""
    x = Inputs(*inputs)
    cos, sin = (table.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1) for table in (x.cos, x.sin))
    return with_keys(x, rotated_keys(x._replace(cos=cos, sin=sin), half=rotate_neighbours))


def deinterleaved_keys(*inputs: Tensor) -> Outputs:
    """The key is reordered, even elements first, before its halves are rotated."""
    x = Inputs(*inputs)
    key = torch.cat((x.key_states[..., 0::2], x.key_states[..., 1::2]), dim=-1)
    return right(*x._replace(key_states=key))


def interleaved_result(*inputs: Tensor) -> Outputs:
    """The halves are rotated rightly and then stored as neighbours."""
    x = Inputs(*inputs)
    first, second = rotated_keys(x).chunk(2, dim=-1)
    return with_keys(x, torch.stack((first, second), dim=-1).flatten(-2))


def minus_on_the_wrong_half(*inputs: Tensor) -> Outputs:
    """The second half gets the minus sign, which turns the rotation backwards."""
    x = Inputs(*inputs)
    return with_keys(x, rotated_keys(x, half=lambda key: -rotate_half(key)))


def minus_missing(*inputs: Tensor) -> Outputs:
    """The halves are swapped without a minus sign."""
    x = Inputs(*inputs)
    return with_keys(x, rotated_keys(x, half=swap_halves))


def minus_on_both_halves(*inputs: Tensor) -> Outputs:
    """Both halves get the minus sign."""
    x = Inputs(*inputs)
    return with_keys(x, rotated_keys(x, half=lambda key: -swap_halves(key)))


def cos_and_sin_swapped(*inputs: Tensor) -> Outputs:
    """cos is used as sin, and sin as cos."""
    x = Inputs(*inputs)
    return right(*x._replace(cos=x.sin, sin=x.cos))


def key_not_rotated(*inputs: Tensor) -> Outputs:
    """The new keys are appended as they came: both outputs are copies of the inputs."""
    x = Inputs(*inputs)
    return with_keys(x, x.key_states)


def cos_term_only(*inputs: Tensor) -> Outputs:
    """The term with sin is missing."""
    x = Inputs(*inputs)
    return right(*x._replace(sin=torch.zeros_like(x.sin)))


def sin_term_only(*inputs: Tensor) -> Outputs:
    """The term with cos is missing."""
    x = Inputs(*inputs)
    return right(*x._replace(cos=torch.zeros_like(x.cos)))


def only_the_first_half_rotated(*inputs: Tensor) -> Outputs:
    """The second half of every key is appended unrotated."""
    x = Inputs(*inputs)
    keys = rotated_keys(x)
    half = keys.shape[-1] // 2
    return with_keys(x, torch.cat((keys[..., :half], x.key_states[..., half:]), dim=-1))


def value_rotated_as_well(*inputs: Tensor) -> Outputs:
    """The new values are rotated like the keys."""
    x = Inputs(*inputs)
    return right(*x._replace(value_states=rotated_keys(x._replace(key_states=x.value_states))))


def old_keys_rotated_again(*inputs: Tensor) -> Outputs:
    """The cached keys are rotated too, by the tables of the first token."""
    x = Inputs(*inputs)
    first = x._replace(key_states=x.key_cache, cos=x.cos[:, :, :1], sin=x.sin[:, :, :1])
    return right(*x._replace(key_cache=rotated_keys(first)))


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


def tables_summed_over_the_batch(*inputs: Tensor) -> Outputs:
    """cos and sin are summed over the batch rows."""
    x = Inputs(*inputs)
    cos, sin = (table.float().sum(0, keepdim=True).bfloat16() for table in (x.cos, x.sin))
    return right(*x._replace(cos=cos, sin=sin))


def position_ignored(*inputs: Tensor) -> Outputs:
    """The tables of the first token serve all tokens."""
    x = Inputs(*inputs)
    return right(*x._replace(cos=x.cos[:, :, :1], sin=x.sin[:, :, :1]))


def tables_of_the_previous_token(*inputs: Tensor) -> Outputs:
    """Every token but the first is rotated by the tables of the one before it."""
    x = Inputs(*inputs)
    cos, sin = (torch.cat((table[:, :, :1], table[:, :, :-1]), dim=2) for table in (x.cos, x.sin))
    return right(*x._replace(cos=cos, sin=sin))


def _repeated(table: Tensor, half: int) -> Tensor:
    chosen = table.chunk(2, dim=-1)[half]
    return torch.cat((chosen, chosen), dim=-1)


def first_half_of_the_tables(*inputs: Tensor) -> Outputs:
    """Only the first half of cos and of sin is read, and serves both halves of the key."""
    x = Inputs(*inputs)
    return right(*x._replace(cos=_repeated(x.cos, 0), sin=_repeated(x.sin, 0)))


def second_half_of_the_tables(*inputs: Tensor) -> Outputs:
    """Only the second half of cos and of sin is read, and serves both halves of the key."""
    x = Inputs(*inputs)
    return right(*x._replace(cos=_repeated(x.cos, 1), sin=_repeated(x.sin, 1)))


def first_half_of_cos(*inputs: Tensor) -> Outputs:
    """Only the first half of cos is read; sin is read rightly."""
    x = Inputs(*inputs)
    return right(*x._replace(cos=_repeated(x.cos, 0)))


def first_half_of_sin(*inputs: Tensor) -> Outputs:
    """Only the first half of sin is read; cos is read rightly."""
    x = Inputs(*inputs)
    return right(*x._replace(sin=_repeated(x.sin, 0)))


def sin_rotated_with_the_key(*inputs: Tensor) -> Outputs:
    """sin is multiplied before the halves are swapped: rotate_half(k * sin)."""
    x = Inputs(*inputs)
    key, cos, sin = x.key_states.float(), x.cos.float(), x.sin.float()
    return with_keys(x, faults.nearest(key * cos + rotate_half(key * sin)))


def cos_rebuilt_from_sin(*inputs: Tensor) -> Outputs:
    """cos is not read: its magnitude is taken to be sqrt(1 - sin^2)."""
    x = Inputs(*inputs)
    magnitude = (1 - x.sin.float().square()).clamp(min=0).sqrt()
    return right(*x._replace(cos=magnitude.copysign(x.cos.float()).bfloat16()))


# Which key or value


def key_and_value_swapped(*inputs: Tensor) -> Outputs:
    """The two outputs are returned in the wrong order."""
    keys, values = right(*inputs)
    return values, keys


def new_key_and_value_swapped(*inputs: Tensor) -> Outputs:
    """The new values are rotated into the key cache, and the new keys go into the value cache."""
    x = Inputs(*inputs)
    return right(*x._replace(key_states=x.value_states, value_states=x.key_states))


def keys_of_the_previous_head(*inputs: Tensor) -> Outputs:
    """Every head gets the new key of the head before it."""
    x = Inputs(*inputs)
    return right(*x._replace(key_states=x.key_states.roll(1, dims=1)))


def keys_of_batch_zero(*inputs: Tensor) -> Outputs:
    """The new keys of the first batch row serve all."""
    x = Inputs(*inputs)
    return right(*x._replace(key_states=x.key_states[:1].expand_as(x.key_states)))


def batch_and_head_swapped(*inputs: Tensor) -> Outputs:
    """New keys and values are read as if heads were the outer axis: at h*B + b, not b*H + h."""
    x = Inputs(*inputs)
    batch, heads, tokens, head_dim = x.key_states.shape
    key, value = (
        new.reshape(heads, batch, tokens, head_dim).transpose(0, 1)
        for new in (x.key_states, x.value_states)
    )
    return right(*x._replace(key_states=key, value_states=value))


def head_and_token_swapped(*inputs: Tensor) -> Outputs:
    """New keys and values are read as if laid out [B,N,H,D]."""
    x = Inputs(*inputs)
    batch, heads, tokens, head_dim = x.key_states.shape
    key, value = (
        new.reshape(batch, tokens, heads, head_dim).transpose(1, 2)
        for new in (x.key_states, x.value_states)
    )
    return right(*x._replace(key_states=key, value_states=value))


# Where the rows go


def new_rows_first(*inputs: Tensor) -> Outputs:
    """The new rows are put before the cached ones."""
    x = Inputs(*inputs)
    return append(rotated_keys(x), x.key_cache), append(x.value_states, x.value_cache)


def last_token_left_zero(*inputs: Tensor) -> Outputs:
    """The last new token is missing: its rows are zero."""
    keys, values = right(*inputs)
    keys[:, :, -1] = 0
    values[:, :, -1] = 0
    return keys, values


def last_token_stale(*inputs: Tensor) -> Outputs:
    """The last new token is missing: its rows repeat those before them."""
    keys, values = right(*inputs)
    before = max(keys.shape[2] - 2, 0)
    keys[:, :, -1], values[:, :, -1] = keys[:, :, before], values[:, :, before]
    return keys, values


def last_key_missing(*inputs: Tensor) -> Outputs:
    """The last new key is missing, its row zero; the value is there."""
    keys, values = right(*inputs)
    keys[:, :, -1] = 0
    return keys, values


def last_value_missing(*inputs: Tensor) -> Outputs:
    """The last new value is missing, its row zero; the key is there."""
    keys, values = right(*inputs)
    values[:, :, -1] = 0
    return keys, values


def tokens_reversed(*inputs: Tensor) -> Outputs:
    """The new tokens are appended in reverse."""
    x = Inputs(*inputs)
    return append(x.key_cache, rotated_keys(x).flip(2)), append(
        x.value_cache, x.value_states.flip(2)
    )


def caches_shifted_by_a_row(*inputs: Tensor) -> Outputs:
    """The cached rows move up by one: the first is lost, the last doubled."""
    x = Inputs(*inputs)
    key, value = (
        torch.cat((cache[:, :, 1:], cache[:, :, -1:]), dim=2)
        for cache in (x.key_cache, x.value_cache)
    )
    return right(*x._replace(key_cache=key, value_cache=value))


def value_cache_shifted_by_a_row(*inputs: Tensor) -> Outputs:
    """The cached values move down by one: the last is lost, the first doubled."""
    x = Inputs(*inputs)
    value = torch.cat((x.value_cache[:, :, :1], x.value_cache[:, :, :-1]), dim=2)
    return right(*x._replace(value_cache=value))


def updated_cache_shifted_by_a_row(*inputs: Tensor) -> Outputs:
    """All rows of the updated key cache move down by one, the last to the front."""
    keys, values = right(*inputs)
    return keys.roll(1, dims=2), values


def new_rows_one_too_early(*inputs: Tensor) -> Outputs:
    """The new rows start on the last cached row, and the last row is left zero."""
    x = Inputs(*inputs)
    keys, values = right(*inputs)
    cached = x.key_cache.shape[2]
    if cached > 0:
        early = slice(cached - 1, -1)
        keys[:, :, early], values[:, :, early] = rotated_keys(x), x.value_states
        keys[:, :, -1], values[:, :, -1] = 0, 0
    return keys, values


def old_rows_zero(*inputs: Tensor) -> Outputs:
    """The cached rows are not copied: they are zero."""
    x = Inputs(*inputs)
    return right(
        *x._replace(
            key_cache=torch.zeros_like(x.key_cache), value_cache=torch.zeros_like(x.value_cache)
        )
    )


def old_rows_of_batch_zero(*inputs: Tensor) -> Outputs:
    """The cached keys of the first batch row serve all."""
    x = Inputs(*inputs)
    return right(*x._replace(key_cache=x.key_cache[:1].expand_as(x.key_cache)))


def new_rows_zero_in_a_long_cache(*inputs: Tensor) -> Outputs:
    """The new rows are zero where the cache has 256 rows or more."""
    x = Inputs(*inputs)
    keys, values = right(*inputs)
    cached = x.key_cache.shape[2]
    if cached >= 256:
        keys[:, :, cached:], values[:, :, cached:] = 0, 0
    return keys, values


def all_zeros(*inputs: Tensor) -> Outputs:
    """Both outputs are zero."""
    keys, values = right(*inputs)
    return torch.zeros_like(keys), torch.zeros_like(values)


# Faults of some elements only


def one_new_element_in_a_large_case(*inputs: Tensor) -> Outputs:
    """One element of the last new key is wrong, in outputs of 2^20 elements or more."""
    keys, values = right(*inputs)
    if keys.numel() >= LARGE:
        faults.flip_a_bit(keys, (-1, 0, -1, 1))
    return keys, values


def one_copied_element_in_a_large_case(*inputs: Tensor) -> Outputs:
    """One element of the first cached value is wrong, in outputs of 2^20 elements or more."""
    keys, values = right(*inputs)
    if values.numel() >= LARGE:
        faults.flip_a_bit(values, (0, -1, 0, 1))
    return keys, values


def batches_from_16_with_tables_of_16_before(*inputs: Tensor) -> Outputs:
    """Batch row b is rotated by the tables of row b modulo 16."""
    x = Inputs(*inputs)
    row = torch.arange(x.key_states.shape[0], device=x.cos.device) % 16
    return right(*x._replace(cos=x.cos[row], sin=x.sin[row]))


def batches_from_16_zero(*inputs: Tensor) -> Outputs:
    """Batch rows from 16 on are left zero."""
    keys, values = right(*inputs)
    keys[16:], values[16:] = 0, 0
    return keys, values


def heads_from_8_not_rotated(*inputs: Tensor) -> Outputs:
    """Heads from 8 on are appended unrotated."""
    x = Inputs(*inputs)
    return with_keys(x, torch.cat((rotated_keys(x)[:, :8], x.key_states[:, 8:]), dim=1))


def rows_from_1024_zero(*inputs: Tensor) -> Outputs:
    """Rows from 1024 on are left zero."""
    keys, values = right(*inputs)
    keys[:, :, 1024:], values[:, :, 1024:] = 0, 0
    return keys, values


def rows_from_1024_repeat_the_first(*inputs: Tensor) -> Outputs:
    """Cached value rows are read at their index modulo 1024."""
    x = Inputs(*inputs)
    row = torch.arange(x.value_cache.shape[2], device=x.value_cache.device) % 1024
    return right(*x._replace(value_cache=x.value_cache[:, :, row]))


def partial_token_block_missing(*inputs: Tensor) -> Outputs:
    """Of more than 16 new tokens, those past the last full block of 16 are left zero."""
    x = Inputs(*inputs)
    keys, values = right(*inputs)
    rest = x.key_states.shape[2] % 16
    if x.key_states.shape[2] > 16 and rest:
        keys[:, :, -rest:], values[:, :, -rest:] = 0, 0
    return keys, values


def partial_row_block_missing(*inputs: Tensor) -> Outputs:
    """Of more than 64 cached rows, those past the last full block of 64 are left zero."""
    x = Inputs(*inputs)
    keys, values = right(*inputs)
    cached = x.key_cache.shape[2]
    if cached > 64:
        keys[:, :, cached - cached % 64 : cached] = 0
    return keys, values


def last_head_not_rotated(*inputs: Tensor) -> Outputs:
    """The last head is appended unrotated."""
    x = Inputs(*inputs)
    return with_keys(x, torch.cat((rotated_keys(x)[:, :-1], x.key_states[:, -1:]), dim=1))


def last_token_not_rotated(*inputs: Tensor) -> Outputs:
    """The last new token is appended unrotated."""
    x = Inputs(*inputs)
    return with_keys(x, append(rotated_keys(x)[:, :, :-1], x.key_states[:, :, -1:]))


def last_element_wrong(*inputs: Tensor) -> Outputs:
    """The very last element of the updated value cache is wrong."""
    keys, values = right(*inputs)
    faults.flip_a_bit(values, (-1, -1, -1, -1))
    return keys, values


def nan_in_the_last_row(*inputs: Tensor) -> Outputs:
    """One element of the last key row is NaN."""
    keys, values = right(*inputs)
    keys[-1, -1, -1, 0] = torch.nan
    return keys, values


# Copies


def _copied_by(copy: Callable[[Tensor], Tensor], inputs: tuple[Tensor, ...]) -> Outputs:
    x = Inputs(*inputs)
    return right(
        *x._replace(
            key_cache=copy(x.key_cache),
            value_cache=copy(x.value_cache),
            value_states=copy(x.value_states),
        )
    )


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


def new_values_without_the_last_bit(*inputs: Tensor) -> Outputs:
    """The new values lose the lowest bit of the significand; the caches are copied rightly."""
    x = Inputs(*inputs)
    return right(*x._replace(value_states=faults.without_last_bit(x.value_states)))


# Arithmetic and rounding


def truncated(*inputs: Tensor) -> Outputs:
    """Rotated keys are truncated toward zero by dropping the low half of the float32 pattern."""
    x = Inputs(*inputs)
    return with_keys(x, rotated_keys(x, store=faults.toward_zero))


def rounded_away_from_zero(*inputs: Tensor) -> Outputs:
    """Rotated keys are rounded away from zero."""
    x = Inputs(*inputs)
    return with_keys(x, rotated_keys(x, store=faults.away_from_zero))


def ties_rounded_away(*inputs: Tensor) -> Outputs:
    """Rotated keys are rounded to nearest, but ties away from zero instead of to even."""
    x = Inputs(*inputs)
    return with_keys(x, rotated_keys(x, store=faults.ties_away))


def products_in_fp16(*inputs: Tensor) -> Outputs:
    """The two products are rounded to float16."""
    x = Inputs(*inputs)
    key, cos, sin = x.key_states.float(), x.cos.float(), x.sin.float()
    cos_term, sin_term = (key * cos).half(), (rotate_half(key) * sin).half()
    return with_keys(x, faults.nearest(cos_term.float() + sin_term.float()))


def results_scaled(*inputs: Tensor) -> Outputs:
    """Rotated keys are too large by the factor 1 + 2^-7."""
    x = Inputs(*inputs)
    return with_keys(x, rotated_keys(x, store=faults.scaled))


def results_flushed(*inputs: Tensor) -> Outputs:
    """Subnormal results of the rotation are flushed to zero."""
    x = Inputs(*inputs)
    return with_keys(x, rotated_keys(x, store=faults.flushed))


def results_clamped(*inputs: Tensor) -> Outputs:
    """Infinite results of the rotation become the largest finite number."""
    x = Inputs(*inputs)
    return with_keys(x, rotated_keys(x, store=faults.clamped))


def results_without_nan(*inputs: Tensor) -> Outputs:
    """NaN results of the rotation become zero."""
    x = Inputs(*inputs)
    return with_keys(x, rotated_keys(x, store=faults.without_nan))


def terms_with_a_zero_table_skipped(*inputs: Tensor) -> Outputs:
    """A term whose table entry is zero is skipped, though infinity times zero is NaN."""
    x = Inputs(*inputs)
    key, cos, sin = x.key_states.float(), x.cos.float(), x.sin.float()
    cos_term = torch.where(cos == 0, 0.0, key * cos)
    sin_term = torch.where(sin == 0, 0.0, rotate_half(key) * sin)
    return with_keys(x, faults.nearest(cos_term + sin_term))


def small_rest_lost_when_terms_cancel(*inputs: Tensor) -> Outputs:
    """A sum below 2^-6 of its larger term is taken to be zero."""
    x = Inputs(*inputs)
    key, cos, sin = x.key_states.float(), x.cos.float(), x.sin.float()
    cos_term, sin_term = key * cos, rotate_half(key) * sin
    total = cos_term + sin_term
    cancels = total.abs() < 2.0**-6 * torch.maximum(cos_term.abs(), sin_term.abs())
    return with_keys(x, faults.nearest(torch.where(cancels, 0.0, total)))


# Shape, dtype, layout and memory of the outputs


def keys_broadcast_over_heads(*inputs: Tensor) -> Outputs:
    """The key output has shape [B,1,C+N,D], which would broadcast."""
    keys, values = right(*inputs)
    return keys[:, :1].contiguous(), values


def keys_broadcast_over_the_batch(*inputs: Tensor) -> Outputs:
    """The key output has shape [1,H,C+N,D], which would broadcast."""
    keys, values = right(*inputs)
    return keys[:1].contiguous(), values


def values_broadcast_over_batch_and_heads(*inputs: Tensor) -> Outputs:
    """The value output has shape [C+N,D], which would broadcast."""
    keys, values = right(*inputs)
    return keys, values[0, 0].contiguous()


def last_row_cut_off(*inputs: Tensor) -> Outputs:
    """Both outputs lack their last row."""
    keys, values = right(*inputs)
    return keys[:, :, :-1].contiguous(), values[:, :, :-1].contiguous()


def batch_and_heads_flattened(*inputs: Tensor) -> Outputs:
    """Both outputs have shape [B*H,C+N,D]."""
    keys, values = right(*inputs)
    return keys.flatten(0, 1), values.flatten(0, 1)


def keys_in_float32(*inputs: Tensor) -> Outputs:
    """The key output is float32."""
    keys, values = right(*inputs)
    return keys.float(), values


def outputs_in_float16(*inputs: Tensor) -> Outputs:
    """Both outputs are float16."""
    keys, values = right(*inputs)
    return keys.half(), values.half()


def keys_transposed_in_memory(*inputs: Tensor) -> Outputs:
    """The key output is laid out [B,C+N,H,D] in memory, so it is not contiguous."""
    keys, values = right(*inputs)
    return keys.transpose(1, 2).contiguous().transpose(1, 2), values


def values_cut_from_wider_rows(*inputs: Tensor) -> Outputs:
    """The value output is cut from rows of twice the length, so it is not contiguous."""
    keys, values = right(*inputs)
    return keys, torch.cat((values, values), dim=-1)[..., : values.shape[-1]]


def values_never_written(*inputs: Tensor) -> Outputs:
    """The value output is allocated and never written."""
    keys, values = right(*inputs)
    return keys, torch.empty_like(values)


def last_row_never_written(*inputs: Tensor) -> Outputs:
    """The last row of the key output is never written."""
    keys, values = right(*inputs)
    partial = torch.empty_like(keys)
    partial[:, :, :-1] = keys[:, :, :-1]
    return partial, values


def keys_rotated_in_place(*inputs: Tensor) -> Outputs:
    """The result is right, but key_states holds the rotated keys afterwards."""
    x = Inputs(*inputs)
    outputs = right(*inputs)
    x.key_states.copy_(rotated_keys(x))
    return outputs


def tables_scaled_in_place(*inputs: Tensor) -> Outputs:
    """The result is right, but cos is doubled afterwards."""
    x = Inputs(*inputs)
    outputs = right(*inputs)
    x.cos.mul_(2)
    return outputs


def cache_cleared_after_use(*inputs: Tensor) -> Outputs:
    """The result is right, but the last row of value_cache is zero afterwards."""
    x = Inputs(*inputs)
    outputs = right(*inputs)
    x.value_cache[:, :, -1:] = 0
    return outputs


def value_states_returned_for_an_empty_cache(*inputs: Tensor) -> Outputs:
    """With an empty cache, value_states itself is the value output."""
    x = Inputs(*inputs)
    keys, values = right(*inputs)
    return keys, x.value_states if x.value_cache.shape[2] == 0 else values


def view_of_value_states_for_an_empty_cache(*inputs: Tensor) -> Outputs:
    """With an empty cache, a view of value_states is the value output."""
    x = Inputs(*inputs)
    keys, values = right(*inputs)
    return keys, x.value_states[:] if x.value_cache.shape[2] == 0 else values


def one_tensor_twice(*inputs: Tensor) -> Outputs:
    """Both outputs are the updated key cache, the same tensor."""
    keys, _ = right(*inputs)
    return keys, keys


_BUFFERS: dict[tuple[object, ...], Tensor] = {}


def one_buffer_for_all_calls(*inputs: Tensor) -> Outputs:
    """The key output of every call lies in one buffer, which the next call overwrites."""
    keys, values = right(*inputs)
    buffer = _BUFFERS.setdefault((keys.shape, keys.device), torch.empty_like(keys))
    return buffer.copy_(keys), values


_ANSWERS: dict[tuple[object, ...], Outputs] = {}


def answer_remembered_by_shape(*inputs: Tensor) -> Outputs:
    """The answer to the first call with inputs of these shapes is given to all later ones."""
    key = ("shape", *(tensor.shape for tensor in inputs), inputs[0].device)
    return _ANSWERS.setdefault(key, right(*inputs))


def answer_remembered_by_address(*inputs: Tensor) -> Outputs:
    """The answer to the first call with inputs at these addresses is given to all later ones."""
    key = ("address", *((tensor.shape, tensor.data_ptr()) for tensor in inputs))
    return _ANSWERS.setdefault(key, right(*inputs))


def value_output_missing(*inputs: Tensor) -> tuple[Tensor]:
    """Only the key output is returned, in a tuple."""
    keys, _ = right(*inputs)
    return (keys,)


def bare_key_output(*inputs: Tensor) -> Tensor:
    """Only the key output is returned, as a tensor."""
    keys, _ = right(*inputs)
    return keys


def one_output_too_many(*inputs: Tensor) -> tuple[Tensor, ...]:
    """The rotated keys are returned as a third output."""
    return *right(*inputs), rotated_keys(Inputs(*inputs))


def value_output_is_none(*inputs: Tensor) -> tuple[Tensor, None]:
    """The value output is None."""
    keys, _ = right(*inputs)
    return keys, None


def nothing_returned(*inputs: Tensor) -> None:
    """The outputs are computed and not returned."""
    right(*inputs)


# Style "out": the two output tensors follow the inputs


def _split(tensors: tuple[Tensor, ...]) -> tuple[Inputs, Tensor, Tensor]:
    *inputs, key_out, value_out = tensors
    return Inputs(*inputs), key_out, value_out


def interleaved_pairs_out(*tensors: Tensor) -> None:
    """Neighbours are rotated with each other (GPT-J), not the two halves."""
    x, key_out, value_out = _split(tensors)
    keys, values = interleaved_pairs(*x)
    key_out.copy_(keys)
    value_out.copy_(values)


def value_never_written_out(*tensors: Tensor) -> None:
    """The value output is never written."""
    x, key_out, _ = _split(tensors)
    key_out.copy_(right(*x)[0])


def last_row_never_written_out(*tensors: Tensor) -> None:
    """The last row of the key output is never written."""
    x, key_out, value_out = _split(tensors)
    keys, values = right(*x)
    key_out[:, :, :-1] = keys[:, :, :-1]
    value_out.copy_(values)


def outputs_taken_for_zero_out(*tensors: Tensor) -> None:
    """Results are added to the outputs, which are taken to be zero before."""
    x, key_out, value_out = _split(tensors)
    keys, values = right(*x)
    key_out.add_(keys)
    value_out.add_(values)


def results_returned_out(*tensors: Tensor) -> Outputs:
    """Results are returned, and the outputs given are never written."""
    x, _, _ = _split(tensors)
    return right(*x)


def written_past_the_end_out(*tensors: Tensor) -> None:
    """64 elements behind the key output are overwritten with zeros."""
    x, key_out, value_out = _split(tensors)
    keys, values = right(*x)
    key_out.copy_(keys)
    value_out.copy_(values)
    faults.clear_behind(key_out)


def keys_rotated_in_place_out(*tensors: Tensor) -> None:
    """The result is right, but key_states holds the rotated keys afterwards."""
    x, key_out, value_out = _split(tensors)
    keys, values = keys_rotated_in_place(*x)
    key_out.copy_(keys)
    value_out.copy_(values)


WRONG: tuple[WrongKernel, ...] = (
    WrongKernel(interleaved_pairs, c.ANY),
    WrongKernel(interleaved_pairs_and_tables, c.ANY),
    WrongKernel(deinterleaved_keys, c.ANY),
    WrongKernel(interleaved_result, c.ANY),
    WrongKernel(minus_on_the_wrong_half, c.ANY),
    WrongKernel(minus_missing, c.ANY),
    WrongKernel(minus_on_both_halves, c.ANY),
    WrongKernel(cos_and_sin_swapped, c.ANY),
    WrongKernel(key_not_rotated, c.ANY),
    WrongKernel(cos_term_only, c.ANY),
    WrongKernel(sin_term_only, c.ANY),
    WrongKernel(only_the_first_half_rotated, c.ANY),
    WrongKernel(value_rotated_as_well, c.ANY),
    WrongKernel(old_keys_rotated_again, c.OLD_ROWS),
    WrongKernel(tables_of_batch_zero, c.TWO_BATCHES),
    WrongKernel(cos_of_batch_zero, c.TWO_BATCHES),
    WrongKernel(sin_of_batch_zero, c.TWO_BATCHES),
    WrongKernel(tables_summed_over_the_batch, c.TWO_BATCHES),
    WrongKernel(position_ignored, c.TWO_TOKENS),
    WrongKernel(tables_of_the_previous_token, c.TWO_TOKENS),
    WrongKernel(first_half_of_the_tables, c.UNPAIRED_TABLES),
    WrongKernel(second_half_of_the_tables, c.UNPAIRED_TABLES),
    WrongKernel(first_half_of_cos, c.UNPAIRED_TABLES),
    WrongKernel(first_half_of_sin, c.UNPAIRED_TABLES),
    WrongKernel(sin_rotated_with_the_key, c.UNPAIRED_TABLES),
    WrongKernel(cos_rebuilt_from_sin, c.TABLES_OFF_THE_CIRCLE),
    WrongKernel(key_and_value_swapped, c.ANY),
    WrongKernel(new_key_and_value_swapped, c.ANY),
    WrongKernel(keys_of_the_previous_head, c.TWO_HEADS),
    WrongKernel(keys_of_batch_zero, c.TWO_BATCHES),
    WrongKernel(batch_and_head_swapped, c.TWO_BATCHES_AND_HEADS),
    WrongKernel(head_and_token_swapped, c.HEADS_AND_TOKENS),
    WrongKernel(new_rows_first, c.OLD_ROWS),
    WrongKernel(last_token_left_zero, c.ANY),
    WrongKernel(last_token_stale, c.TWO_ROWS),
    WrongKernel(last_key_missing, c.ANY),
    WrongKernel(last_value_missing, c.ANY),
    WrongKernel(tokens_reversed, c.TWO_TOKENS),
    WrongKernel(caches_shifted_by_a_row, c.OLD_ROWS),
    WrongKernel(value_cache_shifted_by_a_row, c.OLD_ROWS),
    WrongKernel(updated_cache_shifted_by_a_row, c.TWO_ROWS),
    WrongKernel(new_rows_one_too_early, c.OLD_ROWS),
    WrongKernel(old_rows_zero, c.OLD_ROWS),
    WrongKernel(old_rows_of_batch_zero, c.TWO_BATCHES),
    WrongKernel(new_rows_zero_in_a_long_cache, c.LONG_CACHE),
    WrongKernel(all_zeros, c.ANY),
    WrongKernel(one_new_element_in_a_large_case, c.LARGE),
    WrongKernel(one_copied_element_in_a_large_case, c.LARGE),
    WrongKernel(batches_from_16_with_tables_of_16_before, c.BATCHES_FROM_16),
    WrongKernel(batches_from_16_zero, c.BATCHES_FROM_16),
    WrongKernel(heads_from_8_not_rotated, c.HEADS_FROM_8),
    WrongKernel(rows_from_1024_zero, c.ROWS_FROM_1024),
    WrongKernel(rows_from_1024_repeat_the_first, c.ROWS_FROM_1024),
    WrongKernel(partial_token_block_missing, c.PARTIAL_TOKEN_BLOCK),
    WrongKernel(partial_row_block_missing, c.PARTIAL_ROW_BLOCK),
    WrongKernel(last_head_not_rotated, c.ANY),
    WrongKernel(last_token_not_rotated, c.ANY),
    WrongKernel(last_element_wrong, c.ANY),
    WrongKernel(nan_in_the_last_row, c.ANY),
    WrongKernel(copies_with_nan_as_zero, c.COPIED_NAN),
    WrongKernel(copies_with_canonical_nan, c.COPIED_NAN_PAYLOAD),
    WrongKernel(copies_through_fp32, c.COPIED_NAN_PAYLOAD),
    WrongKernel(copies_through_fp16, c.COPIED_OUTSIDE_FP16),
    WrongKernel(copies_without_subnormals, c.COPIED_SUBNORMAL),
    WrongKernel(copies_without_negative_zero, c.COPIED_NEGATIVE_ZERO),
    WrongKernel(copies_with_finite_bounds, c.COPIED_INFINITY),
    WrongKernel(copies_without_the_last_bit, c.ANY),
    WrongKernel(new_values_without_the_last_bit, c.ANY),
    WrongKernel(truncated, c.ANY, c.INACCURATE),
    WrongKernel(rounded_away_from_zero, c.ANY, c.INACCURATE),
    WrongKernel(ties_rounded_away, c.TIES, c.INACCURATE),
    WrongKernel(products_in_fp16, c.PRODUCTS_OUTSIDE_FP16),
    WrongKernel(results_scaled, c.ANY),
    WrongKernel(results_flushed, c.SUBNORMAL_RESULTS),
    WrongKernel(results_clamped, c.COMPUTED_INFINITY),
    WrongKernel(results_without_nan, c.COMPUTED_NAN),
    WrongKernel(terms_with_a_zero_table_skipped, c.ZERO_TIMES_INFINITY),
    WrongKernel(small_rest_lost_when_terms_cancel, c.CANCELLATION, c.INACCURATE),
    WrongKernel(keys_broadcast_over_heads, c.TWO_HEADS, c.WRONG_SHAPE),
    WrongKernel(keys_broadcast_over_the_batch, c.TWO_BATCHES, c.WRONG_SHAPE),
    WrongKernel(values_broadcast_over_batch_and_heads, c.ANY, c.WRONG_SHAPE),
    WrongKernel(last_row_cut_off, c.ANY, c.WRONG_SHAPE),
    WrongKernel(batch_and_heads_flattened, c.ANY, c.WRONG_SHAPE),
    WrongKernel(keys_in_float32, c.ANY, c.WRONG_DTYPE),
    WrongKernel(outputs_in_float16, c.ANY, c.WRONG_DTYPE),
    WrongKernel(keys_transposed_in_memory, c.TWO_ROWS, c.WRONG_LAYOUT),
    WrongKernel(values_cut_from_wider_rows, c.ANY, c.WRONG_LAYOUT),
    WrongKernel(values_never_written, c.ANY, c.CALL_OR_VALUES, (c.UNINITIALISED_OUTPUT,)),
    WrongKernel(last_row_never_written, c.ANY, c.CALL_OR_VALUES, (c.UNINITIALISED_OUTPUT,)),
    WrongKernel(keys_rotated_in_place, c.ANY, c.CALL_VIOLATION, (c.INPUT_MUTATED,)),
    WrongKernel(tables_scaled_in_place, c.ANY, c.CALL_VIOLATION, (c.INPUT_MUTATED,)),
    WrongKernel(cache_cleared_after_use, c.OLD_ROWS, c.CALL_VIOLATION, (c.INPUT_MUTATED,)),
    WrongKernel(
        value_states_returned_for_an_empty_cache,
        c.EMPTY_CACHE,
        c.CALL_VIOLATION,
        (c.OUTPUT_ALIASES_INPUT,),
    ),
    WrongKernel(
        view_of_value_states_for_an_empty_cache,
        c.EMPTY_CACHE,
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
    WrongKernel(value_output_missing, c.ANY, c.CALL_VIOLATION, (c.WRONG_OUTPUT_COUNT,)),
    WrongKernel(bare_key_output, c.ANY, c.CALL_VIOLATION, (c.WRONG_OUTPUT_COUNT,)),
    WrongKernel(one_output_too_many, c.ANY, c.CALL_VIOLATION, (c.WRONG_OUTPUT_COUNT,)),
    WrongKernel(value_output_is_none, c.ANY, c.CALL_VIOLATION, (c.WRONG_RETURN_TYPE,)),
    WrongKernel(nothing_returned, c.ANY, c.CALL_VIOLATION, (c.WRONG_RETURN_TYPE,)),
    WrongKernel(interleaved_pairs_out, c.ANY, style="out"),
    WrongKernel(
        value_never_written_out,
        c.ANY,
        c.CALL_OR_VALUES,
        (c.UNINITIALISED_OUTPUT,),
        style="out",
    ),
    WrongKernel(
        last_row_never_written_out,
        c.ANY,
        c.CALL_OR_VALUES,
        (c.UNINITIALISED_OUTPUT,),
        style="out",
    ),
    WrongKernel(
        outputs_taken_for_zero_out,
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
    WrongKernel(
        keys_rotated_in_place_out, c.ANY, c.CALL_VIOLATION, (c.INPUT_MUTATED,), style="out"
    ),
)
"""Every wrong kernel of the operator."""
