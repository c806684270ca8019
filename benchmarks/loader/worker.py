"""Measures one system in a process of its own; prints one JSON line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.loader import systems
from dlrm.startup import prepare_torch


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
    """Iterate for some seconds or to the epoch's end, the first batch included."""
    batches = systems.make(args.system, args)
    rows, first = 0, None
    cpu, begin = time.process_time(), time.perf_counter()
    iterator = iter(batches)
    for batch in iterator:
        rows += batch if isinstance(batch, int) else batch.labels.shape[0]
        now = time.perf_counter()
        if first is None:
            first = now - begin
        if now - begin > args.seconds:
            break
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    if hasattr(batches, "stop"):
        batches.stop()
    return {
        "samples_per_s": rows / seconds,
        "samples_per_cpu_s": rows / cpu,
        "first_batch_ms": 1e3 * first,
        # only after another iterator has loaded code and files: how a next epoch begins
        "next_epoch_ms": _next_epoch(batches) if args.system == systems.OURS else None,
    }


def _next_epoch(batches: Any) -> float:
    begin = time.perf_counter()
    next(iter(batches))
    return 1e3 * (time.perf_counter() - begin)


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
