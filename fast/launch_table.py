"""Tiles and warps by the regime of the shape. Nothing is tried at run time.

Sizes are in bytes or elements, so that one row of the table holds for all head dims and types. The
rows are ordered; the first whose limit is not exceeded is taken.

The rows below were chosen by counting, and have not been measured yet: enough loads of 16 bytes in
flight on 132 multiprocessors, and at least two programs on each where there is work for them.
"""

from __future__ import annotations

from dataclasses import dataclass

_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class ForwardTile:
    """How a forward kernel divides its work.

    Attributes:
        rotate_elements: elements of half rows that a token program rotates.
        copy_bytes: bytes of each cache that a copying program copies for one head.
        copy_programs: with named rows, how many copying programs there should be at least before
            one takes several heads, which then share the search through cache_position.
        warps: warps of a program.
        stream: see :func:`fast.addressing.load`.
    """

    rotate_elements: int
    copy_bytes: int
    copy_programs: int
    warps: int
    stream: int


@dataclass(frozen=True)
class BackwardTile:
    """How a backward kernel divides its work.

    Attributes:
        token_elements: elements of half rows of one head that a token program holds; half as many
            in float32.
        heads_at_once: heads whose rows are loaded before the first is worked on, at most.
        registers: of a thread, at most. With a limit of our own the compiler does not spill a few
            to stay below one of its own choosing; 128 let four programs of four warps share a
            multiprocessor, 168 three.
        copy_bytes: see :class:`ForwardTile`; as are the others.
        copy_programs: see :class:`ForwardTile`.
        warps: see :class:`ForwardTile`.
        stream: see :class:`ForwardTile`.
    """

    token_elements: int
    heads_at_once: int
    registers: int
    copy_bytes: int
    copy_programs: int
    warps: int
    stream: int


# By the bytes that the call moves.
FORWARD: tuple[tuple[int, ForwardTile], ...] = (
    # Too little for 132 multiprocessors: many small programs.
    (4 << 20, ForwardTile(1024, 2048, 1024, 4, 0)),
    # Everything else: 16 KiB in flight for each program of four warps.
    (_UNLIMITED, ForwardTile(1024, 8192, 1024, 4, 0)),
)

# By the number of new tokens in all batch entries.
BACKWARD: tuple[tuple[int, BackwardTile], ...] = (
    # A few tokens: their chain of loads is what takes time, so all heads are loaded at once.
    (1024, BackwardTile(128, 8, 128, 8192, 1024, 4, 0)),
    (8192, BackwardTile(256, 4, 128, 8192, 1024, 4, 0)),
    # Enough tokens to fill the GPU: registers are better spent on more programs at a time.
    (_UNLIMITED, BackwardTile(512, 2, 168, 8192, 1024, 4, 0)),
)

# The interpreter pays by the operation, not by the element.
FORWARD_INTERPRETED = ForwardTile(8192, 16384, 1, 4, 0)
BACKWARD_INTERPRETED = BackwardTile(4096, 1, 255, 16384, 1, 4, 0)


def forward_tile(bytes_moved: int, *, interpreted: bool) -> ForwardTile:
    """Return the tile for a forward call."""
    if interpreted:
        return FORWARD_INTERPRETED
    return next(tile for limit, tile in FORWARD if bytes_moved <= limit)


def backward_tile(tokens: int, *, interpreted: bool) -> BackwardTile:
    """Return the tile for a backward call with that many new tokens, over all batch entries."""
    if interpreted:
        return BACKWARD_INTERPRETED
    return next(tile for limit, tile in BACKWARD if tokens <= limit)
