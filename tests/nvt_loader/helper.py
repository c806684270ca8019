"""What the loader tests share."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.nvt_loader import KJTLoader, memory
from nvt_torchrec.nvt_loader.cpu.blocks import LoaderBatch
from nvt_torchrec.nvt_loader.parquet.dataset import read_dataset
from tests.nvt_loader.data import row_numbers


def limit_rows(patch: pytest.MonkeyPatch, path: Path, **rows: int) -> None:
    """Let blocks (BLOCK) and decoded chunks (DECODE) hold so many rows of the data at a path."""
    width = int(read_dataset(path).batch_row_bytes)
    for what, maximum in rows.items():
        patch.setattr(memory, f"{what}_BYTES", maximum * width)


def rows_of(batches) -> list[int]:
    """The row numbers of some batches, in order."""
    return [row for batch in batches for row in row_numbers(batch.dense_features).tolist()]


def assert_same(first: list[Batch], second: list[Batch]) -> None:
    """The batches are equal, number by number."""
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.dense_features, b.dense_features)
        assert torch.equal(a.sparse_features.values(), b.sparse_features.values())
        assert torch.equal(a.sparse_features.lengths(), b.sparse_features.lengths())
        assert torch.equal(a.sparse_features.offsets(), b.sparse_features.offsets())
        assert a.sparse_features.length_per_key() == b.sparse_features.length_per_key()
        assert torch.equal(a.labels, b.labels)
        if getattr(a, "dense_vectors", None) is not None:
            assert torch.equal(a.dense_vectors, b.dense_vectors)


def embeddings() -> EmbeddingBagCollection:
    """A table for each categorical column of a split."""
    tables = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=4, num_embeddings=200, feature_names=[key])
        for i, key in enumerate(("cat_0", "cat_1", "cat_2"))
    ]
    return EmbeddingBagCollection(tables=tables)


def all_ranks(path: Path, batch_size: int, world_size: int, **options) -> list[KJTLoader]:
    """The loaders of all ranks, on the CPU."""
    return [
        KJTLoader(path, batch_size, rank=rank, world_size=world_size, device="cpu", **options)
        for rank in range(world_size)
    ]


def global_rows(loaders: list[KJTLoader]) -> list[list[int]]:
    """Per step the row numbers of the global batch; all ranks must have as many steps."""
    ranks = [[rows_of([batch]) for batch in loader] for loader in loaders]
    return [list(itertools.chain(*step)) for step in zip(*ranks, strict=True)]


def global_batches(loaders: list[KJTLoader]) -> list[Batch]:
    """Per step the batches of all ranks as one batch; all ranks must have as many steps."""
    return [_joined(step) for step in zip(*map(list, loaders), strict=True)]


def _joined(ranks: tuple[Batch, ...]) -> Batch:
    keys = ranks[0].sparse_features.keys()
    parts = [batch.sparse_features.to_dict() for batch in ranks]
    joined = [part[key] for key in keys for part in parts]
    values = torch.cat([part.values() for part in joined])
    lengths = torch.cat([part.lengths() for part in joined])
    dense = torch.cat([batch.dense_features for batch in ranks])
    labels = torch.cat([batch.labels for batch in ranks])
    vectors = None
    if getattr(ranks[0], "dense_vectors", None) is not None:
        vectors = torch.cat([batch.dense_vectors for batch in ranks])
    ids = KeyedJaggedTensor(keys, values, lengths=lengths)
    return LoaderBatch(dense, ids, labels, dense_vectors=vectors)


def read_rows(path: Path) -> dict[int, dict[str, float]]:
    """Row number → column → value, as pyarrow reads the split."""
    found = {}
    for file in sorted(path.glob("part.*.parquet")):
        for row in pq.read_table(file).to_pylist():
            found[round(row["int_0"] * 2**20)] = row
    return found
