"""Initialize tables with weights that depend only on the seed.

The same seed gives the same weights on any device, for any number of ranks and any sharding plan.
Each block of rows has its own random number generator, so a shard is initialized without
allocating the whole table.
"""

from __future__ import annotations

import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from nvt_torchrec.base.device import use_device
from nvt_torchrec.base.threads import count_cores

#: The number of rows that one generator initializes. The initial weights depend on it.
BLOCK_ROWS = 65536
#: The number of threads that initialize blocks: this rank's share of the machine's cores.
_INIT_THREADS = max(1, min(16, count_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def fill_table(
    shard: torch.Tensor, table: str, rows: int, dim: int, seed: int, offsets: tuple[int, int]
) -> None:
    """Write the initial weights of a table or one of its shards, in several threads.

    They are uniform in ±1/sqrt(rows), as in DLRM (Naumov et al. 2019, and its published code).

    Args:
        shard: The shard [m, n], which is filled in place.
        table: The table's name, which selects its random numbers.
        rows: The rows of the whole table.
        dim: The width of the whole table.
        seed: The seed of the run.
        offsets: The first row and the first column of the shard in the table.
    """
    first_row, first_column = offsets
    num_rows, num_columns = shard.shape
    end_row = first_row + num_rows
    bound = 1 / math.sqrt(rows)
    stream = torch.cuda.current_stream(shard.device) if shard.is_cuda else None

    def fill(block: int) -> None:
        begin = block * BLOCK_ROWS
        height = min(BLOCK_ROWS, rows - begin)
        key = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        values = torch.empty(height, dim).uniform_(-bound, bound, generator=generator)
        low, high = max(first_row, begin), min(end_row, begin + height)
        in_shard = values.numpy()[low - begin : high - begin]
        in_shard = in_shard[:, first_column : first_column + num_columns]
        # NumPy copies in this thread; torch would start more threads in each.
        in_shard = np.ascontiguousarray(in_shard)
        target = shard.detach()[low - first_row : high - first_row]
        if stream is None:
            np.copyto(target.numpy(), in_shard)
            return
        with torch.cuda.stream(stream):  # the caller's stream, not this thread's
            target.copy_(torch.from_numpy(in_shard))

    blocks = range(first_row // BLOCK_ROWS, math.ceil(end_row / BLOCK_ROWS))
    with ThreadPoolExecutor(_INIT_THREADS, "init", use_device, (shard.device,)) as pool:
        for _ in pool.map(fill, blocks):  # raises an error of any thread
            pass
