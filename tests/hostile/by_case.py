"""Candidates of ``kv_rope.concat.forward`` that misbehave on cases of three batch entries."""

from __future__ import annotations

import os
import resource
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


def compiles_for_two_seconds_then_crashes_on_three_batches(key: Tensor, *rest: Tensor) -> object:
    """Take long in the first call of every process, as a compiler does."""
    if not _COMPILED:
        time.sleep(2)
        _COMPILED.append(True)
    return crashes_on_three_batches(key, *rest)


def breaks_torch_on_three_batches(key: Tensor, *rest: Tensor) -> object:
    """Take from torch what the reading of outputs needs."""
    outputs = forward_fp32(key, *rest)
    if key.shape[0] == 3:
        torch.Tensor.data_ptr = None  # type: ignore[method-assign, assignment]
    return outputs


def spends_its_files_on_three_batches(key: Tensor, *rest: Tensor) -> object:
    """Leave the process no file to open."""
    outputs = forward_fp32(key, *rest)
    if key.shape[0] == 3:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    return outputs


def wrong_from_the_fourth_call_on(*inputs: Tensor) -> object:
    """Depend on how often it was called."""
    _CALLS.append(True)
    keys, values = forward_fp32(*inputs)
    return (keys, values) if len(_CALLS) < 4 else (keys, values + 1)


_COMPILED: list[bool] = []
_CALLS: list[bool] = []
