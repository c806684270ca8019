"""What one field becomes by the rules of its column, in plain Python: re, decimal, datetime."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from nvt_torchrec.formats.feature_spec.raw_types.time import EPOCHS
from nvt_torchrec.formats.feature_spec.read_plan import LabelRule, Read

#: Of float32.
LARGEST = (2 - 2**-23) * 2.0**127
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
MICROSECOND = datetime.timedelta(microseconds=1)
_LIMITS = {"int32": (-(2**31), 2**31 - 1), "int": (-(2**53), 2**53)}
_NUMBER = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?"
_EXCHANGED = str.maketrans(",.", ".,")
BAD = "malformed"


def _number(text: str, read: Read):
    if read.decimal == ",":
        text = text.translate(_EXCHANGED)
    sign = "[+-]?" if read.lenient else "-?"
    if read.raw in _LIMITS:
        if not re.fullmatch(sign + (_NUMBER if read.lenient else "[0-9]+"), text):
            return BAD
        with decimal.localcontext(prec=1000):
            number = decimal.Decimal(text)
            low, high = _LIMITS[read.raw]
            fits = low <= number <= high and number == int(number)
        return int(number) if fits else BAD
    if not re.fullmatch(sign + _NUMBER, text) or not abs(float(text)) <= LARGEST:
        return BAD
    return BAD if read.raw == "weight" and float(text) < 0 else float(text)


def _hexadecimal(text: str, read: Read):
    return int(text, 16) if re.fullmatch("[0-9a-fA-F]{1,8}", text) else BAD


def _boolean(text: str, read: Read):
    true = text.lower() in {"true", "t", "yes", "y", "1", "1.0"}
    return int(true) if true or text.lower() in {"false", "f", "no", "n", "0", "0.0"} else BAD


_WORDS = ["é", "zz", "日本", "a", "b" * 20, "~", "0", "ß", "A", "\x01", "🙂"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A raw type that columns may have.

    Attributes:
        expected: What a text becomes that is not missing, or BAD.
        values: Values of rows to score.
        good: One of them.
        write: How a log has such a value.
        held: Values of ``RawRows``, of integers 0 to 10; only of categories.
    """

    expected: Callable[[str, Read], Any]
    values: st.SearchStrategy
    good: Any
    write: Callable[[Any], str] = str
    held: Callable[[np.ndarray], Any] | None = None


#: Every raw type of columns; tests take their names from the registry.
KINDS = {
    "int32": Kind(_number, st.integers(*_LIMITS["int32"]), 1),
    "float": Kind(_number, st.floats(-LARGEST, LARGEST), 0.5, repr),
    "hex32": Kind(
        _hexadecimal,
        st.integers(0, 2**32 - 1),
        "0000001b",
        "{:x}".format,
        lambda draws: (draws * 0x1F3D5B79 % 2**32).astype(np.uint32),
    ),
    "int": Kind(
        _number,
        st.integers(*_LIMITS["int"]),
        -7,
        held=lambda draws: draws**15 * np.where(draws % 2, -1, 1),  # up to 10^15, of either sign
    ),
    "bool": Kind(_boolean, st.booleans(), True, held=lambda draws: draws % 2),
    "string": Kind(
        lambda text, read: text,
        st.text(
            st.characters(exclude_characters='|,"\r\n', exclude_categories=["Cs"]),
            min_size=1,
            max_size=9,
        ),
        "é",
        held=lambda draws: pa.array([_WORDS[draw] for draw in draws], pa.string()),
    ),
}


def expected(text: str, read: Read):
    """One value in plain Python."""
    strip = (lambda item: item.strip(" \t")) if read.trim else (lambda item: item)
    text = strip(text)
    if text in map(strip, read.nulls):
        text = ""
    if read.raw == "label":
        if read.decimal == "," and not read.label.positive:
            text = text.translate(_EXCHANGED)
        return _label(text, read.label, strip)
    if text == "":
        return BAD if read.raw == "weight" else None
    if read.raw == "time":
        return time_of(text, read.time_format)
    return _number(text, read) if read.raw == "weight" else KINDS[read.raw].expected(text, read)


def _label(text: str, rule: LabelRule, strip):
    if rule.positive:
        if text in map(strip, rule.positive):
            return 1 if text else BAD
        return BAD if not text or (rule.negative and text not in map(strip, rule.negative)) else 0
    if rule.threshold is not None:
        good = re.fullmatch("-?" + _NUMBER, text) and abs(float(text)) <= LARGEST
        return int(float(text) >= rule.threshold) if good else BAD
    return {"0": 0, "1": 1, "0.0": 0, "1.0": 1}.get(text, BAD)


def time_of(text: str, time_format: str):
    """A time as microseconds since 1970 UTC, or BAD."""
    if time_format in EPOCHS:
        if not re.fullmatch("[+-]?" + _NUMBER, text):
            return BAD
        with decimal.localcontext(prec=1000):
            value = int(decimal.Decimal(text) * EPOCHS[time_format])
        fits = -62_135_596_800_000_000 <= value <= 253_402_300_799_999_999
        return value if fits else BAD
    try:
        if time_format == "":
            day = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
            clock = r"[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9]{2}(:?[0-5][0-9])?)?"
            text = text.removesuffix(" UTC") if re.search(r":.* UTC$", text) else text
            assert not re.search("UTC$", text)
            assert re.fullmatch(rf"{day}([T ]{clock})?", text)
            time = datetime.datetime.fromisoformat(text)
        else:
            time = datetime.datetime.strptime(text, time_format)
        if time.tzinfo is None:
            time = time.replace(tzinfo=datetime.UTC)
    except (AssertionError, ValueError):
        return BAD
    value = (time - EPOCH) // MICROSECOND
    return value if value >= -62_135_596_800_000_000 else BAD
