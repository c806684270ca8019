"""Compare drawing negatives for a log of positives with Polars.

Polars draws the items of all rows at once, leaves out items that the user has, and writes the rows
as parquet; unlike ours, it does not redraw items that it left out, and ignores times. Ours is the
whole ETL, which also fits and encodes. Each system also runs without negatives. A note below the
table gives the time that the negatives add.

    python -m benchmarks.negatives --rows 500000
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.data import make_once
from benchmarks.etl.systems import CASE_METRICS, make_case_system, make_parquet_system
from benchmarks.harness import System, Table, describe_added, run_benchmark
from benchmarks.process import BUILD
from benchmarks.raw_log import draw_log, write_csv
from nvt_torchrec.base.command_line import Settings, flag

DRAWN = "negatives"
PLAIN = "no negatives"
_SPEC = """[input]
format = "csv"
[label]
name = "liked"
{label}
[split]
by = "time"
column = "time"
time_format = "epoch_s"
valid_from = "1970-01-28"
test_from = "1970-01-29"
[[categorical]]
names = ["user", "item"]
raw = "int"
"""
_NEGATIVES = """[negatives]
item = "item"
user = "user"
per_positive = {per_positive}
"""


@dataclasses.dataclass(frozen=True)
class NegativesSettings(Settings):
    """The settings of the benchmark."""

    rows: int = flag("rows of the log", 500_000, minimum=10_000)
    per_positive: int = flag("negatives to draw for each row", 4, minimum=1)
    items: int = flag("items", 100_000, minimum=100)
    users: int = flag("users", 50_000, minimum=100)
    repeats: int = flag("runs of each system", 3, minimum=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a run failed."""
    return run_benchmark("negatives", __doc__, NegativesSettings, _run, argv)


def _run(settings: NegativesSettings) -> int:
    rows = settings.rows
    items = settings.items
    users = settings.users
    root = BUILD / f"negatives-{rows}-{items}-{users}"
    log = f"{rows:,} rows, {items:,} items, {users:,} users"
    make_once(root, f"a log of {log}", lambda: _make_log(root, rows, items, users))
    title = f"{settings.per_positive} negatives per row: {log}"
    table = Table("negatives", title, CASE_METRICS, base="polars")
    systems = [_make_ours(root, case, settings.per_positive) for case in (DRAWN, PLAIN)]
    systems += [_make_polars(root, case, settings.per_positive) for case in (DRAWN, PLAIN)]
    table.measure(systems, repeats=settings.repeats)
    table.notes += describe_added(table, DRAWN, PLAIN)
    return table.finish()


def _make_log(root: Path, rows: int, items: int, users: int) -> None:
    """Write a log sorted by time."""
    random = np.random.default_rng(0)
    log = draw_log(random, rows, users, items)
    log["item"] -= 1
    log["liked"] = np.ones(rows, np.int8)
    write_csv(log, root / "log.csv")


def _make_ours(root: Path, case: str, per_positive: int) -> System:
    """Return the ETL, with or without negatives."""
    if case == DRAWN:
        name = "drawn"
        spec = _SPEC.format(label="value = 1") + _NEGATIVES.format(per_positive=per_positive)
    else:
        name = "plain"
        spec = _SPEC.format(label="")
    spec_file = root / f"{name}.toml"
    spec_file.write_text(spec)
    flags = "--spec", spec_file, "--input_path", root / "log.csv"
    return make_case_system(case, root / name, *flags)


def _make_polars(root: Path, case: str, per_positive: int) -> System:
    """Return Polars, with or without negatives."""
    output = root / "polars.parquet"
    drawn = per_positive if case == DRAWN else 0
    arguments = [root / "log.csv", output, drawn]
    return make_parquet_system("polars", case, "negatives_peer.py", output, arguments)


if __name__ == "__main__":
    sys.exit(main())
