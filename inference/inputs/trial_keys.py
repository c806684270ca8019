"""Keys of the spec that would take a value that it does not take now.

A key is named only if it really does: the value is converted again as the column would then be
read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pyarrow as pa

from nvt_torchrec.clicklog.text.convert import convert, fields_of
from nvt_torchrec.formats.spec.raw_types import DENSE_RAW_TYPES
from nvt_torchrec.formats.spec.reading import Read
from nvt_torchrec.formats.spec.times import EPOCHS, ISO

#: Texts that mean a missing value in many logs, in lower case.
_NULLS = frozenset(
    {"?", "-", "--", ".", "na", "n/a", "#n/a", "nan", "none", "null", "nil", "\\n", "unknown",
     "missing", "undefined", "(null)", "<na>", "(none)", "-nan", "inf", "-inf"}
)  # fmt: skip
_PATTERNS = (
    "%Y-%m-%d %H:%M:%S", "%Y/%m/%d %H:%M:%S", "%Y/%m/%d", "%Y%m%d", "%Y%m%d%H", "%Y%m%d%H%M%S",
    "%y%m%d%H", "%d.%m.%Y", "%d.%m.%Y %H:%M:%S", "%d.%m.%Y %H:%M", "%d/%m/%Y", "%d/%m/%Y %H:%M:%S",
    "%m/%d/%Y", "%m/%d/%Y %H:%M", "%d/%m/%Y %H:%M", "%m/%d/%Y %H:%M:%S", "%Y",
    "%m/%d/%Y %I:%M %p", "%m/%d/%Y %I:%M:%S %p", "%d-%b-%Y", "%d-%b-%Y %H:%M:%S", "%d %b %Y",
    "%b %d, %Y", "%b %d, %Y %I:%M %p", "%d/%b/%Y:%H:%M:%S %z",
)  # fmt: skip
#: Plausible times: 1990 to 2100, so that a number is not taken for another unit.
_FIRST_TIME, _LAST_TIME = 631_152_000_000_000, 4_102_444_800_000_000


def keys_that_take(text: str, read: Read) -> Iterator[tuple[str, Read]]:
    """Yield keys of the spec with which a column would take a text, and how it is read then.

    Args:
        text: the value.
        read: how the column is read; not a label.
    """
    return ((keys, changed) for keys, changed in _candidates(text, read) if _takes(text, changed))


def _candidates(text: str, read: Read) -> Iterator[tuple[str, Read]]:
    """Yield keys, and how the column would be read with them; simple ones first."""
    if text.strip().lower() in _NULLS and read.raw != "weight":
        token = text.strip() if read.trim or text != text.strip() else text
        keys = f"nulls = [{_toml(token)}]"
        yield keys, dataclasses.replace(read, nulls=(*read.nulls, token))
        keys = f"nulls = [{_toml(token)}] and trim = true"
        yield keys, dataclasses.replace(read, nulls=(*read.nulls, token), trim=True)
    variants = [("", read)]
    if not read.trim:
        variants.append(("trim = true", dataclasses.replace(read, trim=True)))
        yield variants[1]
    if read.raw in ("int32", "int", "float"):
        for keys, one in variants:
            yield _and(keys, "lenient = true"), dataclasses.replace(one, lenient=True)
        for character in (",", ".", "'", "_"):
            if character == "." and text.count(".") < 2:  # a decimal point
                continue
            key = f"thousands = {_toml(character)}"
            for keys, one in variants:
                yield _and(keys, key), dataclasses.replace(one, thousands=character)
                grouped = dataclasses.replace(one, thousands=character, lenient=True)
                yield _and(keys, key, "lenient = true"), grouped
        spaced = dataclasses.replace(read, thousands=" ")
        yield 'thousands = " "', spaced
    if read.raw == "time":
        for time_format in (ISO, *EPOCHS, *_PATTERNS):
            for keys, one in variants:
                changed = dataclasses.replace(one, time_format=time_format)
                key = f"time_format = {_toml(time_format)}" if time_format else "no time_format"
                if time_format != read.time_format and _plausible(text, changed):
                    yield _and(keys, key), changed
    for raw in _OTHER_RAW_TYPES.get(read.raw, ()):
        for keys, one in variants:
            yield _and(keys, f'raw = "{raw}"'), dataclasses.replace(one, raw=raw)


#: By raw type, those that take more; the dense ones are for dense columns.
_OTHER_RAW_TYPES = {DENSE_RAW_TYPES[0]: ("float",), "int": ("string",), "hex32": ("int", "string")}


def _one(text: str) -> pa.Array:
    return fields_of([text.encode("utf-8", "surrogateescape")])


def _takes(text: str, read: Read) -> bool:
    return not convert(_one(text), read).code[0]


def _plausible(text: str, read: Read) -> bool:
    column = convert(_one(text), read)
    return not column.code[0] and _FIRST_TIME <= column.values[0] < _LAST_TIME


def _and(*keys: str) -> str:
    return " and ".join(key for key in keys if key)


def _toml(text: str) -> str:
    """The text as TOML writes a string."""
    return json.dumps(text, ensure_ascii=False)
