"""The number of distinct values among the events of each key, updated in the order of time.

For each pair of a key and a value, the number of events within the window is kept. The pair counts
for its key as long as this number is not 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from nvt_torchrec.base.arrays import to_offsets
from nvt_torchrec.base.kernels import compiled


@dataclasses.dataclass(frozen=True)
class DistinctCounts:
    """The pairs of key and value of all keys of a group.

    Attributes:
        columns: int64 [counts], for each count of values, the row of :attr:`EventBlock.pairs`.
        first: int64 [counts + 1], where the pairs of each count begin, and the end of the last.
        events: int32 [pairs], the number of events within the window that have each pair.
        keys: int32 [pairs], the number of each pair's key; 0 until an event has the pair.
        values: int64 [keys, counts], the number of distinct values of each key.
    """

    columns: np.ndarray
    first: np.ndarray
    events: np.ndarray
    keys: np.ndarray
    values: np.ndarray

    @classmethod
    def zeros(cls, keys: int, columns: Sequence[int], pairs: Sequence[int]) -> DistinctCounts:
        """Return the counts before any event.

        Args:
            keys: Number of keys.
            columns: See the attributes.
            pairs: Number of pairs of each count.
        """
        first = to_offsets(np.array(pairs, np.int64))
        return cls(
            columns=np.array(columns, np.int64),
            first=first,
            events=np.zeros(first[-1], np.int32),
            keys=np.zeros(first[-1], np.int32),
            values=np.zeros((keys, len(columns)), np.int64),
        )

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays, as one argument for kernels."""
        return self.columns, self.first, self.events, self.keys, self.values

    def add_earlier_pairs(self, count: int, keys: np.ndarray, pairs: np.ndarray) -> None:
        """Add pairs of earlier days that never leave the window.

        Args:
            count: The index of the count of values.
            keys: int64 [n], the numbers of their keys.
            pairs: int64 [n], the distinct numbers of the pairs.
        """
        index = self.first[count] + pairs
        self.events[index] = 1
        self.keys[index] = keys
        np.add.at(self.values[:, count], keys, 1)

    def list_pairs(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs that events have: the numbers of their keys, and their own, [n] each."""
        pairs = slice(self.first[count], self.first[count + 1])
        seen = np.flatnonzero(self.events[pairs])
        return self.keys[pairs][seen], seen


@compiled()
def count_pairs(distinct: tuple, key: int, pairs: np.ndarray, event: int, sign: int) -> None:
    """Add an event to the pairs of its key (sign 1), or subtract it (sign -1)."""
    columns, first, events, keys, values = distinct
    for d in range(len(columns)):
        pair = pairs[columns[d], event]
        if pair < 0:
            continue
        index = first[d] + pair
        events[index] += sign
        if sign > 0:
            keys[index] = key
            values[key, d] += events[index] == 1
        else:
            values[key, d] -= events[index] == 0
