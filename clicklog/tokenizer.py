"""From the bytes of a tab-separated log to typed columns, checking every field.

One pass, compiled by numba without the interpreter lock: threads of one process parse in parallel.
"""

from __future__ import annotations

import dataclasses

import numba
import numpy as np

from clicklog.spec import FeatureSpec

#: Bad rows of a block that are described; further ones are only counted.
DESCRIBED_BAD_ROWS = 100

_TAB, _NEWLINE, _RETURN, _MINUS = 9, 10, 13, 45
_BAD_LABEL, _BAD_INTEGER, _BIG_INTEGER, _BAD_HEX, _BAD_FIELD_COUNT = 1, 2, 3, 4, 5


@dataclasses.dataclass(frozen=True)
class BadRow:
    """A row that breaks the spec.

    Attributes:
        line: index of the line within the parsed bytes, from 0.
        what: which column holds which value, and what belongs there.
    """

    line: int
    what: str


@dataclasses.dataclass
class RawRows:
    """Typed columns of ``n`` well-formed rows, in the order of the file.

    Attributes:
        label: uint8 [n], 0 or 1; None for a log without a label column.
        dense: int32 [dense columns, n]; 0 where missing.
        dense_missing: uint64 [n], bit j set where dense column j is missing.
        categorical: uint32 [categorical columns, n]; 0 where missing.
        categorical_missing: uint64 [n], bit j set where categorical column j is missing.
        bad: the first bad rows; bad rows are in none of the columns.
        bad_count: how many bad rows there were.
    """

    label: np.ndarray | None
    dense: np.ndarray
    dense_missing: np.ndarray
    categorical: np.ndarray
    categorical_missing: np.ndarray
    bad: list[BadRow]
    bad_count: int

    def __len__(self) -> int:
        return self.dense_missing.shape[0]


def parse_rows(data: bytes | memoryview | np.ndarray, spec: FeatureSpec, *, label: bool) -> RawRows:
    """Parse whole lines.

    Args:
        data: lines, the last one with or without its newline; ``\\r\\n`` ends a line too.
        spec: the columns, in order. Categories are up to 8 hexadecimal digits, dense values 32-bit
            integers, labels 0 or 1; an empty field is missing (a label may not be).
        label: whether the rows begin with the label.
    """
    buffer = np.frombuffer(data, np.uint8)
    if len(buffer) and buffer[-1] != _NEWLINE:
        buffer = np.append(buffer, np.uint8(_NEWLINE))
    lines = int(np.count_nonzero(buffer == _NEWLINE))
    dense_count, categorical_count = len(spec.dense), len(spec.categorical)
    labels = np.empty(lines if label else 0, np.uint8)
    dense = np.zeros((dense_count, lines), np.int32)
    categorical = np.zeros((categorical_count, lines), np.uint32)
    missing = np.zeros((2, lines), np.uint64)
    bad = np.zeros((DESCRIBED_BAD_ROWS, 5), np.int64)
    rows, bad_count = _parse(buffer, label, labels, dense, categorical, missing, bad)
    names = spec.columns if label else spec.columns[1:]
    described = [_describe(buffer, names, *map(int, entry)) for entry in bad[:bad_count]]
    return RawRows(
        label=labels[:rows] if label else None,
        dense=dense[:, :rows],
        dense_missing=missing[0, :rows],
        categorical=categorical[:, :rows],
        categorical_missing=missing[1, :rows],
        bad=described,
        bad_count=bad_count,
    )


def _describe(
    buffer: np.ndarray, names: list[str], line: int, code: int, column: int, begin: int, end: int
) -> BadRow:
    if code == _BAD_FIELD_COUNT:
        return BadRow(line, f"{column} fields instead of {len(names)}")
    value = bytes(buffer[begin : min(end, begin + 40)]).decode("utf-8", "replace")
    expected = {
        _BAD_LABEL: "a label is 0 or 1",
        _BAD_INTEGER: "an integer is needed, or nothing",
        _BIG_INTEGER: "it does not fit 32 bits",
        _BAD_HEX: "1 to 8 hexadecimal digits are needed, or nothing",
    }[code]
    return BadRow(line, f"column {names[column]}: {value!r}: {expected}")


