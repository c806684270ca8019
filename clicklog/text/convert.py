"""Convert fields of text to values of a raw type, checking each.

A field is a range of bytes; an empty field is a missing value. Numba compiles the loops, which run
without the interpreter lock. Rare cases (numbers beyond float64, invalid UTF-8) are left to Python.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.base.strings import string_array
from nvt_torchrec.clicklog.text.field_errors import (
    BAD_FLOAT,
    BAD_HEX,
    BAD_INTEGER,
    BAD_LABEL,
    BAD_UTF8,
    BAD_WEIGHT,
    EMPTY_ITEM,
    LABEL_NUMBER,
    NULL_ITEM,
    OTHER_LABEL,
    OUT_OF_RANGE,
    quote_field,
)
from nvt_torchrec.clicklog.text.field_rules import find_texts, trim
from nvt_torchrec.clicklog.text.numbers import (
    exchange,
    gather,
    parse_floats,
    parse_ints,
    parse_lenient_ints,
    ungroup,
)
from nvt_torchrec.clicklog.text.time_fields import parse_times
from nvt_torchrec.formats.rows import CategoryValues, Jagged
from nvt_torchrec.formats.spec.labels import LabelRule
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.spec.reading import Read

#: Raw types of numbers whose digits may be grouped, and the code of a wrong group.
_SYNTAX = {"int32": BAD_INTEGER, "int": BAD_INTEGER, "float": BAD_FLOAT}

#: Value of each byte as a hexadecimal digit; 255 for bytes that are not one. A table, because
#: branches on the digits of hashes are mispredicted half of the time.
HEX_DIGIT = np.full(256, 255, np.uint8)
HEX_DIGIT[48:58] = np.arange(10)
HEX_DIGIT[65:71] = HEX_DIGIT[97:103] = np.arange(10, 16)


@dataclasses.dataclass(frozen=True)
class Converted:
    """A column of ``n`` rows, bad ones included.

    Attributes:
        values: see :class:`formats.rows.RawRows`; 0, "" or an empty list where missing or wrong.
        missing: bool [n].
        code: uint8 [n], 0 or the code of an error, see :mod:`clicklog.text.field_errors`.
        show: returns the wrong value of a row with a code, as Python writes it.
        text: of text, returns the whole wrong field of a row with a code; None: not from text.
    """

    values: CategoryValues
    missing: np.ndarray
    code: np.ndarray
    show: Callable[[int], str]
    text: Callable[[int], str] | None = None


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

    def text(self, row: int) -> str:
        """Return the field of a row; bytes that are not UTF-8 become lone surrogates."""
        field = self.data[self.begin[row] : self.end[row]].tobytes()
        return field.decode("utf-8", "surrogateescape")


def convert(fields: Fields, read: Read) -> Converted:
    """Convert single values as a column of the file is to be read.

    Only a label and a weight may not be missing. Of ``read``, the source and ``multi_hot`` are
    ignored.
    """
    raw, data, begin, end = read.raw, fields.data, fields.begin, fields.end
    if read.trim:
        begin, end = trim(data, begin, end)
    if read.nulls:
        end = np.where(find_texts(data, begin, end, read.nulls, trimmed=read.trim), begin, end)
    missing = begin == end
    code = np.zeros(len(fields), np.uint8)
    if raw == "string":
        return Converted(_strings(data, begin, end, code), missing, code, fields.show, fields.text)
    grouped = None
    if read.thousands and raw in _SYNTAX:
        grouped = ungroup(data, begin, end, read.thousands)
        if grouped:
            data, begin, end, wrong = grouped
    texts = raw == "label" and read.label is not None and read.label.positive
    if read.decimal == "," and not texts:
        data, begin, end = exchange(data, begin, end)
    if raw == "label":
        values = _labels(data, begin, end, read.label, missing, code)
        return Converted(values, missing, code, fields.show, fields.text)
    kind = RAW_TYPES[raw]
    values = np.zeros(len(fields), kind.dtype)
    if raw == "float":
        values = parse_floats(data, begin, end, code, lenient=read.lenient)
    elif raw == "weight":
        values = parse_floats(data, begin, end, code)
        code[missing | (code == BAD_FLOAT) | (values < 0)] = BAD_WEIGHT
        values[code != 0] = 0
    elif raw == "time":
        values = parse_times(data, begin, end, read.time_format, code)
    elif raw == "hex32":
        _parse_hex(data, begin, end, values, code)
    else:
        limits = (int(kind.least), int(kind.most), OUT_OF_RANGE[raw])
        parse_ints(data, begin, end, *limits, values, code)
        if read.lenient and code.any():
            parse_lenient_ints(data, begin, end, *limits, values, code)
    if grouped:
        code[wrong] = _SYNTAX[raw]
    return Converted(values, missing, code, fields.show, fields.text)


def convert_lists(fields: Fields, read: Read, separator: str) -> Converted:
    """Convert fields that hold lists of values. An empty field or a null text is a missing list.

    Spaces are removed around a list and around each value. Within a list, an empty value and a null
    text are errors.
    """
    data, begin, end = fields.data, fields.begin, fields.end
    if read.trim:
        begin, end = trim(data, begin, end)
    if read.nulls:
        end = np.where(find_texts(data, begin, end, read.nulls, trimmed=read.trim), begin, end)
    offsets = _count_items(data, begin, end, ord(separator))
    first = np.empty(offsets[-1], np.int32)
    last = np.empty(offsets[-1], np.int32)
    _split_items(data, begin, end, ord(separator), offsets, first, last)
    if read.trim:
        first, last = trim(data, first, last)
    items = convert(Fields(data, first, last), read)
    items.code[items.missing] = NULL_ITEM
    items.code[first == last] = EMPTY_ITEM
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
    return Converted(
        values,
        lengths == 0,
        code,
        lambda row: items.show(item_of[row]),
        items.text and (lambda row: items.text(item_of[row])),
    )


def _strings(
    text: np.ndarray, begin: np.ndarray, end: np.ndarray, code: np.ndarray
) -> pa.StringArray:
    offsets, data = gather(text, begin, end)
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
        return string_array(*gather(text, begin, np.where(code == 0, end, begin)))
    return values


def _labels(
    data: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    rule: LabelRule | None,
    missing: np.ndarray,
    code: np.ndarray,
) -> np.ndarray:
    """Convert fields to labels by a rule; None: of 0 and 1."""
    values = np.zeros(len(begin), np.uint8)
    if rule is not None and rule.positive:
        values[find_texts(data, begin, end, rule.positive, trimmed=rule.trim)] = 1
        if rule.negative:
            negative = find_texts(data, begin, end, rule.negative, trimmed=rule.trim)
            code[(values == 0) & ~negative] = OTHER_LABEL
        code[missing] = OTHER_LABEL
    elif rule is not None and rule.threshold is not None:
        numbers = parse_floats(data, begin, end, code)
        code[missing | (code == BAD_FLOAT)] = LABEL_NUMBER
        values[(numbers >= rule.threshold) & (code == 0)] = 1
    else:
        _parse_labels(data, begin, end, values, code)
    return values


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
        size = end[i] - at
        good = size == 1 or (size == 3 and data[at + 1] == 46 and data[at + 2] == 48)  # 1.0
        if good and (data[at] == 48 or data[at] == 49):
            values[i] = data[at] - 48
        else:
            code[i] = BAD_LABEL


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
