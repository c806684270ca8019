"""SIGTERM ends a run between two steps, with a checkpoint from which it goes on bit by bit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvt_torchrec.training.checkpoint.directories import list_complete
from nvt_torchrec.training.launch.preemption import EXIT_STATUS
from nvt_torchrec.training.loop import train_steps, trainer
from tests.training.runs import (
    MODEL,
    ROOT,
    STEPS,
    assert_same,
    environment,
    events,
    flags_of,
    resumed_step,
    train_here,
    train_many,
)
from tests.warm import warm_python

NEVER = "--checkpoint_freq=1000"
SCRIPT = str(ROOT / "tests" / "training" / "disturbed.py")


def _terminate_at(monkeypatch, what: str, number: int) -> None:
    """Send this process SIGTERM when the loop calls it for the ``number``th time."""
    calls = iter(range(1, 10**9))

    def call(*args, **kwargs):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    module = train_steps if what == "set_learning_rate" else trainer
    original = getattr(module, what)
    monkeypatch.setattr(module, what, call)


@pytest.mark.parametrize(
    ("what", "number", "step"),
    [
        ("set_learning_rate", 1, 1),
        ("evaluate", 2, 60),
        ("evaluate", 4, 90),  # of test
    ],
)
def test_alone(data, whole, tmp_path, monkeypatch, caplog, what, number, step):
    flags = flags_of(data, tmp_path, NEVER)
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        _terminate_at(patch, what, number)
        with pytest.raises(SystemExit) as ended:
            train_here(*flags)
    assert ended.value.code == EXIT_STATUS == 143
    assert f"SIGTERM: the run ends after step {step}; --resume continues" in caplog.text
    assert [path.name for path in list_complete(tmp_path / "steps")] == [f"step_{step:08}"]
    assert not (tmp_path / "final").exists()
    assert signal.getsignal(signal.SIGTERM) == before
    result = train_here(*flags, "--resume")
    assert result.steps == STEPS
    assert set(result.metrics) == {"valid", "test"}
    assert_same(tmp_path / "final", whole / "final")
    seen = {event["step"] for event in events(tmp_path / "log", "evaluation")}
    assert seen == {30, 60, 90}, "an evaluation that was cut short is made up for"


def test_without_a_directory_nothing_is_kept_and_a_warning_is_logged(
    data, tmp_path, monkeypatch, caplog
):
    _terminate_at(monkeypatch, "set_learning_rate", 5)
    flags = [f"--binary_path={data}", "--batch_size=32", "--epochs=1"]
    with pytest.raises(SystemExit) as ended:
        train_here(*flags, f"--save_checkpoint_path={tmp_path / 'final'}")
    assert ended.value.code == 143
    assert "ends after step 5; without --checkpoint_dir, nothing of it is kept" in caplog.text
    assert not list(tmp_path.iterdir())


def test_the_final_checkpoint_is_finished(data, whole, tmp_path, monkeypatch):
    """Nothing is left to go on with: the run ends as it would have without the signal."""

    def too_late(number, frame):
        raise AssertionError("nothing handles SIGTERM")

    before = signal.signal(signal.SIGTERM, too_late)
    try:
        for what in ("measure_importance", "save_checkpoint"):
            with monkeypatch.context() as patch:
                _terminate_at(patch, what, 1)
                result = train_here(*flags_of(data, tmp_path / what, NEVER))
            assert result.steps == STEPS
            assert_same(tmp_path / what / "final", whole / "final")
            assert events(tmp_path / what / "log", "end")
    finally:
        signal.signal(signal.SIGTERM, before)


class Job:
    """A run of two ranks by torchrun, which wait at step 20 for :meth:`terminate`."""

    def __init__(self, path: Path, *flags: str, launcher: tuple[str, ...] = ()) -> None:
        self.places = path / "places"
        run = [warm_python(), "-m", "torch.distributed.run", "--standalone", *launcher]
        run += ["--nproc-per-node=2"]
        self.process = subprocess.Popen(
            [*run, SCRIPT, "waits", "20", str(self.places), *MODEL, *flags],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )

    def terminate(self, *ranks: int, agent: bool = False) -> None:
        """Send SIGTERM to ranks, and to torchrun, when all ranks wait; then let these go on."""
        while True:
            texts = [path.read_text().split() for path in sorted(self.places.glob("*"))]
            if len(texts) == 2 and all(len(text) > 2 * 20 for text in texts):
                break
            assert self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.02)
        pids = [int(texts[rank][0]) for rank in ranks]
        for pid in [self.process.pid] * agent + pids:
            os.kill(pid, signal.SIGTERM)
        (self.places / "go").touch()

    def end(self) -> tuple[int, str]:
        """Exit status and stderr."""
        _, stderr = self.process.communicate(timeout=800)
        return self.process.returncode, stderr


@pytest.fixture
def start(tmp_path) -> Iterator:
    jobs = []

    def run(*args, **kwargs) -> Job:
        jobs.append(Job(tmp_path, *args, **kwargs))
        return jobs[-1]

    yield run
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.communicate()


@pytest.mark.timeout(1200)
def test_torchrun_is_told_and_a_later_job_resumes(data, two_ranks, tmp_path, start):
    """As a scheduler tells it: once to the agent, and here to each rank as well."""
    flags = flags_of(data, tmp_path, NEVER, batch_size=16)
    job = start(*flags)
    job.terminate(0, 1, agent=True)
    status, stderr = job.end()
    assert status != 0
    assert "SIGTERM: the run ends after step " in stderr
    assert "forcefully" not in stderr, "nothing had to be killed"
    (checkpoint,) = list_complete(tmp_path / "steps")
    train_many([[*flags, "--resume"]], 2)
    assert checkpoint.name == f"step_{resumed_step(tmp_path):08}"
    assert_same(tmp_path / "final", two_ranks / "same" / "final")


@pytest.mark.timeout(1200)
def test_one_rank_is_told_and_torchrun_restarts_all(data, two_ranks, tmp_path, start):
    flags = flags_of(data, tmp_path, NEVER, "--resume", batch_size=16)
    job = start(*flags, launcher=("--max-restarts=1",))
    job.terminate(1)
    status, stderr = job.end()
    assert status == 0, stderr
    assert resumed_step(tmp_path) > 20
    assert_same(tmp_path / "final", two_ranks / "same" / "final")
