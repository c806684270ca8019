"""Measure one system in a process of its own and print one JSON line."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.loader import systems
from benchmarks.loader.clock import PROCESSORS, Clock
from benchmarks.process import high_water
from nvt_torchrec.dlrm.launch.startup import prepare_torch

#: A run ends after its time if it has got LEAST_ROWS rows, and after PATIENCE times that anyway.
LEAST_ROWS, PATIENCE = 400_000, 20
#: How often loader and decoding are measured in turn.
ROUNDS = 3


def main() -> None:
    """Measure the system that the command line names."""
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

    Rates exclude the first batch, which has a measurement of its own.
    """
    batches = systems.make(args.system, args)
    gc.freeze()  # as train_torchrec.py does, so that collections skip the imports' objects
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
    found["loading_mb"] = high_water(os.getpid()) / 1e6
    if further and args.form == "int32" and not args.shuffle:
        found |= _beside_decoding(batches, args)
    return found


def _iterate(iterator: Iterator[Any], seconds: float) -> int:
    """Draw batches for some seconds and return the number of their rows."""
    rows, begin = 0, time.perf_counter()
    for batch in iterator:
        rows += batch if isinstance(batch, int) else batch.labels.shape[0]
        elapsed = time.perf_counter() - begin
        # a loader that delivers in bursts needs several of them to show its rate
        if elapsed > seconds and (rows > LEAST_ROWS or elapsed > PATIENCE * seconds):
            break
    return rows


def _next_epochs(batches: Any) -> dict[str, float]:
    """Return the median times to the first batch of a later epoch, with code and files warm."""
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
    """Return the medians of the loader's rate over the rate of decoding the same files.

    Both are measured in turn in one process, because runs that are minutes apart do not compare on
    a shared machine.
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
        "samples_per_s": sum(rank["samples_per_s"] for rank in found),
        "samples_per_cpu_s": sum(rank["samples_per_cpu_s"] for rank in found) / len(found),
        "first_batch_ms": max(rank["first_batch_ms"] for rank in found),
        "loading_mb": sum(rank["loading_mb"] for rank in found),
        # the other ranks are not other programs
        "others": max(0.0, found[0]["others"] - sum(map(_cpu_share, found[1:]))),
    }


def _cpu_share(rank: dict[str, Any]) -> float:
    """Return the share of the processors that a rank used."""
    cpu = rank["samples_per_s"] / rank["samples_per_cpu_s"]  # processors
    return cpu / PROCESSORS


if __name__ == "__main__":
    main()
