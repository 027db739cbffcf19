"""Candidates of ``kv_rope.concat.forward`` that misbehave on cases of three batch entries."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor

from tests.honest import forward_fp32


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


if "LOADS_ONCE" in os.environ and Path(os.environ["LOADS_ONCE"]).exists():
    raise RuntimeError("imported twice")
