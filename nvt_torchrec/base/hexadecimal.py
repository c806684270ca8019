"""Parse fields of text as hexadecimal numbers, in a compiled loop."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import string_parts
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.base.number_text import SYNTAX, ParsedText

#: The value of each byte as a digit; 255 for bytes that are not one.
_DIGIT = np.full(256, 255, np.uint8)
_DIGIT[48:58] = np.arange(10)
_DIGIT[65:71] = _DIGIT[97:103] = np.arange(10, 16)


def parse_hexadecimal(texts: pa.Array, missing: np.ndarray) -> ParsedText:
    """Parse fields of one to eight hexadecimal digits.

    Args:
        texts: String or binary array [n] without nulls; "" where missing.
        missing: Where fields are missing, bool [n].
    """
    offsets, data = string_parts(texts)
    data.flags.writeable = False  # always read-only, so that Numba compiles the loop only once
    values, wrong = _parse_texts(offsets, data)
    return ParsedText(values, missing, np.where(wrong, SYNTAX, 0).astype(np.uint8))


@compiled()
def _parse_texts(offsets: np.ndarray, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers, uint32 [n], 0 where malformed or empty; and a mask of malformed texts."""
    values = np.zeros(len(offsets) - 1, np.uint32)
    wrong = np.zeros(len(values), np.bool_)
    for i in range(len(values)):
        begin, end = offsets[i], offsets[i + 1]
        value = np.uint32(0)
        digits = np.uint8(0)  # bitwise or of all digits: above 15 if a byte is not a digit
        for at in range(begin, min(end, begin + 8)):
            digit = _DIGIT[data[at]]
            digits |= digit
            value = np.uint32((value << np.uint32(4)) | np.uint32(digit))
        wrong[i] = digits > 15 or end - begin > 8
        values[i] = 0 if wrong[i] else value
    return values, wrong
