"""What the values of a column are: numbers, hexadecimal digits, times, lists or texts."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.base import LARGEST_FLOAT32
from nvt_torchrec.formats.feature_spec.raw_types.time import EPOCHS, ISO

#: Texts that mean a missing value in any column, and those that do so among numbers only.
NULLS = ("?", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "\\N", "None")
_NULLS_OF_NUMBERS = ("-", "--", "na", "none", ".", "nil", "unknown", "inf", "-inf")
#: Of an integer; longer ones are in no range, and Python converts no text of 4,300 digits.
_MOST_DIGITS = 300
_INT = re.compile(r"-?\d+")
_FLOAT = re.compile(r"-?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_LENIENT_INT = re.compile(r"[-+]?\d+(\.0+)?")
_HEX = re.compile("[0-9a-fA-F]{8}")
_SHORT_HEX = re.compile("[0-9a-fA-F]{1,8}")
#: 1,234.50 or 1.234,50: a number, and no list of numbers.
_COMMA_NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?|[-+]?[\d.]*\d,\d+")
#: The signs of currencies, and of a percentage, before or behind a number.
_UNIT = re.compile(r"[-+]?([$€£¥₹₽₩%]) ?[\d.,-]*\d|[-+]?\d[\d.,]* ?([$€£¥₹₽₩%])")
_GROUPED = re.compile(r"[-+]?(\d+|[1-9]\d{0,2}(,\d{3})+)(\.\d*)?")
#: An item of a list with spaces between, such as 17 or N55689; 017 may be part of a number.
_CODE = re.compile(r"-?(0|[1-9]\d*)|[A-Za-z]+\d+")
#: How programs write booleans, in lower case; 1 and 0 alone are numbers.
_BOOLEANS = {"true", "false", "1", "0"}
_SEPARATORS = "|,;^ "
#: Names of columns whose numbers may be times.
_TIMES = re.compile(
    r"(?!.*[\W_]id$)(time|date|day|hour|stamp|birth|dob|(^|_)(ts|at|on|when)$)", re.IGNORECASE
)
_DATES = (
    "%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%m/%d/%y", "%d/%m/%y",
    "%d.%m.%y", "%d-%b-%Y", "%d %b %Y", "%b %d, %Y", "%m %d, %Y",
)  # fmt: skip
_CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S %z", " %I:%M %p", " %I:%M:%S %p")
_SERVER_LOG = "%d/%b/%Y:%H:%M:%S %z"
_ISO = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z| UTC|[-+]\d\d(:?\d\d)?)?)?")
#: Formats of digits only, by how many there are.
_COMPACT = {8: ["%Y%m%d", "%y%m%d%H"], 10: ["%Y%m%d%H"], 12: ["%Y%m%d%H%M"], 14: ["%Y%m%d%H%M%S"]}
#: Texts and numbers that are not ISO are taken for times if they lie between these years.
_YEARS = range(1990, 2038)


@dataclasses.dataclass(frozen=True)
class Profile:
    """What is known of a column.

    Attributes:
        name: in the file; of text without a header the place holder that the spec uses.
        kind: "empty", "int", "float", "bool", "hex32", "time", "string" or, of lists, their items'
            kind.
        rows: how many were seen.
        counts: how often each value was seen, without missing ones and spaces around.
        missing: how many values are missing.
        reading: how values are written, as keys of the spec: nulls, trim, lenient, thousands, unit.
        time_format: of times; "" for parquet's own.
        separator: of lists in text.
        floating: whether the file holds floats, though these are integers.
        multi_hot: whether values are lists.
        unread: why the column cannot be read; "" if it can.
        texts: the value of each row as it is written, of parquet its text, "" where missing.
    """

    name: str
    kind: str
    rows: int
    counts: Counter[str]
    missing: int = 0
    reading: dict[str, Any] = dataclasses.field(default_factory=dict)
    time_format: str = ""
    separator: str = ""
    floating: bool = False
    multi_hot: bool = False
    unread: str = ""
    texts: Sequence[str] = ()

    @property
    def plain_name(self) -> str:
        """The name without what RecBole's files add: ``rating`` of ``rating:float``."""
        return re.sub(r":(token|float)(_seq)?$", "", self.name)

    @property
    def distinct(self) -> int:
        """The number of distinct values."""
        return len(self.counts)

    @property
    def present(self) -> int:
        """The number of values that are not missing."""
        return self.rows - self.missing

    @property
    def often(self) -> float:
        """How often a value is there, on average."""
        return self.present / max(self.distinct, 1)

    @functools.cached_property
    def numbers(self) -> list[float]:
        """The distinct numbers in the order of the rows."""
        return list(map(self.number, self.counts))

    @property
    def least(self) -> float:
        """The smallest number."""
        return min(self.numbers)

    @property
    def most(self) -> float:
        """The largest number."""
        return max(self.numbers)

    def number(self, text: str) -> float:
        """Return the number that a text is."""
        text = _bare(text, self.reading)
        is_int = _INT.fullmatch(text) and len(text) <= _MOST_DIGITS
        return int(text) if is_int else float(text)

    def of_rows(self) -> list[str | None]:
        """Return the value of each row without spaces around, None where it is missing."""
        nulls = {"", *self.reading.get("nulls", ())}
        stripped = (text.strip(" \t") for text in self.texts)
        return [None if text in nulls else text for text in stripped]

    def fits(self, raw: str) -> bool:
        """Whether all numbers are within the limits of a raw type."""
        return RAW_TYPES[raw].contains(self.least) and RAW_TYPES[raw].contains(self.most)

    def time(self, text: str) -> datetime.datetime:
        """Return the time that a text is."""
        return to_time(text, self.time_format)


