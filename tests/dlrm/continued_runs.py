"""Runs of ``--continue_from``: outputs of three generations, and checkpoints of the first one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from tests.dlrm.runs import train_here, train_many

RATES = {"sgd": 0.3, "adagrad": 0.02, "rowwise_adagrad": 0.05, "adam": 0.005}
SHARDINGS = ("table_wise", "row_wise", "column_wise")
TABLES = "model.dlrm.sparse_arch.embedding_bag_collection.embedding_bags."
#: Of a checkpoint: optimizer, world size and kind of sharding.
Kind: TypeAlias = tuple[str, int, str]


def flags(data: Path, optimizer: str = "rowwise_adagrad", *more: str, batch: int = 32) -> list[str]:
    return [
        f"--binary_path={data}",
        f"--batch_size={batch}",
        f"--optimizer={optimizer}",
        f"--learning_rate={RATES[optimizer]}",
        "--throughput_check_freq_within_epoch=1000",
        *more,
    ]


def train_checkpoints(root: Path, data: Path, kinds: Iterable[Kind]) -> dict[Kind, Path]:
    """Train a checkpoint of each kind; those of two ranks by one start of torchrun."""
    checkpoints, of_two_ranks = {}, []
    for optimizer, ranks, sharding in kinds:
        path = checkpoints[optimizer, ranks, sharding] = root / f"{optimizer}-{ranks}-{sharding}"
        more = [f"--save_checkpoint_path={path}", "--max_steps=8", f"--sharding={sharding}"]
        run = flags(data, optimizer, *more, batch=32 // ranks)
        if ranks == 1:
            train_here(*run)
        else:
            of_two_ranks.append(run)
    if of_two_ranks:
        train_many(of_two_ranks, 2)
    return checkpoints
