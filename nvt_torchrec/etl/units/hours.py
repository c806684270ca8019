"""How many rows there are in each hour, and which come long after all others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nvt_torchrec.base.arrays import mark_begins
from nvt_torchrec.formats.feature_spec.derivations import HOUR

#: Rows after a gap are late if they are at most one in so many, or a single one.
_ROWS_PER_LATE_ROW = 10_000
#: The gap before late rows is longer: nights and hours without service are shorter.
_MIN_GAP_HOURS = 24
#: The gap is more than so many times as long as any other.
_MIN_GAP_RATIO = 2


def find_late(hours: np.ndarray) -> int | None:
    """Return the time from which rows are late, in microseconds; None if there are no such rows.

    They are a few rows after a gap that is longer than a day, and more than twice as long as any
    other gap, but for gaps after a few rows at the beginning.

    Args:
        hours: int64 [2, hours], the hours since 1970, rising, and how many rows have each.
    """
    hour, rows = hours
    # Of each gap between two hours with rows: how long it is, and the rows before and after it.
    gaps = np.diff(hour)
    before = np.cumsum(rows)[:-1]
    after = rows.sum() - before
    max_late = max(1, rows.sum() // _ROWS_PER_LATE_ROW)
    longest_gap = gaps[(before > max_late) & (after > max_late)].max(initial=1)
    is_late = (after <= max_late) & (before > max_late)
    is_late &= (gaps > _MIN_GAP_HOURS) & (gaps > _MIN_GAP_RATIO * longest_gap)
    if not is_late.any():
        return None
    first = int(np.argmax(is_late))
    return int(hour[first + 1]) * HOUR


def count_times(times: np.ndarray) -> np.ndarray:
    """Count rows by the hour of their times, int64 [n]; return int64 [2, hours]."""
    return count_hours(times, np.empty((0, len(times)), np.int64))


def count_hours(known: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Count events, and those with each label, by the hour from which they are known.

    Args:
        known: int64 [n], from when they are known, in microseconds.
        labels: int64 [labels, n], 0 or 1.

    Returns:
        int64 [2 + labels, hours]: the hours since 1970, rising; events; events with each label.
    """
    hours = known // HOUR
    first = np.flatnonzero(mark_begins(hours))  # few runs, as most logs are sorted by time
    counts = np.diff(first, append=len(hours))
    positives = np.add.reduceat(labels, first, axis=1)
    return add_hours([np.stack([hours[first], counts, *positives])])


def add_hours(counted: Sequence[np.ndarray]) -> np.ndarray:
    """Add up counts of hours, see :func:`count_hours`."""
    joined = np.concatenate(counted, axis=1)
    hours, index = np.unique(joined[0], return_inverse=True)
    total = np.zeros((len(joined), len(hours)), np.int64)
    total[0] = hours
    for row in range(1, len(joined)):
        np.add.at(total[row], index, joined[row])
    return total
