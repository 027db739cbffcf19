"""The gradients by what each new token brought: one meaning for both layouts of the cache.

With ``g`` the cotangents of the rows that the new tokens were written to:

* ``grad_key_states = g * cos + rotate_half_T(g * sin)``
* ``grad_value_states``: the cotangents of the value rows
* ``grad_cos = sum over heads of g * key_states``
* ``grad_sin = sum over heads of g * rotate_half(key_states)``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ...blocks import tiles
from ...definition import Block, Copied, Summed
from .rotation import (
    adjoint_terms,
    head_terms,
    pair_clusters,
    rotate_half,
    table_tile,
)

Rows = Callable[[slice, slice, slice], torch.Tensor]
"""Given slices of batch entries, heads and new tokens, the cotangents ``[B,H,N,D]`` of these."""


def table_gradients(
    g: torch.Tensor, key: torch.Tensor, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return grad_cos and grad_sin for ``g`` and ``key`` of ``[B,H,N,D]``, in their own type."""
    return (
        (g * key).sum(dim=1, keepdim=keepdim),
        (g * rotate_half(key)).sum(dim=1, keepdim=keepdim),
    )


@dataclass(frozen=True)
class TokenGradients:
    """The blocks of the four gradients.

    Attributes:
        key: key_states, ``[B,H,N,D]``.
        cos: ``[B,1,N,D]``.
        sin: ``[B,1,N,D]``.
        key_rows: cotangents of the rows the new keys were written to.
        value_rows: those of the values.
        region: the region of grad_key_states and grad_value_states.
        keepdim: whether grad_cos and grad_sin keep the heads as a dimension of size one: they are
            ``[B,1,N,D]`` then, else ``[B,N,D]``.
    """

    key: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    key_rows: Rows
    value_rows: Rows
    region: str
    keepdim: bool

    def blocks(self, output: str, limit: int) -> Iterator[Block]:
        """Yield the blocks of one of the four outputs."""
        batches, heads, count, width = self.key.shape
        if output == "grad_value_states":
            for tile in tiles(self.key.shape, limit):
                batch, head, row, column = tile
                rows = self.value_rows(batch, head, row)
                yield Block(self.region, tile, Copied(rows[..., column]))
        elif output == "grad_key_states":
            # A tile spans all of D, as rotate_half pairs d with d + D/2.
            for batch, head, row in tiles((batches, heads, count), max(1, limit // (2 * width))):
                index = (batch, head, row, slice(0, width))
                yield Block(self.region, index, self._adjoint_rotation(batch, head, row))
        else:
            one = (slice(0, 1),) if self.keepdim else ()
            for batch, row in tiles((batches, count), max(1, limit // (heads * width))):
                index = (batch, *one, row, slice(0, width))
                yield Block("all rows", index, self._head_sum(batch, row, output == "grad_sin"))

    def _adjoint_rotation(self, batch: slice, head: slice, row: slice) -> Summed:
        def terms() -> torch.Tensor:
            cos, sin = (table_tile(table, batch, row) for table in (self.cos, self.sin))
            return adjoint_terms(self.key_rows(batch, head, row), cos, sin)

        return Summed(terms, 2, lambda: self._clusters(batch, row))

    def _head_sum(self, batch: slice, row: slice, rotated: bool) -> Summed:
        heads = self.key.shape[1]

        def terms() -> torch.Tensor:
            key = self.key[batch, :, row]
            factor = rotate_half(key) if rotated else key
            products = head_terms(self.key_rows(batch, slice(0, heads), row), factor)
            return products.unsqueeze(2) if self.keepdim else products

        def clusters() -> torch.Tensor:
            numbers = self._clusters(batch, row)
            return numbers if self.keepdim else numbers.squeeze(1)

        return Summed(terms, heads, clusters)

    def _clusters(self, batch: slice, row: slice) -> torch.Tensor:
        return pair_clusters(self.key.shape, self.cos, self.sin, batch, row)
