"""The rows of a raw click log, in blocks, whatever the format of its files.

Paths may be remote (anything fsspec opens). Rows of text are addressed by bytes, rows of parquet by
their numbers: a :class:`Block` is a range of whole rows of one file, so the same log always falls
into the same blocks, whoever reads them. What only some formats need is imported when they do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from clicklog.errors import BadInputError, BadRowError
from clicklog.readers import lines
from clicklog.readers.days import DayFile, find_days, parse_days
from clicklog.readers.lines import (
    count_lines,
    cut_lines,
    filesystem_of,
    offset_of_line,
    read_bytes,
    read_stream,
    read_up_to,
)
from clicklog.readers.pieces import LongLine
from clicklog.rows import BadRow, RawRows, with_bad_rows
from clicklog.spec.feature_spec import FeatureSpec
from clicklog.text.fast_rows import count_newlines
from clicklog.text.line_layout import LineLayout, layout_of, plain_layout
from clicklog.text.parse import parse_rows

__all__ = [
    "Block",
    "DayFile",
    "OpenDay",
    "Piece",
    "count_lines",
    "find_days",
    "first_line",
    "header_lines",
    "offset_of_line",
    "open_day",
    "parse_days",
    "read_block",
    "read_bytes",
    "read_pieces",
    "read_stream",
    "stream_pieces",
    "stream_rows",
]

#: The first lines of a file, by which its header and the presence of a label are told.
_HEAD_BYTES = 1 << 16
_LONGEST_HEADER = 1 << 24
_PARQUET_MAGIC = b"PAR1"
#: Text that is read at once for a block in one piece: most blocks are smaller.
_WHOLE_BYTES = 128 << 20
#: What to do about a line that is too long, if not to leave it out.
TOO_LONG_REMEDY = (
    "cut the file off there if a crash left such an end, allow longer lines with "
    "`etl run --max_line_kb`"
)
#: What a value of parquet takes about, decoded and as typed column.
_VALUE_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Block:
    """Whole rows of ``path``: the bytes ``[begin, end)``, of parquet the rows with these numbers.

    ``source`` names the file in errors.
    """

    path: str
    begin: int
    end: int
    source: str


@dataclasses.dataclass(frozen=True)
class OpenDay:
    """A day that has been looked into, for cutting it into blocks.

    Attributes:
        file: the day; not compressed.
        label: whether its rows have a label.
        begin: where the first row begins: a byte, or row 0 of parquet.
        end: where the last one ends.
    """

    file: DayFile
    spec: FeatureSpec
    label: bool
    begin: int
    end: int

    @property
    def _parquet(self) -> bool:
        return self.spec.input.format == "parquet"

    def count_rows(self, end: int) -> int:
        """Rows before ``end``."""
        return end if self._parquet else count_lines(self.file.path, self.begin, end)

    def find_row(self, row: int, end: int) -> int:
        """Where row ``row`` (from 0) begins; ``end`` if there are not so many."""
        if self._parquet:
            return min(row, end)
        return offset_of_line(self.file.path, row, end, self.begin)

    def cut(self, begin: int, end: int, block_bytes: int) -> list[Block]:
        """Cut ``[begin, end)`` (whole rows) into blocks of about ``block_bytes``."""
        path, source = self.file.path, self.file.source
        if self._parquet:
            from clicklog.readers.parquet_rows import cut_rows, parquet_layout

            cuts = cut_rows(parquet_layout(path, source, self.spec), begin, end, block_bytes)
        else:
            cuts = cut_lines(path, begin, end, block_bytes)
        return [Block(path, *cut, source) for cut in cuts]


def open_day(day: DayFile, spec: FeatureSpec) -> OpenDay:
    """Look into a file: does it have a label, where do its rows begin?

    Raises:
        BadInputError: it is in another format than the spec says, or lacks a column.
        BadRowError: its lines have not as many fields as the spec.
    """
    if spec.input.format == "parquet":
        from clicklog.readers.parquet_rows import parquet_layout

        there = parquet_layout(day.path, day.source, spec)
        return OpenDay(day, spec, there.label, 0, there.rows)
    layout = _layout(day.path, day.source, spec)
    return OpenDay(day, spec, layout.label, min(layout.begin, day.size), day.size)


def _layout(path: str, source: str, spec: FeatureSpec) -> LineLayout:
    size = _HEAD_BYTES
    head = read_up_to(path, 0, size)
    while spec.input.header and b"\n" not in head and len(head) == size < _LONGEST_HEADER:
        size *= 16
        head = read_up_to(path, 0, size)
    return _layout_of(head, source, spec)


def _layout_of(head: bytes, source: str, spec: FeatureSpec) -> LineLayout:
    if head.startswith(_PARQUET_MAGIC):
        raise BadInputError(
            f"{source}: a parquet file, where the spec says {spec.input.format}",
            'set format = "parquet" in its [input]',
        )
    return layout_of(head, source, spec)


def check_label(label: bool, source: str, spec: FeatureSpec) -> None:
    """Raise :class:`BadRowError` for a file whose rows have no label."""
    if label:
        return
    what = f"rows of {len(spec.columns) - 1} fields, so there is no label"
    if spec.input.format == "parquet" or spec.input.header:
        what = f"no column {spec.label}, so there is no label"
    raise BadRowError(f"{source}: {what}", "training data needs the label")


def check_first_rows(day: DayFile, spec: FeatureSpec, *, reject: bool) -> None:
    """Look at the first rows of a day, which may be compressed, and read no more than them.

    Raises:
        BadInputError: it is truncated, in another format than the spec says, or lacks a column.
        BadRowError: they break the spec (unless ``reject``), or have no label.
    """
    if spec.input.format == "parquet":  # is read from its end, once that is there
        head = next(read_stream(day.path, len(_PARQUET_MAGIC)), b"")
        if head != _PARQUET_MAGIC:
            raise BadInputError(
                f"{day.source}: cannot be read as parquet: it begins with {head!r}",
                "set another format in the [input] of the spec, or fetch the file again",
            )
        return
    for piece in stream_pieces(day.path, spec, block_bytes=_HEAD_BYTES):
        check_label(piece.label, day.source, spec)
        piece.parse(reject=reject)
        return


def read_block(
    block: Block, spec: FeatureSpec, *, label: bool = True, reject: bool = False
) -> RawRows:
    """Read and parse a block.

    Args:
        block: the rows.
        spec: the columns, and the format of the file.
        label: whether rows have the label.
        reject: leave bad rows out (all are in ``RawRows.bad``) instead of raising.

    Raises:
        BadInputError: the file is not there, damaged, or lacks a column.
        BadRowError: a row breaks the spec, with file, line, column and value.
    """
    (rows,) = read_pieces(block, spec, label=label, reject=reject, piece_bytes=None)
    return rows


def read_pieces(
    block: Block,
    spec: FeatureSpec,
    *,
    label: bool = True,
    reject: bool = False,
    piece_bytes: int | None = 8 << 20,
) -> Iterator[RawRows]:
    """:func:`read_block` in pieces of about ``piece_bytes``, which bounds its memory.

    Line numbers count from 0 in each piece; ``RawRows.lines`` adds up to the block's. Small pieces
    also stay in a processor's cache. ``None``: one piece.
    """
    if spec.input.format == "parquet":
        unit, pieces = "row", _parquet_rows(block, spec, label, reject, piece_bytes)
    else:
        unit, pieces = "line", _text_rows(block, spec, label, reject, piece_bytes)
    lines_before = 0
    for rows in pieces:
        if rows.bad_count and not reject:
            _raise_bad_row(rows, block.source, first_line(block, spec) + lines_before, unit)
        lines_before += rows.lines
        yield rows


def _parquet_rows(
    block: Block, spec: FeatureSpec, label: bool, reject: bool, piece_bytes: int | None
) -> Iterator[RawRows]:
    from clicklog.readers.parquet_rows import read_parquet

    size = piece_bytes and max(1, piece_bytes // (_VALUE_BYTES * len(spec.columns)))
    path, begin, end, source = block.path, block.begin, block.end, block.source
    return read_parquet(path, begin, end, source, spec, label=label, reject=reject, piece_rows=size)


def _text_rows(
    block: Block, spec: FeatureSpec, label: bool, reject: bool, piece_bytes: int | None
) -> Iterator[RawRows]:
    layout = _block_layout(block, spec, label)
    size = piece_bytes or min(block.end - block.begin, _WHOLE_BYTES)
    limit = spec.input.max_line_kb << 10
    pieces = lines.read_pieces(block.path, block.begin, block.end, size, limit)
    for together in [list(pieces)] if piece_bytes is None else ([piece] for piece in pieces):
        yield _parse_together(together, spec, layout, reject)


def _parse_together(
    pieces: list[memoryview | LongLine], spec: FeatureSpec, layout: LineLayout, reject: bool
) -> RawRows:
    texts, bad, before = [], [], 0
    for piece in pieces:
        if isinstance(piece, LongLine):
            bad.append(_too_long(piece, before))
            before += 1
        else:
            texts.append(piece)
            if len(pieces) > 1:
                before += count_newlines(np.frombuffer(piece, np.uint8))
    text = texts[0] if len(texts) == 1 else b"".join(texts)
    rows = parse_rows(text, spec, layout, reject=reject)
    return with_bad_rows(rows, bad) if bad else rows


def _too_long(line: LongLine, index: int) -> BadRow:
    return BadRow(index, str(line), "", line.head, TOO_LONG_REMEDY)


def first_line(block: Block, spec: FeatureSpec) -> int:
    """The number of a block's first line in its file (of parquet, its first row), from 1."""
    if spec.input.format == "parquet":
        return block.begin + 1
    return 1 + count_lines(block.path, 0, block.begin)


