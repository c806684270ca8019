"""Initialize tables: their weights depend on the seed alone.

The same seed gives the same weights on any device, for any number of ranks and any sharding plan:
tables are initialized in blocks of rows, each with a generator of its own, so that a shard is
initialized without making the whole table.
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

#: The rows of a table that one generator initializes. The initial weights depend on this number.
BLOCK_ROWS = 65536
#: The threads that initialize blocks: this rank's share of the machine's cores.
_INIT_THREADS = max(1, min(16, count_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def fill_table(
    shard: torch.Tensor, table: str, rows: int, dim: int, seed: int, offsets: tuple[int, int]
) -> None:
    """Write the initial weights of a table, or of a shard of it, in threads.

    They are uniform in ±1/sqrt(rows), as in DLRM (Naumov et al. 2019, and its published code).

    Args:
        shard: The shard [m, n], filled in place.
        table: The table's name, which selects its random numbers.
        rows: The rows of the whole table.
        dim: The width of the whole table.
        seed: The seed of the run.
        offsets: The first row and the first column of the shard in the table.
    """
    first, column = offsets
    bound = 1 / math.sqrt(rows)
    end = first + shard.shape[0]
    stream = torch.cuda.current_stream(shard.device) if shard.is_cuda else None

    def fill(block: int) -> None:
        begin = block * BLOCK_ROWS
        height = min(BLOCK_ROWS, rows - begin)
        key = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        values = torch.empty(height, dim).uniform_(-bound, bound, generator=generator)
        low, high = max(first, begin), min(end, begin + height)
        # NumPy copies in this thread; torch would start further threads in each.
        own = np.ascontiguousarray(
            values.numpy()[low - begin : high - begin, column : column + shard.shape[1]]
        )
        part = shard.detach()[low - first : high - first]
        if stream is None:
            np.copyto(part.numpy(), own)
            return
        with torch.cuda.stream(stream):  # the caller's stream, not the one of this thread
            part.copy_(torch.from_numpy(own))

    blocks = range(first // BLOCK_ROWS, math.ceil(end / BLOCK_ROWS))
    with ThreadPoolExecutor(_INIT_THREADS, "init", use_device, (shard.device,)) as pool:
        for _ in pool.map(fill, blocks):  # raises the error of a thread
            pass
