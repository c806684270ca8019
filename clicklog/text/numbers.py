"""Parse fields of text as integers and floating-point numbers, exactly and correctly rounded.

The loops are compiled. Strict forms come first; what a column's rules allow besides (``lenient``,
``thousands``) are passes of their own, so that columns without rules do not pay for them.
"""

from __future__ import annotations

import numba
import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.base.strings import string_array
from nvt_torchrec.clicklog.text.field_errors import BAD_FLOAT, BAD_INTEGER, NOT_FINITE
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES

_PLUS, _COMMA, _MINUS, _DOT, _ZERO = 43, 44, 45, 46, 48
#: What :func:`decimal` returns beside the number.
EXACT, SYNTAX, FRACTION, BIG = range(4)
#: Numbers stop growing here, because further digits would wrap around.
_BIG = 2**59


def parse_floats(
    data: np.ndarray, begin: np.ndarray, end: np.ndarray, code: np.ndarray, *, lenient: bool = False
) -> np.ndarray:
    """Parse fields as float64; 0 where empty or wrong, and then with a code."""
    if lenient:
        begin = _without_plus(data, begin, end)
    _check_floats(data, begin, end, code)
    present = (begin != end) & (code == 0)
    texts = string_array(*gather(data, begin[present], end[present]))
    try:
        numbers = to_numpy(texts.cast(pa.float64()))
    except pa.ArrowInvalid:  # beyond float64
        numbers = np.array([float(text) for text in texts.to_pylist()])
    values = np.zeros(len(begin), np.float64)
    values[present] = numbers
    beyond = np.abs(values) > RAW_TYPES["float"].most
    code[beyond] = NOT_FINITE
    values[beyond] = 0
    return values


@compiled()
def gather(data, begin, end):
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
def parse_ints(data, begin, end, low, high, too_big, values, code):
    """Parse ``-?D+``, where D is a digit."""
    for i in range(len(begin)):
        at, stop = begin[i], end[i]
        if at == stop:
            continue
        negative = data[at] == _MINUS
        if negative:
            at += 1
        value = np.int64(0)
        big = False
        digits = at
        while at < stop and np.uint8(data[at] - _ZERO) < 10:
            value = value * 10 + np.int64(data[at] - _ZERO)
            big |= value >= _BIG  # kept, because further digits would wrap around
            value &= _BIG - 1
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
def parse_lenient_ints(data, begin, end, low, high, too_big, values, code):
    """Parse the fields that are no plain integers but may be one in another form: +5, 260.0."""
    for i in range(len(begin)):
        if code[i] != BAD_INTEGER:
            continue
        status, value = decimal(data, begin[i], end[i], 0)
        if status == BIG or (status == EXACT and (value < low or value > high)):
            code[i] = too_big
        elif status == EXACT:
            code[i] = 0
            values[i] = value


