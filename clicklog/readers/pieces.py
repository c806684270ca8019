"""Text in pieces of whole lines, in bounded memory however long a line is.

A line longer than a limit is read over, not kept: what a crash leaves at the end of a file is
gigabytes of zeros without a line break.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import IO

#: Bytes that are kept of a line that is too long.
KEPT_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class LongLine:
    """A line that has more bytes than it may have.

    Attributes:
        begin: the byte of the (decompressed) file at which it begins.
        size: its bytes, without its end.
        head: the first :data:`KEPT_BYTES` of them.
        limit: how many it may have.
    """

    begin: int
    size: int
    head: bytes
    limit: int

    def __str__(self) -> str:
        return (
            f"a line of {self.size:,} bytes from byte {self.begin:,} on, "
            f"where at most {self.limit:,} are read (its first {len(self.head):,} are kept)"
        )


class EndedEarlyError(Exception):
    """A file has fewer bytes than asked for; ``args`` are how many it has."""


def split_pieces(
    file: IO[bytes], piece_bytes: int, limit: int, *, begin: int = 0, size: int | None = None
) -> Iterator[memoryview | LongLine]:
    """Cut what a file holds from where it stands into pieces of whole lines.

    Args:
        file: is read from begin to end, each byte once.
        piece_bytes: about how long a piece is.
        limit: bytes of a line, without its end; of longer ones a :class:`LongLine` comes instead.
        begin: the byte of the file at which it stands, for :attr:`LongLine.begin`.
        size: how much to read: whole lines. Without, all there is.

    Yields:
        In their order, lines (read-only; the last one perhaps without its newline), none of them
        longer than ``limit``; and those that are.

    Raises:
        EndedEarlyError: there are fewer than ``size`` bytes.
    """
    rest = memoryview(b"")  # a line of which the end has not come
    long: LongLine | None = None  # one that is too long already
    while True:
        wanted = max(piece_bytes, len(rest))
        if size is not None:
            wanted = min(wanted, size)
        buffer = bytearray(len(rest) + wanted)
        buffer[: len(rest)] = rest
        filled = len(rest) + _fill(file, memoryview(buffer)[len(rest) :])
        ended = filled < len(buffer) or not wanted
        if size is not None:
            if ended and size:
                raise EndedEarlyError(begin + filled)
            size -= wanted
            ended = not size
        first = 0
        if long is not None:
            first = buffer.find(b"\n", 0, filled) + 1
            gone = first - 1 if first else filled
            long = dataclasses.replace(long, size=long.size + gone)
            if first or ended:
                yield long
                long = None
            first = first or filled
        cut = filled if ended else buffer.rfind(b"\n", first, filled) + 1 or first
        yield from _without_long_lines(buffer, first, cut, begin, limit)
        if ended:
            return
        rest = memoryview(buffer)[cut:filled]
        begin += cut
        if len(rest) > limit:
            long = LongLine(begin, len(rest), bytes(rest[:KEPT_BYTES]), limit)
            begin += len(rest)
            rest = memoryview(b"")


def _fill(file: IO[bytes], view: memoryview) -> int:
    """Read until a buffer is full or the file has ended; how many bytes."""
    filled = 0
    while filled < len(view):
        got = file.readinto(view[filled:])
        if not got:
            break
        filled += got
    return filled


def _without_long_lines(
    buffer: bytearray, at: int, stop: int, begin: int, limit: int
) -> Iterator[memoryview | LongLine]:
    """The whole lines ``buffer[at:stop]``; its first byte is byte ``begin`` of the file."""
    view = memoryview(buffer).toreadonly()
    first = at
    while stop - at > limit:
        newline = buffer.rfind(b"\n", at, at + limit + 1)  # mostly a few steps
        if newline >= 0:
            at = newline + 1
            continue
        newline = buffer.find(b"\n", at + limit, stop)
        end = newline if newline >= 0 else stop
        if first < at:
            yield view[first:at]
        yield LongLine(begin + at, end - at, bytes(view[at : at + KEPT_BYTES]), limit)
        first = at = min(end + 1, stop)
    if first < stop:
        yield view[first:stop]
