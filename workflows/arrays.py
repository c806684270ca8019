"""NumPy and Arrow arrays of one another's bytes.

``pa.array(…)`` and ``Array.to_numpy()`` import pandas where it is installed, which takes longer
than all else a start of the ETL does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from clicklog.strings import string_array


def int64_array(values: np.ndarray | Sequence[int]) -> pa.Int64Array:
    """An Arrow array of int64 without nulls."""
    values = np.ascontiguousarray(values, np.int64)
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])


def int64_values(array: pa.Array) -> np.ndarray:
    """int64 [n] of an Arrow array of 64-bit integers without nulls; read-only."""
    begin = array.offset
    return np.frombuffer(array.buffers()[1] or b"", np.int64)[begin : begin + len(array)]


def strings(values: Sequence[str]) -> pa.StringArray:
    """An Arrow array of a few strings."""
    encoded = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return string_array(offsets, np.frombuffer(b"".join(encoded), np.uint8))
