"""Keys of the spec that would take a value that it does not take now.

A key is named only if it really does: the value is converted again as the column would then be
read.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator

import pyarrow as pa

from nvt_torchrec.clicklog.text.convert import Converted, convert, fields_of
from nvt_torchrec.formats.spec.labels import LabelRule
from nvt_torchrec.formats.spec.raw_types import DENSE_RAW_TYPES
from nvt_torchrec.formats.spec.raw_types.base import NOT_UTF8
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
#: Of labels that are 0, the ones that are 1.
_OPPOSITES = {"no": "yes", "n": "y", "false": "true", "f": "t", "negative": "positive"}
#: Plausible times: 1990 to 2100, so that a number is not taken for another unit.
_FIRST_TIME, _LAST_TIME = 631_152_000_000_000, 4_102_444_800_000_000
_MOST_TEXT = 40


def remedy_of(column: Converted, read: Read, row: int) -> str:
    """Return what to do about the wrong value of a row, if more than to correct the file."""
    hint = remedy(column.text(row) if column.text else None, read, int(column.code[row]))
    return hint and f"correct the file, or {hint}"


@functools.lru_cache(maxsize=4096)
def remedy(text: str | None, read: Read, code: int) -> str:
    """Return "set … for column … in the spec" if a key would take a wrong value, else "".

    Args:
        text: the value, of lists the wrong one in it; None: it is not text, or not known.
        read: how the column was read.
        code: what is wrong, see :mod:`formats.spec.raw_types.base`.
    """
    if code == NOT_UTF8:
        return 'set encoding = "latin-1" in [input] of the spec if the file is in it'
    if not text or not text.replace("\t", " ").isprintable():
        return ""
    if read.raw == "label":
        return _label_remedy(text, read)
    for keys, _ in keys_that_take(text, read):
        return f"set {keys} for column {read.source} in the spec"
    if (keys := _decimal_keys(text, read)) is not None:
        own = keys and f", and {keys} for column {read.source},"
        return f'set decimal = "," in [input]{own} of the spec'
    if len(text) > _MOST_TEXT or read.raw == "weight" or any(c.isdigit() for c in text):
        return ""
    return (
        f"set nulls = [{_toml(text.strip() if read.trim else text)}] for column {read.source} in "
        "the spec if it means a missing value"
    )


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


def _decimal_keys(text: str, read: Read) -> str | None:
    """Return the keys that take a number beside ``decimal = ","``; None if that does not help."""
    if read.raw not in ("int32", "float", "weight") or read.decimal == ",":
        return None
    read = dataclasses.replace(read, decimal=",")
    numbers = [("", read)]
    if read.raw == "int32":
        numbers.append(('raw = "float"', dataclasses.replace(read, raw="float")))
    for trim, trimmed in [("", read.trim), ("trim = true", True)]:
        for point, thousands in [("", read.thousands), ('thousands = "."', ".")]:
            for raw, one in numbers:
                if _takes(text, dataclasses.replace(one, trim=trimmed, thousands=thousands)):
                    return _and(raw, point, trim)
    return None


#: By raw type, those that take more; the dense ones are for dense columns.
_OTHER_RAW_TYPES = {DENSE_RAW_TYPES[0]: ("float",), "int": ("string",), "hex32": ("int", "string")}


def _label_remedy(text: str, read: Read) -> str:
    rule = read.label or LabelRule(read.source)
    where = f"in [label] of the spec, for column {read.source}"
    if not read.trim and _takes(text, dataclasses.replace(read, trim=True, label=_trimmed(rule))):
        return f"set trim = true {where}"
    bare = text.strip(" \t") if read.trim else text
    if not bare or len(bare) > _MOST_TEXT:
        return ""
    if rule.positive:
        return f"add {_toml(bare)} to positive or negative {where}"
    number = dataclasses.replace(read, label=LabelRule(rule.name, rule.source, threshold=1))
    if rule.threshold is None and _takes(text, number):
        return f"set threshold, the least number that is 1, {where}"
    one = _OPPOSITES.get(bare.lower(), bare)
    one = one.upper() if bare.isupper() else one.title() if bare.istitle() else one
    return f"set positive, the texts that are 1, such as positive = [{_toml(one)}], {where}"


def _trimmed(rule: LabelRule) -> LabelRule:
    return dataclasses.replace(rule, trim=True)


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
