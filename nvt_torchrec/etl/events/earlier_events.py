"""What is kept of the events of earlier days."""

from __future__ import annotations

import dataclasses

import numpy as np

#: The time of what is known before every row.
BEFORE_ALL = -(2**62)


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
