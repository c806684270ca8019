"""The raw type ``time``: microseconds since 1970-01-01 00:00 UTC, for the years 1 to 9999.

No column of the output has this type; derived columns, splits and events read it. A time format
becomes a regular expression whose groups are the parts of a time. Only the distinct texts of a
column are parsed, because most logs repeat them. The calendar is checked: the 30th of February is
malformed.
"""

# ruff: noqa: D102 - methods are described in RawType
from __future__ import annotations

import datetime
import decimal
import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import null_mask, string_array, string_parts, to_numpy
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.number_text import cast, lengths, matches, parse_exact, try_cast
from nvt_torchrec.formats.feature_spec.raw_types import base

if TYPE_CHECKING:
    from nvt_torchrec.formats.feature_spec.read_plan import Read

#: The formats of numbers since 1970-01-01 00:00 UTC, with the microseconds of their units.
EPOCHS = {"epoch_s": 1_000_000, "epoch_ms": 1000, "epoch_us": 1}
#: The directives of a format, as in ``strptime``, and the largest number of digits of each. 0 for
#: ``%b``, the first three letters of English months, and ``%z``, an offset (Z, +0200 or +02:00).
DIRECTIVES = {"Y": 4, "y": 2, "m": 2, "d": 2, "H": 2, "M": 2, "S": 2, "f": 6, "b": 0, "z": 0}
#: The format of ISO 8601: a date, or a date and a time, with or without a fraction and an offset.
ISO = ""
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_EXAMPLE = datetime.datetime(2014, 10, 30, 12, tzinfo=datetime.UTC)
_SECOND = 1_000_000
_DAY = 86_400_000_000
#: The number of digits after the decimal point of each unit, down to a microsecond.
_SHIFTS = {"epoch_s": 6, "epoch_ms": 3, "epoch_us": 0}
_DECIMAL_BYTES = np.isin(np.arange(256), list(b"0123456789-."))
_INT64_DIGITS = 18
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_ISO = (
    "^(?P<Y>[0-9]{4})-(?P<m>[0-9]{2})-(?P<d>[0-9]{2})"
    r"(?:[T ](?P<H>[0-9]{2}):(?P<M>[0-9]{2})(?::(?P<S>[0-9]{2})(?:\.(?P<f>[0-9]+))?)?"
    "(?P<z>Z| UTC|[+-][0-9]{2}(?::?[0-9]{2})?)?)?$"
)
#: The texts that Arrow and ``datetime.fromisoformat`` read in the same way.
PLAIN_ISO = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?)?$"
_LETTERS = {"b": "[a-zA-Z]{3}", "z": "Z|[+-][0-9]{2}:?[0-9]{2}"}
#: Stands for a malformed offset from UTC.
_NO_OFFSET = 2**30


def check_time_format(format: str, where: str) -> None:
    """Raise :class:`SettingsError` unless ``format`` is a time format.

    A format is :data:`ISO`, one of :data:`EPOCHS`, or a pattern such as ``%y%m%d%H``, with
    :data:`DIRECTIVES` only, each at most once, and a year. Times are UTC.

    Args:
        format: The format.
        where: The beginning of error messages.
    """
    if format == ISO or format in EPOCHS:
        return
    used = re.findall("%(.?)", format)
    are_known = all(name in DIRECTIVES for name in used)
    are_unique = len(set(used)) == len(used)
    has_one_year = ("Y" in used) != ("y" in used)
    if not (used and are_known and are_unique and has_one_year):
        raise SettingsError(
            f"{where}time_format = {format!r}",
            f"give one of {', '.join(EPOCHS)}, or a pattern with a year, such as "
            f"%Y-%m-%d %H:%M:%S; it may use %{' %'.join(DIRECTIVES)}, each at most once",
        )
    if {"m", "b"} <= set(used):
        raise SettingsError(
            f"{where}time_format = {format!r}", "use %m or %b for the month, not both"
        )


def parse_iso(text: str, where: str) -> int:
    """Return the microseconds since 1970 of an ISO 8601 date or time; UTC unless it has an offset.

    Raises:
        SettingsError: The text is malformed; the message begins with ``where``.
    """
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise SettingsError(
            f"{where} = {text!r}", "write a date or time such as 2014-10-30 12:00:00"
        ) from None
    return to_microseconds(time)


