"""Numbers of Arrow arrays as raw types, and as the texts of a label's rule."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import null_mask, to_numpy
from nvt_torchrec.formats.spec.raw_types.base import RANGE, SYNTAX, Parsed, RawType

if TYPE_CHECKING:
    from nvt_torchrec.formats.spec.reading import Read


def any_numbers(array: pa.Array, read: Read, kind: RawType) -> Parsed:
    """Convert numbers that may have a fraction."""
    numbers, missing = as_numbers(array, read.nulls)
    wrong = (numbers < kind.least) | (numbers > kind.most)
    values = np.where(wrong, 0, numbers).astype(kind.dtype)
    return Parsed(values, missing, np.where(wrong, RANGE, 0).astype(np.uint8))


def whole_numbers(array: pa.Array, read: Read, kind: RawType) -> Parsed:
    """Convert numbers that may have no fraction."""
    numbers, missing = as_numbers(array, read.nulls)
    wrong = (numbers < kind.least) | (numbers > kind.most)
    code = np.where(wrong, RANGE, 0).astype(np.uint8)
    if numbers.dtype == np.float64:
        broken = ~wrong & (numbers != np.floor(numbers))
        code[broken] = SYNTAX
        wrong |= broken
    return Parsed(np.where(wrong, 0, numbers).astype(kind.dtype), missing, code)


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


def label_texts(array: pa.Array, read: Read) -> tuple[pa.Array, Read]:
    """Return values as text, and the rule with its texts as such values are written."""
    rule = read.label
    assert rule is not None
    boolean = pa.types.is_boolean(array.type)
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)

    def written(text: str) -> str:
        text = text.strip()
        if boolean:
            return {"1": "true", "0": "false"}.get(text, text.lower())
        number = _number(text)
        if number is None:
            return text
        if float(number).is_integer() and abs(number) < 2**53:
            number = int(number)
        if isinstance(number, float):
            return str(pa.scalar(number).cast(pa.string()))
        return str(number)

    changed = dataclasses.replace(
        rule,
        positive=tuple(map(written, rule.positive)),
        negative=tuple(map(written, rule.negative)),
        trim=False,
    )
    if pa.types.is_floating(array.type):
        array = array.cast(pa.float64())
    return array.cast(pa.string()), dataclasses.replace(read, label=changed)
