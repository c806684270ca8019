"""Blocks on a GPU: decoded there by libcudf, or decoded on the CPU and copied asynchronously.

Everything a block needs happens on a stream of the loader's own, in the loader's thread. The
training thread never waits for the host: its stream waits for the event behind a block, once per
block. Blocks are torch's memory; libcudf's is used on the loader's stream only.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator

import torch

from nvt_loader.blocks import FlatBlock, JaggedBlock, Source
from nvt_loader.cpu.builder import CpuBuilder
from nvt_loader.cuda.device_rows import build_on_device, decoded_rows
from nvt_loader.parquet.dataset import Dataset

#: What RMM's pool for libcudf keeps between calls, at most.
POOL_BYTES = 1 << 30


def choose_builder(dataset: Dataset, device: torch.device) -> type[CpuBuilder]:
    """What makes blocks for ``device`` on this machine."""
    if device.type == "cpu":
        return CpuBuilder
    # undersampling picks rows by their labels, which is done on the CPU
    if dataset.undersampling is None and importlib.util.find_spec("pylibcudf") is not None:
        return CudfBuilder
    return PinnedBuilder


class PinnedBuilder(CpuBuilder):
    """Blocks decoded on the CPU into pinned memory; asynchronous copies of each to the device."""

    def __init__(self, dataset: Dataset, device: torch.device, threads: int = 1) -> None:
        super().__init__(dataset, device, threads)
        self._stream = loader_stream(device)

    def memory(self, size: int) -> torch.Tensor:
        """Uninitialised pinned memory, which torch recycles: uint8 [size]."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def produce(
        self, produced: Iterator[tuple[slice, FlatBlock]]
    ) -> tuple[slice, FlatBlock | JaggedBlock, torch.cuda.Event] | None:
        """The next block, on its way to the device, and the event after it."""
        with torch.cuda.stream(self._stream):
            made = next(produced, None)
            if made is None:
                return None
            steps, block = made
            # torch keeps the pinned memory until the copies that read it are done
            return steps, block.to(self._device), self._stream.record_event()

    def receive(
        self, steps: slice, block: FlatBlock | JaggedBlock, ready: torch.cuda.Event
    ) -> tuple[slice, FlatBlock | JaggedBlock]:
        """Let the caller's stream wait for the block."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(ready)
        for tensor in block.tensors:
            tensor.record_stream(stream)
        return steps, block


class CudfBuilder(PinnedBuilder):
    """Blocks decoded by libcudf on the device; no column passes through the host."""

    on_device = True

    def __init__(self, dataset: Dataset, device: torch.device, _threads: int = 1) -> None:
        super().__init__(dataset, device)
        from nvt_loader.cuda.cudf_reader import CudfReader

        use_pool(device)
        self._rows = CudfReader(dataset, self._stream)
        self.decode = self._rows.decode

    def build(self, steps: int, batch: int, sources: list[Source]) -> FlatBlock | JaggedBlock:
        """As :meth:`CpuBuilder.build`, on the device."""
        rows = [part for source in sources for part in source.reader.take(steps * source.width)]
        self._rows.read([part.group for part in rows])
        return build_on_device(
            self._dataset, decoded_rows(rows), sources, steps, batch, self._device
        )


@functools.cache
def loader_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all loaders on a device.

    Memory that torch hands out on one stream is used again on that stream only: with a stream for
    each epoch, each epoch would take its own. What a loader launches is little, and training
    waits for it: so it goes first.
    """
    return torch.cuda.Stream(device, priority=-1)


@functools.cache
def use_pool(device: torch.device) -> None:
    """Let RMM take libcudf's memory on ``device`` from a pool of CUDA's, unless somebody has chosen
    already. By itself it asks the driver for each buffer, and for that the device has to be idle.

    To take it from torch's allocator instead needs Python for each buffer, and so the interpreter's
    lock, which the training thread holds.
    """
    import rmm

    if type(rmm.mr.get_per_device_resource(device.index)) is rmm.mr.CudaMemoryResource:
        with torch.cuda.device(device):
            pool = rmm.mr.CudaAsyncMemoryResource(release_threshold=POOL_BYTES)
        rmm.mr.set_per_device_resource(device.index, pool)
