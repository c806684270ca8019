"""Periodic checkpoints, written while training continues.

A run's directory holds ``step_00001000``, ``step_00002000`` …, each a checkpoint of
:mod:`training.checkpoint.saving`, and ``latest``, the name of the newest. A checkpoint appears
whole or not at all, and only with finite values; the newest ``keep`` are kept. A run that resumes
from an older checkpoint renames newer ones, which it could not use, to ``step_00002000.unusable``.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from nvt_torchrec.base.device import use_device
from nvt_torchrec.base.errors import OutputError
from nvt_torchrec.base.files.atomic import TEMPORARY, write_text
from nvt_torchrec.models.checkpoint.record import MODEL_FILE, is_checkpoint_alone
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.training.checkpoint.saving import save_checkpoint
from nvt_torchrec.training.launch.distributed import Group

log = logging.getLogger(__name__)

LATEST_FILE = "latest"
#: The checkpoints that are kept unless the user says how many.
_KEPT = 3
#: Seconds that a failed run waits for its last checkpoint, which other ranks may never finish.
_ABANDON_SECONDS = 10.0
_STEP_NAME = re.compile(r"step_(\d{8,})")


class Checkpoints:
    """Write a run's checkpoints in a thread, while training continues.

    Args:
        directory: The directory of the run's checkpoints.
        keep: The number of the newest that are kept; None for three.
        config: The model's shape.
        group: This rank. A process group is made for the threads' collectives, apart from
            training's (collective).

    Attributes:
        saved_step: The step of the newest; None if there is none.
    """

    def __init__(
        self, directory: Path | str, keep: int | None, config: ModelConfig, group: Group
    ) -> None:
        self.directory = Path(directory).absolute()
        self._keep = keep or _KEPT
        self._config = config
        self._group = dataclasses.replace(group, cpu=dist.new_group(backend="gloo"))
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.saved_step: int | None = None
        if group.rank == 0:
            for path in self.directory.glob(f".step_*{TEMPORARY}"):  # left by killed runs
                shutil.rmtree(path, ignore_errors=True)

    def save(
        self, step: int, state: dict[str, Any], record: dict[str, Any], loss: torch.Tensor
    ) -> None:
        """Copy ``state`` now and write it in the background (collective).

        Args:
            step: The last trained step.
            state: The tensors, as for :func:`training.checkpoint.saving.save_checkpoint`.
            record: The training record, likewise.
            loss: The loss since the last report, likewise.

        Raises:
            OutputError, SettingsError: The checkpoint before could not be written.
        """
        self.wait()
        self.saved_step = step
        copies = step, copied(state), record, _copied_tensor(loss)
        self._thread = threading.Thread(
            name="checkpoint", target=self._write, args=copies, daemon=True
        )
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether a checkpoint could not be written on this rank; :meth:`wait` raises why."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until the last checkpoint is whole; raise the error that it failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def abandon(self) -> None:
        """After an error in training, give a checkpoint that is being written some time to end."""
        if self._thread is not None:
            self._thread.join(_ABANDON_SECONDS)

    def _write(
        self, step: int, state: dict[str, Any], record: dict[str, Any], loss: torch.Tensor
    ) -> None:
        use_device(self._group.device)
        try:
            path = self.directory / f"step_{step:08}"
            save_checkpoint(path, state, self._config, record, self._group, loss=loss)
            if self._group.rank == 0:
                write_text(self.directory / LATEST_FILE, f"{path.name}\n")
                for old in filter(is_checkpoint_alone, finished(self.directory)[: -self._keep]):
                    remove(old)
                log.info("checkpoint: %s", path)
        except BaseException as error:
            self._error = error


def checkpoints_in(directory: Path | str) -> list[Path]:
    """Return the checkpoints in a run's directory, whole or not, oldest first."""
    paths = [path for path in Path(directory).glob("step_*") if _STEP_NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step_")))


def finished(directory: Path | str) -> list[Path]:
    """Return the whole checkpoints in a run's directory, oldest first."""
    return [path for path in checkpoints_in(directory) if (path / MODEL_FILE).is_file()]


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that cannot be used, so that no run reads it, and return its new path.

    Raises:
        OutputError: It cannot be renamed.
    """
    shutil.rmtree(path.with_name(f"{path.name}.unusable"), ignore_errors=True)
    return _rename(path, f"{path.name}.unusable")


def remove(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that a killed run leaves no half of it."""
    shutil.rmtree(_rename(path, f".{path.name}.old{TEMPORARY}"), ignore_errors=True)


def _rename(path: Path, name: str) -> Path:
    try:
        return path.rename(path.with_name(name))
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be renamed: {error.strerror or error}", "make its directory writable"
        ) from error


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a nested dict of tensors to main memory."""
    return {
        key: copied(value) if isinstance(value, dict) else _copied_tensor(value)
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
