"""Sum up the events before each row, in the order of time.

The sums of all keys are in memory; events and rows pass by in chunks. An event is added once it is
known before the next row, and, of a sum with a window, subtracted once it has left the window.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nvt_torchrec.base.files.mapping import map_array, write_array
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.etl.events.extract import flag_type
from nvt_torchrec.etl.events.timeline import (
    NO_EVENTS,
    EarlierEvents,
    EventBlock,
    EventLog,
    sort_by_key,
)
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import DAY
from nvt_torchrec.workflows.event_sums import (
    BEFORE_ALL,
    EVENT,
    FIRST_LABEL,
    TRAIN,
    GroupSums,
    cut_times,
    history_bit,
    sums_of_groups,
)
from nvt_torchrec.workflows.history_tail import HistoryTail

#: The time of the last event of a key without one.
NEVER = -(2**63)


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
        newest: The time of the newest row, also of earlier days.
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
        report(log.bounds[0] / len(groups))
        _, *trained = states[0][:, -group.others :].T
        yield Summed(np.stack(trained), kept)
    log.sync(path for group in groups for path in group.outputs)


class GroupSummer:
    """Sums up the events of a group.

    A state is int64 [keys, sums + 2 + labels]: of each key the sums, the time of the last event,
    how many rows for training it has, and how many of them with each label.
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
        self.log, self.group, self.wanted, self.newest = log, group, wanted, newest
        self.others = 2 + len(log.spec.labels)
        self._keys = map_array(log.files.keys(group))
        is_old = earlier.known == BEFORE_ALL
        self._old, recent = earlier.take(is_old), earlier.take(~is_old)
        flags = np.full(len(recent.key), 1 << EVENT, flag_type(log.spec))
        for label, counts in enumerate(recent.counts[1:]):
            flags |= counts.astype(flags.dtype) << (FIRST_LABEL + label)
        self._recent = [self._make_block(recent.known, recent.happened, flags, recent.key)]
        self._of_histories = []
        for number in wanted.histories if tails else ():
            key, known = tails[number].expand()
            flags = np.full(len(key), 1 << history_bit(log.spec, number), flag_type(log.spec))
            happened = np.full(len(key), NEVER)
            self._of_histories.append(self._make_block(known, happened, flags, key))
        kind = np.int32 if log.bounds[0] + earlier.counts[0].sum() < 2**31 else np.int64
        self.outputs: list[Path] = []
        for name in log.names:
            rows = log.map(log.files.flags(name)).shape
            self._create(log.files.sums(name, group), (len(wanted.sums), *rows), kind)
            if wanted.has_last:
                self._create(log.files.last(name, group), rows, np.int64)

    def _create(self, path: Path, shape: tuple[int, ...], kind: type) -> None:
        write_array(path, np.empty((*shape[:-1], 0), kind))  # checks that it can be written
        if shape[-1]:
            np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
        self.outputs.append(path)

    def _make_block(
        self, known: np.ndarray, happened: np.ndarray, flags: np.ndarray, keys: np.ndarray
    ) -> EventBlock:
        numbers = np.searchsorted(self._keys, keys).astype(np.int32)
        return EventBlock(known, happened, flags, numbers).take(np.argsort(known, kind="stable"))

    def tasks(self) -> list[Callable[[], Any]]:
        """Return what is to be done: what is kept, and the state of each window."""
        windows = list(dict.fromkeys(window for window, _ in self.wanted.sums))
        return [self._keep, *(functools.partial(self._sum, window) for window in windows)]

    def _start(self, window: int, bits: Sequence[int]) -> np.ndarray:
        """Return the state before the first event."""
        state = np.zeros((len(self._keys), len(bits) + self.others), np.int64)
        state[:, len(bits)] = NEVER
        place = np.searchsorted(self._keys, self._old.key)
        state[place, len(bits)] = self._old.happened
        for number, bit in enumerate(bits if not window else ()):
            if bit < FIRST_LABEL + len(self.log.spec.labels):
                state[place, number] = self._old.counts[bit - EVENT]
        return state

    def _sum(self, window: int) -> np.ndarray:
        log, group, files = self.log, self.group, self.log.files
        first = next(i for i, (other, _) in enumerate(self.wanted.sums) if other == window)
        bits = [bit for other, bit in self.wanted.sums if other == window]
        of_window = slice(first, first + len(bits))
        before = [*self._recent, *self._of_histories]
        added, dropped = (log.iterate_events(group, before) for _ in range(2))
        summer = RunningSums(window, bits, self._start(window, bits), added, dropped)
        for chunk in log.iterate_rows():
            blocks = [log.block(group, number) for number in chunk.blocks]
            cuts = cut_times(log.spec, chunk.take([block.happened for block in blocks]))
            numbers = chunk.take([block.numbers for block in blocks])
            flags = chunk.take([block.flags for block in blocks])
            names = [log.names[number] for number in chunk.blocks]
            outputs = [map_array(files.sums(name, group), write=True)[of_window] for name in names]
            counts = np.zeros((len(bits), len(cuts)), outputs[0].dtype)
            last = np.full(len(cuts), NEVER)
            summer.go_on(cuts, numbers, flags, counts, last)
            chunk.put(counts, outputs)
            if not first and self.wanted.has_last:
                chunk.put(last, [map_array(files.last(name, group), write=True) for name in names])
        return summer.finish(end_of(log.spec, self.newest))

    def _keep(self) -> EarlierEvents:
        """Return what is kept for further days: events within the longest window, and sums."""
        longest = max(window for window, _ in self.wanted.sums)
        horizon = int(cut_times(self.log.spec, np.array([self.newest]))[0]) - longest
        bits = range(EVENT, FIRST_LABEL + len(self.log.spec.labels))
        events = self.log.iterate_events(self.group, self._recent)
        summer = RunningSums(0, bits, self._start(0, bits), events, iter(()))
        state = summer.finish(horizon)
        there = np.flatnonzero(state[:, 0])
        old = state[there].T
        parts = [(there, np.full(len(there), BEFORE_ALL), old[len(bits)], old[: len(bits)])]
        for left in summer.iterate_left():
            left = left.take(left.numbers >= 0)
            counts = np.stack([left.flags >> bit & 1 for bit in bits]).astype(np.int64)
            parts.append((left.numbers, left.known, left.happened, counts))
        number, known, happened, counts = (
            np.concatenate(column, axis=-1) for column in zip(*parts, strict=True)
        )
        order = sort_by_key(number.astype(np.int32), len(self._keys))
        return EarlierEvents(self._keys[number], known, happened, counts).take(order)


