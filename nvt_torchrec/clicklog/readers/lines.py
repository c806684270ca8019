"""Read bytes of files, local or remote, and find where their lines begin."""

from __future__ import annotations

import contextlib
import io
import itertools
import lzma
import zlib
from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa
from fsspec.compression import compr
from fsspec.utils import infer_compression

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.base.files.remote import open_input
from nvt_torchrec.formats.feature_spec import InputFormat

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: The first bytes of a parquet file.
PARQUET_MAGIC = b"PAR1"
#: The number of bytes that are read at once to find the end of a long line.
_SCAN_BYTES = 8 << 20
#: The number of bytes that are read at first; nearly every line ends within them.
_LINE_BYTES = 64 << 10


def read_bytes(path: str, begin: int, end: int) -> bytes:
    """Read the bytes ``[begin, end)``. Raises :class:`BadInputError` if the file is shorter."""
    data = read_at_most(path, begin, end)
    if len(data) != end - begin:
        raise _make_shrunk_error(path, begin + len(data), end)
    return data


def read_at_most(path: str, begin: int, end: int) -> bytes:
    """Read the bytes ``[begin, end)``, fewer at the end of the file. Raises BadInputError."""
    with _open(path) as file:
        file.seek(begin)
        return file.read(end - begin)


def read_into(path: str, begin: int, end: int, buffer: memoryview) -> None:
    """Read the bytes ``[begin, end)`` into the beginning of a buffer.

    Raises:
        BadInputError: The file cannot be read, or is shorter.
    """
    with _open(path) as file:
        file.seek(begin)
        filled = fill(file, buffer[: end - begin])
    if filled < end - begin:
        raise _make_shrunk_error(path, begin + filled, end)


@contextlib.contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    """Open a file. Raises BadInputError if it cannot be opened, or read while it is open."""
    try:
        with open_input(path) as file:
            yield file
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error}") from error


def _make_shrunk_error(path: str, size: int, wanted: int) -> BadInputError:
    """Return the error about a file that has ``size`` bytes instead of ``wanted``."""
    return BadInputError(
        f"{path}: {size} bytes instead of {wanted}: the file shrank while it was read",
        "start again when no program writes to it",
    )


def read_chunks(
    path: str, begin: int, end: int, chunk_bytes: int, text: InputFormat, source: str = ""
) -> Iterator[memoryview]:
    """Read the whole lines in the bytes ``[begin, end)``; see :func:`split_chunks`.

    Raises:
        BadInputError: The file cannot be read, or is shorter.
        BadRowError: A line is too long.
    """
    with _open(path) as file:
        file.seek(begin)
        yield from split_chunks(
            file,
            chunk_bytes,
            text.line_limit,
            source=source or path,
            begin=begin,
            size=end - begin,
        )
        if file.tell() < end:
            raise _make_shrunk_error(path, file.tell(), end)


def cut_lines(path: str, begin: int, end: int, block_bytes: int) -> list[tuple[int, int]]:
    """Cut ``[begin, end)`` (whole lines) into ranges of about ``block_bytes``.

    Each cut is the first line end at or after a multiple of ``block_bytes``, so that a range does
    not depend on previous ranges. A long line makes its range longer; no byte is read twice.
    """
    cuts = [begin]
    with _open(path) as file:
        for nominal in range(begin + block_bytes, end, block_bytes):
            if nominal > cuts[-1]:  # otherwise a long line ends after it
                cuts.append(_find_line_end(file, nominal - 1, end))
    if cuts[-1] != end:
        cuts.append(end)
    return list(itertools.pairwise(cuts))


def _find_line_end(file: IO[bytes], begin: int, end: int) -> int:
    """Return the byte after the first newline of ``[begin, end)``; ``end`` if there is none."""
    file.seek(begin)
    offset = begin
    size = _LINE_BYTES
    while offset < end:
        chunk = file.read(min(size, end - offset))
        if not chunk:
            break
        newline = chunk.find(b"\n")
        if newline >= 0:
            return offset + newline + 1
        offset += len(chunk)
        size = _SCAN_BYTES
    return end


def read_stream(path: str, chunk_bytes: int) -> Iterator[bytes]:
    """Read a file in chunks, decompressed according to the ending of its name.

    Raises:
        BadInputError: The file is missing or truncated, or its name has the wrong ending.
    """
    with _stream(path) as file:
        while chunk := file.read(chunk_bytes):
            yield chunk


def stream_chunks(path: str, chunk_bytes: int, text: InputFormat) -> Iterator[memoryview]:
    """Read the lines of a file in chunks, decompressed; see :func:`split_chunks`.

    The lines before the header or the first row are skipped.

    Raises:
        BadInputError: As :func:`read_stream`.
        BadRowError: A line is too long.
    """
    with _stream(path) as file:
        head, begin, _ = skip_preamble(file, text.skip_lines, text.comment)
        limit = text.line_limit
        yield from split_chunks(file, chunk_bytes, limit, source=path, begin=begin, head=head)


