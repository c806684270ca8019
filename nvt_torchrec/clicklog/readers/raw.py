"""The rows of a raw click log, in blocks, whatever the format of its files.

Paths may be remote (anything fsspec opens). Rows of text are addressed by bytes, rows of parquet by
their numbers: a :class:`Block` is a range of whole rows of one file, so every reader divides a log
into the same blocks. What only some formats need is imported when it is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nvt_torchrec.base.errors import BadRowError
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.lines import find_preamble, read_chunks, text_end
from nvt_torchrec.clicklog.readers.text_rows import (
    block_layout,
    count_file_rows,
    cut_text,
    file_layout,
    offset_of_row,
    parse_chunks,
)
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import RawRows, describes

#: Text that is read at once for a block in one chunk: most blocks are smaller.
_WHOLE_BYTES = 128 << 20
#: About how many bytes a value of parquet takes, decoded and as typed column.
_VALUE_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Block:
    """A range of whole rows of the file ``path``.

    ``begin`` and ``end`` are bytes, in parquet row numbers; ``source`` names the file in errors.
    """

    path: str
    begin: int
    end: int
    source: str


@dataclasses.dataclass(frozen=True)
class OpenDay:
    """A day whose header or footer has been read, to be cut into blocks.

    Attributes:
        file: The day; not compressed.
        spec: Its columns.
        label: Whether its rows have a label.
        begin: Where the first row begins: a byte, in parquet row 0.
        end: Where the last row ends.
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
        """Count the rows before ``end``."""
        if self._parquet:
            return end
        return count_file_rows(self.file.path, self.begin, end, self.spec)

    def find_row(self, row: int, end: int) -> int:
        """Return where row ``row`` (from 0) begins; ``end`` if there are fewer rows."""
        if self._parquet:
            return min(row, end)
        return offset_of_row(self.file.path, row, self.begin, end, self.spec)

    def cut(self, begin: int, end: int, block_bytes: int) -> list[Block]:
        """Cut ``[begin, end)`` (whole rows) into blocks of about ``block_bytes``."""
        path, source = self.file.path, self.file.source
        if self._parquet:
            from nvt_torchrec.clicklog.readers.parquet_rows import cut_rows, parquet_layout

            cuts = cut_rows(parquet_layout(path, source, self.spec), begin, end, block_bytes)
        else:
            cuts = cut_text(path, begin, end, block_bytes, self.spec)
        return [Block(path, *cut, source) for cut in cuts]


def open_day(day: DayFile, spec: FeatureSpec) -> OpenDay:
    """Find out whether a file has a label and where its rows begin.

    Raises:
        BadInputError: It is in another format than the spec says, or lacks a column.
        BadRowError: Its lines have another number of fields than the spec.
    """
    if spec.input.format == "parquet":
        from nvt_torchrec.clicklog.readers.parquet_rows import parquet_layout

        there = parquet_layout(day.path, day.source, spec)
        return OpenDay(day, spec, there.label, 0, there.rows)
    layout = file_layout(day.path, day.size, day.source, spec)
    begin, end = min(layout.begin, day.size), day.size
    if spec.input.skip_empty_lines:
        end = text_end(day.path, begin, end)
    return OpenDay(day, spec, layout.label, begin, end)


def check_label(label: bool, source: str, spec: FeatureSpec) -> None:
    """Raise :class:`BadRowError` for a file whose rows have no label."""
    if label:
        return
    wanted = [name for name in spec.sources(label=True) if name not in spec.sources(label=False)]
    remedy = "correct the names in the spec, or pass data with labels to train on"
    if any(f"/{name}=" in source for name in wanted):
        remedy = "convert it to parquet: of text, values in the names of directories are no columns"
    raise BadRowError(f"{source}: rows without {', '.join(wanted)}, which training reads", remedy)


