"""Runs one part of the benchmark in a process of its own; prints one JSON line."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import sys
from pathlib import Path

from nvt_torchrec.base.command_line import Parser, Settings, flag, parse

#: Part → the function that yields its results.
PARTS = {
    "data": "benchmarks.gpu.data:make_all",
    "smoke/dlpack": "benchmarks.gpu.smokes:dlpack",
    "smoke/card": "benchmarks.gpu.card:card",
    "smoke/fbgemm": "benchmarks.gpu.smokes:fbgemm",
    "smoke/interaction": "benchmarks.gpu.smokes:interaction",
    "smoke/encode": "benchmarks.gpu.smokes:encode",
    "smoke/cluster": "benchmarks.gpu.smokes:cluster",
    "copies": "benchmarks.gpu.etl:copies",
    "block": "benchmarks.gpu.etl:block",
    "stages": "benchmarks.gpu.etl_stages:stages",
    "vocabulary": "benchmarks.gpu.vocabulary:vocabulary",
    "training": "benchmarks.gpu.training:training",
    "profile": "benchmarks.gpu.training:profile",
    "loader": "benchmarks.gpu.loader:loaders",
    "engine/cpu": "benchmarks.gpu.etl:cpu_engine",
    "engine/dask": "benchmarks.gpu.etl:dask_engine",
    "scoring": "benchmarks.gpu.scoring:scoring",
}


@dataclasses.dataclass(frozen=True)
class GpuSettings(Settings):
    """The settings of the benchmark, and of the process that runs one of its parts."""

    # fmt: off
    device: str = flag("cuda, or cpu to try the benchmark at a small size", "cuda")
    data: Path | None = flag(
        "where the data are made, once (default: build/bench/gpu-DEVICE)", None
    )
    rows: int = flag("rows of the parquet", 4_000_000, least=1)
    log_rows: int = flag("rows of the raw log", 3_000_000, least=1)
    max_table_rows: int = flag("largest number of rows of MLPerf's tables", 40_000_000, least=1)
    batch_sizes: tuple[int, ...] = flag(
        "batch sizes of training; the loader, one precision and profiles have the largest",
        (8192, 65536), least=1
    )
    ways: tuple[str, ...] = flag("how the dense layers are computed (default: in every way)", ())
    seconds: float = flag("seconds that each figure is measured for", 2.0)
    model: tuple[str, ...] = flag(
        "more of the trainer's flags, for example for a smaller model", (),
        parse=lambda text: tuple(text.split()), metavar="FLAGS"
    )
    # fmt: on


@dataclasses.dataclass(frozen=True)
class PartSettings(Settings):
    """Which part to run."""

    part: str = flag("the part to run", positional=True, choices=tuple(PARTS))
    results: Path | None = flag("file for the results, one on each line", None)


def main() -> None:
    """Run the part that the arguments name, until it ends or its time is over."""
    settings, part = parse(Parser(), None, GpuSettings, PartSettings)
    settings.data.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    from nvt_torchrec.dlrm.launch.startup import prepare_torch

    prepare_torch()
    import torch

    from benchmarks.gpu.measure import describe

    device = torch.device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    module, name = PARTS[part.part].split(":")
    count = 0
    with open(part.results or os.devnull, "a") as out:
        for result in getattr(importlib.import_module(module), name)(settings, device):
            print(json.dumps(result), file=out, flush=True)  # kept if the time runs out
            count += 1
    print(json.dumps({"results": count, "versions": describe(device)}))


if __name__ == "__main__":
    main()
