"""Logs whose features are derived from other columns: drift, extension and the tools."""

from __future__ import annotations

import datetime
import random
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

from nvt_torchrec.clicklog.text.line_layout import plain_layout
from nvt_torchrec.clicklog.text.tokenizer import parse_rows
from nvt_torchrec.etl.__main__ import main as etl
from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.workflows.__main__ import main as workflow_tool
from nvt_torchrec.workflows.description import inspect
from tests.etl.runs import settings
from tests.workflows.random_specs import Oracle

#: The label in the middle, a field that nothing reads, and columns that several features read.
SPEC = """
dense = [
    {names = "age", derive = "age", from = ["time", "born"], transform = "normalize"},
    {names = "amount", raw = "int32", fill = -1, lenient = true, nulls = ["NA"]},
]
categorical = [
    {names = "hour", derive = "hour", from = "time"},
    {names = "weekday", derive = "weekday", from = "time"},
    {names = ["site", "app"], raw = "string", nulls = ["-"], freq_threshold = 2},
    {names = "site_app", derive = "cross", from = ["site", "app"], max_table_size = 12},
    {names = "amount_log", derive = "log_square", from = "amount", lenient = true, nulls = ["NA"]},
    {names = "bucket", derive = "bucket", from = "site_size", boundaries = [0, 2, 50]},
    {names = "month", derive = "month", from = "born"},
]

[input]
format = "csv"
delimiter = ";"
columns = ["site_size", "time", "", "clicked", "site", "app", "born", "amount"]

[label]
name = "click"
from = "clicked"
"""


def line(rng: random.Random) -> str:
    time = datetime.datetime(2014, 10, 21) + datetime.timedelta(hours=rng.randrange(24 * 9))
    site, app = rng.choice("aabbcd-é"), rng.choice(["x", "x", "y", "-", ""])
    born = datetime.date(1900, 1, 1) + datetime.timedelta(days=rng.randrange(40_000))
    amount = rng.choice(["NA", "", "+5", "260.0", str(rng.randrange(-3, 90))])
    size = rng.randrange(-3, 90)
    return f"{size};{time};x;{rng.randrange(2)};{site};{app};{born};{amount}"


def test_drift_extension_and_the_tools(tmp_path: Path, capsys) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    spec = load_spec(tmp_path / "spec.toml")
    rng, out = random.Random(4), tmp_path / "out"
    (tmp_path / "raw").mkdir()
    days = ["".join(f"{line(rng)}\n" for _ in range(count)) for count in (150, 90, 61, 70)]
    for number, lines in enumerate(days):
        (tmp_path / "raw" / f"day_{number}.csv").write_text(lines)
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
    assert inspect(out / "workflow").lineage[-1].days == (3,)
    capsys.readouterr()
    saved = str(out / "workflow")
    assert workflow_tool(["inspect", saved]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in spec.categorical_names)
    oracle = Oracle(
        spec, [parse_rows((days[0] + days[1]).encode(), spec, plain_layout(spec, label=True))]
    )
    for column in ("hour", "site_app", "amount_log", "month"):
        for value, number in oracle.ids[column].items():  # which the extension kept
            assert workflow_tool(["lookup", saved, column, "--value", str(value)]) == 0
            assert str(number) in capsys.readouterr().out
