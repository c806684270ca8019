"""What the values of a column are: numbers, hexadecimal digits, times, lists or texts."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence

from nvt_torchrec.etl.guess.times import time_format
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.spec.raw_types.base import LARGEST_FLOAT32

#: Texts that mean a missing value in any column, and those that do so among numbers only.
NULLS = ("?", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "\\N", "None")
_NULLS_OF_NUMBERS = ("-", "--", "na", "none", ".", "nil", "unknown", "inf", "-inf")
_INT = re.compile(r"-?\d+")
_FLOAT = re.compile(r"-?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_LENIENT_INT = re.compile(r"[-+]?\d+(\.0+)?")
_GROUPED = re.compile(r"-?\d{1,3}(,\d{3})*(\.\d+)?")
_HEX = re.compile("[0-9a-fA-F]{8}")
_SHORT_HEX = re.compile("[0-9a-fA-F]{1,8}")
_COMMA_NUMBER = re.compile(r"[-+]?(\d+|[1-9]\d{0,2}(\.\d{3})+)(,\d+)?")
_EXCHANGED = str.maketrans(",.", ".,")
_SEPARATORS = "|,;^ "
#: Of the texts of a column of numbers, the share that may be too large to be read.
_FEW = 0.01


@dataclasses.dataclass(frozen=True)
class Profile:
    """What is known of a column.

    Attributes:
        name: in the file; of text without a header the place holder that the spec uses.
        kind: "empty", "int", "float", "hex32", "time", "string" or, of lists, their items' kind.
        rows: how many were seen.
        counts: how often each value was seen, without missing ones and spaces around.
        nulls: the texts that mean a missing value.
        missing: how many values are missing.
        trim: whether values have spaces around them.
        lenient: whether integers are written as +5 or 260.0, numbers as +5.0.
        thousands: the character between groups of digits; "" where there are none.
        decimal: the decimal point of the file's numbers.
        time_format: of times; None for parquet's own.
        separator: of lists in text.
        floating: whether the file holds floats, though these are integers.
        multi_hot: whether values are lists.
        unread: why the column cannot be read; "" if it can.
        least: of numbers, the smallest.
        most: the largest.
    """

    name: str
    kind: str
    rows: int
    counts: Counter[str]
    nulls: tuple[str, ...] = ()
    missing: int = 0
    trim: bool = False
    lenient: bool = False
    thousands: str = ""
    decimal: str = "."
    time_format: str = ""
    separator: str = ""
    floating: bool = False
    multi_hot: bool = False
    unread: str = ""
    least: float = 0
    most: float = 0

    @property
    def distinct(self) -> int:
        """The number of distinct values."""
        return len(self.counts)

    @property
    def present(self) -> int:
        """The number of values that are not missing."""
        return self.rows - self.missing

    def number(self, text: str) -> float:
        """Return the number that a text is, which may group its digits."""
        return float(_with_point(text, self.decimal).replace(",", ""))


def profile(
    values: Sequence[str],
    name: str,
    *,
    named: bool = True,
    lists: bool = True,
    decimal: str = ".",
) -> Profile:
    """Return what a column of texts is.

    Args:
        values: of each row; "" where missing.
        name: of the column.
        named: whether the file names its columns.
        lists: whether a text may be a list of values.
        decimal: the decimal point of numbers.
    """
    raw = Counter(values)
    trim = any(value != value.strip(" \t") for value in raw)
    counts: Counter[str] = Counter()
    for value, often in raw.items():
        counts[value.strip(" \t")] += often
    counts.pop("", None)
    nulls = _null_texts(counts, decimal)
    counts = Counter({text: often for text, often in counts.items() if text not in nulls})
    missing = len(values) - sum(counts.values())
    texts = Profile(name, "empty", len(values), counts, nulls, missing, trim, decimal=decimal)
    if not counts:
        return texts
    format = time_format(counts, name if named else "")
    if format is not None:
        return dataclasses.replace(texts, kind="time", time_format=format)
    numbers = _as_numbers(texts) or _as_hex(texts)
    if numbers:
        return numbers
    separator = _list_separator(counts) if lists else ""
    if not separator:
        return dataclasses.replace(texts, kind="string")
    items: Counter[str] = Counter()
    spaces = False
    for text, often in counts.items():
        for item in items_of(text, separator):
            items[item.strip()] += often
            spaces = spaces or item != item.strip()
    of_items = dataclasses.replace(
        texts,
        kind="string",
        counts=items,
        trim=trim or spaces,
        separator=separator,
        multi_hot=True,
    )
    numbers = _as_numbers(of_items) or _as_hex(of_items)
    if numbers and numbers.kind != "float" and not numbers.lenient:
        return dataclasses.replace(
            of_items, kind=numbers.kind, least=numbers.least, most=numbers.most
        )
    if any(map(_in_brackets, counts)):
        why = f"lists of texts in brackets: write them without, with {separator} between"
        return dataclasses.replace(of_items, kind="empty", unread=why)
    return of_items


def _in_brackets(text: str) -> bool:
    return text[:1] == "[" and text[-1:] == "]"


def items_of(text: str, separator: str) -> list[str]:
    """Return the items of a list, which may be in brackets or end with a separator."""
    text = text[1:-1] if _in_brackets(text) else text
    return text.removesuffix(separator).split(separator) if text.strip() else []


def has_decimal_commas(columns: Sequence[Sequence[str]]) -> bool:
    """Whether the numbers of a file are written as 1,5: some columns are, and none as 1.5."""
    some = False
    for values in columns:
        texts = {value.strip(" \t") for value in values} - {"", *NULLS, *_NULLS_OF_NUMBERS}
        if not any("," in text or "." in text for text in texts):
            continue
        fractions = {text.partition(".")[2] for text in texts if "." in text}
        if all(map(_FLOAT.fullmatch, texts)) and any(len(each) != 3 for each in fractions):
            return False
        # 1,234 alone may be a group of digits
        grouped = all(map(_GROUPED.fullmatch, texts))
        some = some or (not grouped and all(map(_COMMA_NUMBER.fullmatch, texts)))
    return some


def _with_point(text: str, decimal: str) -> str:
    """Return a number with commas only between groups of digits."""
    return text.translate(_EXCHANGED) if decimal == "," else text


def _null_texts(counts: Counter[str], decimal: str) -> tuple[str, ...]:
    """Return the texts among the values that mean a missing value."""
    codes = sum(bool(re.fullmatch("[A-Z]{2}", text)) for text in counts) > len(counts) / 2
    nulls = {text for text in NULLS if text in counts and not (text == "NA" and codes)}
    others = [text for text in counts if text not in nulls and text not in _NULLS_OF_NUMBERS]
    numbers = [_with_point(text, decimal) for text in others]
    if others and all(_LENIENT_INT.fullmatch(text) or _FLOAT.fullmatch(text) for text in numbers):
        nulls |= {text for text in _NULLS_OF_NUMBERS if text in counts}
        large = [
            text
            for text, number in zip(others, numbers, strict=True)
            if not number.isdigit() and abs(float(number)) > LARGEST_FLOAT32
        ]
        if len(large) <= max(1, _FEW * len(others)) < len(others):
            nulls |= set(large)
    return tuple(sorted(nulls))


def _as_numbers(of: Profile) -> Profile | None:
    """Return the profile of a column of numbers, or None."""
    texts = [_with_point(text, of.decimal) for text in of.counts]
    if all(map(_INT.fullmatch, texts)) and any(re.fullmatch(r"-?0\d+", text) for text in texts):
        return None  # 00501 is not 501
    grouped = any("," in text for text in texts) and all(map(_GROUPED.fullmatch, texts))
    if grouped:
        texts = [text.replace(",", "") for text in texts]
    whole = all(map(_LENIENT_INT.fullmatch, texts))
    plain = _INT if whole else _FLOAT
    if not whole and not all(_FLOAT.fullmatch(text.removeprefix("+")) for text in texts):
        return None
    numbers = [int(text) if _INT.fullmatch(text) else float(text) for text in texts]
    if max(map(abs, numbers)) > LARGEST_FLOAT32:
        return None
    return dataclasses.replace(
        of,
        kind="int" if whole else "float",
        lenient=not all(map(plain.fullmatch, texts)),
        thousands={".": ",", ",": "."}[of.decimal] if grouped else "",
        least=min(numbers),
        most=max(numbers),
    )


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
    for separator in _SEPARATORS:
        lists = [items_of(text, separator) for text in counts]
        if sum(len(each) > 1 for each in lists) < max(2, 0.1 * len(counts)):
            continue
        items = {item for each in lists for item in each}
        bare = {item.strip() for item in items}
        numbers = all(_INT.fullmatch(item) for item in bare)
        if separator == " ":  # also within a text
            known = numbers and not any(re.match(r"-?0\d", item) for item in bare)
        else:
            known = numbers or (bare == items and len(items) < len(counts))
        if known and all(bare):
            return separator
    return ""


def fits(value: float, raw: str) -> bool:
    """Whether a number is within the limits of a raw type."""
    return RAW_TYPES[raw].contains(value)
