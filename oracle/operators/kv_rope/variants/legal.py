"""Legal liberties: other ways to compute the same that honest kernels take.

Each meets the contract ``stored_intermediates`` for every input: a product is kept in float32 or
exactly, or stored once in the output type; sums are made in float32 or better, in any order; the
result is rounded once more. What an implementation looks like matters as well as its bits: on
another device the same liberty may give others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....rounding import FLOAT32, format_of, round_float64, round_to_odd, two_sum
from ..rotation import rotate_half, rotate_half_transposed
from .parts import (
    BACKWARD,
    FORWARD,
    STATIC_BACKWARD,
    STATIC_FORWARD,
    Kind,
    Pair,
    Parts,
    Tokens,
    add_in_order,
    product,
    rotated,
    sum_heads,
    unrotated,
)

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Rotation = Callable[[Parts, torch.Tensor, Tokens], torch.Tensor]

# Products: kept in float32, exact, stored in the output type, or some of each.


def _exact(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64) * factor.to(torch.float64)


def _stored(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return product(x, factor).to(x.dtype).to(torch.float32)


def _stored_once(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return round_float64(_exact(x, factor), format_of(x.dtype)).to(torch.float32)


def _stored_where(dimension: int, chosen: Callable[[torch.Tensor, int], torch.Tensor]) -> Product:
    """Return a product that is stored where ``chosen(index, size)`` says along a dimension."""

    def mixed(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        kept = product(x, factor)
        shape = [1] * kept.dim()
        shape[dimension] = -1
        size = kept.shape[dimension]
        mask = chosen(torch.arange(size, device=x.device), size).view(shape)
        return torch.where(mask, kept.to(x.dtype).to(torch.float32), kept)

    return mixed


_even_heads = _stored_where(1, lambda head, _heads: head % 2 == 0)
_odd_tokens = _stored_where(2, lambda token, _tokens: token % 2 == 1)
_first_columns = _stored_where(3, lambda column, columns: column < columns // 2)


def _products(of: Product) -> Parts:
    return Parts(cos_product=of, sin_product=of, head_product=of)


# Sums of two terms.


def _odd_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the sum rounded to odd in float64, from which every type can be reached rightly."""
    high, low = two_sum(a.to(torch.float64), b.to(torch.float64))
    return round_to_odd(high, torch.where(high.isfinite(), low, 0.0))


def _fused_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Round the exact sum once to float32; with an exact product it is a fused multiply-add."""
    return round_float64(_odd_sum(a, b), FLOAT32)


def _negated_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``-(-a - b)``, whose zeros have the other sign where terms cancel."""
    return -(-a - b)


