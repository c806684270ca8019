"""The cells in which drift counts values.

Cells of a dense column are ten bins at the deciles of the training rows, in the values that the
model sees: transformed, missing ones filled. Cells of a categorical column are :class:`Buckets` of
its vocabulary by frequency. Imports neither NVTabular nor Dask nor pandas.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numba import types

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.rows import Jagged
from nvt_torchrec.formats.spec.feature_spec import FIRST_OOV_ID
from nvt_torchrec.formats.workflow_description import Vocabulary, WorkflowDescription
from nvt_torchrec.workflows.compiled.workflow import Ids

#: Bins of equal share, where values are distinct enough. Ten is customary for the PSI.
BINS = 10


def make_edges(sample: np.ndarray) -> np.ndarray:
    """Return the edges of the bins, float32 [columns, BINS − 1], of values float32 [columns, n].

    A value is in bin k if it is greater than k edges. Where values repeat, so do edges, and bins
    between them are empty.
    """
    if not sample.size:
        return np.zeros((len(sample), BINS - 1), np.float32)
    edges = np.quantile(sample, np.arange(1, BINS) / BINS, axis=1, method="inverted_cdf").T
    return np.ascontiguousarray(edges, np.float32)


def count_bins(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Count the values float32 [columns, n] in each bin: int64 [columns, BINS]."""
    counts = np.zeros((len(edges), BINS), np.int64)
    _count_bins(values, edges, counts)
    return counts


@compiled(
    types.void(
        types.Array(types.float32, 2, "A", readonly=True),
        types.Array(types.float32, 2, "C", readonly=True),
        types.Array(types.int64, 2, "C"),
    ),
)
def _count_bins(values, edges, counts):
    for j in range(len(edges)):
        column = np.ascontiguousarray(values[j])
        for i in range(len(column)):
            bin_ = 0
            for k in range(edges.shape[1]):
                bin_ += np.int64(column[i] > edges[j, k])
            counts[j, bin_] += 1


#: Buckets of frequent values. Ten is customary for the PSI.
BUCKETS = 10
#: The bucket of rare values and those out of vocabulary; that of padding and null, never compared.
REST, ABSENT = BUCKETS, BUCKETS + 1
#: Occurrences, in the half that decides, from which on a value is frequent. The order of rarer
#: values is mostly chance.
LEAST_COUNT = 10
#: The most values in the buckets of frequent values, which bounds the memory.
MOST_VALUES = 1 << 16
_AGAIN = "copy the whole workflow directory again, or fit it again"


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The values of a vocabulary in a few buckets by the frequency that they had when counted.

    The most frequent values are in :data:`BUCKETS` buckets of about equal share, and the rest,
    which is rare or out of vocabulary, in one more.

    Values that are chosen for their high counts have high counts by chance, too: on another day
    their share is lower without any shift (regression to the mean; for values seen once see Good,
    The population frequencies of species, Biometrika 40, 1953). So the counts are split: each
    occurrence is put into one of two halves at random. One half decides which values are in which
    bucket, the other one, which is independent of it, how large the share of each bucket is (data
    thinning: Neufeld et al., Journal of Machine Learning Research 25, 2024). The shares are then
    unbiased, even that of the rest, whose values another day may have seen for the first time.

    Attributes:
        of_ids: uint8 [n], the bucket of each id; larger ids are in that of the last one, the rest.
        counts: int64 [BUCKETS + 1], how often the values of each bucket occurred in the half of
            the rows that decides on the shares.
    """

    of_ids: np.ndarray
    counts: np.ndarray

    @classmethod
    def make(cls, counts: np.ndarray, first: int, unseen: int) -> Buckets:
        """Make the buckets of counted ids.

        Args:
            counts: How often each id occurred, int64 [n], in the order of the ids.
            first: The first id.
            unseen: How often values without an id of their own occurred.
        """
        rng = np.random.default_rng(0)  # the same split every time
        frequent = np.flatnonzero(counts >= LEAST_COUNT)  # others cannot be in the head
        rare = unseen + int(counts.sum()) - int(counts[frequent].sum())
        deciding = rng.binomial(counts[frequent], 0.5)
        measuring = counts[frequent] - deciding
        head = np.argsort(-deciding, kind="stable")[:MOST_VALUES]  # of equal counts, smaller ids
        head = head[deciding[head] >= LEAST_COUNT]
        rest = int(measuring.sum()) - int(measuring[head].sum())
        total = int(deciding[head].sum()) + rest + rare // 2  # only buckets of equal share need it
        before = np.cumsum(deciding[head]) - deciding[head]
        buckets = np.minimum(before * BUCKETS // max(1, total), BUCKETS - 1)
        sums = np.zeros(BUCKETS + 1, np.int64)
        np.add.at(sums, buckets, measuring[head])
        sums[REST] = rest + int(rng.binomial(rare, 0.5))
        ids = first + frequent[head]
        of_ids = np.full(max(first, int(ids.max(initial=0)) + 1) + 1, REST, np.uint8)
        of_ids[:FIRST_OOV_ID] = ABSENT
        of_ids[ids] = buckets
        return cls(of_ids, sums)

    def count(self, ids: Ids, counts: np.ndarray) -> None:
        """Add the ids of a column to counts of buckets, int64 [BUCKETS + 2]."""
        _count_buckets(ids.values if isinstance(ids, Jagged) else ids, self.of_ids, counts)


@compiled(
    types.void(
        types.Array(types.int32, 1, "A", readonly=True),
        types.Array(types.uint8, 1, "C", readonly=True),
        types.Array(types.int64, 1, "C"),
    ),
    nogil=False,  # a few microseconds
)
def _count_buckets(ids, of_ids, counts):
    last = len(of_ids) - 1
    for i in range(len(ids)):
        counts[of_ids[min(np.int64(ids[i]), last)]] += 1


def read_buckets(path: Path, description: WorkflowDescription) -> dict[str, Buckets]:
    """Read the buckets of all vocabularies of a saved workflow.

    Hashed columns have no counts, so they are left out.

    Raises:
        BadInputError: A vocabulary is damaged.
    """
    result = {}
    for name, (column, *_) in description.spec.vocabularies.items():
        if not column.hash_buckets:
            vocabulary = description.vocabularies[column.name]
            counts = _read_counts(path / vocabulary.file, vocabulary)
            unseen = vocabulary.observed["oov"]
            result[name] = Buckets.make(counts, column.reserved_ids, unseen)
    return result


def _read_counts(file: Path, vocabulary: Vocabulary) -> np.ndarray:
    """Read how often each value of a vocabulary occurred, int64 [values]."""
    try:
        column = pq.read_table(file, columns=[f"{vocabulary.name}_size"], use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise BadInputError(f"{file}: cannot be read: {error}", _AGAIN) from error
    if column.shape != (vocabulary.values, 1) or column.schema[0].type != pa.int64():
        raise BadInputError(f"{file}: no counts of {vocabulary.values} values", _AGAIN)
    return to_numpy(column[0].combine_chunks())
