"""Small logs whose clicks are in other files, and what plain Python makes of them.

Impressions and clicks of the same second, clicks before every impression, twice the same click,
clicks at the end of a window, missing keys.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.events import Events
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.splits import SPLITS
from tests.etl.runs import read_split
from tests.logs import pack

HOUR, DAY = 3600, 86_400
SPEC = """
[input]
format = "{format}"
{label}
[split]
{split}
[[dense]]
names = "price"
raw = "float"
[[categorical]]
names = ["user", "category"]
raw = "string"
[[categorical]]
names = "item"
raw = "int"
{more}
"""
BY_ID = 'key = {id = "impression"}'
BY_PAIR = 'key = ["user", "item"]'
LABEL = """
[label]
name = "clicked"
from = "clicks*"
{key}
within = "{within}"
time = "at"
time_format = "epoch_s"
{log_time}
"""
LOG_TIME = 'log_time = "time"\nlog_time_format = "epoch_s"'
BY_DAYS = 'by = "days"'
BY_TIME = (
    'by = "time"\ncolumn = "time"\ntime_format = "epoch_s"\n'
    'valid_from = "1970-01-02"\ntest_from = "1970-01-02 12:00"'
)
BY_PRICE = 'by = "column"\ncolumn = "price"\nvalid = 0.2\ntest = 0.3'
EVENTS = """
[events]
time = "time"
time_format = "epoch_s"
cut = "{cut}"
[[aggregate]]
of = "user"
values = ["count", "rate", "since"]
[[aggregate]]
of = "item"
values = ["count", "rate"]
window = "1d"
[[history]]
name = "recent"
of = "user"
columns = ["item", "category"]
where = "clicked"
"""


@dataclasses.dataclass(frozen=True)
class Shown:
    """A row of the log; "" is missing."""

    time: int
    id: str
    user: str
    item: str
    category: str
    price: str


@dataclasses.dataclass(frozen=True)
class Click:
    """A row of a file of clicks."""

    at: int
    impression: str
    user: str
    item: str


def make_shown(count: int, days: int, seed: int = 0, step: int = 1800) -> list[Shown]:
    """Impressions in the order of time, many of them in the same second."""
    rng = np.random.default_rng(seed)
    rows = []
    for number, time in enumerate(np.sort(rng.integers(0, days * DAY // step, count)).tolist()):
        user, item = int(rng.integers(0, 9)), int(rng.integers(0, 12))
        rows.append(
            Shown(
                time * step,
                f"i{number % (count - 9)}" if number % 50 else "",  # some twice, some missing
                f"u{user}" if user else "",
                str(item) if item else "",
                f"c{item % 4}",
                f"{rng.lognormal(3):.2f}",
            )
        )
    return rows


def make_clicks(rows: Sequence[Shown], window: int, seed: int = 0, step: int = 1800) -> list[Click]:
    """Clicks of some rows: early, late, at both ends of the window, twice; and of nobody."""
    rng = np.random.default_rng(seed)
    clicks = []
    for row in rows:
        if rng.random() < 0.4:
            late = int(rng.integers(-2, 2 * window // step)) * step
            late = int(rng.choice([late, 0, window, window + 1, window - 1, -1]))
            item = f"0{row.item}" if row.item and rng.random() < 0.5 else row.item
            click = Click(row.time + late, row.id, row.user, item)
            clicks += [click] * int(rng.integers(1, 3))
    clicks += [Click(5 * step, "nobody", "nobody", "99"), Click(7 * step, "", "", "3")]
    return [clicks[i] for i in rng.permutation(len(clicks))]


def key_of(row: Shown | Click, key: str) -> tuple[str, ...] | None:
    """Return the key of a row; None where a part of it is missing."""
    if key == BY_ID:
        value = row.id if isinstance(row, Shown) else row.impression
        return (value,) if value else None
    return (row.user, str(int(row.item))) if row.user and row.item else None


def find_clicked(
    rows: Iterable[Shown], clicks: Iterable[Click], key: str, window: int
) -> set[Shown]:
    """Return the rows that were clicked, by looking at all rows for each click."""
    rows = list(rows)
    clicked: set[Shown] = set()
    for click in clicks:
        wanted = key_of(click, key)
        before = [
            row for row in rows if wanted and key_of(row, key) == wanted and row.time <= click.at
        ]
        newest = max((row.time for row in before), default=None)
        if newest is not None and click.at - newest <= window:
            clicked |= {row for row in before if row.time == newest}
    return clicked


def write_rows(path: Path, rows: Sequence[object]) -> None:
    """Write rows as csv, or as the ending of the name says."""
    records = [dataclasses.asdict(row) for row in rows]  # type: ignore[call-overload]
    _write_records(path, records)


def _write_records(path: Path, records: Sequence[dict[str, object]]) -> None:
    if path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            delimiter = "\t" if path.suffix == ".tsv" else ","
            writer = csv.DictWriter(file, list(records[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(records)
        return
    typed = [{name: value or None for name, value in record.items()} for record in records]
    for record in typed:
        for name in ("time", "at"):
            if name in record:
                record[name] = record[name] or 0
        record["item"] = int(str(record["item"])) if record["item"] else None
        if "price" in record:
            record["price"] = float(str(record["price"]))
    if path.suffix == ".jsonl":
        lines = [json.dumps(record) for record in typed]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        pd.DataFrame(typed).astype({"item": "Int64"}).to_parquet(path)


def write_labelled(path: Path, rows: Sequence[Shown], clicked: set[Shown], window: int) -> None:
    """Write rows with their labels, and from when these are known."""
    records = [
        dataclasses.asdict(row) | {"clicked": int(row in clicked), "known": row.time + window}
        for row in rows
    ]
    _write_records(path, records)


def write_spec(
    directory: Path,
    key: str,
    within: str,
    split: str = BY_DAYS,
    *,
    more: str = "",
    log_time: str | None = None,
    format: str = "csv",
) -> FeatureSpec:
    """Return the spec of a log with files of clicks."""
    if log_time is None:
        log_time = "" if more or split == BY_TIME else LOG_TIME
    label = LABEL.format(key=key, within=within, log_time=log_time)
    file = directory / "spec.toml"
    file.write_text(SPEC.format(format=format, label=label, split=split, more=more))
    return load_spec(file)


def labelled_spec(spec: FeatureSpec) -> FeatureSpec:
    """Return the spec of the same log with the labels, and from when they are known, in it."""
    events = spec.events
    if events is not None:
        events = Events(events.time, events.time_format, source="known", cut=events.cut)
    return dataclasses.replace(spec, label_files=(), events=events)


WITHIN = {"6h": 6 * HOUR, "1d": DAY}


def assert_equal_outputs(output: Path, expected: Path) -> None:
    """The parquet and the ids of all values are the same."""
    for split in SPLITS:
        pd.testing.assert_frame_equal(read_split(output, split), read_split(expected, split))
    for kind in ("unique", "meta"):
        files = {file.name: file for file in output.glob(f"workflow/artifacts/**/{kind}.*")}
        others = {file.name: file for file in expected.glob(f"workflow/artifacts/**/{kind}.*")}
        assert files.keys() == others.keys()
        for name, file in files.items():
            assert file.read_bytes() == others[name].read_bytes(), name


class Log:
    """A log, its clicks, and when its rows are written by day."""

    def __init__(
        self,
        tmp_path: Path,
        key: str,
        within: str,
        *,
        days: int = 3,
        count: int = 500,
        seed: int = 0,
    ) -> None:
        self.raw, self.joined = tmp_path / "raw", tmp_path / "joined"
        self.raw.mkdir()
        self.joined.mkdir()
        self.window, self.days = WITHIN[within], days
        self.rows = make_shown(count, days + 2, seed)
        self.clicks = make_clicks(self.rows, self.window, seed)
        self.clicked = find_clicked(self.rows, self.clicks, key, self.window)
        assert 20 < len(self.clicked) < 0.5 * count

    def of_day(self, day: int) -> list[Shown]:
        return [row for row in self.rows if row.time // DAY == day]

    def clicks_until(self, time: int, after: int = -1) -> list[Click]:
        return [click for click in self.clicks if after < click.at <= time]

    def cut(self, day: int, *, whole: bool = False) -> int:
        """The time before which rows are written once a day has arrived."""
        times = [row.time for row in self.rows if row.time // DAY <= day]
        newest = (day + 1) * DAY if whole else max(times)
        return newest - self.window

    def written(self, day: int, *, after: int = -1, whole: bool = False) -> list[list[Shown]]:
        """The rows that are written, of each day."""
        before = self.cut(day, whole=whole)
        return [[r for r in self.of_day(i) if after <= r.time < before] for i in range(day + 1)]

    def write(self, ending: str = "csv", *, day: int | None = None) -> None:
        """Write the days until one and their clicks."""
        day = self.days - 1 if day is None else day
        for i in range(day + 1):
            write_rows(self.raw / f"day_{i}.{ending.removesuffix('.gz')}", self.of_day(i))
        clicks = self.clicks_until((day + 1) * DAY - 1)
        plain, half = ending.removesuffix(".gz"), len(clicks) // 2
        write_rows(self.raw / f"clicks_a.{plain}", clicks[:half])
        write_rows(self.raw / f"clicks_b.{plain}", clicks[half:])
        if ending.endswith(".gz"):
            for file in [*self.raw.iterdir()]:
                pack(file)

    def write_joined(self, *, by_days: bool, day: int | None = None, whole: bool = False) -> None:
        """Write the rows that are written, with their labels; by days in the days that count."""
        day = self.days - 1 if day is None else day
        days = self.written(day, whole=whole)
        if by_days:
            last = max(i for i, rows in enumerate(days) if 2 * len(rows) >= len(self.of_day(i)))
            days = [*days[:last], [row for rows in days[last:] for row in rows]]
        for i, rows in enumerate(days):
            if rows:
                write_labelled(self.joined / f"day_{i}.csv", rows, self.clicked, self.window)
