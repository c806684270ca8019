"""Text in chunks of whole lines, in bounded memory however long a line is.

A line longer than a limit is skipped, not kept: a crash may leave gigabytes of zeros without a line
break at the end of a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import IO, Any

#: Bytes that are kept of a line that is too long.
KEPT_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class LongLine:
    """A line with more bytes than the limit.

    Attributes:
        begin: The byte of the (decompressed) file at which it begins.
        size: Its bytes, without its end.
        head: The first :data:`KEPT_BYTES` of them.
        limit: How many it may have.
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


def split_chunks(
    file: IO[bytes],
    chunk_bytes: int,
    limit: int,
    *,
    begin: int = 0,
    size: int | None = None,
    head: bytes = b"",
) -> Iterator[memoryview | LongLine]:
    """Cut the rest of a file into chunks of whole lines.

    Args:
        file: Read from its current position on, each byte once.
        chunk_bytes: About how long a chunk is.
        limit: Bytes that a line may have, without its end; in place of a longer line comes a
            :class:`LongLine`.
        begin: The position of ``head`` in the file, for :attr:`LongLine.begin`.
        size: How many bytes to read at most: whole lines. None: up to the end of the file.
        head: Bytes that were read already and come before the rest of the file.

    Yields:
        In the order of the file, chunks of lines up to ``limit`` (read-only; the last line perhaps
        without its newline), and the longer lines.
    """
    rest = memoryview(head)  # of a line whose end has not been read
    long: LongLine | None = None  # a line that is too long already
    while True:
        wanted = max(chunk_bytes, len(rest))
        if size is not None:
            wanted = min(wanted, size)
        buffer = bytearray(len(rest) + wanted)
        buffer[: len(rest)] = rest
        filled = len(rest) + fill(file, memoryview(buffer)[len(rest) :])
        ended = filled < len(buffer) or not wanted
        if size is not None:
            size -= wanted
            ended = ended or not size
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
        yield from _drop_long_lines(buffer, first, cut, begin, limit)
        if ended:
            return
        rest = memoryview(buffer)[cut:filled]
        begin += cut
        if len(rest) > limit:
            long = LongLine(begin, len(rest), bytes(rest[:KEPT_BYTES]), limit)
            begin += len(rest)
            rest = memoryview(b"")


def fill(file: Any, view: memoryview) -> int:
    """Read until a buffer is full or the file has ended; return how many bytes."""
    filled = 0
    while filled < len(view):
        got = file.readinto(view[filled:])
        if not got:
            break
        filled += got
    return filled


def _drop_long_lines(
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
