"""Convert typed columns, of parquet or in memory, by the rules of a feature spec.

- Text is parsed like the fields of a text file, for every raw type and with every rule.
- Integers may have any integer type, or be floats without a fraction, because pandas makes floats
  of integers with missing values; NaN is a missing value. hex32 may be integers. Integers in a
  column of strings become their decimal digits. If ``nulls`` has texts that are numbers, these
  numbers are missing values.
- Booleans are 1 and 0 in columns of numbers; columns of strings do not accept them.
- Decimals are numbers, or strings of their digits. Lists may be text, with ``list_separator``.
- Labels and weights may be numbers or booleans. A label's texts are compared with the numbers that
  they stand for, and ``true`` and ``false`` with booleans.
- Times may be timestamps (UTC without a time zone), dates, or numbers if the format is numeric:
  since 1970, or a pattern of digits only.

A conversion that would lose information is an error, such as a fraction in a column of integers or
a float in a column of strings.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import blank_texts, is_list, is_text, null_mask, to_numpy, to_offsets
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.clicklog.text.convert import (
    Converted,
    check_vectors,
    convert,
    convert_items,
    convert_lists,
)
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.base import EMPTY_ITEM, NULL_ITEM
from nvt_torchrec.formats.feature_spec.read_plan import Read


def fits(held: pa.DataType, read: Read, separator: str = "") -> bool:
    """Return whether columns of a type can be read; single values may still be wrong.

    Args:
        held: The type of the column.
        read: How the column is read.
        separator: The character between the values of a list in text; "" if lists cannot be text.
    """
    if pa.types.is_dictionary(held):
        held = held.value_type
    if pa.types.is_null(held):
        return True
    if read.multi_hot:
        if is_text(held):
            return bool(separator)
        return is_list(held) and fits(held.value_type, dataclasses.replace(read, multi_hot=False))
    return is_text(held) or RAW_TYPES[read.raw].fits(held, read)


def describe_wanted(read: Read) -> str:
    """Describe the type that a column must have, for errors that say "not …"."""
    if read.raw == "label":
        return "a label (0 or 1)"
    return f"a list of raw type {read.raw}" if read.multi_hot else f"of raw type {read.raw}"


def suggest_type_remedy(held: pa.DataType, read: Read) -> str:
    """Return the remedy for a column of a file whose type does not fit."""
    return suggest_for_booleans(held, read) or (
        f"change raw, multi_hot, derive or time_format of column {read.source} in the spec, or "
        "rewrite the file"
    )


def suggest_conversion(read: Read) -> str:
    """Return the remedy for a column in memory whose type does not fit."""
    if RAW_TYPES[read.raw].is_text:
        return "pass its texts as in the log; pandas.read_csv needs dtype=str for them"
    return "convert it first"


def suggest_for_booleans(held: pa.DataType, read: Read) -> str:
    """Return the remedy for booleans in a column of strings; "" for other types.

    It is unknown how the log writes them.
    """
    if read.raw != "string" or not pa.types.is_boolean(held):
        return ""
    return (
        f'set raw = "bool" for column {read.source} in the spec, which accepts all forms of true '
        "and false, or write the same texts as in the training log"
    )


def convert_array(array: pa.Array, read: Read, separator: str = "") -> Converted:
    """Convert a column whose type fits; see :func:`fits`."""
    if not read.multi_hot:
        return _convert_values(array, read)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text(array.type):
        return convert_lists(to_text_fields(array), read, separator)
    return _convert_lists(array, read)


def convert_column(array: pa.Array, read: Read) -> Converted:
    """Check and convert a column in memory.

    Args:
        array: [n], of any type that fits.
        read: How the column is read.

    Raises:
        SchemaError: The type of the array does not fit.
    """
    if not fits(array.type, read):
        raise SchemaError(
            f"column {read.source} is of type {array.type}, not {describe_wanted(read)}",
            suggest_for_booleans(array.type, read) or suggest_conversion(read),
        )
    return convert_array(array, read)


def _to_plain_type(array: pa.Array, read: Read) -> pa.Array:
    """Return values without a dictionary, and decimals as integers or floats."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_decimal(array.type) and read.raw != "string":
        with contextlib.suppress(pa.ArrowInvalid):  # has a fraction, or more than 64 bits
            return array.cast(pa.int64())
        # Arrow's cast to float64 can be off by one ulp
        return array.cast(pa.string()).cast(pa.float64())
    return array


def _convert_values(array: pa.Array, read: Read) -> Converted:
    """Convert single values."""
    array = _to_plain_type(array, read)
    if pa.types.is_null(array.type):
        array = array.cast(pa.string())
    kind = RAW_TYPES[read.raw]
    if is_text(array.type):
        null = null_mask(array)
        column = convert(to_text_fields(array), read)
        # errors show texts like fields of a file, but must tell null from the empty text
        return dataclasses.replace(
            column, show=lambda row: "None" if null[row] else column.show(row)
        )
    texts = kind.to_texts(array, read)
    if texts is not None:
        column = convert(to_text_fields(texts[0]), texts[1])
        return dataclasses.replace(column, show=_make_show(array))
    parsed = kind.from_arrow(array, read)
    return Converted(parsed.values, parsed.missing, parsed.code, _make_show(array))


def _make_show(array: pa.Array) -> Callable[[int], str]:
    """Return the function that shows a value in errors; see :class:`.convert.Converted`."""
    if pa.types.is_temporal(array.type):
        return lambda row: str(array[row])
    return lambda row: repr(array[row].as_py())


def to_text_fields(texts: pa.Array) -> pa.Array:
    """Convert texts to the form of a text file's fields: 32-bit offsets, "" for null."""
    null = null_mask(texts)
    if texts.type not in (pa.string(), pa.binary()):
        texts = texts.cast(pa.large_binary()).cast(pa.binary())
    return blank_texts(texts, null).view(pa.binary())


def _convert_lists(array: pa.Array, read: Read) -> Converted:
    """Convert lists; null and empty lists are missing values, nulls in a list are errors."""
    if pa.types.is_null(array.type):
        array = array.cast(pa.list_(pa.string()))
    lengths = np.where(null_mask(array), 0, to_numpy(pc.list_value_length(array)))
    flat = array.flatten()
    items = _convert_values(flat, read)
    null = null_mask(flat)
    items.code[items.missing & (items.code == 0)] = EMPTY_ITEM
    items.code[null] = NULL_ITEM
    lists = convert_items(to_offsets(lengths), items)
    return check_vectors(lists, read)
