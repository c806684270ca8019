"""Divide the loader's memory among blocks, decoded columns and shuffling windows."""

from __future__ import annotations

import dataclasses
import math

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.vectors import count_inputs
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset
from nvt_torchrec.nvt_loader.plan import Plan

#: Bytes that a loader holds by default: blocks, decoded columns, shuffling windows.
LOADER_MEMORY = 256 << 20

#: The same where libcudf decodes.
DEVICE_MEMORY = 1 << 30

#: How many times the default may grow for large batches, or for rows of a thousand columns, whose
#: decoded chunks alone take 256 MiB. If more is needed, as for a shuffling window of such rows, the
#: user decides between more memory and a smaller window.
MAX_GROWTH = 4

#: The largest size of a block, unless one step takes more: 64 Ki rows of a Criteo log. Each block
#: costs a fixed amount of work in Python, so small ones cost more per row.
BLOCK_BYTES = 10 << 20

#: The same where libcudf decodes: a GPU takes about as long for few rows as for many.
DEVICE_BLOCK_BYTES = 80 << 20

#: Rows of the first block: few, so that the first batch is ready soon.
FIRST_ROWS = 8192

#: Bytes decoded at a time for a virtual shard. Fewer cost more for each row; more make the time
#: between batches uneven.
DECODE_BYTES = 2560 << 10

#: The smallest number of rows decoded at a time, whatever their bytes.
MIN_DECODE_ROWS = 1024

#: Decoded chunks of a virtual shard: one in use, one ahead.
HELD_CHUNKS = 2

#: Blocks whose row groups libcudf decodes ahead of the block that is being built. So each virtual
#: shard holds at most as many row groups besides the one in use.
READ_AHEAD = 2

#: Blocks built ahead of the one in use.
PREFETCH_BLOCKS = 2

#: Blocks held at once: the one in use, those ahead, and one that is being built.
HELD_BLOCKS = PREFETCH_BLOCKS + 2


@dataclasses.dataclass(frozen=True)
class Demand:
    """The rows that one rank has to hold at once.

    Attributes:
        batch: Rows of a batch of this rank.
        window: This rank's rows of a shuffling window; 0 if rows are not shuffled.
        shards: The number of virtual shards that this rank reads.
        read: Rows read for each row of this rank; more than 1 if it shares virtual shards with
            other ranks.
        threads: The number of virtual shards that are decoded at the same time.
    """

    batch: int
    window: int = 0
    shards: int = 1
    read: float = 1.0
    threads: int = 1

    @classmethod
    def measure_rank(
        cls, plan: Plan, rank: int, world_size: int, *, shuffled: bool, threads: int
    ) -> Demand:
        """Return the demand of a rank of a plan; ``shuffled`` if rows are shuffled in windows."""
        batch = plan.global_batch // world_size
        spans = plan.list_spans(rank, world_size)
        window = 0
        if shuffled:
            steps = min(plan.window_steps, max(plan.full_steps, 1))
            window = min(steps * batch, max(plan.rows, 1))
        read = sum(span.width for span in spans) / batch
        return cls(batch, window, len(spans), read, threads)


@dataclasses.dataclass(frozen=True)
class Budget:
    """The sizes of blocks and decoded chunks, in rows.

    Attributes:
        block_rows: The largest number of rows of a block: at least one step or a whole shuffling
            window.
        first_rows: Rows of the first block.
        decode_rows: Rows decoded at a time for each virtual shard of a rank.
    """

    block_rows: int
    first_rows: int
    decode_rows: int


def count_held_rows(demand: Demand, budget: Budget, *, whole: bool) -> float:
    """Return how many rows a loader holds at most: blocks, a shuffling window, decoded chunks.

    Args:
        demand: The demand of the loader's rank.
        budget: The sizes.
        whole: Whether all rows that are read for a block are decoded before the block is built, as
            they are for lists and where libcudf decodes.
    """
    blocks = float(HELD_BLOCKS * budget.block_rows)
    if whole and not demand.window:
        blocks += demand.read * budget.block_rows
    # Virtual shards that are decoded at the same time hold their rows of the window twice: in the
    # order of the file and in the new one.
    share = 1.0 if whole else min(1.0, demand.threads / demand.shards)
    window = demand.window * max(1.0, share * (1 + demand.read))
    chunks = HELD_CHUNKS * demand.shards * budget.decode_rows
    return blocks + window + chunks


