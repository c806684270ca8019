"""Blocks of rows with any number of ids in some columns (multi-hot), in CPU memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from nvt_torchrec.nvt_loader.cpu.blocks import JaggedBlock
from nvt_torchrec.nvt_loader.cpu.row_copies import (
    ALIGNMENT,
    RowCopies,
    copy_floats,
    flat,
    moves,
    stack,
)
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset
from nvt_torchrec.nvt_loader.parquet.kernels import (
    list_lengths,
    list_values,
    permute,
    permute_lists,
)
from nvt_torchrec.nvt_loader.parquet.row_chunks import Buffers, RowChunk


def build_jagged(
    dataset: Dataset,
    parts: list[list[RowChunk]],
    copies: RowCopies,
    tensors: Callable[..., list[torch.Tensor]],
) -> JaggedBlock:
    """Build a block of chunks; ``tensors`` makes tensors of given dtypes and shapes."""
    schema, steps, batch = dataset.schema, copies.steps, copies.batch
    columns = len(schema.categorical)
    labels, dense, lengths, offsets = tensors(
        (torch.float32, (steps, batch)),
        (torch.float32, (steps, batch, len(schema.dense))),
        (torch.int32, (steps, columns * batch)),
        (torch.int32, (steps, columns * batch + 1)),
    )
    dtype = torch.int64 if dataset.id_dtype.itemsize == 8 else torch.int32
    copy_floats(labels, dense, parts, copies)
    is_list = np.array([name in set(schema.multi_hot) for name in schema.categorical])
    addresses, elements = (
        np.ascontiguousarray(stack(parts, what)[:, 1 + len(schema.dense) :])
        for what in ("addresses", "values")
    )
    where = is_list, batch, copies.of_lists(columns * batch), copies.bounds
    list_lengths(flat(lengths), addresses, *where)
    starts = np.zeros(steps * columns * batch + 1, np.int64)
    np.cumsum(flat(lengths), out=starts[1:])
    by_step = starts[:-1].reshape(steps, -1)
    np.subtract(by_step, by_step[:, :1], out=offsets.numpy()[:, :-1], casting="same_kind")
    offsets.numpy()[:, -1] = starts[columns * batch :: columns * batch] - by_step[:, 0]
    total = int(starts[-1])
    (values,) = tensors((dtype, (total,)))
    sources = np.where(is_list, elements, addresses)
    list_values(flat(values), starts, sources, addresses, *where)
    bounds = starts[::batch].tolist()
    return JaggedBlock(labels, dense, values, lengths, offsets, bounds)


def permuted_jagged(
    chunks: list[RowChunk], order: np.ndarray, dataset: Dataset, buffers: Buffers
) -> RowChunk:
    """Copy the rows of some chunks in another order into one chunk."""
    rows, floats = len(order), 1 + len(dataset.schema.dense)
    moved = list(moves(chunks, order))
    addresses, values = np.zeros((2, len(dataset.row_bytes)), np.int64)
    owner = []

    def take(size: int, dtype: np.dtype | type) -> np.ndarray:
        memory = buffers.take(-(-size * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT)
        owner.append(memory)
        return memory.view(dtype)[:size]

    memory = take(floats * rows, np.int32)
    for to_rows, from_rows, chunk in moved:
        permute(memory, chunk.addresses[:floats], rows, to_rows, from_rows)
    addresses[:floats] = memory.ctypes.data + 4 * rows * np.arange(floats)
    lists = set(dataset.schema.multi_hot)
    for i, name in enumerate(dataset.schema.categorical, start=floats):
        if name not in lists:
            memory = take(rows, dataset.id_dtype)
            for to_rows, from_rows, chunk in moved:
                permute(memory, chunk.addresses[i : i + 1], rows, to_rows, from_rows)
            addresses[i] = memory.ctypes.data
            continue
        lengths = np.empty(rows, np.int32)
        for to_rows, from_rows, chunk in moved:
            lengths[to_rows] = np.diff(chunk.offsets(i))[from_rows]
        offsets = take(rows + 1, np.int32)
        offsets[0] = 0
        np.cumsum(lengths, out=offsets[1:])
        starts = offsets.astype(np.int64)
        memory = take(int(starts[-1]), dataset.id_dtype)
        for to_rows, from_rows, chunk in moved:
            where = chunk.addresses[i], to_rows, from_rows
            permute_lists(memory, starts, chunk.values[i], *where)
        addresses[i], values[i] = offsets.ctypes.data, memory.ctypes.data
    return RowChunk(rows, addresses, dataset.row_bytes, values, owner)
