"""Find where rows end whose quoted fields may contain line breaks.

The loops are compiled and run without the interpreter lock. Rows are found from where one is known
to begin. Text of other specifications needs none of this: there every line break ends a row.
"""

from __future__ import annotations

import numpy as np

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.clicklog.text.fast_rows import load_word, trailing_zeros

_NEWLINE, _QUOTE = 10, 34
_EACH = np.uint64(0x0101010101010101)


#: Why :func:`skip_rows` stopped: at the end; the row needs more text; it is too long; its quote is
#: not closed, and it ends with its first line, or is the rest of the text.
STOPPED, UNFINISHED, TOO_LONG, OPEN_ON_LINE, OPEN_TO_END = range(5)


@compiled()
def skip_rows(buffer, at, stop, final, limit, delimiter):
    """Skip rows whose quoted fields may contain line breaks.

    A row may have ``limit`` bytes without its end. If a quote on its first line is not closed
    within them, the row ends with that line, so that a stray quote spoils one row and not the rest
    of the file.

    Args:
        buffer: uint8, the text.
        at: Where a row begins.
        stop: Where the text ends.
        final: Whether the file, or another whole number of rows, ends there too.
        limit: Bytes of a row.
        delimiter: The byte between fields.

    Returns:
        Where the next row begins, and why it stopped.
    """
    start = at
    while start < stop:
        last = min(stop, start + limit + 1)  # the line break may come after `limit` bytes
        at, ended, quoted, first_line, newline = _end_of_row(buffer, start, last, stop, delimiter)
        if not ended:
            # a doubled quote may go on in further text
            if not final and stop - start <= limit + 2:
                return start, UNFINISHED
            if quoted and first_line and newline >= 0:
                return start, OPEN_ON_LINE
            if stop - start > limit:
                return start, TOO_LONG
            if quoted:
                return start, OPEN_TO_END
        start = at
    return start, STOPPED


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
def _next_mark(buffer, at, last):
    """Return where the first quote or line break of ``[at, last)`` is, eight bytes at a time."""
    begin = np.uint64(buffer.ctypes.data)
    while at + 8 <= last:
        word = load_word(begin + np.uint64(at))
        quotes = word ^ (_EACH * np.uint64(_QUOTE))
        newlines = word ^ (_EACH * np.uint64(_NEWLINE))
        # the lowest bit that is set is bit 7 of the first byte that is zero in one of them
        marks = ((quotes - _EACH) & ~quotes) | ((newlines - _EACH) & ~newlines)
        marks &= _EACH << np.uint64(7)
        if marks:
            return at + np.int64(trailing_zeros(marks) >> np.uint64(3))
        at += 8
    while at < last and buffer[at] != _QUOTE and buffer[at] != _NEWLINE:
        at += 1
    return at


def row_begins(text: bytes | memoryview, quotes: str) -> np.ndarray:
    """Return int32 [n + 1], where each of the rows begins and the last one ends.

    Args:
        text: Whole rows, the last one with or without its newline.
        quotes: The delimiter of text whose quoted fields may contain line breaks; "" of other text.
    """
    buffer = np.frombuffer(text, np.uint8)
    if quotes:
        return _row_begins(buffer, ord(quotes))
    begins = np.flatnonzero(buffer == _NEWLINE) + 1
    end = [len(buffer)] if len(buffer) and buffer[-1] != _NEWLINE else []
    return np.concatenate([[0], begins, end]).astype(np.int32)


@compiled()
def _row_begins(buffer, delimiter):
    size = len(buffer)
    begins = np.zeros(64, np.int32)
    count = 1
    at = 0
    while at < size:
        at, ended, _, _, _ = _end_of_row(buffer, at, size, size, delimiter)
        if not ended:  # the last row has no newline, or a quote that is not closed
            at = size
        if count == len(begins):
            begins = np.append(begins, np.empty(count, np.int32))
        begins[count] = at
        count += 1
    return begins[:count]
