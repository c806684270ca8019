"""Sum up the events before each row, partition by partition."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import fsync_directory
from nvt_torchrec.base.files.mapping import write_array
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.etl.events.extract import (
    FIRST_LABEL,
    KEY,
    KNOWN,
    ROW,
    TIME,
    TRAIN,
    EventFiles,
)
from nvt_torchrec.etl.events.label_rates import sum_keys
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import DAY
from nvt_torchrec.formats.feature_spec.events import parse_duration

#: About how many rows a partition has.
PARTITION_ROWS = 1 << 20
#: The time of what is known before every row.
BEFORE_ALL = -(2**62)
#: The time of the last event of a key without one.
NEVER = -(2**63)


@dataclasses.dataclass(frozen=True)
class GroupSums:
    """What is summed up over the events of a group.

    Attributes:
        key: The columns of its key.
        sums: Of each sum, the window in microseconds (0: always), and the number of the label whose
            events are counted (-1: all).
        histories: The numbers of its histories.
    """

    key: tuple[str, ...]
    sums: tuple[tuple[int, int], ...]
    histories: tuple[int, ...]

    @property
    def last(self) -> int:
        """The row of an array of sums with the time of the last event; before it are the counts."""
        return len(self.sums)

    @property
    def rows(self) -> int:
        """The rows of an array of sums; the last ones are the numbers of events of histories."""
        return len(self.sums) + 1 + len(self.histories)

    @property
    def longest_window(self) -> int:
        """The longest window in microseconds; 0 without one."""
        return max((window for window, _ in self.sums), default=0)


def sums_of_groups(spec: FeatureSpec) -> list[GroupSums]:
    """Return what is summed up for the aggregates of each group."""
    groups = []
    for key in spec.groups:
        sums: dict[tuple[int, int], None] = {}
        for column in spec.aggregates:
            aggregate = column.aggregate
            if aggregate is None or aggregate.key != key:
                continue
            window = parse_duration(aggregate.window)
            sums[window, -1] = None
            if aggregate.label:
                sums[window, spec.labels.index(aggregate.label)] = None
        histories = [i for i, rule in enumerate(spec.histories) if rule.key == key]
        groups.append(GroupSums(key, tuple(sums), tuple(histories)))
    return groups


@dataclasses.dataclass(frozen=True)
class EarlierEvents:
    """What is kept of a group's events of earlier days; of a key, those long ago are summed up.

    Attributes:
        key: int64 [n], rising.
        known: int64 [n], from when it is known; rising for each key.
        happened: int64 [n], the time of the last one.
        counts: int64 [1 + labels, n]: how many events there are, and how many with each label.
    """

    key: np.ndarray
    known: np.ndarray
    happened: np.ndarray
    counts: np.ndarray

    @classmethod
    def none(cls, labels: int) -> EarlierEvents:
        """Return no events."""
        empty = np.empty(0, np.int64)
        return cls(empty, empty, empty, np.empty((1 + labels, 0), np.int64))

    def take(self, places: slice | np.ndarray) -> EarlierEvents:
        """Return the events at some places."""
        return EarlierEvents(
            self.key[places], self.known[places], self.happened[places], self.counts[:, places]
        )

    @classmethod
    def concatenate(cls, parts: Sequence[EarlierEvents]) -> EarlierEvents:
        """Return the events of several one after the other."""
        return cls(
            np.concatenate([part.key for part in parts]),
            np.concatenate([part.known for part in parts]),
            np.concatenate([part.happened for part in parts]),
            np.concatenate([part.counts for part in parts], axis=1),
        )


@dataclasses.dataclass(frozen=True)
class Summed:
    """The result of a group.

    Attributes:
        keys: int64 [keys], all keys so far, rising.
        sums: int64 [sums, keys], what their events sum up to after the last row.
        kept: What is kept for further days.
        row_keys: int64 [n], the keys of the new rows, rising.
        moments: float64 [labels, 5] of the training rows, see :func:`.label_rates.sum_keys`.
    """

    keys: np.ndarray
    sums: np.ndarray
    kept: EarlierEvents
    row_keys: np.ndarray
    moments: np.ndarray


@dataclasses.dataclass(frozen=True)
class EventLog:
    """The events of a log.

    Attributes:
        spec: The columns.
        files: The events of its blocks.
        names: The names of the blocks, in the order of the log.
        earlier: Of each group, the events of days before.
        tails: Of each history, its events of days before: int64 [2, n], their keys, rising, and
            from when they are known.
        threads: How many partitions are summed up at once.
    """

    spec: FeatureSpec
    files: EventFiles
    names: list[str]
    earlier: list[EarlierEvents]
    tails: list[np.ndarray]
    threads: int

    def map_events(self, group: int) -> list[np.ndarray]:
        """Map the events of a group's blocks."""
        return [np.load(self.files.events(n, group), mmap_mode="r") for n in self.names]

    def bounds(self) -> tuple[int, int, int]:
        """Return how many rows there are, and the first and the last time."""
        arrays = [array[TIME] for array in self.map_events(0) if array.shape[1]]
        if not arrays:
            raise BadInputError("there is no well-formed row", "correct the input")
        rows = sum(map(len, arrays))
        return rows, min(int(a.min()) for a in arrays), max(int(a.max()) for a in arrays)


