"""Events of all blocks in the order of time, a chunk at a time, and the numbers of their keys."""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
from nvt_torchrec.workflows.event_groups import BEFORE_ALL, GroupSums

#: About how many events a chunk has: what is computed of them stays in a processor's cache.
CHUNK_ROWS = 1 << 17
#: How many times of a chunk are looked at to find where chunks end.
_SAMPLES_OF_CHUNK = 256
#: How many arrays are mapped at once.
_OPEN = 256


@dataclasses.dataclass(frozen=True)
class EarlierEvents:
    """What is kept of a group's events of earlier days; of a key, those long ago are summed up.

    Attributes:
        key: int64 [n], rising.
        known: int64 [n], from when it is known; rising for each key.
        happened: int64 [n], the time of the last one.
        counts: int64 [measures, n], see :attr:`workflows.event_groups.GroupSums.measures`.
        picked: float64 [picked, n], see :attr:`workflows.event_groups.GroupSums.picked`; of events
            that are summed up what is picked of them.
    """

    key: np.ndarray
    known: np.ndarray
    happened: np.ndarray
    counts: np.ndarray
    picked: np.ndarray

    @classmethod
    def none(cls, group: GroupSums) -> EarlierEvents:
        """Return no events of a group."""
        return cls.from_rows(np.empty((cls.count_rows(group), 0), np.int64), group)

    @staticmethod
    def count_rows(group: GroupSums) -> int:
        """Return how many rows :meth:`to_rows` gives."""
        return 3 + group.measures + len(group.picked)

    @classmethod
    def from_rows(cls, rows: np.ndarray, group: GroupSums) -> EarlierEvents:
        """Return the events of what :meth:`to_rows` returned."""
        end = 3 + group.measures
        return cls(rows[0], rows[1], rows[2], rows[3:end], rows[end:].view(np.float64))

    def to_rows(self) -> np.ndarray:
        """Return all in one array, int64 [rows, n]; of floats the bits."""
        first = np.stack([self.key, self.known, self.happened])
        return np.concatenate([first, self.counts, self.picked.view(np.int64)])

    def take(self, indices: slice | np.ndarray) -> EarlierEvents:
        """Return some of the events."""
        return EarlierEvents(
            key=self.key[indices],
            known=self.known[indices],
            happened=self.happened[indices],
            counts=np.ascontiguousarray(self.counts[:, indices]),
            picked=np.ascontiguousarray(self.picked[:, indices]),
        )


@dataclasses.dataclass(frozen=True)
class EventBlock:
    """Events of a group, in the order in which they are known.

    Attributes:
        known: int64 [n], from when they are known, in microseconds since 1970.
        happened: int64 [n], their times.
        flags: Unsigned [n], see :data:`workflows.event_groups.TRAIN`.
        numbers: int32 [n], those of their keys in the group; -1 without a key.
        amounts: float64 [amounts, n], see :attr:`FeatureSpec.amounts`; NaN where missing.
        ids: int32 [columns of histories, n]; None where nobody needs them.
    """

    known: np.ndarray
    happened: np.ndarray
    flags: np.ndarray
    numbers: np.ndarray
    amounts: np.ndarray
    ids: np.ndarray | None = None

    def take(self, indices: slice | np.ndarray) -> EventBlock:
        """Return some of the events."""
        return EventBlock(*(column[..., indices] for column in self.columns))

    @property
    def columns(self) -> list[np.ndarray]:
        """The columns that are there, in the order of the attributes."""
        return [column for column in vars(self).values() if column is not None]


NO_EVENTS = EventBlock(
    known=np.empty(0, np.int64),
    happened=np.empty(0, np.int64),
    flags=np.empty(0, np.uint8),
    numbers=np.empty(0, np.int32),
    amounts=np.empty((0, 0)),
)


