"""The newest events of each key of a history, which are kept for inference and further days."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from nvt_torchrec.base.arrays import to_offsets


@dataclasses.dataclass(frozen=True)
class HistoryTail:
    """The newest events of each key of a history.

    Attributes:
        keys: int64 [keys], rising.
        offsets: int64 [keys + 1], where the events of each key begin; the oldest comes first.
        known: int64 [events], from when each is known.
        ids: int32 [columns, events].
    """

    keys: np.ndarray
    offsets: np.ndarray
    known: np.ndarray
    ids: np.ndarray

    @classmethod
    def none(cls, columns: int) -> HistoryTail:
        """Return no events."""
        empty = np.empty(0, np.int64)
        return cls(empty, np.zeros(1, np.int64), empty, np.empty((columns, 0), np.int32))

    @classmethod
    def newest(
        cls, keys: np.ndarray, counts: np.ndarray, known: np.ndarray, ids: np.ndarray, maximum: int
    ) -> HistoryTail:
        """Return the newest events of each key that has any.

        Args:
            keys: int64 [keys], rising.
            counts: int64 [keys], how many events each has.
            known: int64 [events], by key, then time.
            ids: int32 [columns, events].
            maximum: How many events of a key there are at most.
        """
        if (counts > maximum).any():
            events_left = np.repeat(np.cumsum(counts), counts) - np.arange(len(known))
            is_newest = events_left <= maximum
            known, ids = known[is_newest], ids[:, is_newest]
        kept_counts = np.minimum(counts, maximum)[counts > 0]
        offsets = to_offsets(kept_counts)
        return cls(keys[counts > 0], offsets, known, ids)

    @classmethod
    def concatenate(cls, parts: Sequence[HistoryTail]) -> HistoryTail:
        """Return the events of several with rising keys."""
        counts = np.concatenate([np.diff(part.offsets) for part in parts])
        return cls(
            np.concatenate([part.keys for part in parts]),
            to_offsets(counts),
            np.concatenate([part.known for part in parts]),
            np.concatenate([part.ids for part in parts], axis=1),
        )

    def take(self, keys: slice) -> HistoryTail:
        """Return the events of some keys that follow each other."""
        offsets = self.offsets[keys.start : keys.stop + 1]
        events = slice(int(offsets[0]), int(offsets[-1]))
        return HistoryTail(
            self.keys[keys], offsets - offsets[0], self.known[events], self.ids[:, events]
        )

    def expand(self) -> np.ndarray:
        """Return the key of each event, and from when it is known: int64 [2, events]."""
        return np.stack([np.repeat(self.keys, np.diff(self.offsets)), self.known])
