"""Rows of text files whose quoted fields contain line breaks: count, find and cut them.

Where a row begins depends on all quotes before it, so these read the file from where a row is known
to begin; :mod:`.lines` needs no more than the next line break.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from nvt_torchrec.clicklog.readers.line_chunks import LongLine
from nvt_torchrec.clicklog.readers.lines import read_chunks
from nvt_torchrec.clicklog.text.row_ends import NO_LIMIT, count_rows, delimiter_bytes, skip_rows

_SCAN_BYTES = 8 << 20


def count_quoted_rows(path: str, begin: int, end: int, limit: int, delimiter: str) -> int:
    """Count the rows in the bytes ``[begin, end)``.

    Args:
        path: of the file.
        begin: where a row begins.
        end: where a row or the file ends.
        limit: bytes of a row, see :func:`.line_chunks.split_chunks`.
        delimiter: between fields.
    """
    pieces = _pieces(path, begin, end, limit, delimiter)
    return sum(1 if isinstance(p, LongLine) else count_rows(p, delimiter) for _, p in pieces)


def offset_of_quoted_row(
    path: str, row: int, begin: int, end: int, limit: int, delimiter: str
) -> int:
    """Return the byte at which row ``row`` (from 0, at ``begin``) begins; ``end`` without one."""
    if row <= 0:
        return begin
    for at, piece in _pieces(path, begin, end, limit, delimiter):
        if row == 0:
            return at
        if isinstance(piece, LongLine):
            row -= 1
            continue
        found, rows = _skip(piece, delimiter, row, NO_LIMIT)
        row -= rows
        if row == 0 and found < len(piece):
            return at + found
    return end


def cut_quoted_rows(
    path: str, begin: int, end: int, block_bytes: int, limit: int, delimiter: str
) -> list[tuple[int, int]]:
    """Cut ``[begin, end)`` into ranges as :func:`.lines.cut_lines` does, at ends of rows."""
    cuts = [begin]
    nominal = begin + block_bytes
    for at, piece in _pieces(path, begin, end, limit, delimiter):
        if at >= nominal:
            cuts.append(at)
            nominal += -(-(at + 1 - nominal) // block_bytes) * block_bytes
        if isinstance(piece, LongLine):
            continue
        while at + len(piece) > nominal:
            found, _ = _skip(piece, delimiter, NO_LIMIT, nominal - at)
            if found == len(piece):  # it ends with the piece, and the next one may go on there
                break
            cuts.append(at + found)
            nominal += -(-(at + found + 1 - nominal) // block_bytes) * block_bytes
    return list(itertools.pairwise([*cuts, end])) if begin < end else []


def _skip(piece: memoryview, delimiter: str, most: int, until: int) -> tuple[int, int]:
    text, between = np.frombuffer(piece, np.uint8), delimiter_bytes(delimiter)
    at, rows, _ = skip_rows(text, 0, len(text), True, NO_LIMIT, between, most, until)
    return at, rows


def _pieces(
    path: str, begin: int, end: int, limit: int, delimiter: str
) -> Iterator[tuple[int, memoryview | LongLine]]:
    """Yield the pieces of a range of the file, and where each begins."""
    at = begin
    for piece in read_chunks(path, begin, end, _SCAN_BYTES, limit, delimiter):
        yield at, piece
        at += piece.size + 1 if isinstance(piece, LongLine) else len(piece)
