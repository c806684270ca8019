"""Events of all blocks in the order of time, a chunk at a time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import fsync_directory
from nvt_torchrec.base.files.mapping import map_array
from nvt_torchrec.etl.events.extract import EventFiles, is_rising
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.events import EventKey
from nvt_torchrec.workflows.event_groups import BEFORE_ALL, EVENT, sums_of_groups

#: About how many events a chunk has: what is computed of them stays in a processor's cache.
CHUNK_ROWS = 1 << 17
#: How many times of a chunk are looked at to find where chunks end.
_SAMPLES_OF_CHUNK = 256
#: How many arrays are mapped at once.
_OPEN = 256


@dataclasses.dataclass(frozen=True)
class EventBlock:
    """Events of a group, in the order in which they are known.

    Attributes:
        known: int64 [n], from when they are known, in microseconds since 1970.
        happened: int64 [n], their times.
        flags: Unsigned [n], see :data:`workflows.event_groups.TRAIN`.
        numbers: int32 [n], those of their keys in the group; -1 without a key.
        amounts: float64 [amounts, n], see those of :attr:`GroupSums.amounts`; NaN where missing.
        pairs: int32 [compared, n], of each column whose values are counted the number of the pair
            of key and value; -1 without a value.
        ids: int32 [columns of histories, n]; None where nobody needs them.
    """

    known: np.ndarray
    happened: np.ndarray
    flags: np.ndarray
    numbers: np.ndarray
    amounts: np.ndarray
    pairs: np.ndarray
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
    pairs=np.empty((0, 0), np.int32),
)


def list_pair_keys(spec: FeatureSpec) -> list[list[int]]:
    """Return, of each group, the numbers of the keys that are pairs of its key and a value."""
    pair_keys = []
    for group in sums_of_groups(spec):
        pairs = [EventKey((*group.key, column), group.source) for column in group.compared]
        pair_keys.append([spec.event_keys.index(pair) for pair in pairs])
    return pair_keys


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
    if not blocks:
        return
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
    """The events of a log and of further sources; several threads may use it.

    Args:
        spec: The columns.
        files: The events of all blocks.
        names: The names of the log's blocks, in the order of the log.
        sources: By source, the names of its blocks, in the order of its files.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        files: EventFiles,
        names: Sequence[str],
        sources: Mapping[str, Sequence[str]],
    ) -> None:
        self.spec, self.files, self.names = spec, files, names
        self._names_by_source = {"": names, **sources}
        # a log of many blocks has more files than a process may open
        self.map = functools.lru_cache(_OPEN)(map_array)
        self._exists = functools.cache(Path.exists)
        self.pair_keys = list_pair_keys(spec)
        self._groups = sums_of_groups(spec)

    @functools.cached_property
    def rows(self) -> int:
        """How many rows there are."""
        return self._count(self.names)

    def count_events(self, group: int) -> int:
        """Return how many events a group has, with and without a key."""
        return self._count(self.event_names(self._groups[group].source))

    def _count(self, names: Sequence[str]) -> int:
        return sum(self.map(self.files.times(name)).shape[1] for name in names)

    def event_names(self, source: str) -> Sequence[str]:
        """Return the names of the blocks of a source; "": those of the log."""
        return self._names_by_source[source]

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

    def rows_of(self, group: int, number: int) -> EventBlock:
        """Map the rows of a block of the log, without amounts and pairs."""
        name = self.names[number]
        times = self.map(self.files.times(name))
        return EventBlock(
            known=times[-1],
            happened=times[0],
            flags=self.map(self.files.flags(name)),
            numbers=self.map(self.files.numbers(name, group)),
            amounts=np.empty((0, times.shape[1])),
            pairs=np.empty((0, times.shape[1]), np.int32),
        )

    def _events_of(self, group: int, name: str, *, with_ids: bool) -> EventBlock:
        """Map the events of a block of the group's source."""
        times = self.map(self.files.times(name))
        flags, numbers = self.files.flags(name), self.files.numbers(name, group)
        pairs = np.empty((0, times.shape[1]), np.int32)
        if self.pair_keys[group]:
            of_pairs = [self.files.numbers(name, key) for key in self.pair_keys[group]]
            pairs = np.stack([self.map(file) for file in of_pairs])
        amounts = np.empty((0, times.shape[1]))
        if self._groups[group].amounts:
            amounts = self.map(self.files.amounts(name))
        ids = self.map(self.files.ids(name)) if with_ids else None
        return EventBlock(
            times[-1], times[0], self.map(flags), self.map(numbers), amounts, pairs, ids
        )

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

    def iterate_events(self, group: int, *, with_ids: bool = False) -> Iterator[EventBlock]:
        """Yield the events in the order in which they are known; ties keep the order of the log.

        Args:
            group: The group.
            with_ids: Whether the ids of the columns of histories are read.
        """
        names = self.event_names(self._groups[group].source)

        def read(number: int) -> EventBlock:
            return self._events_of(group, names[number], with_ids=with_ids)

        def read_known(number: int) -> np.ndarray:
            return self.map(self.files.times(names[number]))[-1]

        for events in _merge_blocks(len(names), read, read_known):
            if self.spec.negatives:  # a row that was drawn has no flag but that of training
                yield events.take(np.flatnonzero(events.flags >> EVENT))
            else:
                yield events


def merge_events(blocks: Sequence[EventBlock]) -> Iterator[EventBlock]:
    """Yield the events of blocks in the order in which they are known, a chunk at a time.

    Ties keep the order of the blocks.
    """
    return _merge_blocks(len(blocks), lambda i: blocks[i], lambda i: blocks[i].known)


def _merge_blocks(
    blocks: int, read: Callable[[int], EventBlock], read_known: Callable[[int], np.ndarray]
) -> Iterator[EventBlock]:
    """Yield the events of blocks in order; see :func:`cut_chunks`.

    Args:
        blocks: How many blocks there are.
        read: Returns a block.
        read_known: Returns from when its events are known.
    """
    for chunk in cut_chunks(blocks, read_known):
        columns = zip(*(read(number).columns for number in chunk.blocks), strict=True)
        # each column of the chunk is made of that column of its blocks
        yield EventBlock(*(chunk.take(column) for column in columns))
