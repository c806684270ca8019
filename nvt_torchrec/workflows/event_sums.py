"""What the events before a row to score sum up to.

The ETL sums up as the rows pass by (:mod:`etl.events.sums`). For inference, :class:`GroupEvents`
keeps the events of each key, those before the longest window as one, so that the same sums follow
for a row of any later time.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numba import types

from nvt_torchrec.base.arrays import mark_begins
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.exact_sums import join_sums
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import DAY
from nvt_torchrec.workflows.event_groups import BEFORE_ALL, PARTS, FoundSums, GroupSums
from nvt_torchrec.workflows.event_picks import merge_picks, pick, pick_from_each

#: In :attr:`GroupEvents.previous`: earlier than all times, and later.
NEVER = -(2**63)
NO_VALUE = 2**63 - 1
_DAMAGED = "copy the whole workflow again, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class GroupEvents:
    """The events of each key of a group, for sums as of any time from that of the state on.

    Attributes:
        keys: int64 [keys], rising.
        offsets: int64 [keys + 1], where the events of each key begin.
        known: int64 [events], from when each is known; rising for each key.
        last: int64 [events], the time of the last event of the key so far.
        sums: int64 [measures + compared, events], the sums over the events of the key so far, see
            :attr:`GroupSums.measures`; and, of columns whose values are counted, how many of these
            events are the last ones with their values that are known before the time of the state.
        picks: float64 [picked, events], what is picked of each event and all later ones of its key
            that are known before the time of the state; of those that are not, their own numbers.
            None of a group without.
        previous: int64 [compared, events], of events that are not known by then, from when the
            event before with the same value is known; :data:`NEVER` if there is none, and
            :data:`NO_VALUE` if the event has none. None of a group without.
    """

    keys: np.ndarray
    offsets: np.ndarray
    known: np.ndarray
    last: np.ndarray
    sums: np.ndarray
    picks: np.ndarray | None = None
    previous: np.ndarray | None = None

    @staticmethod
    def array_names(group: GroupSums) -> list[str]:
        """Return the names of the arrays that a group has, in the order of the attributes."""
        names = ["keys", "offsets", "known", "last", "sums"]
        if group.picked:
            names.append("picks")
        if group.compared:
            names.append("previous")
        return names

    @staticmethod
    def shapes(group: GroupSums, keys: int, events: int) -> list[tuple[int, ...]]:
        """Return the shapes of these arrays, of so many keys and events."""
        sums = group.measures + len(group.compared)
        shapes: list[tuple[int, ...]] = [(keys,), (keys + 1,), (events,), (events,), (sums, events)]
        if group.picked:
            shapes.append((len(group.picked), events))
        if group.compared:
            shapes.append((len(group.compared), events))
        return shapes

    @classmethod
    def collect(
        cls,
        spec: FeatureSpec,
        group: GroupSums,
        as_of: int,
        key: np.ndarray,
        known: np.ndarray,
        happened: np.ndarray,
        counts: np.ndarray,
        picked: np.ndarray,
        pairs: np.ndarray,
    ) -> GroupEvents:
        """Sum up events that no row of ``as_of`` or later can tell apart.

        Args:
            spec: The columns.
            group: What is summed up.
            as_of: The earliest time before which events count for a row.
            key: int64 [n], rising: that of each event, or of several as one.
            known: int64 [n], from when they are known; rising for each key.
            happened: int64 [n], the time of the last one.
            counts: int64 [measures, n], the measures of each.
            picked: float64 [picked, n], the number of each, or what is picked of several.
            pairs: int64 [compared, n], the hash of key and value of each; 0 without one.
        """
        windows = sorted(window for window in group.windows if window)
        if not len(key):
            offsets, sums = np.zeros(1, np.int64), np.concatenate([counts, pairs])
            picks = picked if group.picked else None
            previous = pairs if group.compared else None
            return cls(key, offsets, known, happened, sums, picks, previous)
        begin = known
        if spec.events is not None and spec.events.cut == "day":
            # rows count events before the begin of their day, and from the begin of a window on,
            # which is always at the same time of a day
            bounds = np.unique([0, *(-window % DAY for window in windows)])
            begin = known // DAY * DAY
            begin += bounds[np.searchsorted(bounds, known - begin, side="right") - 1]
        begin = np.where(known < as_of - max(windows, default=0), BEFORE_ALL, begin)
        begins_other = mark_begins(key) | mark_begins(begin)
        previous = None
        if group.compared:
            # Events that some rows know and others do not are kept one by one: each has a value.
            is_late = known >= as_of
            begins_other |= is_late
            counts = np.concatenate(
                [counts, [_mark_last(of_column, is_late) for of_column in pairs]]
            )
            previous = np.array([_find_previous(of_column, begin) for of_column in pairs])
        first = np.flatnonzero(begins_other)
        previous = None if previous is None else previous[:, first]
        keys, begins = np.unique(key[first], return_index=True)
        offsets = np.append(begins, len(first)).astype(np.int64)
        last = np.maximum.reduceat(happened, first)
        sums = np.add.reduceat(counts, first, axis=1)
        _accumulate(offsets, last, sums)
        picks = None
        if group.picked:
            kinds = group.pick_kinds
            picks = merge_picks(kinds, np.ascontiguousarray(picked), first)
            pick_from_each(kinds, picks, offsets, begin[first], as_of)
        return cls(keys, offsets, begin[first], last, sums, picks, previous)

    def sums_before(
        self, group: GroupSums, as_of: int, hashes: np.ndarray, cuts: np.ndarray
    ) -> FoundSums:
        """Return what the events of rows' keys sum up to; 0 in the sums of histories.

        Args:
            group: What is summed up.
            as_of: The earliest time before which events count for a row.
            hashes: int64 [n], the keys; 0 without one.
            cuts: int64 [n], the time before which events count for each row.

        Raises:
            BadInputError: The events are damaged.
        """
        windows, rows = group.windows_and_rows
        found = np.zeros((len(rows), len(hashes)), np.int64)
        last = np.zeros(len(hashes), np.int64)
        events = self.keys, self.offsets, self.known, self.last, self.sums
        if not _sum_before(*events, hashes, cuts, windows, rows, found, last):
            raise BadInputError("events of a workflow: damaged: they are not there", _DAMAGED)
        first = len(group.sums)
        totals = np.empty((len(group.totals), 2, len(hashes)))
        for number in range(len(group.totals)):
            count, *words = found[first + PARTS * number : first + PARTS * (number + 1)]
            totals[number] = count, join_sums(np.stack(words))
        picks = np.full((len(group.picks), len(hashes)), np.nan)
        if self.picks is not None:
            numbers, windows = group.picks_and_windows
            _pick_before(
                (self.keys, self.offsets, self.known, self.picks),
                (group.pick_kinds, numbers, windows),
                as_of, hashes, cuts, picks,
            )  # fmt: skip
        distinct = found[first + PARTS * len(group.totals) :]
        if self.previous is not None:
            _count_late(
                (self.keys, self.offsets, self.known, self.previous),
                np.array([group.compared.index(column) for _, column in group.distinct]),
                np.array([window for window, _ in group.distinct]),
                as_of, hashes, cuts, distinct,
            )  # fmt: skip
        return FoundSums(found[:first], totals, picks, distinct, last)


def _mark_last(pairs: np.ndarray, is_late: np.ndarray) -> np.ndarray:
    """Return which events are the last ones with their values, late events apart.

    Args:
        pairs: int64 [n], see :meth:`GroupEvents.collect`.
        is_late: bool [n].

    Returns:
        int64 [n], 1 or 0.
    """
    there = np.flatnonzero((pairs != 0) & ~is_late)[::-1]
    _, index = np.unique(pairs[there], return_index=True)  # the first ones, from behind
    marks = np.zeros(len(pairs), np.int64)
    marks[there[index]] = 1
    return marks


def _find_previous(pairs: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return :attr:`GroupEvents.previous` of a column.

    Args:
        pairs: int64 [n], see :meth:`GroupEvents.collect`.
        known: int64 [n], from when the events are known; rising for each key.
    """
    order = np.argsort(pairs, kind="stable")
    is_first = mark_begins(pairs[order])
    previous = np.empty(len(pairs), np.int64)
    previous[order[1:]] = known[order[:-1]]
    previous[order[is_first]] = NEVER
    previous[pairs == 0] = NO_VALUE
    return previous


