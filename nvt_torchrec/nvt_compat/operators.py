"""Patches for operators of NVTabular 23.8 that silently return wrong values or fail on valid data.

``Categorify``:

* With pandas 3 (copy-on-write) a chained ``fillna(inplace=True)`` does nothing, and arrays of a
  frame are read-only.
* Values with equal counts were in arbitrary order, so two runs gave the same value different ids.
* A column that is all null, in a partition or in all training data, raised an IndexError.
* If a column has only empty lists in the training data, a null that never occurred got an id.
* With ``single_table``, nulls and values without an id got ids of real values.
* An integer vocabulary could not encode a column with missing values (float64 in pandas).

Other operators:

* ``DifferenceLag`` assigns None in a column of booleans, which is an error in pandas 3.
* ``LogOp`` is log(1 + x): -1 becomes -inf, and smaller values become NaN. The patch warns about it.
* ``Normalize`` turns a whole column into NaN if one value is infinite. The patch raises an error.
* ``Normalize`` computes the variance as Σx² − (Σx)²/n. If values are equal, or large compared with
  their spread, the difference consists of rounding errors. (A column that was always missing got a
  standard deviation of 3e-8, and its first present value became a feature of 3e7.) The patch
  computes count, mean and the sum of squared deviations of each chunk, and merges them without
  cancellation (Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing
  sample variances, 1979). The mean is stored as an offset from the chunk's first value, so that the
  spread of equal values is 0 and the spread of close values is exact. Chunks are merged in order,
  so the result does not depend on the workers.

Operators that neither specs nor the example use are not patched: ``Bucketize`` puts missing values
into the top bucket, ``FillMedian`` over several partitions is far from the median, and
``HashBucket`` and ``ListSlice(pad=True)`` fail on lists of pandas frames. The full table is in
docs/nvtabular.md.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from nvt_torchrec.nvt_compat.patching import edit, replace

import numpy as np
import pandas as pd

from nvt_torchrec.base.errors import SchemaError


def cast_to_vocabulary(column: Any, vocabulary: Any) -> Any:
    """Return a column cast to the dtype of a vocabulary, unless nulls would be lost.

    pandas stores integers with missing values as float64. Such a column is not cast: the integers
    of a vocabulary are exact in float64, and merging float64 with int64 keys compares by value.

    Raises:
        TypeError: The column has strings and the vocabulary numbers (a cast would read hexadecimal
            digits as decimal), or the column has numbers and the vocabulary strings (no value would
            be found).
    """
    dtype = vocabulary.dtype
    if not isinstance(column, pd.Series):
        return _cast_to_cudf_vocabulary(column, vocabulary)
    numbers = pd.api.types.is_numeric_dtype(dtype)
    if not len(vocabulary) or column.isna().all():
        # No value can be found, and the dtype of an empty column is arbitrary.
        return pd.Series(np.nan, column.index, dtype="float64" if numbers else dtype)
    if numbers and not pd.api.types.is_numeric_dtype(column):
        raise TypeError(f"column {column.name}: {column.dtype} values, expected numbers")
    if not numbers and pd.api.types.infer_dtype(column, skipna=True) != "string":
        raise TypeError(f"column {column.name}: {column.dtype} values, expected strings")
    if column.dtype.kind == "f" and dtype.kind in "iu":
        return column
    return column.astype(dtype)


def _cast_to_cudf_vocabulary(column: Any, vocabulary: Any) -> Any:
    """Compute :func:`cast_to_vocabulary` for cuDF, whose integer columns can have nulls."""
    numbers = pd.api.types.is_numeric_dtype(vocabulary.dtype)
    is_number = pd.api.types.is_numeric_dtype(column.dtype)
    if not len(vocabulary) or (numbers != is_number and bool(column.isna().all())):
        return vocabulary[:0].reindex(column.index)  # all null
    if numbers != is_number:
        needed = "numbers" if numbers else "strings"
        raise TypeError(f"column {column.name}: {column.dtype} values, expected {needed}")
    if column.dtype.kind == "f" and vocabulary.dtype.kind in "iu":
        return column
    return column.astype(vocabulary.dtype)


def _patch_encode(categorify: Any) -> None:
    """Patch the function of Categorify that finds the ids of values."""
    categorify.cast_to_vocabulary = cast_to_vocabulary
    edit(
        categorify._encode,
        # In a single table the columns share the reserved ids; the first label is that of a value.
        ('value["labels"].head(1).iloc[0] if single_table else NULL_OFFSET', "NULL_OFFSET"),
        # Only the length of `nulls` is used, so copying all columns is not necessary.
        ("nulls = df[expr].index.values", "nulls = expr[expr]"),
        # The original fails if all values are null; `list_col` is already known.
        ("if isinstance(df[cl].dropna().iloc[0], (np.ndarray, list)):", "if list_col:"),
        (
            "codes[cl] = dispatch.flatten_list_column_values(ser).astype(value[cr].dtype)",
            "codes[cl] = cast_to_vocabulary(codes[cl], value[cr])",
        ),
        (
            "codes[cl] = df[cl].copy().astype(value[cr].dtype)",
            "codes[cl] = cast_to_vocabulary(df[cl], value[cr])",
        ),
        (
            'merged_df["labels"].fillna(df._constructor_sliced(indistinct), inplace=True)',
            'merged_df["labels"] = merged_df["labels"].fillna(df._constructor_sliced(indistinct))',
        ),
        ("labels.fillna(indistinct, inplace=True)", "labels = labels.fillna(indistinct)"),
        (
            "labels[nulls] = null_encoding_offset",
            # `nulls` are index values, but `labels` is indexed by rows, which only agrees for a
            # RangeIndex.
            "labels = labels.copy()\n        labels[expr.values] = null_encoding_offset",
        ),
    )


def sort_by_count(frame: Any, count: str, values: list[str]) -> Any:
    """Return a vocabulary sorted by descending count, then by ascending value, nulls first."""
    order = {"ascending": [False] + [True] * len(values), "na_position": "first"}
    return frame.sort_values([count, *values], ignore_index=True, **order)


def count_later_rows(vocabulary: Any, part: int, count: str) -> int:
    """Return the total count of the values in the partitions after ``part``."""
    later = range(part + 1, vocabulary.npartitions)
    counts = [vocabulary.partitions[i][count] for i in later]
    return sum(int(part.compute(scheduler="synchronous").sum()) for part in counts)


def _patch_vocabulary(categorify: Any) -> None:
    """Patch the functions of Categorify that write vocabularies."""
    categorify.sort_by_count = sort_by_count
    categorify.count_later_rows = count_later_rows
    edit(
        categorify._write_uniques,
        (
            "df = df.sort_values(name_size_multi, ascending=False, ignore_index=True)",
            "df = sort_by_count(df, name_size_multi, col_selector.names)",
        ),
        # With split_out > 1, `head` of the sorted frame does not contain the nulls, and Dask does
        # not pass a BlockIndex on, so the null got an id.
        (
            'df = df.sort_values(col_name, na_position="first")',
            "null_row = _compute_sync(df[df[col_name].isnull()])",
        ),
        ("null_row = df.head(1)", ""),
        (
            "df = df.map_partitions(_drop_first_row, BlockIndex((df.npartitions,)))",
            "df = df.dropna(subset=[col_name])",
        ),
        (
            # This runs inside of a task, where Dask would use a client to shuffle between workers.
            ")[0][::-1],\n                )",
            ")[0][::-1],\n                    shuffle_method='tasks',\n"
            "                ).map_partitions(sort_by_count, name_size, [col_name])",
        ),
        (
            # If there was no null because all lists were empty, a null row was added and got an id.
            """
        if hasattr(df, "convert_dtypes"):
            df = df.convert_dtypes()
        df_null = type(df)({c: [None] for c in col_selector.names})
        for c in col_selector.names:
            df_null[c] = df_null[c].astype(df[c].dtype)
        df_write = df_null
