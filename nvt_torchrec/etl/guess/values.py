"""Find what the values of a column are: numbers, times, lists or strings."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import strings
from nvt_torchrec.base.number_text import SYNTAX, ParsedText
from nvt_torchrec.etl.guess.names import is_called
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.time import EPOCHS, ISO
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.vectors import MAX_WIDTH

#: Strings that mean a missing value in any column, and those that do so only among numbers.
NULLS = ("?", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "\\N", "None")
_NULLS_OF_NUMBERS = ("-", "--", "na", "none", ".", "nil", "unknown", "inf", "-inf")
#: Up to this many distinct words in a column of at least this many distinct numbers mean missing
#: values, if they are in at most a hundredth of the rows.
_MAX_WORDS = 3
_MIN_NUMBERS = 20
#: Signs that are not part of a number, and numbers with such signs: $5, 5 %, 1,000, 1.234,5.
_SIGN = re.compile("[,$€£¥₹₽₩%]")
_AMOUNT = re.compile(
    r"[-+]?[$€£¥₹₽₩%]? ?-?(\d+|\d{1,3}([.,])\d{3}(\2\d{3})*)([.,]\d*)? ?[$€£¥₹₽₩%]?"
)
_INT = re.compile(r"-?\d+")
_LEADING_ZERO = re.compile(r"-?0\d+")
#: An item of a space-separated list, such as 17 or N55689; 017 may be a part of a phone number.
_CODE = re.compile(r"-?(0|[1-9]\d*)|[A-Za-z]+\d+")
#: Booleans in lower case; a column with only 1 and 0 has numbers.
_BOOLEANS = {"true", "false", "1", "0"}
_SEPARATORS = "|,;^ "
_DATES = (
    "%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%m/%d/%y", "%d/%m/%y",
    "%d.%m.%y", "%d-%b-%Y", "%d %b %Y", "%b %d, %Y", "%m %d, %Y",
)  # fmt: skip
_CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S %z")
_SERVER_LOG = "%d/%b/%Y:%H:%M:%S %z"
#: Time formats with only digits, by the number of digits.
_COMPACT = {8: ["%Y%m%d", "%y%m%d%H"], 10: ["%Y%m%d%H"], 12: ["%Y%m%d%H%M"], 14: ["%Y%m%d%H%M%S"]}
#: Strings and numbers that are not ISO are times only if they lie in 1990 to 2037; microseconds.
_FIRST, _END = np.array(["1990", "2038"], "M8[us]").astype(np.int64)
#: RecBole's types, which follow the names of columns: an id or word, a number, lists of these.
DECLARED = ("token", "token_seq", "float", "float_seq")
#: Numbers that may be times; some programs write them as floats: 978300760.0.
_DIGITS = re.compile(r"[0-9]+(\.0+)?")
#: The number of values that are tried first: most formats fail on one of them.
_NUM_TRIED = 3


@dataclasses.dataclass(frozen=True)
class Profile:
    """The type and the values of a column in a sample.

    Attributes:
        name: The name in the file, without a declared type; for text without a header, the
            placeholder name that the spec uses.
        kind: "empty", "int", "bigint" (more than 53 bits), "float", "bool", "hex32", "time" or
            "string"; for lists, the kind of the items. Columns that cannot be read are "empty".
        rows: The number of rows of the sample.
        counts: How often each value occurs (for lists, each item), without missing values and
            without surrounding spaces.
        missing: The number of missing values.
        reading: How values are written, as keys of the spec: nulls, trim, lenient.
        numbers: The distinct values in the order of ``counts`` as numbers; times are microseconds
            since 1970.
        time_format: The format of times; "" for parquet's own.
        separator: The separator of lists in text.
        floating: Whether the file stores the integers as floats.
        multi_hot: Whether values are lists.
        unread: Why the column cannot be read; "" if it can.
        codes: int64 [rows], the index in ``counts`` of each row's value, for lists of the whole
            list; -1 if missing.
        header: The name in the file if it ends with a declared type: ``user_id:token``; else "".
        declared: The declared type, one of ``DECLARED``; else "".
        width: The length of vectors; 0 for other columns. A log cannot have vectors, only its
            tables can, so their kind is "empty".
        half: Whether the file stores vectors as float16.
    """

    name: str
    kind: str
    rows: int
    counts: Counter[str]
    missing: int = 0
    reading: dict[str, Any] = dataclasses.field(default_factory=dict)
    numbers: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    time_format: str = ""
    separator: str = ""
    floating: bool = False
    multi_hot: bool = False
    unread: str = ""
    codes: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    header: str = ""
    declared: str = ""
    width: int = 0
    half: bool = False

    @property
    def source(self) -> str:
        """The name of the column in the file, as a spec refers to it."""
        return self.header or self.name

    @property
    def distinct(self) -> int:
        """The number of distinct values."""
        return len(self.counts)

    @property
    def present(self) -> int:
        """The number of values that are not missing."""
        return self.rows - self.missing

    @property
    def mean_count(self) -> float:
        """How often a distinct value occurs on average."""
        return self.present / max(self.distinct, 1)

    @property
    def is_number(self) -> bool:
        """Whether a dense column can hold the values."""
        return self.kind in ("int", "float") and not self.multi_hot

    def sorted_numbers(self) -> np.ndarray:
        """Return the number of each row that has one, sorted."""
        return np.sort(np.repeat(self.numbers, list(self.counts.values())))

    def fits(self, raw: str) -> bool:
        """Return True if all numbers are within the limits of a raw type."""
        kind = RAW_TYPES[raw]
        return kind.contains(self.numbers.min()) and kind.contains(self.numbers.max())


def profile(values: Sequence[str], name: str, *, lists: bool = True, declared: str = "") -> Profile:
    """Find the type of a column of strings.

    Args:
        values: The string of each row; "" if it is missing.
        name: The name of the column; "" if it has none.
        lists: Whether a string may be a list of values.
        declared: The type that the file declares, one of ``DECLARED``; else "".
    """
    stripped = [value.strip(" \t") for value in values]
    counts = Counter(stripped)
    nulls = _find_nulls(counts)
    reading: dict[str, Any] = {"nulls": nulls} if nulls else {}
    if any(map(operator.ne, stripped, values)):
        reading["trim"] = True
    missing = sum(counts.pop(text, 0) for text in ("", *nulls))
    codes_by_text = {text: code for code, text in enumerate(counts)}
    codes = np.array([codes_by_text.get(text, -1) for text in stripped], np.int64)
    column = Profile(
        name, "empty", len(values), counts, missing, reading, codes=codes, declared=declared
    )
    if not counts:
        return column
    if declared == "float_seq":
        return dataclasses.replace(column, unread="lists of numbers can only be read as ids")
    if declared == "token_seq":
        return _split_lists(column, " ")
    if declared == "token":
        ids = _find_numbers(column) or _find_hashes(column)
        if ids is None or ids.kind == "float":
            return dataclasses.replace(column, kind="string")
        return ids
    format = find_time_format(list(counts), name)
    if format is not None:
        times = _parse(list(counts), "time", time_format=format).values
        return dataclasses.replace(column, kind="time", time_format=format, numbers=times)
    numbers = _find_numbers(column) or _find_hashes(column)
    if numbers:
        return numbers
    if {text.lower() for text in counts} <= _BOOLEANS:
        return dataclasses.replace(column, kind="bool")
    if any(map(_SIGN.search, counts)) and all(map(_AMOUNT.fullmatch, counts)):
        why = (
            "numbers with signs: write them without $, % and separators of thousands; "
            'decimal = "," in [input] reads a decimal comma'
        )
        return dataclasses.replace(column, unread=why)
    width, separator = _find_vectors(counts) if lists else (0, "")
    if width:
        vectors = make_vector(name, len(values), missing, width)
        return dataclasses.replace(vectors, separator=separator)
    separator = _find_list_separator(counts) if lists else ""
    if separator:
        return _split_lists(column, separator)
    return dataclasses.replace(column, kind="string")


def _parse(texts: Sequence[str], raw: str, **keys: Any) -> ParsedText:
    """Parse texts with the reader of a raw type."""
    array = strings(texts).view(pa.binary())
    return RAW_TYPES[raw].from_text(array, np.zeros(len(texts), bool), Read("", raw, **keys))


def _can_parse(texts: Sequence[str], raw: str, **keys: Any) -> bool:
    """Return True if the reader of a raw type accepts all texts."""
    return not _parse(texts, raw, **keys).code.any()


def _find_nulls(counts: Counter[str]) -> list[str]:
    """Return the values that mean a missing value."""
    nulls = {text for text in NULLS if text in counts}
    signs = {text for text in _NULLS_OF_NUMBERS if text in counts}
    others = [text for text in counts if text and text not in nulls | signs]
    words = {text for text in others if not re.search(r"\d", text)}
    numbers = [text for text in others if text not in words]
    num_words = sum(counts[text] for text in words)
    is_rare = len(words) <= _MAX_WORDS and num_words <= 0.01 * counts.total()
    may_be_nulls = not words or (is_rare and len(numbers) >= _MIN_NUMBERS)
    if may_be_nulls and numbers and _can_parse(numbers, "float", lenient=True):
        nulls |= signs | words
    return sorted(nulls)


def _find_numbers(column: Profile) -> Profile | None:
    """Return the profile of a column of numbers, or None."""
    texts = list(column.counts)
    options: tuple[dict[str, Any], ...] = ({}, {"lenient": True})
    for kind, lenient in itertools.product(("int", "float"), options):
        parsed = _parse(texts, kind, **lenient)
        if parsed.code.any():
            is_too_large = kind == "int" and not lenient and not (parsed.code == SYNTAX).any()
            if not is_too_large:
                continue
            kind = "bigint"
        if kind != "float" and any(map(_LEADING_ZERO.fullmatch, texts)):
            return None  # codes: 00501 is not 501
        reading = column.reading | lenient
        return dataclasses.replace(column, kind=kind, reading=reading, numbers=parsed.values)
    return None


def _find_hashes(column: Profile) -> Profile | None:
    """Return the profile of a column of hashes with up to 8 hexadecimal digits, or None."""
    texts = list(column.counts)
    num_full = sum(len(text) == 8 for text in texts)
    if num_full < 0.9 * len(texts) or not _can_parse(texts, "hex32"):
        return None
    if "".join(texts).isdigit() and len(texts) > min(num_full, 4):
        return None  # hashes with only digits are rare, so 00501234 is a code
    return dataclasses.replace(column, kind="hex32")


def _split_lists(column: Profile, separator: str) -> Profile:
    """Return the profile of a column of lists, given the profile of their texts."""
    items: Counter[str] = Counter()
    reading = dict(column.reading)
    for text, count in column.counts.items():
        for item in split_items(text, separator):
            items[item.strip()] += count
            if item != item.strip():
                reading["trim"] = True
    lists = dataclasses.replace(column, counts=items, reading=reading)
    numbers = _find_numbers(lists) or _find_hashes(lists)
    kind = "string"
    unread = ""
    if numbers and numbers.kind != "float" and numbers.reading == reading:
        kind = numbers.kind
    elif any(map(_is_bracketed, column.counts)):
        unread = f"lists of strings in brackets: write only the items, separated by {separator}"
        kind = "empty"
    return dataclasses.replace(lists, kind=kind, unread=unread, separator=separator, multi_hot=True)


def make_vector(name: str, rows: int, missing: int, width: int) -> Profile:
    """Return the profile of a column of lists of numbers of one length."""
    why = f"lists of {width} numbers: put them into a table with a [[vector]], see docs/vectors.md"
    return Profile(name, "empty", rows, Counter(), missing, unread=why, width=width, multi_hot=True)


def _find_vectors(counts: Counter[str]) -> tuple[int, str]:
    """Return the length and the separator of lists that are vectors; 0 and "" if texts are not.

    Lists are vectors if all have the same length, of at least two numbers, and some number has a
    fraction: integers may be ids.
    """
    for separator in _SEPARATORS:
        lists = [split_items(text, separator) for text in counts]
        width = len(lists[0])
        if not 2 <= width <= MAX_WIDTH or any(len(each) != width for each in lists):
            continue
        items = [item.strip() for item in itertools.chain.from_iterable(lists)]
        if all(items) and _can_parse(items, "float") and not _can_parse(items, "int"):
            return width, separator
    return 0, ""


def _is_bracketed(text: str) -> bool:
    return text[:1] == "[" and text[-1:] == "]"


def split_items(text: str, separator: str) -> list[str]:
    """Split a list, which may be in brackets or end with a separator."""
    text = text[1:-1] if _is_bracketed(text) else text
    return text.removesuffix(separator).split(separator) if text.strip() else []


def _find_list_separator(counts: Counter[str]) -> str:
    """Return the separator of lists; "" if texts are not lists.

    Texts are lists if a tenth of them have several items, no item is empty, and the items look like
    ids: all are integers, or there are fewer distinct items than texts, because items recur.
    """
    for separator in _SEPARATORS:
        lists = [split_items(text, separator) for text in counts]
        if sum(len(each) > 1 for each in lists) < max(2, 0.1 * len(counts)):
            continue
        items = set(itertools.chain.from_iterable(lists))
        bare = {item.strip() for item in items}
        if separator == " ":  # also between the words of a text
            are_ids = all(map(_CODE.fullmatch, bare))
        else:
            integers = all(map(_INT.fullmatch, bare))
            are_ids = integers or (bare == items and len(items) < len(counts))
        if are_ids and all(bare):
            return separator
    return ""


def find_time_format(texts: list[str], name: str) -> str | None:
    """Return the format of a column's times, as a spec writes it; None if they are not times.

    Args:
        texts: The distinct values, at least one, without missing ones.
        name: The column's name; values of only digits are times if the name suggests it or is "".
    """
    if _can_parse(texts, "time", time_format=ISO):
        return ISO
    if not re.search(r"\d.*\d.*\d", texts[0]):
        return None
    digits = all(map(_DIGITS.fullmatch, texts))
    if digits and name and not is_called(name, "time"):
        return None
    formats = [_SERVER_LOG]
    for date, clock in itertools.product(_DATES, _CLOCKS):
        formats.append(date + clock)
    if digits:
        widths = {len(text) for text in texts}
        formats = list(EPOCHS)
        if len(widths) == 1:
            formats = [*_COMPACT.get(widths.pop(), []), *EPOCHS]
    spans = {}
    for format in formats:
        if _read_times(texts[:_NUM_TRIED], format) is None:
            continue
        times = _read_times(texts, format)
        if times is not None:
            spans[format] = np.ptp(times)
    if digits:
        return next(iter(spans), None)
    # 01/03, 02/03, … may be days of March or the third days of months. The rows of a log are close
    # in time, so the format with the shortest span is the right one.
    return min(spans, key=lambda format: spans[format], default=None)


def _read_times(texts: list[str], format: str) -> np.ndarray | None:
    """Parse times of a format; return None if one is not of the format, or out of 1990 to 2037."""
    times = _parse(texts, "time", time_format=format)
    if times.code.any() or not ((times.values >= _FIRST) & (times.values < _END)).all():
        return None
    return times.values
