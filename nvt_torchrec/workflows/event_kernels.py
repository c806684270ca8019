"""Compiled loops that find the sums, picks and newest events before each row to score.

They read the arrays of :class:`.event_sums.GroupEvents` or :class:`.history_tail.HistoryTail`.
"""

from __future__ import annotations

import numpy as np
from numba import types

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.workflows.event_groups import BEFORE_ALL
from nvt_torchrec.workflows.event_picks import pick

_INTEGERS = types.Array(types.int64, 1, "A", readonly=True)


@compiled()
def accumulate(offsets: np.ndarray, last: np.ndarray, sums: np.ndarray) -> None:
    """Replace the values of each event by running values over the events of its key."""
    for key in range(len(offsets) - 1):
        for event in range(offsets[key] + 1, offsets[key + 1]):
            last[event] = max(last[event], last[event - 1])
            for row in range(len(sums)):
                sums[row, event] += sums[row, event - 1]


@compiled()
def find_first(known: np.ndarray, begin: int, end: int, time: int) -> int:
    """Return the first of the events from ``begin`` to ``end`` that is known at or after a time."""
    while begin < end:
        middle = (begin + end) // 2
        if known[middle] < time:
            begin = middle + 1
        else:
            end = middle
    return begin


@compiled()
def find_key(keys: np.ndarray, wanted: int) -> int:
    """Return the index of a key in ascending keys; -1 if it is absent or 0 (no key)."""
    index = find_first(keys, 0, len(keys), wanted)
    if wanted == 0 or index == len(keys) or keys[index] != wanted:
        return -1
    return index


@compiled()
def find_events(keys: np.ndarray, offsets: np.ndarray, wanted: int) -> tuple[int, int]:
    """Return begin and end of a key's events; 0 and 0 if the key is absent or 0 (no key)."""
    key = find_key(keys, wanted)
    if key < 0:
        return 0, 0
    return offsets[key], offsets[key + 1]


@compiled(
    types.boolean(
        *[_INTEGERS] * 4,
        types.Array(types.int64, 2, "C", readonly=True),
        *[_INTEGERS] * 4,
        types.Array(types.int64, 2, "C"),
        types.Array(types.int64, 1, "C"),
    )
)
def look_up_sums(
    keys: np.ndarray,
    offsets: np.ndarray,
    known: np.ndarray,
    last: np.ndarray,
    sums: np.ndarray,
    hashes: np.ndarray,
    cuts: np.ndarray,
    windows: np.ndarray,
    rows: np.ndarray,
    found: np.ndarray,
    last_of_row: np.ndarray,
) -> bool:
    """Look up the sums over the events before each row.

    Args:
        keys, offsets, known, last, sums: The arrays of :class:`.event_sums.GroupEvents`.
        hashes: int64 [n], the keys of the rows; 0 for a missing key.
        cuts: int64 [n], the time before which events count for each row.
        windows, rows: See :attr:`.event_groups.GroupSums.windows_and_rows`.
        found: int64 [windows, n], zeros; the sums are written to rows that have events.
        last_of_row: int64 [n]; the time of the last event is written to rows that have one.

    Returns:
        False if an offset is beyond the events: the file is damaged.
    """
    for i in range(len(hashes)):
        begin, end = find_events(keys, offsets, hashes[i])
        if not 0 <= begin <= end <= len(known):
            return False
        end = find_first(known, begin, end, cuts[i])
        if end == begin:
            continue
        last_of_row[i] = last[end - 1]
        for s in range(len(windows)):
            if rows[s] >= len(sums):  # counts the events of a history, which are stored elsewhere
                continue
            # Sums are running, so a window is the difference of two of them.
            found[s, i] = sums[rows[s], end - 1]
            if windows[s]:
                left = find_first(known, begin, end, cuts[i] - windows[s])
                if left > begin:
                    found[s, i] -= sums[rows[s], left - 1]
    return True


