"""Convert raw rows to the frames that a Workflow transforms."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.clicklog.in_memory.frames import Features
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import CategoryValues, Jagged, RawRows, is_missing

if TYPE_CHECKING:
    import pandas as pd

#: The mask of labels and weights, which are never missing.
_NOT_MISSING = np.zeros(0, bool)


def to_frame(rows: RawRows, spec: FeatureSpec, *, gpu: bool = False) -> pd.DataFrame:
    """Return a frame of the raw columns, named and ordered as in the spec.

    pandas: labels and weight are float32. Numbers are float64, NaN where missing; all values that a
    spec allows are exact in it, and NVTabular's pandas code does not support nullable integers.
    Strings are object, None where missing. A list column has an array (int64 or object) in each
    row, empty where missing.

    cuDF: labels and weight are float32. Integers are int64, floats float64, strings str, lists of
    int64 or str; missing values are null, missing lists are empty.

    Args:
        rows: Parsed rows. If they have no labels, the frame has no labels and no weight.
        spec: The columns.
        gpu: Return a ``cudf.DataFrame`` on the current device.
    """
    unchanged = dict(zip(spec.labels, rows.labels, strict=False))  # rows.labels may be empty
    if rows.weight is not None:
        unchanged[spec.weight] = rows.weight
    features: Features = {name: (values, _NOT_MISSING) for name, values in unchanged.items()}
    for j, name in enumerate(spec.dense_names):
        features[name] = rows.dense[j], is_missing(rows.dense_missing, j)
    for j, name in enumerate(spec.categorical_names):
        features[name] = rows.categorical[j], is_missing(rows.categorical_missing, j)
    return features_to_frame(features, unchanged, gpu=gpu)


def features_to_frame(features: Features, unchanged: Collection[str], *, gpu: bool) -> pd.DataFrame:
    """Return the frame of :func:`to_frame` for columns that were read one by one.

    Args:
        features: See :func:`clicklog.in_memory.frames.read_features`.
        unchanged: The names of labels and weight.
        gpu: Return a ``cudf.DataFrame`` on the current device.
    """
    convert = _to_arrow if gpu else _to_pandas
    columns = {}
    for name, (values, missing) in features.items():
        if name in unchanged:
            columns[name] = np.asarray(values, np.float32)
        else:
            columns[name] = convert(values, missing)
    if gpu:
        import cudf

        return cudf.DataFrame.from_arrow(pa.table(columns))
    import pandas as pd

    return pd.DataFrame(columns, copy=False)


def _to_pandas(values: CategoryValues, absent: np.ndarray) -> np.ndarray:
    if isinstance(values, Jagged):
        return _to_objects(values)
    if isinstance(values, pa.Array):
        column = values.to_numpy(zero_copy_only=False)
        if absent.any():
            column = column.copy()
            column[absent] = None
        return column
    column = values.astype(np.float64)
    column[absent] = np.nan
    return column


def _to_objects(jagged: Jagged) -> np.ndarray:
    """Return an object array of arrays."""
    values = jagged.values
    if isinstance(values, pa.Array):
        values = values.to_numpy(zero_copy_only=False)
    else:
        values = values.astype(np.int64, copy=False)
    column = np.empty(len(jagged), object)
    offsets = jagged.offsets.tolist()
    for i in range(len(column)):  # not at once: NumPy would stack arrays of equal lengths
        column[i] = values[offsets[i] : offsets[i + 1]]
    return column


def _to_arrow(values: CategoryValues, absent: np.ndarray | None) -> pa.Array:
    if isinstance(values, Jagged):
        offsets = pa.array(values.offsets.astype(np.int32))
        return pa.ListArray.from_arrays(offsets, _to_arrow(values.values, None))
    if isinstance(values, pa.Array):
        if absent is None or not absent.any():
            return values
        return pc.if_else(pa.array(~absent), values, pa.scalar(None, pa.string()))
    kept = np.float64 if values.dtype.kind == "f" else np.int64
    return pa.array(values.astype(kept), mask=absent)
