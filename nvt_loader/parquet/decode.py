"""A decoder for the CPU, and the reader that hands out a run of rows bit by bit.

Files are read, not mapped: a mapped file that is cut short, or a network file system that fails,
ends the process without a word (SIGBUS). :mod:`nvt_loader.cuda.blocks` has a decoder for GPUs.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clicklog.errors import BadInputError, SchemaError
from nvt_loader.parquet.arrow_rows import ArrowRows
from nvt_loader.parquet.checks import Checker
from nvt_loader.parquet.chunks import Chunk, CpuRows, Decoder, Rows, Target
from nvt_loader.parquet.footers import REWRITE, Layout, check_file, check_unchanged
from nvt_loader.parquet.page_rows import OpenRows, PageRows
from nvt_loader.plan import Piece

#: Footers kept, so that a shuffled epoch does not parse one for each row group.
FOOTERS = 64


def cpu_decoder(layout: Layout) -> Decoder:
    """A decoder of a split's row groups; verifies the page checksums that there are.

    Columns of other numeric types than the contract's are converted. The decoder raises
    :class:`BadInputError` for a file that cannot be read or is not what its footer was at planning
    time, and :class:`SchemaError` for a null, a number that is none and an id outside its table.
    It may be called from several threads.
    """
    checker = Checker(layout)
    by_pages, by_arrow = PageRows(layout, checker), ArrowRows(layout, checker)
    read_footer = functools.lru_cache(FOOTERS)(lambda number: check_file(layout, number))
    numbers = np.arange(len(layout.schema.columns))

    def decode(piece: Piece, rows: int) -> Iterator[CpuRows]:
        with explained(layout, piece.row_group):
            footer = read_footer(layout.row_groups[piece.row_group].file)
            check_unchanged(layout, piece.row_group, footer)
            opened = None
            if layout.undersampling is None:
                opened = by_pages.open(piece.row_group, footer)
            if opened is None or not opened.skip(piece.begin):
                yield from by_arrow.chunks(piece, rows, footer, numbers)
            elif opened.complete:
                arrow = functools.partial(by_arrow.chunks, footer=footer, numbers=numbers)
                yield PendingRows(layout, opened, piece, arrow)
            else:
                yield from _mixed(opened, by_arrow, piece, rows, footer, numbers)

    return decode


@contextlib.contextmanager
def explained(layout: Layout, row_group: int) -> Iterator[None]:
    """Say of which file and row group an error is."""
    group = layout.row_groups[row_group]
    try:
        yield
    except SchemaError as error:
        what = f"{error.what}, in row group {group.index}"
        raise SchemaError(what, error.remedy) from error
    except (pa.ArrowException, OSError) as error:
        raise BadInputError(
            f"{layout.files[group.file]}: row group {group.index} cannot be decoded: {error}",
            REWRITE,
        ) from error


def _mixed(
    opened: OpenRows,
    by_arrow: ArrowRows,
    piece: Piece,
    rows: int,
    footer: pq.FileMetaData,
    numbers: np.ndarray,
) -> Iterator[Chunk]:
    """A piece of which some columns are read by pages, the others by Arrow."""
    done = piece.begin
    for chunk in by_arrow.chunks(piece, rows, footer, np.setdiff1d(numbers, opened.numbers)):
        found = opened.read(chunk.rows)
        if found is None:
            rest = Piece(piece.row_group, done, piece.end)
            yield from by_arrow.chunks(rest, rows, footer, numbers)
            return
        chunk.addresses[opened.numbers] = found.addresses[opened.numbers]
        chunk.owner.append(found)
        yield chunk
        done += chunk.rows


@dataclasses.dataclass(frozen=True)
class PendingRows:
    """Rows of an open row group, which are decoded when they are copied; in their order.

    Attributes:
        layout, opened: of which they are.
        piece: which rows.
        arrow: reads a piece, so many rows at a time, where ``opened`` cannot.
    """

    layout: Layout
    opened: OpenRows
    piece: Piece
    arrow: Callable[[Piece, int], Iterator[Chunk]]

    @property
    def rows(self) -> int:
        """How many."""
        return self.piece.end - self.piece.begin

    def slice(self, begin: int, end: int) -> PendingRows:
        """Rows [begin, end) of them: none may be left out between two slices."""
        first = self.piece.begin
        piece = Piece(self.piece.row_group, first + begin, first + end)
        return PendingRows(self.layout, self.opened, piece, self.arrow)

    def chunks(self) -> Iterator[Chunk]:
        """The rows, decoded."""
        with explained(self.layout, self.piece.row_group):
            chunk = self.opened.read(self.rows)
            if chunk is not None:
                yield chunk
                return
            yield from self.arrow(self.piece, self.rows)

    def copy_to(self, target: Target, first: int) -> None:
        """Copy them to a block; they are the source's rows from ``first`` on."""
        if not self.layout.hash_indices and self.opened.read_into(target, first, self.rows):
            return
        for chunk in self.chunks():
            chunk.copy_to(target, first)
            first += chunk.rows


class RowReader:
    """Hands out consecutive rows of a sequence of pieces.

    :meth:`decode_ahead` lets a pool's threads decode (or, of :class:`PendingRows`, read) the next
    of it while what is there is used. Who takes what they have not begun with decodes it: so taking
    may be a task of the same pool.
    """

    def __init__(self, decoder: Decoder, pieces: Iterable[Piece], first: int, rows: int) -> None:
        """Where Arrow decodes, it decodes ``rows`` at a time; ``first``, fewer, in the first piece,
        so that it comes sooner. With ``rows`` rows there, nothing is decoded ahead."""
        sizes = iter([first])
        self._chunks = (chunk for piece in pieces for chunk in decoder(piece, next(sizes, rows)))
        self._enough = rows
        self._rest: Rows | None = None
        self._ready: collections.deque[Rows] = collections.deque()
        self._error: Exception | None = None
        self._decoding = threading.Lock()

    def take(self, rows: int) -> list[Rows]:
        """The next ``rows`` rows, as chunks that follow one another."""
        parts = []
        while rows:
            chunk = self._rest if self._rest is not None else self._next()
            taken = min(rows, chunk.rows)
            whole = taken == chunk.rows
            parts.append(chunk if whole else chunk.slice(0, taken))
            self._rest = None if whole else chunk.slice(taken, chunk.rows)
            rows -= taken
        return parts

    @property
    def left(self) -> int:
        """Rows that are there to be taken."""
        rest, ready = self._rest, self._ready.copy()  # which other threads change
        return (rest.rows if rest is not None else 0) + sum(chunk.rows for chunk in ready)

    def decode_ahead(self, pool: concurrent.futures.Executor) -> None:
        """Let the pool decode what comes next, unless enough is there."""
        if self.left < self._enough:
            pool.submit(self._decode)

    def _decode(self) -> None:
        while self._error is None and self.left < self._enough:
            if not self._decoding.acquire(blocking=False):
                return  # another thread is at it
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
            except Exception as error:  # for who takes the rows
                self._error = error
