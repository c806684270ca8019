"""ETL, loader, training and inference on a GPU, each beside its limit, in one table.

"x limit" is within a case: of the ETL against copying from pinned memory (in GB/s), of the loader
against `cudf.read_parquet` alone, of training against batches that lie ready. GB/s of the ETL are
of text. "wait" is the share of the time in which a training step waits for its batch. Tables are
MLPerf's (97 GiB in float32: one card of 141 GB holds them; give --max_table_rows to others).

A part that fails or outlasts its time stays in the table as failed, with what it found until then.
With --device cpu everything runs at whatever size is asked for, but what needs cuDF: that shows
that the benchmark works, and its figures mean nothing.
"""

from __future__ import annotations

import clicklog.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.worker import PARTS, GpuSettings
from benchmarks.harness import Metric, Table, run_benchmark
from benchmarks.process import Run, run
from benchmarks.venvs import BUILD
from clicklog.command_line import as_text, flag
from clicklog.errors import SettingsError

METRICS = (
    Metric("rows_per_s", "M rows/s", ".3f", ratio=True, scale=1e-6),
    Metric("gb_per_s", "GB/s", ".2f", ratio=True),
    Metric("ms", "ms", ",.2f"),
    Metric("wait_share", "wait %", ".1f", scale=100),
)
#: What issue 8 asks of one H200.
LEAST_LOADER, LEAST_TRAINING, LEAST_SAMPLES, LEAST_TEXT = 0.8, 0.97, 4.1e6, 3.0


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings(GpuSettings):
    """The settings of the benchmark."""

    parts: tuple[str, ...] = flag("the parts to run", tuple(PARTS), choices=tuple(PARTS))
    limit: float | None = flag("seconds that each part may take", None, above=0)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a part failed."""
    return run_benchmark("gpu", __doc__, BenchmarkSettings, _run, argv)


def _run(settings: BenchmarkSettings) -> int:
    if settings.device != "cpu" and not _has_gpu():
        raise SettingsError(
            "torch sees no GPU here", "python -m etl doctor says why; --device cpu to try it"
        )
    table = Table("gpu", f"On {settings.device}, {settings.rows:,} rows", METRICS, base="limit")
    for part in settings.parts:
        _measure(part, settings, table)
    if settings.device != "cpu":
        table.notes += _notes(table)
    table.print()
    print(f"written to {table.write(parts=settings.parts)}")
    return 1 if table.failed else 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _measure(part: str, settings: BenchmarkSettings, table: Table) -> None:
    """Run a part in a process of its own, and put what it found into the table."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        command = [sys.executable, "-m", "benchmarks.gpu.worker", part, "--results", results]
        data = settings.data or BUILD / f"gpu-{settings.device}"
        for name in ("device", "rows", "log_rows", "max_table_rows", "batch_sizes", "seconds"):
            command += [f"--{name}={as_text(getattr(settings, name))}"]
        command += [f"--data={data}", f"--model={' '.join(settings.model)}"]
        done = run(command, timeout=settings.limit or PARTS[part][1])
        lines = results.read_text().splitlines() if results.exists() else []
    for line in lines:
        found = json.loads(line)
        key = found.pop("system"), found.pop("case")
        found["versions"] = done.output.get("versions", {})
        table.runs[key] = [Run(done.wall_s, done.cpu_s, done.peak_rss_mb, found)]
    if done.error:
        table.fail(part, "", done.error)
    if versions := done.output.get("versions"):
        line = ", ".join(f"{name} {value}" for name, value in versions.items())
        table.notes[:] = [f"on: {line}"]


def _notes(table: Table) -> list[str]:
    """What was asked for, and what came."""
    found = []
    best = 0.0
    for system, case in table.runs:
        rate = table.ratio(system, case, "rows_per_s")
        if case.startswith("loader") and system.startswith("ours"):
            found.append((f"{case}, {system}: {rate or 0:.2f} of decoding", rate, LEAST_LOADER))
        if system.startswith("from "):
            found.append(
                (f"{case}, {system}: {rate or 0:.3f} of ready batches", rate, LEAST_TRAINING)
            )
            best = max(best, table.median(system, case, "rows_per_s") or 0.0)
    if best:
        found.append((f"training: {best / 1e6:.2f} M samples/s", best, LEAST_SAMPLES))
    text = table.median("dask engine: both", "ETL", "gb_per_s")
    if text:
        found.append((f"ETL: {text:.2f} GB/s of text", text, LEAST_TEXT))
    lines = ["asked for, of one H200:"] if found else []
    for words, value, least in found:
        reached = value is not None and value >= least
        lines.append(f"  {words}: {'reached' if reached else 'MISSED'} (>= {least:g})")
    return lines


if __name__ == "__main__":
    sys.exit(main())
