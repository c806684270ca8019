"""The directories of checkpoints: list, rename and remove checkpoints, and lock out other runs.

A run's ``--checkpoint_dir`` holds ``step_00001000``, ``step_00002000`` …, each a checkpoint of
:mod:`training.checkpoint.saving`, and ``latest``, a file with the name of the newest one. A run
that cannot use the newest checkpoints renames them, for example to ``step_00002000.unusable``, and
resumes from an older one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError, ClickLogError, OutputError
from nvt_torchrec.base.files.atomic import TEMPORARY, locked, output_errors
from nvt_torchrec.models.checkpoint.record import MODEL_FILE, CheckpointRecord
from nvt_torchrec.training.launch.distributed import Group, call_on_rank_0, was_restarted
from nvt_torchrec.training.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)

LATEST_FILE = "latest"
_STEP_NAME = re.compile(r"step_(\d{8,})")
#: How long, in seconds, a restarted job waits for a lock that its previous start held. A file
#: server only frees the locks of a lost machine when their lease ends: NFS after 90 s.
_LEASE_SECONDS = 120.0


def list_checkpoints(directory: Path | str) -> list[Path]:
    """Return the checkpoints in a run's directory, complete or not, oldest first."""
    paths = [path for path in Path(directory).glob("step_*") if _STEP_NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step_")))


def list_complete(directory: Path | str) -> list[Path]:
    """Return the complete checkpoints in a run's directory, oldest first."""
    return [path for path in list_checkpoints(directory) if (path / MODEL_FILE).is_file()]


def newest_record(checkpoints: list[Path]) -> tuple[Path, CheckpointRecord] | None:
    """Return the newest readable checkpoint of a list, and its record; None if none is readable."""
    for path in reversed(checkpoints):
        # Unreadable checkpoints are skipped silently; resume_from reports them.
        with contextlib.suppress(ClickLogError):
            return path, CheckpointRecord.read(path)
    return None


def resolve(path: Path) -> Path:
    """Return ``path`` if it is a checkpoint, or the newest checkpoint in the directory.

    Raises:
        BadInputError: ``path`` neither is nor holds a checkpoint.
    """
    if (path / MODEL_FILE).is_file():
        return path
    checkpoints = list_complete(path)
    if checkpoints:
        return checkpoints[-1]
    raise BadInputError(
        f"--continue_from {path}: no checkpoint",
        "give a directory that --save_checkpoint_path named, a periodic checkpoint "
        "(CHECKPOINT_DIR/step_…), or a --checkpoint_dir that holds one",
    )


def set_aside(path: Path) -> Path:
    """Rename an unusable checkpoint, so that no run reads it, and return its new path.

    Raises:
        OutputError: It cannot be renamed.
    """
    return _rename(path, f"{path.name}.unusable")


def remove(path: Path) -> None:
    """Remove a checkpoint.

    It is renamed first, so that a process that is killed in between does not leave an incomplete
    checkpoint under its name.

    Raises:
        OutputError: It cannot be renamed.
    """
    renamed = _rename(path, f".{path.name}.old{TEMPORARY}")
    shutil.rmtree(renamed, ignore_errors=True)


def _rename(path: Path, name: str) -> Path:
    """Rename a checkpoint, replacing anything of that name; raise OutputError if it fails."""
    shutil.rmtree(path.with_name(name), ignore_errors=True)
    try:
        return path.rename(path.with_name(name))
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be renamed: {error.strerror or error}", "make its directory writable"
        ) from error


def lock_files(settings: TrainSettings) -> dict[Path, Path]:
    """Return the directories that a run writes checkpoints to, and the lock file of each."""
    locks = {}
    if settings.checkpoint_dir:
        locks[Path(settings.checkpoint_dir)] = Path(settings.checkpoint_dir) / ".lock"
    if settings.save_checkpoint_path:
        path = Path(settings.save_checkpoint_path).absolute()
        locks[path] = path.with_name(f".{path.name}.lock")
    return locks


@contextlib.contextmanager
def claim_directories(locks: Mapping[Path, Path], group: Group) -> Iterator[None]:
    """Hold the locks of a run's directories, which exclude other runs (collective).

    Rank 0 holds them by flock, so the operating system frees them however the process ends. A lock
    file that a killed run left behind locks nothing.

    Args:
        locks: Directories and their lock files, which are created here and removed at the end.
        group: This rank.

    Raises:
        OutputError: Another run holds a lock, or a lock file cannot be created (on all ranks).
    """
    seconds = _LEASE_SECONDS if locks and was_restarted(group) else 0.0
    with contextlib.ExitStack() as stack:
        for directory, path in locks.items():
            call_on_rank_0(group, _claim, directory, path, stack, time.monotonic() + seconds)
        yield


def _claim(directory: Path, path: Path, stack: contextlib.ExitStack, deadline: float) -> None:
    """Lock a directory until ``stack`` is closed.

    Args:
        directory: The directory.
        path: The lock file.
        stack: The stack, which unlocks the directory and removes the file when it is closed.
        deadline: The time, in monotonic seconds, up to which to wait for another process's lock.

    Raises:
        OutputError: Another run holds the lock, or the file cannot be created.
    """
    with output_errors(path, "choose a writable directory"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    while True:
        try:
            marker = stack.enter_context(locked(path, directory))
            break
        except OutputError:
            if time.monotonic() > deadline:
                holder = path.read_text(encoding="utf-8") or "unknown"
                raise OutputError(
                    f"{directory}: another run is writing checkpoints here: {holder}",
                    "wait for it or end it, or choose another directory",
                ) from None
            time.sleep(1)
        except OSError as error:
            log.warning(
                "%s: this file system has no locks (%s): make sure that no other run writes there",
                directory,
                error.strerror or error,
            )
            return
    stack.callback(path.unlink, missing_ok=True)
    marker.truncate(0)
    marker.write(f"process {os.getpid()} on {socket.gethostname()}")
    marker.flush()
