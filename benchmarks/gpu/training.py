"""Training the MLPerf DLRM: from batches that lie ready, and from the loader."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

import torch
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel

from benchmarks.gpu.data import ensure_parquet
from benchmarks.gpu.loader import our_loaders
from benchmarks.gpu.measure import Result, settle
from benchmarks.gpu.worker import GpuSettings
from dlrm.build import OneRankPipeline, build, set_up_dense
from dlrm.config import model_config
from dlrm.data import read_schema
from dlrm.launch.distributed import process_group
from dlrm.model import TrainBatch, TrainModel
from dlrm.settings.flags import parse_settings
from dlrm.settings.train_settings import TrainSettings
from nvt_loader import KJTLoader

#: How the dense layers are computed: the settings that this changes.
WAYS = {
    "fp32": {},
    "tf32": {"allow_tf32": True},
    "bf16": {"amp": True},
    "bf16 graphs": {"amp": True, "cuda_graphs": True},
    "bf16 compiled": {"amp": True, "compile_dense": True},
    "bf16 compiled, graphs": {"amp": True, "compile_dense": True, "cuda_graphs": True},
}
#: Steps that are not timed: kernels are chosen, pipelines filled.
_WARM = 20
_READY = 8


def training(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """Samples/s per precision and batch size, and the share of the time spent waiting for data.

    The model is MLPerf's in all but its initial embeddings: those are drawn on the device, because
    drawing 97 GiB on the CPU takes minutes.
    """
    split = ensure_parquet(args.data, args.rows, args.max_table_rows)
    largest = max(args.batch_sizes)
    settings = parse_settings(
        [f"--binary_path={split}", f"--batch_size={largest}", "--learning_rate=0.1", *args.model]
    )
    with process_group() as group:
        config = model_config(settings, read_schema(settings))
        with mock.patch("dlrm.sharding.distribute._fill_tables", _fill_on_device):
            model, optimizer, plan = build(settings, config, group)
        gib = sum(plan["gib_per_rank"])
        for way, changes in WAYS.items():
            chosen = dataclasses.replace(settings, **changes)
            for size in _sizes(args.batch_sizes, chosen):
                _set_up(model, dataclasses.replace(chosen, batch_size=size), device)
                for result in _from_each(model, optimizer, split, size, device, args.seconds):
                    yield {"case": f"train {way} B={size}", "table_gib": gib, **result}


def _sizes(sizes: list[int], settings: TrainSettings) -> list[int]:
    """Those that a way is measured at: compiling takes long, and graphs are for small batches."""
    if settings.cuda_graphs:
        return [min(sizes)]
    return sorted({min(sizes), max(sizes)}) if settings.compile_dense else sizes


def _from_each(
    model: DistributedModelParallel,
    optimizer,
    split: Path,
    size: int,
    device: torch.device,
    seconds: float,
) -> Iterator[Result]:
    """From ready batches, then from each of our loaders, which end by themselves afterwards."""

    def systems() -> Iterator[tuple[str, Iterable[TrainBatch]]]:
        loader = KJTLoader(split / "train", size, device=device, drop_last=True)
        yield "limit", itertools.cycle(_padded(itertools.islice(loader, _READY), size))
        for name, batches in our_loaders(split, size, device):
            yield f"from {name}", _padded(batches, size)

    for system, batches in systems():
        rate, waited = _train(model, optimizer, batches, size, device, seconds)
        yield {"system": system, "rows_per_s": rate, "ms": 1e3 * size / rate, "wait_share": waited}


def _fill_on_device(model: DistributedModelParallel, config, seed: int) -> None:
    for value in model.state_dict().values():
        if hasattr(value, "local_shards"):
            for shard in value.local_shards():
                shard.tensor.uniform_(-0.01, 0.01)


def _set_up(model: DistributedModelParallel, settings: TrainSettings, device: torch.device) -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("nvt_loader"):
            thread.join()  # it makes blocks that nobody will take, which a capture forbids
    settle(device)
    torch._dynamo.reset()  # it gives up after eight variants
    (whole,) = (module for module in model.modules() if isinstance(module, TrainModel))
    whole._amp = settings.amp
    set_up_dense(whole.dlrm, settings)


def _padded(batches: Iterable[Batch], size: int) -> Iterator[TrainBatch]:
    for batch in batches:
        yield TrainBatch.of(batch, size, size)


def _train(
    model: DistributedModelParallel,
    optimizer,
    batches: Iterable[TrainBatch],
    size: int,
    device: torch.device,
    seconds: float,
) -> tuple[float, float]:
    """Samples/s, and the share of the time that ``next`` took."""
    waited = 0.0

    def timed() -> Iterator[TrainBatch]:
        nonlocal waited
        source = iter(batches)
        while True:
            begin = time.perf_counter()
            batch = next(source)
            waited += time.perf_counter() - begin
            yield batch

    pipeline = OneRankPipeline(model, optimizer)
    stream = timed()
    for _ in range(_WARM):
        pipeline.progress(stream)
    settle(device)
    steps, waited, begin = 0, 0.0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        pipeline.progress(stream)
        steps += 1
    settle(device)
    taken = time.perf_counter() - begin
    return steps * size / taken, waited / taken
