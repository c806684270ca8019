"""PSI and G against their definitions, SciPy and draws; and the measures of a day."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from nvt_torchrec.workflows.drift import (
    LEAST_EXPECTED,
    Counted,
    Measure,
    Thresholds,
    compare,
    differ,
    population_stability,
)


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


def day(rows: int, *, positives: int | None = None, whole: bool = True, missing: int = 0):
    cells = np.array([rows // 2, rows - rows // 2])
    return Counted({"a": cells}, {"a": (missing, rows)}, {}, [(positives, rows)], (0, rows), whole)


def days(*counts: tuple[int, int]) -> Counted:
    rows = sum(rows for _, rows in counts)
    return Counted({"a": np.array([rows // 2] * 2)}, {"a": (0, rows)}, {}, list(counts), (0, rows))


def measure(name: str, now: Counted, then: Counted, **thresholds: float) -> Measure | None:
    found = compare(now, then, Thresholds(**thresholds))
    return next((one for one in found if one.name == name), None)


BEFORE = days((300, 10_000), (400, 12_000), (280, 9_000))


@pytest.mark.parametrize(
    ("rows", "change", "flagged"),
    [
        (9_000, 0.0, False),
        (11_000, 0.0, False),
        (12_100, 100 / (31_000 / 3), False),
        (6_500, -2_500 / (31_000 / 3), False),
        (4_500, -4_500 / (31_000 / 3), True),
        (24_000, 12_000 / (31_000 / 3), True),
    ],
)
def test_rows_are_compared_with_the_range_of_the_days(rows: int, change: float, flagged: bool):
    found = measure("rows", day(rows), BEFORE)
    assert found.change == pytest.approx(change)
    assert found.flagged == flagged
    assert (found.now, found.then) == ([rows], [10_000, 12_000, 9_000])


def test_few_rows_differ_by_chance():
    """8 rows instead of 14 are less than a third below, and of no meaning."""
    few, many = days((1, 14), (1, 14)), days((1, 14_000), (1, 14_000))
    assert not measure("rows", day(8), few).flagged
    assert measure("rows", day(8), few).change < -0.3
    assert measure("rows", day(8_000), many).flagged


def test_rows_of_parts_of_days_are_not_compared():
    assert measure("rows", day(100, whole=False), BEFORE) is None
    assert measure("rows", day(100), dataclasses.replace(BEFORE, whole=False)) is None
    assert measure("rows", day(100), days((1, 14_000))) is None  # perhaps a log of many days


@pytest.mark.parametrize(("positives", "flagged"), [(300, False), (350, False), (500, True)])
def test_label_rates_are_compared_with_the_range_of_the_days(positives: int, flagged: bool):
    found = measure("label rate", day(10_000, positives=positives), BEFORE)
    assert found.flagged == flagged
    assert found.change == pytest.approx(max(0, positives / 10_000 - 400 / 12_000) / (980 / 31_000))
    assert measure("label rate", day(10_000), BEFORE) is None


def test_without_a_limit_nothing_is_flagged():
    gone = day(10_000, missing=10_000)
    assert measure("missing rate", gone, BEFORE).flagged
    found = measure("missing rate", gone, BEFORE, missing_rate=math.inf)
    assert (found.flagged, found.limit, found.change) == (False, None, 1.0)
