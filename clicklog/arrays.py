"""Arrow's arrays of numbers and of truth values as NumPy arrays, and back.

``pa.array`` of a NumPy array and ``Array.to_numpy`` would import pandas where it is installed: a
second, and memory, that the paths without NVTabular do not spend.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def to_arrow(values: np.ndarray) -> pa.Array:
    """An array of numbers [n], without a copy if it is contiguous."""
    values = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def rows_to_arrow(values: np.ndarray) -> list[pa.Array]:
    """The rows of an array of numbers [k, n], without a copy if it is contiguous."""
    values = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(values.dtype)
    count, length = values.shape
    buffer, size = pa.py_buffer(values), values.itemsize * length
    cut = (buffer.slice(k * size, size) for k in range(count))
    return [pa.Array.from_buffers(kind, length, [None, row]) for row in cut]


def to_numpy(array: pa.Array) -> np.ndarray:
    """The numbers [n] of a primitive array (not bool), without a copy; anything where null."""
    kind = np.dtype(array.type.to_pandas_dtype())
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(len(array), kind)
    return np.frombuffer(buffer, kind, len(array), array.offset * kind.itemsize)


def mask_to_arrow(mask: np.ndarray) -> pa.BooleanArray:
    """Truth values, bool [n]."""
    bits = pa.py_buffer(np.packbits(mask, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, bits])


def null_mask(array: pa.Array) -> np.ndarray:
    """Where an array is null, bool [n]."""
    bits = array.is_null().buffers()[1]
    if bits is None:
        return np.zeros(len(array), bool)
    mask = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little", count=len(array))
    return mask.view(bool)
