"""What autograd recorded of one call, and the gradients it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .evaluation import Arguments, Function, copy_as_laid_out, read_outputs


@dataclass(frozen=True)
class Graph:
    """A function called with leaves, and what autograd recorded.

    Attributes:
        leaves: the differentiated inputs: copies with the strides given, in memory of their own.
        outputs: the floating outputs.
    """

    leaves: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]

    @classmethod
    def build(
        cls, func: Function, arguments: Arguments, requiring: Sequence[int] | None = None
    ) -> Graph:
        """Call the function.

        Args:
            func: the function.
            arguments: what it is called with.
            requiring: which differentiated inputs require gradients, by number; None for all.
        """
        values = list(arguments.values)
        for place, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                shared = place in arguments.overlapping
                values[place] = (
                    value.detach().clone(memory_format=torch.contiguous_format)
                    if shared
                    else copy_as_laid_out(value)
                )
        leaves = tuple(values[place] for place in arguments.checked)
        for number, leaf in enumerate(leaves):
            leaf.requires_grad_(requiring is None or number in requiring)
        return cls(leaves, read_outputs(func(*values)))

    def gradients(self, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run the backward; None where autograd has no gradient."""
        return self._gradients(self.outputs, cotangents)

    def _gradients(
        self, outputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        requiring = [leaf for leaf in self.leaves if leaf.requires_grad]
        pairs = [
            (output, cotangent)
            for output, cotangent in zip(outputs, cotangents, strict=True)
            if output.requires_grad
        ]
        if not pairs:
            return [None] * len(self.leaves)
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                requiring,
                [cotangent for _, cotangent in pairs],
                retain_graph=True,
                allow_unused=True,
            )
        )
        return [next(found) if leaf.requires_grad else None for leaf in self.leaves]

    def with_undefined(
        self, cotangents: Sequence[torch.Tensor], number: int
    ) -> list[torch.Tensor | None]:
        """Run the backward with the cotangent of one output left undefined."""
        outputs = list(self.outputs)
        outputs[number] = _Undefined.apply(outputs[number])  # type: ignore[no-untyped-call]
        return self._gradients(outputs, cotangents)

    def batched(self, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run the backward for cotangents stacked along a new first axis, through vmap."""
        pairs = [
            (output, cotangent)
            for output, cotangent in zip(self.outputs, cotangents, strict=True)
            if output.requires_grad
        ]
        return list(
            torch.autograd.grad(
                [output for output, _ in pairs],
                self.leaves,
                [cotangent for _, cotangent in pairs],
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
        )

    def why_absent(self, number: int) -> str:
        """Say why a leaf has no gradient: ``missing`` if a path leads to it, else ``detached``."""
        leaf = self.leaves[number]
        waiting = [output.grad_fn for output in self.outputs if output.grad_fn is not None]
        seen = set()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if getattr(node, "variable", None) is leaf:
                return "missing"
            waiting += [following for following, _ in node.next_functions if following is not None]
        return "detached"


class _Undefined(torch.autograd.Function):
    """The identity, whose backward passes on no gradient at all."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Return the tensor."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:  # noqa: ARG004
        """Return nothing."""
        return


def eager_gradients(
    function: Function, arguments: Arguments
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor | None] | None]:
    """Return what computes a function's gradients in the inputs' own type, by autograd.

    It returns None where the outputs are of another type than the inputs, so that nothing is
    learned about computing in theirs.
    """

    def gradients(cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
        graph = Graph.build(function, arguments)
        same = {tensor.dtype for tensor in graph.leaves} == {out.dtype for out in graph.outputs}
        return graph.gradients(cotangents) if same else None

    return gradients
