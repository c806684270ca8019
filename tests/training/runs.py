"""Training runs for the tests: by one rank here or by torchrun, whole or interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from nvt_torchrec.models import registry
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import load_build
from nvt_torchrec.training.launch.distributed import process_group
from nvt_torchrec.training.loop import train_steps
from nvt_torchrec.training.loop.train import TrainResult, train
from nvt_torchrec.training.settings.train_settings import parse_settings
from nvt_torchrec.training.sharding.train_model import ModelWithTables, build_model
from tests.ranks import run_ranks
from tests.shell import free_port
from tests.warm import programs, warm_python

ROOT = Path(__file__).parents[2]

#: A small model; the batch size is given by each test.
MODEL = [
    "--embedding_dim=8",
    "--dense_arch_layer_sizes=16,8",
    "--over_arch_layer_sizes=16,1",
    "--epochs=1",
    "--no-batch_norm",  # a run that may choose tries several trainings first
    "--no-boosted_trees",
    "--throughput_check_freq_within_epoch=1",
    "--validation_freq_within_epoch=10000",
]


#: The flags of each model, and of each interaction of a DLRM, with small sizes.
MODELS = {
    "original": [],
    "dcn": ["--interaction_type=dcn", "--dcn_num_layers=2", "--dcn_low_rank_dim=4"],
    "deepfm": ["--model=deepfm"],
    "dcn_v2": ["--model=dcn_v2", "--dcn_num_layers=2", "--dcn_low_rank_dim=4"],
    "final_mlp": ["--model=final_mlp"],
}


def train_here(*flags: str) -> TrainResult:
    """Train as the only rank, in this process."""
    settings = parse_settings(with_model(flags))
    with process_group() as group:
        return train(settings, group)


def with_model(flags: Sequence[str]) -> list[str]:
    """Return the flags with those of a small model, as far as it has such layers."""
    names = [flag.removeprefix("--model=") for flag in flags if flag.startswith("--model=")]
    taken = registry.list_model_flags((*names, registry.DEFAULT_MODEL)[0])
    settings = {flag: flag[2:].removeprefix("no-").split("=")[0] for flag in MODEL}
    layers = {
        flag
        for flag, name in settings.items()
        if name in registry.MODEL_FLAGS and name not in taken
    }
    return [*(flag for flag in MODEL if flag not in layers), *flags]


def torchrun(
    *command: str, ranks: int = 2, timeout: float = 800, launcher: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository with its flags by torchrun."""
    script, *flags = command
    run = [warm_python(), "-m", "torch.distributed.run", "--standalone", *launcher]
    run += [f"--nproc-per-node={ranks}", str(ROOT / script), *flags]
    return run_command(run, timeout=timeout)


def train_script(*flags: str) -> list[str]:
    """The command that trains a small model in a process of its own."""
    return [warm_python(), str(ROOT / "train_torchrec.py"), *MODEL, *flags]


def two_machines(
    *command: str, timeout: float = 800, launcher: Sequence[str] = ()
) -> list[subprocess.CompletedProcess[str]]:
    """Run a script with its flags by two torchrun agents that meet on the loopback, a rank each."""
    script, *flags = command
    run = [warm_python(), "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    run += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=test"]
    run += [*launcher, str(ROOT / script), *flags]
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda _: run_command(run, timeout=timeout), range(2)))


def train_many(flags: list[list[str]], ranks: int) -> None:
    """Train several times in the same processes."""
    run_ranks(ranks, train_each, flags)


