"""The AUROC of a single column; tests of metrics compare that of scores with scikit-learn's."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvt_torchrec.base.auroc import auroc, column_auroc, grouped_auroc

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


grouped = st.lists(
    st.tuples(
        st.integers(-3, 3), st.integers(0, 1), st.integers(-1, 4), st.sampled_from([0.0, 0.5, 2.0])
    ),
    max_size=50,
)


@given(grouped, st.booleans())
def test_gauc_is_the_weighted_mean_of_the_groups(rows, weighted):
    scores, labels, groups, weights = np.array(rows, np.float64).reshape(-1, 4).T
    weights = weights if weighted else np.ones(len(rows))
    areas = {g: auroc(*(x[groups == g] for x in (scores, labels, weights))) for g in range(5)}
    totals = {g: weights[groups == g].sum() for g in areas if areas[g] is not None}
    mean, samples = grouped_auroc(
        scores, labels, groups.astype(np.int64), weights if weighted else None
    )
    assert samples == sum(np.count_nonzero(groups == g) for g in totals)
    if not totals:
        assert mean is None
        return
    expected = sum(areas[g] * total for g, total in totals.items()) / sum(totals.values())
    assert mean == pytest.approx(expected, abs=1e-12)
