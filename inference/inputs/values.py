"""Python values → rows, checking each: dicts as JSON gives them, lists, columns of objects.

Written for a single row: one loop over its fields, no array per column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from clicklog.rows import CategoryValues, Ragged, RawRows, dense_dtype
from clicklog.spec.feature_spec import FeatureSpec
from clicklog.spec.raw_types import (
    EMPTY_ITEM,
    HEX32_PATTERN,
    NOT_FINITE,
    NOT_UTF8,
    RAW_TYPES,
    RawType,
)
from clicklog.strings import strings
from inference.errors import InvalidRowError, MissingColumnError

_HEX = re.compile(HEX32_PATTERN).fullmatch
_INT32, _INT, _HEX32 = RAW_TYPES["int32"], RAW_TYPES["int"], RAW_TYPES["hex32"]
_FLOAT, _STRING = RAW_TYPES["float"], RAW_TYPES["string"]
_MISSING_TYPES = {"NAType", "NaTType", "MaskedConstant"}  # pandas', NumPy's: by name, not imported


def no_such_key(row: int, column: str) -> MissingColumnError:
    """The error of a row that is a dict without a column."""
    return MissingColumnError(
        f"row {row} has no column {column}", "a missing value is null", column, row
    )


def _is_missing(value: Any) -> bool:
    if value is None or value == "" or value == b"":
        return True
    return isinstance(value, float | np.floating) and math.isnan(value)


def _integer(value: Any, kind: RawType) -> int:
    if isinstance(value, float | np.floating) and float(value).is_integer():
        limit = {2: 2**11, 4: 2**24}.get(getattr(value, "itemsize", 8), 2**53)
        if abs(value) > limit and limit < 2**53:
            raise ValueError(f"{value.dtype} rounds integers above {limit}, use int64 or float64")
        value = int(value)
    if not isinstance(value, int | np.integer | np.bool_):
        raise ValueError(_INT.syntax)
    value = int(value)
    if not kind.contains(value):
        raise ValueError(kind.range)
    return value


def _int32(value: Any) -> int | None:
    if type(value) is int and _INT32.least <= value <= _INT32.most:
        return value
    return None if _absent(value) else _integer(value, _INT32)


def _int(value: Any) -> int | None:
    if type(value) is int and _INT.least <= value <= _INT.most:
        return value
    return None if _absent(value) else _integer(value, _INT)


def _hex32(value: Any) -> int | None:
    if type(value) is str and _HEX(value):
        return int(value, 16)
    if _absent(value):
        return None
    if isinstance(value, bytes):
        value = value.decode("ascii", "replace")
    if isinstance(value, str):  # also numpy.str_
        if not _HEX(value):
            raise ValueError(_HEX32.syntax)
        return int(value, 16)
    return _integer(value, _HEX32)


def _float(value: Any) -> float | None:
    if type(value) is not float or value != value:
        if _absent(value):
            return None
        if not isinstance(value, int | float | np.number | np.bool_):
            raise ValueError(_FLOAT.syntax)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if abs(number) > _FLOAT.most:
        raise ValueError(NOT_FINITE)
    return number


def _string(value: Any) -> str | None:
    if type(value) is not str or not value:
        if _absent(value):
            return None
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError:
                raise ValueError(NOT_UTF8) from None
        if not isinstance(value, str):
            raise ValueError(_STRING.syntax)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(NOT_UTF8) from None
    return value


def _absent(value: Any) -> bool:
    if type(value).__name__ in _MISSING_TYPES:
        return True
    try:
        return bool(_is_missing(value))
    except (TypeError, ValueError):  # arrays, and what else has no truth value
        return False


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "int32": _int32,
    "int": _int,
    "hex32": _hex32,
    "float": _float,
    "string": _string,
}


def parser(raw: str, *, multi_hot: bool = False) -> Callable[[Any], Any]:
    """A function from a value to what a column of this raw type holds, None if it is missing.

    It raises ValueError with the reason if the column cannot hold the value. Integers may be floats
    without a fraction; hex32 an integer, or its digits; a list any iterable but a string.
    """
    one = _PARSERS[raw]
    return _list_parser(one) if multi_hot else one


def _list_parser(one: Callable[[Any], Any]) -> Callable[[Any], list | None]:
    def parse(value: Any) -> list | None:
        if _absent(value):
            return None
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise ValueError("expected a list or a missing value")
        items = [one(item) for item in value]
        if None in items:
            raise ValueError(EMPTY_ITEM)
        return items or None

    return parse


class RowReader:
    """Reads rows that are dicts. Made once for a spec."""

    def __init__(self, spec: FeatureSpec) -> None:
        self._spec = spec
        self._dense = [
            (c.name, parser(c.raw), 1 << j, RAW_TYPES[c.raw].placeholder)
            for j, c in enumerate(spec.dense)
        ]
        self._categorical = [
            (
                c.name,
                parser(c.raw, multi_hot=c.multi_hot),
                1 << j,
                () if c.multi_hot else RAW_TYPES[c.raw].placeholder,
            )
            for j, c in enumerate(spec.categorical)
        ]

    def read(self, rows: Sequence[Mapping[str, Any]]) -> RawRows:
        """Typed columns of the rows; further keys, a label among them, are ignored.

        Raises:
            MissingColumnError: a row lacks a column.
            InvalidRowError: a value that its column cannot hold.
        """
        spec, count = self._spec, len(rows)
        dense, dense_missing = self._fields(rows, self._dense)
        flat, missing = self._fields(rows, self._categorical)
        numbers = np.array(dense, dense_dtype(spec)).reshape(count, len(spec.dense))
        width = len(spec.categorical)
        categorical: np.ndarray | list[CategoryValues]
        if spec.is_criteo_format:
            categorical = np.array(flat, np.uint32).reshape(count, width).T
        else:
            categorical = [
                category_values(flat[j::width], column.raw, multi_hot=column.multi_hot)
                for j, column in enumerate(spec.categorical)
            ]
        return RawRows(
            label=None,
            dense=numbers.T,
            dense_missing=np.array(dense_missing, np.uint64),
            categorical=categorical,
            categorical_missing=np.array(missing, np.uint64),
            line=np.arange(count),
            bad=[],
            bad_count=0,
            lines=count,
        )

    @staticmethod
    def _fields(rows: Sequence[Mapping[str, Any]], columns: list) -> tuple[list, list[int]]:
        """The values row by row, and bits of the missing ones."""
        values: list[Any] = []
        missing = []
        append = values.append
        for index, row in enumerate(rows):
            bits = 0
            for name, parse, bit, placeholder in columns:
                try:
                    value = parse(row[name])
                except KeyError:
                    raise no_such_key(index, name) from None
                except ValueError as error:
                    raise InvalidRowError(index, name, f"{row[name]!r:.60}: {error}") from None
                if value is None:
                    bits |= bit
                    value = placeholder
                append(value)
            missing.append(bits)
        return values, missing


def category_values(values: list, raw: str, *, multi_hot: bool) -> CategoryValues:
    """Parsed values as an array; lists as their items."""
    if multi_hot:
        offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
        items = [item for value in values for item in value]
        return Ragged(offsets, category_values(items, raw, multi_hot=False))
    if raw == "string":
        return strings(values)
    return np.array(values, RAW_TYPES[raw].dtype)