def find_preamble(path: str, text: InputFormat) -> tuple[int, int]:
    """Return the number of bytes and of lines before the header or the first row of a file.

    Raises:
        BadInputError: As :func:`read_stream`.
    """
    with _stream(path) as file:
        return skip_preamble(file, text.skip_lines, text.comment)[1:]


def find_text_end(path: str, begin: int, end: int) -> int:
    """Return the offset of the empty lines at the end of the bytes ``[begin, end)``.

    Only the last :data:`_SCAN_BYTES` are searched. If they are all empty lines, these count as
    rows.

    Raises:
        BadInputError: The file cannot be read.
    """
    scanned = max(begin, end - _SCAN_BYTES)
    kept = drop_empty_lines(read_at_most(path, scanned, end))
    if not kept and scanned > begin:  # all empty, and there may be more empty lines before them
        return end
    return scanned + kept


def drop_empty_lines(text: bytes | memoryview) -> int:
    """Return the offset of the empty lines at the end of a text of whole lines."""
    whole = bytes(text)
    if not whole.endswith(b"\n"):
        return len(whole)
    rows = whole.rstrip(b"\r\n")
    return whole.index(b"\n", len(rows)) + 1 if rows else 0


def skip_preamble(file: IO[bytes], skip_lines: int, comment: str = "") -> tuple[bytes, int, int]:
    """Skip a byte order mark, ``skip_lines`` lines, and then those that begin with ``comment``.

    Returns:
        The bytes that were read after them, the number of bytes before these, and the number of
        skipped lines.
    """
    begin = 0
    lines = 0
    part = file.readline(_LINE_BYTES)  # the beginning of a line, which may be longer
    if part.startswith(BYTE_ORDER_MARK):
        begin = len(BYTE_ORDER_MARK)
        part = part.removeprefix(BYTE_ORDER_MARK)
    is_within_line = False
    while part:
        is_comment = bool(comment) and part.startswith(comment.encode())
        if not (is_within_line or lines < skip_lines or is_comment):
            break
        begin += len(part)
        is_within_line = not part.endswith(b"\n")
        if not is_within_line:
            lines += 1
        part = file.readline(_LINE_BYTES)
    return part, begin, lines


@contextlib.contextmanager
def _stream(path: str) -> Iterator[IO[bytes]]:
    """Open a file, decompressed by the ending of its name. Raises as :func:`read_stream`."""
    kind = infer_compression(path)
    try:
        with open_input(path) as file:
            if path.endswith(".zst"):  # fsspec needs an additional package for it, Arrow does not
                with pa.CompressedInputStream(file, "zstd") as stream:
                    yield io.BufferedReader(stream)
            elif kind is None:
                yield file
            else:
                with compr[kind](file, mode="rb") as stream:
                    yield stream
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file", "check the path") from None
    except PermissionError:
        raise BadInputError(f"{path}: permission denied", "make it readable") from None
    except IsADirectoryError:
        raise BadInputError(f"{path}: a directory", "pass one of its files") from None
    except (EOFError, OSError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise BadInputError(
            f"{path}: truncated, or not of the type in its name: {error}", "fetch it again"
        ) from error


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
        file: The file; it is read from its current position on, each byte once.
        chunk_bytes: The approximate size of a chunk.
        limit: The largest length of a line in bytes, without its line break.
        source: The name of the file in errors.
        begin: The position of ``head`` in the file, for errors.
        size: The number of bytes to read, which are whole lines; None for all.
        head: Bytes that were read before, and come before the rest of the file.

    Raises:
        BadRowError: A line is longer than ``limit``.
    """
    rest = memoryview(head)  # the beginning of a line whose end has not been read
    while True:
        # If a line is longer than a chunk, the chunk size doubles, to limit how often it is copied.
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
    checked = 0  # no line before this byte is too long
    while stop - checked > limit:
        # Search for the last newline within the limit, not the first one: that takes one step for
        # about ``limit`` bytes instead of one for each line.
        newline = buffer.rfind(b"\n", checked, checked + limit + 1)
        if newline < 0:
            raise BadRowError(
                f"{source}: the line at byte {begin + checked:,} does not end within {limit:,} "
                "bytes",
                "truncate the file there if a crash left such an end, or set a larger max_line_kb "
                "in [input] of the spec",
            )
        checked = newline + 1


def fill(file: Any, view: memoryview) -> int:
    """Read until a buffer is full or the file ends; return the number of bytes."""
    filled = 0
    while filled < len(view):
        count = file.readinto(view[filled:])
        if not count:
            break
        filled += count
    return filled
