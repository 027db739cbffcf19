"""Messages between processes: JSON objects, one to a packet of a SOCK_SEQPACKET socket.

A packet arrives whole or not at all, so a peer that writes garbage can spoil its own message, but
can neither block the reader with half of one nor make it run anything. What is received is read
strictly as the dataclass it should be (:func:`decode`).
"""

from __future__ import annotations

import array
import dataclasses
import json
import math
import select
import socket
import time
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

MESSAGE_BYTES = 2**17
"""The longest message that is read."""

_T = TypeVar("_T")


class Malformed(ValueError):
    """A message that is none of ours; the text says what it was instead."""


class Gone(Exception):
    """The other end of a channel is closed, or its process has ended."""


class TimedOut(Exception):
    """No message came in time."""


class Channel:
    """One end of a pair of sockets.

    Args:
        end: a socket of type SOCK_SEQPACKET; it is closed with the channel.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the other finds this one gone."""
        self._socket.close()

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message, with file descriptors.

        Raises:
            Gone: if nobody is there to receive it.
        """
        data = json.dumps(message, allow_nan=False).encode()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            self._socket.sendmsg([data], ancillary if descriptors else [], socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Gone from error

    def receive(self, descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
        """Wait for the next message, and up to so many file descriptors with it.

        Raises:
            Gone: if the other end is closed.
            Malformed: if what came is no JSON object, or longer than a message may be.
        """
        room = socket.CMSG_SPACE(descriptors * array.array("i").itemsize) if descriptors else 0
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError as error:
            raise Gone from error
        if not data:
            raise Gone
        if flags & socket.MSG_TRUNC:
            raise Malformed(f"a message of more than {MESSAGE_BYTES} bytes")
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Malformed("a message that is not JSON") from error
        if not isinstance(message, dict):
            raise Malformed("a message that is no JSON object")
        received = array.array("i")
        for _level, _kind, payload in ancillary:
            received.frombytes(payload)
        return message, list(received)

    def is_readable(self, seconds: float = 0.0) -> bool:
        """Whether there is a message, or the other end is gone, within so many seconds."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return bool(poll.poll(math.ceil(seconds * 1000)))

    def wait(self, deadline: float) -> None:
        """Wait until there is something to receive.

        Args:
            deadline: the time, by ``time.monotonic()``, until which to wait.

        Raises:
            TimedOut: if there is nothing by then.
        """
        if not self.is_readable(max(0.0, deadline - time.monotonic())):
            raise TimedOut


def channel_pair() -> tuple[Channel, socket.socket]:
    """Make a pair: a channel, and the socket of its other end, to hand over."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours), theirs


def decode(kind: type[_T], value: object) -> _T:
    """Read plain JSON data as a dataclass, strictly.

    Args:
        kind: a dataclass of numbers, strings, optional values, tuples and such dataclasses.
        value: what ``json.loads`` made of ``dataclasses.asdict``.

    Raises:
        Malformed: if a field is missing, unknown, or of another type than declared.
    """
    if not isinstance(value, dict):
        raise Malformed(f"no {kind.__name__}: {type(value).__name__}")
    hints = typing.get_type_hints(kind)
    if set(value) != set(hints):
        raise Malformed(f"a {kind.__name__} with the fields {sorted(value)!s:.200}")
    try:
        return kind(**{name: _decode_value(hint, value[name]) for name, hint in hints.items()})
    except (ValueError, OverflowError) as error:
        raise Malformed(str(error)) from error


def _decode_value(hint: Any, value: Any) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list):
        kinds = options[:1] * len(value) if options[-1] is Ellipsis else options
        return tuple(_decode_value(k, v) for k, v in zip(kinds, value, strict=True))
    if origin is types.UnionType:
        return None if value is None else _decode_value(options[0], value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return decode(hint, value)
    if hint is float and type(value) is int:
        return float(value)
    # True equals 1, and a NaN is a float, but neither is sent.
    fits = value in options if origin is Literal else type(value) is (origin or hint)
    if not fits or (hint is float and not math.isfinite(value)):
        raise Malformed(f"{value!r:.80} where {hint} is due")
    return value
