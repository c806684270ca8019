"""What is kept of the events of earlier days, for the days that are added and for inference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.files.mapping import map_array
from nvt_torchrec.formats.feature_spec.events import HistoryRule
from nvt_torchrec.workflows.event_groups import GroupSums
from nvt_torchrec.workflows.event_state_arrays import DIRECTORY, list_history_files
from nvt_torchrec.workflows.history_tail import HistoryTail


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
        pairs: int64 [compared, n], of each column whose values are counted the hash of key and
            value; 0 without a value. Of events that are summed up, each value that they have makes
            a further event with no counts.
    """

    key: np.ndarray
    known: np.ndarray
    happened: np.ndarray
    counts: np.ndarray
    picked: np.ndarray
    pairs: np.ndarray

    @classmethod
    def none(cls, group: GroupSums) -> EarlierEvents:
        """Return no events of a group."""
        return cls.from_rows(np.empty((cls.count_rows(group), 0), np.int64), group)

    @staticmethod
    def count_rows(group: GroupSums) -> int:
        """Return how many rows :meth:`to_rows` gives."""
        return 3 + group.measures + len(group.picked) + len(group.compared)

    @classmethod
    def from_rows(cls, rows: np.ndarray, group: GroupSums) -> EarlierEvents:
        """Return the events of what :meth:`to_rows` returned."""
        counts, picked, pairs = np.split(
            rows[3:], [group.measures, group.measures + len(group.picked)]
        )
        return cls(rows[0], rows[1], rows[2], counts, picked.view(np.float64), pairs)

    def to_rows(self) -> np.ndarray:
        """Return all in one array, int64 [rows, n]; of floats the bits."""
        first = np.stack([self.key, self.known, self.happened])
        return np.concatenate([first, self.counts, self.picked.view(np.int64), self.pairs])

    def take(self, indices: slice | np.ndarray) -> EarlierEvents:
        """Return some of the events."""
        return EarlierEvents(
            key=self.key[indices],
            known=self.known[indices],
            happened=self.happened[indices],
            counts=np.ascontiguousarray(self.counts[:, indices]),
            picked=np.ascontiguousarray(self.picked[:, indices]),
            pairs=np.ascontiguousarray(self.pairs[:, indices]),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[EarlierEvents]) -> EarlierEvents:
        """Return the events of all parts."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*(np.concatenate(column, axis=-1) for column in columns))


@dataclasses.dataclass(frozen=True)
class EarlierFiles:
    """Where what is kept of earlier days is, which :class:`.EarlierDays` and loading have checked.

    It goes with each task to its worker, which maps what it needs.

    Attributes:
        extension: ``OUT/extension`` of the days before.
        workflow: ``OUT/workflow`` of the days before.
    """

    extension: Path
    workflow: Path

    def open_group(self, number: int, group: GroupSums) -> EarlierEvents:
        """Map the events of a group."""
        return EarlierEvents.from_rows(map_array(self.extension / kept_file(number)), group)

    def open_tail(self, rule: HistoryRule) -> HistoryTail:
        """Map the newest events of a history."""
        names = list_history_files(rule.name)
        return HistoryTail(*(map_array(self.workflow / DIRECTORY / name) for name in names))


def kept_file(group: int) -> str:
    """Return the name of the file of a group's events, see :meth:`EarlierEvents.to_rows`."""
    return f"events.{group}.npy"
