"""Validate files: their kind and size, the names of other files in them, and JSON.

Files may come from anywhere, so every value is validated before it is used: types, missing and
unknown keys, numbers that no array could hold, and the checks of dataclasses in their
``__post_init__``. All problems raise the same error, which names the file and the key.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
import stat
import types
import typing
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

from nvt_torchrec.base.errors import BadInputError, ClickLogError, UnregisteredError

T = TypeVar("T")

#: The largest integer and the largest float that arrays can hold.
_MAX_INTEGER = 2**63 - 1
_MAX_FLOAT = math.nextafter(math.inf, 0)
#: The names of types in errors.
_NAMES = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}


def open_regular(path: Path | str) -> IO[bytes]:
    """Open a regular file for reading.

    Other files are not read: a named pipe could block forever, and a device might never end.

    Raises:
        OSError: The file cannot be opened, or is not a regular one.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    kind = IsADirectoryError if stat.S_ISDIR(mode) else OSError
    raise kind("not a regular file")


def read_regular(path: Path | str, maximum: int) -> bytes:
    """Return the content of a regular file of at most ``maximum`` bytes.

    Raises:
        OSError: The file cannot be read, or is not a regular one.
        ValueError: The file is larger.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > maximum:
            raise ValueError(f"expected at most {maximum} bytes, got {size}")
        return file.read(maximum)


def parse_strict_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON that is unambiguous, so that all programs read it in the same way.

    Raises:
        ValueError: The text is not JSON, is nested too deep, or has NaN, infinity or a duplicate
            key.
    """
    if not isinstance(text, str):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON; a missing value is null")


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object, refusing duplicate keys: programs differ in which value they take."""
    items = dict(pairs)
    if len(items) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        ((key, _),) = counts.most_common(1)
        raise ValueError(f"the key {key!r:.60} occurs twice in an object")
    return items


#: Made once, because `json.loads` with these options would make one for each text.
_DECODER = json.JSONDecoder(object_pairs_hook=_make_object, parse_constant=_refuse_constant)


def resolve_inside(directory: Path, name: str, source: Path | str, remedy: str = "") -> Path:
    """Return the path of a file or directory below ``directory`` that another file names.

    Args:
        directory: The directory that the path must be in.
        name: The path, relative to ``directory``.
        source: The file that names it, for errors.
        remedy: What to do about a damaged file.

    Raises:
        BadInputError: The name is not relative, or leads out of the directory, perhaps by a link.
    """
    parts = Path(name).parts
    is_inside = False
    if parts and ".." not in parts and not Path(name).is_absolute():
        with contextlib.suppress(ValueError):  # raised for a name that no file can have
            real = Path(os.path.realpath(directory / name))  # follows links
            is_inside = real.is_relative_to(os.path.realpath(directory))
    if not is_inside:
        raise BadInputError(f"{source}: {name!r:.200} is not inside {directory}", remedy)
    return directory / name


def parse(kind: type[T], value: Any, source: Path | str, remedy: str = "") -> T:
    """Convert a value that was read from JSON to a type, checking it.

    Args:
        kind: A dataclass, ``dict[str, X]``, ``list[X]``, ``tuple[X, ...]``, ``X | None``, ``bool``,
            ``int`` (64 bits), ``float`` (finite), ``str`` or ``Any``. Dataclasses may raise
            ValueError or errors of this project in ``__post_init__``; their instances are returned
            unchanged. A class attribute ``removed_keys`` maps keys of earlier versions to the value
            with which they may still occur, because it has no effect.
        value: The value that was read.
        source: The file, for errors.
        remedy: What to do about a damaged file.

    Raises:
        BadInputError: The value is not of this type.
    """
    try:
        return convert(kind, value)
    except UnregisteredError as error:
        raise BadInputError(f"{source}: {error.what}", error.remedy) from None
    except (ValueError, LookupError, TypeError, ClickLogError) as error:
        what = error.what if isinstance(error, ClickLogError) else error
        raise BadInputError(f"{source}: damaged: {what}", remedy) from None


def convert(kind: Any, value: Any, where: str = "") -> Any:
    """Convert as :func:`parse` does, but raise ValueError, and the errors of ``__post_init__``."""
    if kind is Any:
        return value
    origin = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if origin is types.UnionType:  # X | None
        return None if value is None else convert(inner[0], value, where)
    if origin in (list, tuple):
        _check(isinstance(value, list | tuple), value, where, "a list")
        items = []
        for i, item in enumerate(value):
            items.append(convert(inner[0], item, f"{where}[{i}]"))
        return origin(items)
    if origin is dict or dataclasses.is_dataclass(kind):
        if origin is None and isinstance(value, kind):
            return value
        _check(isinstance(value, dict), value, where, "an object")
        if origin is dict:
            return {key: convert(inner[1], item, _join(where, key)) for key, item in value.items()}
        return _convert_dataclass(kind, value, where)
    if kind is float:
        is_good = type(value) in (int, float) and abs(value) <= _MAX_FLOAT
    elif kind is int:  # not isinstance, because True is an instance of int
        is_good = type(value) is int and abs(value) <= _MAX_INTEGER
    else:
        is_good = type(value) is kind
    _check(is_good, value, where, _NAMES[kind])
    return value


def _convert_dataclass(kind: type, value: dict[str, Any], where: str) -> Any:
    """Convert a JSON object to a dataclass; see :func:`convert`."""
    field_types, required = _find_fields(kind)
    missing = required - value.keys()
    if missing:
        raise ValueError(f"{_join(where, min(missing))} is missing")
    removed: dict[str, Any] = getattr(kind, "removed_keys", {})
    value = {key: item for key, item in value.items() if removed.get(key, ...) != item}
    unknown = value.keys() - field_types.keys()
    if unknown:
        raise ValueError(f"{_join(where, min(unknown))[:80]} is unknown")
    arguments = {}
    for key, item in value.items():
        arguments[key] = convert(field_types[key], item, _join(where, key))
    return kind(**arguments)


@functools.cache
def _find_fields(kind: type) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a dataclass's fields, and the names of those without a default."""
    hints = typing.get_type_hints(kind)
    field_types = {}
    required = set()
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        field_types[field.name] = hints[field.name]
        has_default = field.default is not dataclasses.MISSING
        if not has_default and field.default_factory is dataclasses.MISSING:
            required.add(field.name)
    return field_types, frozenset(required)


def _join(where: str, key: str) -> str:
    """Return the path of a key in a file, for errors."""
    return f"{where}.{key}" if where else key


def _check(is_good: bool, value: Any, where: str, wanted: str) -> None:
    """Raise ValueError, which says what was expected, unless ``is_good``."""
    if is_good:
        return
    is_nested = isinstance(value, dict | list | tuple)
    shown = type(value).__name__ if is_nested else f"{value!r:.60}"
    what = f"expected {wanted}, got {shown}"
    raise ValueError(f"{where}: {what}" if where else what)
