"""Measures one system in a process of its own; prints one JSON line."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.loader import systems
from dlrm.startup import prepare_torch

#: A run ends when its time is over and so many rows came, or when it has lasted so many times it.
LEAST_ROWS, PATIENCE = 200_000, 5


def main() -> None:
    """Measure what the arguments say."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("system")
    add("--data", type=Path, required=True)
    add("--form", choices=("int32", "int64", "lists"), default="int32")
    add("--batch_size", type=int, default=2048)
    add("--shuffle", action="store_true")
    add("--ranks", type=int, default=1)
    add("--rank", type=int, default=0)
    add("--seconds", type=float, default=3.0)
    add("--step", action="store_true", help="measure training steps")
    args = parser.parse_args()
    prepare_torch()
    if args.step:
        from benchmarks.loader.step import measure_steps

        found = measure_steps(args)
    elif args.ranks > 1 and args.rank == 0:
        found = _all_ranks(args)
    else:
        found = measure(args)
    print(json.dumps(found))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Iterate for some seconds after the first batch, or to the epoch's end.

    Rates are of what comes after the first batch: a loader that begins slowly is not measured by
    its beginning again.
    """
    batches = systems.make(args.system, args)
    before, begin = time.process_time(), time.perf_counter()
    iterator = iter(batches)
    next(iterator)
    first, first_cpu = time.perf_counter() - begin, time.process_time() - before
    rows, cpu, begin = 0, time.process_time(), time.perf_counter()
    for batch in iterator:
        rows += batch if isinstance(batch, int) else batch.labels.shape[0]
        elapsed = time.perf_counter() - begin
        # a loader that stands still between its chunks needs some of them to show its rate
        if elapsed > args.seconds and (rows > LEAST_ROWS or elapsed > PATIENCE * args.seconds):
            break
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    if hasattr(batches, "stop"):
        batches.stop()
    found = {
        "samples_per_s": rows / seconds,
        "samples_per_cpu_s": rows / cpu,
        "first_batch_ms": 1e3 * first,
        "first_batch_cpu_ms": 1e3 * first_cpu,
    }
    if args.system == systems.OURS:
        del iterator, batch
        found |= _next_epochs(batches)
    return found


def _next_epochs(batches: Any) -> dict[str, float]:
    """Medians of how long the first batch of a further epoch takes: code and files are warm."""
    wall, cpu = [], []
    for _ in range(5):
        time.sleep(0.2)  # the last iterator's threads end
        before, begin = time.process_time(), time.perf_counter()
        iterator = iter(batches)
        next(iterator)
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - before)
        del iterator
    return {
        "next_epoch_ms": 1e3 * statistics.median(wall),
        "next_epoch_cpu_ms": 1e3 * statistics.median(cpu),
    }


def _all_ranks(args: argparse.Namespace) -> dict[str, Any]:
    """This process and one more for each further rank, all at once."""
    command = [sys.executable, "-m", "benchmarks.loader.worker", *sys.argv[1:]]
    others = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(1, args.ranks)
    ]
    found = [measure(args)]
    for other in others:
        found.append(json.loads(other.communicate()[0].splitlines()[-1]))
    return {
        "samples_per_s": sum(one["samples_per_s"] for one in found),
        "samples_per_cpu_s": sum(one["samples_per_cpu_s"] for one in found) / len(found),
        "first_batch_ms": max(one["first_batch_ms"] for one in found),
    }


if __name__ == "__main__":
    main()
