"""The systems that are measured: each is an iterable of one epoch of TorchRec batches."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.loader.data import TABLE_SIZES

OURS, STOCK, NPY, PLAIN = "ours", "merlin stock", "torchrec npy", "plain pyarrow"
DECODE, MEMCPY = "limit: decode", "limit: memcpy"


def make(system: str, args: argparse.Namespace) -> Iterable[Any]:
    """Return the batches of a system, and import only what it needs."""
    return {
        OURS: ours,
        STOCK: stock,
        NPY: npy,
        PLAIN: plain,
        DECODE: decode,
        MEMCPY: memcpy,
    }[system](args)


def files(args: argparse.Namespace) -> list[Path]:
    """The parquet files, in order."""
    return sorted((args.data / args.form / "train").glob("*.parquet"))


def ours(args: argparse.Namespace) -> Iterable[Any]:
    """The loader of this project, with its defaults."""
    from nvt_torchrec.nvt_loader import KJTLoader

    return KJTLoader(
        args.data / args.form / "train",
        args.batch_size,
        rank=args.rank,
        world_size=args.ranks,
        shuffle=args.shuffle,
        id_dtype="int64" if args.form == "int64" else "int32",
        device="cpu",
    )


def stock(args: argparse.Namespace) -> Iterable[Any]:
    """merlin.dataloader's Loader as its documentation has it, and a map to TorchRec's batch."""
    import nvt_torchrec.nvt_compat  # noqa: F401  (before merlin)

    import torch
    from merlin.dataloader.torch import Loader
    from merlin.io import Dataset
    from torchrec.datasets.utils import Batch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    names = [f"int_{i}" for i in range(13)]
    keys = [f"cat_{i}" for i in range(len(TABLE_SIZES))]

    def to_batch(features: dict[str, torch.Tensor], labels: torch.Tensor) -> Batch:
        dense = torch.cat([features[name].view(-1, 1) for name in names], dim=1)
        values, lengths = [], []
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

    data = Dataset(list(map(str, files(args))), engine="parquet")
    data.schema = _merlin_schema(args)
    loader = Loader(
        data,
        batch_size=args.batch_size,
        shuffle=args.shuffle,
        global_size=args.ranks,
        global_rank=args.rank,
    )
    return loader.map(to_batch)


def _merlin_schema(args: argparse.Namespace) -> Any:
    from merlin.schema.io.tensorflow_metadata import TensorflowMetadata

    directory = args.data / args.form / "train" / ".merlin"
    return TensorflowMetadata.from_json_file(directory / "schema.json").to_merlin_schema()


def npy(args: argparse.Namespace) -> Iterable[Any]:
    """TorchRec's in-memory datapipe over mapped arrays: no decoding, three times the bytes."""
    from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

    count = len(files(args))

    def paths(kind: str) -> list[str]:
        return [str(args.data / "npy" / f"{i}_{kind}.npy") for i in range(count)]

    return InMemoryBinaryCriteoIterDataPipe(
        "train",
        paths("dense"),
        paths("sparse"),
        paths("labels"),
        batch_size=args.batch_size,
        rank=args.rank,
        world_size=args.ranks,
        shuffle_batches=args.shuffle,
        mmap_mode=True,
    )


def plain(args: argparse.Namespace) -> Iterable[Any]:
    """A plain solution: torch's DataLoader over an IterableDataset that reads with pyarrow."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset
    from torchrec.datasets.utils import Batch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    keys = [f"cat_{i}" for i in range(len(TABLE_SIZES))]
    names = [f"int_{i}" for i in range(13)]

    class Rows(IterableDataset):
        def __iter__(self) -> Iterator[Batch]:
            for path in files(args)[args.rank :: args.ranks]:
                for rows in pq.ParquetFile(path).iter_batches(args.batch_size):
                    yield self._batch(rows)

        def _batch(self, rows: Any) -> Batch:
            dense = np.stack([rows.column(name).to_numpy() for name in names], axis=1)
            values, lengths = [], []
            for key in keys:
                column = rows.column(key)
                if hasattr(column, "flatten") and hasattr(column, "offsets"):
                    values.append(column.flatten().to_numpy())
                    lengths.append(np.diff(column.offsets.to_numpy()))
                else:
                    values.append(column.to_numpy())
                    lengths.append(np.ones(len(column), np.int32))
            sparse = KeyedJaggedTensor(
                keys,
                torch.from_numpy(np.concatenate(values)),
                lengths=torch.from_numpy(np.concatenate(lengths)),
            )
            label = torch.tensor(rows.column("label").to_numpy())
            return Batch(torch.from_numpy(dense), sparse, label)

    return DataLoader(Rows(), batch_size=None)


class _Decoded:
    """Row groups as Arrow's tables."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def __iter__(self) -> Iterator[int]:
        for path in files(self._args):
            file = pq.ParquetFile(path, page_checksum_verification=True)
            for i in range(file.num_row_groups):
                yield file.read_row_group(i, use_threads=False).num_rows


def decode(args: argparse.Namespace) -> Iterable[Any]:
    """Decode only: pyarrow, one thread, whole row groups, checksums verified, no batches."""
    return _Decoded(args)


def memcpy(args: argparse.Namespace) -> Iterable[Any]:
    """Copy only: the same batch again and again, into new memory."""
    import torch

    size, count = args.batch_size, 4_000_000 // args.batch_size
    tensors = [
        torch.zeros(size, 13),
        torch.zeros(26, size, dtype=torch.int32),
        torch.zeros(size),
    ]

    def copies() -> Iterator[int]:
        for _ in range(count):
            for tensor in tensors:
                tensor.clone()
            yield size

    return copies()
