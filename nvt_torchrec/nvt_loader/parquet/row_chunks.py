"""Rows in CPU memory, column by column, and a reader that hands them out in order."""

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
    """A block in CPU memory, and the copies that say which of its rows come from a source.

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


#: A function ``(slice, rows) → parts of the slice``. The parts follow one another and together are
#: the slice; it decodes at most ``rows`` rows at a time.
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
        """Yield the chunk itself: it is decoded already."""
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
    """Return ``length`` numbers of four bytes from an address on, on the same memory."""
    memory: Any = (ctypes.c_char * (4 * length)).from_address(int(address))
    return np.frombuffer(memory, dtype)


class ShardReader:
    """Hands out consecutive rows of a sequence of row group slices.

    :meth:`decode_ahead` lets a pool's threads decode the next rows while earlier ones are used (of
    :class:`~nvt_loader.parquet.decoder.LazyRows`, they only read the bytes). :meth:`take` itself
    decodes rows that no thread has begun with, so it may be a task of the same pool.
    """

    def __init__(
        self, decoder: Decoder, slices: Iterable[RowGroupSlice], first: int, rows: int
    ) -> None:
        """Read ``slices`` with ``decoder``.

        Args:
            decoder: Decodes a slice.
            slices: The slices to read.
            first: Rows that are decoded at a time in the first slice: fewer, so that they are ready
                sooner.
            rows: Rows that are decoded at a time in the others. While so many decoded rows wait to
                be taken, nothing is decoded ahead.
        """
        self._chunks = _decode_slices(decoder, slices, first, rows)
        self._enough = rows
        self._rest: Rows | None = None
        self._ready: collections.deque[Rows] = collections.deque()
        self._error: Exception | None = None
        self._decoding = threading.Lock()

    def take(self, rows: int) -> Iterator[Rows]:
        """Yield the next ``rows`` rows, in parts that follow one another."""
        while rows:
            chunk = self._rest if self._rest is not None else self._next()
            self._rest = None
            if chunk.rows > rows:
                self._rest = chunk.slice(rows, chunk.rows)
                chunk = chunk.slice(0, rows)
            rows -= chunk.rows
            yield chunk

    def peek(self, rows: int) -> list[Rows]:
        """Return parts that hold the next ``rows`` rows, or all that are left, without taking them.

        An error of decoding is not raised here, but where the rows are taken.
        """
        while self.left < rows and self._error is None:
            with self._decoding:
                self._decode_next()
        rest = [] if self._rest is None else [self._rest]
        return [*rest, *self._ready]

    @property
    def left(self) -> int:
        """The number of decoded rows that wait to be taken."""
        rest, ready = self._rest, self._ready.copy()  # copies: other threads change them meanwhile
        rows = sum(chunk.rows for chunk in ready)
        return rows if rest is None else rows + rest.rows

    def decode_ahead(self, pool: concurrent.futures.Executor) -> None:
        """Let the pool decode the next rows, unless enough are decoded."""
        if self.left < self._enough:
            pool.submit(self._decode)

    def _decode(self) -> None:
        """Decode until enough rows are ready, or another thread decodes: a task of the pool."""
        while self._error is None and self.left < self._enough:
            if not self._decoding.acquire(blocking=False):
                return  # another thread is decoding
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
        """Decode the next rows, or keep the error for :meth:`take`; the lock must be held."""
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
    """Decode slices one after another: the first by ``first`` rows, the others by ``rows``."""
    at_once = first
    for part in slices:
        yield from decoder(part, at_once)
        at_once = rows


class Buffers:
    """Hands out byte buffers and takes each back when nothing refers to it any more."""

    def __init__(self) -> None:
        self._free: collections.deque[np.ndarray] = collections.deque()

    def take(self, size: int) -> np.ndarray:
        """Return ``size`` uninitialised bytes: uint8 [size].

        Slices of the array do not keep it alive: use it as a tensor's memory, or hold it.
        """
        buffer = self._find_free(size)
        if buffer is None:
            buffer = np.empty(size, np.uint8)
        view = buffer[:size]
        # Called when nothing refers to the view any more, which is not the same object as buffer.
        weakref.finalize(view, self._free.append, buffer).atexit = False
        return view

    def _find_free(self, size: int) -> np.ndarray | None:
        """Return a free buffer of about ``size`` bytes; buffers of other sizes are given up."""
        for _ in range(len(self._free)):
            try:
                free = self._free.popleft()
            except IndexError:  # another thread took the last one
                return None
            if size <= len(free) <= 2 * size + 4096:
                return free
        return None
