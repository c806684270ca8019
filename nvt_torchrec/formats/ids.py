"""The encoded ids of categorical columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Ids:
    """The encoded ids of all categorical columns of ``n`` rows.

    Attributes:
        values: Integers [columns, n], one id in each row; with lists, one-dimensional.
        offsets: Integers [columns, n + 1], for lists: row i of column j has the ids
            ``values[offsets[j, i]:offsets[j, i + 1]]``, and column j + 1 begins where column j
            ends. None if each row has one id in each column.
    """

    values: np.ndarray
    offsets: np.ndarray | None = None

    def __len__(self) -> int:
        return self.values.shape[1] if self.offsets is None else self.offsets.shape[1] - 1

    @classmethod
    def from_lengths(cls, columns: Sequence[np.ndarray], lengths: np.ndarray) -> Ids:
        """Make ids of their values and lengths.

        Args:
            columns: The ids in pieces, one column after the other.
            lengths: Integers [columns, n], how many each row has.
        """
        values = np.concatenate(columns)
        if (lengths == 1).all():
            return cls(values.reshape(lengths.shape))
        return cls(values, find_offsets(lengths))

    @classmethod
    def concatenate(cls, parts: Sequence[Ids]) -> Ids:
        """Return the ids of some rows, followed by those of others of the same columns."""
        if all(part.offsets is None for part in parts):
            return cls(np.concatenate([part.values for part in parts], axis=1))
        values: list[np.ndarray] = []
        for ids_of_parts in zip(*(part.columns for part in parts), strict=True):
            values += ids_of_parts
        return cls.from_lengths(values, np.concatenate([part.lengths for part in parts], axis=1))

    def slice(self, begin: int, end: int) -> Ids:
        """Return the ids of the rows from ``begin`` to ``end``; copies of lists, else views."""
        if self.offsets is None:
            return Ids(self.values[:, begin:end])
        offsets = self.offsets[:, begin : end + 1]
        columns = [self.values[first:last] for first, last in offsets[:, [0, -1]].tolist()]
        return Ids.from_lengths(columns, np.diff(offsets))

    def take_newest(self, first: int, maximum: int) -> Ids:
        """Return the ids with only the last ``maximum`` of each row in the columns from ``first``.

        All ids of the columns before are kept.
        """
        if self.offsets is None or self.get_lengths(first).max(initial=0) <= maximum:
            return self
        lengths = self.lengths
        lengths[first:] = np.minimum(lengths[first:], maximum)
        # The ids of a list end where they did. So the indices of its last ones are consecutive
        # numbers, moved by the distance between that end and its end among the ids that are kept.
        ends = self.offsets[:, 1:].reshape(-1)
        indices = np.arange(lengths.sum())
        indices += np.repeat(ends - lengths.cumsum(), lengths.reshape(-1))
        return Ids.from_lengths([self.values[indices]], lengths)

    def column(self, j: int) -> np.ndarray:
        """Return the ids of all rows of a column, one row after the other."""
        if self.offsets is None:
            return self.values[j]
        return self.values[self.offsets[j, 0] : self.offsets[j, -1]]

    def pad(self, j: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the last ids of each row in a column.

        Returns:
            Integers [n, width], which end with the last id of the row and begin with 0 where it has
            fewer; and bool [n, width], where there is an id.
        """
        lengths = self.lengths[j]
        from_end = np.arange(width, 0, -1)  # the last position of a row is 1 from its end
        present = from_end <= lengths[:, np.newaxis]
        padded = np.zeros(present.shape, self.values.dtype)
        indices = lengths.cumsum()[:, np.newaxis] - from_end
        padded[present] = self.column(j)[indices[present]]
        return padded, present

    @property
    def count(self) -> int:
        """The number of columns."""
        return len(self.values if self.offsets is None else self.offsets)

    @property
    def columns(self) -> list[np.ndarray]:
        """What :meth:`column` returns for each column."""
        if self.offsets is None:
            return [*self.values]
        ends = self.offsets[:, [0, -1]].tolist()
        return [self.values[begin:end] for begin, end in ends]

    @property
    def lengths(self) -> np.ndarray:
        """How many ids each row has: [columns, n]."""
        return self.get_lengths(0)

    def get_lengths(self, first: int) -> np.ndarray:
        """Return how many ids each row has in the columns from ``first`` on."""
        if self.offsets is None:
            return np.ones_like(self.values[first:])
        return self.offsets[first:, 1:] - self.offsets[first:, :-1]


def find_offsets(lengths: np.ndarray, dtype: type = np.int64) -> np.ndarray:
    """Return :attr:`Ids.offsets` for the number of ids in each row, integers [columns, n]."""
    columns, rows = lengths.shape
    ends = lengths.cumsum().reshape(columns, rows)  # the ids of a column follow those before it
    offsets = np.zeros((columns, rows + 1), dtype)
    offsets[:, 1:] = ends
    if rows:
        offsets[1:, 0] = ends[:-1, -1]
    return offsets