def _block_layout(block: Block, spec: FeatureSpec, label: bool) -> LineLayout:
    if not spec.input.header:
        return plain_layout(spec, label=label)
    layout = _layout(block.path, block.source, spec)
    if label and not layout.label:
        raise BadInputError(f"{block.source}: column {spec.label} is not in the header")
    return layout if label else layout.without_label()


def _raise_bad_row(rows: RawRows, source: str, first: int, unit: str = "line") -> None:
    bad = rows.bad[0]
    more = f" (and {rows.bad_count - 1} more rows near it)" if rows.bad_count > 1 else ""
    raise BadRowError(
        f"{source}, {unit} {first + bad.line}: {bad.what}{more}",
        f"{bad.remedy or 'correct the file'}, or leave such rows out with --on_bad_rows quarantine",
    )


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some rows of a log, read but not parsed: that can be left to other threads.

    Attributes:
        first: the number of the first row, from 0; a header is none.
        text: the lines; of parquet None.
        long: a line that is too long; there are no others then.
        layout: of the lines; of parquet None.
        block: the rows of a parquet file, otherwise None.
    """

    path: str
    spec: FeatureSpec
    first: int
    label: bool
    text: bytes | memoryview | None = None
    layout: LineLayout | None = None
    block: Block | None = None
    long: LongLine | None = None

    def without_label(self) -> Piece:
        """The same, but for the label, where columns have names: what it holds does not matter."""
        if self.block is None and not self.spec.input.header:
            return self
        layout = self.layout.without_label() if self.layout else None
        return dataclasses.replace(self, label=False, layout=layout)

    def parse(self, *, reject: bool = False) -> RawRows:
        """Parse the rows; line numbers count from ``first``. Raises BadRowError."""
        if self.block is not None:
            return read_block(self.block, self.spec, label=self.label, reject=reject)
        pieces = [self.text if self.long is None else self.long]
        rows = _parse_together(pieces, self.spec, self.layout, reject)
        if rows.bad_count and not reject:
            _raise_bad_row(rows, self.path, self.first + 1 + header_lines(self.spec))
        return rows


def stream_rows(
    path: str, spec: FeatureSpec, *, block_bytes: int, reject: bool = False
) -> Iterator[tuple[np.ndarray, RawRows]]:
    """Read a log from begin to end, in blocks; also a compressed one, with or without labels.

    Yields:
        Numbers of the rows, int64 [n] from 0 (a header is none), and the parsed rows.

    Raises:
        BadInputError: the file is missing, empty or truncated.
        BadRowError: a row breaks the spec (unless ``reject``).
    """
    for piece in stream_pieces(path, spec, block_bytes=block_bytes):
        rows = piece.parse(reject=reject)
        yield piece.first + rows.line, rows


def stream_pieces(path: str, spec: FeatureSpec, *, block_bytes: int) -> Iterator[Piece]:
    """:func:`stream_rows`, but the rows are left to be parsed."""
    if spec.input.format == "parquet":
        yield from _parquet_pieces(path, spec, block_bytes)
        return
    layout, first = None, 0
    for piece in lines.stream_pieces(path, block_bytes, spec.input.max_line_kb << 10):
        long = piece if isinstance(piece, LongLine) else None
        text = b"" if long else piece
        if layout is None:
            layout = _layout_of(long.head if long else bytes(piece), path, spec)
            if long and spec.input.header:
                raise BadInputError(f"{path}: the header is {long}", "is it the right file?")
            text = text[layout.begin :]
        if long or len(text):
            yield Piece(path, spec, first, layout.label, text, layout, long=long)
            first += 1 if long else count_newlines(np.frombuffer(text, np.uint8))
    if layout is None:
        raise BadInputError(f"{path}: empty file", "there is nothing to read")


def header_lines(spec: FeatureSpec) -> int:
    """Lines of a text file before its first row."""
    return int(bool(spec.input.header))


def _parquet_pieces(path: str, spec: FeatureSpec, block_bytes: int) -> Iterator[Piece]:
    from clicklog.readers.parquet_rows import cut_rows, parquet_layout

    filesystem, name = filesystem_of(path)
    if not filesystem.isfile(name):
        raise BadInputError(f"{path}: no such file", "check the path")
    layout = parquet_layout(path, path, spec)
    if not layout.rows:
        raise BadInputError(f"{path}: no rows", "there is nothing to read")
    for begin, end in cut_rows(layout, 0, layout.rows, block_bytes):
        yield Piece(path, spec, begin, layout.label, block=Block(path, begin, end, path))
