"""Rows in CPU memory, stored column by column, and a reader that hands them out in order."""

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
    """Consecutive rows of all columns, which may not be decoded yet."""

    rows: int

    def slice(self, begin: int, end: int) -> Rows:
        """Return rows [begin, end) as a view."""


class Target(NamedTuple):
    """The memory of a block, and the copies that fill the rows of one source.

    Attributes:
        labels, weights, dense: int32 [steps · B, columns], the bits of the block's float32 values.
        ids: int32 [steps · columns · B], the block's ids.
        copies: int64 [copies, 5], from :func:`nvt_loader.parquet.parquet_kernels.find_copies`.
        batch: B.
    """

    labels: np.ndarray
    weights: np.ndarray
    dense: np.ndarray
    ids: np.ndarray
    copies: np.ndarray
    batch: int


#: A function ``(slice, rows) → parts of the slice``. Concatenated, the parts are the slice. At most
#: ``rows`` rows are decoded at a time.
Decoder = Callable[[RowGroupSlice, int], Iterator[Any]]


@dataclasses.dataclass(frozen=True)
class RowChunk:
    """Decoded rows in CPU memory, column by column: labels, weight, dense, categorical.

    Every value takes four bytes.

    Attributes:
        rows: The number of rows.
        addresses: int64 [columns], the address of each column's first row. For a list column, the
            address of the first row's offset (int32).
        values: int64 [columns], the address of a list column's elements; 0 for other columns.
        owner: The objects that keep the memory alive.
    """

    rows: int
    addresses: np.ndarray
    values: np.ndarray
    owner: Any

    def slice(self, begin: int, end: int) -> RowChunk:
        """Return rows [begin, end) as a view."""
        return RowChunk(end - begin, self.addresses + 4 * begin, self.values, self.owner)

    def decode(self) -> Iterator[RowChunk]:
        """Yield the chunk itself, which is already decoded."""
        yield self

    def copy_to(self, target: Target, first: int) -> None:
        """Copy the rows to a block; ``first`` is the index of the first row in its source."""
        *memory, copies, batch = target
        copy_rows(*memory, self.addresses, copies, batch, first, self.rows)

    def view_column(self, number: int, dtype: type) -> np.ndarray:
        """Return a view of a column without lists: [rows]."""
        return _view(self.addresses[number], self.rows, dtype)

    def view_offsets(self, number: int) -> np.ndarray:
        """Return a view of the offsets of a list column: int32 [rows + 1]."""
        return _view(self.addresses[number], self.rows + 1, np.int32)


def _view(address: int, length: int, dtype: type) -> np.ndarray:
    """Return a view of ``length`` values of four bytes at an address."""
    memory: Any = (ctypes.c_char * (4 * length)).from_address(int(address))
    return np.frombuffer(memory, dtype)


