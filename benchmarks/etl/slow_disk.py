"""Run ``python -m etl`` on a slow disk: every fsync sleeps first.

The last line it prints has the number of fsyncs, and how many seconds working threads waited for
them. The arguments are those of ``python -m etl``.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable

from nvt_torchrec.base.files import atomic as files

#: Seconds that each sync takes longer, as on a network disk or a busy one.
DELAY_S = 0.05


def slow_main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    lock = threading.Lock()
    seen = {"syncs": 0, "sync_wait_s": 0.0}

    def slow(fsync: Callable) -> Callable:
        def wrapped(descriptor: int) -> None:
            time.sleep(DELAY_S)
            with lock:
                seen["syncs"] += 1
            fsync(descriptor)

        return wrapped

    def timed(waits: Callable) -> Callable:
        @functools.wraps(waits)
        def wrapped(*args):
            begin = time.perf_counter()
            try:
                return waits(*args)
            finally:
                if not threading.current_thread().name.startswith("sync"):
                    with lock:
                        seen["sync_wait_s"] += time.perf_counter() - begin

        return wrapped

    os.fsync = slow(os.fsync)
    # before other modules import them by name
    files.publish, files.fsync_directory = timed(files.publish), timed(files.fsync_directory)
    from nvt_torchrec.etl.__main__ import main
    from nvt_torchrec.etl.engines.syncing import Syncer

    Syncer.add, Syncer.wait, Syncer.__exit__ = map(
        timed, (Syncer.add, Syncer.wait, Syncer.__exit__)
    )
    status = main(arguments)
    print(json.dumps(seen))
    return status


if __name__ == "__main__":
    sys.exit(slow_main(sys.argv[1:]))
