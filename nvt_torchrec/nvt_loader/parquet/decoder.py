"""Decode slices of row groups on the CPU: from the pages where possible, else by Arrow.

Files are read, not mapped: where a mapped file is truncated or a network file system fails, the
process would end without a message (SIGBUS). :mod:`nvt_loader.cuda.cudf_reader` decodes on GPUs.
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

#: Seeds undersampling together with the user's seed, so that its random words are independent of
#: those that order an epoch (epochs, the second seed there, are smaller).
_UNDERSAMPLING_STREAM = 2**32


def cpu_decoder(dataset: Dataset) -> Decoder:
    """Return a decoder of a split's row groups that verifies page checksums where there are any.

    Columns of other numeric types than the loader's are converted. The decoder raises
    :class:`BadInputError` for a file that cannot be read or has changed since planning, and
    :class:`SchemaError` for a null, for infinity or NaN, and for an id outside its table. Several
    threads may call it at the same time.
    """
    checker = Checker(dataset)
    arrow_reader = ArrowReader(dataset, checker)
    page_reader = None
    # Undersampling filters rows, which only the Arrow reader does.
    if dataset.files is not None and dataset.undersampling is None:
        page_reader = PageReader(dataset.files, checker)
    columns = np.arange(len(dataset.schema.columns))
    read_by_arrow = functools.partial(arrow_reader.chunks, numbers=columns)

    def decode(part: RowGroupSlice, rows: int) -> Iterator[RowChunk | LazyRows]:
        with error_context(dataset, part.row_group):
            opened = None
            if page_reader is not None:
                opened = page_reader.open(part.row_group)
            if opened is None or not opened.skip(part.begin):
                yield from read_by_arrow(part, rows)
            elif opened.complete:
                yield LazyRows(dataset, opened, part, rows, read_by_arrow)
            else:
                yield from _decode_mixed(opened, arrow_reader, part, rows, columns)

    return decode


def _decode_mixed(
    opened: OpenRowGroup,
    arrow_reader: ArrowReader,
    part: RowGroupSlice,
    rows: int,
    columns: np.ndarray,
) -> Iterator[RowChunk]:
    """Decode a slice of which some columns are read from the pages, the others by Arrow."""
    done = part.begin
    other_columns = np.setdiff1d(columns, opened.numbers)
    for chunk in arrow_reader.chunks(part, rows, other_columns):
        paged = opened.read(chunk.rows)
        if paged is None:
            # The pages turned out to be unreadable: Arrow reads all columns of the rest.
            rest = dataclasses.replace(part, begin=done)
            yield from arrow_reader.chunks(rest, rows, columns)
            return
        chunk.addresses[opened.numbers] = paged.addresses[opened.numbers]
        chunk.owner.append(paged)
        yield chunk
        done += chunk.rows


@dataclasses.dataclass(frozen=True)
class LazyRows:
    """Rows of an open row group that are decoded when they are used, in their order.

    Attributes:
        dataset: The data.
        opened: The row group.
        part: The rows of the row group.
        max_rows: The largest number of rows that are decoded at a time.
        read_by_arrow: Decodes a slice, at most so many rows at a time, if ``opened`` cannot.
    """

    dataset: Dataset
    opened: OpenRowGroup
    part: RowGroupSlice
    max_rows: int
    read_by_arrow: Callable[[RowGroupSlice, int], Iterator[RowChunk]]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.part.end - self.part.begin

    def slice(self, begin: int, end: int) -> LazyRows:
        """Return rows [begin, end). Slices must be used in order, without a gap between them."""
        first = self.part.begin
        part = dataclasses.replace(self.part, begin=first + begin, end=first + end)
        return dataclasses.replace(self, part=part)

    def chunks(self) -> Iterator[RowChunk]:
        """Decode the rows."""
        rest = self.part
        with error_context(self.dataset, rest.row_group):
            while rest.begin < rest.end:
                chunk = self.opened.read(min(self.max_rows, rest.end - rest.begin))
                if chunk is None:
                    yield from self.read_by_arrow(rest, self.max_rows)
                    return
                yield chunk
                rest = dataclasses.replace(rest, begin=rest.begin + chunk.rows)

    def copy_to(self, target: Target, first: int) -> None:
        """Copy the rows to a block; ``first`` is the number of the first one in its source."""
        if self.opened.read_into(target, first, self.rows):
            return
        # `opened` is broken from now on, so all chunks come from Arrow, which reports the error.
        for chunk in self.chunks():
            chunk.copy_to(target, first)
            first += chunk.rows


class ArrowReader:
    """Reads any source by record batches: lists, other types, undersampling, any kind of page.

    It verifies page checksums where there are any. Whatever the page reader refuses is read here,
    so errors of broken files are Arrow's.
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

        Args:
            part: The slice.
            rows: The largest number of rows of a chunk.
            numbers: int [read columns], the schema's columns that are read; the others have no
                address.

        Raises:
            SchemaError: A null, infinity or NaN, or an id outside its table.
            pa.ArrowException, OSError: The file cannot be read.
        """
        names = [self._dataset.schema.columns[i] for i in numbers.tolist()]
        batches = self.read(part.row_group, names, rows)
        if self._dataset.undersampling is not None:
            batches = self._undersample(batches, part.row_group)
        name, index = self._dataset.locate(part.row_group)
        first = 0  # the batch's first row, counted from the begin of the row group
        for batch in batches:
            begin, end = max(part.begin - first, 0), min(part.end - first, batch.num_rows)
            if begin < end:
                yield self._convert(batch.slice(begin, end - begin), numbers, name)
            first += batch.num_rows
            if first >= part.end:
                return
        raise BadInputError(
            f"{name}: row group {index} ends after {first} of {part.end} rows", REWRITE
        )

    def _undersample(
        self, batches: Iterator[pa.RecordBatch], row_group: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield of each batch of a row group the rows that undersampling keeps."""
        assert self._dataset.undersampling is not None
        rate, seed = self._dataset.undersampling
        keep = keep_rows(self._dataset.source.row_counts[row_group], rate, seed, row_group)
        first = 0
        for batch in batches:
            positive = pc.not_equal(batch.column(self._dataset.schema.label), 0)
            mask = pc.or_(positive, pa.array(keep[first : first + batch.num_rows]))
            first += batch.num_rows
            yield batch.filter(mask)

    def _convert(self, batch: pa.RecordBatch, numbers: np.ndarray, where: str) -> RowChunk:
        """Convert and check a batch; ``where`` is its file, for errors."""
        names = self._dataset.schema.columns
        addresses, values = np.zeros((2, len(names)), np.int64)
        owner = []
        for i in numbers.tolist():
            column = self._checker.convert(batch.column(names[i]), i, where)
            owner.append(column)
            if pa.types.is_list(column.type):
                addresses[i] = column.buffers()[1].address + 4 * column.offset
                values[i] = to_numpy(column.values).ctypes.data
            else:
                addresses[i] = to_numpy(column).ctypes.data
        return RowChunk(batch.num_rows, addresses, values, owner)


