"""Decode slices of row groups on the CPU: from the pages where possible, else by Arrow.

Files are read, not mapped: if a mapped file is cut short or a network file system fails, the
process ends without a message (SIGBUS). :mod:`nvt_loader.cuda.cudf_reader` is the decoder for GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.nvt_loader.parquet.checks import Checker
from nvt_torchrec.nvt_loader.parquet.dataset import REWRITE, Dataset, check_file, check_unchanged
from nvt_torchrec.nvt_loader.parquet.kernels import random_words
from nvt_torchrec.nvt_loader.parquet.page_reader import OpenRowGroup, PageReader
from nvt_torchrec.nvt_loader.parquet.row_chunks import Decoder, RowChunk, RowGroupSlice, Target

#: Footers kept, so that a shuffled epoch does not parse one for each row group.
FOOTERS = 64


def cpu_decoder(dataset: Dataset) -> Decoder:
    """Return a decoder of a split's row groups that verifies the page checksums that there are.

    Columns of other numeric types than the loader's are converted. The decoder raises
    :class:`BadInputError` for a file that cannot be read or has changed since planning, and
    :class:`SchemaError` for a null, for infinity or NaN, and for an id outside its table. Several
    threads may call it at the same time.
    """
    checker = Checker(dataset)
    by_pages, by_arrow = PageReader(dataset, checker), ArrowReader(dataset, checker)
    read_footer = functools.lru_cache(FOOTERS)(functools.partial(check_file, dataset))
    columns = np.arange(len(dataset.schema.columns))

    def decode(part: RowGroupSlice, rows: int) -> Iterator[RowChunk | LazyRows]:
        with error_context(dataset, part.row_group):
            footer = read_footer(dataset.row_groups[part.row_group].file)
            check_unchanged(dataset, part.row_group, footer)
            opened = None
            if dataset.undersampling is None:
                opened = by_pages.open(part.row_group, footer)
            arrow = functools.partial(by_arrow.chunks, footer=footer.metadata)
            if opened is None or not opened.skip(part.begin):
                yield from arrow(part, rows, numbers=columns)
            elif opened.complete:
                arrow = functools.partial(arrow, numbers=columns)
                yield LazyRows(dataset, opened, part, rows, arrow)
            else:
                yield from _mixed(opened, arrow, part, rows, columns)

    return decode


@contextlib.contextmanager
def error_context(dataset: Dataset, row_group: int) -> Iterator[None]:
    """Add the file and row group to errors."""
    group = dataset.row_groups[row_group]
    try:
        yield
    except SchemaError as error:
        what = f"{error.what}, in row group {group.index}"
        raise SchemaError(what, error.remedy) from error
    except (pa.ArrowException, OSError) as error:
        raise BadInputError(
            f"{dataset.files[group.file]}: row group {group.index} cannot be decoded: {error}",
            REWRITE,
        ) from error


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
        most: The most rows that are decoded at a time.
        arrow: Decodes a slice, so many rows at a time, where ``opened`` cannot.
    """

    dataset: Dataset
    opened: OpenRowGroup
    part: RowGroupSlice
    most: int
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
                chunk = self.opened.read(min(self.most, rest.end - rest.begin))
                if chunk is None:
                    yield from self.arrow(rest, self.most)
                    return
                yield chunk
                rest = dataclasses.replace(rest, begin=rest.begin + chunk.rows)

    def copy_to(self, target: Target, first: int) -> None:
        """Copy the rows to a block; ``first`` is the number of the first one in its source."""
        if not self.dataset.hash_indices and self.opened.read_into(target, first, self.rows):
            return
        for chunk in self.chunks():
            chunk.copy_to(target, first)
            first += chunk.rows


