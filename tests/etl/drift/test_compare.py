"""The measures of a day, and which of them are flagged."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from nvt_torchrec.etl.day_drift import Counted, compare
from nvt_torchrec.etl.drift_cells import Measure
from nvt_torchrec.etl.settings import Thresholds


def day(rows: int, *, positives: int | None = None, missing: int = 0) -> Counted:
    labels = [] if positives is None else [(positives, rows)]
    cells = np.array([rows // 2, rows - rows // 2])
    return Counted({"a": cells}, {"a": (missing, rows)}, {}, labels, [rows], (0, rows))


def days(*counts: tuple[int, int]) -> Counted:
    rows = [rows for _, rows in counts]
    cells = np.array([sum(rows) // 2] * 2)
    return Counted({"a": cells}, {"a": (0, sum(rows))}, {}, list(counts), rows, (0, sum(rows)))


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
    assert measure("rows", day(100), dataclasses.replace(BEFORE, rows=[])) is None
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
