"""The raw type ``bool``: true and false, however a program writes them."""

# ruff: noqa: D102 - methods are described in RawType
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import is_one_of
from nvt_torchrec.formats.feature_spec.raw_types.base import SYNTAX, Parsed, is_missing
from nvt_torchrec.formats.feature_spec.raw_types.integers import Integer, usual_numbers

if TYPE_CHECKING:
    from nvt_torchrec.formats.feature_spec.reading import Read

#: In lower case; the numbers are what NumPy and pandas make of booleans.
TRUE, FALSE = ("true", "t", "yes", "y", "1", "1.0"), ("false", "f", "no", "n", "0", "0.0")


class Bool(Integer):
    """Categories true and false, which are 1 and 0."""

    name, dtype, categorical, has_point = "bool", "int64", True, False
    syntax = "expected true or false (also 1 or 0), or a missing value"
    least, most = 0, 1
    keys = 'nulls, trim or raw = "string"'
    example = True
    probes = (0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.json_types = ({"type": "boolean"}, *self.json_types, {"type": "string"})

    @property
    def range(self) -> str:
        """The error message for another number, as for another text."""
        return self.syntax

    def log_text(self, value: Any) -> str:
        return "true" if value else "false"

    def from_log_text(self, text: str) -> int:
        if text.lower() not in (*TRUE, *FALSE):
            raise ValueError(self.syntax)
        return int(text.lower() in TRUE)

    def from_text(self, texts: pa.Array, missing: np.ndarray, read: Read) -> Parsed:
        lower = pc.ascii_lower(texts.view(pa.string()))
        values, false = is_one_of(lower, TRUE), is_one_of(lower, FALSE)
        code = np.where(missing | values | false, 0, SYNTAX).astype(np.uint8)
        return Parsed(values.astype(self.dtype), missing, code)

    def from_python(self, value: Any) -> int | None:
        if is_missing(value):
            return None
        if isinstance(value, bytes):
            value = value.decode("ascii", "replace")
        return self.from_log_text(value) if isinstance(value, str) else self.whole(value)

    def from_usual(self, values: list, kinds: set[type]) -> tuple[Any, np.ndarray] | None:
        usual = kinds and kinds <= {int, bool}
        return usual_numbers(self, values, np.int64) if usual else None
