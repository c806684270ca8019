"""Columns of tables: as if the log held them, for each format, engine, day and version."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvt_torchrec.base.errors import (
    BadInputError,
    BadRowError,
    ClickLogError,
    OutputError,
    SettingsError,
)
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.inspection import report
from tests.etl.runs import QUARANTINE, failing, read_split, settings, tree
from tests.etl.table_logs import (
    BY_DAYS,
    BY_TIME,
    DAY,
    EVENTS,
    VERSIONS,
    Item,
    joined_spec,
    load_table_spec,
    make_impressions,
    make_items,
    make_users,
    write_joined,
    write_rows,
)
from tests.logs import pack

HOUR = 3600


def write_day(
    raw: Path, joined: Path, day: int, rows: list, items: list, users: list, delay: int | None
) -> None:
    of_day = [row for row in rows if row.time // DAY == day]
    write_rows(raw / f"day_{day}.csv", of_day)
    write_joined(joined / f"day_{day}.csv", of_day, items, users, delay=delay)


def assert_equal_outputs(output: Path, expected: Path) -> None:
    """The parquet, and the ids of all values, are the same."""
    for split in SPLITS:
        pd.testing.assert_frame_equal(read_split(output, split), read_split(expected, split))
    for kind in ("unique", "meta"):
        files = {file.name: file for file in output.glob(f"workflow/artifacts/**/{kind}.*")}
        others = {file.name: file for file in expected.glob(f"workflow/artifacts/**/{kind}.*")}
        assert files.keys() == others.keys()
        for name, file in files.items():
            assert file.read_bytes() == others[name].read_bytes(), name


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    raw, joined = tmp_path / "raw", tmp_path / "joined"
    raw.mkdir()
    joined.mkdir()
    return raw, joined


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("split", [BY_DAYS, BY_TIME])
@pytest.mark.parametrize("versions", ["", VERSIONS])
def test_columns_are_those_of_a_log_that_was_joined_before(
    tmp_path: Path, folders: tuple[Path, Path], ending: str, split: str, versions: str
) -> None:
    raw, joined = folders
    more = ""
    if versions and split == BY_DAYS:  # versions need the time of a row
        more = EVENTS
    spec = load_table_spec(tmp_path, split, versions=versions, more=more)
    rows, users = make_impressions(400, 3), make_users()
    items = make_items(versions=5 if versions else 1)
    delay = HOUR if versions else None
    half = len(items) // 2  # a table may have several files
    plain = ending.removesuffix(".gz")
    write_rows(raw / f"items_1.{plain}", items[:half])
    write_rows(raw / f"items_2.{plain}", items[half:])
    write_rows(raw / "users.csv", users)
    if ending.endswith(".gz"):
        pack(raw / "items_1.csv")
        pack(raw / "items_2.csv")
    for day in range(3):
        write_day(raw, joined, day, rows, items, users, delay)
    run(settings(raw, tmp_path / "out", spec, block_mb=1))
    run(settings(joined, tmp_path / "expected", joined_spec(spec)))
    assert_equal_outputs(tmp_path / "out", tmp_path / "expected")
    shown = report(tmp_path / "out/workflow")
    assert re.search(
        rf"items +item +{len(items)} +{'versions by changed' if versions else 'one row'}", shown
    )
    train = read_split(tmp_path / "out", "train")
    assert train["brand"].nunique() > 3
    assert train["price"].nunique() > (15 if versions else 5)


def test_workers_of_a_cluster_join_the_same(
    tmp_path: Path, folders: tuple[Path, Path], dask_client
) -> None:
    raw, joined = folders
    spec = load_table_spec(tmp_path, BY_TIME, versions=VERSIONS, more=EVENTS)
    rows, items, users = make_impressions(300, 3), make_items(versions=4), make_users()
    write_rows(raw / "items.csv", items)
    write_rows(raw / "users.csv", users)
    for day in range(3):
        write_day(raw, joined, day, rows, items, users, HOUR)
    run(settings(raw, tmp_path / "out", spec, scheduler=dask_client.scheduler.address))
    run(settings(joined, tmp_path / "expected", joined_spec(spec)))
    assert_equal_outputs(tmp_path / "out", tmp_path / "expected")


@pytest.mark.parametrize("versions", ["", VERSIONS])
def test_a_new_day_brings_its_tables(
    tmp_path: Path, folders: tuple[Path, Path], versions: str
) -> None:
    """New items, changed prices; a day without files takes the tables as they are."""
    raw, joined = folders
    split = BY_TIME if versions else BY_DAYS
    spec = load_table_spec(tmp_path, split, versions=versions)
    rows, users = make_impressions(500, 5), make_users()
    delay = HOUR if versions else None
    today = make_items(1, versions=3 if versions else 1)
    write_rows(raw / "items.csv", today)
    write_rows(raw / "users.csv", users)
    for day in range(3):
        write_day(raw, joined, day, rows, today, users, delay)
    for name, log, of_log in (("out", raw, spec), ("expected", joined, joined_spec(spec))):
        run(settings(log, tmp_path / name, of_log))
    before = tree(tmp_path / "out")
    changes = make_items(2, versions=2 if versions else 1, first=2)[:20]
    changes.append(Item("13", 2 * DAY, "17.5", "new brand", "hats", "1|2"))
    known = {(item.id, item.changed if versions else 0): item for item in [*today, *changes]}
    for day, table in ((3, changes), (4, [])):
        later, later_joined = tmp_path / f"raw_{day}", tmp_path / f"joined_{day}"
        later.mkdir()
        later_joined.mkdir()
        if table:
            write_rows(later / "new_items.csv", table)
        write_day(later, later_joined, day, rows, [*known.values()], users, delay)
        paths = (f"items={later / 'new_items.csv'}",) if table else ()
        extend(ExtendSettings(tmp_path / "out", str(later / f"day_{day}.csv"), table=paths))
        extend(ExtendSettings(tmp_path / "expected", str(later_joined / f"day_{day}.csv")))
        assert_equal_outputs(tmp_path / "out", tmp_path / "expected")
    for _ in range(1):
        extend(ExtendSettings(tmp_path / "out", undo=True))
    extend(ExtendSettings(tmp_path / "out", str(tmp_path / "raw_4/day_4.csv")))
    assert_equal_outputs(tmp_path / "out", tmp_path / "expected")
    assert tree(tmp_path / "out") != before


def test_an_interrupted_run_goes_on_with_the_tables_that_it_has(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    raw, joined = folders
    spec = load_table_spec(tmp_path, BY_TIME, versions=VERSIONS, more=EVENTS)
    rows, items, users = make_impressions(200, 3), make_items(versions=3), make_users()
    write_rows(raw / "items.csv", items)
    write_rows(raw / "users.csv", users)
    for day in range(3):
        write_day(raw, joined, day, rows, items, users, HOUR)
    run(settings(raw, tmp_path / "whole", spec))
    stop = KeyboardInterrupt("ctrl-c")
    with failing("nvt_torchrec.etl.tables.table_writer.order_rows", stop, after=1):
        run(settings(raw, tmp_path / "out", spec))  # the second table
    with failing("nvt_torchrec.etl.stages.Stages.count_and_encode", stop):
        run(settings(raw, tmp_path / "out", spec))
    with failing("nvt_torchrec.etl.engines.host.write_units", stop):
        run(settings(raw, tmp_path / "out", spec))
    run(settings(raw, tmp_path / "out", spec))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_resumed_run_must_have_the_same_tables(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    raw = folders[0]
    spec = small_log(raw, tmp_path)
    with failing("nvt_torchrec.etl.engines.host.write_units", KeyboardInterrupt("ctrl-c")):
        run(settings(raw, tmp_path / "out", spec))
    write_rows(raw / "users.csv", make_users()[1:])
    with pytest.raises(ClickLogError, match="tables"):
        run(settings(raw, tmp_path / "out", spec))
    run(settings(raw, tmp_path / "out", spec, restart=True))
    run(settings(raw, tmp_path / "whole", spec))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_resumed_extension_takes_the_tables_that_it_began_with(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    """``--resume`` alone names neither the day nor its tables."""
    raw = folders[0]
    rows, changes = make_impressions(200, 2), make_items(2)[:6]
    write_rows(raw / "items.csv", make_items())
    write_rows(raw / "users.csv", make_users())
    write_rows(raw / "day_0.csv", rows[:100])
    write_rows(tmp_path / "day_1.csv", rows[100:])
    write_rows(tmp_path / "changes.csv", changes)
    spec = load_table_spec(raw)
    outputs = tmp_path / "out", tmp_path / "whole"
    for output in outputs:
        run(settings(raw, output, spec))
    day = ExtendSettings(
        outputs[0], str(tmp_path / "day_1.csv"), table=(f"items={tmp_path / 'changes.csv'}",)
    )
    with failing("nvt_torchrec.etl.extend.extend.switch", OutputError("stop here")):
        extend(day)
    extend(ExtendSettings(outputs[0], resume=True))
    extend(dataclasses.replace(day, output_path=outputs[1]))
    assert tree(outputs[0]) == tree(outputs[1])


def test_numbered_files_of_a_table_are_no_days(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    """Of a run and of an extension, whose directories hold both."""
    raw, later = folders
    rows = make_impressions(200, 2)
    write_rows(raw / "items_1.csv", make_items())
    write_rows(raw / "users.csv", make_users())
    write_rows(raw / "part-0.csv", rows[:60])
    write_rows(raw / "part-1.csv", rows[60:100])
    write_rows(later / "items_2.csv", make_items(2)[:6])
    write_rows(later / "part-2.csv", rows[100:])
    run(settings(raw, tmp_path / "out", load_table_spec(raw)))
    manifest = extend(ExtendSettings(tmp_path / "out", str(later)))
    assert [Path(file.path).name for file in manifest.inputs] == [
        "part-0.csv",
        "part-1.csv",
        "part-2.csv",
    ]


def small_log(raw: Path, tmp_path: Path, **options: str) -> FeatureSpec:
    """Write a log with tables of one version; return its spec."""
    write_rows(raw / "items.csv", make_items(versions=2 if "versions" in options else 1))
    write_rows(raw / "users.csv", make_users())
    write_rows(raw / "day_0.csv", make_impressions(100, 1))
    return load_table_spec(tmp_path, **options)


def append(path: Path, line: str) -> None:
    with open(path, "a") as file:
        file.write(line + "\n")


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("3,0,1.5,b,c,1", BadInputError, r"items.csv, line 14 and .*, line \d+ have the same id"),
        (",0,1.5,b,c,1", BadRowError, "items.csv, line 14: table items: a row without its key, id"),
        ("13,0,cheap,b,c,1", BadRowError, "items.csv, line 14: column price: 'cheap'"),
        ("13,0,1.5,b,c,1|x", BadRowError, "items.csv, line 14: column tags: 'x'"),
    ],
)
def test_a_wrong_row_of_a_table_is_named(
    tmp_path: Path, folders: tuple[Path, Path], line: str, error: type, message: str
) -> None:
    spec = small_log(folders[0], tmp_path)
    append(folders[0] / "items.csv", line)
    with pytest.raises(error, match=message):
        run(settings(folders[0], tmp_path / "out", spec))


def test_wrong_rows_of_a_table_are_left_out_and_kept(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    raw = folders[0]
    spec = small_log(raw, tmp_path)
    run(settings(raw, tmp_path / "whole", spec))
    for line in (",0,1.5,b,c,1", "13,0,cheap,b,c,1"):
        append(raw / "items.csv", line)
    run(settings(raw, tmp_path / "out", spec, **QUARANTINE))
    assert_equal_outputs(tmp_path / "out", tmp_path / "whole")
    head, *rejected = (tmp_path / "out/rejected/table.items.tsv").read_text().splitlines()
    assert head.split("\t") == ["file", "line", "reason", "raw"]
    assert [row.split("\t")[1] for row in rejected] == ["14", "15"]
    assert "without its key" in rejected[0]
    assert rejected[1].endswith("13,0,cheap,b,c,1")


def test_a_table_whose_rows_are_all_malformed_is_an_error(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    spec = small_log(folders[0], tmp_path)
    items = folders[0] / "items.csv"
    header = items.read_text().splitlines()[0]
    items.write_text(f"{header}\n13,0,cheap,b,c,1\n")
    with pytest.raises(BadInputError, match=r"no well-formed row; .*: 'cheap'"):
        run(settings(folders[0], tmp_path / "out", spec, **QUARANTINE))


def test_a_key_that_the_log_does_not_have_is_refused(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    """Else all columns of the table would be missing, at exit status 0."""
    spec = small_log(folders[0], tmp_path)
    others = [Item(str(100 + i), 0, "1", "b", "c", "") for i in range(9)]
    write_rows(folders[0] / "items.csv", others)
    with pytest.raises(SettingsError, match=r"table items: it has the keys of 0 of \d+ rows"):
        run(settings(folders[0], tmp_path / "out", spec))


def test_tables_that_are_not_there(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    spec = small_log(folders[0], tmp_path)
    (folders[0] / "users.csv").rename(tmp_path / "moved.csv")
    with pytest.raises(BadInputError, match=r"table users: .*no such file"):
        run(settings(folders[0], tmp_path / "out", spec))
    with pytest.raises(SettingsError, match="no table or source 'user'"):
        run(settings(folders[0], tmp_path / "out", spec, table=("user=x",)))
    with pytest.raises(SettingsError, match="--table users"):
        run(settings(folders[0], tmp_path / "out", spec, table=("users",)))
    run(settings(folders[0], tmp_path / "out", spec, table=(f"users={tmp_path / 'moved.csv'}",)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('path = "users.csv"', 'path = "../users.csv"', "--table users=PATH"),
        ('path = "users.csv"', 'path = "/etc/passwd"', "--table users=PATH"),
        ('path = "users.csv"', 'path = "s3://bucket/users.csv"', "--table users=PATH"),
        ('table = "users"\nfreq', 'table = "user"\nfreq', "column job: table = 'user'"),
        ('key = ["user", "country"]', "key = []", r"table users: key = \(\)"),
        ('name = "users"', 'name = "items"', "tables of the same name: items"),
        (
            'key = {item = "id"}',
            'key = {item = "id"}\nvalid_from = "changed"',
            "rows of the log have no",
        ),
        ('key = {item = "id"}', 'key = {item = "id"}\nknown = "1h"', "valid_from"),
        ('key = {item = "id"}', 'key = {item = "id"}\nnam = "x"', "unknown key 'nam'"),
    ],
)
def test_a_table_that_a_spec_may_not_name(
    tmp_path: Path, folders: tuple[Path, Path], old: str, new: str, message: str
) -> None:
    small_log(folders[0], tmp_path)
    text = (tmp_path / "spec.toml").read_text()
    assert old in text
    (tmp_path / "spec.toml").write_text(text.replace(old, new))
    from nvt_torchrec.formats.feature_spec.toml_file import load_spec

    with pytest.raises(SettingsError, match=message):
        load_spec(tmp_path / "spec.toml")


def test_a_version_of_the_second_of_a_row_does_not_count(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    """Planted: the price of the second itself tells the label."""
    raw = folders[0]
    rows = [row for row in make_impressions(300, 3) if row.item]
    items: dict[tuple[str, int], Item] = {}
    for row in rows:
        key = str(int(row.item)), row.time
        items[key] = Item(*key, str(1000 * row.clicked + 1), "b", "c", "")
    write_rows(raw / "items.csv", [*items.values()])
    write_rows(raw / "users.csv", make_users())
    for day in range(3):
        write_rows(raw / f"day_{day}.csv", [row for row in rows if row.time // DAY == day])
    versions = 'valid_from = "changed"\ntime_format = "epoch_s"'
    spec = load_table_spec(tmp_path, BY_TIME, versions=versions)
    run(settings(raw, tmp_path / "out", spec))
    train = read_split(tmp_path / "out", "train")
    agree = np.corrcoef(train["price"], train["clicked"])[0, 1]
    assert abs(agree) < 0.3, "a row sees its own label"


@pytest.mark.parametrize(
    ("file", "value"),
    [
        *itertools.product(["tags.lists.npy", "brand.texts.npy"], [-1, 10**12]),
        *itertools.product(["tags.codes.npy", "brand.codes.npy"], [-1, 2**31 - 1]),
    ],
)
def test_offsets_that_lead_elsewhere_are_an_error(
    tmp_path: Path, folders: tuple[Path, Path], file: str, value: int
) -> None:
    """Nothing is read outside of the files of a stranger's workflow."""
    spec = small_log(folders[0], tmp_path)
    run(settings(folders[0], tmp_path / "out", spec))
    workflow = tmp_path / "out/workflow"
    path = workflow / "tables/items" / file
    array = np.load(path)
    array[: len(array) - 1] = value
    np.save(path, array)
    with pytest.raises(BadInputError, match="digest differs"):
        compiled.load(workflow, verify=True)
    loaded = compiled.load(workflow)
    assert loaded.tables is not None
    table = loaded.tables.by_name["items"]
    name, kind, _ = file.split(".")
    rows = np.arange(len(table))
    with pytest.raises(BadInputError, match="an index out of range"):
        table.take(name, rows)
    if kind == "codes":
        num_distinct = len(table.list_distinct(name))
        ids = np.zeros(num_distinct, np.int32)
        with pytest.raises(BadInputError, match="an index out of range"):
            table.count_values(name, rows, num_distinct)
        with pytest.raises(BadInputError, match="an index out of range"):
            table.encode(name, rows, ids, (1, 2, 3), np.zeros(2, np.int64))


@pytest.mark.parametrize("file", ["keys.npy", "price.values.npy", "brand.codes.npy"])
def test_a_table_of_another_size_is_an_error(
    tmp_path: Path, folders: tuple[Path, Path], file: str
) -> None:
    spec = small_log(folders[0], tmp_path)
    run(settings(folders[0], tmp_path / "out", spec))
    path = tmp_path / "out/workflow/tables/items" / file
    np.save(path, np.load(path)[:3])
    with pytest.raises(BadInputError, match=file.replace(".", r"\.")):
        compiled.load(tmp_path / "out/workflow")