@compiled()
def _accumulate(offsets: np.ndarray, last: np.ndarray, sums: np.ndarray) -> None:
    """Replace values by those of all events of the key so far."""
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


_INTEGERS = types.Array(types.int64, 1, "A", readonly=True)


@compiled(
    types.boolean(
        *[_INTEGERS] * 4,
        types.Array(types.int64, 2, "C", readonly=True),
        *[_INTEGERS] * 4,
        types.Array(types.int64, 2, "C"),
        types.Array(types.int64, 1, "C"),
    )
)
def _sum_before(
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
    """Fill ``found`` and ``last_of_row``; return whether the events are where the offsets say."""
    for i in range(len(hashes)):
        key = find_first(keys, 0, len(keys), hashes[i])
        if hashes[i] == 0 or key == len(keys) or keys[key] != hashes[i]:
            continue
        begin, end = offsets[key], offsets[key + 1]
        if not 0 <= begin <= end <= len(known):
            return False
        end = find_first(known, begin, end, cuts[i])
        if end == begin:
            continue
        last_of_row[i] = last[end - 1]
        for s in range(len(windows)):
            if rows[s] >= len(sums):  # of a history
                continue
            found[s, i] = sums[rows[s], end - 1]
            if windows[s]:
                left = find_first(known, begin, end, cuts[i] - windows[s])
                if left > begin:
                    found[s, i] -= sums[rows[s], left - 1]
    return True


@compiled()
def _pick_before(
    events: tuple,
    wanted: tuple,
    as_of: int,
    hashes: np.ndarray,
    cuts: np.ndarray,
    found: np.ndarray,
) -> None:
    """Fill ``found``, of events whose offsets :func:`_sum_before` has checked."""
    keys, offsets, known, picked = events
    kinds, numbers, windows = wanted
    for i in range(len(hashes)):
        key = find_first(keys, 0, len(keys), hashes[i])
        if hashes[i] == 0 or key == len(keys) or keys[key] != hashes[i]:
            continue
        begin, end = offsets[key], offsets[key + 1]
        # the numbers of events before this one say what is picked until it, all others their own
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
def _count_late(
    events: tuple,
    columns: np.ndarray,
    windows: np.ndarray,
    as_of: int,
    hashes: np.ndarray,
    cuts: np.ndarray,
    found: np.ndarray,
) -> None:
    """Add to ``found`` the values of events that are not known before ``as_of``.

    An event has a further value if that of the same value before has left the window.
    """
    keys, offsets, known, previous = events
    for i in range(len(hashes)):
        key = find_first(keys, 0, len(keys), hashes[i])
        if hashes[i] == 0 or key == len(keys) or keys[key] != hashes[i]:
            continue
        begin, end = offsets[key], offsets[key + 1]
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
    """Find the newest events of rows' keys in those of a history.

    Args:
        keys: int64 [keys], rising.
        offsets: int64 [keys + 1], where the events of each key begin; the oldest comes first.
        known: int64 [events], from when each is known.
        hashes: int64 [n], the keys of the rows; 0 without one.
        cuts: int64 [n], the time before which events count for each row.
        maximum: The most events of a row.
        ends: int64 [n], filled with where the events of a row end.
        counts: int64 [n], filled with how many there are.

    Returns:
        Whether the events are where the offsets say.
    """
    for i in range(len(hashes)):
        key = find_first(keys, 0, len(keys), hashes[i])
        if hashes[i] == 0 or key == len(keys) or keys[key] != hashes[i]:
            continue
        begin, end = offsets[key], offsets[key + 1]
        if not 0 <= begin <= end <= len(known):
            return False
        ends[i] = find_first(known, begin, end, cuts[i])
        counts[i] = min(ends[i] - begin, maximum)
    return True
