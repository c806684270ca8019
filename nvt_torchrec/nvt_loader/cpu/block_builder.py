"""Build blocks in CPU memory by compiled loops."""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from nvt_torchrec.nvt_loader.cpu.blocks import (
    FlatBlock,
    JaggedBlock,
    ShardRows,
    count_float_columns,
    find_moves,
    list_source_copies,
    make_empty_block,
    split_floats,
    view_flat,
    write_offsets,
)
from nvt_torchrec.nvt_loader.parquet import parquet_kernels as kernels
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset
from nvt_torchrec.nvt_loader.parquet.decoder import make_cpu_decoder
from nvt_torchrec.nvt_loader.parquet.row_chunks import Buffers, Decoder, RowChunk, Target

#: The alignment in bytes of the tensors in a block's memory: a cache line.
ALIGNMENT = 64


class CpuBuilder:
    """Builds blocks in CPU memory from the row groups of a split.

    The subclasses in :mod:`nvt_loader.cuda.builders` build blocks on a GPU. :meth:`build` and
    :meth:`produce` run in the loader's thread, which shares the decoding with ``threads - 1`` other
    threads; :meth:`receive` runs in the caller's thread.
    """

    #: Whether row groups are decoded on the device, as a whole.
    on_device = False
    #: The number of bytes of device memory that libraries keep for themselves.
    library_bytes = 0
    #: If row groups are decoded on the device: the builder of the first block, and of all other
    #: blocks if the device's first block differs from it.
    host: CpuBuilder | None = None
    #: The class of ``host``.
    host_kind: type[CpuBuilder]

    def __init__(self, dataset: Dataset, device: torch.device, threads: int = 1) -> None:
        self._dataset = dataset
        self.device = device
        self.decode: Decoder = make_cpu_decoder(dataset)
        self.buffers = Buffers()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        if threads > 1:
            self._pool = concurrent.futures.ThreadPoolExecutor(threads - 1, "nvt_loader_decode")

    def build(
        self, steps: int, batch: int, sources: list[ShardRows], following: Sequence[int] = ()
    ) -> FlatBlock | JaggedBlock:
        """Build the block of ``steps`` batches of ``batch`` rows from the rows of all sources.

        ``following`` are the numbers of steps of the next blocks from these sources.
        """
        if not sources:
            return make_empty_block(self._dataset, steps, torch.device("cpu"))
        if not self._dataset.jagged:
            return self._build_flat(steps, batch, sources)

        def take(source: ShardRows) -> list[RowChunk]:
            return _decode_all(self._take_rows(source, steps))

        chunks = self._share(take, sources)
        self._decode_ahead(sources)
        drawn = [source.drawn for source in sources]
        return build_jagged(self._dataset, chunks, drawn, steps, batch, self.allocate_tensors)

    def _build_flat(self, steps: int, batch: int, sources: list[ShardRows]) -> FlatBlock:
        """Build a block without lists; the threads write the rows of different sources to it."""
        schema = self._dataset.schema
        *floats, ids = self.allocate_tensors(
            *[(torch.float32, (steps * batch, width)) for width in count_float_columns(schema)],
            (torch.int32, (steps, len(schema.integers), batch)),
        )
        labels, weights, dense = [part.numpy().view(np.int32) for part in floats]
        # One view per block: making one per source would take longer than all other Python code.
        flat_ids = view_flat(ids)

        def fill(source: ShardRows) -> None:
            drawn = source.drawn
            copies = list_source_copies(drawn, steps, [steps * drawn.width], 0)
            target = Target(labels, weights, dense, flat_ids, copies, batch)
            first = 0
            for rows in self._take_rows(source, steps):
                rows.copy_to(target, first)
                first += rows.rows

        self._share(fill, sources)
        self._decode_ahead(sources)
        return FlatBlock(*split_floats(self._dataset, steps, floats), ids)

    def _take_rows(self, source: ShardRows, steps: int) -> Iterable[Any]:
        """Take a source's rows for ``steps`` steps.

        If rows are shuffled, the result contains only this rank's rows, in the shuffled order.
        """
        parts: Iterable[Any] = source.reader.take(steps * source.width)
        if source.order is None:
            return parts
        chunks = _decode_all(parts)
        order = source.order().reshape(steps, -1)[:, source.begin : source.end]
        return [permute_chunks(chunks, order.ravel(), self._dataset, self.buffers)]

    def _share(self, function: Callable[[ShardRows], Any], sources: list[ShardRows]) -> list[Any]:
        """Return a function's result for each source, computed by this thread and the pool."""
        if self._pool is None:
            return list(map(function, sources))
        # The pool begins with the first source. This thread goes backwards from the last one and
        # runs the tasks that it can cancel, which are those that the pool has not begun.
        tasks = [self._pool.submit(function, source) for source in sources]
        results = []
        for task, source in zip(reversed(tasks), reversed(sources), strict=True):
            results.append(function(source) if task.cancel() else task.result())
        return results[::-1]

    def _decode_ahead(self, sources: list[ShardRows]) -> None:
        """Let the pool decode the next rows of each source."""
        if self._pool is not None:
            for source in sources:
                source.reader.decode_ahead(self._pool)

    def allocate_tensors(self, *wanted: tuple[torch.dtype, tuple[int, ...]]) -> list[torch.Tensor]:
        """Return uninitialised tensors of these dtypes and shapes, in one recycled buffer."""
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in wanted]
        aligned_sizes = [math.ceil(size / ALIGNMENT) * ALIGNMENT for size in sizes]
        # Not zero bytes, because torch cannot view an empty array as another dtype.
        memory = self.allocate_bytes(max(sum(aligned_sizes), ALIGNMENT))
        tensors = []
        begin = 0
        for (dtype, shape), size, aligned_size in zip(wanted, sizes, aligned_sizes, strict=True):
            tensors.append(memory[begin : begin + size].view(dtype).view(shape))
            begin += aligned_size
        return tensors

    def allocate_bytes(self, size: int) -> torch.Tensor:
        """Return uninitialised memory that the CPU can write to: uint8 [size]."""
        return torch.from_numpy(self.buffers.take(size))

    def produce(self, produced: Iterator[tuple[slice, FlatBlock]]) -> tuple | None:
        """Build the next block and return the arguments of :meth:`receive`; None at the end."""
        return next(produced, None)

    def receive(
        self, steps: slice, block: FlatBlock | JaggedBlock, ready: torch.cuda.Event | None = None
    ) -> tuple[slice, FlatBlock | JaggedBlock]:
        """Make the block usable by the caller.

        Args:
            steps: The steps that the caller draws.
            block: The block.
            ready: The event recorded after the device's work on the block; None on a CPU.
        """
        return steps, block

    def read_ahead(self, sources: list[ShardRows], following: Sequence[int]) -> None:
        """Start to read the next blocks before the first one is built."""

    def close(self) -> None:
        """End the decoding threads. No block can be built afterwards."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _decode_all(parts: Iterable[Any]) -> list[RowChunk]:
    """Decode parts of a source's rows."""
    chunks: list[RowChunk] = []
    for rows in parts:
        chunks += rows.decode()
    return chunks


