"""``guess``, ``run`` and ``extend`` of a log with a time, as a newcomer calls them."""

from __future__ import annotations

import datetime
import json
import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvt_torchrec.etl.__main__ import main
from tests.etl.runs import etl_run, read_split

DAYS, ROWS = 20, 60


def _write_log(file: Path, first_day: int, days: int) -> Path:
    """Write a log of so many days of September, in the order of time."""
    rng = np.random.default_rng(first_day)
    count = days * ROWS
    seconds = np.sort(rng.integers(0, days * 86_400, count))
    begin = datetime.datetime(2026, 9, first_day)
    times = [str(begin + datetime.timedelta(seconds=second)) for second in seconds.tolist()]
    columns = {
        "time": times,
        "user_id": rng.integers(0, 50, count),
        "item_id": rng.integers(0, 30, count),
        "click": rng.integers(0, 5, count) // 4,
    }
    pd.DataFrame(columns).to_csv(file, index=False)
    return file


@pytest.mark.parametrize("flags", [[], ["--events"]], ids=["plain", "events"])
def test_the_next_day_is_test_as_the_spec_says(
    flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, output, spec = tmp_path / "raw" / "day_0.csv", tmp_path / "out", tmp_path / "spec.toml"
    log.parent.mkdir()
    _write_log(log, 1, DAYS)
    assert not main(["guess", str(log), "--output", str(spec), *flags])
    comment, _, split = spec.read_text().partition("[split]")
    assert "later days" in " ".join(comment.replace("#", "").split())
    assert 'test_from = "2026-09-19"' in split
    assert etl_run(log, output, "--spec", str(spec)) == 0
    before = {name: read_split(output, name) for name in ("train", "valid", "test")}

    day = _write_log(log.with_name("day_1.csv"), 1 + DAYS, 1)
    with caplog.at_level(logging.WARNING):
        assert not main(["extend", "--output_path", str(output), "--input_path", str(day)])
    assert "none of its rows is for training, because none is before 2026-09-17" in caplog.text
    for name in ("train", "valid"):
        pd.testing.assert_frame_equal(read_split(output, name), before[name])
    test = read_split(output, "test")
    assert len(test) == len(before["test"]) + ROWS
    counts = json.loads((output / "manifest.json").read_text())["by_day_and_split"]["1"]
    assert counts["test"]["rows"] == ROWS

    # as a run over both days with these cuts writes it
    whole = tmp_path / "whole"
    assert etl_run(log.parent, whole, "--spec", str(spec)) == 0
    keys = [name for name in test if name.endswith(".key")]  # numbered by each output for itself
    expected = read_split(whole, "test").drop(columns=keys)
    pd.testing.assert_frame_equal(test.drop(columns=keys), expected)
    assert main(["check", str(output)]) in (0, None)
