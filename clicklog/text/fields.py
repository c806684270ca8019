"""Find where the fields of delimited text begin and end.

The loops are compiled and run without the interpreter lock. Every line break ends a row: a quoted
field cannot contain one, so that rows can be counted, cut and numbered from any line on.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from clicklog.errors import SettingsError
from clicklog.kernels import compiled
from clicklog.text.field_errors import AFTER_QUOTE, FIELD_COUNT, OPEN_QUOTE

_NEWLINE, _RETURN, _QUOTE = 10, 13, 34
#: Positions within a block are 32-bit integers.
MAX_BLOCK_BYTES = 2**31 - 2


@dataclasses.dataclass(frozen=True)
class Lines:
    """``n`` lines and the fields of some of their columns.

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
    text: bytes | memoryview | np.ndarray, slots: np.ndarray, *, delimiter: str, quoted: bool
) -> Lines:
    """Find the fields of whole lines; the last one may lack its newline, ``\\r\\n`` ends one too.

    Args:
        text: the lines.
        slots: int32 [fields of a line], the column of each field, or -1 for none.
        delimiter: the ASCII character between fields.
        quoted: whether fields may be quoted with ``"``, with doubled quotes inside.

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
    line_ends = np.flatnonzero(buffer == _NEWLINE).astype(np.int32)
    count, columns = len(line_ends), int(slots.max()) + 1
    quoted = quoted and bool((buffer == _QUOTE).any())
    kept = buffer.copy() if quoted else np.empty(0, np.uint8)  # becomes the text without quotes
    buffer.flags.writeable = False  # one type of array, so that loops are compiled once
    begin = np.zeros((columns, count), np.int32)
    end = np.zeros((columns, count), np.int32)
    code, where = np.zeros(count, np.uint8), np.zeros(count, np.int32)
    _split(buffer, line_ends, slots, ord(delimiter), kept, begin, end, code, where)
    data = kept if quoted else buffer
    data.flags.writeable = False
    line_begin = np.concatenate([np.zeros(1, np.int32), line_ends + np.int32(1)])
    return Lines(data, begin, end, code, where, line_begin)


@compiled()
def _split(buffer, line_ends, slots, delimiter, kept, begin, end, code, where):
    quoted = len(kept) > 0
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
                while at < stop and buffer[at] != delimiter:
                    at += 1
                last = at
            if fields < len(slots) and slots[fields] >= 0:
                begin[slots[fields], line] = first
                end[slots[fields], line] = last
            fields += 1
            if wrong or at >= stop:
                break
            at += 1  # the delimiter
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
                if at < stop and buffer[at] != delimiter:
                    wrong = AFTER_QUOTE
                return first, last, at, wrong
        kept[last] = buffer[at]
        last += 1
        at += 1
    return first, last, at, OPEN_QUOTE
