"""Put vectors into blocks, such as the text embedding of each row.

Rows carry the numbers of their vectors until they are in the order of the block. Then the values
are copied from the memory-mapped stores, which all ranks share. The vector of a row may take a
hundred times the memory of its other columns, too much to hold it for a whole shuffling window.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.formats.vectors import count_inputs
from nvt_torchrec.nvt_loader import memory
from nvt_torchrec.nvt_loader.cpu.blocks import FlatBlock, JaggedBlock, view_flat
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset


def add_vectors(
    dataset: Dataset,
    blocks: Iterator[tuple[slice, Any]],
    allocate_tensors: Callable[..., list[torch.Tensor]],
) -> Iterator[tuple[slice, FlatBlock | JaggedBlock]]:
    """Replace the numbers of vectors in blocks by the vectors, and divide blocks that become large.

    Args:
        dataset: The data, with vectors.
        blocks: Yields the steps to draw, and a block whose ids are the columns of
            ``schema.integers``.
        allocate_tensors: Returns uninitialised tensors of given dtypes and shapes.

    Yields:
        The steps to draw, and a block with ``dense_vectors``, whose ids do not contain the numbers.

    Raises:
        SchemaError: The number of a vector is outside its store, or a value is not finite.
        BadInputError: A file of a store has been modified.
    """
    assert dataset.vectors is not None
    inputs = count_inputs(dataset.schema.vectors)
    for drawn, block in blocks:
        steps, batch = block.labels.shape[:2]
        if batch == 0:
            empty = torch.empty(steps, 0, inputs)
            yield drawn, dataclasses.replace(block, dense_vectors=empty)
            continue
        dataset.vectors.check()
        numbers = _read_numbers(dataset, block, steps, batch)
        begin, end, _ = drawn.indices(steps)
        step_bytes = 4 * batch * inputs
        num_parts = min(end - begin, 1 + (end - begin) * step_bytes // memory.BLOCK_BYTES)
        bounds = np.linspace(begin, end, num_parts + 1).astype(int).tolist()
        for first, last in itertools.pairwise(bounds):
            part = slice(first, last)
            part_numbers = numbers[:, part].reshape(len(numbers), -1)
            (values,) = allocate_tensors((torch.float32, (last - first, batch, inputs)))
            take_vectors(dataset, part_numbers, values.view(-1, inputs).numpy())
            yield (
                slice(0, last - first),
                _take_steps(dataset, block, part, values, allocate_tensors),
            )


def take_vectors(
    dataset: Dataset, numbers: np.ndarray, out: np.ndarray | None = None
) -> np.ndarray:
    """Return the vectors of n rows and their indicators, float32 [n, all inputs].

    Args:
        dataset: The data, with vectors.
        numbers: int32 [vectors, n], the number of each vector; -1 for a row without a vector.
        out: The array for the result; by default a new one.

    Raises:
        SchemaError: A number is outside its store, or a value is not finite.
    """
    assert dataset.vectors is not None
    try:
        return dataset.vectors.take(numbers, out)
    except SchemaError as error:
        raise SchemaError(
            f"{dataset.source.name}: {error.what}",
            "the parquet files and the vectors are not from the same ETL run, or a file is "
            "damaged: copy them again, or run the ETL again",
        ) from error


def _read_numbers(
    dataset: Dataset, block: FlatBlock | JaggedBlock, steps: int, batch: int
) -> np.ndarray:
    """Read the numbers of the vectors of a block's rows: int32 [vectors, steps, B]."""
    columns = len(dataset.schema.integers)
    first = columns - len(dataset.schema.vectors)
    if isinstance(block, FlatBlock):
        found = block.ids.numpy()[:, first:]
    else:
        # Each row has one number, so the numbers of a step and column are contiguous.
        begins = np.array(block.bounds[:-1]).reshape(steps, columns, 1)[:, first:]
        found = view_flat(block.values)[begins + np.arange(batch)]
    return np.ascontiguousarray(found.swapaxes(0, 1))


def _take_steps(
    dataset: Dataset,
    block: FlatBlock | JaggedBlock,
    steps: slice,
    values: torch.Tensor,
    allocate_tensors: Callable[..., list[torch.Tensor]],
) -> FlatBlock | JaggedBlock:
    """Return a block of a slice of steps, with the vectors ``values`` instead of their numbers."""
    columns = len(dataset.schema.integers)
    kept = columns - len(dataset.schema.vectors)
    shared = block.take_floats(steps)
    if isinstance(block, FlatBlock):
        # Make all tensors of a block contiguous, because copying others to a device is synchronous.
        own = block.ids[steps, :kept]
        (ids,) = allocate_tensors((torch.int32, tuple(own.shape)))
        ids.copy_(own)
        return FlatBlock(*shared, ids, values)
    count, batch = values.shape[:2]
    lengths, offsets = allocate_tensors(
        (torch.int32, (count, kept * batch)), (torch.int32, (count, kept * batch + 1))
    )
    lengths.copy_(block.lengths[steps, : kept * batch])
    offsets.copy_(block.offsets[steps, : kept * batch + 1])
    # The numbers are the last ids of each step, so all others are moved as one range.
    found = np.array(block.bounds[:-1]).reshape(-1, columns)[steps, : kept + 1]
    sizes = found[:, -1] - found[:, 0]
    ends = sizes.cumsum()
    (ids,) = allocate_tensors((torch.int32, (int(ends[-1]),)))
    for begin, end, size in zip(found[:, 0], ends, sizes, strict=True):
        view_flat(ids)[end - size : end] = view_flat(block.values)[begin : begin + size]
    moved = found[:, :kept] + (ends - sizes - found[:, 0])[:, np.newaxis]
    bounds = [*moved.ravel().tolist(), int(ends[-1])]
    return JaggedBlock(*shared, ids, lengths, offsets, bounds, values)
