"""Checkpoints that cannot be used: neither written, nor resumed from, nor served.

Errors that say nothing against a checkpoint do neither call it damaged nor pass it over.
"""

from __future__ import annotations

import dataclasses
import errno
import re
import shutil
from pathlib import Path

import pytest
import torch

from nvt_torchrec.base.errors import BadInputError, ClickLogError, SettingsError
from nvt_torchrec.models.checkpoint.reading import read_model
from nvt_torchrec.models.checkpoint.record import CheckpointRecord, compute_digest
from nvt_torchrec.models.checkpoint.tensor_files import read_tensors
from nvt_torchrec.training.checkpoint import restoring
from nvt_torchrec.training.checkpoint.ancestor import remove_older
from nvt_torchrec.training.checkpoint.directories import list_complete
from nvt_torchrec.training.launch.distributed import process_group
from tests.mutations import flip_bit
from tests.training.runs import (
    MODEL,
    STEPS,
    assert_same,
    flags_of,
    resumed_step,
    torchrun,
    train_here,
)


def test_a_flipped_bit_is_noticed_and_the_checkpoint_before_taken(data, whole, started, caplog):
    """Of the optimizer's state, which no forward pass would miss."""
    newest = list_complete(started / "steps")[-1]
    (part,) = newest.glob("*.distcp")
    items = read_tensors(newest).items()
    chunk = next(tensor.chunks[0] for key, tensor in items if key.startswith("optimizer.tables"))
    flip_bit(part, chunk.begin + chunk.length - 70)
    _assert_resumes_from_the_one_before(
        data, whole, started, caplog, "0_0.distcp: not the file that was written"
    )


def test_keep_removes_checkpoints_of_the_row_alone(started):
    """Whatever ``continued_from`` names; a directory beside it was enough."""
    *_, before, last = list_complete(started / "steps")
    victim = before.with_name("webapp")

    def forge(path: Path, digest: str) -> None:
        record = CheckpointRecord.read(last)
        ancestor = {"checkpoint": str(path), "digest": digest, "optimizer_steps": 1, "epochs": 1.0}
        ancestor |= dict.fromkeys(("workflow_digest", "generation", "days"))
        training = {**record.training, "continued_from": ancestor}
        dataclasses.replace(record, training=training).write(last)
        remove_older(last, 1)

    victim.mkdir()
    for content in ("{}", (before / "model.json").read_text()):
        (victim / "model.json").write_text(content)
        forge(victim, compute_digest(before))
        assert victim.is_dir()
    forge(before, "0" * 128)
    (before / "mine.txt").touch()
    forge(before, compute_digest(before))
    assert before.is_dir()
    (before / "mine.txt").unlink()
    forge(before, compute_digest(before))
    assert not before.exists()


def _assert_resumes_from_the_one_before(data, whole, path, caplog, why: str) -> None:
    """Passes the newest over, says so, and ends as the run that was not interrupted."""
    train_here(*flags_of(data, path), "--resume")
    assert resumed_step(path) == 77
    (said,) = [
        record.message for record in caplog.records if "skipped, and renamed" in record.message
    ]
    assert "step_00000084" in said
    assert why in said
    assert_same(path / "final", whole / "final")
    names = {one.name for one in (path / "steps").iterdir()}
    steps = {"step_00000070", "step_00000077", "step_00000084"}
    assert names == {*steps, "step_00000084.unusable", "latest"}


def test_an_incomplete_checkpoint_is_passed_over(data, whole, started, caplog):
    file = list_complete(started / "steps")[-1] / "model.json"
    file.write_text(file.read_text()[:500])
    _assert_resumes_from_the_one_before(data, whole, started, caplog, "cannot be read")


@pytest.fixture
def newest_is_nan(data, started, monkeypatch) -> Path:
    """What a program left that wrote checkpoints without a look at their values."""
    shutil.rmtree(list_complete(started / "steps")[-1])
    diverging = ["--change_lr", "--lr_change_point=0.9", "--lr_after_change_point=1e38"]
    quiet = "--throughput_check_freq_within_epoch=1000"
    with monkeypatch.context() as patch:
        patch.setattr("nvt_torchrec.training.checkpoint.saving.find_not_finite", lambda state: "")
        with pytest.raises(SettingsError, match="the loss is nan"):
            train_here(*flags_of(data, started), "--resume", *diverging, quiet)
    shutil.rmtree(started / "log")
    assert list_complete(started / "steps")[-1].name == "step_00000084"
    return started


