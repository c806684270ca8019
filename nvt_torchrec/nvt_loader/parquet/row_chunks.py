"""Rows in CPU memory, column by column: what decodes them, and what hands them out in order."""

from __future__ import annotations

import collections
import concurrent.futures
import ctypes
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from nvt_torchrec.nvt_loader.parquet.parquet_kernels import copy_rows

#: Rows [begin, end).
Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class RowGroupSlice:
    """Rows [begin, end) of a row group, given by its index in file order."""

    row_group: int
    begin: int
    end: int


class Rows(Protocol):
    """Consecutive rows of all columns, decoded or not yet."""

    rows: int

    def slice(self, begin: int, end: int) -> Rows:
        """Return rows [begin, end), on the same memory."""


class Target(NamedTuple):
    """Where the rows of a source go in a block in CPU memory.

    Attributes:
        labels, weights, dense: The block's memory [steps · B, columns]; floats as their bits.
        ids: The same, flat.
        copies: int64 [copies, 5], from :func:`nvt_loader.parquet.parquet_kernels.find_copies`.
        batch: B.
    """

    labels: np.ndarray
    weights: np.ndarray
    dense: np.ndarray
    ids: np.ndarray
    copies: np.ndarray
    batch: int


#: ``(slice, rows) → parts of the slice``, which follow one another and together are the slice. What
#: is decoded at once is decoded so many rows at a time.
Decoder = Callable[[RowGroupSlice, int], Iterator[Any]]


@dataclasses.dataclass(frozen=True)
class RowChunk:
    """Rows in CPU memory, column by column: labels, weight, dense, categorical.

    A number takes four bytes.

    Attributes:
        rows: The number of rows.
        addresses: int64 [columns], where the first row lies; of a list column, its int32 offset.
        values: int64 [columns], the address of a list column's elements; 0 for other columns.
        owner: The objects that keep the memory alive.
    """

    rows: int
    addresses: np.ndarray
    values: np.ndarray
    owner: Any

    def slice(self, begin: int, end: int) -> RowChunk:
        """Return rows [begin, end), on the same memory."""
        return RowChunk(end - begin, self.addresses + 4 * begin, self.values, self.owner)

    def chunks(self) -> Iterator[RowChunk]:
        """Yield the chunk itself, which is decoded."""
        yield self

    def copy_to(self, target: Target, first: int) -> None:
        """Copy the rows to a block; ``first`` is the number of the first one in its source."""
        *memory, copies, batch = target
        copy_rows(*memory, self.addresses, copies, batch, first, self.rows)

    def column(self, number: int, dtype: type) -> np.ndarray:
        """Return a column other than a list, on the same memory: [rows]."""
        return _view(self.addresses[number], self.rows, dtype)

    def offsets(self, number: int) -> np.ndarray:
        """Return where the rows of a list column begin among its elements: int32 [rows + 1]."""
        return _view(self.addresses[number], self.rows + 1, np.int32)


def _view(address: int, length: int, dtype: type) -> np.ndarray:
    memory: Any = (ctypes.c_char * (4 * length)).from_address(int(address))
    return np.frombuffer(memory, dtype)


class ShardReader:
    """Hands out consecutive rows of a sequence of row group slices.

    :meth:`decode_ahead` lets a pool's threads decode (of :class:`~nvt_loader.parquet.decoder
    .LazyRows`, read) the next rows while earlier ones are used. :meth:`take` decodes what no thread
    has begun with, so it may itself be a task of the same pool.
    """

    def __init__(
        self, decoder: Decoder, slices: Iterable[RowGroupSlice], first: int, rows: int
    ) -> None:
        """Read ``slices`` with ``decoder``.

        Args:
            decoder: Decodes a slice, so many rows at a time.
            slices: What to read.
            first: Rows that are decoded at a time in the first slice; fewer, so that they come
                sooner.
            rows: Rows that are decoded at a time in the others. While so many rows are there to be
                taken, nothing is decoded ahead.
        """
        sizes = iter([first])
        self._chunks = (chunk for part in slices for chunk in decoder(part, next(sizes, rows)))
        self._enough = rows
        self._rest: Rows | None = None
        self._ready: collections.deque[Rows] = collections.deque()
        self._error: Exception | None = None
        self._decoding = threading.Lock()

    def take(self, rows: int) -> Iterator[Rows]:
        """Yield the next ``rows`` rows, in parts that follow one another."""
        while rows:
            chunk = self._rest if self._rest is not None else self._next()
            taken = min(rows, chunk.rows)
            whole = taken == chunk.rows
            self._rest = None if whole else chunk.slice(taken, chunk.rows)
            rows -= taken
            yield chunk if whole else chunk.slice(0, taken)

    def peek(self, rows: int) -> list[Rows]:
        """Return the parts that the next ``rows`` rows begin or end in, or all that are left.

        They stay to be taken. An error is raised where the rows are taken.
        """
        while self.left < rows and self._error is None:
            with self._decoding:
                self._decode_next()
        rest = [] if self._rest is None else [self._rest]
        return [*rest, *self._ready]

    @property
    def left(self) -> int:
        """Rows that are there to be taken."""
        rest, ready = self._rest, self._ready.copy()  # which other threads change
        return (rest.rows if rest is not None else 0) + sum(chunk.rows for chunk in ready)

    def decode_ahead(self, pool: concurrent.futures.Executor) -> None:
        """Let the pool decode the next rows, unless enough are there."""
        if self.left < self._enough:
            pool.submit(self._decode)

    def _decode(self) -> None:
        while self._error is None and self.left < self._enough:
            if not self._decoding.acquire(blocking=False):
                return  # another thread is decoding
            try:
                self._decode_next()
            finally:
                self._decoding.release()

    def _next(self) -> Rows:
        if not self._ready:
            with self._decoding:
                if not self._ready:
                    self._decode_next()
                if not self._ready:
                    raise self._error or AssertionError
        return self._ready.popleft()

    def _decode_next(self) -> None:
        if self._error is None:
            try:
                self._ready.append(next(self._chunks))
            except StopIteration:
                self._error = EOFError("no rows are left")
            except Exception as error:  # raised again where the rows are taken
                self._error = error


class Buffers:
    """Hands out byte buffers and takes each back when nothing refers to it any more."""

    def __init__(self) -> None:
        self._free: collections.deque[np.ndarray] = collections.deque()

    def take(self, size: int) -> np.ndarray:
        """Return ``size`` uninitialised bytes: uint8 [size].

        Slices of the array do not keep it alive: use it as a tensor's memory, or hold it.
        """
        buffer = None
        for _ in range(len(self._free)):
            try:
                free = self._free.popleft()
            except IndexError:  # another thread took it
                break
            if size <= len(free) <= 2 * size + 4096:
                buffer = free
                break
        if buffer is None:
            buffer = np.empty(size, np.uint8)
        view = buffer[:size]
        weakref.finalize(view, self._free.append, buffer).atexit = False
        return view
