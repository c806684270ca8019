"""Parse single values of a column of rows in memory: one parser per column, made once for a spec.

What a value means is decided elsewhere: by its raw type (:mod:`formats.feature_spec.raw_types`)
and, in columns that are read by rules, by :mod:`clicklog.in_memory.python_values`. The parsers here
are shortcuts for the values that such columns usually hold, strings and numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from nvt_torchrec.clicklog.in_memory.python_values import has_rules, parse_by_rules
from nvt_torchrec.clicklog.in_memory.value_errors import NOT_A_LIST
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.base import (
    EMPTY_ITEM,
    MESSAGES,
    is_missing,
    parse_number,
)
from nvt_torchrec.formats.feature_spec.raw_types.time import (
    EPOCHS,
    ISO,
    PLAIN_ISO,
    to_microseconds,
)
from nvt_torchrec.formats.feature_spec.read_plan import Read

#: The characters that ``trim`` removes.
_SPACES = " \t"
#: Raw type → (regular expression of the most common spellings of its numbers, the function that
#: converts these exactly as Arrow does).
_PLAIN_NUMBERS: dict[str, tuple[Any, Callable[[str], int | float]]] = {
    "hex32": (re.compile("[0-9a-fA-F]{1,8}").fullmatch, functools.partial(int, base=16)),
    "int32": (re.compile("-?[0-9]{1,15}").fullmatch, int),
    "int": (re.compile("-?[0-9]{1,15}").fullmatch, int),
    "time": (re.compile("-?[0-9]{1,15}").fullmatch, int),
    "float": (re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{1,15})?").fullmatch, float),
}
#: The same for columns without such a shortcut: the expression matches no string.
_NO_PLAIN_NUMBERS: tuple[Any, Callable[[str], int | float]] = re.compile("(?!)").match, float
#: Convert a value of a row to the column's type, and a missing value to None; raise ValueError.
Parse: TypeAlias = Callable[[Any], Any]


def make_parser(read: Read, *, text: bool) -> Parse:
    """Make the parser of a column.

    Args:
        read: How the column is read.
        text: Read strings as fields of a text file, even if ``read`` has no rules.
    """
    kind = RAW_TYPES[read.raw]
    parse: Parse = kind.from_python
    if text or has_rules(read):
        single = dataclasses.replace(read, multi_hot=False)
        parse = _make_text_parser(single) if kind.is_text else _make_number_parser(single)
    return _make_list_parser(parse) if read.multi_hot else parse


def _trim_nulls(read: Read) -> set[str]:
    """Return the strings that represent a missing value, trimmed if values are."""
    return {text.strip(_SPACES) if read.trim else text for text in read.nulls}


def _make_text_parser(read: Read) -> Parse:
    """Make the parser of a string column that is read by rules."""
    from_python = RAW_TYPES[read.raw].from_python
    nulls = _trim_nulls(read)

    def parse(value: Any) -> Any:
        if type(value) is not str:
            return None if value is None else parse_by_rules(value, read)
        if read.trim:
            value = value.strip(_SPACES)
        return None if value in nulls else from_python(value)

    return parse


def _make_number_parser(read: Read) -> Parse:
    """Make the parser of a column of numbers or times that is read by rules."""
    take_number = RAW_TYPES[read.raw].from_python
    if read.raw == "time":
        if read.time_format == ISO:
            return _make_iso_parser(read)
        if read.time_format not in EPOCHS:
            return functools.partial(_parse_present, read=read)
        take_number = functools.partial(_convert_epoch, read=read)
    null_texts = _trim_nulls(read)
    null_numbers = {parse_number(text) for text in read.nulls}
    is_plain, to_number = _PLAIN_NUMBERS.get(read.raw, _NO_PLAIN_NUMBERS)
    if read.raw == "float" and read.decimal != ".":
        is_plain, to_number = _NO_PLAIN_NUMBERS

    def parse(value: Any) -> Any:
        if value is None:
            return None
        # Only these exact types have shortcuts. All others, such as bool, which is a subclass of
        # int, go to parse_by_rules.
        if type(value) is str:
            text = value.strip(_SPACES) if read.trim else value
            if not text or text in null_texts:
                return None
            if is_plain(text):
                return take_number(to_number(text))
        elif type(value) is int or type(value) is float:
            number = take_number(value)
            return None if value in null_numbers else number
        return parse_by_rules(value, read)

    return parse


def _parse_present(value: Any, read: Read) -> Any:
    """Parse a value by the rules of its column, unless it is None."""
    return None if value is None else parse_by_rules(value, read)


def _make_iso_parser(read: Read) -> Parse:
    """Make the parser of a column of ISO 8601 times."""
    null_texts = _trim_nulls(read)
    is_plain = re.compile(PLAIN_ISO).fullmatch

    def parse(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is str:
            text = value.strip(_SPACES) if read.trim else value
            if not text or text in null_texts:
                return None
            if is_plain(text):
                # For an impossible date, such as 30 February, parse_by_rules raises the error that
                # says what is wrong.
                with contextlib.suppress(ValueError):
                    return to_microseconds(datetime.datetime.fromisoformat(text))
        return parse_by_rules(value, read)

    return parse


def _convert_epoch(number: int | float, read: Read) -> int:
    """Convert a number in the column's time format to microseconds. Raises ValueError."""
    if isinstance(number, int):
        time = number * EPOCHS[read.time_format]
        if RAW_TYPES["time"].contains(time):
            return time
    return parse_by_rules(number, read)  # a fraction, or beyond the limits


def _make_list_parser(parse_item: Parse) -> Parse:
    """Make the parser of a multi-hot column; an empty list is a missing value."""

    def parse(value: Any) -> list | None:
        if is_missing(value):
            return None
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise ValueError(NOT_A_LIST)
        items = [parse_item(item) for item in value]
        if None in items:
            raise ValueError(MESSAGES[EMPTY_ITEM])
        return items or None

    return parse