""",
            """
        df_write, null_size = df, 0
""",
        ),
    )
    edit(
        categorify._save_encodings,
        # Write an empty vocabulary, too, if there were only nulls.
        ("if _len == 0:\n            continue", "if _len == 0 and p:\n            continue"),
        # `sizes` are those of one partition, not of all.
        ("removed = df[(sizes < freq_threshold)", "removed = _df[(sizes < freq_threshold)"),
        # Values of the remaining partitions, which do not fit, are out of vocabulary, too.
        (
            "break  # Ignore any remaining files",
            "oov_size += (\n"
            "                count_later_rows(df, p, size_col)\n"
            "                if record_size_meta and is_collection else 0\n"
            "            )\n"
            "            break",
        ),
    )


def _difference_lag(self: Any, col_selector: Any, df: Any) -> Any:
    """Subtract the value ``shift`` rows earlier, or return null if that row is in another group."""
    output = {}
    for shift in self.shifts:
        keys = df[self.partition_cols]
        same_group = (keys == keys.shift(shift)).fillna(False).all(axis=1)
        for column in col_selector.names:
            difference = (df[column] - df[column].shift(shift)).where(same_group)
            output[self._column_name(column, shift)] = difference.astype(self.output_dtype)
    return type(df)(output)


def _add_check(function: Callable, check: Callable) -> Callable:
    """Return a method that calls a check with its arguments before it calls ``function``."""

    @functools.wraps(function)
    def method(self: Any, *args: Any) -> Any:
        check(*args)
        return function(self, *args)

    return method


def _warn_of_nan(col_selector: Any, df: Any) -> None:
    """Warn about values for which LogOp returns -inf or NaN."""
    from merlin.core.dispatch import flatten_list_column_values, is_list_dtype

    for name in col_selector.names:
        column = df[name]
        if is_list_dtype(column):
            column = flatten_list_column_values(column)
        column = column.astype("float32")  # the rounding of LogOp
        num_wrong = int((column <= -1).sum())
        if num_wrong:
            warnings.warn(
                f"LogOp: column {name}: {num_wrong} of {len(column)} values are -1 or less "
                f"(smallest {float(column.min()):g}), so log(1 + x) is -inf or NaN. Insert "
                "Clip(min_value=0) before LogOp, or correct the values",
                UserWarning,
                stacklevel=3,
            )


def _refuse_infinity(dask_stats: Any) -> None:
    """Refuse infinite and NaN means. Raises SchemaError."""
    for name, count, mean in zip(
        dask_stats.index, dask_stats["count"], dask_stats["mean"], strict=True
    ):
        if count and not np.isfinite(mean):
            raise SchemaError(
                f"column {name}: the mean of its {count} values is {mean:g}, so Normalize would "
                "turn all of them into NaN: some are infinite, or too large to add up",
                "limit them with Clip first; note that LogOp turns -1 into -inf",
            )


def _chunkwise_moments(df: Any) -> pd.DataFrame:
    """Return the moments of each column of a chunk in float64.

    They are the count, the origin (the first value), the offset (mean - origin) and m2, the sum of
    squared deviations from the mean.
    """
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
    """Merge the results of :func:`_chunkwise_moments` for several chunks, in their order."""
    merged = inputs[0]
    for other in inputs[1:]:
        count = merged["count"] + other["count"]
        share = (other["count"] / count).where(count > 0, 0.0)
        delta = other["origin"] - merged["origin"] + (other["offset"] - merged["offset"])
        m2 = merged["m2"] + other["m2"] + delta**2 * merged["count"] * share
        frame = merged.assign(count=count, offset=merged["offset"] + delta * share, m2=m2)
        # If one of the two has no values, the result is the other.
        frame = frame.where(other["count"] > 0, merged)
        merged = frame.where(merged["count"] > 0, other)
    return merged


def _finalize_moments(inp: pd.DataFrame, ddof: int = 1) -> pd.DataFrame:
    """Return count, mean, variance and standard deviation by column."""
    degrees = inp["count"] - ddof
    variance = (inp["m2"] / degrees).where(degrees > 0, np.nan)
    mean = (inp["origin"] + inp["offset"]).where(inp["count"] > 0, np.nan)
    return pd.DataFrame(
        {"count": inp["count"], "mean": mean, "var": variance, "std": np.sqrt(variance)}
    )


def apply() -> None:
    """Patch Categorify; replace methods of operators, and the three steps of their moments."""
    from nvtabular import ops
    from nvtabular.ops import categorify, moments

    _patch_encode(categorify)
    _patch_vocabulary(categorify)
    replace(ops.DifferenceLag, "transform", _difference_lag, expect="mask[mask == False] = None")
    log_op = _add_check(ops.LogOp.transform, _warn_of_nan)
    replace(ops.LogOp, "transform", log_op, expect="self.output_dtype) + 1")
    finalize = _add_check(ops.Normalize.fit_finalize, _refuse_infinity)
    replace(ops.Normalize, "fit_finalize", finalize, expect='dask_stats["std"]')
    replace(moments, "_chunkwise_moments", _chunkwise_moments, expect="squaredsum")
    replace(moments, "_tree_node_moments", _tree_node_moments, expect="squaredsum")
    replace(moments, "_finalize_moments", _finalize_moments, expect="x2 - x**2 / n")
