"""The base class of formats of tables, whose rows are addressed by number and columns by name."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import json
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import to_arrow, to_bytes_type
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.log_format import Block, LogFormat, OpenDay, Sample, UnparsedRows
from nvt_torchrec.clicklog.readers.parquet_values import (
    convert_array,
    describe_wanted,
    fits,
    suggest_type_remedy,
)
from nvt_torchrec.clicklog.text.assemble import assemble
from nvt_torchrec.clicklog.text.convert import make_missing_column
from nvt_torchrec.clicklog.text.remedies import suggest_column
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import RawRows

#: The largest size of a value in a typed column, in bytes. Blocks are sized by it, because encoded
#: pages may be far smaller.
_VALUE_BYTES = 8
#: The approximate bytes of a value while it is read: decoded, and in a typed column.
_DECODED_BYTES = 16
#: The largest number of columns that an error lists.
_MAX_LISTED = 20
#: Hive's name for the directory of rows without a value.
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
#: Rows that are decoded together.
Rows: TypeAlias = pa.Table | pa.RecordBatch


class Table:
    """An open table.

    Attributes:
        schema: The columns.
        rows: The number of rows of each row group, which is decoded as a whole.
    """

    schema: pa.Schema
    rows: list[int]

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the approximate decoded size, in bytes, of the named columns of each group."""
        return [rows * _VALUE_BYTES * len(names) for rows in self.rows]

    def cut(
        self, names: Sequence[str], begin: int, end: int, block_bytes: int
    ) -> list[tuple[int, int]]:
        """Cut ``[begin, end)`` into ranges whose named columns have about ``block_bytes``."""
        groups = list(zip(self.rows, self.sizes(names), strict=True))
        return cut_rows(groups, begin, end, block_bytes)

    def decode(
        self, groups: list[int], names: Sequence[str] | None, chunk_rows: int | None
    ) -> Iterator[Rows]:
        """Decode groups in order, in chunks of at most ``chunk_rows`` rows; :meth:`read` calls it.

        Args:
            groups: The numbers of the groups, increasing.
            names: The columns, fields of structs as ``s.c``; None for all.
            chunk_rows: The largest number of rows of a chunk; None for any number.
        """
        raise NotImplementedError

    def read(
        self, begin: int, end: int, names: Sequence[str] | None, chunk_rows: int | None
    ) -> Iterator[Rows]:
        """Read the rows ``[begin, end)`` in order; see :meth:`decode`."""
        ends = list(itertools.accumulate(self.rows))
        begins = [0, *ends[:-1]]
        groups = [i for i in range(len(ends)) if begins[i] < end and begin < ends[i]]
        first = begins[groups[0]] if groups else end  # the number of the next decoded row
        for rows in self.decode(groups, names, chunk_rows):
            chunk = rows.slice(max(begin - first, 0), max(end - max(first, begin), 0))
            first += rows.num_rows
            if chunk.num_rows or chunk_rows is None:
                yield chunk


@dataclasses.dataclass(frozen=True)
class TableRows(UnparsedRows):
    """Rows of a table that have not been read yet.

    Attributes:
        block: The range of the rows.
    """

    format: TableFormat
    block: Block

    def parse_all(self, *, max_bad_rows: int) -> RawRows:
        """See :meth:`UnparsedRows.parse_all`."""
        reads = self.format.read(
            self.block, label=self.label, max_bad_rows=max_bad_rows, chunk_bytes=None
        )
        (rows,) = reads
        return rows

    def names(self) -> Sequence[str]:
        """See :meth:`UnparsedRows.names`."""
        with self.format.open_table(self.path, self.path) as table:
            return table.schema.names

    def columns(self, names: Sequence[str], lines: np.ndarray) -> dict[str, pa.ChunkedArray]:
        """See :meth:`UnparsedRows.columns`."""
        with self.format.open_table(self.path, self.path) as table:
            rows = pa.concat_tables(table.read(self.block.begin, self.block.end, names, None))
        if len(lines) < len(rows):
            rows = rows.take(to_arrow(lines))
        return {name: rows.column(name) for name in names}


