"""Events of all blocks in the order of time, a chunk at a time, and the numbers of their keys."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import fsync_directory
from nvt_torchrec.base.files.mapping import map_array, write_array
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.etl.events.extract import EventFiles, is_rising
from nvt_torchrec.formats.feature_spec import FeatureSpec

#: About how many events a chunk has: what is computed of them stays in a processor's cache.
CHUNK_ROWS = 1 << 17
#: How many arrays are mapped at once.
_OPEN = 256


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
        counts = np.ascontiguousarray(self.counts[:, places])
        return EarlierEvents(self.key[places], self.known[places], self.happened[places], counts)


@dataclasses.dataclass(frozen=True)
class EventBlock:
    """Events of a group, in the order in which they are known.

    Attributes:
        known: int64 [n], from when they are known, in microseconds since 1970.
        happened: int64 [n], their times.
        flags: Unsigned [n], see :data:`workflows.event_sums.TRAIN`.
        numbers: int32 [n], those of their keys in the group; -1 without a key.
        ids: int32 [columns of histories, n]; None where nobody needs them.
    """

    known: np.ndarray
    happened: np.ndarray
    flags: np.ndarray
    numbers: np.ndarray
    ids: np.ndarray | None = None

    def take(self, places: slice | np.ndarray) -> EventBlock:
        """Return the events at some places."""
        return EventBlock(*(column[..., places] for column in self.columns))

    @property
    def columns(self) -> list[np.ndarray]:
        """The columns that are there, in the order of the attributes."""
        return [column for column in vars(self).values() if column is not None]


NO_EVENTS = EventBlock(*(np.empty(0, kind) for kind in (np.int64, np.int64, np.uint8, np.int32)))


@dataclasses.dataclass(frozen=True)
class EventChunk:
    """Events of several blocks.

    Attributes:
        pieces: The number of each block, and the places of its events.
        order: The order of the events, of the pieces one after the other.
    """

    pieces: list[tuple[int, slice | np.ndarray]]
    order: slice | np.ndarray

    @property
    def blocks(self) -> list[int]:
        """The numbers of the blocks."""
        return [number for number, _ in self.pieces]

    def take(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the values of the events, which are in arrays of their blocks, [.., n]."""
        parts = [a[..., places] for a, (_, places) in zip(arrays, self.pieces, strict=True)]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return np.ascontiguousarray(values[..., self.order])

    def put(self, values: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        """Write values [.., n] of the events to arrays of their blocks."""
        if not isinstance(self.order, slice):
            ordered = np.empty_like(values)
            ordered[..., self.order] = values
            values = ordered
        begin = 0
        for array, (_, places) in zip(arrays, self.pieces, strict=True):
            count = places.stop - places.start if isinstance(places, slice) else len(places)
            array[..., places] = values[..., begin : begin + count]
            begin += count


def cut_chunks(blocks: int, read: Callable[[int], np.ndarray]) -> Iterator[EventChunk]:
    """Yield all events in the order of time; of the same time, in the order of the blocks.

    All events of one time are in one chunk. Blocks of which a chunk has no event are not read.

    Args:
        blocks: How many blocks there are.
        read: Returns the times of a block's events, int64 [n], rising.
    """
    step = max(1, CHUNK_ROWS // 256)
    sample = np.sort(np.concatenate([read(number)[::step] for number in range(blocks)]))
    bounds = np.unique(sample[:: CHUNK_ROWS // step])[1:]
    cuts = [
        np.concatenate([[0], np.searchsorted(read(number), bounds), [len(read(number))]])
        for number in range(blocks)
    ]
    for begins, ends in zip(np.stack(cuts, 1)[:-1], np.stack(cuts, 1)[1:], strict=True):
        there = np.flatnonzero(ends > begins).tolist()
        if there:
            chunk = EventChunk([(i, slice(begins[i], ends[i])) for i in there], slice(None))
            times = chunk.take([read(i) for i in there])
            order = slice(None) if is_rising(times) else np.argsort(times, kind="stable")
            yield dataclasses.replace(chunk, order=order)


class EventLog:
    """The events of a log; several threads may use it.

    Args:
        spec: The columns.
        files: The events of its blocks.
        names: The names of the blocks, in the order of the log.
    """

    def __init__(self, spec: FeatureSpec, files: EventFiles, names: Sequence[str]) -> None:
        self.spec, self.files, self.names = spec, files, names
        # a log of many blocks has more files than a process may open
        self.map = functools.lru_cache(_OPEN)(map_array)
        self._exists = functools.cache(Path.exists)

    @functools.cached_property
    def bounds(self) -> tuple[int, int, int]:
        """How many rows there are, and the first and the last time."""
        found = [self._bounds(name) for name in self.names]
        if not any(rows for rows, _, _ in found):
            raise BadInputError("there is no well-formed row", "correct the input")
        rows, first, last = zip(*(of_block for of_block in found if of_block[0]), strict=True)
        return sum(rows), min(first), max(last)

    def _bounds(self, name: str) -> tuple[int, int, int]:
        times = self.map(self.files.times(name))[0]
        return (len(times), int(times.min()), int(times.max())) if len(times) else (0, 0, 0)

    def block(self, group: int, number: int, *, with_ids: bool = False) -> EventBlock:
        """Map the events of a block."""
        name = self.names[number]
        times = self.map(self.files.times(name))
        flags, numbers = self.files.flags(name), self.files.numbers(name, group)
        ids = self.map(self.files.ids(name)) if with_ids else None
        return EventBlock(times[-1], times[0], self.map(flags), self.map(numbers), ids)

    def sync(self, paths: Iterable[Path]) -> None:
        """Make arrays that were written to durable."""
        for path in paths:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        fsync_directory(self.files.directory)

    def iterate_rows(self) -> Iterator[EventChunk]:
        """Yield the rows in the order of their times."""
        by_time = [
            self.files.time_order(name) if self._exists(self.files.time_order(name)) else None
            for name in self.names
        ]

        def read(number: int) -> np.ndarray:
            file = by_time[number]
            return self.map(file or self.files.times(self.names[number]))[0]

        for chunk in cut_chunks(len(self.names), read):
            pieces = [
                (number, places if (file := by_time[number]) is None else self.map(file)[1, places])
                for number, places in chunk.pieces
            ]
            yield dataclasses.replace(chunk, pieces=pieces)

    def iterate_events(
        self, group: int, before: Sequence[EventBlock], *, with_ids: bool = False
    ) -> Iterator[EventBlock]:
        """Yield the events in the order in which they are known; of the same time, as they lie.

        Args:
            group: The group.
            before: Events of earlier days, which come first.
            with_ids: Whether the ids of the columns of histories are read.
        """
        first = len(before)

        def read(number: int) -> EventBlock:
            if number < first:
                return before[number]
            return self.block(group, number - first, with_ids=with_ids)

        def read_known(number: int) -> np.ndarray:
            if number < first:
                return before[number].known
            return self.map(self.files.times(self.names[number - first]))[-1]

        for chunk in cut_chunks(first + len(self.names), read_known):
            columns = zip(*(read(number).columns for number in chunk.blocks), strict=True)
            yield EventBlock(*(chunk.take(column) for column in columns))


def number_keys(log: EventLog, earlier: Sequence[EarlierEvents], threads: int) -> None:
    """Write the keys of each group, and the number of the key of each event.

    Args:
        log: The events.
        earlier: Of each group, the events of days before.
        threads: How many blocks are in work at once.
    """
    every = []
    for group, before in enumerate(earlier):
        names = (log.files.block_keys(name, group) for name in log.names)
        row_keys = _merge_keys(map(map_array, names))
        every.append(_merge_keys([row_keys, before.key]))
        write_array(log.files.row_keys(group), row_keys)
        write_array(log.files.keys(group), every[-1])

    def number(name: str) -> None:
        for group, keys in enumerate(every):
            of_block = map_array(log.files.block_keys(name, group))
            places = np.searchsorted(keys, of_block).astype(np.int32)
            places[of_block == 0] = -1
            codes = map_array(log.files.codes(name, group))
            write_array(log.files.numbers(name, group), places[codes])

    for _ in map_in_order(number, log.names, threads, "events"):
        pass


def _merge_keys(several: Iterable[np.ndarray]) -> np.ndarray:
    """Return the different keys, rising, but for 0."""
    merged, waiting, size = np.empty(0, np.int64), list[np.ndarray](), 0
    for keys in several:
        waiting.append(keys)
        size += len(keys)
        if size > max(len(merged), 1 << 20):  # so that each is sorted a few times only
            merged, waiting, size = np.unique(np.concatenate([merged, *waiting])), [], 0
    merged = np.unique(np.concatenate([merged, *waiting]))
    return merged[merged != 0]


def sort_by_key(numbers: np.ndarray, keys: int) -> np.ndarray:
    """Return the places of events with a key by rising key; of one key, in their order.

    Args:
        numbers: int32 [n], those of their keys; negative without one.
        keys: How many keys there are.
    """
    counts = np.bincount(numbers[numbers >= 0], minlength=keys)
    order = np.empty(counts.sum(), np.int64)
    _place_events(numbers, np.cumsum(counts) - counts, order)
    return order


@compiled()
def _place_events(numbers: np.ndarray, begins: np.ndarray, order: np.ndarray) -> None:
    for event in range(len(numbers)):
        if numbers[event] >= 0:
            order[begins[numbers[event]]] = event
            begins[numbers[event]] += 1
