"""Parquet → batches on the device, beside bare decoding and TorchRec's binary pipe."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch
from torchrec.datasets.criteo import CAT_FEATURE_COUNT, InMemoryBinaryCriteoIterDataPipe
from torchrec.datasets.utils import Batch

from benchmarks.gpu.data import ensure_parquet, training_files
from benchmarks.gpu.measure import Result, seconds_of, settle
from benchmarks.gpu.worker import GpuSettings
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.nvt_loader.cpu.builder import CpuBuilder
from nvt_torchrec.nvt_loader.cuda import builders as gpu


def loaders(args: GpuSettings, device: torch.device) -> Iterator[Result]:
    """Rows/s of each system at each batch size; the limit is decoding without batches, with the
    memory that our loader gives libcudf."""
    split = ensure_parquet(args.data, args.rows, args.max_table_rows)
    files = training_files(split, args.rows)
    if device.type == "cuda" and find_spec("rmm"):
        gpu.use_pool(device)
    for size in args.batch_sizes:
        case = f"loader B={size}"
        took = seconds_of(lambda: _decode(files, device), device, args.seconds)
        yield {"system": "limit", "case": case, "rows_per_s": args.rows / took}
        pinned = ("TorchRec npy, pinned copies", _npy(split.parent / "npy", size, device))
        for system, batches in itertools.chain(our_loaders(split, size, device), [pinned]):
            rows, seconds = _iterate(batches, device, args.seconds)
            yield {
                "system": system,
                "case": case,
                "rows_per_s": rows / seconds,
                "ms": 1e3 * seconds / max(1, rows // size),
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


def our_loaders(
    split: Path, size: int, device: torch.device
) -> Iterator[tuple[str, Iterator[Batch]]]:
    """Each way to make blocks for a device, the default first: its name, and batches without
    end."""
    found = [("ours, CPU", CpuBuilder, None)]
    if device.type == "cuda":
        pinned = "ours, CPU decode + pinned copies"
        found = [("ours, libcudf", gpu.CudfBuilder, None)] if find_spec("pylibcudf") else []
        found += [(pinned, gpu.PinnedBuilder, None)]
        if len(os.sched_getaffinity(0)) >= 8:
            found += [(f"{pinned}, 8 threads", gpu.PinnedBuilder, 8)]
    for name, kind, threads in found:
        yield name, _epochs(split, size, device, kind, threads)


def _epochs(
    split: Path, size: int, device: torch.device, kind: type[CpuBuilder], threads: int | None
) -> Iterator[Batch]:
    with mock.patch("nvt_torchrec.nvt_loader.loader.choose_builder", return_value=kind):
        loader = KJTLoader(
            split / "train", size, device=device, drop_last=True, decode_threads=threads
        )
    while True:
        with mock.patch("nvt_torchrec.nvt_loader.loader.choose_builder", return_value=kind):
            batches = iter(loader)
        yield from batches


def _npy(folder: Path, size: int, device: torch.device) -> Iterator[object]:
    count = len(list(folder.glob("*_dense.npy")))

    def paths(kind: str) -> list[str]:
        return [str(folder / f"{i}_{kind}.npy") for i in range(count)]

    pipe = InMemoryBinaryCriteoIterDataPipe(
        "train",
        *(paths(kind) for kind in ("dense", "sparse", "labels")),
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


def _iterate(batches: Iterable[object], device: torch.device, seconds: float) -> tuple[int, float]:
    """Rows and seconds after the first batch."""
    iterator = iter(batches)
    next(iterator)
    settle(device)
    rows, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        rows += next(iterator).labels.shape[0]
    settle(device)
    return rows, time.perf_counter() - begin
