"""The systems that are measured: each is an iterable of one epoch of TorchRec batches."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.data import criteo_schema, npy_files

OURS, STOCK, NPY, DECODE = "ours", "merlin stock", "torchrec npy", "limit: decode"


def make(system: str, args: argparse.Namespace) -> Iterable[Any]:
    """Return the batches of a system, and import only what it needs."""
    return {OURS: _ours, STOCK: _stock, NPY: _npy, DECODE: _Decoded}[system](args)


def _files(args: argparse.Namespace) -> list[Path]:
    return sorted((args.data / args.form / "train").glob("*.parquet"))


def _ours(args: argparse.Namespace) -> Iterable[Any]:
    """The loader of this project, with its defaults."""
    from nvt_torchrec.nvt_loader import KJTLoader

    return KJTLoader(
        args.data / args.form / "train",
        args.batch_size,
        rank=args.rank,
        world_size=args.ranks,
        shuffle=args.shuffle,
        device="cpu",
    )


def _stock(args: argparse.Namespace) -> Iterable[Any]:
    """merlin.dataloader's Loader as its documentation has it, and a map to TorchRec's batch."""
    import nvt_torchrec.nvt_compat  # noqa: F401  (before merlin)

    import torch
    from merlin.dataloader.torch import Loader
    from merlin.io import Dataset
    from merlin.schema.io.tensorflow_metadata import TensorflowMetadata
    from torchrec.datasets.utils import Batch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    names, keys = criteo_schema().dense, list(criteo_schema().categorical)

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

    data = Dataset(list(map(str, _files(args))), engine="parquet")
    schema = args.data / args.form / "train" / ".merlin" / "schema.json"
    data.schema = TensorflowMetadata.from_json_file(schema).to_merlin_schema()
    loader = Loader(
        data,
        batch_size=args.batch_size,
        shuffle=args.shuffle,
        global_size=args.ranks,
        global_rank=args.rank,
    )
    return loader.map(to_batch)


def _npy(args: argparse.Namespace) -> Iterable[Any]:
    """TorchRec's in-memory datapipe over mapped arrays: no decoding, three times the bytes."""
    from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

    return InMemoryBinaryCriteoIterDataPipe(
        "train",
        *npy_files(args.data / "npy"),
        batch_size=args.batch_size,
        rank=args.rank,
        world_size=args.ranks,
        shuffle_batches=args.shuffle,
        mmap_mode=True,
    )


class _Decoded:
    """Decode only: pyarrow, one thread, whole row groups, checksums verified, no batches."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def __iter__(self) -> Iterator[int]:
        for path in _files(self._args):
            file = pq.ParquetFile(path, page_checksum_verification=True)
            for i in range(file.num_row_groups):
                yield file.read_row_group(i, use_threads=False).num_rows
