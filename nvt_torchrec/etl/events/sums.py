"""Sum up the events before each row, in the order of time.

The sums of all keys are in memory; events and rows pass by in chunks. An event is added once it is
known before the next row, and, of a sum with a window, subtracted once it has left the window.
:mod:`.running_sums` does that; here is what is summed up, written and kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nvt_torchrec.base.exact_sums import join_sums, split_terms
from nvt_torchrec.base.files.mapping import map_array, write_array
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.etl.events.distinct_counts import DistinctCounts
from nvt_torchrec.etl.events.earlier_events import EarlierEvents
from nvt_torchrec.etl.events.extract import flag_type
from nvt_torchrec.etl.events.key_numbers import sort_by_key
from nvt_torchrec.etl.events.running_sums import NEVER, KeySums, RowSums, RunningSums
from nvt_torchrec.etl.events.timeline import EventBlock, EventChunk, EventLog
from nvt_torchrec.etl.events.window_picks import WindowPicks
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import DAY
from nvt_torchrec.workflows.event_groups import (
    BEFORE_ALL,
    EVENT,
    FIRST_LABEL,
    PARTS,
    GroupSums,
    WindowParts,
    cut_times,
    history_bit,
    sums_of_groups,
)
from nvt_torchrec.workflows.event_picks import PICK_KINDS
from nvt_torchrec.workflows.history_tail import HistoryTail


@dataclasses.dataclass(frozen=True)
class Summed:
    """The result of a group.

    Attributes:
        trained: int64 [1 + labels, keys], how many rows for training these have, and with each
            label.
        kept: What is kept for further days.
    """

    trained: np.ndarray
    kept: EarlierEvents


def end_of(spec: FeatureSpec, newest: int) -> int:
    """Return the time for which a workflow sums up what happened: after the newest row.

    With ``cut = "day"`` it is the begin of the next day, for whose rows the sums are right.
    """
    assert spec.events is not None
    return newest // DAY * DAY + DAY if spec.events.cut == "day" else newest + 1


def sum_up(
    log: EventLog,
    earlier: Sequence[EarlierEvents],
    tails: Sequence[HistoryTail],
    newest: int,
    threads: int,
    report: Callable[[float], object] = lambda rows: None,
) -> Iterator[Summed]:
    """Write what the events before each row sum up to, beside each block; yield each group's sums.

    Args:
        log: The events.
        earlier: Of each group, the events of days before.
        tails: Of each history, the newest events of days before; none without such days.
        newest: The time of the newest row that is not late, also of earlier days.
        threads: How many windows are summed up at once.
        report: Called with the number of rows done since the last call, counting a row once.
    """
    groups = [
        GroupSummer(log, number, wanted, earlier[number], tails, newest)
        for number, wanted in enumerate(sums_of_groups(log.spec))
    ]
    tasks = [work for group in groups for work in group.tasks()]
    done = map_in_order(lambda work: work(), tasks, threads, "events")
    for group in groups:
        kept, *states = (next(done) for _ in group.tasks())
        report(log.rows / len(groups))
        yield Summed(states[0].trained.T, kept)
    log.sync(path for group in groups for path in group.outputs)


class GroupSummer:
    """Sums up the events of a group.

    Args:
        log: The events.
        group: The number of the group.
        wanted: What is summed up.
        earlier: The events of days before.
        tails: Of each history, the newest events of days before; none without such days.
        newest: The time of the newest row that is not late, also of earlier days.

    Attributes:
        outputs: The files that are written.
    """

    def __init__(
        self,
        log: EventLog,
        group: int,
        wanted: GroupSums,
        earlier: EarlierEvents,
        tails: Sequence[HistoryTail],
        newest: int,
    ) -> None:
        self._log, self._group, self._wanted, self._newest = log, group, wanted, newest
        self._keys = map_array(log.files.keys(group))
        self._pair_keys = [map_array(log.files.keys(key)) for key in log.pair_keys[group]]
        is_old = earlier.known == BEFORE_ALL
        is_pair = (earlier.pairs != 0).any(axis=0)
        self._old, self._old_pairs = earlier.take(is_old & ~is_pair), earlier.take(is_old & is_pair)
        self._recent = [self._restore_recent(earlier.take(~is_old))]
        self._of_histories = []
        for number in wanted.histories if tails else ():
            self._of_histories.append(self._restore_history(number, tails[number]))
        kind = np.int32 if log.count_events(group) + earlier.counts[0].sum() < 2**31 else np.int64
        self.outputs: list[Path] = []
        files = log.files
        for name in log.names:
            (rows,) = log.map(files.flags(name)).shape
            self._create(files.sums(name, group), (len(wanted.sums), rows), kind)
            if wanted.totals:
                self._create(files.totals(name, group), (len(wanted.totals), 2, rows), np.float64)
            if wanted.picks:
                self._create(files.picks(name, group), (len(wanted.picks), rows), np.float64)
            if wanted.distinct:
                self._create(files.distinct(name, group), (len(wanted.distinct), rows), kind)
            if wanted.has_last:
                self._create(files.last(name, group), (rows,), np.int64)

    def _create(self, path: Path, shape: tuple[int, ...], kind: type) -> None:
        write_array(path, np.empty((*shape[:-1], 0), kind))  # checks that it can be written
        if shape[-1]:
            np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
        self.outputs.append(path)

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
        flag = 1 << history_bit(self._log.spec, number)
        block = self._make_block(key, known, np.full(len(key), NEVER), flag)
        return block.take(np.argsort(known, kind="stable"))

    def _make_block(
        self, keys: np.ndarray, known: np.ndarray, happened: np.ndarray, flag: int
    ) -> EventBlock:
        """Return events with one flag and neither amounts nor values."""
        return EventBlock(
            known=known,
            happened=happened,
            flags=np.full(len(keys), flag, flag_type(self._log.spec)),
            numbers=np.searchsorted(self._keys, keys).astype(np.int32),
            amounts=np.full((len(self._wanted.amounts), len(keys)), np.nan),
            pairs=np.full((len(self._pair_keys), len(keys)), -1, np.int32),
        )

    def tasks(self) -> list[Callable[[], Any]]:
        """Return what is to be done: what is kept, and the state of each window."""
        windows = self._wanted.windows
        return [self._keep, *(functools.partial(self._sum, window) for window in windows)]

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
        log, group, files = self._log, self._group, self._log.files
        parts = self._wanted.select_window(window)
        before = [*self._recent, *self._of_histories]
        summer = RunningSums(
            window=window,
            bits=[*parts.sums.values()],
            columns=[self._wanted.amounts.index(column) for column in parts.totals.values()],
            state=self._start(window, parts),
            added=log.iterate_events(group, before),
            dropped=log.iterate_events(group, before),
        )
        # one of the windows writes the time of the last event, which is the same for all
        writes_last = self._wanted.has_last and window == self._wanted.windows[0]
        for chunk in log.iterate_rows():
            blocks = [log.rows_of(group, number) for number in chunk.blocks]
            rows = RowSums(
                cuts=cut_times(log.spec, chunk.take([block.happened for block in blocks])),
                numbers=chunk.take([block.numbers for block in blocks]),
                flags=chunk.take([block.flags for block in blocks]),
                parts=parts,
            )
            summer.go_on(rows)
            self._write(chunk, files.sums, parts.sums, rows.sums)
            self._write(chunk, files.totals, parts.totals, rows.totals.reshape(-1, 2, len(rows)))
            self._write(chunk, files.picks, parts.picks, rows.picks)
            self._write(chunk, files.distinct, parts.distinct, rows.distinct)
            if writes_last:
                outputs = [files.last(log.names[number], group) for number in chunk.blocks]
                chunk.put(rows.last, [map_array(output, write=True) for output in outputs])
        return summer.finish(end_of(log.spec, self._newest))

    def _write(
        self,
        chunk: EventChunk,
        file_of: Callable[[str, int], Path],
        numbers: Iterable[int],
        values: np.ndarray,
    ) -> None:
        """Write values of a chunk of rows to the files of their blocks.

        Args:
            chunk: The rows.
            file_of: Returns the file of a block and a group.
            numbers: Of each value the number in the group, which is its index in the file.
            values: [numbers, .., n].
        """
        if not len(values):
            return
        names = [self._log.names[number] for number in chunk.blocks]
        outputs = [map_array(file_of(name, self._group), write=True) for name in names]
        for number, of_number in zip(numbers, values, strict=True):
            chunk.put(of_number, [output[number] for output in outputs])

    def _keep(self) -> EarlierEvents:
        """Return what is kept for further days: events within the longest window, and sums."""
        log, wanted = self._log, self._wanted
        horizon = int(cut_times(log.spec, np.array([self._newest]))[0]) - max(wanted.windows)
        parts = wanted.select_kept()
        summer = RunningSums(
            window=0,
            bits=[*parts.sums.values()],
            columns=[self._wanted.amounts.index(column) for column in parts.totals.values()],
            state=self._start(0, parts),
            added=log.iterate_events(self._group, self._recent),
            dropped=iter(()),
        )
        state = summer.finish(horizon)
        kept = [self._keep_sums(state), *self._keep_pairs(state, parts)]
        for left in summer.iterate_left():
            if len(left.known):  # before the first event there are not even its columns
                kept.append(self._keep_events(left.take(left.numbers >= 0)))
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
