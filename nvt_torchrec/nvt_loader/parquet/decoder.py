"""Decode slices of row groups on the CPU: from the pages where possible, else by Arrow.

Files are read, not mapped: if a mapped file is cut short or a network file system fails, the
process ends without a message (SIGBUS). :mod:`nvt_loader.cuda.cudf_reader` is the decoder for GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.nvt_loader.parquet.checks import Checker
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset, error_context
from nvt_torchrec.nvt_loader.parquet.files import REWRITE, check_columns
from nvt_torchrec.nvt_loader.parquet.page_reader import OpenRowGroup, PageReader
from nvt_torchrec.nvt_loader.parquet.parquet_kernels import random_words
from nvt_torchrec.nvt_loader.parquet.row_chunks import Decoder, RowChunk, RowGroupSlice, Target

#: Makes the random words of undersampling independent of those of an epoch's order.
_KEEP = 2**32


def cpu_decoder(dataset: Dataset) -> Decoder:
    """Return a decoder of a split's row groups that verifies the page checksums that there are.

    Columns of other numeric types than the loader's are converted. The decoder raises
    :class:`BadInputError` for a file that cannot be read or has changed since planning, and
    :class:`SchemaError` for a null, for infinity or NaN, and for an id outside its table. Several
    threads may call it at the same time.
    """
    checker = Checker(dataset)
    by_arrow, columns = ArrowReader(dataset, checker), np.arange(len(dataset.schema.columns))
    by_pages = None
    if dataset.files is not None and dataset.undersampling is None:
        by_pages = PageReader(dataset.files, checker)

    def decode(part: RowGroupSlice, rows: int) -> Iterator[RowChunk | LazyRows]:
        with error_context(dataset, part.row_group):
            opened = None
            if by_pages is not None:
                opened = by_pages.open(part.row_group)
            arrow = by_arrow.chunks
            if opened is None or not opened.skip(part.begin):
                yield from arrow(part, rows, numbers=columns)
            elif opened.complete:
                arrow = functools.partial(arrow, numbers=columns)
                yield LazyRows(dataset, opened, part, rows, arrow)
            else:
                yield from _mixed(opened, arrow, part, rows, columns)

    return decode


def _mixed(
    opened: OpenRowGroup,
    arrow: Callable[..., Iterator[RowChunk]],
    part: RowGroupSlice,
    rows: int,
    columns: np.ndarray,
) -> Iterator[RowChunk]:
    """Decode a slice of which some columns are read from the pages, the others by Arrow."""
    done = part.begin
    for chunk in arrow(part, rows, numbers=np.setdiff1d(columns, opened.numbers)):
        paged = opened.read(chunk.rows)
        if paged is None:
            yield from arrow(dataclasses.replace(part, begin=done), rows, numbers=columns)
            return
        chunk.addresses[opened.numbers] = paged.addresses[opened.numbers]
        chunk.owner.append(paged)
        yield chunk
        done += chunk.rows


@dataclasses.dataclass(frozen=True)
class LazyRows:
    """Rows of an open row group that are decoded when they are used, in their order.

    Attributes:
        dataset, opened: The data and the row group.
        part: Which rows of the row group.
        maximum: The most rows that are decoded at a time.
        arrow: Decodes a slice, so many rows at a time, where ``opened`` cannot.
    """

    dataset: Dataset
    opened: OpenRowGroup
    part: RowGroupSlice
    maximum: int
    arrow: Callable[[RowGroupSlice, int], Iterator[RowChunk]]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.part.end - self.part.begin

    def slice(self, begin: int, end: int) -> LazyRows:
        """Return rows [begin, end); no row may be left out between two slices."""
        first = self.part.begin
        part = dataclasses.replace(self.part, begin=first + begin, end=first + end)
        return dataclasses.replace(self, part=part)

    def chunks(self) -> Iterator[RowChunk]:
        """Decode the rows."""
        rest = self.part
        with error_context(self.dataset, rest.row_group):
            while rest.begin < rest.end:
                chunk = self.opened.read(min(self.maximum, rest.end - rest.begin))
                if chunk is None:
                    yield from self.arrow(rest, self.maximum)
                    return
                yield chunk
                rest = dataclasses.replace(rest, begin=rest.begin + chunk.rows)

    def copy_to(self, target: Target, first: int) -> None:
        """Copy the rows to a block; ``first`` is the number of the first one in its source."""
        if self.opened.read_into(target, first, self.rows):
            return
        for chunk in self.chunks():
            chunk.copy_to(target, first)
            first += chunk.rows


class ArrowReader:
    """Reads any source by record batches: lists, other types, undersampling, any kind of page.

    It verifies the page checksums that there are. What the page reader refuses comes here, so the
    errors of broken files are Arrow's.
    """

    def __init__(self, dataset: Dataset, checker: Checker) -> None:
        self._dataset, self._checker = dataset, checker

    def read(self, row_group: int, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a row group."""
        source = self._dataset.source
        for batch in source.read(row_group, columns, rows):
            if self._dataset.files is None:
                check_columns(batch.schema, self._dataset.schema, source.name, columns)
            yield batch

    def chunks(self, part: RowGroupSlice, rows: int, numbers: np.ndarray) -> Iterator[RowChunk]:
        """Yield a slice of a row group in chunks of at most ``rows`` rows.

        Only the schema's columns ``numbers`` are read; the others have no address.

        Raises:
            SchemaError: A null, infinity or NaN, or an id outside its table.
            pa.ArrowException, OSError: The file cannot be read.
        """
        names = [self._dataset.schema.columns[i] for i in numbers.tolist()]
        batches = self.read(part.row_group, names, rows)
        name, index = self._dataset.place(part.row_group)
        first = 0  # of the batch, as a row of the row group
        for batch in self._kept(batches, part.row_group):
            begin, end = max(part.begin - first, 0), min(part.end - first, batch.num_rows)
            if begin < end:
                yield self._chunk(batch.slice(begin, end - begin), numbers, name)
            first += batch.num_rows
            if first >= part.end:
                return
        raise BadInputError(
            f"{name}: row group {index} ends after {first} of {part.end} rows", REWRITE
        )

    def _kept(self, batches: Iterator[pa.RecordBatch], row_group: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows that undersampling keeps."""
        if self._dataset.undersampling is None:
            yield from batches
            return
        first, rows = 0, self._dataset.source.row_counts[row_group]
        keep = keep_rows(rows, *self._dataset.undersampling, row_group)
        for batch in batches:
            positive = pc.not_equal(batch.column(self._dataset.schema.label), 0)
            mask = pc.or_(positive, pa.array(keep[first : first + batch.num_rows]))
            first += batch.num_rows
            yield batch.filter(mask)

    def _chunk(self, batch: pa.RecordBatch, numbers: np.ndarray, name: str) -> RowChunk:
        names = self._dataset.schema.columns
        addresses, values = np.zeros((2, len(names)), np.int64)
        owner = []
        for i in numbers.tolist():
            column = self._checker.column(batch.column(names[i]), i, name)
            owner.append(column)
            if pa.types.is_list(column.type):
                addresses[i] = column.buffers()[1].address + 4 * column.offset
                values[i] = to_numpy(column.values).ctypes.data
            else:
                addresses[i] = to_numpy(column).ctypes.data
        return RowChunk(batch.num_rows, addresses, values, owner)


def count_kept(dataset: Dataset, rate: float, seed: int) -> Dataset:
    """Undersample, and count the rows of each row group that are kept, by all labels.

    Raises:
        SettingsError: The rows have several labels, of which one may be 1 and another 0.
    """
    if len(dataset.schema.labels) > 1:
        labels = ", ".join(dataset.schema.labels)
        raise SettingsError(f"undersampling_rate with the labels {labels}", "give one label")
    label, kept = dataset.schema.label, []
    reader = ArrowReader(dataset, Checker(dataset))
    for i, rows in enumerate(dataset.source.row_counts):
        with error_context(dataset, i):
            parts = [np.asarray(batch.column(label)) for batch in reader.read(i, [label], rows)]
        positive = np.concatenate([np.empty(0, bool), *(part != 0 for part in parts)])
        keep = positive | keep_rows(rows, rate, seed, i)
        kept.append(int(np.count_nonzero(keep)))
    return dataclasses.replace(dataset, undersampling=(rate, seed), kept=tuple(kept))


def keep_rows(rows: int, rate: float, seed: int, row_group: int) -> np.ndarray:
    """Return which rows of a row group are in a sample of the share ``rate``: bool [rows].

    It is a function of seed and row group, and so the same in every epoch.
    """
    sequence = np.random.SeedSequence((seed, _KEEP), spawn_key=(row_group,))
    words = np.empty(rows, np.uint64)
    random_words(words, sequence.generate_state(1, np.uint64)[0])
    return words < np.uint64(rate * 2**63) * np.uint64(2) if rate < 1 else np.ones(rows, bool)
