"""Checkpoints on the way, and going on from one: exactly where training was.

A run's directory holds ``step_00001000``, ``step_00002000`` …, each a checkpoint of
:mod:`dlrm.checkpoint`, and ``latest``, the name of the newest. A checkpoint appears whole or not
at all; the newest ``keep`` stay.

What a resumed run shares with one that was never interrupted: weights, optimizer state, the step
(which the learning rate follows), the loader's place in the data, and the random number
generators. On the same number of ranks the result is therefore the same bit by bit (on CPUs); on
another number the same batches follow, summed in another order.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from clicklog.errors import BadInputError, OutputError, SchemaError, SettingsError
from clicklog.files import TEMPORARY, write_text
from dlrm.checkpoint import (
    MODEL_FILE,
    Reader,
    check_contents,
    read_model_file,
    reason,
    save_checkpoint,
)
from dlrm.config import ModelConfig
from dlrm.distributed import Group
from dlrm.settings import table_optimizer

log = logging.getLogger(__name__)

LATEST_FILE = "latest"
#: Seconds an error in training waits for a checkpoint that other ranks may never finish.
_PATIENCE = 10.0
#: Settings that the weights, or the steps of an epoch, depend on: a resumed run must share them.
_MUST_STAY = (
    "eps",
    "seed",
    "shuffle_training_set",
    "drop_last_training_batch",
    "limit_train_batches",
    "undersampling_rate",
    "hash_indices",
    "dataset_type",
    "dataset_subset",
    "shuffle_batches",
)
#: Settings that also change what is trained, but that one may want to change on the way.
_MAY_CHANGE = (
    "epochs",
    "learning_rate",
    "dense_learning_rate",
    "change_lr",
    "lr_change_point",
    "lr_after_change_point",
    "lr_warmup_steps",
    "lr_decay_start",
    "lr_decay_steps",
    "lr_policy",
    "decay_power",
    "decay_end_lr",
    "comm_precision",
    "max_steps",
    "amp",
)
_STEP_NAME = re.compile(r"step_(\d{8,})")


def training_state(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, group: Group
) -> dict[str, Any]:
    """All tensors of a run, to save or to load into: they share memory with it."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "random": {f"rank_{group.rank}": torch.get_rng_state()},
    }


