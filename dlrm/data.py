"""A run's data: which rows each split has, in which batches they come."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from clicklog.errors import ClickLogError
from clicklog.etl_output import EtlOutput
from clicklog.files.atomic import read_json
from clicklog.files.validation import parse
from clicklog.schema import TableSchema
from dlrm.config import ModelConfig
from dlrm.launch.distributed import Group
from dlrm.model import TrainBatch
from dlrm.multi_hot import MultiHot
from dlrm.settings.train_settings import TrainSettings
from dlrm.synthetic import SyntheticLoader, synthetic_schema
from nvt_loader import KJTLoader

Loader = KJTLoader | SyntheticLoader

#: Rows of a synthetic valid or test set, as a share of the training set's.
_HELD_OUT = 0.1


def read_schema(settings: TrainSettings) -> TableSchema:
    """The columns and table sizes of the data.

    Raises:
        SettingsError: there are no data, or none of the ETL's.
        BadInputError, SchemaError: their schema cannot be read.
    """
    settings.check_data()
    if settings.dataset_type == "synthetic":
        return synthetic_schema(
            settings.synthetic_dataset_numerical_features, settings.synthetic_dataset_table_sizes
        )
    return TableSchema.read(settings.binary_path)


def read_oracle(settings: TrainSettings) -> dict[str, dict[str, float]] | None:
    """What is known to be the best that any model can reach, by split, for a synthetic log.

    ``python -m etl synthesize`` writes the metrics of the true click probabilities beside its
    log; they are those of the ETL's splits if these have as many rows and clicks.
    """
    output = EtlOutput.of_splits(settings.binary_path)
    try:
        inputs = output.manifest_value("inputs", list[dict[str, Any]])
        splits = output.manifest_value("splits", dict[str, dict[str, Any]])
        file = Path(inputs[0]["path"]).parent / "synthetic.json"
        summary = parse(dict[str, Any], read_json(file, "a synthetic log's description"), file)
        oracle = parse(dict[str, dict[str, Any]], summary["oracle"], file)
        found = {
            split: {name: float(scores[name]) for name in ("auroc", "log_loss")}
            for split, scores in oracle.items()
            if all(scores[name] == splits[split][name] for name in ("rows", "positives"))
        }
    except (ClickLogError, LookupError, TypeError, ValueError):
        return None
    return found or None


def make_loader(
    settings: TrainSettings,
    config: ModelConfig,
    split: str,
    group: Group,
    batch_size: int | None = None,
) -> Loader:
    """The loader of a split, for this rank.

    Raises:
        SettingsError, BadInputError, SchemaError: as :class:`nvt_loader.KJTLoader`.
    """
    limits = {
        "train": settings.limit_train_batches,
        "valid": settings.limit_val_batches,
        "test": settings.limit_test_batches,
    }
    make = _parquet if settings.dataset_type == "parquet" else _synthetic
    batch_size = batch_size or settings.batch_size_of(split)
    loader = make(settings, config, split, group, batch_size, limits[split])
    if split == "train" and settings.dataset_subset is not None and len(loader):
        limit = math.ceil(settings.dataset_subset * len(loader))
        loader = make(settings, config, split, group, batch_size, limit)
    return loader.map(MultiHot(config).batch) if config.multi_hot_sizes else loader


def _parquet(
    settings: TrainSettings,
    config: ModelConfig,
    split: str,
    group: Group,
    batch_size: int,
    limit: int | None,
) -> KJTLoader:
    training = split == "train"
    memory = settings.loader_memory
    return KJTLoader(
        settings.split_path(split),
        batch_size,
        rank=group.rank,
        world_size=group.world_size,
        shuffle=settings.shuffle_training_set and training,
        seed=settings.seed,
        drop_last=settings.drop_last_training_batch and training,
        device=group.device,
        table_sizes=config.num_embeddings,
        hash_indices=settings.hash_indices,
        undersampling_rate=settings.undersampling_rate if training else None,
        limit_batches=limit,
        loader_memory=None if memory is None else memory << 20,
    )


def _synthetic(
    settings: TrainSettings,
    config: ModelConfig,
    split: str,
    group: Group,
    batch_size: int,
    limit: int | None,
) -> SyntheticLoader:
    rows = settings.synthetic_dataset_num_entries
    schema = synthetic_schema(len(config.dense), config.num_embeddings)
    return SyntheticLoader(
        schema,
        rows if split == "train" else int(_HELD_OUT * rows),
        batch_size,
        rank=group.rank,
        world_size=group.world_size,
        seed=_number(settings.seed, split),
        limit_batches=limit,
        device=group.device,
    )


class TrainingBatches:
    """Makes the batches of training's steps from the loader's.

    Args:
        settings: batch size, ``shuffle_batches``, seed.
        loader: of the training set.
        group: this rank.
    """

    def __init__(self, settings: TrainSettings, loader: Loader, group: Group) -> None:
        self._settings, self._group, self._loader = settings, group, loader

    def step(self, batch: Batch, epoch: int, i: int) -> TrainBatch:
        """The batch of step ``i`` of an epoch, of as many rows as the other ranks' batches."""
        ranks, last = self._group.world_size, len(self._loader) - 1
        global_size = self._settings.batch_size * ranks
        if i == last:  # the rest of the data, however the ranks share it
            global_size = min(global_size, self._loader.num_rows - i * global_size)
        size = -(-global_size // ranks)
        rows = len(batch.labels)
        if rows > size or (rows < size and i < last):
            raise RuntimeError(f"step {i}: a batch of {rows} instead of {size} rows")
        if self._settings.shuffle_batches:
            seed = _number(self._settings.seed, "shuffle", epoch, i, self._group.rank)
            batch = shuffled(batch, seed)
        return TrainBatch.of(batch, size, global_size)


def shuffled(batch: Batch, seed: int) -> Batch:
    """The rows of ``batch`` in an order that follows from ``seed``."""
    rows, ids = len(batch.labels), batch.sparse_features
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    order = order.to(batch.labels.device)
    first = torch.arange(len(ids.keys()), device=order.device).unsqueeze(1) * rows
    lengths, values, weights = torch.ops.fbgemm.permute_1D_sparse_data(
        (first + order).flatten().int(),
        ids.lengths(),
        ids.values(),
        ids.weights_or_none(),
        ids.values().numel(),
    )
    return Batch(
        dense_features=batch.dense_features[order],
        sparse_features=KeyedJaggedTensor(
            keys=ids.keys(), values=values, weights=weights, lengths=lengths, stride=rows
        ),
        labels=batch.labels[order],
    )


def _number(*parts: object) -> int:
    """A seed, 0 … 2**62 - 1, that follows from all parts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2
