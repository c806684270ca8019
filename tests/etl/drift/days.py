"""A small log and its output, and days of it with a shift."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nvt_torchrec.clicklog.synthetic.click_model import SyntheticSettings
from nvt_torchrec.clicklog.synthetic.log import synthesize
from nvt_torchrec.etl.commands.drift import find_day
from nvt_torchrec.etl.day_drift import Drift, measure_drift
from nvt_torchrec.etl.run import run
from tests.etl.runs import settings
from tests.logs import CRITEO

ROWS = 4000
_NAMES = CRITEO.columns


def make_log(directory: Path) -> Path:
    """Days 0 to 3, and the output of days 0 to 2 in ``out``; returns the directory of both."""
    synthesize(directory / "raw", SyntheticSettings(days=4, rows_per_day=ROWS))
    run(settings(directory / "raw", directory / "out", days=frozenset({0, 1, 2})))
    return directory


def read_rows(day: Path) -> list[list[str]]:
    """Return the fields of the rows of a day."""
    return [line.split("\t") for line in day.read_text().splitlines()]


def changed(day: Path, to: Path, column: str, change: Callable[[str, int], str]) -> Path:
    """Write a day with other values of a column, each made of its value and its row."""
    rows = read_rows(day)
    index = _NAMES.index(column)
    for number, row in enumerate(rows):
        row[index] = change(row[index], number)
    to.write_text("".join("\t".join(row) + "\n" for row in rows))
    return to


def with_larger_int_2(day: Path, to: Path) -> Path:
    """Write a day whose values of int_2 are ten times as large."""
    return changed(day, to, "int_2", lambda value, row: value and str(10 * int(value)))


def drift_of(output: Path, day: Path | str, **options) -> Drift:
    """Compare a file with an output."""
    return measure_drift(output, find_day(str(day)), **options)
