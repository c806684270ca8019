"""Wrong values that stock NVTabular 23.8 gives silently, or errors on valid data.

* Under pandas 3 (copy-on-write) a chained ``fillna(inplace=True)`` does nothing, and arrays of a
  frame are read-only.
* Equal counts came in any order: two runs gave the same value different ids.
* A partition whose column is all null, and a training set whose column is all null: IndexError.
* A training set with nothing but empty lists in a column: a made-up null got an id of its own.
* An integer vocabulary could not encode a column with missing values (float64 in pandas).
"""

from __future__ import annotations

from nvt_compat.patching import edit

import numpy as np
import pandas as pd


def key_like_vocabulary(column, vocabulary):
    """A column to be looked up in a vocabulary: cast to its type, if that loses no null.

    pandas keeps integers with missing values as float64. The integers that a vocabulary may hold
    are exact there, and merging float64 with int64 keys compares by value.

    Raises:
        TypeError: strings for a vocabulary of numbers (a cast would read hexadecimal digits as
            decimal ones), or numbers for one of strings (none would be found); both silently.
    """
    dtype = vocabulary.dtype
    if not isinstance(column, pd.Series):
        return _like_cudf_vocabulary(column, vocabulary)
    numbers = pd.api.types.is_numeric_dtype(dtype)
    if not len(vocabulary) or column.isna().all():
        # nothing can be found, and either may have the type of nothing at all
        return pd.Series(np.nan, column.index, dtype="float64" if numbers else dtype)
    if numbers and not pd.api.types.is_numeric_dtype(column):
        raise TypeError(f"column {column.name}: {column.dtype} values, numbers are needed")
    if not numbers and pd.api.types.infer_dtype(column, skipna=True) != "string":
        raise TypeError(f"column {column.name}: {column.dtype} values, strings are needed")
    if column.dtype.kind == "f" and dtype.kind in "iu":
        return column
    return column.astype(dtype)


def _like_cudf_vocabulary(column, vocabulary):
    """The same for cuDF, whose integers may be missing and whose columns have one type each."""
    numbers = pd.api.types.is_numeric_dtype(vocabulary.dtype)
    is_number = pd.api.types.is_numeric_dtype(column.dtype)
    if not len(vocabulary) or (numbers != is_number and bool(column.isna().all())):
        return vocabulary[:0].reindex(column.index)  # all null
    if numbers != is_number:
        needed = "numbers" if numbers else "strings"
        raise TypeError(f"column {column.name}: {column.dtype} values, {needed} are needed")
    if column.dtype.kind == "f" and vocabulary.dtype.kind in "iu":
        return column
    return column.astype(vocabulary.dtype)


def _mend_encode(categorify) -> None:
    categorify.key_like_vocabulary = key_like_vocabulary
    edit(
        categorify._encode,
        # Only whether there are any is asked, and all columns were copied for it.
        ("nulls = df[expr].index.values", "nulls = expr[expr]"),
        # all null: `iloc[0]` of nothing; whether it is a list column is known by now
        ("if isinstance(df[cl].dropna().iloc[0], (np.ndarray, list)):", "if list_col:"),
        (
            "codes[cl] = dispatch.flatten_list_column_values(ser).astype(value[cr].dtype)",
            "codes[cl] = key_like_vocabulary(codes[cl], value[cr])",
        ),
        (
            "codes[cl] = df[cl].copy().astype(value[cr].dtype)",
            "codes[cl] = key_like_vocabulary(df[cl], value[cr])",
        ),
        (
            'merged_df["labels"].fillna(df._constructor_sliced(indistinct), inplace=True)',
            'merged_df["labels"] = merged_df["labels"].fillna(df._constructor_sliced(indistinct))',
        ),
        (
            "labels.fillna(indistinct, inplace=True)",
            "labels = labels.fillna(indistinct)",
        ),
        (
            "labels[nulls] = null_encoding_offset",
            # `nulls` holds index values, `labels` counts rows: the same for a RangeIndex only
            "labels = labels.copy()\n        labels[expr.values] = null_encoding_offset",
        ),
    )


def by_count(frame, count: str, values: list[str]):
    """A vocabulary by falling count; ties by value, nulls before everything else."""
    order = {"ascending": [False] + [True] * len(values), "na_position": "first"}
    return frame.sort_values([count, *values], ignore_index=True, **order)


def rows_after(vocabulary, part: int, count: str) -> int:
    """How many rows the values have that are in later partitions than ``part``."""
    later = range(part + 1, vocabulary.npartitions)
    counts = [vocabulary.partitions[i][count] for i in later]
    return sum(int(one.compute(scheduler="synchronous").sum()) for one in counts)


def _mend_vocabulary(categorify) -> None:
    categorify.by_count, categorify.rows_after = by_count, rows_after
    edit(
        categorify._write_uniques,
        (
            "df = df.sort_values(name_size_multi, ascending=False, ignore_index=True)",
            "df = by_count(df, name_size_multi, col_selector.names)",
        ),
        # With split_out > 1: Dask takes `head` of what is sorted without its nulls, and passes no
        # BlockIndex on, so the null got an id.
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
            # this is a task itself: with a client, Dask would have workers exchange the rows
            ")[0][::-1],\n                )",
            ")[0][::-1],\n                    shuffle_method='tasks',\n"
            "                ).map_partitions(by_count, name_size, [col_name])",
        ),
        (
            # not even a null was seen (all lists empty): a null row made up instead got an id
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
        # nothing but nulls was seen: an empty vocabulary is still a vocabulary
        ("if _len == 0:\n            continue", "if _len == 0 and p:\n            continue"),
        # of one partition, not of all of them
        ("removed = df[(sizes < freq_threshold)", "removed = _df[(sizes < freq_threshold)"),
        # what does not fit is out of vocabulary in the other partitions too
        (
            "break  # Ignore any remaining files",
            "oov_size += rows_after(df, p, size_col) if record_size_meta and is_collection else 0\n"
            "            break",
        ),
    )


def apply() -> None:
    """Mend NVTabular's Categorify."""
    from nvtabular.ops import categorify

    _mend_encode(categorify)
    _mend_vocabulary(categorify)