def profile(values: Sequence[str], name: str, *, lists: bool = True) -> Profile:
    """Return what a column of texts is.

    Args:
        values: of each row; "" where missing.
        name: of the column; "" if it has none.
        lists: whether a text may be a list of values.
    """
    raw = Counter(values)
    counts: Counter[str] = Counter()
    for value, often in raw.items():
        counts[value.strip(" \t")] += often
    counts.pop("", None)
    nulls = _null_texts(counts)
    reading: dict[str, Any] = {"nulls": nulls} if nulls else {}
    if any(value != value.strip(" \t") for value in raw):
        reading["trim"] = True
    counts = Counter({text: often for text, often in counts.items() if text not in nulls})
    missing = len(values) - sum(counts.values())
    texts = Profile(name, "empty", len(values), counts, missing, reading, texts=values)
    if not counts:
        return texts
    format = time_format(list(counts), name)
    if format is not None:
        return dataclasses.replace(texts, kind="time", time_format=format)
    numbers = _as_numbers(texts) or _as_hex(texts)
    if numbers:
        return numbers
    if {text.lower() for text in counts} <= _BOOLEANS:
        return dataclasses.replace(texts, kind="bool")
    separator = _list_separator(counts) if lists else ""
    return _as_lists(texts, separator) if separator else dataclasses.replace(texts, kind="string")


def _as_lists(texts: Profile, separator: str) -> Profile:
    items: Counter[str] = Counter()
    reading = texts.reading
    for text, often in texts.counts.items():
        for item in items_of(text, separator):
            items[item.strip()] += often
            if item != item.strip():
                reading = {**reading, "trim": True}
    changes: dict[str, Any] = {"reading": reading, "separator": separator, "multi_hot": True}
    lists = dataclasses.replace(texts, kind="string", counts=items, **changes)
    numbers = _as_numbers(lists) or _as_hex(lists)
    if numbers and numbers.kind != "float" and numbers.reading == reading:
        return dataclasses.replace(lists, kind=numbers.kind)
    if any(map(_in_brackets, texts.counts)):
        why = f"lists of texts in brackets: write them without, with {separator} between"
        return dataclasses.replace(lists, kind="empty", unread=why)
    return lists


def _in_brackets(text: str) -> bool:
    return text[:1] == "[" and text[-1:] == "]"


def items_of(text: str, separator: str) -> list[str]:
    """Return the items of a list, which may be in brackets or end with a separator."""
    text = text[1:-1] if _in_brackets(text) else text
    return text.removesuffix(separator).split(separator) if text.strip() else []


def _null_texts(counts: Counter[str]) -> list[str]:
    """Return the texts among the values that mean a missing value."""
    codes = sum(bool(re.fullmatch("[A-Z]{2}", text)) for text in counts) > len(counts) / 2
    nulls = {text for text in NULLS if text in counts and not (text == "NA" and codes)}
    others = [text for text in counts if text not in nulls and text not in _NULLS_OF_NUMBERS]
    if others and all(_LENIENT_INT.fullmatch(text) or _FLOAT.fullmatch(text) for text in others):
        nulls |= {text for text in _NULLS_OF_NUMBERS if text in counts}
    return sorted(nulls)


