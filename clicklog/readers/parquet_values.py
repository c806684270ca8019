"""Convert typed columns, of parquet or in memory, as a column of the file is to be read.

- Text is read as a text file's fields are, for every raw type and with every rule.
- Integers may be of any integer type, or floats without a fraction, which pandas makes of integers
  with missing values; NaN is a missing value. hex32 may be integers. Integers as strings are their
  decimal digits. Where a column has null texts that are numbers, these numbers are missing values.
- Labels and weights may be numbers or booleans; a label's texts are compared with the numbers they
  stand for, and ``true`` and ``false`` with booleans.
- Times may be timestamps (without a time zone: UTC), dates, or numbers if the format is one of
  numbers: since 1970, or a pattern of digits alone.

What would lose information is an error, or another type than the column's: a fraction as an
integer, a float as text.
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import null_mask, to_numpy
from nvt_torchrec.base.strings import string_parts
from nvt_torchrec.clicklog.text.convert import Converted, Fields, convert, of_items
from nvt_torchrec.clicklog.text.field_errors import (
    BAD_INTEGER,
    BAD_LABEL,
    BAD_WEIGHT,
    BEYOND_TIME,
    EMPTY_ITEM,
    LABEL_NUMBER,
    NULL_ITEM,
    OUT_OF_RANGE,
)
from nvt_torchrec.formats.spec.labels import LabelRule
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.spec.reading import Read
from nvt_torchrec.formats.spec.times import DIRECTIVES, EPOCHS

#: Raw types that numbers and booleans may be read as.
_NUMERIC = ("int32", "int", "float", "hex32", "label", "weight")
#: Microseconds of a unit of Arrow's timestamps; nanoseconds are divided.
_UNITS = {"s": 1_000_000, "ms": 1000, "us": 1}


def fits(held: pa.DataType, read: Read) -> bool:
    """Whether columns of a type can be read in a way; values may still be wrong."""
    types = pa.types
    if read.multi_hot:
        lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        item = dataclasses.replace(read, multi_hot=False)
        return types.is_null(held) or (
            any(one(held) for one in lists) and fits(held.value_type, item)
        )
    if types.is_dictionary(held):
        held = held.value_type
    if types.is_null(held) or _is_text(held):
        return True
    if types.is_timestamp(held) or types.is_date(held):
        return read.raw == "time"
    if read.raw == "time":
        pattern = _is_digits(read.time_format) and types.is_integer(held)
        numeric = types.is_integer(held) or types.is_floating(held)
        return pattern or (read.time_format in EPOCHS and numeric)
    if types.is_integer(held):
        return True
    if types.is_decimal(held):
        return read.raw in ("float", "label", "weight")
    return (types.is_floating(held) or types.is_boolean(held)) and read.raw in _NUMERIC


def wanted(read: Read) -> str:
    """What a column must be, for errors."""
    if read.raw == "label":
        return "a label (0 or 1)"
    return f"a list of raw type {read.raw}" if read.multi_hot else f"of raw type {read.raw}"


def type_remedy(held: pa.DataType, read: Read) -> str:
    """What to do about a column whose type does not fit."""
    change = ""
    others = [dataclasses.replace(read, raw=raw) for raw in ("int", "float")]
    if read.raw == "time":
        keys = [f'time_format = "{name}"' for name in EPOCHS]
        if fits(held, dataclasses.replace(read, time_format="epoch_s")):
            change = f"set {' or '.join(keys)} for column {read.source} in the spec, or "
    elif pa.types.is_timestamp(held) or pa.types.is_date(held):
        change = 'add derive = "hour", "weekday" … or "age" to the column, or '
    elif fits(held, dataclasses.replace(read, multi_hot=not read.multi_hot)):
        flag = str(not read.multi_hot).lower()
        change = f"set multi_hot = {flag} for column {read.source} in the spec, or "
    elif read.raw == "string" and fits(held, others[0]):
        change = f'set raw = "int" for column {read.source} in the spec if it holds integers, or '
    change = change or "change the column's raw type or multi_hot in the spec, or "
    return f"{change}rewrite the file"


def convert_array(array: pa.Array, read: Read) -> Converted:
    """Convert a column whose type fits."""
    return _lists(array, read) if read.multi_hot else _values(array, read)


def _is_text(held: pa.DataType) -> bool:
    types = pa.types
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    views = (types.is_string_view, types.is_binary_view)
    return any(one(held) for one in (*texts, *views))


def _is_digits(time_format: str) -> bool:
    """Whether a time format is a pattern of digits alone."""
    if not re.fullmatch("(%[a-zA-Z])+", time_format):
        return False
    return all(DIRECTIVES[name] for name in time_format[1::2])


def _plain(array: pa.Array) -> pa.Array:
    types = pa.types
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_string_view(array.type):
        return array.cast(pa.string())
    if types.is_binary_view(array.type):
        return array.cast(pa.binary())
    if types.is_decimal(array.type):  # Arrow's cast to float64 can be off by one ulp
        return array.cast(pa.string()).cast(pa.float64())
    return array


def _values(array: pa.Array, read: Read) -> Converted:
    """Convert single values."""
    array = _plain(array)
    if pa.types.is_null(array.type):
        array = array.cast(pa.string())
    if _is_text(array.type):
        return _texts(array, array, read)
    if read.raw == "string":
        return _texts(array, array.cast(pa.string()), read)
    if read.raw == "time":
        return _times(array, read)
    if read.raw == "label" and read.label is not None and read.label.positive:
        return _texts(array, *_label_texts(array, read))
    return _numbers(array, read)


def _texts(array: pa.Array, texts: pa.Array, read: Read) -> Converted:
    """Convert the texts of some values."""
    null = null_mask(texts)
    offsets, data = string_parts(texts)
    begin = offsets[:-1].copy()  # writable like those of text, so that loops are compiled once
    column = convert(Fields(data, begin, np.where(null, begin, offsets[1:])), read)
    if array is texts:
        show = lambda row: "None" if null[row] else column.show(row)  # noqa: E731
    else:
        show = lambda row: repr(array[row].as_py())  # noqa: E731
    return dataclasses.replace(column, show=show)


def _numbers(array: pa.Array, read: Read) -> Converted:
    """Convert numbers to numbers, labels or weights."""
    raw, integer = read.raw, pa.types.is_integer(array.type)
    numbers, null = _as_numbers(array, read.nulls)
    code = np.zeros(len(numbers), np.uint8)
    threshold = read.label.threshold if raw == "label" and read.label is not None else None
    if threshold is not None:
        values = (numbers >= threshold).astype(np.uint8)
        code[null] = LABEL_NUMBER
        values[null] = 0
    else:
        kind = RAW_TYPES[raw]
        wrong = (numbers < kind.least) | (numbers > kind.most)
        code[wrong] = OUT_OF_RANGE[raw]
        if raw not in ("float", "weight") and numbers.dtype == np.float64:
            broken = ~wrong & (numbers != np.floor(numbers))
            code[broken] = BAD_LABEL if raw == "label" else BAD_INTEGER
            wrong |= broken
        values = np.where(wrong, 0, numbers).astype(kind.dtype)
        if raw in ("label", "weight"):
            code[null] = BAD_LABEL if raw == "label" else BAD_WEIGHT

    def text(row: int) -> str:
        return str(array[row].as_py())

    return Converted(
        values, null, code, lambda row: repr(array[row].as_py()), text if integer else None
    )


def _as_numbers(array: pa.Array, nulls: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers, 0 where missing, as integers or float64; and where they are missing."""
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


