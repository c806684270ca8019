"""Interrupted runs go on as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from clicklog.errors import BadInputError, OutputError, SchemaError, SettingsError
from dlrm import train as train_module
from dlrm.checkpoint import load_model, read_model_file
from dlrm.resume import finished
from tests.dlrm.runs import MODEL, events, losses, torchrun, train_here

FLAGS = ["--epochs=3", "--learning_rate=0.05", "--adagrad", "--shuffle_training_set"]
STEPS = 90  # 3 epochs of 30 steps of 32 rows


class PulledPlug(BaseException):
    pass


def _interrupt_at(monkeypatch, step: int) -> None:
    """Let training end abruptly before step ``step`` (from 0)."""
    calls = iter(range(10**9))

    def pull(optimizer, value):
        if next(calls) == step:
            raise PulledPlug
        original(optimizer, value)

    original = train_module.set_learning_rate
    monkeypatch.setattr(train_module, "set_learning_rate", pull)


def _train_until_pulled(monkeypatch, step: int, *flags: str) -> None:
    with monkeypatch.context() as patch:
        _interrupt_at(patch, step)
        with pytest.raises(PulledPlug):
            train_here(*flags)


def _weights(path: Path) -> dict[str, torch.Tensor]:
    model, _ = load_model(path)
    return model.state_dict()


def _assert_same(a: Path, b: Path) -> None:
    ours, theirs = _weights(a), _weights(b)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def _flags(data: Path, path: Path, batch_size: int = 32) -> list[str]:
    return [
        f"--binary_path={data}",
        f"--batch_size={batch_size}",
        f"--log_path={path / 'log'}",
        f"--save_checkpoint_path={path / 'final'}",
        f"--checkpoint_dir={path / 'steps'}",
        "--checkpoint_freq=7",
        *FLAGS,
    ]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    train_here(*_flags(data, path))
    return path


def test_the_newest_are_kept(whole):
    names = [path.name for path in finished(whole / "steps")]
    assert names == ["step_00000070", "step_00000077", "step_00000084"]
    assert (whole / "steps" / "latest").read_text() == "step_00000084\n"
    left = {path.name for path in (whole / "steps").iterdir()}
    assert left == {*names, "latest"}, "nothing half written or half removed"


@pytest.mark.parametrize("step", [8, 29, 30, 31, 61, 89])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(data, whole, tmp_path, monkeypatch, step):
    """Also over the end of an epoch, where the loader's state is the next one's beginning."""
    _train_until_pulled(monkeypatch, step, *_flags(data, tmp_path))
    result = train_here(*_flags(data, tmp_path), "--resume", "--validation_freq_within_epoch=11")
    (resumed,) = events(tmp_path / "log", "resume")
    assert resumed["step"] == step - step % 7
    assert result.steps == STEPS
    assert result.samples == 3 * 929
    _assert_same(tmp_path / "final", whole / "final")
    expected = losses(whole / "log")
    assert losses(tmp_path / "log")[-(STEPS - resumed["step"]) :] == expected[resumed["step"] :]


def test_interrupted_twice(data, whole, tmp_path, monkeypatch):
    for step in (20, 5):  # counted from where it resumes
        _train_until_pulled(monkeypatch, step, *_flags(data, tmp_path), "--resume")
    train_here(*_flags(data, tmp_path), "--resume")
    assert len(events(tmp_path / "log", "resume")) == 2
    _assert_same(tmp_path / "final", whole / "final")


KILLED = """
import os, signal, sys
import train_torchrec
from dlrm import resume, train

original = train.set_learning_rate
calls = iter(range(10**9))

def kill(optimizer, value):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and os.environ["RANK"] == "1" and next(calls) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    original(optimizer, value)

train.set_learning_rate = kill
sys.exit(train_torchrec.main(sys.argv[2:]))
"""


@pytest.mark.timeout(600)
def test_a_killed_rank_brings_the_job_back(data, whole, tmp_path):
    """Two ranks; on one of them SIGKILL. torchrun starts both again, and they go on."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    flags = [*MODEL, *_flags(data, tmp_path, batch_size=16), "--keep_checkpoints=20"]
    result = torchrun(str(script), "40", *flags, launcher=["--max-restarts=1"], timeout=400)
    assert result.returncode == 0, result.stderr
    (resumed,) = events(tmp_path / "log", "resume")
    assert 20 <= resumed["step"] <= 40
    np.testing.assert_allclose(
        losses(tmp_path / "log")[-STEPS + resumed["step"] :],
        losses(whole / "log")[resumed["step"] :],
        rtol=0,
        atol=1e-5,
    )
    # from two ranks to one: 50 and more losses as if nothing had happened
    for path in finished(tmp_path / "steps"):
        if int(path.name.removeprefix("step_")) > 30:
            shutil.rmtree(path)
    shutil.rmtree(tmp_path / "log")
    shutil.rmtree(tmp_path / "final")
    assert read_model_file(finished(tmp_path / "steps")[-1])["world_size"] == 2
    train_here(*_flags(data, tmp_path), "--resume")
    (resumed,) = events(tmp_path / "log", "resume")
    assert resumed["step"] == 28
    np.testing.assert_allclose(
        losses(tmp_path / "log"), losses(whole / "log")[28:], rtol=0, atol=1e-5
    )


