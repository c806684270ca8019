"""``serve --workers N``."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from nvt_torchrec.inference.__main__ import main
from tests.inference.bundles import ROWS
from tests.inference.serving import Server, serving, until


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
        assert server.metric("inference_rows_total") == 60  # whoever is asked
        assert server.metric('inference_requests_total{code="200"}') == 20
        server.wait_for("inference_requests_under_way", 0)

        killed = first.pop()
        os.kill(killed, signal.SIGKILL)
        until(lambda: len(_workers(server) - {killed}) == 2)
        until(lambda: "another one was started" in server.stderr.read_text())
        assert server.metric("inference_rows_total") == 60
        assert len(server.predict(rows=rows)) == 3

        left = _workers(server)
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
