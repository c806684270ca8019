"""Validation of what files hold: their kind and size, names of other files, JSON.

Files may come from anywhere, so every value is validated before it is used: types, missing and
unknown keys, numbers that no array could hold, and what the dataclass itself refuses in its
``__post_init__``. All of these are one kind of error, which names the file and the place in it.
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

#: The largest integer and the largest float that arrays hold.
_MAX_INTEGER = 2**63 - 1
_MAX_FLOAT = math.nextafter(math.inf, 0)
#: How errors name the types.
_NAMES = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}


def open_regular(path: Path | str) -> IO[bytes]:
    """Open a file to read it, if it is a regular one.

    No byte is read of others: a named pipe could block for ever, a device never end.

    Raises:
        OSError: It cannot be opened, or is another kind of file.
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
        OSError: It cannot be read, or is another kind of file.
        ValueError: It is larger.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > maximum:
            raise ValueError(f"{size} bytes, where at most {maximum} are expected")
        return file.read(maximum)


def parse_strict_json(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text that all programs read in the same way.

    Raises:
        ValueError: It is not JSON, nests values too deep, has NaN or infinity, or a key twice.
    """
    if not isinstance(text, str):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("values are nested too deep") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON; a missing value is null")


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; programs differ in which value of a duplicate key they take."""
    items = dict(pairs)
    if len(items) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        ((key, _),) = counts.most_common(1)
        raise ValueError(f"the key {key!r:.60} occurs twice in an object")
    return items


#: Made once: `json.loads` makes one for each text.
_DECODER = json.JSONDecoder(object_pairs_hook=_make_object, parse_constant=_refuse_constant)


def resolve_inside(directory: Path, name: str, source: Path | str, remedy: str = "") -> Path:
    """Return the path of a file or directory that another file names, below ``directory``.

    Args:
        directory: Where it has to be.
        name: Its path, relative to ``directory``.
        source: The file that names it, for errors.
        remedy: What to do about a damaged file.

    Raises:
        BadInputError: The name is not relative, or leads out of the directory, perhaps by a link.
    """
    parts = Path(name).parts
    is_inside = False
    if parts and ".." not in parts and not Path(name).is_absolute():
        with contextlib.suppress(ValueError):  # raised for a name that no file can have
            real = Path(os.path.realpath(directory / name))  # where links lead
            is_inside = real.is_relative_to(os.path.realpath(directory))
    if not is_inside:
        raise BadInputError(f"{source}: {name!r:.200} does not lie in {directory}", remedy)
    return directory / name


def parse(kind: type[T], value: Any, source: Path | str, remedy: str = "") -> T:
    """Return a value that was read from JSON as a type.

    Args:
        kind: A dataclass, ``dict[str, X]``, ``list[X]``, ``tuple[X, ...]``, ``X | None``, ``bool``,
            ``int`` (64 bits), ``float`` (finite), ``str`` or ``Any``. Dataclasses may raise
            ValueError or errors of this project in ``__post_init__``; an instance of one is taken
            as it is. Its ``removed_keys`` may occur with the values that had no effect.
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
    """Return what :func:`parse` does; raises ValueError, and what ``__post_init__`` raises."""
    if kind is Any:
        return value
    origin = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if origin is types.UnionType:  # X | None
        return None if value is None else convert(inner[0], value, where)
    if origin in (list, tuple):
        _check(isinstance(value, list | tuple), value, where, "a list")
        return origin(convert(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict or dataclasses.is_dataclass(kind):
        if origin is None and isinstance(value, kind):
            return value
        _check(isinstance(value, dict), value, where, "an object")
        if origin is dict:
            return {key: convert(inner[1], item, _join(where, key)) for key, item in value.items()}
        return _convert_dataclass(kind, value, where)
    if kind is float:
        is_good = type(value) in (int, float) and abs(value) <= _MAX_FLOAT
    elif kind is int:  # type, as True is an instance of int
        is_good = type(value) is int and abs(value) <= _MAX_INTEGER
    else:
        is_good = type(value) is kind
    _check(is_good, value, where, _NAMES[kind])
    return value


def _convert_dataclass(kind: type, value: dict[str, Any], where: str) -> Any:
    """Return an object of JSON as a dataclass; see :func:`convert`."""
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
    """Return the place of a key in a file, for errors."""
    return f"{where}.{key}" if where else key


def _check(is_good: bool, value: Any, where: str, wanted: str) -> None:
    """Raise ValueError unless a value is of the type that is wanted."""
    if is_good:
        return
    is_nested = isinstance(value, dict | list | tuple)
    shown = type(value).__name__ if is_nested else f"{value!r:.60}"
    raise ValueError(f"{where or 'it'} is {shown}, {wanted} is needed")
