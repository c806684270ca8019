"""One measured run of a command: wall clock, CPU seconds and peak memory of its process tree."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

#: Seconds between two looks at the memory of a run, and between two searches for new processes.
_POLL, _SEARCH = 0.02, 0.25
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Run:
    """What became of one run.

    Attributes:
        wall_s: Seconds from its start to its end.
        cpu_s: User and system seconds of the process and its descendants.
        peak_rss_mb: The largest sum of the resident memory of its processes at one moment, MB (10^6
            bytes), or the largest of one process if that is more. Pages that processes share
            count in each.
        output: The JSON object it printed last, or what was read from its files; {} if it failed.
        error: Why it failed; empty if it did not.
    """

    wall_s: float
    cpu_s: float
    peak_rss_mb: float
    output: dict[str, Any]
    error: str = ""


def run(
    command: Sequence[str | os.PathLike],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 3600,
    result: Callable[[], dict[str, Any]] | None = None,
    output: Path | None = None,
) -> Run:
    """Run a command to its end and measure it.

    The command prints one JSON object as its last line on stdout, unless ``result`` is given, and
    exits with status 0; anything else is a failed run, which is returned and not raised.

    Args:
        command: Program and arguments.
        env: Variables that are added to the environment.
        cwd: Its working directory.
        timeout: Seconds after which it is killed, with all its processes.
        result: Is called after it, in place of reading its last line.
        output: A path; what it prints is kept in the files of this name that end in .out and .err.
    """
    begin = time.perf_counter()
    with _file(output, ".out") as stdout, _file(output, ".err") as stderr:
        try:
            process = subprocess.Popen(
                [os.fspath(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                start_new_session=True,  # its descendants are found by the session
            )
        except OSError as error:
            return Run(0.0, 0.0, 0.0, {}, f"cannot be started: {error}")
        tree = _Tree(process.pid)
        try:
            status, usage = _wait(process, tree, begin + timeout)
        finally:
            tree.kill()
        wall = time.perf_counter() - begin
        waited_for = usage.ru_utime + usage.ru_stime  # its descendants, too
        cpu, peak = max(waited_for, tree.cpu_s), tree.peak_bytes / 1e6
        value, error = {}, ""
        if status:
            stderr.seek(0)
            last = stderr.read().decode("utf-8", "replace").strip().splitlines()[-3:]
            late = f"killed after {timeout:.0f} s; " if wall > timeout else ""
            error = late + (" / ".join(line.strip() for line in last) or f"exit status {status}")
        elif result:
            value = result()
        else:
            stdout.seek(0)
            value, error = _last_object(stdout.read().decode("utf-8", "replace"))
        return Run(wall, cpu, peak, value, error)


def _file(path: Path | None, ending: str) -> IO[bytes]:
    if path is None:
        return tempfile.TemporaryFile()
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(f"{path}{ending}", "w+b")


def _wait(process: subprocess.Popen, tree: _Tree, deadline: float):
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait
            return process.returncode, usage
        if time.perf_counter() > deadline:
            tree.kill()
        tree.look()
        time.sleep(_POLL)


def _last_object(text: str) -> tuple[dict[str, Any], str]:
    """The JSON object in the last line, and what is wrong if there is none."""
    last = text.strip().rsplit("\n", 1)[-1]
    try:
        value = json.loads(last)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        return {}, f"no JSON object in the last line it printed: {last[:80]!r}"
    return value, ""


class _Tree:
    """The processes of one session: the memory they held at most, the CPU time they used."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._pids: set[int] = {session}
        self._cpu: dict[int, float] = {}
        self._searched = 0.0
        self.peak_bytes = 0

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu.values())

    def look(self) -> None:
        """Note memory and CPU time of every process; now and then look for new ones."""
        now = time.perf_counter()
        if now - self._searched > _SEARCH:
            self._searched = now
            self._pids |= self._members()
        together = 0
        for pid in list(self._pids):
            try:
                resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
                fields, most = _stat(pid), high_water(pid)
            except (OSError, ValueError, IndexError):  # it has ended
                self._pids.discard(pid)
                continue
            self._cpu[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
            together += resident
            self.peak_bytes = max(self.peak_bytes, most)
        self.peak_bytes = max(self.peak_bytes, together)

    def _members(self) -> set[int]:
        found = set()
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    if int(_stat(int(name))[3]) == self._session:
                        found.add(int(name))
                except (OSError, ValueError, IndexError):
                    continue
        return found

    def kill(self) -> None:
        """End whatever the session still runs."""
        for pid in self._members():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on; the second may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def high_water(pid: int) -> int:
    """The largest resident memory of a process so far, bytes; exact between two looks.

    Unlike ``ru_maxrss`` it does not count the process that it was forked from.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
