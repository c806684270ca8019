"""What the values of a column are: numbers, times, lists or texts."""

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

#: Texts that mean a missing value in any column, and those that do so among numbers only.
NULLS = ("?", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "\\N", "None")
_NULLS_OF_NUMBERS = ("-", "--", "na", "none", ".", "nil", "unknown", "inf", "-inf")
#: So few words, in a hundredth of the rows at most, are missing values among many numbers.
_MAX_WORDS = 3
#: So many numbers are many.
_MIN_NUMBERS = 20
#: Signs that are no part of a number, and numbers with them: $5, 5 %, 1,000, 1.234,5.
_SIGN = re.compile("[,$€£¥₹₽₩%]")
_AMOUNT = re.compile(
    r"[-+]?[$€£¥₹₽₩%]? ?-?(\d+|\d{1,3}([.,])\d{3}(\2\d{3})*)([.,]\d*)? ?[$€£¥₹₽₩%]?"
)
_INT = re.compile(r"-?\d+")
_LEADING_ZERO = re.compile(r"-?0\d+")
#: An item of a list with spaces between, such as 17 or N55689; 017 may be part of a number.
_CODE = re.compile(r"-?(0|[1-9]\d*)|[A-Za-z]+\d+")
#: How programs write booleans, in lower case; 1 and 0 alone are numbers.
_BOOLEANS = {"true", "false", "1", "0"}
_SEPARATORS = "|,;^ "
_DATES = (
    "%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%m/%d/%y", "%d/%m/%y",
    "%d.%m.%y", "%d-%b-%Y", "%d %b %Y", "%b %d, %Y", "%m %d, %Y",
)  # fmt: skip
_CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S %z")
_SERVER_LOG = "%d/%b/%Y:%H:%M:%S %z"
#: Formats of digits only, by how many there are.
_COMPACT = {8: ["%Y%m%d", "%y%m%d%H"], 10: ["%Y%m%d%H"], 12: ["%Y%m%d%H%M"], 14: ["%Y%m%d%H%M%S"]}
#: Texts and numbers that are not ISO are taken for times from 1990 to 2037; in microseconds.
_FIRST, _END = np.array(["1990", "2038"], "M8[us]").astype(np.int64)
#: What RecBole writes behind the names of columns: an id or a word, a number, lists of these.
DECLARED = ("token", "token_seq", "float", "float_seq")
#: Numbers that may be times, which some programs write as floats: 978300760.0.
_DIGITS = re.compile(r"[0-9]+(\.0+)?")
#: By so few texts most formats are ruled out.
_NUM_TRIED = 3


