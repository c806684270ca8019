"""The same hash on the CPU and on the GPU: MurmurHash3 as in ``cudf.Series.hash_values()``.

The released ``hash_series`` uses pandas' hash on the CPU. Its buckets differ from cuDF's and
between input types (5 and 5.0), it hashes the row index too (equal values in two rows get different
buckets), and it fails on lists. HashBucket, HashedCross and Categorify's ``num_buckets`` use it.
"""

from __future__ import annotations

from nvt_torchrec.nvt_compat.patching import replace

import numpy as np
import pandas as pd
import pyarrow as pa

from nvt_torchrec.base.hashing import murmur3_int, murmur3_string


def _hash_series(ser) -> np.ndarray:
    """Hash a series, or all elements of lists; uint32 [n], for a cuDF series a cuDF series.

    Whole numbers are hashed as int64, whatever their dtype, because pandas stores integers with
    missing values as float64. Strings are hashed as UTF-8. The hash of a missing value is
    undefined.

    Raises:
        TypeError: A series of anything else.
    """
    from merlin.core import dispatch

    if not isinstance(ser, pd.Series):
        return _whole(ser.list.leaves if dispatch.is_list_dtype(ser) else ser).hash_values()
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


def _whole(ser):
    """Numbers of a cuDF series as int64; strings as they are."""
    if ser.dtype.kind not in "iuf":
        return ser
    if ser.dtype.kind == "f":
        ser = ser.nans_to_nulls()
    whole = ser.astype("int64")
    if ser.dtype.kind == "f" and bool((whole != ser).any()):
        raise TypeError(f"column {ser.name}: fractions are no categories to hash")
    return whole


def apply() -> None:
    """Replace ``merlin.core.dispatch.hash_series``, before NVTabular's operators import it."""
    from merlin.core import dispatch

    replace(dispatch, "hash_series", _hash_series, expect="hash_object_dispatch(ser)")
