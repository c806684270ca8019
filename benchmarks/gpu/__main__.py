"""ETL, loader, training and the tests on a GPU, step by step, most valuable first.

Each step is a process with a time limit of its own, so that a crash costs one step. What a step
found is kept at once in build/bench/gpu.jsonl, and what it printed in build/bench/gpu/; --resume
leaves out what succeeded with the same arguments. At the end a table shows all figures.

"x limit" is within a case: of the ETL against copying from pinned memory (in GB/s), of the loader
against `cudf.read_parquet` alone, of training against batches that lie ready. GB/s of the ETL are
of text. "wait" is the share of the time in which a training step waits for its batch. Tables are
MLPerf's (97 GiB in float32: one card of 141 GB holds them; give --max_table_rows to others).

With --device cpu everything runs at whatever size is asked for, but what needs cuDF: that shows
that the benchmark works, and its figures mean nothing.
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import dataclasses
import sys
from collections.abc import Iterable

from benchmarks.gpu.runner import FAILED, RECORDS, Record, run_steps
from benchmarks.gpu.steps import all_steps, chosen
from benchmarks.gpu.worker import GpuSettings
from benchmarks.harness import Metric, Table, run_benchmark
from benchmarks.process import Run
from benchmarks.venvs import BUILD
from nvt_torchrec.base.command_line import flag
from nvt_torchrec.base.errors import SettingsError

METRICS = (
    Metric("rows_per_s", "M rows/s", ".3f", ratio=True, scale=1e-6),
    Metric("gb_per_s", "GB/s", ".2f", ratio=True),
    Metric("ms", "ms", ",.2f"),
    Metric("wait_share", "wait %", ".1f", scale=100),
)


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings(GpuSettings):
    """The settings of the benchmark."""

    # fmt: off
    only: tuple[str, ...] = flag("run only steps with these names, for example 'training/*'", ())
    resume: bool = flag("leave out steps that have succeeded with the same arguments", False)
    list: bool = flag("list the steps and their time limits", False)
    # fmt: on


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a step failed."""
    return run_benchmark("gpu", __doc__, BenchmarkSettings, _run, argv)


def _run(settings: BenchmarkSettings) -> int:
    shared = GpuSettings(
        **{field.name: getattr(settings, field.name) for field in dataclasses.fields(GpuSettings)}
    )
    shared = dataclasses.replace(shared, data=settings.data or BUILD / f"gpu-{settings.device}")
    steps = chosen(all_steps(shared), settings.only)
    if settings.list:
        for step in steps:
            print(f"{step.seconds:5.0f} s  {step.name}")
        return 0
    if settings.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise SettingsError(
                "torch sees no GPU here", "python -m etl doctor says why; --device cpu to try it"
            )
    records = run_steps(steps, shared, resume=settings.resume)
    table = as_table(records, settings.device)
    table.print()
    print(f"written to {table.write()} and {RECORDS}")
    return 1 if any(record.status == FAILED for record in records) else 0


def as_table(records: Iterable[Record], device: str) -> Table:
    """Put the figures of the steps into a table."""
    table = Table("gpu", f"On {device}", METRICS, base="limit")
    for record in records:
        for result in record.results:
            output = {**result, "versions": record.versions}
            table.runs[result["system"], result["case"]] = [Run(record.wall_s, 0.0, 0.0, output)]
        if record.status == FAILED:
            table.fail(f"step {record.step}", "", record.error)
        if record.versions:
            versions = ", ".join(f"{name} {value}" for name, value in record.versions.items())
            table.notes = [f"on: {versions}"]
    return table


if __name__ == "__main__":
    sys.exit(main())
