"""The raw type ``time``: microseconds since 1970-01-01 00:00 UTC, of the years 1 to 9999.

Only derived columns and splits read it.
"""

# ruff: noqa: D102 - methods are described in RawType
from __future__ import annotations

import datetime
import re
from typing import TYPE_CHECKING

import numpy as np

from nvt_torchrec.formats.spec.raw_types.base import RANGE, Parsed, RawType
from nvt_torchrec.formats.spec.times import DIRECTIVES, EPOCHS

if TYPE_CHECKING:
    import pyarrow as pa

    from nvt_torchrec.formats.spec.reading import Read

#: Microseconds of a unit of Arrow's timestamps; nanoseconds are divided.
_UNITS = {"s": 1_000_000, "ms": 1000, "us": 1}
_EXAMPLE = datetime.datetime(2014, 10, 30, 12, tzinfo=datetime.UTC)


class Time(RawType):
    """Times."""

    name, dtype = "time", "int64"
    syntax = "expected a time or a missing value"
    least, most = -62_135_596_800_000_000, 253_402_300_799_999_999
    keys = "time_format, nulls or trim"
    json_types = ({"type": "string"}, {"type": "integer"}, {"type": "number"})

    @property
    def range(self) -> str:
        """The error message for a time that is too early or too late."""
        return "expected a time of the years 1 to 9999 or a missing value"

    def example_of(self, read: Read) -> int | str:
        if read.time_format in EPOCHS:
            return int(_EXAMPLE.timestamp()) * 1_000_000 // EPOCHS[read.time_format]
        if read.time_format:
            return _EXAMPLE.strftime(read.time_format)
        return _EXAMPLE.isoformat(" ")

    def from_text(self, texts: pa.Array, missing: np.ndarray, read: Read) -> Parsed:
        from nvt_torchrec.formats.spec.raw_types.time_text import parse_times

        return parse_times(texts, missing, read.time_format, self)

    def fits(self, held: pa.DataType, read: Read) -> bool:
        import pyarrow as pa

        types = pa.types
        if types.is_timestamp(held) or types.is_date(held):
            return True
        if types.is_floating(held):
            return read.time_format in EPOCHS
        return types.is_integer(held) and (
            read.time_format in EPOCHS or _is_digits(read.time_format)
        )

    def as_texts(self, array: pa.Array, read: Read) -> tuple[pa.Array, Read] | None:
        import pyarrow as pa
        import pyarrow.compute as pc

        if not (_is_digits(read.time_format) and pa.types.is_integer(array.type)):
            return None
        width = sum(DIRECTIVES[name] for name in read.time_format[1::2])
        return pc.utf8_lpad(array.cast(pa.string()), width, "0"), read  # of a year such as 09

    def from_arrow(self, array: pa.Array, read: Read) -> Parsed:
        import pyarrow as pa

        from nvt_torchrec.base.arrays import null_mask, to_numpy
        from nvt_torchrec.formats.spec.raw_types.arrow_numbers import as_numbers

        missing = null_mask(array)
        if pa.types.is_date(array.type):
            array = array.cast(pa.timestamp("ms"))
        if pa.types.is_timestamp(array.type):
            unit = _UNITS.get(array.type.unit, 0)
            numbers = np.where(missing, 0, to_numpy(array.view(pa.int64())))
            if not unit:
                numbers, unit = numbers // 1000, 1
        else:
            numbers, missing = as_numbers(array, read.nulls)
            unit = EPOCHS[read.time_format]
        wrong = (numbers < self.least // unit) | (numbers > self.most // unit)
        numbers = np.where(wrong, 0, numbers)
        if numbers.dtype == np.float64:
            numbers = np.floor(numbers * unit).astype(np.int64)
        else:
            numbers = numbers.astype(np.int64) * unit
        return Parsed(numbers, missing, np.where(wrong, RANGE, 0).astype(np.uint8))


def _is_digits(time_format: str) -> bool:
    """Return whether a time format is a pattern of digits alone."""
    if not re.fullmatch("(%[a-zA-Z])+", time_format):
        return False
    return all(DIRECTIVES[name] for name in time_format[1::2])