def permute_chunks(
    chunks: list[RowChunk], order: np.ndarray, dataset: Dataset, buffers: Buffers
) -> RowChunk:
    """Copy rows of several chunks, in another order, into one chunk.

    Args:
        chunks: The chunks.
        order: int64 [rows], the index of each row of the result in the concatenated chunks.
        dataset: The data.
        buffers: The memory for the result.
    """
    rows = len(order)
    columns = dataset.schema.columns
    moves = list(find_moves(chunks, order))
    lists = [columns.index(name) for name in dataset.schema.multi_hot]
    plain = np.setdiff1d(np.arange(len(columns)), lists)  # the columns without lists
    addresses, values = np.zeros((2, len(columns)), np.int64)
    owner = []

    def take(size: int) -> np.ndarray:
        memory = buffers.take(4 * size)
        owner.append(memory)
        return memory.view(np.int32)

    plain_values = take(len(plain) * rows)
    for to_rows, from_rows, chunk in moves:
        kernels.permute(plain_values, chunk.addresses[plain], rows, to_rows, from_rows)
    addresses[plain] = plain_values.ctypes.data + 4 * rows * np.arange(len(plain))
    for i in lists:
        lengths = np.empty(rows, np.int32)
        for to_rows, from_rows, chunk in moves:
            lengths[to_rows] = np.diff(chunk.view_offsets(i))[from_rows]
        offsets = take(rows + 1)
        offsets[0] = 0
        np.cumsum(lengths, out=offsets[1:])
        starts = offsets.astype(np.int64)
        elements = take(int(starts[-1]))
        for to_rows, from_rows, chunk in moves:
            source = chunk.values[i], chunk.addresses[i]
            kernels.permute_lists(elements, starts, *source, to_rows, from_rows)
        addresses[i] = offsets.ctypes.data
        values[i] = elements.ctypes.data
    return RowChunk(rows, addresses, values, owner)


