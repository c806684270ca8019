"""Sum up the events before each row, in the order of time.

The sums of all keys are in memory; events and rows pass by in chunks. An event is added once it is
known before the next row, and, of a sum with a window, subtracted once it has left the window.
:mod:`.running_sums` does that; here is what is summed up, written and kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nvt_torchrec.base.exact_sums import join_sums, split_terms
from nvt_torchrec.base.files.mapping import map_array, write_array
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.etl.events.extract import flag_type
from nvt_torchrec.etl.events.running_sums import NEVER, KeySums, RowSums, RunningSums
from nvt_torchrec.etl.events.timeline import (
    EarlierEvents,
    EventBlock,
    EventLog,
    sort_by_key,
)
from nvt_torchrec.etl.events.window_picks import WindowPicks
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import DAY
from nvt_torchrec.workflows.event_groups import (
    BEFORE_ALL,
    EVENT,
    FIRST_LABEL,
    PARTS,
    GroupSums,
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
        self._bits = range(EVENT, FIRST_LABEL + wanted.labels)
        self._keys = map_array(log.files.keys(group))
        is_old = earlier.known == BEFORE_ALL
        self._old, recent = earlier.take(is_old), earlier.take(~is_old)
        self._recent = [self._restore(recent)]
        self._of_histories = []
        for number in wanted.histories if tails else ():
            key, known = tails[number].expand()
            flags = np.full(len(key), 1 << history_bit(log.spec, number), flag_type(log.spec))
            amounts = np.full((len(log.spec.amounts), len(key)), np.nan)
            happened = np.full(len(key), NEVER)
            self._of_histories.append(self._make_block(known, happened, flags, key, amounts))
        kind = np.int32 if log.rows + earlier.counts[0].sum() < 2**31 else np.int64
        self.outputs: list[Path] = []
        for name in log.names:
            rows = log.map(log.files.flags(name)).shape
            self._create(log.files.sums(name, group), (len(wanted.sums), *rows), kind)
            if wanted.totals:
                totals = 2 * len(wanted.totals)
                self._create(log.files.totals(name, group), (totals, *rows), np.float64)
            if wanted.picks:
                picks = len(wanted.picks)
                self._create(log.files.picks(name, group), (picks, *rows), np.float64)
            if wanted.has_last:
                self._create(log.files.last(name, group), rows, np.int64)

    def _create(self, path: Path, shape: tuple[int, ...], kind: type) -> None:
        write_array(path, np.empty((*shape[:-1], 0), kind))  # checks that it can be written
        if shape[-1]:
            np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
        self.outputs.append(path)

    def _restore(self, recent: EarlierEvents) -> EventBlock:
        """Return events of earlier days that are kept one by one, with their flags and amounts."""
        labels, columns = self._wanted.labels, self._log.spec.amounts
        flags = np.full(len(recent.key), 1 << EVENT, flag_type(self._log.spec))
        for label, counts in enumerate(recent.counts[1 : 1 + labels]):
            flags |= counts.astype(flags.dtype) << (FIRST_LABEL + label)
        amounts = np.full((len(columns), len(recent.key)), np.nan)
        for number, column in enumerate(self._wanted.columns):
            first = 1 + labels + PARTS * number
            count, *words = recent.counts[first : first + PARTS]
            amount = join_sums(np.stack(words))
            amounts[columns.index(column)] = np.where(count > 0, amount, np.nan)
        for (column, _), numbers in zip(self._wanted.picked, recent.picked, strict=True):
            amounts[columns.index(column)] = numbers
        return self._make_block(recent.known, recent.happened, flags, recent.key, amounts)

    def _make_block(
        self,
        known: np.ndarray,
        happened: np.ndarray,
        flags: np.ndarray,
        keys: np.ndarray,
        amounts: np.ndarray,
    ) -> EventBlock:
        numbers = np.searchsorted(self._keys, keys).astype(np.int32)
        block = EventBlock(known, happened, flags, numbers, amounts)
        return block.take(np.argsort(known, kind="stable"))

    def tasks(self) -> list[Callable[[], Any]]:
        """Return what is to be done: what is kept, and the state of each window."""
        windows = self._wanted.windows
        return [self._keep, *(functools.partial(self._sum, window) for window in windows)]

    def _start(
        self,
        window: int,
        bits: Sequence[int],
        columns: Sequence[str],
        picks: Sequence[tuple[str, str]],
    ) -> KeySums:
        """Return the sums of all keys before the first event.

        Args:
            window: The window; events that are summed up as one have left every window.
            bits: Of each sum, the bit of the events that it counts.
            columns: The columns of totals.
            picks: The column and the kind of each pick.
        """
        amounts = self._log.spec.amounts
        kept = WindowPicks(
            keys=len(self._keys),
            columns=[amounts.index(column) for column, _ in picks],
            kinds=[PICK_KINDS[kind] for _, kind in picks],
            window=window,
        )
        state = KeySums.zeros(len(bits), len(columns), self._wanted.labels, kept, len(self._keys))
        index = np.searchsorted(self._keys, self._old.key)
        state.last[index] = self._old.happened
        if window:
            return state
        for number, bit in enumerate(bits):
            if bit in self._bits:
                state.sums[index, number] = self._old.counts[bit - EVENT]
        for number, column in enumerate(columns):
            first = 1 + self._wanted.labels + PARTS * self._wanted.columns.index(column)
            parts = self._old.counts[first : first + PARTS]
            state.totals[index, PARTS * number : PARTS * (number + 1)] = parts.T
        for number, wanted in enumerate(picks):
            kept.picked[index, number] = self._old.picked[self._wanted.picked.index(wanted)]
        return state

    def _sum(self, window: int) -> KeySums:
        """Write what the events within a window sum up to before each row."""
        log, group, files, wanted = self._log, self._group, self._log.files, self._wanted
        sums = [number for number, (other, _) in enumerate(wanted.sums) if other == window]
        totals = [number for number, (other, _) in enumerate(wanted.totals) if other == window]
        picks = [number for number, (other, _, _) in enumerate(wanted.picks) if other == window]
        bits = [wanted.sums[number][1] for number in sums]
        columns = [wanted.totals[number][1] for number in totals]
        before = [*self._recent, *self._of_histories]
        summer = RunningSums(
            window=window,
            bits=bits,
            columns=[log.spec.amounts.index(column) for column in columns],
            state=self._start(window, bits, columns, [wanted.picks[i][1:] for i in picks]),
            added=log.iterate_events(group, before),
            dropped=log.iterate_events(group, before),
        )
        # one of the windows writes the time of the last event, which is the same for all
        writes_last = wanted.has_last and window == wanted.windows[0]
        for chunk in log.iterate_rows():
            blocks = [log.block(group, number) for number in chunk.blocks]
            names = [log.names[number] for number in chunk.blocks]
            rows = RowSums(
                cuts=cut_times(log.spec, chunk.take([block.happened for block in blocks])),
                numbers=chunk.take([block.numbers for block in blocks]),
                flags=chunk.take([block.flags for block in blocks]),
                sums=len(bits),
                totals=len(columns),
                picks=len(picks),
            )
            summer.go_on(rows)
            if sums:  # the sums of a window stand together
                of_window = slice(sums[0], sums[-1] + 1)
                outputs = [map_array(files.sums(name, group), write=True) for name in names]
                chunk.put(rows.sums, [output[of_window] for output in outputs])
            if totals:
                found = rows.totals.reshape(len(totals), 2, -1)
                outputs = [map_array(files.totals(name, group), write=True) for name in names]
                for number, of_total in zip(totals, found, strict=True):
                    pair = slice(2 * number, 2 * number + 2)
                    chunk.put(of_total, [output[pair] for output in outputs])
            if picks:
                outputs = [map_array(files.picks(name, group), write=True) for name in names]
                chunk.put(rows.picks, [output[picks[0] : picks[-1] + 1] for output in outputs])
            if writes_last:
                chunk.put(
                    rows.last, [map_array(files.last(name, group), write=True) for name in names]
                )
        return summer.finish(end_of(log.spec, self._newest))

    def _keep(self) -> EarlierEvents:
        """Return what is kept for further days: events within the longest window, and sums."""
        log, wanted = self._log, self._wanted
        horizon = int(cut_times(log.spec, np.array([self._newest]))[0]) - max(wanted.windows)
        columns = [log.spec.amounts.index(column) for column in wanted.columns]
        summer = RunningSums(
            window=0,
            bits=self._bits,
            columns=columns,
            state=self._start(0, self._bits, wanted.columns, wanted.picked),
            added=log.iterate_events(self._group, self._recent),
            dropped=iter(()),
        )
        state = summer.finish(horizon)
        there = np.flatnonzero(state.sums[:, 0])
        measures = np.concatenate([state.sums[there].T, state.totals[there].T])
        picked = state.picks.picked[there].T
        parts = [(there, np.full(len(there), BEFORE_ALL), state.last[there], measures, picked)]
        for left in summer.iterate_left():
            left = left.take(left.numbers >= 0)
            measures = [(left.flags >> bit & 1).astype(np.int64)[np.newaxis] for bit in self._bits]
            for column in columns:
                amounts = left.amounts[column]
                measures += [~np.isnan(amounts)[np.newaxis], split_terms(amounts)]
            picked = left.amounts[[log.spec.amounts.index(column) for column, _ in wanted.picked]]
            measures = np.concatenate(measures)
            parts.append((left.numbers, left.known, left.happened, measures, picked))
        number, known, happened, counts, picked = (
            np.concatenate(column, axis=-1) for column in zip(*parts, strict=True)
        )
        order = sort_by_key(number.astype(np.int32), len(self._keys))
        return EarlierEvents(self._keys[number], known, happened, counts, picked).take(order)
