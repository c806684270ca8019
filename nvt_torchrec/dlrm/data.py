"""A run's data: schema, label, loaders of the splits, and training batches."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from nvt_torchrec.base.errors import BadInputError, ClickLogError, SettingsError
from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.dlrm.checkpoint.ancestor import newest_record, resolve
from nvt_torchrec.dlrm.checkpoint.record import CheckpointRecord
from nvt_torchrec.dlrm.checkpoint.writer import checkpoints_in
from nvt_torchrec.dlrm.launch.distributed import Group
from nvt_torchrec.dlrm.model import TrainBatch
from nvt_torchrec.dlrm.models.config import ModelConfig
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings, table_optimizer, with_sizes
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.feature_spec.feature_spec import did_you_mean
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.nvt_loader.parquet.dataset import read_dataset
from nvt_torchrec.nvt_loader.selection import Selection

if TYPE_CHECKING:
    from nvt_torchrec.nvt_loader.merlin import MerlinLoader

log = logging.getLogger(__name__)

#: What reads a split.
Loader: TypeAlias = "KJTLoader | MerlinLoader"

_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches")
#: What a run takes from its checkpoint unless it is given.
_MODEL_SIZES = (
    "vector_scale",
    *("embedding_dim", "dense_arch_layer_sizes", "over_arch_layer_sizes", "first_order"),
    "dense_bins",
)
_RATES = ("learning_rate", "dense_learning_rate", "lr_warmup_steps", "dense_decay")


def read_schema(settings: TrainSettings) -> TableSchema:
    """Return the columns and table sizes of the data.

    Raises:
        SettingsError: ``binary_path`` does not hold what the ETL writes.
        BadInputError, SchemaError: The schema cannot be read, or the ETL is adding a day.
    """
    settings.check_data()
    EtlOutput.of_splits(settings.binary_path).check_whole()
    return TableSchema.read(settings.binary_path)


def choose_label(settings: TrainSettings, schema: TableSchema) -> TrainSettings:
    """Return the settings with the labels that the run trains or evaluates; None for the main one.

    So checkpoints of data with one label do not depend on its name.

    A run that only evaluates a checkpoint takes the checkpoint's labels unless it names some.

    Raises:
        SettingsError: The data have no such label, or the checkpoint that the run continues from
            was trained on others.
        BadInputError, SchemaError: The checkpoint cannot be read.
    """
    given = settings.labels
    for name in given:
        if name not in schema.labels:
            raise SettingsError(
                f"--label {name}: the data have no such label", did_you_mean(name, schema.labels)
            )
    labels = () if given == (schema.label,) else given
    # with one label there is nothing to choose
    path = _checkpoint_of(settings) if schema.more_labels else None
    if path is not None:
        then = CheckpointRecord.read(path).labels
        if settings.mode != "train" and not given:
            labels = then
        if then != labels:
            before, now = (",".join(names or (schema.label,)) for names in (then, labels))
            if settings.mode == "train" and settings.continue_from:
                raise SettingsError(
                    f"--continue_from {path}: trained on label {before}, now it is {now}",
                    f"give --label {before}; to train another label from these weights, give "
                    "--load_checkpoint_path instead of --continue_from",
                )
            log.warning("%s was trained on label %s, now the label is %s", path, before, now)
    return dataclasses.replace(settings, label=",".join(labels) or None)  # type: ignore[call-arg]


def check_gauc_column(settings: TrainSettings, schema: TableSchema) -> None:
    """Check that ``--gauc_column`` has one id in each row.

    Raises:
        SettingsError: It is another column, or none.
    """
    name = settings.gauc_column
    known = [column for column in schema.categorical if column not in schema.multi_hot]
    if name is None or name in known:
        return
    remedy = did_you_mean(name, known)
    with contextlib.suppress(ClickLogError):  # data of another program
        split = Manifest.read(EtlOutput.of_splits(settings.binary_path).manifest).split or {}
        if name == split.get("column"):
            remedy = (
                "the log is divided by it: add it to the spec as a [[categorical]] column with "
                "hash_buckets, as no value of valid is in training's vocabulary, and run the ETL"
            )
    raise SettingsError(f"--gauc_column {name}: no column with one id in each row", remedy)


def _checkpoint_of(settings: TrainSettings) -> Path | None:
    if settings.continue_from:
        return resolve(Path(settings.continue_from))
    return Path(settings.load_checkpoint_path) if settings.load_checkpoint_path else None


def choose_sizes(settings: TrainSettings, schema: TableSchema, ranks: int) -> TrainSettings:
    """Fill in the sizes of model and batch, and the optimizer, that ``settings`` do not have.

    They are those of the checkpoint that the run starts from, if there is one, else those of
    ``--size``. A run that resumes keeps its learning rates, too.

    Args:
        settings: The settings of the run.
        schema: The columns of the data.
        ranks: The number of ranks.

    Raises:
        BadInputError, SchemaError: The checkpoint or the data cannot be read.
    """
    directory = settings.checkpoint_dir
    resumed = newest_record(checkpoints_in(directory)) if directory else None
    path = None if resumed else _checkpoint_of(settings)
    if resumed or path:
        record = resumed[1] if resumed else CheckpointRecord.read(path or "")
        then = record.training["settings"]
        model = ModelConfig.from_dict(record.model)
        sizes = {**model.settings, **vars(model)}
        kept = {
            name: tuple(sizes[name]) if isinstance(sizes[name], list) else sizes[name]
            for name in _MODEL_SIZES
            if name in sizes
        }
        if "over_arch_layer_sizes" in kept:  # with other labels it is refused as another model
            *layers, _ = kept["over_arch_layer_sizes"]
            kept["over_arch_layer_sizes"] = (*layers, settings.label_count)
        if resumed or settings.continue_from:
            batch = then.get("batch_size", 1) * record.world_size // ranks
            kept |= {"batch_size": max(1, batch), "eps": then.get("eps")}
            kept["optimizer"] = table_optimizer(then)
        if resumed and not (settings.learning_rate or settings.dense_learning_rate):
            kept |= {"dense_decay": 0.0, **{name: then.get(name) for name in _RATES}}
        if resumed:
            same = "shuffle_training_set", "epochs", "early_stopping"
            kept |= {name: then.get(name) for name in same}
        if model.model == settings.model != "dlrm":
            kept["model_settings"] = model.settings
        known = {name: value for name, value in kept.items() if value not in (None, ())}
        settings = settings.filled(known)
    rows = read_dataset(settings.split_path("train"), schema).rows
    return with_sizes(settings, int(rows.sum()), ranks)


def describe_data(settings: TrainSettings) -> dict[str, str]:
    """Return the names of the log, the label and the split, as pages show them."""
    label = ", ".join(settings.labels) or TableSchema.read(settings.binary_path).label
    try:
        manifest = Manifest.read(EtlOutput.of_splits(settings.binary_path).manifest)
    except ClickLogError:  # data made elsewhere
        return {"log": "", "label": label, "split": ""}
    return {"log": manifest.log_name, "label": label, "split": manifest.split_text}


def read_oracle(settings: TrainSettings) -> dict[str, dict[str, float]] | None:
    """Return the best metrics that any model can reach, by split, for a synthetic log.

    ``python -m etl synthesize`` writes the metrics of the true click probabilities beside its
    log. They hold for the main label, and the ETL's splits if these have as many rows and clicks.
    """
    if settings.label:
        return None
    output = EtlOutput.of_splits(settings.binary_path)
    try:
        manifest = Manifest.read(output.manifest)
        file = Path(manifest.inputs[0].path).parent / "synthetic.json"
        summary = parse(dict[str, Any], read_json(file, "a synthetic log's description"), file)
        oracle = parse(dict[str, dict[str, Any]], summary["oracle"], file)
        best = {
            split: {name: float(scores[name]) for name in ("auroc", "log_loss")}
            for split, scores in oracle.items()
            if all(scores[name] == manifest.splits[split][name] for name in ("rows", "positives"))
        }
    except (ClickLogError, LookupError, TypeError, ValueError):
        return None
    return best or None


def make_loader(
    settings: TrainSettings,
    config: ModelConfig,
    split: str,
    group: Group,
    selection: Selection | None = None,
) -> Loader:
    """Return this rank's loader of a split, or of the part of it that ``selection`` names.

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
        "data": settings.split_path(split),
        "batch_size": settings.batch_size_of(split),
        "drop_last": settings.drop_last_training_batch and training,
        "table_sizes": config.num_embeddings,
        "hash_indices": settings.hash_indices,
        "selection": selection,
        "label": config.labels if len(config.labels) > 1 else config.labels[0],
        "limit_batches": limits[split],
        "rank": group.rank,
        "world_size": group.world_size,
        "device": group.device,
    }
    if settings.loader == "merlin" and training:
        from nvt_torchrec.nvt_loader.merlin import MerlinLoader

        return MerlinLoader.of_split(**common)
    return KJTLoader(
        **common,
        shuffle=bool(settings.shuffle_training_set and training),
        seed=settings.seed,
        undersampling_rate=settings.undersampling_rate if training else None,
        loader_memory=None if memory is None else memory << 20,
        strict_gpu=settings.strict_gpu,
        cpu_decoding=settings.cpu_decoding,
    )


