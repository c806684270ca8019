"""Which rows of which chunk go where in a block in CPU memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from nvt_torchrec.nvt_loader.cpu.blocks import ShardRows
from nvt_torchrec.nvt_loader.parquet.kernels import find_copies
from nvt_torchrec.nvt_loader.parquet.row_chunks import RowChunk


def flat(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory as a flat array; floats as their bits."""
    array = tensor.view(-1).numpy()
    return array.view(np.int32) if array.dtype == np.float32 else array


def source_copies(source: ShardRows, steps: int, rows: list[int], first_chunk: int) -> np.ndarray:
    """Return the copies of one source, whose chunks have these numbers of rows.

    They are int64 [copies, 5]; the chunks are numbered from ``first_chunk`` on.
    """
    found = np.empty((steps + len(rows), 5), np.int64)
    where = source.width, source.begin, source.end, source.first
    count = find_copies(found, steps, *where, np.array(rows, np.int64), first_chunk)
    return found[:count]


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
