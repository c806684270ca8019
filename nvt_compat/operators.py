"""Operators that fail on today's stack, or return NaN silently.

* ``DifferenceLag`` assigns None in a column of booleans, which is an error in pandas 3.
* ``LogOp`` is log(1 + x): -1 becomes -inf, smaller values NaN. Here it warns of them.
* ``Normalize`` turns a whole column into NaN for one infinite value. Here it raises an error.
* ``Categorify`` and ``FillMissing`` on dictionaries of NumPy arrays, as Triton's servers call them,
  use a C++ extension. The released one reads NumPy 1's dtypes ("unhandled dtype i0", "Unhandled
  floating point width for FillTransform0"), imports a name that merlin-core never had, and ignores
  ``num_buckets``: all out-of-vocabulary values get id 2. Here the operator's own ``transform`` is
  used, so ids equal the workflow's.
"""

from __future__ import annotations

import functools
import warnings

from nvt_torchrec.nvt_compat.patching import replace

import numpy as np
import pandas as pd

from nvt_torchrec.base.errors import SchemaError


def _difference_lag(self, col_selector, df):
    """Subtract the row ``shift`` rows before; missing where that row is of another group."""
    output = {}
    for shift in self.shifts:
        keys = df[self.partition_cols]
        same = (keys == keys.shift(shift)).fillna(False).all(axis=1)
        for column in col_selector.names:
            difference = (df[column] - df[column].shift(shift)).where(same)
            output[self._column_name(column, shift)] = difference.astype(self.output_dtype)
    return type(df)(output)


def _warning_of_nan(transform):
    @functools.wraps(transform)
    def log_op(self, col_selector, df):
        for name in col_selector.names:
            _warn_of_nan(name, df[name])
        return transform(self, col_selector, df)

    return log_op


def _warn_of_nan(name: str, column) -> None:
    from merlin.core.dispatch import flatten_list_column_values, is_list_dtype

    if is_list_dtype(column):
        column = flatten_list_column_values(column)
    # rounded as LogOp does it
    column = column.astype("float32")
    if wrong := int((column <= -1).sum()):
        warnings.warn(
            f"LogOp: column {name}: {wrong} of {len(column)} values are -1 or less (smallest "
            f"{float(column.min()):g}), so log(1 + x) is -inf or NaN. Put Clip(min_value=0) before "
            "LogOp, or correct the values",
            UserWarning,
            stacklevel=2,
        )


def _refusing_infinity(fit_finalize):
    @functools.wraps(fit_finalize)
    def normalize(self, dask_stats):
        for name, count, mean in zip(
            dask_stats.index, dask_stats["count"], dask_stats["mean"], strict=True
        ):
            if count and not np.isfinite(mean):
                raise SchemaError(
                    f"column {name}: the mean of its {count} values is {mean:g}, and Normalize "
                    "would make all of them NaN: some are infinite, or too large to add",
                    "bound them with Clip first; LogOp makes -inf of -1",
                )
        fit_finalize(self, dask_stats)

    return normalize


class OnArrays:
    """A fitted operator that transforms each column separately."""

    def __init__(self, operator) -> None:
        from merlin.dag import DataFormats, Supports

        self._operator = operator
        self.supports = Supports.CPU_DICT_ARRAY
        self.supported_formats = DataFormats.NUMPY_DICT_ARRAY

    def transform(self, col_selector, tensors: dict) -> dict:
        """Transform ``{column: array [n], or for lists (values, offsets)}``."""
        return {name: self._column(name, value) for name, value in tensors.items()}

    def _column(self, name: str, value):
        from merlin.dag import ColumnSelector

        values, *offsets = value if isinstance(value, tuple) else (value,)
        frame = pd.DataFrame({name: np.ravel(values)})
        result = self._operator.transform(ColumnSelector([name]), frame)[name].to_numpy()
        return (result, *offsets) if isinstance(value, tuple) else result


def _categorify(self, columns, inference_config) -> OnArrays | None:
    """Return None, to transform frames, for a combination of columns, which needs all of them."""
    return None if self.encode_type == "combo" else OnArrays(self)


def _fill_missing(self, col_selector, inference_config) -> OnArrays | None:
    """Return None, to transform frames, where the result has more columns than arrays."""
    return None if self.add_binary_cols else OnArrays(self)


def apply() -> None:
    """Replace methods of the operators."""
    from nvtabular.ops import Categorify, DifferenceLag, FillMissing, LogOp, Normalize

    replace(DifferenceLag, "transform", _difference_lag, expect="mask[mask == False] = None")
    replace(LogOp, "transform", _warning_of_nan(LogOp.transform), expect="self.output_dtype) + 1")
    finalize = _refusing_infinity(Normalize.fit_finalize)
    replace(Normalize, "fit_finalize", finalize, expect='dask_stats["std"]')
    for operator, function in ((Categorify, _categorify), (FillMissing, _fill_missing)):
        replace(operator, "inference_initialize", function, expect="nvtabular_cpp.inference")
