"""Scripts of the docs, run by bash where an operator works."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.warm import programs, warm_python

ROOT = Path(__file__).parents[1]
#: With the interpreter of these tests and the packages of this checkout, and without a GPU.
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": str(ROOT),
    "CUDA_VISIBLE_DEVICES": "",
}


def warm_environment() -> dict[str, str]:
    """Return :data:`ENVIRONMENT` with commands that have imported already: see ``warm.py``."""
    path = os.pathsep.join([programs(), ENVIRONMENT["PATH"]])
    # torchrun starts ranks by the latter
    return {**ENVIRONMENT, "PATH": path, "PYTHON_EXEC": warm_python()}


def run(directory: Path, script: str) -> tuple[int, str]:
    """Run a script; return its status and what it printed."""
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=directory,
        env=warm_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def python(
    *arguments: object, warm: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the interpreter of these tests in the repository's root, or one that has imported."""
    command = [warm_python() if warm else sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **options)


@contextlib.contextmanager
def started(
    directory: Path, command: list[str], log: Path, **environment: str
) -> Iterator[subprocess.Popen]:
    """Start a command, which prints to a file; at the end, kill what it has started."""
    with (
        open(log, "w") as file,
        subprocess.Popen(
            command,
            cwd=directory,
            env=warm_environment() | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            end_session(process.pid)


def end_session(session: int) -> None:
    """Kill the processes of a session, and wait until they and their warm programs are gone."""
    while members := [process for process in _processes() if _session_of(process) == session]:
        for process in members:
            with contextlib.suppress(OSError):
                os.kill(process, 9)
        while any(map(_session_of, members)):
            time.sleep(0.01)
    subprocess.run([warm_python(), "-c", ""], check=True)  # begins when their programs are gone


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _session_of(process: int) -> int | None:
    """Return the session of a process; None if it has ended, waited for or not."""
    try:
        state, _, _, session = (
            Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:4]
        )
        threads = len(os.listdir(f"/proc/{process}/task"))
    except OSError:
        return None
    # files of one whose first thread has ended are open until its last one has
    return None if state in "ZX" and threads < 2 else int(session)


def free_port() -> str:
    """Return the number of a port that no program uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
