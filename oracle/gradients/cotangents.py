"""The cotangents a backward is fed: plain ones, and others in memory as real programs pass them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cotangent:
    """One cotangent of all outputs.

    Attributes:
        name: ``random 1``, ``strided``, ``expanded``, ...
        tensors: one for each output, as they are fed.
    """

    name: str
    tensors: tuple[torch.Tensor, ...]

    @property
    def flat(self) -> torch.Tensor:
        """All values one after the other, float64."""
        return torch.cat([tensor.detach().to(torch.float64).reshape(-1) for tensor in self.tensors])

    @property
    def kind(self) -> str:
        """The name without its number."""
        return self.name.split(" ")[0]


def make_cotangents(
    outputs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], count: int, seed: int
) -> tuple[Cotangent, ...]:
    """Draw cotangents.

    Args:
        outputs: tensors of the outputs' shapes, on their devices.
        dtypes: the cotangents' types.
        count: how many contiguous random ones.
        seed: of the draws.

    Returns:
        ``count`` random ones; a ``strided`` one, which lies in every second place of a buffer with
        its last two dimensions exchanged, NaN in between; and an ``expanded`` one, one number seen
        as a whole tensor (stride 0), as the gradient of ``sum`` is.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: Sequence[int]) -> torch.Tensor:
        # Away from zero, so that no entry is hidden.
        random = torch.rand(2, *shape, dtype=torch.float64, generator=generator)
        return torch.where(random[0] < 0.5, -1.0, 1.0) * (0.5 + random[1])

    def make(name: str) -> Cotangent:
        tensors = []
        for output, dtype in zip(outputs, dtypes, strict=True):
            values = draw(() if name == "expanded" else output.shape).to(dtype).to(output.device)
            if name == "expanded":
                values = values.expand(output.shape)
            elif name == "strided":
                values = _spread(values)
            tensors.append(values)
        return Cotangent(name, tuple(tensors))

    names = [f"random {number}" for number in range(1, count + 1)]
    return tuple(make(name) for name in (*names, "strided", "expanded"))


def _spread(values: torch.Tensor) -> torch.Tensor:
    """Lay values out in every second place, the last two dimensions exchanged."""
    order = list(range(values.dim()))
    order[-2:] = order[-2:][::-1]
    shape = [values.shape[dimension] for dimension in order]
    buffer = torch.full((*shape, 2), torch.nan, dtype=values.dtype, device=values.device)
    view = buffer[..., 0].permute(order)
    return view.copy_(values)


def one_hot(
    outputs: Sequence[torch.Tensor], dtype: torch.dtype, output: int, place: int
) -> tuple[torch.Tensor, ...]:
    """Return the cotangent that picks one element of one output: a row of the Jacobian."""
    tensors = tuple(torch.zeros(out.shape, dtype=dtype, device=out.device) for out in outputs)
    tensors[output].view(-1)[place] = 1.0
    return tensors
