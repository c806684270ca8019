"""Compare the ETL with NVTabular and Polars: a raw log → vocabularies → training parquet.

Every program reads the same text and writes the same values: vocabularies sorted by falling count
(ties by value), int32 ids, log-normalized float32 dense columns, uncompressed parquet. The outputs
are compared value by value; a program with a different output counts as failed. Times include the
start of the processes.
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # first: makes Ctrl-C print one line, no traceback

# isort: split
import dataclasses
import logging
import shutil
import sys
from pathlib import Path

from benchmarks.etl.systems import (
    DAYS,
    NVTABULAR,
    POLARS,
    list_output,
    make_etl_system,
    make_log,
    make_peer_system,
)
from benchmarks.etl.verify import DifferentOutputError, compare
from benchmarks.harness import CPU, MEMORY, WALL, Metric, Table, run_benchmark
from benchmarks.process import BUILD
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.threads import count_cores
from nvt_torchrec.formats.feature_spec.toml_file import load_spec

OURS = "ours cpu"
NVTABULAR_NAME = "nvtabular 23.8"


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings(Settings):
    """The settings of the benchmark."""

    rows: int = flag("rows of the log to generate", 4_000_000, minimum=1)
    repeats: int = flag("runs of each system; nvtabular and dask always run once", 3, minimum=1)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a system failed."""
    return run_benchmark("etl", __doc__, BenchmarkSettings, _run, argv)


def _run(settings: BenchmarkSettings) -> int:
    log = BUILD / "etl" / f"log-{settings.rows}"
    out = BUILD / "etl" / "out"
    make_log(log, settings.rows)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    rows = settings.rows // DAYS * DAYS
    megabytes = sum(file.stat().st_size for file in log.glob("day_*")) / 1e6
    table = Table(
        "etl",
        f"ETL of {rows:,} rows ({megabytes:,.0f} MB of text, {DAYS} days), {count_cores()} threads",
        [Metric("rows_per_s", "rows/s", ratio=True), WALL, CPU, MEMORY],
        base="polars",
    )
    flags = "--engine", "cpu", "--input_path", log
    staged = "polars staged"
    systems = [
        make_etl_system(OURS, out / OURS, *flags),
        make_peer_system("polars", POLARS, log, rows, out / "polars"),
        make_peer_system(staged, POLARS, log, rows, out / staged, "--stage", "disk"),
    ]
    for engine in ("dask", "nvtabular"):
        flags = "--engine", engine, "--input_path", log
        systems.append(make_etl_system(f"ours {engine}", out / f"ours {engine}", *flags, repeats=1))
    systems.append(
        make_peer_system(NVTABULAR_NAME, NVTABULAR, log, rows, out / NVTABULAR_NAME, repeats=1)
    )
    table.measure(systems, repeats=settings.repeats)
    logging.getLogger("benchmarks").info("comparing what they wrote")
    _compare(table, out, rows * (DAYS - 1) // DAYS)
    shutil.rmtree(out)
    return table.finish()


def _compare(table: Table, out: Path, train_rows: int) -> None:
    """Compare the outputs of the last runs with ours, and note the result."""
    done = [name for name, _ in table.runs if (name, "") not in table.failed]
    if OURS not in done:
        table.notes.append("outputs were not compared: our cpu engine wrote none")
        return
    spec = load_spec()
    columns = spec.label, spec.dense_names, spec.categorical_names
    equal = []
    ours = list_output(out / OURS)
    for system in done:
        if system == OURS:
            continue
        same_ties = system != NVTABULAR_NAME  # NVTabular orders equally frequent values differently
        theirs = list_output(out / system)
        try:
            summary = compare(ours, theirs, train_rows, *columns, same_ties=same_ties)
        except DifferentOutputError as error:
            table.fail(system, "", error.what)
        else:
            equal.append(system if same_ties else f"{system} (up to ties)")
    if equal:
        table.notes.append(f"same output as ours: {', '.join(equal)}: {summary}")


if __name__ == "__main__":
    sys.exit(main())
