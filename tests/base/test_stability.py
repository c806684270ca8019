"""PSI and G against their definitions, SciPy's distributions, and draws of one distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from nvt_torchrec.base.stability import (
    LEAST_EXPECTED,
    chi_squared_limit,
    differ,
    likelihood_ratio,
    population_stability,
)


def test_psi_is_its_definition():
    then, now = np.array([500, 300, 200]), np.array([200, 120, 80])
    assert population_stability(then, now, 0.01).psi == pytest.approx(0)
    now = np.array([100, 120, 180])
    p, q = now / 400, then / 1000
    found = population_stability(then, now, 0.01)
    assert found.psi == pytest.approx(sum((a - b) * math.log(a / b) for a, b in zip(p, q)))  # noqa: B905
    assert found.cells == 3
    assert found.expected == pytest.approx(2 * (1 / 1000 + 1 / 400))
    assert found.limit == pytest.approx(stats.chi2.isf(0.005, 2) * (1 / 1000 + 1 / 400))


def test_cells_with_too_few_rows_are_merged():
    then = np.array([990, 5, 5, 0, 1000])
    found = population_stability(then, np.array([990, 5, 5, 0, 1000]), 0.01)
    assert found.cells == 2  # 990; 5 + 5 + 0 + 1000
    assert population_stability(then, np.array([10, 0, 0, 0, 10]), 0.01).cells == 1
    # the last cell is merged with the one before it
    assert population_stability(np.array([1000, 1000, 1]), np.array([60, 60, 80]), 0.01).cells == 2


@pytest.mark.parametrize("rows", [0, 1, LEAST_EXPECTED, 2 * LEAST_EXPECTED, 1000])
@pytest.mark.parametrize("cells", [1, 2, 11])
def test_any_number_of_rows_gives_finite_numbers(rows: int, cells: int):
    rng = np.random.default_rng(rows)
    then = rng.multinomial(10 * rows, np.full(cells, 1 / cells))
    for now in (
        rng.multinomial(rows, np.full(cells, 1 / cells)),
        np.eye(cells, dtype=int)[0] * rows,
    ):
        found = population_stability(then, now, 0.01)
        assert math.isfinite(found.psi)
        assert found.psi >= -1e-12
        assert found.limit > 0
        if found.cells < 2:
            assert (found.psi, found.limit) == (0, math.inf)


def test_an_empty_cell_is_finite():
    found = population_stability(np.array([500, 500]), np.array([100, 0]), 0.01)
    assert found.psi > 1


@pytest.mark.parametrize(("m", "n"), [(5000, 300), (300, 5000), (2000, 2000)])
def test_psi_without_a_shift_is_as_large_as_stated(m: int, n: int):
    rng = np.random.default_rng(m)
    shares = np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.07])
    draws = 4000
    found = [
        population_stability(then, now, 0.05)
        for then, now in zip(
            rng.multinomial(m, shares, draws), rng.multinomial(n, shares, draws), strict=True
        )
    ]
    psi = np.array([one.psi for one in found])
    expected = np.mean([one.expected for one in found])
    assert psi.mean() == pytest.approx(expected, rel=0.1)
    exceeding = np.mean([one.psi > one.limit for one in found])
    assert 0.015 < exceeding < 0.05  # about half: the limit allows for a heavier tail


def test_g_is_that_of_scipy():
    for now, then in (((30, 100), (900, 5000)), ((0, 50), (10, 5000)), ((5, 5), (1, 2))):
        table = [[now[0], now[1] - now[0]], [then[0], then[1] - then[0]]]
        expected = stats.chi2_contingency(table, correction=False, lambda_="log-likelihood")
        assert likelihood_ratio(now, then) == pytest.approx(expected.statistic)
        assert differ(now, then, 0.01) == (expected.pvalue < 0.01)


def test_shares_that_cannot_be_compared_do_not_differ():
    assert not differ((0, 0), (5, 10), 0.01)
    assert not differ((5, 10), (0, 0), 0.01)
    assert not differ((0, 10), (0, 10), 0.5)
    assert not differ((10, 10), (10, 10), 0.5)


@pytest.mark.parametrize("rate", [0.0005, 0.01, 0.3, 0.999])
def test_shares_of_one_distribution_differ_with_the_error_rate(rate: float):
    rng = np.random.default_rng(1)
    draws = 5000
    pairs = zip(rng.binomial(400, rate, draws), rng.binomial(4000, rate, draws), strict=True)
    differing = sum(differ((int(a), 400), (int(b), 4000), 0.01) for a, b in pairs)
    assert differing / draws < 0.02


def test_limits_are_those_of_scipy():
    for freedom in (1, 9):
        for rate in (0.05, 1e-4, 1e-6):
            assert chi_squared_limit(freedom, rate) == pytest.approx(stats.chi2.isf(rate, freedom))