def build_jagged(
    dataset: Dataset,
    chunks_by_source: list[list[RowChunk]],
    sources: list[ShardRows],
    steps: int,
    batch: int,
    allocate_tensors: Callable[..., list[torch.Tensor]],
) -> JaggedBlock:
    """Build a block with lists from the rows of all sources.

    Args:
        dataset: The data.
        chunks_by_source: The decoded rows of each source.
        sources: The sources.
        steps: The number of batches.
        batch: The number of rows of each batch.
        allocate_tensors: Returns uninitialised tensors of given dtypes and shapes.
    """
    schema = dataset.schema
    first_id = len(schema.floats)
    columns = len(schema.integers)
    *floats, lengths, offsets = allocate_tensors(
        *[(torch.float32, (steps * batch, width)) for width in count_float_columns(schema)],
        (torch.int32, (steps, columns * batch)),
        (torch.int32, (steps, columns * batch + 1)),
    )
    chunks: list[RowChunk] = []
    found = []
    for source, own in zip(sources, chunks_by_source, strict=True):
        found.append(list_source_copies(source, steps, [chunk.rows for chunk in own], len(chunks)))
        chunks += own
    copies = np.concatenate(found)
    copies = copies[np.argsort(copies[:, 0], kind="stable")]

    labels, weights, dense = [part.numpy().view(np.int32) for part in floats]
    no_ids = np.empty(0, np.int32)
    for i, chunk in enumerate(chunks):
        own_copies = copies[copies[:, 1] == i]
        addresses = chunk.addresses[:first_id]
        kernels.copy_rows(
            labels, weights, dense, no_ids, addresses, own_copies, batch, 0, chunk.rows
        )

    # Write the ids in two passes, because the lengths determine where each row's elements begin.
    is_list = np.array([name in schema.multi_hot for name in schema.integers])
    list_copies = copies[:, 1:].copy()
    list_copies[:, 3] += copies[:, 0] * columns * batch
    first_copies = np.searchsorted(copies[:, 0], np.arange(steps + 1))
    layout = is_list, batch, list_copies, first_copies
    addresses = np.stack([chunk.addresses[first_id:] for chunk in chunks])
    kernels.write_list_lengths(view_flat(lengths), addresses, *layout)
    starts = np.zeros(steps * columns * batch + 1, np.int64)
    np.cumsum(view_flat(lengths), out=starts[1:])
    write_offsets(offsets.numpy(), starts)
    (values,) = allocate_tensors((torch.int32, (int(starts[-1]),)))
    # For a column without lists, `addresses` are those of the ids themselves.
    elements = np.stack([chunk.values[first_id:] for chunk in chunks])
    elements = np.where(is_list, elements, addresses)
    kernels.copy_list_values(view_flat(values), starts, elements, addresses, *layout)
    views = split_floats(dataset, steps, floats)
    return JaggedBlock(*views, values, lengths, offsets, starts[::batch].tolist())
