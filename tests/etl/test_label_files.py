"""Labels from other files: as if the log had them, for each format, engine, key and day."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import pytest

from nvt_torchrec.base.errors import BadInputError, BadRowError, SettingsError
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
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
    LABEL,
    LOG_TIME,
    SPEC,
    Click,
    Shown,
    find_clicked,
    key_of,
    labelled_spec,
    make_clicks,
    make_shown,
    write_labelled,
    write_rows,
    write_spec,
)
from tests.etl.runs import QUARANTINE, failing, read_split, settings, tree
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
        self.key, self.window, self.days = key, WITHIN[within], days
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
        clicks = self.clicks_until((day + 1) * DAY - 1)
        times += [click.at for click in clicks if key_of(click, self.key)]
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
    """A log and its clicks; a file of clicks has the format of its name."""
    log = Log(tmp_path, BY_PAIR, "6h")
    log.write(ending)
    log.write_joined(by_days=True)
    log_format = {"csv.gz": "csv", "tsv": 'tsv"\nheader = true #"', "jsonl": "json"}
    spec = write_spec(tmp_path, BY_PAIR, "6h", format=log_format.get(ending, ending))
    run(settings(log.raw, tmp_path / "out", spec))
    of_joined = labelled_spec(write_spec(tmp_path, BY_PAIR, "6h"))
    run(settings(log.joined, tmp_path / "expected", of_joined))
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


def test_clicks_of_further_days_may_be_there_already(tmp_path: Path) -> None:
    """Rows of these days are written later nevertheless, with their clicks."""
    log = Log(tmp_path, BY_ID, "1d")
    log.write()
    write_rows(log.raw / "clicks_a.csv", log.clicks)
    spec = write_spec(tmp_path, BY_ID, "1d", BY_TIME)
    manifest = run(settings(log.raw, tmp_path / "out", spec))
    assert manifest.rows["waiting"] == 0
    write_rows(log.raw / "day_3.csv", log.of_day(3))
    manifest = extend(ExtendSettings(tmp_path / "out", str(log.raw / "day_3.csv")))
    assert manifest.rows["waiting"] == 0
    rows = [row for row in log.rows if row.time < 4 * DAY]
    found = pd.concat([read_split(tmp_path / "out", split) for split in SPLITS])
    expected = find_clicked(rows, log.clicks, BY_ID, DAY)
    assert found["clicked"].tolist() == [float(row in expected) for row in rows]


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    log = Log(tmp_path, BY_PAIR, "6h", count=200)
    log.write()
    spec = write_spec(tmp_path, BY_PAIR, "6h", more=EVENTS.format(cut="event"))
    run(settings(log.raw, tmp_path / "whole", spec))
    stop = KeyboardInterrupt("ctrl-c")
    for name in (
        "etl.labels.prepare_labels.match_blocks",
        "etl.labels.prepare_labels._write_label",
        "etl.stages.Stages.count_and_encode",
        "etl.engines.host.write_units",
        "etl.labels.prepare_labels.keep_labels",
    ):
        with failing(f"nvt_torchrec.{name}", stop):
            run(settings(log.raw, tmp_path / "out", spec))
    run(settings(log.raw, tmp_path / "out", spec))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_an_interrupted_extension_goes_on(tmp_path: Path) -> None:
    """Also by --resume alone, and not with other clicks."""
    log = Log(tmp_path, BY_PAIR, "1d", count=300)
    log.write()
    spec = write_spec(tmp_path, BY_PAIR, "1d")
    for name in ("out", "whole"):
        run(settings(log.raw, tmp_path / name, spec))
    write_rows(log.raw / "day_3.csv", log.of_day(3))
    later = tmp_path / "later.csv"
    write_rows(later, log.clicks_until(4 * DAY - 1, after=3 * DAY - 1))
    path = {"label_path": (f"clicked={later}",)}
    day = str(log.raw / "day_3.csv")
    extend(ExtendSettings(tmp_path / "whole", day, **path))
    stop = KeyboardInterrupt("ctrl-c")
    with failing("nvt_torchrec.etl.stages.Stages.count_and_encode", stop):
        extend(ExtendSettings(tmp_path / "out", day, **path))
    with failing("nvt_torchrec.etl.extend.extend.switch", stop):
        extend(ExtendSettings(tmp_path / "out", day, **path))
    extend(ExtendSettings(tmp_path / "out", resume=True))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_the_file_of_rows_that_wait_must_be_there(tmp_path: Path) -> None:
    log = Log(tmp_path, BY_PAIR, "1d", count=300)
    log.write()
    run(settings(log.raw, tmp_path / "out", write_spec(tmp_path, BY_PAIR, "1d")))
    write_rows(log.raw / "day_3.csv", log.of_day(3))
    day = ExtendSettings(tmp_path / "out", str(log.raw / "day_3.csv"))
    file = log.raw / "day_2.csv"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"c1", b"c2"))
    with pytest.raises(BadInputError, match=r"day_2.csv: was changed; rows of it wait"):
        extend(day)
    file.unlink()
    with pytest.raises(BadInputError, match=r"day_2.csv: .*; rows of it wait for their clicks"):
        extend(day)
    file.write_bytes(content)  # another time of change, the same content
    extend(day)


def test_a_row_that_is_older_than_what_was_written(tmp_path: Path) -> None:
    """Its clicks may have been taken by others, or forgotten."""
    log = Log(tmp_path, BY_PAIR, "6h")
    log.write()
    run(settings(log.raw, tmp_path / "out", write_spec(tmp_path, BY_PAIR, "6h")))
    late = Shown(DAY, "i", "u1", "1", "c1", "3")
    write_rows(log.raw / "day_3.csv", [*log.of_day(3), late])
    day = ExtendSettings(tmp_path / "out", str(log.raw / "day_3.csv"))
    with pytest.raises(BadRowError, match=r"day_3.csv, line \d+: column time: .* older than rows"):
        extend(day)
    manifest = extend(dataclasses.replace(day, **QUARANTINE))
    assert manifest.rows["rejected"] == 1


def append(path: Path, line: str) -> None:
    with open(path, "a") as file:
        file.write(line + "\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("soon,i1,u1,1", r"clicks_b.csv, line \d+: column at: 'soon'"),
        (",i1,u1,1", r"clicks_b.csv, line \d+: label clicked: a row without at"),
        ("5,i1,u1,one", r"clicks_b.csv, line \d+: column item: 'one'"),
    ],
)
def test_a_wrong_click_is_named(tmp_path: Path, line: str, message: str) -> None:
    log = Log(tmp_path, BY_PAIR, "6h")
    log.write()
    spec = write_spec(tmp_path, BY_PAIR, "6h")
    run(settings(log.raw, tmp_path / "whole", spec))
    append(log.raw / "clicks_b.csv", line)
    with pytest.raises(BadRowError, match=message):
        run(settings(log.raw, tmp_path / "out", spec))
    run(settings(log.raw, tmp_path / "out", spec, **QUARANTINE))
    assert_equal_outputs(tmp_path / "out", tmp_path / "whole")
    head, rejected = (tmp_path / "out/rejected/label.clicked.tsv").read_text().splitlines()
    assert head.split("\t") == ["file", "line", "reason", "raw"]
    number = len((log.raw / "clicks_b.csv").read_text().splitlines())
    assert rejected.split("\t")[:2] == [str(log.raw / "clicks_b.csv"), str(number)]


def test_malformed_rows_of_the_log_are_none(tmp_path: Path) -> None:
    """A row that is left out takes no click, and is rejected once, also where its file waits."""
    log = Log(tmp_path, BY_PAIR, "1d")
    log.write()
    spec = write_spec(tmp_path, BY_PAIR, "1d", BY_TIME)
    run(settings(log.raw, tmp_path / "whole", spec))
    for row in [*log.of_day(1)[::9], *log.of_day(2)[::9]]:
        file = log.raw / f"day_{row.time // DAY}.csv"
        append(file, f"{row.time + 1},i,{row.user},{row.item},c,dear")
    manifest = run(settings(log.raw, tmp_path / "out", spec, **QUARANTINE))
    assert_equal_outputs(tmp_path / "out", tmp_path / "whole")
    bad = manifest.rows["rejected"]
    assert bad > 10
    write_rows(log.raw / "day_3.csv", log.of_day(3))
    later = tmp_path / "later.csv"
    write_rows(later, log.clicks_until(4 * DAY - 1, after=3 * DAY - 1))
    day = str(log.raw / "day_3.csv")
    path = (f"clicked={later}",)
    manifest = extend(ExtendSettings(tmp_path / "out", day, label_path=path, **QUARANTINE))
    assert manifest.rows["rejected"] == bad
    assert manifest.rows["out"] == sum(map(len, log.written(3)))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("user", "nobody", r"0 of \d+ clicks have the key of a row of the log"),
        (
            "at",
            10**9,
            r"\d+ clicks have the key of a row, and 0 come within 6h after it: rows are ",
        ),
    ],
)
def test_clicks_of_another_log_are_refused(
    tmp_path: Path, column: str, value: object, message: str
) -> None:
    """Else all labels would be 0, at exit status 0."""
    log = Log(tmp_path, BY_PAIR, "6h")
    log.write()
    write_rows(
        log.raw / "clicks_a.csv",
        [dataclasses.replace(click, **{column: value}) for click in log.clicks],
    )
    (log.raw / "clicks_b.csv").unlink()
    with pytest.raises(SettingsError, match=message):
        run(settings(log.raw, tmp_path / "out", write_spec(tmp_path, BY_PAIR, "6h")))


def test_files_of_clicks_that_are_not_there(tmp_path: Path) -> None:
    log = Log(tmp_path, BY_PAIR, "6h")
    log.write()
    spec = write_spec(tmp_path, BY_PAIR, "6h")
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("clicks_a.csv", "clicks_b.csv"):
        (log.raw / name).rename(moved / name)
    with pytest.raises(BadInputError, match=r"label clicked: .*no such file"):
        run(settings(log.raw, tmp_path / "out", spec))
    with pytest.raises(SettingsError, match="no label 'click' from a file"):
        run(settings(log.raw, tmp_path / "out", spec, label_path=("click=x",)))
    with pytest.raises(SettingsError, match="--label_path clicked"):
        run(settings(log.raw, tmp_path / "out", spec, label_path=("clicked",)))
    run(settings(log.raw, tmp_path / "out", spec, label_path=(f"clicked={moved}/*.csv",)))


def test_no_window_has_ended(tmp_path: Path) -> None:
    log = Log(tmp_path, BY_PAIR, "6h", days=1)
    log.write()
    spec = write_spec(tmp_path, BY_PAIR, "300d")
    with pytest.raises(BadInputError, match="no row's window has ended: the log and the clicks"):
        run(settings(log.raw, tmp_path / "out", spec))


@pytest.mark.parametrize(
    ("file", "line"), [("clicks_b.csv", "9,i1,u1,1"), ("day_2.csv", "9,i1,u1,1,c1,5")]
)
def test_a_row_of_a_wrong_clock_ends_no_window(tmp_path: Path, file: str, line: str) -> None:
    log = Log(tmp_path, BY_PAIR, "6h")
    log.write()
    spec = write_spec(tmp_path, BY_PAIR, "6h")
    before = run(settings(log.raw, tmp_path / "whole", spec))
    append(log.raw / file, line.replace("9", str(400 * DAY), 1))
    manifest = run(settings(log.raw, tmp_path / "out", spec))
    assert_equal_outputs(tmp_path / "out", tmp_path / "whole")
    assert manifest.rows["waiting"] == before.rows["waiting"] + file.startswith("day")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('from = "clicks*"', 'from = "../clicks*"', "--label_path clicked=PATH"),
        ('from = "clicks*"', 'from = "/etc/passwd"', "--label_path clicked=PATH"),
        ('from = "clicks*"', 'from = "s3://bucket/clicks"', "--label_path clicked=PATH"),
        ('from = "clicks*"', "", "name the files"),
        ('within = "6h"', 'within = "6"', 'such as "90m"'),
        ('within = "6h"', "", 'such as "90m"'),
        ('key = ["user", "item"]', "", "key"),
        ('key = ["user", "item"]', 'key = ["user", "user"]', "twice"),
        ('within = "6h"', 'within = "6h"\nthreshold = 4', "unknown key 'threshold'"),
        (LOG_TIME, "", "rows have no time"),
        (LOG_TIME, f"{LOG_TIME}\n{EVENTS.format(cut='event')}", "leave it out"),
    ],
)
def test_a_label_that_a_spec_may_not_have(tmp_path: Path, old: str, new: str, message: str) -> None:
    write_spec(tmp_path, BY_PAIR, "6h")
    text = (tmp_path / "spec.toml").read_text()
    assert old in text
    (tmp_path / "spec.toml").write_text(text.replace(old, new))
    with pytest.raises(SettingsError, match=message):
        load_spec(tmp_path / "spec.toml")


@pytest.mark.parametrize("seed", range(4))
def test_several_labels_of_several_files(tmp_path: Path, seed: int) -> None:
    """A label of the log, and two from files, whose windows differ."""
    log = Log(tmp_path, BY_PAIR, "1d", seed=seed)
    log.write()
    seen = make_clicks(log.rows, 6 * HOUR, seed + 99)
    write_rows(log.raw / "seen.parquet", [click for click in seen if click.at < 3 * DAY])
    text = LABEL.format(key=BY_PAIR, within="1d", log_time=LOG_TIME).replace("[label]", "[[label]]")
    other = LABEL.format(key=BY_ID, within="6h", log_time=LOG_TIME)
    other = other.replace('"clicked"', '"seen"').replace("clicks*", "seen.parquet")
    text += (
        other.replace("[label]", "[[label]]") + '[[label]]\nname = "price_known"\nfrom = "price"\n'
    )
    text += "threshold = 20\n"
    file = tmp_path / "spec.toml"
    file.write_text(SPEC.format(format="csv", label=text, split=BY_TIME, more=""))
    manifest = run(settings(log.raw, tmp_path / "out", load_spec(file)))
    written = [row for of_day in log.written(2) for row in of_day]
    assert manifest.rows["out"] == len(written)
    seen_rows = find_clicked(log.rows, seen, BY_ID, 6 * HOUR)
    found = pd.concat([read_split(tmp_path / "out", split) for split in SPLITS])
    columns = ["clicked", "seen", "price_known"]
    expected = [(row in log.clicked, row in seen_rows, float(row.price) >= 20) for row in written]
    assert found[columns].astype(bool).to_numpy().tolist() == list(map(list, expected))
