from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from dlrm.metrics import auroc, compute_metrics

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


def test_metrics_equal_scikit_learn():
    rng = np.random.default_rng(0)
    logits = rng.normal(-1, 2, 10_000).astype(np.float32)
    labels = (rng.random(10_000) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    found = compute_metrics(logits, labels)
    log_loss = sklearn.log_loss(labels, probabilities)
    base = sklearn.log_loss(labels, np.full(10_000, labels.astype(np.float64).mean()))
    assert found.samples == 10_000
    assert found.auroc == pytest.approx(sklearn.roc_auc_score(labels, logits), abs=1e-12)
    assert found.log_loss == pytest.approx(log_loss, abs=1e-9)
    assert found.normalized_entropy == pytest.approx(log_loss / base, abs=1e-9)
    assert found.accuracy == sklearn.accuracy_score(labels, probabilities >= 0.5)
    assert found.positive_rate == pytest.approx(labels.mean())
    assert found.mean_prediction == pytest.approx(probabilities.mean(), abs=1e-9)


def test_extreme_logits_do_not_overflow():
    found = compute_metrics(np.array([1e4, -1e4, 1e4]), np.array([1.0, 0.0, 0.0]))
    assert found.log_loss == pytest.approx(1e4 / 3)
    assert found.auroc == 0.75


def test_no_samples_and_one_class():
    assert compute_metrics(np.zeros(0), np.zeros(0)).to_dict() == {
        "samples": 0,
        "auroc": None,
        "log_loss": None,
        "normalized_entropy": None,
        "accuracy": None,
        "positive_rate": None,
        "mean_prediction": None,
    }
    found = compute_metrics(np.array([0.5, -0.5]), np.array([1.0, 1.0]))
    assert (found.auroc, found.normalized_entropy, found.accuracy) == (None, None, 0.5)