class TableFormat(LogFormat):
    """Base class of formats of tables."""

    by_rows = True

    @classmethod
    @abc.abstractmethod
    def open_table(cls, path: str, source: str) -> contextlib.AbstractContextManager[Table]:
        """Open a table; ``source`` is its name in errors.

        Raises:
            BadInputError: The table cannot be read, now or within the context.
        """

    @classmethod
    def sample(cls, path: str, head: bytes, maximum: int) -> Sample:
        """See :meth:`LogFormat.sample`."""
        with cls.open_table(path, path) as table:
            tables = [table.schema.empty_table()]  # so that a file without rows has its columns
            for rows in table.read(0, maximum, None, maximum):
                tables.append(pa.table(rows))
            return Sample(pa.concat_tables(tables), sum(table.rows) <= maximum)

    # ---- blocks

    def open(self, day: DayFile) -> OpenDay:
        """See :meth:`LogFormat.open`."""
        with self.open_table(day.path, day.source) as table:
            label, _ = self._check_table(table, day.source)
            return OpenDay(self, day, label, 0, sum(table.rows))

    def _check_table(self, table: Table, source: str) -> tuple[bool, list[str]]:
        """Return whether there are labels, and the columns to read; see :func:`check_columns`."""
        partition = parse_partition_values(source)
        label = all(
            name in partition or find_type(table.schema, name)
            for name in self.spec.sources(label=True)
        )
        return label, check_columns(table.schema, source, self.spec, label=label)

    def cut(
        self, path: str, source: str, begin: int, end: int, block_bytes: int
    ) -> list[tuple[int, int]]:
        """See :meth:`LogFormat.cut`; ``block_bytes`` is the decoded size."""
        with self.open_table(path, source) as table:
            _, names = self._check_table(table, source)
            return table.cut(names, begin, end, block_bytes)

    def count_rows(self, path: str, begin: int, end: int) -> int:
        """See :meth:`LogFormat.count_rows`."""
        return end - begin

    def find_row(self, path: str, row: int, begin: int, end: int) -> int:
        """See :meth:`LogFormat.find_row`."""
        return min(row, end)

    def first_line(self, block: Block) -> int:
        """See :meth:`LogFormat.first_line`."""
        return block.begin + 1

    def read(
        self, block: Block, *, label: bool, max_bad_rows: int, chunk_bytes: int | None
    ) -> Iterator[RawRows]:
        """See :meth:`LogFormat.read`; :mod:`.parquet_values` says which types columns may have.

        Raises:
            BadInputError: The file is damaged, or a column is missing or of another type.
        """
        source = block.source
        spec = self.spec
        row_bytes = _DECODED_BYTES * len(spec.sources(label=label))
        chunk_rows = chunk_bytes and max(1, chunk_bytes // row_bytes)
        with self.open_table(block.path, source) as table:
            names = check_columns(table.schema, source, spec, label=label)
            if block.end > sum(table.rows):
                raise BadInputError(
                    f"{source}: {sum(table.rows)} rows instead of {block.end}: it was rewritten",
                    "start again when no program writes to it",
                )
            chunks = table.read(block.begin, block.end, names, chunk_rows)
            for rows in chunks if chunk_rows else [pa.concat_tables(chunks)]:
                yield table_to_rows(rows, source, spec, label=label, max_bad_rows=max_bad_rows)

    def rates(self, last: OpenDay, block: Block) -> tuple[float, float]:
        """See :meth:`LogFormat.rates`."""
        return 1.0, last.file.size / max(1, last.end)

    # ---- streams

    def stream(self, path: str, block_bytes: int) -> Iterator[UnparsedRows]:
        """See :meth:`LogFormat.stream`."""
        with self.open_table(path, path) as table:
            label, names = self._check_table(table, path)
            cuts = table.cut(names, 0, sum(table.rows), block_bytes)
        if not cuts:
            raise BadInputError(f"{path}: no rows", "there is nothing to read")
        for begin, end in cuts:
            yield TableRows(self, path, begin, label, Block(path, begin, end, path))

    def check_head(self, day: DayFile, *, reject: bool) -> None:
        """See :meth:`LogFormat.check_head`; a table is only checked after it is decompressed."""


def cut_rows(
    groups: list[tuple[int, int]], begin: int, end: int, block_bytes: int
) -> list[tuple[int, int]]:
    """Cut the rows ``[begin, end)``; see :meth:`Table.cut`.

    Cuts are between groups, because a group that is cut is decoded again for each block. Only
    groups that are larger than a block are cut.

    Args:
        groups: The numbers of rows and bytes of each group.
        begin: The first row.
        end: The row after the last row.
        block_bytes: The approximate size of a block.
    """
    cuts = [begin]
    group_begin = 0
    filled = 0  # the bytes since the last cut
    for rows, group_bytes in groups:
        low = max(begin, group_begin)
        high = min(end, group_begin + rows)
        group_begin += rows
        if low >= high:
            continue
        size = group_bytes * (high - low) // rows
        if filled and filled + size > block_bytes:
            cuts.append(low)
            filled = 0
        parts = max(1, -(-size // block_bytes))
        if parts == 1:
            filled += size
            continue
        for i in range(1, parts):
            cuts.append(low + (high - low) * i // parts)
        filled = block_bytes  # so that the next group begins a block
    return [cut for cut in itertools.pairwise([*cuts, end]) if cut[0] < cut[1]]


def parse_partition_values(path: str) -> dict[str, str | None]:
    """Parse the values in the names of directories such as ``date=2024-10-30``, as Hive does."""
    values: dict[str, str | None] = {}
    for directory in path.split("/")[:-1]:
        name, sign, value = directory.partition("=")
        if sign:
            is_null = value == _HIVE_NULL
            values[urllib.parse.unquote(name)] = None if is_null else urllib.parse.unquote(value)
    return values


def find_type(schema: pa.Schema, name: str) -> pa.DataType | None:
    """Return the type of a column, or of a field ``s.c`` of a struct; None without one."""
    if schema.names.count(name) == 1:
        return schema.field(name).type
    column, *fields = name.split(".")
    held = schema.field(column).type if fields and schema.names.count(column) == 1 else None
    for field in fields:
        if held is None or not pa.types.is_struct(held) or held.get_field_index(field) < 0:
            return None
        held = held.field(field).type
    return held


def _column(table: Rows, name: str, source: str) -> pa.Array:
    """Return a column, a field of a struct, or a value in the names of directories, as an array."""
    if name not in table.schema.names and find_type(table.schema, name) is None:
        value = pa.scalar(parse_partition_values(source)[name], pa.string())
        return pa.repeat(value, table.num_rows)
    column, *fields = [name] if name in table.schema.names else name.split(".")
    array = table.column(column)
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return pc.struct_field(array, fields) if fields else array


def table_to_rows(
    table: Rows,
    source: str,
    spec: FeatureSpec,
    *,
    label: bool,
    max_bad_rows: int,
    text: Callable[[int], bytes] | None = None,
) -> RawRows:
    """Convert a table whose columns were checked by :func:`check_columns`.

    Args:
        table: The columns.
        source: The name of the file in errors.
        spec: The columns of the spec.
        label: Whether to read the label.
        max_bad_rows: See :func:`.assemble.assemble`.
        text: Returns the raw text of a row; None for the columns of the row as JSON.
    """
    plan = spec.read_plan(label=label)
    separator = spec.input.list_separator
    names = dict.fromkeys(read.source for read in plan.reads)
    optional = spec.optional_time
    if find_type(table.schema, optional) is None and optional not in parse_partition_values(source):
        names.pop(optional, None)
    columns = {name: _column(table, name, source) for name in names}

    def to_json(row: int) -> bytes:
        values = {}
        for name, column in columns.items():
            cell = column.slice(row, 1)
            # as bytes, because malformed UTF-8 cannot become a Python string
            values[name] = cell.cast(to_bytes_type(cell.type))[0].as_py()
        return json.dumps(values, default=_to_text, ensure_ascii=False).encode()

    converted = []
    for read in plan.reads:
        if read.source in columns:
            converted.append(convert_array(columns[read.source], read, separator))
        else:
            converted.append(make_missing_column(read, len(table)))
    return assemble(
        spec, converted, text or to_json, rows=len(table), label=label, max_bad_rows=max_bad_rows
    )


def _to_text(value: object) -> str:
    """Convert a value that JSON cannot represent to text."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def check_columns(schema: pa.Schema, source: str, spec: FeatureSpec, *, label: bool) -> list[str]:
    """Check the columns of a table, and return the names of those to read.

    Columns whose values are in the names of directories are not read from the table.

    Raises:
        BadInputError: A column is missing, not unique, or has another type.
    """
    partition = parse_partition_values(source)
    names = []
    for read in spec.read_plan(label=label).reads:
        held = find_type(schema, read.source)
        if held is None and read.source not in schema.names:
            is_optional = read.source == spec.optional_time and not spec.needs_time(label=label)
            if read.source in partition or is_optional:
                continue
        if held is None:
            hint = suggest_column(read.source, schema.names, spec.sources(label=True))
            listed = ", ".join([*schema.names, *partition][:_MAX_LISTED])
            problem = "not unique" if read.source in schema.names else "missing"
            raise BadInputError(
                f"{source}: column {read.source} is {problem}",
                f"{hint}the file has {listed}; name them in the spec as in the file",
            )
        if not fits(held, read, spec.input.list_separator):
            raise BadInputError(
                f"{source}: column {read.source} is of type {held}, not {describe_wanted(read)}",
                suggest_type_remedy(held, read),
            )
        names.append(read.source)
    return list(dict.fromkeys(names))
