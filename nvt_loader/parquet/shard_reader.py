"""Hand out the rows of a virtual shard in order, decoded ahead by other threads."""

from __future__ import annotations

import collections
import concurrent.futures
import threading
from collections.abc import Iterable, Iterator

from nvt_torchrec.nvt_loader.parquet.row_chunks import Decoder, Rows
from nvt_torchrec.nvt_loader.plan import RowGroupSlice


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
            decoder: decodes a slice, so many rows at a time.
            slices: what to read.
            first: rows that are decoded at a time in the first slice; fewer, so that they come
                sooner.
            rows: rows that are decoded at a time in the others. While so many rows are there to be
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
                    raise self._error
        return self._ready.popleft()

    def _decode_next(self) -> None:
        if self._error is None:
            try:
                self._ready.append(next(self._chunks))
            except StopIteration:
                self._error = EOFError("no rows are left")
            except Exception as error:  # raised again where the rows are taken
                self._error = error