def _as_numbers(of: Profile) -> Profile | None:
    """Return the profile of a column of numbers, or None."""
    texts, reading = list(of.counts), dict(of.reading)
    if unit := next(filter(None, map(_UNIT.fullmatch, texts)), None):
        reading["unit"] = unit[1] or unit[2]
        texts = [_bare(text, reading) for text in texts]
    if any("," in text for text in texts) and all(map(_GROUPED.fullmatch, texts)):
        reading["thousands"] = ","
        texts = [text.replace(",", "") for text in texts]
    of = dataclasses.replace(of, reading=reading)
    if all(map(_INT.fullmatch, texts)) and any(re.fullmatch(r"-?0\d+", text) for text in texts):
        return None  # 00501 is not 501
    whole = all(map(_LENIENT_INT.fullmatch, texts))
    if not whole and not all(_FLOAT.fullmatch(text.removeprefix("+")) for text in texts):
        return None
    if max(map(abs, of.numbers)) > LARGEST_FLOAT32:
        return None
    if not all(map((_INT if whole else _FLOAT).fullmatch, texts)):
        reading["lenient"] = True
    return dataclasses.replace(of, kind="int" if whole else "float", reading=reading)


def _bare(text: str, reading: dict[str, Any]) -> str:
    """Return the text of a number without its unit, and without commas between its digits."""
    for key in ("unit", "thousands"):
        text = text.replace(reading.get(key, ""), "").strip()
    return text


def _as_hex(of: Profile) -> Profile | None:
    """Return the profile of a column of hashes with up to 8 hexadecimal digits, or None."""
    eight = sum(bool(_HEX.fullmatch(text)) for text in of.counts)
    letters = any(not text.isdigit() for text in of.counts)
    if not all(_SHORT_HEX.fullmatch(text) for text in of.counts) or eight < 0.9 * of.distinct:
        return None
    if not letters and of.distinct > min(eight, 4):  # hashes of digits only are rare: 00501234
        return None
    return dataclasses.replace(of, kind="hex32")


def _list_separator(counts: Counter[str]) -> str:
    """Return the character between the items of lists; "" where texts are no lists.

    Texts are lists if there are several in a tenth of them, no item is empty, and all items are
    integers, or fewer than the texts, because they come back in other lists.
    """
    numbers_alone = all(map(_COMMA_NUMBER.fullmatch, counts))
    for separator in _SEPARATORS.replace(",", "" if numbers_alone else ","):
        lists = [items_of(text, separator) for text in counts]
        if sum(len(each) > 1 for each in lists) < max(2, 0.1 * len(counts)):
            continue
        items = {item for each in lists for item in each}
        bare = {item.strip() for item in items}
        numbers = all(_INT.fullmatch(item) for item in bare)
        if separator == " ":  # also within a text
            known = all(map(_CODE.fullmatch, bare))
        else:
            known = numbers or (bare == items and len(items) < len(counts))
        if known and all(bare):
            return separator
    return ""


def time_format(texts: list[str], name: str) -> str | None:
    """Return the format of a column's times, as a spec writes it; None if they are no times.

    Args:
        texts: the column's values that are not missing, each once, at least one.
        name: the column's name: digits are taken for a time if it suggests this or is "".
    """
    if all(map(_ISO.fullmatch, texts)):
        return ISO if _times(texts, ISO, range(1, 10_000)) else None
    digits = all(text.isascii() and text.isdigit() for text in texts)
    if digits and name and not _TIMES.search(name):
        return None
    formats = [_SERVER_LOG, *(date + clock for date in _DATES for clock in _CLOCKS)]
    if digits:
        widths = {len(text) for text in texts}
        formats = [*(_COMPACT.get(widths.pop(), []) if len(widths) == 1 else []), *EPOCHS]
    read = {format: times for format in formats if (times := _times(texts, format))}
    if digits:
        return next(iter(read), None)
    # 01/03, 02/03, … may be days of March or of different months: the rows of a log are near
    return min(read, key=lambda format: max(read[format]) - min(read[format]), default=None)


def _times(
    texts: list[str], time_format: str, years: range = _YEARS
) -> list[datetime.datetime] | None:
    """Return times; None if some text is none, or lies in another year."""
    times = []
    try:
        for text in texts:
            times.append(to_time(text, time_format))
            if times[-1].year not in years:
                return None
    except (ValueError, OverflowError):
        return None
    return times


def to_time(text: str, time_format: str) -> datetime.datetime:
    """Return a time, UTC. Raises ValueError."""
    if time_format in EPOCHS:
        since = datetime.timedelta(microseconds=int(text) * EPOCHS[time_format])
        return datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + since
    if time_format == ISO:
        time = datetime.datetime.fromisoformat(text.removesuffix(" UTC"))
    else:
        time = datetime.datetime.strptime(text, time_format)
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
