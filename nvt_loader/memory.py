"""Buffers that are used again, and how much of the memory budget goes where.

Fresh memory costs as much as filling it: the kernel hands it out in pages of zeros.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref

import numpy as np

from clicklog.errors import SettingsError
from nvt_loader.parquet.footers import Layout

#: What a loader holds by default: blocks, decoded columns, shuffling windows.
LOADER_MEMORY = 256 << 20

#: The same, where libcudf decodes, and bytes of a block then: a GPU takes about as long for few
#: rows as for many.
DEVICE_MEMORY, DEVICE_BLOCK_BYTES = 1 << 30, 80 << 20

#: Most bytes of a block, if the budget allows and it is not one step: 64 Ki rows of a Criteo log.
#: Each block costs some work in Python besides.
BLOCK_BYTES = 10 << 20

#: Rows of the first block: few, so that the first batch comes soon.
FIRST_ROWS = 8192

#: Bytes decoded at a time for a virtual shard: less costs more for each, more comes in bursts.
DECODE_BYTES, LEAST_DECODE_ROWS = 2560 << 10, 1024

#: Decoded chunks of a virtual shard: one in use, one ahead.
HELD_CHUNKS = 2

#: Blocks that are made ahead of the one in use; besides, one may be in the making.
PREFETCH_BLOCKS = 2
HELD_BLOCKS = PREFETCH_BLOCKS + 2


class Buffers:
    """Hands out byte buffers and takes them back when nothing refers to them any more."""

    def __init__(self) -> None:
        self._free: collections.deque[np.ndarray] = collections.deque()

    def take(self, size: int) -> np.ndarray:
        """``size`` uninitialised bytes: uint8 [size]. Slices of the array do not keep it: use it
        as the memory of a tensor, or hold it."""
        buffer = None
        for _ in range(len(self._free)):
            try:
                found = self._free.popleft()
            except IndexError:  # another thread took it
                break
            if size <= len(found) <= 2 * size + 4096:
                buffer = found
                break
        if buffer is None:
            buffer = np.empty(size, np.uint8)
        view = buffer[:size]
        weakref.finalize(view, self._free.append, buffer).atexit = False
        return view


@dataclasses.dataclass(frozen=True)
class Budget:
    """How many rows are held where.

    Attributes:
        block_rows: of a block, at most (but always one step, or a whole shuffling window).
        first_rows: of the first block.
        decode_rows: decoded at a time for each virtual shard of a rank.
    """

    block_rows: int
    first_rows: int
    decode_rows: int


def row_bytes(layout: Layout) -> float:
    """Bytes of a row in a batch; of list columns the average by ``layout.list_elements``."""
    elements = layout.list_elements
    total = float(4 * (1 + len(layout.schema.dense)))
    for name in layout.schema.categorical:
        if name in layout.schema.multi_hot:  # ids, and a length, an offset and a start
            weight = 4 if layout.weights else 0
            total += elements[name] * (layout.id_dtype.itemsize + weight) + 16
        else:
            total += layout.id_dtype.itemsize + (20 if layout.jagged else 0)
    return total


def divide(
    layout: Layout,
    memory: int | None,
    *,
    batch: int,
    window: int,
    shards: int,
    on_device: bool = False,
) -> Budget:
    """Divide ``memory`` bytes: half to blocks, half to what they are made of.

    Args:
        layout: the data.
        memory: bytes for blocks, decoded columns and shuffling windows; None: the default.
        batch: rows of a batch of this rank.
        window: this rank's rows of a shuffling window; 0 when rows are not shuffled.
        shards: virtual shards that this rank reads.
        on_device: libcudf decodes, whole row groups.

    Raises:
        SettingsError: it is too little for a step or a window.
    """
    width = row_bytes(layout)
    if memory is None:
        memory = DEVICE_MEMORY if on_device else LOADER_MEMORY
    block = max(batch, window)
    needed = width * (HELD_BLOCKS * block + window + HELD_CHUNKS * shards * LEAST_DECODE_ROWS)
    if needed > memory:
        raise SettingsError(
            f"loader_memory = {memory >> 20} MiB is too little: batches of {batch} rows"
            + (f" and shuffling windows of {window} rows" if window else "")
            + f" take {int(needed) / 2**20:.0f} MiB",
            "give it more, or choose a smaller batch" + (" or --shuffle_window" if window else ""),
        )
    block_bytes = DEVICE_BLOCK_BYTES if on_device else BLOCK_BYTES
    block_rows = max(block, int(min(block_bytes, memory / 2 / HELD_BLOCKS) / width))
    rest = memory / width - HELD_BLOCKS * block_rows - window
    most = min(DECODE_BYTES / width, rest / shards / HELD_CHUNKS)
    decode_rows = max(LEAST_DECODE_ROWS, int(most))
    return Budget(block_rows, min(FIRST_ROWS, block_rows), decode_rows)
