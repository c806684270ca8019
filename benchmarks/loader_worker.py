"""Measure one system in a process of its own and print one JSON line."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.data import criteo_schema, npy_files
from benchmarks.process import high_water
from nvt_torchrec.base.startup import prepare_torch

OURS = "ours"
STOCK = "merlin stock"
NPY = "torchrec npy"
DECODE = "limit: decode"
#: On a GPU: ours without libcudf.
CPU_DECODING = "ours, CPU decodes"
#: How long a run iterates.
SECONDS = 2.0
#: It goes on until it has so many rows, because a loader that delivers in bursts needs several of
#: them to show its rate;
MIN_ROWS = 400_000
#: but no longer than so many times its time.
PATIENCE = 20
#: How often loader and decoding are measured in turn.
ROUNDS = 3


def main() -> None:
    """Measure the system that the command line names."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("system")
    add("--data", type=Path, required=True)
    add("--form", choices=("int32", "lists", "histories", "vectors"), default="int32")
    add("--batch_size", type=int, default=2048)
    add("--shuffle", action="store_true")
    add("--device", default="cpu")
    args = parser.parse_args()
    prepare_torch()
    print(json.dumps(measure_rates(args)))


def measure_rates(args: argparse.Namespace) -> dict[str, Any]:
    """Iterate for some seconds after the first batch, or to the epoch's end.

    Rates exclude the first batch, which has a measurement of its own.
    """
    batches = make(args.system, args)
    gc.freeze()  # as train_torchrec.py does, so that collections skip the imports' objects
    iterator, first, _ = _draw_first_batch(batches)
    figures = _measure_rates(iterator, SECONDS, args.device) | {"first_batch_ms": first}
    _stop(batches)
    if args.system == OURS:
        del iterator
        figures |= _measure_next_epochs(batches)
    # before decoding alone is measured, which takes memory of its own
    figures["loading_mb"] = high_water(os.getpid()) / 1e6
    if args.system == OURS and args.form == "int32" and not args.shuffle:
        figures |= _compare_with_decoding(batches, args)
    return figures


def _draw_first_batch(batches: Iterable[Any]) -> tuple[Iterator[Any], float, float]:
    """Return an iterator behind its first batch, and the time and CPU time to it in ms."""
    cpu_begin = time.process_time()
    begin = time.perf_counter()
    iterator = iter(batches)
    next(iterator)
    return iterator, 1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - cpu_begin)


def _stop(batches: Any) -> None:
    """End the threads of Merlin's loader, which would go on."""
    if hasattr(batches, "stop"):
        batches.stop()


def _measure_rates(iterator: Iterator[Any], seconds: float, device: str) -> dict[str, float]:
    """Draw batches for some seconds and return the rates of their rows."""
    rows = 0
    ids = 0
    cpu_begin = time.process_time()
    begin = time.perf_counter()
    for batch in iterator:
        if isinstance(batch, int):  # decoded rows
            rows += batch
        else:
            rows += batch.labels.shape[0]
            ids += batch.sparse_features.values().shape[0]
        elapsed = time.perf_counter() - begin
        if elapsed > seconds and (rows > MIN_ROWS or elapsed > PATIENCE * seconds):
            break
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return {
        "ids_per_s": ids / (time.perf_counter() - begin),
        "samples_per_s": rows / (time.perf_counter() - begin),
        "samples_per_cpu_s": rows / (time.process_time() - cpu_begin),
    }


def _measure_next_epochs(batches: Any) -> dict[str, float]:
    """Return the median times to the first batch of a later epoch, with code and files warm."""
    wall = []
    cpu = []
    for _ in range(5):
        time.sleep(0.2)  # the last iterator's threads end
        _, wall_ms, cpu_ms = _draw_first_batch(batches)
        wall.append(wall_ms)
        cpu.append(cpu_ms)
    return {"next_epoch_ms": statistics.median(wall), "next_epoch_cpu_ms": statistics.median(cpu)}


