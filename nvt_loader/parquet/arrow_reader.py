"""Read rows with pyarrow: list columns, other types, undersampling, any kind of page.

What the page reader refuses comes here, so the errors of broken files are Arrow's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.nvt_loader.parquet.checks import Checker
from nvt_torchrec.nvt_loader.parquet.dataset import REWRITE, Dataset
from nvt_torchrec.nvt_loader.parquet.kernels import random_words
from nvt_torchrec.nvt_loader.parquet.row_chunks import RowChunk, RowGroupSlice


class ArrowReader:
    """Reads a split's columns with pyarrow; verifies the page checksums that there are."""

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
        first = 0
        keep = _sampled(self._dataset, row_group)
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


def _sampled(dataset: Dataset, row_group: int) -> np.ndarray:
    """Return which rows of a row group undersampling keeps even if negative: bool [rows]."""
    rate, seed = dataset.undersampling
    rows = dataset.row_groups[row_group].rows
    return keep_rows(rows, rate, seed=seed, row_group=row_group)


def count_kept(dataset: Dataset, rate: float, seed: int) -> Dataset:
    """Undersample, and count the rows of each row group that are kept, by all labels."""
    dataset = dataclasses.replace(dataset, undersampling=(rate, seed))
    label = dataset.schema.label
    kept, cuts, number, file = [], {}, -1, None
    for i, group in enumerate(dataset.row_groups):
        path = dataset.path(group.file)
        try:
            if group.file != number:
                number, file = group.file, pq.ParquetFile(path, page_checksum_verification=True)
            labels = file.read_row_group(group.index, [label], use_threads=False).column(0)
        except (pa.ArrowException, OSError) as error:
            raise BadInputError(
                f"{path}: row group {group.index} cannot be decoded: {error}", REWRITE
            ) from error
        keep = (np.asarray(labels) != 0) | _sampled(dataset, i)
        kept.append(int(np.count_nonzero(keep)))
        if i in dataset.cuts:
            begin, end = (int(np.count_nonzero(keep[:row])) for row in dataset.cuts[i])
            cuts[i] = begin, end
    return dataclasses.replace(dataset, kept=tuple(kept), cuts=cuts)


#: Makes the random words of undersampling independent of those of an epoch's order.
_KEEP = 2**32


def keep_rows(rows: int, rate: float, *, seed: int, row_group: int) -> np.ndarray:
    """Return which rows of a row group are in a sample of the share ``rate``: bool [rows].

    It is a function of seed and row group, and so the same in every epoch.
    """
    sequence = np.random.SeedSequence((seed, _KEEP), spawn_key=(row_group,))
    words = np.empty(rows, np.uint64)
    random_words(words, sequence.generate_state(1, np.uint64)[0])
    return words < np.uint64(rate * 2**63) * np.uint64(2) if rate < 1 else np.ones(rows, bool)
