"""Which format the times of a column have."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable

from nvt_torchrec.formats.spec.times import EPOCHS, ISO

_NAMED = re.compile(r"(time|date|day|hour|stamp|birth|dob|(^|_)(ts|at|on|when)$)", re.IGNORECASE)
#: Patterns with separators: a regular expression, and the format that it suggests.
_PATTERNS = [
    (r"\d{4}/\d\d/\d\d", "%Y/%m/%d"),
    (r"\d{1,2}\.\d{1,2}\.\d{4}", "%d.%m.%Y"),
    (r"\d{1,2}/\d{1,2}/\d{4}", "%m/%d/%Y"),
    (r"\d{1,2}/\d{1,2}/\d{4}", "%d/%m/%Y"),
    (r"\d{1,2}-\d{1,2}-\d{4}", "%d-%m-%Y"),
    (r"\d{1,2}/\d{1,2}/\d\d", "%m/%d/%y"),
    (r"\d{1,2}/\d{1,2}/\d\d", "%d/%m/%y"),
    (r"\d{1,2}\.\d{1,2}\.\d\d", "%d.%m.%y"),
    (r"\d{1,2}-[A-Za-z]{3}-\d{4}", "%d-%b-%Y"),
    (r"\d{1,2} [A-Za-z]{3} \d{4}", "%d %b %Y"),
    (r"[A-Za-z]{3} \d{1,2}, \d{4}", "%b %d, %Y"),
]
_CLOCKS = [("", ""), (r" \d{1,2}:\d\d", " %H:%M"), (r" \d{1,2}:\d\d:\d\d", " %H:%M:%S")]
_CLOCKS += [(r" \d{1,2}:\d\d [AaPp][Mm]", " %I:%M %p")]
_CLOCKS += [(r" \d{1,2}:\d\d:\d\d [AaPp][Mm]", " %I:%M:%S %p")]
_SERVER_LOG = re.compile(r"\d\d/[A-Za-z]{3}/\d{4}:\d\d:\d\d:\d\d [-+]\d{4}")
_ISO = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z| UTC|[-+]\d\d(:?\d\d)?)?)?")
#: Digits only: how many, and the format.
_COMPACT = [(8, "%Y%m%d"), (8, "%y%m%d%H"), (10, "%Y%m%d%H"), (12, "%Y%m%d%H%M")]
_COMPACT += [(14, "%Y%m%d%H%M%S")]
#: Numbers are taken for times if they lie between these.
_FIRST, _LAST = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (1990, 2038))


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
    if all(_ISO.fullmatch(text) for text in texts):
        return ISO if all(_is_iso(text) for text in texts) else None
    if all(text.isascii() and text.isdigit() for text in texts):
        return _of_digits(texts) if not name or _NAMED.search(name) else None
    if _SERVER_LOG.fullmatch(texts[0]) and _all_match(texts, "%d/%b/%Y:%H:%M:%S %z"):
        return "%d/%b/%Y:%H:%M:%S %z"
    formats = [
        its_format + suffix
        for date, its_format in _PATTERNS
        for clock, suffix in _CLOCKS
        if re.fullmatch(date + clock, texts[0]) and _all_match(texts, its_format + suffix)
    ]
    # 01/03, 02/03, … may be days of March or of different months: the rows of a log are near
    return min(formats, key=lambda each: _span(texts, each), default=None)


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


def _is_iso(text: str) -> bool:
    try:
        to_time(text, ISO)
    except ValueError:
        return False
    return True


def _of_digits(texts: list[str]) -> str | None:
    widths = {len(text) for text in texts}
    for width, its_format in _COMPACT:
        if widths == {width} and _all_match(texts, its_format):
            return its_format
    for its_format in ("epoch_s", "epoch_ms", "epoch_us"):
        if max(widths) < 20 and _all_match(texts, its_format):
            return its_format
    return None


def _all_match(texts: list[str], its_format: str) -> bool:
    try:
        return all(_FIRST <= to_time(text, its_format) < _LAST for text in texts)
    except (ValueError, OverflowError):
        return False
