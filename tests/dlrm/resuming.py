"""Runs that are interrupted and go on: their flags, and how their results are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nvt_torchrec.dlrm import train as train_module
from nvt_torchrec.dlrm.checkpoint.store import load_model
from tests.dlrm.runs import train_here

FLAGS = ["--epochs=3", "--learning_rate=0.05", "--adagrad", "--shuffle_training_set"]
STEPS = 90  # 3 epochs of 30 steps of 32 rows


def weights(path: Path) -> dict[str, torch.Tensor]:
    model, _ = load_model(path)
    return model.state_dict()


def assert_same(a: Path, b: Path) -> None:
    ours, theirs = weights(a), weights(b)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def flags_of(data: Path, path: Path, *other: str, batch_size: int = 32) -> list[str]:
    """The flags of a run in ``path``; ``other`` take the place of those of the same name."""
    flags = [
        f"--binary_path={data}",
        f"--batch_size={batch_size}",
        f"--log_path={path / 'log'}",
        f"--save_checkpoint_path={path / 'final'}",
        f"--checkpoint_dir={path / 'steps'}",
        "--checkpoint_freq=7",
        *FLAGS,
    ]
    names = {flag.split("=")[0] for flag in other}
    return [*(flag for flag in flags if flag.split("=")[0] not in names), *other]


def adam_flags(data: Path, path: Path, **kwargs) -> list[str]:
    """The flags of a run of one epoch with Adam."""
    flags = flags_of(data, path, "--epochs=1", "--learning_rate=0.01", **kwargs)
    return [*(flag for flag in flags if flag != "--adagrad"), "--optimizer=adam"]


class PulledPlug(BaseException):
    """Ends a run abruptly."""


def interrupt_at(monkeypatch, step: int) -> None:
    """Let training end abruptly before step ``step`` (from 0)."""
    calls = iter(range(10**9))

    def pull(optimizer, value):
        if next(calls) == step:
            raise PulledPlug
        original(optimizer, value)

    original = train_module.set_learning_rate
    monkeypatch.setattr(train_module, "set_learning_rate", pull)


def train_until_pulled(monkeypatch, step: int, *flags: str) -> None:
    """Train here until :func:`interrupt_at` ends it."""
    with monkeypatch.context() as patch:
        interrupt_at(patch, step)
        with pytest.raises(PulledPlug):
            train_here(*flags)