class ArrowReader:
    """Reads a split's columns with pyarrow: lists, other types, undersampling, any kind of page.

    It verifies the page checksums that there are. What the page reader refuses comes here, so the
    errors of broken files are Arrow's.
    """

    def __init__(self, dataset: Dataset, checker: Checker) -> None:
        self._dataset, self._checker = dataset, checker

    def chunks(
        self, part: RowGroupSlice, rows: int, footer: pq.FileMetaData, numbers: np.ndarray
    ) -> Iterator[RowChunk]:
        """Yield a slice of a row group in chunks of at most ``rows`` rows.

        Only the schema's columns ``numbers`` are read; the others have no address.

        Raises:
            SchemaError: A null, infinity or NaN, or an id outside its table.
            pa.ArrowException, OSError: The file cannot be read.
        """
        dataset = self._dataset
        group = dataset.row_groups[part.row_group]
        # pyarrow takes a millisecond to open a path; a ParquetFile keeps the last call's settings
        source = pa.OSFile(str(dataset.path(group.file)))
        file = pq.ParquetFile(
            source, metadata=footer, pre_buffer=False, page_checksum_verification=True
        )
        batches = file.iter_batches(
            min(rows, group.rows),
            row_groups=[group.index],
            columns=[dataset.schema.columns[i] for i in numbers.tolist()],
            use_threads=False,
        )
        first = 0  # of the batch, as a row of the row group
        for batch in self._kept(batches, part.row_group):
            begin, end = max(part.begin - first, 0), min(part.end - first, batch.num_rows)
            if begin < end:
                yield self._chunk(batch.slice(begin, end - begin), numbers, group.file)
            first += batch.num_rows
            if first >= part.end:
                return
        raise BadInputError(
            f"{dataset.files[group.file]}: row group {group.index} ends after {first} of "
            f"{part.end} rows",
            REWRITE,
        )

    def _kept(self, batches: Iterator[pa.RecordBatch], row_group: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows that undersampling keeps."""
        if self._dataset.undersampling is None:
            yield from batches
            return
        first, rows = 0, self._dataset.row_groups[row_group].rows
        keep = keep_rows(rows, *self._dataset.undersampling, row_group)
        for batch in batches:
            positive = pc.not_equal(batch.column(self._dataset.schema.label), 0)
            mask = pc.or_(positive, pa.array(keep[first : first + batch.num_rows]))
            first += batch.num_rows
            yield batch.filter(mask)

    def _chunk(self, batch: pa.RecordBatch, numbers: np.ndarray, file: int) -> RowChunk:
        names = self._dataset.schema.columns
        addresses, values = np.zeros((2, len(names)), np.int64)
        owner = []
        for i in numbers.tolist():
            column = self._checker.column(batch.column(names[i]), i, file)
            owner.append(column)
            if pa.types.is_list(column.type):
                addresses[i] = column.buffers()[1].address + 4 * column.offset
                values[i] = to_numpy(column.values).ctypes.data
            else:
                addresses[i] = to_numpy(column).ctypes.data
        return RowChunk(batch.num_rows, addresses, values, owner)


def count_kept(dataset: Dataset, rate: float, seed: int) -> Dataset:
    """Undersample, and count the rows of each row group that are kept, by all labels."""
    label = dataset.schema.label
    kept, cuts, number, file = [], {}, -1, None
    for i, group in enumerate(dataset.row_groups):
        with error_context(dataset, i):
            if group.file != number:
                path, number = dataset.path(group.file), group.file
                file = pq.ParquetFile(path, page_checksum_verification=True)
            labels = file.read_row_group(group.index, [label], use_threads=False).column(0)
        keep = (np.asarray(labels) != 0) | keep_rows(group.rows, rate, seed, i)
        kept.append(int(np.count_nonzero(keep)))
        if i in dataset.cuts:
            begin, end = (int(np.count_nonzero(keep[:row])) for row in dataset.cuts[i])
            cuts[i] = begin, end
    return dataclasses.replace(dataset, undersampling=(rate, seed), kept=tuple(kept), cuts=cuts)


#: Makes the random words of undersampling independent of those of an epoch's order.
_KEEP = 2**32


def keep_rows(rows: int, rate: float, seed: int, row_group: int) -> np.ndarray:
    """Return which rows of a row group are in a sample of the share ``rate``: bool [rows].

    It is a function of seed and row group, and so the same in every epoch.
    """
    sequence = np.random.SeedSequence((seed, _KEEP), spawn_key=(row_group,))
    words = np.empty(rows, np.uint64)
    random_words(words, sequence.generate_state(1, np.uint64)[0])
    return words < np.uint64(rate * 2**63) * np.uint64(2) if rate < 1 else np.ones(rows, bool)