class Checkpoints:
    """Writes a run's checkpoints in a thread of its own, while training goes on.

    Args:
        directory: of the run's checkpoints.
        keep: how many of the newest stay.
        config: the model's shape.
        group: this rank. A process group of their own keeps the writing threads' collectives
            apart from training's (collective).
    """

    def __init__(self, directory: Path | str, keep: int, config: ModelConfig, group: Group) -> None:
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._config = config
        self._group = dataclasses.replace(group, cpu=dist.new_group(backend="gloo"))
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.saved_at = time.monotonic()
        if group.rank == 0:
            for path in self.directory.glob(f".step_*{TEMPORARY}"):  # of runs that were killed
                shutil.rmtree(path, ignore_errors=True)

    def save(self, step: int, state: dict[str, Any], record: dict[str, Any]) -> None:
        """Copy ``state`` now and write it in the background (collective).

        Raises:
            OutputError: this checkpoint, or the one before, cannot be written.
        """
        self.wait()
        copied = _copied(state)
        self.saved_at = time.monotonic()
        self._thread = threading.Thread(
            name="checkpoint", target=self._write, args=(step, copied, record), daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is whole. Raises :class:`OutputError` if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def abandon(self) -> None:
        """After an error: let a checkpoint that is under way come to its end, if it soon does."""
        if self._thread is not None:
            self._thread.join(_PATIENCE)

    def _write(self, step: int, state: dict[str, Any], record: dict[str, Any]) -> None:
        if (
            self._group.device.type == "cuda"
        ):  # a thread begins on the first GPU, whose it may not be
            torch.cuda.set_device(self._group.device)
        try:
            path = self.directory / f"step_{step:08}"
            save_checkpoint(path, state, self._config, record, self._group)
            if self._group.rank == 0:
                write_text(self.directory / LATEST_FILE, f"{path.name}\n")
                for old in finished(self.directory)[: -self._keep]:
                    _remove(old)
                log.info("checkpoint: %s", path)
        except BaseException as error:
            self._error = error


def finished(directory: Path | str) -> list[Path]:
    """The whole checkpoints in a run's directory, oldest first."""
    found = [
        path
        for path in Path(directory).glob("step_*")
        if _STEP_NAME.fullmatch(path.name) and (path / MODEL_FILE).is_file()
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def load_state(
    path: Path, model: DistributedModelParallel, optimizer: CombinedOptimizer, group: Group
) -> None:
    """Load weights, optimizer state and, on the same world size, random number generators.

    The world size and the sharding plan may differ from those it was written with (collective).

    Raises:
        BadInputError: the checkpoint is damaged.
        SchemaError: its tensors are not those of the run, for example row-wise Adagrad's moments
            of column shards under another plan.
    """
    dense = dict(optimizer.optimizers)["dense"]
    if not dense.state:
        dense.init_state()  # Adam's, which torch makes in the first step: without it none is loaded
        dense.zero_grad()
    state = training_state(model, optimizer, group)
    value = read_model_file(path)
    if value["world_size"] != group.world_size:
        del state["random"]
    _load(path, state, value["files"], group)
    model.load_state_dict(state["model"])
    loaded = optimizer.state_dict()
    loaded["state"] = state["optimizer"]
    optimizer.load_state_dict(loaded)
    if "random" in state:
        torch.set_rng_state(state["random"][f"rank_{group.rank}"])


def load_weights(
    path: Path, model: DistributedModelParallel, config: ModelConfig, group: Group
) -> None:
    """Load the weights of a checkpoint, of any world size and plan (collective).

    Raises:
        BadInputError: there is no checkpoint, or it is damaged.
        SchemaError: it is of another model.
    """
    value = read_model_file(path)
    _check_model(path, value["model"], config)
    state = {"model": model.state_dict()}
    _load(path, state, value["files"], group)
    model.load_state_dict(state["model"])


def _load(path: Path, state: dict[str, Any], files: dict[str, Any], group: Group) -> None:
    """Fill the tensors of ``state`` from a checkpoint's ``files`` (collective)."""
    damaged: list[Any] = [None] * group.world_size
    mine = check_contents(path, files, rank=group.rank, world_size=group.world_size)
    dist.all_gather_object(damaged, mine, group=group.cpu)
    if any(damaged):
        raise BadInputError(
            f"the checkpoint is damaged: {'; '.join(filter(None, damaged))}", "use another one"
        )
    reader = Reader(path)
    try:
        _check_sizes(path, state, reader)
        dcp.load(state, storage_reader=reader, process_group=group.cpu)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, CheckpointException) as error:
        raise BadInputError(
            f"{path}: the checkpoint is damaged: {reason(error)}", "use another one"
        ) from error


def _check_model(path: Path, then: Any, config: ModelConfig) -> None:
    different = _differences(ModelConfig.from_dict(then).to_dict(), config.to_dict())
    if different:
        raise SchemaError(f"{path}: another model: {different}", "give the same model settings")


def check_resumable(
    path: Path, record: dict[str, Any], config: ModelConfig, group: Group
) -> dict[str, Any]:
    """The training record of a checkpoint, if a run may go on from it.

    Args:
        path: the checkpoint.
        record: what the run would write now: its settings and ``workflow_digest``.
        config: the run's model.
        group: this rank; rank 0 says which other settings changed.

    Raises:
        SchemaError: the model, or the workflow that made the data, is another.
        SettingsError: a setting that the checkpoint's weights depend on is another.
    """
    value = read_model_file(path)
    _check_model(path, value["model"], config)
    training = value["training"]
    if training.get("workflow_digest") != record["workflow_digest"]:
        raise SchemaError(
            f"{path}: trained on data of workflow {training.get('workflow_digest')}, these are of "
            f"{record['workflow_digest']}",
            "resume on the same data, or start a new run",
        )
    then, now = training["settings"], record["settings"]
    different = _differences(_fixed(then), _fixed(now))
    if different:
        raise SettingsError(
            f"{path}: other settings than now: {different}", "resume with the same settings"
        )
    for name in _MAY_CHANGE:
        if group.rank == 0 and then.get(name) != now[name]:
            log.warning("--%s is %s from here on; it was %s", name, now[name], then.get(name))
    return training


def _fixed(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that a resumed run must share. The loader checks the global batch itself."""
    fixed = {name: settings.get(name) for name in _MUST_STAY}
    adagrad, optimizer = settings.get("adagrad"), settings.get("optimizer")
    return {"optimizer": table_optimizer(optimizer, adagrad), **fixed}


def _differences(then: dict[str, Any], now: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} was {then.get(name)}, is {now[name]}"
        for name in now
        if then.get(name) != now[name]
    )


def _check_sizes(path: Path, state: dict[str, Any], reader: Reader) -> None:
    stored = reader.read_metadata().state_dict_metadata
    for name, tensor in _flat(state):
        found = stored.get(name)
        if found is None:
            raise SchemaError(
                f"{path}: holds no {name!r}, which this run needs",
                "resume with the same optimizer and model",
            )
        if tuple(found.size) != tuple(tensor.shape):
            raise SchemaError(
                f"{path}: {name} is {list(found.size)}, in this run {list(tensor.shape)}",
                "row-wise Adagrad keeps a moment per column shard: resume with the same world "
                "size and --sharding",
            )


def _flat(state: dict[str, Any], prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    found = []
    for key, value in state.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """The same nested dict with tensors in memory of their own, on the CPU."""
    return {
        key: _copied(value) if isinstance(value, dict) else _copied_tensor(value)
        for key, value in state.items()
    }


def _copied_tensor(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, ShardedTensor):
        return value.detach().to("cpu", copy=True)
    copied = copy.copy(value)
    copied._local_shards = [
        Shard(shard.tensor.detach().to("cpu", copy=True), shard.metadata)
        for shard in value.local_shards()
    ]
    return copied


def _remove(path: Path) -> None:
    """Remove a checkpoint; killed on the way, no half of it looks like a whole one."""
    away = path.with_name(f".{path.name}.old{TEMPORARY}")
    try:
        path.rename(away)
        shutil.rmtree(away)
    except OSError as error:
        raise OutputError(f"{path}: cannot be removed: {error.strerror or error}") from error
