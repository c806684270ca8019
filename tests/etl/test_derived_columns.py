"""Logs whose features are derived from other columns, from raw text to parquet, in both engines."""

from __future__ import annotations

import datetime
import random
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import pandas as pd
import pytest

from nvt_torchrec import workflows
from nvt_torchrec.clicklog.text.line_layout import plain_layout
from nvt_torchrec.clicklog.text.tokenizer import parse_rows
from nvt_torchrec.etl.__main__ import main as etl
from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.spec.toml_file import load_spec
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.__main__ import main as workflow_tool
from nvt_torchrec.workflows.frames import to_frame
from nvt_torchrec.workflows.store import load
from tests.clicklog.reference_reader import as_lists, parse, split
from tests.etl.runs import read_split, settings
from tests.workflows.random_specs import Oracle

#: Nothing dense, the label in the middle, fields that nothing reads, one that three columns read.
CATEGORIES = """
[input]
format = "csv"
delimiter = ";"
columns = ["id", "time", "", "clicked", "site", "app"]

[label]
name = "click"
from = "clicked"

[[categorical]]
names = "hour"
derive = "hour"
from = "time"
time_format = "%y%m%d%H"

[[categorical]]
names = "weekday"
derive = "weekday"
from = "time"
time_format = "%y%m%d%H"

[[categorical]]
names = ["site", "app"]
raw = "string"
nulls = ["-"]
freq_threshold = 2

[[categorical]]
names = "site_app"
from = ["site", "app"]
derive = "cross"
nulls = ["-"]
max_table_size = 12
"""
#: One column as dense and as categorical, twice, and an age.
NUMBERS = """
[input]
format = "csv"
columns = ["born", "amount", "site", "app", "rating", "time"]

[label]
name = "liked"
from = "rating"
threshold = 4

[[dense]]
names = "age"
from = ["time", "born"]
derive = "age"
transform = "normalize"

[[dense]]
names = "amount"
raw = "int32"
fill = -1
lenient = true
nulls = ["NA"]

[[categorical]]
names = "amount_category"
from = "amount"
raw = "int"
lenient = true
nulls = ["NA"]

[[categorical]]
names = "amount_log"
from = "amount"
derive = "log_square"
lenient = true
nulls = ["NA"]

[[categorical]]
names = "amount_bucket"
from = "amount"
derive = "bucket"
boundaries = [0, 2, 50]
lenient = true
nulls = ["NA"]

[[categorical]]
names = "month"
from = "born"
derive = "month"

[[categorical]]
names = "site"
raw = "string"
"""


def category_line(rng: random.Random) -> str:
    time = datetime.datetime(2014, 10, 21) + datetime.timedelta(hours=rng.randrange(24 * 9))
    site, app = rng.choice("aabbcd-é"), rng.choice(["x", "x", "y", "-", ""])
    return f"{rng.random()};{time:%y%m%d%H};x;{rng.randrange(2)};{site};{app}"


def number_line(rng: random.Random) -> str:
    born = datetime.date(1900, 1, 1) + datetime.timedelta(days=rng.randrange(40_000))
    amount = rng.choice(["NA", "", "+5", "260.0", str(rng.randrange(-3, 90))])
    return f"{born},{amount},{rng.choice('ab')},?,{rng.randrange(1, 11) / 2},2014-10-30 12:00"


@pytest.fixture(scope="module", params=[(CATEGORIES, category_line), (NUMBERS, number_line)])
def log(request, tmp_path_factory: pytest.TempPathFactory):
    """A spec, three days for training and evaluation, and one more."""
    text, line = request.param
    base = tmp_path_factory.mktemp("log")
    (base / "spec.toml").write_text(text)
    spec = load_spec(base / "spec.toml")
    rng = random.Random(4)
    days = []
    (base / "raw").mkdir()
    (base / "new").mkdir()
    for day, count in enumerate((150, 90, 61, 70)):
        lines = [line(rng) for _ in range(count)]
        folder = base / ("new" if day == 3 else "raw")
        (folder / f"day_{day}.csv").write_text("".join(f"{one}\n" for one in lines))
        days.append(lines)
    run(settings(base / "raw", base / "out", spec))
    return base, spec, days


