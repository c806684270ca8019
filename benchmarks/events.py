"""Compare aggregates and histories of an event log with DuckDB and Polars.

The peers only compute the same aggregates, and the newest 50 items of each row as lists; ours is
the whole ETL, which also fits and encodes, and stores each event once. Each system also runs
without events; then the peers just write the columns that they read. A note below the table gives
the time that the events add.

    python -m benchmarks.events --rows 2000000

For a long log, only ours is measured, and compared with a tenth of the log: rows/s, and the memory
of the process without mapped files. There is one user for every five rows, and a window of 30 of 60
days.

    python -m benchmarks.events --long 40000000

The long log can also run on a Dask cluster of this machine. Then the memory of the coordinator,
which also runs the scheduler, and of the largest worker are shown:

    python -m benchmarks.events --long 10000000 --engine dask --workers 4
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from benchmarks.data import make_once
from benchmarks.etl.systems import make_case_system, make_etl_system, make_parquet_system
from benchmarks.harness import (
    Metric,
    System,
    Table,
    describe_added,
    run_benchmark,
    run_etl,
)
from benchmarks.process import BUILD
from benchmarks.raw_log import (
    draw_items,
    draw_labels,
    draw_log,
    draw_prices,
    draw_user_shares,
    write_csv,
)
from nvt_torchrec.base.command_line import Settings, flag

METRICS = (
    Metric("rows_per_s", "rows/s"),
    Metric("wall_s", "wall s", ".1f"),
    Metric("cpu_s", "CPU s", ".1f"),
    Metric("peak_rss_mb", "peak MB"),
    Metric("mb", "MB of events", ".1f"),
)
EVENTS = "events"
PLAIN = "no events"
#: The most distinct values of a column of ids.
ITEMS = 50_000
WINDOW_DAYS = 7
_SPEC = """[input]
format = "csv"
[split]
by = "time"
column = "time"
time_format = "epoch_s"
valid_from = "{valid}"
test_from = "{test}"
{dense}[[categorical]]
names = {names}
raw = "int"
"""
_DENSE = """[[dense]]
names = "price"
raw = "float"
"""
_EVENTS = f"""[events]
time = "time"
time_format = "epoch_s"
[[aggregate]]
of = ["user"]
[[aggregate]]
of = ["item"]
values = ["count", "rate"]
window = "{WINDOW_DAYS}d"
[[history]]
name = "recent"
of = ["user"]
columns = ["item"]
"""


LONG_METRICS = (
    *METRICS[:3],
    Metric("peak_own_mb", "own MB"),
    METRICS[3],
)
DASK_METRICS = (
    *METRICS[:3],
    Metric("peak_main_mb", "coordinator's own MB"),
    Metric("peak_child_mb", "largest worker's own MB"),
)
_LONG_DAYS = 60
#: The rows of a long log that are drawn at once.
_LONG_ROWS = 4_000_000
_LONG_EVENTS = """[events]
time = "time"
time_format = "epoch_s"
[[aggregate]]
of = ["user"]
values = ["count", "rate"]
window = "30d"
[[history]]
name = "recent"
of = ["user"]
columns = ["item"]
"""


@dataclasses.dataclass(frozen=True)
class EventsSettings(Settings):
    """The settings of the benchmark."""

    rows: int = flag("rows of the log", 2_000_000, minimum=10_000)
    columns: int = flag("number of additional integer columns", 0)
    repeats: int = flag("runs of each system", 3, minimum=1)
    long: int = flag("measure a long log of this many rows instead; 0 for none", 0)
    engine: str = flag("engine for the long log", "cpu", choices=("cpu", "dask"))
    workers: int = flag("threads, or workers of the cluster; 0 for one per core", 0)
    block_mb: int = flag("MiB of the long log per unit of work", 64, minimum=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a run failed."""
    return run_benchmark("events", __doc__, EventsSettings, _run, argv)


def _run(settings: EventsSettings) -> int:
    if settings.long:
        return _run_long(settings)
    rows = settings.rows
    columns = settings.columns
    root = BUILD / f"events-{rows}-{columns}"
    log = f"{rows:,} rows, {columns} additional columns"
    make_once(root, f"an event log of {log}", lambda: _make_log(root, rows, columns))
    table = Table("events", f"Events of {log}", METRICS, base="polars")
    systems = [_make_ours(root, rows, case) for case in (EVENTS, PLAIN)]
    for name in ("duckdb", "polars"):
        systems += [_make_peer(root, name, case) for case in (EVENTS, PLAIN)]
    table.measure(systems, repeats=settings.repeats)
    table.notes += describe_added(table, EVENTS, PLAIN)
    return table.finish()


