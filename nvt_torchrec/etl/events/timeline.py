"""Events of several blocks in the order of time, a chunk at a time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from nvt_torchrec.etl.events.extract import is_rising

#: About how many events a chunk has: what is computed of them stays in a processor's cache.
CHUNK_ROWS = 1 << 17
#: How many times of a chunk are looked at to find where chunks end.
_SAMPLES_OF_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class EventBlock:
    """Events of a group, in the order in which they are known.

    Attributes:
        known: int64 [n], from when they are known, in microseconds since 1970.
        happened: int64 [n], their times.
        flags: Unsigned [n], see :data:`workflows.event_groups.TRAIN`.
        numbers: int32 [n], those of their keys in the partition.
        amounts: float64 [amounts, n], see those of :attr:`GroupSums.amounts`; NaN where missing.
        pairs: int32 [compared, n], of each column whose values are counted the number of the pair
            of key and value; -1 without a value.
    """

    known: np.ndarray
    happened: np.ndarray
    flags: np.ndarray
    numbers: np.ndarray
    amounts: np.ndarray
    pairs: np.ndarray

    def take(self, indices: slice | np.ndarray) -> EventBlock:
        """Return some of the events."""
        return EventBlock(*(column[..., indices] for column in vars(self).values()))


NO_EVENTS = EventBlock(
    known=np.empty(0, np.int64),
    happened=np.empty(0, np.int64),
    flags=np.empty(0, np.uint8),
    numbers=np.empty(0, np.int32),
    amounts=np.empty((0, 0)),
    pairs=np.empty((0, 0), np.int32),
)


@dataclasses.dataclass(frozen=True)
class EventChunk:
    """Events of several blocks.

    Attributes:
        pieces: The number of each block, and where the chunk's events are in it.
        order: The events in the order of time: indices into the pieces, one after the other. A
            slice of all of them where they are in this order already.
    """

    pieces: list[tuple[int, slice]]
    order: slice | np.ndarray

    @property
    def blocks(self) -> list[int]:
        """The numbers of the blocks."""
        return [number for number, _ in self.pieces]

    def take(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the values of the events, which are in arrays of their blocks, [.., n]."""
        parts = []
        for array, (_, events) in zip(arrays, self.pieces, strict=True):
            parts.append(array[..., events])
        values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return np.ascontiguousarray(values[..., self.order])


def cut_chunks(blocks: int, read: Callable[[int], np.ndarray]) -> Iterator[EventChunk]:
    """Yield all events in the order of time; ties keep the order of the blocks.

    All events of one time are in one chunk.

    Args:
        blocks: How many blocks there are.
        read: Returns the times of a block's events, int64 [n], rising.
    """
    if not blocks:
        return
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
        pieces = [(number, slice(begins[number], ends[number])) for number in numbers]
        chunk = EventChunk(pieces, slice(None))
        times = chunk.take([read(number) for number in numbers])
        if not is_rising(times):
            chunk = dataclasses.replace(chunk, order=np.argsort(times, kind="stable"))
        yield chunk


def merge_events(blocks: Sequence[EventBlock]) -> Iterator[EventBlock]:
    """Yield the events of blocks in the order in which they are known, a chunk at a time.

    Ties keep the order of the blocks.
    """
    for chunk in cut_chunks(len(blocks), lambda number: blocks[number].known):
        columns = zip(*(vars(blocks[number]).values() for number in chunk.blocks), strict=True)
        # Each column of the chunk is made of that column of its blocks.
        yield EventBlock(*(chunk.take(column) for column in columns))


def iterate_in_order(times: np.ndarray, offsets: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the indices of events in the order of time, a chunk at a time.

    Args:
        times: int64 [n], rising within each block.
        offsets: int64 [blocks + 1], where the events of each block begin, and the last ones end.

    Yields:
        int64 [chunk]; ties keep the order of the blocks.
    """
    bounds = list(itertools.pairwise(offsets.tolist()))

    def read_times(number: int) -> np.ndarray:
        begin, end = bounds[number]
        return times[begin:end]

    for chunk in cut_chunks(len(bounds), read_times):
        yield chunk.take([np.arange(*bounds[number]) for number in chunk.blocks])
