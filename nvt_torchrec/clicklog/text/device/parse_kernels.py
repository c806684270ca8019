"""Kernels that find the lines of a text and parse them, one thread per line.

Adjacent threads read adjacent lines byte by byte, so most bytes come from the caches, and write
adjacent values of a column. Importing this module imports numba.cuda.

All computations use int64 or uint64, because Numba's simulator uses NumPy's numbers, which would
overflow in smaller types.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from nvt_torchrec.base.device import kernel

_TAB = 9
_NEWLINE = 10
_RETURN = 13
_MINUS = 45
_ZERO = 48
_NINE = 57
#: The number of bytes in which a thread searches for line ends.
SPAN_BYTES = 64
#: Parsed numbers are capped here, however many digits follow. The cap is outside of int32, and ten
#: times the cap still fits int64.
_BEYOND_INT32 = 2**40
_MIN_INT32 = -(2**31)
_MAX_INT32 = 2**31 - 1
_HEX_DIGITS = 8


@kernel
def count_line_ends(text, counts):
    """Count the newlines of each span of :data:`SPAN_BYTES`: int64 [spans]."""
    span = cuda.grid(1)
    if span >= counts.shape[0]:
        return
    count = 0
    for at in range(span * SPAN_BYTES, min((span + 1) * SPAN_BYTES, text.shape[0])):
        if text[at] == _NEWLINE:
            count += 1
    counts[span] = count


@kernel
def write_line_ends(text, lines_until, ends):
    """Write the offsets of the newlines.

    Args:
        text: uint8 [bytes].
        lines_until: The number of newlines up to the end of each span, int64 [spans].
        ends: The result, int64 [newlines].
    """
    span = cuda.grid(1)
    if span >= lines_until.shape[0]:
        return
    line = lines_until[span - 1] if span > 0 else 0
    for at in range(span * SPAN_BYTES, min((span + 1) * SPAN_BYTES, text.shape[0])):
        if text[at] == _NEWLINE:
            ends[line] = at
            line += 1


@kernel
def parse_lines(text, ends, limit, label, dense, categorical, missing, malformed):
    """Parse each line as a label, 32-bit integers and hexadecimal numbers.

    Args:
        text: uint8 [bytes].
        ends: The offset of each line's newline, int64 [n].
        limit: The largest length of a line in bytes, without its newline.
        label: The result, uint8 [n].
        dense: The result, int32 [dense columns, n].
        categorical: The result, uint32 [categorical columns, n].
        missing: The result, uint64 [2, n], the masks of missing dense and categorical columns.
        malformed: The result, int32 [1], set to 1 if a line is malformed, whose values are then
            undefined.
    """
    line = cuda.grid(1)
    if line >= ends.shape[0]:
        return
    at = ends[line - 1] + 1 if line > 0 else 0
    end = ends[line]
    if end - at > limit:
        malformed[0] = 1
        return
    # For an empty line, text[end - 1] is the newline of the previous line. For an empty first line
    # it is text[-1], the last byte of the text, which is a newline, too.
    if text[end - 1] == _RETURN:
        end -= 1
    dense_count = dense.shape[0]
    categorical_count = categorical.shape[0]
    if text[at] != _ZERO and text[at] != _ZERO + 1:
        malformed[0] = 1
        return
    label[line] = text[at] - _ZERO
    at += 1
    absent = np.uint64(0)
    for j in range(dense_count):
        if text[at] != _TAB:
            malformed[0] = 1
            return
        at += 1
        negative = text[at] == _MINUS
        if negative:
            at += 1
        digits = at
        value = np.int64(0)
        while text[at] >= _ZERO and text[at] <= _NINE:
            value = min(value * 10 + np.int64(text[at]) - _ZERO, _BEYOND_INT32)
            at += 1
        if at == digits:
            if negative:
                malformed[0] = 1
                return
            absent |= np.uint64(1) << np.uint64(j)
        if negative:
            value = -value
        if value < _MIN_INT32 or value > _MAX_INT32:
            malformed[0] = 1
            return
        dense[j, line] = value
    missing[0, line] = absent
    absent = np.uint64(0)
    for j in range(categorical_count):
        if text[at] != _TAB:
            malformed[0] = 1
            return
        at += 1
        digits = at
        value = np.int64(0)
        while at < digits + _HEX_DIGITS:
            digit = np.int64(text[at]) - _ZERO
            if digit < 0 or digit > 9:
                # | 32 makes letters lower-case and maps no other byte to a … f; 87 = ord("a") - 10
                digit = (np.int64(text[at]) | 32) - 87
                if digit < 10 or digit > 15:
                    break
            value = value * 16 + digit
            at += 1
        if at == digits:
            absent |= np.uint64(1) << np.uint64(j)
        categorical[j, line] = value
    missing[1, line] = absent
    if at != end:
        malformed[0] = 1
