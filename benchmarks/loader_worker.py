"""Measure one system of :mod:`benchmarks.loader` in this process, and print one JSON line."""

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

from benchmarks.data import list_npy_files, make_criteo_schema
from benchmarks.process import read_peak_memory
from nvt_torchrec.base.startup import prepare_torch

OURS = "ours"
STOCK = "merlin stock"
NPY = "torchrec npy"
DECODE = "limit: decode"
#: Ours on a GPU without libcudf.
CPU_DECODING = "ours, CPU decodes"
#: The seconds for which a run iterates.
SECONDS = 2.0
#: A run continues until it has this many rows: a loader that delivers in bursts shows its rate only
#: after several of them.
MIN_ROWS = 400_000
#: A run ends after this many times its seconds, even with fewer rows.
PATIENCE = 20
#: The number of times that the loader and decoding are measured alternately.
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
    """Iterate for a few seconds after the first batch, or to the end of the epoch.

    Rates exclude the first batch, which is measured separately.
    """
    batches = make_batches(args.system, args)
    gc.freeze()  # as train_torchrec.py does, so that collections skip the imports' objects
    iterator, first, _ = _draw_first_batch(batches)
    metrics = _measure_rates(iterator, SECONDS, args.device) | {"first_batch_ms": first}
    _stop(batches)
    if args.system == OURS:
        del iterator
        metrics |= _measure_next_epochs(batches)
    # Read the peak before decoding alone is measured, which takes additional memory.
    metrics["loading_mb"] = read_peak_memory(os.getpid()) / 1e6
    if args.system == OURS and args.form == "int32" and not args.shuffle:
        metrics |= _compare_with_decoding(batches, args)
    return metrics


def _draw_first_batch(batches: Iterable[Any]) -> tuple[Iterator[Any], float, float]:
    """Draw the first batch; return the iterator, and the wall and CPU time that it took in ms."""
    cpu_begin = time.process_time()
    begin = time.perf_counter()
    iterator = iter(batches)
    next(iterator)
    return iterator, 1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - cpu_begin)


def _stop(batches: Any) -> None:
    """Stop the threads of Merlin's loader, which would otherwise continue."""
    if hasattr(batches, "stop"):
        batches.stop()


def _measure_rates(iterator: Iterator[Any], seconds: float, device: str) -> dict[str, float]:
    """Draw batches for ``seconds``; return the rates of ids and rows."""
    rows = 0
    ids = 0
    cpu_begin = time.process_time()
    begin = time.perf_counter()
    for batch in iterator:
        if isinstance(batch, int):  # the number of decoded rows
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
    """Return the median times to the first batch of a later epoch, with warm code and files."""
    wall = []
    cpu = []
    for _ in range(5):
        time.sleep(0.2)  # let the threads of the last iterator end
        _, wall_ms, cpu_ms = _draw_first_batch(batches)
        wall.append(wall_ms)
        cpu.append(cpu_ms)
    return {"next_epoch_ms": statistics.median(wall), "next_epoch_cpu_ms": statistics.median(cpu)}


def _compare_with_decoding(batches: Any, args: argparse.Namespace) -> dict[str, float]:
    """Return the median ratios of the loader's rate to the rate of decoding the same files.

    Both are measured alternately in one process, because on a shared machine runs that are minutes
    apart cannot be compared.
    """
    wall_shares = []
    cpu_shares = []
    for _ in range(ROUNDS):
        iterator, _, _ = _draw_first_batch(make_batches(DECODE, args))
        decoding = _measure_rates(iterator, SECONDS / ROUNDS, args.device)
        iterator, _, _ = _draw_first_batch(batches)
        loading = _measure_rates(iterator, SECONDS / ROUNDS, args.device)
        wall_shares.append(loading["samples_per_s"] / decoding["samples_per_s"])
        cpu_shares.append(loading["samples_per_cpu_s"] / decoding["samples_per_cpu_s"])
    return {
        "decode_share": statistics.median(wall_shares),
        "decode_share_cpu": statistics.median(cpu_shares),
    }


def make_batches(system: str, args: argparse.Namespace) -> Iterable[Any]:
    """Make the batches of a system; import only the modules that it needs."""
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
    """Make the loader of this project with its defaults."""
    from nvt_torchrec.nvt_loader import KJTLoader

    return KJTLoader(
        args.data / args.form / "train",
        args.batch_size,
        shuffle=args.shuffle,
        device=args.device,
        cpu_decoding=args.system == CPU_DECODING,
    )


def _make_stock(args: argparse.Namespace) -> Iterable[Any]:
    """Make merlin.dataloader's Loader as documented, mapped to TorchRec's batches."""
    import nvt_torchrec.nvt_compat  # noqa: F401  (must come before merlin)

    import torch
    from merlin.dataloader.torch import Loader
    from merlin.io import Dataset
    from merlin.schema.io.tensorflow_metadata import TensorflowMetadata
    from torchrec.datasets.utils import Batch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    names = make_criteo_schema().dense
    keys = list(make_criteo_schema().categorical)

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
    """Make TorchRec's datapipe over mapped arrays: no decoding, but three times the bytes."""
    from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

    pipe = InMemoryBinaryCriteoIterDataPipe(
        "train",
        *list_npy_files(args.data / "npy"),
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
    """Only decodes files, and yields numbers of rows.

    On a CPU pyarrow decodes one row group at a time, with one thread, and verifies checksums. On a
    GPU cuDF decodes one file at a time.
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
