"""Write checkpoints: torch.distributed.checkpoint files and ``model.json``, complete or absent.

A checkpoint is a directory::

    model.json      :mod:`models.checkpoint.record`: the model and its origin, and the BLAKE2b
                    digests of each file and of itself; written last
    tensors.json    :mod:`models.checkpoint.tensor_files`: the location of each tensor
    .metadata       the same for torch.distributed.checkpoint itself, a pickle; not read here
    __R_N.distcp    files of rank R: weights, optimizer state, random number generators

It is written next to its final path, fsynced and renamed. Only tensors are stored, and reading an
untrusted checkpoint runs no code from it (:mod:`models.checkpoint.tensor_files`). A state with
values that are not finite is not written.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from nvt_torchrec.base.device import use_device
from nvt_torchrec.base.errors import OutputError, SettingsError
from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.base.files.atomic import TEMPORARY, fsync_directory, write_text
from nvt_torchrec.base.finite import find_not_finite
from nvt_torchrec.models.checkpoint.reading import first_line
from nvt_torchrec.models.checkpoint.record import (
    MODEL_FILE,
    TENSORS_FILE,
    CheckpointRecord,
    is_checkpoint_alone,
)
from nvt_torchrec.models.checkpoint.tensor_files import write_tensors
from nvt_torchrec.training.checkpoint.directories import LATEST_FILE, list_complete, remove
from nvt_torchrec.training.launch.distributed import Group, gather_objects
from nvt_torchrec.training.launch.run_state import RunState, copy_state

log = logging.getLogger(__name__)

#: The metadata file that torch writes next to the tensors.
_PICKLE_FILE = ".metadata"
#: The packages whose versions a checkpoint records.
_PACKAGES = ("torch", "torchrec", "numpy")
#: The default number of periodic checkpoints to keep.
_NUM_KEPT = 3
#: How long, in seconds, a failed run waits for its last checkpoint, which other ranks may never
#: finish.
_ABANDON_SECONDS = 10.0


class Checkpoints:
    """Write a run's checkpoints in a thread, while training continues.

    Args:
        directory: The directory of the run's checkpoints.
        keep: The number of newest checkpoints to keep; None for three.
        run: The run. The constructor is collective: it makes a separate process group for the
            collectives of the threads, because they would interleave with those of training.

    Attributes:
        saved_step: The step of the newest checkpoint of this run; None if there is none.
    """

    def __init__(self, directory: Path | str, keep: int | None, run: RunState) -> None:
        self.directory = Path(directory).absolute()
        self._keep = keep or _NUM_KEPT
        group = dataclasses.replace(run.group, cpu=dist.new_group(backend="gloo"))
        self._run = dataclasses.replace(run, group=group)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.saved_step: int | None = None
        if group.rank == 0:
            for path in self.directory.glob(f".step_*{TEMPORARY}"):  # left by killed runs
                shutil.rmtree(path, ignore_errors=True)

    def save(
        self, step: int, state: dict[str, Any], record: dict[str, Any], loss: torch.Tensor
    ) -> None:
        """Copy the state now, and write it in the background (collective).

        Args:
            step: The last trained step.
            state: The tensors, as for :func:`save_checkpoint`.
            record: The training record, as for :func:`save_checkpoint`.
            loss: The loss since the last report, as for :func:`save_checkpoint`.

        Raises:
            OutputError, SettingsError: The previous checkpoint could not be written.
        """
        self.wait()
        self.saved_step = step
        copies = step, copy_state(state), record, copy_state(loss)
        self._thread = threading.Thread(None, self._write, "checkpoint", copies, daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether this rank failed to write a checkpoint; :meth:`wait` raises the error."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until the last checkpoint is complete; raise the error if writing it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def abandon(self) -> None:
        """Wait a few seconds for the last checkpoint, after an error in training."""
        if self._thread is not None:
            self._thread.join(_ABANDON_SECONDS)

    def _write(
        self, step: int, state: dict[str, Any], record: dict[str, Any], loss: torch.Tensor
    ) -> None:
        """Write a checkpoint, and remove the oldest ones; runs in the thread."""
        group = self._run.group
        use_device(group.device)
        try:
            path = self.directory / f"step_{step:08}"
            save_checkpoint(path, state, record, self._run, loss=loss)
            if group.rank == 0:
                write_text(self.directory / LATEST_FILE, f"{path.name}\n")
                for old in list_complete(self.directory)[: -self._keep]:
                    if is_checkpoint_alone(old):
                        remove(old)
                log.info("checkpoint: %s", path)
        except BaseException as error:  # wait() raises it in the main thread
            self._error = error


def check_destination(path: Path | str) -> None:
    """Check that a checkpoint may be written to ``path``; nothing is ever overwritten.

    Raises:
        OutputError: ``path`` is a file, or a directory that is not empty.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        problem = "already holds a checkpoint" if (path / MODEL_FILE).exists() else "is not empty"
        raise OutputError(f"{path} {problem}", "choose another directory, or move this one away")


