"""Decoded rows, column by column, and what decodes them."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from nvt_loader.plan import Piece


class Rows(Protocol):
    """Consecutive rows of all columns."""

    rows: int

    def slice(self, begin: int, end: int) -> Rows:
        """Rows [begin, end) of them, on the same memory."""


#: ``(piece, rows at a time) → chunks``: consecutive rows, together exactly the piece's.
Decoder = Callable[[Piece, int], Iterator[Rows]]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Rows in CPU memory, column by column: label, dense, categorical.

    Attributes:
        rows: how many.
        addresses: int64 [columns], of the first row; of a list column, of its int32 offsets.
        sizes: int64 [columns], bytes from one row to the next there.
        values: int64 [columns], of a list column, the address of its elements; else 0.
        weights: int64 [columns], of a weighted column, the address of its elements' float32
            weights; else 0.
        owner: what keeps the memory alive.
    """

    rows: int
    addresses: np.ndarray
    sizes: np.ndarray
    values: np.ndarray
    weights: np.ndarray
    owner: Any

    def slice(self, begin: int, end: int) -> Chunk:
        """Rows [begin, end), on the same memory."""
        addresses = self.addresses + begin * self.sizes
        return Chunk(end - begin, addresses, self.sizes, self.values, self.weights, self.owner)

    def column(self, number: int, dtype: np.dtype | type) -> np.ndarray:
        """A column that is no list, on the same memory: [rows]."""
        return _view(self.addresses[number], self.rows, np.dtype(dtype))

    def offsets(self, number: int) -> np.ndarray:
        """Where the rows of a list column begin among its elements: int32 [rows + 1]."""
        return _view(self.addresses[number], self.rows + 1, np.dtype(np.int32))


def _view(address: int, length: int, dtype: np.dtype) -> np.ndarray:
    memory = (ctypes.c_char * (length * dtype.itemsize)).from_address(int(address))
    return np.frombuffer(memory, dtype)
