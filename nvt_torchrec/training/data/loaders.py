"""Loaders of a run's splits, and batches that have the same size on all ranks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn import functional
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import fold_ids
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.nvt_loader.cpu.blocks import LoaderBatch
from nvt_torchrec.training.launch.distributed import Group
from nvt_torchrec.training.settings.train_settings import TrainSettings

if TYPE_CHECKING:
    from nvt_torchrec.nvt_loader.merlin import MerlinLoader

#: What reads a split.
Loader: TypeAlias = "KJTLoader | MerlinLoader"

_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches")


@dataclasses.dataclass
class TrainBatch(LoaderBatch):
    """One rank's batch of a step.

    Attributes:
        rows: The number of samples in it; padding rows follow them.
        global_size: The number of samples of all ranks together.
    """

    rows: int = 0
    global_size: int = 0

    @classmethod
    def pad(cls, batch: Batch, size: int, global_size: int) -> TrainBatch:
        """Pad ``batch`` to ``size`` rows, so that all ranks have equally many.

        Row-wise sharded tables scatter their sums in equal parts. A padding row has no ids, so it
        reads no table; :class:`training.sharding.train_model.TrainModel` leaves it out of the loss.
        """
        rows, weights = len(batch.labels), getattr(batch, "weights", None)
        counts = rows, global_size
        if rows == size:
            return cls(batch.dense_features, batch.sparse_features, batch.labels, weights, *counts)
        ids = batch.sparse_features
        more = size - rows
        pad = functional.pad
        padded = KeyedJaggedTensor(
            keys=ids.keys(),
            values=ids.values(),
            weights=ids.weights_or_none(),
            lengths=pad(ids.lengths().view(len(ids.keys()), rows), (0, more)).flatten(),
            stride=size,
        )
        dense = pad(batch.dense_features, (0, 0, 0, more))
        if weights is not None:
            weights = pad(weights, (0, more))
        labels = pad(batch.labels, (0, 0, 0, more))
        return cls(dense, padded, labels, weights, *counts)


def spread_events(batch: LoaderBatch, config: ModelConfig) -> LoaderBatch:
    """Return a batch of features as one of ``config.lookups``: a key for each event of a list."""
    ids, lists = batch.sparse_features, config.lists
    values, lengths = [], []
    for name, column in ids.to_dict().items():
        own, counts = column.values(), column.lengths()
        if name in lists:
            back = torch.arange(config.max_events, 0, -1, device=counts.device).unsqueeze(1)
            present = back <= counts
            own = own[(counts.cumsum(0) - back)[present]]
            counts = present.flatten().to(counts.dtype)
        values.append(own)
        lengths.append(counts)
    keys, whole = [*config.lookups], torch.cat(values)
    spread = KeyedJaggedTensor(keys, whole, lengths=torch.cat(lengths), stride=ids.stride())
    return dataclasses.replace(batch, sparse_features=spread)


def fold_batch(batch: LoaderBatch, config: ModelConfig) -> LoaderBatch:
    """Return a batch whose ids are rows of the tables, which have fewer rows than there are ids."""
    ids = batch.sparse_features
    rows = torch.tensor(config.feature_rows, dtype=ids.values().dtype)
    rows = rows.repeat_interleave(torch.tensor(ids.length_per_key())).to(ids.values().device)
    folded = KeyedJaggedTensor(
        ids.keys(), fold_ids(ids.values(), rows), lengths=ids.lengths(), stride=ids.stride()
    )
    return dataclasses.replace(batch, sparse_features=folded)


def make_loader(
    settings: TrainSettings,
    config: ModelConfig,
    split: str,
    group: Group,
    files: tuple[Path, ...] | None = None,
) -> Loader:
    """Return this rank's loader of a split, or of some files of it.

    Evaluations never read through Merlin's loader.

    Raises:
        SettingsError, BadInputError, SchemaError: As the loaders raise them.
    """
    training = split == "train"
    limits = {
        "train": settings.limit_train_batches,
        "valid": settings.limit_val_batches,
        "test": settings.limit_test_batches,
    }
    memory = settings.loader_memory
    common: dict[str, Any] = {
        "data": files or settings.split_path(split),
        "batch_size": settings.batch_size_of(split),
        "drop_last": settings.drop_last_training_batch and training,
        # where ids share rows, the loader checks them by the data's own sizes
        "table_sizes": None if config.hash_indices else config.num_embeddings,
        "label": config.labels,
        "limit_batches": limits[split],
        "rank": group.rank,
        "world_size": group.world_size,
        "device": group.device,
    }
    if settings.loader == "merlin" and training:
        from nvt_torchrec.nvt_loader.merlin import MerlinLoader

        return MerlinLoader.from_split(**common)
    functions: list[Callable[[LoaderBatch], LoaderBatch]] = []
    if config.hash_indices:
        functions.append(functools.partial(fold_batch, config=config))
    if config.lists:
        functions.append(functools.partial(spread_events, config=config))
    return KJTLoader(
        **common,
        shuffle=bool(settings.shuffle_training_set and training),
        seed=settings.seed,
        undersampling_rate=settings.undersampling_rate if training else None,
        loader_memory=None if memory is None else memory << 20,
        strict_gpu=settings.strict_gpu,
        cpu_decoding=settings.cpu_decoding,
        max_events=config.max_events,
        transforms=functions,
    )


def make_sample(
    settings: TrainSettings,
    config: ModelConfig,
    split: str,
    group: Group,
    batches: int,
    batch_rows: int,
    files: tuple[Path, ...] | None = None,
) -> KJTLoader:
    """Return this rank's loader of some batches of a split, of so many rows on all ranks.

    Training rows are drawn at random.
    """
    size = max(1, batch_rows // group.world_size)
    changes: dict[str, Any] = {**dict.fromkeys(_LIMITS, batches), "loader": None}
    changes |= {"batch_size": size, "test_batch_size": size, "loader_memory": None}
    changes |= {"shuffle_training_set": True, "drop_last_training_batch": False}
    settings = dataclasses.replace(settings, **changes)
    return make_loader(settings, config, split, group, files)  # type: ignore[return-value]


def check_length(settings: TrainSettings, total_steps: int) -> None:
    """Check that there is something to train on. Raises BadInputError."""
    if not total_steps:
        raise BadInputError(f"{settings.split_path('train')}: no rows to train on")


def padded_batches(loader: Loader, group: Group, first: int = 0) -> Iterator[TrainBatch]:
    """Yield the batches of a pass, in each step padded to the same size on all ranks.

    A loader that ends early is a RuntimeError, so that no other rank waits for this one.

    Args:
        loader: The loader, which begins at step ``first``.
        group: This rank.
        first: The step of the pass, from 0.
    """
    batches = iter(loader)
    for step in range(first, len(loader)):
        sizes = loader.step_rows(step)
        yield TrainBatch.pad(next(batches), max(sizes), sum(sizes))
    next(batches, None)  # the loader compares the rows with its plan
