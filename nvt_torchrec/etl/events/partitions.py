"""Rows and events of a group by ranges of its keys, on disk, so that each range fits into memory.

The numbers of keys follow their hashes, so a range of numbers is a partition by hash, and what is
made of the partitions, one after the other, is in the order of the keys. Within a partition rows
and events stay in the order of time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from nvt_torchrec.base.arrays import to_offsets
from nvt_torchrec.base.files.atomic import delete
from nvt_torchrec.base.files.growing import create_array
from nvt_torchrec.base.files.mapping import map_array
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.etl.events import timeline
from nvt_torchrec.etl.events.extract import EventFiles, flag_type
from nvt_torchrec.etl.events.timeline import EventBlock, EventLog
from nvt_torchrec.workflows.event_groups import cut_times

#: About how many keys and events a partition has, unless a single key has more events.
PARTITION_EVENTS = 1 << 18
_ROW_ARRAYS = ("row_cuts", "row_numbers", "row_flags")
_EVENT_ARRAYS = tuple(field.name for field in dataclasses.fields(EventBlock))


class KeyRanges:
    """Where the rows or events of each range of keys are, and where the next ones go.

    Args:
        bounds: int64 [ranges + 1], the numbers of the keys at which ranges begin, and the last one
            ends.
        counts: int64 [keys], how many of them each key has.
        without_key: How many have none; they are with the first range.

    Attributes:
        offsets: int64 [ranges + 1], where those of each range begin, and the last ones end.
    """

    def __init__(self, bounds: np.ndarray, counts: np.ndarray, without_key: int = 0) -> None:
        self._bounds = bounds
        sizes = [counts[begin:end].sum() for begin, end in itertools.pairwise(bounds)]
        sizes[0] += without_key
        self.offsets = to_offsets(np.array(sizes, np.int64))
        self._next = self.offsets[:-1].copy()

    def place(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the next rows or events go, and the numbers of their keys in their ranges.

        Args:
            numbers: int32 [n], those of their keys; negative without one.

        Returns:
            int64 [n]; int32 [n], -1 without a key.
        """
        positions, in_range = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int32)
        _place(numbers, self._bounds, self._next, positions, in_range)
        return positions, in_range


def cut_keys(counts: np.ndarray) -> np.ndarray:
    """Return ranges of keys that have about :data:`PARTITION_EVENTS` keys and events each.

    Args:
        counts: int64 [kinds, keys], how many events of some kinds each key has.

    Returns:
        int64 [ranges + 1], where they begin, and the last one ends; there is at least one range.
    """
    bounds, end, num_keys = [0], 0, counts.shape[1]
    while end < num_keys:
        end = int(_end_range(counts, end, PARTITION_EVENTS))
        bounds.append(end)
    return np.array(bounds if num_keys else [0, 0], np.int64)


def count_numbers(numbers: np.ndarray, counts: np.ndarray) -> int:
    """Count events by the numbers of their keys; return how many have none.

    Args:
        numbers: Integers [n]; negative without a key.
        counts: int64 [keys], to which they are added.
    """
    return int(_count(np.ascontiguousarray(numbers), counts))


def count_keys(events: np.ndarray, keys: np.ndarray, counts: np.ndarray) -> None:
    """Count events of earlier days by their keys.

    Args:
        events: int64 [n], the keys of the events.
        keys: int64 [keys], all keys, rising.
        counts: int64 [keys], to which they are added.
    """
    for piece in iterate_slices(0, len(events)):
        count_numbers(np.searchsorted(keys, events[piece]), counts)


def find_keys(sorted_keys: np.ndarray, keys: np.ndarray) -> slice:
    """Return where keys of a range are in a sorted array.

    Args:
        sorted_keys: int64 [n], which may have a key several times.
        keys: int64 [keys], all keys of the range, rising; none: nothing is found.
    """
    if not len(keys):
        return slice(0, 0)
    first = np.searchsorted(sorted_keys, keys[0])
    return slice(int(first), int(np.searchsorted(sorted_keys, keys[-1], side="right")))


def cut_by_key(keys: np.ndarray) -> Iterator[slice]:
    """Yield slices of events that are sorted by key, each with all events of its keys.

    Args:
        keys: int64 [n], rising: the key of each event.
    """
    begin = 0
    while begin < len(keys):
        end = min(begin + PARTITION_EVENTS, len(keys))
        end = int(np.searchsorted(keys, keys[end - 1], side="right"))
        yield slice(begin, end)
        begin = end


def iterate_slices(begin: int, end: int) -> Iterator[slice]:
    """Yield slices of about a chunk each, of everything from ``begin`` to ``end``."""
    for first in range(begin, end, timeline.CHUNK_ROWS):
        yield slice(first, min(first + timeline.CHUNK_ROWS, end))


