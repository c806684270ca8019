"""Labels from other files: as if the log had them, for each format, engine, key and day."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.formats.splits import SPLITS
from tests.etl.click_logs import (
    BY_DAYS,
    BY_ID,
    BY_PAIR,
    BY_PRICE,
    BY_TIME,
    DAY,
    EVENTS,
    HOUR,
    Click,
    Shown,
    find_clicked,
    labelled_spec,
    make_clicks,
    make_shown,
    write_labelled,
    write_rows,
    write_spec,
)
from tests.etl.runs import read_split, settings, tree
from tests.logs import pack

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
        times += [click.at for click in self.clicks_until((day + 1) * DAY - 1)]
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


@pytest.mark.parametrize("within", ["6h", "1d"])
@pytest.mark.parametrize("key", [BY_ID, BY_PAIR])
@pytest.mark.parametrize("split", [BY_DAYS, BY_TIME, BY_PRICE])
def test_labels_are_those_of_a_log_that_was_joined_before(
    tmp_path: Path, split: str, key: str, within: str
) -> None:
    log = Log(tmp_path, key, within, days=4)
    log.write()
    log.write_joined(by_days=split == BY_DAYS)
    spec = write_spec(tmp_path, key, within, split)
    manifest = run(settings(log.raw, tmp_path / "out", spec, block_mb=1))
    run(settings(log.joined, tmp_path / "expected", labelled_spec(spec)))
    assert_equal_outputs(tmp_path / "out", tmp_path / "expected")
    rows = manifest.rows
    assert rows["in"] == sum(len(log.of_day(day)) for day in range(4))
    assert rows["waiting"] == rows["in"] - rows["out"] > 0


@pytest.mark.parametrize("ending", ["csv.gz", "tsv", "jsonl", "parquet"])
def test_all_formats(tmp_path: Path, ending: str) -> None:
    log = Log(tmp_path, BY_PAIR, "6h")
    log.write(ending)
    log.write_joined(by_days=True)
    kind = {"csv.gz": "csv", "jsonl": "json"}.get(ending, ending)
    header = "header = true" if ending == "tsv" else ""
    spec = write_spec(tmp_path, BY_PAIR, "6h", format=f'{kind}"\n{header}#')
    run(settings(log.raw, tmp_path / "out", spec))
    csv = write_spec(tmp_path, BY_PAIR, "6h")
    run(settings(log.joined, tmp_path / "expected", labelled_spec(csv)))
    assert_equal_outputs(tmp_path / "out", tmp_path / "expected")


@pytest.mark.parametrize("cut", ["event", "day"])
@pytest.mark.parametrize("within", ["6h", "1d"])
def test_events_know_a_label_once_its_window_has_ended(
    tmp_path: Path, within: str, cut: str
) -> None:
    log = Log(tmp_path, BY_PAIR, within, days=4, count=700)
    log.write()
    log.write_joined(by_days=False, whole=cut == "day")
    spec = write_spec(tmp_path, BY_PAIR, within, BY_TIME, more=EVENTS.format(cut=cut))
    run(settings(log.raw, tmp_path / "out", spec))
    run(settings(log.joined, tmp_path / "expected", labelled_spec(spec)))
    assert_equal_outputs(tmp_path / "out", tmp_path / "expected")


def test_workers_of_a_cluster_write_the_same(tmp_path: Path, dask_client) -> None:
    log = Log(tmp_path, BY_PAIR, "6h")
    log.write()
    spec = write_spec(tmp_path, BY_PAIR, "6h", BY_TIME, more=EVENTS.format(cut="event"))
    run(settings(log.raw, tmp_path / "out", spec, scheduler=dask_client.scheduler.address))
    run(settings(log.raw, tmp_path / "expected", spec))
    assert_equal_outputs(tmp_path / "out", tmp_path / "expected")


@pytest.mark.parametrize("more", ["", "event", "day"])
@pytest.mark.parametrize("within", ["6h", "1d"])
@pytest.mark.parametrize("split", [BY_DAYS, BY_TIME, BY_PRICE])
def test_a_new_day_brings_clicks_of_the_day_before(
    tmp_path: Path, split: str, within: str, more: str
) -> None:
    """Each generation writes what a run over the log joined by then would add, and undo undoes."""
    if more and split == BY_PRICE:
        pytest.skip("refused: rows for training would count later events")
    log = Log(tmp_path, BY_PAIR, within, days=3, count=700)
    whole = more == "day"
    log.write()
    log.write_joined(by_days=split == BY_DAYS, whole=whole)
    events = EVENTS.format(cut=more) if more else ""
    spec = write_spec(tmp_path, BY_PAIR, within, split, more=events)
    run(settings(log.raw, tmp_path / "out", spec))
    run(settings(log.joined, tmp_path / "expected", labelled_spec(spec)))
    for day in (3, 4):
        before = tree(tmp_path / "out")
        write_rows(log.raw / f"day_{day}.csv", log.of_day(day))
        end = (day + 1) * DAY - 1
        clicks = log.clicks_until(end, after=(day * DAY - 1) if day == 3 else -1)
        later = tmp_path / f"later_{day}.csv"
        write_rows(later, clicks)  # of the fourth day all clicks again
        rows = log.written(day, after=log.cut(day - 1, whole=whole), whole=whole)
        expected = log.joined / f"day_{day}.csv"
        write_labelled(expected, [r for of_day in rows for r in of_day], log.clicked, log.window)
        flags = {"label_path": (f"clicked={later}",)}
        added = ExtendSettings(tmp_path / "out", str(log.raw / f"day_{day}.csv"), **flags)
        extend(added)
        extend(ExtendSettings(tmp_path / "expected", str(expected), days=frozenset({day})))
        assert_equal_outputs(tmp_path / "out", tmp_path / "expected")
        after = tree(tmp_path / "out")
        extend(ExtendSettings(tmp_path / "out", undo=True))
        back = tree(tmp_path / "out")
        assert {name: back[name] for name in before if ".previous" not in name} == {
            name: before[name] for name in before if ".previous" not in name
        }
        manifest = extend(added)
        assert tree(tmp_path / "out").keys() == after.keys()
        assert_equal_outputs(tmp_path / "out", tmp_path / "expected")
        written = sum(map(len, log.written(day, whole=whole)))
        assert manifest.rows["out"] == written
        assert manifest.rows["waiting"] == sum(len(log.of_day(i)) for i in range(day + 1)) - written
        assert manifest.rows["in"] == manifest.rows["out"] + manifest.rows["waiting"]