def _label_texts(array: pa.Array, read: Read) -> tuple[pa.Array, Read]:
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
        return (
            str(pa.scalar(float(number)).cast(pa.string()))
            if type(number) is float
            else str(number)
        )

    changed = LabelRule(
        rule.name,
        rule.source,
        tuple(map(written, rule.positive)),
        tuple(map(written, rule.negative)),
    )
    if pa.types.is_floating(array.type):
        array = array.cast(pa.float64())
    return array.cast(pa.string()), dataclasses.replace(read, label=changed)


def _times(array: pa.Array, read: Read) -> Converted:
    """Convert timestamps, dates and numbers to microseconds since 1970."""
    held = array.type
    if _is_digits(read.time_format) and pa.types.is_integer(held):
        width = sum(DIRECTIVES[name] for name in read.time_format[1::2])
        texts = pc.utf8_lpad(array.cast(pa.string()), width, "0")  # of a year such as 09
        return _texts(array, texts, read)
    null = null_mask(array)
    if pa.types.is_date(held):
        array, unit = array.cast(pa.timestamp("ms")), 1000
    elif pa.types.is_timestamp(held):
        unit = _UNITS.get(held.unit, 0)
    else:
        numbers, null = _as_numbers(array, read.nulls)
        unit = EPOCHS[read.time_format]
    if pa.types.is_temporal(array.type):
        numbers = np.where(null, 0, to_numpy(array.view(pa.int64())))
    if unit == 0:
        numbers, unit = numbers // 1000, 1
    kind = RAW_TYPES["time"]
    wrong = (numbers < kind.least // unit) | (numbers > kind.most // unit)
    numbers = np.where(wrong, 0, numbers)
    if numbers.dtype == np.float64:
        numbers = np.floor(numbers * unit)
    else:
        numbers = numbers.astype(np.int64) * unit
    code = np.where(wrong, BEYOND_TIME, 0).astype(np.uint8)
    return Converted(numbers.astype(np.int64), null, code, lambda row: str(array[row]))


def _lists(array: pa.Array, read: Read) -> Converted:
    """Convert lists; null and empty lists are missing values, a null in a list is an error."""
    if pa.types.is_null(array.type):
        array = array.cast(pa.list_(pa.string()))
    lengths = np.where(null_mask(array), 0, to_numpy(pc.list_value_length(array)))
    flat = _plain(array.flatten())
    items = _values(flat, read)
    null = null_mask(flat)
    items.code[items.missing & (items.code == 0)] = EMPTY_ITEM
    items.code[null] = NULL_ITEM
    return of_items(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), items)
