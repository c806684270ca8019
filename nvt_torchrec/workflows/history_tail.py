"""The newest events of each key of a history, kept for inference and for later days of the ETL."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from nvt_torchrec.base.arrays import to_offsets


@dataclasses.dataclass(frozen=True)
class HistoryTail:
    """The newest events of each key of a history.

    Attributes:
        keys: int64 [keys], ascending.
        offsets: int64 [keys + 1], where the events of each key begin, oldest first.
        known: int64 [events], the time from which each is known.
        ids: int32 [columns, events].
    """

    keys: np.ndarray
    offsets: np.ndarray
    known: np.ndarray
    ids: np.ndarray

    @classmethod
    def make_empty(cls, columns: int) -> HistoryTail:
        """Return a tail without events."""
        empty = np.empty(0, np.int64)
        return cls(empty, np.zeros(1, np.int64), empty, np.empty((columns, 0), np.int32))

    @classmethod
    def select_newest(
        cls, keys: np.ndarray, counts: np.ndarray, known: np.ndarray, ids: np.ndarray, maximum: int
    ) -> HistoryTail:
        """Return the newest events of each key that has any.

        Args:
            keys: int64 [keys], ascending.
            counts: int64 [keys], the number of events of each.
            known: int64 [events], ordered by key, then time.
            ids: int32 [columns, events].
            maximum: The maximum number of events that are kept of a key.
        """
        if (counts > maximum).any():
            events_left = np.repeat(np.cumsum(counts), counts) - np.arange(len(known))
            is_newest = events_left <= maximum
            known = known[is_newest]
            ids = ids[:, is_newest]
        kept_counts = np.minimum(counts, maximum)[counts > 0]
        offsets = to_offsets(kept_counts)
        return cls(keys[counts > 0], offsets, known, ids)

    @classmethod
    def concatenate(cls, parts: Sequence[HistoryTail]) -> HistoryTail:
        """Join tails whose keys ascend from one to the next."""
        counts = np.concatenate([np.diff(part.offsets) for part in parts])
        return cls(
            np.concatenate([part.keys for part in parts]),
            to_offsets(counts),
            np.concatenate([part.known for part in parts]),
            np.concatenate([part.ids for part in parts], axis=1),
        )

    def take(self, keys: slice) -> HistoryTail:
        """Return the events of a range of keys."""
        offsets = self.offsets[keys.start : keys.stop + 1]
        events = slice(int(offsets[0]), int(offsets[-1]))
        return HistoryTail(
            self.keys[keys], offsets - offsets[0], self.known[events], self.ids[:, events]
        )

    def expand(self) -> np.ndarray:
        """Return the key of each event, and the time from which it is known: int64 [2, events]."""
        return np.stack([np.repeat(self.keys, np.diff(self.offsets)), self.known])
