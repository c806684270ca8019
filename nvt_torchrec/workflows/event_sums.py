"""What the events before a row to score sum up to.

The ETL sums up as the rows pass by (:mod:`etl.events.sums`). For inference, :class:`GroupEvents`
keeps the events of each key, those before the longest window as one, so that the same sums follow
for a row of any later time.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nvt_torchrec.base.arrays import mark_begins
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.exact_sums import join_sums
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import DAY
from nvt_torchrec.workflows.event_groups import BEFORE_ALL, PARTS, FoundSums, GroupSums
from nvt_torchrec.workflows.event_kernels import accumulate, count_late, pick_before, sum_before
from nvt_torchrec.workflows.event_picks import merge_picks, pick_from_each

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
            return cls(
                keys=key,
                offsets=np.zeros(1, np.int64),
                known=known,
                last=happened,
                sums=np.concatenate([counts, pairs]),
                picks=picked if group.picked else None,
                previous=pairs if group.compared else None,
            )
        begin = known
        if spec.events is not None and spec.events.cut == "day":
            # Rows count events before the begin of their day, and from the begin of a window on,
            # which is always at the same time of a day: no row tells events between two such
            # times apart.
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
            marks = [_mark_last(column_pairs, is_late) for column_pairs in pairs]
            counts = np.concatenate([counts, marks])
            previous = np.array([_find_previous(column_pairs, begin) for column_pairs in pairs])
        first = np.flatnonzero(begins_other)
        if previous is not None:
            previous = previous[:, first]
        keys, begins = np.unique(key[first], return_index=True)
        offsets = np.append(begins, len(first)).astype(np.int64)
        last = np.maximum.reduceat(happened, first)
        sums = np.add.reduceat(counts, first, axis=1)
        accumulate(offsets, last, sums)
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
        if not sum_before(*events, hashes, cuts, windows, rows, found, last):
            raise BadInputError(
                "events of a workflow: damaged: their offsets are beyond the events", _DAMAGED
            )
        # What was found follows GroupSums.windows_and_rows: sums, parts of totals, distinct values.
        end_of_sums = len(group.sums)
        end_of_totals = end_of_sums + PARTS * len(group.totals)
        totals = np.empty((len(group.totals), 2, len(hashes)))
        for number in range(len(group.totals)):
            first = end_of_sums + PARTS * number
            count, *words = found[first : first + PARTS]
            totals[number] = count, join_sums(np.stack(words))
        picks = np.full((len(group.picks), len(hashes)), np.nan)
        if self.picks is not None:
            numbers, windows = group.picks_and_windows
            pick_before(
                (self.keys, self.offsets, self.known, self.picks),
                (group.pick_kinds, numbers, windows),
                as_of, hashes, cuts, picks,
            )  # fmt: skip
        distinct = found[end_of_totals:]
        if self.previous is not None:
            count_late(
                (self.keys, self.offsets, self.known, self.previous),
                np.array([group.compared.index(column) for _, column in group.distinct]),
                np.array([window for window, _ in group.distinct]),
                as_of, hashes, cuts, distinct,
            )  # fmt: skip
        return FoundSums(found[:end_of_sums], totals, picks, distinct, last)


def _mark_last(pairs: np.ndarray, is_late: np.ndarray) -> np.ndarray:
    """Return which events are the last ones with their values, late events apart.

    Args:
        pairs: int64 [n], see :meth:`GroupEvents.collect`.
        is_late: bool [n].

    Returns:
        int64 [n], 1 or 0.
    """
    # From behind, as np.unique returns the first event of each value.
    candidates = np.flatnonzero((pairs != 0) & ~is_late)[::-1]
    _, first = np.unique(pairs[candidates], return_index=True)
    marks = np.zeros(len(pairs), np.int64)
    marks[candidates[first]] = 1
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
