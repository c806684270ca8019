"""``serve --workers N``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvt_torchrec.inference.__main__ import main
from tests.inference.bundles import ROWS
from tests.inference.serving import Server, serving, until
from tests.shell import ROOT

#: MB that a worker may have of its own, with a bundle of a few kB: its stacks, buffers and objects.
#: A process that imports for itself has 226.
MAX_OWN_MB = 80


def _workers(server: Server) -> set[int]:
    """Its processes that have the bundle mapped."""
    pid = server.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return {int(child) for child in children if "table.npy" in _maps(int(child))}


def _maps(pid: int, kind: str = "maps") -> str:
    try:
        return Path(f"/proc/{pid}/{kind}").read_text(encoding="utf-8")
    except OSError:
        return ""


def _own_mb(pid: int) -> float:
    """Return the memory of a process that it shares with no other one."""
    own = re.findall(
        r"^Private_(?:Clean|Dirty): +(\d+) kB", _maps(pid, "smaps_rollup"), re.MULTILINE
    )
    return sum(map(int, own)) * 1024 / 1e6


def test_the_parent_forks_without_threads() -> None:
    """A fork has only the thread that forks; a lock that another one holds is held for ever."""
    program = """
import os
from nvt_torchrec.inference.server.forked_workers import import_application
import_application()
tasks = "/proc/self/task"
print(*sorted(open(f"{tasks}/{thread}/comm").read().strip() for thread in os.listdir(tasks)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() in (["python"], ["jemalloc_bg_thd", "python"])  # Arrow's prepares


def test_workers_share_and_are_replaced(small_bundle: Path, tmp_path: Path) -> None:
    rows = ROWS[:3]
    flags = ["--bundle", str(small_bundle), "--workers", "2", "--timeout_s", "100"]
    with serving(tmp_path, *flags) as server:
        first = _workers(server)
        assert len(first) == 2
        assert server.pid not in first
        for _ in range(20):
            assert len(server.predict(rows=rows)) == 3
        for pid in first:  # none of the table's pages is its own
            maps = _maps(pid, "smaps")
            table = maps[maps.index("table.npy") :]
            assert re.search(r"Private_Dirty: +(\d+) kB", table)[1] == "0"
            assert _own_mb(pid) < MAX_OWN_MB
        assert server.metric("inference_rows_total") == 60  # whoever is asked
        assert server.metric('inference_requests_total{code="200"}') == 20
        server.wait_for("inference_requests_under_way", 0)

        killed = first.pop()
        os.kill(killed, signal.SIGKILL)
        until(lambda: len(_workers(server) - {killed}) == 2)
        until(lambda: "a new one was started" in server.stderr.read_text())
        assert server.metric("inference_rows_total") == 60
        assert len(server.predict(rows=rows)) == 3

        left = _workers(server)
        assert len(left) == 2
        assert max(map(_own_mb, left)) < MAX_OWN_MB  # the replaced one, too
        os.kill(server.pid, signal.SIGKILL)  # its workers end by themselves
        until(lambda: not any(_maps(pid) for pid in left))


def test_workers_share_a_bundle_only(small_bundle: Path, capsys) -> None:
    parts = ["--workflow", str(small_bundle / "workflow"), "--checkpoint", "none"]
    for flags in (["--bundle", str(small_bundle), "--tables", "int8"], parts):
        assert main(["serve", *flags, "--workers", "2"]) == 2
        assert "python -m inference bundle" in capsys.readouterr().err


def test_workers_that_cannot_start(small_bundle: Path, tmp_path: Path) -> None:
    flags = ["--bundle", str(small_bundle), "--workers", "2", "--device", "nowhere"]
    with pytest.raises(AssertionError, match="--device nowhere"), serving(tmp_path, *flags):
        pass
