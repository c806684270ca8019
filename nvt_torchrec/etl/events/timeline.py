"""Events of several blocks in the order of time, a chunk at a time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from nvt_torchrec.etl.events.extract import is_sorted

#: About how many events a chunk has: few enough that its arrays stay in the processor's cache.
CHUNK_ROWS = 1 << 17
#: How many of a chunk's times are sampled to find where chunks end.
_SAMPLES_OF_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class EventBlock:
    """Events of a group, in the order in which they become known.

    Attributes:
        known: int64 [n], the time from which each is known, in microseconds since 1970.
        happened: int64 [n], the time of each event.
        flags: Unsigned [n], see :data:`workflows.event_groups.TRAIN`.
        numbers: int32 [n], the number of each event's key in the partition.
        amounts: float64 [amounts, n], see :attr:`GroupSums.amounts`; NaN where missing.
        pairs: int32 [distinct columns, n], for each column whose distinct values are counted, the
            number of the pair of key and value; -1 without a value.
    """

    known: np.ndarray
    happened: np.ndarray
    flags: np.ndarray
    numbers: np.ndarray
    amounts: np.ndarray
    pairs: np.ndarray

    def take(self, indices: slice | np.ndarray) -> EventBlock:
        """Return the events at the given indices."""
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
        pieces: The number of each block, and the slice of its events that are in the chunk.
        order: The indices that sort the concatenated pieces by time; a slice of all if they are
            sorted already.
    """

    pieces: list[tuple[int, slice]]
    order: slice | np.ndarray

    @property
    def blocks(self) -> list[int]:
        """The numbers of the blocks."""
        return [number for number, _ in self.pieces]

    def take(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the values of the chunk's events, [.., n], from an array of each block."""
        parts = []
        for array, (_, events) in zip(arrays, self.pieces, strict=True):
            parts.append(array[..., events])
        values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return np.ascontiguousarray(values[..., self.order])


def cut_chunks(blocks: int, read: Callable[[int], np.ndarray]) -> Iterator[EventChunk]:
    """Yield all events in the order of time; ties keep the order of the blocks.

    All events with the same time are in one chunk.

    Args:
        blocks: Number of blocks.
        read: Returns the times of a block's events, int64 [n], ascending.
    """
    if not blocks:
        return
    # Blocks may overlap in time by any amount. Chunks end at quantiles of a sample of all times, so
    # that each has about CHUNK_ROWS events regardless of the overlap.
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
        if not is_sorted(times):
            chunk = dataclasses.replace(chunk, order=np.argsort(times, kind="stable"))
        yield chunk


def merge_events(blocks: Sequence[EventBlock]) -> Iterator[EventBlock]:
    """Yield the events of blocks in the order in which they become known, a chunk at a time.

    Ties keep the order of the blocks.
    """
    for chunk in cut_chunks(len(blocks), lambda number: blocks[number].known):
        columns = {}
        for field in dataclasses.fields(EventBlock):
            arrays = [getattr(blocks[number], field.name) for number in chunk.blocks]
            columns[field.name] = chunk.take(arrays)
        yield EventBlock(**columns)


def iterate_in_order(times: np.ndarray, offsets: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the indices of events in the order of time, a chunk at a time.

    Args:
        times: int64 [n], ascending within each block.
        offsets: int64 [blocks + 1], where the events of each block begin, and the end of the last.

    Yields:
        int64 [chunk]; ties keep the order of the blocks.
    """
    bounds = list(itertools.pairwise(offsets.tolist()))

    def read_times(number: int) -> np.ndarray:
        begin, end = bounds[number]
        return times[begin:end]

    for chunk in cut_chunks(len(bounds), read_times):
        yield chunk.take([np.arange(*bounds[number]) for number in chunk.blocks])