def make_sample(
    settings: TrainSettings,
    config: ModelConfig,
    split: str,
    group: Group,
    batches: int,
    batch_rows: int,
    selection: Selection | None = None,
) -> KJTLoader:
    """Return this rank's loader of some batches of a split, of so many rows on all ranks.

    Training rows are drawn at random.
    """
    size = max(1, batch_rows // group.world_size)
    changes: dict[str, Any] = {**dict.fromkeys(_LIMITS, batches), "loader": None}
    changes |= {"batch_size": size, "test_batch_size": size, "loader_memory": None}
    changes |= {"shuffle_training_set": True, "drop_last_training_batch": False}
    settings = dataclasses.replace(settings, **changes)
    return make_loader(settings, config, split, group, selection)  # type: ignore[return-value]


def check_length(settings: TrainSettings, total_steps: int) -> None:
    """Check that there is something to train on, and to measure.

    Raises:
        BadInputError: The training set has no rows.
        SettingsError: All steps belong to ``--benchmark_warmup_steps``.
    """
    if not total_steps:
        raise BadInputError(f"{settings.split_path('train')}: no rows to train on")
    if settings.benchmark_warmup_steps >= total_steps:
        raise SettingsError(
            f"--benchmark_warmup_steps {settings.benchmark_warmup_steps} of {total_steps} steps",
            "leave some to measure",
        )


def padded_batches(loader: Loader, group: Group, first: int = 0) -> Iterator[TrainBatch]:
    """Yield the batches of a pass, in each step padded to the same size on all ranks.

    Args:
        loader: The loader, which begins at step ``first``.
        group: This rank.
        first: The step of the pass, from 0.
    """
    steps, batches = len(loader), iter(loader)
    for step in range(first, steps):
        batch = next(batches, None)
        if batch is None:
            raise RuntimeError(f"the loader ended after {step} of {steps} steps")
        sizes, rows = loader.step_rows(step), len(batch.labels)
        if rows != sizes[group.rank]:
            raise RuntimeError(f"step {step}: {rows} rows instead of {sizes[group.rank]}")
        yield TrainBatch.of(batch, max(sizes), sum(sizes))
    if next(batches, None) is not None:
        raise RuntimeError(f"the loader has more than the {steps} steps it said")
