"""What can be wrong with a field: codes, which compiled loops can set, and messages."""

from __future__ import annotations

from nvt_torchrec.formats.spec import raw_types
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES

BAD_LABEL, BAD_INTEGER, BEYOND_INT32, BEYOND_INT, BEYOND_UINT32, BAD_HEX, BAD_FLOAT = range(1, 8)
NOT_FINITE, BAD_UTF8, EMPTY_ITEM, NULL_ITEM, OPEN_QUOTE, AFTER_QUOTE, FIELD_COUNT = range(8, 15)
BAD_TIME, BEYOND_TIME, BAD_WEIGHT, OTHER_LABEL, LABEL_NUMBER = range(15, 20)

#: The code of a number outside of a raw type's limits.
OUT_OF_RANGE = {
    "label": BAD_LABEL,
    "int32": BEYOND_INT32,
    "float": NOT_FINITE,
    "hex32": BEYOND_UINT32,
    "int": BEYOND_INT,
    "time": BEYOND_TIME,
    "weight": BAD_WEIGHT,
}
#: By code, except for FIELD_COUNT, whose message needs the numbers of fields.
MESSAGES = {
    BAD_LABEL: RAW_TYPES["label"].syntax,
    BAD_INTEGER: RAW_TYPES["int"].syntax,
    BEYOND_INT32: RAW_TYPES["int32"].range,
    BEYOND_INT: RAW_TYPES["int"].range,
    BEYOND_UINT32: RAW_TYPES["hex32"].range,
    BAD_HEX: RAW_TYPES["hex32"].syntax,
    BAD_FLOAT: RAW_TYPES["float"].syntax,
    NOT_FINITE: raw_types.NOT_FINITE,
    BAD_UTF8: raw_types.NOT_UTF8,
    EMPTY_ITEM: raw_types.EMPTY_ITEM,
    NULL_ITEM: raw_types.NULL_ITEM,
    OPEN_QUOTE: "its quote is not closed on this line",
    AFTER_QUOTE: "text after the closing quote",
    BAD_TIME: RAW_TYPES["time"].syntax,
    BEYOND_TIME: "expected a time of the years 1 to 9999 or a missing value",
    BAD_WEIGHT: RAW_TYPES["weight"].syntax,
    OTHER_LABEL: "expected one of the texts in positive and negative",
    LABEL_NUMBER: "expected a number, because the label has a threshold",
}


def describe_field_error(column: str, value: str, code: int) -> str:
    """One line about a field; ``value`` is its content, as :func:`quote_field` returns it."""
    return f"column {column}: {value}: {MESSAGES[code]}"


def quote_field(field: bytes) -> str:
    """The beginning of a field as Python writes a string."""
    return repr(field[:40].decode("utf-8", "replace"))
