"""Formats of times in logs."""

from __future__ import annotations

import datetime
import re

from nvt_torchrec.base.errors import SettingsError

#: Numbers of seconds, milliseconds or microseconds since 1970-01-01 00:00 UTC.
EPOCHS = {"epoch_s": 1_000_000, "epoch_ms": 1000, "epoch_us": 1}
#: The directives of a format, as in ``strptime``, and the most digits that each takes; 0 for AM or
#: PM, the first three letters of English months, and an offset from UTC (Z, +0200 or +02:00).
DIRECTIVES = {"Y": 4, "y": 2, "m": 2, "d": 2, "H": 2, "M": 2, "S": 2, "f": 6, "I": 2}
DIRECTIVES |= {"p": 0, "b": 0, "z": 0}
#: "" stands for ISO 8601: a date, or a date and a time, with or without a fraction and "Z".
ISO = ""
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def check_time_format(format: str, where: str) -> None:
    """Raise :class:`SettingsError` unless ``format`` is one of a time; errors begin with ``where``.

    A format is :data:`ISO`, one of :data:`EPOCHS`, or a pattern such as ``%y%m%d%H``, with
    :data:`DIRECTIVES` only, each at most once, and a year. Times are UTC.
    """
    if format == ISO or format in EPOCHS:
        return
    used = re.findall("%(.?)", format)
    known = all(name in DIRECTIVES for name in used)
    if not used or not known or len(set(used)) < len(used) or ("Y" in used) == ("y" in used):
        raise SettingsError(
            f"{where}time_format = {format!r}",
            f"{', '.join(EPOCHS)}, or a pattern with a year, such as %Y-%m-%d %H:%M:%S; of "
            f"%{' %'.join(DIRECTIVES)}, each at most once",
        )
    if ("I" in used) != ("p" in used) or {"I", "H"} <= set(used) or {"m", "b"} <= set(used):
        raise SettingsError(
            f"{where}time_format = {format!r}",
            "an hour is %H, or %I with %p (AM or PM); a month is %m or %b",
        )


def parse_iso(text: str, where: str) -> int:
    """Return the microseconds since 1970 of an ISO 8601 date or time, UTC unless it says otherwise.

    Raises:
        SettingsError: It is none; the message begins with ``where``.
    """
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise SettingsError(
            f"{where} = {text!r}", "write a date or time such as 2014-10-30 12:00:00"
        ) from None
    return microseconds_of(time)


def microseconds_of(time: datetime.datetime) -> int:
    """Return the microseconds since 1970 of a time, UTC unless it has a time zone."""
    if time.tzinfo is None:
        time = time.replace(tzinfo=datetime.UTC)
    return (time - _EPOCH) // datetime.timedelta(microseconds=1)
