"""Build blocks in CPU memory by compiled loops."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from nvt_torchrec.nvt_loader.cpu.blocks import (
    FlatBlock,
    JaggedBlock,
    ShardRows,
    empty_block,
    flat,
    float_views,
    float_widths,
    moves,
    source_copies,
)
from nvt_torchrec.nvt_loader.parquet import parquet_kernels as kernels
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset
from nvt_torchrec.nvt_loader.parquet.decoder import cpu_decoder
from nvt_torchrec.nvt_loader.parquet.row_chunks import Buffers, Decoder, RowChunk, Target

#: Tensors in a block's memory begin at multiples of this many bytes.
ALIGNMENT = 64


class CpuBuilder:
    """Turns a split's row groups into blocks in CPU memory.

    The subclasses in :mod:`nvt_loader.cuda.builders` make blocks on a GPU. :meth:`build` and
    :meth:`produce` run in the loader's thread, which shares the decoding with ``threads`` - 1
    others; :meth:`receive` runs in the caller's.
    """

    #: Whether row groups are decoded on the device, whole.
    on_device = False
    #: Bytes of a device that libraries keep for themselves.
    library_bytes = 0
    #: Where row groups are decoded on the device: what builds the first block, and all others if
    #: the device's differ from its; and its class.
    host: CpuBuilder | None = None
    host_kind: type[CpuBuilder]

    def __init__(self, dataset: Dataset, device: torch.device, threads: int = 1) -> None:
        self._dataset = dataset
        self.device = device
        self.decode: Decoder = cpu_decoder(dataset)
        self.buffers = Buffers()
        self._pool = (
            concurrent.futures.ThreadPoolExecutor(threads - 1, "nvt_loader_decode")
            if threads > 1
            else None
        )

    def build(
        self, steps: int, batch: int, sources: list[ShardRows], following: Sequence[int] = ()
    ) -> FlatBlock | JaggedBlock:
        """Build the block of ``steps`` batches of ``batch`` rows from the rows of all sources.

        ``following`` are the steps of the next blocks from these sources.
        """
        if not sources:
            return empty_block(self._dataset, steps, torch.device("cpu"))
        if not self._dataset.jagged:
            return self._build_flat(steps, batch, sources)

        def take(source: ShardRows) -> list[RowChunk]:
            return [chunk for rows in self._rows(source, steps) for chunk in rows.chunks()]

        parts = self._share(take, sources)
        self._decode_ahead(sources)
        drawn = [source.drawn for source in sources]
        return build_jagged(self._dataset, parts, drawn, steps, batch, self.tensors)

    def _build_flat(self, steps: int, batch: int, sources: list[ShardRows]) -> FlatBlock:
        schema = self._dataset.schema
        *floats, ids = self.tensors(
            *((torch.float32, (steps * batch, width)) for width in float_widths(schema)),
            (torch.int32, (steps, len(schema.integers), batch)),
        )
        memory = *(part.numpy().view(np.int32) for part in floats), flat(ids)

        def fill(source: ShardRows) -> None:
            drawn = source.drawn
            copies = source_copies(drawn, steps, [steps * drawn.width], 0)
            target = Target(*memory, copies, batch)  # type: ignore[call-arg, arg-type]
            first = 0
            for rows in self._rows(source, steps):
                rows.copy_to(target, first)
                first += rows.rows

        self._share(fill, sources)
        self._decode_ahead(sources)
        return FlatBlock(*float_views(self._dataset, steps, floats), ids)

    def _rows(self, source: ShardRows, steps: int) -> Iterable[Any]:
        """Take a source's rows for some steps; if they are shuffled, only this rank's, in order."""
        parts: Any = source.reader.take(steps * source.width)
        if source.order is None:
            return parts
        chunks = [chunk for rows in parts for chunk in rows.chunks()]
        order = source.order().reshape(steps, -1)[:, source.begin : source.end]
        return [permuted(chunks, order.ravel(), self._dataset, self.buffers)]

    def _share(self, function: Callable[[ShardRows], Any], sources: list[ShardRows]) -> list[Any]:
        """Apply a function to each source, in this thread and the pool's."""
        if self._pool is None:
            return list(map(function, sources))
        # The pool begins with the first source. From the last one on, this thread takes those that
        # the pool has not begun.
        tasks = [self._pool.submit(function, source) for source in sources]
        found = [
            function(source) if task.cancel() else task.result()
            for task, source in zip(tasks[::-1], sources[::-1], strict=True)
        ]
        return found[::-1]

    def _decode_ahead(self, sources: list[ShardRows]) -> None:
        if self._pool is not None:
            for source in sources:
                source.reader.decode_ahead(self._pool)

    def tensors(self, *wanted: tuple[torch.dtype, tuple[int, ...]]) -> list[torch.Tensor]:
        """Return uninitialised tensors of these dtypes and shapes, in one recycled buffer."""
        sizes = [dtype.itemsize * int(np.prod(shape)) for dtype, shape in wanted]
        begins = np.cumsum([0] + [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]).tolist()
        # at least some bytes: torch cannot view an empty array as another dtype
        memory = self.memory(max(begins[-1], ALIGNMENT))
        return [
            memory[begin : begin + size].view(dtype).view(shape)
            for (dtype, shape), begin, size in zip(wanted, begins, sizes, strict=False)
        ]

    def memory(self, size: int) -> torch.Tensor:
        """Return uninitialised memory that the CPU can write to: uint8 [size]."""
        return torch.from_numpy(self.buffers.take(size))

    def produce(self, produced: Iterator[tuple[slice, FlatBlock]]) -> tuple | None:
        """Return the next block as the arguments of :meth:`receive`; None at the end."""
        return next(produced, None)

    def receive(
        self, steps: slice, block: FlatBlock | JaggedBlock, ready: torch.cuda.Event | None = None
    ) -> tuple[slice, FlatBlock | JaggedBlock]:
        """Make the block usable by the caller.

        Args:
            steps: The steps that the caller draws.
            block: The block.
            ready: Follows the work on the block, if a device does it.
        """
        return steps, block

    def read_ahead(self, sources: list[ShardRows], following: Sequence[int]) -> None:
        """Begin to read the next blocks, before the first one is built."""

    def close(self) -> None:
        """End the decoding threads. No block may be built after that."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def permuted(
    chunks: list[RowChunk], order: np.ndarray, dataset: Dataset, buffers: Buffers
) -> RowChunk:
    """Copy the rows of some chunks in another order into one chunk."""
    rows, columns = len(order), dataset.schema.columns
    moved = list(moves(chunks, order))
    lists = [columns.index(name) for name in dataset.schema.multi_hot]
    plain = np.setdiff1d(np.arange(len(columns)), lists)
    addresses, values = np.zeros((2, len(columns)), np.int64)
    owner = []

    def take(size: int) -> np.ndarray:
        memory = buffers.take(4 * size)
        owner.append(memory)
        return memory.view(np.int32)

    memory = take(len(plain) * rows)
    for to_rows, from_rows, chunk in moved:
        kernels.permute(memory, chunk.addresses[plain], rows, to_rows, from_rows)
    addresses[plain] = memory.ctypes.data + 4 * rows * np.arange(len(plain))
    for i in lists:
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
            kernels.permute_lists(memory, starts, chunk.values[i], *where)
        addresses[i], values[i] = offsets.ctypes.data, memory.ctypes.data
    return RowChunk(rows, addresses, values, owner)


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
    first_id, columns = len(schema.floats), len(schema.integers)
    *floats, lengths, offsets = tensors(
        *((torch.float32, (steps * batch, width)) for width in float_widths(schema)),
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
    block = *(part.numpy().view(np.int32) for part in floats), np.empty(0, np.int32)
    for i, chunk in enumerate(chunks):
        own = copies[copies[:, 1] == i]
        kernels.copy_rows(*block, chunk.addresses[:first_id], own, batch, 0, chunk.rows)
    is_list = np.array([name in set(schema.multi_hot) for name in schema.integers])
    addresses = np.stack([chunk.addresses[first_id:] for chunk in chunks])
    elements = np.stack([chunk.values[first_id:] for chunk in chunks])
    of_lists = copies[:, 1:].copy()
    of_lists[:, 3] += copies[:, 0] * columns * batch
    where = is_list, batch, of_lists, np.searchsorted(copies[:, 0], np.arange(steps + 1))
    kernels.list_lengths(flat(lengths), addresses, *where)
    starts = np.zeros(steps * columns * batch + 1, np.int64)
    np.cumsum(flat(lengths), out=starts[1:])
    by_step = starts[:-1].reshape(steps, -1)
    np.subtract(by_step, by_step[:, :1], out=offsets.numpy()[:, :-1], casting="same_kind")
    offsets.numpy()[:, -1] = starts[columns * batch :: columns * batch] - by_step[:, 0]
    (values,) = tensors((torch.int32, (int(starts[-1]),)))
    kernels.list_values(
        flat(values), starts, np.where(is_list, elements, addresses), addresses, *where
    )
    views = float_views(dataset, steps, floats)
    return JaggedBlock(*views, values, lengths, offsets, starts[::batch].tolist())
