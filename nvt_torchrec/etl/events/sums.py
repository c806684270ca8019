"""Sum up the events before each row, in the order of time, for some keys at a time.

The sums of the keys of a partition are in memory; its events and rows pass by in chunks. An event
is added once it is known before the next row, and, of a sum with a window, subtracted once it has
left the window. :mod:`.running_sums` does that; here is what is summed up, written and kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from nvt_torchrec.base.exact_sums import join_sums, split_terms
from nvt_torchrec.base.files.mapping import map_array
from nvt_torchrec.etl.events.distinct_counts import DistinctCounts
from nvt_torchrec.etl.events.earlier_events import EarlierEvents
from nvt_torchrec.etl.events.extract import EventFiles, flag_type
from nvt_torchrec.etl.events.partitions import (
    PartitionFiles,
    sort_by_key,
)
from nvt_torchrec.etl.events.running_sums import NEVER, KeySums, RowSums, RunningSums
from nvt_torchrec.etl.events.timeline import (
    NO_EVENTS,
    EventBlock,
    list_pair_keys,
    merge_events,
)
from nvt_torchrec.etl.events.window_picks import WindowPicks
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import DAY
from nvt_torchrec.workflows.event_groups import (
    BEFORE_ALL,
    EVENT,
    FIRST_LABEL,
    PARTS,
    WindowParts,
    cut_times,
    history_bit,
    sums_of_groups,
)
from nvt_torchrec.workflows.event_picks import PICK_KINDS
from nvt_torchrec.workflows.history_tail import HistoryTail


@dataclasses.dataclass(frozen=True)
class Summed:
    """The result of a partition.

    Attributes:
        group: The number of the group.
        rows: How many rows there are.
        trained: int64 [1 + labels, keys], how many rows for training these have, and with each
            label.
        kept: What is kept for further days.
    """

    group: int
    rows: int
    trained: np.ndarray
    kept: EarlierEvents


@dataclasses.dataclass(frozen=True)
class Partition:
    """Some keys of a group, whose events are summed up apart.

    Attributes:
        spec: The columns.
        files: The files of a run's events.
        group: The number of the group.
        keys: The numbers of the keys.
        rows: Where the rows are among those of the group.
        events: Where the events are among those of the group.
        earlier: The events of days before.
        tails: By history, the newest events of days before; none without such days.
        newest: The time of the newest row that is not late, also of earlier days.
    """

    spec: FeatureSpec
    files: EventFiles
    group: int
    keys: slice
    rows: slice
    events: slice
    earlier: EarlierEvents
    tails: dict[int, HistoryTail]
    newest: int


def end_of(spec: FeatureSpec, newest: int) -> int:
    """Return the time for which a workflow sums up what happened: after the newest row.

    With ``cut = "day"`` it is the begin of the next day, for whose rows the sums are right.
    """
    assert spec.events is not None
    return newest // DAY * DAY + DAY if spec.events.cut == "day" else newest + 1


def sum_partition(partition: Partition) -> Summed:
    """Write what the events before each row of a partition sum up to; return its sums."""
    return PartitionSummer(partition).sum_up()


class PartitionSummer:
    """Sums up the events of a partition."""

    def __init__(self, partition: Partition) -> None:
        spec, files, group = partition.spec, partition.files, partition.group
        self._spec, self._files, self._group = spec, files, group
        self._partition, self._newest = partition, partition.newest
        self._wanted = wanted = sums_of_groups(spec)[group]
        self._keys = map_array(files.keys(group))[partition.keys]
        earlier, self._arrays = partition.earlier, PartitionFiles(files, group)
        self._events = self._arrays.read_events(partition.events)
        self._pair_keys: list[np.ndarray] = []
        self._number_pairs()
        is_old = earlier.known == BEFORE_ALL
        is_pair = (earlier.pairs != 0).any(axis=0)
        self._old, self._old_pairs = earlier.take(is_old & ~is_pair), earlier.take(is_old & is_pair)
        self._recent = [self._restore_recent(earlier.take(~is_old))]
        self._of_histories = []
        for number in wanted.histories:
            if number in partition.tails:
                history = self._restore_history(number, partition.tails[number])
                self._of_histories.append(history)

    def _number_pairs(self) -> None:
        """Number the pairs of keys and values of the partition alone."""
        events = self._events[0] if self._events else NO_EVENTS
        numbers = np.array(events.pairs)
        for column, key in enumerate(list_pair_keys(self._spec)[self._group]):
            all_keys = map_array(self._files.keys(key))
            hashes = self._partition.earlier.pairs[column]
            used = np.searchsorted(all_keys, hashes[hashes != 0])
            if len(numbers):
                of_events = numbers[column]
                used = np.union1d(used, of_events[of_events >= 0])
                numbers[column] = np.where(of_events < 0, -1, np.searchsorted(used, of_events))
            self._pair_keys.append(all_keys[np.unique(used)])
        if self._events:
            self._events = [dataclasses.replace(events, pairs=numbers)]

    def _restore_recent(self, recent: EarlierEvents) -> EventBlock:
        """Return the events of earlier days that are kept one by one."""
        labels, columns = self._wanted.labels, self._wanted.amounts
        block = self._make_block(recent.key, recent.known, recent.happened, 1 << EVENT)
        for label, counts in enumerate(recent.counts[1 : 1 + labels]):
            block.flags[:] |= counts.astype(block.flags.dtype) << (FIRST_LABEL + label)
        for number, column in enumerate(self._wanted.columns):
            first = 1 + labels + PARTS * number
            count, *words = recent.counts[first : first + PARTS]
            amounts = join_sums(np.stack(words))
            block.amounts[columns.index(column)] = np.where(count > 0, amounts, np.nan)
        for (column, _), amounts in zip(self._wanted.picked, recent.picked, strict=True):
            block.amounts[columns.index(column)] = amounts
        for number, (keys, pairs) in enumerate(zip(self._pair_keys, recent.pairs, strict=True)):
            block.pairs[number] = np.where(pairs != 0, np.searchsorted(keys, pairs), -1)
        return block.take(np.argsort(recent.known, kind="stable"))

    def _restore_history(self, number: int, tail: HistoryTail) -> EventBlock:
        """Return the events that a history keeps of earlier days, which no aggregate counts."""
        key, known = tail.expand()
        flag = 1 << history_bit(self._spec, number)
        block = self._make_block(key, known, np.full(len(key), NEVER), flag)
        return block.take(np.argsort(known, kind="stable"))

    def _make_block(
        self, keys: np.ndarray, known: np.ndarray, happened: np.ndarray, flag: int
    ) -> EventBlock:
        """Return events with one flag and neither amounts nor values."""
        return EventBlock(
            known=known,
            happened=happened,
            flags=np.full(len(keys), flag, flag_type(self._spec)),
            numbers=np.searchsorted(self._keys, keys).astype(np.int32),
            amounts=np.full((len(self._wanted.amounts), len(keys)), np.nan),
            pairs=np.full((len(self._pair_keys), len(keys)), -1, np.int32),
        )

    def sum_up(self) -> Summed:
        """Write what the events before each row sum up to; return the sums."""
        trained = [self._sum(window).trained for window in self._wanted.windows]
        rows = self._partition.rows
        return Summed(self._group, rows.stop - rows.start, trained[0].T, self._keep())

    def _start(self, window: int, parts: WindowParts) -> KeySums:
        """Return the sums of all keys before the first event.

        Args:
            window: The window; events that are summed up as one have left every window.
            parts: What is summed up.
        """
        wanted, amounts = self._wanted, self._wanted.amounts
        picks = WindowPicks(
            keys=len(self._keys),
            columns=[amounts.index(column) for column, _ in parts.picks.values()],
            kinds=[PICK_KINDS[kind] for _, kind in parts.picks.values()],
            window=window,
        )
        compared = [wanted.compared.index(column) for column in parts.distinct.values()]
        pairs = [len(self._pair_keys[column]) for column in compared]
        distinct = DistinctCounts.zeros(len(self._keys), compared, pairs)
        state = KeySums.zeros(len(parts.sums), len(parts.totals), wanted.labels, picks, distinct)
        old = self._old
        index = np.searchsorted(self._keys, old.key)
        state.last[index] = old.happened
        if window:
            return state
        for number, bit in enumerate(parts.sums.values()):
            if bit < FIRST_LABEL + wanted.labels:  # not of a history
                state.sums[index, number] = old.counts[bit - EVENT]
        for number, column in enumerate(parts.totals.values()):
            first = 1 + wanted.labels + PARTS * wanted.columns.index(column)
            of_total = old.counts[first : first + PARTS]
            state.totals[index, PARTS * number : PARTS * (number + 1)] = of_total.T
        for number, column_and_kind in enumerate(parts.picks.values()):
            picks.picked[index, number] = old.picked[wanted.picked.index(column_and_kind)]
        for number, compared_column in enumerate(compared):
            hashes = self._old_pairs.pairs[compared_column]
            there = hashes != 0
            keys = np.searchsorted(self._keys, self._old_pairs.key[there])
            pair_numbers = np.searchsorted(self._pair_keys[compared_column], hashes[there])
            distinct.start(number, keys, pair_numbers)
        return state

    def _sum(self, window: int) -> KeySums:
        """Write what the events within a window sum up to before each row."""
        files, group = self._files, self._group
        parts = self._wanted.select_window(window)
        blocks = [*self._recent, *self._of_histories, *self._events]
        summer = RunningSums(
            window=window,
            bits=[*parts.sums.values()],
            columns=[self._wanted.amounts.index(column) for column in parts.totals.values()],
            state=self._start(window, parts),
            added=merge_events(blocks),
            dropped=merge_events(blocks),
        )
        # one of the windows writes the time of the last event, which is the same for all
        writes_last = self._wanted.has_last and window == self._wanted.windows[0]
        for piece, cuts, numbers, flags in self._arrays.read_rows(self._partition.rows):
            rows = RowSums(cuts, numbers, flags, parts)
            summer.go_on(rows)
            _write(files.sums(group), piece, parts.sums, rows.sums)
            totals = rows.totals.reshape(-1, 2, len(rows))
            _write(files.totals(group), piece, parts.totals, totals)
            _write(files.picks(group), piece, parts.picks, rows.picks)
            _write(files.distinct(group), piece, parts.distinct, rows.distinct)
            if writes_last:
                map_array(files.last(group), write=True)[piece] = rows.last
        return summer.finish(end_of(self._spec, self._newest))

    def _keep(self) -> EarlierEvents:
        """Return what is kept for further days: events within the longest window, and sums."""
        wanted = self._wanted
        horizon = int(cut_times(self._spec, np.array([self._newest]))[0]) - max(wanted.windows)
        parts = wanted.select_kept()
        summer = RunningSums(
            window=0,
            bits=[*parts.sums.values()],
            columns=[self._wanted.amounts.index(column) for column in parts.totals.values()],
            state=self._start(0, parts),
            added=merge_events([*self._recent, *self._events]),
            dropped=iter(()),
        )
        state = summer.finish(horizon)
        kept = [self._keep_sums(state), *self._keep_pairs(state, parts)]
        for left in summer.iterate_left():
            if len(left.known):  # before the first event there are not even its columns
                kept.append(self._keep_events(left))
        together = EarlierEvents.concatenate(kept)
        numbers = np.searchsorted(self._keys, together.key).astype(np.int32)
        return together.take(sort_by_key(numbers, len(self._keys)))

    def _keep_sums(self, state: KeySums) -> EarlierEvents:
        """Return the events of each key that have left all windows, as one."""
        keys = np.flatnonzero(state.sums[:, 0])
        return EarlierEvents(
            key=self._keys[keys],
            known=np.full(len(keys), BEFORE_ALL),
            happened=state.last[keys],
            counts=np.concatenate([state.sums[keys].T, state.totals[keys].T]),
            picked=state.picks.picked[keys].T,
            pairs=np.zeros((len(self._pair_keys), len(keys)), np.int64),
        )

    def _keep_pairs(self, state: KeySums, parts: WindowParts) -> Iterator[EarlierEvents]:
        """Yield, of each count of values without a window, an event for each value of a key."""
        wanted = self._wanted
        for number, name in enumerate(parts.distinct.values()):
            column = wanted.compared.index(name)
            keys, pairs = state.distinct.list_pairs(number)
            hashes = np.zeros((len(self._pair_keys), len(keys)), np.int64)
            hashes[column] = self._pair_keys[column][pairs]
            yield EarlierEvents(
                key=self._keys[keys],
                known=np.full(len(keys), BEFORE_ALL),
                happened=np.full(len(keys), NEVER),
                counts=np.zeros((wanted.measures, len(keys)), np.int64),
                picked=np.full((len(wanted.picked), len(keys)), np.nan),
                pairs=hashes,
            )

    def _keep_events(self, events: EventBlock) -> EarlierEvents:
        """Return events, which have keys, one by one."""
        wanted, columns = self._wanted, self._wanted.amounts
        bits = range(EVENT, FIRST_LABEL + wanted.labels)
        counts = [np.stack([events.flags >> bit & 1 for bit in bits]).astype(np.int64)]
        for column in wanted.columns:
            amounts = np.ascontiguousarray(events.amounts[columns.index(column)])
            counts += [~np.isnan(amounts)[np.newaxis], split_terms(amounts)]
        hashes = np.zeros((len(self._pair_keys), len(events.known)), np.int64)
        for number, keys in enumerate(self._pair_keys):
            there = events.pairs[number] >= 0
            hashes[number, there] = keys[events.pairs[number, there]]
        return EarlierEvents(
            key=self._keys[events.numbers],
            known=events.known,
            happened=events.happened,
            counts=np.concatenate(counts),
            picked=events.amounts[[columns.index(column) for column, _ in wanted.picked]],
            pairs=hashes,
        )


def _write(path: Path, rows: slice, numbers: Iterable[int], values: np.ndarray) -> None:
    """Write values of some rows to the sums of their group.

    Args:
        path: The file.
        rows: Where the rows are.
        numbers: Of each value the number in the group, which is its index in the file.
        values: [numbers, .., n].
    """
    if not len(values):
        return
    output = map_array(path, write=True)
    for number, of_number in zip(numbers, values, strict=True):
        output[number, ..., rows] = of_number
