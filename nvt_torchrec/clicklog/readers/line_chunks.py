"""Text in chunks of whole lines, in bounded memory.

A longer line than the limit is an error: a crash may leave gigabytes of zeros without a line break
at the end of a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from nvt_torchrec.base.errors import BadRowError


def split_chunks(
    file: IO[bytes],
    chunk_bytes: int,
    limit: int,
    *,
    source: str = "",
    begin: int = 0,
    size: int | None = None,
    head: bytes = b"",
) -> Iterator[memoryview]:
    """Yield the rest of a file in chunks of whole lines, read-only.

    Args:
        file: Read from its current position on, each byte once.
        chunk_bytes: About how long a chunk is.
        limit: Bytes that a line may have, without its end.
        source: Names the file in errors.
        begin: The position of ``head`` in the file, for errors.
        size: How many bytes to read at most: whole lines. None: up to the end of the file.
        head: Bytes that were read already and come before the rest of the file.

    Raises:
        BadRowError: A line is longer than ``limit``.
    """
    rest = memoryview(head)  # of a line whose end has not been read
    while True:
        wanted = max(chunk_bytes, len(rest))
        if size is not None:
            wanted = min(wanted, size)
            size -= wanted
        buffer = bytearray(len(rest) + wanted)
        buffer[: len(rest)] = rest
        filled = len(rest) + fill(file, memoryview(buffer)[len(rest) :])
        _check_lines(buffer, filled, limit, source, begin)
        ended = filled < len(buffer) or not wanted or size == 0
        cut = filled if ended else buffer.rfind(b"\n", 0, filled) + 1
        if cut:
            yield memoryview(buffer)[:cut].toreadonly()
        if ended:
            return
        rest = memoryview(buffer)[cut:filled]
        begin += cut


def _check_lines(buffer: bytearray, stop: int, limit: int, source: str, begin: int) -> None:
    """Check that no line before ``stop`` is longer than ``limit``; see :func:`split_chunks`."""
    at = 0
    while stop - at > limit:
        newline = buffer.rfind(b"\n", at, at + limit + 1)  # mostly a few steps
        if newline < 0:
            raise BadRowError(
                f"{source}: a line that does not end within {limit:,} bytes from byte "
                f"{begin + at:,} on",
                "truncate the file there if a crash left such an end, or set a larger max_line_kb "
                "in [input] of the spec",
            )
        at = newline + 1


def fill(file: Any, view: memoryview) -> int:
    """Read until a buffer is full or the file has ended; return how many bytes."""
    filled = 0
    while filled < len(view):
        got = file.readinto(view[filled:])
        if not got:
            break
        filled += got
    return filled