@compiled()
def decimal(data, at, stop, shift):
    """Parse ``[+-]?(D+(.D*)?|.D+)([eE][+-]?D+)?`` times ten to the power of ``shift``.

    Returns:
        A status (EXACT; FRACTION: digits after the point are left out; BIG; SYNTAX), and the
        number as int64.
    """
    negative = False
    if at < stop and (data[at] == _PLUS or data[at] == _MINUS):
        negative = data[at] == _MINUS
        at += 1
    first = at
    at = _digits(data, at, stop)
    whole = at - first
    count = whole
    last = at
    if at < stop and data[at] == _DOT:
        at = _digits(data, at + 1, stop)
        count += at - last - 1
        last = at
    if count == 0:
        return SYNTAX, np.int64(0)
    exponent = 0
    if at < stop and (data[at] | 32) == 101:
        at += 1
        down = at < stop and data[at] == _MINUS
        if at < stop and (data[at] == _PLUS or data[at] == _MINUS):
            at += 1
        digits = at
        while at < stop and np.uint8(data[at] - _ZERO) < 10:
            exponent = min(exponent * 10 + np.int64(data[at] - _ZERO), 1_000_000_000)
            at += 1
        if at == digits:
            return SYNTAX, np.int64(0)
        if down:
            exponent = -exponent
    if at < stop:
        return SYNTAX, np.int64(0)
    point = whole + exponent + shift  # how many of the digits are before the result's point
    value = np.int64(0)
    status = EXACT
    seen = 0
    for i in range(first, last):
        if data[i] == _DOT:
            continue
        digit = np.int64(data[i] - _ZERO)
        if seen < point:
            value = value * 10 + digit
            if value >= _BIG:
                return BIG, np.int64(0)
        elif digit:
            status = FRACTION
        seen += 1
    while seen < point and value:
        value *= 10
        if value >= _BIG:
            return BIG, np.int64(0)
        seen += 1
    if negative:
        value = -value
    return status, value


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
        if data[at] == _MINUS:
            at += 1
        first = at
        at = _digits(data, at, stop)
        digits = at - first
        if at < stop and data[at] == _DOT:
            first = at + 1
            at = _digits(data, first, stop)
            digits += at - first
        good = digits > 0
        if good and at < stop and (data[at] | 32) == 101:
            at += 1
            if at < stop and (data[at] == _PLUS or data[at] == _MINUS):
                at += 1
            first = at
            at = _digits(data, at, stop)
            good = at > first
        if not good or at < stop:
            code[i] = BAD_FLOAT


@compiled()
def _without_plus(data, begin, end):
    """Return where the fields begin after a plus sign."""
    moved = begin.copy()
    for i in range(len(begin)):
        at = begin[i]
        if end[i] - at > 1 and data[at] == _PLUS and data[at + 1] != _MINUS:
            moved[i] = at + 1
    return moved


def ungroup(
    data: np.ndarray, begin: np.ndarray, end: np.ndarray, separator: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Remove the character that groups digits.

    Returns:
        The fields without it, and which ones have it in another place than between groups of three
        digits before the decimal point; those become empty. None: no field has it.
    """
    if not _contains(data, begin, end, ord(separator)):
        return None
    kept = np.empty(int((end - begin).sum()), np.uint8)
    first, last = begin.copy(), end.copy()
    wrong = np.zeros(len(begin), np.bool_)
    _ungroup(data, begin, end, ord(separator), kept, first, last, wrong)
    kept.flags.writeable = False  # one type of array, so that loops are compiled once
    return kept, first, last, wrong


def exchange(
    data: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the fields with commas for points and points for commas.

    So 1,5 is parsed as 1.5, and 1.5 is malformed like 1,5 elsewhere.
    """
    offsets, exchanged = gather(data, begin, end)
    commas = exchanged == _COMMA
    exchanged[exchanged == _DOT] = _COMMA
    exchanged[commas] = _DOT
    exchanged.flags.writeable = False  # one type of array, so that loops are compiled once
    return exchanged, offsets[:-1].copy(), offsets[1:].copy()


@compiled()
def _contains(data, begin, end, separator):
    for i in range(len(begin)):
        for at in range(begin[i], end[i]):
            if data[at] == separator:
                return True
    return False


@compiled()
def _ungroup(data, begin, end, separator, kept, first, last, wrong):
    to = 0
    for i in range(len(begin)):
        at, stop = begin[i], end[i]
        first[i] = to
        if at < stop and (data[at] == _MINUS or data[at] == _PLUS):
            kept[to] = data[at]
            to += 1
            at += 1
        head = _digits(data, at, stop) - at  # digits of the first group
        grouped = 1 <= head <= 3 and data[at] != _ZERO
        copied = 0
        bad = False
        while at < stop:
            if data[at] == separator:
                group = _digits(data, at + 1, stop) - at - 1
                # separators stand after the first group, and after groups of three that follow it
                bad |= not (grouped and copied == head and group == 3)
                head += 3
            else:
                kept[to] = data[at]
                to += 1
                copied += 1
            at += 1
        wrong[i] = bad
        if bad:
            to = first[i]
        last[i] = to
