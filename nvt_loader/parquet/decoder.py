"""Decode slices of row groups on the CPU: from the pages where possible, else by Arrow.

Files are read, not mapped: if a mapped file is cut short or a network file system fails, the
process ends without a message (SIGBUS). :mod:`nvt_loader.cuda.cudf_reader` is the decoder for GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.nvt_loader.parquet.arrow_reader import ArrowReader
from nvt_torchrec.nvt_loader.parquet.checks import Checker
from nvt_torchrec.nvt_loader.parquet.dataset import REWRITE, Dataset, check_file, check_unchanged
from nvt_torchrec.nvt_loader.parquet.page_reader import OpenRowGroup, PageReader
from nvt_torchrec.nvt_loader.parquet.row_chunks import Decoder, RowChunk, RowGroupSlice, Target

#: Footers kept, so that a shuffled epoch does not parse one for each row group.
FOOTERS = 64


def cpu_decoder(dataset: Dataset) -> Decoder:
    """Return a decoder of a split's row groups that verifies the page checksums that there are.

    Columns of other numeric types than the loader's are converted. The decoder raises
    :class:`BadInputError` for a file that cannot be read or has changed since planning, and
    :class:`SchemaError` for a null, for infinity or NaN, and for an id outside its table. Several
    threads may call it at the same time.
    """
    checker = Checker(dataset)
    by_pages, by_arrow = PageReader(dataset, checker), ArrowReader(dataset, checker)
    read_footer = functools.lru_cache(FOOTERS)(functools.partial(check_file, dataset))
    columns = np.arange(len(dataset.schema.columns))

    def decode(part: RowGroupSlice, rows: int) -> Iterator[RowChunk | LazyRows]:
        with error_context(dataset, part.row_group):
            footer = read_footer(dataset.row_groups[part.row_group].file)
            check_unchanged(dataset, part.row_group, footer)
            opened = None
            if dataset.undersampling is None:
                opened = by_pages.open(part.row_group, footer)
            arrow = functools.partial(by_arrow.chunks, footer=footer.metadata)
            if opened is None or not opened.skip(part.begin):
                yield from arrow(part, rows, numbers=columns)
            elif opened.complete:
                arrow = functools.partial(arrow, numbers=columns)
                yield LazyRows(dataset, opened, part, rows, arrow)
            else:
                yield from _mixed(opened, arrow, part, rows, columns)

    return decode


@contextlib.contextmanager
def error_context(dataset: Dataset, row_group: int) -> Iterator[None]:
    """Add the file and row group to errors."""
    group = dataset.row_groups[row_group]
    try:
        yield
    except SchemaError as error:
        what = f"{error.what}, in row group {group.index}"
        raise SchemaError(what, error.remedy) from error
    except (pa.ArrowException, OSError) as error:
        raise BadInputError(
            f"{dataset.files[group.file]}: row group {group.index} cannot be decoded: {error}",
            REWRITE,
        ) from error


def _mixed(
    opened: OpenRowGroup,
    arrow: Callable[..., Iterator[RowChunk]],
    part: RowGroupSlice,
    rows: int,
    columns: np.ndarray,
) -> Iterator[RowChunk]:
    """Decode a slice of which some columns are read from the pages, the others by Arrow."""
    done = part.begin
    for chunk in arrow(part, rows, numbers=np.setdiff1d(columns, opened.numbers)):
        paged = opened.read(chunk.rows)
        if paged is None:
            yield from arrow(dataclasses.replace(part, begin=done), rows, numbers=columns)
            return
        chunk.addresses[opened.numbers] = paged.addresses[opened.numbers]
        chunk.owner.append(paged)
        yield chunk
        done += chunk.rows


@dataclasses.dataclass(frozen=True)
class LazyRows:
    """Rows of an open row group that are decoded when they are used, in their order.

    Attributes:
        dataset, opened: The data and the row group.
        part: Which rows of the row group.
        most: The most rows that are decoded at a time.
        arrow: Decodes a slice, so many rows at a time, where ``opened`` cannot.
    """

    dataset: Dataset
    opened: OpenRowGroup
    part: RowGroupSlice
    most: int
    arrow: Callable[[RowGroupSlice, int], Iterator[RowChunk]]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.part.end - self.part.begin

    def slice(self, begin: int, end: int) -> LazyRows:
        """Return rows [begin, end); no row may be left out between two slices."""
        first = self.part.begin
        part = dataclasses.replace(self.part, begin=first + begin, end=first + end)
        return dataclasses.replace(self, part=part)

    def chunks(self) -> Iterator[RowChunk]:
        """Decode the rows."""
        rest = self.part
        with error_context(self.dataset, rest.row_group):
            while rest.begin < rest.end:
                chunk = self.opened.read(min(self.most, rest.end - rest.begin))
                if chunk is None:
                    yield from self.arrow(rest, self.most)
                    return
                yield chunk
                rest = dataclasses.replace(rest, begin=rest.begin + chunk.rows)

    def copy_to(self, target: Target, first: int) -> None:
        """Copy the rows to a block; ``first`` is the number of the first one in its source."""
        if not self.dataset.hash_indices and self.opened.read_into(target, first, self.rows):
            return
        for chunk in self.chunks():
            chunk.copy_to(target, first)
            first += chunk.rows
