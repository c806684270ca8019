"""Over 1,000 days without a shift, the share that is flagged stays below the stated rate."""

from __future__ import annotations

import pytest

from benchmarks.drift.__main__ import exceeds_a_threshold, main
from benchmarks.drift.simulation import CHANCE_ALONE, draws
from nvt_torchrec.etl.drift.thresholds import ColumnThresholds, Thresholds

DRAWS = 1000


@pytest.mark.parametrize(("rows", "seed"), [(150, 1), (2000, 2)])
def test_days_without_a_shift(rows: int, seed: int):
    """With the thresholds, and with the limits of chance alone, which hold in days of any size."""
    flagged = {"thresholds": 0, "chance": 0}
    for draw in draws(DRAWS, 50_000, rows, seed):
        if draw.drift(CHANCE_ALONE).flags:  # others are not flagged with thresholds either
            flagged["chance"] += 1
            flagged["thresholds"] += bool(draw.drift(Thresholds()).flags)
    stated = Thresholds().false_alarm_rate
    assert flagged["thresholds"] <= stated * DRAWS
    assert flagged["chance"] <= stated * DRAWS


def test_thresholds_without_limits_of_chance_would_flag_many_days():
    """So the test above can fail: without these limits small days exceed the thresholds."""
    exceeding = [
        exceeds_a_threshold(draw.drift(Thresholds())) for draw in draws(100, 50_000, 150, 1)
    ]
    assert sum(exceeding) > 50


def test_a_larger_rate_is_a_larger_share():
    """The error rate is used, not only stated."""
    by_chance = Thresholds(
        ColumnThresholds(0.0, 0.0, 0.0),
        label_rate=0.0,
        malformed_share=0.0,
        false_alarm_rate=0.3,
    )
    flagged = sum(bool(draw.drift(by_chance).flags) for draw in draws(300, 50_000, 2000, 3))
    assert 0.03 < flagged / 300 < 0.3


def test_the_command_prints_the_shares(capsys: pytest.CaptureFixture[str]):
    assert main(["--draws", "50", "--rows", "300", "--train_rows", "20000"]) == 0
    assert "stated rate: 1.00%" in capsys.readouterr().out
