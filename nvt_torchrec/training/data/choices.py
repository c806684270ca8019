"""Fill in the settings that a run leaves open: labels, sizes, and the order of rows.

They come from the data and from the checkpoint that the run starts from.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import ClickLogError, SchemaError, SettingsError
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.feature_spec.field_checks import did_you_mean
from nvt_torchrec.formats.histories import HISTORIES
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.vectors import VECTORS
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.registry import MODELS, list_model_flags
from nvt_torchrec.nvt_loader.parquet.dataset import read_dataset
from nvt_torchrec.training.checkpoint.directories import list_checkpoints, newest_record, resolve
from nvt_torchrec.training.settings.train_settings import (
    MODEL_SIZES,
    RATES,
    TABLE_SIZES,
    TrainSettings,
    fill_sizes,
    table_optimizer,
)

log = logging.getLogger(__name__)

#: Ways to split a log that do not order the splits by time.
_NOT_BY_TIME = ("share", "column", "files")


def read_schema(settings: TrainSettings) -> TableSchema:
    """Return the columns and table sizes of the data.

    Raises:
        SettingsError: ``binary_path`` is not an output of the ETL.
        BadInputError, SchemaError: The schema cannot be read, or the ETL is adding a day.
    """
    settings.check_data()
    EtlOutput.from_splits(settings.binary_path).check_whole()
    return TableSchema.read(settings.binary_path)


def check_stores(settings: TrainSettings) -> None:
    """Compare the histories and vectors that a run reads with the digests in the ETL's manifest.

    The loader only checks that ids fit into their tables, and that values are finite. It would not
    notice other wrong values.

    Raises:
        BadInputError: A store differs, or the manifest is damaged.
    """
    output = EtlOutput.from_splits(settings.binary_path)
    if not output.manifest.is_file():  # another program wrote the data
        return
    stores = []
    if settings.max_events != 0:
        stores.append(HISTORIES)
    if settings.vectors is not False:
        stores.append(VECTORS)
    manifest = Manifest.read(output.manifest)
    remedy = "copy the output again, or run the ETL again"
    for store in stores:
        directory = output.splits.relative_to(output.root) / store
        output.check_described(manifest, remedy, below=f"{directory}/")


def choose_label(settings: TrainSettings, schema: TableSchema) -> TrainSettings:
    """Return the settings with the labels that the run trains or evaluates.

    If that is only the data's main label, the setting is None, so that checkpoints of data with one
    label do not depend on its name. A run that only evaluates a checkpoint uses the checkpoint's
    labels by default.

    Raises:
        SettingsError: The data have no such label, or the checkpoint that the run continues from
            was trained on other labels.
        BadInputError, SchemaError: The checkpoint cannot be read.
    """
    given = settings.labels
    for name in given:
        if name not in schema.labels:
            raise SettingsError(
                f"--label {name}: the data have no such label", did_you_mean(name, schema.labels)
            )
    labels = () if given == (schema.label,) else given
    path = None
    if len(schema.labels) > 1:  # with one label there is nothing to choose
        path = _find_checkpoint(settings)
    if path is not None:
        trained = CheckpointRecord.read(path).labels
        if settings.mode != "train" and not given:
            labels = trained
        if trained != labels:
            before = ",".join(trained or (schema.label,))
            now = ",".join(labels or (schema.label,))
            if settings.mode == "train" and settings.continue_from:
                raise SettingsError(
                    f"--continue_from {path}: trained on label {before}, but this run trains {now}",
                    f"give --label {before}; to train another label from these weights, give "
                    "--load_checkpoint_path instead of --continue_from",
                )
            log.warning("%s was trained on label %s, this run uses %s", path, before, now)
    return dataclasses.replace(settings, label=",".join(labels) or None)  # type: ignore[call-arg]


def check_gauc_column(settings: TrainSettings, schema: TableSchema) -> None:
    """Check that ``--gauc_column`` has one id in each row.

    Raises:
        SettingsError: The column does not exist, or it is multi-hot.
    """
    name = settings.gauc_column
    known = [column for column in schema.categorical if column not in schema.multi_hot]
    if name is None or name in known:
        return
    raise SettingsError(
        f"--gauc_column {name}: not a column with one id in each row", did_you_mean(name, known)
    )


def check_log_q_correction(settings: TrainSettings, schema: TableSchema) -> None:
    """Check that ``--log_q_correction`` fits the data, and the checkpoint that is continued.

    Raises:
        SettingsError: The data have no correction, or the checkpoint of ``--continue_from`` was
            trained with the opposite setting, so that its logits have another meaning.
        BadInputError, SchemaError: The checkpoint cannot be read.
    """
    wanted = settings.log_q_correction
    if wanted and not schema.log_q_correction:
        raise SettingsError(
            "--log_q_correction: the data have no log-Q correction",
            "leave the flag out; the ETL writes the correction if popularity of [negatives] is "
            "above 0",
        )
    if settings.mode != "train" or not settings.continue_from or wanted is None:
        return
    path = resolve(Path(settings.continue_from))
    trained = bool(CheckpointRecord.read(path).training["settings"].get("log_q_correction"))
    if wanted != trained:
        flags = {True: "--log_q_correction", False: "--no-log_q_correction"}
        raise SettingsError(
            f"--continue_from {path}: trained with {flags[trained]}, but this run has "
            f"{flags[wanted]}",
            f"leave {flags[wanted]} out; to train these weights with it, give "
            "--load_checkpoint_path instead of --continue_from",
        )


def _find_checkpoint(settings: TrainSettings) -> Path | None:
    """Return the checkpoint that the run starts from; None if it starts from none."""
    if settings.continue_from:
        return resolve(Path(settings.continue_from))
    return Path(settings.load_checkpoint_path) if settings.load_checkpoint_path else None


def choose_sizes(settings: TrainSettings, schema: TableSchema, ranks: int) -> TrainSettings:
    """Fill in the sizes of model and batch, and the optimizer, if ``settings`` leave them open.

    They come from the checkpoint that the run starts from, if any, and otherwise from ``--size``. A
    run that resumes also keeps its learning rates.

    Args:
        settings: The settings of the run.
        schema: The columns of the data.
        ranks: The number of ranks.

    Raises:
        BadInputError, SchemaError: The checkpoint or the data cannot be read.
    """
    directory = settings.checkpoint_dir
    resumed = newest_record(list_checkpoints(directory)) if directory else None
    if resumed:
        kept = _find_settings(settings, str(directory), resumed[1], ranks, is_resumed=True)
        settings = settings.fill_in(kept)
    else:
        path = _find_checkpoint(settings)
        if path:
            record = CheckpointRecord.read(path)
            kept = _find_settings(settings, str(path), record, ranks, is_resumed=False)
            settings = settings.fill_in(kept)
    rows = read_dataset(settings.split_path("train"), schema).rows
    return fill_sizes(settings, int(rows.sum()), ranks)


def _find_settings(
    settings: TrainSettings, path: str, record: CheckpointRecord, ranks: int, *, is_resumed: bool
) -> dict[str, Any]:
    """Return the settings of a checkpoint that a run uses unless it has its own.

    Args:
        settings: The settings of the run.
        path: The checkpoint, for errors.
        record: The checkpoint's record.
        ranks: The number of ranks of the run.
        is_resumed: Whether the run resumes the checkpoint's run, instead of starting from its
            weights.

    Raises:
        SchemaError: It is a checkpoint of another model.
    """
    model = ModelConfig.from_dict(record.model)
    if model.model != settings.model:
        raise SchemaError(
            f"{path}: a checkpoint of --model {model.model}, but this run has {settings.model}",
            f"add --model {model.model}, or train from scratch",
        )
    saved = record.training["settings"]
    kept = _find_model_sizes(settings, model)
    kept["log_q_correction"] = saved.get("log_q_correction")
    if is_resumed or settings.continue_from:
        batch_size = saved.get("batch_size", 1) * record.world_size // ranks
        kept["batch_size"] = max(1, batch_size)
        if settings.batch_size is None:
            kept["test_batch_size"] = saved.get("test_batch_size")
        kept["eps"] = saved.get("eps")
        # Evaluations need no optimizer, so a CPU may test a model whose optimizer needs a GPU.
        if settings.mode == "train":
            kept["optimizer"] = table_optimizer(saved)
            kept["embedding_l2"] = saved.get("embedding_l2") or 0.0
            # The optimizer state of data-parallel tables is stored in another form.
            if saved.get("sharding") == "data_parallel":
                kept["sharding"] = "data_parallel"
    if is_resumed:
        if not (settings.learning_rate or settings.dense_learning_rate):
            kept["dense_decay"] = 0.0
            for name in RATES:
                kept[name] = saved.get(name)
        for name in ("shuffle_training_set", "epochs", "early_stopping", "average_weights"):
            kept[name] = saved.get(name)
    gives_table_sizes = any(getattr(settings, name) for name in TABLE_SIZES)
    if model.hash_indices and not gives_table_sizes:
        # In tables of other sizes, ids would share other rows.
        for name in TABLE_SIZES:
            value = saved.get(name)
            kept[name] = tuple(value) if isinstance(value, list) else value
    if settings.model not in MODELS:
        kept["model_settings"] = model.settings
    return {name: value for name, value in kept.items() if value not in (None, ())}


def _find_model_sizes(settings: TrainSettings, model: ModelConfig) -> dict[str, Any]:
    """Return the sizes of a checkpoint's model, by flag."""
    flags = list_model_flags(settings.model)
    sizes: dict[str, Any] = {}
    if flags:  # checkpoints of earlier versions hold neither of these
        sizes = {"batch_norm": False, "dropout": 0.0}
    for name, value in model.settings.items():
        if name in flags:
            sizes[name] = value
    sizes.update(vars(model), vectors=bool(model.dense_vectors))
    kept: dict[str, Any] = {}
    for name in MODEL_SIZES:
        if name in sizes:
            value = sizes[name]
            kept[name] = tuple(value) if isinstance(value, list) else value
    if "over_arch_layer_sizes" in kept:
        # The last layer's width is this run's number of labels. If the checkpoint has other labels,
        # a later check rejects it with a better message.
        *layers, _ = kept["over_arch_layer_sizes"]
        kept["over_arch_layer_sizes"] = (*layers, settings.label_count)
    return kept


def choose_order(settings: TrainSettings) -> TrainSettings:
    """Decide whether to shuffle the training rows, if ``settings`` leave it open.

    Rows are shuffled if the log was split at random. If it was split by time or days, its rows are
    ordered by time, and the newest rows should be trained last. Data that another program wrote
    are not shuffled, nor are any by Merlin's loader, which cannot shuffle.
    """
    try:
        manifest = Manifest.read(EtlOutput.from_splits(settings.binary_path).manifest)
    except ClickLogError:  # another program wrote the data
        return settings.fill_in({"shuffle_training_set": False})
    is_random = (manifest.split or {}).get("by") in _NOT_BY_TIME
    shuffle = is_random and settings.loader != "merlin"
    return settings.fill_in({"shuffle_training_set": shuffle})


def describe_data(settings: TrainSettings) -> dict[str, str]:
    """Return the names of the log, the label and the split, for display."""
    label = ", ".join(settings.labels) or TableSchema.read(settings.binary_path).label
    try:
        manifest = Manifest.read(EtlOutput.from_splits(settings.binary_path).manifest)
    except ClickLogError:  # another program wrote the data
        return {"log": "", "label": label, "split": ""}
    return {"log": manifest.log_name, "label": label, "split": manifest.split_text}
