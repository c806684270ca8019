"""The encoded ids of categorical columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Ids:
    """The encoded ids of all categorical columns of ``n`` rows.

    Attributes:
        values: Integers [columns, n] if every row has one id in every column; with lists, the ids
            of all columns and rows in one dimension.
        offsets: Integers [columns, n + 1] for lists: row i of column j has the ids
            ``values[offsets[j, i]:offsets[j, i + 1]]``, and column j + 1 begins where column j
            ends. None if every row has one id in every column.
    """

    values: np.ndarray
    offsets: np.ndarray | None = None

    def __len__(self) -> int:
        return self.values.shape[1] if self.offsets is None else self.offsets.shape[1] - 1

    @classmethod
    def from_lengths(cls, columns: Sequence[np.ndarray], lengths: np.ndarray) -> Ids:
        """Make ids from their values and the lengths of the lists.

        Args:
            columns: The ids in pieces, one column after the other.
            lengths: Integers [columns, n], the number of ids of each row.
        """
        values = np.concatenate(columns)
        if (lengths == 1).all():
            return cls(values.reshape(lengths.shape))
        return cls(values, find_offsets(lengths))

    @classmethod
    def concatenate(cls, parts: Sequence[Ids]) -> Ids:
        """Join the ids of several blocks of rows, which have the same columns."""
        if all(part.offsets is None for part in parts):
            return cls(np.concatenate([part.values for part in parts], axis=1))
        values: list[np.ndarray] = []
        for ids_of_parts in zip(*(part.columns for part in parts), strict=True):
            values += ids_of_parts
        return cls.from_lengths(values, np.concatenate([part.lengths for part in parts], axis=1))

    def slice(self, begin: int, end: int) -> Ids:
        """Return the ids of the rows ``[begin, end)``; lists are copied, other ids are a view."""
        if self.offsets is None:
            return Ids(self.values[:, begin:end])
        offsets = self.offsets[:, begin : end + 1]
        columns = [self.values[first:last] for first, last in offsets[:, [0, -1]].tolist()]
        return Ids.from_lengths(columns, np.diff(offsets))

    def take_newest(self, first: int, maximum: int) -> Ids:
        """Keep only the last ``maximum`` ids of each row, in the columns from ``first`` on."""
        if self.offsets is None or self.get_lengths(first).max(initial=0) <= maximum:
            return self
        lengths = self.lengths
        lengths[first:] = np.minimum(lengths[first:], maximum)
        # A shortened list keeps its end. So the indices of its ids are consecutive numbers, shifted
        # by the distance between its end among all ids and its end among the ids that are kept.
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
        """Return the last ``width`` ids of each row in a column, padded on the left.

        Returns:
            The ids, integers [n, width], with 0 as padding; and where there is an id,
            bool [n, width].
        """
        lengths = self.lengths[j]
        from_end = np.arange(width, 0, -1)  # the distance of a position to the end: width … 1
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
        """The ids of each column, see :meth:`column`."""
        if self.offsets is None:
            return [*self.values]
        ends = self.offsets[:, [0, -1]].tolist()
        return [self.values[begin:end] for begin, end in ends]

    @property
    def lengths(self) -> np.ndarray:
        """The number of ids of each row, [columns, n]."""
        return self.get_lengths(0)

    def get_lengths(self, first: int) -> np.ndarray:
        """Return the number of ids of each row, in the columns from ``first`` on."""
        if self.offsets is None:
            return np.ones_like(self.values[first:])
        return self.offsets[first:, 1:] - self.offsets[first:, :-1]


def find_offsets(lengths: np.ndarray, dtype: type = np.int64) -> np.ndarray:
    """Return :attr:`Ids.offsets` for the number of ids in each row, integers [columns, n]."""
    columns, rows = lengths.shape
    ends = lengths.cumsum().reshape(columns, rows)  # one running sum over all columns
    offsets = np.zeros((columns, rows + 1), dtype)
    offsets[:, 1:] = ends
    if rows:
        offsets[1:, 0] = ends[:-1, -1]
    return offsets
