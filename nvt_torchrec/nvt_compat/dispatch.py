"""``merlin.core.dispatch``: the same hash on CPU and GPU, and list columns of pandas frames.

The patched hash is MurmurHash3, as in ``cudf.Series.hash_values()``. The released function uses
pandas' hash on the CPU. Its buckets differ from cuDF's and between input types (5 and 5.0); it also
hashes the row index, so that equal values in two rows get different buckets; and it fails on lists.
HashBucket, HashedCross and Categorify's ``num_buckets`` use it.

In list columns of pandas frames each row holds an array. Three errors are patched:

* If all lists were empty, flattening lost their type and returned a vocabulary of objects. The
  empty arrays do have a type.
* If the first rows had empty lists, the type of the column was unknown, which was an error.
* The index of the result of ``encode_list_column`` always began at 0, whatever the frame's index.
  So in a slice of a frame, rows got the lists of other rows, or none.
"""

from __future__ import annotations

import itertools
from typing import Any

from nvt_torchrec.nvt_compat.patching import edit, replace

import numpy as np
import pandas as pd
import pyarrow as pa

from nvt_torchrec.base.hashing import murmur3_int, murmur3_string


def _hash_series(ser: Any) -> np.ndarray:
    """Hash the values of a series, or all elements of its lists.

    Whole numbers are hashed as int64, whatever their dtype, because pandas stores integers with
    missing values as float64. Strings are hashed as UTF-8. The hash of a missing value is
    undefined.

    Returns:
        uint32 [n]; a cuDF series if ``ser`` is one.

    Raises:
        TypeError: The values are neither whole numbers nor strings.
    """
    from merlin.core import dispatch

    if not isinstance(ser, pd.Series):
        values = ser.list.leaves if dispatch.is_list_dtype(ser) else ser
        return _to_whole(values).hash_values()
    if dispatch.is_list_dtype(ser):
        ser = dispatch.flatten_list_column_values(ser)
    if pd.api.types.is_numeric_dtype(ser):
        values = ser.to_numpy(np.float64, na_value=0) if ser.hasnans else ser.to_numpy()
        if values.dtype.kind == "f":
            whole = values.astype(np.int64)
            if (whole != values).any():
                raise TypeError(f"column {ser.name}: fractions are no categories to hash")
            values = whole
        return murmur3_int(values)
    if ser.isna().all():
        return np.zeros(len(ser), np.uint32)
    if pd.api.types.infer_dtype(ser, skipna=True) != "string":
        raise TypeError(f"column {ser.name}: {ser.dtype} values, expected numbers or strings")
    return murmur3_string(pa.array(ser, pa.large_string(), from_pandas=True))


def _to_whole(ser: Any) -> Any:
    """Return the numbers of a cuDF series as int64; return strings unchanged.

    Raises:
        TypeError: A number has a fraction.
    """
    if ser.dtype.kind not in "iuf":
        return ser
    if ser.dtype.kind == "f":
        ser = ser.nans_to_nulls()
    whole = ser.astype("int64")
    if ser.dtype.kind == "f" and bool((whole != ser).any()):
        raise TypeError(f"column {ser.name}: fractions are no categories to hash")
    return whole


def flatten_values(lists: pd.Series) -> pd.Series:
    """Return the concatenated elements of all lists."""
    arrays = list(lists)
    if arrays and all(isinstance(array, np.ndarray) for array in arrays):
        return pd.Series(np.concatenate(arrays))
    return pd.Series(list(itertools.chain(*arrays)))


def apply() -> None:
    """Patch ``merlin.core.dispatch`` before Merlin and NVTabular import its functions."""
    from merlin.core import dispatch

    replace(dispatch, "hash_series", _hash_series, expect="hash_object_dispatch(ser)")
    dispatch.flatten_values = flatten_values
    edit(
        dispatch.flatten_list_column_values,
        ("return pd.Series(itertools.chain(*s))", "return flatten_values(s)"),
    )
    edit(
        dispatch.encode_list_column,
        (
            "return pd.Series(new_data)",
            "return pd.Series(new_data, index=original.index, dtype=object)",
        ),
        # cuDF's columns accept only dtype objects, not names or types
        ("encoded.astype(dtype, copy=False)", "encoded.astype(np.dtype(dtype), copy=False)"),
        ("ListDtype(encoded.dtype if dtype is None else dtype)", "ListDtype(encoded.dtype)"),
    )
    edit(
        dispatch.list_val_dtype,
        (
            "except StopIteration:\n                return None",
            "except StopIteration:\n                return getattr(ser.iloc[0], 'dtype', None)",
        ),
    )
