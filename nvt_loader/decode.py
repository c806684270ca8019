"""A decoder for the CPU, and the reader that hands out a run of rows bit by bit.

Files are read, not mapped: a mapped file that is cut short, or a network file system that fails,
ends the process without a word (SIGBUS). :mod:`nvt_loader.gpu` has a decoder for GPUs.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clicklog.errors import BadInputError, SchemaError
from nvt_loader.arrow_rows import ArrowRows
from nvt_loader.checks import Checker
from nvt_loader.chunks import Chunk, Decoder, Rows
from nvt_loader.layout import REWRITE, Layout, check_file, check_unchanged
from nvt_loader.page_rows import PageRows
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

    def decode(piece: Piece, rows: int) -> Iterator[Chunk]:
        group = layout.row_groups[piece.row_group]
        path = layout.files[group.file]
        done = piece.begin
        # chunks of one size: after a short one at the end, the next would come too late
        rows = -(-(piece.end - done) // -(-(piece.end - done) // rows))
        try:
            footer = read_footer(group.file)
            check_unchanged(layout, piece.row_group, footer)
            if layout.undersampling is None:
                for chunk in _by_pages(by_pages, by_arrow, piece, rows, footer, numbers):
                    yield chunk
                    done += chunk.rows
            if done < piece.end:
                rest = Piece(piece.row_group, done, piece.end)
                yield from by_arrow.chunks(rest, rows, footer, numbers)
        except SchemaError as error:
            what = f"{error.what}, in row group {group.index}"
            raise SchemaError(what, error.remedy) from error
        except (pa.ArrowException, OSError) as error:
            raise BadInputError(
                f"{path}: row group {group.index} cannot be decoded: {error}", REWRITE
            ) from error

    return decode


def _by_pages(
    by_pages: PageRows,
    by_arrow: ArrowRows,
    piece: Piece,
    rows: int,
    footer: pq.FileMetaData,
    numbers: np.ndarray,
) -> Iterator[Chunk]:
    """The rows of a piece as long as :mod:`nvt_loader.page_rows` can read some of the columns; the
    others are Arrow's."""
    opened = by_pages.open(piece.row_group, footer)
    if opened is None or not opened.skip(piece.begin):
        return
    others = np.setdiff1d(numbers, opened.numbers)
    if others.size:
        for chunk in by_arrow.chunks(piece, rows, footer, others):
            found = opened.read(chunk.rows)
            if found is None:
                return
            chunk.addresses[opened.numbers] = found.addresses[opened.numbers]
            chunk.owner.append(found)
            yield chunk
        return
    for begin in range(piece.begin, piece.end, rows):
        found = opened.read(min(rows, piece.end - begin))
        if found is None:
            return
        yield found


class RowReader:
    """Hands out consecutive rows of a sequence of pieces; decodes about ``rows`` at a time.

    :meth:`decode_ahead` lets a pool's threads decode the next of it while what is there is used.
    Who takes what they have not begun with decodes it: so taking may be a task of the same pool.
    """

    def __init__(self, decoder: Decoder, pieces: Iterable[Piece], first: int, rows: int) -> None:
        """``first``: rows decoded at a time in the first piece, so that it comes sooner."""
        sizes = iter([first])
        self._chunks = (chunk for piece in pieces for chunk in decoder(piece, next(sizes, rows)))
        self._rest: Rows | None = None
        self._ahead: concurrent.futures.Future[Rows | None] | None = None

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
    def is_ahead(self) -> bool:
        """Whether decoding has begun of what is wanted after what is there."""
        return self._ahead is not None

    def decode_ahead(self, pool: concurrent.futures.Executor) -> None:
        """Begin with what is wanted after what is there, unless that is done already."""
        if self._ahead is None:
            self._ahead = pool.submit(next, self._chunks, None)

    def _next(self) -> Rows:
        if self._ahead is None:
            return next(self._chunks)
        ahead, self._ahead = self._ahead, None
        return next(self._chunks) if ahead.cancel() else ahead.result()  # not begun: do it here
