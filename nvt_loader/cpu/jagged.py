"""Blocks of rows with any number of ids in some columns (multi-hot), in CPU memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from nvt_loader.blocks import JaggedBlock
from nvt_loader.cpu.runs import ALIGNMENT, Runs, copy_floats, flat, scattered, stack
from nvt_loader.kernels import list_lengths, list_values, permute, permute_lists
from nvt_loader.memory import Buffers
from nvt_loader.parquet.chunks import Chunk
from nvt_loader.parquet.footers import Layout


def build_jagged(
    layout: Layout,
    parts: list[list[Chunk]],
    runs: Runs,
    tensors: Callable[..., list[torch.Tensor]],
) -> JaggedBlock:
    """A block of chunks; ``tensors`` makes tensors of given dtypes and shapes."""
    schema, steps, batch = layout.schema, runs.steps, runs.batch
    columns = len(schema.categorical)
    labels, dense, lengths, offsets = tensors(
        (torch.float32, (steps, batch)),
        (torch.float32, (steps, batch, len(schema.dense))),
        (torch.int32, (steps, columns * batch)),
        (torch.int32, (steps, columns * batch + 1)),
    )
    dtype = torch.int64 if layout.id_dtype.itemsize == 8 else torch.int32
    copy_floats(labels, dense, parts, runs)
    is_list = np.array([name in set(schema.multi_hot) for name in schema.categorical])
    addresses, elements, weighted = (
        np.ascontiguousarray(stack(parts, what)[:, 1 + len(schema.dense) :])
        for what in ("addresses", "values", "weights")
    )
    where = is_list, batch, runs.at(columns * batch), runs.bounds
    list_lengths(flat(lengths), addresses, *where)
    starts = np.zeros(steps * columns * batch + 1, np.int64)
    np.cumsum(flat(lengths), out=starts[1:])
    by_step = starts[:-1].reshape(steps, -1)
    np.subtract(by_step, by_step[:, :1], out=offsets.numpy()[:, :-1], casting="same_kind")
    offsets.numpy()[:, -1] = starts[columns * batch :: columns * batch] - by_step[:, 0]
    total = int(starts[-1])
    wanted = [(dtype, (total,))] + [(torch.float32, (total,))] * bool(layout.weights)
    values, *weights = tensors(*wanted)
    sources = np.where(is_list, elements, addresses)
    list_values(flat(values), starts, sources, addresses, *where)
    if weights:
        if total:
            weights[0].fill_(1.0)
        list_values(flat(weights[0]), starts, weighted, addresses, *where)
    bounds = starts[::batch].tolist()
    return JaggedBlock(
        labels, dense, values, weights[0] if weights else None, lengths, offsets, bounds
    )


def permuted_jagged(
    chunks: list[Chunk], order: np.ndarray, layout: Layout, buffers: Buffers
) -> Chunk:
    """The rows of some chunks in another order: a chunk on memory of its own."""
    rows, floats = len(order), 1 + len(layout.schema.dense)
    moves = list(scattered(chunks, order))
    addresses, values, weights = np.zeros((3, len(layout.row_bytes)), np.int64)
    owner = []

    def take(size: int, dtype: np.dtype | type) -> np.ndarray:
        memory = buffers.take(-(-size * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT)
        owner.append(memory)
        return memory.view(dtype)[:size]

    memory = take(floats * rows, np.int32)
    for to_rows, from_rows, chunk in moves:
        permute(memory, chunk.addresses[:floats], rows, to_rows, from_rows)
    addresses[:floats] = memory.ctypes.data + 4 * rows * np.arange(floats)
    lists = set(layout.schema.multi_hot)
    for i, name in enumerate(layout.schema.categorical, start=floats):
        if name not in lists:
            memory = take(rows, layout.id_dtype)
            for to_rows, from_rows, chunk in moves:
                permute(memory, chunk.addresses[i : i + 1], rows, to_rows, from_rows)
            addresses[i] = memory.ctypes.data
            continue
        lengths = np.empty(rows, np.int32)
        for to_rows, from_rows, chunk in moves:
            lengths[to_rows] = np.diff(chunk.offsets(i))[from_rows]
        offsets = take(rows + 1, np.int32)
        offsets[0] = 0
        np.cumsum(lengths, out=offsets[1:])
        starts = offsets.astype(np.int64)
        memory = take(int(starts[-1]), layout.id_dtype)
        for to_rows, from_rows, chunk in moves:
            where = chunk.addresses[i], to_rows, from_rows
            permute_lists(memory, starts, chunk.values[i], *where)
        addresses[i], values[i] = offsets.ctypes.data, memory.ctypes.data
        if name in layout.weights:
            memory = take(int(starts[-1]), np.int32)
            for to_rows, from_rows, chunk in moves:
                where = chunk.addresses[i], to_rows, from_rows
                permute_lists(memory, starts, chunk.weights[i], *where)
            weights[i] = memory.ctypes.data
    return Chunk(rows, addresses, layout.row_bytes, values, weights, owner)
