"""The newest, smallest or largest value among the events of a key; NaN if no event has one.

Unlike sums, picks cannot be subtracted when an event leaves a window. The ETL, which sees events in
the order of time, drops a value once a later event supersedes it: :mod:`etl.events.window_picks`.
For rows to score, :func:`accumulate_picks` stores with each event the pick over it and all later
ones. These rows are later than nearly all events, so only the begin of a window has to be found.
"""

from __future__ import annotations

import math

import numpy as np

from nvt_torchrec.base.kernels import compiled

#: The kinds of picks, named like the fields of :class:`EventsBefore`, and their codes in kernels.
PICK_KINDS = {"newest": 0, "smallest": 1, "largest": 2}
_NEWEST = PICK_KINDS["newest"]
_SMALLEST = PICK_KINDS["smallest"]


@compiled()
def supersedes(kind: int, newer: float, older: float) -> bool:
    """Return whether a later value is picked instead of an earlier one if both count."""
    if kind == _NEWEST:
        return True
    return newer <= older if kind == _SMALLEST else newer >= older


@compiled()
def pick(kind: int, newer: float, older: float) -> float:
    """Return the picked one of two values; NaN stands for no value."""
    if math.isnan(newer):
        return older
    if math.isnan(older):
        return newer
    return newer if supersedes(kind, newer, older) else older


@compiled()
def merge_picks(kinds: np.ndarray, numbers: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the picks of events that are merged into fewer ones.

    Args:
        kinds: int64 [picks].
        numbers: float64 [picks, n], the values of the events, oldest first.
        first: int64 [merged], ascending, the index of the first event of each merged one.

    Returns:
        float64 [picks, merged].
    """
    merged = np.full((len(kinds), len(first)), np.nan)
    for group in range(len(first)):
        end = first[group + 1] if group + 1 < len(first) else numbers.shape[1]
        for event in range(first[group], end):
            for p in range(len(kinds)):
                merged[p, group] = pick(kinds[p], numbers[p, event], merged[p, group])
    return merged


@compiled()
def accumulate_picks(
    kinds: np.ndarray, numbers: np.ndarray, offsets: np.ndarray, known: np.ndarray, as_of: int
) -> None:
    """Replace the values of each event by the picks over it and all later events of its key.

    Only events known before ``as_of`` are merged. Later ones keep their own values, because some
    rows are scored before these events are known.

    Args:
        kinds: int64 [picks].
        numbers: float64 [picks, events], changed in place.
        offsets: int64 [keys + 1], where the events of each key begin.
        known: int64 [events], the time from which each is known, ascending within a key.
        as_of: The earliest time before which events count for a row.
    """
    for key in range(len(offsets) - 1):
        for event in range(offsets[key + 1] - 2, offsets[key] - 1, -1):
            if known[event + 1] < as_of:
                for p in range(len(kinds)):
                    numbers[p, event] = pick(kinds[p], numbers[p, event + 1], numbers[p, event])
