"""The trainer's settings: one dataclass that checks itself, and the command line that makes it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvt_torchrec.base.command_line import Parser, parse, parse_words
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.day_names import parse_days
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.feature_spec.events import parse_duration
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.models.interactions import INTERACTIONS
from nvt_torchrec.models.registry import MODEL_FLAGS, MODELS, list_model_flags
from nvt_torchrec.training.settings.fields import LOGS, TrainFields
from nvt_torchrec.training.settings.sizes import SIZES

#: What a run takes from its checkpoint unless it is given: sizes of the model, and rates.
MODEL_SIZES = (
    *("embedding_dim", "dense_arch_layer_sizes", "over_arch_layer_sizes", "first_order"),
    *("vector_scale", "dense_bins", "max_events", "sequences", "hash_indices", "vectors"),
    *("batch_norm", "dropout"),
)
#: The sizes of tables that are given; with ``hash_indices`` they are taken from a checkpoint, too.
TABLE_SIZES = ("num_embeddings", "num_embeddings_per_feature", "max_table_size")
RATES = ("learning_rate", "dense_learning_rate", "lr_warmup_steps", "dense_decay")
#: A flag as the README of TorchRec's example writes it.
THREE_DASHES = "---adagrad"
#: The steps of an epoch that the default batch gives, at least.
_MIN_STEPS = 350
#: The smallest default batch, on all ranks.
_MIN_BATCH = 32
#: The largest one.
_MAX_BATCH = 16_384
#: The smallest default number of bins of a dense column.
_MIN_BINS = 8
#: The largest one.
_MAX_BINS = 64
#: The samples of a step of an evaluation, at least, where no batch size is given.
_MIN_TEST_BATCH = 4096
#: The flags of what Merlin's loader cannot do.
_NOT_BY_MERLIN = (
    *("shuffle_training_set", "undersampling_rate", "checkpoint_dir", "loader_memory"),
    "hash_indices",
)


def _list_interaction_fields() -> list[tuple[str, Any, Any]]:
    """Return the sizes of the interactions as fields of a dataclass."""
    found = []
    for kind in INTERACTIONS.values():
        for field in dataclasses.fields(kind):
            copy = dataclasses.field(default=field.default, metadata=field.metadata)
            found.append((field.name, field.type, copy))
    return found


#: The flags, with those of the interactions' sizes: an interaction brings its own.
_AllFields = dataclasses.make_dataclass(
    "_AllFields", _list_interaction_fields(), bases=(TrainFields,), frozen=True
)


@dataclasses.dataclass(frozen=True)
class TrainSettings(_AllFields):  # type: ignore[misc, valid-type]
    """The settings of a training run. Each field is the flag of the same name.

    Raises:
        SettingsError: A value is not allowed, or settings contradict each other.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_layers(self)
        _check_schedule(self)
        _check_run(self)
        _check_days(self)
        _check_tuning(self)

    @property
    def table_optimizer(self) -> str:
        """The optimizer of the tables: a key of ``OPTIMIZERS``."""
        return table_optimizer(vars(self))

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels to train; () for the data's main one alone."""
        return parse_words(self.label or "")

    @property
    def label_count(self) -> int:
        """The number of labels to train."""
        return max(1, len(self.labels))

    def batch_size_of(self, split: str) -> int:
        """Return the samples per step and rank of a split, once :func:`fill_sizes` chose them."""
        return self.batch_size if split == "train" else self.test_batch_size or self.batch_size

    def fill_in(self, defaults: Mapping[str, Any]) -> TrainSettings:
        """Return the settings with those of ``defaults`` that they do not have."""
        missing = {}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                missing[name] = value
        if self.adagrad:
            # It names the optimizer, and contradicts another one.
            missing.pop("optimizer", None)
        return dataclasses.replace(self, **missing)

    def split_path(self, split: str) -> Path:
        """Return the directory of a split: train, valid or test."""
        return Path(self.binary_path) / split

    def log_directory(self) -> Path:
        """Return the directory of the run's log, by default one named by the time of this call."""
        if self.log_path:
            return Path(self.log_path)
        if self.checkpoint_dir:
            return Path(self.checkpoint_dir) / "log"
        return Path(LOGS) / time.strftime("%Y%m%d-%H%M%S")

    def check_data(self) -> None:
        """Check that ``binary_path`` is what the ETL writes, before anything is loaded.

        Raises:
            SettingsError: It is missing or is something else, with a hint at the right path.
        """
        path = Path(self.binary_path)
        flag = f"--binary_path {self.binary_path}"
        where = (
            "it is OUT/criteo_binary/split of: python -m etl run; python -m etl synthesize makes a "
            "log to begin with"
        )
        if not path.is_dir():
            raise SettingsError(f"{flag}: no such directory", where)
        missing = [split for split in SPLITS if not (path / split).is_dir()]
        if not missing:
            return
        inner = EtlOutput(path).splits
        if all((inner / split).is_dir() for split in SPLITS):
            hint = f"give the directory of the splits: --binary_path {inner}"
        elif "valid" in missing and (path / "validation").is_dir():
            hint = "there is a directory 'validation'; the ETL calls it 'valid': rename it"
        else:
            hint = where
        raise SettingsError(f"{flag}: holds no {', '.join(missing)}", hint)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return dataclasses.asdict(self)


