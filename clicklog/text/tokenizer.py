"""Parse the bytes of a log in Criteo's format to typed columns, checking every field.

One compiled pass without the interpreter lock, so that threads parse in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.clicklog.text.convert import describe_count, describe_value, show_field
from nvt_torchrec.clicklog.text.fast_rows import count_newlines, longest_row, parse_row
from nvt_torchrec.clicklog.text.remedies import correct_or, line_remedy, value_remedy
from nvt_torchrec.formats.rows import DESCRIBED_BAD_ROWS, BadRow, RawRows, describes
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.raw_types.base import FIELD_COUNT, HEX_DIGIT, RANGE, SYNTAX
from nvt_torchrec.formats.spec.reading import Read

_TAB, _NEWLINE, _RETURN, _MINUS = 9, 10, 13, 45
#: Numbers stop growing here, however many digits follow.
_BEYOND_INT32 = np.int64(2**40)


def parse_criteo(
    data: bytes | memoryview | np.ndarray,
    spec: FeatureSpec,
    *,
    label: bool,
    reject: bool | int = False,
) -> RawRows:
    """Parse whole lines of a log in Criteo's format.

    Args:
        data: lines, the last one with or without its newline; ``\\r\\n`` ends a line too.
        spec: the columns, in order; its ``is_criteo_format`` is true. Categories are up to 8
            hexadecimal digits, dense values 32-bit integers, labels 0 or 1, also as 0.0 and 1.0. An
            empty field is a missing value, which a label may not be.
        label: whether the rows begin with the label.
        reject: describe every bad row, not only the first ``DESCRIBED_BAD_ROWS``.
    """
    buffer = np.frombuffer(data, np.uint8)
    if len(buffer) and buffer[-1] != _NEWLINE:
        buffer = np.append(buffer, np.uint8(_NEWLINE))
    buffer.flags.writeable = False  # one type of array, so that loops are compiled once
    lines = count_newlines(buffer)
    dense_count, categorical_count = len(spec.dense), len(spec.categorical)
    labels = np.empty(lines if label else 0, np.uint8)
    dense = np.empty((dense_count, lines), np.int32)
    categorical = np.empty((categorical_count, lines), np.uint32)
    missing = np.empty((2, lines), np.uint64)
    line = np.empty(lines, np.int64)
    bad = np.zeros((DESCRIBED_BAD_ROWS, 7), np.int64)
    columns = (labels, dense, categorical, missing, line)
    longest = longest_row(dense_count, categorical_count)
    rows, bad_count = _parse(buffer, label, longest, *columns, bad)
    if bad_count > len(bad) and describes(reject, bad_count):  # rare enough to parse twice
        bad = np.zeros((bad_count, 7), np.int64)
        _parse(buffer, label, longest, *columns, bad)
    reads = spec.read_plan(label=label).reads
    described = [_describe(buffer, spec, reads, *map(int, entry)) for entry in bad[:bad_count]]
    return RawRows(
        label=labels[:rows] if label else None,
        dense=dense[:, :rows],
        dense_missing=missing[:1, :rows],
        categorical=categorical[:, :rows],
        categorical_missing=missing[1:, :rows],
        line=line[:rows],
        bad=described,
        bad_count=bad_count,
        lines=lines,
    )


def _field(buffer: np.ndarray, begin: int, end: int, *, last: bool) -> bytes:
    """Return a field, the last one without the ``\\r`` of the line's end."""
    field = bytes(buffer[begin:end])
    return field.removesuffix(b"\r") if last else field


def _describe(
    buffer: np.ndarray,
    spec: FeatureSpec,
    reads: Sequence[Read],
    line: int,
    code: int,
    column: int,
    begin: int,
    end: int,
    line_begin: int,
    line_end: int,
) -> BadRow:
    text = bytes(buffer[line_begin:line_end]).removesuffix(b"\r")
    if code == FIELD_COUNT:
        what = describe_count(column, len(reads))
        return BadRow(line, what, "", text, line_remedy(text, spec, code))
    read = reads[column]
    value = show_field(_field(buffer, begin, end, last=column == len(reads) - 1))
    remedy = correct_or(value_remedy(read, code))
    return BadRow(line, describe_value(read, value, code), read.source, text, remedy)


