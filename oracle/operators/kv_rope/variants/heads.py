"""Wrong gradients of the tables: the sums over heads, and what is summed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .parts import (
    BACKWARD,
    RIGHT,
    Kind,
    Pair,
    Parts,
    Tokens,
    Unary,
    add_in_order,
    head_sums,
    rotated,
    sum_heads,
)

# The sum, from float32 products [B,H,N,D].


def _without_last(products: torch.Tensor) -> torch.Tensor:
    kept = products.clone()
    kept[:, -1] = 0
    return sum_heads(kept)


def _mean(products: torch.Tensor) -> torch.Tensor:
    # Multiplied, as dividing by a number is no correctly rounded division on every device.
    return sum_heads(products) * (1 / products.shape[1])


def _over_the_batch(products: torch.Tensor) -> torch.Tensor:
    total = sum_heads(products)
    return add_in_order(total.unbind(0)).expand_as(total) if total.shape[0] else total


def _running(dtype: torch.dtype) -> Unary:
    """Return a sum that is rounded to a type after every head."""

    def reduce(products: torch.Tensor) -> torch.Tensor:
        total = products[:, 0].to(dtype)
        for head in range(1, products.shape[1]):
            total = (total.to(torch.float32) + products[:, head]).to(dtype)
        return total.to(torch.float32)

    return reduce


def _reversed_in_bfloat16(products: torch.Tensor) -> torch.Tensor:
    return _running(torch.bfloat16)(products.flip(1))


def _tree_in_bfloat16(products: torch.Tensor) -> torch.Tensor:
    level = [term.to(torch.bfloat16) for term in products.unbind(1)]
    while len(level) > 1:
        pairs = [left + right for left, right in zip(level[0::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return level[0].to(torch.float32)


def _halves_in_bfloat16(products: torch.Tensor) -> torch.Tensor:
    middle = (products.shape[1] + 1) // 2
    padded = torch.cat((products, torch.zeros_like(products[:, :1])), dim=1)
    first, second = (
        sum_heads(part).to(torch.bfloat16).to(torch.float32)
        for part in (padded[:, :middle], padded[:, middle:])
    )
    return first + second


def _small_skipped(products: torch.Tensor) -> torch.Tensor:
    largest = products.abs().amax(dim=1, keepdim=True)
    return sum_heads(torch.where(products.abs() < 2.0**-6 * largest, 0.0, products))


_SUMS = (
    Kind(
        "head-0-instead-of-the-sum",
        "grad_cos and grad_sin are those of the first head alone.",
        Parts(reduce=lambda products: products[:, 0]),
        BACKWARD,
    ),
    Kind(
        "last-head-instead-of-the-sum",
        "grad_cos and grad_sin are those of the last head: each head overwrites the others.",
        Parts(reduce=lambda products: products[:, -1]),
        BACKWARD,
    ),
    Kind(
        "last-head-missing-from-the-sum",
        "The sums over heads lack the last head.",
        Parts(reduce=_without_last),
        BACKWARD,
    ),
    Kind(
        "odd-heads-missing-from-the-sum",
        "The sums over heads lack every second head.",
        Parts(reduce=lambda products: sum_heads(products[:, 0::2])),
        BACKWARD,
    ),
    Kind(
        "first-head-counted-twice",
        "The sums over heads hold the first head twice.",
        Parts(reduce=lambda products: sum_heads(products) + products[:, 0]),
        BACKWARD,
    ),
    Kind(
        "head-mean-instead-of-sum",
        "grad_cos and grad_sin are means over the heads.",
        Parts(reduce=_mean),
        BACKWARD,
    ),
    Kind(
        "summed-over-the-batch-too",
        "grad_cos and grad_sin are summed over the batch as well, as for tables of one row.",
        Parts(reduce=_over_the_batch),
        BACKWARD,
    ),
    Kind(
        "head-sum-in-bfloat16",
        "The sum over heads is rounded to bfloat16 after every head.",
        Parts(reduce=_running(torch.bfloat16)),
        BACKWARD,
    ),
    Kind(
        "head-sum-in-bfloat16-reversed",
        "The sum over heads, last one first, is rounded to bfloat16 after every head.",
        Parts(reduce=_reversed_in_bfloat16),
        BACKWARD,
    ),
    Kind(
        "head-sum-in-bfloat16-pairwise",
        "Heads are added as a tree whose every node is rounded to bfloat16.",
        Parts(reduce=_tree_in_bfloat16),
        BACKWARD,
    ),
    Kind(
        "half-sums-in-bfloat16",
        "The sums over each half of the heads are rounded to bfloat16 before they are added.",
        Parts(reduce=_halves_in_bfloat16),
        BACKWARD,
    ),
    Kind(
        "head-sum-in-float16",
        "The sum over heads is rounded to float16 after every head.",
        Parts(reduce=_running(torch.float16)),
        BACKWARD,
    ),
    Kind(
        "small-heads-skipped",
        "Products below 2^-6 of the largest one are left out of the sums over heads.",
        Parts(reduce=_small_skipped),
        BACKWARD,
    ),
    Kind(
        "nan-heads-skipped",
        "Products that are NaN are left out of the sums over heads.",
        Parts(reduce=lambda products: sum_heads(torch.where(products.isnan(), 0.0, products))),
        BACKWARD,
    ),
)

# What is summed.


def _sums(change: Callable[[torch.Tensor, torch.Tensor], Pair]) -> Parts:
    """Return parts that change grad_cos and grad_sin ``[B,N,D]`` before rounding."""
    return Parts(table_gradients=lambda parts, tokens: change(*head_sums(parts, tokens)))


def _folded(total: torch.Tensor) -> torch.Tensor:
    """Add the two halves and return the sum in both, the gradient of a paired table."""
    first, second = total.chunk(2, dim=-1)
    return (first + second).repeat(1, 1, 2)


def _first_half(total: torch.Tensor) -> torch.Tensor:
    first, second = total.chunk(2, dim=-1)
    return torch.cat((first, torch.zeros_like(second)), dim=-1)


def _rotated_gradient(parts: Parts, tokens: Tokens) -> Pair:
    turned = parts.turn(tokens.keys)
    grad_sin = parts.reduce(parts.head_product(turned, tokens.key_states))
    return head_sums(parts, tokens)[0], grad_sin


def _rotated_keys(tokens: Tokens) -> Tokens:
    key = tokens.key_states
    return tokens._replace(key_states=rotated(RIGHT, key, tokens).to(key.dtype))


_SUMMED = (
    Kind(
        "grad-cos-and-grad-sin-swapped",
        "grad_cos and grad_sin are returned in the wrong order.",
        _sums(lambda cos, sin: (sin, cos)),
        BACKWARD,
    ),
    Kind(
        "table-gradients-zero",
        "grad_cos and grad_sin are zero: the tables are taken for constants.",
        _sums(lambda cos, sin: (torch.zeros_like(cos), torch.zeros_like(sin))),
        BACKWARD,
    ),
    Kind(
        "grad-cos-zero",
        "grad_cos is zero.",
        _sums(lambda cos, sin: (torch.zeros_like(cos), sin)),
        BACKWARD,
    ),
    Kind(
        "grad-sin-zero",
        "grad_sin is zero.",
        _sums(lambda cos, sin: (cos, torch.zeros_like(sin))),
        BACKWARD,
    ),
    Kind(
        "table-gradients-of-paired-tables",
        "The halves of grad_cos, and of grad_sin, are added and shared, as for paired tables.",
        _sums(lambda cos, sin: (_folded(cos), _folded(sin))),
        BACKWARD,
    ),
    Kind(
        "table-gradients-of-the-first-half",
        "The second halves of grad_cos and grad_sin are zero.",
        _sums(lambda cos, sin: (_first_half(cos), _first_half(sin))),
        BACKWARD,
    ),
    Kind(
        "grad-sin-rotates-the-gradient",
        "grad_sin sums rotate_half(g) * k instead of g * rotate_half(k).",
        Parts(table_gradients=_rotated_gradient),
        BACKWARD,
    ),
    Kind(
        "table-gradients-from-rotated-keys",
        "grad_cos and grad_sin use the rotated keys instead of key_states.",
        Parts(read=_rotated_keys),
        BACKWARD,
    ),
    Kind(
        "table-gradients-from-values",
        "grad_cos and grad_sin use the gradients of the values instead of the keys'.",
        Parts(table_gradients=lambda parts, t: head_sums(parts, t._replace(keys=t.values))),
        BACKWARD,
    ),
)

FAULTS: tuple[Kind, ...] = _SUMS + _SUMMED
