"""Settings of this process that Python's standard library has no names for."""

from __future__ import annotations

import ctypes

# From linux/prctl.h.
PR_SET_PDEATHSIG = 1
"""The signal that this process gets when its parent ends."""
PR_SET_CHILD_SUBREAPER = 36
"""Whether orphans below this process become its children."""


def prctl(option: int, value: int) -> None:
    """Change a setting of this process, as the system call of that name does.

    Raises:
        OSError: if the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
