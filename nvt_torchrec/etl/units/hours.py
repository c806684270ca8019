"""How many rows there are in each hour, and which come long after all others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nvt_torchrec.base.arrays import mark_begins
from nvt_torchrec.formats.feature_spec.derivations import HOUR

#: Rows after a gap are late if they are at most one in so many, or a single one.
_SHARE = 10_000
#: Hours of a gap before late rows: nights and hours without service are shorter.
_GAP_HOURS = 24
#: How many times longer that gap is than any other.
_TIMES_LONGER = 2


def find_late(hours: np.ndarray) -> int | None:
    """Return the time from which rows are late, in microseconds; None if there are no such rows.

    They are a few rows after a gap that is longer than a day, and more than twice as long as any
    other gap, but for gaps after a few rows at the beginning.

    Args:
        hours: int64 [2, hours], the hours since 1970, rising, and how many rows have each.
    """
    hour, rows = hours
    before = np.cumsum(rows)[:-1]
    after = rows.sum() - before
    few = max(1, rows.sum() // _SHARE)
    gaps = np.diff(hour)
    longest = gaps[(before > few) & (after > few)].max(initial=1)
    late = (after <= few) & (before > few)
    late &= (gaps > _GAP_HOURS) & (gaps > _TIMES_LONGER * longest)
    places = np.flatnonzero(late)
    return int(hour[places[0] + 1]) * HOUR if len(places) else None


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
    return add_hours([np.stack([hours[first], counts, *np.add.reduceat(labels, first, axis=1)])])


def add_hours(counted: Sequence[np.ndarray]) -> np.ndarray:
    """Add up counts of hours, see :func:`count_hours`."""
    every = np.concatenate(counted, axis=1)
    hours, place = np.unique(every[0], return_inverse=True)
    total = np.zeros((len(every), len(hours)), np.int64)
    total[0] = hours
    for row in range(1, len(every)):
        np.add.at(total[row], place, every[row])
    return total
