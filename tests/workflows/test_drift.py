"""PSI and G against their definitions and SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from nvt_torchrec.workflows.drift import LEAST_EXPECTED, differ, population_stability


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
