"""Operators that return wrong values silently.

* ``LogOp`` is log(1 + x): -1 becomes -inf, smaller values NaN. Here it warns of them.
* ``Normalize`` turns a whole column into NaN for one infinite value. Here it raises an error. It
  computes the variance as Σx² − (Σx)²/n: where values are large compared with their spread, or all
  equal, the difference consists of rounding errors, and a column that was always missing got a
  standard deviation of 3e-8, and its first present value became a feature of 3e7. Here chunks give
  count, mean and the sum of squared deviations, which merge without cancellation (Chan, Golub,
  LeVeque: Updating formulae and a pairwise algorithm for computing sample variances, 1979). The
  mean is stored as an offset from the chunk's first value, so that the spread of equal values is 0
  and that of close values is exact. Chunks are merged in order, whatever the workers.

Those that specs and the example do not use are as released: ``DifferenceLag`` fails in pandas 3,
``Bucketize`` puts a missing value into the top bucket, ``FillMedian`` is far from the median over
several partitions, ``HashBucket`` and ``ListSlice(pad=True)`` fail on lists of pandas frames.
docs/nvtabular.md has the table.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

from nvt_torchrec.nvt_compat.patching import replace

import numpy as np
import pandas as pd

from nvt_torchrec.base.errors import SchemaError


def _checked(function: Callable, check: Callable) -> Callable:
    """Return a method that first calls a check with its arguments."""

    @functools.wraps(function)
    def method(self, *args):
        check(*args)
        return function(self, *args)

    return method


def _warn_of_nan(col_selector, df) -> None:
    from merlin.core.dispatch import flatten_list_column_values, is_list_dtype

    for name in col_selector.names:
        column = df[name]
        if is_list_dtype(column):
            column = flatten_list_column_values(column)
        # rounded as LogOp does it
        column = column.astype("float32")
        if wrong := int((column <= -1).sum()):
            warnings.warn(
                f"LogOp: column {name}: {wrong} of {len(column)} values are -1 or less (smallest "
                f"{float(column.min()):g}), so log(1 + x) is -inf or NaN. Put Clip(min_value=0) "
                "before LogOp, or correct the values",
                UserWarning,
                stacklevel=3,
            )


def _refuse_infinity(dask_stats) -> None:
    for name, count, mean in zip(
        dask_stats.index, dask_stats["count"], dask_stats["mean"], strict=True
    ):
        if count and not np.isfinite(mean):
            raise SchemaError(
                f"column {name}: the mean of its {count} values is {mean:g}, and Normalize would "
                "make all of them NaN: some are infinite, or too large to add",
                "bound them with Clip first; LogOp makes -inf of -1",
            )


def _chunkwise_moments(df) -> pd.DataFrame:
    """Return count, origin, mean − origin and sum of squared deviations by column, in float64."""
    from merlin.core.dispatch import flatten_list_column_values, is_list_dtype

    rows = {}
    for name in df.columns:
        column = df[name]
        if is_list_dtype(column):
            column = flatten_list_column_values(column)
        column = column.dropna().astype("float64")
        if not len(column):
            rows[name] = (0, 0.0, 0.0, 0.0)
            continue
        origin = float(column.iloc[0])
        column = column - origin
        offset = float(column.mean())
        rows[name] = (len(column), origin, offset, float(((column - offset) ** 2).sum()))
    names = ["count", "origin", "offset", "m2"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=names)


def _tree_node_moments(inputs: list[pd.DataFrame]) -> pd.DataFrame:
    merged = inputs[0]
    for other in inputs[1:]:
        count = merged["count"] + other["count"]
        share = (other["count"] / count).where(count > 0, 0.0)
        delta = other["origin"] - merged["origin"] + (other["offset"] - merged["offset"])
        m2 = merged["m2"] + other["m2"] + delta**2 * merged["count"] * share
        frame = merged.assign(count=count, offset=merged["offset"] + delta * share, m2=m2)
        # where one of the two has no rows, the other is the result
        frame = frame.where(other["count"] > 0, merged)
        merged = frame.where(merged["count"] > 0, other)
    return merged


def _finalize_moments(inp: pd.DataFrame, ddof: int = 1) -> pd.DataFrame:
    degrees = inp["count"] - ddof
    variance = (inp["m2"] / degrees).where(degrees > 0, np.nan)
    mean = (inp["origin"] + inp["offset"]).where(inp["count"] > 0, np.nan)
    return pd.DataFrame(
        {"count": inp["count"], "mean": mean, "var": variance, "std": np.sqrt(variance)}
    )


def apply() -> None:
    """Replace methods of the operators, and the three steps of their moments."""
    from nvtabular import ops
    from nvtabular.ops import moments

    log_op = _checked(ops.LogOp.transform, _warn_of_nan)
    replace(ops.LogOp, "transform", log_op, expect="self.output_dtype) + 1")
    finalize = _checked(ops.Normalize.fit_finalize, _refuse_infinity)
    replace(ops.Normalize, "fit_finalize", finalize, expect='dask_stats["std"]')
    for name, function, expect in (
        ("_chunkwise_moments", _chunkwise_moments, "squaredsum"),
        ("_tree_node_moments", _tree_node_moments, "squaredsum"),
        ("_finalize_moments", _finalize_moments, "x2 - x**2 / n"),
    ):
        replace(moments, name, function, expect=expect)
