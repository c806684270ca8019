"""Sum up the events before each row, partition by partition."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from nvt_torchrec.base.arrays import mark_begins
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import fsync_directory
from nvt_torchrec.base.files.mapping import write_array
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.etl.events.earlier_events import EarlierEvents
from nvt_torchrec.etl.events.extract import (
    FIRST_LABEL,
    KEY,
    KNOWN,
    ROW,
    TIME,
    TRAIN,
    EventFiles,
)
from nvt_torchrec.etl.events.partitions import (
    choose_events,
    order_events,
    partitions,
    place_keys,
    read_partition,
)
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import DAY
from nvt_torchrec.formats.feature_spec.events import parse_duration

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
class Summed:
    """The result of a group.

    Attributes:
        keys: int64 [keys], all keys so far, rising.
        sums: int64 [sums, keys], what their events sum up to after the last row; no histories.
        row_keys: int64 [n], the keys of the new rows, rising.
        trained: int64 [1 + labels, n], how many rows for training these have, and with each label.
        kept: What is kept for further days.
    """

    keys: np.ndarray
    sums: np.ndarray
    row_keys: np.ndarray
    trained: np.ndarray
    kept: EarlierEvents


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
            np.concatenate([part.row_keys for part in parts]),
            np.concatenate([part.trained for part in parts], axis=1),
            EarlierEvents.concatenate([part.kept for part in parts]),
        )
    fsync_directory(log.files.directory)


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
    results = np.zeros((wanted.rows, data.shape[1]), np.int64)
    results[wanted.last] = NEVER
    places = np.flatnonzero(data[KEY])  # rows without a key are no events
    rows = data if len(places) == len(results[0]) else np.take(data, places, axis=1)
    counts = np.ones((1 + len(log.spec.labels), len(places)), np.int64)
    for label, count in enumerate(counts[1:]):
        count[:] = rows[ROW] >> (FIRST_LABEL + label) & 1
    every = EarlierEvents(rows[KEY], rows[KNOWN], rows[TIME], counts)
    earlier = log.earlier[group]
    begin, end = place_keys(earlier.key, bounds)
    if begin < end:
        every = EarlierEvents.concatenate([earlier.take(slice(begin, end)), every])
    every = every.take(order_events(every.key, every.known))
    keys = every.key[mark_begins(every.key)]
    # of the rows by key and time
    cuts = cut_times(log.spec, rows[TIME])
    order = order_events(rows[KEY], cuts)
    row_keys, cuts, places = rows[KEY][order], cuts[order], places[order]
    at_end = np.zeros((wanted.last + 1, len(keys)), np.int64)
    _sum_rows(
        row_keys,
        cuts,
        places,
        keys,
        end_of(log.spec, newest),
        every.key,
        every.known,
        every.happened,
        every.counts,
        np.array([window for window, _ in wanted.sums], np.int64),
        np.array([1 + label for _, label in wanted.sums], np.int64),
        results,
        at_end,
    )
    for number, result in zip(wanted.histories, results[wanted.last + 1 :], strict=True):
        tail = log.tails[number]
        of_history = tail[:, slice(*place_keys(tail[KEY], bounds))]
        chosen = choose_events(log.spec, number, data)
        key, known = np.concatenate([of_history, data[[KEY, KNOWN]][:, chosen]], axis=1)
        by_time = order_events(key, known)
        _count_rows(row_keys, cuts, places, key[by_time], known[by_time], result)
    at = 0
    for output, (begin, stop) in zip(outputs, ranges, strict=True):
        if stop > begin:
            output[:, begin:stop] = results[:, at : at + stop - begin]
        at += stop - begin
    first = mark_begins(row_keys)
    trained = counts * (rows[ROW] >> TRAIN & 1)
    horizon = int(cut_times(log.spec, np.array([newest]))[0]) - wanted.longest_window
    summed = Summed(
        keys,
        at_end,
        row_keys[first],
        np.add.reduceat(trained[:, order], np.flatnonzero(first), axis=1),
        every.shorten(horizon),
    )
    return summed, data.shape[1]


@compiled()
def _sum_rows(
    row_keys: np.ndarray,
    cuts: np.ndarray,
    places: np.ndarray,
    every: np.ndarray,
    end: int,
    keys: np.ndarray,
    known: np.ndarray,
    happened: np.ndarray,
    counts: np.ndarray,
    windows: np.ndarray,
    kinds: np.ndarray,
    sums: np.ndarray,
    at_end: np.ndarray,
) -> None:
    """Sum up the events that are known before each row.

    Args:
        row_keys: int64 [n], the keys of the rows, rising.
        cuts: int64 [n], the times before which events count; rising for each key.
        places: int64 [n], where the sums of each row are written.
        every: int64 [keys], the distinct keys of the events, rising; those of the rows are there.
        end: A time after all rows.
        keys: int64 [m], the keys of the events, rising.
        known: int64 [m], from when they are known; rising for each key.
        happened: int64 [m], their times.
        counts: int64 [kinds, m], what each event counts.
        windows: int64 [s], of each sum, how long an event counts; 0: always.
        kinds: int64 [s], of each sum, the row of ``counts``.
        sums: int64 [at least s + 1, n], the result: the sums, and the time of the last event.
        at_end: int64 [s + 1, keys], likewise of each key for the time ``end``.
    """
    size = len(windows)
    current = np.zeros(size, np.int64)
    dropped = np.zeros(size, np.int64)
    event = row = 0
    for number in range(len(every)):
        key = every[number]
        current[:] = 0
        dropped[:] = event
        last = NEVER
        is_end = False
        while not is_end:
            is_end = row == len(row_keys) or row_keys[row] != key
            cut = end if is_end else cuts[row]
            while event < len(keys) and keys[event] == key and known[event] < cut:
                for s in range(size):
                    current[s] += counts[kinds[s], event]
                last = max(last, happened[event])
                event += 1
            target, place = (at_end, number) if is_end else (sums, places[row])
            for s in range(size):
                if windows[s] > 0:
                    while dropped[s] < event and known[dropped[s]] < cut - windows[s]:
                        current[s] -= counts[kinds[s], dropped[s]]
                        dropped[s] += 1
                target[s, place] = current[s]
            target[size, place] = last
            row += not is_end
        while event < len(keys) and keys[event] == key:
            event += 1


@compiled()
def _count_rows(
    row_keys: np.ndarray,
    cuts: np.ndarray,
    places: np.ndarray,
    keys: np.ndarray,
    known: np.ndarray,
    result: np.ndarray,
) -> None:
    """Count the events that are known before each row; the arguments are as above."""
    event = first = 0
    for row in range(len(row_keys)):
        if row == 0 or row_keys[row] != row_keys[row - 1]:
            while event < len(keys) and keys[event] < row_keys[row]:
                event += 1
            first = event
        while event < len(keys) and keys[event] == row_keys[row] and known[event] < cuts[row]:
            event += 1
        result[places[row]] = event - first