def _rounded_once(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return round_float64(total.to(torch.float64), format_of(dtype))


# Whole rotations.


def _rotated_by_halves(_parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    (x1, x2), (c1, c2), (s1, s2) = _halves(x, tokens.cos, tokens.sin)
    return torch.cat((x1 * c1 - x2 * s1, x2 * c2 + x1 * s2), dim=-1)


def _unrotated_by_halves(_parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    (x1, x2), (c1, c2), (s1, s2) = _halves(x, tokens.cos, tokens.sin)
    return torch.cat((x1 * c1 + x2 * s2, x2 * c2 - x1 * s1), dim=-1)


def _halves(*tensors: torch.Tensor) -> tuple[Pair, ...]:
    pairs = (x.to(torch.float32).chunk(2, dim=-1) for x in tensors)
    return tuple((first, second) for first, second in pairs)


def _rotated_as_complex(_parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    (x1, x2), (c1, c2), (s1, s2) = _halves(x, tokens.cos, tokens.sin)
    number = torch.complex(x1, x2)
    first, second = number * torch.complex(c1, s1), number * torch.complex(c2, s2)
    return torch.cat((first.real, second.imag), dim=-1)


def _unrotated_as_complex(_parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    (x1, x2), (c1, c2), (s1, s2) = _halves(x, tokens.cos, tokens.sin)
    number = torch.complex(x1, x2)
    # The halves of sin change places: (x1 + i x2)(c1 - i s2) is x1 c1 + x2 s2 and so on.
    first, second = number * torch.complex(c1, -s2), number * torch.complex(c2, -s1)
    return torch.cat((first.real, second.imag), dim=-1)


def _other_half(table: torch.Tensor) -> torch.Tensor:
    return table.roll(table.shape[-1] // 2, dims=-1)


def _rotated_addcmul(parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    turned = rotate_half(x).to(torch.float32)
    return torch.addcmul(parts.cos_product(x, tokens.cos), turned, tokens.sin.to(torch.float32))


def _unrotated_addcmul(parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    turned = rotate_half_transposed(x).to(torch.float32)
    sin = _other_half(tokens.sin).to(torch.float32)
    return torch.addcmul(parts.cos_product(x, tokens.cos), turned, sin)


def _stacked(x: torch.Tensor, turned: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Stack factors and tables, so that a sum of products is one einsum."""
    shape = x.shape
    left = torch.stack((x, turned)).to(torch.float32)
    return left, torch.stack((cos.expand(shape), sin.expand(shape))).to(torch.float32)


def _rotated_einsum(_parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    pair = _stacked(x, rotate_half(x), tokens.cos, tokens.sin)
    return torch.einsum("pbhnd,pbhnd->bhnd", *pair)


def _unrotated_einsum(_parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    pair = _stacked(x, rotate_half_transposed(x), tokens.cos, _other_half(tokens.sin))
    return torch.einsum("pbhnd,pbhnd->bhnd", *pair)


def _in_chunks(whole: Rotation) -> Rotation:
    """Return a rotation that goes through the tokens 16 at a time, the last ones first."""

    def rotate(parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        result = torch.empty_like(x, dtype=torch.float32)
        for start in reversed(range(0, x.shape[2], 16)):
            chunk = slice(start, start + 16)
            part = tokens._replace(cos=tokens.cos[:, :, chunk], sin=tokens.sin[:, :, chunk])
            result[:, :, chunk] = whole(parts, x[:, :, chunk], part)
        return result

    return rotate


def _by_heads(whole: Rotation) -> Rotation:
    """Return a rotation that goes through batch entries and heads one by one."""

    def rotate(parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        result = torch.empty_like(x, dtype=torch.float32)
        for batch in range(x.shape[0]):
            cos, sin = (
                table[batch : batch + 1] if table.shape[0] > 1 else table
                for table in (tokens.cos, tokens.sin)
            )
            part = tokens._replace(cos=cos, sin=sin)
            for head in range(x.shape[1]):
                index = (slice(batch, batch + 1), slice(head, head + 1))
                result[index] = whole(parts, x[index], part)
        return result

    return rotate


def _autograd(
    differentiable: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    tokens: Tokens,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of a function of key, cos and sin in the output type."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [
            x.detach().clone().requires_grad_() for x in (tokens.key_states, tokens.cos, tokens.sin)
        ]
        return torch.autograd.grad(differentiable(*leaves), leaves, gradient.clone())


def _rotation(key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return key * cos + rotate_half(key) * sin


def _unrotated_by_autograd(_parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return _autograd(_rotation, tokens, x)[0]


def _table_gradients_by_autograd(_parts: Parts, tokens: Tokens) -> Pair:
    _, grad_cos, grad_sin = _autograd(_rotation, tokens, tokens.keys)
    return grad_cos[:, 0], grad_sin[:, 0]


def _adjoint(key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return key * cos + rotate_half_transposed(key * sin)


def _rotated_by_autograd(_parts: Parts, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Rotate as the vector-Jacobian product of the transposed rotation."""
    return _autograd(_adjoint, tokens, x)[0]


# Sums over heads.


def _pairwise(products: torch.Tensor) -> torch.Tensor:
    level = list(products.unbind(1))
    while len(level) > 1:
        pairs = [left + right for left, right in zip(level[0::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]


def _two_parts(products: torch.Tensor, first: slice, second: slice) -> torch.Tensor:
    if products.shape[1] == 1:
        return sum_heads(products)
    return sum_heads(products[:, first]) + sum_heads(products[:, second])


def _two_halves(products: torch.Tensor) -> torch.Tensor:
    middle = (products.shape[1] + 1) // 2
    return _two_parts(products, slice(0, middle), slice(middle, None))


def _even_and_odd(products: torch.Tensor) -> torch.Tensor:
    return _two_parts(products, slice(0, None, 2), slice(1, None, 2))


def _from_the_middle(products: torch.Tensor) -> torch.Tensor:
    middle = products.shape[1] // 2
    return sum_heads(products.roll(-middle, dims=1))


def _by_matrix_product(products: torch.Tensor) -> torch.Tensor:
    ones = products.new_ones(products.shape[1])
    return torch.einsum("h,bhnd->bnd", ones, products)


def _fused_heads(products: torch.Tensor) -> torch.Tensor:
    """Add exact products to a float32 total, each time rounding once: fused multiply-adds."""
    total = round_float64(products[:, 0], FLOAT32)
    for head in range(1, products.shape[1]):
        total = _fused_sum(total, products[:, head])
    return total


def _added_exactly(products: torch.Tensor) -> torch.Tensor:
    """Add in float64 with the errors carried along, and round to odd."""
    high = products[:, 0].to(torch.float64)
    low = torch.zeros_like(high)
    for head in range(1, products.shape[1]):
        high, error = two_sum(high, products[:, head].to(torch.float64))
        low = low + error
    total, rest = two_sum(high, low)
    # Where a term is not finite, neither are the errors: the plain sum has the right class.
    finite = total.isfinite()
    plain = add_in_order(products.to(torch.float64).unbind(1))
    return round_to_odd(torch.where(finite, total, plain), torch.where(finite, rest, 0.0))


# Caches and rows: other ways to move the same bits.


def _indexed_write(cache: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    result = cache.clone()
    result[:, :, positions] = new
    return result


def _copied_by_index(
    cache: torch.Tensor, positions: torch.Tensor, new: torch.Tensor
) -> torch.Tensor:
    return cache.index_copy(2, positions, new)


def _scattered(cache: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    # torch.scatter of bfloat16 on a CPU loses the payload of NaN (2.13), that of integers nothing.
    bits = format_of(cache.dtype).bits_dtype
    index = positions[:, None].expand(new.shape)
    return cache.view(bits).scatter(2, index, new.view(bits)).view(cache.dtype)


def _row_by_row(cache: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    result = cache.clone()
    for token in reversed(range(positions.numel())):
        row = positions[token : token + 1]
        result.index_copy_(2, row, new[:, :, token : token + 1])
    return result


def _is_new(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(cache.shape[2], device=cache.device)
    return torch.isin(rows, positions)[:, None]


def _cleared_by_choice(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return torch.where(_is_new(cache, positions), torch.zeros_like(cache), cache)


def _cleared_to_negative_zero(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return cache.index_fill(2, positions, -0.0)


def _cleared_row_by_row(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    result = cache.clone()
    for token in reversed(range(positions.numel())):
        result.index_fill_(2, positions[token : token + 1], 0)
    return result


def _copied_by_bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(format_of(x.dtype).bits_dtype).clone().view(x.dtype)


def _torch_sum(products: torch.Tensor) -> torch.Tensor:
    return products.sum(dim=1)


def _rounded_exactly(of: Product) -> Parts:
    """Return parts that add products exactly and round their sums once."""
    return Parts(
        cos_product=of,
        sin_product=of,
        head_product=of,
        add=_odd_sum,
        reduce=_added_exactly,
        store=_rounded_once,
        store_sums=_rounded_once,
    )


def _writes(write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Parts:
    return Parts(place_keys=write, place_values=write)


def _clears(clear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Parts:
    return Parts(clear_keys=clear, clear_values=clear)


_ROTATIONS = (
    Kind(
        "float32",
        "Products and sums in float32, one rounding.",
        Parts(),
    ),
    Kind(
        "eager",
        "Every product is stored in the output type, as PyTorch does without compiling.",
        _products(_stored),
    ),
    Kind(
        "float64",
        "Products and sums in float64, rounded by way of float32.",
        _products(_exact),
    ),
    Kind(
        "correctly-rounded",
        "The exact value is rounded once.",
        _rounded_exactly(_exact),
    ),
    Kind(
        "products-stored-once",
        "Every exact product is stored in the output type, never in float32.",
        _products(_stored_once),
    ),
    Kind(
        "products-stored-sums-exact",
        "Every product is stored, and their exact sum rounded once.",
        _rounded_exactly(_stored),
    ),
    Kind(
        "cos-product-stored",
        "In the rotation only the product with cos is stored.",
        Parts(cos_product=_stored),
    ),
    Kind(
        "sin-product-stored",
        "In the rotation only the product with sin is stored.",
        Parts(sin_product=_stored),
    ),
    Kind(
        "even-heads-stored",
        "Products of even heads are stored, those of odd ones kept.",
        _products(_even_heads),
    ),
    Kind(
        "odd-tokens-stored",
        "Products of odd tokens are stored, those of even ones kept.",
        _products(_odd_tokens),
    ),
    Kind(
        "first-columns-stored",
        "Products of the first half of the columns are stored, the others kept.",
        _products(_first_columns),
    ),
    Kind(
        "fused-onto-the-cos-product",
        "A fused multiply-add adds the sin term to the product with cos.",
        Parts(sin_product=_exact, add=_fused_sum),
    ),
    Kind(
        "fused-onto-the-sin-product",
        "A fused multiply-add adds the cos term to the product with sin.",
        Parts(cos_product=_exact, add=_fused_sum),
    ),
    Kind(
        "fused-onto-a-stored-cos-product",
        "A fused multiply-add adds the sin term to the stored product with cos.",
        Parts(cos_product=_stored, sin_product=_exact, add=_fused_sum),
    ),
    Kind(
        "fused-onto-a-stored-sin-product",
        "A fused multiply-add adds the cos term to the stored product with sin.",
        Parts(cos_product=_exact, sin_product=_stored, add=_fused_sum),
    ),
    Kind(
        "negated-twice",
        "-(-a - b) is computed, so that zeros have the other sign.",
        Parts(add=_negated_sum),
    ),
    Kind(
        "by-halves",
        "Both halves are worked out apart, by subtracting instead of negating.",
        Parts(rotate=_rotated_by_halves, unrotate=_unrotated_by_halves),
    ),
    Kind(
        "as-complex-numbers",
        "The halves are real and imaginary parts, multiplied by complex tables.",
        Parts(rotate=_rotated_as_complex, unrotate=_unrotated_as_complex),
    ),
    Kind(
        "addcmul",
        "torch.addcmul in float32, which may fuse.",
        Parts(rotate=_rotated_addcmul, unrotate=_unrotated_addcmul),
    ),
    Kind(
        "einsum",
        "Both terms are stacked and summed by torch.einsum.",
        Parts(rotate=_rotated_einsum, unrotate=_unrotated_einsum),
    ),
    Kind(
        "in-chunks-of-tokens",
        "16 tokens are rotated at a time, the last ones first.",
        Parts(rotate=_in_chunks(rotated), unrotate=_in_chunks(unrotated)),
    ),
    Kind(
        "head-by-head",
        "Batch entries and heads are rotated one by one.",
        Parts(rotate=_by_heads(rotated), unrotate=_by_heads(unrotated)),
    ),
    Kind(
        "copied-as-integers",
        "Copies are made of bit patterns.",
        Parts(copy=_copied_by_bits),
    ),
    Kind(
        "autograd-of-the-transpose",
        "The vector-Jacobian product of the transposed rotation, in the output type.",
        Parts(rotate=_rotated_by_autograd),
        FORWARD,
    ),
    Kind(
        "autograd-of-the-reference",
        "What autograd makes of the rotation in the output type.",
        Parts(unrotate=_unrotated_by_autograd, table_gradients=_table_gradients_by_autograd),
        BACKWARD,
    ),
)

_HEADS = (
    Kind(
        "torch-sum",
        "torch.sum adds the heads in its own order.",
        Parts(reduce=_torch_sum),
        BACKWARD,
    ),
    Kind(
        "heads-in-reverse",
        "Heads are added one by one, the last one first.",
        Parts(reduce=lambda products: sum_heads(products.flip(1))),
        BACKWARD,
    ),
    Kind(
        "heads-pairwise",
        "Heads are added as a tree.",
        Parts(reduce=_pairwise),
        BACKWARD,
    ),
    Kind(
        "heads-in-two-halves",
        "The sums over each half of the heads are added.",
        Parts(reduce=_two_halves),
        BACKWARD,
    ),
    Kind(
        "even-and-odd-heads",
        "The sums over even and over odd heads are added.",
        Parts(reduce=_even_and_odd),
        BACKWARD,
    ),
    Kind(
        "heads-from-the-middle",
        "Heads are added one by one, starting in the middle.",
        Parts(reduce=_from_the_middle),
        BACKWARD,
    ),
    Kind(
        "heads-by-matrix-product",
        "A product with ones adds the heads, in whatever order it takes.",
        Parts(reduce=_by_matrix_product),
        BACKWARD,
    ),
    Kind(
        "heads-fused",
        "Each head is added by a fused multiply-add.",
        Parts(head_product=_exact, reduce=_fused_heads),
        BACKWARD,
    ),
    Kind(
        "head-sum-exact",
        "The exact sum over heads is rounded once.",
        Parts(head_product=_exact, reduce=_added_exactly, store_sums=_rounded_once),
        BACKWARD,
    ),
    Kind(
        "head-products-stored",
        "Only the products under the sums over heads are stored.",
        Parts(head_product=_stored),
        BACKWARD,
    ),
    Kind(
        "stored-heads-in-reverse",
        "Stored products are added one by one, the last head first.",
        Parts(head_product=_stored, reduce=lambda products: sum_heads(products.flip(1))),
        BACKWARD,
    ),
)

_ROWS = (
    Kind(
        "written-by-indexing",
        "Rows are written by an indexed assignment.",
        _writes(_indexed_write),
        STATIC_FORWARD,
    ),
    Kind(
        "written-by-index-copy",
        "Rows are written by torch.index_copy.",
        _writes(_copied_by_index),
        STATIC_FORWARD,
    ),
    Kind(
        "written-by-scatter",
        "Rows are written by torch.scatter, as bit patterns.",
        _writes(_scattered),
        STATIC_FORWARD,
    ),
    Kind(
        "written-row-by-row",
        "Rows are written one by one, the last token first.",
        _writes(_row_by_row),
        FORWARD,
    ),
    Kind(
        "cleared-by-choice",
        "Rows are cleared by a choice between zero and the cache.",
        _clears(_cleared_by_choice),
        STATIC_BACKWARD,
    ),
    Kind(
        "cleared-to-negative-zero",
        "Rows are cleared to -0.0.",
        _clears(_cleared_to_negative_zero),
        STATIC_BACKWARD,
    ),
    Kind(
        "cleared-row-by-row",
        "Rows are cleared one by one, the last token first.",
        _clears(_cleared_row_by_row),
        STATIC_BACKWARD,
    ),
)

LIBERTIES: tuple[Kind, ...] = _ROTATIONS + _HEADS + _ROWS
