"""Locks that let only one run at a time write checkpoints to a directory."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from nvt_torchrec.base.errors import OutputError
from nvt_torchrec.base.files.atomic import locked, output_errors
from nvt_torchrec.training.launch.distributed import Group, from_rank_0, was_restarted
from nvt_torchrec.training.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)

#: Seconds that a restarted job waits for a lock of its last start: a file server frees the locks of
#: a machine that is gone when their lease ends, NFS after 90 s.
_LEASE_SECONDS = 120.0


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
def claimed(locks: Mapping[Path, Path], group: Group) -> Iterator[None]:
    """Hold locks, which only one run can hold at a time (collective).

    Rank 0 holds them by flock, so they end with its process however that ends; a file that a
    killed run left behind locks nothing.

    Args:
        locks: Directories and their lock files, which are made here and removed at the end.
        group: This rank.

    Raises:
        OutputError: Another run holds one, or it cannot be made (on all ranks).
    """
    if not locks:
        yield
        return
    seconds = _LEASE_SECONDS if was_restarted(group) else 0.0
    with contextlib.ExitStack() as stack:
        error = None
        if group.rank == 0:
            try:
                for directory, path in locks.items():
                    _claim(directory, path, stack, time.monotonic() + seconds)
            except OutputError as refusal:
                error = refusal
        error = from_rank_0(group, error)
        if error:
            raise error
        yield


def _claim(directory: Path, path: Path, stack: contextlib.ExitStack, deadline: float) -> None:
    with output_errors(path, "choose a writable place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    while True:
        try:
            marker = stack.enter_context(locked(path, directory))
            break
        except OutputError:
            if time.monotonic() > deadline:
                raise OutputError(
                    f"{directory}: another run is writing checkpoints here: "
                    f"{path.read_text(encoding='utf-8') or 'unknown'}",
                    "wait for it or end it, or choose another directory",
                ) from None
            time.sleep(1)
        except OSError as error:
            log.warning(
                "%s: this file system has no locks (%s): see that no other run writes there",
                directory,
                error.strerror or error,
            )
            marker = stack.enter_context(path.open("w", encoding="utf-8"))
            break
    stack.callback(path.unlink, missing_ok=True)
    marker.truncate(0)
    marker.write(f"process {os.getpid()} on {socket.gethostname()}")
    marker.flush()
