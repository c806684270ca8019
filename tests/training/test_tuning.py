"""Settings that ``--tune`` finds on valid."""

from __future__ import annotations

import logging
import re

import pytest

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.training.launch.distributed import process_group
from nvt_torchrec.training.loop import tuning
from nvt_torchrec.training.loop.train import train
from nvt_torchrec.training.settings.train_settings import parse_settings
from tests.plays import SHARE, write_plays
from tests.training.runs import written_to


@pytest.fixture(scope="module")
def plays(tmp_path_factory):
    path = tmp_path_factory.mktemp("plays")
    return write_plays(path, SHARE, rows=2_000, users=60, items=40, crossed=1.5)


def _tune(flags, caplog):
    """Train with ``--tune``; return the result, and by the log each trial's flags and loss."""
    caplog.set_level(logging.INFO)
    caplog.clear()
    with process_group() as group:
        result = train(parse_settings(flags), group)
    trials = re.findall(r"trial (.*): log loss of valid ([\d.]+)", caplog.text)
    return result, {flags: float(loss) for flags, loss in trials}


def test_the_command_that_is_logged_repeats_the_best(plays, tmp_path, monkeypatch, caplog):
    """Three trials, as the time has passed by then; the second run is given their best."""
    monkeypatch.setattr(tuning, "_EPOCHS", (3, 15))
    clock = iter(range(100))
    monkeypatch.setattr(tuning, "time", type("Clock", (), {"monotonic": lambda: next(clock)}))
    data = [f"--binary_path={plays}", "--no-boosted_trees"]
    flags = [*data, "--tune=2s", *written_to(tmp_path / "tuned")]
    result, trials = _tune(flags, caplog)
    assert len(trials) == 3
    best = re.search(r"the best settings, log loss of valid ([\d.]+): (.*)\n", caplog.text)
    assert trials[best[2]] == pytest.approx(float(best[1]))
    assert result.metrics["valid"]["log_loss"] == pytest.approx(float(best[1]), abs=2e-5)
    again, trials = _tune([*data, *best[2].split(), *written_to(tmp_path / "again")], caplog)
    assert not trials
    assert again.metrics == result.metrics


def test_what_is_given_is_not_searched(plays, tmp_path, caplog):
    fixed = ["--model=deepfm", "--embedding_dim=8", "--batch_norm", "--learning_rate=0.02"]
    flags = [f"--binary_path={plays}", "--no-boosted_trees", "--tune=1s", "--dropout=0"]
    result, trials = _tune([*flags, *fixed, *written_to(tmp_path)], caplog)
    assert {re.sub(r"[\d,]+", "N", each) for each in trials} == {
        "--model deepfm --over_arch_layer_sizes N"
    }
    then = CheckpointRecord.read(result.checkpoint).training["settings"]
    assert (then["model"], then["embedding_dim"], then["learning_rate"]) == ("deepfm", 8, 0.02)
    assert (then["batch_norm"], then["optimizer"]) == (True, "adagrad")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--tune=20", "--tune 20: not a duration"),
        ("--tune=1h --model=a:b", "cannot search the settings of --model a:b"),
        ("--tune=1h --continue_from=x", "are both set"),
    ],
)
def test_what_cannot_be_tuned(flags, reason):
    with pytest.raises(SettingsError, match=reason):
        parse_settings(["--binary_path=/nowhere", *flags.split()])
