"""Arrays of distinct categories: int64 (raw hex32 and int), or strings without nulls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import mask_to_numpy, to_arrow, to_numpy
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.strings import strings
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES

#: int64 [n], or a string array [n] without nulls (32-bit offsets).
Values: TypeAlias = np.ndarray | pa.StringArray


def empty_values(raw: str) -> Values:
    """Return no values of a raw type."""
    return strings([]) if RAW_TYPES[raw].is_text else np.empty(0, np.int64)


def is_text(values: Values) -> bool:
    """Return whether values are strings."""
    return isinstance(values, pa.Array)


def take(values: Values, indices: np.ndarray) -> Values:
    """Return the values at indices."""
    return values.take(to_arrow(indices)) if is_text(values) else values[indices]


def concatenate(parts: Sequence[Values], column: str) -> Values:
    """Join values of one raw type.

    Raises:
        SettingsError: they are strings of more than 2 GiB, of the column that is named.
    """
    if not is_text(parts[0]):
        return np.concatenate(parts)
    try:
        return pa.concat_arrays(parts)
    except pa.ArrowInvalid:
        raise SettingsError(
            f"column {column}: {sum(map(len, parts))} different strings of more than 2 GiB in all",
            "set hash_buckets for this column in the spec, and fit again",
        ) from None


def replaced(values: Values, indices: np.ndarray, others: Values, column: str) -> Values:
    """Return the values with others in the place of those at the indices."""
    if is_text(values):
        place = np.arange(len(values))
        place[indices] = len(values) + np.arange(len(others))
        return take(concatenate([values, others], column), place)
    result = values.copy()
    result[indices] = others
    return result


def order_by_value(values: Values) -> np.ndarray:
    """Return the indices that sort values: numbers by size, strings by their UTF-8 bytes."""
    if not is_text(values):
        return np.argsort(values, kind="stable")
    import pyarrow.compute as pc  # slow to import, and only needed for strings

    return to_numpy(pc.array_sort_indices(values)).astype(np.int64)


def differ_from_next(ordered: Values) -> np.ndarray:
    """Return where a value differs from the one behind it: bool [n − 1]."""
    if not is_text(ordered):
        return ordered[1:] != ordered[:-1]
    import pyarrow.compute as pc

    return mask_to_numpy(pc.not_equal(ordered[1:], ordered[:-1]))


def order_by(keys: Sequence[np.ndarray], values: Values) -> np.ndarray:
    """Return the indices that sort by ascending keys, the most important one first, then by value.

    Args:
        keys: int64 [n] each.
        values: [n], distinct.
    """
    by_value = order_by_value(values)
    keys = [key[by_value] for key in keys]
    return by_value[np.lexsort(keys[::-1])] if keys else by_value
