"""Measures one system in a process of its own; prints one JSON line."""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.loader import systems
from benchmarks.loader.clock import PROCESSORS, Clock
from dlrm.launch.startup import prepare_torch

#: A run ends when its time is over and so many rows came, or when it has lasted so many times it.
LEAST_ROWS, PATIENCE = 400_000, 20
#: How often loader and decoding are measured in turn.
ROUNDS = 3


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
    gc.freeze()  # as train_torchrec.py does: garbage of the imports is nobody's here
    before, begin = time.process_time(), time.perf_counter()
    iterator = iter(batches)
    next(iterator)
    first, first_cpu = time.perf_counter() - begin, time.process_time() - before
    clock = Clock()
    rows = _iterate(iterator, args.seconds)
    seconds, cpu, others = clock.stop()
    if hasattr(batches, "stop"):
        batches.stop()
    found = {
        "samples_per_s": rows / seconds,
        "samples_per_cpu_s": rows / cpu,
        "first_batch_ms": 1e3 * first,
        "first_batch_cpu_ms": 1e3 * first_cpu,
        "seconds": seconds,
        "others": others,
    }
    further = args.system == systems.OURS and args.ranks == 1
    if further:
        del iterator
        found |= _next_epochs(batches)
    # here, because decoding alone takes memory of its own
    found["loading_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    if further and args.form == "int32" and not args.shuffle:
        found |= _beside_decoding(batches, args)
    return found


def _iterate(iterator: Iterator[Any], seconds: float) -> int:
    """Draw batches for some seconds; how many rows came."""
    rows, begin = 0, time.perf_counter()
    for batch in iterator:
        rows += batch if isinstance(batch, int) else batch.labels.shape[0]
        elapsed = time.perf_counter() - begin
        # a loader that stands still between its chunks needs some of them to show its rate
        if elapsed > seconds and (rows > LEAST_ROWS or elapsed > PATIENCE * seconds):
            break
    return rows


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


def _beside_decoding(batches: Any, args: argparse.Namespace) -> dict[str, float]:
    """The loader's rate over that of decoding the same files alone, both in turn; medians.

    In one process and in turn, because on a shared machine two runs that are minutes apart do not
    compare.
    """
    shares: dict[str, list[float]] = {"decode_share": [], "decode_share_cpu": []}
    for _ in range(ROUNDS):
        rates = []
        for source in (systems.make(systems.DECODE, args), batches):
            iterator = iter(source)
            next(iterator)
            clock = Clock()
            rows = _iterate(iterator, args.seconds / ROUNDS)
            seconds, cpu, _ = clock.stop()
            del iterator
            rates.append((rows / seconds, rows / cpu))
        (decoded, decoded_cpu), (own, own_cpu) = rates
        shares["decode_share"].append(own / decoded)
        shares["decode_share_cpu"].append(own_cpu / decoded_cpu)
    return {name: statistics.median(values) for name, values in shares.items()}


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
        "loading_mb": sum(one["loading_mb"] for one in found),
        # the other ranks are not others
        "others": max(0.0, found[0]["others"] - sum(map(_cpu_share, found[1:]))),
    }


def _cpu_share(one: dict[str, Any]) -> float:
    """The share of the processors that a rank took."""
    cpu = one["samples_per_s"] / one["samples_per_cpu_s"]  # processors
    return cpu / PROCESSORS


if __name__ == "__main__":
    main()
