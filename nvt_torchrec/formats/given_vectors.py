"""Vectors that come with rows to score, in the place of those that a workflow stores."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class GivenVectors:
    """The values of a vector for ``n`` rows; rows that share values refer to one copy of them.

    Attributes:
        values: float32 [m, width + 1], different vectors, each with its indicator behind it: 1, or
            0 beside zeros for a missing vector.
        index: int64 [n], which of them each row has.
    """

    values: np.ndarray
    index: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def slice(self, begin: int, end: int) -> GivenVectors:
        """Return the vectors of some rows."""
        return dataclasses.replace(self, index=self.index[begin:end])
