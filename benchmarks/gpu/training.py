"""Loading and training on the device, with the MLPerf DLRM."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch
from torchrec.datasets.criteo import CAT_FEATURE_COUNT, InMemoryBinaryCriteoIterDataPipe
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel

from benchmarks.data import npy_files
from benchmarks.gpu.data import ensure_parquet, training_files
from benchmarks.gpu.worker import GpuSettings, Result, seconds_of, settle
from nvt_torchrec.dlrm.build import OneRankPipeline, build
from nvt_torchrec.dlrm.config import model_config
from nvt_torchrec.dlrm.data import read_schema
from nvt_torchrec.dlrm.launch.distributed import process_group
from nvt_torchrec.dlrm.model import TrainBatch
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings, parse_settings
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.nvt_loader.cpu.builder import CpuBuilder
from nvt_torchrec.nvt_loader.cuda import builders as gpu

#: How a step is computed: the settings that this changes.
WAYS = {
    "fp32": {},
    "tf32": {"allow_tf32": True},
    "bf16": {"amp": True},
    "bf16 compiled": {"amp": True, "compile_dense": True},
    "bf16 fp16 tables": {"amp": True, "table_precision": "fp16"},
}
#: Steps that are not timed: kernels are chosen, pipelines filled.
_WARM = 20
_READY = 8


def loaders(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """Measure rows/s of each loader; the limit is decoding without batches, with our memory."""
    split, size = ensure_parquet(args), max(args.batch_sizes)
    case = f"loader B={size}"
    if device.type == "cuda" and find_spec("rmm"):
        gpu.use_pool(device)
    files = training_files(split, args.rows)
    took = seconds_of(lambda: _decode(files, device), device, args.seconds)
    yield {"system": "limit", "case": case, "rows_per_s": args.rows / took}
    pinned = ("TorchRec npy, pinned copies", _npy(split.parent / "npy", size, device))
    for system, batches in itertools.chain(_our_loaders(split, size, device), [pinned]):
        next(batches)
        settle(device)
        rows, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < args.seconds:
            rows += next(batches).labels.shape[0]
        settle(device)
        rate = rows / (time.perf_counter() - begin)
        yield {"system": system, "case": case, "rows_per_s": rate, "ms": 1e3 * size / rate}


def training(args: GpuSettings, device: torch.device, way: str) -> Iterator[Result]:
    """Measure samples/s of a way to train, and the share of the time spent waiting for data.

    First from batches that lie ready, which is the limit, then from each of our loaders. The model
    is MLPerf's in all but its initial embeddings: those are drawn on the device, because drawing
    97 GiB on the CPU takes minutes.
    """
    settings, split = _settings(args)
    settings = dataclasses.replace(settings, **WAYS[way])
    size = settings.batch_size
    with process_group() as group:
        with _drawn_on_device():
            model, optimizer, plan = build(
                settings, model_config(settings, read_schema(settings)), group
            )
        loader = KJTLoader(split / "train", size, device=device, drop_last=True)
        ready = itertools.cycle(list(itertools.islice(loader, _READY)))
        named = ((f"from {name}", batches) for name, batches in _our_loaders(split, size, device))
        for system, batches in itertools.chain([("limit", ready)], named):
            stream = (TrainBatch.of(batch, size, size) for batch in batches)
            rate, waited = _train(model, optimizer, stream, size, device, args.seconds)
            yield {
                "system": system,
                "case": f"train {way} B={size}",
                "table_gib": sum(plan["gib_per_rank"]),
                "rows_per_s": rate,
                "ms": 1e3 * size / rate,
                "wait_share": waited,
            }


def _decode(files: list[Path], device: torch.device) -> None:
    if device.type == "cuda" and find_spec("cudf"):
        import cudf

        for file in files:
            cudf.read_parquet(file)
        return
    import pyarrow.parquet as pq

    for file in files:
        pq.ParquetFile(file).read(use_threads=False)


def _our_loaders(
    split: Path, size: int, device: torch.device
) -> Iterator[tuple[str, Iterator[Batch]]]:
    """Yield each way to make blocks for a device, the default first, and batches without end."""
    ways = [("ours, CPU", CpuBuilder, None)]
    if device.type == "cuda":
        pinned = "ours, CPU decode + pinned copies"
        ways = [("ours, libcudf", gpu.CudfBuilder, None)] if find_spec("pylibcudf") else []
        ways += [(pinned, gpu.PinnedBuilder, None)]
        if len(os.sched_getaffinity(0)) >= 8:
            ways += [(f"{pinned}, 8 threads", gpu.PinnedBuilder, 8)]
    for name, kind, threads in ways:
        yield name, _epochs(split, size, device, kind, threads)


def _epochs(
    split: Path, size: int, device: torch.device, kind: type[CpuBuilder], threads: int | None
) -> Iterator[Batch]:
    loader = None
    while True:
        with mock.patch("nvt_torchrec.nvt_loader.loader.choose_builder", return_value=kind):
            loader = loader or KJTLoader(
                split / "train", size, device=device, drop_last=True, decode_threads=threads
            )
            batches = iter(loader)
        yield from batches


def _npy(folder: Path, size: int, device: torch.device) -> Iterator[Batch]:
    pipe = InMemoryBinaryCriteoIterDataPipe(
        "train",
        *npy_files(folder),
        batch_size=size,
        rank=0,
        world_size=1,
        hashes=[2**31 - 1] * CAT_FEATURE_COUNT,  # TorchRec 1.6 needs some; taken at loading
    )
    while True:
        for batch in pipe:
            if device.type == "cuda":
                batch = batch.pin_memory().to(device, non_blocking=True)
            yield batch


def _settings(args: GpuSettings) -> tuple[TrainSettings, Path]:
    """Return the trainer's settings, and the splits that they name."""
    split = ensure_parquet(args)
    given = [f"--binary_path={split}", f"--batch_size={max(args.batch_sizes)}"]
    return parse_settings([*given, "--learning_rate=0.1", *args.model]), split


def _drawn_on_device() -> AbstractContextManager[object]:
    """Draw the initial embeddings on the device."""

    def fill(model: DistributedModelParallel, config: object, seed: int) -> None:
        for value in model.state_dict().values():
            if hasattr(value, "local_shards"):
                for shard in value.local_shards():
                    shard.tensor.uniform_(-0.01, 0.01)

    return mock.patch("nvt_torchrec.dlrm.build._fill_tables", fill)


def _train(
    model: DistributedModelParallel,
    optimizer,
    batches: Iterable[TrainBatch],
    size: int,
    device: torch.device,
    seconds: float,
) -> tuple[float, float]:
    """Return samples/s, and the share of the time that ``next`` took."""
    waited = 0.0

    def timed() -> Iterator[TrainBatch]:
        nonlocal waited
        source = iter(batches)
        while True:
            begin = time.perf_counter()
            batch = next(source)
            waited += time.perf_counter() - begin
            yield batch

    pipeline, stream = OneRankPipeline(model, optimizer), timed()
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
