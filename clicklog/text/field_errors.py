"""What can be wrong with a field, as codes that compiled loops can set, and in words."""

from __future__ import annotations

BAD_LABEL, BAD_INTEGER, BIG_INT32, BIG_INT, BAD_HEX, BAD_FLOAT, NOT_FINITE = range(1, 8)
BAD_UTF8, EMPTY_ITEM, NULL_ITEM, BAD_UINT32, OPEN_QUOTE, AFTER_QUOTE, FIELD_COUNT = range(8, 15)

#: What belongs there, by code.
EXPECTED = {
    BAD_LABEL: "a label is 0 or 1",
    BAD_INTEGER: "an integer is needed, or nothing",
    BIG_INT32: "it does not fit 32 bits",
    BIG_INT: "integers up to ±2**53 are read",
    BAD_HEX: "1 to 8 hexadecimal digits are needed, or nothing",
    BAD_FLOAT: "a number is needed, or nothing",
    NOT_FINITE: "a finite number is needed, one of float32",
    BAD_UTF8: "it is no UTF-8",
    EMPTY_ITEM: "an empty value in a list",
    NULL_ITEM: "a null value in a list",
    BAD_UINT32: "0 to 4294967295 is needed, or nothing",
    OPEN_QUOTE: "its quote is not closed on this line",
    AFTER_QUOTE: "text after the closing quote",
}


def complaint(column: str, value: str, code: int) -> str:
    """One line about a field; ``value`` is what stands in it, as Python writes it."""
    return f"column {column}: {value}: {EXPECTED[code]}"


def shown(value: bytes) -> str:
    """The beginning of a field as Python writes a string."""
    return repr(value[:40].decode("utf-8", "replace"))