def _compare_with_decoding(batches: Any, args: argparse.Namespace) -> dict[str, float]:
    """Return the medians of the loader's rate over the rate of decoding the same files.

    Both are measured in turn in one process, because runs that are minutes apart do not compare on
    a shared machine.
    """
    wall_shares = []
    cpu_shares = []
    for _ in range(ROUNDS):
        iterator, _, _ = _draw_first_batch(make(DECODE, args))
        decoding = _measure_rates(iterator, SECONDS / ROUNDS, args.device)
        iterator, _, _ = _draw_first_batch(batches)
        loading = _measure_rates(iterator, SECONDS / ROUNDS, args.device)
        wall_shares.append(loading["samples_per_s"] / decoding["samples_per_s"])
        cpu_shares.append(loading["samples_per_cpu_s"] / decoding["samples_per_cpu_s"])
    return {
        "decode_share": statistics.median(wall_shares),
        "decode_share_cpu": statistics.median(cpu_shares),
    }


def make(system: str, args: argparse.Namespace) -> Iterable[Any]:
    """Return the batches of a system, and import only what it needs."""
    makers = {
        OURS: _make_ours,
        CPU_DECODING: _make_ours,
        STOCK: _make_stock,
        NPY: _make_npy,
        DECODE: _DecodedRows,
    }
    return makers[system](args)


def _list_files(args: argparse.Namespace) -> list[Path]:
    return sorted((args.data / args.form / "train").glob("*.parquet"))


def _make_ours(args: argparse.Namespace) -> Iterable[Any]:
    """Return the loader of this project, with its defaults."""
    from nvt_torchrec.nvt_loader import KJTLoader

    return KJTLoader(
        args.data / args.form / "train",
        args.batch_size,
        shuffle=args.shuffle,
        device=args.device,
        cpu_decoding=args.system == CPU_DECODING,
    )


def _make_stock(args: argparse.Namespace) -> Iterable[Any]:
    """Return merlin.dataloader's Loader by its documentation, with a map to TorchRec's batch."""
    import nvt_torchrec.nvt_compat  # noqa: F401  (before merlin)

    import torch
    from merlin.dataloader.torch import Loader
    from merlin.io import Dataset
    from merlin.schema.io.tensorflow_metadata import TensorflowMetadata
    from torchrec.datasets.utils import Batch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    names = criteo_schema().dense
    keys = list(criteo_schema().categorical)

    def to_batch(features: dict[str, torch.Tensor], labels: torch.Tensor) -> Batch:
        dense = torch.cat([features[name].view(-1, 1) for name in names], dim=1)
        values = []
        lengths = []
        for key in keys:
            if f"{key}__values" in features:
                offsets = features[f"{key}__offsets"]
                values.append(features[f"{key}__values"].view(-1))
                lengths.append(offsets.diff().to(torch.int32))
            else:
                values.append(features[key].view(-1))
                lengths.append(torch.ones(len(features[key]), dtype=torch.int32))
        sparse = KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths))
        return Batch(dense, sparse, labels.view(-1))

    data = Dataset(list(map(str, _list_files(args))), engine="parquet")
    schema = args.data / args.form / "train" / ".merlin" / "schema.json"
    data.schema = TensorflowMetadata.from_json_file(schema).to_merlin_schema()
    return Loader(data, batch_size=args.batch_size, shuffle=args.shuffle).map(to_batch)


def _make_npy(args: argparse.Namespace) -> Iterable[Any]:
    """Return TorchRec's datapipe over mapped arrays: no decoding, but three times the bytes."""
    from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

    pipe = InMemoryBinaryCriteoIterDataPipe(
        "train",
        *npy_files(args.data / "npy"),
        batch_size=args.batch_size,
        rank=0,
        world_size=1,
        shuffle_batches=args.shuffle,
        mmap_mode=True,
    )
    if args.device == "cpu":
        return pipe
    return (batch.pin_memory().to(args.device, non_blocking=True) for batch in pipe)


class _DecodedRows:
    """Decodes only, and yields numbers of rows.

    On a CPU by pyarrow: whole row groups, by one thread, with checksums verified. On a GPU by cuDF:
    whole files.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def __iter__(self) -> Iterator[int]:
        for path in _list_files(self._args):
            if self._args.device == "cuda":
                import cudf

                yield len(cudf.read_parquet(path))
                continue
            file = pq.ParquetFile(path, page_checksum_verification=True)
            for i in range(file.num_row_groups):
                yield file.read_row_group(i, use_threads=False).num_rows


if __name__ == "__main__":
    main()
