"""Put the events of histories into blocks.

Rows carry pointers (a key and a number of events) until they are in the order of the block. Then
the events are read in ascending order of the keys. So rows with the same key read the same memory
in succession, and a store that does not fit in memory is read from its files in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.histories import HistoryStore
from nvt_torchrec.nvt_loader import memory
from nvt_torchrec.nvt_loader.cpu.blocks import FlatBlock, JaggedBlock, view_flat, write_offsets
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset


@compiled("int64(int32[::1], int32[::1], int32[::1], int64)")
def write_event_counts(lengths, keys, events, maximum):
    """Write the number of events of each row; return the first row with an invalid pointer, or -1.

    Args:
        lengths: Output, int32 [rows]: the number of events that each row gets, at most ``maximum``.
        keys, events: int32 [rows], the key and the number of events of each row.
        maximum: The maximum number of events per row.
    """
    for row in range(len(keys)):
        # Key -1 means that the row has no history.
        if events[row] < 0 or (keys[row] < 0 and (keys[row] != -1 or events[row] != 0)):
            return row
        lengths[row] = min(events[row], maximum)
    return -1


@compiled(
    "int64(int32[::1], int64[::1], int64[::1], int32[::1], int32[::1], int64, int64, int64[::1],"
    " int32[::1], int64)"
)
def copy_events(values, starts, rows, keys, events, maximum, first, offsets, ids, size):
    """Copy the newest events of rows, oldest first; return the first invalid row, or -1.

    Args:
        values: Output: the ids of a block.
        starts: The index in ``values`` where the events of each row begin.
        rows: The rows, whose keys are all in one directory of the store.
        keys, events: The key and the number of events of all rows of the block.
        maximum: The maximum number of events per row.
        first: The first key of the directory.
        offsets: The offsets of the directory's keys.
        ids: A column of the directory's events.
        size: The number of rows of the column's embedding table.
    """
    for row in rows:
        key = keys[row] - first
        if key >= len(offsets) - 1:
            return row
        begin = offsets[key]
        end = offsets[key + 1]
        if begin < 0 or end > len(ids) or begin > end or events[row] > end - begin:
            return row
        count = min(np.int64(events[row]), maximum)
        # Unsigned indices need no test for negative values, so the loop is vectorized.
        source = np.uint64(begin + events[row] - count)
        target = np.uint64(starts[row])
        largest = np.uint32(0)  # read as unsigned, a negative id exceeds the size of any table
        for i in range(np.uint64(count)):
            value = ids[source + i]
            values[target + i] = value
            largest = max(largest, np.uint32(value))
        if largest >= size:
            return row
    return -1


def add_events(
    dataset: Dataset,
    blocks: Iterator[tuple[slice, Any]],
    allocate_tensors: Callable[..., list[torch.Tensor]],
) -> Iterator[tuple[slice, FlatBlock | JaggedBlock]]:
    """Replace the pointers in blocks by the events, and divide blocks that become too large.

    Args:
        dataset: The data.
        blocks: Yields the steps to draw, and a block whose ids are the columns of
            ``schema.integers`` without the numbers of vectors.
        allocate_tensors: Returns uninitialised tensors of given dtypes and shapes.

    Yields:
        The steps to draw, and a block with the events after the ids of the categorical columns.

    Raises:
        SchemaError: A pointer is invalid, or the id of an event is outside its table.
        BadInputError: A file of a store has been modified.
    """
    for drawn, block in blocks:
        steps, batch = block.labels.shape[:2]
        if batch == 0:
            yield drawn, block
            continue
        for store in dataset.stores:
            store.check()
        begin, end, _ = drawn.indices(steps)
        pointers, lengths = _read_pointers(dataset, block, steps, batch)
        size = 4 * int(lengths[:, begin:end].sum(dtype=np.int64))
        num_parts = min(end - begin, 1 + size // memory.BLOCK_BYTES)
        bounds = np.linspace(begin, end, num_parts + 1).astype(int).tolist()
        for first, last in itertools.pairwise(bounds):
            part = slice(first, last)
            expanded = _expand_pointers(
                dataset, block, part, pointers[:, part], lengths[:, part], allocate_tensors
            )
            yield slice(0, last - first), expanded


def _read_pointers(
    dataset: Dataset, block: FlatBlock | JaggedBlock, steps: int, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Read the pointers of a block.

    Returns:
        The keys and numbers of events, int32 [histories, steps, 2, B]; and the number of events
        that each row gets, int32 [columns of all histories, steps, B].
    """
    categorical = len(dataset.schema.categorical)
    columns = categorical + 2 * len(dataset.stores)
    if isinstance(block, FlatBlock):
        found = block.ids.numpy()[:, categorical:]
    else:
        # A pointer column has one value per row, so its values in a step are contiguous.
        firsts = np.array(block.bounds[:-1]).reshape(steps, columns, 1)[:, categorical:]
        found = view_flat(block.values)[firsts + np.arange(batch)]
    pointers = found.reshape(steps, len(dataset.stores), 2, batch).swapaxes(0, 1).copy()
    lengths = np.empty((len(dataset.stores), steps, batch), np.int32)
    for store, own, counts in zip(dataset.stores, pointers, lengths, strict=True):
        keys, events = own.swapaxes(0, 1).reshape(2, -1)
        bad_row = write_event_counts(counts.reshape(-1), keys, events, dataset.max_events)
        if bad_row >= 0:
            _refuse(dataset, store, int(keys[bad_row]), int(events[bad_row]))
    return pointers, np.repeat(lengths, [len(store.sizes) for store in dataset.stores], axis=0)