class ShardReader:
    """Hands out consecutive rows of a sequence of row group slices.

    :meth:`decode_ahead` lets the threads of a pool decode the next rows while earlier rows are in
    use. (:class:`~nvt_loader.parquet.decoder.LazyRows` are only read from the file by then, and
    decoded on use.) :meth:`take` decodes rows itself if no thread has begun to, so it never waits
    for a free thread and may run in the same pool.
    """

    def __init__(
        self, decoder: Decoder, slices: Iterable[RowGroupSlice], first: int, rows: int
    ) -> None:
        """Read ``slices`` with ``decoder``.

        Args:
            decoder: Decodes a slice.
            slices: The slices to read.
            first: The number of rows decoded at a time in the first slice: fewer than later, so
                that the first rows are ready sooner.
            rows: The number of rows decoded at a time in all other slices. Decoding ahead stops
                when this many decoded rows wait to be taken.
        """
        self._chunks = _decode_slices(decoder, slices, first, rows)
        self._max_ahead = rows
        self._rest: Rows | None = None
        self._ready: collections.deque[Rows] = collections.deque()
        self._error: Exception | None = None
        self._decoding = threading.Lock()

    def take(self, rows: int) -> Iterator[Rows]:
        """Yield the next ``rows`` rows in one or more consecutive parts."""
        while rows:
            chunk = self._rest if self._rest is not None else self._next()
            self._rest = None
            if chunk.rows > rows:
                self._rest = chunk.slice(rows, chunk.rows)
                chunk = chunk.slice(0, rows)
            rows -= chunk.rows
            yield chunk

    def peek(self, rows: int) -> list[Rows]:
        """Return parts that contain the next ``rows`` rows (or all remaining) without taking them.

        A decoding error is not raised here but by the :meth:`take` of the same rows.
        """
        while self.left < rows and self._error is None:
            with self._decoding:
                self._decode_next()
        rest = [] if self._rest is None else [self._rest]
        return [*rest, *self._ready]

    @property
    def left(self) -> int:
        """The number of decoded rows that wait to be taken."""
        # Other threads change both meanwhile, so each is read once; the deque is copied because
        # iterating over it while it changes is an error.
        rest = self._rest
        ready = self._ready.copy()
        rows = sum(chunk.rows for chunk in ready)
        return rows if rest is None else rows + rest.rows

    def decode_ahead(self, pool: concurrent.futures.Executor) -> None:
        """Let the pool decode the next rows, unless enough decoded rows are waiting."""
        if self.left < self._max_ahead:
            pool.submit(self._decode)

    def _decode(self) -> None:
        """Decode until enough rows are ready, as a task of the pool.

        Return at once if another thread is decoding: a waiting thread would be lost to the pool.
        """
        while self._error is None and self.left < self._max_ahead:
            if not self._decoding.acquire(blocking=False):
                return
            try:
                self._decode_next()
            finally:
                self._decoding.release()

    def _next(self) -> Rows:
        """Return the next decoded rows; raise the error that ended the decoding."""
        if not self._ready:
            with self._decoding:
                # Another thread may have decoded them while this one waited for the lock.
                if not self._ready:
                    self._decode_next()
                if not self._ready:
                    raise self._error or AssertionError
        return self._ready.popleft()

    def _decode_next(self) -> None:
        """Decode the next rows, or keep the error for :meth:`take`. The caller holds the lock."""
        if self._error is not None:
            return
        try:
            self._ready.append(next(self._chunks))
        except StopIteration:
            self._error = EOFError("no rows are left")
        except Exception as error:
            self._error = error


def _decode_slices(
    decoder: Decoder, slices: Iterable[RowGroupSlice], first: int, rows: int
) -> Iterator[Rows]:
    """Decode the first slice ``first`` rows at a time, and the others ``rows`` rows at a time."""
    rows_at_once = first
    for part in slices:
        yield from decoder(part, rows_at_once)
        rows_at_once = rows


class Buffers:
    """Hands out byte buffers, and reuses each one when nothing refers to it any more."""

    def __init__(self) -> None:
        self._free: collections.deque[np.ndarray] = collections.deque()

    def take(self, size: int) -> np.ndarray:
        """Return ``size`` uninitialised bytes: uint8 [size].

        A NumPy slice of the array does not keep it alive (its base is the buffer), so the caller
        must hold the array itself, or a tensor made of it, as long as the memory is in use.
        """
        buffer = self._find_free(size)
        if buffer is None:
            buffer = np.empty(size, np.uint8)
        view = buffer[:size]
        # The buffer returns to the free ones when the view, which is a separate object, is deleted.
        weakref.finalize(view, self._free.append, buffer).atexit = False
        return view

    def _find_free(self, size: int) -> np.ndarray | None:
        """Return a free buffer of about ``size`` bytes, and drop free buffers of other sizes."""
        for _ in range(len(self._free)):
            try:
                free = self._free.popleft()
            except IndexError:  # another thread took the last one
                return None
            if size <= len(free) <= 2 * size + 4096:
                return free
        return None
