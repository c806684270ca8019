"""What each process of test_processes.py runs."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from nvt_loader import KJTLoader
from tests.nvt_loader.helper import rows_of


def run_rank(rank: int, world_size: int, directory: str, path: str) -> None:
    """Iterate two epochs with a collective in every step; check the rows of all ranks."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    loader = KJTLoader(path, 32, rank=rank, world_size=world_size, shuffle=True, device="cpu")
    for epoch in range(2):
        seen: list[int] = []
        for step, batch in enumerate(loader):
            ranks: list = [None] * world_size
            dist.all_gather_object(ranks, (epoch, step, rows_of([batch])))  # hangs if one has left
            assert {(e, s) for e, s, _ in ranks} == {(epoch, step)}
            for _, _, rows in ranks:
                seen += rows
        assert step + 1 == len(loader)
        assert sorted(seen) == list(range(loader.num_rows))
        assert seen != sorted(seen)
    dist.destroy_process_group()
