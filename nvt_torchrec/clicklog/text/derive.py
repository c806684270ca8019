"""Derived columns: parts of a time, ages, buckets, logarithms, crosses; and keys of splits.

Readers call :func:`derive` for each block, and inference for each request, so that a derived column
is like one of the file for everything that follows. Each value depends on its own row only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import blanked, string_parts, strings
from nvt_torchrec.base.hashing import mix
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.reading import CROSS_SEPARATOR, Derivation
from nvt_torchrec.formats.feature_spec.times import parse_iso

#: Microseconds.
HOUR = 3_600_000_000
DAY = 24 * HOUR
#: 1970-01-01 was a Thursday, and Monday is 0.
_FIRST_WEEKDAY = 3
#: Above this, :func:`log_square` takes the logarithm, so that 0, 1 and 2 stay apart.
LEAST_LOGARITHM = 2


def hour_of_day(times: np.ndarray) -> np.ndarray:
    """Return 0 to 23."""
    return times // HOUR % 24  # NumPy rounds down, also below 0


def weekday_of(times: np.ndarray) -> np.ndarray:
    """Return 0 for Monday to 6 for Sunday."""
    return (times // DAY + _FIRST_WEEKDAY) % 7


def day_of_month(times: np.ndarray) -> np.ndarray:
    """Return 1 to 31."""
    days = _days(times)
    return (days - days.astype("M8[M]").astype("M8[D]")).astype(np.int64) + 1


def month_of_year(times: np.ndarray) -> np.ndarray:
    """Return 1 to 12."""
    return _days(times).astype("M8[M]").astype(np.int64) % 12 + 1


def _days(times: np.ndarray) -> np.ndarray:
    return (times // DAY).astype("M8[D]")


_PARTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "hour": hour_of_day,
    "weekday": weekday_of,
    "day": day_of_month,
    "month": month_of_year,
}


def derive(
    how: Derivation, sources: Sequence[np.ndarray | pa.StringArray], missing: np.ndarray
) -> np.ndarray | pa.StringArray:
    """Compute a column; where it is missing, its values are 0 or "".

    Args:
        how: The rule.
        sources: The values [n] of its sources, of the raw type that the rule reads.
        missing: bool [n], where any source is missing.
    """
    if how.kind == "cross":
        return cross(sources[0], sources[1], missing)
    first = sources[0]
    if how.kind in _PARTS:
        values = _PARTS[how.kind](first)
    elif how.kind == "age":
        end = parse_iso(how.reference, "reference") if len(sources) == 1 else first
        values = (end - sources[-1]) / DAY
    elif how.kind == "bucket":
        values = np.searchsorted(np.array(how.boundaries, np.float64), first, side="right")
    else:
        values = log_square(first)
    values[missing] = 0
    return values.astype(RAW_TYPES[how.gives].dtype, copy=False)


def log_square(numbers: np.ndarray) -> np.ndarray:
    """Return ⌊(ln x)²⌋ of numbers above 2, and others without their fraction, int64 [n].

    So the winners of the Criteo challenge made categories of its integers (github.com/ycjuan/
    kaggle-2014-criteo), and so does FuxiCTR's ``convert_to_bucket``, with which BARS measures
    Criteo_x4. Unlike the winners, both keep no mark by which ⌊(ln 3)²⌋ = 1 differs from 1. Numbers
    below the least of raw type int count as that.
    """
    large = numbers > LEAST_LOGARITHM
    plain = np.maximum(np.trunc(np.where(large, 0, numbers)), RAW_TYPES["int"].least)
    squares = np.floor(np.log(np.where(large, numbers, 1.0)) ** 2)
    return np.where(large, squares, plain).astype(np.int64)


def cross(first: pa.StringArray, second: pa.StringArray, missing: np.ndarray) -> pa.StringArray:
    """Join the texts of two columns; "" where either is missing."""
    joined = pc.binary_join_element_wise(first, second, strings([CROSS_SEPARATOR])[0])
    return blanked(joined, missing)


#: Of FNV-1a (Fowler, Noll and Vo), whose low bits are mixed once more, by MurmurHash3's finalizer.
_BASIS, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)


def hash_texts(values: pa.StringArray) -> np.ndarray:
    """Hash strings [n]; int64 [n]. The hash of a text never changes between versions."""
    offsets, data = string_parts(values)
    return _hash_texts(offsets, data).view(np.int64)


@compiled()
def _hash_texts(offsets, data):
    hashes = np.empty(len(offsets) - 1, np.uint64)
    for i in range(len(hashes)):
        hashed = _BASIS
        for at in range(offsets[i], offsets[i + 1]):
            hashed = (hashed ^ np.uint64(data[at])) * _PRIME
        hashes[i] = mix(hashed)
    return hashes
