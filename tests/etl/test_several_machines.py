"""The commands of docs/etl.md, "Several machines", on one: a cluster in processes of its own."""

from __future__ import annotations

import shlex
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from distributed import Client
from distributed.comm import CommClosedError

from nvt_torchrec.etl.engines import cluster
from nvt_torchrec.etl.run import run
from tests.etl.runs import settings
from tests.logs import random_rows, write_day
from tests.shell import ROOT, free_port, started
from tests.shell import run as run_script

#: Runs the ETL, and kills all workers, the session KILLED, when units are about to be encoded.
_LOSING = """
import os, sys
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.engines import cluster, workers
from tests.shell import end_session

encode = workers.Workers.encode

def alone(self, units, workflow):
    cluster.LOST_SECONDS = 2
    end_session(int(os.environ["KILLED"]))
    return encode(self, units, workflow)

workers.Workers.encode = alone
sys.exit(main(sys.argv[1:]))
"""


def test_the_commands_of_the_docs_and_a_cluster_without_workers(tmp_path: Path) -> None:
    """RuntimeError of a closed event loop, status 1, hid why the run ended."""
    for day in range(3):
        write_day(tmp_path / "raw" / f"day_{day}", random_rows(200, day))
    section = (ROOT / "docs/etl.md").read_text().split("## Several machines")[1].split("\n## ")[0]
    for name, value in (
        ("--nworkers 16", "--nworkers 1"),
        ("HEAD", "127.0.0.1"),
        ("8786", free_port()),
        ("RAW", str(tmp_path / "raw")),
        ("OUT", str(tmp_path / "out")),
    ):
        assert name in section
        section = section.replace(name, value)
    lines = [line.partition("#")[0].split() for line in section.split("\n") if line[:4] == " " * 4]
    scheduler, worker, on_gpus, etl = lines
    assert on_gpus[:4] == ["dask", "cuda", *worker[1:3]]
    assert etl[:2] == ["nvt-etl", "run"]
    scheduler += ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
    address = worker[2]
    with started(tmp_path, scheduler, tmp_path / "scheduler.log"):
        with started(tmp_path, worker, tmp_path / "worker.log") as process:
            with Client(address, timeout=300) as client:
                client.wait_for_workers(1)
            command = shlex.join(["python", "-c", _LOSING, *etl[1:]])
            status, printed = run_script(tmp_path, f"export KILLED={process.pid}; {command}")
        assert status == 2, printed
        assert "error: the cluster has had no worker for 2 s\n" in printed
        assert "Traceback" not in printed
        with started(tmp_path, worker, tmp_path / "worker.log"):
            with Client(address, timeout=300) as client:
                client.wait_for_workers(1)
            status, printed = run_script(tmp_path, shlex.join(etl))
        assert status == 0, printed
        assert "counted; 0 of " in printed  # it went on
    run(settings(tmp_path / "raw", tmp_path / "cpu"))
    ours, expected = (
        [path.read_bytes() for path in sorted((tmp_path / name).rglob("part.*.parquet"))]
        for name in ("out", "cpu")
    )
    assert len(ours) == 4
    assert ours == expected


def test_lost_workers_are_logged(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    """And the client is closed once there was none for too long; a lost scheduler is named."""
    monkeypatch.setattr(cluster, "LOST_SECONDS", 0.04)
    states, closed = iter([["a", "b"], ["b", "c"]]), threading.Event()
    client = SimpleNamespace(
        scheduler_info=lambda n_workers: {"workers": next(states, [])},
        close=lambda timeout: closed.set(),
    )

    @cluster.readable_errors(client)
    def wait() -> None:
        closed.wait()
        raise RuntimeError("IOLoop is closed")

    with pytest.raises(cluster.WorkerLostError, match=r"no worker for 0\.04 s"):
        wait()
    assert [text.partition(",")[0] for text in caplog.messages] == [
        f"worker {name} is lost" for name in "abc"
    ]
    with (
        pytest.raises(cluster.WorkerLostError, match="scheduler of the cluster is lost: in <TCP"),
        cluster.readable_errors(),
    ):
        raise CommClosedError("in <TCP (closed)>")
