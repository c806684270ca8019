"""Parquet → batches on the device, beside bare decoding and TorchRec's binary pipe."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch
from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

from benchmarks.gpu.data import ensure_parquet
from benchmarks.gpu.measure import Result, seconds_of, settle
from nvt_loader import KJTLoader, gpu


def loaders(args: argparse.Namespace, device: torch.device) -> Iterator[Result]:
    """Rows/s of each system at each batch size; the limit is decoding without batches."""
    split = ensure_parquet(args.data, args.rows, args.max_table_rows)
    files = sorted((split / "train").glob("part.*.parquet"))
    took = seconds_of(lambda: _decode(files, device), device, args.seconds)
    for size in args.batch_sizes:
        case = f"loader B={size}"
        yield {"system": "limit", "case": case, "rows_per_s": args.rows / took}
        for system, batches in _systems(split, size, device):
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


def _systems(
    split: Path, size: int, device: torch.device
) -> Iterator[tuple[str, Iterable[object]]]:
    train = split / "train"
    if device.type == "cuda":
        kinds = ["CudfBlocks"] if find_spec("pylibcudf") else []
        for kind in [*kinds, "PinnedBlocks"]:
            made = getattr(gpu, kind)
            name = "ours, libcudf" if kind == "CudfBlocks" else "ours, CPU decode + pinned copies"

            # bound now: the generator goes on after the loop
            def epochs(made=made) -> Iterator[object]:
                with mock.patch("nvt_loader.loader.choose_blocks", lambda a, b, _: made(a, b)):
                    loader = KJTLoader(train, size, device=device)
                    while True:
                        yield from loader

            yield name, epochs()
    else:
        loader = KJTLoader(train, size, device=device)
        yield "ours, CPU", (batch for _ in iter(int, 1) for batch in loader)
    yield "TorchRec npy, pinned copies", _npy(split.parent / "npy", size, device)


def _npy(folder: Path, size: int, device: torch.device) -> Iterator[object]:
    count = len(list(folder.glob("*_dense.npy")))

    def paths(kind: str) -> list[str]:
        return [str(folder / f"{i}_{kind}.npy") for i in range(count)]

    pipe = InMemoryBinaryCriteoIterDataPipe(
        "train", paths("dense"), paths("sparse"), paths("labels"), size, 0, 1
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