def passed(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Assert that a program ended without an error."""
    assert result.returncode == 0, result.stderr
    return result


def environment() -> dict[str, str]:
    """Of a process that imports this repository; torchrun starts its ranks by PYTHON_EXEC."""
    first = {"PATH": [programs(), str(Path(sys.executable).parent)], "PYTHONPATH": [str(ROOT)]}
    paths = {
        name: os.pathsep.join([*folders, *filter(None, [os.environ.get(name)])])
        for name, folders in first.items()
    }
    return {**os.environ, **paths, "PYTHON_EXEC": warm_python()}


def run_command(
    command: list[str], timeout: float = 800, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in ``cwd``: by default where this process is, see ``conftest.py``."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def events(directory: Path, kind: str) -> list[dict]:
    """The events of one kind in a run's metrics.jsonl."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def losses(directory: Path) -> list[float]:
    """The losses of a run that reported every step."""
    return [event["loss"] for event in events(directory, "train")]


def resumed_step(path: Path) -> int:
    """The step of the only resumption of the run in ``path``."""
    (resumed,) = events(path / "log", "resume")
    return resumed["step"]


#: What TorchRec's example trains: a model of vectors alone, in one epoch, at a constant rate. The
#: flags of a run begin with them, as later ones win.
EXAMPLE = ("--first_order=0", "--dense_bins=0", "--epochs=1", "--lr_warmup_steps=0")
EXAMPLE += ("--dense_decay=0", "--eps=1e-8")
#: The same, by its optimizer.
EXAMPLE_SGD = (*EXAMPLE, "--optimizer=sgd")

FLAGS = [*EXAMPLE, "--epochs=3", "--learning_rate=0.05", "--adagrad", "--shuffle_training_set"]
FLAGS += ["--dense_bins=4"]
STEPS = 90  # 3 epochs of 30 steps of 32 rows


def with_tables(config: ModelConfig, seed: int = 0) -> ModelWithTables:
    """TorchRec's model in this process alone, with memory for its tables."""
    build = load_build(config.model) if config.own else None
    model = build_model(config, seed=seed, build=build).eval().requires_grad_(False)
    model.sparse_arch.embedding_bag_collection.to_empty(device="cpu")
    return model


def config_of(path: Path) -> ModelConfig:
    """What a checkpoint says of its model."""
    return ModelConfig.from_dict(CheckpointRecord.read(path).model)


def model_of(path: Path) -> ModelWithTables:
    """TorchRec's model with the weights of a checkpoint, read by torch itself."""
    model = with_tables(config_of(path))
    dcp.load({"model": {"model": model.state_dict()}}, checkpoint_id=path)
    return model


@torch.inference_mode()
def score(model: ModelWithTables, loader: Iterable) -> tuple[np.ndarray, np.ndarray]:
    """The logits and labels, float32 [N] each, of the rows in their order."""
    batches = [(model(b.dense_features, b.sparse_features), b.labels) for b in loader]
    logits, labels = map(torch.cat, zip(*batches, strict=True))
    return logits.squeeze(-1).numpy(), labels.float().numpy()


def weights(path: Path) -> dict[str, torch.Tensor]:
    return model_of(path).state_dict()


def assert_same(a: Path, b: Path) -> None:
    ours, theirs = weights(a), weights(b)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def written_to(path: Path) -> list[str]:
    """The flags of what a run leaves in ``path``: its log and its last checkpoint."""
    return [f"--log_path={path / 'log'}", f"--save_checkpoint_path={path / 'final'}"]


def small_run(data: Path, path: Path, *other: str, batch_size: int = 32) -> list[str]:
    """The flags of a run in ``path``; ``other`` take the place of those of the same name."""
    return [f"--binary_path={data}", f"--batch_size={batch_size}", *written_to(path), *other]


def train_losses(data: Path, path: Path, *flags: str) -> list[float]:
    """Train here in batches of 32 rows, with log and checkpoint in ``path``; return the losses."""
    train_here(*small_run(data, path, *flags))
    return losses(path / "log")


def flags_of(data: Path, path: Path, *other: str, batch_size: int = 32) -> list[str]:
    """The flags of a run of three epochs that also keeps checkpoints of its steps."""
    steps = [f"--checkpoint_dir={path / 'steps'}", "--checkpoint_freq=7"]
    return small_run(data, path, *steps, *FLAGS, *other, batch_size=batch_size)


def early_flags(data: Path, path: Path, **kwargs) -> list[str]:
    """The flags of a run that stops early, at the default rates: its labels depend on nothing."""
    steps = [f"--checkpoint_dir={path / 'steps'}", "--checkpoint_freq=7", "--early_stopping=4"]
    more = ["--epochs=20", "--validation_freq_within_epoch=10", "--shuffle_training_set"]
    return small_run(data, path, *steps, *more, **kwargs)


def adagrad_flags(data: Path, path: Path, **kwargs) -> list[str]:
    """The flags of a run of one epoch with Adagrad, which keeps a moment per weight."""
    flags = flags_of(data, path, "--epochs=1", "--learning_rate=0.01", **kwargs)
    return [*(flag for flag in flags if flag != "--adagrad"), "--optimizer=adagrad"]


class PulledPlug(BaseException):
    """Ends a run abruptly."""


def interrupt_at(monkeypatch, step: int) -> None:
    """Let training end abruptly before step ``step`` (from 0)."""
    calls = iter(range(10**9))

    def pull(optimizer, value):
        if next(calls) == step:
            raise PulledPlug
        original(optimizer, value)

    original = train_steps.set_learning_rate
    monkeypatch.setattr(train_steps, "set_learning_rate", pull)


def train_until_pulled(monkeypatch, step: int, *flags: str) -> None:
    """Train here until :func:`interrupt_at` ends it."""
    with monkeypatch.context() as patch:
        interrupt_at(patch, step)
        with pytest.raises(PulledPlug):
            train_here(*flags)


def train_each(runs: list[list[str]]) -> None:
    """Train, one after the other. No global names the group: it would outlive the interpreter."""
    with process_group() as group:
        for flags in runs:
            train(parse_settings(with_model(flags)), group)
