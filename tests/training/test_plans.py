"""The loss curve is the same under every plan, and that of a DLRM in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.training.settings.train_settings import parse_settings
from tests.training.continuing import RATES, SHARDINGS, flags
from tests.training.reference import reference_losses
from tests.training.runs import losses, train_here, train_many

EPOCHS = 7  # of 30 steps: more than 200
CHANGED = 168  # the first step at the other rate
FLAGS = ["--first_order=0.5", "--seed=5", "--change_lr", "--lr_change_point=0.8"]
FLAGS += ["--throughput_check_freq_within_epoch=1"]
SHORT = ["--max_steps=20", "--lr_change_point=1"]
#: This one takes all steps, and the others 20 at one rate.
LONG = [("rowwise_adagrad", "row_wise")]
CASES = [
    (optimizer, sharding)
    for optimizer in ("adagrad", "rowwise_adagrad")
    for sharding in SHARDINGS
    if (optimizer, sharding) != ("rowwise_adagrad", "column_wise")  # a moment per column shard
]
CASES.append(("sgd", "row_wise"))


def _flags(data: Path, optimizer: str, *more: str) -> list[str]:
    changed = f"--lr_after_change_point={RATES[optimizer] / 2}"
    return flags(data, optimizer, f"--epochs={EPOCHS}", changed, *FLAGS, *more)


@pytest.fixture(scope="module")
def references(data) -> dict[str, list[float]]:
    def losses_at(optimizer: str, value: float) -> list[float]:
        given = _flags(data, optimizer)
        settings = parse_settings(given)
        assert (settings.table_optimizer, settings.seed) == (optimizer, 5)
        return reference_losses(
            data, *given, rate=lambda step: value / 2 if step >= CHANGED else value
        )

    return {optimizer: losses_at(optimizer, value) for optimizer, value in RATES.items()}


@pytest.mark.parametrize("optimizer", RATES)
def test_one_rank(data, references, tmp_path, optimizer):
    train_here(*_flags(data, optimizer), f"--log_path={tmp_path}")
    expected = references[optimizer]
    assert len(expected) > 200
    # it learns, though it starts from a regression on the same rows
    assert np.mean(expected[-30:]) < np.mean(expected[:30]) - 0.005
    np.testing.assert_allclose(losses(tmp_path), expected, rtol=0, atol=1e-5)


def _compare(references: dict[str, list[float]], logs: dict[tuple[str, str], Path]) -> None:
    for case, log in logs.items():
        expected = references[case[0]][: None if case in LONG else 20]
        np.testing.assert_allclose(losses(log), expected, rtol=0, atol=1e-5, err_msg=str(case))


def test_every_plan(data, references, tmp_path):
    logs = {(name, sharding): tmp_path / name / sharding for name, sharding in CASES}
    runs = []
    for case, log in logs.items():
        more = [f"--sharding={case[1]}", "--batch_size=16", f"--log_path={log}"]
        runs.append(_flags(data, case[0], *more, *(() if case in LONG else SHORT)))
    train_many(runs, 2)
    _compare(references, logs)


def test_a_plan_of_two_kinds(data, references, tmp_path):
    """On four ranks; of t_cat_3's three rows no rank would get its share, so it stays whole."""
    logs = {(name, "mixed"): tmp_path / name for name in ("sgd", "rowwise_adagrad")}
    more = ["--sharding=row_wise", "--batch_size=8", *SHORT]
    runs = [_flags(data, name, *more, f"--log_path={log}") for (name, _), log in logs.items()]
    train_many(runs, 4)
    _compare(references, logs)
