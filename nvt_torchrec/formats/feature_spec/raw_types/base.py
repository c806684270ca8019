"""What every raw type has: attributes, messages, and conversions that its class fills in.

A raw type says what a column of a log may hold, and everything that depends on it.
"""

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

#: What can be wrong with a value, and then with a whole line. Compiled loops set these codes.
NOT_UTF8, EMPTY_ITEM, NULL_ITEM, OTHER_LABEL, LABEL_NUMBER = range(3, 8)
OPEN_QUOTE, AFTER_QUOTE, FIELD_COUNT = range(8, 11)
WRONG_WIDTH, BEYOND_FLOAT16 = range(11, 13)
#: The messages of all codes but those that depend on the raw type, and that of FIELD_COUNT, whose
#: message needs the numbers of fields.
MESSAGES = {
    NOT_UTF8: "expected UTF-8 text",
    EMPTY_ITEM: "a list must not hold an empty value",
    NULL_ITEM: "a list must not hold a null value",
    OTHER_LABEL: "expected one of the texts in positive and negative",
    LABEL_NUMBER: "expected a number, because the label has a threshold",
    OPEN_QUOTE: "its quote is not closed on this line",
    AFTER_QUOTE: "text after the closing quote",
    WRONG_WIDTH: "a vector has as many numbers as its width in the spec says",
    BEYOND_FLOAT16: "expected numbers that fit float16, from -65504 to 65504",
}
#: Types of missing values of pandas and NumPy, by name because pandas is not imported.
_MISSING_TYPES = {"NAType", "NaTType", "MaskedConstant"}


