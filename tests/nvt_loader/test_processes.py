"""Real processes: as many steps on each rank, so that no collective waits for ever."""

from __future__ import annotations

import torch.multiprocessing

from tests.nvt_loader.data import write_split
from tests.nvt_loader.ranks import run_rank


def test_two_processes(tmp_path):
    write_split(tmp_path, {"train": [1000, 100, 700, 50, 31]})  # the last step: 19 and 20 rows
    train = str(tmp_path / "train")
    torch.multiprocessing.spawn(run_rank, args=(2, str(tmp_path), train), nprocs=2)
