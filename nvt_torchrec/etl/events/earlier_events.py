"""The events of earlier days, as they are kept for days that are added, and for inference."""

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
    """A group's events of earlier days; the events of a key that left all windows are merged.

    Attributes:
        key: int64 [n], ascending.
        known: int64 [n], the time from which each is known, ascending within a key.
        happened: int64 [n], the time of each event, or of the last one of merged events.
        counts: int64 [measures, n], see :attr:`workflows.event_groups.GroupSums.num_measures`.
        picked: float64 [stored picks, n], see
            :attr:`workflows.event_groups.GroupSums.stored_picks`; for merged events, their pick.
        pairs: int64 [distinct columns, n], for each column whose distinct values are counted, the
            hash of key and value; 0 without a value. For merged events, each distinct value is a
            separate event without counts.
    """

    key: np.ndarray
    known: np.ndarray
    happened: np.ndarray
    counts: np.ndarray
    picked: np.ndarray
    pairs: np.ndarray

    @classmethod
    def make_empty(cls, group: GroupSums) -> EarlierEvents:
        """Return zero events of a group."""
        return cls.from_rows(np.empty((cls.count_rows(group), 0), np.int64), group)

    @staticmethod
    def count_rows(group: GroupSums) -> int:
        """Return the number of rows that :meth:`to_rows` returns."""
        return 3 + group.num_measures + len(group.stored_picks) + len(group.distinct_columns)

    @classmethod
    def from_rows(cls, rows: np.ndarray, group: GroupSums) -> EarlierEvents:
        """Return the events that :meth:`to_rows` wrote into an array."""
        counts, picked, pairs = np.split(
            rows[3:], [group.num_measures, group.num_measures + len(group.stored_picks)]
        )
        return cls(rows[0], rows[1], rows[2], counts, picked.view(np.float64), pairs)

    def to_rows(self) -> np.ndarray:
        """Return all attributes as one array, int64 [rows, n]; floats are stored as their bits."""
        first = np.stack([self.key, self.known, self.happened])
        return np.concatenate([first, self.counts, self.picked.view(np.int64), self.pairs])

    def take(self, indices: slice | np.ndarray) -> EarlierEvents:
        """Return the events at the given indices."""
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
    """The directories with the events of earlier days, whose files have been checked.

    It is passed to workers with each task, and they map the files that they need.

    Attributes:
        extension: ``OUT/extension`` of the earlier days.
        workflow: ``OUT/workflow`` of the earlier days.
    """

    extension: Path
    workflow: Path

    def open_group(self, number: int, group: GroupSums) -> EarlierEvents:
        """Map the events of a group."""
        return EarlierEvents.from_rows(map_array(self.extension / kept_file_name(number)), group)

    def open_tail(self, rule: HistoryRule) -> HistoryTail:
        """Map the newest events of a history."""
        names = list_history_files(rule.name)
        return HistoryTail(*(map_array(self.workflow / DIRECTORY / name) for name in names))


def kept_file_name(group: int) -> str:
    """Return the name of the file of a group's events, see :meth:`EarlierEvents.to_rows`."""
    return f"events.{group}.npy"
