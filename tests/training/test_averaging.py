"""The moving average of a run's weights, which is evaluated and kept."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.training.loop import trainer
from nvt_torchrec.training.loop.averaging import Averaging
from tests.training.runs import (
    assert_same,
    early_flags,
    events,
    train_here,
    train_many,
    train_until_pulled,
    weights,
)

ON = SimpleNamespace(average_weights=True)


def _set_weights(module: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for weight in module.parameters():
            weight.fill_(value)


@pytest.mark.parametrize(("epoch_steps", "every", "window"), [(4, 1, 4), (20, 1, 20), (50, 3, 16)])
def test_the_average_is_that_of_an_epoch(epoch_steps, every, window):
    """The mean of the weights up to an epoch; then each new one takes a share of its window."""
    module = torch.nn.Linear(2, 1)
    average = Averaging(SimpleNamespace(model=module), epoch_steps, ON)
    average.apply()
    assert average.state is None  # before the first step there is none
    expected, samples = 0.0, 0
    for step in range(1, 2 * epoch_steps + 1):
        _set_weights(module, step)
        average.note_step(step)
        if step % every == 0:
            samples += 1
            expected += (step - expected) / min(samples, window)
    assert average.samples == samples
    with average.applied():
        assert module.bias.item() == pytest.approx(expected)
    assert module.bias.item() == 2 * epoch_steps
    average.finish()
    average.restore()
    assert module.bias.item() == pytest.approx(expected)


def test_nothing_is_kept_without_the_flag():
    run, off = SimpleNamespace(model=torch.nn.Linear(2, 1)), SimpleNamespace(average_weights=None)
    average = Averaging(run, 4, off)
    average.note_step(1)
    assert (average.state, average.samples) == (None, 0)


def _read_losses(path: Path) -> list[float]:
    """Return the log losses of valid."""
    return [e["log_loss"] for e in events(path / "log", "evaluation") if e["split"] == "valid"]


def test_a_run_resumes_bitwise_with_its_average(data, tmp_path, monkeypatch):
    """From a step between two evaluations, and from one in the middle of which it ended."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    more = ["--average_weights", "--epochs=4"]
    result = train_here(*early_flags(data, whole), *more)
    train_here(*early_flags(data, tmp_path / "plain"), "--epochs=4")
    averaged, plain = _read_losses(whole), _read_losses(tmp_path / "plain")
    assert averaged[0] == plain[0]  # before the first step
    assert averaged[1:] != plain[1:]
    flags = [*early_flags(data, broken), *more]
    train_until_pulled(monkeypatch, 25, *flags)
    calls = iter(range(10**9))
    evaluate = trainer.evaluate

    def terminate_and_evaluate(*args):
        if next(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "evaluate", terminate_and_evaluate)
        with pytest.raises(SystemExit):
            train_here(*flags, "--resume")
    [newest] = (broken / "steps" / "latest").read_text().split()
    assert CheckpointRecord.read(broken / "steps" / newest).training["averaged"] > 1
    assert train_here(*flags, "--resume").metrics == result.metrics
    assert_same(whole / "final", broken / "final")
    settings = CheckpointRecord.read(whole / "final").training["settings"]
    assert settings["average_weights"]


def test_the_average_is_the_same_on_two_ranks(data, tmp_path):
    flags = ["--average_weights", "--epochs=2", "--early_stopping=0"]
    train_here(*early_flags(data, tmp_path / "one"), *flags)
    train_many([[*early_flags(data, tmp_path / "two", batch_size=16), *flags]], ranks=2)
    expected, found = (weights(tmp_path / name / "final") for name in ("one", "two"))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-4)