def _expand_pointers(
    dataset: Dataset,
    block: FlatBlock | JaggedBlock,
    steps: slice,
    pointers: np.ndarray,
    lengths: np.ndarray,
    allocate_tensors: Callable[..., list[torch.Tensor]],
) -> JaggedBlock:
    """Return a block of a slice of steps, with events instead of pointers.

    Args:
        dataset: The data.
        block: The block with pointers.
        steps: The steps.
        pointers, lengths: The results of :func:`_read_pointers` for these steps.
        allocate_tensors: Returns uninitialised tensors of given dtypes and shapes.
    """
    schema = dataset.schema
    count, batch = lengths.shape[1:]
    categorical = len(schema.categorical)
    features = len(schema.features)
    columns = categorical + 2 * len(dataset.stores)
    all_lengths, offsets = allocate_tensors(
        (torch.int32, (count, features * batch)), (torch.int32, (count, features * batch + 1))
    )
    by_feature = all_lengths.numpy().reshape(count, features, batch)
    if isinstance(block, FlatBlock):
        ids = view_flat(block.ids)
        bounds = batch * np.arange(block.ids.shape[0] * columns + 1)
        by_feature[:, :categorical] = 1
    else:
        ids = view_flat(block.values)
        bounds = np.array(block.bounds)
        own_lengths = block.lengths[steps].numpy().reshape(count, columns, batch)
        by_feature[:, :categorical] = own_lengths[:, :categorical]
    by_feature[:, categorical:] = lengths.swapaxes(0, 1)
    starts = np.zeros(count * features * batch + 1, np.int64)
    np.cumsum(view_flat(all_lengths), out=starts[1:])
    write_offsets(offsets.numpy(), starts)
    (values,) = allocate_tensors((torch.int32, (int(starts[-1]),)))
    # In each step the ids of the categorical columns come first and are copied unchanged.
    step_starts = starts[:: features * batch]
    for step in range(count):
        first_column = (steps.start + step) * columns
        begin = bounds[first_column]
        end = bounds[first_column + categorical]
        to = step_starts[step]
        view_flat(values)[to : to + end - begin] = ids[begin:end]
    starts_by_feature = starts[:-1].reshape(count, features, batch)
    first = categorical
    for store, own in zip(dataset.stores, pointers, strict=True):
        _copy_history(dataset, store, view_flat(values), starts_by_feature[:, first:], own)
        first += len(store.sizes)
    return JaggedBlock(
        *block.take_floats(steps),
        values,
        all_lengths,
        offsets,
        starts[::batch].tolist(),
        None if block.dense_vectors is None else block.dense_vectors[steps],
    )


def _copy_history(
    dataset: Dataset,
    store: HistoryStore,
    values: np.ndarray,
    starts: np.ndarray,
    pointers: np.ndarray,
) -> None:
    """Copy the events of a history.

    Args:
        dataset: The data.
        store: The store of the events.
        values: Output, int32: the ids of a block.
        starts: int64 [steps, columns or more, B], the index in ``values`` where the events of each
            row begin; the first columns are those of the history.
        pointers: int32 [steps, 2, B], keys and numbers of events.
    """
    keys, events = pointers.swapaxes(0, 1).reshape(2, -1)
    order = np.argsort(keys, kind="stable")
    # Rows without a history, whose key is -1, sort before the first part and are left out.
    firsts = [part.first for part in store.parts]
    bounds = [*np.searchsorted(keys[order], firsts), len(order)]
    for part, (begin, end) in zip(store.parts, itertools.pairwise(bounds), strict=True):
        rows = order[begin:end]
        for column, (ids, size) in enumerate(zip(part.ids, store.sizes, strict=True)):
            column_starts = np.ascontiguousarray(starts[:, column]).reshape(-1)
            pointed = rows, keys, events, dataset.max_events, part.first, part.offsets
            bad_row = copy_events(values, column_starts, *pointed, ids, size)
            if bad_row >= 0:
                _refuse(dataset, store, int(keys[bad_row]), int(events[bad_row]))


def _refuse(dataset: Dataset, store: HistoryStore, key: int, events: int) -> None:
    """Raise the error of a row with the invalid pointer (``key``, ``events``).

    Raises:
        SchemaError: Always. The store's own check of the pointer words the message.
    """
    try:
        store.read_newest(key, events, dataset.max_events)
    except SchemaError as error:
        raise SchemaError(
            f"{dataset.source.name}: {error.what}",
            error.remedy
            or "the parquet files and the histories are not from the same ETL run: run it again",
        ) from error
    raise AssertionError((key, events))
