"""Raw types: what a column of a log may hold, and within which limits.

This is the only table of them. The parsers of text, parquet and Python values check values by it,
and their error messages quote it.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

#: The largest finite float32. What is larger would become infinite in the training parquet.
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
#: 32 bits in hexadecimal digits, as a regular expression.
HEX32_PATTERN = "[0-9a-fA-F]{1,8}"


@dataclasses.dataclass(frozen=True)
class RawType:
    """What a column of one raw type holds.

    Attributes:
        dtype: name of the NumPy dtype of its values in ``RawRows``; "str" for strings, which are
            Arrow arrays.
        placeholder: the value that stands in ``RawRows`` where the column is missing.
        syntax: error message for a value that is not of this type.
        least: the smallest value; 0 for strings, which have no limits.
        most: the largest value; 0 for strings.
    """

    dtype: str
    placeholder: int | float | str
    syntax: str
    least: int | float = 0
    most: int | float = 0

    @property
    def range(self) -> str:
        """Error message for a number that is too small or too large."""
        return f"expected an integer from {self.least} to {self.most} or a missing value"

    def contains(self, number: int | float) -> bool:
        """Whether a number lies within the limits; NaN does not."""
        return self.least <= number <= self.most


_INTEGER = "expected an integer or a missing value"
_LABEL = "expected a label of 0 or 1"

#: By name: ``label`` is the label's; :data:`DENSE_RAW_TYPES` and :data:`CATEGORICAL_RAW_TYPES`
#: are those that a spec can give to its columns.
RAW_TYPES = {
    "label": RawType("uint8", 0, _LABEL, 0, 1),
    "int32": RawType("int32", 0, _INTEGER, -(2**31), 2**31 - 1),
    "float": RawType(
        "float64",
        0.0,
        "expected a number or a missing value",
        -LARGEST_FLOAT32,
        LARGEST_FLOAT32,
    ),
    # In text, hexadecimal digits.
    "hex32": RawType(
        "uint32", 0, "expected 1 to 8 hexadecimal digits or a missing value", 0, 2**32 - 1
    ),
    # Integers up to 2**53 are exact in float64, as which NVTabular's pandas code holds them.
    "int": RawType("int64", 0, _INTEGER, -(2**53), 2**53),
    # Microseconds since 1970-01-01 00:00 UTC, years 1 to 9999. Only derived columns and splits
    # read it.
    "time": RawType(
        "int64",
        0,
        "expected a time or a missing value",
        -62_135_596_800_000_000,
        253_402_300_799_999_999,
    ),
    "weight": RawType(
        "float64", 0.0, "expected a weight, a number of at least 0", 0, LARGEST_FLOAT32
    ),
    # UTF-8; the empty string is a missing value.
    "string": RawType("str", "", "expected a string or a missing value"),
}
DENSE_RAW_TYPES = ("int32", "float")
#: Raw types whose text may have a decimal point.
NUMBERS = ("int32", "int", "float", "label", "weight")
CATEGORICAL_RAW_TYPES = ("hex32", "int", "string")

#: Error messages that several raw types share.
NOT_FINITE = "expected a finite number that fits float32"
NOT_UTF8 = "expected UTF-8 text"
EMPTY_ITEM = "a list must not hold an empty value"
NULL_ITEM = "a list must not hold a null value"


def as_log_text(value: int | str, raw: str) -> str:
    """A category as it is written in a log: a hex32 value in 8 hexadecimal digits."""
    return f"{value:08x}" if raw == "hex32" else str(value)


def is_finite_number(value: Any) -> bool:
    """Whether a value from TOML or JSON is an integer or float that float64 can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
