"""Arrow arrays as NumPy ones and back, without a copy.

``pa.array`` of an ndarray and ``Array.to_numpy`` would import pandas, where it is installed.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def to_arrow(values: np.ndarray) -> pa.Array:
    """A contiguous array of numbers, [n]."""
    values = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def to_numpy(array: pa.Array) -> np.ndarray:
    """The numbers of a primitive array (not bool), [n]; anything where it has nulls."""
    dtype = np.dtype(array.type.to_pandas_dtype())
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(len(array), dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)
