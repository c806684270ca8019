"""Rows in CPU memory, column by column, and the interface of what decodes them."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from nvt_torchrec.nvt_loader.kernels import copy_rows
from nvt_torchrec.nvt_loader.plan import RowGroupSlice


class Rows(Protocol):
    """Consecutive rows of all columns."""

    rows: int

    def slice(self, begin: int, end: int) -> Rows:
        """Return rows [begin, end), on the same memory."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Where the rows of a source go in a block in CPU memory.

    Attributes:
        labels, dense, ids: the block's memory, flat; floats as their bits.
        copies: int64 [copies, 5], from :func:`nvt_loader.kernels.find_copies`.
        batch: B.
    """

    labels: np.ndarray
    dense: np.ndarray
    ids: np.ndarray
    copies: np.ndarray
    batch: int

    @property
    def arguments(self) -> tuple:
        """The arguments of the compiled loops."""
        return self.labels, self.dense, self.ids, self.copies, self.batch


class CpuRows(Rows, Protocol):
    """Rows on the CPU, decoded or not yet."""

    def chunks(self) -> Iterator[RowChunk]:
        """Decode the rows."""

    def copy_to(self, target: Target, first: int) -> None:
        """Copy the rows to a block; ``first`` is the number of the first one in its source."""


#: ``(slice, rows) → parts of the slice``, which follow one another and together are the slice. What
#: is decoded at once is decoded so many rows at a time.
Decoder = Callable[[RowGroupSlice, int], Iterator[Rows]]


@dataclasses.dataclass(frozen=True)
class RowChunk:
    """Rows in CPU memory, column by column: label, dense, categorical.

    Attributes:
        rows: the number of rows.
        addresses: int64 [columns], where the first row lies; of a list column, its int32 offset.
        sizes: int64 [columns], bytes from one row to the next at that address.
        values: int64 [columns], the address of a list column's elements; 0 for other columns.
        weights: int64 [columns], the address of the float32 weights of a list column's elements; 0
            without weights.
        owner: the objects that keep the memory alive.
    """

    rows: int
    addresses: np.ndarray
    sizes: np.ndarray
    values: np.ndarray
    weights: np.ndarray
    owner: Any

    def slice(self, begin: int, end: int) -> RowChunk:
        """Return rows [begin, end), on the same memory."""
        addresses = self.addresses + begin * self.sizes
        return RowChunk(end - begin, addresses, self.sizes, self.values, self.weights, self.owner)

    def chunks(self) -> Iterator[RowChunk]:
        """Yield the chunk itself, which is decoded."""
        yield self

    def copy_to(self, target: Target, first: int) -> None:
        """Copy the rows to a block; ``first`` is the number of the first one in its source."""
        labels, dense, ids, copies, batch = target.arguments
        copy_rows(labels, dense, ids, self.addresses, copies, batch, first, self.rows)

    def column(self, number: int, dtype: np.dtype | type) -> np.ndarray:
        """Return a column other than a list, on the same memory: [rows]."""
        return _view(self.addresses[number], self.rows, np.dtype(dtype))

    def offsets(self, number: int) -> np.ndarray:
        """Return where the rows of a list column begin among its elements: int32 [rows + 1]."""
        return _view(self.addresses[number], self.rows + 1, np.dtype(np.int32))


def _view(address: int, length: int, dtype: np.dtype) -> np.ndarray:
    memory = (ctypes.c_char * (length * dtype.itemsize)).from_address(int(address))
    return np.frombuffer(memory, dtype)
