"""A candidate that leaves a copy of its process behind, and works."""

import os

import torch

os.fork()


def add(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first + second