def cut_times(spec: FeatureSpec, times: np.ndarray) -> np.ndarray:
    """Return the times before which events count for rows of these times, int64 [n]."""
    assert spec.events is not None
    return times // DAY * DAY if spec.events.cut == "day" else np.asarray(times)


def end_of(spec: FeatureSpec, newest: int) -> int:
    """Return the time for which a workflow sums up what happened: after the newest row.

    With ``cut = "day"`` it is the begin of the next day, for whose rows the sums are right.
    """
    assert spec.events is not None
    return newest // DAY * DAY + DAY if spec.events.cut == "day" else newest + 1


def partitions(rows: int) -> list[tuple[int, int | None]]:
    """Return the ranges of hashes of the partitions of so many rows; the last one is open."""
    count = 1
    while count * PARTITION_ROWS < rows:
        count *= 2
    lows = [-(2**63) + i * (2**64 // count) for i in range(count)]
    return list(zip(lows, [*lows[1:], None], strict=True))


def sum_up(
    log: EventLog, rows: int, newest: int, report: Callable[[float], object] = lambda rows: None
) -> Iterator[Summed]:
    """Write what the events before each row sum up to, beside each block; yield each group's sums.

    Args:
        log: The events.
        rows: How many there are.
        newest: The time of the newest row, also of earlier days.
        report: Called with the number of rows done since the last call, counting a row once.
    """
    for group, wanted in enumerate(sums_of_groups(log.spec)):
        events = log.map_events(group)
        outputs = [
            _create(log.files.sums(name, group), (wanted.rows, array.shape[1]))
            for name, array in zip(log.names, events, strict=True)
        ]
        work = functools.partial(_sum_partition, log, group, wanted, events, outputs, newest)
        parts = []
        for summed, done in map_in_order(work, partitions(rows), log.threads, "events"):
            parts.append(summed)
            report(done / len(log.spec.groups))
        for array in outputs:
            array.flush()
        yield Summed(
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part.sums for part in parts], axis=1),
            EarlierEvents.concatenate([part.kept for part in parts]),
            np.concatenate([part.row_keys for part in parts]),
            np.sum([part.moments for part in parts], axis=0),
        )
    fsync_directory(log.files.directory)


def place_keys(keys: np.ndarray, bounds: tuple[int, int | None]) -> tuple[int, int]:
    """Return where the keys of a partition begin and end among rising keys."""
    low, high = bounds
    end = len(keys) if high is None else int(np.searchsorted(keys, high))
    return int(np.searchsorted(keys, low)), end


def read_partition(
    events: Sequence[np.ndarray], bounds: tuple[int, int | None]
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Read the events of a partition.

    Args:
        events: The events of each block, int64 [4, n].
        bounds: The partition, see :func:`partitions`.

    Returns:
        Where they begin and end in each block; all of them, int64 [4, m].
    """
    ranges = [place_keys(array[KEY], bounds) for array in events]
    pieces = [array[:, begin:end] for array, (begin, end) in zip(events, ranges, strict=True)]
    return ranges, np.concatenate(pieces, axis=1)


def order_events(key: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Return the order by key, then time, of int64 [n] each; equal ones keep their order.

    Blocks are sorted by key, and most logs by time: merging is faster than sorting.
    """
    order = np.argsort(key, kind="stable")
    later = (np.diff(time[order]) >= 0) | (np.diff(key[order]) > 0)
    return order if later.all() else np.lexsort((time, key))


def choose_events(spec: FeatureSpec, number: int, data: np.ndarray) -> np.ndarray:
    """Return the places of the events of a history in int64 [4, n]."""
    rule, chosen = spec.histories[number], data[KEY] != 0
    if rule.where:
        chosen &= (data[ROW] >> (FIRST_LABEL + spec.labels.index(rule.where)) & 1).astype(bool)
    return np.flatnonzero(chosen)


def _create(path: Path, shape: tuple[int, int]) -> np.memmap:
    write_array(path, np.empty((shape[0], 0), np.int64))  # checks that it can be written
    if not shape[1]:
        return np.load(path, mmap_mode="r")
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.int64, shape=shape)


