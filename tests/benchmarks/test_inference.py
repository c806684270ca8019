"""What the load test of the server makes of its answers."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from benchmarks.inference import BenchmarkSettings, _load

SETTINGS = BenchmarkSettings(bundle=Path("bundle"), input="day_0", seconds=0.2)


def test_scores_and_refusals_are_told_apart() -> None:
    statuses = itertools.cycle([200, 200, 503])

    def send() -> int:
        time.sleep(0.01)
        return next(statuses)

    figures = _load(send, 1, SETTINGS, 64).output
    assert figures["rows_per_s"] == pytest.approx(64 * figures["requests_per_s"])
    assert 0 < figures["refused_per_s"] < figures["requests_per_s"]
    assert 10 <= figures["p50_ms"] <= figures["p99_ms"]


def test_other_answers_and_lost_requests_are_failures() -> None:
    def lose() -> int:
        raise ConnectionResetError("reset")

    assert _load(lambda: 500, 2, SETTINGS, 1).error == "answers with status [500]"
    assert "a request was not answered: ConnectionResetError" in _load(lose, 2, SETTINGS, 1).error
