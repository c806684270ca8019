"""Convert fields of text to values of a raw type, checking each, by the rules of their column.

A field is the text between two delimiters; an empty field is a missing value.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import blanked, is_one_of, mask_to_arrow, string_array, string_parts
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.base import EMPTY_ITEM, NULL_ITEM
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.rows import CategoryValues, Jagged

#: Bytes of a field that an error shows.
_SHOWN = 40


@dataclasses.dataclass(frozen=True)
class Converted:
    """A column of ``n`` rows, bad ones included.

    Attributes:
        values: See :class:`formats.rows.RawRows`; 0, "" or an empty list where missing or wrong.
        missing: bool [n].
        code: uint8 [n], 0 or the code of an error, see :mod:`formats.feature_spec.raw_types.base`.
        show: Returns the wrong value of a row with a code, as Python writes it.
    """

    values: CategoryValues
    missing: np.ndarray
    code: np.ndarray
    show: Callable[[int], str]

    @property
    def parts(self) -> tuple[CategoryValues, np.ndarray]:
        """The values, and where they are missing."""
        return self.values, self.missing


def missing_column(read: Read, rows: int) -> Converted:
    """Return a column of single values that is not there: all are missing."""
    return convert(fields_of([b""] * rows), read)


def describe_count(fields: int, wanted: int) -> str:
    """Return what is wrong with a line that has another number of fields."""
    return f"{fields} field{'s' * (fields != 1)} instead of {wanted}"


def fields_of(values: list[bytes]) -> pa.Array:
    """Make an array of a few fields (``pa.array`` imports pandas)."""
    begins = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return string_array(begins, np.frombuffer(b"".join(values), np.uint8)).view(pa.binary())


def convert(fields: pa.Array, read: Read) -> Converted:
    """Convert single values as a column of the file is to be read.

    Only a label and a weight may not be missing.

    Args:
        fields: Binary array [n] without nulls.
        read: How they are read; the source and ``multi_hot`` are ignored.
    """
    texts, missing = _present(fields, read)
    parsed = RAW_TYPES[read.raw].from_text(texts, missing, read)
    return Converted(
        parsed.values,
        parsed.missing,
        parsed.code,
        lambda row: repr(fields[row].as_py()[:_SHOWN].decode("utf-8", "replace")),
    )


def _present(fields: pa.Array, read: Read) -> tuple[pa.Array, np.ndarray]:
    """Return fields without spaces around them and null texts, and which are then empty."""
    if read.trim:
        fields = pc.ascii_trim(fields.view(pa.string()), characters=" \t").view(pa.binary())
    if read.nulls:
        fields = blanked(fields, is_one_of(fields, read.nulls, trimmed=read.trim))
    return fields.view(pa.binary()), np.diff(string_parts(fields)[0]) == 0


def convert_lists(fields: pa.Array, read: Read, separator: str) -> Converted:
    """Convert fields that hold lists of values. An empty field or a null text is a missing list.

    Spaces are removed around a list and around each value. Within a list, an empty value and a null
    text are errors. A list may end with a separator; one of numbers may be in brackets.
    """
    texts, missing = _present(fields, read)
    bare = _bare_lists(texts, missing, read, separator)
    if bare is not texts:
        texts, missing = _present(bare, read)
    lists = pc.split_pattern(texts, pattern=separator)
    offsets = np.frombuffer(lists.buffers()[1], np.int32, len(lists) + 1, 4 * lists.offset)
    lengths = np.diff(offsets)
    items = lists.values.slice(offsets[0], offsets[-1] - offsets[0])
    if missing.any():  # an empty text was split into one empty value
        items = items.filter(mask_to_arrow(np.repeat(~missing, lengths)))
        lengths = np.where(missing, 0, lengths)
    items = items.view(pa.binary())
    converted = convert(items, read)
    converted.code[converted.missing] = NULL_ITEM
    bare = _present(items, dataclasses.replace(read, nulls=()))[1]
    converted.code[bare] = EMPTY_ITEM
    return convert_items(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), converted)


def _bare_lists(texts: pa.Array, missing: np.ndarray, read: Read, separator: str) -> pa.Array:
    """Return lists without brackets around them and a separator at their end.

    Most columns have neither, and are returned as they are.
    """
    offsets, data = string_parts(texts)
    last = data[offsets[1:][~missing] - 1]
    brackets = (last == ord("]")).any() and not RAW_TYPES[read.raw].is_text
    if brackets:
        texts = pc.replace_substring_regex(texts, r"(?s)^\[(.*)\]$", r"\1")
    if brackets or (last == ord(separator)).any():
        texts = pc.replace_substring_regex(texts, f"(?s)(.){re.escape(separator)}$", r"\1")
    return texts


def convert_items(offsets: np.ndarray, items: Converted) -> Converted:
    """Make lists of converted items; a row has the code of its first wrong item."""
    lengths = np.diff(offsets)
    code = np.zeros(len(lengths), np.uint8)
    wrong = np.flatnonzero(items.code)[::-1]  # reversed: the first item of a row is written last
    rows = np.searchsorted(offsets, wrong, side="right") - 1
    code[rows] = items.code[wrong]
    item_of = dict(zip(rows.tolist(), wrong.tolist(), strict=True))
    values = Jagged(offsets, items.values)
    return Converted(values, lengths == 0, code, lambda row: items.show(item_of[row]))
