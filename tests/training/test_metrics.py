from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from nvt_torchrec.base.auroc import auroc
from nvt_torchrec.models.metrics import compute_metrics

pairs = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), min_size=1, max_size=60)


@given(pairs)
def test_auroc_equals_scikit_learn_also_with_ties(pairs):
    scores, labels = np.array(pairs).T
    if len(set(labels)) < 2:
        assert auroc(scores, labels) is None
    else:
        assert auroc(scores, labels) == pytest.approx(
            sklearn.roc_auc_score(labels, scores), abs=1e-12
        )


def test_extreme_logits_do_not_overflow():
    metrics = compute_metrics(np.array([1e4, -1e4, 1e4]), np.array([1.0, 0.0, 0.0]))
    assert metrics.log_loss == pytest.approx(1e4 / 3)
    assert metrics.auroc == 0.75


def test_no_samples_and_one_class():
    assert compute_metrics(np.zeros(0), np.zeros(0)).to_dict() == {
        "samples": 0,
        "positives": 0,
        "auroc": None,
        "log_loss": None,
        "normalized_entropy": None,
        "accuracy": None,
        "positive_rate": None,
        "mean_prediction": None,
        "calibration": None,
    }
    assert compute_metrics(*np.zeros((2, 0)), groups=np.zeros(0, int)).gauc_samples == 0
    metrics = compute_metrics(np.array([0.5, -0.5]), np.array([1.0, 1.0]))
    assert (metrics.auroc, metrics.normalized_entropy, metrics.accuracy) == (None, None, 0.5)
    metrics = compute_metrics(np.array([0.5, -0.5]), np.array([0.0, 0.0]))
    assert (metrics.calibration, metrics.positives) == (None, 0)


def test_the_calibration_curve_is_of_tenths_by_rising_prediction():
    rng = np.random.default_rng(3)
    logits, labels = rng.normal(size=1000), rng.integers(0, 2, 1000)
    p = 1 / (1 + np.exp(-logits))
    tenths = np.array_split(np.argsort(p), 10)
    expected = [(p[rows].mean(), labels[rows].mean()) for rows in tenths]
    curve = compute_metrics(logits, labels).calibration_curve
    np.testing.assert_allclose(curve, expected, rtol=1e-9)
    weights = rng.integers(0, 3, 1000)
    totals = np.array([weights[rows].sum() for rows in tenths])
    weighted = compute_metrics(logits, labels, weights).calibration_curve
    assert totals @ np.array(weighted)[:, 1] == pytest.approx(weights @ labels)
    assert compute_metrics(np.zeros(4), np.array([0, 1, 1, 1])).calibration_curve == ((0.5, 0.75),)


weighted = st.lists(
    st.tuples(st.integers(-3, 3), st.integers(0, 1), st.sampled_from([0.0, 0.3, 1.0, 7.5])),
    max_size=40,
)


@given(weighted)
def test_weighted_metrics_equal_brute_force(rows):
    """Over all pairs; and for whole weights, as if each row were there so often."""
    scores, labels, weights = np.array(rows, np.float64).reshape(-1, 3).T
    metrics = compute_metrics(scores, labels, weights)
    total = weights.sum()
    if not len(rows):
        assert metrics == compute_metrics(scores, labels)
        return
    assert (metrics.samples, metrics.positives) == (len(rows), labels.sum())
    assert metrics.total_weight == pytest.approx(total)
    won = possible = 0.0
    for score, label, weight in rows:
        for other, its_label, its_weight in rows:
            if label > its_label:
                won += weight * its_weight * ((score > other) + (score == other) / 2)
                possible += weight * its_weight
    assert metrics.auroc == (pytest.approx(won / possible, abs=1e-12) if possible else None)
    if not total:
        assert metrics.log_loss is metrics.accuracy is metrics.mean_prediction is None
        return
    p = 1 / (1 + np.exp(-scores))
    losses = -np.log(np.where(labels == 1, p, 1 - p))
    rate = (weights * labels).sum() / total
    assert metrics.log_loss == pytest.approx((weights * losses).sum() / total, abs=1e-12)
    assert metrics.positive_rate == pytest.approx(rate)
    assert metrics.mean_prediction == pytest.approx((weights * p).sum() / total)
    right = (scores >= 0) == (labels == 1)
    assert metrics.accuracy == pytest.approx((weights * right).sum() / total)
    if 0 < (weights * labels).sum() < total:
        base = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
        assert metrics.normalized_entropy == pytest.approx(metrics.log_loss / base, abs=1e-9)
        assert metrics.calibration == pytest.approx(metrics.mean_prediction / rate)
    else:
        assert metrics.normalized_entropy is None


def test_metrics_without_weights_say_nothing_of_them():
    assert "total_weight" not in compute_metrics(np.ones(3), np.ones(3)).to_dict()
    same = compute_metrics(np.arange(5.0), np.arange(5) % 2, np.full(5, 0.5)).to_dict()
    assert same.pop("total_weight") == 2.5
    assert same == pytest.approx(compute_metrics(np.arange(5.0), np.arange(5) % 2).to_dict())
