"""Regularization that a run on a small log chooses on valid."""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
from types import SimpleNamespace

import pytest

from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.models.metrics import Metrics
from nvt_torchrec.training.launch.distributed import process_group
from nvt_torchrec.training.loop import selection, trials
from nvt_torchrec.training.loop.selection import is_open
from nvt_torchrec.training.loop.train import train
from nvt_torchrec.training.loop.trainer import Trainer
from nvt_torchrec.training.settings.train_settings import parse_settings
from tests.plays import SHARE, write_plays
from tests.training.runs import written_to

DATA = "--binary_path=/nowhere"
FIRST = (False, "wide")


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
        ([0.4, 0.6, 0.7, 0.65], [*FIRST, 0.015, 0.045], {"batch_norm": False}),
        # one that is worse, and the next one even more
        ([0.5, 0.4, 0.7, 0.75], [*FIRST, 0.015, 0.045], {"batch_norm": True}),
        # one that is worse than the regression
        ([0.5, 0.4, 0.85], [*FIRST, 0.015], {"batch_norm": True}),
        (
            [0.5, 0.45, 0.46, 0.4, 0.42, 0.3],
            [*FIRST, 0.015, 0.045, 0.135, "long"],
            {"embedding_l2": 0.045, "epochs": 15, "over_arch_layer_sizes": None},
        ),
        (
            [0.5, 0.4, 0.35, 0.36, 0.38],
            [*FIRST, 0.015, 0.045, "long"],
            {"embedding_l2": 0.015, "epochs": 7, "over_arch_layer_sizes": None},
        ),
        (
            [0.5, 0.3, 0.35, 0.36],
            [*FIRST, 0.015, 0.045],
            {"batch_norm": True, "over_arch_layer_sizes": (256, 128, 1)},
        ),
        # by less than two nats over 1,000 rows
        ([0.4, 0.3985, 0.3981, 0.4], [*FIRST, 0.015, 0.045], {"batch_norm": False}),
    ],
)
def test_what_is_tried_and_chosen(monkeypatch, losses, tried, chosen):
    """L2 is raised while the loss falls; a gain that may be chance is none."""
    given, left = [], iter(losses)

    class Untrained:
        def __init__(self, settings, config, group, keeps_log):
            assert not keeps_log
            assert settings.checkpoint_dir is settings.save_checkpoint_path is None
            is_wide = settings.over_arch_layer_sizes is not None
            tried = settings.embedding_l2 or ("wide" if is_wide else settings.batch_norm)
            given.append("long" if settings.epochs == 15 else tried)

        def try_out(self, start):
            """Return metrics of 1,000 rows with the next log loss."""
            found = Metrics(1000, 400, log_loss=next(left), effective_counts=(400, 600))
            return {"label": found}

    regression = Metrics(1000, 1000, log_loss=0.8)
    baselines = "start", {("valid", "logistic regression"): {"label": regression}}
    monkeypatch.setattr(trials, "Trainer", Untrained)
    monkeypatch.setattr(trials, "compute_baselines", lambda *arguments: baselines)
    for name in ("choose_sizes", "choose_order"):
        monkeypatch.setattr(trials.choices, name, lambda settings, *rest: settings)
    monkeypatch.setattr(trials, "choose_days", lambda *_: SimpleNamespace(files=None))
    monkeypatch.setattr(trials, "model_config", lambda *arguments: None)
    monkeypatch.setattr(trials, "choose_sharding", lambda settings, *rest: settings)
    monkeypatch.setattr(trials.KeptTraining, "keep", lambda trial: given[-1])
    flags = [DATA, "--batch_size=64", "--checkpoint_dir=steps", "--save_checkpoint_path=final"]
    settings = parse_settings(flags)
    with process_group() as group:
        found, known, training = selection.choose_regularization(settings, settings, None, group)
    assert given == tried
    assert known == baselines
    # The training that is kept is that of the settings that are chosen.
    kept = found.embedding_l2 or ("wide" if found.over_arch_layer_sizes else found.batch_norm)
    assert training == ("long" if found.epochs == 15 else kept)
    assert {name: getattr(found, name) for name in chosen} == chosen
    assert found.batch_size == (256 if "embedding_l2" in chosen else 64)
    assert (found.checkpoint_dir, found.save_checkpoint_path) == ("steps", "final")


@pytest.mark.parametrize("regularized", [True, False])
def test_a_run_takes_what_is_best_on_valid(tmp_path, monkeypatch, caplog, regularized):
    """A checkpoint has what was chosen, and trials leave nothing.

    A run that resumes has the same, and one that has finished is not repeated.
    """
    data = write_plays(tmp_path, SHARE, rows=4_000, users=60, items=40, crossed=1.5)
    flags = [f"--binary_path={data}", "--no-boosted_trees", *written_to(tmp_path)]
    flags += [f"--checkpoint_dir={tmp_path / 'steps'}"]
    settings = parse_settings(flags)
    try_out = Trainer.try_out

    def prefer(trainer, start):
        """Return metrics whose loss is lower with L2, or without."""
        metrics = try_out(trainer, start)
        if bool(trainer.settings.embedding_l2) == regularized:
            return metrics
        [(name, of_label)] = metrics.items()
        return {name: dataclasses.replace(of_label, log_loss=of_label.log_loss + 1)}

    monkeypatch.setattr(Trainer, "try_out", prefer)
    monkeypatch.setattr(selection, "_EPOCHS", 3)
    monkeypatch.setattr(selection, "_LONG_EPOCHS", 6)
    monkeypatch.setattr(selection, "_MAX_L2_TRIALS", 2)
    caplog.set_level(logging.INFO)
    with process_group() as group:
        result = train(settings, group)
    tried = re.findall(r"trial (.*): log loss of valid ([\d.]+)", caplog.text)
    wide = "--batch_norm --over_arch_layer_sizes 256,128,1"
    assert [name for name, _ in tried[:2]] == ["--no-batch_norm", wide]
    assert tried[2][0].startswith("--embedding_l2 0.015 ")
    best = re.search(r"chosen on valid: (.*)\n", caplog.text)[1]
    assert ("--embedding_l2" in best) == regularized
    assert result.metrics["valid"]["log_loss"] == pytest.approx(float(dict(tried)[best]), abs=2e-5)
    then = CheckpointRecord.read(tmp_path / "final").training["settings"]
    if regularized:
        strength = float(re.search(r"--embedding_l2 ([\d.]+)", best)[1])
        epochs = int(re.search(r"--epochs (\d)", best)[1])
        assert (then["embedding_l2"], then["optimizer"]) == (strength, "adam")
        assert then["epochs"] == epochs
        assert then["sharding"] == "data_parallel"
    else:
        assert (then["embedding_l2"], then["optimizer"]) == (None, "adagrad")
        assert then["batch_norm"] is ("--no-batch_norm" not in best)
    assert bool(then["average_weights"]) == ("--epochs 6" in best)
    assert result.metrics["test"]["auroc"] > 0.7
    with process_group() as group:
        assert train(settings, group).status == "already done"
    shutil.rmtree(tmp_path / "final")
    caplog.clear()
    with process_group() as group:
        again = train(parse_settings([*flags, "--resume"]), group)
    assert "trial" not in caplog.text
    assert again.metrics["test"]["log_loss"] == result.metrics["test"]["log_loss"]
    now = CheckpointRecord.read(tmp_path / "final").training["settings"]
    assert (then["test_batch_size"], now["test_batch_size"]) == (4096, 4096)
