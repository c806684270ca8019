"""Days in the names of a log's files (numbers and dates), and lists of days on a command line."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Iterable, Sequence

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.file_formats import INPUT_FORMATS

#: The endings of names of text files; ``INPUT_FORMATS`` has those of other formats.
_TEXT_ENDINGS = ("tsv", "txt", "csv", "dat", "data", "log", "json", "inter")
#: The endings that may follow a number or date: Spark's number of a file and its codec, the ending
#: of the format, and the ending of a compressed file.
_ENDINGS = r"(?:\.c\d+)?(?:\.snappy|\.gz|\.zstd)?(?:\.(?:{}))?(?:\.(?:gz|bz2|xz|zst))?"
#: Spark's id of a job, as in part-00017-01234567-89ab-cdef-0123-456789abcdef-c000.snappy.parquet.
_SPARK = r"(?:-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?:[-.]c\d+)?)?"
_DAY = r"day_(\d+)"
_DATE = r"(|.*[^0-9])(\d{4})([-_]?)(\d\d)\3(\d\d)"
_NUMBER = rf"(|.*[-_.=])(\d+){_SPARK}"
_PARTITION = re.compile(r"([^=]+)=([^=]+)")

_EPOCH = datetime.date(1970, 1, 1)
#: Numbers of days in this range (1997 to 2199) are shown as dates, because a log with 27 years of
#: numbered days is unlikely.
_FIRST_DATE = 10_000
_LAST_DATE = 84_005
#: The largest number of a day, because generations of a workflow keep days in 32 bits.
MAX_DAY = 2**31 - 1
#: The largest number of days in a range on the command line.
_MAX_RANGE = 1_000_000


@dataclasses.dataclass(frozen=True)
class DayName:
    """The day in the name of a file.

    Attributes:
        kind: ``day`` for ``day_3``, ``date`` or ``number``; ``natural`` for a file without a day,
            which is numbered by its position among the sorted files.
        prefix: The name before the number or date; the whole name of a ``natural`` file.
        number: The number; for a date, the days since 1970-01-01.
        digits: The number of digits if the number begins with 0, else 0.
    """

    kind: str
    prefix: str
    number: int
    digits: int = 0

    def format_name(self, number: int) -> str:
        """Return the name, without ending, of the file of another day."""
        if self.kind == "date":
            return str(to_date(number))
        return f"{self.prefix}{number:0{self.digits}d}"

    def format_flag(self, numbers: Iterable[int]) -> str:
        """Return days as ``--days`` takes them."""
        if self.kind == "date":
            return ",".join(self.format_name(number) for number in sorted(numbers))
        return ",".join(str(number) for number in sorted(numbers))


def parse_day_name(path: str) -> DayName | None:
    """Return the day in a file's name, or in its directory's, such as ``date=2024-10-30``."""
    *directories, name = re.split(r"[/\\]", path)
    parsed = _parse(name)
    if directories and (parsed is None or parsed.kind != "day"):
        return parse_partition_name(directories[-1]) or parsed
    return parsed


def format_day_title(path: str) -> str:
    """Return the name of a file's day for users; "" if ``day_N`` or no day is in its path."""
    name = parse_day_name(path)
    if name is None or name.kind == "day":
        return ""
    if name.kind == "date":
        return name.format_name(name.number)
    parts = path.split("/")
    if name.prefix.endswith("="):  # the day is in the name of the directory
        return "/".join(parts[-2:])
    return parts[-1]


def parse_partition_name(directory: str) -> DayName | None:
    """Return the day in the name of a directory such as ``date=2024-10-30`` or ``day=3``."""
    match = _PARTITION.fullmatch(directory)
    if match is None:
        return None
    parsed = _parse(match[2])
    if parsed is None or parsed.prefix:
        return None
    return dataclasses.replace(parsed, prefix=f"{match[1]}=")


def make_endings_pattern() -> str:
    """Return a regular expression of the endings of data files, without the dot."""
    endings = [*_TEXT_ENDINGS]
    for file_format in INPUT_FORMATS.values():
        endings += file_format.endings
    return "|".join(re.escape(ending) for ending in endings)


