"""One run at a time for a directory of checkpoints."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from nvt_torchrec.base.errors import OutputError
from nvt_torchrec.training.checkpoint.directories import claim_directories
from nvt_torchrec.training.launch.distributed import process_group
from tests.training.runs import environment, events, flags_of, train_here

HOLDER = """
import pathlib, sys, time
from nvt_torchrec.training.checkpoint.directories import claim_directories
from nvt_torchrec.training.launch.distributed import process_group

locks = {pathlib.Path(path): pathlib.Path(path) for path in sys.argv[1:]}
with process_group() as group, claim_directories(locks, group):
    print("here", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(started) -> Iterator[subprocess.Popen]:
    """Another process that has the directories of ``started``."""
    locks = [str(started / "steps" / ".lock"), str(started / ".final.lock")]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *locks], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "here\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_run_is_refused_until_the_first_is_gone_however_it_ends(data, started, holder):
    half = started / "steps" / ".step_00000091.tmp"
    half.mkdir()  # that the first run is writing
    who = f"another run is writing checkpoints here: process {holder.pid} on {socket.gethostname()}"
    with pytest.raises(OutputError, match=f"steps: {who}"):
        train_here(*flags_of(data, started), "--resume")
    no_directory = [f"--binary_path={data}", "--epochs=1"]
    with pytest.raises(OutputError, match=f"{started / 'final'}: {who}"):
        train_here(*no_directory, f"--save_checkpoint_path={started / 'final'}")
    assert half.exists()
    assert not (started / "log").exists(), "nor anything else was touched"
    holder.kill()
    holder.wait()
    train_here(*flags_of(data, started), "--resume")
    assert events(started / "log", "resume")
    assert not [path for path in started.rglob(".*") if path.name.endswith("lock")]


def test_a_restarted_job_waits_for_locks_of_a_machine_that_is_gone(tmp_path, monkeypatch):
    lock = tmp_path / ".lock"
    with process_group() as group:
        first = claim_directories({tmp_path: lock}, group)
        first.__enter__()
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        end = threading.Timer(1.5, first.__exit__, (None, None, None))
        begin = time.monotonic()
        end.start()
        with claim_directories({tmp_path: lock}, group):
            assert time.monotonic() - begin > 1
            assert lock.read_text() == f"process {os.getpid()} on {socket.gethostname()}"
        end.join()
    assert not lock.exists()


def test_file_systems_without_locks(tmp_path, monkeypatch, caplog):
    def flock(*args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with process_group() as group, claim_directories({tmp_path: tmp_path / ".lock"}, group):
        assert "this file system has no locks (No locks available)" in caplog.text
