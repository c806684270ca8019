"""The base class of file formats, which read files, blocks and streams of rows.

Rows are addressed by positions in their file: byte offsets in text, row numbers in tables. Only the
format knows which. A :class:`Block` is a range of whole rows, so every reader divides a log into
the same blocks. :data:`clicklog.readers.READERS` is the registry.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.errors import BadRowError
from nvt_torchrec.clicklog.readers import load_reader
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.text.remedies import may_leave_out
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.spec_variants import bound_times
from nvt_torchrec.formats.rows import UNLIMITED, RawRows


@dataclasses.dataclass(frozen=True)
class Block:
    """A range of whole rows of a file.

    Attributes:
        path: The path of the file.
        begin: The position of the first row.
        end: The position after the last row.
        source: The name of the file in errors.
        times: The half-open range of times, in microseconds since 1970 UTC, outside of which rows
            are malformed; None for any times.
    """

    path: str
    begin: int
    end: int
    source: str
    times: tuple[int, int] | None = dataclasses.field(default=None, kw_only=True)


@dataclasses.dataclass(frozen=True)
class OpenDay:
    """A day whose header or footer has been read, to be cut into blocks.

    Attributes:
        format: The format that reads the day.
        file: The day, which is not compressed.
        label: Whether its rows have a label.
        begin: The position of its first row.
        end: The position after its last row.
    """

    format: LogFormat
    file: DayFile
    label: bool
    begin: int
    end: int

    def count_rows(self, end: int) -> int:
        """Count the rows before ``end``."""
        return self.format.count_rows(self.file.path, self.begin, end)

    def find_row(self, row: int, end: int) -> int:
        """Return the position of row ``row`` (from 0); ``end`` if there are fewer rows."""
        return self.format.find_row(self.file.path, row, self.begin, end)

    def cut(self, begin: int, end: int, block_bytes: int) -> list[Block]:
        """Cut ``[begin, end)`` (whole rows) into blocks of about ``block_bytes``."""
        path = self.file.path
        source = self.file.source
        cuts = self.format.cut(path, source, begin, end, block_bytes)
        return [Block(path, *cut, source) for cut in cuts]


@dataclasses.dataclass(frozen=True)
class UnparsedRows(abc.ABC):
    """Rows of a log that have been read but not parsed, so that threads can parse them.

    Attributes:
        format: The format that parses them.
        path: The path of the file.
        first: The number of the first row, from 0; a header is not a row.
        label: Whether the rows have a label.
    """

    format: LogFormat
    path: str
    first: int
    label: bool

    @property
    def spec(self) -> FeatureSpec:
        """The columns of the file."""
        return self.format.spec

    @property
    def first_line(self) -> int:
        """The line number of the first row in messages; see :meth:`LogFormat.first_line`."""
        return self.first + 1

    def drop_label(self) -> UnparsedRows:
        """Return the same rows without the label, so that its values are not checked."""
        return dataclasses.replace(self, label=False)

    def parse(self, *, reject: bool = False) -> RawRows:
        """Parse the rows.

        Args:
            reject: Whether to leave bad rows out instead of raising :class:`BadRowError`.
        """
        rows = self.parse_all(max_bad_rows=UNLIMITED if reject else 0)
        if rows.bad_count and not reject:
            raise self.format.make_bad_row_error(rows, self.path, self.first_line)
        return rows

    @abc.abstractmethod
    def parse_all(self, *, max_bad_rows: int) -> RawRows:
        """Parse the rows, however many of them are bad.

        Args:
            max_bad_rows: If there are more bad rows, only the first ones are described.
        """

    @abc.abstractmethod
    def names(self) -> Sequence[str]:
        """Return the names of all columns of the file, "" for fields without a name."""

    @abc.abstractmethod
    def columns(
        self, names: Sequence[str], lines: np.ndarray
    ) -> dict[str, pa.Array | pa.ChunkedArray]:
        """Return unparsed columns, by name, of the rows with these indices ``lines`` (from 0)."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Rows from which a spec can be guessed.

    Attributes:
        table: The rows.
        whole: Whether the file has no other rows.
        malformed: The number of rows that could not be read.
    """

    table: pa.Table
    whole: bool
    malformed: int = 0


class LogFormat(abc.ABC):
    """Reads files of one format as the columns of a spec.

    Attributes:
        by_rows: Whether positions are row numbers; otherwise they are byte offsets.
    """

    by_rows: ClassVar[bool] = False

    def __init__(self, spec: FeatureSpec) -> None:
        self.spec = spec

    # ---- before there is a spec

    @classmethod
    def recognizes(cls, path: str, head: bytes) -> bool:
        """Return whether a file that begins with ``head`` is of this format."""
        return False

    @classmethod
    def sample(cls, path: str, head: bytes, maximum: int) -> Sample:
        """Read the first rows of a file that :meth:`recognizes` accepted.

        Args:
            path: The path of the file.
            head: For text, whole lines from its beginning.
            maximum: The largest number of rows to read.
        """
        raise NotImplementedError

    # ---- errors

    def check_label(self, label: bool, source: str) -> None:
        """Raise :class:`BadRowError` for a file whose rows have no label."""
        if label:
            return
        features = self.spec.sources(label=False)
        lacking = [name for name in self.spec.sources(label=True) if name not in features]
        remedy = "correct the names in the spec, or pass data with labels to train on"
        if any(f"/{name}=" in source for name in lacking):
            remedy = (
                "convert it to parquet: values in the names of directories are not read as columns "
                "of text"
            )
        what = f"{source}: rows without {', '.join(lacking)}, which training reads"
        raise BadRowError(what, remedy)

    def make_bad_row_error(self, rows: RawRows, source: str, first: int) -> BadRowError:
        """Return the error about the first bad row.

        Args:
            rows: The rows, at least one of which is bad.
            source: The name of the file.
            first: The number of their first line in the file.
        """
        bad = rows.bad[0]
        what = f"{source}, {self.unit} {first + bad.line}: {bad.what}"
        if rows.bad_count > 1:
            what += f" (one of {rows.bad_count} malformed rows near it)"
        remedy = bad.remedy or "correct the file"
        if may_leave_out(remedy):
            remedy += ", or leave such rows out with --on_bad_rows quarantine"
        return BadRowError(what, remedy)

    # ---- blocks

    @property
    def unit(self) -> str:
        """The unit of :meth:`first_line`: "line" or "row"."""
        return "row" if self.by_rows else "line"

    @abc.abstractmethod
    def open(self, day: DayFile) -> OpenDay:
        """Read the header or footer of a file: whether it has a label, and where its rows begin.

        Raises:
            BadInputError: The file has another format than the spec, or lacks a column.
            BadRowError: Its lines have another number of fields than the spec.
        """

    @abc.abstractmethod
    def cut(
        self, path: str, source: str, begin: int, end: int, block_bytes: int
    ) -> list[tuple[int, int]]:
        """Cut ``[begin, end)`` (whole rows) into ranges of about ``block_bytes``."""

    @abc.abstractmethod
    def count_rows(self, path: str, begin: int, end: int) -> int:
        """Count the rows in ``[begin, end)``, including malformed ones, without parsing them."""

    @abc.abstractmethod
    def find_row(self, path: str, row: int, begin: int, end: int) -> int:
        """Return the position of row ``row``, counted from ``begin``; ``end`` if there is none."""

    @abc.abstractmethod
    def first_line(self, block: Block) -> int:
        """Return the line number (for tables, the row number) of a block's first row, from 1."""

    @abc.abstractmethod
    def read(
        self, block: Block, *, label: bool, max_bad_rows: int, chunk_bytes: int | None
    ) -> Iterator[RawRows]:
        """Read and parse a block in chunks; see :func:`read_block_chunks`."""

    @abc.abstractmethod
    def rates(self, last: OpenDay, block: Block) -> tuple[float, float]:
        """Estimate the rows per position, and the bytes of a file per position.

        Args:
            last: A day.
            block: A block of the day.
        """

    @property
    def row_size(self) -> int:
        """The smallest number of positions that a row takes."""
        return 1

    # ---- streams

    @abc.abstractmethod
    def stream(self, path: str, block_bytes: int) -> Iterator[UnparsedRows]:
        """Read a file, compressed or not, in blocks of about ``block_bytes``, without parsing.

        Raises:
            BadInputError: The file is missing, empty or truncated.
            BadRowError: Its lines have another number of fields than the spec.
        """

    @abc.abstractmethod
    def check_head(self, day: DayFile, *, reject: bool) -> None:
        """Check only the first rows of a compressed day.

        Raises:
            BadInputError: The file is truncated, has another format than the spec, or lacks a
                column.
            BadRowError: A row breaks the spec (unless ``reject``), or rows have no label.
        """


