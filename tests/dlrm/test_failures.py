"""A rank that fails, in any way, ends the job: no rank waits for it, and its error is on top."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.dlrm.runs import MODEL, torchrun, two_machines

SCRIPT = """
import os, pathlib, signal, sys
import torchrec, train_torchrec; from nvt_torchrec import nvt_loader
from nvt_torchrec.dlrm import train

how, rank = sys.argv[1], os.environ["RANK"]
pathlib.Path(sys.argv[2], rank).write_text(str(os.getpid()))

class Loader(nvt_loader.KJTLoader):
    def __iter__(self):
        for step, batch in enumerate(super().__iter__()):
            if step == 5 and rank == "1" and how == "ends":
                return
            yield batch

def at_a_step(optimizer, value, calls=iter(range(10**9))):
    original(optimizer, value)
    if rank == "1" and next(calls) == 5:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "step":
            optimizer.step = fail

def fail(closure=None):
    raise RuntimeError("the weights are on fire")

nvt_loader.KJTLoader = Loader
import nvt_torchrec.dlrm.data
nvt_torchrec.dlrm.data.KJTLoader = Loader
original, train.set_learning_rate = train.set_learning_rate, at_a_step
sys.exit(train_torchrec.main(sys.argv[3:]))
"""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("step", "RuntimeError: the weights are on fire"),
        ("ends", "RuntimeError: the loader ended after 5 of 30 steps"),
    ],
)
def test_a_failing_rank_ends_the_job(data, tmp_path, how, message):
    result = torchrun(*_command(data, tmp_path, how), timeout=800)
    assert message in result.stderr
    before = result.stderr[: result.stderr.index(message)]
    assert "Connection" not in before, "an error that follows from the first one"
    _check(tmp_path, result, message)


def test_a_killed_rank_ends_the_job_on_another_machine_too(data, tmp_path):
    results = two_machines(*_command(data, tmp_path, "killed"))
    (result,) = [result for result in results if "SIGKILL" in result.stderr]
    _check(tmp_path, result, "Signal 9 (SIGKILL) received")
    assert all(result.returncode for result in results)


def _command(data: Path, path: Path, how: str) -> list[str]:
    script = path / "failing.py"
    script.write_text(SCRIPT)
    (path / "pids").mkdir()
    flags = [f"--binary_path={data}", "--batch_size=16", f"--save_checkpoint_path={path / 'c'}"]
    return [str(script), how, str(path / "pids"), *MODEL, *flags]


def _check(path: Path, result: subprocess.CompletedProcess[str], message: str) -> None:
    assert result.returncode != 0
    report = result.stderr.partition("Root Cause (first observed failure)")[2]
    assert "rank      : 1 (" in report
    assert message in report
    assert not (path / "c").exists()
    pids = [file.read_text() for file in (path / "pids").iterdir()]
    assert len(pids) == 2
    assert not any(Path("/proc", pid).exists() for pid in pids), "no rank is left behind"
