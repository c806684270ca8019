"""Load what a run with ``--continue_from`` starts from, and save it before the first step."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from nvt_torchrec.dlrm.checkpoint.state import training_state
from nvt_torchrec.dlrm.checkpoint.store import save_checkpoint
from nvt_torchrec.dlrm.checkpoint.tensors import Window, read_tensors, read_windows
from nvt_torchrec.dlrm.config import model_config
from nvt_torchrec.dlrm.data import read_schema
from nvt_torchrec.dlrm.launch.distributed import Group, process_group
from nvt_torchrec.dlrm.settings.train_settings import parse_settings
from nvt_torchrec.dlrm.train import Trainer
from tests.dlrm.runs import MODEL


def save_start(flags: Sequence[str], path: Path, group: Group) -> None:
    """Save the state of a run before its first step (collective)."""
    settings = parse_settings([*MODEL, *flags])
    trainer = Trainer(settings, model_config(settings, read_schema(settings)), group)
    trainer._continue()
    state = training_state(trainer.model, trainer.optimizer, group)
    save_checkpoint(path, state, trainer.config, trainer._record(), group)


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


def main(runs: str) -> None:
    """Save the starts of several runs, one after the other."""
    with process_group() as group:
        for flags, path in json.loads(runs):
            save_start(flags, Path(path), group)


if __name__ == "__main__":
    main(sys.argv[1])
