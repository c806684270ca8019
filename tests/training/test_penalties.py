"""Penalties of the regression's ids and the number of trees, chosen on rows of valid."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from nvt_torchrec.training.baselines.baselines import Trees
from nvt_torchrec.training.baselines.penalties import choose_penalties
from nvt_torchrec.training.baselines.regression import Objective, fit_regression
from nvt_torchrec.training.baselines.row_sample import Column, RowSample

USERS, SEEN = 600, 300


def make_sample(rng, users: np.ndarray, *, with_past: bool = True) -> RowSample:
    """Draw rows of users; ``with_past``: a dense column says what the user did before.

    In training the id's weight says the same again, fitted to the very clicks of the row.
    """
    effects = np.random.default_rng(9).normal(0, 1.2, USERS)
    past = effects[users] + rng.normal(0, 0.3, len(users))
    labels = rng.random(len(users)) < 1 / (1 + np.exp(-effects[users]))
    dense = past[:, None] if with_past else np.zeros((len(users), 0))
    weights = np.ones(len(users), np.float32)
    label = labels.astype(np.float32)
    return RowSample(dense.astype(np.float32), [Column(users, None)], {"label": label}, weights)


def drop_non_clicks(sample: RowSample, rate: float, rng) -> RowSample:
    """Keep all clicks, and a share ``rate`` of the other rows."""
    kept = (sample.labels["label"] == 1) | (rng.random(len(sample)) < rate)
    ids = Column(sample.columns[0].ids[kept], None)
    label = {"label": sample.labels["label"][kept]}
    return RowSample(sample.dense[kept], [ids], label, sample.weights[kept])


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_ids_that_repeat_what_dense_columns_say_get_larger_penalties(rate, caplog):
    """Rows of valid have users that training never saw, as those of later days do."""
    rng = np.random.default_rng(0)
    train = drop_non_clicks(make_sample(rng, rng.integers(0, SEEN, 1_800)), rate, rng)
    offset = np.log(rate)
    valid, test = (make_sample(rng, rng.integers(0, USERS, 4_000)) for _ in range(2))
    objective = Objective(train, "label")
    start = fit_regression(train, "label")
    with caplog.at_level(logging.INFO):
        chosen = choose_penalties(objective, start, valid, "label", offset)
    assert chosen.penalties[0] > start.penalties[0]
    assert "penalties of ids raised" in caplog.text
    loss = chosen.shift(offset).log_loss(test, "label")
    assert loss < start.shift(offset).log_loss(test, "label") - 0.005
    assert chosen.dense[0] > start.dense[0]


def test_penalties_that_valid_does_not_want_stay():
    """Where all users are known, their weights are all that is known of them."""
    rng = np.random.default_rng(1)
    train, valid = (
        make_sample(rng, rng.integers(0, SEEN, 6_000), with_past=False) for _ in range(2)
    )
    start = fit_regression(train, "label")
    chosen = choose_penalties(Objective(train, "label"), start, valid, "label")
    assert chosen is start
    nothing = make_sample(rng, np.zeros(0, np.int64))
    assert choose_penalties(Objective(train, "label"), start, nothing, "label") is start


def test_valid_says_how_many_trees():
    """A log of noise and one weak column wants few; LightGBM's hundred would learn the noise."""
    pytest.importorskip("lightgbm")
    rng = np.random.default_rng(2)

    def sample(rows: int) -> RowSample:
        dense = rng.normal(size=(rows, 6)).astype(np.float32)
        labels = (rng.random(rows) < 1 / (1 + np.exp(-0.7 * dense[:, 0]))).astype(np.float32)
        return RowSample(dense, [], {"label": labels}, None)

    train, valid, test = sample(1_000), sample(1_000), sample(4_000)

    def log_loss(trees: Trees) -> float:
        logits = trees.logits(test)
        return float(np.mean(np.logaddexp(0, logits) - test.labels["label"] * logits))

    chosen, fixed = Trees(train, valid, "label"), Trees(train, sample(0), "label")
    assert log_loss(chosen) < log_loss(fixed) - 0.02