@compiled()
def look_up_picks(
    events: tuple,
    wanted: tuple,
    as_of: int,
    hashes: np.ndarray,
    cuts: np.ndarray,
    found: np.ndarray,
) -> None:
    """Look up the picked values of the events before each row.

    Args:
        events: Arrays of :class:`.event_sums.GroupEvents`: keys, offsets, known, picks. The offsets
            must have been checked by :func:`look_up_sums`.
        wanted: The kinds of the stored picks, int64 [stored picks]; for each pick, its index in
            these and its window, int64 [picks] each.
        as_of: The earliest time before which events count for a row.
        hashes: int64 [n], the keys of the rows; 0 for a missing key.
        cuts: int64 [n], the time before which events count for each row.
        found: float64 [picks, n], NaN; the picks are written to rows that have events.
    """
    keys, offsets, known, picked = events
    kinds, numbers, windows = wanted
    for i in range(len(hashes)):
        begin, end = find_events(keys, offsets, hashes[i])
        # An event before first_late stores the pick over itself and all later events before
        # first_late; the later ones store their own values, and are merged one by one.
        first_late = find_first(known, begin, end, as_of)
        end = find_first(known, begin, end, cuts[i])
        for p in range(len(numbers)):
            left = begin
            if windows[p]:
                left = find_first(known, begin, end, cuts[i] - windows[p])
            number = numbers[p]
            if left < first_late:
                found[p, i] = picked[number, left]
            for late in range(max(left, first_late), end):
                found[p, i] = pick(kinds[number], picked[number, late], found[p, i])


@compiled()
def count_late_values(
    events: tuple,
    columns: np.ndarray,
    windows: np.ndarray,
    as_of: int,
    hashes: np.ndarray,
    cuts: np.ndarray,
    found: np.ndarray,
) -> None:
    """Add the distinct values of events that are not known before ``as_of`` to ``found``.

    An event adds a distinct value if the previous event with the same value has left the window.

    Args:
        events: Arrays of :class:`.event_sums.GroupEvents`: keys, offsets, known, previous. The
            offsets must have been checked by :func:`look_up_sums`.
        columns: int64 [distinct], the row of ``previous`` for each count of distinct values.
        windows: int64 [distinct]; 0: all events count.
        as_of: The earliest time before which events count for a row.
        hashes: int64 [n], the keys of the rows; 0 for a missing key.
        cuts: int64 [n], the time before which events count for each row.
        found: int64 [distinct, n].
    """
    keys, offsets, known, previous = events
    for i in range(len(hashes)):
        begin, end = find_events(keys, offsets, hashes[i])
        first_late = find_first(known, begin, end, as_of)
        end = find_first(known, begin, end, cuts[i])
        for d in range(len(columns)):
            opens = cuts[i] - windows[d] if windows[d] else np.int64(BEFORE_ALL)
            for late in range(max(first_late, find_first(known, begin, end, opens)), end):
                found[d, i] += previous[columns[d], late] < opens


@compiled(
    types.boolean(
        *[_INTEGERS] * 5,
        types.int64,
        types.Array(types.int64, 1, "C"),
        types.Array(types.int64, 1, "C"),
    )
)
def find_newest(
    keys: np.ndarray,
    offsets: np.ndarray,
    known: np.ndarray,
    hashes: np.ndarray,
    cuts: np.ndarray,
    maximum: int,
    ends: np.ndarray,
    counts: np.ndarray,
) -> bool:
    """Find the newest events of a history before each row.

    Args:
        keys: int64 [keys], ascending.
        offsets: int64 [keys + 1], where the events of each key begin, oldest first.
        known: int64 [events], the time from which each event is known.
        hashes: int64 [n], the keys of the rows; 0 for a missing key.
        cuts: int64 [n], the time before which events count for each row.
        maximum: The maximum number of events of a row.
        ends: int64 [n], the result: the end of each row's events; 0 if its key has none.
        counts: int64 [n], the result: the number of each row's events.

    Returns:
        False if an offset is beyond the events: the file is damaged.
    """
    for i in range(len(hashes)):
        begin, end = find_events(keys, offsets, hashes[i])
        if not 0 <= begin <= end <= len(known):
            return False
        ends[i] = find_first(known, begin, end, cuts[i])
        counts[i] = min(ends[i] - begin, maximum)
    return True
