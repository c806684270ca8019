"""The files of a run's events, below its state."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from nvt_torchrec.base.files.atomic import TEMPORARY, delete
from nvt_torchrec.base.files.mapping import map_array


@dataclasses.dataclass(frozen=True)
class EventFiles:
    """The files of a run's events below its state.

    The arrays of a block are in the order in which its events are known; ``order`` is there unless
    that is the order of the rows, and ``time_order`` unless it is that of their times. Each file is
    written by a single task, so that workers on several machines may share a POSIX file system.
    """

    directory: Path

    def times(self, name: str) -> Path:
        """Int64 [1 or 2, n], microseconds: when an event happened; from when it is known."""
        return self.directory / f"{name}.times.npy"

    def flags(self, name: str) -> Path:
        """Unsigned [n], see :data:`workflows.event_groups.TRAIN`."""
        return self.directory / f"{name}.flags.npy"

    def amounts(self, name: str) -> Path:
        """Float64 [amounts, n], NaN where missing; only of a spec with such columns."""
        return self.directory / f"{name}.amounts.npy"

    def order(self, name: str) -> Path:
        """Int64 [n], the number of the row of each event in the block."""
        return self.directory / f"{name}.order.npy"

    def time_order(self, name: str) -> Path:
        """Int64 [n], the indices of the events by rising time; ties keep their order."""
        return self.directory / f"{name}.by_time.npy"

    def pieces(self, name: str) -> Path:
        """Int64 [pieces + 1], where the pieces of the rows begin, and the last one ends."""
        return self.directory / f"{name}.pieces.npy"

    def block_keys(self, name: str, group: int) -> Path:
        """Int64 [keys], the different keys of a block, rising; 0 for none."""
        return self.directory / f"{name}.{group}.keys.npy"

    def codes(self, name: str, group: int) -> Path:
        """Int32 [n], the index of each event's key among those of the block."""
        return self.directory / f"{name}.{group}.codes.npy"

    def numbers(self, name: str, group: int) -> Path:
        """Int32 [n], the number of each event's key in the group; -1 without a key."""
        return self.directory / f"{name}.{group}.numbers.npy"

    def sums(self, name: str, group: int) -> Path:
        """Records [n] of :func:`.event_records.sums_dtype`, what is before each row, by row."""
        return self.directory / f"{name}.{group}.sums.npy"

    def values(self, name: str) -> Path:
        """The columns of the histories, as dictionaries of values, in the order of the rows."""
        return self.directory / f"{name}.arrow"

    def hours(self, name: str) -> Path:
        """What :func:`etl.units.hours.count_hours` returns of the events of a block."""
        return self.directory / f"{name}.hours.npy"

    def keys(self, group: int) -> Path:
        """Int64 [keys], the keys of a group by their numbers: rising."""
        return self.directory / f"{group}.keys.npy"

    def row_keys(self, group: int) -> Path:
        """Int64 [keys], the keys of a group's rows, rising."""
        return self.directory / f"{group}.row_keys.npy"

    def row_indices(self, group: int) -> Path:
        """Int32 [keys], of each key the number of smaller keys of rows: its index among these."""
        return self.directory / f"{group}.row_indices.npy"

    def bounds(self, group: int) -> Path:
        """Int64 [partitions + 1], the numbers of the keys at which partitions begin and end."""
        return self.directory / f"{group}.bounds.npy"

    def tail(self, history: str, name: str) -> Path:
        """An array of the newest events of a history, see :class:`.HistoryTail`."""
        return self.directory / f"tail.{history}.{name}.npy"

    def group_events(self, group: int, name: str) -> Path:
        """An array of a group's :class:`workflows.event_sums.GroupEvents`."""
        return self.directory / f"{group}.events.{name}.npy"

    def scratch(self, group: int, name: str) -> Path:
        """What is made of a group on the way, and deleted by :meth:`delete_scratch`."""
        return self.directory / f".{group}.{name}{TEMPORARY}"

    def delete_scratch(self, group: int) -> None:
        """Delete all scratch files of a group, also those of a process that was killed."""
        for path in [*self.directory.glob(f".{group}.*{TEMPORARY}")]:
            delete(path)

    def read_order(self, name: str) -> slice | np.ndarray:
        """Return the rows of a block's events; a slice of all if they are in the same order."""
        file = self.order(name)
        return map_array(file) if file.exists() else slice(None)

    def read_time_order(self, name: str) -> slice | np.ndarray:
        """Return the indices of a block's events by rising time; a slice of all if they are so."""
        file = self.time_order(name)
        return map_array(file) if file.exists() else slice(None)

    def read(self, name: str, path: Path) -> np.ndarray:
        """Return an array [.., n] of a block's events in the order of the rows."""
        array, order = map_array(path), self.read_order(name)
        if isinstance(order, slice):
            return array
        ordered = np.empty_like(array)
        ordered[..., order] = array
        return ordered