@dataclasses.dataclass(frozen=True)
class Profile:
    """What is known of a column.

    Attributes:
        name: The name in the file, without a type behind it; of text without a header the
            placeholder that the spec uses.
        kind: "empty", "int", "bigint" (of more than 53 bits), "float", "bool", "hex32", "time",
            "string" or, of lists, their items' kind.
        rows: How many rows were seen.
        counts: How often each value was seen, without missing ones and spaces around.
        missing: How many values are missing.
        reading: How values are written, as keys of the spec: nulls, trim, lenient.
        numbers: The numbers that the values are, of times microseconds since 1970.
        time_format: The format of times; "" for parquet's own.
        separator: The separator of lists in text.
        floating: Whether the file holds floats, though these are integers.
        multi_hot: Whether values are lists.
        unread: Why the column cannot be read; "" if it can.
        codes: int [rows], the number of each row's value, of lists of its text; -1 where missing.
        header: The name in the file, where that has a type behind it: ``user_id:token``.
        declared: That type, one of ``DECLARED``.
        width: Of a vector, how many numbers each row has; else 0. As columns of a log it is not
            read, its kind is "empty".
        half: Of a vector, whether the file holds float16.
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
        """The name by which a spec finds the column."""
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
    def often(self) -> float:
        """How often a value is there, on average."""
        return self.present / max(self.distinct, 1)

    @property
    def is_number(self) -> bool:
        """Whether values are numbers that a dense column can have."""
        return self.kind in ("int", "float") and not self.multi_hot

    def sorted_numbers(self) -> np.ndarray:
        """Return the numbers of the rows, sorted."""
        return np.sort(np.repeat(self.numbers, list(self.counts.values())))

    def fits(self, raw: str) -> bool:
        """Whether all numbers are within the limits of a raw type."""
        kind = RAW_TYPES[raw]
        return kind.contains(self.numbers.min()) and kind.contains(self.numbers.max())


def profile(values: Sequence[str], name: str, *, lists: bool = True, declared: str = "") -> Profile:
    """Return what a column of texts is.

    Args:
        values: The text of each row; "" where missing.
        name: The name of the column; "" if it has none.
        lists: Whether a text may be a list of values.
        declared: Its type, if the file says it: one of ``DECLARED``.
    """
    stripped = [value.strip(" \t") for value in values]
    counts = Counter(stripped)
    nulls = _find_nulls(counts)
    reading: dict[str, Any] = {"nulls": nulls} if nulls else {}
    if any(map(operator.ne, stripped, values)):
        reading["trim"] = True
    missing = sum(counts.pop(text, 0) for text in ("", *nulls))
    numbers_of_texts = {text: number for number, text in enumerate(counts)}
    codes = np.array([numbers_of_texts.get(text, -1) for text in stripped], np.int64)
    column = Profile(
        name, "empty", len(values), counts, missing, reading, codes=codes, declared=declared
    )
    if not counts:
        return column
    if declared == "float_seq":
        return dataclasses.replace(column, unread="lists of numbers are read as ids only")
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
            "numbers with signs: write them without $, % or a comma between thousands; "
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
    """Return what the reader of a raw type makes of some texts."""
    array = strings(texts).view(pa.binary())
    return RAW_TYPES[raw].from_text(array, np.zeros(len(texts), bool), Read("", raw, **keys))


def _can_parse(texts: Sequence[str], raw: str, **keys: Any) -> bool:
    """Return whether all texts are of a raw type."""
    return not _parse(texts, raw, **keys).code.any()


def _find_nulls(counts: Counter[str]) -> list[str]:
    """Return the texts among the values that mean a missing value."""
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
    for kind, lenient in itertools.product(("int", "float"), ({}, {"lenient": True})):
        parsed = _parse(texts, kind, **lenient)
        if parsed.code.any():
            if kind == "float" or lenient or (parsed.code == SYNTAX).any():
                continue
            kind = "bigint"
        if kind != "float" and any(map(_LEADING_ZERO.fullmatch, texts)):
            return None  # 00501 is not 501
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
        return None  # hashes of digits only are rare: 00501234
    return dataclasses.replace(column, kind="hex32")


def _split_lists(column: Profile, separator: str) -> Profile:
    items: Counter[str] = Counter()
    reading = dict(column.reading)
    for text, count in column.counts.items():
        for item in split_items(text, separator):
            items[item.strip()] += count
            if item != item.strip():
                reading["trim"] = True
    lists = dataclasses.replace(column, counts=items, reading=reading)
    numbers = _find_numbers(lists) or _find_hashes(lists)
    kind, unread = "string", ""
    if numbers and numbers.kind != "float" and numbers.reading == reading:
        kind = numbers.kind
    elif any(map(_is_bracketed, column.counts)):
        unread = f"lists of texts in brackets: write them without, with {separator} between"
        kind = "empty"
    return dataclasses.replace(lists, kind=kind, unread=unread, separator=separator, multi_hot=True)


def make_vector(name: str, rows: int, missing: int, width: int) -> Profile:
    """Return the profile of a column of lists of numbers of one length."""
    why = f"lists of {width} numbers: a [[vector]] is read from a table, see docs/vectors.md"
    return Profile(name, "empty", rows, Counter(), missing, unread=why, width=width, multi_hot=True)


def _find_vectors(counts: Counter[str]) -> tuple[int, str]:
    """Return the length of lists of numbers, and what is between them; 0 where texts are none.

    Lists are vectors if all have the same length, of at least two numbers, and some number has a
    fraction: integers may be ids.
    """
    for separator in _SEPARATORS:
        lists = [split_items(text, separator) for text in counts]
        width = len(lists[0])
        if not 2 <= width <= MAX_WIDTH or any(len(each) != width for each in lists):
            continue
        items = [item.strip() for each in lists for item in each]
        if all(items) and _can_parse(items, "float") and not _can_parse(items, "int"):
            return width, separator
    return 0, ""


def _is_bracketed(text: str) -> bool:
    return text[:1] == "[" and text[-1:] == "]"


def split_items(text: str, separator: str) -> list[str]:
    """Return the items of a list, which may be in brackets or end with a separator."""
    text = text[1:-1] if _is_bracketed(text) else text
    return text.removesuffix(separator).split(separator) if text.strip() else []


def _find_list_separator(counts: Counter[str]) -> str:
    """Return the character between the items of lists; "" where texts are no lists.

    Texts are lists if there are several in a tenth of them, no item is empty, and all items are
    integers, or fewer than the texts, because they come back in other lists.
    """
    for separator in _SEPARATORS:
        lists = [split_items(text, separator) for text in counts]
        if sum(len(each) > 1 for each in lists) < max(2, 0.1 * len(counts)):
            continue
        items = {item for each in lists for item in each}
        bare = {item.strip() for item in items}
        if separator == " ":  # also within a text
            known = all(map(_CODE.fullmatch, bare))
        else:
            integers = all(map(_INT.fullmatch, bare))
            known = integers or (bare == items and len(items) < len(counts))
        if known and all(bare):
            return separator
    return ""


def find_time_format(texts: list[str], name: str) -> str | None:
    """Return the format of a column's times, as a spec writes it; None if they are no times.

    Args:
        texts: The column's values that are not missing, each once, at least one.
        name: The column's name: digits are taken for a time if it suggests this or is "".
    """
    if _can_parse(texts, "time", time_format=ISO):
        return ISO
    if not re.search(r"\d.*\d.*\d", texts[0]):
        return None
    digits = all(map(_DIGITS.fullmatch, texts))
    if digits and name and not is_called(name, "time"):
        return None
    formats = [_SERVER_LOG, *(date + clock for date in _DATES for clock in _CLOCKS)]
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
    # 01/03, 02/03, … may be days of March or of different months: the rows of a log are near
    return min(spans, key=lambda format: spans[format], default=None)


def _read_times(texts: list[str], format: str) -> np.ndarray | None:
    """Return the times that texts are in a format; None if they are none, or not of our time."""
    times = _parse(texts, "time", time_format=format)
    if times.code.any() or not ((times.values >= _FIRST) & (times.values < _END)).all():
        return None
    return times.values
