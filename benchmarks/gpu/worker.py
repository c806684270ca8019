"""Run one part of the benchmark in a process of its own; print one JSON line.

A part is a function that takes the settings and the device, and yields its results as it finds
them: objects with ``system``, ``case`` and any of the table's metrics. They go to stderr at once,
so that a crash leaves those before it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvt_torchrec.base.command_line import Parser, Settings, flag, parse

if TYPE_CHECKING:
    import torch

Result = dict[str, Any]


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
    seconds: float = flag("seconds that each figure is measured for", 2.0)
    model: tuple[str, ...] = flag(
        "more of the trainer's flags, for example for a smaller model", (),
        parse=lambda text: tuple(text.split()), metavar="FLAGS"
    )
    # fmt: on


@dataclasses.dataclass(frozen=True)
class PartSettings(Settings):
    """Which part to run."""

    part: str = flag("the part to run: MODULE:FUNCTION of this package", positional=True)
    way: str = flag("how to train, see benchmarks.gpu.training; or the engine", "")


def main() -> None:
    """Run the part that the arguments name, until it ends or its time is over."""
    settings, part = parse(Parser(), None, GpuSettings, PartSettings)
    settings.data.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    from nvt_torchrec.dlrm.launch.startup import prepare_torch

    prepare_torch()
    import torch

    device = torch.device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    module, name = part.part.split(":")
    function = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
    results = []
    for result in function(settings, device, *filter(None, [part.way])):
        results.append(result)
        print(json.dumps(result), file=sys.stderr, flush=True)
    print(json.dumps({"results": results, "versions": _versions(device)}))


def settle(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median seconds of one call; the first call is not counted."""
    work()
    taken, end = [], time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        settle(device)
        begin = time.perf_counter()
        work()
        settle(device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _versions(device: torch.device) -> dict[str, Any]:
    """Return the card, its driver and the versions that matter."""
    import torch

    from nvt_torchrec.base.versions import installed_version

    names = ("torch", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec", "cudf-cu13", "dask-cuda")
    facts: dict[str, Any] = {name: installed_version(name) for name in names}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["card"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        facts["cuda"] = torch.version.cuda
    return {name: value for name, value in facts.items() if value}


if __name__ == "__main__":
    main()
