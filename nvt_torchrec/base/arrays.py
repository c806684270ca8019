"""Convert between Arrow and NumPy arrays, without a copy where possible, and without pandas.

``pa.array`` of a NumPy array and ``Array.to_numpy`` import pandas if it is installed, which takes a
second and memory that code without NVTabular does not need.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.errors import SchemaError


def to_arrow(values: np.ndarray) -> pa.Array:
    """Convert numbers [n], without a copy if they are contiguous."""
    values = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


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


def is_list(held: pa.DataType) -> bool:
    """Return whether the values of a type are lists."""
    types = pa.types
    return types.is_list(held) or types.is_large_list(held) or types.is_fixed_size_list(held)


def is_text(held: pa.DataType) -> bool:
    """Return whether the values of a type are text, as strings or as bytes."""
    types = pa.types
    is_string = types.is_string(held) or types.is_large_string(held) or types.is_string_view(held)
    is_bytes = types.is_binary(held) or types.is_large_binary(held) or types.is_binary_view(held)
    return is_string or is_bytes


def to_bytes_type(held: pa.DataType) -> pa.DataType:
    """Return a type with bytes instead of strings, because Python cannot show malformed UTF-8."""
    if pa.types.is_dictionary(held):
        return to_bytes_type(held.value_type)
    if is_list(held):
        return pa.large_list(to_bytes_type(held.value_type))
    return pa.large_binary() if is_text(held) else held


def null_mask(array: pa.Array) -> np.ndarray:
    """Return where an array is null, bool [n]."""
    return mask_to_numpy(array.is_null())


def string_parts(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets (int32 or int64 [n + 1]) and bytes (uint8) of a string or binary array.

    Value i is ``bytes[offsets[i]:offsets[i + 1]]``; nulls are ignored. The first offset of a slice
    is not 0.
    """
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    kind = np.dtype(np.int64 if wide else np.int32)
    _, offsets, data = array.buffers()
    if not len(array):  # then Arrow allows an array without offsets
        return np.zeros(1, kind), np.empty(0, np.uint8)
    numbers = np.frombuffer(offsets, kind, len(array) + 1, array.offset * kind.itemsize)
    return numbers, np.frombuffer(data if data is not None else b"", np.uint8)


def string_array(offsets: np.ndarray, data: np.ndarray) -> pa.StringArray | pa.LargeStringArray:
    """Make a string array without nulls from UTF-8 bytes and offsets [n + 1].

    int32 offsets make a StringArray, int64 offsets a LargeStringArray.
    """
    kind = pa.LargeStringArray if offsets.dtype == np.int64 else pa.StringArray
    return kind.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(data))


def to_offsets(lengths: np.ndarray) -> np.ndarray:
    """Return the offsets, int64 [n + 1] from 0, of lists or texts with the given lengths [n]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def strings(values: Sequence[str]) -> pa.StringArray:
    """Make a string array of a few strings (``pa.array`` imports pandas)."""
    joined = "".join(values)
    data = joined.encode()
    is_ascii = len(data) == len(joined)  # then lengths in characters are lengths in bytes
    lengths = map(len, values if is_ascii else [value.encode() for value in values])
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(np.fromiter(lengths, np.int32, len(values)), out=offsets[1:])
    return string_array(offsets, np.frombuffer(data, np.uint8))


def blank_texts(texts: pa.Array, mask: np.ndarray) -> pa.StringArray:
    """Replace texts by "" where ``mask``, bool [n], is set.

    Arrow's function for this, ``pc.if_else``, would make an array with nulls.
    """
    if not mask.any():
        return texts
    offsets, data = string_parts(texts)
    lengths = np.diff(offsets)
    kept_bytes = data[offsets[0] : offsets[-1]][np.repeat(~mask, lengths)]
    lengths[mask] = 0
    kept_offsets = np.zeros(len(offsets), np.int32)
    np.cumsum(lengths, out=kept_offsets[1:])
    return string_array(kept_offsets, kept_bytes)


def is_one_of(texts: pa.Array, wanted: Sequence[str], *, trimmed: bool = False) -> np.ndarray:
    """Return a mask of the texts that are one of the wanted ones, bool [n].

    Args:
        texts: String or binary array without nulls; UTF-8.
        wanted: The texts to find.
        trimmed: Whether ``texts`` have been trimmed; ``wanted`` are then trimmed, too.
    """
    import pyarrow.compute as pc

    among = strings([text.strip(" \t") if trimmed else text for text in wanted])
    return mask_to_numpy(pc.is_in(texts, value_set=among.cast(texts.type)))


def check_valid(data: pa.Table | pa.ChunkedArray | pa.Array, what: str) -> None:
    """Check that Arrow data from a caller has valid offsets, indices and UTF-8.

    Using invalid data could crash the process. The check costs nothing for numbers, and 10 ms for
    2 M texts or lists.

    Raises:
        SchemaError: The data is not valid.
    """
    try:
        data.validate(full=True)
    except pa.ArrowInvalid as error:
        raise SchemaError(f"{what}: not valid Arrow data: {error}", "create it again") from None


def mark_begins(values: np.ndarray) -> np.ndarray:
    """Return where values [n] differ from their predecessor, bool [n]; the first value does."""
    return np.append(np.ones(min(len(values), 1), bool), values[1:] != values[:-1])
