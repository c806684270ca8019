"""Parquet row groups → columns, on the CPU, and the reader that hands out a run of rows bit by bit.

A *decoder* is a function ``(piece, rows at a time) → iterator of column lists``: arrays in schema
order (label, dense, categorical), consecutive, and together exactly the piece's rows. Here they
are NumPy arrays ``[rows]`` on Arrow's memory; :mod:`nvt_loader.gpu` has a decoder that gives
tensors on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clicklog.errors import BadInputError, SchemaError
from nvt_loader.layout import REWRITE, Layout, check_columns
from nvt_loader.plan import Piece

#: Parquet files kept open, so that a shuffled epoch does not parse a footer for each row group.
OPEN_FILES = 32

Columns = list[Any]
Decoder = Callable[[Piece, int], Iterator[Columns]]


def cpu_decoder(layout: Layout) -> Decoder:
    """A decoder of a split's row groups by pyarrow; verifies the page checksums that there are.

    The decoder raises :class:`BadInputError` for a file that cannot be read or is not what its
    footer was at planning time, and :class:`SchemaError` for a null, a number that is none and an
    id outside its table.
    """
    names = layout.schema.columns

    @functools.lru_cache(OPEN_FILES)
    def open_file(number: int) -> pq.ParquetFile:
        path = layout.files[number]
        file = pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
        check_columns(file.schema_arrow, layout.schema, path)
        return file

    def decode(piece: Piece, rows: int) -> Iterator[Columns]:
        group = layout.row_groups[piece.row_group]
        path = layout.files[group.file]
        try:
            file = open_file(group.file)
            check_unchanged(layout, piece.row_group, file.metadata)
            batches = file.iter_batches(rows, row_groups=[group.index], columns=names)
            first = 0  # of the batch, as a row of the row group
            for batch in batches:
                begin, end = max(piece.begin - first, 0), min(piece.end - first, batch.num_rows)
                if begin < end:
                    yield _columns(batch.slice(begin, end - begin), names, layout, group.file)
                first += batch.num_rows
                if first >= piece.end:
                    return
        except (pa.ArrowException, OSError) as error:
            raise BadInputError(
                f"{path}: row group {group.index} cannot be decoded: {error}", REWRITE
            ) from error
        raise BadInputError(
            f"{path}: row group {group.index} ends after {first} of {group.rows} rows", REWRITE
        )

    return decode


def check_unchanged(layout: Layout, row_group: int, footer: pq.FileMetaData) -> None:
    """Refuse a file whose row groups are no longer as planned. Raises :class:`BadInputError`."""
    group = layout.row_groups[row_group]
    if group.index >= footer.num_row_groups or footer.row_group(group.index).num_rows != group.rows:
        raise BadInputError(
            f"{layout.files[group.file]}: row group {group.index} has no longer {group.rows} rows",
            "the file was rewritten while in use, or _metadata is out of date: delete _metadata",
        )


def _columns(batch: pa.RecordBatch, names: list[str], layout: Layout, file: int) -> Columns:
    arrays = []
    for name in names:
        array = batch.column(name)
        if array.null_count:
            raise SchemaError(
                f"{layout.files[file]}: column {name} holds {array.null_count} null values",
                "the ETL fills missing values; run it again",
            )
        arrays.append(array.to_numpy(zero_copy_only=True))
    floats = len(names) - len(layout.schema.categorical)
    for name, array in zip(names[:floats], arrays[:floats], strict=True):
        with np.errstate(all="ignore"):  # a sum that overflows is looked at more closely
            finite = np.isfinite(array.sum())
        if not finite:
            check_finite(array, name, layout.files[file])
    for i, (array, size) in enumerate(zip(arrays[floats:], layout.schema.table_sizes, strict=True)):
        # read as unsigned, a negative id is a large one: one reduction for both ends
        if array.view(np.uint32).max() >= size:
            raise_outside(array, i, layout, file)
    return arrays


def check_finite(column: np.ndarray, name: str, path: Path) -> None:
    """Refuse infinities and NaN, which one step spreads over the whole model.

    Raises:
        SchemaError: naming file, column and value.
    """
    broken = column[~np.isfinite(column)]
    if broken.size:
        raise SchemaError(
            f"{path}: column {name} holds {broken[0]} (in {broken.size} of {column.size} rows)",
            "the ETL writes finite numbers only; run it again",
        )


def raise_outside(ids: np.ndarray, column: int, layout: Layout, file: int) -> NoReturn:
    """Refuse ids outside their table, before an embedding kernel meets them.

    Raises:
        SchemaError: naming file, column, id and table size.
    """
    name, size = layout.schema.categorical[column], layout.schema.table_sizes[column]
    outside = ids[(ids < 0) | (ids >= size)]
    raise SchemaError(
        f"{layout.files[file]}: column {name} holds id {outside[0]}, outside its table of {size} "
        f"rows (in {outside.size} of {ids.size} rows)",
        "table sizes come from .merlin/schema.json: it and the data are of two ETL runs",
    )


class RowReader:
    """Hands out consecutive rows of a sequence of pieces; decodes about ``rows`` at a time."""

    def __init__(self, decoder: Decoder, pieces: Iterable[Piece], rows: int) -> None:
        self._columns = (columns for piece in pieces for columns in decoder(piece, rows))
        self._rest: Columns | None = None

    def take(self, rows: int) -> list[Columns]:
        """The next ``rows`` rows, as column lists that follow one another."""
        parts = []
        while rows:
            columns = self._rest if self._rest is not None else next(self._columns)
            taken = min(rows, len(columns[0]))
            parts.append([column[:taken] for column in columns])
            rows -= taken
            whole = taken == len(columns[0])
            self._rest = None if whole else [column[taken:] for column in columns]
        return parts
