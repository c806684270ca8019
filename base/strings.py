"""Arrow string arrays as NumPy arrays, and back, without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import mask_to_numpy


def string_parts(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets (int32 or int64 [n + 1]) and bytes (uint8) of a string or binary array.

    Nulls are ignored.

    Value i is ``bytes[offsets[i]:offsets[i + 1]]``; the first offset of a slice is not 0.
    """
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    kind = np.dtype(np.int64 if wide else np.int32)
    _, offsets, data = array.buffers()
    if not len(array):  # then Arrow allows an array without offsets
        return np.zeros(1, kind), np.empty(0, np.uint8)
    numbers = np.frombuffer(offsets, kind, len(array) + 1, array.offset * kind.itemsize)
    return numbers, np.frombuffer(data if data is not None else b"", np.uint8)


def string_array(offsets: np.ndarray, data: np.ndarray) -> pa.StringArray:
    """Make a string array without nulls of int32 offsets [n + 1] and UTF-8 bytes."""
    length = len(offsets) - 1
    return pa.StringArray.from_buffers(length, pa.py_buffer(offsets), pa.py_buffer(data))


def strings(values: Sequence[str]) -> pa.StringArray:
    """Make a string array of a few strings (``pa.array`` imports pandas)."""
    encoded = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return string_array(offsets, np.frombuffer(b"".join(encoded), np.uint8))


def blanked(texts: pa.Array, mask: np.ndarray) -> pa.StringArray:
    """Return texts with "" where ``mask``, bool [n], is set.

    Arrow's own choice between two arrays would make an array with nulls.
    """
    if not mask.any():
        return texts
    offsets, data = string_parts(texts)
    kept = np.diff(offsets)
    used = data[offsets[0] : offsets[-1]][np.repeat(~mask, kept)]
    kept[mask] = 0
    begins = np.zeros(len(offsets), np.int32)
    np.cumsum(kept, out=begins[1:])
    return string_array(begins, used)


def is_one_of(texts: pa.Array, wanted: Sequence[str], *, trimmed: bool = False) -> np.ndarray:
    """Return which texts are among some, bool [n].

    Args:
        texts: string or binary array without nulls; UTF-8.
        wanted: the texts to find.
        trimmed: whether ``texts`` are without the spaces around them; then ``wanted`` are taken
            without them too.
    """
    import pyarrow.compute as pc

    found = strings([text.strip(" \t") if trimmed else text for text in wanted])
    return mask_to_numpy(pc.is_in(texts, value_set=found.cast(texts.type)))
