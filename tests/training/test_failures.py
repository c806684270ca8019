"""A rank that fails, in any way, ends the job: no rank waits for it, and its error is on top."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.training.runs import MODEL, torchrun, two_machines


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("fails", "RuntimeError: the weights are on fire"),
        ("ends", "RuntimeError: generator raised StopIteration"),
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
    flags = [f"--binary_path={data}", "--batch_size=16", f"--save_checkpoint_path={path / 'c'}"]
    return ["tests/training/disturbed.py", how, "5", str(path / "places"), *MODEL, *flags]


def _check(path: Path, result: subprocess.CompletedProcess[str], message: str) -> None:
    assert result.returncode != 0
    report = result.stderr.partition("Root Cause (first observed failure)")[2]
    assert "rank      : 1 (" in report
    assert message in report
    assert not (path / "c").exists()
    pids = [file.read_text().split()[0] for file in (path / "places").iterdir()]
    assert len(pids) == 2
    while any(Path("/proc", pid).exists() for pid in pids):
        time.sleep(0.01)  # no rank is left behind: one that has ended may still be listed
