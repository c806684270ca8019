"""The bytes of files, local or remote, and where their lines begin."""

from __future__ import annotations

import contextlib
import functools
import itertools
import lzma
import zlib
from collections.abc import Iterator
from typing import IO

import fsspec
import numpy as np
import pyarrow as pa

from clicklog.errors import BadInputError
from clicklog.fast_rows import count_newlines

_SCAN_BYTES = 8 << 20
_LINE_BYTES = 64 << 10  # enough to hold the end of nearly every line


@functools.lru_cache(maxsize=64)
def filesystem_of(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a path or URL, and the path within it. Raises :class:`BadInputError`."""
    try:
        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise BadInputError(
            f"{path}: cannot be opened: {error}",
            "install the package that fsspec needs for it, or fetch the files and pass their path",
        ) from error


def read_bytes(path: str, begin: int, end: int) -> bytes:
    """The bytes ``[begin, end)``. Raises :class:`BadInputError` if they are not there."""
    data = read_up_to(path, begin, end)
    if len(data) != end - begin:
        raise BadInputError(
            f"{path}: {begin + len(data)} bytes instead of {end}: it shrank while it was read",
            "start again once nobody writes it",
        )
    return data


def read_up_to(path: str, begin: int, end: int) -> bytes:
    """The bytes ``[begin, end)``, fewer at the end of the file. Raises :class:`BadInputError`."""
    filesystem, name = filesystem_of(path)
    try:
        with filesystem.open(name, "rb") as file:
            file.seek(begin)
            return file.read(end - begin)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error}") from error


def _chunks(
    path: str, begin: int, end: int, size: int = _SCAN_BYTES
) -> Iterator[tuple[int, np.ndarray]]:
    for at in range(begin, end, size):
        yield at, np.frombuffer(read_bytes(path, at, min(at + size, end)), np.uint8)


def count_lines(path: str, begin: int, end: int) -> int:
    """Lines in the bytes ``[begin, end)``; a last line without its newline counts."""
    lines, last = 0, 10
    for _, chunk in _chunks(path, begin, end):
        lines += count_newlines(chunk)
        last = int(chunk[-1])
    return lines + (last != 10)


def offset_of_line(path: str, line: int, size: int, begin: int = 0) -> int:
    """Byte at which line ``line`` (from 0, at ``begin``) begins; ``size`` if there are no more."""
    if line <= 0:
        return begin
    seen = 0
    for at, chunk in _chunks(path, begin, size):
        lines = count_newlines(chunk)
        if seen + lines >= line:
            return at + int(np.flatnonzero(chunk == 10)[line - seen - 1]) + 1
        seen += lines
    return size


def cut_lines(path: str, begin: int, end: int, block_bytes: int) -> list[tuple[int, int]]:
    """Cut ``[begin, end)`` (whole lines) into stretches of about ``block_bytes``.

    Each cut is the first line end at or after a multiple of ``block_bytes``, so that a stretch does
    not depend on the ones before it.
    """
    cuts = [begin]
    for nominal in range(begin + block_bytes, end, block_bytes):
        if nominal <= cuts[-1]:
            continue
        for at, chunk in _chunks(path, nominal - 1, end, _LINE_BYTES):
            ends = np.flatnonzero(chunk == 10)
            if len(ends):
                cuts.append(at + int(ends[0]) + 1)
                break
    if cuts[-1] != end:
        cuts.append(end)
    return list(itertools.pairwise(cuts))


@contextlib.contextmanager
def _decompressed(path: str) -> Iterator[IO[bytes]]:
    if path.endswith(".zst"):  # fsspec needs one more package for it, Arrow does not
        with fsspec.open(path, "rb") as file, pa.CompressedInputStream(file, "zstd") as stream:
            yield stream
    else:
        with fsspec.open(path, "rb", compression="infer") as file:
            yield file


def read_stream(path: str, chunk_bytes: int) -> Iterator[bytes]:
    """The bytes of a file in chunks, decompressed by the ending of its name.

    Raises:
        BadInputError: it is missing, truncated, or not what its name says.
    """
    filesystem_of(path)  # its errors say more than those of opening
    try:
        with _decompressed(path) as file:
            while chunk := file.read(chunk_bytes):
                yield chunk
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file", "check the path") from None
    except IsADirectoryError:
        raise BadInputError(f"{path}: a directory", f"pass one file, as {path}/day_23") from None
    except (EOFError, OSError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise BadInputError(
            f"{path}: truncated, or not what its name says: {error}", "fetch it again"
        ) from error
