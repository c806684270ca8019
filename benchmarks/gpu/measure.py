"""How long work on a device takes, and what a part of the benchmark finds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

#: A part's result: ``system``, ``case``, and any of the table's metrics.
Result = dict[str, Any]


def settle(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median seconds of one call; the first call is not counted."""
    work()
    taken, end = [], time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        settle(device)
        begin = time.perf_counter()
        work()
        settle(device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def describe(device: torch.device) -> dict[str, Any]:
    """The card, its driver and the versions that matter."""
    from nvt_torchrec.base.versions import installed_version

    names = ("torch", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec", "cudf-cu13", "dask-cuda")
    found: dict[str, Any] = {
        name: version for name in names if (version := installed_version(name))
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["card"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        found["cuda"] = torch.version.cuda
    return found
