"""The cells in which drift counts values.

Cells of a dense column are ten bins at the deciles of the training rows, in the values that the
model sees: transformed, missing ones filled. Cells of a categorical column are :class:`Buckets` of
its vocabulary by frequency. Imports neither NVTabular nor Dask nor pandas.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from numba import types

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.rows import Jagged
from nvt_torchrec.formats.spec.columns import FIRST_OOV_ID
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.compiled.workflow import Ids

#: Bins of equal share, where values are distinct enough. Ten is customary for the PSI.
BINS = 10


@dataclasses.dataclass(frozen=True)
class Bins:
    """Bins of a dense column at the deciles of a sample.

    A value is in bin k if it is greater than k edges. Where values repeat, so do edges, and bins
    between them are empty.

    Attributes:
        edges: float32 [BINS − 1].
        counts: int64 [BINS], the values of the sample in each bin.
    """

    edges: np.ndarray
    counts: np.ndarray

    @classmethod
    def make(cls, sample: np.ndarray) -> Bins:
        """Make the bins of some values, float32 [n]."""
        edges = np.zeros(BINS - 1, np.float32)
        if len(sample):
            shares = np.arange(1, BINS) / BINS
            edges = np.quantile(sample, shares, method="inverted_cdf").astype(np.float32)
        bins = cls(edges, np.zeros(BINS, np.int64))
        bins.counts[:] = bins.count(sample)
        return bins

    def count(self, values: np.ndarray) -> np.ndarray:
        """Count values, float32 [n], in each bin: int64 [BINS]."""
        counts = np.zeros(BINS, np.int64)
        _count_bins(values, self.edges, counts)
        return counts


@compiled(
    types.void(
        types.Array(types.float32, 1, "A", readonly=True),
        types.Array(types.float32, 1, "C", readonly=True),
        types.Array(types.int64, 1, "C"),
    ),
)
def _count_bins(values, edges, counts):
    column = np.ascontiguousarray(values)
    for i in range(len(column)):
        bin_ = 0
        for k in range(len(edges)):
            bin_ += np.int64(column[i] > edges[k])
        counts[bin_] += 1


#: Buckets of frequent values. Ten is customary for the PSI.
BUCKETS = 10
#: The bucket of rare values and those out of vocabulary; that of padding and null, never compared.
REST, ABSENT = BUCKETS, BUCKETS + 1
#: Occurrences, in the half that decides, from which on a value is frequent. The order of rarer
#: values is mostly chance.
LEAST_COUNT = 10
#: The most values in the buckets of frequent values, which bounds the memory.
MOST_VALUES = 1 << 16


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

    def count(self, ids: Ids) -> np.ndarray:
        """Count the ids of a column in each bucket but :data:`ABSENT`: int64 [BUCKETS + 1]."""
        counts = np.zeros(BUCKETS + 2, np.int64)
        _count_buckets(ids.values if isinstance(ids, Jagged) else ids, self.of_ids, counts)
        return counts[:ABSENT]


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
            unseen = vocabulary.observed["oov"]
            counts = vocabulary.read_counts(path)
            result[name] = Buckets.make(counts, column.reserved_ids, unseen)
    return result
