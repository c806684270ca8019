"""Measure the ETL of a log with an additional source of events, and without it.

All cases fit and encode the same rows. With the source, the ETL reads and sorts its events, and
aggregates the user's events of the 7 days before each row: their count, the sum and the newest
value of a column, and the time since the newest event. Without it, there are no events at all, or
only those of the log. A note below the table gives the throughput with the source as a share of the
throughput without it.

    python -m benchmarks.sources --rows 2000000
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.data import make_once
from benchmarks.etl.systems import CASE_METRICS, make_case_system
from benchmarks.harness import System, Table, run_benchmark
from benchmarks.process import BUILD
from benchmarks.raw_log import (
    SECONDS,
    draw_labels,
    draw_log,
    draw_prices,
    draw_user_shares,
    write_csv,
)
from nvt_torchrec.base.command_line import Settings, flag

WINDOW_DAYS = 7
_SPEC = """[input]
format = "csv"
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
names = ["user", "item", "category", "device"]
raw = "int"
"""
_EVENTS = """[events]
time = "time"
time_format = "epoch_s"
"""
_LOG_AGGREGATES = f"""[[aggregate]]
of = ["user"]
values = ["count", "rate"]
window = "{WINDOW_DAYS}d"
"""
_SOURCE_AGGREGATES = f"""[[source]]
name = "purchases"
path = "purchases.csv"
time = "at"
time_format = "epoch_s"
known = "10m"
key = {{user = "user_id"}}
[[aggregate]]
of = ["user"]
source = "purchases"
values = ["count", "sum(amount)", "last(amount)", "since"]
window = "{WINDOW_DAYS}d"
"""
#: Case → additional blocks of the spec.
CASES = {
    "no events": "",
    "source": _EVENTS + _SOURCE_AGGREGATES,
    "log's events": _EVENTS + _LOG_AGGREGATES,
    "both": _EVENTS + _LOG_AGGREGATES + _SOURCE_AGGREGATES,
}
#: The pairs of cases that are compared below the table: with and without the source.
COMPARED = (("source", "no events"), ("both", "log's events"))


@dataclasses.dataclass(frozen=True)
class SourcesSettings(Settings):
    """The settings of the benchmark."""

    rows: int = flag("rows of the log", 2_000_000, minimum=10_000)
    events: int = flag("events of the source", 500_000, minimum=1000)
    users: int = flag("users", 20_000, minimum=100)
    repeats: int = flag("runs of each case", 3, minimum=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a run failed."""
    return run_benchmark("sources", __doc__, SourcesSettings, _run, argv)


def _run(settings: SourcesSettings) -> int:
    rows = settings.rows
    events = settings.events
    users = settings.users
    root = BUILD / f"sources-{rows}-{events}-{users}"
    log = f"{rows:,} rows, {events:,} events of a source, {users:,} users"
    make_once(root, log, lambda: _make_log(root, rows, events, users))
    table = Table("sources", f"Sources: {log}", CASE_METRICS, base="ours")
    systems = [_make_system(root, number) for number in range(len(CASES))]
    table.measure(systems, repeats=settings.repeats)
    table.notes += ["", "rows/s and rows per CPU second, relative to the case without the source:"]
    for case, plain in COMPARED:
        shares = []
        for key in ("wall_s", "cpu_s"):
            # Compare the runs of the same round, because other programs may use the machine.
            slower = table.values("ours", case, key)
            faster = table.values("ours", plain, key)
            ratios = [b / a for a, b in zip(slower, faster, strict=True)]
            shares.append(statistics.median(ratios))
        table.notes.append(f"  {case:6} vs. {plain:12} {shares[0]:.2f}, {shares[1]:.2f}")
    return table.finish()


def _make_log(root: Path, rows: int, events: int, users: int) -> None:
    """Write a log and events, both sorted by time, and a spec for each case."""
    random = np.random.default_rng(0)
    user_shares = draw_user_shares(random, users)
    log = draw_log(random, rows, users, 50_000, user_shares)
    log["category"] = random.integers(0, 50, rows)
    log["device"] = random.integers(0, 5, rows)
    log["price"] = draw_prices(random, rows)
    log["label"] = draw_labels(random, rows)
    write_csv(log, root / "log.csv")
    purchases = {
        "at": np.sort(random.integers(0, SECONDS, events)),
        "user_id": random.choice(users, events, p=user_shares),
        "amount": draw_prices(random, events),
    }
    write_csv(purchases, root / "purchases.csv")
    for number, blocks in enumerate(CASES.values()):
        (root / f"{number}.toml").write_text(_SPEC + blocks)


def _make_system(root: Path, number: int) -> System:
    """Return the ETL of case ``number``."""
    case = [*CASES][number]
    flags = "--spec", root / f"{number}.toml", "--input_path", root / "log.csv"
    return make_case_system(case, root / f"out-{number}", *flags)


if __name__ == "__main__":
    sys.exit(main())
