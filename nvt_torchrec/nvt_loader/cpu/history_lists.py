"""The events of histories, put into blocks: rows carry pointers until they are in their order.

The events of a block are read key by key, in ascending order: rows of one key read the same memory
at once, and a store that is larger than the memory is read from its files in order.
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
from nvt_torchrec.nvt_loader.cpu.blocks import FlatBlock, JaggedBlock, flat
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset


@compiled("int64(int32[::1], int32[::1], int32[::1], int64)")
def count_events(lengths, keys, events, maximum):
    """Write how many events each row gets; return the first row whose pointer cannot be, or -1."""
    for row in range(len(keys)):
        if events[row] < 0 or (keys[row] < 0 and (keys[row] != -1 or events[row] != 0)):
            return row
        lengths[row] = min(events[row], maximum)
    return -1


@compiled(
    "int64(int32[::1], int64[::1], int64[::1], int32[::1], int32[::1], int64, int64, int64[::1],"
    " int32[::1], int64)"
)
def copy_events(values, starts, rows, keys, events, maximum, first, offsets, ids, size):
    """Copy the newest events of some rows, oldest first; return the first bad row, or -1.

    Args:
        values: The target.
        starts: Where in it the events of each row go.
        rows: The rows, whose keys lie in one directory of the store.
        keys, events, most: Of all rows, and the most events of each.
        first, offsets, ids: The directory's first key, its offsets, and a column of its events.
        size: Rows of the column's table.
    """
    for row in rows:
        at = keys[row] - first
        if at >= len(offsets) - 1:
            return row
        begin, end = offsets[at], offsets[at + 1]
        if begin < 0 or end > len(ids) or begin > end or events[row] > end - begin:
            return row
        count = min(np.int64(events[row]), maximum)
        source, target = np.uint64(begin + events[row] - count), np.uint64(starts[row])
        largest = np.uint32(0)  # as unsigned numbers, negative ids are large
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
    tensors: Callable[..., list[torch.Tensor]],
) -> Iterator[tuple[slice, FlatBlock | JaggedBlock]]:
    """Put events in the place of pointers, and cut blocks that get large by it.

    Args:
        dataset: The data.
        blocks: The steps to draw, and blocks whose ids are the columns of ``schema.integers``.
        tensors: Makes tensors of given dtypes and shapes.

    Raises:
        SchemaError: A pointer leads outside the store, or an id is outside its table.
        BadInputError: A file of a store was written to.
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
        pieces = min(end - begin, 1 + size // memory.BLOCK_BYTES)
        bounds = np.linspace(begin, end, pieces + 1).astype(int).tolist()
        for first, last in itertools.pairwise(bounds):
            part = slice(first, last)
            made = _expand(dataset, block, part, pointers[:, part], lengths[:, part], tensors)
            yield slice(0, last - first), made


def _read_pointers(
    dataset: Dataset, block: FlatBlock | JaggedBlock, steps: int, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and numbers of events, int32 [histories, steps, 2, B], and how many of them each
    row gets, int32 [features of histories, steps, B]."""
    columns, singles = len(dataset.schema.integers), len(dataset.schema.categorical)
    if isinstance(block, FlatBlock):
        found = block.ids.numpy()[:, singles:]
    else:
        places = np.array(block.bounds[:-1]).reshape(steps, columns, 1)[:, singles:]
        found = flat(block.values)[places + np.arange(batch)]
    pointers = found.reshape(steps, len(dataset.stores), 2, batch).swapaxes(0, 1).copy()
    lengths = np.empty((len(dataset.stores), steps, batch), np.int32)
    for store, own, counts in zip(dataset.stores, pointers, lengths, strict=True):
        keys, events = own.swapaxes(0, 1).reshape(2, -1)
        bad = count_events(counts.reshape(-1), keys, events, dataset.max_events)
        if bad >= 0:
            _refuse(dataset, store, int(keys[bad]), int(events[bad]))
    return pointers, np.repeat(lengths, [len(store.sizes) for store in dataset.stores], axis=0)


def _expand(
    dataset: Dataset,
    block: FlatBlock | JaggedBlock,
    steps: slice,
    pointers: np.ndarray,
    lengths: np.ndarray,
    tensors: Callable[..., list[torch.Tensor]],
) -> JaggedBlock:
    """Return a block of some steps with the events in the place of the pointers."""
    schema = dataset.schema
    count, batch = lengths.shape[1:]
    columns, features, singles = map(len, (schema.integers, schema.features, schema.categorical))
    held, offsets = tensors(
        (torch.int32, (count, features * batch)), (torch.int32, (count, features * batch + 1))
    )
    by_feature = held.numpy().reshape(count, features, batch)
    if isinstance(block, FlatBlock):
        ids, bounds = flat(block.ids), batch * np.arange(block.ids.shape[0] * columns + 1)
        by_feature[:, :singles] = 1
    else:
        ids, bounds = flat(block.values), np.array(block.bounds)
        own = block.lengths[steps].numpy().reshape(count, columns, batch)
        by_feature[:, :singles] = own[:, :singles]
    by_feature[:, singles:] = lengths.swapaxes(0, 1)
    starts = np.zeros(count * features * batch + 1, np.int64)
    np.cumsum(flat(held), out=starts[1:])
    firsts = starts[:: features * batch]
    np.subtract(
        starts[:-1].reshape(count, -1), firsts[:-1, None], out=offsets.numpy()[:, :-1],
        casting="same_kind",
    )  # fmt: skip
    offsets.numpy()[:, -1] = np.diff(firsts)
    (values,) = tensors((torch.int32, (int(starts[-1]),)))
    for step in range(count):
        begin, end = bounds[[(steps.start + step) * columns + i for i in (0, singles)]]
        flat(values)[firsts[step] : firsts[step] + end - begin] = ids[begin:end]
    places, at = starts[:-1].reshape(count, features, batch), singles
    for store, own in zip(dataset.stores, pointers, strict=True):
        _copy_history(dataset, store, flat(values), places[:, at:], own)
        at += len(store.sizes)
    weights = block.row_weights
    return JaggedBlock(
        block.labels[steps],
        None if weights is None else weights[steps],
        block.dense[steps],
        *(values, held, offsets, starts[::batch].tolist()),
    )


def _copy_history(
    dataset: Dataset,
    store: HistoryStore,
    values: np.ndarray,
    places: np.ndarray,
    pointers: np.ndarray,
) -> None:
    """Copy the events of a history; ``places`` [steps, columns or more, B] is where they go."""
    keys, events = pointers.swapaxes(0, 1).reshape(2, -1)
    order = np.argsort(keys, kind="stable")
    cuts = [*np.searchsorted(keys[order], [part.first for part in store.parts]), len(order)]
    for part, begin, end in zip(store.parts, cuts, cuts[1:], strict=False):
        for column, (ids, size) in enumerate(zip(part.ids, store.sizes, strict=True)):
            starts = np.ascontiguousarray(places[:, column]).reshape(-1)
            where = starts, order[begin:end], keys, events, dataset.max_events
            bad = copy_events(values, *where, part.first, part.offsets, ids, size)
            if bad >= 0:
                _refuse(dataset, store, int(keys[bad]), int(events[bad]))


def _refuse(dataset: Dataset, store: HistoryStore, key: int, events: int) -> None:
    """Raise the error of a row that points to these events."""
    try:
        store.newest(key, events, dataset.max_events)
    except SchemaError as error:
        raise SchemaError(
            f"{dataset.source.name}: {error.what}",
            error.remedy or "the parquet and the histories are not of one ETL run: run it again",
        ) from error
    raise AssertionError((key, events))
