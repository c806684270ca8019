"""The rows of one file from its beginning to its end, compressed or not, with or without labels."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.line_chunks import LongLine
from nvt_torchrec.clicklog.readers.lines import (
    read_stream,
    stream_chunks,
    without_empty_lines,
)
from nvt_torchrec.clicklog.readers.raw import Block, bad_row_error, check_label, read_block, unit_of
from nvt_torchrec.clicklog.readers.text_rows import (
    PARQUET_MAGIC,
    first_layout,
    header_lines,
    parse_chunks,
    rows_in,
)
from nvt_torchrec.clicklog.text.fast_rows import count_newlines
from nvt_torchrec.clicklog.text.line_layout import HEAD_BYTES, LineLayout
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import RawRows


@dataclasses.dataclass(frozen=True)
class UnparsedRows:
    """Some rows of a log that have been read but not parsed, which threads can do.

    Attributes:
        path: Of the file.
        spec: Its columns.
        first: The number of the first row, from 0; a header is not a row.
        label: Whether the rows have a label.
        text: The lines; of parquet None.
        layout: Of the lines; of parquet None.
        block: The rows of a parquet file, otherwise None.
        long: A line that is too long; there are no others then.
    """

    path: str
    spec: FeatureSpec
    first: int
    label: bool
    text: bytes | memoryview | None = None
    layout: LineLayout | None = None
    block: Block | None = None
    long: LongLine | None = None

    def without_label(self) -> UnparsedRows:
        """The same rows without the label, so that its values are not checked.

        The parser of Criteo's format always reads a label that is there: then the same rows.
        """
        if self.spec.is_criteo_format:
            return self
        layout = self.layout.without_label() if self.layout else None
        return dataclasses.replace(self, label=False, layout=layout)

    def parse(self, *, reject: bool = False, describe: bool = True) -> RawRows:
        """Parse the rows; line numbers count from ``first``.

        Args:
            reject: Leave bad rows out instead of raising :class:`BadRowError`.
            describe: Describe all of them, and not only the first ones of a text.
        """
        if self.block is not None:
            return read_block(self.block, self.spec, label=self.label, reject=reject)
        chunk = self.text if self.long is None else self.long
        describes_all = reject and describe
        rows = parse_chunks([chunk], self.spec, self.layout, reject=describes_all or int(reject))
        if rows.bad_count and not reject:
            first = self.first + 1 + header_lines(self.spec, self.path)
            raise bad_row_error(rows, self.path, first, unit_of(self.spec))
        return rows


def stream_unparsed(path: str, spec: FeatureSpec, *, block_bytes: int) -> Iterator[UnparsedRows]:
    """Read a file in blocks of about ``block_bytes``, without parsing them.

    Raises:
        BadInputError: The file is missing, empty or truncated.
        BadRowError: Its lines have another number of fields than the spec.
    """
    if spec.input.format == "parquet":
        yield from _stream_parquet(path, spec, block_bytes)
        return
    chunks = stream_chunks(path, block_bytes, spec.input)
    if spec.input.skip_empty_lines:
        chunks = _without_empty_end(chunks)
    taken, layout = first_layout(chunks, path, spec)
    first, begin = 0, layout.begin
    for chunk in itertools.chain(taken, chunks):
        if isinstance(chunk, LongLine):
            yield UnparsedRows(path, spec, first, layout.label, b"", layout, long=chunk)
            first += 1
        elif len(text := chunk[begin:]):
            yield UnparsedRows(path, spec, first, layout.label, text, layout)
            first += rows_in(text, spec)
        begin = 0  # the header is in the first chunk


def _without_empty_end(
    chunks: Iterator[memoryview | LongLine],
) -> Iterator[memoryview | LongLine]:
    """Yield chunks but for the empty lines at the end of the last one."""
    empty = 0
    for chunk in chunks:
        if isinstance(chunk, LongLine):
            kept, rest = chunk, memoryview(b"")
        else:
            end = without_empty_lines(chunk)
            kept, rest = chunk[:end], chunk[end:]
        if isinstance(kept, LongLine) or len(kept):
            if empty:
                yield memoryview(b"\n" * empty)
            yield kept
            empty = 0
        empty += count_newlines(np.frombuffer(rest, np.uint8))


def _stream_parquet(path: str, spec: FeatureSpec, block_bytes: int) -> Iterator[UnparsedRows]:
    from nvt_torchrec.clicklog.readers.parquet_rows import cut_rows, parquet_layout

    layout = parquet_layout(path, path, spec)
    if not layout.rows:
        raise BadInputError(f"{path}: no rows", "there is nothing to read")
    for begin, end in cut_rows(layout, 0, layout.rows, block_bytes):
        yield UnparsedRows(path, spec, begin, layout.label, block=Block(path, begin, end, path))


def check_first_rows(day: DayFile, spec: FeatureSpec, *, reject: bool) -> None:
    """Check the first rows of a day, which may be compressed, and read no more than them.

    Raises:
        BadInputError: It is truncated, in another format than the spec says, or lacks a column.
        BadRowError: They break the spec (unless ``reject``), or have no label.
    """
    if spec.input.format == "parquet":  # its footer, at the end, is read after decompression
        head = next(read_stream(day.path, len(PARQUET_MAGIC)), b"")
        if head != PARQUET_MAGIC:
            raise BadInputError(
                f"{day.source}: cannot be read as parquet: it begins with {head!r}",
                "set another format in the [input] of the spec, or fetch the file again",
            )
        return
    unparsed = next(stream_unparsed(day.path, spec, block_bytes=HEAD_BYTES), None)
    if unparsed is not None:
        check_label(unparsed.label, day.source, spec)
        unparsed.parse(reject=reject)
