"""What the load test of the server makes of hey's answers."""

from __future__ import annotations

import pytest

from benchmarks.serve.__main__ import summarize, table

HEAD = "response-time,DNS+dialup,DNS,Request-write,Response-delay,Response-read,status-code,offset"


def lines(*answers: tuple[float, int, float]) -> str:
    rows = [f"{took},0,0,0,{took},0,{status},{begun}" for took, status, begun in answers]
    return "\n".join([HEAD, *rows]) + "\n"


def test_scores_refusals_and_errors_are_told_apart() -> None:
    first = lines((0.1, 200, 0.0), (0.3, 200, 0.5), (0.01, 503, 1.0))
    second = lines((0.2, 200, 1.8), (0.01, 500, 1.0))
    load = summarize([first, second], 64, "2x overload", sent=8)
    assert load.errors == 4  # one with 500, three without an answer
    assert load.offered_per_s == pytest.approx(8 / 2.0)
    assert load.scored_per_s == pytest.approx(3 / 2.0)
    assert load.shed_per_s == pytest.approx(1 / 2.0)
    assert load.p50_ms == pytest.approx(200)
    assert 200 < load.p99_ms <= 300
    alone = summarize([first], 64, "1 client")
    assert alone.errors == 0
    assert alone.offered_per_s == pytest.approx(3 / 1.01)
    head, overload, single = table([load, alone]).splitlines()
    assert head.split()[:3] == ["rows", "load", "offered/s"]
    assert overload.split()[-1] == "4"
    assert single.split()[-1] == "0"
