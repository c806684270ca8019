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

#: The loaders that may read a split.
Loader: TypeAlias = "KJTLoader | MerlinLoader"

#: The largest number of values of vectors in a batch of a sample, unless the smallest number of
#: rows has more.
_SAMPLE_VALUES = 1 << 25
_MIN_SAMPLE_ROWS = 64
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
        """Pad a batch to ``size`` rows.

        All ranks must have equally many: row-wise sharded tables scatter their sums in equal parts.
        A padding row has no ids, so it reads no table, and the loss leaves it out
        (:class:`training.sharding.train_model.TrainModel`).
        """
        rows, weights = len(batch.labels), getattr(batch, "weights", None)
        dense_vectors = getattr(batch, "dense_vectors", None)
        correction = getattr(batch, "log_q_correction", None)
        dense, ids, labels = batch.dense_features, batch.sparse_features, batch.labels
        num_padding = size - rows
        if num_padding:
            lengths = ids.lengths().view(len(ids.keys()), rows)
            ids = KeyedJaggedTensor(
                keys=ids.keys(),
                values=ids.values(),
                weights=ids.weights_or_none(),
                lengths=functional.pad(lengths, (0, num_padding)).flatten(),
                stride=size,
            )
            dense = functional.pad(dense, (0, 0, 0, num_padding))
            labels = functional.pad(labels, (0, 0, 0, num_padding))
            if weights is not None:
                weights = functional.pad(weights, (0, num_padding))
            if correction is not None:
                correction = functional.pad(correction, (0, num_padding))
            if dense_vectors is not None:
                dense_vectors = functional.pad(dense_vectors, (0, 0, 0, num_padding))
        parts = dense, ids, labels, weights, dense_vectors, correction
        return cls(*parts, rows, global_size)


def spread_events(batch: LoaderBatch, config: ModelConfig) -> LoaderBatch:
    """Return a batch in which each of the newest events of a list has a key of its own.

    The keys are those of ``config.lookups``. A lookup sums the embeddings of a key in each row; of
    a key for each event the sums are the embeddings themselves, which the model takes.
    """
    ids = batch.sparse_features
    values, lengths = [], []
    for name, column in ids.to_dict().items():
        column_ids, counts = column.values(), column.lengths()
        if name in config.lists:
            # [max_events, rows]: how many places each event lies before the end of its list, the
            # oldest event first, and whether the list is as long as that.
            back = torch.arange(config.max_events, 0, -1, device=counts.device).unsqueeze(1)
            is_present = back <= counts
            ends = counts.cumsum(0)
            column_ids = column_ids[(ends - back)[is_present]]
            counts = is_present.flatten().to(counts.dtype)
        values.append(column_ids)
        lengths.append(counts)
    spread = KeyedJaggedTensor(
        [*config.lookups], torch.cat(values), lengths=torch.cat(lengths), stride=ids.stride()
    )
    return dataclasses.replace(batch, sparse_features=spread)


def fold_batch(batch: LoaderBatch, config: ModelConfig) -> LoaderBatch:
    """Return a batch whose ids are rows of their tables, which have fewer rows than ids."""
    ids = batch.sparse_features
    rows = torch.tensor(config.feature_rows, dtype=ids.values().dtype)
    rows = rows.repeat_interleave(torch.tensor(ids.length_per_key())).to(ids.values().device)
    folded = KeyedJaggedTensor(
        ids.keys(), fold_ids(ids.values(), rows), lengths=ids.lengths(), stride=ids.stride()
    )
    return dataclasses.replace(batch, sparse_features=folded)


def make_loaders(
    settings: TrainSettings, config: ModelConfig, group: Group, files: tuple[Path, ...] | None
) -> dict[str, Loader]:
    """Return this rank's loader of each split; of train, that of some files, or None for all."""
    loaders = {"train": make_loader(settings, config, "train", group, files)}
    for split in ("valid", "test"):
        loaders[split] = make_loader(settings, config, split, group)
    return loaders


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
    is_training = split == "train"
    limits = {
        "train": settings.limit_train_batches,
        "valid": settings.limit_val_batches,
        "test": settings.limit_test_batches,
    }
    memory = settings.loader_memory
    common: dict[str, Any] = {
        "data": files or settings.split_path(split),
        "batch_size": settings.batch_size_of(split),
        "drop_last": settings.drop_last_training_batch and is_training,
        # Where ids share rows, the loader checks ids by the sizes of the data's own tables.
        "table_sizes": None if config.hash_indices else config.num_embeddings,
        "label": config.labels,
        "limit_batches": limits[split],
        "rank": group.rank,
        "world_size": group.world_size,
        "device": group.device,
        "read_vectors": bool(config.dense_vectors),
    }
    if settings.loader == "merlin" and is_training:
        from nvt_torchrec.nvt_loader.merlin import MerlinLoader

        return MerlinLoader.from_split(**common)
    functions: list[Callable[[LoaderBatch], LoaderBatch]] = []
    if config.hash_indices:
        functions.append(functools.partial(fold_batch, config=config))
    if config.lists:
        functions.append(functools.partial(spread_events, config=config))
    return KJTLoader(
        **common,
        shuffle=bool(settings.shuffle_training_set and is_training),
        seed=settings.seed,
        undersampling_rate=settings.undersampling_rate if is_training else None,
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
    """Return this rank's loader of a sample of a split.

    Training rows are drawn at random.

    Args:
        settings: The settings of the run.
        config: The model.
        split: The split.
        group: This rank.
        batches: How many batches there are at most.
        batch_rows: The rows of a batch, of all ranks together; fewer if vectors are wide.
        files: The files to read; None for all of the split.
    """
    if config.dense_vectors:
        # Rows of wide vectors would take gigabytes.
        max_rows = max(_MIN_SAMPLE_ROWS, _SAMPLE_VALUES // config.vector_inputs)
        batch_rows = min(batch_rows, max_rows)
    size = max(1, batch_rows // group.world_size)
    changes: dict[str, Any] = dict.fromkeys(_LIMITS, batches)
    changes["batch_size"] = changes["test_batch_size"] = size
    changes["loader"] = changes["loader_memory"] = None
    changes["shuffle_training_set"] = True
    changes["drop_last_training_batch"] = False
    settings = dataclasses.replace(settings, **changes)
    return make_loader(settings, config, split, group, files)  # type: ignore[return-value]


def check_length(settings: TrainSettings, total_steps: int) -> None:
    """Check that there is something to train on. Raises BadInputError."""
    if not total_steps:
        raise BadInputError(f"{settings.split_path('train')}: no rows to train on")


def pad_batches(loader: Loader, group: Group, first: int = 0) -> Iterator[TrainBatch]:
    """Yield the batches of a pass, in each step padded to the same size on all ranks.

    The number of steps is that of the loader's plan. A loader that ends early raises RuntimeError:
    otherwise the other ranks would wait for this one.

    Args:
        loader: The loader, which begins at step ``first``.
        group: This rank.
        first: The step of the pass, from 0.
    """
    batches = iter(loader)
    for step in range(first, len(loader)):
        sizes = loader.step_rows(step)
        yield TrainBatch.pad(next(batches), max(sizes), sum(sizes))
    next(batches, None)  # at its end, the loader compares the rows with its plan
