"""Arrow arrays of numbers and booleans as NumPy arrays, and back, without pandas.

``pa.array`` of a NumPy array and ``Array.to_numpy`` import pandas where it is installed, which
takes a second and memory that code without NVTabular saves.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def to_arrow(values: np.ndarray) -> pa.Array:
    """Convert numbers [n], without a copy if they are contiguous."""
    values = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def rows_to_arrow(values: np.ndarray) -> list[pa.Array]:
    """Convert each row of numbers [k, n], without a copy if they are contiguous."""
    values = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(values.dtype)
    count, length = values.shape
    buffer, size = pa.py_buffer(values), values.itemsize * length
    cut = (buffer.slice(k * size, size) for k in range(count))
    return [pa.Array.from_buffers(kind, length, [None, row]) for row in cut]


def to_numpy(array: pa.Array) -> np.ndarray:
    """Return the numbers [n] of a primitive array (not bool), without a copy.

    Where the array is null, the numbers are arbitrary.
    """
    kind = np.dtype(array.type.to_pandas_dtype())
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(len(array), kind)
    return np.frombuffer(buffer, kind, len(array), array.offset * kind.itemsize)


def mask_to_arrow(mask: np.ndarray) -> pa.BooleanArray:
    """Convert booleans [n]."""
    bits = pa.py_buffer(np.packbits(mask, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, bits])


def mask_to_numpy(mask: pa.BooleanArray) -> np.ndarray:
    """Return the booleans [n] of an array without nulls."""
    bits = np.frombuffer(mask.buffers()[1] or b"", np.uint8)
    end = mask.offset + len(mask)
    return np.unpackbits(bits, bitorder="little", count=end)[mask.offset :].view(bool)


def null_mask(array: pa.Array) -> np.ndarray:
    """Return where an array is null, bool [n]."""
    bits = array.is_null().buffers()[1]
    if bits is None:
        return np.zeros(len(array), bool)
    mask = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little", count=len(array))
    return mask.view(bool)
