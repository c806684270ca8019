"""Forks of this process that are killed with SIGKILL just before chosen writes.

A write is whatever changes a directory: a file opened to be written, a new directory, a rename, a
link, a deleted name. Its kind is what it does, in which directory, and the ending of the name; of
directories the whole name. Which split it is, numbers and digests do not count. Python reports
writes as audit events, so those of the standard library are seen, too; files that Arrow opens are
not, but for their renames.
"""

from __future__ import annotations

import collections
import faulthandler
import gc
import json
import os
import random
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.shell import python

HANGS_AFTER = 600.0
#: By audit event, the positions of the path and of the descriptor of the directory it is relative
#: to in its arguments; of a rename and a link the new path.
_WRITES = {
    "os.rename": (1, 3),
    "os.link": (1, 3),
    "os.symlink": (1, 2),
    "os.mkdir": (0, 2),
    "os.remove": (0, 1),
    "os.rmdir": (0, 1),
}
_OPENED_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT
#: What differs between paths of the same kind: digests and random names, numbers, splits.
_VARIABLE = re.compile(
    r"(?<![a-z])(?=[a-z]*[0-9])[0-9a-f]{8,}(?![a-z])|[0-9]+|\b(?:train|valid|test)\b"
)


def fork(work: Callable[[], object]) -> int:
    """Start to work in a fork, in a process group of its own; its id.

    It has imported and compiled what this process has, so that moments fall into the work. After
    :data:`HANGS_AFTER` seconds it shows what its threads do, and ends.
    """
    gc.freeze()  # or the fork copies all pages of what was imported, to look for garbage in it
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        # tqdm's own is a semaphore that all forks share: who is killed while holding it stops them
        tqdm.set_lock(threading.RLock())
        faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def was_killed(
    work: Callable[[Callable[[], None]], object],
    before_write: Callable[[str], object],
    directory: Path,
) -> bool:
    """Work in a fork; whether it was killed.

    ``work`` calls the function that it is given where writes begin to count: from there on,
    ``before_write`` is called with the kind of each below ``directory``.
    """
    _, status = os.waitpid(fork(lambda: work(lambda: _watch(before_write, directory))), 0)
    if not os.WIFSIGNALED(status) and os.waitstatus_to_exitcode(status):
        raise SystemExit("an attempt failed")
    return os.WIFSIGNALED(status)


def _watch(before_write: Callable[[str], object], directory: Path) -> None:
    lock, inside = threading.RLock(), threading.local()

    def watch(event: str, arguments: tuple) -> None:
        path = _written_path(event, arguments)
        # what before_write itself writes is not reported
        if path is None or getattr(inside, "watching", False):
            return
        if not path.is_relative_to(directory) or _changes_nothing(event, path):
            return
        with lock:
            inside.watching = True
            try:
                before_write(_kind(event, path.relative_to(directory)))
            finally:
                inside.watching = False

    sys.addaudithook(watch)


def _written_path(event: str, arguments: tuple) -> Path | None:
    """Return the path that an audit event says is written to; None for other events."""
    directory = None
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int) or not flags & _OPENED_TO_WRITE:
            return None
    elif event in _WRITES:
        place, at = _WRITES[event]
        path, directory = arguments[place], arguments[at] if at < len(arguments) else None
    else:
        return None
    where = Path(os.fsdecode(path))
    if isinstance(directory, int) and directory >= 0:  # rmtree works with descriptors
        where = Path(os.readlink(f"/proc/self/fd/{directory}")) / where
    return where


def _changes_nothing(event: str, path: Path) -> bool:
    """Return whether a directory is there already, or what is deleted is not."""
    if event == "os.mkdir":
        return os.path.lexists(path)
    return event in ("os.remove", "os.rmdir") and not os.path.lexists(path)


def _kind(event: str, path: Path) -> str:
    name = path.name if event in ("os.mkdir", "os.rmdir") else f"*{path.suffix}"
    return f"{event} {_VARIABLE.sub('#', str(path.parent / name))}"


def kill_before(turn: int, kind: str = "") -> Callable[[str], None]:
    """Make a function that kills its process the ``turn``-th time it is called, from 1 on.

    With ``kind``, only calls with this kind of write count: threads may do the writes of other
    kinds in another order each time.
    """
    calls = 0

    def count(written: str) -> None:
        nonlocal calls
        calls += kind in ("", written)
        if calls == turn:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


def draw_writes(
    kinds: Iterable[str], chance: random.Random, without: Collection[str] = ()
) -> Iterator[tuple[str, int]]:
    """Yield kinds of writes, and which of the writes of this kind is drawn, from 1 on.

    Args:
        kinds: Those of all writes of a run.
        chance: Draws.
        without: Kinds that have been tried elsewhere.

    Of these, and of those that :func:`is_alike` names, every fifth kind is yielded.
    """
    counts = collections.Counter(kinds)
    skipped = {kind for kind in counts if kind in without or is_alike(kind)}
    for number, (kind, writes) in enumerate(sorted(counts.items())):
        if number % 5 == 0 or kind not in skipped:
            yield kind, 1 + chance.randrange(writes)


def is_alike(kind: str) -> bool:
    """Return whether a kill before a write of this kind leaves what others leave as well.

    Before a temporary file is opened, there is what the write before it left; before its rename,
    which is a kind of its own, it is there. A file that is written in its place has another
    ending, and so its kind is tried.
    """
    action, path = kind.split(" ", 1)
    if action == "open":
        return path.endswith("*.tmp")
    return action in ("os.mkdir", "os.rmdir")


def seen_by(module: str, *arguments: object) -> Any:
    """Run a module that kills its forks; what it printed as JSON."""
    done = python("-m", module, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
