"""``serve --workers N``."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvt_torchrec.inference.server.workers import _Parent

from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.server.settings import ServerSettings
from tests.inference.conftest import Trained
from tests.inference.serving import Server, serving
from tests.inference.test_predictor import criteo_dicts
from tests.logs import random_rows


def _workers(server: Server) -> set[int]:
    """Its processes that have the bundle mapped."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return {int(child) for child in children if "table.npy" in _maps(int(child))}


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8")
    except OSError:
        return ""


def _until(condition) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_workers_share_and_are_replaced(bundle: Path, tmp_path: Path) -> None:
    rows = criteo_dicts(random_rows(3, 1))
    patient = ["--max_wait_ms", "100000", "--timeout_s", "100"]
    with serving(tmp_path, "--bundle", str(bundle), "--workers", "2", *patient) as server:
        first = _workers(server)
        assert len(first) == 2
        assert server.process.pid not in first
        for _ in range(20):
            assert len(server.predict(rows=rows)) == 3
        for pid in first:  # none of the table's pages is its own
            maps = _maps(pid)
            table = maps[maps.index("table.npy") :]
            assert re.search(r"Private_Dirty: +(\d+) kB", table)[1] == "0"
        assert server.metric("inference_rows_total") == 60  # whoever is asked
        assert server.metric('inference_requests_total{code="200"}') == 20
        server.wait_for("inference_requests_under_way", 0)

        killed = first.pop()
        os.kill(killed, signal.SIGKILL)
        _until(lambda: len(_workers(server) - {killed}) == 2)
        assert "starting another one" in server.stderr.read_text()
        assert server.metric("inference_rows_total") == 60
        assert len(server.predict(rows=rows)) == 3

        left = _workers(server)
        server.process.kill()  # its workers end by themselves
        _until(lambda: not any(_maps(pid) for pid in left))


@pytest.mark.parametrize("flags", [["--workers", "0"], ["--workers", "2", "--tables", "int8"]])
def test_flags(bundle: Path, capsys, flags: list[str]) -> None:
    assert main(["serve", "--bundle", str(bundle), *flags]) == 2
    assert f"{flags[-2]} " in capsys.readouterr().err + " "


def test_workers_share_a_bundle_only(trained: Trained, capsys) -> None:
    assert main(["serve", *trained.flags, "--workers", "2"]) == 2
    assert "python -m inference bundle" in capsys.readouterr().err


class Processes:
    """Stands in for multiprocessing's context: keeps the arguments of the processes it starts."""

    Pipe = staticmethod(multiprocessing.Pipe)

    def __init__(self) -> None:
        self.started: list[tuple] = []

    def Process(self, target, args):  # noqa: N802
        self.started.append(args)
        return SimpleNamespace(start=lambda: None, pid=len(self.started))


def test_one_worker_compares_digests_before_the_others_start() -> None:
    parent = _Parent(lambda check: check, Path(), ServerSettings(workers=3), None)
    parent._context = processes = Processes()
    assert parent._may_start()
    parent._start()
    assert not parent._may_start()
    ready = multiprocessing.Pipe()
    parent._workers[0].pipe = ready[0]
    parent._update(parent._workers[0])
    assert not parent._may_start()
    ready[1].send_bytes(b"ready")
    parent._update(parent._workers[0])
    while len(processes.started) < 3:
        assert parent._may_start()
        parent._start()
    parent._started = True
    parent._start()  # in the place of one that ended
    assert [check for _, _, check, *_ in processes.started] == [True, False, False, True]


def test_sighup_waits_for_workers_that_are_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "nvt_torchrec.inference.server.workers.os.kill", lambda *args: sent.append(args)
    )
    parent = _Parent(lambda check: check, Path(), ServerSettings(workers=1), None)
    parent._context = Processes()
    parent._start()
    worker = parent._workers[0]
    worker.pipe, theirs = multiprocessing.Pipe()
    parent._pass_on(signal.SIGHUP)
    assert not sent  # it would end a worker that has no handler yet
    theirs.send_bytes(b"ready")
    parent._update(worker)
    assert sent == [(1, signal.SIGHUP)]
    parent._pass_on(signal.SIGHUP)
    assert len(sent) == 2


def test_workers_that_cannot_start(bundle: Path, tmp_path: Path) -> None:
    flags = ["--bundle", str(bundle), "--workers", "2", "--device", "nowhere"]
    with pytest.raises(AssertionError, match="--device nowhere"), serving(tmp_path, *flags):
        pass
