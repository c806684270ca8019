"""Convert fields of text to checked values of a raw type, by the rules of their column.

A field is the text between two delimiters; an empty field is a missing value.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import (
    blank_texts,
    is_one_of,
    mask_to_arrow,
    string_array,
    string_parts,
    to_offsets,
)
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.base import (
    BEYOND_FLOAT16,
    EMPTY_ITEM,
    NULL_ITEM,
    WRONG_WIDTH,
)
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.rows import CategoryValues, Jagged

#: The largest number of bytes of a field that an error shows.
_MAX_SHOWN_BYTES = 40


@dataclasses.dataclass(frozen=True)
class Converted:
    """A column of ``n`` rows, bad ones included.

    Attributes:
        values: See :class:`formats.rows.RawRows`; 0, "" or an empty list where missing or wrong.
        missing: Where values are missing, bool [n].
        code: uint8 [n], 0 or the code of an error, see :mod:`formats.feature_spec.raw_types.base`.
        show: Returns the value of a row for errors, as Python's ``repr``.
    """

    values: CategoryValues
    missing: np.ndarray
    code: np.ndarray
    show: Callable[[int], str]

    @property
    def parts(self) -> tuple[CategoryValues, np.ndarray]:
        """The values, and where they are missing."""
        return self.values, self.missing


def make_missing_column(read: Read, rows: int) -> Converted:
    """Return a column of single values, all missing, for a source that a file lacks."""
    return convert(to_fields([b""] * rows), read)


def describe_count(fields: int, wanted: int) -> str:
    """Describe the error of a line that has another number of fields."""
    unit = "field" if fields == 1 else "fields"
    return f"{fields} {unit} instead of {wanted}"


def to_fields(values: list[bytes]) -> pa.Array:
    """Make an array of a few fields (``pa.array`` imports pandas)."""
    begins = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return string_array(begins, np.frombuffer(b"".join(values), np.uint8)).view(pa.binary())


def convert(fields: pa.Array, read: Read) -> Converted:
    """Convert fields that hold single values.

    Args:
        fields: Binary array [n] without nulls.
        read: How they are read; ``source`` and ``multi_hot`` are ignored.
    """
    texts, missing = _find_present(fields, read)
    parsed = RAW_TYPES[read.raw].from_text(texts, missing, read)

    def show(row: int) -> str:
        return repr(fields[row].as_py()[:_MAX_SHOWN_BYTES].decode("utf-8", "replace"))

    return Converted(parsed.values, parsed.missing, parsed.code, show)


def _find_present(fields: pa.Array, read: Read) -> tuple[pa.Array, np.ndarray]:
    """Trim fields and replace null texts by "", if the column's rules say so.

    Returns:
        The fields, binary array [n]; and where they are empty, bool [n].
    """
    if read.trim:
        fields = pc.ascii_trim(fields.view(pa.string()), characters=" \t").view(pa.binary())
    if read.nulls:
        fields = blank_texts(fields, is_one_of(fields, read.nulls, trimmed=read.trim))
    offsets, _ = string_parts(fields)
    return fields.view(pa.binary()), np.diff(offsets) == 0


def convert_lists(fields: pa.Array, read: Read, separator: str) -> Converted:
    """Convert fields that hold lists of values; an empty field or a null text is a missing list.

    Trimming removes spaces around a list and around each value. Within a list, an empty value or a
    null text is an error. A list may end with a separator, and lists of numbers may be in brackets.
    """
    texts, missing = _find_present(fields, read)
    stripped = _strip_lists(texts, missing, read, separator)
    if stripped is not texts:  # the rest may be a null text, or have spaces around it
        texts, missing = _find_present(stripped, read)
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
    _, empty = _find_present(items, dataclasses.replace(read, nulls=()))
    converted.code[empty] = EMPTY_ITEM
    list_offsets = to_offsets(lengths)
    return check_vectors(convert_items(list_offsets, converted), read)


def _strip_lists(texts: pa.Array, missing: np.ndarray, read: Read, separator: str) -> pa.Array:
    """Remove brackets around lists, and a separator at their end.

    Columns that have neither, as most do, are returned unchanged.
    """
    offsets, data = string_parts(texts)
    last_bytes = data[offsets[1:][~missing] - 1]
    has_brackets = (last_bytes == ord("]")).any() and not RAW_TYPES[read.raw].is_text
    if has_brackets:
        texts = pc.replace_substring_regex(texts, r"(?s)^\[(.*)\]$", r"\1")
    if has_brackets or (last_bytes == ord(separator)).any():
        texts = pc.replace_substring_regex(texts, f"(?s)(.){re.escape(separator)}$", r"\1")
    return texts


def convert_items(offsets: np.ndarray, items: Converted) -> Converted:
    """Make lists of converted items; a row has the code of its first wrong item.

    Args:
        offsets: int64 [n + 1], the offsets of the rows' lists in the items.
        items: The items of all rows, one row after the other.
    """
    lengths = np.diff(offsets)
    code = np.zeros(len(lengths), np.uint8)
    # In reverse, so that the first of several wrong items of a row is written last.
    wrong = np.flatnonzero(items.code)[::-1]
    rows = np.searchsorted(offsets, wrong, side="right") - 1
    code[rows] = items.code[wrong]
    first_wrong_items = dict(zip(rows.tolist(), wrong.tolist(), strict=True))
    values = Jagged(offsets, items.values)
    return Converted(values, lengths == 0, code, lambda row: items.show(first_wrong_items[row]))


def check_vectors(lists: Converted, read: Read) -> Converted:
    """Check that the lists of a vector have its width, and numbers that fit its dtype.

    The lists of other columns are returned unchanged.
    """
    if not read.width or not isinstance(lists.values, Jagged):
        return lists
    offsets = lists.values.offsets
    numbers = lists.values.values
    assert isinstance(numbers, np.ndarray)
    lengths = np.diff(offsets)
    is_good = lists.code == 0
    has_other_width = is_good & (lengths != read.width) & (lengths > 0)
    lists.code[has_other_width] = WRONG_WIDTH
    too_large = np.flatnonzero(np.abs(numbers) > read.maximum)
    rows = np.searchsorted(offsets, too_large, side="right") - 1
    # in reverse, so that the first of several numbers of a row is kept
    first_too_large = dict(zip(rows[::-1].tolist(), too_large[::-1].tolist(), strict=True))
    lists.code[[row for row in first_too_large if lists.code[row] == 0]] = BEYOND_FLOAT16

    def show(row: int) -> str:
        if lists.code[row] == WRONG_WIDTH:
            return f"{lengths[row]} values instead of {read.width}"
        if lists.code[row] == BEYOND_FLOAT16:
            return repr(float(numbers[first_too_large[row]]))
        return lists.show(row)

    return dataclasses.replace(lists, show=show)
