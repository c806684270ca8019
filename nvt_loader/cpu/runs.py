"""Which rows of which chunk go where in a block in CPU memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from nvt_loader.blocks import Source
from nvt_loader.kernels import copy_rows, find_runs
from nvt_loader.parquet.chunks import Chunk, Rows

#: Tensors in a block's memory begin at multiples of this many bytes.
ALIGNMENT = 64


def stack(parts: list[list[Chunk]], what: str) -> np.ndarray:
    """An attribute of all chunks of all parts: int64 [chunks, columns]."""
    return np.stack([getattr(chunk, what) for chunks in parts for chunk in chunks])


def flat(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's memory as a flat array; floats as their bits."""
    array = tensor.view(-1).numpy()
    return array.view(np.int32) if array.dtype == np.float32 else array


class Runs:
    """Which consecutive rows of which chunk make which part of a batch, in the batches' order.

    Attributes:
        steps, batch: of the block.
        bounds: int64 [steps + 1], which runs make each step.
    """

    def __init__(
        self, parts: list[list[Rows]], sources: list[Source], steps: int, batch: int
    ) -> None:
        self.steps, self.batch = steps, batch
        found, chunks = [], 0
        for source, own in zip(sources, parts, strict=True):
            found.append(runs_of(source, steps, [chunk.rows for chunk in own], chunks))
            chunks += len(own)
        self._runs = np.concatenate(found)
        self._runs = self._runs[np.argsort(self._runs[:, 0], kind="stable")]
        self.bounds = np.searchsorted(self._runs[:, 0], np.arange(steps + 1))

    def within(self, chunk: int) -> np.ndarray:
        """The runs in a chunk: int64 [runs, 5], as :func:`nvt_loader.kernels.find_runs`."""
        return self._runs[self._runs[:, 1] == chunk]

    def at(self, size: int) -> np.ndarray:
        """The runs as :mod:`nvt_loader.kernels` takes them, of steps of ``size`` elements."""
        found = self._runs[:, 1:].copy()
        found[:, 3] += self._runs[:, 0] * size
        return found


def runs_of(source: Source, steps: int, rows: list[int], first_chunk: int) -> np.ndarray:
    """A source's runs: int64 [runs, 5]: step, chunk, first row in it, rows, place in the batch."""
    found = np.empty((steps + len(rows), 5), np.int64)
    where = source.width, source.begin, source.end, source.first
    count = find_runs(found, steps, *where, np.array(rows, np.int64), first_chunk)
    return found[:count]


def copy_floats(
    labels: torch.Tensor, dense: torch.Tensor, parts: list[list[Chunk]], runs: Runs
) -> None:
    """Write labels and dense features of a block."""
    block = flat(labels), flat(dense), np.empty(0, np.int32)
    floats = 1 + dense.shape[2]
    chunks = [chunk for chunks in parts for chunk in chunks]
    for number, chunk in enumerate(chunks):
        copy_rows(*block, chunk.addresses[:floats], runs.within(number), runs.batch, 0, chunk.rows)


def scattered(
    chunks: list[Chunk], order: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, Chunk]]:
    """Per chunk: where its rows go, ascending, and which rows they are (uint32 each)."""
    first = 0
    for chunk in chunks:
        here = order - first
        to_rows = np.flatnonzero((here >= 0) & (here < chunk.rows))
        yield to_rows.astype(np.uint32), here[to_rows].astype(np.uint32), chunk
        first += chunk.rows
