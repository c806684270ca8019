"""Compare the ETL with NVTabular and Polars: a raw log → vocabularies → training parquet.

Every program reads the same text and writes the same values: vocabularies by falling count (ties
by value), ids int32, dense log-normalized float32, uncompressed parquet. Their outputs are compared
value by value; a program with a different output counts as failed. Times are those of whole
processes, including their start.
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # before slow imports: Ctrl-C prints one line from here on

# isort: split
import dataclasses
import logging
import shutil
import sys

from benchmarks.etl import systems
from benchmarks.etl.systems import DAYS, NVTABULAR, POLARS, Log, make_log
from benchmarks.etl.verify import DifferentOutputError, compare
from benchmarks.harness import CPU, MEMORY, WALL, Metric, System, Table, run_benchmark
from benchmarks.process import BUILD
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.etl.settings import cores
from nvt_torchrec.formats.feature_spec.toml_file import load_spec

ETL = "TSV to parquet"
OURS, OURS_DASK, OURS_NVTABULAR = "ours cpu", "ours dask", "ours nvtabular"
NVTABULAR_NAME, POLARS_STAGED = "nvtabular 23.8", "polars staged"


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings(Settings):
    """The settings of the benchmark."""

    # fmt: off
    rows: int = flag("rows of the log to make", 4_000_000, least=1)
    repeats: int = flag("runs of each system", 3, least=1)
    slow_repeats: int = flag("runs of the slow systems (nvtabular, dask)", 1, least=1)
    threads: int = flag("threads of every system", cores, least=1)
    only: str = flag(
        "only the lines with one of these, for example 'polars,cpu TSV'", "", metavar="WORDS"
    )
    # fmt: on


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a system failed."""
    return run_benchmark("etl", __doc__, BenchmarkSettings, _run, argv)


def _run(settings: BenchmarkSettings) -> int:
    work = BUILD / "etl"
    path = work / f"log-{settings.rows}"
    make_log(path, settings.rows)
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    log = Log(path, settings.rows // DAYS * DAYS, out, settings.threads)
    chosen = [
        system
        for system in _systems(log, settings.slow_repeats)
        if any(word in f"{system.name} {system.case}" for word in settings.only.split(","))
    ]
    megabytes = sum(file.stat().st_size for file in path.glob("day_*")) / 1e6
    table = Table(
        "etl",
        f"ETL of {log.rows:,} rows ({megabytes:,.0f} MB of text, {DAYS} days), "
        f"{log.threads} threads",
        [Metric("rows_per_s", "rows/s", ratio=True), WALL, CPU, MEMORY],
        base="polars",
    )
    table.measure(chosen, repeats=settings.repeats)
    logging.getLogger("benchmarks").info("comparing what they wrote")
    _compare(table, log)
    shutil.rmtree(out)
    return table.finish()


def _systems(log: Log, slow: int) -> list[System]:
    return [
        systems.ours(log, "cpu", OURS, ETL),
        systems.peer(log, POLARS, "polars", case=ETL),
        systems.peer(log, POLARS, POLARS_STAGED, "--stage", "disk", case=ETL),
        systems.ours(log, "dask", OURS_DASK, ETL, repeats=slow),
        systems.ours(log, "nvtabular", OURS_NVTABULAR, ETL, repeats=slow),
        systems.peer(log, NVTABULAR, NVTABULAR_NAME, case=ETL, repeats=slow),
    ]


def _compare(table: Table, log: Log) -> None:
    """Compare the outputs of the last runs with ours, and note the result."""
    done = [name for name, case in table.runs if (name, case) not in table.failed]
    if OURS not in done:
        table.notes.append("outputs were not compared: our cpu engine wrote none")
        return
    spec, agreed = load_spec(), []
    columns = spec.label, spec.dense_names, spec.categorical_names
    ours = systems.list_output(log, OURS, ETL)
    train_rows = log.rows * (DAYS - 1) // DAYS
    for system in done:
        if system == OURS:
            continue
        ties = system == NVTABULAR_NAME  # orders equally frequent values in its own way
        theirs = systems.list_output(log, system, ETL)
        try:
            summary = compare(ours, theirs, train_rows, *columns, same_ties=not ties)
        except DifferentOutputError as error:
            table.fail(system, ETL, error.what)
        else:
            agreed.append(f"{system} (up to ties)" if ties else system)
    if agreed:
        table.notes.append(f"same output as ours: {', '.join(agreed)}: {summary}")


if __name__ == "__main__":
    sys.exit(main())
