"""Run a command and measure its process tree: wall time, CPU seconds and peak memory."""

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
#: The directory of results and data.
BUILD = ROOT / "build" / "bench"
#: The seconds between two measurements of memory.
_POLL_S = 0.02
#: The seconds between two searches for new processes.
_SEARCH_S = 0.25
#: The number of last lines of stderr in the error of a failed run.
_ERROR_LINES = 3


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of one run. Memory is in MB of 10^6 bytes.

    Attributes:
        wall_s: The seconds from start to end.
        cpu_s: The user and system seconds of the process and of the descendants it waited for.
        peak_rss_mb: The peak over time of the sum of the resident memory of all processes, or the
            peak of a single process if it is larger (sums may miss a short peak). Pages that
            processes share count once for each process.
        output: The JSON object that it printed last, or that ``result`` made; {} if it failed.
        error: The cause of a failure; empty if it succeeded.
        peak_own_mb: Like ``peak_rss_mb``, without pages of mapped files, which the system may drop.
        peak_main_mb: The peak memory, without mapped files, of the process itself.
        peak_child_mb: The peak memory, without mapped files, of a single descendant; 0 if there are
            no descendants.
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
    """Run a command in the repository's root, and measure it.

    The command prints one JSON object as its last line on stdout, unless ``result`` is given. If
    its exit status is not 0, a failed run is returned; no exception is raised.

    Args:
        command: The program and its arguments.
        timeout: The seconds after which the command and its descendants are killed.
        result: Called after the command, to return the object instead of its last line.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C only reaches this program, which then kills the tree
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
        return Run(
            wall_s=wall,
            cpu_s=usage.ru_utime + usage.ru_stime,
            peak_rss_mb=tree.peak_bytes / 1e6,
            output=value,
            error=error,
            peak_own_mb=tree.peak_own_bytes / 1e6,
            peak_main_mb=tree.peak_main_bytes / 1e6,
            peak_child_mb=tree.peak_child_bytes / 1e6,
        )


def _wait(process: subprocess.Popen, tree: _Tree, deadline: float) -> tuple[int, Any]:
    """Wait for a process while measuring its memory; return exit status and resource usage."""
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            # Tell Popen the status, because it can no longer wait for the process itself.
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage
        if time.perf_counter() > deadline:
            tree.kill()
        tree.measure()
        time.sleep(_POLL_S)


class _Tree:
    """A process and its descendants, and their peak memory."""

    def __init__(self, pid: int) -> None:
        self._processes = {psutil.Process(pid)}
        self._main = pid
        self._searched = 0.0
        self.peak_bytes = 0
        self.peak_own_bytes = 0
        self.peak_main_bytes = 0
        self.peak_child_bytes = 0

    def measure(self) -> None:
        """Update the peaks; now and then search for new processes."""
        if time.perf_counter() - self._searched > _SEARCH_S:
            self._searched = time.perf_counter()
            self._find_descendants()
        total = own = 0
        for process in self._processes:
            with contextlib.suppress(psutil.Error, OSError):  # raised if the process has ended
                memory = process.memory_info()
                total += memory.rss
                process_own = memory.rss - memory.shared
                own += process_own
                if process.pid == self._main:
                    self.peak_main_bytes = max(self.peak_main_bytes, process_own)
                else:
                    self.peak_child_bytes = max(self.peak_child_bytes, process_own)
                self.peak_own_bytes = max(self.peak_own_bytes, own)
                self.peak_bytes = max(self.peak_bytes, total, read_peak_memory(process.pid))

    def kill(self) -> None:
        """Kill all processes that still run."""
        self._find_descendants()
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _find_descendants(self) -> None:
        """Add new descendants to the processes."""
        for process in list(self._processes):
            with contextlib.suppress(psutil.Error):
                self._processes.update(process.children(recursive=True))


def read_peak_memory(pid: int) -> int:
    """Return the peak resident memory of a process so far, in bytes; 0 if it has ended.

    Unlike ``ru_maxrss``, it does not include the memory of the process that it was forked from.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    for line in status.splitlines():
        if line.startswith("VmHWM:"):  # in KiB
            return int(line.split()[1]) << 10
    return 0
