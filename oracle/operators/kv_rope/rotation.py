"""Rotary position embedding as algebra: the rotation, its adjoint, and their exact terms.

``rotate_half(x) = concat(-x[..., D/2:], x[..., :D/2])`` (the half-split layout of GPT-NeoX, not
GPT-J's neighbour pairs; J. Su et al., "RoFormer", arXiv:2104.09864, section 3.4.2), and its
transpose ``rotate_half_T(y) = concat(y[..., D/2:], -y[..., :D/2])``.

Terms are products of two numbers of at most 24 significant bits, which are exact in float64.
Tables are ``[B or 1, 1, N, D]`` in all functions here.
"""

from __future__ import annotations

import torch

from ...blocks import Selection


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Return ``concat(-x[..., D/2:], x[..., :D/2])`` for ``x`` of shape ``[..., D]``, D even."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_half_transposed(y: torch.Tensor) -> torch.Tensor:
    """Return ``concat(y[..., D/2:], -y[..., :D/2])``, the adjoint of :func:`rotate_half`."""
    half = y.shape[-1] // 2
    return torch.cat((y[..., half:], -y[..., :half]), dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``[B,H,N,D]`` by tables, in the tensors' own type."""
    return x * cos + rotate_half(x) * sin


def rotate_transposed(y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the adjoint of :func:`rotate` to ``[B,H,N,D]``, in the tensors' own type."""
    return y * cos + rotate_half_transposed(y * sin)


def rotation_terms(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the two exact terms of every element of :func:`rotate`, float64 ``[2,B,H,N,D]``."""
    return _products((x, cos), (rotate_half(x), sin))


def adjoint_terms(y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the two exact terms of :func:`rotate_transposed`, float64 ``[2,B,H,N,D]``."""
    half = y.shape[-1] // 2
    swapped = torch.cat((y[..., half:], y[..., :half]), dim=-1)
    return _products((y, cos), (swapped, rotate_half_transposed(sin)))


def head_terms(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the exact terms of ``sum over heads of y * x``, float64 ``[H,B,N,D]``."""
    return (y.to(torch.float64) * x.to(torch.float64)).transpose(0, 1).contiguous()


def _products(*pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the exact products of pairs of low-precision tensors as float64 ``[count, ...]``."""
    return torch.stack([a.to(torch.float64) * b.to(torch.float64) for a, b in pairs])


def table_tile(table: torch.Tensor, batch: slice, tokens: Selection) -> torch.Tensor:
    """Return the part of a table ``[B or 1,1,N,D]`` that belongs to batch entries and tokens."""
    return table[batch if table.shape[0] > 1 else slice(0, 1), :, tokens]


def pair_clusters(
    shape: torch.Size, cos: torch.Tensor, sin: torch.Tensor, batch: slice, tokens: Selection
) -> torch.Tensor:
    """Number the groups of rotated elements that share an input.

    One token's elements d and d + D/2 are made of the same numbers, and all heads use one table;
    where a table has one row for several batch entries, these share it as well.

    Args:
        shape: the shape of the rotated states, ``[B,H,N,D]``.
        cos: ``[B or 1,1,N,D]``; only its shape and device are used.
        sin: likewise.
        batch: the batch entries of the part.
        tokens: the tokens of the part.

    Returns:
        int64 ``[batch entries or 1, 1, tokens, D]``, counted from 0 over all states.
    """
    batches, _, count, width = shape
    half = width // 2
    entries, places, columns = (
        torch.arange(size, device=cos.device) for size in (batches, count, width)
    )
    shared = min(cos.shape[0], sin.shape[0]) < batches
    entry = entries[:1] * 0 if shared else entries[batch]
    first = (entry[:, None, None, None] * count + places[tokens][:, None]) * half
    return first + columns % half
