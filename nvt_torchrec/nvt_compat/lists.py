"""List columns of pandas frames, where each row holds an array.

* Flattening lost the type where all lists were empty, and gave a vocabulary of objects. Empty
arrays
  have a type.
* A column whose first rows had empty lists was an error, because its type was unknown.
* The result of ``encode_list_column`` had an index from 0, whatever the frame's index, so that rows
  of a slice of a frame got the lists of other rows, or none.
"""

from __future__ import annotations

import itertools

from nvt_torchrec.nvt_compat.patching import edit

import numpy as np
import pandas as pd


def flat_values(lists: pd.Series) -> pd.Series:
    """Return the elements of all lists, one after the other."""
    arrays = list(lists)
    if arrays and all(isinstance(array, np.ndarray) for array in arrays):
        return pd.Series(np.concatenate(arrays))
    return pd.Series(list(itertools.chain(*arrays)))


def apply() -> None:
    """Patch ``merlin.core.dispatch`` before Merlin and NVTabular import its functions."""
    from merlin.core import dispatch

    dispatch.flat_values = flat_values
    edit(
        dispatch.flatten_list_column_values,
        ("return pd.Series(itertools.chain(*s))", "return flat_values(s)"),
    )
    edit(
        dispatch.encode_list_column,
        (
            "return pd.Series(new_data)",
            "return pd.Series(new_data, index=original.index, dtype=object)",
        ),
        # cuDF's columns accept dtypes only as objects, not as names or types
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
