"""The files of a run's events, in the directory of its state."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from nvt_torchrec.base.files.atomic import TEMPORARY, delete
from nvt_torchrec.base.files.mapping import map_array


@dataclasses.dataclass(frozen=True)
class EventFiles:
    """The paths of a run's event files; a block, a group and a history are arguments.

    The arrays of a block are in the order in which its events become known. The file ``order``
    exists unless that is the order of the rows, and ``time_order`` unless that is the order of
    their times. Each file is written by a single task, so that workers on several machines may
    share a POSIX file system.
    """

    directory: Path

    def times(self, name: str) -> Path:
        """Int64 [1 or 2, n], microseconds: the time of each event, and when it becomes known."""
        return self.directory / f"{name}.times.npy"

    def flags(self, name: str) -> Path:
        """Unsigned [n], see :data:`workflows.event_groups.TRAIN`."""
        return self.directory / f"{name}.flags.npy"

    def amounts(self, name: str) -> Path:
        """Float64 [amounts, n], NaN where missing; only for a spec with amounts."""
        return self.directory / f"{name}.amounts.npy"

    def order(self, name: str) -> Path:
        """Int64 [n], the index in the block of each event's row."""
        return self.directory / f"{name}.order.npy"

    def time_order(self, name: str) -> Path:
        """Int64 [n], the indices that sort the events by time; ties keep their order."""
        return self.directory / f"{name}.by_time.npy"

    def pieces(self, name: str) -> Path:
        """Int64 [pieces + 1], where each piece of rows begins, and the end of the last one."""
        return self.directory / f"{name}.pieces.npy"

    def block_keys(self, name: str, group: int) -> Path:
        """Int64 [keys], the distinct keys of a block, ascending; 0 stands for a missing key."""
        return self.directory / f"{name}.{group}.keys.npy"

    def codes(self, name: str, group: int) -> Path:
        """Int32 [n], the index of each event's key in :meth:`block_keys`."""
        return self.directory / f"{name}.{group}.codes.npy"

    def numbers(self, name: str, group: int) -> Path:
        """Int32 [n], the index of each event's key in :meth:`keys`; -1 without a key."""
        return self.directory / f"{name}.{group}.numbers.npy"

    def sums(self, name: str, group: int) -> Path:
        """Records [n] of :func:`.event_records.sums_dtype`, the sums before each row, by row."""
        return self.directory / f"{name}.{group}.sums.npy"

    def values(self, name: str) -> Path:
        """The columns of the histories, dictionary-encoded, in the order of the rows."""
        return self.directory / f"{name}.arrow"

    def hours(self, name: str) -> Path:
        """The result of :func:`etl.units.hours.count_hours` for the events of a block."""
        return self.directory / f"{name}.hours.npy"

    def keys(self, group: int) -> Path:
        """Int64 [keys], all keys of a group, ascending; the index of a key is its number."""
        return self.directory / f"{group}.keys.npy"

    def row_keys(self, group: int) -> Path:
        """Int64 [keys], the keys of a group that rows have, ascending."""
        return self.directory / f"{group}.row_keys.npy"

    def row_indices(self, group: int) -> Path:
        """Int32 [keys], for each of :meth:`keys`, the number of smaller :meth:`row_keys`."""
        return self.directory / f"{group}.row_indices.npy"

    def bounds(self, group: int) -> Path:
        """Int64 [partitions + 1], the key number at which each partition begins, and the end."""
        return self.directory / f"{group}.bounds.npy"

    def tail(self, history: str, name: str) -> Path:
        """An array of the newest events of a history, see :class:`.HistoryTail`."""
        return self.directory / f"tail.{history}.{name}.npy"

    def group_events(self, group: int, name: str) -> Path:
        """An array of a group's :class:`workflows.event_sums.GroupEvents`."""
        return self.directory / f"{group}.events.{name}.npy"

    def scratch(self, group: int, name: str) -> Path:
        """A temporary file of a group, deleted by :meth:`delete_scratch`."""
        return self.directory / f".{group}.{name}{TEMPORARY}"

    def delete_scratch(self, group: int) -> None:
        """Delete all scratch files of a group, including those of a process that was killed."""
        for path in [*self.directory.glob(f".{group}.*{TEMPORARY}")]:
            delete(path)

    def read_order(self, name: str) -> slice | np.ndarray:
        """Return :meth:`order`, or a slice of all rows if events and rows have the same order."""
        file = self.order(name)
        return map_array(file) if file.exists() else slice(None)

    def read_time_order(self, name: str) -> slice | np.ndarray:
        """Return :meth:`time_order`, or a slice of all events if they are sorted by time."""
        file = self.time_order(name)
        return map_array(file) if file.exists() else slice(None)

    def read(self, name: str, path: Path) -> np.ndarray:
        """Return an array [.., n] of a block's events in the order of the rows."""
        array = map_array(path)
        order = self.read_order(name)
        if isinstance(order, slice):
            return array
        ordered = np.empty_like(array)
        ordered[..., order] = array
        return ordered
