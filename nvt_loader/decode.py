"""Parquet row groups → columns, on the CPU, and the reader that hands out a run of rows bit by bit.

A *decoder* is a function ``(piece, rows at a time) → iterator of chunks``: consecutive rows, and
together exactly the piece's. Here a chunk is addresses in Arrow's memory; :mod:`nvt_loader.gpu` has
a decoder that gives tensors on the device. Files are read, not mapped: a mapped file that is cut
short, or a network file system that fails, ends the process without a word (SIGBUS).
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clicklog.errors import BadInputError, SchemaError
from nvt_loader.checks import Checker
from nvt_loader.kernels import plain_addresses
from nvt_loader.layout import REWRITE, Layout
from nvt_loader.plan import Piece, keep_rows

#: Footers kept, so that a shuffled epoch does not parse one for each row group.
FOOTERS = 64


class Rows(Protocol):
    """Consecutive rows of all columns."""

    rows: int

    def slice(self, begin: int, end: int) -> Rows:
        """Rows [begin, end) of them, on the same memory."""


Decoder = Callable[[Piece, int], Iterator[Rows]]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Rows in CPU memory, column by column: label, dense, categorical.

    Attributes:
        rows: how many.
        addresses: int64 [columns], of the first row; of a list column, of its int32 offsets.
        sizes: int64 [columns], bytes from one row to the next there.
        values: int64 [columns], of a list column, the address of its elements; else 0.
        weights: int64 [columns], of a weighted column, the address of its elements' float32
            weights; else 0.
        owner: what keeps the memory alive.
    """

    rows: int
    addresses: np.ndarray
    sizes: np.ndarray
    values: np.ndarray
    weights: np.ndarray
    owner: Any

    def slice(self, begin: int, end: int) -> Chunk:
        """Rows [begin, end), on the same memory."""
        addresses = self.addresses + begin * self.sizes
        return Chunk(end - begin, addresses, self.sizes, self.values, self.weights, self.owner)

    def column(self, number: int, dtype: np.dtype | type) -> np.ndarray:
        """A column that is no list, on the same memory: [rows]."""
        return _view(self.addresses[number], self.rows, np.dtype(dtype))

    def offsets(self, number: int) -> np.ndarray:
        """Where the rows of a list column begin among its elements: int32 [rows + 1]."""
        return _view(self.addresses[number], self.rows + 1, np.dtype(np.int32))


def _view(address: int, length: int, dtype: np.dtype) -> np.ndarray:
    memory = (ctypes.c_char * (length * dtype.itemsize)).from_address(int(address))
    return np.frombuffer(memory, dtype)


def cpu_decoder(layout: Layout) -> Decoder:
    """A decoder of a split's row groups by pyarrow; verifies the page checksums that there are.

    Columns of other numeric types than the contract's are converted. The decoder raises
    :class:`BadInputError` for a file that cannot be read or is not what its footer was at planning
    time, and :class:`SchemaError` for a null, a number that is none and an id outside its table.
    It may be called from several threads.
    """
    names = layout.read_columns
    checker = Checker(layout)
    read_footer = functools.lru_cache(FOOTERS)(lambda number: check_file(layout, number))

    def decode(piece: Piece, rows: int) -> Iterator[Chunk]:
        group = layout.row_groups[piece.row_group]
        path = layout.files[group.file]
        try:
            footer = read_footer(group.file)
            check_unchanged(layout, piece.row_group, footer)
            unproven = checker.unproven(footer, group.index)
            # A reader of its own: a ParquetFile keeps the settings of the last call.
            source = pa.OSFile(str(path))  # given the path, pyarrow takes a millisecond to open it
            file = pq.ParquetFile(
                source, metadata=footer, pre_buffer=False, page_checksum_verification=True
            )
            batches = file.iter_batches(
                min(rows, group.rows), row_groups=[group.index], columns=names, use_threads=False
            )
            where = None
            first = 0  # of the batch, as a row of the row group
            for batch in _kept(batches, layout, piece.row_group):
                where = where or _columns(batch.schema, layout, checker, unproven)
                begin, end = max(piece.begin - first, 0), min(piece.end - first, batch.num_rows)
                if begin < end:
                    rows_of_piece = batch.slice(begin, end - begin)
                    yield _chunk(rows_of_piece, layout, checker, where, group.file)
                first += batch.num_rows
                if first >= piece.end:
                    return
        except SchemaError as error:
            what = f"{error.what}, in row group {group.index}"
            raise SchemaError(what, error.remedy) from error
        except (pa.ArrowException, OSError) as error:
            raise BadInputError(
                f"{path}: row group {group.index} cannot be decoded: {error}", REWRITE
            ) from error
        raise BadInputError(
            f"{path}: row group {group.index} ends after {first} of {piece.end} rows", REWRITE
        )

    return decode


def check_file(layout: Layout, number: int) -> pq.FileMetaData:
    """A file's footer. Raises :class:`BadInputError` if the file is no longer as it was."""
    path, size = layout.files[number], layout.sizes[number]
    found = path.stat().st_size
    if found != size:
        raise BadInputError(
            f"{path} has {found} bytes; it had {size} when the loader was made",
            "the file was rewritten or cut short while in use: restore it, or start again",
        )
    return layout.read_footer(path)


def check_unchanged(layout: Layout, row_group: int, footer: pq.FileMetaData) -> None:
    """Refuse a file whose row groups are no longer as planned. Raises :class:`BadInputError`."""
    group = layout.row_groups[row_group]
    if group.index >= footer.num_row_groups or footer.row_group(group.index).num_rows != group.rows:
        raise BadInputError(
            f"{layout.files[group.file]}: row group {group.index} has no longer {group.rows} rows",
            "the file was rewritten while in use, or _metadata is out of date: delete _metadata",
        )


