"""Parts of times: int64 microseconds since 1970-01-01 00:00 UTC, also before it."""

from __future__ import annotations

import numpy as np

HOUR = 3_600_000_000
DAY = 24 * HOUR
#: 1970-01-01 was a Thursday, and Monday is 0.
_FIRST_WEEKDAY = 3


def hour_of_day(times: np.ndarray) -> np.ndarray:
    """Return 0 to 23."""
    return times // HOUR % 24  # NumPy rounds down, also below 0


def weekday_of(times: np.ndarray) -> np.ndarray:
    """Return 0 for Monday to 6 for Sunday."""
    return (times // DAY + _FIRST_WEEKDAY) % 7


def day_of_month(times: np.ndarray) -> np.ndarray:
    """Return 1 to 31."""
    days = _days(times)
    return (days - days.astype("M8[M]").astype("M8[D]")).astype(np.int64) + 1


def month_of_year(times: np.ndarray) -> np.ndarray:
    """Return 1 to 12."""
    return _days(times).astype("M8[M]").astype(np.int64) % 12 + 1


def _days(times: np.ndarray) -> np.ndarray:
    return (times // DAY).astype("M8[D]")
