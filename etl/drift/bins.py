"""Bins of the dense columns: quantiles of the training rows, in the values that the model sees.

Bins are cut in transformed values, with missing ones filled, because these are stored. The
transform is monotonic, so the bins are quantile bins of the raw values too.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numba import types

from nvt_torchrec.base.kernels import compiled

#: Bins of equal share, where values are distinct enough. Ten is customary for the PSI.
BINS = 10
#: The quantiles that are reported.
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)


@dataclasses.dataclass(frozen=True)
class DenseBins:
    """The bins of all dense columns.

    Attributes:
        edges: float32 [dense columns, BINS − 1], ascending; a value is in bin k if it is greater
            than k of them. Where values repeat, so do edges, and bins between them are empty.
        counts: int64 [dense columns, BINS], sampled training rows in each bin.
        quantiles: float64 [dense columns, quantiles], of the same rows.
    """

    edges: np.ndarray
    counts: np.ndarray
    quantiles: np.ndarray

    @classmethod
    def make(cls, sample: np.ndarray) -> DenseBins:
        """Make bins of transformed training rows, float32 [dense columns, n]."""
        shares = np.arange(1, BINS) / BINS
        if not sample.size:
            empty = np.zeros((len(sample), BINS - 1), np.float32)
            return cls(empty, np.zeros((len(sample), BINS), np.int64), quantiles(sample))
        edges = np.quantile(sample, shares, axis=1, method="inverted_cdf").T
        edges = np.ascontiguousarray(edges, np.float32)
        return cls(edges, count_bins(sample, edges), quantiles(sample))


def quantiles(sample: np.ndarray) -> np.ndarray:
    """Return :data:`QUANTILES` of [dense columns, n] as float64 [dense columns, quantiles]."""
    if not sample.size:
        return np.full((len(sample), len(QUANTILES)), np.nan)
    return np.quantile(sample, QUANTILES, axis=1, method="inverted_cdf").T.astype(np.float64)


def count_bins(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Count the values float32 [dense columns, n] in each bin: int64 [dense columns, BINS]."""
    counts = np.zeros((len(edges), edges.shape[1] + 1), np.int64)
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