class RunningSums:
    """Adds events to a state, and subtracts those that leave the window, as the rows pass by.

    Args:
        window: How long an event counts, in microseconds; 0: always.
        bits: Of each sum, the bit of the events that it counts.
        state: See :class:`GroupSummer`; it is changed.
        added: The events in the order in which they are known.
        dropped: The same events once more; not read without a window.
    """

    def __init__(
        self,
        window: int,
        bits: Sequence[int],
        state: np.ndarray,
        added: Iterator[EventBlock],
        dropped: Iterator[EventBlock],
    ) -> None:
        self._window, self._bits, self._state = window, np.array(bits), state
        self._streams = [added, dropped if window else iter(())]
        self._chunks = [NO_EVENTS] * 2
        # where the rows, the added and the dropped events are, and whether there are further ones
        self._at, self._more = np.zeros(3, np.int64), np.ones(2, np.bool_)

    def go_on(
        self,
        cuts: np.ndarray,
        numbers: np.ndarray,
        flags: np.ndarray,
        counts: np.ndarray,
        last: np.ndarray,
    ) -> None:
        """Sum up the events before further rows.

        Args:
            cuts: int64 [n], the times before which events count; rising.
            numbers: int32 [n], those of the rows' keys; -1 without one.
            flags: Unsigned [n].
            counts: Integers [sums, n], the result, where there is a key.
            last: int64 [n], likewise the time of the last event.
        """
        self._at[0] = 0
        while self._at[0] < len(cuts):
            added, dropped = self._chunks
            _sum_rows(
                (cuts, numbers, flags, counts, last),
                (added.known, added.happened, added.flags, added.numbers),
                (dropped.known, dropped.flags, dropped.numbers),
                self._window, self._bits, self._state, self._at, self._more,
            )  # fmt: skip
            for place, chunk in enumerate(self._chunks):
                if self._at[1 + place] == len(chunk.known):
                    self._refill(place)

    def _refill(self, place: int) -> None:
        events = next(self._streams[place], None)
        self._more[place] = events is not None
        if events is not None:
            self._chunks[place], self._at[1 + place] = events, 0

    def finish(self, end: int) -> np.ndarray:
        """Return the state for a time."""
        row = np.array([end]), np.array([-1], np.int32), np.zeros(1, self._chunks[0].flags.dtype)
        self.go_on(*row, np.empty((len(self._bits), 1), np.int32), np.empty(1, np.int64))
        return self._state

    def iterate_left(self) -> Iterator[EventBlock]:
        """Yield the events that were not added."""
        yield self._chunks[0].take(slice(self._at[1], None))
        yield from self._streams[0]


@compiled()
def _sum_rows(
    rows: tuple,
    added: tuple,
    dropped: tuple,
    window: int,
    bits: np.ndarray,
    state: np.ndarray,
    at: np.ndarray,
    more: np.ndarray,
) -> None:
    """Sum up events until there are no more rows, or no more events in the chunk."""
    cuts, row_numbers, row_flags, counts, last = rows
    known, happened, flags, numbers = added
    known_of_dropped, flags_of_dropped, numbers_of_dropped = dropped
    size = len(bits)
    event, drop = at[1], at[2]
    for row in range(at[0], len(cuts)):
        cut = cuts[row]
        while event < len(known) and known[event] < cut:
            number = numbers[event]
            if number >= 0:
                for s in range(size):
                    state[number, s] += flags[event] >> bits[s] & 1
                state[number, size] = max(state[number, size], happened[event])
            event += 1
        while drop < len(known_of_dropped) and known_of_dropped[drop] < cut - window:
            number = numbers_of_dropped[drop]
            if number >= 0:
                for s in range(size):
                    state[number, s] -= flags_of_dropped[drop] >> bits[s] & 1
            drop += 1
        at[1], at[2] = event, drop
        if (event == len(known) and more[0]) or (drop == len(known_of_dropped) and more[1]):
            at[0] = row
            return
        number = row_numbers[row]
        if number >= 0:
            for s in range(size):
                counts[s, row] = state[number, s]
            last[row] = state[number, size]
            if row_flags[row] >> TRAIN & 1:
                for kind in range(EVENT, EVENT + state.shape[1] - size - 1):
                    state[number, size + kind] += row_flags[row] >> kind & 1
    at[0] = len(cuts)
