"""Text in chunks of whole lines, in bounded memory however long a line is.

A line longer than a limit is skipped, not kept: a crash may leave gigabytes of zeros without a line
break at the end of a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator
from typing import IO, Any

import numpy as np

from nvt_torchrec.clicklog.text.row_ends import OPEN_ON_LINE, OPEN_TO_END, TOO_LONG, skip_rows

#: Bytes that are kept of a line that is too long.
KEPT_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class LongLine:
    """A line with more bytes than the limit, or a row whose quote is not closed within it.

    Attributes:
        begin: The byte of the (decompressed) file at which it begins.
        size: Its bytes, without its end.
        head: The first :data:`KEPT_BYTES` of them.
        limit: How many it may have.
        open_quote: Whether it is a row whose quote is not closed.
    """

    begin: int
    size: int
    head: bytes
    limit: int
    open_quote: bool = False

    def __str__(self) -> str:
        if self.open_quote:
            return (
                f"a quote in the row from byte {self.begin:,} on is not closed within "
                f"{self.limit:,} bytes"
            )
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
    quotes: str = "",
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
        quotes: The delimiter of text whose quoted fields may contain line breaks, which are then
            part of a line; "" for other text.
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
        if quotes:
            cut = filled
            if long is None:
                text = memoryview(buffer)[:filled].toreadonly()
                cut, long = yield from _rows(text, first, begin, limit, quotes, final=ended)
        else:
            cut = filled if ended else buffer.rfind(b"\n", first, filled) + 1 or first
            yield from _drop_long_lines(buffer, first, cut, begin, limit)
        if ended:
            return
        rest = memoryview(buffer)[cut:filled]
        begin += cut
        if len(rest) > limit and not quotes:
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


def _rows(
    text: memoryview, first: int, begin: int, limit: int, delimiter: str, *, final: bool
) -> Generator[memoryview | LongLine, None, tuple[int, LongLine | None]]:
    """Cut ``text[first:]``, where quoted fields may contain line breaks, into rows.

    Args:
        text: Of a bytearray; its first byte is byte ``begin`` of the file.
        first: Where a row begins.
        begin: See above.
        limit: See :func:`split_chunks`.
        delimiter: Likewise.
        final: Whether the file ends with the text.

    Yields:
        As :func:`split_chunks`.

    Returns:
        Where the rest begins, and a line that is too long and whose end has not been read.
    """
    array, stop = np.frombuffer(text, np.uint8), len(text)
    at = first
    while True:
        at, why = skip_rows(array, at, stop, final, limit, ord(delimiter))
        if first < at:
            yield text[first:at]
        if why not in (TOO_LONG, OPEN_ON_LINE, OPEN_TO_END):
            return at, None
        after = {OPEN_TO_END: stop, OPEN_ON_LINE: at}.get(why, at + limit + 1)
        newline = text.obj.find(b"\n", after, stop)  # type: ignore[attr-defined]
        end = newline if newline >= 0 else stop
        head = bytes(text[at : min(at + KEPT_BYTES, end)])
        line = LongLine(begin + at, end - at, head, limit, why != TOO_LONG)
        if end == stop and not final:
            return stop, line
        yield line
        first = at = min(end + 1, stop)
