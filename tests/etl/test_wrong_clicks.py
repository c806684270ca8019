"""Labels from other files: what is wrong with clicks, their files and their specs is said."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, BadRowError, SettingsError
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.commands.check import check
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from tests.etl.click_logs import (
    BY_PAIR,
    BY_TIME,
    DAY,
    EVENTS,
    LOG_TIME,
    Log,
    Shown,
    assert_equal_outputs,
    write_rows,
    write_spec,
)
from tests.etl.runs import QUARANTINE, change_json, settings


def test_the_file_of_rows_that_wait_must_be_there(tmp_path: Path) -> None:
    log = Log(tmp_path, BY_PAIR, "1d", count=300)
    log.write()
    run(settings(log.raw, tmp_path / "out", write_spec(tmp_path, BY_PAIR, "1d")))
    write_rows(log.raw / "day_3.csv", log.of_day(3))
    day = ExtendSettings(tmp_path / "out", str(log.raw / "day_3.csv"))
    file = log.raw / "day_2.csv"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"c1", b"c2"))
    with pytest.raises(
        BadInputError, match=r"day_2.csv: was changed; some of its rows are written"
    ):
        extend(day)
    file.unlink()
    with pytest.raises(
        BadInputError, match=r"day_2.csv: .*; some of its rows wait for their clicks"
    ):
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


#: For logs that have positives only.
NEGATIVES = """
[negatives]
per_positive = 2
from = "items"
item = "item"
user = "user"
[[table]]
name = "items"
path = "items.csv"
key = "item"
"""


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


def test_clicks_that_are_all_malformed_are_no_empty_file(tmp_path: Path) -> None:
    log = Log(tmp_path, BY_PAIR, "6h")
    log.write()
    for file in log.raw.glob("clicks*"):
        file.unlink()
    (log.raw / "clicks.csv").write_text("at,item,user,row\n2026-11-01 10:00,5,u1,1\nsoon,5,u1,1\n")
    message = r"no well-formed row; .*clicks.csv, line 2: column at: '2026-11-01"
    with pytest.raises(BadInputError, match=message):
        run(settings(log.raw, tmp_path / "out", write_spec(tmp_path, BY_PAIR, "6h"), **QUARANTINE))


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
            r"\d+ clicks have the key of a row, and 0 come within 6h after it: rows range from ",
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
    with pytest.raises(SettingsError, match="no label from a file named 'click'"):
        run(settings(log.raw, tmp_path / "out", spec, label_path=("click=x",)))
    with pytest.raises(SettingsError, match="--label_path clicked"):
        run(settings(log.raw, tmp_path / "out", spec, label_path=("clicked",)))
    run(settings(log.raw, tmp_path / "out", spec, label_path=(f"clicked={moved}/*.csv",)))


def test_clicks_that_end_before_the_log_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the files of a day are missing: its rows would be 0 in silence."""
    log = Log(tmp_path, BY_PAIR, "6h")
    log.write()
    spec = write_spec(tmp_path, BY_PAIR, "6h")
    run(settings(log.raw, tmp_path / "whole", spec))
    assert "its clicks end" not in caplog.text
    write_rows(log.raw / "clicks_a.csv", log.clicks_until(2 * DAY - 1))
    (log.raw / "clicks_b.csv").unlink()
    run(settings(log.raw, tmp_path / "out", spec))
    assert "its clicks end at 1970-01-02" in caplog.text
    assert "--label_path clicked=PATH" in caplog.text


def test_no_window_has_ended(tmp_path: Path) -> None:
    log = Log(tmp_path, BY_PAIR, "6h", days=1)
    log.write()
    spec = write_spec(tmp_path, BY_PAIR, "300d")
    with pytest.raises(BadInputError, match="no row's window has ended: the log ends at"):
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
    # nor is its file read for ever
    write_rows(log.raw / "day_3.csv", log.of_day(3))
    (log.raw / "clicks_b.csv").write_text("at,impression,user,item\n")
    write_rows(log.raw / "clicks_a.csv", log.clicks_until(4 * DAY - 1))
    extend(ExtendSettings(tmp_path / "out", str(log.raw / "day_3.csv")))
    state = json.loads((tmp_path / "out/extension/labels.json").read_text())
    assert [Path(path).name for path in state["waiting"]] == ["day_3.csv"]


def test_damaged_states_are_an_error(tmp_path: Path) -> None:
    """Nothing is extended by clicks of another day, or by none."""
    log = Log(tmp_path, BY_PAIR, "6h")
    log.write()
    output = tmp_path / "out"
    run(settings(log.raw, output, write_spec(tmp_path, BY_PAIR, "6h")))
    write_rows(log.raw / "day_3.csv", log.of_day(3))
    assert main(["check", str(output)]) == 0
    kept = output / "extension/labels.0.npy"
    content = kept.read_bytes()
    for damaged in (content[:-8], content[:-1] + b"\x07"):
        kept.write_bytes(damaged)
        with pytest.raises(BadInputError, match=r"labels\.0\.npy"):
            extend(ExtendSettings(output, str(log.raw / "day_3.csv")))
        assert "no day can be added" in "".join(map(str, check(output, workers=1)))
    kept.write_bytes(content)
    change_json(output / "extension/labels.json", lambda value: value.update(cut=0))
    with pytest.raises(BadInputError, match=r"extension/labels\.json"):
        extend(ExtendSettings(output, str(log.raw / "day_3.csv")))


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
        ('key = ["user", "item"]', 'key = ["user", "user"]', "list each column once"),
        ('within = "6h"', 'within = "6h"\nthreshold = 4', "unknown key 'threshold'"),
        (LOG_TIME, "", "rows of the log have no time"),
        (LOG_TIME, f"{LOG_TIME}\n{NEGATIVES}", "remove \\[negatives\\]"),
        (LOG_TIME, f"{LOG_TIME}\n{EVENTS.format(cut='event')}", "remove log_time"),
    ],
)
def test_a_label_that_a_spec_may_not_have(tmp_path: Path, old: str, new: str, message: str) -> None:
    write_spec(tmp_path, BY_PAIR, "6h")
    text = (tmp_path / "spec.toml").read_text()
    assert old in text
    (tmp_path / "spec.toml").write_text(text.replace(old, new))
    with pytest.raises(SettingsError, match=message):
        load_spec(tmp_path / "spec.toml")