def _make_log(root: Path, rows: int, columns: int) -> None:
    """Write rows sorted by time, with a hundred rows per user on average."""
    random = np.random.default_rng(0)
    users = rows // 100
    log = draw_log(random, rows, users, ITEMS, draw_user_shares(random, users))
    log["price"] = draw_prices(random, rows)
    log["label"] = draw_labels(random, rows)
    names = ["item"]
    for i in range(columns):
        log[f"x{i}"] = draw_items(random, rows, ITEMS)
        names.append(f"x{i}")
    write_csv(log, root / "log.csv")
    days = {"valid": "1970-01-28", "test": "1970-01-29"}
    spec = _SPEC.format(names=json.dumps(names), dense=_DENSE, **days)
    (root / "events.toml").write_text(spec + _EVENTS)
    (root / "plain.toml").write_text(spec)


def _run_long(settings: EventsSettings) -> int:
    """Measure a tenth of a long log, and all of it."""
    title = f"A tenth of {settings.long:,} rows, and all of them, one user for every 5 rows"
    metrics = LONG_METRICS if settings.engine == "cpu" else DASK_METRICS
    table = Table(f"events-long-{settings.engine}", title, metrics, base="ours")
    options = ["--engine", settings.engine, "--block_mb", settings.block_mb]
    if settings.workers:
        options += ["--workers", settings.workers]
    systems: list[System] = []
    for rows in (settings.long // 10, settings.long):
        root = BUILD / f"events-long-{rows}"
        make_once(root, f"a log of {rows:,} rows", functools.partial(_make_long_log, root, rows))
        flags = "--spec", root / "events.toml", "--input_path", root / "log.csv"
        system = make_case_system(f"{rows:,} rows", root / "out", *flags, *options)
        if systems:  # preparing the first system has filled the cache of compiled kernels
            system = dataclasses.replace(system, prepare=lambda: None)
        systems.append(dataclasses.replace(system, timeout=7200))
    table.measure(systems, repeats=settings.repeats)
    return table.finish()


def _make_long_log(root: Path, rows: int) -> None:
    """Write rows sorted by time, one part at a time."""
    random = np.random.default_rng(0)
    times = np.sort(random.integers(0, _LONG_DAYS * 86_400, rows))
    with open(root / "log.csv", "wb") as file:
        for begin in range(0, rows, _LONG_ROWS):
            part_times = times[begin : begin + _LONG_ROWS]
            count = len(part_times)
            log = pa.table(
                {
                    "time": part_times,
                    "user": random.integers(0, rows // 5, count),
                    "item": draw_items(random, count, ITEMS),
                    "label": draw_labels(random, count),
                }
            )
            options = pa_csv.WriteOptions(include_header=begin == 0)
            pa_csv.write_csv(log, file, options)
    days = {"valid": "1970-02-27", "test": "1970-02-28"}
    spec = _SPEC.format(names=json.dumps(["item"]), dense="", **days)
    (root / "events.toml").write_text(spec + _LONG_EVENTS)


def _make_ours(root: Path, rows: int, case: str) -> System:
    """Return the ETL, with or without events."""
    spec = {EVENTS: "events", PLAIN: "plain"}[case]
    output = root / spec
    flags = "--spec", root / f"{spec}.toml", "--input_path", root / "log.csv"
    system = make_etl_system("ours", output, *flags)

    def result() -> dict[str, float]:
        history = (output / "criteo_binary/split/_histories").rglob("*.npy")
        pointer_bytes = 2 * 4 * rows if case == EVENTS else 0  # two int32 columns of the parquet
        size = sum(file.stat().st_size for file in history) + pointer_bytes
        return {**system.result(), "mb": size / 1e6}

    def prepare() -> None:
        """Fill the cache of compiled kernels; the first rows alone have no valid and test."""
        system.before()
        run_etl("run", *flags, "--output_path", output)

    return dataclasses.replace(system, case=case, result=result, prepare=prepare)


def _make_peer(root: Path, name: str, case: str) -> System:
    """Return DuckDB or Polars, with or without events."""
    output = root / f"{name}.parquet"
    window = WINDOW_DAYS * 86_400 if case == EVENTS else 0
    arguments = [name, root / "log.csv", output, window]
    system = make_parquet_system(name, case, "events_peers.py", output, arguments)

    def result() -> dict[str, float]:
        footer = pq.read_metadata(output)
        size = 0
        for j in range(footer.num_columns):
            if footer.schema.column(j).path.startswith("recent"):
                for i in range(footer.num_row_groups):
                    size += footer.row_group(i).column(j).total_compressed_size
        return {"rows": footer.num_rows, "mb": size / 1e6}

    return dataclasses.replace(system, result=result)


if __name__ == "__main__":
    sys.exit(main())
