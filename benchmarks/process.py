"""One measured run of a command: wall clock, CPU seconds and peak memory of its process tree."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
#: Where results and data go.
BUILD = ROOT / "build" / "bench"
#: Seconds between two looks at the memory of a run.
_POLL_S = 0.02
#: Seconds between two searches for new processes.
_SEARCH_S = 0.25
#: How many of the last lines on stderr the error of a failed run has.
_ERROR_LINES = 3


@dataclasses.dataclass(frozen=True)
class Run:
    """What became of one run.

    Attributes:
        wall_s: Seconds from its start to its end.
        cpu_s: User and system seconds of the process and of the descendants it waited for.
        peak_rss_mb: The largest sum of the resident memory of its processes at one moment, MB (10^6
            bytes), or the largest of one process if that is more. Pages that processes share
            count in each.
        output: The JSON object it printed last, or what was read from its files; {} if it failed.
        error: Why it failed; empty if it did not.
        peak_own_mb: As ``peak_rss_mb``, without pages of mapped files, which the system may drop.
        peak_main_mb: The largest such memory of the process itself.
        peak_child_mb: The largest such memory of one of its descendants; 0 without any.
    """

    wall_s: float
    cpu_s: float
    peak_rss_mb: float
    output: dict[str, Any]
    error: str = ""
    peak_own_mb: float = 0.0
    peak_main_mb: float = 0.0
    peak_child_mb: float = 0.0


def run(
    command: Sequence[str | os.PathLike],
    *,
    timeout: float = 3600,
    result: Callable[[], dict[str, Any]] | None = None,
) -> Run:
    """Run a command to its end, in the repository's root, and measure it.

    The command prints one JSON object as its last line on stdout, unless ``result`` is given. An
    exit status other than 0 is a failed run, which is returned and not raised.

    Args:
        command: Program and arguments.
        timeout: Seconds after which it is killed, with all its processes.
        result: Is called after it, in place of reading its last line.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C reaches this program alone, which ends it
        )
        tree = _Tree(process.pid)
        try:
            status, usage = _wait(process, tree, begin + timeout)
        finally:
            tree.kill()
        wall = time.perf_counter() - begin
        value = {}
        error = ""
        if status:
            stderr.seek(0)
            lines = stderr.read().decode("utf-8", "replace").strip().splitlines()
            error = " / ".join(line.strip() for line in lines[-_ERROR_LINES:])
            if not error:
                error = f"exit status {status}"
            if wall > timeout:
                error = f"killed after {timeout:.0f} s; {error}"
        elif result:
            value = result()
        else:
            stdout.seek(0)
            value = json.loads(stdout.readlines()[-1])
        cpu, peak = usage.ru_utime + usage.ru_stime, tree.peak_bytes / 1e6
        return Run(
            wall_s=wall,
            cpu_s=cpu,
            peak_rss_mb=peak,
            output=value,
            error=error,
            peak_own_mb=tree.peak_own_bytes / 1e6,
            peak_main_mb=tree.peak_main_bytes / 1e6,
            peak_child_mb=tree.peak_child_bytes / 1e6,
        )


def _wait(process: subprocess.Popen, tree: _Tree, deadline: float) -> tuple[int, Any]:
    """Wait for a process, noting its memory; return exit status and resource usage."""
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait
            return process.returncode, usage
        if time.perf_counter() > deadline:
            tree.kill()
        tree.look()
        time.sleep(_POLL_S)


class _Tree:
    """A process and its descendants, and the memory that they held at most."""

    def __init__(self, pid: int) -> None:
        self._processes = {psutil.Process(pid)}
        self._main = pid
        self._searched = 0.0
        self.peak_bytes = 0
        self.peak_own_bytes = 0
        self.peak_main_bytes = 0
        self.peak_child_bytes = 0

    def look(self) -> None:
        """Note the memory of every process; now and then look for new ones."""
        if time.perf_counter() - self._searched > _SEARCH_S:
            self._searched = time.perf_counter()
            self._find_descendants()
        total = own = 0
        for process in self._processes:
            with contextlib.suppress(psutil.Error, OSError):  # raised if it has ended
                memory = process.memory_info()
                total += memory.rss
                own_of_process = memory.rss - memory.shared
                own += own_of_process
                if process.pid == self._main:
                    self.peak_main_bytes = max(self.peak_main_bytes, own_of_process)
                else:
                    self.peak_child_bytes = max(self.peak_child_bytes, own_of_process)
                self.peak_own_bytes = max(self.peak_own_bytes, own)
                self.peak_bytes = max(self.peak_bytes, total, high_water(process.pid))

    def kill(self) -> None:
        """End whatever still runs."""
        self._find_descendants()
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _find_descendants(self) -> None:
        for process in list(self._processes):
            with contextlib.suppress(psutil.Error):
                self._processes.update(process.children(recursive=True))


def high_water(pid: int) -> int:
    """Return the largest resident memory of a process so far, bytes; 0 if it has ended.

    Unlike ``ru_maxrss`` it does not count the process that it was forked from.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    for line in status.splitlines():
        if line.startswith("VmHWM:"):  # in KiB
            return int(line.split()[1]) << 10
    return 0