def _kept(
    batches: Iterator[pa.RecordBatch], layout: Layout, row_group: int
) -> Iterator[pa.RecordBatch]:
    """The rows that undersampling keeps."""
    if layout.undersampling is None:
        yield from batches
        return
    first = 0
    keep = sampled(layout, row_group)
    for batch in batches:
        positive = pc.not_equal(batch.column(layout.schema.label), 0)
        mask = pc.or_(positive, pa.array(keep[first : first + batch.num_rows]))
        first += batch.num_rows
        yield batch.filter(mask)


def sampled(layout: Layout, row_group: int) -> np.ndarray:
    """Which rows of a row group undersampling keeps even if they are negative: bool [rows]."""
    rate, seed = layout.undersampling
    rows = layout.row_groups[row_group].rows
    return keep_rows(rows, rate, seed=seed, row_group=row_group)


def count_kept(layout: Layout) -> Layout:
    """The layout with the rows that undersampling keeps of each row group; reads all labels."""
    label = layout.schema.label
    kept, number, file = [], -1, None
    for i, group in enumerate(layout.row_groups):
        path = layout.files[group.file]
        try:
            if group.file != number:
                number, file = group.file, pq.ParquetFile(path, page_checksum_verification=True)
            labels = file.read_row_group(group.index, [label], use_threads=False).column(0)
        except (pa.ArrowException, OSError) as error:
            raise BadInputError(
                f"{path}: row group {group.index} cannot be decoded: {error}", REWRITE
            ) from error
        positive = np.asarray(labels) != 0
        kept.append(int(np.count_nonzero(positive | sampled(layout, i))))
    return dataclasses.replace(layout, kept=tuple(kept))


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Where the columns are in a file's batches, and which can be taken as they are.

    Attributes:
        indices: int64 [columns], in a batch.
        plain: int64, numbers of the columns of the loader's own types.
        others: numbers of those that are converted, and of the lists.
        unproven: see :meth:`nvt_loader.checks.Checker.unproven`.
    """

    indices: np.ndarray
    plain: np.ndarray
    others: list[int]
    unproven: np.ndarray


def _columns(found: pa.Schema, layout: Layout, checker: Checker, unproven: np.ndarray) -> _Columns:
    indices = np.array([found.get_field_index(name) for name in layout.schema.columns])
    plain = [checker.is_plain(found.field(at).type, i) for i, at in enumerate(indices.tolist())]
    return _Columns(
        indices, np.flatnonzero(plain), np.flatnonzero(~np.array(plain)).tolist(), unproven
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _chunk(
    batch: pa.RecordBatch, layout: Layout, checker: Checker, where: _Columns, file: int
) -> Chunk:
    addresses, values, weights = np.zeros((3, len(where.indices)), np.int64)
    # Arrow's C data interface: all addresses at once, instead of three objects for each column
    _, exported = batch.__arrow_c_array__()
    owner: list[Any] = [exported]
    plain, others = where.plain, where.others
    pointer = _capsule_pointer(exported, b"arrow_array")
    if not plain_addresses(addresses, pointer, plain, where.indices[plain], layout.row_bytes):
        others = range(len(where.indices))  # there are nulls somewhere
    arrays = {}
    for i in others:
        arrays[i] = column = checker.column(batch.column(int(where.indices[i])), i, file)
        if pa.types.is_list(column.type):
            addresses[i] = column.buffers()[1].address + 4 * column.offset
            values[i] = _address(column.values)
        else:
            addresses[i] = _address(column)
    owner.append(arrays)
    chunk = Chunk(batch.num_rows, addresses, layout.row_bytes, values, weights, owner)
    checker.check(chunk, arrays, where.unproven, file)
    for name, weight in layout.weights.items():
        i = layout.schema.columns.index(name)
        weights[i] = checker.weights(batch.column(weight), arrays[i], weight, owner, file)
    return chunk


def _address(array: pa.Array) -> int:
    data = array.buffers()[1]
    return 0 if data is None else data.address + array.offset * array.type.bit_width // 8


class RowReader:
    """Hands out consecutive rows of a sequence of pieces; decodes about ``rows`` at a time.

    :meth:`decode_ahead` lets a pool's threads decode the next of it while what is there is used.
    Who takes what they have not begun with decodes it: so taking may be a task of the same pool.
    """

    def __init__(self, decoder: Decoder, pieces: Iterable[Piece], first: int, rows: int) -> None:
        """``first``: rows decoded at a time in the first piece, so that it comes sooner."""
        sizes = iter([first])
        self._chunks = (chunk for piece in pieces for chunk in decoder(piece, next(sizes, rows)))
        self._rest: Rows | None = None
        self._ahead: concurrent.futures.Future[Rows | None] | None = None

    def take(self, rows: int) -> list[Rows]:
        """The next ``rows`` rows, as chunks that follow one another."""
        parts = []
        while rows:
            chunk = self._rest if self._rest is not None else self._next()
            taken = min(rows, chunk.rows)
            whole = taken == chunk.rows
            parts.append(chunk if whole else chunk.slice(0, taken))
            self._rest = None if whole else chunk.slice(taken, chunk.rows)
            rows -= taken
        return parts

    @property
    def is_ahead(self) -> bool:
        """Whether decoding has begun of what is wanted after what is there."""
        return self._ahead is not None

    def decode_ahead(self, pool: concurrent.futures.Executor) -> None:
        """Begin with what is wanted after what is there, unless that is done already."""
        if self._ahead is None:
            self._ahead = pool.submit(next, self._chunks, None)

    def _next(self) -> Rows:
        if self._ahead is None:
            return next(self._chunks)
        ahead, self._ahead = self._ahead, None
        return next(self._chunks) if ahead.cancel() else ahead.result()  # not begun: do it here