def rows_of(lines: list[str], spec):
    text = "".join(f"{line}\n" for line in lines).encode()
    rows = parse_rows(text, spec, plain_layout(spec, label=True))
    assert as_lists(rows, spec) == [parse(split(line, spec), spec) for line in lines]
    return rows


def expected_splits(days, spec) -> tuple[dict, Oracle]:
    half = (len(days[2]) + 1) // 2
    lines = {"train": days[0] + days[1], "valid": days[2][:half], "test": days[2][half:]}
    rows = {name: rows_of(some, spec) for name, some in lines.items()}
    return rows, Oracle(spec, [rows["train"]])


def check_frame(frame: pd.DataFrame, expected: dict, spec) -> None:
    for name in (spec.label, *spec.categorical_names):
        assert frame[name].tolist() == expected[name]
    for name in spec.dense_names:
        np.testing.assert_allclose(frame[name], expected[name], rtol=1e-5, atol=1e-5)


def test_the_parquet_is_what_plain_python_derives(log) -> None:
    base, spec, days = log
    rows, oracle = expected_splits(days, spec)
    for name in SPLITS:
        check_frame(read_split(base / "out", name), oracle.transform(rows[name]), spec)


def test_the_saved_workflow_is_nvtabulars_and_keeps_the_derivations(log) -> None:
    base, spec, days = log
    rows, oracle = expected_splits(days, spec)
    description = workflows.inspect(base / "out" / "workflow")
    assert description.spec.read_plan(label=True) == spec.read_plan(label=True)
    expected = oracle.transform(rows["test"])
    frame = load(base / "out" / "workflow", raw=False).transform(to_frame(rows["test"], spec))
    check_frame(frame, expected, spec)
    # new rows without labels, as they come for scoring
    lines = days[3]
    own = compiled.load(base / "out" / "workflow")
    names = [i for i, name in enumerate(spec.input.columns) if name not in ("clicked", "rating")]
    short = [spec.input.delimiter.join(split(line, spec)[i] for i in names) for line in lines]
    text = "".join(f"{line}\n" for line in short).encode()
    encoded = own.transform(parse_rows(text, own.spec, plain_layout(own.spec, label=False)))
    expected = oracle.transform(rows_of(lines, spec))
    for ids, name in zip(encoded.ids, spec.categorical_names, strict=True):
        assert ids.tolist() == expected[name]


def test_drift_extension_and_the_tools(log, tmp_path: Path, capsys) -> None:
    base, spec, days = log
    out = tmp_path / "out"
    (tmp_path / "raw").mkdir()
    for file in [*(base / "raw").iterdir(), *(base / "new").iterdir()]:
        (tmp_path / "raw" / file.name).write_bytes(file.read_bytes())
    run(settings(tmp_path / "raw", out, spec, days=(0, 1, 2)))
    day = str(tmp_path / "raw" / "day_3.csv")
    assert etl(["drift", str(out), "--input", day, "--all_columns"]) == 0
    printed = capsys.readouterr().out
    columns = (*spec.dense, *spec.categorical)
    of_time = {c.name for c in columns if c.derive is not None and c.derive.reads == "time"}
    assert of_time
    for column in columns:  # a day has one weekday
        assert (f" {column.name} " in printed) == (column.name not in of_time), column.name
    command = ["extend", "--output_path", str(out), "--input_path", str(tmp_path / "raw")]
    assert etl([*command, "--days", "3"]) == 0
    assert workflows.inspect(out / "workflow").lineage[-1].days == (3,)
    capsys.readouterr()
    saved = str(out / "workflow")
    assert workflow_tool(["inspect", saved]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in spec.categorical_names)
    _, oracle = expected_splits(days, spec)
    for column in {"hour", "site_app", "amount_log", "month"} & set(spec.categorical_names):
        for value, number in oracle.ids[column].items():  # which the extension kept
            assert workflow_tool(["lookup", saved, column, "--value", str(value)]) == 0
            assert str(number) in capsys.readouterr().out
