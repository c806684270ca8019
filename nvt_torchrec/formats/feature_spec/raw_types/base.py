"""The base class of raw types: their attributes, error messages and conversions."""

from __future__ import annotations

import decimal
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import null_mask, string_array, to_numpy
from nvt_torchrec.base.number_text import RANGE, SYNTAX, ParsedText
from nvt_torchrec.formats.feature_spec.read_plan import Read

# The codes of errors, which compiled loops set. 0 is no error; base.number_text defines SYNTAX = 1
# and RANGE = 2.
#: Errors of a value.
NOT_UTF8 = 3
EMPTY_ITEM = 4
NULL_ITEM = 5
OTHER_LABEL = 6
LABEL_NUMBER = 7
#: Errors of a whole line.
OPEN_QUOTE = 8
AFTER_QUOTE = 9
FIELD_COUNT = 10
#: Errors of a vector.
WRONG_WIDTH = 11
BEYOND_FLOAT16 = 12
#: The messages of these codes, except FIELD_COUNT, whose message needs the numbers of fields.
#: The messages of SYNTAX and RANGE depend on the raw type.
MESSAGES = {
    NOT_UTF8: "expected UTF-8 text",
    EMPTY_ITEM: "a list must not hold an empty value",
    NULL_ITEM: "a list must not hold a null value",
    OTHER_LABEL: "expected one of the texts in positive and negative",
    LABEL_NUMBER: "expected a number, because the label has a threshold",
    OPEN_QUOTE: "its quote is not closed on this line",
    AFTER_QUOTE: "text after the closing quote",
    WRONG_WIDTH: "expected a vector of the width in the spec",
    BEYOND_FLOAT16: "expected numbers that fit float16, from -65504 to 65504",
}
#: Types of missing values of pandas and NumPy, by name so that pandas need not be imported.
_MISSING_TYPES = {"NAType", "NaTType", "MaskedConstant"}


