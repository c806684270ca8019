"""Weights of how often an id occurs, in the regression that a model starts from."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from nvt_torchrec.base.auroc import auroc
from nvt_torchrec.training.baselines.id_counts import IdCounts, add_count_weights
from nvt_torchrec.training.baselines.regression import Objective, fit_regression
from nvt_torchrec.training.baselines.row_sample import Column, RowSample

UNKNOWN, FIRST_ID, IDS = 2, 3, 1_500


def draw_rows(rng, count: int, *, by_frequency: bool) -> tuple[np.ndarray, np.ndarray]:
    """Draw ids, of which few are frequent, and labels: frequent ids are clicked, or any."""
    share = 1 / np.arange(1, IDS + 1)
    drawn = rng.choice(IDS, count, p=share / share.sum())
    effect = 0.7 * np.log(share[drawn] * 400) if by_frequency else np.zeros(count)
    labels = rng.random(count) < 1 / (1 + np.exp(-effect))
    return drawn, labels.astype(np.float32)


def make_samples(*, by_frequency: bool) -> list[RowSample]:
    """Return rows of train, valid and test; ids without a training row are unknown."""
    rng = np.random.default_rng(3)
    drawn = [draw_rows(rng, count, by_frequency=by_frequency) for count in (3_000, 4_000, 4_000)]
    known = np.isin(np.arange(IDS), drawn[0][0])
    samples = []
    for ids, labels in drawn:
        column = Column(np.where(known[ids], ids + FIRST_ID, UNKNOWN), None)
        dense = rng.normal(size=(len(ids), 1)).astype(np.float32)
        samples.append(RowSample(dense, [column], {"label": labels}, None))
    return samples


def test_rare_and_unknown_ids_get_weights_that_rows_of_the_same_rarity_have(caplog):
    train, valid, test = make_samples(by_frequency=True)
    without = fit_regression(train, "label")
    with caplog.at_level(logging.INFO):
        found = add_count_weights(without, train, valid, "label", (FIRST_ID + IDS,))
    assert "weights for the frequency of ids" in caplog.text
    assert found.log_loss(test, "label") < without.log_loss(test, "label") - 0.01
    labels = test.labels["label"]
    assert auroc(labels, found.logits(test)) > auroc(labels, without.logits(test)) + 0.01
    # An unknown id is as rare as one of a single row, which is seldom clicked.
    (weights,) = found.weights
    assert found.ids[0].tolist() == list(range(FIRST_ID + IDS))
    assert weights[UNKNOWN] < weights[FIRST_ID : FIRST_ID + 5].min() - 1


def test_an_own_row_does_not_count_in_training_and_the_merged_weights_are_the_sums():
    train, valid, _ = make_samples(by_frequency=True)
    counts = IdCounts.count(train, (FIRST_ID + IDS,))
    single = counts.rows[0][train.columns[0].ids] == 1
    inside = counts.add_columns(train, in_training=True)
    assert not inside.columns[1].ids[single].any()
    assert inside.columns[1].ids[~single].all()
    outside = counts.add_columns(valid, in_training=False)
    assert not outside.columns[1].ids[valid.columns[0].ids == UNKNOWN].any()
    edges = np.linspace(-2, 2, 9, dtype=np.float32)[None]
    objective = Objective(inside, "label", edges)
    start = counts.add_weights(fit_regression(train, "label", edges), objective)
    penalties = counts.insert_penalties(
        fit_regression(train, "label", edges), objective.estimate_penalties(start)
    )
    found = objective.solve(start, penalties)
    merged = counts.merge(found)
    assert len(merged.ids) == len(merged.weights) == len(merged.penalties) == 2
    assert merged.logits(valid) == pytest.approx(found.logits(outside), abs=1e-9)


def test_columns_whose_counts_say_nothing_stay_as_they_are():
    train, valid, _ = make_samples(by_frequency=False)
    without = fit_regression(train, "label")
    rest = "label", (FIRST_ID + IDS,)
    assert add_count_weights(without, train, valid, *rest) is without
    nothing = RowSample(valid.dense[:0], [Column(np.zeros(0, np.int64), None)], {}, None)
    assert add_count_weights(without, train, nothing, *rest) is without
    # Of few ids, none is rare.
    ids = Column(train.columns[0].ids % 50, None)
    few = RowSample(train.dense, [ids], train.labels, None)
    assert not IdCounts.count(few, (50,)).rows
