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
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clicklog.arrays import to_numpy
from clicklog.errors import BadInputError
from clicklog.spec.feature_spec import FIRST_OOV_ID
from workflows.description import WorkflowDescription

#: Buckets of frequent values. Ten is customary for the population stability index.
BUCKETS = 10
#: The bucket of rare values and those out of vocabulary; that of padding and null, never compared.
REST, ABSENT = BUCKETS, BUCKETS + 1
#: Occurrences from which on a value is frequent: by Good's formula the counts of rarer values in a
#: heavy-tailed column are too high by more than a twentieth.
LEAST_COUNT = 20
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
    def make(cls, counts: np.ndarray, first_id: int, unseen: int) -> FrequencyBuckets:
        """Make the buckets of counted ids.

        Args:
            counts: int64 [n], how often the ids ``first_id``, + 1, … occurred.
            first_id: The first of them.
            unseen: How often values without an id of their own occurred.
        """
        total = int(counts.sum()) + unseen
        head = _most_frequent(counts)
        of_head = counts[head]
        before = np.cumsum(of_head) - of_head
        buckets = (before * BUCKETS // max(1, total)).astype(np.uint8)
        sums = np.zeros(BUCKETS + 1, np.int64)
        np.add.at(sums, buckets, of_head)
        sums[REST] = total - int(of_head.sum())
        return cls(*_runs(head + first_id, buckets), sums)

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


def read_counts(path: Path, description: WorkflowDescription, column: str) -> np.ndarray:
    """Read how often the values of a column's vocabulary occurred, int64 [values] by id.

    Args:
        path: The directory of the saved workflow.
        description: Its description.
        column: The name of a categorical column that is not hashed.

    Raises:
        BadInputError: The vocabulary is damaged.
    """
    vocabulary = description.vocabularies[column]
    file = path / vocabulary.file
    try:
        table = pq.read_table(file, columns=[f"{vocabulary.name}_size"], partitioning=None)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise BadInputError(f"{file}: cannot be read: {error}", _AGAIN) from error
    chunks = [to_numpy(chunk) for chunk in table.column(0).chunks] if table.num_columns else []
    counts = np.concatenate([np.empty(0, np.int64), *chunks]).astype(np.int64)
    if len(counts) != vocabulary.values or counts.min(initial=0) < 0:
        raise BadInputError(
            f"{file}: {len(counts)} counts of the {vocabulary.values} values of column {column}",
            _AGAIN,
        )
    return counts


_AGAIN = "copy the whole workflow directory again, or fit it again"


def read_buckets(path: Path, description: WorkflowDescription) -> dict[str, FrequencyBuckets]:
    """Read the buckets of all vocabularies of a saved workflow, one vocabulary at a time.

    Hashed columns have no counts, so they are left out.

    Raises:
        BadInputError: A vocabulary is damaged.
    """
    found = {}
    for name, columns in description.spec.vocabularies.items():
        first = columns[0]
        if first.hash_buckets:
            continue
        counts = read_counts(path, description, first.name)
        unseen = description.vocabularies[first.name].observed["oov"]
        found[name] = FrequencyBuckets.make(counts, first.reserved_ids, unseen)
    return found