class BadValueError(ValueError):
    """A Python value that a column cannot hold.

    Attributes:
        index: The position of the first such value.
        reason: The error message, which says what was expected.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        self.reason = reason


class RawType:
    """Base class of raw types.

    Attributes:
        name: The name in a spec.
        dtype: The name of the NumPy dtype of values in ``RawRows``; "str" for strings, which are
            Arrow arrays.
        placeholder: The value in ``RawRows`` where the column is missing.
        syntax: The error message for a value that is not of this type.
        out_of_range: The error message for a number below ``minimum`` or above ``maximum``; "" for
            the default message, which names both limits.
        minimum: The smallest value; 0 for strings, which have no limits.
        maximum: The largest value; 0 for strings.
        dense: Whether dense columns can have this type.
        categorical: Whether categorical columns can have it.
        has_point: Whether its text may have a decimal point, so that ``decimal`` applies.
        arrow_kinds: The kinds of Arrow types, in addition to text, that values are read from.
        keys: The keys of a spec that may help with a text that is not of this type.
        wider: The raw type that can hold numbers outside of the limits; "" for none.
        takes_text: Whether values may be texts that are not numbers, so that exported models take
            tensors of strings.
        probes: Values at the limits, with which exported models are tested.
    """

    name: ClassVar[str]
    dtype: ClassVar[str]
    placeholder: ClassVar[int | float | str] = 0
    syntax: ClassVar[str]
    out_of_range: ClassVar[str] = ""
    minimum: ClassVar[int | float] = 0
    maximum: ClassVar[int | float] = 0
    dense: ClassVar[bool] = False
    categorical: ClassVar[bool] = False
    has_point: ClassVar[bool] = False
    arrow_kinds: ClassVar[tuple[str, ...]] = ("integer",)
    keys: ClassVar[str] = "nulls or trim"
    wider: ClassVar[str] = ""
    takes_text: ClassVar[bool] = False
    probes: ClassVar[tuple[Any, ...]] = ()

    @property
    def range_message(self) -> str:
        """The error message for a number that is too small or too large."""
        if self.out_of_range:
            return self.out_of_range
        return f"expected an integer from {self.minimum} to {self.maximum} or a missing value"

    @property
    def is_text(self) -> bool:
        """Whether values are strings; otherwise they are numbers."""
        return self.dtype == "str"

    @property
    def is_whole(self) -> bool:
        """Whether values are numbers without a fraction."""
        return "int" in self.dtype

    def contains(self, number: int | float | decimal.Decimal) -> bool:
        """Return whether a number lies within the limits; NaN does not."""
        return self.minimum <= number <= self.maximum

    def message(self, code: int) -> str:
        """Return the error message of a code."""
        if code == SYNTAX:
            return self.syntax
        if code == RANGE:
            return self.range_message
        return MESSAGES[code]

    def to_log_text(self, value: Any) -> str:
        """Return a value as it is written in a log."""
        return str(value)

    def parse_log_text(self, text: str) -> Any:
        """Return the value of a text in a log that is not missing. Raises ``ValueError``."""
        return text

    # Text and Arrow

    def from_text(self, texts: pa.Array, missing: np.ndarray, read: Read) -> ParsedText:
        """Convert the fields of a column of text.

        Args:
            texts: Binary array [n] without nulls, trimmed if the column is; "" where missing.
            missing: Where fields are missing, bool [n].
            read: How the column is read.
        """
        raise NotImplementedError

    def fits(self, held: pa.DataType, read: Read) -> bool:
        """Return whether values of an Arrow type, neither text nor lists, can be of this type."""
        return any(getattr(pa.types, f"is_{kind}")(held) for kind in self.arrow_kinds)

    def to_texts(self, array: pa.Array, read: Read) -> tuple[pa.Array, Read] | None:
        """Convert an Arrow array that is not text to text, for types that are parsed from text.

        Returns:
            The texts, and how they are read; None if :meth:`from_arrow` converts the array.
        """
        return None

    def from_arrow(self, array: pa.Array, read: Read) -> ParsedText:
        """Convert an Arrow array for which :meth:`to_texts` returns None."""
        numbers, missing = to_numbers(array, read.nulls)
        out_of_range = (numbers < self.minimum) | (numbers > self.maximum)
        code = np.where(out_of_range, RANGE, 0).astype(np.uint8)
        if self.is_whole and numbers.dtype == np.float64:
            code[~out_of_range & (numbers != np.floor(numbers))] = SYNTAX
        return ParsedText(np.where(code != 0, 0, numbers).astype(self.dtype), missing, code)

    # Python values

    def from_python(self, value: Any) -> Any:
        """Return one Python value as a value of this type; None if it is missing.

        Raises:
            ValueError: The column cannot hold it; the message says what was expected.
        """
        raise NotImplementedError

    def parse_text(self, text: str | bytes) -> Any:
        """Return the value of a text, parsed like a field of a file. Raises :class:`ValueError`."""
        field = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        offsets = np.array([0, len(field)], np.int32)
        texts = string_array(offsets, np.frombuffer(field, np.uint8)).view(pa.binary())
        parsed = self.from_text(texts, np.zeros(1, np.bool_), Read("", self.name))
        if parsed.code[0]:
            raise ValueError(self.message(int(parsed.code[0])))
        return parsed.values[0].item()

    def from_values(self, values: list) -> tuple[np.ndarray | pa.StringArray, np.ndarray]:
        """Convert Python values [n], all at once if their types allow it, else one by one.

        Returns:
            The values, and where they are missing, bool [n].

        Raises:
            BadValueError: The column cannot hold a value; it names the first one.
        """
        kinds = set(map(type, values))
        filled: list = values
        nulls: np.ndarray | None = None
        if type(None) in kinds:
            kinds.remove(type(None))
            if str in kinds or self.is_text:  # empty texts are missing as well
                filled = ["" if value is None else value for value in values]
                kinds.add(str)
            else:
                filled = [0 if value is None else value for value in values]
                kinds.add(int)
                nulls = np.array([value is None for value in values], bool)
        converted = self.convert_vectorized(filled, kinds)
        if converted is not None:
            numbers, missing = converted
            return numbers, missing if nulls is None else missing | nulls
        parsed = []
        for index, value in enumerate(values):
            try:
                parsed.append(self.from_python(value))
            except ValueError as error:
                raise BadValueError(index, str(error)) from None
        missing = np.array([value is None for value in parsed], bool)
        return self.array([self.placeholder if v is None else v for v in parsed]), missing

    def convert_vectorized(self, values: list, kinds: set[type]) -> tuple[Any, np.ndarray] | None:
        """Convert Python values [n] at once.

        Args:
            values: The values, without None.
            kinds: Their types.

        Returns:
            The values, and where they are missing, bool [n]; None if the values must be converted
            one by one.
        """
        return None

    def array(self, values: list) -> np.ndarray | pa.StringArray:
        """Make an array of converted values, which include placeholders for missing ones."""
        return np.array(values, self.dtype)


def is_missing(value: Any) -> bool:
    """Return whether a Python value is None, NaN, NA, NaT or empty text."""
    if value is None or type(value).__name__ in _MISSING_TYPES:
        return True
    if isinstance(value, str | bytes):
        return not value
    return isinstance(value, float | np.floating | decimal.Decimal) and math.isnan(value)


def to_numbers(array: pa.Array, nulls: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Convert an Arrow array of numbers or booleans.

    Args:
        array: The array [n].
        nulls: Texts that mean a missing value; those that are numbers apply.

    Returns:
        The numbers [n], integers or float64, 0 where missing; and where they are missing, bool [n].
    """
    null = null_mask(array)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if not pa.types.is_integer(array.type):
        array = array.cast(pa.float64())
    numbers = np.where(null, 0, to_numpy(array))  # Arrow's fill_null imports pandas
    if numbers.dtype == np.float64:
        null = null | np.isnan(numbers)
    for number in map(parse_number, nulls):
        if number is not None:
            null = null | (numbers == number)
    return np.where(null, numbers.dtype.type(0), numbers), null


def match_number(numbers: np.ndarray, texts: Sequence[str]) -> np.ndarray:
    """Return a mask of the numbers that one of the texts stands for, bool [n].

    ``true`` stands for 1, ``false`` for 0; texts that are not numbers match nothing.
    """
    booleans = {"true": 1, "false": 0}
    wanted: list[int | float] = []
    for text in texts:
        number = booleans.get(text.strip().lower(), parse_number(text))
        if number is not None:
            wanted.append(number)
    return np.isin(numbers, wanted)


def parse_number(text: str) -> int | float | None:
    """Return the number that a text stands for; None if it is not a number."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return None if math.isnan(number) else number
