"""A log of positives with negatives drawn beside each row, and without; beside Polars.

Polars draws the items of all rows at once, leaves out those that the user has, and writes the rows
as parquet; unlike ours it draws none anew, and looks at no time. Ours is the whole ETL, which also
fits and encodes. Below the table stands what the negatives add.

    python -m benchmarks.negatives --rows 500000
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.data import make_once
from benchmarks.etl.systems import CASE_METRICS, build_environment, etl_case, find_python
from benchmarks.harness import System, Table, describe_added, run_benchmark
from benchmarks.process import BUILD
from benchmarks.raw_log import draw_log, write_csv
from nvt_torchrec.base.command_line import Settings, flag

DRAWN, PLAIN = "negatives", "no negatives"

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
    per_positive: int = flag("rows that are drawn for each", 4, minimum=1)
    items: int = flag("items", 100_000, minimum=100)
    users: int = flag("users", 50_000, minimum=100)
    repeats: int = flag("runs of each system", 3, minimum=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a run failed."""
    return run_benchmark("negatives", __doc__, NegativesSettings, _run, argv)


def _run(settings: NegativesSettings) -> int:
    rows, items, users = settings.rows, settings.items, settings.users
    root = BUILD / f"negatives-{rows}-{items}-{users}"
    log = f"{rows:,} rows, {items:,} items, {users:,} users"
    make_once(root, f"a log of {log}", lambda: _make_log(root, rows, items, users))
    title = f"{settings.per_positive} negatives a row: {log}"
    table = Table("negatives", title, CASE_METRICS, base="polars")
    systems = [_ours(root, case, settings.per_positive) for case in (DRAWN, PLAIN)]
    systems += [_polars(root, case, settings.per_positive) for case in (DRAWN, PLAIN)]
    table.measure(systems, repeats=settings.repeats)
    table.notes += describe_added(table, DRAWN, PLAIN)
    return table.finish()


def _make_log(root: Path, rows: int, items: int, users: int) -> None:
    """Write a log in the order of time."""
    random = np.random.default_rng(0)
    log = draw_log(random, rows, users, items)
    log["item"] -= 1
    log["liked"] = np.ones(rows, np.int8)
    write_csv(log, root / "log.csv")


def _ours(root: Path, case: str, per_positive: int) -> System:
    name = "drawn" if case == DRAWN else "plain"
    spec = _SPEC.format(label="value = 1" if case == DRAWN else "")
    if case == DRAWN:
        spec += _NEGATIVES.format(per_positive=per_positive)
    (root / f"{name}.toml").write_text(spec)
    output = root / name
    flags = "--spec", root / f"{name}.toml", "--input_path", root / "log.csv"
    return etl_case(case, output, *flags)


def _polars(root: Path, case: str, per_positive: int) -> System:
    output = root / "polars.parquet"
    program = Path(__file__).with_name("negatives_peer.py")
    drawn = per_positive if case == DRAWN else 0
    command = [find_python("events"), program, root / "log.csv", output, drawn]

    def result() -> dict[str, float]:
        import pyarrow.parquet as pq

        return {"rows": pq.read_metadata(output).num_rows}

    return System(
        "polars",
        case,
        [str(part) for part in command],
        prepare=lambda: build_environment("events"),
        before=lambda: output.unlink(missing_ok=True),
        result=result,
    )


if __name__ == "__main__":
    sys.exit(main())
