"""The loader beside Merlin's own, TorchRec's and a plain one: parquet → batches for a DLRM.

Every run is a process of its own that iterates for some seconds; its start is not counted, and
rates are without the first batch. Limits are parts of the work alone: decoding with one thread (no
checksums, no batches), copying a batch. "x merlin stock" is within a case. "later ms" and "CPU ms"
are of the first batch of a later epoch. Training steps are those of a small DLRM
(DistributedModelParallel, TrainPipelineSparseDist, B = 2048); "x ready" is the step's time over
that with a batch that is ready in memory, both measured in the same process in turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Metric, System, Table, start_logging
from benchmarks.loader.data import ensure
from benchmarks.loader.systems import DECODE, MEMCPY, NPY, OURS, PLAIN, STOCK
from benchmarks.venvs import BUILD
from clicklog.errors import run_command

METRICS = (
    Metric("samples_per_s", "M samples/s", ".2f", ratio=True, scale=1e-6),
    Metric("samples_per_cpu_s", "M samples/CPU s", ".2f", ratio=True, scale=1e-6),
    Metric("first_batch_ms", "first ms"),
    Metric("next_epoch_ms", "later ms"),
    Metric("next_epoch_cpu_ms", "CPU ms"),
    Metric("step_ms", "step ms", ".1f"),
    Metric("step_ratio", "x ready", ".2f"),
    Metric("peak_rss_mb", "peak MB"),
)
#: What issue 4 asks of each case, as a multiple of the stock loader's samples/s.
TARGETS = {"B=256": 20, "B=2048": 6, "B=65536": 2.7, "multi-hot B=2048": 10}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a system failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loader",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=int, default=4_000_000, help="of the data to make")
    add("--repeats", type=int, default=1, help="runs of each system")
    add("--seconds", type=float, default=2.0, help="that a run iterates")
    add("--cases", metavar="TEXT", default="", help="only cases with this in their name")
    add("--systems", metavar="LIST", help=f"only these, for example '{OURS},{STOCK}'")
    args = parser.parse_args(argv)
    start_logging()
    return run_command(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    data = BUILD / "loader-data"
    ensure(data, args.rows)
    chosen = [system for system in _systems(data, args.seconds) if args.cases in system.case]
    if args.systems:
        names = [name.strip() for name in args.systems.split(",")]
        chosen = [system for system in chosen if system.name in names]
    title = f"Loading {args.rows:,} Criteo-shaped rows"
    table = Table("loader", title, METRICS, base=STOCK)
    table.measure(chosen, repeats=args.repeats)
    table.notes += _notes(table)
    table.print()
    print(f"written to {table.write()}")
    return 1 if table.failed else 0


def _systems(data: Path, seconds: float) -> Iterator[System]:
    def one(name: str, case: str, *options: object) -> System:
        command = [sys.executable, "-m", "benchmarks.loader.worker", name, "--data", data]
        command += ["--seconds", seconds, *options]
        return System(name, case, list(map(str, command)), timeout=600)

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
    notes = ["", "asked for:"]
    for case, least in TARGETS.items():
        ratio = table.ratio(OURS, case, "samples_per_s")
        if ratio is not None:
            notes.append(_said(f"{case}: {ratio:.1f} x {STOCK}", ratio >= least, f">= {least}"))
    decoded = table.median(DECODE, "all rows", "samples_per_s")
    sizes = [f"B={size}" for size in (256, 2048, 16384, 65536)]
    own = {case: table.median(OURS, case, "samples_per_s") for case in sizes}
    if decoded:
        for case, value in own.items():
            if value:
                share = value / decoded
                notes.append(
                    _said(f"{case}: {share:.2f} of one decoding thread", share >= 0.65, ">= 0.65")
                )
    for case in ("B=2048", "shuffled B=2048"):
        first = table.median(OURS, case, "next_epoch_ms")
        if first:
            notes.append(_said(f"{case}: first batch {first:.0f} ms", first < 50, "< 50"))
    peaks = [table.median(OURS, case, "peak_rss_mb") for case in sizes]
    if all(peaks):
        notes.append(_said(f"peak memory {max(peaks):.0f} MB", max(peaks) < 800, "< 800"))
    ratio = table.median(OURS, "step B=2048", "step_ratio")
    if ratio:
        notes.append(_said(f"training step {ratio:.2f} x ready", ratio <= 1.05, "<= 1.05"))
    return notes


def _said(what: str, reached: bool, asked: str) -> str:
    return f"  {what}: {'reached' if reached else 'MISSED'} ({asked})"


if __name__ == "__main__":
    sys.exit(main())
