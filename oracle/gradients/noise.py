"""How exactly a function computes: the noise of its values, found from the values themselves.

Sixth differences of values at points 2^-20 apart or so (relative to the inputs, all moved at once):
what is smooth cancels there, what is not stays (J. J. More and S. M. Wild, "Estimating
computational noise", SIAM J. Sci. Comput. 2011). Randomness and computing in less than float64
show as well. Nine points lie on each of three lines, as on one the roundings may happen to follow
a smooth curve; and a little beside the inputs, as kinks and jumps are often exactly at them
(zeros, integers) and are no noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from .evaluation import copy_as_laid_out, has_overlap

_POINTS = 9
_ORDER = 6
_SPACINGS = (1.0 * 2.0**-20, 1.4 * 2.0**-21, 1.7 * 2.0**-19)
_OFFSET = 2.0**-12
_DEVIATIONS = 4


def nearby(tensors: Sequence[torch.Tensor], seed: int) -> Iterator[list[torch.Tensor]]:
    """Yield float64 tensors near the given ones: evenly spaced, on one random line after another.

    They lie in memory as the given ones do, expanded ones excepted.
    """
    generator = torch.Generator().manual_seed(seed)
    for spacing in _SPACINGS:
        directions = []
        for tensor in tensors:
            random = torch.rand(2, *tensor.shape, dtype=torch.float64, generator=generator)
            sign = torch.where(random[0] < 0.5, -1.0, 1.0) * (0.5 + random[1] / 2)
            directions.append(sign.to(tensor.device) * scales(tensor).view(tensor.shape))
        for number in range(-(_POINTS // 2), _POINTS // 2 + 1):
            yield [
                _moved(tensor, (_OFFSET + number * spacing) * direction)
                for tensor, direction in zip(tensors, directions, strict=True)
            ]


def _moved(tensor: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    if has_overlap(tensor):
        return tensor + change
    return copy_as_laid_out(tensor).add_(change)


def noise_of(values: torch.Tensor) -> torch.Tensor:
    """Return four standard deviations of the noise in values at :func:`nearby` points.

    Args:
        values: float64 ``[points, ...]``.

    Returns:
        float64 ``[...]``; 0 where values are not finite.
    """
    lines = values.view(len(_SPACINGS), _POINTS, *values.shape[1:])
    differences = lines.diff(n=_ORDER, dim=1)
    variance = differences.square().mean(dim=(0, 1)) / math.comb(2 * _ORDER, _ORDER)
    noise = _DEVIATIONS * variance.sqrt()
    return torch.where(torch.isfinite(noise), noise, 0.0)


def scales(tensor: torch.Tensor) -> torch.Tensor:
    """Return, per element, a power of two of the size of the numbers there, float64 ``[count]``.

    The size is that of the element or of the tensor's root mean square, whichever is larger; one
    for a tensor of zeros.
    """
    flat = tensor.reshape(-1)
    finite = torch.where(torch.isfinite(flat), flat, 0.0)
    largest = finite.abs().max() if flat.numel() else finite.sum()
    if float(largest) == 0:
        return torch.ones_like(flat)
    mean = (finite / largest).square().mean().sqrt() * largest
    return torch.exp2(torch.maximum(finite.abs(), mean).log2().round())
