"""The raw type ``time``: microseconds since 1970-01-01 00:00 UTC, of the years 1 to 9999.

Only derived columns and splits read it. A time format becomes a regular expression whose groups are
the parts of a time. Only the different texts of a column are parsed, because most logs repeat them.
The calendar is checked: the 30th of February is malformed.
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
from nvt_torchrec.base.number_text import cast, exact, lengths, matches, try_cast
from nvt_torchrec.formats.feature_spec.raw_types import base

if TYPE_CHECKING:
    from nvt_torchrec.formats.feature_spec.read_plan import Read

#: Numbers of seconds, milliseconds or microseconds since 1970-01-01 00:00 UTC.
EPOCHS = {"epoch_s": 1_000_000, "epoch_ms": 1000, "epoch_us": 1}
#: The directives of a format, as in ``strptime``, and the most digits that each takes; 0 for the
#: first three letters of English months, and an offset from UTC (Z, +0200 or +02:00).
DIRECTIVES = {"Y": 4, "y": 2, "m": 2, "d": 2, "H": 2, "M": 2, "S": 2, "f": 6, "b": 0, "z": 0}
#: "" stands for ISO 8601: a date, or a date and a time, with or without a fraction and "Z".
ISO = ""
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_EXAMPLE = datetime.datetime(2014, 10, 30, 12, tzinfo=datetime.UTC)
_SECOND = 1_000_000
_DAY = 86_400_000_000
#: Digits of a microsecond after the point of each unit.
_SHIFTS = {"epoch_s": 6, "epoch_ms": 3, "epoch_us": 0}
_DECIMAL_BYTES = np.isin(np.arange(256), list(b"0123456789-."))
_INT64_DIGITS = 18
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_ISO = (
    "^(?P<Y>[0-9]{4})-(?P<m>[0-9]{2})-(?P<d>[0-9]{2})"
    r"(?:[T ](?P<H>[0-9]{2}):(?P<M>[0-9]{2})(?::(?P<S>[0-9]{2})(?:\.(?P<f>[0-9]+))?)?"
    "(?P<z>Z| UTC|[+-][0-9]{2}(?::?[0-9]{2})?)?)?$"
)
#: What Arrow and ``datetime.fromisoformat`` read in the same way.
PLAIN_ISO = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?)?$"
_LETTERS = {"b": "[a-zA-Z]{3}", "z": "Z|[+-][0-9]{2}:?[0-9]{2}"}
_NO_OFFSET = 2**30


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
    if {"m", "b"} <= set(used):
        raise SettingsError(f"{where}time_format = {format!r}", "a month is %m or %b")


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
    return to_microseconds(time)


def to_microseconds(time: datetime.datetime) -> int:
    """Return the microseconds since 1970 of a time, UTC unless it has a time zone."""
    if time.tzinfo is None:
        time = time.replace(tzinfo=datetime.UTC)
    return (time - _EPOCH) // datetime.timedelta(microseconds=1)


class Time(base.RawType):
    """Times."""

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
        return pc.utf8_lpad(array.cast(pa.string()), width, "0"), read  # of a year such as 09

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
    """Return times given as numbers since 1970, in units of so many microseconds."""
    wrong = (numbers < kind.minimum // unit) | (numbers > kind.maximum // unit)
    numbers = np.where(wrong, 0, numbers)
    if numbers.dtype == np.float64:
        numbers = np.floor(numbers * unit).astype(np.int64)
    else:
        numbers = numbers.astype(np.int64) * unit
    return base.ParsedText(numbers, missing, np.where(wrong, base.RANGE, 0).astype(np.uint8))


def _is_digits(time_format: str) -> bool:
    """Return whether a time format is a pattern of digits alone."""
    if not re.fullmatch("(%[a-zA-Z])+", time_format):
        return False
    return all(DIRECTIVES[name] for name in time_format[1::2])


def parse_times(
    texts: pa.Array, missing: np.ndarray, time_format: str, kind: Time
) -> base.ParsedText:
    """Parse fields as times.

    A number since 1970 may have a fraction and an exponent. ISO 8601 is ``2014-10-30``, or with
    ``T`` or a space ``2014-10-30 12:00``, seconds and their fraction, and ``Z``, `` UTC`` or an
    offset such as ``+02:00``, ``+0200`` or ``+02``. In a pattern, years have 4 (``%y``: 2) digits,
    and all others as many as there are up to their most; ``%y`` is 1969 to 2068; letters may be
    small or capital. What is beyond a microsecond is left out.
    """
    if time_format in EPOCHS:
        numbers = try_cast(texts, missing, pa.int64(), _DECIMAL_BYTES)
        if numbers is not None:  # whole numbers, as in most logs
            return _to_microseconds(numbers, missing, EPOCHS[time_format], kind)
    encoded = texts.dictionary_encode()
    places = to_numpy(encoded.indices)
    texts = encoded.dictionary
    values: np.ndarray | None
    if time_format in EPOCHS:
        values, good, fits = _since_1970(texts, time_format, kind)
    else:
        values = _plain_iso(texts) if time_format == ISO else None
        good = np.ones(len(texts), bool)
        if values is None:
            values, good = _match_pattern(texts, make_pattern(time_format))
        fits = (values >= kind.minimum) & (values <= kind.maximum)  # not by its offset, perhaps
    code = np.where(good, np.where(fits, 0, base.RANGE), base.SYNTAX).astype(np.uint8)
    values[code != 0] = 0
    values = values[places]
    code = code[places]
    code[missing] = 0
    return base.ParsedText(values, missing, code)


def _plain_iso(texts: pa.Array) -> np.ndarray | None:
    """Return the microseconds of texts that are empty or plain times; None for others."""
    if not (matches(texts, PLAIN_ISO) | (lengths(texts) == 0)).all():
        return None
    return try_cast(texts, lengths(texts) == 0, pa.timestamp("us"))


def _since_1970(
    texts: pa.Array, time_format: str, kind: Time
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return microseconds, which texts are numbers, and which of them are within the limits."""
    shift = _SHIFTS[time_format]
    good = np.ones(len(texts), bool)
    numbers = _decimals(texts, shift)
    if numbers is not None:
        return numbers, good, (numbers >= kind.minimum) & (numbers <= kind.maximum)
    values = np.zeros(len(texts), np.int64)
    fits = good.copy()
    for row, text in enumerate(texts.to_pylist()):
        number = exact(text, shift)
        if number is None:
            good[row] = False
        elif kind.contains(number := number.to_integral_value(decimal.ROUND_DOWN)):
            values[row] = int(number)
        else:
            fits[row] = False
    return values, good, fits


