"""Raw rows → the frames a Workflow transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clicklog.rows import CategoryValues, Ragged, RawRows
from clicklog.spec.feature_spec import FeatureSpec

if TYPE_CHECKING:
    import pandas as pd


def to_frame(rows: RawRows, spec: FeatureSpec, *, gpu: bool = False) -> pd.DataFrame:
    """A frame of the raw columns, named and ordered as in the spec.

    pandas: label float32; numbers float64 with NaN where missing (what a spec admits is exact
    there, and NVTabular's pandas code takes no nullable integers); strings object, None where
    missing; lists an array (int64 or object) in each row, empty where missing. cuDF: label
    float32; int32 dense columns and numeric categories int64, float ones float64, strings, lists
    of int64 or strings, with nulls (lists: empty ones).

    Args:
        rows: parsed rows; without a label column the frame has none either.
        spec: the columns.
        gpu: make a ``cudf.DataFrame`` on the current device.
    """
    if gpu:
        return joined([to_table(rows, spec)], gpu=True)
    import pandas as pd

    return pd.DataFrame(_columns(rows, spec, _to_pandas), copy=False)


def joined(parts: Sequence[Any], *, gpu: bool) -> pd.DataFrame:
    """One frame of the rows of some: of pandas frames, or (``gpu``) a ``cudf.DataFrame`` of what
    :func:`to_table` gives."""
    if gpu:
        import cudf

        return cudf.DataFrame.from_arrow(pa.concat_tables(parts).combine_chunks())
    import pandas as pd

    return parts[0] if len(parts) == 1 else pd.concat(parts, ignore_index=True)


def to_table(rows: RawRows, spec: FeatureSpec) -> pa.Table:
    """The columns of a cuDF frame, on the host; see :func:`to_frame`."""
    return pa.table(_columns(rows, spec, _to_arrow))


def _columns(rows: RawRows, spec: FeatureSpec, convert: Callable) -> dict[str, Any]:
    columns = {}
    if rows.label is not None:
        columns[spec.label] = rows.label.astype(np.float32)
    for names, values, missing in (
        (spec.dense_names, rows.dense, rows.dense_missing),
        (spec.categorical_names, rows.categorical, rows.categorical_missing),
    ):
        for j, name in enumerate(names):
            absent = (missing >> np.uint64(j)) & np.uint64(1) != 0
            columns[name] = convert(values[j], absent)
    return columns


def _to_pandas(values: CategoryValues, absent: np.ndarray) -> np.ndarray:
    if isinstance(values, Ragged):
        return _lists(values)
    if isinstance(values, pa.Array):
        column = values.to_numpy(zero_copy_only=False)
        if absent.any():
            column = column.copy()
            column[absent] = None
        return column
    column = values.astype(np.float64)
    column[absent] = np.nan
    return column


def _lists(ragged: Ragged) -> np.ndarray:
    """An object array of arrays."""
    values = ragged.values
    if isinstance(values, pa.Array):
        values = values.to_numpy(zero_copy_only=False)
    else:
        values = values.astype(np.int64, copy=False)
    column = np.empty(len(ragged), object)
    offsets = ragged.offsets.tolist()
    for i in range(len(column)):  # assigning a list of arrays at once would stack equal lengths
        column[i] = values[offsets[i] : offsets[i + 1]]
    return column


def _to_arrow(values: CategoryValues, absent: np.ndarray | None) -> pa.Array:
    if isinstance(values, Ragged):
        offsets = pa.array(values.offsets.astype(np.int32))
        return pa.ListArray.from_arrays(offsets, _to_arrow(values.values, None))
    if isinstance(values, pa.Array):
        if absent is None or not absent.any():
            return values
        return pc.if_else(pa.array(~absent), values, pa.scalar(None, pa.string()))
    kept = np.float64 if values.dtype.kind == "f" else np.int64
    return pa.array(values.astype(kept), mask=absent)