class BadValueError(ValueError):
    """A Python value that a column cannot hold.

    Attributes:
        index: The place of the first such value.
        reason: What was expected.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        self.reason = reason


class RawType:
    """What a column of one raw type holds; a subclass is one raw type.

    Attributes:
        name: The name in a specification.
        dtype: The name of the NumPy dtype of values in ``RawRows``; "str" for strings, which are
            Arrow arrays.
        placeholder: The value that stands in ``RawRows`` where the column is missing.
        syntax: The error message for a value that is not of this type.
        out_of_range: The error message for a number below ``minimum`` or above ``maximum``; "" for
            the default message, which names both limits.
        minimum: The smallest value; 0 for strings, which have no limits.
        maximum: The largest value; 0 for strings.
        dense: Whether dense columns can have this type.
        categorical: Whether categorical columns can have it.
        has_point: Whether its text may have a decimal point, for which ``decimal`` applies.
        arrow_kinds: The kinds of Arrow types, besides text, from which values are read.
        keys: The keys of the specification to try for a text that is not of this type.
        wider: The raw type that holds numbers beyond the limits; "" for none.
        takes_text: Whether values may be texts that are no numbers, so that tensors hold strings.
        probes: Values at the limits, with which exported models are tried.
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
        limits = f"expected an integer from {self.minimum} to {self.maximum} or a missing value"
        return self.out_of_range or limits

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
        return {SYNTAX: self.syntax, RANGE: self.range_message}.get(code) or MESSAGES[code]

    def to_log_text(self, value: Any) -> str:
        """Return a value as it is written in a log."""
        return str(value)

    def parse_log_text(self, text: str) -> Any:
        """Return the value of a text of a log that is not missing. Raises ``ValueError``."""
        return text

    # Text and Arrow

    def from_text(self, texts: pa.Array, missing: np.ndarray, read: Read) -> ParsedText:
        """Convert fields.

        Args:
            texts: Binary array [n] without nulls; "" where missing. Spaces and null texts are gone.
            missing: Where fields are missing, bool [n].
            read: How the column is read.
        """
        raise NotImplementedError

    def fits(self, held: pa.DataType, read: Read) -> bool:
        """Return whether values of an Arrow type, neither text nor lists, can be of this type."""
        return any(getattr(pa.types, f"is_{kind}")(held) for kind in self.arrow_kinds)

    def to_texts(self, array: pa.Array, read: Read) -> tuple[pa.Array, Read] | None:
        """Return values that are no text as texts, and how these are read; None: as numbers."""
        return None

    def from_arrow(self, array: pa.Array, read: Read) -> ParsedText:
        """Convert values that :meth:`to_texts` does not change to texts."""
        numbers, missing = to_numbers(array, read.nulls)
        wrong = (numbers < self.minimum) | (numbers > self.maximum)
        code = np.where(wrong, RANGE, 0).astype(np.uint8)
        if self.is_whole and numbers.dtype == np.float64:
            code[~wrong & (numbers != np.floor(numbers))] = SYNTAX
        return ParsedText(np.where(code != 0, 0, numbers).astype(self.dtype), missing, code)

    # Python values

    def from_python(self, value: Any) -> Any:
        """Return one Python value as the type holds it; None if it is missing.

        Raises:
            ValueError: The column cannot hold it; the message is the reason.
        """
        raise NotImplementedError

    def parse_text(self, text: str | bytes) -> Any:
        """Return the value of a text, as a field of a file is read. Raises :class:`ValueError`."""
        field = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        offsets = np.array([0, len(field)], np.int32)
        texts = string_array(offsets, np.frombuffer(field, np.uint8)).view(pa.binary())
        parsed = self.from_text(texts, np.zeros(1, np.bool_), Read("", self.name))
        if parsed.code[0]:
            raise ValueError(self.message(int(parsed.code[0])))
        return parsed.values[0].item()

    def from_values(self, values: list) -> tuple[np.ndarray | pa.StringArray, np.ndarray]:
        """Convert Python values [n] at once if all have the usual types, else one by one.

        Returns:
            The values, and where they are missing, bool [n].

        Raises:
            BadValueError: The column cannot hold a value; names the first such one.
        """
        kinds = set(map(type, values))
        usual: list = values
        nulls: np.ndarray | None = None
        if type(None) in kinds:
            kinds.remove(type(None))
            if str in kinds or self.is_text:  # empty texts are missing as well
                usual = ["" if value is None else value for value in values]
                kinds.add(str)
            else:
                usual = [0 if value is None else value for value in values]
                kinds.add(int)
                nulls = np.array([value is None for value in values], bool)
        converted = self.convert_vectorized(usual, kinds)
        if converted is not None:
            return converted if nulls is None else (converted[0], converted[1] | nulls)
        parsed = []
        for index, value in enumerate(values):
            try:
                parsed.append(self.from_python(value))
            except ValueError as error:
                raise BadValueError(index, str(error)) from None
        missing = np.array([value is None for value in parsed], bool)
        return self.array([self.placeholder if v is None else v for v in parsed]), missing

    def convert_vectorized(self, values: list, kinds: set[type]) -> tuple[Any, np.ndarray] | None:
        """Convert values without None, of which ``kinds`` are the types; None: not the usual ones.

        Returns:
            The values, and which of them are missing.
        """
        return None

    def array(self, values: list) -> np.ndarray | pa.StringArray:
        """Make an array of converted values, with placeholders where they are missing."""
        return np.array(values, self.dtype)


def is_missing(value: Any) -> bool:
    """Return whether a Python value is None, NaN, NA, NaT or empty text."""
    if value is None or type(value).__name__ in _MISSING_TYPES:
        return True
    if isinstance(value, str | bytes):
        return not value
    return isinstance(value, float | np.floating | decimal.Decimal) and math.isnan(value)


def to_numbers(array: pa.Array, nulls: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers, 0 where missing, as integers or float64; and where they are missing.

    Where the column has null texts that are numbers, these numbers are missing values.
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
    """Return which numbers are those of some texts, bool [n]; ``true`` is 1, ``false`` 0."""
    booleans = {"true": 1, "false": 0}
    wanted = [booleans.get(text.strip().lower(), parse_number(text)) for text in texts]
    return np.isin(numbers, [number for number in wanted if number is not None])


def parse_number(text: str) -> int | float | None:
    """Return the number that a text is, or None."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return None if math.isnan(number) else number