@pytest.fixture
def started(data, whole, tmp_path) -> Path:
    """A run that has a checkpoint, and nothing after it."""
    shutil.copytree(whole / "steps", tmp_path / "steps")
    return tmp_path


def test_a_directory_with_a_run_is_not_taken_over_silently(data, started):
    with pytest.raises(OutputError, match=r"holds a run, up to step_00000084\n.*--resume"):
        train_here(*_flags(data, started))


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        (
            ["--embedding_dim=16", "--dense_arch_layer_sizes=16,16"],
            SchemaError,
            "embedding_dim was 8, is 16",
        ),
        (["--seed=3"], SettingsError, "seed was 0, is 3"),
        (["--eps=1e-6"], SettingsError, "eps was 1e-08, is 1e-06"),
        (["--batch_size=64"], SettingsError, "global_batch = 64, but 32"),
    ],
)
def test_another_run_is_refused_with_the_difference(data, started, flags, error, message):
    with pytest.raises(error, match=message):
        train_here(*_flags(data, started), "--resume", *flags)


def test_another_workflow_is_refused(data, started):
    (path,) = finished(started / "steps")[-1:]
    value = json.loads((path / "model.json").read_text())
    value["training"]["workflow_digest"] = "another"
    (path / "model.json").write_text(json.dumps(value))
    with pytest.raises(SchemaError, match="data of workflow another, these are of None"):
        train_here(*_flags(data, started), "--resume")


def test_half_written_checkpoints_are_never_resumed_from(data, started):
    newest = finished(started / "steps")[-1]
    newest.rename(newest.with_name(".step_00000084.tmp"))  # killed before the rename
    train_here(*_flags(data, started), "--resume")
    (resumed,) = events(started / "log", "resume")
    assert resumed["step"] == 77


def test_a_damaged_checkpoint_is_refused(data, started):
    newest = finished(started / "steps")[-1]
    (part,) = newest.glob("*.distcp")
    part.write_bytes(b"\0" * part.stat().st_size)
    with pytest.raises(BadInputError, match="step_00000084: the checkpoint is damaged"):
        train_here(*_flags(data, started), "--resume")


def test_a_full_disk_stops_training_and_keeps_what_was_written(data, started, monkeypatch):
    from dlrm import resume as resume_module

    def full(*args):
        raise OutputError("disk full", "free space")

    monkeypatch.setattr(resume_module, "save_checkpoint", full)
    for path in finished(started / "steps")[1:]:
        shutil.rmtree(path)
    with pytest.raises(OutputError, match="disk full"):
        train_here(*_flags(data, started), "--resume")
    assert [path.name for path in finished(started / "steps")] == ["step_00000070"]


def test_by_the_clock(data, tmp_path):
    flags = [f"--binary_path={data}", "--learning_rate=0.1", "--batch_size=32"]
    train_here(*flags, f"--checkpoint_dir={tmp_path}", "--checkpoint_minutes=0.00001")
    assert len(finished(tmp_path)) == 3


def test_mode_test_evaluates_a_checkpoint(data, whole, tmp_path):
    final = events(whole / "log", "evaluation")[-1]
    result = train_here(
        f"--binary_path={data}",
        "--mode=test",
        f"--load_checkpoint_path={whole / 'final'}",
        "--batch_size=64",
    )
    assert result.metrics["test"].samples == final["samples"]
    assert result.metrics["test"].auroc == final["auroc"]
    assert result.metrics["test"].log_loss == pytest.approx(final["log_loss"], abs=1e-7)


def test_starting_from_the_weights_of_another_run(data, whole, tmp_path):
    flags = [f"--binary_path={data}", "--learning_rate=0.05", "--batch_size=32"]
    fresh, warm = tmp_path / "fresh", tmp_path / "warm"
    train_here(*flags, f"--log_path={fresh}")
    train_here(*flags, f"--log_path={warm}", f"--load_checkpoint_path={whole / 'final'}")
    assert losses(warm)[0] < losses(fresh)[0] - 0.05