def get_format(spec: FeatureSpec) -> LogFormat:
    """Return the format of a spec's files. Raises ImportError if it needs a missing package."""
    return load_reader(spec.input.format)(spec)


def read_block_chunks(
    block: Block,
    spec: FeatureSpec,
    *,
    label: bool = True,
    max_bad_rows: int = 0,
    chunk_bytes: int | None = 8 << 20,
) -> Iterator[RawRows]:
    """Read and parse a block in chunks, each with line numbers from 0.

    Args:
        block: The rows.
        spec: The columns, and the format of the file.
        label: Whether rows have the label.
        max_bad_rows: The number of bad rows that are left out (all are in ``RawRows.bad``) before
            the next one is an error.
        chunk_bytes: The approximate size of a chunk; small chunks stay in the cache. None to read
            the block as one chunk.

    Raises:
        BadInputError: The file is missing or damaged, or lacks a column.
        BadRowError: A row breaks the spec; the error names file, line, column and value.
    """
    if block.times is not None:
        spec = bound_times(spec, block.times)
    reader = get_format(spec)
    lines_before = 0
    bad_rows = 0
    for rows in reader.read(block, label=label, max_bad_rows=max_bad_rows, chunk_bytes=chunk_bytes):
        bad_rows += rows.bad_count
        if bad_rows > max_bad_rows:
            first = reader.first_line(block) + lines_before
            error = reader.make_bad_row_error(rows, block.source, first)
            if max_bad_rows:  # one block exceeds the limit of the whole log
                raise BadRowError(
                    f"{error.what}\n{bad_rows:,} rows of this block are malformed, which is more "
                    "than --max_bad_fraction allows of the whole input",
                    "correct the file or the spec, or allow more with --max_bad_fraction",
                )
            raise error
        lines_before += rows.lines
        yield rows
