"""Runs of ``--continue_from``: checkpoints of the first generation, and what a run starts from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from nvt_torchrec.models.checkpoint.tensor_files import Window, read_tensors, read_windows
from nvt_torchrec.training.checkpoint.saving import save_checkpoint
from nvt_torchrec.training.data.choices import read_schema
from nvt_torchrec.training.launch.distributed import Group, process_group
from nvt_torchrec.training.loop.trainer import Trainer
from nvt_torchrec.training.settings.train_settings import parse_settings
from nvt_torchrec.training.sharding.model_config import model_config
from tests.ranks import run_ranks
from tests.training.runs import EXAMPLE, MODEL, train_here, train_many

RATES = {"sgd": 0.3, "adagrad": 0.02, "rowwise_adagrad": 0.05}
SHARDINGS = ("table_wise", "row_wise", "column_wise")
#: World sizes with kinds of sharding; one rank has each table whole under any of them.
PLACEMENTS = [(1, "table_wise"), *((2, sharding) for sharding in SHARDINGS)]
TABLES = "model.model.sparse_arch.embedding_bag_collection.embedding_bags."
#: Of a checkpoint: optimizer, world size and kind of sharding.
Kind: TypeAlias = tuple[str, int, str]


def flags(data: Path, optimizer: str = "rowwise_adagrad", *more: str, batch: int = 32) -> list[str]:
    """The flags of a run; ``more`` take the place of those of the same name."""
    chosen = [*EXAMPLE, f"--optimizer={optimizer}", f"--learning_rate={RATES[optimizer]}"]
    few_lines = "--throughput_check_freq_within_epoch=1000"
    return [f"--binary_path={data}", f"--batch_size={batch}", *chosen, few_lines, *more]


def train_checkpoints(root: Path, data: Path, kinds: Iterable[Kind]) -> dict[Kind, Path]:
    """Train a checkpoint of each kind; those of two ranks in the same processes."""
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


def save_start(flags: Sequence[str], path: Path, group: Group) -> None:
    """Save the state of a run before its first step (collective)."""
    settings = parse_settings([*MODEL, *flags])
    trainer = Trainer(settings, model_config(settings, read_schema(settings)), group)
    trainer._start()
    save_checkpoint(path, trainer.run.tensors(), trainer._record(), trainer.run)


def save_starts(runs: dict[Path, list[str]]) -> None:
    """Save the starts of several runs, by path, as two ranks."""
    run_ranks(2, save_each, runs)


def save_each(runs: dict[Path, list[str]]) -> None:
    """Save the starts of several runs, one after the other, as a rank."""
    with process_group() as group:
        for path, flags in runs.items():
            save_start(flags, path, group)


def save_start_here(flags: Sequence[str], path: Path) -> None:
    """Do it as the only rank, in this process."""
    with process_group() as group:
        save_start(flags, path, group)


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, unsharded, but for the random number generators."""
    stored = read_tensors(path)
    tensors = {
        name: torch.empty(about.size, dtype=getattr(torch, about.dtype))
        for name, about in stored.items()
        if not name.startswith("random.")
    }
    windows = [Window(name, (0,) * tensor.dim(), tensor) for name, tensor in tensors.items()]
    read_windows(path, stored, windows)
    return tensors
