"""The raw type ``string``: UTF-8 text; the empty string is a missing value."""

# ruff: noqa: D102 - methods are described in RawType
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import blank_texts, string_array, string_parts, strings
from nvt_torchrec.base.number_text import lengths
from nvt_torchrec.formats.feature_spec.raw_types import base

if TYPE_CHECKING:
    from nvt_torchrec.formats.feature_spec.read_plan import Read


class String(base.RawType):
    """Categories that are strings."""

    name = "string"
    dtype = "str"
    placeholder = ""
    categorical = True
    syntax = "expected a string or a missing value"
    arrow_kinds = ("integer", "decimal")
    takes_text = True
    probes = ("never seen", "é")

    def from_text(self, texts: pa.Array, missing: np.ndarray, read: Read) -> base.ParsedText:
        code = np.zeros(len(texts), np.uint8)
        offsets, data = string_parts(texts)
        values = string_array(offsets, data)
        used = data[offsets[0] : offsets[-1]]
        if len(used) and int(used.max()) > 127:  # ASCII is always valid
            try:
                values.validate(full=True)
            except pa.ArrowInvalid:
                for row, text in enumerate(texts.to_pylist()):
                    try:
                        text.decode()
                    except UnicodeDecodeError:
                        code[row] = base.NOT_UTF8
                values = blank_texts(values, code != 0)
        return base.ParsedText(values, missing, code)

    def to_texts(self, array: pa.Array, read: Read) -> tuple[pa.Array, Read] | None:
        return array.cast(pa.string()), read

    def from_python(self, value: Any) -> str | None:
        if type(value) is not str or not value:
            if base.is_missing(value):
                return None
            if isinstance(value, bytes):
                try:
                    value = value.decode()
                except UnicodeDecodeError:
                    raise ValueError(base.MESSAGES[base.NOT_UTF8]) from None
            if not isinstance(value, str):
                raise ValueError(self.syntax)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(base.MESSAGES[base.NOT_UTF8]) from None
        return value

    def convert_vectorized(self, values: list, kinds: set[type]) -> tuple[Any, np.ndarray] | None:
        if kinds != {str}:
            return None
        try:
            array = self.array(values)
        except UnicodeEncodeError:
            return None
        return array, lengths(array) == 0

    def array(self, values: list) -> np.ndarray | pa.StringArray:
        return strings(values)
