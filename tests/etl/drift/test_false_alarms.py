"""Over 1,000 days without a shift, the share that is flagged stays below the stated rate."""

from __future__ import annotations

import dataclasses

import pytest

from nvt_torchrec.etl.day_drift import Counted, compare
from nvt_torchrec.etl.settings import Thresholds
from tests.etl.drift.simulation import draws

DRAWS = 1000
#: No threshold: all that is flagged is beyond chance.
CHANCE_ALONE = Thresholds(
    psi=0.0, missing_rate=0.0, unseen_share=0.0, label_rate=0.0, row_count=0.0, malformed_share=0.0
)


def is_flagged(days: tuple[Counted, Counted], thresholds: Thresholds) -> bool:
    return any(measure.flagged for measure in compare(*days, thresholds))


@pytest.mark.parametrize(("rows", "seed"), [(150, 1), (2000, 2)])
def test_days_without_a_shift(rows: int, seed: int):
    """With the thresholds, and with the limits of chance alone, which hold in days of any size."""
    flagged = {"thresholds": 0, "chance": 0}
    for days in draws(DRAWS, 50_000, rows, seed):
        if is_flagged(days, CHANCE_ALONE):  # others are not flagged with thresholds either
            flagged["chance"] += 1
            flagged["thresholds"] += is_flagged(days, Thresholds())
    stated = Thresholds().false_alarm_rate
    assert flagged["thresholds"] <= stated * DRAWS
    assert flagged["chance"] <= stated * DRAWS


def test_a_larger_rate_is_a_larger_share():
    """The error rate is used, not only stated."""
    by_chance = dataclasses.replace(CHANCE_ALONE, false_alarm_rate=0.3)
    flagged = sum(is_flagged(days, by_chance) for days in draws(300, 50_000, 2000, 3))
    assert 0.03 < flagged / 300 < 0.3
