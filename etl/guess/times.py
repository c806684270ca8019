"""Which format the times of a column have."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable

from nvt_torchrec.formats.spec.times import EPOCHS, ISO

_NAMED = re.compile(r"(time|date|day|hour|stamp|birth|dob|(^|_)(ts|at|on|when)$)", re.IGNORECASE)
_DATES = (
    "%Y/%m/%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%m/%d/%y", "%d/%m/%y", "%d.%m.%y",
    "%d-%b-%Y", "%d %b %Y", "%b %d, %Y",
)  # fmt: skip
_CLOCKS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
_SERVER_LOG = "%d/%b/%Y:%H:%M:%S %z"
_ISO = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z| UTC|[-+]\d\d(:?\d\d)?)?)?")
#: Digits only: how many, and the format.
_COMPACT = [(8, "%Y%m%d"), (8, "%y%m%d%H"), (10, "%Y%m%d%H"), (12, "%Y%m%d%H%M")]
_COMPACT += [(14, "%Y%m%d%H%M%S")]
#: Other texts and numbers are taken for times if they lie between these years.
_YEARS = range(1990, 2038)


def time_format(values: Iterable[str], name: str) -> str | None:
    """Return the format of a column's times, as a spec writes it; None if they are no times.

    Args:
        values: all texts of the column that are not missing, each once.
        name: the column's name: a number is taken for a time if the name suggests it; "" if
            columns have no names.
    """
    texts = list(values)
    if not texts:
        return None
    if all(map(_ISO.fullmatch, texts)):
        return ISO if _all_match(texts, ISO, range(1, 10_000)) else None
    if all(text.isascii() and text.isdigit() for text in texts):
        return _of_digits(texts) if not name or _NAMED.search(name) else None
    formats = [_SERVER_LOG, *(date + clock for date in _DATES for clock in _CLOCKS)]
    matching = [each for each in formats if _all_match(texts, each)]
    # 01/03, 02/03, … may be days of March or of different months: the rows of a log are near
    return min(matching, key=lambda each: _span(texts, each), default=None)


def to_time(text: str, time_format: str) -> datetime.datetime:
    """Return a time, UTC. Raises ValueError."""
    if time_format in EPOCHS:
        since = datetime.timedelta(microseconds=int(text) * EPOCHS[time_format])
        return datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + since
    if time_format == ISO:
        time = datetime.datetime.fromisoformat(text.removesuffix(" UTC"))
        return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
    time = datetime.datetime.strptime(text, time_format)
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


def _span(texts: list[str], its_format: str) -> datetime.timedelta:
    times = [to_time(text, its_format) for text in texts]
    return max(times) - min(times)


def _of_digits(texts: list[str]) -> str | None:
    widths = {len(text) for text in texts}
    formats = [its_format for width, its_format in _COMPACT if widths == {width}]
    formats += ["epoch_s", "epoch_ms", "epoch_us"]
    return next((each for each in formats if _all_match(texts, each)), None)


def _all_match(texts: list[str], its_format: str, years: range = _YEARS) -> bool:
    try:
        return all(to_time(text, its_format).year in years for text in texts)
    except (ValueError, OverflowError):
        return False
