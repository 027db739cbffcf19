"""The operators in plain torch, for machines without a GPU: correctly rounded as well.

Only what is computed goes through float64; what is copied stays as it is. Products are exact in
float64 and two-sum keeps what an addition rounds away, so a sum of two terms is rounded once. Sums
over heads are carried as ``total + rest``; where adding to ``rest`` loses something, which takes
terms of very different sizes, those elements are added up as fractions.
"""

from __future__ import annotations

from fractions import Fraction

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
Six = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def two_sum(a: torch.Tensor, b: torch.Tensor) -> Pair:
    """Return the nearest sum of float64 and its error: ``a + b == high + low``."""
    high = a + b
    of_b = high - a
    return high, (a - (high - of_b)) + (b - of_b)


def round_once(high: torch.Tensor, low: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round ``high + low`` to nearest even, once, by way of round-to-odd.

    Args:
        high: float64, nearest to the sum; where it is not finite it is the result.
        low: float64, the rest; only its sign matters, and whether it is zero.
        dtype: bfloat16, float16 or float32.
    """
    low = torch.where(high.isfinite(), low, 0.0)
    bits = high.view(torch.int64)
    inward = (bits ^ low.view(torch.int64)) >> 63
    odd = torch.where(low != 0, (bits + inward) | 1, bits).view(torch.float64)
    nearest = odd.to(torch.float32)
    if dtype == torch.float32:
        return nearest
    back = nearest.to(torch.float64)
    narrow = nearest.view(torch.int32)
    inexact = (narrow - (odd.abs() < back.abs()).to(torch.int32)) | 1
    return torch.where(odd != back, inexact, narrow).view(torch.float32).to(dtype)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotate_half_transposed(y: torch.Tensor) -> torch.Tensor:
    first, second = y.chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1)


def rotate(key_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the rotated keys ``[B,H,N,D]``; tables are ``[B or 1,1,N,D]``."""
    k = key_states.double()
    high, low = two_sum(k * cos.double(), _rotate_half(k) * sin.double())
    return round_once(high, low, key_states.dtype)


def rotate_back(g: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return ``g * cos + rotate_half_T(g * sin)``; ``g`` is ``[B,H,N,D]``, tables ``[B,1,N,D]``."""
    wide = g.double()
    high, low = two_sum(wide * cos.double(), _rotate_half_transposed(wide * sin.double()))
    return round_once(high, low, g.dtype)


def head_sum(g: torch.Tensor, k: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum over heads of ``g * k``, float64 ``[B,H,N,D]``, as ``[B,N,D]`` of a dtype."""
    total, rest = g[:, 0] * k[:, 0], torch.zeros_like(g[:, 0])
    lost = torch.zeros_like(rest, dtype=torch.bool)
    for head in range(1, g.shape[1]):
        total, error = two_sum(total, g[:, head] * k[:, head])
        rest, dropped = two_sum(rest, error)
        lost |= dropped != 0
    high, low = two_sum(total, rest)
    finite = total.isfinite()
    # Where the total is not finite, the rest is NaN.
    high = torch.where(finite, high, total)
    lost &= finite
    if bool(lost.any()):
        pairs = (
            _exact_sum(g_column, k_column)
            for g_column, k_column in zip(
                g.movedim(1, -1)[lost].tolist(), k.movedim(1, -1)[lost].tolist(), strict=True
            )
        )
        highs, lows = zip(*pairs, strict=True)
        high[lost] = high.new_tensor(highs)
        low[lost] = low.new_tensor(lows)
    return round_once(high, low, dtype)


def _exact_sum(g: list[float], k: list[float]) -> tuple[float, float]:
    products = (Fraction(a) * Fraction(b) for a, b in zip(g, k, strict=True))
    exact = sum(products, Fraction(0))
    high = float(exact)
    return high, float(exact - Fraction(high))


def token_gradients(
    g: torch.Tensor, key_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return grad_key_states ``[B,H,N,D]`` and grad_cos, grad_sin ``[B,N,D]``.

    Args:
        g: cotangents of the rows of the new keys, ``[B,H,N,D]``.
        key_states: ``[B,H,N,D]``.
        cos: ``[B,1,N,D]``.
        sin: ``[B,1,N,D]``.
    """
    wide, k = g.double(), key_states.double()
    return (
        rotate_back(g, cos, sin).contiguous(),
        head_sum(wide, k, g.dtype).contiguous(),
        head_sum(wide, _rotate_half(k), g.dtype).contiguous(),
    )


def concat_forward(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> Pair:
    """``kv_rope.concat.forward``."""
    rotated = rotate(key_states, cos, sin)
    return (
        torch.cat((key_cache, rotated), dim=2).contiguous(),
        torch.cat((value_cache, value_states), dim=2).contiguous(),
    )


def concat_backward(
    grad_updated_key_cache: torch.Tensor,
    grad_updated_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> Six:
    """``kv_rope.concat.backward``."""
    old = grad_updated_key_cache.shape[2] - key_states.shape[2]
    grad_key_states, grad_cos, grad_sin = token_gradients(
        grad_updated_key_cache[:, :, old:], key_states, cos, sin
    )
    return (
        grad_key_states,
        _fresh(grad_updated_value_cache[:, :, old:]),
        grad_cos[:, None],
        grad_sin[:, None],
        _fresh(grad_updated_key_cache[:, :, :old]),
        _fresh(grad_updated_value_cache[:, :, :old]),
    )


def static_forward(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_position: torch.Tensor,
) -> Pair:
    """``kv_rope.static.forward``."""
    updated = _fresh(key_cache), _fresh(value_cache)
    static_forward_(key_states, value_states, cos, sin, *updated, cache_position)
    return updated


def static_forward_(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_position: torch.Tensor,
) -> None:
    """``kv_rope.static.forward`` in place."""
    inside = _inside(cache_position, key_cache)
    rows = cache_position[inside]
    rotated = rotate(key_states, cos[:, None], sin[:, None])
    key_cache[:, :, rows] = rotated[:, :, inside]
    value_cache[:, :, rows] = value_states[:, :, inside]


def static_backward(
    grad_key_cache: torch.Tensor,
    grad_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache_position: torch.Tensor,
) -> Six:
    """``kv_rope.static.backward``."""
    inside = _inside(cache_position, grad_key_cache)
    rows = cache_position[inside]
    g, grad_value_states = (torch.zeros_like(key_states) for _ in range(2))
    g[:, :, inside] = grad_key_cache[:, :, rows]
    grad_value_states[:, :, inside] = grad_value_cache[:, :, rows]
    grad_key_states, grad_cos, grad_sin = token_gradients(g, key_states, cos[:, None], sin[:, None])
    grad_key_cache_input = _fresh(grad_key_cache)
    grad_value_cache_input = _fresh(grad_value_cache)
    return (
        grad_key_states,
        grad_value_states.contiguous(),
        grad_cos,
        grad_sin,
        grad_key_cache_input.index_fill_(2, rows, 0.0),
        grad_value_cache_input.index_fill_(2, rows, 0.0),
    )


def _inside(cache_position: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Return which positions are rows of a cache; the others are left out, as in the kernels."""
    return (cache_position >= 0) & (cache_position < cache.shape[2])


def _fresh(part: torch.Tensor) -> torch.Tensor:
    return part.clone(memory_format=torch.contiguous_format)
