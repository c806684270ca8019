"""Regularization that a run on a small log chooses on valid."""

from __future__ import annotations

import logging
import re
import shutil

import pytest

from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.training.launch.distributed import process_group
from nvt_torchrec.training.loop import selection
from nvt_torchrec.training.loop.selection import is_open
from nvt_torchrec.training.loop.train import train
from nvt_torchrec.training.settings.train_settings import parse_settings
from tests.plays import SHARE, write_plays
from tests.training.runs import written_to

DATA = "--binary_path=/nowhere"


@pytest.mark.parametrize(
    "flag",
    ["--embedding_l2=0", "--epochs=2", "--adagrad", "--optimizer=sgd", "--model=my:own"]
    + ["--batch_size=64", "--size=small", "--learning_rate=0.1", "--no-batch_norm"],
)
def test_who_gives_a_flag_has_chosen(flag):
    assert is_open(parse_settings([DATA, "--seed=3", "--embedding_dim=8"]))
    assert not is_open(parse_settings([DATA, flag]))


class _Losses:
    """The losses of trials that are not trained."""

    def __init__(self, regression: float, losses: dict[object, float]) -> None:
        self.regression_loss, self._losses, self.tried = regression, losses, []
        self.best, self.baselines = None, None

    def compute_baselines(self, settings) -> None:
        pass

    def try_out(self, chosen) -> float:
        name = chosen.get("embedding_l2", chosen["batch_norm"])
        self.tried.append(name)
        loss = self._losses[name]
        if self.best is None or loss < self.best[0]:
            self.best = loss, chosen
        return loss

    def fill(self, chosen):
        return chosen


@pytest.mark.parametrize(
    ("losses", "tried", "chosen"),
    [
        (
            {0.015: 0.7, 0.045: 0.65, True: 0.5, False: 0.4},
            [0.015, 0.045, True, False],
            {"batch_norm": False},
        ),
        (
            {0.015: 0.7, 0.045: 0.75, True: 0.5, False: 0.6},
            [0.015, 0.045, True, False],
            {"batch_norm": True},
        ),
        (
            {0.015: 0.65, 0.045: 0.4, 0.135: 0.45, True: 0.45},
            [0.015, 0.045, 0.135, True],
            {"embedding_l2": 0.045, "epochs": 15},
        ),
        (
            {0.015: 0.5, 0.045: 0.51, True: 0.45, False: 0.47},
            [0.015, 0.045, True, False],
            {"batch_norm": True},
        ),
    ],
)
def test_strengths_are_raised_while_the_loss_falls(monkeypatch, losses, tried, chosen):
    search = _Losses(0.6, losses)
    monkeypatch.setattr(selection, "_Search", lambda *arguments: search)
    settings = parse_settings([DATA, "--batch_size=64"])
    group = type("Rank", (), {"rank": 0})()
    found, _ = selection.choose_regularization(settings, settings, None, group)
    assert search.tried == tried
    assert {name: found[name] for name in chosen} == chosen
    assert found.get("batch_size", 64) == (256 if "embedding_l2" in chosen else 64)


@pytest.mark.parametrize("regularized", [True, False])
def test_a_run_takes_what_is_best_on_valid(tmp_path, monkeypatch, caplog, regularized):
    """A checkpoint has what was chosen, and trials leave nothing.

    A run that resumes has the same, and one that has finished is not repeated.
    """
    data = write_plays(tmp_path, SHARE, rows=6_000, users=60, items=40, crossed=1.5)
    flags = [f"--binary_path={data}", "--no-boosted_trees", *written_to(tmp_path)]
    flags += [f"--checkpoint_dir={tmp_path / 'steps'}"]
    settings = parse_settings(flags)
    measured = selection._loss_of

    def prefer(metrics):
        """Return a loss that is lower with L2, or without; the trials are in this order."""
        loss = measured(metrics)
        calls.append(loss)
        is_l2 = 1 < len(calls) <= 3
        return loss if is_l2 == regularized else loss + 1

    calls = []
    monkeypatch.setattr(selection, "_loss_of", prefer)
    monkeypatch.setattr(selection, "_EPOCHS", 6)
    monkeypatch.setattr(selection, "_MOST_L2_TRIALS", 2)
    caplog.set_level(logging.INFO)
    with process_group() as group:
        result = train(settings, group)
    trials = re.findall(r"trial (.*): log loss of valid ([\d.]+)", caplog.text)
    assert len(trials) == len(calls) - 1
    assert trials[0][0] == "--embedding_l2 0.015 --batch_norm"
    best = min(trials, key=lambda trial: float(trial[1]))[0]
    assert f"chosen on valid: {best}\n" in caplog.text
    assert ("--embedding_l2" in best) == regularized
    then = CheckpointRecord.read(tmp_path / "final").training["settings"]
    if regularized:
        strength = float(re.search(r"--embedding_l2 ([\d.]+)", best)[1])
        assert (then["embedding_l2"], then["optimizer"], then["epochs"]) == (strength, "adam", 6)
        assert then["sharding"] == "data_parallel"
    else:
        assert (then["embedding_l2"], then["optimizer"]) == (None, "adagrad")
        assert then["batch_norm"] is ("--no-batch_norm" not in best)
    assert result.metrics["test"]["auroc"] > 0.7
    with process_group() as group:
        assert train(settings, group).status == "already done"
    shutil.rmtree(tmp_path / "final")
    caplog.clear()
    with process_group() as group:
        again = train(parse_settings([*flags, "--resume"]), group)
    assert "trial" not in caplog.text
    assert again.metrics["test"]["log_loss"] == result.metrics["test"]["log_loss"]