@numba.njit(nogil=True, cache=True)
def _ends_field(buffer, at):
    byte = buffer[at]
    return byte == _TAB or byte == _NEWLINE or (byte == _RETURN and buffer[at + 1] == _NEWLINE)


@numba.njit(nogil=True, cache=True)
def _parse_integer(buffer, at):
    """(value, position after it, error code)"""
    negative = buffer[at] == _MINUS
    if negative:
        at += 1
    value = np.int64(0)
    digits = 0
    while 48 <= buffer[at] <= 57:
        if digits < 12:  # enough to see that it is too large, too few to overflow
            value = value * 10 + (np.int64(buffer[at]) - 48)
        digits += 1
        at += 1
    if digits == 0 or not _ends_field(buffer, at):
        return np.int32(0), at, _BAD_INTEGER
    if negative:
        value = -value
    if value < -2147483648 or value > 2147483647 or digits > 12:
        return np.int32(0), at, _BIG_INTEGER
    return np.int32(value), at, 0


@numba.njit(nogil=True, cache=True)
def _parse_hex(buffer, at):
    """(value, position after it, error code)"""
    value = np.uint32(0)
    digits = 0
    while True:
        byte = buffer[at]
        if 48 <= byte <= 57:
            digit = np.uint32(byte - 48)
        elif 97 <= byte <= 102:
            digit = np.uint32(byte - 87)
        elif 65 <= byte <= 70:
            digit = np.uint32(byte - 55)
        else:
            break
        value = np.uint32((value << np.uint32(4)) | digit)
        digits += 1
        at += 1
    if digits == 0 or digits > 8 or not _ends_field(buffer, at):
        return np.uint32(0), at, _BAD_HEX
    return value, at, 0


@numba.njit(nogil=True, cache=True)
def _parse(buffer, has_label, labels, dense, categorical, missing, bad):
    """Fill the columns; (rows, bad rows). ``buffer`` ends with a newline."""
    dense_begin = 1 if has_label else 0
    categorical_begin = dense_begin + dense.shape[0]
    columns = categorical_begin + categorical.shape[0]
    row = 0
    bad_count = 0
    line = 0
    at = 0
    while at < len(buffer):
        line_begin = at
        field_begin = at
        column = 0
        code = 0
        dense_missing = np.uint64(0)
        categorical_missing = np.uint64(0)
        while column < columns:
            field_begin = at
            if column >= categorical_begin:
                j = column - categorical_begin
                if _ends_field(buffer, at):
                    categorical_missing |= np.uint64(1) << np.uint64(j)
                    categorical[j, row] = 0
                else:
                    value, at, code = _parse_hex(buffer, at)
                    categorical[j, row] = value
            elif column >= dense_begin:
                j = column - dense_begin
                if _ends_field(buffer, at):
                    dense_missing |= np.uint64(1) << np.uint64(j)
                    dense[j, row] = 0
                else:
                    count, at, code = _parse_integer(buffer, at)
                    dense[j, row] = count
            elif (buffer[at] == 48 or buffer[at] == 49) and _ends_field(buffer, at + 1):
                labels[row] = buffer[at] - 48
                at += 1
            else:
                code = _BAD_LABEL
            if code != 0:
                break
            if buffer[at] == _RETURN:
                at += 1
            column += 1
            if (buffer[at] == _NEWLINE) != (column == columns):
                code = _BAD_FIELD_COUNT
                break
            at += 1
        if code == 0:
            missing[0, row] = dense_missing
            missing[1, row] = categorical_missing
            row += 1
        else:
            line_end = at
            while buffer[line_end] != _NEWLINE:
                line_end += 1
            at = line_end + 1
            if bad_count < bad.shape[0]:
                fields = 1
                for i in range(line_begin, line_end):
                    if buffer[i] == _TAB:
                        fields += 1
                field_end = field_begin
                while field_end < line_end and not _ends_field(buffer, field_end):
                    field_end += 1
                bad[bad_count, 0] = line
                # A wrong number of fields explains any other error of the row.
                bad[bad_count, 1] = code if fields == columns else _BAD_FIELD_COUNT
                bad[bad_count, 2] = column if fields == columns else fields
                bad[bad_count, 3] = field_begin
                bad[bad_count, 4] = field_end
            bad_count += 1
        line += 1
    return row, bad_count
