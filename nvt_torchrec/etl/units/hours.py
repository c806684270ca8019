"""Count the rows of each hour, and find rows that come long after all others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nvt_torchrec.base.arrays import mark_begins
from nvt_torchrec.formats.feature_spec.derivations import HOUR

#: Rows after a gap are late only if they are at most one in this many rows, or a single row.
_ROWS_PER_LATE_ROW = 10_000
#: The gap before late rows is longer than this; nights and outages are usually shorter.
_MIN_GAP_HOURS = 24
#: The gap before late rows is more than this many times as long as any other gap.
_MIN_GAP_RATIO = 2


def find_late(hours: np.ndarray) -> int | None:
    """Return the time from which rows are late, in microseconds; None if no rows are late.

    Late rows are a few rows after a gap that is longer than a day and more than twice as long as
    any other gap. Gaps after only a few rows at the beginning are not compared.

    Args:
        hours: int64 [2, hours]: the hours since 1970, ascending, and the number of rows in each.
    """
    hour, rows = hours
    # For each gap between two hours with rows: its length, and the number of rows before and after.
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
    """Count rows by hour.

    Args:
        times: int64 [n], in microseconds.

    Returns:
        int64 [2, hours]: the hours since 1970, ascending, and the number of rows in each.
    """
    return count_hours(times, np.empty((0, len(times)), np.int64))


def count_hours(known: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Count events, and positive events by label, by the hour from which they are known.

    Args:
        known: int64 [n], the times from which the events are known, in microseconds.
        labels: int64 [labels, n], 0 or 1.

    Returns:
        int64 [2 + labels, hours]: the hours since 1970, ascending; the number of events; for each
        label, the number of positive events.
    """
    hours = known // HOUR
    first = np.flatnonzero(mark_begins(hours))  # few runs: most logs are sorted by time
    counts = np.diff(first, append=len(hours))
    positives = np.add.reduceat(labels, first, axis=1)
    return add_hours([np.stack([hours[first], counts, *positives])])


def add_hours(counted: Sequence[np.ndarray]) -> np.ndarray:
    """Add up arrays of :func:`count_hours`, which may have the same hours."""
    joined = np.concatenate(counted, axis=1)
    hours, index = np.unique(joined[0], return_inverse=True)
    total = np.zeros((len(joined), len(hours)), np.int64)
    total[0] = hours
    for row in range(1, len(joined)):
        np.add.at(total[row], index, joined[row])
    return total
