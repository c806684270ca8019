"""Limits of numbers, in logs and in specifications."""

from __future__ import annotations

import sys
from typing import Any

#: The largest finite float32. What is larger would become infinite in the training parquet.
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


def is_finite_number(value: Any) -> bool:
    """Return whether a value from TOML or JSON is a number that float64 can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
