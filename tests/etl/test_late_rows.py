"""Rows whose time cannot be right: one ends no window, and keeps no morning from being added."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.base.errors import BadRowError
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings, ExtendSettings
from nvt_torchrec.etl.units.hours import find_late
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import HOUR
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.event_state import EventState
from tests.etl.event_logs import BY_DAYS, BY_TIME, DAY, Row, make_rows, parquet, spec_of, write
from tests.etl.findings import bad
from tests.etl.runs import QUARANTINE
from tests.etl.test_events import hashes_of

YEAR = 365 * DAY


@dataclasses.dataclass(frozen=True)
class Log:
    """Three days of a log, in files of their own, and a fourth one."""

    directory: Path
    spec: FeatureSpec
    rows: list[Row]

    def write(self, day: int, *more: Row) -> Path:
        """Write a day, with further rows at its end."""
        path = self.directory / f"day_{day}.csv"
        write(path, [*(row for row in self.rows if row.time // DAY == day), *more])
        return path

    def run(self, output: Path, *more: Row, **options) -> EventState:
        """Run over three days, the last one with further rows; return what is known then."""
        for day in range(3):
            path = self.write(day, *(more if day == 2 else ()))
        source = str(path.parent)
        run(EtlSettings(source, output, self.spec, engine="cpu", days={0, 1, 2}, **options))
        return state_of(output)


def state_of(output: Path) -> EventState:
    events = compiled.load(output / "workflow").events
    assert events is not None
    return events


def read_rows(output: Path) -> dict[str, np.ndarray]:
    """The rows of all splits in the order of the log; a day is halved by lines, bad ones too."""
    parts = [parquet(output, split) for split in ("train", "valid", "test")]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.fixture(params=[BY_DAYS, BY_TIME], ids=["days", "time"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Log:
    spec = spec_of(tmp_path, request.param, 'known = "1h"')
    (tmp_path / "log").mkdir()
    return Log(tmp_path / "log", spec, make_rows(600, 4, seed=3))


def test_a_row_a_year_ahead_leaves_windows_as_they_are(
    log: Log, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is reported with its line, and the next morning is added."""
    without = log.run(tmp_path / "without")
    late = dataclasses.replace(log.rows[0], time=2 * DAY + YEAR)
    lines = sum(row.time // DAY == 2 for row in log.rows) + 2  # after the header
    with caplog.at_level(logging.WARNING):
        known = log.run(tmp_path / "out", late)
    assert f"day_2.csv, line {lines}: the time 1971-01-03 00:00:00" in caplog.text
    assert known.as_of == without.as_of
    hashes = hashes_of(log.spec, log.rows)
    places = [j for j, c in enumerate(log.spec.aggregates) if c.aggregate.value != "rate"]
    values = known.compute_aggregates(hashes)[places]
    np.testing.assert_array_equal(values, without.compute_aggregates(hashes)[places])
    counts = [j for j, c in enumerate(log.spec.aggregates) if c.name == "user_count_12h"]
    assert known.compute_aggregates(hashes)[counts].max() > 3
    if log.spec.split.by == "days":
        extend(ExtendSettings(tmp_path / "out", str(log.write(3)), engine="cpu"))
        assert bad(tmp_path / "out") == []


def test_a_row_a_year_ahead_is_left_out_by_quarantine(log: Log, tmp_path: Path) -> None:
    """All else is as if it were not there: labels, values, splits."""
    without = log.run(tmp_path / "without")
    late = dataclasses.replace(log.rows[0], time=2 * DAY + YEAR)
    known = log.run(tmp_path / "out", late, **QUARANTINE)
    for name, values in read_rows(tmp_path / "without").items():
        np.testing.assert_array_equal(read_rows(tmp_path / "out")[name], values, err_msg=name)
    hashes = hashes_of(log.spec, log.rows)
    np.testing.assert_array_equal(
        known.compute_aggregates(hashes), without.compute_aggregates(hashes)
    )
    rejected = (tmp_path / "out/rejected/day_2.csv.tsv").read_text()
    assert "a row of 1971-01-03 00:00:00 is long after all other rows" in rejected
    assert late.text() in rejected


@pytest.mark.parametrize("seconds", [20, YEAR])
def test_a_row_that_is_older_than_yesterday_is_named_or_left_out(
    tmp_path: Path, seconds: int
) -> None:
    spec = spec_of(tmp_path, BY_DAYS, "")
    (tmp_path / "log").mkdir()
    log = Log(tmp_path / "log", spec, make_rows(600, 4, seed=3))
    newest = max(row.time for row in log.rows if row.time // DAY == 2)
    older = dataclasses.replace(log.rows[0], time=newest - seconds if seconds < newest else 0)
    outputs = [tmp_path / name for name in ("clean", "out")]
    for output in outputs:
        log.run(output)
    extend(ExtendSettings(outputs[0], str(log.write(3)), engine="cpu"))
    day = log.write(3, older)
    lines = len(day.read_text().splitlines())
    with pytest.raises(BadRowError, match=f"day_3.csv, line {lines}: .* older than rows") as caught:
        extend(ExtendSettings(outputs[1], str(day), engine="cpu"))
    assert "--on_bad_rows quarantine" in str(caught.value)
    extend(ExtendSettings(outputs[1], str(day), engine="cpu", **QUARANTINE))
    there = read_rows(outputs[1])
    for name, values in read_rows(outputs[0]).items():
        np.testing.assert_array_equal(there[name], values, err_msg=name)
    assert older.text() in (outputs[1] / "rejected/day_3.csv.tsv").read_text()


@pytest.mark.parametrize(
    ("hours", "rows", "late"),
    [
        ([0, 1, 2, 8760], [9, 9, 9, 1], 8760),
        ([0, 1, 2, 8760], [9, 9, 9, 2], None),  # they are not alone
        ([0, 1, 2, 8760, 9000], [9000, 9000, 9000, 1, 1], 8760),
        ([0, 1, 2, 20], [9, 9, 9, 1], None),  # a night
        ([0, 1, 60, 61, 120, 200], [9, 9, 9, 9, 9, 1], None),  # weekends
        ([0, 9000, 9001, 9002, 18000], [1, 9, 9, 9, 1], 18000),  # the first one is of 1970
        ([5], [9], None),
        ([], [], None),
    ],
)
def test_late_rows_are_few_after_a_long_gap(
    hours: list[int], rows: list[int], late: int | None
) -> None:
    found = find_late(np.array([hours, rows], np.int64))
    assert found == (None if late is None else late * HOUR)