def table_optimizer(settings: Mapping[str, Any]) -> str:
    """Return the optimizer that two settings name together."""
    return "rowwise_adagrad" if settings.get("adagrad") else settings.get("optimizer") or "sgd"


def fill_sizes(settings: TrainSettings, rows: int, ranks: int) -> TrainSettings:
    """Fill in the sizes of model and batch, and the optimizer, that ``settings`` do not have.

    Args:
        settings: The settings of the run.
        rows: The rows of the training set.
        ranks: The number of ranks.
    """
    name = size_for(rows) if settings.size == "auto" else settings.size
    size = SIZES[name]
    layers = settings.dense_arch_layer_sizes
    dim = settings.embedding_dim or (layers[-1] if layers else size.embedding_dim)
    batch = max(1, global_batch_for(rows) // ranks)
    chosen = {
        "embedding_dim": dim,
        "optimizer": size.optimizer,
        "batch_size": batch,
        "max_events": 50,
        "dense_bins": bins_for(rows),
    }
    # A trained model was stopped where it is best, and a number of steps is a length already.
    is_continued = bool(settings.continue_from or settings.load_checkpoint_path)
    is_one_epoch = settings.mode != "train" or is_continued or bool(settings.max_steps)
    chosen["early_stopping"] = 0
    if settings.epochs is None:
        chosen["epochs"] = 1 if is_one_epoch else size.epochs
        if not is_one_epoch:
            chosen["early_stopping"] = size.early_stopping
    # Layers whose last width follows from the data or from the tables.
    last_widths = {"dense_arch_layer_sizes": dim, "over_arch_layer_sizes": settings.label_count}
    for flag, width in last_widths.items():
        if flag in list_model_flags(settings.model):
            chosen[flag] = (*getattr(size, flag)[:-1], width)
    if settings.batch_size is None:
        chosen["test_batch_size"] = test_batch_for(batch)
    return dataclasses.replace(settings.fill_in(chosen), **{"size": name})


def size_for(rows: int) -> str:
    """Return the largest size that so many training rows can train."""
    # They rise, so the last one that fits is the largest.
    largest = "tiny"
    for name, size in SIZES.items():
        if size.min_rows <= rows:
            largest = name
    return largest


def bins_for(rows: int) -> int:
    """Return the bins of each dense column for so many training rows."""
    return max(_MIN_BINS, min(_MAX_BINS, round(2 * rows ** (1 / 3))))


def global_batch_for(rows: int) -> int:
    """Return the samples of a step, on all ranks: a power of two."""
    # The largest power of two that leaves enough steps.
    batch = 1 << max(0, (rows // _MIN_STEPS).bit_length() - 1)
    return max(_MIN_BATCH, min(batch, _MAX_BATCH))


def test_batch_for(batch: int) -> int:
    """Return the samples of a step of an evaluation, of a run that chooses those of a step."""
    return max(batch, _MIN_TEST_BATCH)


def _check_layers(settings: TrainSettings) -> None:
    taken = list_model_flags(settings.model)
    if not taken and ":" not in settings.model:
        remedy = f"one of {', '.join(MODELS)}, or MODULE:FUNCTION of your own"
        raise SettingsError(f"--model {settings.model}: there is no such model", remedy)
    if taken and settings.model_settings:
        flags = ", ".join(f"--{name}" for name in taken)
        raise SettingsError(
            f"--model_settings has no effect with --model {settings.model}", f"give {flags}"
        )
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in MODEL_FLAGS:
        if getattr(settings, name) != defaults[name] and name not in taken:
            models = ", ".join(model for model in MODELS if name in list_model_flags(model))
            raise SettingsError(
                f"--{name} has no effect with --model {settings.model}",
                f"leave it out, or choose another --model: {models}",
            )
    if settings.embedding_dim is not None and settings.embedding_dim % 4:
        what = f"--embedding_dim {settings.embedding_dim}"
        raise SettingsError(what, "FBGEMM's tables need a multiple of 4")


def _check_schedule(settings: TrainSettings) -> None:
    if settings.change_lr and (settings.lr_warmup_steps or settings.lr_decay_steps):
        raise SettingsError("--change_lr and a warm-up or decay are both set", "give one schedule")
    if settings.lr_decay_steps and settings.lr_decay_start < (settings.lr_warmup_steps or 0):
        raise SettingsError(
            f"--lr_decay_start {settings.lr_decay_start} is before the warm-up ends "
            f"(--lr_warmup_steps {settings.lr_warmup_steps})",
            "let the decay start after the warm-up",
        )


def _check_run(settings: TrainSettings) -> None:
    if settings.keep and not (settings.checkpoint_dir or settings.save_checkpoint_path):
        raise SettingsError(
            f"--keep {settings.keep} without a checkpoint to write",
            "add --save_checkpoint_path or --checkpoint_dir",
        )
    if settings.mode == "test" and not (settings.load_checkpoint_path or settings.continue_from):
        raise SettingsError(
            "--mode test has nothing to test",
            "add --load_checkpoint_path, or --continue_from for a checkpoint with smaller tables",
        )
    if settings.loader != "merlin":
        return
    for name in _NOT_BY_MERLIN:
        if getattr(settings, name):
            remedy = f"leave --{name} out, or use --loader kjt (docs/loader.md)"
            raise SettingsError(f"--loader merlin cannot do --{name}", remedy)


def _check_tuning(settings: TrainSettings) -> None:
    if settings.tune is not None and not parse_duration(settings.tune):
        raise SettingsError(
            f"--tune {settings.tune}: not a duration",
            "give a number and s, m, h or d, for example 20m",
        )
    if settings.tune is not None and settings.model not in MODELS:
        raise SettingsError(
            f"--tune has no effect with --model {settings.model}: its settings are not known",
            "leave it out, or choose a model of this project",
        )


def _check_days(settings: TrainSettings) -> None:
    if settings.days == "new" and not settings.continue_from:
        raise SettingsError(
            "--days new without --continue_from",
            "name the checkpoint that has been trained on the other days, or list the days",
        )
    if settings.days not in (None, "all", "new"):
        parse_days(settings.days)


def build_parser() -> Parser:
    """Make the parser, without the arguments that :class:`TrainSettings` declares."""
    return Parser(
        prog="python train_torchrec.py",
        usage="python train_torchrec.py FLAGS",
        description="Train a sharded model on the parquet that `python -m etl run` wrote.",
        epilog="With several processes: torchx run -s local_cwd dist.ddp -j 1x8 "
        "--script train_torchrec.py -- FLAGS, or: torchrun --nproc-per-node 8 "
        "train_torchrec.py FLAGS. docs/flags.md compares the flags with those of other trainers.",
    )


def parse_settings(argv: Sequence[str]) -> TrainSettings:
    """Parse the trainer's command line.

    Raises:
        SettingsError: A flag is unknown (with the one that was probably meant), a value is not
            allowed, or settings contradict each other.
    """
    argv = ["--adagrad" if argument == THREE_DASHES else argument for argument in argv]
    return parse(build_parser(), argv, TrainSettings)[0]