class PartitionFiles:
    """The rows and events of a group by partition, in files that are deleted at the end.

    Args:
        files: Those of a run's events.
        group: The group.
    """

    def __init__(self, files: EventFiles, group: int) -> None:
        self._files, self._group = files, group

    def _path(self, name: str) -> Path:
        return self._files.scratch(self._group, name)

    def create_counts(self, kinds: int, keys: int) -> np.ndarray:
        """Create counts of the events of each key, int64 [kinds, keys]."""
        return create_array(self._path("counts"), (kinds, keys), np.int64)

    def write_rows(self, log: EventLog, ranges: KeyRanges) -> None:
        """Write the rows of a log, and beside each of its blocks where its rows are."""
        files, group, total = self._files, self._group, int(ranges.offsets[-1])
        cuts = create_array(self._path("row_cuts"), (total,), np.int64)
        numbers = create_array(self._path("row_numbers"), (total,), np.int32)
        flags = create_array(self._path("row_flags"), (total,), flag_type(log.spec))
        for name in log.names:
            (rows,) = log.map(files.flags(name)).shape
            create_array(files.positions(name, group), (rows,), np.int64)
        for chunk in log.iterate_rows():
            blocks = [log.rows_of(group, number) for number in chunk.blocks]
            positions, in_range = ranges.place(chunk.take([block.numbers for block in blocks]))
            times = chunk.take([block.happened for block in blocks])
            cuts[positions] = cut_times(log.spec, times)
            numbers[positions] = in_range
            flags[positions] = chunk.take([block.flags for block in blocks])
            outputs = [files.positions(log.names[number], group) for number in chunk.blocks]
            chunk.put(positions, [map_array(output, write=True) for output in outputs])

    def write_events(self, chunks: Iterable[EventBlock], ranges: KeyRanges) -> None:
        """Write events that have a key, which come in the order in which they are known."""
        arrays: dict[str, np.ndarray] = {}
        for chunk in chunks:
            events = chunk.take(chunk.numbers >= 0) if (chunk.numbers < 0).any() else chunk
            positions, in_range = ranges.place(events.numbers)
            for name, column in vars(dataclasses.replace(events, numbers=in_range)).items():
                if column is None:
                    continue
                if name not in arrays:
                    shape = (*column.shape[:-1], int(ranges.offsets[-1]))
                    arrays[name] = create_array(self._path(name), shape, column.dtype)
                arrays[name][..., positions] = column

    def read_rows(self, rows: slice) -> Iterator[tuple[slice, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield which rows come next, and their cuts, numbers and flags."""
        cuts, numbers, flags = (map_array(self._path(name)) for name in _ROW_ARRAYS)
        for piece in iterate_slices(rows.start, rows.stop):
            yield piece, cuts[piece], numbers[piece], flags[piece]

    def read_events(self, events: slice) -> list[EventBlock]:
        """Map the events of a partition as one block; none without events."""
        if events.start == events.stop:
            return []
        columns: dict[str, np.ndarray] = {}
        for name in _EVENT_ARRAYS:
            path = self._path(name)
            if path.exists():  # only events of histories have ids
                columns[name] = map_array(path)[..., events]
        return [EventBlock(**columns)]

    def delete(self) -> None:
        """Delete the files."""
        for name in ("counts", *_ROW_ARRAYS, *_EVENT_ARRAYS):
            delete(self._path(name))


@compiled()
def _count(numbers: np.ndarray, counts: np.ndarray) -> int:
    """Count events by key; return how many have none."""
    without_key = 0
    for number in numbers:
        if number < 0:
            without_key += 1
        else:
            counts[number] += 1
    return without_key


@compiled()
def _end_range(counts: np.ndarray, begin: int, maximum: int) -> int:
    """Return where the range of keys ends that begins with one."""
    size = 0
    for key in range(begin, counts.shape[1]):
        size += 1
        for kind in range(len(counts)):
            size += counts[kind, key]
        if size > maximum and key > begin:
            return key
    return counts.shape[1]


@compiled()
def _place(
    numbers: np.ndarray,
    bounds: np.ndarray,
    following: np.ndarray,
    positions: np.ndarray,
    in_range: np.ndarray,
) -> None:
    # a counting sort: following[range] is where the next one of a range goes
    for i in range(len(numbers)):
        first, last = 0, len(following) - 1
        while first < last:  # the last range that begins at or before the number
            middle = (first + last + 1) // 2
            if bounds[middle] <= numbers[i]:
                first = middle
            else:
                last = middle - 1
        positions[i] = following[first]
        following[first] += 1
        in_range[i] = numbers[i] - bounds[first] if numbers[i] >= 0 else -1


def sort_by_key(numbers: np.ndarray, keys: int) -> np.ndarray:
    """Return the indices of events by rising key; ties keep their order.

    Args:
        numbers: Integers [n], those of their keys.
        keys: How many keys there are.
    """
    counts = np.bincount(numbers, minlength=keys)
    order = np.empty(len(numbers), np.int64)
    _write_order(numbers, np.cumsum(counts) - counts, order)
    return order


@compiled()
def _write_order(numbers: np.ndarray, begins: np.ndarray, order: np.ndarray) -> None:
    # a counting sort: begins[key] is where the next event of a key goes
    for event in range(len(numbers)):
        order[begins[numbers[event]]] = event
        begins[numbers[event]] += 1
