"""Divide a loader's memory among blocks, decoded columns and shuffling windows."""

from __future__ import annotations

import dataclasses
import math

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.vectors import count_inputs
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset
from nvt_torchrec.nvt_loader.plan import Plan

#: The default number of bytes for blocks, decoded columns and shuffling windows.
LOADER_MEMORY = 256 << 20

#: The same default if libcudf decodes.
DEVICE_MEMORY = 1 << 30

#: The factor by which the default may grow for large batches or wide rows. (The decoded chunks of
#: rows of a thousand columns take 256 MiB.) If more is needed, for example for a shuffling window
#: of such rows, the user must choose between more memory and a smaller window.
MAX_GROWTH = 4

#: The maximum size of a block, unless one step takes more. 10 MiB are 64 Ki rows of a Criteo log.
#: Each block costs a fixed amount of work in Python, so small blocks cost more per row.
BLOCK_BYTES = 10 << 20

#: The same maximum if libcudf decodes: a GPU takes about as long for few rows as for many.
DEVICE_BLOCK_BYTES = 80 << 20

#: The number of rows of the first block: few, so that the first batch is ready soon.
FIRST_ROWS = 8192

#: The number of bytes decoded at a time for a virtual shard. Smaller chunks cost more per row, and
#: larger ones make the time between batches uneven.
DECODE_BYTES = 2560 << 10

#: The minimum number of rows decoded at a time, whatever their size.
MIN_DECODE_ROWS = 1024

#: The number of decoded chunks that a virtual shard holds: one in use, one ahead.
HELD_CHUNKS = 2

#: The number of blocks whose row groups libcudf decodes ahead of the block that is being built. So
#: a virtual shard holds at most this many row groups in addition to the one in use.
READ_AHEAD = 2

#: The number of blocks built ahead of the one in use.
PREFETCH_BLOCKS = 2

#: The number of blocks held at once: the one in use, those ahead, and the one being built.
HELD_BLOCKS = PREFETCH_BLOCKS + 2


@dataclasses.dataclass(frozen=True)
class Demand:
    """The numbers of rows that one rank has to hold at once.

    Attributes:
        batch: The number of rows of a batch of this rank.
        window: The number of this rank's rows in a shuffling window; 0 if rows are not shuffled.
        shards: The number of virtual shards that this rank reads.
        read: The number of rows read per row of this rank; more than 1 if it shares virtual shards
            with other ranks.
        threads: The number of virtual shards decoded at the same time.
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
        """Return the demand of a rank; ``shuffled`` means that rows are shuffled in windows."""
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
        block_rows: The maximum number of rows of a block: at least one step or a whole shuffling
            window.
        first_rows: The number of rows of the first block.
        decode_rows: The number of rows decoded at a time for each virtual shard of a rank.
    """

    block_rows: int
    first_rows: int
    decode_rows: int


def count_held_rows(demand: Demand, budget: Budget, *, whole: bool) -> float:
    """Return the maximum number of rows that blocks, a shuffling window and decoded chunks hold.

    Args:
        demand: The demand of the loader's rank.
        budget: The sizes of blocks and chunks.
        whole: Whether all rows of a block are decoded before the block is built, as with lists and
            with libcudf.
    """
    blocks = float(HELD_BLOCKS * budget.block_rows)
    if whole and not demand.window:
        blocks += demand.read * budget.block_rows
    # Virtual shards that are being decoded hold their rows of the window twice: in the order of the
    # file and in the shuffled order.
    share = 1.0 if whole else min(1.0, demand.threads / demand.shards)
    window = demand.window * max(1.0, share * (1 + demand.read))
    chunks = HELD_CHUNKS * demand.shards * budget.decode_rows
    return blocks + window + chunks


def estimate_device_bytes(
    dataset: Dataset, demand: Demand, budget: Budget, *, on_device: bool
) -> int:
    """Return the maximum number of bytes of GPU memory that a loader takes during an epoch.

    If libcudf decodes (``on_device``), they include row groups, but not libcudf's own memory.
    """
    width = dataset.batch_row_bytes
    if on_device:
        row_groups = (1 + READ_AHEAD) * demand.shards * int(dataset.rows.max(initial=0))
        return int(width * (count_held_rows(demand, budget, whole=True) + row_groups))
    block_bytes = width * max(budget.block_rows, demand.window)
    # A block is divided until its events take at most BLOCK_BYTES or it has one step, and so with
    # its vectors.
    if dataset.stores:
        event_columns = sum(len(store.sizes) for store in dataset.stores)
        block_bytes += max(BLOCK_BYTES, demand.batch * 4 * dataset.max_events * event_columns)
    if dataset.schema.vectors:
        block_bytes += max(BLOCK_BYTES, demand.batch * 4 * count_inputs(dataset.schema.vectors))
    return int(HELD_BLOCKS * block_bytes)


def divide_memory(
    dataset: Dataset, memory: int | None, demand: Demand, *, on_device: bool = False
) -> Budget:
    """Divide memory: about half for blocks, half for decoded columns and a shuffling window.

    Args:
        dataset: The data.
        memory: The number of bytes to divide. None means the default, or more if a step or a window
            needs more, up to :data:`MAX_GROWTH` times the default.
        demand: The rows that the rank has to hold.
        on_device: Whether libcudf decodes, which decodes whole row groups.

    Raises:
        SettingsError: The memory does not suffice for a step or a window.
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
            "increase it, or choose a smaller batch or shuffle_window, or a multiple of the number "
            "of ranks for virtual_shards",
        )
    # The number of rows held is linear in the rows per block and in the rows per chunk. Find its
    # constant part and its slope per row of a block.
    fixed = count_held_rows(demand, Budget(0, 0, 0), whole=whole)
    per_block_row = count_held_rows(demand, Budget(1, 0, 0), whole=whole) - fixed
    # Blocks get half of the memory, but leave enough for the smallest decoded chunks.
    block_bytes = DEVICE_BLOCK_BYTES if on_device else BLOCK_BYTES
    wanted = min(block_bytes, memory / 2 / per_block_row) / width
    possible = min_block_rows + (memory / width - needed_rows) / per_block_row
    block_rows = max(min_block_rows, int(min(wanted, possible)))
    rest = memory / width - fixed - per_block_row * block_rows
    max_decode_rows = min(DECODE_BYTES / width, rest / demand.shards / HELD_CHUNKS)
    decode_rows = max(MIN_DECODE_ROWS, int(max_decode_rows))
    return Budget(block_rows, min(FIRST_ROWS, block_rows), decode_rows)
