"""Which rows of which chunk go where in a block in CPU memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from nvt_torchrec.nvt_loader.cpu.blocks import ShardRows
from nvt_torchrec.nvt_loader.parquet.kernels import copy_rows, find_copies
from nvt_torchrec.nvt_loader.parquet.row_chunks import RowChunk

#: Tensors in a block's memory begin at multiples of this many bytes.
ALIGNMENT = 64


def stack(parts: list[list[RowChunk]], attribute: str) -> np.ndarray:
    """Return an attribute of all chunks of all sources: int64 [chunks, columns]."""
    return np.stack([getattr(chunk, attribute) for chunks in parts for chunk in chunks])


def flat(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory as a flat array; floats as their bits."""
    array = tensor.view(-1).numpy()
    return array.view(np.int32) if array.dtype == np.float32 else array


class RowCopies:
    """The copies that make a block of several sources; see :mod:`nvt_loader.parquet.kernels`.

    Attributes:
        steps, batch: The block's steps, and the rows of a batch.
        bounds: int64 [steps + 1], the first copy of each step, and the number of copies.
    """

    def __init__(
        self, parts: list[list[RowChunk]], sources: list[ShardRows], steps: int, batch: int
    ) -> None:
        self.steps, self.batch = steps, batch
        found, chunks = [], 0
        for source, own in zip(sources, parts, strict=True):
            found.append(source_copies(source, steps, [chunk.rows for chunk in own], chunks))
            chunks += len(own)
        self._copies = np.concatenate(found)
        self._copies = self._copies[np.argsort(self._copies[:, 0], kind="stable")]
        self.bounds = np.searchsorted(self._copies[:, 0], np.arange(steps + 1))

    def from_chunk(self, chunk: int) -> np.ndarray:
        """Return the copies of a chunk's rows: int64 [copies, 5]."""
        return self._copies[self._copies[:, 1] == chunk]

    def of_lists(self, size: int) -> np.ndarray:
        """Return the copies for lists, where a step has ``size`` elements: int64 [copies, 4]."""
        found = self._copies[:, 1:].copy()
        found[:, 3] += self._copies[:, 0] * size
        return found


def source_copies(source: ShardRows, steps: int, rows: list[int], first_chunk: int) -> np.ndarray:
    """Return the copies of one source, whose chunks have these numbers of rows.

    They are int64 [copies, 5]; the chunks are numbered from ``first_chunk`` on.
    """
    found = np.empty((steps + len(rows), 5), np.int64)
    where = source.width, source.begin, source.end, source.first
    count = find_copies(found, steps, *where, np.array(rows, np.int64), first_chunk)
    return found[:count]


def copy_floats(
    labels: torch.Tensor, dense: torch.Tensor, parts: list[list[RowChunk]], copies: RowCopies
) -> None:
    """Write the labels and dense features of a block."""
    block = flat(labels), flat(dense), np.empty(0, np.int32)
    floats = 1 + dense.shape[2]
    chunks = [chunk for chunks in parts for chunk in chunks]
    for i, chunk in enumerate(chunks):
        own = copies.from_chunk(i)
        copy_rows(*block, chunk.addresses[:floats], own, copies.batch, 0, chunk.rows)


def moves(
    chunks: list[RowChunk], order: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, RowChunk]]:
    """Yield for each chunk where its rows go in a new order, ascending, and which rows go there.

    Both are uint32.
    """
    first = 0
    for chunk in chunks:
        here = order - first
        to_rows = np.flatnonzero((here >= 0) & (here < chunk.rows))
        yield to_rows.astype(np.uint32), here[to_rows].astype(np.uint32), chunk
        first += chunk.rows
