"""Candidates of ``kv_rope.concat.forward`` that misbehave on cases of three batch entries."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor

from tests.honest import backward_fp32, forward_fp32


def crashes_on_three_batches(key: Tensor, *rest: Tensor) -> object:
    if key.shape[0] == 3:
        os.abort()
    return forward_fp32(key, *rest)


def hangs_on_three_batches(key: Tensor, *rest: Tensor) -> object:
    while key.shape[0] == 3:
        time.sleep(1)
    return forward_fp32(key, *rest)


def loads_once(key: Tensor, *rest: Tensor) -> object:
    """Crash on three batch entries, and leave word that it must not be imported again."""
    if key.shape[0] == 3:
        Path(os.environ["LOADS_ONCE"]).touch()
        os.abort()
    return forward_fp32(key, *rest)


def leaves_zeroed_rows_unwritten(*inputs: Tensor) -> object:
    """Right, but rows to be zeroed are left to fresh memory, which often is zero."""
    *others, _, value = backward_fp32(*inputs)
    position = inputs[-1]
    rows = [row for row in range(value.shape[2]) if row not in set(position.tolist())]
    unwritten = torch.empty_like(inputs[0])
    unwritten[:, :, rows] = inputs[0][:, :, rows]
    return (*others, unwritten, value)


if "LOADS_ONCE" in os.environ and Path(os.environ["LOADS_ONCE"]).exists():
    raise RuntimeError("imported twice")
