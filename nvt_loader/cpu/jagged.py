"""Blocks of rows with any number of ids in some columns (multi-hot), in CPU memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch

from nvt_torchrec.nvt_loader.cpu.blocks import JaggedBlock, ShardRows, flat, moves, source_copies
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset
from nvt_torchrec.nvt_loader.parquet.kernels import (
    copy_rows,
    list_lengths,
    list_values,
    permute,
    permute_lists,
)
from nvt_torchrec.nvt_loader.parquet.row_chunks import Buffers, RowChunk


def build_jagged(
    dataset: Dataset,
    parts: list[list[RowChunk]],
    sources: list[ShardRows],
    steps: int,
    batch: int,
    tensors: Callable[..., list[torch.Tensor]],
) -> JaggedBlock:
    """Build a block of the chunks of some sources; ``tensors`` makes tensors of given dtypes and
    shapes."""
    schema = dataset.schema
    floats, columns = 1 + len(schema.dense), len(schema.categorical)
    labels, dense, lengths, offsets = tensors(
        (torch.float32, (steps, batch)),
        (torch.float32, (steps, batch, len(schema.dense))),
        (torch.int32, (steps, columns * batch)),
        (torch.int32, (steps, columns * batch + 1)),
    )
    chunks = [chunk for own in parts for chunk in own]
    first = itertools.accumulate(map(len, parts), initial=0)
    copies = np.concatenate(
        [
            source_copies(source, steps, [chunk.rows for chunk in own], number)
            for source, own, number in zip(sources, parts, first, strict=False)
        ]
    )
    copies = copies[np.argsort(copies[:, 0], kind="stable")]
    block = flat(labels), flat(dense), np.empty(0, np.int32)
    for i, chunk in enumerate(chunks):
        own = copies[copies[:, 1] == i]
        copy_rows(*block, chunk.addresses[:floats], own, batch, 0, chunk.rows)
    is_list = np.array([name in set(schema.multi_hot) for name in schema.categorical])
    addresses = np.stack([chunk.addresses[floats:] for chunk in chunks])
    elements = np.stack([chunk.values[floats:] for chunk in chunks])
    of_lists = copies[:, 1:].copy()
    of_lists[:, 3] += copies[:, 0] * columns * batch
    where = is_list, batch, of_lists, np.searchsorted(copies[:, 0], np.arange(steps + 1))
    list_lengths(flat(lengths), addresses, *where)
    starts = np.zeros(steps * columns * batch + 1, np.int64)
    np.cumsum(flat(lengths), out=starts[1:])
    by_step = starts[:-1].reshape(steps, -1)
    np.subtract(by_step, by_step[:, :1], out=offsets.numpy()[:, :-1], casting="same_kind")
    offsets.numpy()[:, -1] = starts[columns * batch :: columns * batch] - by_step[:, 0]
    (values,) = tensors((torch.int32, (int(starts[-1]),)))
    list_values(flat(values), starts, np.where(is_list, elements, addresses), addresses, *where)
    return JaggedBlock(labels, dense, values, lengths, offsets, starts[::batch].tolist())


def permuted_jagged(
    chunks: list[RowChunk], order: np.ndarray, dataset: Dataset, buffers: Buffers
) -> RowChunk:
    """Copy the rows of some chunks in another order into one chunk."""
    rows, floats = len(order), 1 + len(dataset.schema.dense)
    moved = list(moves(chunks, order))
    addresses, values = np.zeros((2, len(dataset.schema.columns)), np.int64)
    owner = []

    def take(size: int) -> np.ndarray:
        memory = buffers.take(4 * size)
        owner.append(memory)
        return memory.view(np.int32)

    memory = take(floats * rows)
    for to_rows, from_rows, chunk in moved:
        permute(memory, chunk.addresses[:floats], rows, to_rows, from_rows)
    addresses[:floats] = memory.ctypes.data + 4 * rows * np.arange(floats)
    lists = set(dataset.schema.multi_hot)
    for i, name in enumerate(dataset.schema.categorical, start=floats):
        if name not in lists:
            memory = take(rows)
            for to_rows, from_rows, chunk in moved:
                permute(memory, chunk.addresses[i : i + 1], rows, to_rows, from_rows)
            addresses[i] = memory.ctypes.data
            continue
        lengths = np.empty(rows, np.int32)
        for to_rows, from_rows, chunk in moved:
            lengths[to_rows] = np.diff(chunk.offsets(i))[from_rows]
        offsets = take(rows + 1)
        offsets[0] = 0
        np.cumsum(lengths, out=offsets[1:])
        starts = offsets.astype(np.int64)
        memory = take(int(starts[-1]))
        for to_rows, from_rows, chunk in moved:
            where = chunk.addresses[i], to_rows, from_rows
            permute_lists(memory, starts, chunk.values[i], *where)
        addresses[i], values[i] = offsets.ctypes.data, memory.ctypes.data
    return RowChunk(rows, addresses, values, owner)
