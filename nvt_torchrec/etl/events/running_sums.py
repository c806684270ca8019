"""Running sums over the events of each key, updated in the order of time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from nvt_torchrec.base.exact_sums import join_words, split_term
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.etl.events.distinct_counts import DistinctCounts, count_pairs
from nvt_torchrec.etl.events.timeline import NO_EVENTS, EventBlock
from nvt_torchrec.etl.events.window_picks import (
    WindowPicks,
    add_to_picks,
    has_room,
    read_picks,
)
from nvt_torchrec.workflows.event_groups import EVENT, PARTS, TRAIN, WindowParts

#: The time of the last event of a key without events.
NEVER = -(2**63)


@dataclasses.dataclass(frozen=True)
class KeySums:
    """The sums of all keys of a group, as of a time.

    Attributes:
        sums: int64 [keys, sums].
        totals: int64 [keys, PARTS * totals]: for each total, the number of values, and the words of
            their sum, see :mod:`base.exact_sums`.
        picks: The picked values.
        distinct: The counts of distinct values.
        last: int64 [keys], the time of the last event.
        trained: int64 [keys, 1 + labels], the number of training rows, and the number of those with
            each label.
    """

    sums: np.ndarray
    totals: np.ndarray
    picks: WindowPicks
    distinct: DistinctCounts
    last: np.ndarray
    trained: np.ndarray

    @classmethod
    def zeros(
        cls, sums: int, totals: int, labels: int, picks: WindowPicks, distinct: DistinctCounts
    ) -> KeySums:
        """Return the sums before any event."""
        keys = len(distinct.values)
        return cls(
            sums=np.zeros((keys, sums), np.int64),
            totals=np.zeros((keys, PARTS * totals), np.int64),
            picks=picks,
            distinct=distinct,
            last=np.full(keys, NEVER),
            trained=np.zeros((keys, 1 + labels), np.int64),
        )


class RowSums:
    """Rows in the order of their times, and the sums over the events before each of them.

    Args:
        cuts: int64 [n], ascending, the time before which events count for each row.
        numbers: int32 [n], the numbers of the rows' keys; -1 without a key.
        flags: Unsigned [n].
        parts: The sums that are computed.

    Attributes:
        sums: int64 [sums, n]; 0 for a row without a key.
        totals: float64 [2 totals, n]: for each total, the number of values, and their sum; 0 for a
            row without a key.
        picks: float64 [picks, n]; NaN if no event has a value.
        distinct: int64 [distinct, n], the number of distinct values; 0 for a row without a key.
        last: int64 [n], the time of the last event; :data:`NEVER` without an event.
    """

    def __init__(
        self, cuts: np.ndarray, numbers: np.ndarray, flags: np.ndarray, parts: WindowParts
    ) -> None:
        rows = len(cuts)
        self.cuts = cuts
        self.numbers = numbers
        self.flags = flags
        self.sums = np.zeros((len(parts.sums), rows), np.int64)
        self.totals = np.zeros((2 * len(parts.totals), rows))
        self.picks = np.full((len(parts.picks), rows), np.nan)
        self.distinct = np.zeros((len(parts.distinct), rows), np.int64)
        self.last = np.full(rows, NEVER)

    def __len__(self) -> int:
        return len(self.cuts)


class RunningSums:
    """Computes the sums before each row by one pass over rows and events in the order of time.

    An event is added to the state when it becomes known, and subtracted when it leaves the window.

    Args:
        window: How long an event counts, in microseconds; 0: always.
        bits: For each sum, the flag bit of the events that it counts.
        columns: For each total, the index of its column of amounts.
        state: The sums before the first row; changed in place.
        added: The events in the order in which they become known.
        dropped: The same events again, which are subtracted; not read without a window.
    """

    def __init__(
        self,
        window: int,
        bits: Sequence[int],
        columns: Sequence[int],
        state: KeySums,
        added: Iterator[EventBlock],
        dropped: Iterator[EventBlock],
    ) -> None:
        self._window = window
        self._state = state
        self._bits = np.array(bits, np.int64)
        self._columns = np.array(columns, np.int64)
        self._streams = [added, dropped if window else iter(())]
        self._chunks = [NO_EVENTS] * 2
        # The next row, and the next events to add and to drop in their chunks; changed by kernels.
        self._at = np.zeros(3, np.int64)
        # Whether the two streams have more chunks.
        self._more = np.ones(2, np.bool_)

    def sum_rows(self, rows: RowSums) -> None:
        """Compute the sums of the next rows."""
        state = self._state
        self._at[0] = 0
        while self._at[0] < len(rows.cuts):
            added, dropped = self._chunks
            _sum_rows(
                (rows.cuts, rows.numbers, rows.flags),
                (rows.sums, rows.totals, rows.picks, rows.distinct, rows.last),
                (added.known, added.numbers, added.flags, added.amounts, added.pairs),
                (dropped.known, dropped.numbers, dropped.flags, dropped.amounts, dropped.pairs),
                added.happened,
                self._window, self._bits, self._columns,
                (state.sums, state.totals, state.last, state.trained),
                state.picks.arrays, state.distinct.arrays,
                self._at, self._more,
            )  # fmt: skip
            state.picks.make_room()
            for stream, chunk in enumerate(self._chunks):
                if self._at[1 + stream] == len(chunk.known):
                    self._refill(stream)

    def _refill(self, stream: int) -> None:
        events = next(self._streams[stream], None)
        self._more[stream] = events is not None
        if events is not None:
            self._chunks[stream] = events
            self._at[1 + stream] = 0

    def finish(self, end: int) -> KeySums:
        """Add the events that are known before ``end``, and return the state."""
        # Passing a row without a key adds the events before it, and computes no sums.
        flags = np.zeros(1, self._chunks[0].flags.dtype)
        numbers = np.array([-1], np.int32)
        self.sum_rows(RowSums(np.array([end]), numbers, flags, WindowParts({}, {}, {}, {})))
        return self._state

    def iterate_remaining(self) -> Iterator[EventBlock]:
        """Yield the events that were not added."""
        yield self._chunks[0].take(slice(self._at[1], None))
        yield from self._streams[0]


@compiled()
def _add_amounts(
    event: int, key: int, amounts: np.ndarray, columns: np.ndarray, totals: np.ndarray, sign: int
) -> None:
    """Add the amounts of an event to the totals of its key (sign 1), or subtract them (sign -1)."""
    for c in range(len(columns)):
        amount = amounts[columns[c], event]
        if math.isnan(amount):
            continue
        high, middle, low = split_term(amount)
        first = PARTS * c
        totals[key, first] += sign
        totals[key, first + 1] += sign * high
        totals[key, first + 2] += sign * middle
        totals[key, first + 3] += sign * low


@compiled()
def _sum_rows(
    rows: tuple,
    found: tuple,
    added: tuple,
    dropped: tuple,
    happened: np.ndarray,
    window: int,
    bits: np.ndarray,
    columns: np.ndarray,
    state: tuple,
    picks: tuple,
    distinct: tuple,
    at: np.ndarray,
    more: np.ndarray,
) -> None:
    """Process rows and events until the rows, a chunk of events, or the room for picks runs out.

    Args:
        rows: The cuts, numbers and flags of :class:`RowSums`.
        found: The sums, totals, picks, distinct and last of :class:`RowSums`, which are written.
        added: The known, numbers, flags, amounts and pairs of the chunk of events to add.
        dropped: The same arrays of the chunk of events to drop.
        happened: int64 [n], the times of the events that become known.
        window: How long an event counts, in microseconds; 0: always.
        bits: See :class:`RunningSums`.
        columns: See :class:`RunningSums`.
        state: The sums, totals, last and trained of :class:`KeySums`.
        picks: See :attr:`.WindowPicks.arrays`.
        distinct: See :attr:`.DistinctCounts.arrays`.
        at: int64 [3], the indices of the next row, event to add and event to drop; updated.
        more: bool [2], whether there are more chunks of events to add, and to drop.
    """
    cuts, row_keys, row_flags = rows
    row_sums, row_totals, row_picks, row_distinct, row_last = found
    known, keys, flags, amounts, pairs = added
    dropped_known, dropped_keys, dropped_flags, dropped_amounts, dropped_pairs = dropped
    sums, totals, last, trained = state
    distinct_values = distinct[4]
    # Most groups only have counts. For them, the other functions are not called at all: a call with
    # a tuple of arrays updates the reference count of each, which takes longer than counting an
    # event.
    has_totals = len(columns) > 0
    has_picks = len(picks[0]) > 0
    has_distinct = len(distinct[0]) > 0
    event = at[1]
    drop = at[2]
    # Rows and both streams of events are in the order of time, and are processed once: before a row
    # is read, the events that it knows are added, and those that left its window are subtracted.
    for row in range(at[0], len(cuts)):
        cut = cuts[row]
        while event < len(known) and known[event] < cut:
            key = keys[event]
            if key < 0:
                event += 1
                continue
            if has_picks:
                if not has_room(picks):
                    at[0] = row
                    at[1] = event
                    at[2] = drop
                    return
                add_to_picks(picks, key, amounts, event, known[event], cut)
            for s in range(len(bits)):
                sums[key, s] += flags[event] >> bits[s] & 1
            if has_totals:
                _add_amounts(event, key, amounts, columns, totals, 1)
            if has_distinct:
                count_pairs(distinct, key, pairs, event, 1)
            last[key] = max(last[key], happened[event])
            event += 1
        while drop < len(dropped_known) and dropped_known[drop] < cut - window:
            key = dropped_keys[drop]
            if key >= 0:
                for s in range(len(bits)):
                    sums[key, s] -= dropped_flags[drop] >> bits[s] & 1
                if has_totals:
                    _add_amounts(drop, key, dropped_amounts, columns, totals, -1)
                if has_distinct:
                    count_pairs(distinct, key, dropped_pairs, drop, -1)
            drop += 1
        at[1] = event
        at[2] = drop
        # If a chunk is used up, the next one may have events before this row: get it first.
        if (event == len(known) and more[0]) or (drop == len(dropped_known) and more[1]):
            at[0] = row
            return
        key = row_keys[row]
        if key < 0:
            continue
        for s in range(len(row_sums)):
            row_sums[s, row] = sums[key, s]
        for c in range(len(row_totals) // 2):
            first = PARTS * c
            row_totals[2 * c, row] = totals[key, first]
            row_totals[2 * c + 1, row] = join_words(
                totals[key, first + 1], totals[key, first + 2], totals[key, first + 3]
            )
        if len(row_picks):
            read_picks(picks, key, cut, row, row_picks)
        for d in range(len(row_distinct)):
            row_distinct[d, row] = distinct_values[key, d]
        row_last[row] = last[key]
        if row_flags[row] >> TRAIN & 1:
            for kind in range(trained.shape[1]):
                trained[key, kind] += row_flags[row] >> (EVENT + kind) & 1
    at[0] = len(cuts)
