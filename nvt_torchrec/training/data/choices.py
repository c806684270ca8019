"""What a run takes from its data and its checkpoint: labels, sizes, order, days, names."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError, ClickLogError, SchemaError, SettingsError
from nvt_torchrec.formats.day_names import days_text, parse_days
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.feature_spec.field_checks import did_you_mean
from nvt_torchrec.formats.histories import HISTORIES
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.registry import MODELS, flags_of
from nvt_torchrec.nvt_loader.parquet.dataset import read_dataset
from nvt_torchrec.training.checkpoint.directories import checkpoints_in, newest_record, resolve
from nvt_torchrec.training.settings.train_settings import (
    MODEL_SIZES,
    RATES,
    TABLE_SIZES,
    TrainSettings,
    fill_sizes,
    table_optimizer,
)

log = logging.getLogger(__name__)

#: Splits of which no part is later than another one.
_NOT_BY_TIME = ("share", "column", "files")


def read_schema(settings: TrainSettings) -> TableSchema:
    """Return the columns and table sizes of the data.

    Raises:
        SettingsError: ``binary_path`` does not hold what the ETL writes.
        BadInputError, SchemaError: The schema cannot be read, or the ETL is adding a day.
    """
    settings.check_data()
    EtlOutput.from_splits(settings.binary_path).check_whole()
    return TableSchema.read(settings.binary_path)


def check_histories(settings: TrainSettings) -> None:
    """Compare the stores of histories that a run reads with the digests in the ETL's manifest.

    The loader checks that what it reads is inside of stores and tables; other ids that are inside
    would be trained on.

    Raises:
        BadInputError: A store differs, or the manifest is damaged.
    """
    output = EtlOutput.from_splits(settings.binary_path)
    if settings.max_events == 0 or not output.manifest.is_file():  # data of another program
        return
    manifest = Manifest.read(output.manifest)
    stores = output.splits.relative_to(output.root) / HISTORIES
    remedy = "copy the output again, or run the ETL again"
    output.check_described(manifest, remedy, below=f"{stores}/")


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
    path = _checkpoint_of(settings) if len(schema.labels) > 1 else None
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
    raise SettingsError(
        f"--gauc_column {name}: no column with one id in each row", did_you_mean(name, known)
    )


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
        if model.model != settings.model:
            raise SchemaError(
                f"{path or directory}: a checkpoint of --model {model.model}, and this run's is "
                f"{settings.model}",
                f"add --model {model.model}, or train from scratch",
            )
        taken = flags_of(settings.model)
        regularization = {"batch_norm": False, "dropout": 0.0} if taken else {}
        of_layers = {k: v for k, v in model.settings.items() if k in taken}
        sizes = {**regularization, **of_layers, **vars(model)}
        kept = {
            name: tuple(sizes[name]) if isinstance(sizes[name], list) else sizes[name]
            for name in MODEL_SIZES
            if name in sizes
        }
        if "over_arch_layer_sizes" in kept:  # with other labels it is refused as another model
            *layers, _ = kept["over_arch_layer_sizes"]
            kept["over_arch_layer_sizes"] = (*layers, settings.label_count)
        if resumed or settings.continue_from:
            batch = then.get("batch_size", 1) * record.world_size // ranks
            kept |= {"batch_size": max(1, batch), "eps": then.get("eps")}
            if settings.mode == "train":  # a CPU may test what a GPU has trained
                kept["optimizer"] = table_optimizer(then)
                kept["embedding_l2"] = then.get("embedding_l2") or 0.0
                if then.get("sharding") == "data_parallel":  # its optimizer state is another one
                    kept["sharding"] = "data_parallel"
        if resumed and not (settings.learning_rate or settings.dense_learning_rate):
            kept |= {"dense_decay": 0.0, **{name: then.get(name) for name in RATES}}
        if resumed:
            same = "shuffle_training_set", "epochs", "early_stopping"
            kept |= {name: then.get(name) for name in same}
        sized = any(getattr(settings, name) for name in TABLE_SIZES)
        if model.hash_indices and not sized:  # with others, ids would move to other rows
            sizes = {name: then.get(name) for name in TABLE_SIZES}
            kept |= {k: tuple(v) if isinstance(v, list) else v for k, v in sizes.items()}
        if model.model == settings.model and settings.model not in MODELS:
            kept["model_settings"] = model.settings
        known = {name: value for name, value in kept.items() if value not in (None, ())}
        settings = settings.filled(known)
    rows = read_dataset(settings.split_path("train"), schema).rows
    return fill_sizes(settings, int(rows.sum()), ranks)


def choose_order(settings: TrainSettings) -> TrainSettings:
    """Fill in whether the training rows are shuffled, if ``settings`` do not say it.

    They are unless the data are divided by time or days, where the order of the log is that of time
    and the newest rows should be trained last; nothing is known; or Merlin's loader reads them,
    which cannot.
    """
    try:
        manifest = Manifest.read(EtlOutput.from_splits(settings.binary_path).manifest)
    except ClickLogError:  # data of another program
        return settings.filled({"shuffle_training_set": False})
    by = (manifest.split or {}).get("by")
    shuffled = by in _NOT_BY_TIME and settings.loader != "merlin"
    return settings.filled({"shuffle_training_set": shuffled})


def describe_data(settings: TrainSettings) -> dict[str, str]:
    """Return the names of the log, the label and the split, as pages show them."""
    label = ", ".join(settings.labels) or TableSchema.read(settings.binary_path).label
    try:
        manifest = Manifest.read(EtlOutput.from_splits(settings.binary_path).manifest)
    except ClickLogError:  # data made elsewhere
        return {"log": "", "label": label, "split": ""}
    return {"log": manifest.log_name, "label": label, "split": manifest.split_text}


@dataclasses.dataclass(frozen=True)
class TrainingDays:
    """The part of the training set that a run reads.

    Attributes:
        days: The days that it trains on, ascending; None if the data do not say.
        files: Their files; None for all that there are.
    """

    days: tuple[int, ...] | None
    files: tuple[Path, ...] | None = None

    def add_earlier(self, days: Sequence[int] | None) -> list[int] | None:
        """Return all days that a model has seen; ``days`` are those before this run."""
        return None if days is None or self.days is None else sorted({*days, *self.days})


def choose_days(settings: TrainSettings, trained: Sequence[int] | None) -> TrainingDays:
    """Return the days that a run reads.

    Args:
        settings: The settings of the run.
        trained: The days that the checkpoint of ``--continue_from`` has been trained on; None if
            they are unknown.

    Raises:
        SettingsError: There is no such day, or no new one.
        BadInputError: The manifest is missing or damaged, or does not say which days there are.
    """
    output = EtlOutput.from_splits(settings.binary_path)
    everything = settings.days in (None, "all")
    try:
        parts = output.parts("train")
    except BadInputError:
        if everything:  # data of another program
            return TrainingDays(None)
        raise
    known = sorted({part.day for part in parts})
    if everything:
        return TrainingDays(tuple(known))
    if settings.days == "new":
        days = _new_days(settings, known, trained)
    else:
        days = _listed_days(settings, known)
    files = tuple(Path(settings.binary_path) / p.file for p in parts if p.day in days)
    return TrainingDays(tuple(days), files)


def log_days(chosen: TrainingDays, rows: int) -> None:
    """Log which days a run reads, if it does not read all."""
    if chosen.files and chosen.days:
        log.info("training on %s: %s rows", _text(chosen.days), f"{rows:,}")


def _new_days(
    settings: TrainSettings, known: list[int], trained: Sequence[int] | None
) -> list[int]:
    if trained is None:
        raise SettingsError(
            f"--days new: {settings.continue_from} does not say which days it was trained on",
            "list the days, for example --days "
            f"{known[-1]}; checkpoints of the runs from now on say it",
        )
    new = sorted(set(known) - set(trained))
    if new:
        return new
    seen = f"--days new: {settings.continue_from} has been trained on {_text(trained)}"
    output = EtlOutput.from_splits(settings.binary_path)
    manifest = Manifest.read(output.manifest)
    added = {extension.day for extension in manifest.extensions}
    no_rows = sorted(added - set(known) - set(trained))
    # split by days, the newest day is for training once the next one is there
    if no_rows and manifest.split is not None:
        raise SettingsError(
            f"{seen}, and no row of {_text(no_rows)} is for training",
            "this checkpoint needs no training: bundle it with the workflow of now, `python -m "
            f"inference bundle --workflow {output.workflow} --checkpoint {settings.continue_from} "
            "--output BUNDLE`; to train on newer rows, run the ETL again with later cuts in the "
            "spec's [split]",
        )
    raise SettingsError(
        f"{seen}, and the training set has no other day", "add a day with `python -m etl extend`"
    )


def _listed_days(settings: TrainSettings, known: list[int]) -> list[int]:
    days = sorted(parse_days(str(settings.days)))
    missing = sorted(set(days) - set(known))
    if missing:
        raise SettingsError(
            f"--days {settings.days}: the training set has no {_text(missing)}",
            f"it has {_text(known)}",
        )
    return days


def _text(days: Sequence[int]) -> str:
    """Describe ascending days, for example ``days 0-3, 7``."""
    return f"{'day' if len(days) == 1 else 'days'} {days_text(days)}"