def test_a_checkpoint_with_nan_is_passed_over(data, whole, newest_is_nan, caplog):
    why = "holds values that are not finite: training had diverged"
    _assert_resumes_from_the_one_before(data, whole, newest_is_nan, caplog, why)


def test_weights_that_are_not_finite_are_refused(data, newest_is_nan):
    """By whatever scores rows with them, and by training that would start from them."""
    path = list_complete(newest_is_nan / "steps")[-1]
    with pytest.raises(
        BadInputError, match=r"(?s)step_00000084: .* not finite.*earlier checkpoint"
    ):
        read_model(path)
    for flags in (["--mode=test"], ["--epochs=1"]):
        with pytest.raises(BadInputError, match=r"step_00000084: .* not finite"):
            train_here(f"--binary_path={data}", f"--load_checkpoint_path={path}", *flags)


def test_no_usable_checkpoint_is_an_error_and_renames_none(data, newest_is_nan):
    started = newest_is_nan
    first, second, third = list_complete(started / "steps")
    (first / ".metadata").unlink()
    (second / "model.json").unlink()
    with pytest.raises(BadInputError, match=r"(?s)none of its 3 .*not finite.*no such.*missing"):
        train_here(*flags_of(data, started), "--resume")
    assert {first, second, third} <= set((started / "steps").iterdir())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_diverged_run_stops_and_keeps_its_finite_checkpoints(data, tmp_path, ranks):
    """No line of progress looks at the loss here; a lower learning rate goes on from there."""
    diverging = ["--change_lr", "--lr_change_point=0.5", "--lr_after_change_point=1e38"]
    quiet = ["--throughput_check_freq_within_epoch=1000", "--keep=2"]
    flags = flags_of(data, tmp_path, *quiet, "--checkpoint_freq=3", batch_size=32 // ranks)
    message = r"after step 48: training diverged, .*\n.*lower --learning_rate \(now 1e\+38\)"
    if ranks == 1:
        with pytest.raises(SettingsError, match=message):
            train_here(*flags, *diverging)
    else:
        result = torchrun("train_torchrec.py", *MODEL, *flags, *diverging, timeout=800)
        assert result.returncode == 1
        assert re.search(message, result.stderr), result.stderr
    kept = list_complete(tmp_path / "steps")
    assert [path.name for path in kept] == ["step_00000042", "step_00000045"]
    for path in kept:
        read_model(path)  # raises for what is not finite
    if ranks == 1:
        assert train_here(*flags, "--resume").steps == STEPS


def _no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _stale(file: Path, *arguments: object) -> bytes:
    if file.name == "schema.json":  # of the data
        return file.read_bytes()
    raise OSError(errno.ESTALE, "Stale file handle", str(file))


@pytest.mark.parametrize(
    ("where", "fails"),
    [
        ("nvt_torchrec.base.files.artifact._digest", _stale),
        ("nvt_torchrec.base.files.atomic.read_regular", _stale),
        ("nvt_torchrec.models.checkpoint.tensor_files.read_chunk", _no_memory),
    ],
)
def test_a_resume_renames_nothing(data, started, monkeypatch, where, fails):
    steps = started / "steps"
    before = sorted(path.name for path in steps.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(where, fails, raising=False)
        with pytest.raises(ClickLogError, match=r"cannot be read now.*(Stale|out of memory)") as e:
            train_here(*flags_of(data, started), "--resume")
    assert not isinstance(e.value, BadInputError)
    assert sorted(path.name for path in steps.iterdir()) == before


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.EIO, "Input/output error"), "cannot be read now: .*Input/output error"),
        (torch.OutOfMemoryError("CUDA out of memory"), "cannot be read now: CUDA out of memory"),
        (BadInputError("gone"), "gone"),
        (KeyError("epoch"), "KeyError: 'epoch'"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(tmp_path, monkeypatch, error, raised):
    """Else the others would wait for it until the launcher ends them."""

    def fail() -> None:
        raise error

    sent = []
    with process_group() as group, monkeypatch.context() as patch:
        patch.setattr(
            restoring, "gather_objects", lambda group, mine: sent.append(mine) or [mine, None]
        )
        with pytest.raises((ClickLogError, RuntimeError), match=raised):
            restoring.call_on_all_ranks(group, tmp_path, fail)
        patch.setattr(
            restoring, "gather_objects", lambda group, mine: [mine, *sent]
        )  # another rank's
        with pytest.raises(type(sent[0]), match=raised):
            restoring.call_on_all_ranks(group, tmp_path, lambda: None)