def _sum_partition(
    log: EventLog,
    group: int,
    wanted: GroupSums,
    events: list[np.ndarray],
    outputs: list[np.memmap],
    newest: int,
    bounds: tuple[int, int | None],
) -> tuple[Summed, int]:
    ranges, data = read_partition(events, bounds)
    there = np.flatnonzero(data[KEY] != 0)  # rows without a key are no events
    labels = len(log.spec.labels)
    counts = np.ones((1 + labels, len(there)), np.int64)
    for label in range(labels):
        counts[1 + label] = data[ROW, there] >> (FIRST_LABEL + label) & 1
    new = EarlierEvents(data[KEY, there], data[KNOWN, there], data[TIME, there], counts)
    earlier = log.earlier[group]
    before = earlier.take(slice(*place_keys(earlier.key, bounds)))
    every = EarlierEvents.concatenate([before, new])
    every = every.take(order_events(every.key, every.known))
    # each row, and at the end one for each key, for inference; by key and time
    keys = np.unique(every.key)
    row_keys = np.concatenate([data[KEY, there], keys])
    end = np.full(len(keys), end_of(log.spec, newest), np.int64)
    cuts = np.concatenate([cut_times(log.spec, data[TIME, there]), end])
    order = order_events(row_keys, cuts)
    sums = np.zeros((wanted.rows, len(order)), np.int64)
    sums[wanted.last] = NEVER
    row_keys, cuts = row_keys[order], cuts[order]
    _sum_rows(
        row_keys,
        cuts,
        every.key,
        every.known,
        every.happened,
        every.counts,
        np.array([window for window, _ in wanted.sums], np.int64),
        np.array([1 + label for _, label in wanted.sums], np.int64),
        sums[: wanted.last + 1],
    )
    for number, row in zip(wanted.histories, sums[wanted.last + 1 :], strict=True):
        tail = log.tails[number]
        of_history = tail[:, slice(*place_keys(tail[KEY], bounds))]
        chosen = choose_events(log.spec, number, data)
        key, known = np.concatenate([of_history, data[[KEY, KNOWN]][:, chosen]], axis=1)
        order_of_events = order_events(key, known)
        key, known = key[order_of_events], known[order_of_events]
        counted = np.zeros((2, len(row_keys)), np.int64)
        ones, always = np.ones((1, len(key)), np.int64), np.zeros(1, np.int64)
        _sum_rows(row_keys, cuts, key, known, known, ones, always, always, counted)
        row[:] = counted[0]
    by_row = np.empty_like(sums)
    by_row[:, order] = sums
    results = np.zeros((wanted.rows, data.shape[1]), np.int64)
    results[wanted.last] = NEVER
    results[:, there] = by_row[:, : len(there)]
    at = 0
    for output, (begin, stop) in zip(outputs, ranges, strict=True):
        if stop > begin:
            output[:, begin:stop] = results[:, at : at + stop - begin]
        at += stop - begin
    horizon = int(cut_times(log.spec, np.array([newest]))[0]) - wanted.longest_window
    train = (data[ROW, there] >> TRAIN & 1).astype(bool)
    summed = Summed(
        keys,
        by_row[:, len(there) :],
        _shorten(every, horizon),
        np.unique(data[KEY, there]),
        sum_keys(new.key[train], counts[:, train]),
    )
    return summed, data.shape[1]


@compiled()
def _sum_rows(
    row_keys: np.ndarray,
    cuts: np.ndarray,
    keys: np.ndarray,
    known: np.ndarray,
    happened: np.ndarray,
    counts: np.ndarray,
    windows: np.ndarray,
    kinds: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Sum up the events that are known before each row.

    Args:
        row_keys: int64 [n], the keys of the rows, rising.
        cuts: int64 [n], the times before which events count; rising for each key.
        keys: int64 [m], the keys of the events, rising.
        known: int64 [m], from when they are known; rising for each key.
        happened: int64 [m], their times.
        counts: int64 [kinds, m], what each event counts.
        windows: int64 [s], of each sum, how long an event counts; 0: always.
        kinds: int64 [s], of each sum, the row of ``counts``.
        sums: int64 [s + 1, n], the result: the sums, and the time of the last event.
    """
    size = len(windows)
    current = np.zeros(size, np.int64)
    dropped = np.zeros(size, np.int64)
    event = 0
    row = 0
    while row < len(row_keys):
        key = row_keys[row]
        while event < len(keys) and keys[event] < key:
            event += 1
        current[:] = 0
        dropped[:] = event
        last = NEVER
        while row < len(row_keys) and row_keys[row] == key:
            cut = cuts[row]
            while event < len(keys) and keys[event] == key and known[event] < cut:
                for s in range(size):
                    current[s] += counts[kinds[s], event]
                last = max(last, happened[event])
                event += 1
            for s in range(size):
                if windows[s] > 0:
                    while dropped[s] < event and known[dropped[s]] < cut - windows[s]:
                        current[s] -= counts[kinds[s], dropped[s]]
                        dropped[s] += 1
                sums[s, row] = current[s]
            sums[size, row] = last
            row += 1


def _shorten(events: EarlierEvents, horizon: int) -> EarlierEvents:
    """Sum up, for each key, the events that are known before a time; others are kept."""
    old = np.flatnonzero(events.known < horizon)
    if not len(old):
        return events
    first = np.flatnonzero(np.diff(events.key[old], prepend=events.key[old[0]] - 1))
    summed = EarlierEvents(
        events.key[old][first],
        np.full(len(first), BEFORE_ALL, np.int64),
        np.maximum.reduceat(events.happened[old], first),
        np.add.reduceat(events.counts[:, old], first, axis=1),
    )
    rest = events.take(np.flatnonzero(events.known >= horizon))
    both = EarlierEvents.concatenate([summed, rest])
    return both.take(np.argsort(both.key, kind="stable"))
