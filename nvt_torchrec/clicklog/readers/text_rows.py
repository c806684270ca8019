"""Read rows of text files in bounded memory, and find the positions of their columns."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.clicklog.readers.line_chunks import LongLine
from nvt_torchrec.clicklog.readers.lines import cut_lines, find_preamble, read_chunks
from nvt_torchrec.clicklog.text.fast_rows import count_newlines
from nvt_torchrec.clicklog.text.line_layout import (
    HEAD_BYTES,
    LineLayout,
    layout_of,
    plain_layout,
    plain_layouts,
)
from nvt_torchrec.clicklog.text.remedies import ANOTHER_LOG
from nvt_torchrec.clicklog.text.row_ends import row_begins
from nvt_torchrec.clicklog.text.tokenizer import as_utf8, parse_rows
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import BadRow, RawRows, with_bad_rows

PARQUET_MAGIC = b"PAR1"
_SCAN_BYTES = 8 << 20
#: What to do about a line that is too long, other than to leave it out.
TOO_LONG_REMEDY = (
    "truncate the file there if a crash left such an end, allow longer lines with "
    "`etl run --max_line_kb`"
)
OPEN_QUOTE_REMEDY = (
    "close the quote (a quote within a quoted field is doubled), or allow longer rows with "
    "`etl run --max_line_kb`"
)


def header_lines(spec: FeatureSpec, path: str) -> int:
    """Return how many lines of a text file come before its first row; it is read for comments."""
    text = spec.input
    skipped = find_preamble(path, text)[1] if text.comment else text.skip_lines
    return int(bool(text.header)) + skipped


def rows_in(text: memoryview | LongLine, spec: FeatureSpec) -> int:
    """Count the rows of whole lines, the last one with or without its newline."""
    if isinstance(text, LongLine):
        return 1
    if spec.input.quotes:
        return len(row_begins(text, spec.input.quotes)) - 1
    return count_newlines(np.frombuffer(text, np.uint8)) + (text[-1:] != b"\n")


def count_file_rows(path: str, begin: int, end: int, spec: FeatureSpec) -> int:
    """Count the rows in the bytes ``[begin, end)``, at whose ends rows or the file end."""
    return sum(rows_in(piece, spec) for _, piece in _pieces(path, begin, end, spec))


def offset_of_row(path: str, row: int, begin: int, end: int, spec: FeatureSpec) -> int:
    """Return the byte at which row ``row`` (from 0, at ``begin``) begins; ``end`` without one."""
    for at, piece in _pieces(path, begin, end, spec):
        rows = rows_in(piece, spec)
        if row < rows:
            return at + int(_begins(piece, spec)[row])
        row -= rows
    return end


def cut_text(
    path: str, begin: int, end: int, block_bytes: int, spec: FeatureSpec
) -> list[tuple[int, int]]:
    """Cut ``[begin, end)`` into ranges as :func:`.lines.cut_lines` does, at ends of rows.

    Where a row with line breaks in quotes begins depends on all quotes before it, so such text is
    read from where a row is known to begin.
    """
    if not spec.input.quotes:
        return cut_lines(path, begin, end, block_bytes)
    cuts, last = [begin], 0
    for at, piece in _pieces(path, begin, end, spec):
        begins = at + _begins(piece, spec)
        multiple = (begins - begin) // block_bytes
        cuts += begins[np.diff(multiple, prepend=last) > 0].tolist()
        last = multiple[-1]
    return list(itertools.pairwise([*cuts, end])) if begin < end else []


def _begins(piece: memoryview | LongLine, spec: FeatureSpec) -> np.ndarray:
    """Return where each row of a piece begins, int64 [n]."""
    if isinstance(piece, LongLine):
        return np.zeros(1, np.int64)
    return row_begins(piece, spec.input.quotes)[:-1].astype(np.int64)


def _pieces(
    path: str, begin: int, end: int, spec: FeatureSpec
) -> Iterator[tuple[int, memoryview | LongLine]]:
    """Yield the pieces of a range of the file, and where each begins."""
    at = begin
    for piece in read_chunks(path, begin, end, _SCAN_BYTES, spec.input):
        yield at, piece
        at += piece.size + 1 if isinstance(piece, LongLine) else len(piece)


def file_layout(path: str, size: int, source: str, spec: FeatureSpec) -> LineLayout:
    """Return the positions of the columns, from a file's header or its first lines.

    Args:
        path: Of the file, which is not compressed.
        size: Bytes of the file.
        source: Names the file in errors.
        spec: The columns.

    Raises:
        BadInputError: It is a parquet file, or its header is too long or lacks a column.
        BadRowError: Its first lines have another number of fields than the spec.
    """
    begin = find_preamble(path, spec.input)[0]
    chunks = read_chunks(path, begin, size, HEAD_BYTES, spec.input)
    layout = first_layout(chunks, source, spec)[1]
    return dataclasses.replace(layout, begin=begin + layout.begin)


def first_layout(
    chunks: Iterable[memoryview | LongLine], source: str, spec: FeatureSpec
) -> tuple[list[memoryview | LongLine], LineLayout]:
    """As :func:`file_layout`, for text that is read in chunks.

    Lines that are too long decide nothing about the label, unless there are no others.

    Args:
        chunks: Without a byte order mark and the lines to skip.
        source: Names the file in errors.
        spec: The columns.

    Returns:
        The chunks that were taken, and the layout; its ``begin`` is counted from the first chunk.

    Raises:
        BadInputError: As :func:`file_layout`; or there are no chunks.
    """
    taken: list[memoryview | LongLine] = []
    for chunk in chunks:
        taken.append(chunk)
        if spec.input.header or not isinstance(chunk, LongLine):
            break
    if not taken:
        raise BadInputError(f"{source}: empty file", "there is nothing to read")
    chunk = taken[0] if isinstance(taken[-1], LongLine) else taken[-1]
    head = chunk.head if isinstance(chunk, LongLine) else bytes(chunk)
    if head.startswith(PARQUET_MAGIC):
        raise BadInputError(
            f"{source}: a parquet file, where the spec says {spec.input.format}",
            ANOTHER_LOG.format(source)
            if spec.is_criteo_format
            else 'set format = "parquet" in its [input]',
        )
    if spec.input.header and isinstance(chunk, LongLine):
        raise BadInputError(
            f"{source}: the header has more than {spec.input.line_limit:,} bytes",
            "check that it is the right file, or allow longer lines with `etl run --max_line_kb`",
        )
    if spec.input.format == "json":
        from nvt_torchrec.clicklog.readers.json_rows import json_layout

        return taken, json_layout(head, source, spec)
    return taken, layout_of(head, source, spec)


def block_layout(path: str, end: int, source: str, spec: FeatureSpec, label: bool) -> LineLayout:
    """Return the positions of the columns for a block of a file that ends at ``end``.

    Raises:
        BadInputError: As :func:`file_layout`.
    """
    if spec.input.format == "json":
        return LineLayout((), label, source=source)
    if not spec.input.header and (label or len(plain_layouts(spec)) <= 2):
        return plain_layout(spec, label=label)
    layout = file_layout(path, end, source, spec)
    return layout if label else layout.without_label()


def parse_chunks(
    chunks: list[memoryview | LongLine],
    spec: FeatureSpec,
    layout: LineLayout,
    *,
    reject: bool | int,
) -> RawRows:
    """Parse chunks of one text together; lines that are too long are bad rows."""
    texts, bad, before = [], [], 0
    for chunk in chunks:
        if isinstance(chunk, LongLine):
            head = bytes(as_utf8(chunk.head, spec.input.encoding))
            remedy = OPEN_QUOTE_REMEDY if chunk.open_quote else TOO_LONG_REMEDY
            bad.append(BadRow(before, str(chunk), "", head, remedy))
        else:
            texts.append(chunk)
        if len(chunks) > 1:
            before += rows_in(chunk, spec)
    text = texts[0] if len(texts) == 1 else b"".join(texts)
    if spec.input.format == "json":
        from nvt_torchrec.clicklog.readers.json_rows import parse_json

        rows = parse_json(text, spec, layout, reject=reject)
    else:
        rows = parse_rows(text, spec, layout, reject=reject)
    return with_bad_rows(rows, bad) if bad else rows
