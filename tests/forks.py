"""Forks of this process that are killed with SIGKILL at chosen moments.

A moment is a call that changes a directory: a rename, a link, a new or a deleted name.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from tests.shell import python

HANGS_AFTER = 600.0
CALLS = ("replace", "rename", "link", "symlink", "mkdir", "unlink", "rmdir")


def fork(work: Callable[[], object]) -> int:
    """Start to work in a fork, in a process group of its own; its id.

    It has imported and compiled what this process has, so that moments fall into the work. After
    :data:`HANGS_AFTER` seconds it shows what its threads do, and ends.
    """
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
    before_call: Callable[[], object],
) -> bool:
    """Work in a fork; whether it was killed.

    ``work`` calls the function that it is given where moments begin to count: from there on,
    ``before_call`` is called before each.
    """
    _, status = os.waitpid(fork(lambda: work(lambda: _watch(before_call))), 0)
    if not os.WIFSIGNALED(status) and os.waitstatus_to_exitcode(status):
        raise SystemExit("an attempt failed")
    return os.WIFSIGNALED(status)


def _watch(before_call: Callable[[], object]) -> None:
    lock = threading.RLock()
    for name in CALLS:
        original = getattr(os, name)

        def watched(*arguments, original=original, **options):
            with lock:
                before_call()
                return original(*arguments, **options)

        setattr(os, name, watched)


def kill_before(moment: int) -> Callable[[], None]:
    """Make a function that kills its process when it is called for the ``moment``-th time."""
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


def seen_by(module: str, *arguments: object) -> Any:
    """Run a module that kills its forks; what it printed as JSON."""
    done = python("-m", module, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
