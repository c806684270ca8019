"""Parse fields of text as times: microseconds since 1970 UTC.

:mod:`formats.spec.times` has the formats. The loops are compiled, and check the calendar: the 30th
of February is malformed.
"""

from __future__ import annotations

import functools
import re

import numpy as np

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.clicklog.text.field_errors import BAD_TIME, BEYOND_TIME
from nvt_torchrec.clicklog.text.numbers import BIG, SYNTAX, decimal
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.spec.times import DIRECTIVES, EPOCHS, ISO

_LEAST, _MOST = int(RAW_TYPES["time"].least), int(RAW_TYPES["time"].most)
_SECOND = 1_000_000
_DAY = 86_400 * _SECOND
_NO_DATE = np.int64(-(2**40))
_NO_HALF = -1
#: Digits of a microsecond after the point of each unit.
_DIGITS = {"epoch_s": 6, "epoch_ms": 3, "epoch_us": 0}
_ORDER = "".join(DIRECTIVES)
_YEAR, _SHORT_YEAR, _MONTH, _MONTH_DAY, _HOUR, _MINUTE, _SECONDS, _FRACTION = range(8)
_HALF_HOUR, _HALF, _MONTH_NAME, _OFFSET = range(8, len(_ORDER))
_MOST_DIGITS = np.array(list(DIRECTIVES.values()))
_MONTH_NAMES = np.frombuffer(b"janfebmaraprmayjunjulaugsepoctnovdec", np.uint8)
_MONTH_DAYS = np.array([31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])


def parse_times(
    data: np.ndarray, begin: np.ndarray, end: np.ndarray, time_format: str, code: np.ndarray
) -> np.ndarray:
    """Parse fields as times, int64 [n]; 0 where empty or wrong, and then with a code.

    A number since 1970 may have a fraction and an exponent. ISO 8601 is ``2014-10-30``, or with
    ``T`` or a space ``2014-10-30 12:00``, seconds and their fraction, and ``Z``, `` UTC`` or an
    offset such as ``+02:00``, ``+0200`` or ``+02``. In a pattern, years have 4 (``%y``: 2) digits,
    and all others as many as there are up to their most; ``%y`` is 1969 to 2068; letters may be
    small or capital. What is beyond a microsecond is left out.
    """
    values = np.zeros(len(begin), np.int64)
    if time_format in EPOCHS:
        _parse_epochs(data, begin, end, _DIGITS[time_format], values, code)
    elif time_format == ISO:
        _parse_iso(data, begin, end, values, code)
    else:
        _parse_pattern(data, begin, end, steps_of(time_format), values, code)
    return values


@functools.lru_cache(maxsize=64)
def steps_of(pattern: str) -> np.ndarray:
    """Return the steps of a pattern: -1 - the index of a directive, or the byte to be there."""
    steps = []
    for directive, text in re.findall("%(.)|([^%]+)", pattern, re.DOTALL):
        steps += [-1 - _ORDER.index(directive)] if directive else list(text.encode())
    return np.array(steps, np.int64)


@compiled()
def _parse_epochs(data, begin, end, shift, values, code):
    for i in range(len(begin)):
        if begin[i] == end[i]:
            continue
        status, value = decimal(data, begin[i], end[i], shift)
        if status == SYNTAX:
            code[i] = BAD_TIME
        elif status == BIG or value < _LEAST or value > _MOST:
            code[i] = BEYOND_TIME
        else:
            values[i] = value


@compiled()
def _parse_iso(data, begin, end, values, code):
    for i in range(len(begin)):
        at, stop = begin[i], end[i]
        if at == stop:
            continue
        code[i] = BAD_TIME  # unless all is well
        if stop - at < 10 or data[at + 4] != 45 or data[at + 7] != 45:
            continue
        days = _days(_number(data, at, 4), _number(data, at + 5, 2), _number(data, at + 8, 2))
        at += 10
        time = 0
        if days == _NO_DATE:
            continue
        if at < stop:
            time, at = _time_of_day(data, at, stop)
        if at < stop or at < 0:
            continue
        value = days * _DAY + time
        if value < _LEAST or value > _MOST:  # by its offset
            code[i] = BEYOND_TIME
            continue
        values[i] = value
        code[i] = 0


@compiled()
def _time_of_day(data, at, stop):
    """Parse ``[T ]HH:MM(:SS(.D+)?)?(Z| UTC|[+-]HH(:?MM)?)?``: microseconds, the byte after it.

    The byte is -1 if it is malformed.
    """
    bad = (0, -1)
    if stop - at < 6 or (data[at] != 84 and data[at] != 32) or data[at + 3] != 58:
        return bad
    hour, minute, second, fraction = _number(data, at + 1, 2), _number(data, at + 4, 2), 0, 0
    at += 6
    if stop - at >= 3 and data[at] == 58:
        second = _number(data, at + 1, 2)
        at += 3
        if stop - at >= 2 and data[at] == 46:
            at += 1
            unit = 100_000
            first = at
            while at < stop and np.uint8(data[at] - 48) < 10:
                fraction += unit * np.int64(data[at] - 48)
                unit //= 10
                at += 1
            if at == first:
                return bad
    if not (0 <= hour < 24 and 0 <= minute < 60 and 0 <= second < 60):
        return bad
    time = ((hour * 60 + minute) * 60 + second) * _SECOND + fraction
    if at < stop and data[at] == 90:
        return time, at + 1
    if stop - at == 4 and data[at] == 32:
        utc = data[at + 1] == 85 and data[at + 2] == 84 and data[at + 3] == 67
        return (time, at + 4) if utc else bad
    if at < stop and (data[at] == 43 or data[at] == 45):
        seconds, at = _offset(data, at, stop)
        return time - seconds * _SECOND, at
    return time, at


