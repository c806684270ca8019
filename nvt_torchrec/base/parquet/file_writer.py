"""Write a parquet file of float32, int32 and lists of them, one row group after the other."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from nvt_torchrec.base import __version__
from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.parquet import compact_protocol as thrift
from nvt_torchrec.base.parquet.column_chunks import TYPES, Bytes, ChunkEncoder, Leaf
from nvt_torchrec.base.parquet.compact_protocol import Value

MAGIC = b"PAR1"
#: The writer of a file, in the form that readers parse to work around defects of old writers.
CREATED_BY = f"nvt-torchrec version {__version__}"
#: The largest number of buffers for a system call (POSIX: IOV_MAX).
_MAX_BUFFERS = 1024
#: Parquet's numbers of repetition types.
_REQUIRED = 0
_REPEATED = 2
_FORMAT_VERSION = 2
#: Parquet's number of lists as a converted type, and of their field in ``LogicalType``.
_CONVERTED_LIST = 3
_LOGICAL_LIST = 3


class ParquetFileWriter:
    """Writes a parquet file.

    The same rows in the same row groups always give the same bytes.

    Args:
        descriptor: The descriptor of an empty file that is open for writing.
        schema: Fields of float32, int32 and lists of them, none of which is nullable.

    Attributes:
        size: The number of bytes written so far.

    Raises:
        ValueError: A field has another type or is nullable.
        OSError: The file cannot be written; the methods raise it, too.
    """

    def __init__(self, descriptor: int, schema: pa.Schema) -> None:
        for field in schema:
            _check_field(field)
        self._descriptor = descriptor
        self._schema = schema
        self._encoder = ChunkEncoder()
        self._row_groups: list[Value] = []
        self._rows = 0
        self.size = 0
        self._write([MAGIC])

    def write_row_group(self, table: pa.Table) -> None:
        """Write one or more rows of the schema as a row group."""
        chunks = []
        begin = self.size
        for field, column in zip(self._schema, table.columns, strict=True):
            chunk = self._encoder.encode(_make_leaf(field, column.combine_chunks()))
            chunks.append(chunk.describe(self.size))
            self._write(chunk.buffers)
        size = self.size - begin
        self._row_groups.append(
            thrift.struct(
                {
                    1: thrift.list_value(chunks),
                    2: thrift.i64(size),
                    3: thrift.i64(len(table)),
                    5: thrift.i64(begin),
                    6: thrift.i64(size),
                }
            )
        )
        self._rows += len(table)

    def finish(self) -> None:
        """Write the footer."""
        # a ColumnOrder, which says that limits are compared as numbers
        ordered_by_type = thrift.struct({1: thrift.struct({})})
        leaves = len(self._schema)
        fields = {
            1: thrift.i32(_FORMAT_VERSION),
            2: thrift.list_value(_describe_schema(self._schema)),
            3: thrift.i64(self._rows),
            4: thrift.list_value(self._row_groups),
            6: thrift.binary(CREATED_BY.encode()),
            7: thrift.list_value([ordered_by_type] * leaves),
        }
        _, footer = thrift.struct(fields)
        self._write([footer, len(footer).to_bytes(4, "little"), MAGIC])

    def _write(self, buffers: Sequence[Bytes]) -> None:
        """Write buffers one after the other without joining them, which would copy them."""
        rest = [memoryview(buffer) for buffer in buffers]
        while rest:
            written = os.writev(self._descriptor, rest[:_MAX_BUFFERS])
            self.size += written
            # the system may write only a part of the bytes
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if written:
                rest[0] = rest[0][written:]


def _check_field(field: pa.Field) -> None:
    """Raise :class:`ValueError` for a field that this writer does not support."""
    inner = field.type.value_field if pa.types.is_list(field.type) else field
    if field.nullable or inner.nullable or inner.type not in (pa.float32(), pa.int32()):
        raise ValueError(
            f"column {field.name} is {field.type}, nullable or of nullable values: expected "
            "float32, int32 or lists of them without nulls"
        )


def _make_leaf(field: pa.Field, column: pa.Array) -> Leaf:
    """Return the values of a column as they are written."""
    if not pa.types.is_list(field.type):
        return Leaf((field.name,), to_numpy(column), len(column))
    offsets = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)
    values = to_numpy(column.values)[offsets[0] : offsets[-1]]
    path = field.name, "list", field.type.value_field.name
    return Leaf(path, values, len(column), offsets - offsets[0])


def _describe_schema(schema: pa.Schema) -> list[Value]:
    """Return parquet's list of ``SchemaElement``: the root, then its fields, depth first."""
    elements = [_describe_group("schema", _REQUIRED, len(schema))]
    for field in schema:
        if pa.types.is_list(field.type):
            elements.append(_describe_group(field.name, _REQUIRED, 1, is_list=True))
            elements.append(_describe_group("list", _REPEATED, 1))
            field = field.type.value_field
        elements.append(
            thrift.struct(
                {
                    1: thrift.i32(TYPES[np.dtype(field.type.to_pandas_dtype())]),
                    3: thrift.i32(_REQUIRED),
                    4: thrift.binary(field.name.encode()),
                }
            )
        )
    return elements


def _describe_group(name: str, repetition: int, children: int, *, is_list: bool = False) -> Value:
    """Return the ``SchemaElement`` of a field with child fields."""
    fields = {
        3: thrift.i32(repetition),
        4: thrift.binary(name.encode()),
        5: thrift.i32(children),
    }
    if is_list:
        fields[6] = thrift.i32(_CONVERTED_LIST)
        fields[10] = thrift.struct({_LOGICAL_LIST: thrift.struct({})})
    return thrift.struct(fields)