def to_microseconds(time: datetime.datetime) -> int:
    """Return the microseconds since 1970 of a time, UTC unless it has a time zone."""
    if time.tzinfo is None:
        time = time.replace(tzinfo=datetime.UTC)
    return (time - _EPOCH) // datetime.timedelta(microseconds=1)


class Time(base.RawType):
    """Times, held as microseconds since 1970."""

    name = "time"
    dtype = "int64"
    syntax = "expected a time or a missing value"
    out_of_range = "expected a time of the years 1 to 9999 or a missing value"
    minimum, maximum = -62_135_596_800_000_000, 253_402_300_799_999_999
    keys = "time_format, nulls or trim"
    takes_text = True

    def from_text(self, texts: pa.Array, missing: np.ndarray, read: Read) -> base.ParsedText:
        return parse_times(texts, missing, read.time_format, self)

    def fits(self, held: pa.DataType, read: Read) -> bool:
        types = pa.types
        if types.is_timestamp(held) or types.is_date(held):
            return True
        if types.is_floating(held):
            return read.time_format in EPOCHS
        return types.is_integer(held) and (
            read.time_format in EPOCHS or _is_digits(read.time_format)
        )

    def to_texts(self, array: pa.Array, read: Read) -> tuple[pa.Array, Read] | None:
        if not (_is_digits(read.time_format) and pa.types.is_integer(array.type)):
            return None
        width = sum(DIRECTIVES[name] for name in read.time_format[1::2])
        # an integer has lost its leading zeros, such as those of a year 09
        return pc.utf8_lpad(array.cast(pa.string()), width, "0"), read

    def from_arrow(self, array: pa.Array, read: Read) -> base.ParsedText:
        missing = null_mask(array)
        if pa.types.is_date(array.type):
            array = array.cast(pa.timestamp("ms"))
        if pa.types.is_timestamp(array.type):
            unit = EPOCHS.get(f"epoch_{array.type.unit}", 0)
            numbers = np.where(missing, 0, to_numpy(array.view(pa.int64())))
            if not unit:  # nanoseconds
                numbers = numbers // 1000
                unit = 1
        else:
            numbers, missing = base.to_numbers(array, read.nulls)
            unit = EPOCHS[read.time_format]
        return _to_microseconds(numbers, missing, unit, self)


