"""Numbers of Arrow arrays as raw types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import null_mask, to_numpy
from nvt_torchrec.formats.spec.raw_types.base import RANGE, SYNTAX, Parsed, RawType

if TYPE_CHECKING:
    from nvt_torchrec.formats.spec.reading import Read


def parse_numbers(array: pa.Array, read: Read, kind: RawType) -> Parsed:
    """Convert numbers, which may have a fraction unless the raw type is one of integers."""
    numbers, missing = as_numbers(array, read.nulls)
    wrong = (numbers < kind.least) | (numbers > kind.most)
    code = np.where(wrong, RANGE, 0).astype(np.uint8)
    if kind.is_whole and numbers.dtype == np.float64:
        code[~wrong & (numbers != np.floor(numbers))] = SYNTAX
    return Parsed(np.where(code != 0, 0, numbers).astype(kind.dtype), missing, code)


def as_numbers(array: pa.Array, nulls: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers, 0 where missing, as integers or float64; and where they are missing.

    Where the column has null texts that are numbers, these numbers are missing values.
    """
    null = null_mask(array)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if not pa.types.is_integer(array.type):
        array = array.cast(pa.float64())
    numbers = np.where(null, 0, to_numpy(array))  # Arrow's fill_null imports pandas
    if numbers.dtype == np.float64:
        null = null | np.isnan(numbers)
    for number in map(_number, nulls):
        if number is not None:
            null = null | (numbers == number)
    return np.where(null, numbers.dtype.type(0), numbers), null


def is_number_of(numbers: np.ndarray, texts: Sequence[str]) -> np.ndarray:
    """Return which numbers are those of some texts, bool [n]; ``true`` is 1, ``false`` 0."""
    booleans = {"true": 1, "false": 0}
    wanted = [booleans.get(text.strip().lower(), _number(text)) for text in texts]
    return np.isin(numbers, [number for number in wanted if number is not None])


def _number(text: str) -> int | float | None:
    """Return the number that a text is, or None."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return None if math.isnan(number) else number
