"""Small operators that return wrong values silently, or fail on valid data; one patch for each.

* ``FillMedian`` asks Dask for approximate quantiles: over several partitions it fills with values
  that are far from the median.
* ``Bucketize`` puts a missing value into the top bucket. Here it raises an error.
* ``HashBucket`` fails on lists of pandas frames.
* ``ListSlice(pad=True)`` does not pad lists that are arrays, and drops the index of the frame.
"""

from __future__ import annotations

import functools

from nvt_torchrec.nvt_compat.patching import replace

import numpy as np
import pandas as pd
from dask import delayed

from nvt_torchrec.base.errors import SchemaError


def _counted(column) -> pd.Series:
    counts = column.value_counts()  # without missing values
    return counts if isinstance(counts, pd.Series) else counts.to_pandas()


def _median(counts: list[pd.Series]) -> float:
    """Return the median of all rows, from the counts of the distinct values in each partition."""
    merged = pd.concat(counts).groupby(level=0).sum()
    if not len(merged):
        return np.nan
    last = merged.cumsum().to_numpy()  # the number of the last row of each value, from 1
    middle = np.searchsorted(last, [(last[-1] + 1) // 2, last[-1] // 2 + 1])
    return float(merged.index.to_numpy(np.float64)[middle].mean())


def _medians(self, col_selector, ddf):
    """Return a task for the exact medians, a series by column."""
    medians = {
        name: delayed(_median)([delayed(_counted)(part) for part in ddf[name].to_delayed()])
        for name in col_selector.names
    }
    return delayed(pd.Series)(medians)


def _refusing_missing(transform):
    @functools.wraps(transform)
    def bucketize(self, col_selector, df):
        for name in col_selector.names:
            if missing := int(df[name].isna().sum()):
                raise SchemaError(
                    f"Bucketize: column {name}: {missing} of {len(df)} values are missing, and "
                    "would get the top bucket",
                    "put FillMissing or FillMedian before Bucketize",
                )
        return transform(self, col_selector, df)

    return bucketize


def _hash_bucket(self, col_selector, df):
    from merlin.core.dispatch import encode_list_column, hash_series, is_list_dtype

    buckets = self.num_buckets
    if isinstance(buckets, int):
        buckets = dict.fromkeys(col_selector.names, buckets)
    for name, count in buckets.items():
        hashed = hash_series(df[name]) % count
        if is_list_dtype(df[name]):
            df[name] = encode_list_column(df[name], hashed, dtype=self.output_dtype)
        else:
            df[name] = hashed.astype(self.output_dtype)
    return df


def _on_pandas(transform):
    @functools.wraps(transform)
    def list_slice(self, col_selector, df):
        if not isinstance(df, pd.DataFrame):
            return transform(self, col_selector, df)
        sliced = {}
        for name in col_selector.names:
            rows = [row[self.start : self.end] for row in df[name]]
            if self.pad:
                rows = [_padded(row, self.max_elements, self.pad_value) for row in rows]
            sliced[name] = pd.Series(rows, df.index, dtype=object)
        return type(df)(sliced, index=df.index)

    return list_slice


def _padded(row, length: int, value: float):
    padding = [value] * (length - len(row))
    if isinstance(row, np.ndarray):
        return np.concatenate([row, np.array(padding, row.dtype)])
    return [*row, *padding]


def apply() -> None:
    """Replace methods of the operators."""
    from nvtabular.ops import Bucketize, FillMedian, HashBucket, ListSlice

    replace(FillMedian, "fit", _medians, expect='method="dask"')
    bucketize = _refusing_missing(Bucketize.transform)
    replace(Bucketize, "transform", bucketize, expect="np.digitize")
    replace(HashBucket, "transform", _hash_bucket, expect="is_list_dtype(df[col].dtype)")
    replace(ListSlice, "transform", _on_pandas(ListSlice.transform), expect="xp.append(v, padding)")
