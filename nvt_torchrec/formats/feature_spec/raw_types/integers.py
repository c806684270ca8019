"""Raw types of integers: ``int32``, ``int``, ``hex32``, and ``bool`` held as 1 and 0."""

# ruff: noqa: D102 - methods are described in RawType
from __future__ import annotations

import decimal
import re
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import is_one_of, strings
from nvt_torchrec.base.number_text import lengths, parse_integers
from nvt_torchrec.formats.feature_spec.raw_types.base import SYNTAX, ParsedText, RawType, is_missing

if TYPE_CHECKING:
    from nvt_torchrec.formats.feature_spec.read_plan import Read

#: The largest integer up to which a float type holds all integers, by the type's size in bytes.
EXACT = {2: 2**11, 4: 2**24}
_HEX = re.compile("[0-9a-fA-F]{1,8}").fullmatch
#: The texts of booleans in lower case; 1.0 and 0.0 are how NumPy and pandas write them as floats.
TRUE, FALSE = ("true", "t", "yes", "y", "1", "1.0"), ("false", "f", "no", "n", "0", "0.0")


class Integer(RawType):
    """Base class of the raw types of integers."""

    syntax = "expected an integer or a missing value"
    has_point = True
    arrow_kinds = ("integer", "floating", "boolean", "decimal")

    def parse_log_text(self, text: str) -> int:
        if not re.fullmatch("[+-]?[0-9]+", text):
            raise ValueError(self.syntax)
        return self.check_limits(int(text))

    def check_limits(self, number: int) -> int:
        """Return the number. Raises ``ValueError`` if it is outside of the limits."""
        if not self.contains(number):
            raise ValueError(self.range_message)
        return number

    def from_text(self, texts: pa.Array, missing: np.ndarray, read: Read) -> ParsedText:
        return parse_integers(texts, missing, read, self.minimum, self.maximum, self.dtype)

    def from_python(self, value: Any) -> int | None:
        if type(value) is int and self.minimum <= value <= self.maximum:
            return value
        if is_missing(value):
            return None
        if self.takes_text and isinstance(value, str | bytes):
            text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
            return self.parse_log_text(text)
        if isinstance(value, str | bytes):
            return self.parse_text(value)
        return self.to_integer(value)

    def to_integer(self, value: Any) -> int:
        """Convert a Python or NumPy number. Raises ``ValueError`` if it has a fraction."""
        if isinstance(value, float | np.floating) and float(value).is_integer():
            limit = EXACT.get(getattr(value, "itemsize", 8), 2**53)
            if isinstance(value, np.floating) and abs(float(value)) > limit and limit < 2**53:
                raise ValueError(
                    f"{value.dtype} rounds integers above {limit}, use int64 or float64"
                )
            value = int(value)
        if isinstance(value, decimal.Decimal) and value.is_finite() and value == int(value):
            value = int(value)  # databases return integers as decimals
        if not isinstance(value, int | np.integer | np.bool_):
            raise ValueError(self.syntax)
        return self.check_limits(int(value))

    def convert_vectorized(self, values: list, kinds: set[type]) -> tuple[Any, np.ndarray] | None:
        return convert_numbers(self, values, np.int64) if kinds == {int} else None


class Int32(Integer):
    """32-bit integers of dense columns."""

    name = "int32"
    dtype = "int32"
    dense = True
    minimum, maximum = -(2**31), 2**31 - 1
    keys = 'nulls, trim, lenient or raw = "float"'
    wider = "float"


class Int(Integer):
    """Integers up to 2**53, which are exact in float64, the type of NVTabular's pandas code."""

    name = "int"
    dtype = "int64"
    categorical = True
    minimum, maximum = -(2**53), 2**53
    keys = 'nulls, trim, lenient or raw = "string"'
    wider = "string"
    probes = (minimum, maximum, -1, 0)


class Hex32(Integer):
    """Categories of 32 bits, written as up to eight hexadecimal digits."""

    name = "hex32"
    dtype = "uint32"
    categorical = True
    has_point = False
    syntax = "expected 1 to 8 hexadecimal digits or a missing value"
    minimum, maximum = 0, 2**32 - 1
    keys = 'nulls, trim, raw = "int" or raw = "string"'
    wider = "int"
    takes_text = True
    probes: ClassVar[tuple[Any, ...]] = (minimum, maximum, 0x9E3779B9)

    def to_log_text(self, value: Any) -> str:
        return f"{value:08x}"

    def parse_log_text(self, text: str) -> int:
        if not _HEX(text):
            raise ValueError(self.syntax)
        return int(text, 16)

    def from_text(self, texts: pa.Array, missing: np.ndarray, read: Read) -> ParsedText:
        from nvt_torchrec.base.hexadecimal import parse_hexadecimal

        return parse_hexadecimal(texts, missing)

    def from_python(self, value: Any) -> int | None:
        if type(value) is str and _HEX(value):
            return int(value, 16)
        return super().from_python(value)

    def convert_vectorized(self, values: list, kinds: set[type]) -> tuple[Any, np.ndarray] | None:
        if kinds != {str}:
            return super().convert_vectorized(values, kinds)
        try:
            texts = strings(values)
        except UnicodeEncodeError:
            return None
        from nvt_torchrec.base.hexadecimal import parse_hexadecimal

        parsed = parse_hexadecimal(texts, lengths(texts) == 0)
        return None if parsed.code.any() else (parsed.values, parsed.missing)


class Bool(Integer):
    """The categories true and false, held as 1 and 0."""

    name = "bool"
    dtype = "int64"
    categorical = True
    has_point = False
    syntax = out_of_range = "expected true or false (also 1 or 0), or a missing value"
    minimum, maximum = 0, 1
    keys = 'nulls, trim or raw = "string"'
    takes_text = True
    probes = (0, 1)

    def to_log_text(self, value: Any) -> str:
        return "true" if value else "false"

    def parse_log_text(self, text: str) -> int:
        if text.lower() not in (*TRUE, *FALSE):
            raise ValueError(self.syntax)
        return int(text.lower() in TRUE)

    def from_text(self, texts: pa.Array, missing: np.ndarray, read: Read) -> ParsedText:
        lower = pc.ascii_lower(texts.view(pa.string()))
        values = is_one_of(lower, TRUE)
        false = is_one_of(lower, FALSE)
        code = np.where(missing | values | false, 0, SYNTAX).astype(np.uint8)
        return ParsedText(values.astype(self.dtype), missing, code)

    def convert_vectorized(self, values: list, kinds: set[type]) -> tuple[Any, np.ndarray] | None:
        if not kinds or not kinds <= {int, bool}:
            return None
        return convert_numbers(self, values, np.int64)


def convert_numbers(
    kind: RawType, values: list, dtype: type
) -> tuple[np.ndarray, np.ndarray] | None:
    """Convert Python's integers and floats; None if one does not lie within the limits."""
    try:
        numbers: np.ndarray = np.array(values, dtype)
    except OverflowError:
        return None
    missing = np.isnan(numbers)
    numbers[missing] = 0
    if len(numbers) and (numbers.min() < kind.minimum or numbers.max() > kind.maximum):
        return None
    return numbers.astype(kind.dtype), missing
