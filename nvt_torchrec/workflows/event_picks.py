"""Numbers picked of the events of a key: the newest, the smallest or the largest; NaN for none.

Unlike sums, they cannot be subtracted. In the order of time an event that leaves a window takes its
number along only if no later event superseded it: :mod:`etl.events.window_picks`. For rows to score
:func:`pick_from_each` says what is picked of the events from each one on: as rows are later than
nearly all events, a window ends after them, and where it begins is all that is to be found.
"""

from __future__ import annotations

import math

import numpy as np

from nvt_torchrec.base.kernels import compiled

#: By field of :class:`EventsBefore`, the number that stands for it in kernels.
PICK_KINDS = {"newest": 0, "smallest": 1, "largest": 2}
_NEWEST = PICK_KINDS["newest"]
_SMALLEST = PICK_KINDS["smallest"]


@compiled()
def supersedes(kind: int, newer: float, older: float) -> bool:
    """Return whether a later number is picked instead of an earlier one, wherever both count."""
    if kind == _NEWEST:
        return True
    return newer <= older if kind == _SMALLEST else newer >= older


@compiled()
def pick(kind: int, newer: float, older: float) -> float:
    """Return which of two numbers is picked; NaN stands for none."""
    if math.isnan(newer):
        return older
    if math.isnan(older):
        return newer
    return newer if supersedes(kind, newer, older) else older


@compiled()
def merge_picks(kinds: np.ndarray, numbers: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return what is picked of events that are taken as one.

    Args:
        kinds: int64 [picks].
        numbers: float64 [picks, n], those of the events; the oldest come first.
        first: int64 [merged], rising, the first event of each that several become.

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
def pick_from_each(
    kinds: np.ndarray, numbers: np.ndarray, offsets: np.ndarray, known: np.ndarray, as_of: int
) -> None:
    """Replace the numbers of events by what is picked of them and all later events of their key.

    Only events that are known before ``as_of`` count, and later ones keep their numbers: some rows
    are scored before these are known.

    Args:
        kinds: int64 [picks].
        numbers: float64 [picks, events]; they are changed.
        offsets: int64 [keys + 1], where the events of each key begin.
        known: int64 [events], from when they are known; rising for each key.
        as_of: The earliest time before which events count for a row.
    """
    for key in range(len(offsets) - 1):
        for event in range(offsets[key + 1] - 2, offsets[key] - 1, -1):
            if known[event + 1] < as_of:
                for p in range(len(kinds)):
                    numbers[p, event] = pick(kinds[p], numbers[p, event + 1], numbers[p, event])
