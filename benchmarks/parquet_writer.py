"""Compare the ETL's parquet writer with Arrow's: CPU time, size, and the time to read the file.

Both write the same rows from memory, in the same row groups, uncompressed and with page checksums;
*arrow, snappy* is Arrow's writer with its default compression. Each run is a separate process
(:mod:`.parquet_writer_worker`), whose start is not counted. pyarrow reads each file back with one
thread, and the rows are compared.

    python -m benchmarks.parquet_writer --rows 1000000
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.data import make_criteo_schema, make_once, write_rows
from benchmarks.harness import Metric, System, Table, run_benchmark
from benchmarks.parquet_writer_worker import WRITERS
from benchmarks.process import BUILD
from nvt_torchrec.base.command_line import Settings, flag

METRICS = (
    Metric("write_cpu_s", "write CPU s", ".2f", ratio=True),
    Metric("write_wall_s", "wall s", ".2f"),
    Metric("mb", "MB", ".1f", ratio=True),
    Metric("read_cpu_s", "read CPU s", ".2f", ratio=True),
    Metric("read_wall_s", "wall s", ".2f"),
)
#: Case → multi-hot columns; the other columns of Criteo's log have one id per row.
CASES = {"ids": (), "lists": ("cat_0", "cat_4", "cat_9", "cat_19")}


@dataclasses.dataclass(frozen=True)
class WriterSettings(Settings):
    """The settings of the benchmark."""

    rows: int = flag("rows of the file to write", 1_000_000, minimum=1_000)
    repeats: int = flag("runs of each writer", 5, minimum=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a run failed."""
    return run_benchmark("parquet_writer", __doc__, WriterSettings, _run, argv)


def _run(settings: WriterSettings) -> int:
    rows = settings.rows
    systems = []
    for case, lists in CASES.items():
        root = BUILD / f"parquet-{rows}-{case}"
        _make_part(root, rows, lists)
        for writer in WRITERS:
            worker = [sys.executable, "-m", "benchmarks.parquet_writer_worker"]
            files = [root / "train" / "part.0.parquet", root / "written.parquet"]
            systems.append(System(writer, case, [*worker, writer, *files]))
    title = f"Writing a file of {rows:,} rows of Criteo's columns"
    table = Table("parquet_writer", title, METRICS, base="arrow")
    table.measure(systems, repeats=settings.repeats)
    return table.finish()


def _make_part(root: Path, rows: int, lists: tuple[str, ...]) -> None:
    """Write the rows once, as one file; columns named in ``lists`` are multi-hot."""
    schema = make_criteo_schema(multi_hot=lists)
    contents = f"a part of {rows:,} rows, lists: {', '.join(lists) or 'none'}"
    make_once(root, contents, lambda: write_rows(root / "train", schema, rows, file_rows=rows))


if __name__ == "__main__":
    sys.exit(main())
