"""Parse fields of text as integers and floats, exactly and correctly rounded.

If Arrow's casts accept all fields, parsing costs one pass over the bytes. Only if a field is
written in another form, or is malformed, each field is matched with a regular expression, and
Python parses the remaining ones.
"""

from __future__ import annotations

import dataclasses
import decimal
import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import mask_to_numpy, string_array, string_parts, to_numpy

#: The largest finite float32. Larger numbers would become infinite in the training parquet.
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
#: The code of a text that is not a number.
SYNTAX = 1
#: The code of a number that is too small or too large.
RANGE = 2

_INTEGER = "^-?[0-9]+$"
#: Integers that are written as +5 or 260.0, and their replacement: 5 and 260.
_LENIENT_INTEGER = r"^(?:\+|(-))?([0-9]+)(?:\.0*)?$"
_PLAIN_INTEGER = r"\1\2"
_FLOAT = r"^-?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_DECIMAL = re.compile(rb"[+-]?(?=\.?[0-9])[0-9]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?")
#: With more digits than any log has; numbers outside of its range become infinite.
_CONTEXT = decimal.Context(prec=1000, traps=[])
#: Integers of at most this many characters always fit int64.
_MAX_SURE_LENGTH = 18

#: The bytes that texts for Arrow's casts may have, bool [256].
_INTEGER_BYTES = np.isin(np.arange(256), list(b"0123456789-"))
_FLOAT_BYTES = np.isin(np.arange(256), list(b"0123456789-.eE"))
#: Maps each byte to itself, but exchanges commas and points.
_EXCHANGED = np.arange(256, dtype=np.uint8)
_EXCHANGED[[ord(","), ord(".")]] = ord("."), ord(",")


@dataclasses.dataclass(frozen=True)
class ParsedText:
    """The values of ``n`` fields.

    Attributes:
        values: [n] of the raw type's dtype, or a string array without nulls; the placeholder where
            a value is missing or wrong.
        missing: Where fields are missing, bool [n].
        code: uint8 [n]: 0, or the code of an error.
    """

    values: np.ndarray | pa.StringArray
    missing: np.ndarray
    code: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumberRules:
    """How the numbers of a column are written.

    Attributes:
        lenient: Whether they may also be written as ``+5``, and integers as ``260.0``.
        decimal: The decimal point.
    """

    lenient: bool = False
    decimal: str = "."


def parse_integers(
    texts: pa.Array,
    missing: np.ndarray,
    read: NumberRules,
    minimum: float,
    maximum: float,
    dtype: str,
) -> ParsedText:
    """Parse ``-?D+``, where D is a digit; if the column is lenient, also +5, 260.0 and 2.6e2."""
    texts = use_decimal_point(texts, read)
    code = np.zeros(len(texts), np.uint8)
    numbers = try_cast(texts, missing, pa.int64(), _INTEGER_BYTES)
    if numbers is None:
        if read.lenient:
            texts = pc.replace_substring_regex(
                texts, pattern=_LENIENT_INTEGER, replacement=_PLAIN_INTEGER
            )
        plain = matches(texts, _INTEGER) & (lengths(texts) <= _MAX_SURE_LENGTH)
        numbers = cast(texts, ~plain, pa.int64())
        for row in np.flatnonzero(~plain & ~missing).tolist():
            text = texts[row].as_py()
            number = parse_exact(text) if read.lenient or re.fullmatch(rb"-?[0-9]+", text) else None
            if number is None or number != number.to_integral_value():
                code[row] = SYNTAX
            elif minimum <= number <= maximum:
                numbers[row] = int(number)
            else:
                code[row] = RANGE
    code[(numbers < minimum) | (numbers > maximum)] = RANGE
    numbers[code != 0] = 0
    return ParsedText(numbers.astype(dtype), missing, code)


def parse_exact(text: bytes, shift: int = 0) -> decimal.Decimal | None:
    """Parse a decimal number, times 10**shift; None if the text is not a number."""
    if not _DECIMAL.fullmatch(text):
        return None
    return _CONTEXT.scaleb(_CONTEXT.create_decimal(text.decode()), shift)


def parse_floats(texts: pa.Array, missing: np.ndarray, read: NumberRules) -> ParsedText:
    """Parse ``-?(D+(.D*)?|.D+)([eE][+-]?D+)?``; if the column is lenient, also with a plus sign."""
    texts = use_decimal_point(texts, read)
    code = np.zeros(len(texts), np.uint8)
    numbers = try_cast(texts, missing, pa.float64(), _FLOAT_BYTES)
    if numbers is None:
        if read.lenient:
            texts = pc.replace_substring_regex(texts, pattern=r"^\+([0-9.])", replacement=r"\1")
        plain = matches(texts, _FLOAT)
        code[~plain & ~missing] = SYNTAX
        numbers = cast(texts, ~plain, pa.float64())
    code[np.abs(numbers) > LARGEST_FLOAT32] = RANGE
    numbers[code != 0] = 0
    return ParsedText(numbers, missing, code)


def use_decimal_point(texts: pa.Array, read: NumberRules) -> pa.Array:
    """Exchange commas and points if the column's decimal point is a comma.

    So 1,5 is parsed as 1.5, and 1.5 is malformed, as 1,5 is in other columns.
    """
    if read.decimal == ".":
        return texts
    offsets, data = string_parts(texts)
    return string_array(offsets, _EXCHANGED[data]).view(pa.binary())


def lengths(texts: pa.Array) -> np.ndarray:
    """Return the length of each text in bytes, [n]."""
    return np.diff(string_parts(texts)[0])


def matches(texts: pa.Array, pattern: str) -> np.ndarray:
    """Return a mask of the texts that a regular expression matches, bool [n]."""
    return mask_to_numpy(pc.match_substring_regex(texts, pattern=pattern))


def cast(texts: pa.Array, absent: np.ndarray, kind: pa.DataType) -> np.ndarray:
    """Cast texts that are known to be numbers, 0 where ``absent``; see :func:`try_cast`."""
    numbers = try_cast(texts, absent, kind)
    assert numbers is not None
    return numbers


def try_cast(
    texts: pa.Array, absent: np.ndarray, kind: pa.DataType, alphabet: np.ndarray | None = None
) -> np.ndarray | None:
    """Cast texts to numbers, 0 where ``absent``.

    Args:
        texts: String or binary array [n].
        absent: Where texts are ignored, bool [n].
        kind: The type of the numbers.
        alphabet: The bytes that texts may have, bool [256], because Arrow would also accept 0x10,
            nan and +1.0; None if the texts are known to be numbers.

    Returns:
        The numbers [n]; None if a text is not a number.
    """
    offsets, data = string_parts(texts)
    used = data[offsets[0] : offsets[-1]]
    if alphabet is not None and len(used):
        # The bytes from - to 9 are - . / and digits; of texts made of them, Arrow casts only valid
        # numbers. Finding the smallest and largest byte is faster than looking up each byte.
        is_usual = used.min() >= ord("-") and used.max() <= ord("9")
        if not is_usual and not alphabet[used].all():
            return None
    buffers: list[pa.Buffer | None] = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    if absent.any():
        buffers[0] = pa.py_buffer(np.packbits(~absent, bitorder="little"))
    try:
        numbers = pa.Array.from_buffers(pa.string(), len(absent), buffers).cast(kind)
    except pa.ArrowInvalid:
        return None
    if pa.types.is_timestamp(kind):
        numbers = numbers.view(pa.int64())
    values = to_numpy(numbers).copy()
    values[absent] = 0
    return values