@compiled()
def _offset(data, at, stop):
    """Parse ``[+-]HH(:?MM)?`` at the end of a text: seconds, and the byte after it or -1."""
    size = stop - at
    if not (size == 3 or size == 5 or (size == 6 and data[at + 3] == 58)):
        return 0, -1
    hour, minute = _number(data, at + 1, 2), 0
    if size > 3:
        minute = _number(data, stop - 2, 2)
    if not (0 <= hour < 24 and 0 <= minute < 60):
        return 0, -1
    seconds = (hour * 60 + minute) * 60
    return (-seconds if data[at] == 45 else seconds), stop


@compiled()
def _parse_pattern(data, begin, end, steps, values, code):
    parts = np.zeros(len(_MOST_DIGITS), np.int64)
    for i in range(len(begin)):
        at, stop = begin[i], end[i]
        if at == stop:
            continue
        parts[:] = 0
        parts[_MONTH] = parts[_MONTH_DAY] = 1
        parts[_HALF] = _NO_HALF
        good = True
        for step in steps:
            if step >= 0:
                good = at < stop and data[at] == step
                at += 1
            elif -1 - step >= _HALF:
                parts[-1 - step], at = _word(data, at, stop, -1 - step)
                good = at >= 0
            else:
                part = -1 - step
                first = at
                value = np.int64(0)
                while at < min(stop, first + _MOST_DIGITS[part]) and np.uint8(data[at] - 48) < 10:
                    value = value * 10 + np.int64(data[at] - 48)
                    at += 1
                good = at > first
                if part <= _SHORT_YEAR:
                    good = at - first == _MOST_DIGITS[part]
                if part == _SHORT_YEAR:
                    part, value = _YEAR, value + (1900 if value > 68 else 2000)
                for _ in range(at - first, 6 if part == _FRACTION else 0):
                    value *= 10
                parts[part] = value
            if not good:
                break
        if parts[_HALF] != _NO_HALF:
            good &= 1 <= parts[_HALF_HOUR] <= 12
            parts[_HOUR] = parts[_HALF_HOUR] % 12 + parts[_HALF]
        if parts[_MONTH_NAME]:
            parts[_MONTH] = parts[_MONTH_NAME]
        days = _days(parts[_YEAR], parts[_MONTH], parts[_MONTH_DAY])
        good &= at == stop and parts[_HOUR] < 24 and parts[_MINUTE] < 60 and parts[_SECONDS] < 60
        if not good or days == _NO_DATE:
            code[i] = BAD_TIME
            continue
        seconds = (parts[_HOUR] * 60 + parts[_MINUTE]) * 60 + parts[_SECONDS]
        value = days * _DAY + (seconds - parts[_OFFSET]) * _SECOND + parts[_FRACTION]
        if value < _LEAST or value > _MOST:  # by its offset
            code[i] = BEYOND_TIME
        else:
            values[i] = value


@compiled()
def _word(data, at, stop, part):
    """Parse AM or PM, the name of a month, or an offset: its value, and the byte after it.

    The value is 0 or 12 hours, a month, or seconds; the byte is -1 if it is malformed.
    """
    bad = (np.int64(0), np.int64(-1))
    if part == _HALF:
        if stop - at < 2 or data[at + 1] | 32 != 109:  # m
            return bad
        first = data[at] | 32
        if first != 97 and first != 112:  # a, p
            return bad
        return np.int64(12 if first == 112 else 0), np.int64(at + 2)
    if part == _MONTH_NAME:
        if stop - at < 3:
            return bad
        for month in range(12):
            same = 0
            while same < 3 and data[at + same] | 32 == _MONTH_NAMES[3 * month + same]:
                same += 1
            if same == 3:
                return np.int64(month + 1), np.int64(at + 3)
        return bad
    if at < stop and data[at] == 90:  # Z
        return np.int64(0), np.int64(at + 1)
    if stop - at < 5 or (data[at] != 43 and data[at] != 45):
        return bad
    colon = 1 if data[at + 3] == 58 else 0
    if stop - at < 5 + colon:
        return bad
    hour, minute = _number(data, at + 1, 2), _number(data, at + 3 + colon, 2)
    if not (0 <= hour < 24 and 0 <= minute < 60):
        return bad
    seconds = (hour * 60 + minute) * 60
    return np.int64(-seconds if data[at] == 45 else seconds), np.int64(at + 5 + colon)


@compiled()
def _number(data, at, digits):
    """Return the number in some bytes; -1 if not all of them are digits."""
    value = np.int64(0)
    for i in range(at, at + digits):
        if np.uint8(data[i] - 48) >= 10:
            return np.int64(-1)
        value = value * 10 + np.int64(data[i] - 48)
    return value


@compiled()
def _days(year, month, day):
    """Return the days since 1970-01-01 of a date, or :data:`_NO_DATE`."""
    if not (1 <= year <= 9999 and 1 <= month <= 12 and day >= 1):
        return _NO_DATE
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    if day > _MONTH_DAYS[month - 1] + (leap and month == 2):
        return _NO_DATE
    # years that begin in March: the leap day is their last day
    year -= month <= 2
    month = (month + 9) % 12
    days = year * 365 + year // 4 - year // 100 + year // 400
    return days + (153 * month + 2) // 5 + day - 1 - 719_468
