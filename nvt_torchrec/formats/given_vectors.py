"""Vectors that come with rows to score, instead of from the tables of a workflow."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class GivenVectors:
    """The values of a vector for ``n`` rows; rows may share a vector.

    Attributes:
        values: float32 [m, width + 1], the distinct vectors. The last column is 1 if the vector is
            present; a missing vector is all zeros.
        index: int64 [n], the index in ``values`` of each row's vector.
    """

    values: np.ndarray
    index: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def slice(self, begin: int, end: int) -> GivenVectors:
        """Return the vectors of the rows ``[begin, end)``."""
        return dataclasses.replace(self, index=self.index[begin:end])
