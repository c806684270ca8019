"""A run goes on from the training of its best trial, as if it had trained that again."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest

from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.training.launch.distributed import process_group
from nvt_torchrec.training.loop import kept_training, selection
from nvt_torchrec.training.loop.train import train
from nvt_torchrec.training.loop.trainer import Trainer
from nvt_torchrec.training.settings.train_settings import parse_settings
from tests.plays import SHARE, write_plays
from tests.ranks import run_ranks
from tests.training.runs import assert_same, events, written_to

#: Fields of events that are times, or memory, or differ because a trial has no directory.
_NOT_COMPARED = ("seconds", "train_seconds", "eta_s", "data_wait", "memory_bytes", "checkpoint")
_NOT_COMPARED += ("samples_per_s", "samples_per_s_per_rank")


@pytest.fixture(scope="module")
def plays(tmp_path_factory):
    path = tmp_path_factory.mktemp("plays")
    return write_plays(path, SHARE, rows=2_000, users=60, items=40, crossed=1.5)


def _flags(data: Path, path: Path) -> list[str]:
    flags = [f"--binary_path={data}", "--no-boosted_trees", *written_to(path)]
    return [*flags, f"--checkpoint_dir={path / 'steps'}"]


def train_kept_and_again(data: Path, path: Path, is_regularized: bool) -> None:
    """Train where the best trial, with L2 or without, is kept, and where it is too large."""
    try_out = Trainer.try_out

    def prefer(trainer, start):
        """Return metrics whose loss is lower with L2, or without."""
        metrics = try_out(trainer, start)
        if metrics is None or bool(trainer.settings.embedding_l2) == is_regularized:
            return metrics
        [(name, found)] = metrics.items()
        return {name: dataclasses.replace(found, log_loss=found.log_loss + 1)}

    for name, num_bytes in ("kept", kept_training._MAX_KEPT_BYTES), ("again", 0):
        with (
            mock.patch.object(Trainer, "try_out", prefer),
            mock.patch.object(kept_training, "_MAX_KEPT_BYTES", num_bytes),
            mock.patch.multiple(selection, _EPOCHS=2, _LONG_EPOCHS=3, _MAX_L2_TRIALS=1),
            process_group() as group,
        ):
            train(parse_settings(_flags(data, path / name)), group)


def _read_training(path: Path) -> dict:
    """Return the training record of a run's model, without the names of its directories."""
    training = CheckpointRecord.read(path / "final").training
    return {**training, "settings": _leave_out_paths(training["settings"])}


def _leave_out_paths(settings: dict) -> dict:
    return {name: value for name, value in settings.items() if "/" not in str(value)}


def _read_events(path: Path, kind: str) -> list[dict]:
    found = events(path / "log", kind)
    for event in found:
        for name in _NOT_COMPARED:
            event.pop(name, None)
    return found


@pytest.mark.parametrize(("ranks", "is_regularized"), [(1, True), (1, False), (2, True)])
def test_the_best_trial_is_the_training(plays, tmp_path, ranks, is_regularized):
    """Weights and record are those of a second training, bit by bit, and the log has its steps."""
    if ranks == 1:
        train_kept_and_again(plays, tmp_path, is_regularized)
    else:
        run_ranks(ranks, train_kept_and_again, plays, tmp_path, is_regularized)
    kept, again = tmp_path / "kept", tmp_path / "again"
    assert_same(kept / "final", again / "final")
    assert _read_training(kept) == _read_training(again)
    for kind in ("train", "baseline", "importance", "end"):
        assert _read_events(kept, kind) == _read_events(again, kind), kind
    # A trial with L2 is only evaluated after an epoch, to save time.
    evaluations = _read_events(kept, "evaluation")
    others = _read_events(again, "evaluation")
    assert all(event in others for event in evaluations)
    assert is_regularized or evaluations == others
    assert (kept / "log" / "training.html").exists()
    # One checkpoint to resume from, and it is that of the model.
    [state] = (kept / "steps").glob("step_*")
    assert CheckpointRecord.read(state).training["finished"]
    shutil.rmtree(kept / "final")
    with process_group() as group:
        result = train(parse_settings([*_flags(plays, kept), "--resume"]), group)
    assert result.status == "continued"
    if ranks == 1:  # on another number of ranks --batch_size is another one
        assert_same(kept / "final", again / "final")


def test_a_profiled_run_trains_its_steps(plays, tmp_path):
    """A trial is not profiled, so the best is trained again."""
    flags = [*_flags(plays, tmp_path), "--profile", "--benchmark_warmup_steps=2"]
    with (
        mock.patch.object(selection, "_MAX_L2_TRIALS", 0),
        process_group() as group,
    ):
        train(parse_settings(flags), group)
    assert json.loads((tmp_path / "log" / "settings.json").read_text())["profile"]
    assert (tmp_path / "log" / "profile.txt").exists()
