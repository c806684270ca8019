"""One run at a time for a directory of checkpoints."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from clicklog.errors import OutputError
from clicklog.files.atomic import lock
from dlrm.launch.distributed import Group, from_rank_0, was_restarted

log = logging.getLogger(__name__)

#: Seconds that a restarted job waits for a lock of its predecessor: a file server frees those of a
#: machine that is gone when their lease ends, NFS after 90 s.
_LEASE = 120.0


@contextlib.contextmanager
def claimed(locks: Sequence[Path], group: Group) -> Iterator[None]:
    """Let no other run have any of ``locks`` meanwhile (collective).

    Rank 0 holds them by flock, so they end with its process however that ends; a file that a
    killed run left behind is nobody's.

    Args:
        locks: files that are made, and removed at the end.
        group: this rank.

    Raises:
        OutputError: another run has one, or it cannot be made (on all ranks).
    """
    if not locks:
        yield
        return
    patience = _LEASE if was_restarted(group) else 0.0
    with contextlib.ExitStack() as stack:
        refused = None
        if group.rank == 0:
            try:
                for path in locks:
                    _claim(path, stack, time.monotonic() + patience)
            except OutputError as error:
                refused = error
        refused = from_rank_0(group, refused)
        if refused:
            raise refused
        yield


def _claim(path: Path, stack: contextlib.ExitStack, deadline: float) -> None:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            marker = stack.enter_context(path.open("a+", encoding="utf-8"))
        except OSError as error:
            raise OutputError(
                f"{path}: cannot be written: {error.strerror or error}", "choose a writable place"
            ) from error
        try:
            lock(marker, path.parent)
        except OutputError:
            if time.monotonic() > deadline:
                raise _taken(path, marker) from None
            time.sleep(1)
            continue
        except OSError as error:
            log.warning(
                "%s: this file system has no locks (%s): see that no other run writes there",
                path.parent,
                error.strerror or error,
            )
        if _is_at(marker, path):  # else the run that had it removed it at its end
            break
    stack.callback(path.unlink, missing_ok=True)
    marker.truncate(0)
    marker.write(f"process {os.getpid()} on {socket.gethostname()}")
    marker.flush()


def _taken(path: Path, marker: IO[str]) -> OutputError:
    marker.seek(0)
    return OutputError(
        f"{path.parent}: another run is writing checkpoints here: {marker.read() or 'unknown'}",
        "wait for it or end it, or choose another directory",
    )


def _is_at(marker: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(marker.fileno()), path.stat())
    except FileNotFoundError:
        return False
