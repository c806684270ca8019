"""Buckets of a vocabulary by the frequency that its values had when they were counted.

Drift of a categorical column is measured over a few buckets instead of millions of values: the most
frequent values in :data:`BUCKETS` buckets of about equal share, from the most frequent on, and the
rest, which holds what is rare or out of vocabulary.

Values that are chosen for their high counts have high counts by chance, too: on another day their
share is lower without any shift (regression to the mean; for values seen once see Good, The
population frequencies of species, Biometrika 40, 1953). So the counts are split: each occurrence is
put into one of two halves at random. One half decides which values are in which bucket, the other
one, which is independent of it, how large the share of each bucket is (data thinning: Neufeld et
al., Journal of Machine Learning Research 25, 2024). The shares are then unbiased, even that of the
rest, whose values another day may have seen for the first time.

Ids of a vocabulary that was extended are not in the order of their counts, so the buckets are kept
as runs of ids, found by binary search. Imports neither NVTabular nor Dask nor pandas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.formats.spec.feature_spec import FIRST_OOV_ID, CategoricalColumn
from nvt_torchrec.formats.workflow_description import WorkflowDescription

#: Buckets of frequent values. Ten is customary for the population stability index.
BUCKETS = 10
#: The bucket of rare values and those out of vocabulary; that of padding and null, never compared.
REST, ABSENT = BUCKETS, BUCKETS + 1
#: Occurrences, in the half that decides, from which on a value is frequent. The order of rarer
#: values is mostly chance, and they would only make more runs.
LEAST_COUNT = 10
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
            occurred in the half of the rows that decides on the shares.
    """

    begins: np.ndarray
    buckets: np.ndarray
    counts: np.ndarray

    @classmethod
    def make(cls, ids: np.ndarray, counts: np.ndarray, unseen: int) -> FrequencyBuckets:
        """Make the buckets of counted ids.

        Args:
            ids: int64 [n], ascending.
            counts: int64 [n], how often each occurred.
            unseen: How often values without an id of their own occurred.
        """
        return _make([(ids, counts)], unseen)

    def sum(self, counts: np.ndarray) -> np.ndarray:
        """Add up counts of all ids from 0 on, int [table size], by bucket: int64 [BUCKETS + 1]."""
        begins = self.begins[self.begins < len(counts)]
        of_runs = np.add.reduceat(counts, begins, dtype=np.int64)
        sums = np.zeros(BUCKETS + 2, np.int64)
        np.add.at(sums, self.buckets[: len(begins)], of_runs)
        return sums[: BUCKETS + 1]


def _make(batches: Iterable[tuple[np.ndarray, np.ndarray]], unseen: int) -> FrequencyBuckets:
    """Make the buckets of batches of ids and counts; few values are in memory at once."""
    rng = np.random.default_rng(0)  # the same split every time
    head = _Head.none()
    rare = unseen
    for ids, counts in batches:
        frequent = np.flatnonzero(counts >= LEAST_COUNT)  # others cannot be in the head
        rare += int(counts.sum()) - int(counts[frequent].sum())
        deciding = rng.binomial(counts[frequent], 0.5)
        head = head.with_more(ids[frequent], deciding, counts[frequent] - deciding)
    rest = head.rest + int(rng.binomial(rare, 0.5))
    total = int(head.deciding.sum()) + head.rest + rare // 2  # only buckets of equal share need it
    order = np.argsort(-head.deciding, kind="stable")
    before = np.cumsum(head.deciding[order]) - head.deciding[order]
    buckets = np.minimum(before * BUCKETS // max(1, total), BUCKETS - 1).astype(np.uint8)
    sums = np.zeros(BUCKETS + 1, np.int64)
    np.add.at(sums, buckets, head.shares[order])
    sums[REST] = rest
    return FrequencyBuckets(*_runs(head.ids[order], buckets), sums)


@dataclasses.dataclass(frozen=True)
class _Head:
    """The most frequent values so far by ascending id, with the counts of both halves.

    ``rest`` is the count, in the half that decides on the shares, of the values left out.
    """

    ids: np.ndarray
    deciding: np.ndarray
    shares: np.ndarray
    rest: int

    @classmethod
    def none(cls) -> _Head:
        none = np.empty(0, np.int64)
        return cls(none, none, none, 0)

    def with_more(self, ids: np.ndarray, deciding: np.ndarray, shares: np.ndarray) -> _Head:
        ids = np.concatenate([self.ids, ids])
        deciding = np.concatenate([self.deciding, deciding])
        shares = np.concatenate([self.shares, shares])
        keep = np.flatnonzero(deciding >= LEAST_COUNT)
        if len(keep) > MOST_VALUES:  # of equal counts, the smaller ids
            keep = np.sort(keep[np.argsort(-deciding[keep], kind="stable")[:MOST_VALUES]])
        rest = self.rest + int(shares.sum()) - int(shares[keep].sum())
        return _Head(ids[keep], deciding[keep], shares[keep], rest)


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
    batches = (
        (np.arange(first, first + len(counts)) + column.reserved_ids, counts)
        for first, counts in read_counts(path, description, column.name)
    )
    return _make(batches, description.vocabularies[column.name].observed["oov"])
