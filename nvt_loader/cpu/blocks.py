"""Blocks in CPU memory, put together by compiled loops."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from nvt_loader.blocks import Block, JaggedBlock, Source, empty_block
from nvt_loader.cpu.jagged import build_jagged, permuted_jagged
from nvt_loader.cpu.runs import ALIGNMENT, Runs, flat, runs_of, scattered
from nvt_loader.kernels import permute
from nvt_loader.memory import Buffers
from nvt_loader.parquet.chunks import Chunk, CpuRows, Decoder, Target
from nvt_loader.parquet.decode import cpu_decoder
from nvt_loader.parquet.footers import Layout


class CpuBlocks:
    """What turns a split's row groups into blocks: here in CPU memory.

    The subclasses in :mod:`nvt_loader.cuda.blocks` make blocks on a GPU. ``build`` and ``produce``
    run in the loader's thread, which shares the decoding with ``threads`` - 1 others; ``receive``
    runs in the caller's.
    """

    #: Whether row groups are decoded on the device, whole.
    on_device = False

    def __init__(self, layout: Layout, device: torch.device, threads: int = 1) -> None:
        self._layout = layout
        self._device = device
        self.decode: Decoder = cpu_decoder(layout)
        self.buffers = Buffers()
        self._pool = (
            concurrent.futures.ThreadPoolExecutor(threads - 1, "nvt_loader_decode")
            if threads > 1
            else None
        )

    def build(self, steps: int, batch: int, sources: list[Source]) -> Block | JaggedBlock:
        """The block of ``steps`` batches of ``batch`` rows, which the sources make together."""
        if not sources:
            return empty_block(self._layout, steps, torch.device("cpu"))
        if not self._layout.jagged:
            return self._build_flat(steps, batch, sources)
        parts = self._take(steps, sources)
        runs = Runs(parts, [source.drawn for source in sources], steps, batch)
        return build_jagged(self._layout, parts, runs, self.tensors)

    def _build_flat(self, steps: int, batch: int, sources: list[Source]) -> Block:
        schema = self._layout.schema
        shape = (steps, batch)
        dtype = torch.int64 if self._layout.id_dtype.itemsize == 8 else torch.int32
        labels, dense, ids = self.tensors(
            (torch.float32, shape),
            (torch.float32, (*shape, len(schema.dense))),
            (dtype, (steps, len(schema.categorical), batch)),
        )
        memory = flat(labels), flat(dense), flat(ids)

        def fill(source: Source) -> None:
            drawn = source.drawn
            target = Target(*memory, runs_of(drawn, steps, [steps * drawn.width], 0), batch)
            first = 0
            for rows in self._rows(source, steps):
                rows.copy_to(target, first)
                first += rows.rows

        self._share(fill, sources)
        self._decode_ahead(sources)
        return Block(labels, dense, ids)

    def _take(self, steps: int, sources: list[Source]) -> list[list[Chunk]]:
        def take(source: Source) -> list[Chunk]:
            return [chunk for rows in self._rows(source, steps) for chunk in rows.chunks()]

        if any(source.order or source.reader.left < steps * source.width for source in sources):
            parts = self._share(take, sources)
        else:  # taking what is there is no work
            parts = list(map(take, sources))
        self._decode_ahead(sources)
        return parts

    def _rows(self, source: Source, steps: int) -> list[CpuRows]:
        """The rows of a source for some steps; if they have an order of their own, this rank's."""
        parts = source.reader.take(steps * source.width)
        if source.order is None:
            return parts
        chunks = [chunk for rows in parts for chunk in rows.chunks()]
        order = source.order().reshape(steps, -1)[:, source.begin : source.end]
        return [permuted(chunks, order.ravel(), self._layout, self.buffers)]

    def _share(self, function: Callable[[Source], Any], sources: list[Source]) -> list[Any]:
        """Map sources, each in one task, together with the pool."""
        if self._pool is None:
            return list(map(function, sources))
        # The pool begins with the first: what it has not come to, from the last on, is done here.
        begun = [self._pool.submit(function, source) for source in sources]
        found = [
            function(source) if task.cancel() else task.result()
            for task, source in zip(begun[::-1], sources[::-1], strict=True)
        ]
        return found[::-1]

    def _decode_ahead(self, sources: list[Source]) -> None:
        if self._pool is not None:
            for source in sources:
                source.reader.decode_ahead(self._pool)

    def tensors(self, *wanted: tuple[torch.dtype, tuple[int, ...]]) -> list[torch.Tensor]:
        """Uninitialised tensors of these dtypes and shapes, in one recycled buffer."""
        sizes = [dtype.itemsize * int(np.prod(shape)) for dtype, shape in wanted]
        begins = np.cumsum([0] + [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]).tolist()
        # never none at all: of an empty array torch cannot make one of another dtype
        memory = self.memory(max(begins[-1], ALIGNMENT))
        return [
            memory[begin : begin + size].view(dtype).view(shape)
            for (dtype, shape), begin, size in zip(wanted, begins, sizes, strict=False)
        ]

    def memory(self, size: int) -> torch.Tensor:
        """Uninitialised memory that the CPU can write to: uint8 [size]."""
        return torch.from_numpy(self.buffers.take(size))

    def produce(self, produced: Iterator[tuple[slice, Block]]) -> tuple | None:
        """What comes next (steps wanted, block), and what :meth:`receive` needs besides; None at
        the end."""
        return next(produced, None)

    def receive(self, steps: slice, block: Block) -> tuple[slice, Block]:
        """Make the block usable by the caller."""
        return steps, block

    def close(self) -> None:
        """End the decoding threads; nothing may be built any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def permuted(chunks: list[Chunk], order: np.ndarray, layout: Layout, buffers: Buffers) -> Chunk:
    """The rows of some chunks in another order: a chunk on memory of its own."""
    if layout.jagged:
        return permuted_jagged(chunks, order, layout, buffers)
    rows, floats = len(order), 1 + len(layout.schema.dense)
    ids = len(layout.schema.categorical)
    begin = -(-4 * floats * rows // ALIGNMENT) * ALIGNMENT  # of the ids
    memory = buffers.take(begin + layout.id_dtype.itemsize * ids * rows)
    targets = memory[: 4 * floats * rows].view(np.int32), memory[begin:].view(layout.id_dtype)
    for to_rows, from_rows, chunk in scattered(chunks, order):
        permute(targets[0], chunk.addresses[:floats], rows, to_rows, from_rows)
        permute(targets[1], chunk.addresses[floats:], rows, to_rows, from_rows)
    offsets = [4 * rows * i for i in range(floats)]
    offsets += [begin + layout.id_dtype.itemsize * rows * i for i in range(ids)]
    none = np.zeros(floats + ids, np.int64)
    return Chunk(rows, memory.ctypes.data + np.array(offsets), layout.row_bytes, none, none, memory)
