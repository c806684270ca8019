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
import fnmatch
import logging
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from benchmarks.gpu.worker import GpuSettings
from benchmarks.harness import ROOT, Metric, Table, run_benchmark
from benchmarks.process import BUILD, Run, run
from nvt_torchrec.base.command_line import as_text, flag
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


@dataclasses.dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        name: Unique; its file of output is named after it.
        command: The arguments of ``python -m``.
        seconds: The limit.
        rapids: Whether it cannot run without cuDF.
        part: Whether it is a part of :mod:`benchmarks.gpu.worker`, which prints results.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    rapids: bool = False
    part: bool = False


def all_steps(settings: GpuSettings) -> list[Step]:
    """Return the steps, in their order."""
    small, large = min(settings.batch_sizes), max(settings.batch_sizes)

    def part(name: str, function: str, seconds: float, **needs: bool) -> Step:
        return Step(name, part_command(function, settings), seconds, part=True, **needs)

    def training(way: str, size: int, seconds: float = 120) -> Step:
        command = part_command("training:training", settings, way=way, batch_sizes=(size,))
        return Step(f"training/{way}/B={size}", command, seconds, part=True)

    def engine(name: str) -> Step:
        command = part_command("etl:engine_run", settings, way=name)
        return Step(f"engine/{name}", command, 240, part=True)

    return [
        Step("doctor", ("etl", "doctor"), 90),
        *_tests(),
        part("copies", "etl:copies", 60),
        part("data", "data:make_all", 600),
        part("stages", "etl:stages", 90, rapids=True),
        training("bf16", large),
        training("bf16", small),
        training("bf16 compiled", small, 240),
        training("tf32", large),
        training("fp32", large),
        part("loader", "training:loaders", 120),
        training("bf16 fp16 tables", large),
        engine("cpu"),
        engine("dask"),
    ]


def part_command(function: str, settings: GpuSettings, **changes: object) -> tuple[str, ...]:
    """Return the arguments of ``python -m`` that run a part with the settings."""
    fields = dataclasses.fields(GpuSettings)
    values = {field.name: getattr(settings, field.name) for field in fields}
    values |= {"model": " ".join(settings.model), **changes}
    given = [
        f"--{key}={as_text(value)}" for key, value in values.items() if value not in (None, (), "")
    ]
    return ("benchmarks.gpu.worker", function, *given)


def _tests() -> Iterator[Step]:
    """Yield a process for each file with tests for a GPU: what they find wrong comes first."""
    files = [*(ROOT / "tests" / "gpu").glob("test_*.py"), ROOT / "tests/nvt_loader/test_gpu.py"]
    for file in sorted(files):
        path = str(file.relative_to(ROOT))
        yield Step(f"tests/{path}", ("pytest", "-q", "-m", "gpu", "-rs", path), 240)


def chosen(steps: Sequence[Step], patterns: Sequence[str]) -> list[Step]:
    """Return the steps that one of the patterns names, in their order.

    Args:
        steps: All steps.
        patterns: Shell patterns, for example ``training/*``; empty for all steps.

    Raises:
        SettingsError: The patterns name no step.
    """
    matching = [step for step in steps if any(fnmatch.fnmatch(step.name, p) for p in patterns)]
    if patterns and not matching:
        names = ", ".join(step.name for step in steps)
        raise SettingsError(f"--only {','.join(patterns)}: no such step", f"one of {names}")
    return matching if patterns else list(steps)


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