def _to_microseconds(
    numbers: np.ndarray, missing: np.ndarray, unit: int, kind: Time
) -> base.ParsedText:
    """Convert numbers since 1970 to microseconds.

    Args:
        numbers: Integers or float64 [n].
        missing: Where they are missing, bool [n].
        unit: The microseconds of a unit.
        kind: The raw type, for its limits.
    """
    out_of_range = (numbers < kind.minimum // unit) | (numbers > kind.maximum // unit)
    numbers = np.where(out_of_range, 0, numbers)
    if numbers.dtype == np.float64:
        numbers = np.floor(numbers * unit).astype(np.int64)
    else:
        numbers = numbers.astype(np.int64) * unit
    code = np.where(out_of_range, base.RANGE, 0).astype(np.uint8)
    return base.ParsedText(numbers, missing, code)


def _is_digits(time_format: str) -> bool:
    """Return whether a time format is a pattern of digits only, such as ``%Y%m%d``."""
    if not re.fullmatch("(%[a-zA-Z])+", time_format):
        return False
    return all(DIRECTIVES[name] for name in time_format[1::2])


def parse_times(
    texts: pa.Array, missing: np.ndarray, time_format: str, kind: Time
) -> base.ParsedText:
    """Parse fields as times.

    A number since 1970 may have a fraction and an exponent. ISO 8601 is ``2014-10-30``, or with
    ``T`` or a space ``2014-10-30 12:00``, seconds and their fraction, and ``Z``, `` UTC`` or an
    offset such as ``+02:00``, ``+0200`` or ``+02``. In a pattern, ``%Y`` has 4 digits and ``%y``
    2 (1969 to 2068); the other numbers have one up to their largest number of digits. Letters may
    be lower or upper case. Digits after the microseconds are ignored.
    """
    if time_format in EPOCHS:
        numbers = try_cast(texts, missing, pa.int64(), _DECIMAL_BYTES)
        if numbers is not None:  # all are integers, as in most logs
            return _to_microseconds(numbers, missing, EPOCHS[time_format], kind)
    encoded = texts.dictionary_encode()
    distinct = encoded.dictionary
    values: np.ndarray | None
    if time_format in EPOCHS:
        values, is_time, fits = _parse_epoch(distinct, time_format, kind)
    else:
        values = _parse_plain_iso(distinct) if time_format == ISO else None
        is_time = np.ones(len(distinct), bool)
        if values is None:
            values, is_time = _match_pattern(distinct, make_pattern(time_format))
        # an offset from UTC can move a time out of the years 1 to 9999
        fits = (values >= kind.minimum) & (values <= kind.maximum)
    code = np.where(is_time, np.where(fits, 0, base.RANGE), base.SYNTAX).astype(np.uint8)
    values[code != 0] = 0
    indices = to_numpy(encoded.indices)
    values = values[indices]
    code = code[indices]
    code[missing] = 0
    return base.ParsedText(values, missing, code)


def _parse_plain_iso(texts: pa.Array) -> np.ndarray | None:
    """Return the microseconds of texts; None unless each is empty or matches PLAIN_ISO."""
    if not (matches(texts, PLAIN_ISO) | (lengths(texts) == 0)).all():
        return None
    return try_cast(texts, lengths(texts) == 0, pa.timestamp("us"))


def _parse_epoch(
    texts: pa.Array, time_format: str, kind: Time
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parse numbers since 1970.

    Returns:
        Microseconds, int64 [n]; whether each text is a number, bool [n]; and whether the number is
        within the limits, bool [n].
    """
    shift = _SHIFTS[time_format]
    is_number = np.ones(len(texts), bool)
    numbers = _parse_decimals(texts, shift)
    if numbers is not None:
        return numbers, is_number, (numbers >= kind.minimum) & (numbers <= kind.maximum)
    values = np.zeros(len(texts), np.int64)
    fits = np.ones(len(texts), bool)
    for row, text in enumerate(texts.to_pylist()):
        number = parse_exact(text, shift)
        if number is None:
            is_number[row] = False
            continue
        number = number.to_integral_value(decimal.ROUND_DOWN)
        if kind.contains(number):
            values[row] = int(number)
        else:
            fits[row] = False
    return values, is_number, fits


def _parse_decimals(texts: pa.Array, shift: int) -> np.ndarray | None:
    """Return numbers times 10**shift; None if Arrow cannot read one of them as a decimal."""
    offsets, data = string_parts(texts)
    if not _DECIMAL_BYTES[data[offsets[0] : offsets[-1]]].all():
        return None
    present = pc.if_else(pc.equal(texts, b""), pa.scalar(b"0", texts.type), texts)
    try:
        numbers = present.view(pa.string()).cast(pa.decimal128(_INT64_DIGITS, shift))
    except pa.ArrowInvalid:  # an exponent, more digits after the point, or no number
        return None
    # a decimal has 128 bits; 18 digits need only the lower 64
    return np.frombuffer(numbers.buffers()[1], np.int64, 2 * len(numbers))[::2].copy()


@functools.lru_cache(maxsize=64)
def make_pattern(time_format: str) -> str:
    """Return the regular expression of a time format, with a group for each directive."""
    if time_format == ISO:
        return _ISO
    steps = re.findall("%(.)|([^%]+)", time_format, re.DOTALL)
    parts = []
    for (directive, text), (following, literal) in zip(steps, [*steps[1:], ("", "")], strict=True):
        if not directive:
            parts.append(re.escape(text))
            continue
        maximum = DIRECTIVES[directive]
        digits_follow = literal[:1].isdigit() or bool(DIRECTIVES.get(following))
        # A number before other digits has its full width, else its end would be ambiguous.
        minimum = maximum if directive in "Yy" or digits_follow else 1
        group = _LETTERS.get(directive, f"[0-9]{{{minimum},{maximum}}}")
        parts.append(f"(?P<{directive}>{group})")
    return f"(?s)^{''.join(parts)}$"


def _match_pattern(texts: pa.Array, pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """Parse times by a regular expression.

    Returns:
        Microseconds, int64 [n]; and whether each text is a time, bool [n].
    """
    matched = pc.extract_regex(texts, pattern=pattern)
    is_time = ~null_mask(matched)
    groups = {field.name: matched.field(field.name) for field in matched.type}

    def parse(name: str, default: int) -> np.ndarray:
        if name in groups:
            return _parse_digits(groups[name])
        return np.full(len(texts), default, np.int64)

    if "y" in groups:
        short = parse("y", 0)
        year = short + np.where(short > 68, 1900, 2000)
    else:
        year = parse("Y", 0)
    month = _map_texts(groups["b"], _parse_month) if "b" in groups else parse("m", 1)
    day = parse("d", 1)
    hour = parse("H", 0)
    minute = parse("M", 0)
    second = parse("S", 0)
    is_time &= (year >= 1) & (month >= 1) & (month <= 12)
    is_time &= (hour < 24) & (minute < 60) & (second < 60)
    months = np.where(is_time, (year - 1970) * 12 + month - 1, 0).astype("M8[M]")
    first_day = months.astype("M8[D]").astype(np.int64)
    days_in_month = (months + 1).astype("M8[D]").astype(np.int64) - first_day
    is_time &= (day >= 1) & (day <= days_in_month)
    seconds = (hour * 60 + minute) * 60 + second
    values = (first_day + day - 1) * _DAY + seconds * _SECOND
    if "f" in groups:
        values += _parse_fraction(groups["f"])
    if "z" in groups:
        offsets = _map_texts(groups["z"], _parse_offset)
        is_time &= offsets < _NO_OFFSET
        values -= offsets * _SECOND
    return values, is_time


def _parse_digits(group: pa.Array) -> np.ndarray:
    """Return the numbers in a group of digits; 0 where it is empty or nothing matched."""
    return cast(group, null_mask(group) | (lengths(group) == 0), pa.int64())


def _parse_fraction(group: pa.Array) -> np.ndarray:
    """Return the microseconds of the digits after the decimal point, ignoring all but six."""
    digits = pc.utf8_rpad(group.view(pa.string()), 6, "0")
    return _parse_digits(pc.utf8_slice_codeunits(digits, 0, 6))


def _map_texts(group: pa.Array, parse: Callable[[str], int]) -> np.ndarray:
    """Apply a function to the texts of a group, once to each distinct text."""
    offsets, data = string_parts(group)
    encoded = string_array(offsets, data).dictionary_encode()
    values = [parse(text) for text in encoded.dictionary.to_pylist()]
    return np.array(values, np.int64)[to_numpy(encoded.indices)]


def _parse_month(text: str) -> int:
    """Return the number of a month by its first three letters; 0 if there is no such month."""
    return _MONTHS.index(text.lower()) + 1 if text.lower() in _MONTHS else 0


def _parse_offset(text: str) -> int:
    """Return the seconds of an offset from UTC; _NO_OFFSET if it is out of range."""
    if text in ("", "Z", " UTC"):
        return 0
    hour = int(text[1:3])
    minute = int(text[3:].removeprefix(":") or 0)
    if hour > 23 or minute > 59:
        return _NO_OFFSET
    seconds = (hour * 60 + minute) * 60
    return -seconds if text[0] == "-" else seconds


def make_example(read: Read) -> int | str:
    """Return an example of a time in the format of a column."""
    if read.time_format in EPOCHS:
        return int(_EXAMPLE.timestamp()) * 1_000_000 // EPOCHS[read.time_format]
    if read.time_format:
        return _EXAMPLE.strftime(read.time_format)
    return _EXAMPLE.isoformat(" ")


def format_time(microseconds: int) -> str:
    """Format microseconds since 1970 as ISO 8601; as a number outside of the years 1 to 9999."""
    try:
        time = datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=microseconds)
    except OverflowError:
        return f"{microseconds} µs"
    return time.isoformat(" ")
