"""Read rows of a parquet file, by their numbers, as columns of a feature spec."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import urllib.parse
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import as_bytes
from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.parquet_footer import DECOMPRESSED, Footer, columns_of_leaves, footer_of
from nvt_torchrec.clicklog.readers.lines import filesystem_of
from nvt_torchrec.clicklog.readers.parquet_values import (
    conversion_remedy,
    convert_array,
    fits,
    remedy_of_booleans,
    type_remedy,
    wanted,
)
from nvt_torchrec.clicklog.text.assemble import assemble
from nvt_torchrec.clicklog.text.convert import Converted
from nvt_torchrec.clicklog.text.remedies import similar_column
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.reading import Read
from nvt_torchrec.formats.rows import RawRows

#: The most bytes of a value in a typed column. Blocks are sized by it, because encoded pages may be
#: far smaller.
_VALUE_BYTES = 8
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclasses.dataclass(frozen=True)
class ParquetLayout:
    """The contents of a parquet file, from its footer.

    Attributes:
        rows: Number of rows.
        label: Whether there is a label column.
        groups: Rows of each row group, and bytes of the spec's columns in it, decoded.
    """

    rows: int
    label: bool
    groups: list[tuple[int, int]]


@contextlib.contextmanager
def _opened(path: str, source: str) -> Iterator[tuple[pq.ParquetFile, Footer]]:
    filesystem, name = filesystem_of(path)
    try:
        with filesystem.open(name, "rb") as file:
            footer = footer_of(file)
            with pq.ParquetFile(
                file, metadata=footer.metadata, pre_buffer=True, page_checksum_verification=True
            ) as parquet:
                yield parquet, footer
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise BadInputError(
            f"{source}: cannot be read as parquet: {error}",
            "fetch it again, or set its format in the spec's [input]",
        ) from error


def parquet_layout(path: str, source: str, spec: FeatureSpec) -> ParquetLayout:
    """Read a file's footer.

    Raises:
        BadInputError: It is not a parquet file, or a column is missing or of another type.
    """
    with _opened(path, source) as (_, footer):
        partition = partition_values(source)
        label = all(
            name in partition or find_type(footer.schema, name) for name in spec.sources(label=True)
        )
        wanted = check_columns(footer.schema, source, spec, label=label)
        wanted = {name if name in footer.schema.names else name.split(".")[0] for name in wanted}
        leaves = [i for i, name in enumerate(columns_of_leaves(footer.schema)) if name in wanted]
        sizes = footer.chunks[:, leaves, DECOMPRESSED].sum(axis=1)
        groups = [
            (rows, max(size, rows * _VALUE_BYTES * len(wanted)))
            for rows, size in zip(footer.rows.tolist(), sizes.tolist(), strict=True)
        ]
        return ParquetLayout(footer.metadata.num_rows, label, groups)


def cut_rows(
    layout: ParquetLayout, begin: int, end: int, block_bytes: int
) -> list[tuple[int, int]]:
    """Cut the rows ``[begin, end)`` into ranges of about ``block_bytes``, decoded.

    Cuts are between row groups; only larger row groups are cut themselves.
    """
    cuts, first, filled = [begin], 0, 0
    for rows, size in layout.groups:
        low, high = max(begin, first), min(end, first + rows)
        first += rows
        if low >= high:
            continue
        size = size * (high - low) // rows
        if filled and filled + size > block_bytes:
            cuts.append(low)
            filled = 0
        parts = max(1, -(-size // block_bytes))
        cuts += [low + (high - low) * i // parts for i in range(1, parts)]
        filled = filled + size if parts == 1 else block_bytes
    return [cut for cut in itertools.pairwise([*cuts, end]) if cut[0] < cut[1]]


def read_parquet(
    path: str,
    begin: int,
    end: int,
    source: str,
    spec: FeatureSpec,
    *,
    label: bool,
    reject: bool | int,
    chunk_rows: int | None = None,
) -> Iterator[RawRows]:
    """Read the rows ``[begin, end)`` in order, checking every value.

    :mod:`.parquet_values` says which types a column may have.

    Args:
        path: Of the file.
        begin: First row.
        end: The row after the last row.
        source: Names the file in errors.
        spec: The columns.
        label: Whether to read the label.
        reject: Describe every bad row, not only the first ones.
        chunk_rows: The most rows that are read at once; None: all.

    Yields:
        Chunks of rows; line numbers count from 0 in each.

    Raises:
        BadInputError: The file is damaged, or a column is missing or of another type.
    """
    with _opened(path, source) as (parquet, footer):
        names = check_columns(parquet.schema_arrow, source, spec, label=label)
        meta = footer.metadata
        if end > meta.num_rows:
            raise BadInputError(
                f"{source}: {meta.num_rows} rows instead of {end}: it was rewritten",
                "start again when no program writes to it",
            )
        rows = footer.rows.tolist()
        ends = list(itertools.accumulate(rows))
        begins = [0, *ends[:-1]]
        groups = [i for i in range(len(ends)) if begins[i] < end and begin < ends[i]]
        at = begins[groups[0]] if groups else end
        if chunk_rows is None:
            tables = [parquet.read_row_groups(groups, columns=names, use_threads=False)]
        else:
            tables = parquet.iter_batches(
                chunk_rows, row_groups=groups, columns=names, use_threads=False
            )
        for table in tables:
            chunk = table.slice(max(begin - at, 0), max(end - max(at, begin), 0))
            at += len(table)
            if len(chunk) or chunk_rows is None:
                yield table_to_rows(chunk, source, spec, label=label, reject=reject)


def partition_values(path: str) -> dict[str, str | None]:
    """Return the values in the names of directories such as ``date=2024-10-30``, as Hive does."""
    pairs = (name.split("=", 1) for name in path.split("/")[:-1] if "=" in name)
    return {
        urllib.parse.unquote(name): None if value == _HIVE_NULL else urllib.parse.unquote(value)
        for name, value in pairs
    }


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


def _column(table: pa.Table | pa.RecordBatch, name: str, source: str) -> pa.Array:
    """Return a column, or a field of a struct, or a value of the directories, as one array."""
    if name not in table.schema.names and find_type(table.schema, name) is None:
        value = pa.scalar(partition_values(source)[name], pa.string())
        return pa.repeat(value, table.num_rows)
    column, *fields = [name] if name in table.schema.names else name.split(".")
    array = _whole(table.column(column))
    return pc.struct_field(array, fields) if fields else array


def table_to_rows(
    table: pa.Table | pa.RecordBatch,
    source: str,
    spec: FeatureSpec,
    *,
    label: bool,
    reject: bool | int,
    text: Callable[[int], bytes] | None = None,
) -> RawRows:
    """Return the rows of a table whose columns are as the spec says; see :func:`check_columns`.

    Args:
        table: The columns.
        source: Names the file in errors.
        spec: The columns of the spec.
        label: Whether to read the label.
        reject: Whether to describe every bad row, and not only the first ones.
        text: Returns the raw text of a row; None: the columns of the row as JSON.
    """
    plan, separator = spec.read_plan(label=label), spec.input.list_separator
    columns = {name: _column(table, name, source) for name in spec.sources(label=label)}

    def as_json(row: int) -> bytes:
        here = {name: column.slice(row, 1) for name, column in columns.items()}
        value = {name: one.cast(as_bytes(one.type))[0].as_py() for name, one in here.items()}
        return json.dumps(value, default=_readable, ensure_ascii=False).encode()

    converted = (convert_array(columns[read.source], read, separator) for read in plan.reads)
    return assemble(spec, converted, text or as_json, rows=len(table), label=label, reject=reject)


def convert_column(array: pa.Array, read: Read) -> Converted:
    """Check and convert a column that is in memory, as :func:`read_parquet` does.

    Args:
        array: [n], of any type that can hold the values that are read.
        read: How the column is read.

    Raises:
        SchemaError: The array is of another type.
    """
    if not fits(array.type, read):
        raise SchemaError(
            f"column {read.source} is of type {array.type}, not {wanted(read)}",
            remedy_of_booleans(array.type, read) or conversion_remedy(read),
        )
    return convert_array(array, read)


def _readable(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def check_columns(schema: pa.Schema, source: str, spec: FeatureSpec, *, label: bool) -> list[str]:
    """Return the names of the columns to read; check that they exist and their types."""
    partition = partition_values(source)
    names = []
    for read in spec.read_plan(label=label).reads:
        held = find_type(schema, read.source)
        if held is None and read.source in partition and read.source not in schema.names:
            continue
        if held is None:
            hint = similar_column(read.source, schema.names, spec.sources(label=True))
            there = ", ".join([*schema.names, *partition][:20])
            where = "twice" if read.source in schema.names else "not"
            raise BadInputError(
                f"{source}: column {read.source} is {where} there",
                f"{hint}it has {there}; name them in the spec as in the file",
            )
        if not fits(held, read, spec.input.list_separator):
            raise BadInputError(
                f"{source}: column {read.source} is of type {held}, not {wanted(read)}",
                type_remedy(held, read),
            )
        names.append(read.source)
    return list(dict.fromkeys(names))


def _whole(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a column as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
