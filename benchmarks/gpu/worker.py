"""Runs one part of the benchmark in a process of its own; prints one JSON line."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
from pathlib import Path

#: Part → the function that yields its results, and the seconds that it may take on a GPU machine.
PARTS = {
    "copies": ("benchmarks.gpu.etl:copies", 60),
    "etl": ("benchmarks.gpu.etl:stages", 240),
    "loader": ("benchmarks.gpu.loader:loaders", 180),
    "training": ("benchmarks.gpu.training:training", 360),
    "scoring": ("benchmarks.gpu.scoring:scoring", 120),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What both this process and the one that starts it take."""
    add = parser.add_argument
    add("--device", default="cuda", help="cuda, or cpu to try the benchmark at a small size")
    add("--data", type=Path, help="where the data are made, once (default: build/bench/gpu)")
    add("--rows", type=int, default=4_000_000, help="of the parquet")
    add("--log_rows", type=int, default=3_000_000, help="of the raw log")
    add("--max_table_rows", type=int, default=40_000_000, help="of MLPerf's tables")
    add("--batch_sizes", default="8192,16384,32768,65536", help="of loader and training")
    add("--seconds", type=float, default=2.0, help="that a figure is measured for")
    add("--model", default="", help="more of the trainer's flags, for a smaller model say")


def main() -> None:
    """Run the part that the arguments name, until it ends or its time is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--results", type=Path, required=True, help="a line for each result")
    add_arguments(parser)
    args = parser.parse_args()
    args.batch_sizes = [int(size) for size in args.batch_sizes.split(",")]
    args.model = args.model.split()
    args.data.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    from dlrm.launch.startup import prepare_torch

    prepare_torch()
    import torch

    from benchmarks.gpu.measure import describe

    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    module, name = PARTS[args.part][0].split(":")
    count = 0
    with open(args.results, "a") as out:
        for result in getattr(importlib.import_module(module), name)(args, device):
            print(json.dumps(result), file=out, flush=True)  # kept if the time runs out
            count += 1
    print(json.dumps({"results": count, "versions": describe(device)}))


if __name__ == "__main__":
    main()
