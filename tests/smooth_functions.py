"""Smooth functions of two tensors, composed at random, as hypothesis strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

Unary = Callable[[torch.Tensor], torch.Tensor]
Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ROWS, COLUMNS = 3, 4


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Multiply by a fixed matrix."""
    grid = torch.arange(COLUMNS * COLUMNS, dtype=x.dtype).view(COLUMNS, COLUMNS)
    return x @ torch.cos(1.7 * grid)


UNARY: dict[str, Unary] = {
    "sin": torch.sin,
    "cos of 5 x": lambda x: torch.cos(5 * x),
    "tanh": torch.tanh,
    "exp of tanh": lambda x: torch.exp(torch.tanh(x)),
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "x^2 / (1 + x^2)": lambda x: x * x / (1 + x * x),
    "log(1 + x^2)": lambda x: torch.log1p(x * x),
    "sqrt(1 + x^2)": lambda x: torch.sqrt(1 + x * x),
    "atan": torch.atan,
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (COLUMNS,), eps=0.1),
    "matrix": _mix,
    "cumsum": lambda x: torch.cumsum(x, 0),
    "roll": lambda x: x.roll(1, -1),
    "transposed and back": lambda x: x.T.contiguous().sin().T,
    "scaled down": lambda x: 1e-3 * x,
    "scaled up": lambda x: 30 * x,
}
BINARY: dict[str, Binary] = {
    "plus": torch.add,
    "minus": torch.sub,
    "times": torch.mul,
    "over 1 + y^2": lambda x, y: x / (1 + y * y),
    "atan2": lambda x, y: torch.atan2(x, 2 + y * y),
    "attention": lambda x, y: torch.softmax(x @ y.T, -1) @ y,
}


@dataclass(frozen=True)
class SmoothFunction:
    """A composed function.

    Attributes:
        text: how it is composed.
        compute: takes ``[ROWS, COLUMNS]`` and ``[COLUMNS]``; returns ``[ROWS, COLUMNS]``.
    """

    text: str
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.compute(x, y)


_X = SmoothFunction("x", lambda x, _: x)
_Y = SmoothFunction("y", lambda x, y: y.expand(x.shape))


def _apply(name: str, inner: SmoothFunction) -> SmoothFunction:
    outer = UNARY[name]
    return SmoothFunction(f"{name}({inner.text})", lambda x, y: outer(inner(x, y)))


def _join(name: str, left: SmoothFunction, right: SmoothFunction) -> SmoothFunction:
    outer = BINARY[name]
    return SmoothFunction(
        f"({left.text}) {name} ({right.text})", lambda x, y: outer(left(x, y), right(x, y))
    )


def smooth_functions() -> st.SearchStrategy[SmoothFunction]:
    """Return a strategy for functions of up to about a dozen operations."""
    return st.recursive(
        st.sampled_from((_X, _Y)),
        lambda inner: st.one_of(
            st.builds(_apply, st.sampled_from(sorted(UNARY)), inner),
            st.builds(_join, st.sampled_from(sorted(BINARY)), inner, inner),
        ),
        max_leaves=6,
    )


def draw_inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the two inputs."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=generator),
        torch.randn(COLUMNS, dtype=torch.float64, generator=generator),
    )