@compiled()
def _parse(buffer, has_label, longest, labels, dense, categorical, missing, row_line, bad):
    """Fill the columns; return the numbers of rows and bad rows. ``buffer`` ends with a newline.

    :func:`clicklog.text.fast_rows.parse_row` parses the usual rows and may read ``longest`` bytes;
    all others, and those near the end, are parsed byte by byte. Here the usual forms of a field are
    parsed inline: a call costs as much as a field, because Numba counts references to the buffer.
    """
    dense_begin = 1 if has_label else 0
    categorical_begin = dense_begin + dense.shape[0]
    columns = categorical_begin + categorical.shape[0]
    size = len(buffer)
    row = 0
    bad_count = 0
    line = 0
    at = 0
    begin = np.uint64(buffer.ctypes.data)
    dense_address, dense_step = np.uint64(dense.ctypes.data), np.uint64(4 * dense.shape[1])
    ids_address, ids_step = np.uint64(categorical.ctypes.data), np.uint64(4 * categorical.shape[1])
    while at < size:
        if at + longest <= size:
            offset = np.uint64(4 * row)
            end, label, dense_missing, ids_missing = parse_row(
                begin + np.uint64(at), has_label,
                dense_address + offset, dense_step, dense.shape[0],
                ids_address + offset, ids_step, categorical.shape[0],
            )  # fmt: skip
            if end:
                if has_label:
                    labels[row] = label
                missing[0, row] = dense_missing
                missing[1, row] = ids_missing
                row_line[row] = line
                row += 1
                line += 1
                at = np.int64(end - begin)
                continue
        line_begin = at
        column = 0
        code = 0
        if has_label:
            if buffer[at] == 48 or buffer[at] == 49:
                labels[row] = buffer[at] - 48
                at += 1
                if buffer[at] == 46 and buffer[at + 1] == 48:  # 1.0
                    at += 2
                code = _next_field(buffer, at, columns == 1, SYNTAX)
            else:
                code = SYNTAX
            at += 1
            column = 1
        mask = np.uint64(0)
        while code == 0 and column < categorical_begin:
            field = at
            byte = buffer[at]
            value = np.int64(0)
            negative = byte == _MINUS
            if negative:
                at += 1
                byte = buffer[at]
            digits = at
            while np.uint8(byte - 48) < 10:
                value = min(value * 10 + np.int64(byte - 48), _BEYOND_INT32)
                at += 1
                byte = buffer[at]
            if at == field:
                mask |= np.uint64(1) << np.uint64(column - dense_begin)
            elif at == digits:
                code = SYNTAX
            if negative:
                value = -value
            if value != np.int32(value):
                code = RANGE if _is_integer(buffer, digits) else SYNTAX
            dense[column - dense_begin, row] = np.int32(value)
            column += 1
            if code == 0 and (byte != _TAB or column == columns):
                code = _next_field(buffer, at, column == columns, SYNTAX)
            at = field if code else at + 1
        missing[0, row] = mask
        mask = np.uint64(0)
        while code == 0 and column < columns:
            field = at
            value32 = np.uint32(0)
            invalid = np.uint8(255)
            if at + 8 < size:  # nearly always 8 digits
                invalid = np.uint8(0)
                for i in range(8):
                    digit = HEX_DIGIT[buffer[at + i]]
                    invalid |= digit
                    value32 = np.uint32((value32 << np.uint32(4)) | np.uint32(digit))
            if invalid < 16:
                at += 8
            else:
                value32 = np.uint32(0)
                while HEX_DIGIT[buffer[at]] < 16 and at - field < 8:
                    value32 = np.uint32((value32 << np.uint32(4)) | HEX_DIGIT[buffer[at]])
                    at += 1
                if at == field:
                    mask |= np.uint64(1) << np.uint64(column - categorical_begin)
            categorical[column - categorical_begin, row] = value32
            column += 1
            if buffer[at] != _TAB or column == columns:
                code = _next_field(buffer, at, column == columns, SYNTAX)
            at = field if code else at + 1
        missing[1, row] = mask
        if code == 0:
            # after a last field that ends with \r\n, `at` is at the \n
            if buffer[at - 1] == _RETURN:
                at += 1
            row_line[row] = line
            row += 1
        else:
            at = _note_bad_row(buffer, line_begin, line, code, column - 1, columns, bad, bad_count)
            bad_count += 1
        line += 1
    return row, bad_count


@compiled()
def _next_field(buffer, at, last, otherwise):
    """Return 0 if the field ends at ``at``; else an error code."""
    byte = buffer[at]
    if byte == _NEWLINE or (byte == _RETURN and buffer[at + 1] == _NEWLINE):
        return 0 if last else FIELD_COUNT
    if byte == _TAB:
        return FIELD_COUNT if last else 0
    return otherwise


@compiled()
def _is_integer(buffer, at):
    """Whether the rest of the field is digits."""
    while 48 <= buffer[at] <= 57:
        at += 1
    return buffer[at] in (_TAB, _NEWLINE, _RETURN)


@compiled()
def _note_bad_row(buffer, begin, line, code, column, columns, bad, bad_count):
    """Record a bad row, if there is room; return where the next line begins."""
    end = begin
    fields = 1
    field_begin = begin
    while buffer[end] != _NEWLINE:
        if buffer[end] == _TAB:
            if fields == column:
                field_begin = end + 1
            fields += 1
        end += 1
    line_end = end
    if bad_count < bad.shape[0]:
        field_end = field_begin
        while field_end < end and buffer[field_end] != _TAB:
            field_end += 1
        # A wrong number of fields explains any other error of the row.
        bad[bad_count, 0] = line
        bad[bad_count, 1] = code if fields == columns else FIELD_COUNT
        bad[bad_count, 2] = column if fields == columns else fields
        bad[bad_count, 3] = field_begin
        bad[bad_count, 4] = field_end
        bad[bad_count, 5] = begin
        bad[bad_count, 6] = line_end
    return end + 1
