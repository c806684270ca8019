"""Formats of text with one row per line, read in bounded memory and addressed by byte offsets."""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import to_arrow
from nvt_torchrec.base.errors import BadInputError, BadRowError, SettingsError
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.lines import (
    PARQUET_MAGIC,
    cut_lines,
    drop_empty_lines,
    find_preamble,
    find_text_end,
    read_bytes,
    read_chunks,
    stream_chunks,
)
from nvt_torchrec.clicklog.readers.log_format import Block, LogFormat, OpenDay, UnparsedRows
from nvt_torchrec.clicklog.text.convert import convert
from nvt_torchrec.clicklog.text.delimited import parse_delimited, split_rows
from nvt_torchrec.clicklog.text.fast_rows import count_newlines, find_row_offsets
from nvt_torchrec.clicklog.text.line_layout import (
    HEAD_BYTES,
    LineLayout,
    find_layout,
    list_plain_layouts,
    make_plain_layout,
)
from nvt_torchrec.clicklog.text.remedies import ANOTHER_LOG
from nvt_torchrec.clicklog.text.tokenizer import parse_rows, to_utf8
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types.base import MESSAGES, NOT_UTF8
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.rows import RawRows

#: The number of bytes that are read at once of a block that must become one chunk; most blocks are
#: smaller.
_WHOLE_BYTES = 128 << 20
#: The number of bytes that are read at once to count or find rows.
_SCAN_BYTES = 8 << 20
#: The number of bytes of a block from which the average length of rows is estimated.
_RATE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class TextRows(UnparsedRows):
    """Lines that have been read but not parsed.

    Attributes:
        text: The lines.
        layout: The fields of a line.
    """

    format: TextFormat
    text: bytes | memoryview
    layout: LineLayout

    @property
    def first_line(self) -> int:
        """See :attr:`UnparsedRows.first_line`."""
        return self.first + 1 + self.format.header_lines(self.path)

    def drop_label(self) -> UnparsedRows:
        """See :meth:`UnparsedRows.drop_label`.

        Rows in Criteo's format keep it, because its parser always reads the label of the lines.
        """
        if self.spec.is_criteo_format:
            return self
        return dataclasses.replace(self, label=False, layout=self.layout.drop_label())

    def parse_all(self, *, max_bad_rows: int) -> RawRows:
        """See :meth:`UnparsedRows.parse_all`."""
        return self.format.parse_text(self.text, self.layout, max_bad_rows=max_bad_rows)

    def names(self) -> Sequence[str]:
        """See :meth:`UnparsedRows.names`."""
        if not self.layout.fields:
            raise SettingsError(
                f"{self.path}: --id_columns does not work with JSON lines",
                "remove it, or write the rows as parquet",
            )
        return self.layout.fields

    def columns(self, names: Sequence[str], lines: np.ndarray) -> dict[str, pa.Array]:
        """See :meth:`UnparsedRows.columns`; they are strings."""
        all_names = self.layout.fields
        text = to_utf8(self.text, self.spec.input.encoding)
        indices = sorted(all_names.index(name) for name in names)
        split = split_rows(text, self.spec.input, len(all_names), indices)
        rows = to_arrow(np.searchsorted(split.line, lines))
        columns = {}
        for name in names:
            fields = split.columns[indices.index(all_names.index(name))].take(rows)
            column = convert(fields, Read(name, "string"))
            if column.code.any():
                row = int(column.code.argmax())
                raise BadRowError(
                    f"{self.path}, line {self.first_line + int(lines[row])}: column {name}: "
                    f"{column.show(row)}: {MESSAGES[NOT_UTF8]}",
                    "correct the file, or remove that column from --id_columns",
                )
            columns[name] = column.values
        return columns


