"""What is kept of the events of earlier days."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from nvt_torchrec.base.kernels import compiled

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

    def shorten(self, horizon: int) -> EarlierEvents:
        """Sum up, for each key, the events that are known before a time; others are kept.

        These events are overwritten.
        """
        left = _shorten(self.key, self.known, self.happened, self.counts, horizon)
        return EarlierEvents.concatenate([self.take(slice(left))])  # a copy, of these alone

    @classmethod
    def concatenate(cls, parts: Sequence[EarlierEvents]) -> EarlierEvents:
        """Return the events of several one after the other."""
        return cls(
            np.concatenate([part.key for part in parts]),
            np.concatenate([part.known for part in parts]),
            np.concatenate([part.happened for part in parts]),
            np.concatenate([part.counts for part in parts], axis=1),
        )


@compiled()
def _shorten(
    key: np.ndarray, known: np.ndarray, happened: np.ndarray, counts: np.ndarray, horizon: int
) -> int:
    """Shorten events in place, see :meth:`EarlierEvents.shorten`; return how many are left."""
    used = 0
    for event in range(len(key)):
        is_old = known[event] < horizon
        merged = is_old and used and key[used - 1] == key[event] and known[used - 1] == BEFORE_ALL
        if not merged:
            key[used], happened[used] = key[event], happened[event]
            known[used] = BEFORE_ALL if is_old else known[event]
            used += 1
        happened[used - 1] = max(happened[used - 1], happened[event])
        for kind in range(len(counts)):
            before = counts[kind, used - 1] if merged else 0
            counts[kind, used - 1] = before + counts[kind, event]
    return used
