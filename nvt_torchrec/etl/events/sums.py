"""Sum the events before each row of a partition, a range of keys, in the order of time.

The sums of a partition's keys are in memory; its events and rows are read in chunks. An event is
added once it is known before the next row, and subtracted once it has left the window of a sum
(:mod:`.running_sums`). This module sets the sums up from earlier days, writes the sums before each
row, and selects the events that are kept for later days.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from nvt_torchrec.base.exact_sums import join_sums, split_terms
from nvt_torchrec.base.files.atomic import delete
from nvt_torchrec.base.files.mapping import map_array
from nvt_torchrec.etl.events.distinct_counts import DistinctCounts
from nvt_torchrec.etl.events.earlier_events import EarlierEvents, EarlierFiles
from nvt_torchrec.etl.events.event_records import iterate_slices, save_array, save_records
from nvt_torchrec.etl.events.extract import flag_type
from nvt_torchrec.etl.events.merged_partitions import (
    PartitionRows,
    allocate_sums,
    read_events,
    read_rows,
)
from nvt_torchrec.etl.events.partitions import DividedGroup, find_keys, sort_by_key
from nvt_torchrec.etl.events.running_sums import NEVER, KeySums, RowSums, RunningSums
from nvt_torchrec.etl.events.timeline import EventBlock, merge_events
from nvt_torchrec.etl.events.window_picks import WindowPicks
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import DAY
from nvt_torchrec.workflows.event_groups import (
    BEFORE_ALL,
    EVENT,
    FIRST_LABEL,
    PARTS,
    WindowParts,
    find_cuts,
    get_history_bit,
)
from nvt_torchrec.workflows.event_picks import PICK_KINDS
from nvt_torchrec.workflows.history_tail import HistoryTail


def find_as_of(spec: FeatureSpec, newest: int) -> int:
    """Return the time of a workflow's event state: just after the newest row.

    With ``cut = "day"`` it is the begin of the next day, whose rows count all events before it.
    """
    assert spec.events is not None
    return newest // DAY * DAY + DAY if spec.events.cut == "day" else newest + 1


def sum_partition(
    partition: int, group: DividedGroup, earlier: EarlierFiles | None, newest: int
) -> float:
    """Write the sums before each row of a partition, and the events that are kept.

    Args:
        partition: The number of the partition.
        group: The group; its blocks must have been divided.
        earlier: The files of earlier days; None for a run.
        newest: The time of the newest row that is not late, including earlier days.

    Returns:
        The number of rows done, divided by the number of groups, so that all groups add up to one.

    Raises:
        OutputError: The directory cannot be written.
    """
    summer = PartitionSummer(partition, group, earlier, newest)
    rows = summer.write_sums()
    for path in group.list_spilled(partition):
        delete(path)
    return rows / len(group.log.spec.groups)


class PartitionSummer:
    """Sums the events of a partition; see :func:`sum_partition`."""

    def __init__(
        self, partition: int, group: DividedGroup, earlier: EarlierFiles | None, newest: int
    ) -> None:
        spec = group.log.spec
        files = group.log.files
        group_sums = group.group_sums
        self._spec = spec
        self._files = files
        self._group = group
        self._partition = partition
        self._newest = newest
        self._group_sums = group_sums
        begin, end = map_array(files.bounds(group.number))[partition : partition + 2].tolist()
        self._keys = map_array(files.keys(group.number))[begin:end]
        kept = EarlierEvents.make_empty(group_sums)
        if earlier:
            kept = earlier.open_group(group.number, group_sums)
            kept = kept.take(find_keys(kept.key, self._keys))
        self._events = read_events(group, partition)
        self._pair_keys: list[np.ndarray] = []
        self._number_pairs(kept)
        # The events that have left every window are merged into one for each key, and one for each
        # pair of key and value.
        is_old = kept.known == BEFORE_ALL
        is_pair = (kept.pairs != 0).any(axis=0)
        self._old = kept.take(is_old & ~is_pair)
        self._old_pairs = kept.take(is_old & is_pair)
        self._recent = [self._restore_recent(kept.take(~is_old))]
        self._history_events: list[EventBlock] = []
        if earlier:
            for number in group_sums.histories:
                tail = earlier.open_tail(spec.histories[number])
                tail = tail.take(find_keys(tail.keys, self._keys))
                self._history_events.append(self._restore_history(number, tail))

    def _number_pairs(self, kept: EarlierEvents) -> None:
        """Number the pairs of keys and values that occur in the partition.

        Args:
            kept: The events of earlier days, which may have more pairs.
        """
        numbers = np.array(self._events.pairs)
        for column, key in enumerate(self._group.pair_keys):
            all_keys = map_array(self._files.keys(key))
            hashes = kept.pairs[column]
            used = np.searchsorted(all_keys, hashes[hashes != 0])
            pairs = numbers[column]
            used = np.union1d(used, pairs[pairs >= 0])
            numbers[column] = np.where(pairs < 0, -1, np.searchsorted(used, pairs))
            self._pair_keys.append(all_keys[used])
        self._events = dataclasses.replace(self._events, pairs=numbers)

    def _restore_recent(self, recent: EarlierEvents) -> EventBlock:
        """Return the events of earlier days that are kept one by one."""
        labels = self._group_sums.num_labels
        columns = self._group_sums.amounts
        block = self._make_block(recent.key, recent.known, recent.happened, 1 << EVENT)
        for label, counts in enumerate(recent.counts[1 : 1 + labels]):
            block.flags[:] |= counts.astype(block.flags.dtype) << (FIRST_LABEL + label)
        for number, column in enumerate(self._group_sums.total_columns):
            first = 1 + labels + PARTS * number
            count, *words = recent.counts[first : first + PARTS]
            amounts = join_sums(np.stack(words))
            block.amounts[columns.index(column)] = np.where(count > 0, amounts, np.nan)
        for (column, _), amounts in zip(self._group_sums.stored_picks, recent.picked, strict=True):
            block.amounts[columns.index(column)] = amounts
        for number, (keys, pairs) in enumerate(zip(self._pair_keys, recent.pairs, strict=True)):
            block.pairs[number] = np.where(pairs != 0, np.searchsorted(keys, pairs), -1)
        return block.take(np.argsort(recent.known, kind="stable"))

    def _restore_history(self, number: int, tail: HistoryTail) -> EventBlock:
        """Return the events that a history keeps of earlier days, which no aggregate counts."""
        key, known = tail.expand()
        flag = 1 << get_history_bit(self._spec, number)
        block = self._make_block(key, known, np.full(len(key), NEVER), flag)
        return block.take(np.argsort(known, kind="stable"))

    def _make_block(
        self, keys: np.ndarray, known: np.ndarray, happened: np.ndarray, flag: int
    ) -> EventBlock:
        """Return events with the given flags, and neither amounts nor pairs."""
        return EventBlock(
            known=known,
            happened=happened,
            flags=np.full(len(keys), flag, flag_type(self._spec)),
            numbers=np.searchsorted(self._keys, keys).astype(np.int32),
            amounts=np.full((len(self._group_sums.amounts), len(keys)), np.nan),
            pairs=np.full((len(self._pair_keys), len(keys)), -1, np.int32),
        )

    def write_sums(self) -> int:
        """Write the sums before each row, and the events that are kept; return the number of rows.

        Raises:
            OutputError: The directory cannot be written.
        """
        group = self._group
        partition = self._partition
        rows = read_rows(group, partition)
        found = allocate_sums(group, partition, len(rows.cuts))
        trained = []
        for window in self._group_sums.windows:
            trained.append(self._sum_window(window, rows, found).trained)
        save_records(group.sums_file(partition), rows.offsets, found)
        # Every window counted the same training rows.
        save_array(group.trained_file(partition), trained[0].T)
        save_array(group.kept_file(partition), self._collect_kept().to_rows())
        return len(found)

    def _make_state(self, window: int, parts: WindowParts) -> KeySums:
        """Return the sums of all keys before the first event.

        Args:
            window: The window. Only without a window (0), merged events of earlier days count.
            parts: The sums that are computed.
        """
        group_sums = self._group_sums
        amounts = group_sums.amounts
        picks = WindowPicks(
            keys=len(self._keys),
            columns=[amounts.index(column) for column, _ in parts.picks.values()],
            kinds=[PICK_KINDS[kind] for _, kind in parts.picks.values()],
            window=window,
        )
        distinct_columns = []
        for column in parts.distinct.values():
            distinct_columns.append(group_sums.distinct_columns.index(column))
        num_pairs = [len(self._pair_keys[column]) for column in distinct_columns]
        distinct = DistinctCounts.zeros(len(self._keys), distinct_columns, num_pairs)
        state = KeySums.zeros(
            len(parts.sums), len(parts.totals), group_sums.num_labels, picks, distinct
        )
        old = self._old
        index = np.searchsorted(self._keys, old.key)
        state.last[index] = old.happened
        if window:
            return state
        for number, bit in enumerate(parts.sums.values()):
            if bit < FIRST_LABEL + group_sums.num_labels:  # the other bits are those of histories
                state.sums[index, number] = old.counts[bit - EVENT]
        for number, column in enumerate(parts.totals.values()):
            first = 1 + group_sums.num_labels + PARTS * group_sums.total_columns.index(column)
            kept_totals = old.counts[first : first + PARTS]
            state.totals[index, PARTS * number : PARTS * (number + 1)] = kept_totals.T
        for number, column_and_kind in enumerate(parts.picks.values()):
            picks.picked[index, number] = old.picked[group_sums.stored_picks.index(column_and_kind)]
        for number, column_index in enumerate(distinct_columns):
            hashes = self._old_pairs.pairs[column_index]
            has_value = hashes != 0
            keys = np.searchsorted(self._keys, self._old_pairs.key[has_value])
            pairs = np.searchsorted(self._pair_keys[column_index], hashes[has_value])
            distinct.add_earlier_pairs(number, keys, pairs)
        return state

    def _sum_window(self, window: int, rows: PartitionRows, found: np.ndarray) -> KeySums:
        """Write the sums within a window before each row.

        Args:
            window: The window.
            rows: The rows, by time.
            found: Records [n], by block; the sums are written to them.

        Returns:
            The sums of all keys after the newest row.
        """
        parts = self._group_sums.select_window(window)
        blocks = [*self._recent, *self._history_events, self._events]
        summer = RunningSums(
            window=window,
            bits=[*parts.sums.values()],
            columns=[self._group_sums.amounts.index(column) for column in parts.totals.values()],
            state=self._make_state(window, parts),
            added=merge_events(blocks),
            dropped=merge_events(blocks),
        )
        # The time of the last event has no window, so only the first pass writes it.
        writes_last = self._group_sums.has_last and window == self._group_sums.windows[0]
        for piece in iterate_slices(0, len(found)):
            chunk = RowSums(rows.cuts[piece], rows.numbers[piece], rows.flags[piece], parts)
            summer.sum_rows(chunk)
            indices = rows.indices[piece]
            for number, sums in zip(parts.sums, chunk.sums, strict=True):
                found["sums"][indices, number] = sums
            totals = chunk.totals.reshape(-1, 2, len(chunk))
            for number, count_and_sum in zip(parts.totals, totals, strict=True):
                found["totals"][indices, number] = count_and_sum.T
            for number, picks in zip(parts.picks, chunk.picks, strict=True):
                found["picks"][indices, number] = picks
            for number, values in zip(parts.distinct, chunk.distinct, strict=True):
                found["distinct"][indices, number] = values
            if writes_last:
                found["last"][indices] = chunk.last
        return summer.finish(find_as_of(self._spec, self._newest))

    def _collect_kept(self) -> EarlierEvents:
        """Return the events that are kept for later days, merging those before all windows."""
        group_sums = self._group_sums
        horizon = int(find_cuts(self._spec, np.array([self._newest]))[0]) - max(group_sums.windows)
        parts = group_sums.select_kept()
        summer = RunningSums(
            window=0,
            bits=[*parts.sums.values()],
            columns=[self._group_sums.amounts.index(column) for column in parts.totals.values()],
            state=self._make_state(0, parts),
            added=merge_events([*self._recent, self._events]),
            dropped=iter(()),
        )
        state = summer.finish(horizon)
        kept = [self._keep_sums(state), *self._keep_pairs(state, parts)]
        for left in summer.iterate_remaining():
            if len(left.known):  # the chunk before the first event has no columns
                kept.append(self._keep_events(left))
        together = EarlierEvents.concatenate(kept)
        numbers = np.searchsorted(self._keys, together.key).astype(np.int32)
        return together.take(sort_by_key(numbers, len(self._keys)))

    def _keep_sums(self, state: KeySums) -> EarlierEvents:
        """Return one merged event for each key with events that have left all windows."""
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
        """Yield, for each count without a window, an event for each pair of key and value."""
        group_sums = self._group_sums
        for number, name in enumerate(parts.distinct.values()):
            column = group_sums.distinct_columns.index(name)
            keys, pairs = state.distinct.list_pairs(number)
            hashes = np.zeros((len(self._pair_keys), len(keys)), np.int64)
            hashes[column] = self._pair_keys[column][pairs]
            yield EarlierEvents(
                key=self._keys[keys],
                known=np.full(len(keys), BEFORE_ALL),
                happened=np.full(len(keys), NEVER),
                counts=np.zeros((group_sums.num_measures, len(keys)), np.int64),
                picked=np.full((len(group_sums.stored_picks), len(keys)), np.nan),
                pairs=hashes,
            )

    def _keep_events(self, events: EventBlock) -> EarlierEvents:
        """Return events one by one; each must have a key."""
        group_sums = self._group_sums
        columns = group_sums.amounts
        bits = range(EVENT, FIRST_LABEL + group_sums.num_labels)
        counts = [np.stack([events.flags >> bit & 1 for bit in bits]).astype(np.int64)]
        for column in group_sums.total_columns:
            amounts = np.ascontiguousarray(events.amounts[columns.index(column)])
            counts += [~np.isnan(amounts)[np.newaxis], split_terms(amounts)]
        hashes = np.zeros((len(self._pair_keys), len(events.known)), np.int64)
        for number, keys in enumerate(self._pair_keys):
            has_value = events.pairs[number] >= 0
            hashes[number, has_value] = keys[events.pairs[number, has_value]]
        return EarlierEvents(
            key=self._keys[events.numbers],
            known=events.known,
            happened=events.happened,
            counts=np.concatenate(counts),
            picked=events.amounts[[columns.index(column) for column, _ in group_sums.stored_picks]],
            pairs=hashes,
        )
