"""Find where the fields of delimited text begin and end.

The loops are compiled and run without the interpreter lock. Every line break ends a row, so that
rows can be counted, cut and numbered from any line on. Only where a spec says so may quoted fields
contain line breaks; then rows are found from the beginning of the file, by :func:`skip_rows`.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import string_array
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.clicklog.text.fast_rows import load_word, trailing_zeros
from nvt_torchrec.formats.spec.raw_types.base import AFTER_QUOTE, FIELD_COUNT, OPEN_QUOTE

_NEWLINE, _RETURN, _QUOTE = 10, 13, 34
_EACH = np.uint64(0x0101010101010101)
#: Positions within a block are 32-bit integers.
MAX_BLOCK_BYTES = 2**31 - 2


@dataclasses.dataclass(frozen=True)
class Lines:
    """``n`` lines (or rows of several lines) and the fields of some of their columns.

    Attributes:
        data: uint8; the bytes of the fields, without quotes.
        begin: int32 [columns, n], where each field begins in ``data``.
        end: int32 [columns, n], where it ends.
        code: uint8 [n], 0 or the code of an error of the line as a whole.
        where: int32 [n], of a line with an error: the position of the field, or for FIELD_COUNT the
            number of fields.
        line_begin: int32 [n + 1], where each line begins in the text; last the size of the text.
    """

    data: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    code: np.ndarray
    where: np.ndarray
    line_begin: np.ndarray

    def __len__(self) -> int:
        return len(self.code)


def split_lines(
    text: bytes | memoryview | np.ndarray,
    slots: np.ndarray,
    *,
    delimiter: str,
    quoted: bool,
    quoted_newlines: bool = False,
) -> Lines:
    """Find the fields of whole lines; the last one may lack its newline, ``\\r\\n`` ends one too.

    Args:
        text: the lines.
        slots: int32 [fields of a line], the column of each field, or -1 for none.
        delimiter: the ASCII characters between fields, mostly one.
        quoted: whether fields may be quoted with ``"``, with doubled quotes inside.
        quoted_newlines: whether quoted fields may contain line breaks.

    Raises:
        SettingsError: the text is too large.
    """
    if len(text) > MAX_BLOCK_BYTES:
        raise SettingsError(
            f"a block of {len(text):,} bytes", "use a smaller --block_mb: blocks are below 2 GiB"
        )
    buffer = np.frombuffer(text, np.uint8)
    if len(buffer) and buffer[-1] != _NEWLINE:
        buffer = np.append(buffer, np.uint8(_NEWLINE))
    between = delimiter_bytes(delimiter)
    quoted = quoted and bool((buffer == _QUOTE).any())
    if quoted and quoted_newlines:
        line_ends = _row_ends(buffer, between)
    else:
        line_ends = np.flatnonzero(buffer == _NEWLINE).astype(np.int32)
    count, columns = len(line_ends), int(slots.max()) + 1
    kept = buffer.copy() if quoted else np.empty(0, np.uint8)  # becomes the text without quotes
    buffer.flags.writeable = False  # one type of array, so that loops are compiled once
    begin = np.zeros((columns, count), np.int32)
    end = np.zeros((columns, count), np.int32)
    code, where = np.zeros(count, np.uint8), np.zeros(count, np.int32)
    _split(buffer, line_ends, slots, between, kept, begin, end, code, where)
    data = kept if quoted else buffer
    data.flags.writeable = False
    line_begin = np.concatenate([np.zeros(1, np.int32), line_ends + np.int32(1)])
    return Lines(data, begin, end, code, where, line_begin)


@functools.lru_cache(maxsize=64)
def delimiter_bytes(delimiter: str) -> np.ndarray:
    """Return the bytes of a delimiter as the loops take them, uint8."""
    return np.frombuffer(delimiter.encode(), np.uint8)


@compiled()
def _matches(buffer, at, stop, delimiter):
    """Whether all of the delimiter is at ``at``, where its first byte is."""
    if at + len(delimiter) > stop:
        return False
    same = True
    for i in range(1, len(delimiter)):
        same &= buffer[at + i] == delimiter[i]
    return same


@compiled()
def _split(buffer, line_ends, slots, delimiter, kept, begin, end, code, where):
    quoted = len(kept) > 0
    first_byte = delimiter[0]
    width = len(delimiter)
    at = 0
    for line in range(len(line_ends)):
        stop = line_ends[line]
        following = stop + 1
        if stop > at and buffer[stop - 1] == _RETURN:
            stop -= 1
        fields = 0
        wrong = 0
        while True:
            first = at
            last = at
            if quoted and at < stop and buffer[at] == _QUOTE:
                first, last, at, wrong = _unquote(buffer, kept, at, stop, delimiter)
                if wrong:
                    code[line] = wrong
                    where[line] = fields
            else:
                while at < stop and not (
                    buffer[at] == first_byte
                    and (width == 1 or _matches(buffer, at, stop, delimiter))
                ):
                    at += 1
                last = at
            if fields < len(slots) and slots[fields] >= 0:
                begin[slots[fields], line] = first
                end[slots[fields], line] = last
            fields += 1
            if wrong or at >= stop:
                break
            at += width
        if not wrong and fields != len(slots):
            code[line] = FIELD_COUNT
            where[line] = fields
        at = following


@compiled()
def _unquote(buffer, kept, at, stop, delimiter):
    """Remove the quotes of the field at ``at``: (its begin, its end, the byte after it, code)."""
    first = at + 1
    last = first  # end of the bytes kept so far
    at = first
    while at < stop:
        if buffer[at] == _QUOTE:
            if at + 1 < stop and buffer[at + 1] == _QUOTE:
                at += 1
            else:
                at += 1
                wrong = 0
                if at < stop and not (
                    buffer[at] == delimiter[0] and _matches(buffer, at, stop, delimiter)
                ):
                    wrong = AFTER_QUOTE
                return first, last, at, wrong
        kept[last] = buffer[at]
        last += 1
        at += 1
    return first, last, at, OPEN_QUOTE


#: Why :func:`skip_rows` stopped: as it was told; the row needs more text; it is too long; its
#: quote is not closed, and it ends with its first line, or is the rest of the text.
STOPPED, UNFINISHED, TOO_LONG, OPEN_ON_LINE, OPEN_TO_END = range(5)
NO_LIMIT = 2**62


@compiled()
def skip_rows(buffer, at, stop, final, limit, delimiter, most, until):
    """Skip rows whose quoted fields may contain line breaks.

    A row may have ``limit`` bytes without its end. If a quote on its first line is not closed
    within them, the row ends with that line, so that a stray quote spoils one row and not the rest
    of the file.

    Args:
        buffer: uint8, the text.
        at: where a row begins.
        stop: where the text ends.
        final: whether the file, or another whole number of rows, ends there too.
        limit: bytes of a row.
        delimiter: see :func:`delimiter_bytes`.
        most: how many rows to skip.
        until: skip no row that begins here or later.

    Returns:
        Where the next row begins, the number of rows skipped, and why it stopped.
    """
    width = len(delimiter)
    rows = 0
    start = at
    while start < stop and start < until and rows < most:
        last = min(stop, start + limit + 1)  # the line break may come after `limit` bytes
        if width == 1:
            at, ended, quoted, first_line, newline = _end_of_row(
                buffer, start, last, stop, delimiter[0]
            )
        else:
            at, ended, quoted, first_line, newline = _end_of_wide_row(
                buffer, start, last, stop, delimiter
            )
        if not ended:
            # a doubled quote or a delimiter may go on in further text
            if not final and stop - start <= limit + 1 + width:
                return start, rows, UNFINISHED
            if quoted and first_line and newline >= 0:
                return start, rows, OPEN_ON_LINE
            if stop - start > limit:
                return start, rows, TOO_LONG
            if quoted:
                return start, rows, OPEN_TO_END
        rows += 1
        start = at
    return start, rows, STOPPED


@compiled()
def _end_of_row(buffer, start, last, stop, delimiter):
    """Find the end of the row that begins at ``start``, looking at the bytes before ``last``.

    Returns:
        The byte after the row's line break; whether there is one; otherwise whether a quote is
        open, whether it is on the row's first line, and where this line ends, -1 if it does not.
    """
    newline = -1
    first_line = False
    quoted = False
    at = start
    while True:
        at = _next_mark(buffer, at, last)
        if at >= last:
            return at, False, quoted, first_line, newline
        if buffer[at] == _QUOTE:
            if not quoted:
                # outside of quotes every delimiter begins a field
                if at == start or buffer[at - 1] == delimiter:
                    quoted = True
                    first_line = newline < 0
            elif at + 1 < stop and buffer[at + 1] == _QUOTE:
                at += 1
            else:
                quoted = False
        elif not quoted:
            return at + 1, True, False, False, newline
        elif newline < 0:
            newline = at
        at += 1


@compiled()
def _end_of_wide_row(buffer, start, last, stop, delimiter):
    """As :func:`_end_of_row`, with a delimiter of several characters.

    Delimiters may overlap (``:::``), so they have to be found from the left.
    """
    newline = -1
    first_line = False
    at_field = True  # whether a field begins here
    quoted = False
    at = start
    while at < last:
        byte = buffer[at]
        if quoted:
            if byte == _QUOTE:
                if at + 1 < stop and buffer[at + 1] == _QUOTE:
                    at += 1
                else:
                    quoted = False
            elif byte == _NEWLINE and newline < 0:
                newline = at
            at += 1
        elif byte == _NEWLINE:
            return at + 1, True, False, False, newline
        elif byte == delimiter[0] and _matches(buffer, at, stop, delimiter):
            at += len(delimiter)
            at_field = True
        else:
            if at_field and byte == _QUOTE:
                quoted = True
                first_line = newline < 0
            at_field = False
            at += 1
    return at, False, quoted, first_line, newline


@compiled()
def _next_mark(buffer, at, last):
    """Return where the first quote or line break of ``[at, last)`` is, eight bytes at a time."""
    begin = np.uint64(buffer.ctypes.data)
    while at + 8 <= last:
        word = load_word(begin + np.uint64(at))
        quotes = word ^ (_EACH * np.uint64(_QUOTE))
        newlines = word ^ (_EACH * np.uint64(_NEWLINE))
        # the lowest bit that is set is bit 7 of the first byte that is zero in one of them
        found = ((quotes - _EACH) & ~quotes) | ((newlines - _EACH) & ~newlines)
        found &= _EACH << np.uint64(7)
        if found:
            return at + np.int64(trailing_zeros(found) >> np.uint64(3))
        at += 8
    while at < last and buffer[at] != _QUOTE and buffer[at] != _NEWLINE:
        at += 1
    return at


def gather(data: np.ndarray, begin: np.ndarray, end: np.ndarray) -> pa.Array:
    """Return the fields as a binary array."""
    return string_array(*_gather(data, begin, end)).view(pa.binary())


@compiled()
def _gather(data, begin, end):
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


def count_rows(text: bytes | memoryview, delimiter: str) -> int:
    """Count the rows of a text, whole ones with closed quotes; quotes may contain line breaks."""
    buffer = np.frombuffer(text, np.uint8)
    between = delimiter_bytes(delimiter)
    return skip_rows(buffer, 0, len(buffer), True, NO_LIMIT, between, NO_LIMIT, NO_LIMIT)[1]


@compiled()
def _row_ends(buffer, delimiter):
    """Return int32 [rows], where each row's line break is; the text ends with one."""
    size = len(buffer)
    wide = len(delimiter) > 1
    ends = np.empty(64, np.int32)
    count = 0
    at = 0
    while at < size:
        if wide:
            at, ended, _, _, _ = _end_of_wide_row(buffer, at, size, size, delimiter)
        else:
            at, ended, _, _, _ = _end_of_row(buffer, at, size, size, delimiter[0])
        if not ended:  # a quote that is not closed: the rest is one row
            at = size
        if count == len(ends):
            ends = np.append(ends, np.empty(count, np.int32))
        ends[count] = at - 1
        count += 1
    return ends[:count]
