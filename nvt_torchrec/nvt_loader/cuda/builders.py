"""Build blocks on a GPU: decoded there by libcudf, or decoded on the CPU and copied.

A block is put in order on a stream of the loader's own, launched by the loader's thread, while
other threads decode the row groups of the next ones on streams of theirs. The training thread never
waits for the host: its stream waits for the event after a block, once per block. Blocks and decoded
row groups are in torch's memory; libcudf's memory is used only on the stream on which it decodes.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from nvt_torchrec.base.device import use_pool
from nvt_torchrec.nvt_loader.cpu.block_builder import CpuBuilder
from nvt_torchrec.nvt_loader.cpu.blocks import FlatBlock, JaggedBlock, ShardRows
from nvt_torchrec.nvt_loader.cuda.device_rows import (
    DeviceRowGroupSlice,
    build_on_device,
    take_decoded_rows,
)
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset

#: The largest number of bytes that RMM's pool for libcudf keeps between calls.
POOL_BYTES = 1 << 30


def choose_builder(dataset: Dataset, device: torch.device) -> type[CpuBuilder]:
    """Return the class that builds blocks for ``device`` on this machine."""
    if device.type == "cpu":
        return CpuBuilder
    if importlib.util.find_spec("pylibcudf") is None:
        return PinnedBuilder
    # libcudf reads files of this machine.
    if dataset.files is None or not dataset.files.is_local:
        return PinnedBuilder
    # Undersampling selects rows on the CPU, and the events of histories and the vectors are mapped
    # into its memory.
    has_stores = dataset.stores or dataset.vectors is not None
    if dataset.undersampling is not None or has_stores:
        return PinnedBuilder
    return CudfBuilder


class PinnedBuilder(CpuBuilder):
    """Builds blocks on the CPU in pinned memory and copies each to the device asynchronously."""

    def __init__(self, dataset: Dataset, device: torch.device, threads: int = 1) -> None:
        super().__init__(dataset, device, threads)
        self._stream = get_stream(device, "building")

    def allocate_bytes(self, size: int) -> torch.Tensor:
        """Return uninitialised pinned memory, which torch recycles: uint8 [size]."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def produce(
        self, produced: Iterator[tuple[slice, FlatBlock]]
    ) -> tuple[slice, FlatBlock | JaggedBlock, torch.cuda.Event] | None:
        """Start the copy of the next block to the device, followed by an event; None at the end."""
        with torch.cuda.stream(self._stream):
            item = next(produced, None)
            if item is None:
                return None
            steps, block = item
            # torch keeps the pinned memory until the copies from it are complete.
            block = block.to(self.device)
            return steps, block, self._stream.record_event()

    def receive(
        self, steps: slice, block: FlatBlock | JaggedBlock, ready: torch.cuda.Event | None = None
    ) -> tuple[slice, FlatBlock | JaggedBlock]:
        """Let the caller's stream wait for the block."""
        assert ready is not None, "`produce` gives an event with each block"
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(ready)
        for tensor in block.tensors.values():
            tensor.record_stream(stream)
        return steps, block


class CudfBuilder(PinnedBuilder):
    """Builds blocks on the device, decoded by libcudf, so that no column passes through the host.

    The first block is an exception: libcudf decodes whole row groups, one of each virtual shard,
    and the first batch would have to wait for them. The CPU decodes its few rows meanwhile, and the
    two blocks are compared (:func:`nvt_loader.epoch.produce_blocks`).
    """

    on_device, library_bytes = True, POOL_BYTES
    host_kind = PinnedBuilder
    host: CpuBuilder

    def __init__(self, dataset: Dataset, device: torch.device, threads: int = 1) -> None:
        super().__init__(dataset, device)
        from nvt_torchrec.nvt_loader.cuda.cudf_reader import CudfReader, ReadAhead

        _use_pool(device)
        stream = get_stream(device, "reading")
        self.reading = ReadAhead(CudfReader(dataset, stream), stream, device)
        self.decode = self.reading.decode
        self.host = self.host_kind(dataset, device, threads)

    def build(
        self, steps: int, batch: int, sources: list[ShardRows], following: Sequence[int] = ()
    ) -> FlatBlock | JaggedBlock:
        """Build a block as :meth:`CpuBuilder.build` does, on the device."""
        parts: list[DeviceRowGroupSlice] = []
        for source in sources:
            taken = source.reader.take(steps * source.width)
            parts += cast("Iterator[DeviceRowGroupSlice]", taken)  # as `decode` yields them
        groups = [part.group for part in parts]
        self.reading.begin(groups)
        # The next blocks are decoded while this one is put in order.
        self.read_ahead(sources, following)
        self.reading.finish(groups, self._stream)
        rows = take_decoded_rows(parts)
        return build_on_device(self._dataset, rows, sources, steps, batch, self.device)

    def read_ahead(self, sources: list[ShardRows], following: Sequence[int]) -> None:
        """Begin to decode the next blocks, with a call of libcudf for each."""
        for steps in itertools.accumulate(following):
            groups = []
            for source in sources:
                peeked = source.reader.peek(steps * source.width)
                groups += [part.group for part in cast("list[DeviceRowGroupSlice]", peeked)]
            self.reading.begin(groups)

    def close(self) -> None:
        """End the threads. No block may be built after that."""
        self.reading.close()
        self.host.close()
        super().close()


@functools.cache
def get_stream(device: torch.device, _purpose: str) -> torch.cuda.Stream:
    """Return the stream that all loaders on a device share for a purpose.

    Torch reuses memory only on the stream that it was allocated on: with a stream for each epoch,
    each epoch would allocate its own. Loaders launch little work and training waits for it, so the
    stream has a high priority.
    """
    return torch.cuda.Stream(device, priority=-1)


@functools.cache
def _use_pool(device: torch.device) -> None:
    """Let RMM take libcudf's memory on ``device`` from a CUDA pool.

    Torch's allocator is no alternative: it needs Python for each buffer, and so the interpreter
    lock, which the training thread holds.
    """
    with torch.cuda.device(device):
        use_pool(release_threshold=POOL_BYTES)
