"""Decode slices of row groups on the CPU: straight from the pages if possible, else by Arrow.

Files are read, not mapped: if a mapped file were truncated or its network file system failed, the
process would be killed without a message (SIGBUS). :mod:`nvt_loader.cuda.cudf_reader` decodes on
GPUs.
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
from nvt_torchrec.nvt_loader.parquet.parquet_kernels import fill_random_words
from nvt_torchrec.nvt_loader.parquet.row_chunks import Decoder, RowChunk, RowGroupSlice, Target

#: The second part of the seed of undersampling. It makes the random words independent of those that
#: order an epoch, where the second part is the number of the epoch, which is smaller.
_UNDERSAMPLING_STREAM = 2**32


def make_cpu_decoder(dataset: Dataset) -> Decoder:
    """Make a thread-safe decoder of a split's row groups, which verifies any page checksums.

    The decoder converts columns of other numeric types to the loader's. It raises
    :class:`BadInputError` if a file cannot be read or has changed since planning, and
    :class:`SchemaError` for a null, an infinite or NaN value, or an id outside its table.
    """
    checker = Checker(dataset)
    arrow_reader = ArrowReader(dataset, checker)
    page_reader = None
    # Undersampling filters rows, which only the Arrow reader does.
    if dataset.files is not None and dataset.undersampling is None:
        page_reader = PageReader(dataset.files, checker)
    columns = np.arange(len(dataset.schema.columns))
    read_by_arrow = functools.partial(arrow_reader.read_chunks, numbers=columns)

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
    """Decode a slice: the columns of ``opened`` from their pages, and the others by Arrow."""
    begin = part.begin
    other_columns = np.setdiff1d(columns, opened.numbers)
    for chunk in arrow_reader.read_chunks(part, rows, other_columns):
        paged = opened.read(chunk.rows)
        if paged is None:
            # The pages turned out to be unreadable: Arrow reads all columns of the remaining rows.
            rest = dataclasses.replace(part, begin=begin)
            yield from arrow_reader.read_chunks(rest, rows, columns)
            return
        chunk.addresses[opened.numbers] = paged.addresses[opened.numbers]
        chunk.owner.append(paged)
        yield chunk
        begin += chunk.rows


@dataclasses.dataclass(frozen=True)
class LazyRows:
    """Rows of an open row group that are decoded on use, which must be in order.

    Attributes:
        dataset: The data.
        opened: The row group.
        part: The slice of the row group that these rows are.
        max_rows: The maximum number of rows decoded at a time.
        read_by_arrow: Decodes a slice, at most the given number of rows at a time, if the pages of
            ``opened`` cannot be read.
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

    def decode(self) -> Iterator[RowChunk]:
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
        """Copy the rows to a block; ``first`` is the index of the first row in its source."""
        if self.opened.read_into(target, first, self.rows):
            return
        # `opened` is broken from now on, so Arrow decodes all rows again and reports any error.
        for chunk in self.decode():
            chunk.copy_to(target, first)
            first += chunk.rows


class ArrowReader:
    """Reads any source by record batches: any page, lists, other types, undersampled rows.

    Everything that the page reader refuses is read here, so Arrow reports the errors of damaged
    files. Page checksums are verified if the pages have any.
    """

    def __init__(self, dataset: Dataset, checker: Checker) -> None:
        self._dataset = dataset
        self._checker = checker

    def read(self, row_group: int, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a row group in batches of about ``rows`` rows."""
        source = self._dataset.source
        for batch in source.read(row_group, columns, rows):
            if self._dataset.files is None:
                check_columns(batch.schema, self._dataset.schema, source.name, columns)
            yield batch

    def read_chunks(
        self, part: RowGroupSlice, rows: int, numbers: np.ndarray
    ) -> Iterator[RowChunk]:
        """Yield a slice of a row group in chunks of at most ``rows`` rows.

        Args:
            part: The slice.
            rows: The maximum number of rows per chunk.
            numbers: int64 [read columns], the indices in the schema of the columns to read; the
                addresses of all other columns are 0.

        Raises:
            SchemaError: A value is null, infinite or NaN, or an id is outside its table.
            BadInputError: The row group has fewer rows than planned.
            pa.ArrowException, OSError: The file cannot be read.
        """
        names = [self._dataset.schema.columns[i] for i in numbers.tolist()]
        batches = self.read(part.row_group, names, rows)
        if self._dataset.undersampling is not None:
            batches = self._undersample(batches, part.row_group)
        name, index = self._dataset.locate(part.row_group)
        first = 0  # the index of the batch's first row in the row group
        for batch in batches:
            begin = max(part.begin - first, 0)
            end = min(part.end - first, batch.num_rows)
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
        """Yield the rows of each batch of a row group that undersampling keeps."""
        assert self._dataset.undersampling is not None
        rate, seed = self._dataset.undersampling
        keep = choose_rows(self._dataset.source.row_counts[row_group], rate, seed, row_group)
        first = 0
        for batch in batches:
            positive = pc.not_equal(batch.column(self._dataset.schema.label), 0)
            mask = pc.or_(positive, pa.array(keep[first : first + batch.num_rows]))
            first += batch.num_rows
            yield batch.filter(mask)

    def _convert(self, batch: pa.RecordBatch, numbers: np.ndarray, where: str) -> RowChunk:
        """Convert a batch to a chunk and check its values; ``where`` is its file, for errors."""
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


def undersample_dataset(dataset: Dataset, rate: float, seed: int) -> Dataset:
    """Return the dataset with undersampling, for which the label of every row is read.

    Args:
        dataset: The data.
        rate: The share of negative rows to keep.
        seed: The seed that chooses the rows.

    Raises:
        SettingsError: Several labels are read. A row may be positive by one and negative by
            another.
    """
    if len(dataset.schema.labels) > 1:
        labels = ", ".join(dataset.schema.labels)
        raise SettingsError(f"undersampling_rate with the labels {labels}", "give one label")
    label = dataset.schema.label
    reader = ArrowReader(dataset, Checker(dataset))
    kept = []
    for row_group, rows in enumerate(dataset.source.row_counts):
        positives = [np.empty(0, bool)]
        with error_context(dataset, row_group):
            for batch in reader.read(row_group, [label], rows):
                positives.append(np.asarray(batch.column(label)) != 0)
        mask = np.concatenate(positives) | choose_rows(rows, rate, seed, row_group)
        kept.append(int(np.count_nonzero(mask)))
    return dataclasses.replace(dataset, undersampling=(rate, seed), kept=tuple(kept))


def choose_rows(rows: int, rate: float, seed: int, row_group: int) -> np.ndarray:
    """Return the mask of a random sample of a row group's rows: bool [rows].

    The sample contains a share ``rate`` of the rows. It depends only on the seed and the row group,
    so it is the same in every epoch.
    """
    if rate >= 1:
        return np.ones(rows, bool)
    sequence = np.random.SeedSequence((seed, _UNDERSAMPLING_STREAM), spawn_key=(row_group,))
    words = np.empty(rows, np.uint64)
    fill_random_words(words, sequence.generate_state(1, np.uint64)[0])
    return words < np.uint64(rate * 2**64)
