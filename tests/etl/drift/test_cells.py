"""PSI and G against their definitions and SciPy; buckets by frequency."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from nvt_torchrec.etl import drift_cells as drift
from nvt_torchrec.etl.drift_cells import (
    ABSENT,
    BUCKETS,
    LEAST_COUNT,
    LEAST_EXPECTED,
    REST,
    Buckets,
    differ,
    population_stability,
)

FIRST = 3


def test_psi_is_its_definition():
    then, now = np.array([500, 300, 200]), np.array([200, 120, 80])
    assert population_stability(then, now, 0.01)[0] == pytest.approx(0)
    now = np.array([100, 120, 180])
    p, q = now / 400, then / 1000
    psi, limit = population_stability(then, now, 0.01)
    assert psi == pytest.approx(sum((a - b) * math.log(a / b) for a, b in zip(p, q)))  # noqa: B905
    assert limit == pytest.approx(stats.chi2.isf(0.005, 2) * (1 / 1000 + 1 / 400))


@pytest.mark.parametrize("rows", [0, 1, LEAST_EXPECTED, 2 * LEAST_EXPECTED, 1000])
@pytest.mark.parametrize("cells", [1, 2, 11])
def test_any_number_of_rows_gives_finite_numbers(rows: int, cells: int):
    rng = np.random.default_rng(rows)
    then = rng.multinomial(10 * rows, np.full(cells, 1 / cells))
    for now in (
        rng.multinomial(rows, np.full(cells, 1 / cells)),
        np.eye(cells, dtype=int)[0] * rows,
    ):
        psi, limit = population_stability(then, now, 0.01)
        assert math.isfinite(psi)
        assert psi >= -1e-12
        assert limit > 0
        if math.isinf(limit):
            assert psi == 0


def test_an_empty_cell_is_finite():
    assert population_stability(np.array([500, 500]), np.array([100, 0]), 0.01)[0] > 1


def test_g_is_that_of_scipy():
    for now, then in (((30, 100), (900, 5000)), ((0, 50), (10, 5000)), ((5, 5), (1, 2))):
        table = [[now[0], now[1] - now[0]], [then[0], then[1] - then[0]]]
        expected = stats.chi2_contingency(table, correction=False, lambda_="log-likelihood")
        assert differ(now, then, expected.pvalue * 1.001)
        assert not differ(now, then, expected.pvalue * 0.999)


def test_shares_that_cannot_be_compared_do_not_differ():
    assert not differ((0, 0), (5, 10), 0.01)
    assert not differ((5, 10), (0, 0), 0.01)
    assert not differ((0, 10), (0, 10), 0.5)
    assert not differ((10, 10), (10, 10), 0.5)


def make(counts: np.ndarray, unseen: int = 0) -> Buckets:
    return Buckets.make(counts, FIRST, unseen)


def bucket_of(buckets: Buckets, ids: np.ndarray) -> np.ndarray:
    return buckets.of_ids[np.minimum(ids, len(buckets.of_ids) - 1)]


def count_of(buckets: Buckets, now: np.ndarray) -> np.ndarray:
    """Add up how often each id occurred by bucket."""
    found = bucket_of(buckets, np.arange(len(now)))
    return np.bincount(found, now, BUCKETS + 2)[: BUCKETS + 1].astype(np.int64)


def random_counts(seed: int, values: int = 3000) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.maximum(rng.zipf(1.3, values) % 10**6, 1)


@pytest.mark.parametrize("seed", range(5))
def test_the_most_frequent_values_are_in_the_first_buckets(seed: int):
    counts = random_counts(seed)
    np.random.default_rng(seed).shuffle(counts)  # as in a workflow that was extended
    made = make(counts, unseen=1000)
    of_ids = bucket_of(made, np.arange(FIRST + len(counts)))
    assert set(of_ids[:2]) == {ABSENT}
    assert of_ids[2] == REST
    order = np.argsort(-counts)
    head = of_ids[FIRST:][order]
    frequent = counts[order] > 4 * LEAST_COUNT
    assert set(head[frequent]) <= set(range(BUCKETS))
    assert set(head[counts[order] < LEAST_COUNT]) <= {REST}
    # the order is that of one half of the occurrences, so neighbours may be exchanged
    mean = [
        counts[of_ids[FIRST:] == b].mean() for b in range(BUCKETS) if (of_ids[FIRST:] == b).any()
    ]
    assert mean == sorted(mean, reverse=True)


def test_sums_are_those_of_each_id():
    counts = random_counts(7)
    made = make(counts, 10)
    ids = np.random.default_rng(1).integers(0, FIRST + len(counts), 10_000).astype(np.int32)
    found, of_ids = made.count(ids), bucket_of(made, ids)
    assert found.tolist() == [int((of_ids == b).sum()) for b in range(BUCKETS + 1)]


def test_shares_are_not_biased_by_the_choice_of_frequent_values():
    """Values of one frequency: the highest counts are high by chance."""
    rng = np.random.default_rng(5)
    counts = rng.multinomial(60_000, np.full(2000, 1 / 2000))  # 30 each
    made = make(counts)
    today = np.concatenate(
        [np.zeros(FIRST, np.int64), rng.multinomial(10**7, np.full(2000, 1 / 2000))]
    )
    now = count_of(made, today) / 10**7
    then = made.counts / made.counts.sum()
    noise = np.sqrt(then / made.counts.sum())
    assert (np.abs(then - now) < 4.5 * noise)[then > 0].all()
    # the naive way: the same order, and shares by the same counts
    order = np.argsort(-counts)
    naive = counts[order[:200]].sum() / counts.sum()
    assert naive > today[FIRST:][order[:200]].sum() / 10**7 * 1.2


def test_the_number_of_values_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drift, "MOST_VALUES", 100)
    counts = np.arange(1000, 2000)
    made = make(counts)
    in_head = bucket_of(made, np.arange(FIRST, FIRST + 1000)) < REST
    assert in_head.sum() == 100
    assert in_head[-20:].all()
    assert not in_head[:500].any()
    assert made.counts.sum() == pytest.approx(counts.sum() / 2, rel=0.01)


@pytest.mark.parametrize("counts", [[], [1], [1, 1, 1], [10**12]])
def test_odd_vocabularies(counts: list[int]):
    made = make(np.array(counts, np.int64), unseen=5)
    assert made.of_ids[-1] == REST
    assert made.counts.sum() <= sum(counts) + 5
    assert count_of(made, np.ones(FIRST + len(counts))).sum() == 1 + len(counts)
