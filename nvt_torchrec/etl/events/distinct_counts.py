"""How many different values the events of each key have, as rows and events pass by.

Of each pair of a key and a value it is known how many events within the window have it. A pair
counts for its key from the first of them until the last one has left the window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from nvt_torchrec.base.arrays import to_offsets
from nvt_torchrec.base.kernels import compiled


@dataclasses.dataclass(frozen=True)
class DistinctCounts:
    """The pairs of all keys of a group.

    Attributes:
        columns: int64 [counts], of each count of values, the row of :attr:`EventBlock.pairs`.
        first: int64 [counts + 1], where the pairs of each of them begin, and the last ones end.
        events: int32 [pairs], how many events within the window have each pair.
        keys: int32 [pairs], the number of the key of each pair that an event had.
        values: int64 [keys, counts], how many different values each key has.
    """

    columns: np.ndarray
    first: np.ndarray
    events: np.ndarray
    keys: np.ndarray
    values: np.ndarray

    @classmethod
    def zeros(cls, keys: int, columns: Sequence[int], pairs: Sequence[int]) -> DistinctCounts:
        """Return no events.

        Args:
            keys: How many keys seen are.
            columns: See the attributes.
            pairs: How many pairs each count has.
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
        """What kernels take."""
        return self.columns, self.first, self.events, self.keys, self.values

    def start(self, count: int, keys: np.ndarray, pairs: np.ndarray) -> None:
        """Take pairs of earlier days that count for ever.

        Args:
            count: The count of values that has them.
            keys: int64 [n], the numbers of their keys.
            pairs: int64 [n], their numbers, each once.
        """
        index = self.first[count] + pairs
        self.events[index] = 1
        self.keys[index] = keys
        np.add.at(self.values[:, count], keys, 1)

    def list_pairs(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs that events have: the numbers of their keys, and of themselves, [n]."""
        pairs = slice(self.first[count], self.first[count + 1])
        seen = np.flatnonzero(self.events[pairs])
        return self.keys[pairs][seen], seen


@compiled()
def count_pairs(distinct: tuple, key: int, pairs: np.ndarray, event: int, sign: int) -> None:
    """Add an event to the pairs of its key, or with sign -1 subtract it."""
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
