"""Regularization that a run on a small log chooses on valid."""

from __future__ import annotations

import logging
import re
import shutil
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("losses", "tried", "chosen"),
    [
        # two that are worse
        ([0.4, 0.5, 0.7, 0.65], [False, True, 0.015, 0.045], {"batch_norm": False}),
        # one that is worse, and the next one even more
        ([0.5, 0.4, 0.7, 0.75], [False, True, 0.015, 0.045], {"batch_norm": True}),
        (
            [0.5, 0.45, 0.46, 0.4, 0.42],
            [False, True, 0.015, 0.045, 0.135],
            {"embedding_l2": 0.045, "epochs": 15},
        ),
        # by less than two nats over 1,000 rows
        ([0.4, 0.399, 0.3985, 0.4], [False, True, 0.015, 0.045], {"batch_norm": False}),
    ],
)
def test_what_is_tried_and_chosen(monkeypatch, losses, tried, chosen):
    """L2 is raised while the loss falls; a gain that may be chance is none."""
    given, left = [], iter(losses)

    class Untrained:
        def __init__(self, settings, config, group, keeps_log):
            assert not keeps_log
            assert settings.checkpoint_dir is settings.save_checkpoint_path is None
            given.append(settings.embedding_l2 or settings.batch_norm)

        def try_out(self, start):
            counts = SimpleNamespace(log_loss=next(left), effective_counts=(400, 600))
            return {"label": counts}

    monkeypatch.setattr(selection, "Trainer", Untrained)
    monkeypatch.setattr(selection, "compute_baselines", lambda *arguments: ("start", {}))
    for name in ("choose_sizes", "choose_order"):
        monkeypatch.setattr(selection.choices, name, lambda settings, *rest: settings)
    monkeypatch.setattr(selection.choices, "choose_days", lambda *_: SimpleNamespace(files=None))
    monkeypatch.setattr(selection, "model_config", lambda *arguments: None)
    monkeypatch.setattr(selection, "choose_sharding", lambda settings, *rest: settings)
    flags = [DATA, "--batch_size=64", "--checkpoint_dir=steps", "--save_checkpoint_path=final"]
    settings = parse_settings(flags)
    with process_group() as group:
        found, baselines = selection.choose_regularization(settings, settings, None, group)
    assert given == tried
    assert baselines == ("start", {})
    assert {name: getattr(found, name) for name in chosen} == chosen
    assert found.batch_size == (256 if "embedding_l2" in chosen else 64)
    assert (found.checkpoint_dir, found.save_checkpoint_path) == ("steps", "final")


@pytest.mark.parametrize("regularized", [True, False])
def test_a_run_takes_what_is_best_on_valid(tmp_path, monkeypatch, caplog, regularized):
    """A checkpoint has what was chosen, and trials leave nothing.

    A run that resumes has the same, and one that has finished is not repeated.
    """
    data = write_plays(tmp_path, SHARE, rows=6_000, users=60, items=40, crossed=1.5)
    flags = [f"--binary_path={data}", "--no-boosted_trees", *written_to(tmp_path)]
    flags += [f"--checkpoint_dir={tmp_path / 'steps'}"]
    settings = parse_settings(flags)
    measured = selection._sum_losses

    def prefer(metrics):
        """Return a loss that is lower with L2, or without; L2 follows two trials without."""
        loss, rows = measured(metrics)
        calls.append(loss)
        return (loss if (len(calls) > 2) == regularized else loss + 1), rows

    calls = []
    monkeypatch.setattr(selection, "_sum_losses", prefer)
    monkeypatch.setattr(selection, "_EPOCHS", 6)
    monkeypatch.setattr(selection, "_MOST_L2_TRIALS", 2)
    caplog.set_level(logging.INFO)
    with process_group() as group:
        result = train(settings, group)
    trials = re.findall(r"trial (.*): log loss of valid ([\d.]+)", caplog.text)
    assert [name for name, _ in trials[:2]] == ["--no-batch_norm", "--batch_norm"]
    assert trials[2][0] == "--embedding_l2 0.015 --batch_norm"
    best = re.search(r"chosen on valid: (.*)\n", caplog.text)[1]
    lowest = min(float(loss) for _, loss in trials)
    assert float(dict(trials)[best]) <= lowest + 2 / 500  # of 600 rows of valid
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
