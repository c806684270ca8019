"""Convert fields of text to values of a raw type, checking each.

A field is a range of bytes; an empty field is a missing value. Numba compiles the loops, which run
without the interpreter lock. Rare cases (numbers beyond float64, invalid UTF-8) are left to Python.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numba
import numpy as np
import pyarrow as pa

from clicklog.arrays import to_numpy
from clicklog.kernels import compiled
from clicklog.rows import CategoryValues, Jagged
from clicklog.spec.raw_types import RAW_TYPES
from clicklog.strings import string_array
from clicklog.text.field_errors import (
    BAD_FLOAT,
    BAD_HEX,
    BAD_INTEGER,
    BAD_LABEL,
    BAD_UTF8,
    EMPTY_ITEM,
    NOT_FINITE,
    OUT_OF_RANGE,
    quote_field,
)

#: Value of each byte as a hexadecimal digit; 255 for bytes that are not one. A table, because
#: branches on the digits of hashes are mispredicted half of the time.
HEX_DIGIT = np.full(256, 255, np.uint8)
HEX_DIGIT[48:58] = np.arange(10)
HEX_DIGIT[65:71] = HEX_DIGIT[97:103] = np.arange(10, 16)


@dataclasses.dataclass(frozen=True)
class Converted:
    """A column of ``n`` rows, bad ones included.

    Attributes:
        values: see :class:`clicklog.rows.RawRows`; 0, "" or an empty list where missing or wrong.
        missing: bool [n].
        code: uint8 [n], 0 or the code of an error, see :mod:`clicklog.text.field_errors`.
        show: returns the wrong value of a row with a code, as Python writes it.
    """

    values: CategoryValues
    missing: np.ndarray
    code: np.ndarray
    show: Callable[[int], str]


@dataclasses.dataclass(frozen=True)
class Fields:
    """Fields of one column: ``data[begin[i]:end[i]]``; integers [n], and uint8 data."""

    data: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return len(self.begin)

    def show(self, row: int) -> str:
        """Return the field of a row as Python writes a string."""
        return quote_field(self.data[self.begin[row] : self.end[row]].tobytes())


def convert(fields: Fields, raw: str) -> Converted:
    """Convert single values of a raw type of :data:`RAW_TYPES`. Only a label may not be missing."""
    missing = fields.begin == fields.end
    code = np.zeros(len(fields), np.uint8)
    data, begin, end = fields.data, fields.begin, fields.end
    if raw == "string":
        return Converted(_strings(fields, code), missing, code, fields.show)
    kind = RAW_TYPES[raw]
    values = np.zeros(len(fields), kind.dtype)
    if raw == "float":
        values = _floats(fields, missing, code)
    elif raw == "hex32":
        _parse_hex(data, begin, end, values, code)
    elif raw == "label":
        _parse_labels(data, begin, end, values, code)
    else:
        _parse_ints(data, begin, end, kind.least, kind.most, OUT_OF_RANGE[raw], values, code)
    return Converted(values, missing, code, fields.show)


def convert_lists(fields: Fields, raw: str, separator: str) -> Converted:
    """Convert fields that hold lists of values. An empty field is a missing list."""
    offsets = _count_items(fields.data, fields.begin, fields.end, ord(separator))
    begin = np.empty(offsets[-1], np.int32)
    end = np.empty(offsets[-1], np.int32)
    _split_items(fields.data, fields.begin, fields.end, ord(separator), offsets, begin, end)
    items = convert(Fields(fields.data, begin, end), raw)
    items.code[items.missing] = EMPTY_ITEM
    return of_items(offsets, items)


def of_items(offsets: np.ndarray, items: Converted) -> Converted:
    """Make lists of converted items; a row has the code of its first wrong item."""
    lengths = np.diff(offsets)
    code = np.zeros(len(lengths), np.uint8)
    wrong = np.flatnonzero(items.code)[::-1]  # reversed: the first item of a row is written last
    rows = np.searchsorted(offsets, wrong, side="right") - 1
    code[rows] = items.code[wrong]
    item_of = dict(zip(rows.tolist(), wrong.tolist(), strict=True))
    values = Jagged(offsets, items.values)
    return Converted(values, lengths == 0, code, lambda row: items.show(item_of[row]))


def _strings(fields: Fields, code: np.ndarray) -> pa.StringArray:
    offsets, data = _gather(fields.data, fields.begin, fields.end)
    values = string_array(offsets, data)
    if not len(data) or int(data.max()) < 128:
        return values
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        for row in range(len(values)):
            try:
                data[offsets[row] : offsets[row + 1]].tobytes().decode()
            except UnicodeDecodeError:
                code[row] = BAD_UTF8
        good = np.where(code == 0, fields.end, fields.begin)
        return string_array(*_gather(fields.data, fields.begin, good))
    return values


def _floats(fields: Fields, missing: np.ndarray, code: np.ndarray) -> np.ndarray:
    """Parse fields as float64, correctly rounded."""
    _check_floats(fields.data, fields.begin, fields.end, code)
    present = ~missing & (code == 0)
    texts = string_array(*_gather(fields.data, fields.begin[present], fields.end[present]))
    try:
        numbers = to_numpy(texts.cast(pa.float64()))
    except pa.ArrowInvalid:  # beyond float64
        numbers = np.array([float(text) for text in texts.to_pylist()])
    values = np.zeros(len(fields), np.float64)
    values[present] = numbers
    code[np.abs(values) > RAW_TYPES["float"].most] = NOT_FINITE
    return values


@compiled()
def _gather(data, begin, end):
    """Copy the fields one after the other: int32 offsets [n + 1] and bytes."""
    offsets = np.zeros(len(begin) + 1, np.int32)
    for i in range(len(begin)):
        offsets[i + 1] = offsets[i] + (end[i] - begin[i])
    gathered = np.empty(offsets[-1], np.uint8)
    for i in range(len(begin)):
        to = offsets[i]
        for at in range(begin[i], end[i]):
            gathered[to] = data[at]
            to += 1
    return offsets, gathered


@compiled()
def _parse_ints(data, begin, end, low, high, too_big, values, code):
    for i in range(len(begin)):
        at, stop = begin[i], end[i]
        if at == stop:
            continue
        negative = data[at] == 45
        if negative:
            at += 1
        value = np.int64(0)
        big = False
        digits = at
        while at < stop and np.uint8(data[at] - 48) < 10:
            value = value * 10 + np.int64(data[at] - 48)
            big |= value >= 2**59  # kept, because further digits would wrap around
            value &= 2**59 - 1
            at += 1
        if at < stop or at == digits:
            code[i] = BAD_INTEGER
            continue
        if negative:
            value = -value
        if big or value < low or value > high:
            code[i] = too_big
        else:
            values[i] = value


@compiled()
def _parse_hex(data, begin, end, values, code):
    for i in range(len(begin)):
        value = np.uint32(0)
        wrong = end[i] - begin[i] > 8
        if not wrong:
            for at in range(begin[i], end[i]):
                digit = HEX_DIGIT[data[at]]
                wrong |= digit > 15
                value = np.uint32((value << np.uint32(4)) | np.uint32(digit & 15))
        if wrong:
            code[i] = BAD_HEX
        else:
            values[i] = value


@compiled()
def _parse_labels(data, begin, end, values, code):
    for i in range(len(begin)):
        at = begin[i]
        if end[i] - at == 1 and (data[at] == 48 or data[at] == 49):
            values[i] = data[at] - 48
        else:
            code[i] = BAD_LABEL


@numba.njit(inline="always")
def _digits(data, at, stop):
    while at < stop and np.uint8(data[at] - 48) < 10:
        at += 1
    return at


@compiled()
def _check_floats(data, begin, end, code):
    """Set a code for fields other than ``-?(D+(.D*)?|.D+)([eE][+-]?D+)?``, where D is a digit."""
    for i in range(len(begin)):
        at, stop = begin[i], end[i]
        if at == stop:
            continue
        if data[at] == 45:
            at += 1
        first = at
        at = _digits(data, at, stop)
        digits = at - first
        if at < stop and data[at] == 46:
            first = at + 1
            at = _digits(data, first, stop)
            digits += at - first
        good = digits > 0
        if good and at < stop and (data[at] | 32) == 101:
            at += 1
            if at < stop and (data[at] == 43 or data[at] == 45):
                at += 1
            first = at
            at = _digits(data, at, stop)
            good = at > first
        if not good or at < stop:
            code[i] = BAD_FLOAT


@compiled()
def _count_items(data, begin, end, separator):
    """Return offsets int64 [n + 1] of the items: separators + 1 in a field, 0 in an empty one."""
    offsets = np.zeros(len(begin) + 1, np.int64)
    for i in range(len(begin)):
        items = 0 if begin[i] == end[i] else 1
        for at in range(begin[i], end[i]):
            items += data[at] == separator
        offsets[i + 1] = offsets[i] + items
    return offsets


@compiled()
def _split_items(data, begin, end, separator, offsets, item_begin, item_end):
    for i in range(len(begin)):
        item = offsets[i]
        if item == offsets[i + 1]:
            continue
        item_begin[item] = begin[i]
        for at in range(begin[i], end[i]):
            if data[at] == separator:
                item_end[item] = at
                item += 1
                item_begin[item] = at + 1
        item_end[item] = end[i]
