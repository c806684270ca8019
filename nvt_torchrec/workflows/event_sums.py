"""Sums over the events before a row to score.

The ETL updates its sums row by row, in the order of time (:mod:`etl.events.sums`). For inference,
:class:`GroupEvents` keeps the events of each key, with those older than the longest window merged
into one. From them the same sums follow for a row of any later time.
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
from nvt_torchrec.workflows.event_kernels import (
    accumulate,
    count_late_values,
    look_up_picks,
    look_up_sums,
)
from nvt_torchrec.workflows.event_picks import accumulate_picks, merge_picks

#: In :attr:`GroupEvents.previous`, no earlier event has the same value; earlier than all times.
NEVER = -(2**63)
#: In :attr:`GroupEvents.previous`, the event has no value; later than all times.
NO_VALUE = 2**63 - 1
_DAMAGED = "copy the whole workflow again, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class GroupEvents:
    """The events of each key of a group, from which the sums as of any later time follow.

    "The time of the state" is ``as_of``, the earliest time before which events count for a row.

    Attributes:
        keys: int64 [keys], ascending.
        offsets: int64 [keys + 1], where the events of each key begin.
        known: int64 [events], the time from which each is known, ascending within a key.
        last: int64 [events], the time of the last event of the key so far.
        sums: int64 [measures + distinct columns, events], running sums over the events of the key:
            first :attr:`GroupSums.num_measures` integers; then, for each distinct column, the
            number of events that are the last ones with their values among those known before the
            time of the state.
        picks: float64 [stored picks, events]. For an event known before the time of the state, the
            pick over it and all later such events of its key; for others, their own value. None for
            a group without picks.
        previous: int64 [distinct columns, events]. For an event not known before the time of the
            state, the time from which the previous event with the same value is known;
            :data:`NEVER` if no earlier event has it, :data:`NO_VALUE` if the event has no value.
            None for a group without counts of distinct values.
    """

    keys: np.ndarray
    offsets: np.ndarray
    known: np.ndarray
    last: np.ndarray
    sums: np.ndarray
    picks: np.ndarray | None = None
    previous: np.ndarray | None = None

    @staticmethod
    def list_array_names(group: GroupSums) -> list[str]:
        """Return the names of the arrays that a group has, in the order of the attributes."""
        names = ["keys", "offsets", "known", "last", "sums"]
        if group.stored_picks:
            names.append("picks")
        if group.distinct_columns:
            names.append("previous")
        return names

    @staticmethod
    def list_shapes(group: GroupSums, keys: int, events: int) -> list[tuple[int, ...]]:
        """Return the shapes of these arrays for the given numbers of keys and events."""
        sums = group.num_measures + len(group.distinct_columns)
        shapes: list[tuple[int, ...]] = [(keys,), (keys + 1,), (events,), (events,), (sums, events)]
        if group.stored_picks:
            shapes.append((len(group.stored_picks), events))
        if group.distinct_columns:
            shapes.append((len(group.distinct_columns), events))
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
        """Merge events that no row of ``as_of`` or later can tell apart.

        An input event may itself be several events of a key that were merged before.

        Args:
            spec: The columns.
            group: The sums that are needed.
            as_of: The earliest time before which events count for a row.
            key: int64 [n], ascending, the key of each event.
            known: int64 [n], the time from which each is known, ascending within a key.
            happened: int64 [n], the time of each event, or of the last one of merged events.
            counts: int64 [measures, n], the measures of each.
            picked: float64 [stored picks, n], the value of each, or the pick of merged events.
            pairs: int64 [distinct columns, n], the hash of key and value; 0 without a value.
        """
        windows = sorted(window for window in group.windows if window)
        if not len(key):
            return cls(
                keys=key,
                offsets=np.zeros(1, np.int64),
                known=known,
                last=happened,
                sums=np.concatenate([counts, pairs]),
                picks=picked if group.stored_picks else None,
                previous=pairs if group.distinct_columns else None,
            )
        begin = known
        if spec.events is not None and spec.events.cut == "day":
            # Rows count events before the begin of their day, and from the begin of a window on.
            # Both fall on fixed times of day, so no row can tell events between two of them apart.
            bounds = np.unique([0, *(-window % DAY for window in windows)])
            begin = known // DAY * DAY
            begin += bounds[np.searchsorted(bounds, known - begin, side="right") - 1]
        begin = np.where(known < as_of - max(windows, default=0), BEFORE_ALL, begin)
        begins_other = mark_begins(key) | mark_begins(begin)
        previous = None
        if group.distinct_columns:
            # Events that only some rows know are kept one by one, because each has its own value.
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
        if group.stored_picks:
            kinds = group.pick_kinds
            picks = merge_picks(kinds, np.ascontiguousarray(picked), first)
            accumulate_picks(kinds, picks, offsets, begin[first], as_of)
        return cls(keys, offsets, begin[first], last, sums, picks, previous)

    def find_sums(
        self, group: GroupSums, as_of: int, hashes: np.ndarray, cuts: np.ndarray
    ) -> FoundSums:
        """Return the sums over the events before each row; those of histories are 0.

        Args:
            group: The sums that are needed.
            as_of: The earliest time before which events count for a row.
            hashes: int64 [n], the keys of the rows; 0 for a missing key.
            cuts: int64 [n], the time before which events count for each row.

        Raises:
            BadInputError: The events are damaged.
        """
        windows, rows = group.windows_and_rows
        found = np.zeros((len(rows), len(hashes)), np.int64)
        last = np.zeros(len(hashes), np.int64)
        events = self.keys, self.offsets, self.known, self.last, self.sums
        if not look_up_sums(*events, hashes, cuts, windows, rows, found, last):
            raise BadInputError(
                "events of a workflow: damaged: an offset is beyond the last event", _DAMAGED
            )
        # The rows of found follow GroupSums.windows_and_rows: sums, parts of totals, distinct.
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
            look_up_picks(
                (self.keys, self.offsets, self.known, self.picks),
                (group.pick_kinds, numbers, windows),
                as_of, hashes, cuts, picks,
            )  # fmt: skip
        distinct = found[end_of_totals:]
        if self.previous is not None:
            count_late_values(
                (self.keys, self.offsets, self.known, self.previous),
                np.array([group.distinct_columns.index(column) for _, column in group.distinct]),
                np.array([window for window, _ in group.distinct]),
                as_of, hashes, cuts, distinct,
            )  # fmt: skip
        return FoundSums(found[:end_of_sums], totals, picks, distinct, last)


def _mark_last(pairs: np.ndarray, is_late: np.ndarray) -> np.ndarray:
    """Return 1 for events that are the last ones with their values, ignoring late events.

    Args:
        pairs: int64 [n], see :meth:`GroupEvents.collect`.
        is_late: bool [n].

    Returns:
        int64 [n], 1 or 0.
    """
    # Reversed, because np.unique returns the first event of each value.
    candidates = np.flatnonzero((pairs != 0) & ~is_late)[::-1]
    _, first = np.unique(pairs[candidates], return_index=True)
    marks = np.zeros(len(pairs), np.int64)
    marks[candidates[first]] = 1
    return marks


def _find_previous(pairs: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return :attr:`GroupEvents.previous` of a column.

    Args:
        pairs: int64 [n], see :meth:`GroupEvents.collect`.
        known: int64 [n], the time from which the events are known, ascending within a key.
    """
    order = np.argsort(pairs, kind="stable")
    is_first = mark_begins(pairs[order])
    previous = np.empty(len(pairs), np.int64)
    previous[order[1:]] = known[order[:-1]]
    previous[order[is_first]] = NEVER
    previous[pairs == 0] = NO_VALUE
    return previous
