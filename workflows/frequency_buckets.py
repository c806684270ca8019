"""Buckets of a vocabulary by the frequency that its values had when they were counted.

Drift of a categorical column is measured over a few buckets instead of millions of values. The
most frequent values are put into :data:`BUCKETS` buckets of about equal share, from the most
frequent on. Another bucket, the rest, holds what is rare or out of vocabulary. Rare values stay out
of the others because their counts are no estimate of their shares: a value is in the vocabulary
*because* it occurred, so on another day the rare values of a vocabulary occur less often and unseen
ones more often, without any shift (Good, The population frequencies of species, Biometrika 40,
1953: of values that occurred r times, (r + 1) · N(r + 1) / N(r) occurrences are expected instead of
r). Their sum with the unseen values is hardly biased.

Ids of a vocabulary that was extended are not in the order of their counts, so the buckets are kept
as runs of ids, found by binary search. Imports neither NVTabular nor Dask nor pandas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clicklog.arrays import to_numpy
from clicklog.errors import BadInputError
from clicklog.spec.feature_spec import FIRST_OOV_ID, CategoricalColumn
from workflows.description import WorkflowDescription

#: Buckets of frequent values. Ten is customary for the population stability index.
BUCKETS = 10
#: The bucket of rare values and those out of vocabulary; that of padding and null, never compared.
REST, ABSENT = BUCKETS, BUCKETS + 1
#: Occurrences from which on a value is frequent: by Good's formula the counts of rarer values in a
#: heavy-tailed column are too high by more than a twentieth.
LEAST_COUNT = 20
_AGAIN = "copy the whole workflow directory again, or fit it again"
#: Values of a vocabulary that are read at once.
_BATCH = 1 << 18
#: The most values in the buckets of frequent values, which bounds the runs.
MOST_VALUES = 1 << 16


@dataclasses.dataclass(frozen=True)
class FrequencyBuckets:
    """The buckets of one vocabulary.

    Attributes:
        begins: int32 [runs], the first id of each run of ids that are in the same bucket;
            ascending, the first is 0.
        buckets: uint8 [runs], their buckets.
        counts: int64 [BUCKETS + 1], how often the values of each bucket, and those of the rest,
            occurred.
    """

    begins: np.ndarray
    buckets: np.ndarray
    counts: np.ndarray

    @classmethod
    def make(cls, ids: np.ndarray, counts: np.ndarray, total: int) -> FrequencyBuckets:
        """Make the buckets of counted ids.

        Args:
            ids: int64 [n], ascending: at least the :data:`MOST_VALUES` most frequent ones.
            counts: int64 [n], how often each occurred.
            total: How often all values occurred, those without an id of their own included.
        """
        head = _most_frequent(counts)
        of_head = counts[head]
        before = np.cumsum(of_head) - of_head
        buckets = (before * BUCKETS // max(1, total)).astype(np.uint8)
        sums = np.zeros(BUCKETS + 1, np.int64)
        np.add.at(sums, buckets, of_head)
        sums[REST] = total - int(of_head.sum())
        return cls(*_runs(ids[head], buckets), sums)

    def sum(self, counts: np.ndarray) -> np.ndarray:
        """Add up counts of all ids from 0 on, int [table size], by bucket: int64 [BUCKETS + 1]."""
        begins = self.begins[self.begins < len(counts)]
        of_runs = np.add.reduceat(counts, begins, dtype=np.int64)
        sums = np.zeros(BUCKETS + 2, np.int64)
        np.add.at(sums, self.buckets[: len(begins)], of_runs)
        return sums[: BUCKETS + 1]


def _most_frequent(counts: np.ndarray) -> np.ndarray:
    """Return the indices of the frequent values by falling count, int64; ties by index."""
    least = LEAST_COUNT
    if len(counts) > MOST_VALUES:
        least = max(least, int(np.partition(counts, -MOST_VALUES)[-MOST_VALUES]))
    frequent = np.flatnonzero(counts >= least)
    return frequent[np.argsort(-counts[frequent], kind="stable")][:MOST_VALUES]


def _runs(ids: np.ndarray, buckets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return begins and buckets of the runs: all ids that are not named are in the rest."""
    order = np.argsort(ids)
    ids, buckets = ids[order], buckets[order]
    begins = np.unique(np.concatenate([[0, FIRST_OOV_ID], ids, ids + 1]))
    of_runs = np.full(len(begins), REST, np.uint8)
    of_runs[np.searchsorted(begins, ids)] = buckets
    of_runs[0] = ABSENT
    keep = np.concatenate([[True], of_runs[1:] != of_runs[:-1]])
    return begins[keep].astype(np.int32), of_runs[keep]


def read_counts(
    path: Path, description: WorkflowDescription, column: str
) -> Iterator[tuple[int, np.ndarray]]:
    """Read how often the values of a column's vocabulary occurred, in batches.

    Args:
        path: The directory of the saved workflow.
        description: Its description.
        column: The name of a categorical column that is not hashed.

    Yields:
        The row of the first value of a batch, and the counts, int64 [batch].

    Raises:
        BadInputError: The vocabulary is damaged.
    """
    vocabulary = description.vocabularies[column]
    file, first = path / vocabulary.file, 0
    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(_BATCH, columns=[f"{vocabulary.name}_size"]):
                if not batch.num_columns or batch.column(0).type != pa.int64():
                    raise BadInputError(f"{file}: no counts of the values", _AGAIN)
                counts = to_numpy(batch.column(0))
                yield first, counts
                first += len(counts)
    except (OSError, pa.ArrowException) as error:
        raise BadInputError(f"{file}: cannot be read: {error}", _AGAIN) from error
    if first != vocabulary.values:
        raise BadInputError(
            f"{file}: {first} counts of the {vocabulary.values} values of column {column}", _AGAIN
        )


def read_buckets(path: Path, description: WorkflowDescription) -> dict[str, FrequencyBuckets]:
    """Read the buckets of all vocabularies of a saved workflow, in bounded memory.

    Hashed columns have no counts, so they are left out.

    Raises:
        BadInputError: A vocabulary is damaged.
    """
    return {
        name: _read_one(path, description, columns[0])
        for name, columns in description.spec.vocabularies.items()
        if not columns[0].hash_buckets
    }


def _read_one(
    path: Path, description: WorkflowDescription, column: CategoricalColumn
) -> FrequencyBuckets:
    ids, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    total = description.vocabularies[column.name].observed["oov"]
    for first, batch in read_counts(path, description, column.name):
        total += int(batch.sum())
        frequent = np.flatnonzero(batch >= LEAST_COUNT)
        ids = np.concatenate([ids, frequent + first + column.reserved_ids])
        counts = np.concatenate([counts, batch[frequent]])
        if len(ids) > MOST_VALUES:
            keep = np.sort(_most_frequent(counts))
            ids, counts = ids[keep], counts[keep]
    return FrequencyBuckets.make(ids, counts, total)
