"""How much of the loader's memory goes to blocks, decoded columns and shuffling windows."""

from __future__ import annotations

import dataclasses
import math

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset
from nvt_torchrec.nvt_loader.plan import Plan

#: Bytes that a loader holds by default: blocks, decoded columns, shuffling windows.
LOADER_MEMORY = 256 << 20

#: The same where libcudf decodes, and the most bytes of a block there: a GPU takes about as long
#: for few rows as for many.
DEVICE_MEMORY, DEVICE_BLOCK_BYTES = 1 << 30, 80 << 20

#: By how much the default may grow for large batches, or rows of a thousand columns and more, of
#: which the chunks that are decoded alone take 256 MiB. What takes more, such as a shuffling window
#: of such rows, is for the user to decide: memory, or a smaller window.
MAX_GROWTH = 4

#: Most bytes of a block, if the budget allows it and one step is not more: 64 Ki rows of a Criteo
#: log. Each block costs some work in Python besides.
BLOCK_BYTES = 10 << 20

#: Rows of the first block: few, so that the first batch comes soon.
FIRST_ROWS = 8192

#: Bytes decoded at a time for a virtual shard, and the fewest rows. Fewer bytes cost more for each
#: row; more make the decoding uneven.
DECODE_BYTES, MIN_DECODE_ROWS = 2560 << 10, 1024

#: Decoded chunks of a virtual shard: one in use, one ahead.
HELD_CHUNKS = 2

#: Blocks whose row groups libcudf decodes ahead of the one in the making; so each virtual shard has
#: at most so many row groups besides the one in use.
READ_AHEAD = 2

#: Blocks made ahead of the one in use. One more may be in the making.
PREFETCH_BLOCKS = 2
HELD_BLOCKS = PREFETCH_BLOCKS + 2


@dataclasses.dataclass(frozen=True)
class Demand:
    """The rows that one rank has to hold at once.

    Attributes:
        batch: Rows of a batch of this rank.
        window: This rank's rows of a shuffling window; 0 if rows are not shuffled.
        shards: Virtual shards that this rank reads.
        read: Rows read for each row of this rank; more than 1 where other ranks read the same
            virtual shards.
        threads: Virtual shards that are decoded at the same time.
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
        """Return what a plan demands of a rank; ``shuffled``: its rows are, within windows."""
        batch = plan.global_batch // world_size
        spans = plan.spans(rank, world_size)
        steps = min(plan.window_steps, max(plan.full_steps, 1)) if shuffled else 0
        window = min(steps * batch, max(plan.rows, 1)) if shuffled else 0
        read = sum(span.width for span in spans) / batch
        return cls(batch, window, len(spans), read, threads)


@dataclasses.dataclass(frozen=True)
class Budget:
    """How many rows are held where.

    Attributes:
        block_rows: Rows of a block, at most (but always one step, or a whole shuffling window).
        first_rows: Rows of the first block.
        decode_rows: Rows decoded at a time for each virtual shard of a rank.
    """

    block_rows: int
    first_rows: int
    decode_rows: int


def held_rows(demand: Demand, budget: Budget, *, whole: bool) -> float:
    """Return how many rows a loader holds at most: blocks, a shuffling window, decoded chunks.

    The rows of a window are held as they were decoded and in their new order, for the virtual
    shards that are decoded at the same time.

    Args:
        demand, budget: Of the loader.
        whole: All rows that are read for a block are decoded before the block is made: lists, and
            whatever libcudf decodes.
    """
    decoded = demand.read if whole and not demand.window else 0.0
    share = 1.0 if whole else min(1.0, demand.threads / demand.shards)
    return (
        (HELD_BLOCKS + decoded) * budget.block_rows
        + demand.window * max(1.0, share * (1 + demand.read))
        + HELD_CHUNKS * demand.shards * budget.decode_rows
    )


def device_bytes(dataset: Dataset, demand: Demand, budget: Budget, *, on_device: bool) -> int:
    """Return the most bytes of a GPU that a loader takes while it is iterated.

    Where libcudf decodes (``on_device``), row groups count, too; its own memory comes on top.
    """
    width = dataset.batch_row_bytes
    if not on_device:
        maximum = 4 * dataset.max_events * sum(len(store.sizes) for store in dataset.stores)
        events = max(BLOCK_BYTES, demand.batch * maximum) if maximum else 0
        return int(HELD_BLOCKS * (width * max(budget.block_rows, demand.window) + events))
    groups = (1 + READ_AHEAD) * demand.shards * int(dataset.rows.max(initial=0))
    return int(width * (held_rows(demand, budget, whole=True) + groups))


def divide_memory(
    dataset: Dataset, memory: int | None, demand: Demand, *, on_device: bool = False
) -> Budget:
    """Divide ``memory`` bytes: half to blocks, half to decoded columns and a shuffling window.

    Args:
        dataset: The data.
        memory: Bytes for blocks, decoded columns and a shuffling window; None: the default, or what
            is needed at least, up to :data:`MAX_GROWTH` times the default.
        demand: What the rank has to hold.
        on_device: Libcudf decodes, whole row groups.

    Raises:
        SettingsError: The memory is too little for a step or a window.
    """
    width = dataset.batch_row_bytes
    whole = on_device or dataset.jagged
    block, window = max(demand.batch, demand.window), demand.window
    minimum = Budget(block, block, MIN_DECODE_ROWS)
    needed = held_rows(demand, minimum, whole=whole)
    if memory is None:
        usual = DEVICE_MEMORY if on_device else LOADER_MEMORY
        memory = min(max(usual, math.ceil(width * needed)), MAX_GROWTH * usual)
    if width * needed > memory:
        raise SettingsError(
            f"loader_memory = {memory >> 20} MiB is too little: batches of {demand.batch} rows and "
            f"shuffling windows of {window} rows take {int(width * needed) / 2**20:.0f} MiB",
            "give it more, or choose a smaller batch or shuffle_window, or virtual_shards = a "
            "multiple of the number of ranks",
        )
    # What a loader holds grows linearly with the rows of a block, and with those decoded at a time.
    fixed = held_rows(demand, Budget(0, 0, 0), whole=whole)
    per_row = held_rows(demand, Budget(1, 0, 0), whole=whole) - fixed
    block_bytes = DEVICE_BLOCK_BYTES if on_device else BLOCK_BYTES
    wanted = min(block_bytes, memory / 2 / per_row) / width
    block_rows = max(block, int(min(wanted, block + (memory / width - needed) / per_row)))
    rest = memory / width - fixed - per_row * block_rows
    maximum = min(DECODE_BYTES / width, rest / demand.shards / HELD_CHUNKS)
    decode_rows = max(MIN_DECODE_ROWS, int(maximum))
    return Budget(block_rows, min(FIRST_ROWS, block_rows), decode_rows)
