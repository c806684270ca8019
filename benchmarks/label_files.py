"""Measure the ETL of a log that contains its clicks, and of a log with its clicks in another file.

Clicks of the file are matched by the id of the impression, or by user and item; then a click
belongs to the newest impression before it. A note below the table gives the time that the file
adds.

    python -m benchmarks.label_files --rows 2000000
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from benchmarks.data import make_once
from benchmarks.etl.systems import CASE_METRICS, make_case_system
from benchmarks.harness import System, Table, describe_added, run_benchmark
from benchmarks.process import BUILD
from nvt_torchrec.base.command_line import Settings, flag

DAYS = 30
INSIDE = "in the log"
#: Case → block ``[label]`` of the spec.
LABELS = {
    INSIDE: 'name = "click"',
    "by id": 'name = "click"\nfrom = "clicks.csv"\nkey = "id"\nwithin = "1h"',
    "by pair": 'name = "click"\nfrom = "clicks.csv"\nkey = ["user", "item"]\nwithin = "1h"',
}
_SPEC = """[input]
format = "csv"
[label]
{label}
[split]
by = "time"
column = "time"
time_format = "epoch_s"
valid_from = "1970-01-28"
test_from = "1970-01-29"
[[dense]]
names = "price"
raw = "float"
[[categorical]]
names = ["user", "item", "place"]
raw = "int"
"""


@dataclasses.dataclass(frozen=True)
class LabelFileSettings(Settings):
    """The settings of the benchmark."""

    rows: int = flag("rows of the log", 2_000_000, minimum=10_000)
    click_rate: float = flag("share of the rows that are clicked", 0.1, minimum=0, maximum=1)
    repeats: int = flag("runs of each case", 3, minimum=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a run failed."""
    return run_benchmark("label_files", __doc__, LabelFileSettings, _run, argv)


def _run(settings: LabelFileSettings) -> int:
    rows = settings.rows
    rate = settings.click_rate
    root = BUILD / f"labels-{rows}-{rate}"
    log = f"{rows:,} rows, {rate:.0%} of them clicked"
    make_once(root, f"a log and its clicks, {log}", lambda: _make_log(root, rows, rate))
    table = Table("label_files", f"Clicks in a separate file: {log}", CASE_METRICS, base="")
    table.measure([_make_system(root, case) for case in LABELS], repeats=settings.repeats)
    for case in [*LABELS][1:]:
        table.notes += describe_added(table, case, INSIDE)
    return table.finish()


def _make_log(root: Path, rows: int, rate: float) -> None:
    """Write a log with its clicks, and a file of the clicks, both sorted by time."""
    random = np.random.default_rng(0)
    time = np.sort(random.integers(0, DAYS * 86_400, rows))
    clicked = random.random(rows) < rate
    log = {
        "time": time,
        "id": np.arange(rows),
        "user": random.integers(0, rows // 10, rows),
        "item": np.minimum(random.zipf(1.3, rows), 100_000),
        "place": random.integers(0, 50, rows),
        "price": random.lognormal(3, 1, rows).round(2),
        "click": clicked.astype(np.int8),
    }
    pa_csv.write_csv(pa.table(log), root / "log.csv")
    clicks = {name: log[name][clicked] for name in ("time", "id", "user", "item")}
    clicks["time"] = clicks["time"] + random.exponential(600, len(clicks["time"])).astype(int)
    order = np.argsort(clicks["time"], kind="stable")
    arrived = {name: values[order] for name, values in clicks.items()}
    pa_csv.write_csv(pa.table(arrived), root / "clicks.csv")
    for case, label in LABELS.items():
        (root / f"{case}.toml").write_text(_SPEC.format(label=label))


def _make_system(root: Path, case: str) -> System:
    output = root / "out"
    flags = "--spec", root / f"{case}.toml", "--input_path", root / "log.csv"
    return make_case_system(case, output, *flags, name="etl")


if __name__ == "__main__":
    sys.exit(main())
