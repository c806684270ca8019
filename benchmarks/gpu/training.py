"""Training the MLPerf DLRM: from batches that lie ready, and from the loader."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import torch
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel

from benchmarks.gpu.data import ensure_parquet
from benchmarks.gpu.loader import our_loaders
from benchmarks.gpu.measure import Result, settle
from benchmarks.gpu.worker import GpuSettings
from benchmarks.venvs import BUILD
from nvt_torchrec.dlrm.build import OneRankPipeline, build, set_up_dense
from nvt_torchrec.dlrm.config import model_config
from nvt_torchrec.dlrm.data import read_schema
from nvt_torchrec.dlrm.launch.distributed import process_group
from nvt_torchrec.dlrm.model import TrainBatch, TrainModel
from nvt_torchrec.dlrm.reporting.profiling import TRACE_FILE
from nvt_torchrec.dlrm.settings.flags import parse_settings
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings
from nvt_torchrec.dlrm.train import train
from nvt_torchrec.nvt_loader import KJTLoader

#: What makes a step faster, each switched off: what is left is what it is worth beside the others.
_OFF = {
    "kernel": {"interaction_kernel": "torch"},
    "padding": {"pad_inputs": "never"},
    "bf16 lookups": {"lookup_precision": "fp32"},
    "int32 ids": {"index_type": "int64"},
    "no bounds check": {"bounds_check": True},
}
_ALL_OFF = {name: value for change in _OFF.values() for name, value in change.items()}
#: How a step is computed: the settings that this changes. "plain" has none of :data:`_OFF`,
#: "plain + X" has X alone, and "without X" all others.
WAYS = {
    "fp32": {},
    "tf32": {"allow_tf32": True},
    "bf16": {"amp": True},
    "bf16 graphs": {"amp": True, "cuda_graphs": True},
    "bf16 compiled": {"amp": True, "compile_dense": True},
    "bf16 compiled graphs": {"amp": True, "compile_dense": True, "cuda_graphs": True},
    "bf16 plain": {"amp": True, **_ALL_OFF},
    **{
        f"bf16 plain + {name}": {
            "amp": True,
            **{key: value for key, value in _ALL_OFF.items() if key not in change},
        }
        for name, change in _OFF.items()
    },
    **{f"bf16 without {name}": {"amp": True, **change} for name, change in _OFF.items()},
    "bf16 fp16 tables": {"amp": True, "table_precision": "fp16"},
}
#: The settings of the tables: a model of its own is built for each combination.
_OF_TABLES = ("table_precision", "lookup_precision", "index_type", "bounds_check")
#: Steps that are not timed: kernels are chosen, pipelines filled.
_WARM = 20
_READY = 8


def training(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """Samples/s per precision and batch size, and the share of the time spent waiting for data.

    The model is MLPerf's in all but its initial embeddings: those are drawn on the device, because
    drawing 97 GiB on the CPU takes minutes.
    """
    settings, split = _settings(args)
    with process_group() as group:
        config = model_config(settings, read_schema(settings))
        ways = {way: dataclasses.replace(settings, **WAYS[way]) for way in args.ways or WAYS}
        alike: dict[tuple, list[str]] = {}
        for way, chosen in ways.items():
            # the lookups' type also depends on --amp
            tables = (chosen.amp, *(getattr(chosen, name) for name in _OF_TABLES))
            alike.setdefault(tables, []).append(way)
        for names in alike.values():
            with drawn_on_device():  # not captured yet: _set_up does that for each batch size
                first = dataclasses.replace(ways[names[0]], cuda_graphs=False)
                model, optimizer, plan = build(first, config, group)
            gib = sum(plan["gib_per_rank"])
            for way, size in itertools.product(names, args.batch_sizes):
                _set_up(model, dataclasses.replace(ways[way], batch_size=size), device)
                for result in _from_each(model, optimizer, split, size, device, args.seconds):
                    yield {"case": f"train {way} B={size}", "table_gib": gib, **result}
            del model, optimizer
            gc.collect()  # before the next tables are made


def profile(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """Trace some steps of the trainer in bfloat16; the trace is in ``build/bench/gpu/profile``."""
    directory = BUILD / "gpu" / "profile"
    settings, _ = _settings(
        args,
        *["--amp", "--profile", f"--benchmark_warmup_steps={_WARM}", f"--max_steps={2 * _WARM}"],
        *["--limit_val_batches=1", "--limit_test_batches=1", f"--log_path={directory}"],
    )
    with process_group() as group, drawn_on_device():
        train(settings, group)
    size = (directory / TRACE_FILE).stat().st_size
    yield {"system": str(directory / TRACE_FILE), "case": "profile", "bytes": size}


def _settings(args: GpuSettings, *flags: str) -> tuple[TrainSettings, Path]:
    """Return the trainer's settings, and the splits that they name."""
    split = ensure_parquet(args.data, args.rows, args.max_table_rows)
    given = [f"--binary_path={split}", f"--batch_size={max(args.batch_sizes)}"]
    return parse_settings([*given, "--learning_rate=0.1", *flags, *args.model]), split


def drawn_on_device() -> AbstractContextManager[object]:
    """Draw the initial embeddings on the device."""
    return mock.patch("nvt_torchrec.dlrm.sharding.distribute._fill_tables", _fill_on_device)


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
