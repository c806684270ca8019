"""The AUROC of a single column; that of scores is compared with scikit-learn's in tests/dlrm."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from nvt_torchrec.base.auroc import auroc, column_auroc

RNG = np.random.default_rng(7)
LABELS = (RNG.random(4000) < 0.3).astype(np.float32)


def test_a_column_that_gives_the_label_away():
    assert column_auroc(pa.array(np.where(LABELS > 0, "b", "a")), LABELS) == 1
    filled = pa.array([f"12:{i % 60}" if label else None for i, label in enumerate(LABELS)])
    assert column_auroc(filled, LABELS) == 1, "filled exactly where the label is 1"


def test_values_that_occur_once_tell_nothing():
    assert column_auroc(pa.array(range(4000)), LABELS) == 0.5
    assert column_auroc(pa.array(RNG.integers(0, 500, 4000)), LABELS) == pytest.approx(
        0.5, abs=0.04
    )


def test_it_is_that_of_the_rates_by_which_labels_were_drawn():
    values = RNG.integers(0, 20, 40_000)
    rates = RNG.random(20)
    labels = (RNG.random(40_000) < rates[values]).astype(np.float32)
    expected = auroc(rates[values], labels)
    assert column_auroc(pa.array(values), labels) == pytest.approx(expected, abs=0.005)


def test_lists_of_one_value_are_as_values_and_more_values_are_averaged():
    values = pa.array(RNG.integers(0, 9, 4000) * (1 + LABELS.astype(int)))
    rows = np.arange(4000)
    alone = column_auroc(values, LABELS)
    assert 0.6 < alone == column_auroc(values, LABELS, rows)
    constant = pa.concat_arrays([values, pa.array(np.full(4000, 99))])
    assert column_auroc(constant, LABELS, np.append(rows, rows)) == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize("labels", [np.ones(100), np.zeros(0), np.array([1.0])])
def test_one_label_has_no_auroc(labels: np.ndarray):
    assert column_auroc(pa.array(range(len(labels))), labels) is None
