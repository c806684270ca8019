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
        at: Where a row begins.
        stop: Where the text ends.
        final: Whether the file, or another whole number of rows, ends there too.
        limit: Bytes of a row.
        delimiter: The byte between fields.
        most: How many rows to skip.
        until: Skip no row that begins here or later.

    Returns:
        Where the next row begins, the number of rows skipped, and why it stopped.
    """
    rows = 0
    start = at
    while start < stop and start < until and rows < most:
        last = min(stop, start + limit + 1)  # the line break may come after `limit` bytes
        at, ended, quoted, first_line, newline = _end_of_row(buffer, start, last, stop, delimiter)
        if not ended:
            # a doubled quote may go on in further text
            if not final and stop - start <= limit + 2:
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


def count_rows(text: bytes | memoryview, delimiter: str) -> int:
    """Count the rows of a text, whole ones with closed quotes; quotes may contain line breaks."""
    buffer = np.frombuffer(text, np.uint8)
    return skip_rows(buffer, 0, len(buffer), True, NO_LIMIT, ord(delimiter), NO_LIMIT, NO_LIMIT)[1]


@compiled()
def row_ends(buffer, delimiter):
    """Return int32 [rows], where each row's line break is; the text ends with one."""
    size = len(buffer)
    ends = np.empty(64, np.int32)
    count = 0
    at = 0
    while at < size:
        at, ended, _, _, _ = _end_of_row(buffer, at, size, size, delimiter)
        if not ended:  # a quote that is not closed: the rest is one row
            at = size
        if count == len(ends):
            ends = np.append(ends, np.empty(count, np.int32))
        ends[count] = at - 1
        count += 1
    return ends[:count]
