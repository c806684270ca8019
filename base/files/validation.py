"""Validation of JSON: a value becomes the dataclass that it should be.

Files may come from anywhere, so every value is validated before it is used: types, missing and
unknown keys, numbers that no array could hold, and what the dataclass itself refuses in its
``__post_init__``. All of these are one kind of error, which names the file and the place in it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from nvt_torchrec.base.errors import BadInputError, ClickLogError

T = TypeVar("T")

_LARGEST = 2**63 - 1
_NAMES = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}


def parse(kind: type[T], value: Any, source: Path | str, remedy: str = "") -> T:
    """``value``, read from JSON, as ``kind``.

    Args:
        kind: A dataclass, ``dict[str, X]``, ``list[X]``, ``tuple[X, ...]``, ``X | None``, ``bool``,
            ``int`` (64 bits), ``float`` (finite), ``str`` or ``Any``. Dataclasses may raise
            ValueError or errors of this project in ``__post_init__``.
        value: The value that was read.
        source: The file, for errors.
        remedy: What to do about a damaged file.

    Raises:
        BadInputError: The value is not of this type.
    """
    try:
        return convert(kind, value)
    except (ValueError, LookupError, TypeError, ClickLogError) as error:
        what = error.what if isinstance(error, ClickLogError) else error
        raise BadInputError(f"{source}: damaged: {what}", remedy) from None


def convert(kind: Any, value: Any, where: str = "") -> Any:
    """As :func:`parse`; raises ValueError, and what ``__post_init__`` raises."""
    if kind is Any:
        return value
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else convert(inner[0], value, where)
    if origin in (list, tuple):
        _check(isinstance(value, list | tuple), value, where, "a list")
        return origin(convert(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict or dataclasses.is_dataclass(kind):
        _check(isinstance(value, dict), value, where, "an object")
        if origin is dict:
            return {key: convert(inner[1], item, _join(where, key)) for key, item in value.items()}
        return _convert_dataclass(kind, value, where)
    if kind is float:
        good = type(value) in (int, float) and abs(value) <= _LARGEST_FLOAT
    else:
        good = type(value) is kind and (kind is not int or abs(value) <= _LARGEST)
    _check(good, value, where, _NAMES[kind])
    return value


def _convert_dataclass(kind: type, value: dict[str, Any], where: str) -> Any:
    types_of, needed = _fields(kind)
    for key in needed - value.keys():
        raise ValueError(f"{_join(where, key)} is missing")
    for key in value.keys() - types_of.keys():
        raise ValueError(f"{_join(where, key)[:80]} is unknown")
    return kind(**{key: convert(types_of[key], value[key], _join(where, key)) for key in value})


@functools.cache
def _fields(kind: type) -> tuple[dict[str, Any], frozenset[str]]:
    """The types of a dataclass's fields, and the names of those without a default."""
    hints = typing.get_type_hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    missing = dataclasses.MISSING
    return (
        {field.name: hints[field.name] for field in fields},
        frozenset(f.name for f in fields if f.default is missing and f.default_factory is missing),
    )


_LARGEST_FLOAT = math.nextafter(math.inf, 0)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _check(good: bool, value: Any, where: str, wanted: str) -> None:
    if not good:
        raise ValueError(f"{where or 'it'} is {_shown(value)}, {wanted} is needed")


def _shown(value: Any) -> str:
    return type(value).__name__ if isinstance(value, dict | list | tuple) else f"{value!r:.60}"
