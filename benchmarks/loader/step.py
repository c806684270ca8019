"""Measure a training step with a loader, and one whose batch is already in memory."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.loader import systems
from benchmarks.loader.clock import Clock
from benchmarks.loader.data import DENSE, TABLE_SIZES

#: Steps before anything is timed, steps of a phase, and how often the phases alternate.
WARM, STEPS, PHASES = 10, 25, 3


def measure_steps(args: argparse.Namespace) -> dict[str, Any]:
    """Return the median times of a step, with ready batches and the system's batches in turn."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ready = list(itertools.islice(systems.make(systems.OURS, args), 8))
    _train(model, optimizer, itertools.islice(itertools.cycle(ready), WARM))
    times: dict[str, list[float]] = {"ready": [], "loader": []}
    clock = Clock()
    for _ in range(PHASES):
        times["ready"] += _train(
            model, optimizer, itertools.islice(itertools.cycle(ready), STEPS + 2)
        )
        batches = systems.make(args.system, args)
        times["loader"] += _train(model, optimizer, itertools.islice(batches, STEPS + 2))
        if hasattr(batches, "stop"):
            batches.stop()  # or its thread continues
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "others": clock.stop()[2],
        "step_ms": 1e3 * medians["loader"],
        "ready_step_ms": 1e3 * medians["ready"],
        "step_ratio": medians["loader"] / medians["ready"],
    }


def _train(model: Any, optimizer: Any, batches: Iterable[Any]) -> list[float]:
    """Return the seconds of each step of a pipeline over ``batches``, except the first two."""
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    seconds, iterator = [], _iterate(batches)
    while True:
        begin = time.perf_counter()
        try:
            pipeline.progress(iterator)
        except StopIteration:
            break
        seconds.append(time.perf_counter() - begin)
    pipeline.detach()
    return seconds[2:]


def _iterate(batches: Iterable[Any]) -> Iterator[Any]:
    yield from batches


def _model() -> DistributedModelParallel:
    tables = [
        EmbeddingBagConfig(
            name=f"t_{i}", embedding_dim=16, num_embeddings=size, feature_names=[f"cat_{i}"]
        )
        for i, size in enumerate(TABLE_SIZES)
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    model = DLRMTrain(DLRM(bags, DENSE, [64, 16], [64, 32, 1]))
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.01})
    return DistributedModelParallel(model, device=torch.device("cpu"))
