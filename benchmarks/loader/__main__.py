"""Compare loaders from parquet to DLRM batches: ours, Merlin's, TorchRec's and a plain one.

Every run is a process of its own that iterates for some seconds. Its start is not counted, and
rates exclude the first batch. "limit" systems do only a part of the work: decode with one thread
(page checksums verified, no batches), or copy a batch. "x merlin stock" compares within a case.
"later ms" and "CPU ms" are the times to the first batch of a later epoch. "x decode" is the
loader's rate over that of one decoding thread, by wall-clock time (the loader has two threads where
there are two processors) and by CPU time. Training steps are those of a small DLRM
(DistributedModelParallel, TrainPipelineSparseDist, B = 2048). "x ready" is the time of a step over
that of a step whose batch is already in memory. Both sides of these ratios are measured in turn in
the same process. "others %" is the share of the machine that other programs took; where it is high,
targets are not judged.
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Metric, System, Table, run_benchmark
from benchmarks.loader.data import bytes_per_row, ensure
from benchmarks.loader.systems import DECODE, MEMCPY, NPY, OURS, PLAIN, STOCK
from benchmarks.venvs import BUILD
from nvt_torchrec.base.command_line import Settings, flag

METRICS = (
    Metric("samples_per_s", "M samples/s", ".2f", ratio=True, scale=1e-6),
    Metric("samples_per_cpu_s", "M samples/CPU s", ".2f", ratio=True, scale=1e-6),
    Metric("first_batch_ms", "first ms"),
    Metric("next_epoch_ms", "later ms"),
    Metric("next_epoch_cpu_ms", "CPU ms"),
    Metric("decode_share", "x decode", ".2f"),
    Metric("decode_share_cpu", "by CPU", ".2f"),
    Metric("step_ms", "step ms", ".1f"),
    Metric("step_ratio", "x ready", ".2f"),
    Metric("loading_mb", "peak MB"),
    Metric("others", "others %", ".0f", scale=100),
)
#: What issue 4 asks of each case, as a multiple of the stock loader's samples/s.
TARGETS = {"B=256": 20, "B=2048": 6, "B=65536": 2.7, "multi-hot B=2048": 10}

SIZES = [f"B={size}" for size in (256, 2048, 16384, 65536)]
PEAKS = [*SIZES, "shuffled B=2048", "int64 B=2048"]

#: Share of the machine that others may take while something is judged.
QUIET = 0.1


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings(Settings):
    """The settings of the benchmark."""

    rows: int = flag("rows of the data to make", 4_000_000, least=1)
    repeats: int = flag("runs of our loader and of Merlin's; the others run once", 2, least=1)
    seconds: float = flag("seconds that a run iterates", 2.0, above=0)
    cases: str = flag("only the cases with this in their name", "")
    systems: tuple[str, ...] = flag(f"only these systems, for example '{OURS},{STOCK}'", ())


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a system failed."""
    return run_benchmark("loader", __doc__, BenchmarkSettings, _run, argv)


def _run(settings: BenchmarkSettings) -> int:
    data = BUILD / "loader-data"
    ensure(data, settings.rows)
    chosen = [
        system for system in _systems(data, settings.seconds) if settings.cases in system.case
    ]
    if settings.systems:
        chosen = [system for system in chosen if system.name in settings.systems]
    title = f"Loading {settings.rows:,} Criteo-shaped rows"
    table = Table("loader", title, METRICS, base=STOCK)
    table.measure(chosen, repeats=settings.repeats)
    table.notes += _notes(table)
    sizes = ", ".join(f"{name} {size:.0f}" for name, size in bytes_per_row(data).items())
    table.notes += ["", f"bytes of a row on disk: {sizes}"]
    table.print()
    print(f"written to {table.write()}")
    return 1 if table.failed else 0


def _systems(data: Path, seconds: float) -> Iterator[System]:
    def one(name: str, case: str, *options: object) -> System:
        command = [sys.executable, "-m", "benchmarks.loader.worker", name, "--data", data]
        command += ["--seconds", seconds, *options]
        repeats = None if name in (OURS, STOCK) else 1
        return System(name, case, list(map(str, command)), timeout=600, repeats=repeats)

    yield one(DECODE, "all rows")
    for size in (256, 2048, 16384, 65536):
        for name in (OURS, STOCK, NPY, PLAIN, MEMCPY):
            yield one(name, f"B={size}", "--batch_size", size)
    for name in (OURS, STOCK, NPY):
        yield one(name, "shuffled B=2048", "--shuffle")
    for name in (OURS, STOCK, PLAIN):
        yield one(name, "int64 B=2048", "--form", "int64")
    for name in (OURS, STOCK, PLAIN):
        yield one(name, "multi-hot B=2048", "--form", "lists")
    for name in (OURS, STOCK, NPY):
        yield one(name, "2 ranks B=2048", "--ranks", 2)
    for name in (OURS, STOCK, NPY, PLAIN):
        yield one(name, "step B=2048", "--step")


def _notes(table: Table) -> list[str]:
    """What was asked for, and what came."""
    notes = ["", f"asked for (judged where others took at most {QUIET:.0%} of the machine):"]

    def judge(case: str, what: str, value: float | None, limit: float, *, least: bool) -> None:
        if value is None:
            return
        busy = max(table.values(OURS, case, "others"), default=0.0)
        reached = value >= limit if least else value <= limit
        verdict = "reached" if reached else "MISSED"
        if busy > QUIET:
            verdict = f"not judged, others took {busy:.0%}"
        asked = f"{'>=' if least else '<='} {limit:g}"
        notes.append(f"  {case}: {value:.2f} {what}: {verdict} ({asked})")

    for case, limit in TARGETS.items():
        ratio = table.ratio(OURS, case, "samples_per_s")
        judge(case, f"x {STOCK}", ratio, limit, least=True)
    for case in SIZES:
        share = table.median(OURS, case, "decode_share")
        judge(case, "x one decoding thread", share, 0.65, least=True)
    for case in ("B=2048", "shuffled B=2048"):
        first = table.median(OURS, case, "next_epoch_ms")
        judge(case, "ms to the first batch", first, 50, least=False)
    for case in PEAKS:
        peak = table.median(OURS, case, "loading_mb")
        judge(case, "MB at most", peak, 800, least=False)
    ratio = table.median(OURS, "step B=2048", "step_ratio")
    judge("step B=2048", "x the step with a ready batch", ratio, 1.05, least=False)
    return notes if len(notes) > 2 else []


if __name__ == "__main__":
    sys.exit(main())