class TextFormat(LogFormat):
    """Base class of formats of text."""

    @staticmethod
    @abc.abstractmethod
    def find_layout(head: bytes, source: str, spec: FeatureSpec) -> LineLayout:
        """Derive the fields of a line from a file's first lines.

        Raises:
            BadInputError, BadRowError: The lines do not fit the format or the spec.
        """

    def block_layout(self, block: Block, label: bool) -> LineLayout:
        """Return the fields of a block's lines. Raises as :meth:`find_layout`."""
        layout = self.file_layout(block.path, block.end, block.source)
        return layout if label else layout.drop_label()

    @staticmethod
    @abc.abstractmethod
    def parse(
        data: bytes | memoryview, spec: FeatureSpec, layout: LineLayout, *, max_bad_rows: int
    ) -> RawRows:
        """Parse whole lines of UTF-8, as :func:`.tokenizer.parse_rows` does."""

    # ---- blocks

    def open(self, day: DayFile) -> OpenDay:
        """See :meth:`LogFormat.open`."""
        layout = self.file_layout(day.path, day.size, day.source)
        begin, end = min(layout.begin, day.size), day.size
        if self.spec.input.skip_empty_lines:
            end = find_text_end(day.path, begin, end)
        return OpenDay(self, day, layout.label, begin, end)

    def file_layout(self, path: str, size: int, source: str) -> LineLayout:
        """Return the fields of a file's lines, from its header or its first lines.

        Args:
            path: The path of the file, which is not compressed.
            size: The size of the file in bytes.
            source: The name of the file in errors.

        Raises:
            BadInputError: The file is parquet, or its header lacks a column.
            BadRowError: Its first lines have another number of fields than the spec, or are too
                long.
        """
        begin, _ = find_preamble(path, self.spec.input)
        chunks = read_chunks(path, begin, size, HEAD_BYTES, self.spec.input, source)
        _, layout = self._first_layout(chunks, source)
        return dataclasses.replace(layout, begin=begin + layout.begin)

    def _first_layout(
        self, chunks: Iterator[memoryview], source: str
    ) -> tuple[memoryview, LineLayout]:
        """Return the first chunk of a text, and the fields of its lines.

        Raises as :meth:`file_layout`.

        Args:
            chunks: The chunks, without a byte order mark and the lines to skip.
            source: The name of the file in errors.

        Returns:
            The first chunk, and the layout, whose ``begin`` counts from the chunk's beginning.
        """
        spec = self.spec
        first = next(chunks, None)
        if first is None:
            raise BadInputError(f"{source}: empty file", "there is nothing to read")
        head = bytes(first)
        if head.startswith(PARQUET_MAGIC):
            remedy = 'set format = "parquet" in its [input]'
            if spec.is_criteo_format:
                remedy = ANOTHER_LOG.format(source)
            raise BadInputError(
                f"{source}: a parquet file, but the spec has format {spec.input.format}", remedy
            )
        return first, self.find_layout(head, source, spec)

    def header_lines(self, path: str) -> int:
        """Return the number of lines before the first row; to skip comments, the file is read."""
        text = self.spec.input
        if text.comment:
            _, skipped = find_preamble(path, text)
        else:
            skipped = text.skip_lines
        return skipped + 1 if text.header else skipped

    def cut(
        self, path: str, source: str, begin: int, end: int, block_bytes: int
    ) -> list[tuple[int, int]]:
        """See :meth:`LogFormat.cut`."""
        return cut_lines(path, begin, end, block_bytes)

    def count_rows(self, path: str, begin: int, end: int) -> int:
        """See :meth:`LogFormat.count_rows`."""
        return sum(self._count_rows_in(piece) for _, piece in self._read_pieces(path, begin, end))

    def find_row(self, path: str, row: int, begin: int, end: int) -> int:
        """See :meth:`LogFormat.find_row`."""
        for offset, piece in self._read_pieces(path, begin, end):
            rows = self._count_rows_in(piece)
            if row < rows:
                return offset + int(find_row_offsets(piece)[row])
            row -= rows
        return end

    def first_line(self, block: Block) -> int:
        """See :meth:`LogFormat.first_line`."""
        begin, lines = find_preamble(block.path, self.spec.input)
        return 1 + lines + self.count_rows(block.path, begin, block.begin)

    @staticmethod
    def _count_rows_in(text: memoryview) -> int:
        """Count the rows of whole lines, the last one with or without its newline."""
        return count_newlines(np.frombuffer(text, np.uint8)) + (text[-1:] != b"\n")

    def _read_pieces(self, path: str, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the pieces of a range of the file, with their offsets."""
        offset = begin
        for piece in read_chunks(path, begin, end, _SCAN_BYTES, self.spec.input):
            yield offset, piece
            offset += len(piece)

    def read(
        self, block: Block, *, label: bool, max_bad_rows: int, chunk_bytes: int | None
    ) -> Iterator[RawRows]:
        """See :meth:`LogFormat.read`."""
        layout = self.block_layout(block, label)
        size = chunk_bytes or min(block.end - block.begin, _WHOLE_BYTES)
        texts: Iterable[Any] = read_chunks(
            block.path, block.begin, block.end, size, self.spec.input, block.source
        )
        if chunk_bytes is None:
            whole = list(texts)
            texts = whole if len(whole) == 1 else [b"".join(whole)]
        for text in texts:
            yield self.parse_text(text, layout, max_bad_rows=max_bad_rows)

    def parse_text(
        self, text: bytes | memoryview, layout: LineLayout, *, max_bad_rows: int
    ) -> RawRows:
        """Parse whole lines in the encoding of the spec."""
        utf8 = to_utf8(text, self.spec.input.encoding)
        return self.parse(utf8, self.spec, layout, max_bad_rows=max_bad_rows)

    def rates(self, last: OpenDay, block: Block) -> tuple[float, float]:
        """See :meth:`LogFormat.rates`."""
        size = min(block.end - block.begin, _RATE_BYTES)
        head = read_bytes(block.path, block.begin, block.begin + size)
        return max(1, head.count(b"\n")) / size, 1.0

    # ---- streams

    def stream(self, path: str, block_bytes: int) -> Iterator[UnparsedRows]:
        """See :meth:`LogFormat.stream`."""
        chunks = stream_chunks(path, block_bytes, self.spec.input)
        if self.spec.input.skip_empty_lines:
            chunks = _drop_empty_end(chunks)
        head, layout = self._first_layout(chunks, path)
        first = 0
        for text in itertools.chain([head[layout.begin :]], chunks):  # without the header
            if len(text):
                yield TextRows(self, path, first, layout.label, text, layout)
                first += self._count_rows_in(text)

    def check_head(self, day: DayFile, *, reject: bool) -> None:
        """See :meth:`LogFormat.check_head`."""
        unparsed = next(self.stream(day.path, HEAD_BYTES), None)
        if unparsed is not None:
            self.check_label(unparsed.label, day.source)
            unparsed.parse(reject=reject)


def _drop_empty_end(chunks: Iterator[memoryview]) -> Iterator[memoryview]:
    """Yield chunks without the empty lines at the end of the text.

    The empty lines at the end of a chunk are held back, and yielded if a row follows.
    """
    held_back = 0
    for chunk in chunks:
        end = drop_empty_lines(chunk)
        if end:
            if held_back:
                yield memoryview(b"\n" * held_back)
            yield chunk[:end]
            held_back = 0
        held_back += count_newlines(np.frombuffer(chunk[end:], np.uint8))


class DelimitedText(TextFormat):
    """Delimited text; fields may be quoted, and there may be a header."""

    find_layout = staticmethod(find_layout)
    parse = staticmethod(parse_delimited)

    @property
    def row_size(self) -> int:
        """See :attr:`LogFormat.row_size`: each field takes at least the byte after it."""
        return len(self.spec.sources(label=True))

    def block_layout(self, block: Block, label: bool) -> LineLayout:
        """See :meth:`TextFormat.block_layout`; without a header, the file is usually not read."""
        if not self.spec.input.header and (label or len(list_plain_layouts(self.spec)) <= 2):
            return make_plain_layout(self.spec, label=label)
        return super().block_layout(block, label)


class Tsv(DelimitedText):
    """Tab-separated text without quotes; Criteo's columns have a faster parser."""

    parse = staticmethod(parse_rows)
