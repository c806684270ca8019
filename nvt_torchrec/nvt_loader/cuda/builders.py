"""Build blocks on a GPU: decoded there by libcudf, or decoded on the CPU and copied.

The loader's thread arranges the rows of a block on its own stream, while other threads decode the
row groups of the next blocks on other streams. The training thread never waits for the device: its
stream waits for one event per block. Blocks and decoded row groups are in torch's memory; libcudf's
memory is only used on the stream on which it decodes.
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

#: The maximum number of bytes that RMM's pool for libcudf keeps between calls.
POOL_BYTES = 1 << 30


def choose_builder(dataset: Dataset, device: torch.device) -> type[CpuBuilder]:
    """Return the class that builds blocks for ``device`` on this machine."""
    if device.type == "cpu":
        return CpuBuilder
    if importlib.util.find_spec("pylibcudf") is None:
        return PinnedBuilder
    # libcudf only reads local files.
    if dataset.files is None or not dataset.files.is_local:
        return PinnedBuilder
    # Undersampling selects rows on the CPU, and the stores of events and vectors are mapped into
    # CPU memory.
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
        """Build the next block, start its copy to the device and record an event.

        Return None at the end.
        """
        with torch.cuda.stream(self._stream):
            item = next(produced, None)
            if item is None:
                return None
            steps, block = item
            # torch does not reuse the pinned memory before the copies from it are complete.
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

    The first block is an exception. libcudf decodes whole row groups, one per virtual shard, which
    the first batch would have to wait for. So the CPU decodes the few rows of the first block in
    the meantime, and the two blocks are compared (:func:`nvt_loader.epoch.produce_blocks`).
    """

    on_device = True
    library_bytes = POOL_BYTES
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
            parts += cast("Iterator[DeviceRowGroupSlice]", taken)  # `decode` yields this type
        groups = [part.group for part in parts]
        self.reading.begin(groups)
        # Decode the next blocks while the rows of this one are arranged.
        self.read_ahead(sources, following)
        self.reading.finish(groups, self._stream)
        rows = take_decoded_rows(parts)
        return build_on_device(self._dataset, rows, sources, steps, batch, self.device)

    def read_ahead(self, sources: list[ShardRows], following: Sequence[int]) -> None:
        """Start to decode the next blocks, with one call of libcudf per block."""
        for steps in itertools.accumulate(following):
            groups = []
            for source in sources:
                peeked = source.reader.peek(steps * source.width)
                groups += [part.group for part in cast("list[DeviceRowGroupSlice]", peeked)]
            self.reading.begin(groups)

    def close(self) -> None:
        """End the threads. No block can be built afterwards."""
        self.reading.close()
        self.host.close()
        super().close()


@functools.cache
def get_stream(device: torch.device, _purpose: str) -> torch.cuda.Stream:
    """Return the stream that all loaders on a device share for a purpose.

    The stream is shared because torch reuses memory only on the stream it was allocated on: if each
    epoch had its own stream, each would allocate its own memory. The stream has a high priority
    because loaders launch little work and training waits for it.
    """
    return torch.cuda.Stream(device, priority=-1)


@functools.cache
def _use_pool(device: torch.device) -> None:
    """Let RMM allocate libcudf's memory on ``device`` from a CUDA pool.

    Torch's allocator is not an alternative: RMM would call it through Python for each buffer, and
    so wait for the interpreter lock, which the training thread holds.
    """
    with torch.cuda.device(device):
        use_pool(release_threshold=POOL_BYTES)