def _parse(name: str) -> DayName | None:
    """Return the day in a name; None if it has neither number nor date."""
    endings = _ENDINGS.format(make_endings_pattern())
    match = re.fullmatch(_DAY + endings, name)
    if match:
        return DayName("day", "day_", int(match[1]))
    match = re.fullmatch(_DATE + endings, name)
    if match:
        number = _days_since_1970(int(match[2]), int(match[4]), int(match[5]))
        if number is not None:
            return DayName("date", match[1], number)
    match = re.fullmatch(_NUMBER + endings, name)
    if match and int(match[2]) <= MAX_DAY:
        digits = len(match[2]) if match[2].startswith("0") else 0
        return DayName("number", match[1], int(match[2]), digits)
    return None


def _days_since_1970(year: int, month: int, day: int) -> int | None:
    """Return the number of a date; None if it does not exist, or is not from 1970 to 2199."""
    if not 1970 <= year < 2200:
        return None
    try:
        return (datetime.date(year, month, day) - _EPOCH).days
    except ValueError:
        return None


def to_date(number: int) -> datetime.date:
    """Return the date of a day's number."""
    return _EPOCH + datetime.timedelta(days=number)


def format_day(number: int) -> str:
    """Format the number of a day, as a date if it is in the range of plausible dates.

    A workflow keeps only the numbers of its days, not the names of its files.
    """
    return str(to_date(number)) if _FIRST_DATE <= number <= _LAST_DATE else str(number)


def format_days(days: Sequence[int]) -> str:
    """Format days as ``0-3, 7`` or ``2024-10-28..2024-10-31``."""
    runs: list[list[int]] = []
    for day in days:
        if runs and day == runs[-1][1] + 1:
            runs[-1][1] = day
        else:
            runs.append([day, day])
    texts = []
    for first, last in runs:
        text = format_day(first)
        if last > first:
            dash = ".." if "-" in text else "-"  # dates contain dashes
            text += f"{dash}{format_day(last)}"
        texts.append(text)
    return ", ".join(texts)


def parse_days(text: str) -> frozenset[int]:
    """Parse a list of days, such as ``0-3,7`` or ``2024-10-28..2024-10-31``.

    A date stands for the number of days since 1970-01-01, as in the names of files.

    Args:
        text: Numbers, dates, and ranges of them, which include both ends.

    Raises:
        SettingsError: The text is malformed, or a range ends before it begins.
    """
    days: set[int] = set()
    for part in text.split(","):
        begin, dots, end = part.partition("..")
        match = re.fullmatch(r"\s*(\d+)-(\d+)\s*", part)
        if match:
            begin, end = match[1], match[2]
        elif not dots:
            end = begin
        first = _parse_day(begin)
        last = _parse_day(end)
        if first is None or last is None:
            raise SettingsError(
                f"days {text!r}: cannot read {part!r}",
                "write for example 0-3,7 or 2024-10-28..2024-10-31",
            )
        if last < first:
            raise SettingsError(
                f"days {text!r}: {part!r} ends before it begins", "write the earlier day first"
            )
        if last - first > _MAX_RANGE:
            raise SettingsError(
                f"days {text!r}: {part!r} is {last - first:,} days",
                f"give at most {_MAX_RANGE:,} days",
            )
        days.update(range(first, last + 1))
    return frozenset(days)


def _parse_day(text: str) -> int | None:
    """Parse a number, or a date as ``2024-10-30`` or ``20241030``; None for other text."""
    match = re.fullmatch(r"(\d{4})(-?)(\d\d)\2(\d\d)", text.strip())
    if match:
        number = _days_since_1970(int(match[1]), int(match[3]), int(match[4]))
        if number is not None:
            return number
    return int(text) if re.fullmatch(r"\s*\d+\s*", text) else None


def make_natural_key(path: str) -> list[tuple[int, int | str]]:
    """Return a key that sorts ``part-2`` before ``part-10``."""
    key: list[tuple[int, int | str]] = []
    for run in re.findall(r"\d+|\D+", path):
        key.append((0, int(run)) if run.isdigit() else (1, run))
    return key