def _decimals(texts: pa.Array, shift: int) -> np.ndarray | None:
    """Return numbers times ten to the power of ``shift``; None if they are not all plain ones."""
    offsets, data = string_parts(texts)
    if not _DECIMAL_BYTES[data[offsets[0] : offsets[-1]]].all():
        return None
    present = pc.if_else(pc.equal(texts, b""), pa.scalar(b"0", texts.type), texts)
    try:
        numbers = present.view(pa.string()).cast(pa.decimal128(_INT64_DIGITS, shift))
    except pa.ArrowInvalid:  # an exponent, more digits after the point, or no number
        return None
    # 128 bits each, of which these numbers need the lower half
    return np.frombuffer(numbers.buffers()[1], np.int64, 2 * len(numbers))[::2].copy()


@functools.lru_cache(maxsize=64)
def make_pattern(time_format: str) -> str:
    """Return the regular expression of a time format; its groups are named as the directives."""
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
        # as many digits as there are, which is not sought again if the rest does not fit
        minimum = maximum if directive in "Yy" or digits_follow else 1
        group = _LETTERS.get(directive, f"[0-9]{{{minimum},{maximum}}}")
        parts.append(f"(?P<{directive}>{group})")
    return f"(?s)^{''.join(parts)}$"


def _match_pattern(texts: pa.Array, pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """Return microseconds, and which texts are times."""
    matched = pc.extract_regex(texts, pattern=pattern)
    good = ~null_mask(matched)
    groups = {field.name: matched.field(field.name) for field in matched.type}
    nothing = np.zeros(len(texts), np.int64)

    def number(name: str, otherwise: int = 0) -> np.ndarray:
        return _numbers(groups[name]) if name in groups else nothing + otherwise

    year = number("Y")
    month = number("m", 1)
    hour = number("H")
    if "y" in groups:
        short = number("y")
        year = short + np.where(short > 68, 1900, 2000)
    if "b" in groups:
        month = _map_texts(groups["b"], _month)
    day = number("d", 1)
    minute = number("M")
    second = number("S")
    good &= (year >= 1) & (month >= 1) & (month <= 12) & (hour < 24) & (minute < 60) & (second < 60)
    months = np.where(good, (year - 1970) * 12 + month - 1, 0).astype("M8[M]")
    first = months.astype("M8[D]").astype(np.int64)
    good &= (day >= 1) & (day <= (months + 1).astype("M8[D]").astype(np.int64) - first)
    seconds = (hour * 60 + minute) * 60 + second
    values = (first + day - 1) * _DAY + seconds * _SECOND
    if "f" in groups:
        values += _fraction(groups["f"])
    if "z" in groups:
        offsets = _map_texts(groups["z"], _offset)
        good &= offsets < _NO_OFFSET
        values -= offsets * _SECOND
    return values, good


def _numbers(group: pa.Array) -> np.ndarray:
    """Return the numbers in a group; 0 where it is empty or nothing matched."""
    return cast(group, null_mask(group) | (lengths(group) == 0), pa.int64())


def _fraction(group: pa.Array) -> np.ndarray:
    """Return the microseconds of digits after the point, of which six count."""
    digits = pc.utf8_rpad(group.view(pa.string()), 6, "0")
    return _numbers(pc.utf8_slice_codeunits(digits, 0, 6))


def _map_texts(group: pa.Array, value_of: Callable[[str], int]) -> np.ndarray:
    """Return a value for each text of a group, of which there are few different ones."""
    offsets, data = string_parts(group)
    encoded = string_array(offsets, data).dictionary_encode()
    values = [value_of(text) for text in encoded.dictionary.to_pylist()]
    return np.array(values, np.int64)[to_numpy(encoded.indices)]


def _month(text: str) -> int:
    return _MONTHS.index(text.lower()) + 1 if text.lower() in _MONTHS else 0


def _offset(text: str) -> int:
    """Return the seconds of an offset from UTC; _NO_OFFSET if there is no such one."""
    if text in ("", "Z", " UTC"):
        return 0
    hour = int(text[1:3])
    minute = int(text[3:].removeprefix(":") or 0)
    if hour > 23 or minute > 59:
        return _NO_OFFSET
    seconds = (hour * 60 + minute) * 60
    return -seconds if text[0] == "-" else seconds


def make_example(read: Read) -> int | str:
    """Return a time as it is written in a column that is read in this way."""
    if read.time_format in EPOCHS:
        return int(_EXAMPLE.timestamp()) * 1_000_000 // EPOCHS[read.time_format]
    if read.time_format:
        return _EXAMPLE.strftime(read.time_format)
    return _EXAMPLE.isoformat(" ")


def format_time(microseconds: int) -> str:
    """Write a time as ISO 8601, UTC; outside of the years 1 to 9999 as its number."""
    try:
        time = datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=microseconds)
    except OverflowError:
        return f"{microseconds} µs"
    return time.isoformat(" ")
