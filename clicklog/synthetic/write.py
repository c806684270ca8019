"""Write synthetic rows of any spec as tsv, csv or parquet."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clicklog.arrays import mask_to_arrow, to_arrow
from clicklog.spec.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec, InputFormat
from clicklog.spec.raw_types import RAW_TYPES
from clicklog.strings import string_array
from clicklog.synthetic.any_spec import ItemLists, SpecRows
from clicklog.synthetic.model import MISSING_COUNT, MISSING_VALUE
from clicklog.synthetic.sources import HUNDREDTHS
from clicklog.synthetic.write_sources import (
    first_lines,
    format_rows_of_sources,
    prefix_of,
    table_of_sources,
)

_ROW_GROUP_ROWS = 1 << 17
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


@contextlib.contextmanager
def open_writer(path: Path, spec: FeatureSpec, days: int) -> Iterator[Callable[[SpecRows], object]]:
    """Open a file for one of ``days`` days; yields a function that appends rows to it."""
    plain = _is_plain(spec)
    if spec.input.format == "parquet":
        with _ParquetFile(path, spec, days) as file:
            yield file.write
        return
    with open(path, "wb") as file:
        if not plain:
            file.write(first_lines(spec))
            yield lambda rows: file.write(format_rows_of_sources(rows, spec, days))
            return
        if spec.input.header:
            file.write(_header(spec))
        yield lambda rows: file.write(format_spec_rows(rows, spec))


def _is_plain(spec: FeatureSpec) -> bool:
    """Whether :func:`format_spec_rows` can write the rows."""
    own = spec.input
    plain = InputFormat(own.format, own.header, own.delimiter, own.list_separator, own.max_line_kb)
    return spec.is_plain and own == plain and len(own.delimiter) <= 1


class _ParquetFile:
    """A parquet file that collects blocks into row groups."""

    def __init__(self, path: Path, spec: FeatureSpec, days: int) -> None:
        self._spec, self._days = spec, days
        self._blocks: list[pa.Table] = []
        self._writer: pq.ParquetWriter | None = None
        self._path = path

    def __enter__(self) -> _ParquetFile:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self._flush()
        if self._writer:
            self._writer.close()

    def write(self, rows: SpecRows) -> None:
        if _is_plain(self._spec):
            self._blocks.append(pa.table(_typed_columns(rows, self._spec)))
        else:
            self._blocks.append(table_of_sources(rows, self._spec, self._days))
        if sum(map(len, self._blocks)) >= _ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._blocks:
            table = pa.concat_tables(self._blocks)
            self._writer = self._writer or pq.ParquetWriter(
                self._path, table.schema, write_page_checksum=True
            )
            self._writer.write_table(table)
            self._blocks = []


def format_spec_rows(rows: SpecRows, spec: FeatureSpec) -> bytes:
    """Format the rows as text, one line each; an empty field is a missing value."""
    columns = [to_arrow(rows.label).cast(pa.string())]
    columns += [
        _dense_text(numbers, column) for numbers, column in zip(rows.dense, spec.dense, strict=True)
    ]
    for values, column in zip(rows.categorical, spec.categorical, strict=True):
        if isinstance(values, ItemLists):
            items = pa.ListArray.from_arrays(_offsets(values), _texts(values.codes, column))
            columns.append(pc.binary_join(items, _scalar(spec.input.list_separator)))
        else:
            texts = _texts(values, column)
            columns.append(pc.if_else(mask_to_arrow(values == MISSING_VALUE), _scalar(""), texts))
    lines = pc.binary_join_element_wise(*columns, _scalar(spec.input.delimiter))
    ended = pc.binary_join_element_wise(lines, _scalar("\n"), _scalar(""))
    data = ended.buffers()[2]
    return data.to_pybytes() if data is not None else b""


def _scalar(text: str) -> pa.StringScalar:
    """Make a scalar of a string; ``pa.scalar`` imports pandas."""
    data = np.frombuffer(text.encode(), np.uint8)
    return string_array(np.array([0, len(data)], np.int32), data)[0]


def _header(spec: FeatureSpec) -> bytes:
    text = io.StringIO()
    if spec.input.format == "csv":
        writer = csv.writer(text, delimiter=spec.input.delimiter, lineterminator="\n")
        writer.writerow(spec.columns)
    else:
        text.write(spec.input.delimiter.join(spec.columns) + "\n")
    return text.getvalue().encode()


def _dense_text(numbers: np.ndarray, column: DenseColumn) -> pa.Array:
    missing = mask_to_arrow(numbers == MISSING_COUNT)
    if column.raw != "float":
        return pc.if_else(missing, _scalar(""), to_arrow(numbers).cast(pa.string()))
    whole = numbers // HUNDREDTHS
    rest = to_arrow(numbers - whole * HUNDREDTHS).cast(pa.string())
    whole_text = to_arrow(whole).cast(pa.string())
    text = pc.binary_join_element_wise(whole_text, pc.utf8_lpad(rest, 2, "0"), _scalar("."))
    return pc.if_else(missing, _scalar(""), text)


def _texts(codes: np.ndarray, column: CategoricalColumn) -> pa.Array:
    if column.raw == "int":
        return to_arrow(codes).cast(pa.string())
    digits = _hex(codes)
    if column.raw == "hex32":
        return digits
    return pc.binary_join_element_wise(_scalar(prefix_of(column)), digits, _scalar(""))


def _hex(codes: np.ndarray) -> pa.StringArray:
    """Format the lowest 32 bits as 8 hexadecimal digits."""
    shifts = np.arange(28, -1, -4)
    digits = _HEX[(codes[:, None] >> shifts) & 15]
    return string_array(np.arange(len(codes) + 1, dtype=np.int32) * np.int32(8), digits.reshape(-1))


def _typed_columns(rows: SpecRows, spec: FeatureSpec) -> dict[str, pa.Array]:
    columns = {spec.label: to_arrow(rows.label.astype(np.int8))}
    for numbers, column in zip(rows.dense, spec.dense, strict=True):
        missing = mask_to_arrow(numbers == MISSING_COUNT)
        if column.raw == "float":
            values = to_arrow(numbers / HUNDREDTHS)
        else:
            values = to_arrow(
                np.where(numbers == MISSING_COUNT, 0, numbers).astype(RAW_TYPES[column.raw].dtype)
            )
        columns[column.name] = _with_nulls(values, missing)
    for values, column in zip(rows.categorical, spec.categorical, strict=True):
        if isinstance(values, ItemLists):
            missing = mask_to_arrow(np.diff(values.offsets) == 0)
            lists = pa.ListArray.from_arrays(_offsets(values), _typed(values.codes, column))
            columns[column.name] = _with_nulls(lists, missing)
        else:
            missing = mask_to_arrow(values == MISSING_VALUE)
            columns[column.name] = _with_nulls(_typed(values, column), missing)
    return columns


def _typed(codes: np.ndarray, column: CategoricalColumn) -> pa.Array:
    if column.raw == "string":
        return _texts(codes, column)
    return to_arrow(codes.astype(RAW_TYPES[column.raw].dtype))


def _with_nulls(values: pa.Array, missing: pa.BooleanArray) -> pa.Array:
    return pc.if_else(missing, pa.nulls(1, values.type)[0], values)


def _offsets(lists: ItemLists) -> pa.Int32Array:
    return to_arrow(lists.offsets.astype(np.int32))
