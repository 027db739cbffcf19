"""What a process prints, shortened: the first and the last bytes of a stream."""

from __future__ import annotations

import array
import fcntl
import os
import termios

# A pipe's usual capacity: one read empties it.
_CHUNK = 2**16


class HeadTail:
    """Keeps the first and the last bytes read from a pipe, and counts those between.

    Args:
        limit: how many bytes of each end are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head = b""
        self._tail = b""
        self._left_out = 0

    def read(self, descriptor: int) -> bool:
        """Take what is there to read, up to a pipe's usual capacity; False at the end.

        There must be something, or it waits: what stands in the pipe is read here only.
        """
        chunk = os.read(descriptor, _CHUNK)
        room = self._limit - len(self._head)
        self._head += chunk[:room]
        tail = self._tail + chunk[room:]
        self._left_out += max(0, len(tail) - self._limit)
        self._tail = tail[-self._limit :]
        return bool(chunk)

    def read_all(self, descriptor: int) -> None:
        """Take what was there at the time of the call, and not what is written meanwhile."""
        waiting = array.array("i", [0])
        fcntl.ioctl(descriptor, termios.FIONREAD, waiting)
        for _ in range(-(-waiting[0] // _CHUNK)):
            self.read(descriptor)

    def text(self) -> str:
        """Decode what was kept."""
        gap = f"\n[{self._left_out} bytes left out]\n".encode() if self._left_out else b""
        return (self._head + gap + self._tail).decode(errors="replace")
