"""Make the loaders of a run's splits, and pad batches to the same size on all ranks."""

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

#: The largest number of vector values in a sample's batch, unless ``_MIN_SAMPLE_ROWS`` have more.
_SAMPLE_VALUES = 1 << 25
_MIN_SAMPLE_ROWS = 64
_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches")


@dataclasses.dataclass
class TrainBatch(LoaderBatch):
    """One rank's batch of a step.

    Attributes:
        rows: The number of samples in the batch; padding rows follow them.
        global_size: The number of samples of all ranks together.
    """

    rows: int = 0
    global_size: int = 0

    @classmethod
    def pad(cls, batch: Batch, size: int, global_size: int) -> TrainBatch:
        """Pad a batch to ``size`` rows.

        All ranks must have the same number of rows, because row-wise sharded tables scatter their
        sums in equal parts. A padding row has no ids, so it reads no table, and the loss ignores it
        (:class:`training.sharding.train_model.TrainModel`).
        """
        dense = batch.dense_features
        ids = batch.sparse_features
        labels = batch.labels
        # A plain torchrec Batch does not have these attributes.
        weights = getattr(batch, "weights", None)
        dense_vectors = getattr(batch, "dense_vectors", None)
        correction = getattr(batch, "log_q_correction", None)
        rows = len(labels)
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
        return cls(dense, ids, labels, weights, dense_vectors, correction, rows, global_size)


def spread_events(batch: LoaderBatch, config: ModelConfig) -> LoaderBatch:
    """Return a batch in which each of a list's newest events has its own key.

    The keys are ``config.lookups``. A lookup sums the embeddings of a key in each row. With one
    event per key, the sums are the events' embeddings, which the model needs one by one.
    """
    ids = batch.sparse_features
    values = []
    lengths = []
    for name, column in ids.to_dict().items():
        column_ids = column.values()
        counts = column.lengths()
        if name in config.lists:
            # [max_events, 1]: the distance of each event from the end of its list, the oldest event
            # first. A row has the event if its list is at least that long.
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
    """Return a batch with its ids mapped to rows of tables that have fewer rows than ids."""
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
    """Return this rank's loader of each split.

    Args:
        settings: The settings of the run.
        config: The model.
        group: This rank.
        files: The files of train to read; None for all files.
    """
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
    """Return this rank's loader of a split; Merlin's loader only ever reads train.

    Args:
        settings: The settings of the run.
        config: The model.
        split: The split.
        group: This rank.
        files: The files to read; None for the whole split.

    Raises:
        SettingsError, BadInputError, SchemaError: The loader cannot read the data.
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
        # If ids share rows, ids may exceed the tables' rows; the loader then uses the data's sizes.
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
    """Return this rank's loader of a sample of a split; training rows are drawn at random.

    Args:
        settings: The settings of the run.
        config: The model.
        split: The split.
        group: This rank.
        batches: The largest number of batches.
        batch_rows: The global batch size; it is reduced if the data's vectors are wide.
        files: The files to read; None for the whole split.
    """
    if config.dense_vectors:
        # Rows of wide vectors would take gigabytes.
        max_rows = max(_MIN_SAMPLE_ROWS, _SAMPLE_VALUES // config.vector_inputs)
        batch_rows = min(batch_rows, max_rows)
    size = max(1, batch_rows // group.world_size)
    changes: dict[str, Any] = dict.fromkeys(_LIMITS, batches)
    changes["batch_size"] = size
    changes["test_batch_size"] = size
    changes["loader"] = None
    changes["loader_memory"] = None
    changes["shuffle_training_set"] = True
    changes["drop_last_training_batch"] = False
    settings = dataclasses.replace(settings, **changes)
    return make_loader(settings, config, split, group, files)  # type: ignore[return-value]


def check_length(settings: TrainSettings, total_steps: int) -> None:
    """Raise BadInputError if a run has no step to train."""
    if not total_steps:
        raise BadInputError(f"{settings.split_path('train')}: no rows to train on")


def pad_batches(loader: Loader, group: Group, first: int = 0) -> Iterator[TrainBatch]:
    """Yield the batches of a pass, padded in each step to the same size on all ranks.

    The loader's plan determines the number of steps. If the loader ends early, this raises
    RuntimeError, so that the other ranks do not wait for this one forever.

    Args:
        loader: The loader, which begins at step ``first``.
        group: This rank.
        first: The first step to yield, counted from 0 within the pass.
    """
    batches = iter(loader)
    for step in range(first, len(loader)):
        sizes = loader.step_rows(step)
        yield TrainBatch.pad(next(batches), max(sizes), sum(sizes))
    next(batches, None)  # at its end, the loader compares the rows with its plan
