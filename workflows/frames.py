"""Raw rows → the frames a Workflow transforms."""

from __future__ import annotations

import numpy as np

from clicklog.spec import FeatureSpec
from clicklog.tokenizer import RawRows


def to_frame(rows: RawRows, spec: FeatureSpec, *, gpu: bool = False):
    """A frame of the raw columns, named and ordered as in the spec.

    pandas: label float32, everything else float64 with NaN where missing (a 32-bit category is
    exact there, and NVTabular's pandas code takes no nullable integers). cuDF: label float32,
    everything else int64 with nulls.

    Args:
        rows: parsed rows; without a label column the frame has none either.
        spec: the columns.
        gpu: make a ``cudf.DataFrame`` on the current device.
    """
    columns = {}
    if rows.label is not None:
        columns[spec.label] = rows.label.astype(np.float32)
    for names, values, missing in (
        (spec.dense_names, rows.dense, rows.dense_missing),
        (spec.categorical_names, rows.categorical, rows.categorical_missing),
    ):
        for j, name in enumerate(names):
            absent = (missing >> np.uint64(j)) & np.uint64(1) != 0
            columns[name] = _column(values[j], absent, gpu)
    if gpu:
        import cudf
        import pyarrow as pa

        return cudf.DataFrame.from_arrow(pa.table(columns))
    import pandas as pd

    return pd.DataFrame(columns, copy=False)


def _column(values: np.ndarray, absent: np.ndarray, gpu: bool):
    if gpu:
        import pyarrow as pa

        return pa.array(values.astype(np.int64), mask=absent)
    column = values.astype(np.float64)
    column[absent] = np.nan
    return column