def save_checkpoint(
    path: Path | str,
    state: dict[str, Any],
    record: dict[str, Any],
    run: RunState,
    *,
    loss: torch.Tensor | None = None,
) -> None:
    """Write a checkpoint to ``path`` (collective; all ranks must share a file system).

    A state with values that are not finite is not written: the checkpoints of a diverged run must
    not replace the older ones from which it could be resumed.

    Args:
        path: The directory, which must not exist or must be empty.
        state: Nested dicts of tensors (:meth:`training.launch.run_state.RunState.tensors`).
        record: The JSON-ready training record for ``model.json``.
        run: The run; its ``cpu`` group is used.
        loss: The sum of this rank's losses since the last report, which must be finite, too.

    Raises:
        OutputError: ``path`` is not empty, or cannot be written.
        SettingsError: A weight, a moment or the loss is not finite (on all ranks).
    """
    path = Path(path).absolute()
    group = run.group
    _check_finite(state if loss is None else {"loss": loss, **state}, record, group)
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        if group.rank == 0:
            check_destination(path)
            shutil.rmtree(temporary, ignore_errors=True)  # left by a run that was killed
            temporary.mkdir(parents=True)
        dist.barrier(group=group.cpu)
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(temporary, sync_files=True),
            process_group=group.cpu,
        )
        # Each rank reads back and digests the files that it wrote.
        parts = gather_objects(group, _digest_files(temporary, f"__{group.rank}_*.distcp"))
        if group.rank == 0:
            # With PyTorch 2.11, the metadata that dcp.save returns lack the locations of tensors.
            metadata = dcp.FileSystemReader(temporary).read_metadata()
            write_tensors(temporary, metadata)
            _check_visible(path, temporary)
            files: dict[str, FileEntry] = {}
            for entries in parts:
                files.update(entries)
            files.update(_digest_files(temporary, _PICKLE_FILE))
            files.update(_digest_files(temporary, TENSORS_FILE))
            versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
            CheckpointRecord(run.config.to_dict(), record, group.world_size, versions, files).write(
                temporary
            )
            # All files are on disk now, model.json last. The rename makes the checkpoint visible.
            os.rename(temporary, path)
            fsync_directory(path.parent)
        dist.barrier(group=group.cpu)
    except (OSError, CheckpointException) as error:
        raise OutputError(
            f"{path}: the checkpoint cannot be written: {first_line(error)}",
            "free disk space, or choose a writable directory",
        ) from error
    finally:
        if group.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def _check_finite(state: dict[str, Any], record: dict[str, Any], group: Group) -> None:
    """Check that all ranks' tensors are finite (collective); raise SettingsError if not."""
    for name in gather_objects(group, find_not_finite(state)):
        if name:
            raise SettingsError(
                f"{name} is not finite after step {record['steps']}: training diverged, and this "
                "checkpoint is not written",
                f"lower --learning_rate (now {record['learning_rate']:g}); with --checkpoint_dir "
                "the earlier checkpoints are kept, and --resume continues from the newest",
            )


def _digest_files(directory: Path, pattern: str) -> dict[str, FileEntry]:
    """Return the sizes and digests of the files whose names match, by name."""
    return {file.name: FileEntry.from_file(file, "blake2b") for file in directory.glob(pattern)}


def _check_visible(path: Path, temporary: Path) -> None:
    """Check that rank 0 sees the files of all ranks; raise OutputError if not."""
    stored = json.loads((temporary / TENSORS_FILE).read_text(encoding="utf-8"))
    missing: set[str] = set()
    for tensor in stored.values():
        missing.update(chunk["file"] for chunk in tensor["chunks"])
    missing -= set(os.listdir(temporary))
    if missing:
        raise OutputError(
            f"{path}: rank 0 does not see {', '.join(sorted(missing))}, which other ranks wrote",
            "choose a directory on a file system that all machines share",
        )