def count_kept(dataset: Dataset, rate: float, seed: int) -> Dataset:
    """Return the dataset undersampled, with the number of rows of each row group that are kept.

    It reads the label of all rows.

    Args:
        dataset: The data.
        rate: The share of the negative rows that is kept.
        seed: Chooses the rows.

    Raises:
        SettingsError: Several labels are read: a row may be positive by one, negative by another.
    """
    if len(dataset.schema.labels) > 1:
        labels = ", ".join(dataset.schema.labels)
        raise SettingsError(f"undersampling_rate with the labels {labels}", "give one label")
    label = dataset.schema.label
    reader = ArrowReader(dataset, Checker(dataset))
    kept = []
    for row_group, rows in enumerate(dataset.source.row_counts):
        positive = [np.empty(0, bool)]
        with error_context(dataset, row_group):
            for batch in reader.read(row_group, [label], rows):
                positive.append(np.asarray(batch.column(label)) != 0)
        keep = np.concatenate(positive) | keep_rows(rows, rate, seed, row_group)
        kept.append(int(np.count_nonzero(keep)))
    return dataclasses.replace(dataset, undersampling=(rate, seed), kept=tuple(kept))


def keep_rows(rows: int, rate: float, seed: int, row_group: int) -> np.ndarray:
    """Return which rows of a row group are in a sample of the share ``rate``: bool [rows].

    The sample depends on seed and row group only, so it is the same in every epoch.
    """
    if rate >= 1:
        return np.ones(rows, bool)
    sequence = np.random.SeedSequence((seed, _UNDERSAMPLING_STREAM), spawn_key=(row_group,))
    words = np.empty(rows, np.uint64)
    random_words(words, sequence.generate_state(1, np.uint64)[0])
    return words < np.uint64(rate * 2**64)
