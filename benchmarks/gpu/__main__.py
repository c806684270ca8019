"""ETL, loader, training and the tests on a GPU, step by step, most valuable first.

A card is often lent for minutes. So each step is a process with a time limit of its own, and a
crash costs one step. After each step build/bench/gpu.json has the table of all figures so far, and
build/bench/gpu/ what the step printed.

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
import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from benchmarks.gpu.steps import Step, all_steps, chosen
from benchmarks.gpu.worker import GpuSettings
from benchmarks.harness import ROOT, Metric, Table, run_benchmark
from benchmarks.process import Run, run
from benchmarks.venvs import BUILD
from nvt_torchrec.base.command_line import flag
from nvt_torchrec.base.errors import SettingsError

log = logging.getLogger("benchmarks")

OUTPUTS = BUILD / "gpu"
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
    # fmt: on


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a step failed."""
    return run_benchmark("gpu", __doc__, BenchmarkSettings, _run, argv)


def _run(settings: BenchmarkSettings) -> int:
    settings = dataclasses.replace(settings, data=settings.data or BUILD / f"gpu-{settings.device}")
    steps = chosen(all_steps(settings), settings.only)
    if settings.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise SettingsError(
                "torch sees no GPU here", "python -m etl doctor says why; --device cpu to try it"
            )
    table = measure(steps, settings.device)
    table.print()
    return 1 if table.failed else 0


def measure(steps: Sequence[Step], device: str) -> Table:
    """Run the steps, each in a process; write the table of their figures after each."""
    table = Table("gpu", f"On {device}", METRICS, base="limit")
    for number, step in enumerate(steps, 1):
        title = f"step {number} of {len(steps)}, {step.name}"
        if step.rapids and (device == "cpu" or find_spec("cudf") is None):
            log.info("%s: left out, it needs a GPU with RAPIDS", title)
            continue
        log.info("%s (at most %.0f s)", title, step.seconds)
        done = run(
            [sys.executable, "-m", *step.command],
            cwd=ROOT,
            timeout=step.seconds,
            result=None if step.part else dict,  # other programs print no results
            output=OUTPUTS / step.name.replace("/", "-").replace(" ", "-"),
        )
        log.info("%s: %.1f s %s", title, done.wall_s, done.error)
        versions = done.output.get("versions", {})
        for result in done.output.get("results", []):
            figures = Run(done.wall_s, 0.0, 0.0, {**result, "versions": versions})
            table.runs[result["system"], result["case"]] = [figures]
        if versions:
            table.notes = [
                f"on: {', '.join(f'{name} {value}' for name, value in versions.items())}"
            ]
        if done.error:
            table.fail(f"step {step.name}", "", done.error)
        table.write()
    return table


if __name__ == "__main__":
    sys.exit(main())