def estimate_device_bytes(
    dataset: Dataset, demand: Demand, budget: Budget, *, on_device: bool
) -> int:
    """Return the largest number of bytes of a GPU that a loader takes while it is iterated.

    Where libcudf decodes (``on_device``), row groups count too; its own memory comes on top.
    """
    width = dataset.batch_row_bytes
    if on_device:
        row_groups = (1 + READ_AHEAD) * demand.shards * int(dataset.rows.max(initial=0))
        return int(width * (count_held_rows(demand, budget, whole=True) + row_groups))
    block_bytes = width * max(budget.block_rows, demand.window)
    if dataset.stores:
        # Blocks are divided until their events take BLOCK_BYTES, or one step is left.
        event_columns = sum(len(store.sizes) for store in dataset.stores)
        block_bytes += max(BLOCK_BYTES, demand.batch * 4 * dataset.max_events * event_columns)
    if dataset.schema.vectors:
        # Likewise.
        block_bytes += max(BLOCK_BYTES, demand.batch * 4 * count_inputs(dataset.schema.vectors))
    return int(HELD_BLOCKS * block_bytes)


def divide_memory(
    dataset: Dataset, memory: int | None, demand: Demand, *, on_device: bool = False
) -> Budget:
    """Divide ``memory`` bytes: half to blocks, half to decoded columns and a shuffling window.

    Args:
        dataset: The data.
        memory: Bytes for blocks, decoded columns and a shuffling window. None stands for the
            default, or for the smallest memory that suffices, up to :data:`MAX_GROWTH` times the
            default.
        demand: The rows that the rank has to hold.
        on_device: Whether libcudf decodes, and so whole row groups.

    Raises:
        SettingsError: The memory is too little for a step or a window.
    """
    width = dataset.batch_row_bytes
    whole = on_device or dataset.jagged
    min_block_rows = max(demand.batch, demand.window)
    minimum = Budget(min_block_rows, min_block_rows, MIN_DECODE_ROWS)
    needed_rows = count_held_rows(demand, minimum, whole=whole)
    needed = width * needed_rows
    if memory is None:
        default = DEVICE_MEMORY if on_device else LOADER_MEMORY
        memory = min(max(default, math.ceil(needed)), MAX_GROWTH * default)
    if needed > memory:
        raise SettingsError(
            f"loader_memory = {memory >> 20} MiB is too little: batches of {demand.batch} rows and "
            f"shuffling windows of {demand.window} rows take {int(needed) / 2**20:.0f} MiB",
            "give it more, or choose a smaller batch or shuffle_window, or virtual_shards = a "
            "multiple of the number of ranks",
        )
    # The rows that a loader holds grow linearly with those of a block, and with those decoded at a
    # time: a fixed part, and so many for each row of a block.
    fixed = count_held_rows(demand, Budget(0, 0, 0), whole=whole)
    per_block_row = count_held_rows(demand, Budget(1, 0, 0), whole=whole) - fixed
    # Blocks get half of the memory, but no more than is left beside the smallest decoded chunks.
    block_bytes = DEVICE_BLOCK_BYTES if on_device else BLOCK_BYTES
    wanted = min(block_bytes, memory / 2 / per_block_row) / width
    possible = min_block_rows + (memory / width - needed_rows) / per_block_row
    block_rows = max(min_block_rows, int(min(wanted, possible)))
    rest = memory / width - fixed - per_block_row * block_rows
    max_decode_rows = min(DECODE_BYTES / width, rest / demand.shards / HELD_CHUNKS)
    decode_rows = max(MIN_DECODE_ROWS, int(max_decode_rows))
    return Budget(block_rows, min(FIRST_ROWS, block_rows), decode_rows)
