"""Rows of a split, column by column, and what decodes them."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from nvt_loader.kernels import copy_rows
from nvt_loader.plan import Piece


class Rows(Protocol):
    """Consecutive rows of all columns."""

    rows: int

    def slice(self, begin: int, end: int) -> Rows:
        """Rows [begin, end) of them, on the same memory."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a source's rows go in a block in CPU memory.

    Attributes:
        labels, dense, ids: of the block, flat; floats as their bits.
        runs: int64 [runs, 5], as :func:`nvt_loader.kernels.find_runs` gives them.
        batch: B.
    """

    labels: np.ndarray
    dense: np.ndarray
    ids: np.ndarray
    runs: np.ndarray
    batch: int

    @property
    def arguments(self) -> tuple:
        """As the kernels take them."""
        return self.labels, self.dense, self.ids, self.runs, self.batch


class CpuRows(Rows, Protocol):
    """Rows on the CPU, decoded or still to be."""

    def chunks(self) -> Iterator[Chunk]:
        """The rows, decoded."""

    def copy_to(self, target: Target, first: int) -> None:
        """Copy them to a block; they are the source's rows from ``first`` on."""


#: ``(piece, rows) → rows of it``: consecutive, together exactly the piece's; where they are decoded
#: at once, so many at a time.
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

    def chunks(self) -> Iterator[Chunk]:
        """The rows, decoded."""
        yield self

    def copy_to(self, target: Target, first: int) -> None:
        """Copy them to a block; they are the source's rows from ``first`` on."""
        labels, dense, ids, runs, batch = target.arguments
        copy_rows(labels, dense, ids, self.addresses, runs, batch, first, self.rows)

    def column(self, number: int, dtype: np.dtype | type) -> np.ndarray:
        """A column that is no list, on the same memory: [rows]."""
        return _view(self.addresses[number], self.rows, np.dtype(dtype))

    def offsets(self, number: int) -> np.ndarray:
        """Where the rows of a list column begin among its elements: int32 [rows + 1]."""
        return _view(self.addresses[number], self.rows + 1, np.dtype(np.int32))


def _view(address: int, length: int, dtype: np.dtype) -> np.ndarray:
    memory = (ctypes.c_char * (length * dtype.itemsize)).from_address(int(address))
    return np.frombuffer(memory, dtype)