@dataclasses.dataclass(frozen=True)
class EventChunk:
    """Events of several blocks.

    Attributes:
        pieces: The number of each block, and the indices of the chunk's events in it.
        order: The events in the order of time: indices into the pieces, one after the other. A
            slice of all of them where they are in this order already.
    """

    pieces: list[tuple[int, slice | np.ndarray]]
    order: slice | np.ndarray

    @property
    def blocks(self) -> list[int]:
        """The numbers of the blocks."""
        return [number for number, _ in self.pieces]

    def take(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the values of the events, which are in arrays of their blocks, [.., n]."""
        parts = []
        for array, (_, indices) in zip(arrays, self.pieces, strict=True):
            parts.append(array[..., indices])
        values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return np.ascontiguousarray(values[..., self.order])

    def put(self, values: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        """Write values [.., n] of the events to arrays of their blocks."""
        if not isinstance(self.order, slice):
            ordered = np.empty_like(values)
            ordered[..., self.order] = values
            values = ordered
        begin = 0
        for array, (_, indices) in zip(arrays, self.pieces, strict=True):
            count = indices.stop - indices.start if isinstance(indices, slice) else len(indices)
            array[..., indices] = values[..., begin : begin + count]
            begin += count


def cut_chunks(blocks: int, read: Callable[[int], np.ndarray]) -> Iterator[EventChunk]:
    """Yield all events in the order of time; ties keep the order of the blocks.

    All events of one time are in one chunk. Blocks of which a chunk has no event are not read.

    Args:
        blocks: How many blocks there are.
        read: Returns the times of a block's events, int64 [n], rising.
    """
    # Chunks end at times that divide a sample of all times into equal parts: blocks may overlap in
    # time by any amount, and a chunk shall have about CHUNK_ROWS events whatever they do.
    step = max(1, CHUNK_ROWS // _SAMPLES_OF_CHUNK)
    sample = np.sort(np.concatenate([read(number)[::step] for number in range(blocks)]))
    bounds = np.unique(sample[:: CHUNK_ROWS // step])[1:]
    cuts = []
    for number in range(blocks):
        times = read(number)
        cuts.append(np.concatenate([[0], np.searchsorted(times, bounds), [len(times)]]))
    for begins, ends in itertools.pairwise(np.stack(cuts, axis=1)):
        numbers = np.flatnonzero(ends > begins).tolist()
        if not numbers:
            continue
        pieces: list[tuple[int, slice | np.ndarray]] = []
        for number in numbers:
            pieces.append((number, slice(begins[number], ends[number])))
        chunk = EventChunk(pieces, slice(None))
        times = chunk.take([read(number) for number in numbers])
        if not is_rising(times):
            chunk = dataclasses.replace(chunk, order=np.argsort(times, kind="stable"))
        yield chunk


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
    def rows(self) -> int:
        """How many rows there are."""
        return sum(self.map(self.files.times(name)).shape[1] for name in self.names)

    def find_newest(self, end: int | None) -> int:
        """Return the newest time before ``end``, or of all. Raises :class:`BadInputError`."""
        newest = BEFORE_ALL
        for name in self.names:
            times = self.map(self.files.times(name))[0]
            if end is not None:
                times = times[times < end]
            newest = max(newest, int(times.max(initial=BEFORE_ALL)))
        if newest == BEFORE_ALL:
            raise BadInputError("there is no well-formed row", "correct the input")
        return newest

    def bounds_of(self, name: str) -> tuple[int, int, int]:
        """Return how many rows a block has, and the first and the last time; 0 without rows."""
        times = self.map(self.files.times(name))[0]
        if not len(times):
            return 0, 0, 0
        return len(times), int(times.min()), int(times.max())

    def block(self, group: int, number: int, *, with_ids: bool = False) -> EventBlock:
        """Map the events of a block."""
        name = self.names[number]
        times = self.map(self.files.times(name))
        flags, numbers = self.files.flags(name), self.files.numbers(name, group)
        amounts = np.empty((0, times.shape[1]))
        if self.spec.amounts:
            amounts = self.map(self.files.amounts(name))
        ids = self.map(self.files.ids(name)) if with_ids else None
        return EventBlock(times[-1], times[0], self.map(flags), self.map(numbers), amounts, ids)

    def sync(self, paths: Iterable[Path]) -> None:
        """Make arrays that were written to durable."""
        for path in paths:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        fsync_directory(self.files.directory)

    def iterate_rows(self) -> Iterator[EventChunk]:
        """Yield the rows in the order of their times."""
        # A block whose rows do not lie by time has a file with its times in order, [0], and the
        # rows that have them, [1].
        sorted_files: list[Path | None] = []
        for name in self.names:
            file = self.files.time_order(name)
            sorted_files.append(file if self._exists(file) else None)

        def read_times(number: int) -> np.ndarray:
            file = sorted_files[number] or self.files.times(self.names[number])
            return self.map(file)[0]

        for chunk in cut_chunks(len(self.names), read_times):
            pieces: list[tuple[int, slice | np.ndarray]] = []
            for number, indices in chunk.pieces:
                by_time = sorted_files[number]
                rows = indices if by_time is None else self.map(by_time)[1, indices]
                pieces.append((number, rows))
            yield dataclasses.replace(chunk, pieces=pieces)

    def iterate_events(
        self, group: int, before: Sequence[EventBlock], *, with_ids: bool = False
    ) -> Iterator[EventBlock]:
        """Yield the events in the order in which they are known; ties keep the order of the log.

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
            blocks = [read(number).columns for number in chunk.blocks]
            # each column of the chunk is made of that column of its blocks
            yield EventBlock(*(chunk.take(column) for column in zip(*blocks, strict=True)))


def number_keys(log: EventLog, earlier: Sequence[EarlierEvents], threads: int) -> None:
    """Write the keys of each group, and the number of the key of each event.

    Args:
        log: The events.
        earlier: Of each group, the events of days before.
        threads: How many blocks are in work at once.
    """
    keys_by_group = []
    for group, before in enumerate(earlier):
        files = [log.files.block_keys(name, group) for name in log.names]
        row_keys = _merge_keys(map_array(file) for file in files)
        keys = _merge_keys([row_keys, before.key])
        keys_by_group.append(keys)
        write_array(log.files.row_keys(group), row_keys)
        write_array(log.files.keys(group), keys)

    def number_block(name: str) -> None:
        for group, keys in enumerate(keys_by_group):
            block_keys = map_array(log.files.block_keys(name, group))
            numbers = np.searchsorted(keys, block_keys).astype(np.int32)
            numbers[block_keys == 0] = -1  # no key
            # an event has the index of its key among those of its block
            codes = map_array(log.files.codes(name, group))
            write_array(log.files.numbers(name, group), numbers[codes])

    for _ in map_in_order(number_block, log.names, threads, "events"):
        pass


def _merge_keys(several: Iterable[np.ndarray]) -> np.ndarray:
    """Return the different keys, rising, but for 0."""
    merged, waiting, size = np.empty(0, np.int64), list[np.ndarray](), 0
    for keys in several:
        waiting.append(keys)
        size += len(keys)
        # Merged when as many wait as there are: so a key is sorted a few times only, and what waits
        # takes no more memory than what is kept.
        if size > max(len(merged), 1 << 20):
            merged, waiting, size = np.unique(np.concatenate([merged, *waiting])), [], 0
    merged = np.unique(np.concatenate([merged, *waiting]))
    return merged[merged != 0]


def sort_by_key(numbers: np.ndarray, keys: int) -> np.ndarray:
    """Return the indices of events that have a key, by rising key; ties keep their order.

    Args:
        numbers: int32 [n], those of their keys; negative without one.
        keys: How many keys there are.
    """
    counts = np.bincount(numbers[numbers >= 0], minlength=keys)
    order = np.empty(counts.sum(), np.int64)
    _write_order(numbers, np.cumsum(counts) - counts, order)
    return order


@compiled()
def _write_order(numbers: np.ndarray, begins: np.ndarray, order: np.ndarray) -> None:
    # a counting sort: begins[key] is where the next event of a key goes
    for event in range(len(numbers)):
        if numbers[event] >= 0:
            order[begins[numbers[event]]] = event
            begins[numbers[event]] += 1