def read_block(
    block: Block, spec: FeatureSpec, *, label: bool = True, reject: bool | int = False
) -> RawRows:
    """Read and parse a block.

    Args:
        block: The rows.
        spec: The columns, and the format of the file.
        label: Whether rows have the label.
        reject: Leave bad rows out (all are in ``RawRows.bad``) instead of raising an error.

    Raises:
        BadInputError: The file is missing or damaged, or lacks a column.
        BadRowError: A row breaks the spec; names file, line, column and value.
    """
    (rows,) = read_block_chunks(block, spec, label=label, reject=reject, chunk_bytes=None)
    return rows


def read_block_chunks(
    block: Block,
    spec: FeatureSpec,
    *,
    label: bool = True,
    reject: bool | int = False,
    chunk_bytes: int | None = 8 << 20,
) -> Iterator[RawRows]:
    """:func:`read_block` in chunks of about ``chunk_bytes``, which bounds its memory.

    Line numbers count from 0 in each chunk; ``RawRows.lines`` adds up to the block's. Small chunks
    also stay in a processor's cache. ``None``: one chunk. ``reject`` may also be the number of bad
    rows that are left out at most; more are an error.
    """
    path, begin, end, source = block.path, block.begin, block.end, block.source
    if spec.input.format == "parquet":
        from nvt_torchrec.clicklog.readers.parquet_rows import read_parquet

        row_bytes = _VALUE_BYTES * len(spec.sources(label=label))
        size = chunk_bytes and max(1, chunk_bytes // row_bytes)
        chunks = read_parquet(
            path, begin, end, source, spec, label=label, reject=reject, chunk_rows=size
        )
    else:
        layout = block_layout(path, end, source, spec, label)
        size = chunk_bytes or min(end - begin, _WHOLE_BYTES)
        pieces = read_chunks(path, begin, end, size, spec.input)
        together = [list(pieces)] if chunk_bytes is None else ([piece] for piece in pieces)
        chunks = (parse_chunks(each, spec, layout, reject=reject) for each in together)
    lines_before = bad = 0
    for rows in chunks:
        bad += rows.bad_count
        if rows.bad_count and (not reject or not describes(reject, bad)):
            error = bad_row_error(
                rows, source, first_line(block, spec) + lines_before, unit_of(spec)
            )
            if reject:  # the rest of the log cannot matter
                raise BadRowError(
                    f"{error.what}\n{bad:,} rows of this block are malformed, which is more than "
                    "--max_bad_fraction allows of the whole input",
                    "correct the file or the spec, or allow more with --max_bad_fraction",
                )
            raise error
        lines_before += rows.lines
        yield rows


def first_line(block: Block, spec: FeatureSpec) -> int:
    """Return the number of a block's first line in its file, from 1.

    In parquet it is that of its first row; so it is where quoted fields may contain line breaks,
    and skipped lines and the header count as rows.
    """
    if spec.input.format == "parquet":
        return block.begin + 1
    begin, lines = find_preamble(block.path, spec.input)
    return 1 + lines + count_file_rows(block.path, begin, block.begin, spec)


def count_rows(block: Block, spec: FeatureSpec) -> int:
    """Count the rows of a block, malformed ones included, without parsing them."""
    if spec.input.format == "parquet":
        return block.end - block.begin
    return count_file_rows(block.path, block.begin, block.end, spec)


def unit_of(spec: FeatureSpec) -> str:
    """What :func:`first_line` counts: "line" or "row"."""
    rows = spec.input.format == "parquet" or spec.input.quoted_newlines
    return "row" if rows else "line"


def bad_row_error(rows: RawRows, source: str, first: int, unit: str = "line") -> BadRowError:
    """Return the error of the first bad row.

    Args:
        rows: With at least one bad row.
        source: Names the file.
        first: The number of their first line in the file.
        unit: What is numbered, "line" or "row".
    """
    bad = rows.bad[0]
    more = f" (and {rows.bad_count - 1} more rows near it)" if rows.bad_count > 1 else ""
    return BadRowError(
        f"{source}, {unit} {first + bad.line}: {bad.what}{more}",
        f"{bad.remedy or 'correct the file'}, or leave such rows out with --on_bad_rows quarantine",
    )
