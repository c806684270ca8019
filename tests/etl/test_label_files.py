"""Labels from other files: as if the log had them, for each format, engine, key and day."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

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
    Log,
    assert_equal_outputs,
    find_clicked,
    labelled_spec,
    make_clicks,
    write_labelled,
    write_rows,
    write_spec,
)
from tests.etl.runs import failing, read_split, settings, tree


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
    """They belong to rows of these days, if such are shown before them."""
    log = Log(tmp_path, BY_PAIR, "1d")
    log.write()
    write_rows(log.raw / "clicks_a.csv", log.clicks)
    spec = write_spec(tmp_path, BY_PAIR, "1d", BY_TIME)
    run(settings(log.raw, tmp_path / "out", spec))
    for day in (3, 4):
        write_rows(log.raw / f"day_{day}.csv", log.of_day(day))
    extend(ExtendSettings(tmp_path / "out", str(log.raw)))
    rows = [row for of_day in log.written(4) for row in of_day]
    found = pd.concat([read_split(tmp_path / "out", split) for split in SPLITS])
    assert found["clicked"].tolist() == [float(row in log.clicked) for row in rows]


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
