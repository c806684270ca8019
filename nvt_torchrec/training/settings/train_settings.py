"""The trainer's settings: a dataclass that validates itself, and its command line."""

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

#: Model settings that a run takes from its checkpoint unless they are given.
MODEL_SIZES = (
    "embedding_dim",
    "dense_arch_layer_sizes",
    "over_arch_layer_sizes",
    "first_order",
    "vector_scale",
    "dense_bins",
    "max_events",
    "sequences",
    "hash_indices",
    "vectors",
    "batch_norm",
    "dropout",
)
#: Flags that give table sizes. With ``hash_indices`` a run takes them from its checkpoint, too.
TABLE_SIZES = ("num_embeddings", "num_embeddings_per_feature", "max_table_size")
#: Learning rates and their schedule, which a resumed run keeps.
RATES = ("learning_rate", "dense_learning_rate", "lr_warmup_steps", "dense_decay")
#: A misspelled flag in the README of TorchRec's example.
THREE_DASHES = "---adagrad"
#: The smallest number of steps per epoch with the default batch size.
_MIN_STEPS = 350
#: Bounds of the default global batch size.
_MIN_BATCH = 32
_MAX_BATCH = 16_384
#: Bounds of the default number of bins of a dense column.
_MIN_BINS = 8
_MAX_BINS = 64
#: The smallest batch size of evaluations if no batch size is given.
_MIN_TEST_BATCH = 4096
#: Flags that Merlin's loader does not support.
_UNSUPPORTED_BY_MERLIN = (
    "shuffle_training_set",
    "undersampling_rate",
    "checkpoint_dir",
    "loader_memory",
    "hash_indices",
)


def _list_interaction_fields() -> list[tuple[str, Any, Any]]:
    """Return the sizes of the interactions as fields of a dataclass."""
    fields = []
    for interaction in INTERACTIONS.values():
        for field in dataclasses.fields(interaction):
            copy = dataclasses.field(default=field.default, metadata=field.metadata)
            fields.append((field.name, field.type, copy))
    return fields


#: All flags, including the sizes that each interaction declares.
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
        """The labels to train; () for the data's main label."""
        return parse_words(self.label or "")

    @property
    def label_count(self) -> int:
        """The number of labels to train."""
        return max(1, len(self.labels))

    def batch_size_of(self, split: str) -> int:
        """Return a split's number of samples per step and rank, after :func:`fill_sizes`."""
        return self.batch_size if split == "train" else self.test_batch_size or self.batch_size

    def fill_in(self, defaults: Mapping[str, Any]) -> TrainSettings:
        """Return the settings with missing (None) values filled in from ``defaults``."""
        missing = {}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                missing[name] = value
        if self.adagrad:
            # --adagrad names the optimizer, and excludes --optimizer.
            missing.pop("optimizer", None)
        return dataclasses.replace(self, **missing)

    def split_path(self, split: str) -> Path:
        """Return the directory of a split: train, valid or test."""
        return Path(self.binary_path) / split

    def log_directory(self) -> Path:
        """Return the directory of the run's log; by default its name is the current time."""
        if self.log_path:
            return Path(self.log_path)
        if self.checkpoint_dir:
            return Path(self.checkpoint_dir) / "log"
        return Path(LOGS) / time.strftime("%Y%m%d-%H%M%S")

    def check_data(self) -> None:
        """Check that ``binary_path`` is an output of the ETL, before anything is loaded.

        Raises:
            SettingsError: It does not exist or is another directory; the error hints at the right
                path.
        """
        path = Path(self.binary_path)
        flag = f"--binary_path {self.binary_path}"
        where = (
            "give OUT/criteo_binary/split, which `python -m etl run` writes; `python -m etl "
            "synthesize` makes a log to begin with"
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
            hint = "rename the directory 'validation': the ETL calls it 'valid'"
        else:
            hint = where
        raise SettingsError(f"{flag}: holds no {', '.join(missing)}", hint)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a JSON-ready dict."""
        return dataclasses.asdict(self)


def table_optimizer(settings: Mapping[str, Any]) -> str:
    """Return the optimizer that ``adagrad`` and ``optimizer`` name together."""
    if settings.get("adagrad"):
        return "rowwise_adagrad"
    return settings.get("optimizer") or "sgd"


def fill_sizes(settings: TrainSettings, rows: int, ranks: int) -> TrainSettings:
    """Fill in the sizes of model and batch, and the optimizer, if ``settings`` leave them open.

    Args:
        settings: The settings of the run.
        rows: The number of rows of the training set.
        ranks: The number of ranks.
    """
    name = choose_size_name(rows) if settings.size == "auto" else settings.size
    size = SIZES[name]
    layers = settings.dense_arch_layer_sizes
    dim = settings.embedding_dim or (layers[-1] if layers else size.embedding_dim)
    batch = max(1, choose_global_batch(rows) // ranks)
    chosen = {
        "embedding_dim": dim,
        "optimizer": size.optimizer,
        "batch_size": batch,
        "max_events": 50,
        "dense_bins": choose_bins(rows),
    }
    # A continued model was already stopped at its best, and --max_steps already sets a length.
    is_continued = bool(settings.continue_from or settings.load_checkpoint_path)
    is_one_epoch = settings.mode != "train" or is_continued or bool(settings.max_steps)
    chosen["early_stopping"] = 0
    if settings.epochs is None:
        chosen["epochs"] = 1 if is_one_epoch else size.epochs
        if not is_one_epoch:
            chosen["early_stopping"] = size.early_stopping
    # The data or the tables determine the width of the last layer.
    last_widths = {"dense_arch_layer_sizes": dim, "over_arch_layer_sizes": settings.label_count}
    for flag, width in last_widths.items():
        if flag in list_model_flags(settings.model):
            chosen[flag] = (*getattr(size, flag)[:-1], width)
    if settings.batch_size is None:
        chosen["test_batch_size"] = choose_test_batch(batch)
    return dataclasses.replace(settings.fill_in(chosen), **{"size": name})


def choose_size_name(rows: int) -> str:
    """Return the name of the largest size for this number of training rows."""
    # SIZES is sorted by min_rows, so the last one that fits is the largest.
    largest = "tiny"
    for name, size in SIZES.items():
        if size.min_rows <= rows:
            largest = name
    return largest


def choose_bins(rows: int) -> int:
    """Return the number of bins per dense column for this number of training rows."""
    return max(_MIN_BINS, min(_MAX_BINS, round(2 * rows ** (1 / 3))))


def choose_global_batch(rows: int) -> int:
    """Return the global batch size for this number of training rows, a power of two."""
    # The largest power of two that leaves enough steps.
    batch = 1 << max(0, (rows // _MIN_STEPS).bit_length() - 1)
    return max(_MIN_BATCH, min(batch, _MAX_BATCH))


def choose_test_batch(batch: int) -> int:
    """Return the batch size of evaluations if the training's, ``batch``, was chosen by default."""
    return max(batch, _MIN_TEST_BATCH)


def _check_layers(settings: TrainSettings) -> None:
    supported = list_model_flags(settings.model)
    if not supported and ":" not in settings.model:
        remedy = f"give one of {', '.join(MODELS)}, or MODULE:FUNCTION for a custom model"
        raise SettingsError(f"--model {settings.model}: no such model", remedy)
    if supported and settings.model_settings:
        flags = ", ".join(f"--{name}" for name in supported)
        raise SettingsError(
            f"--model_settings has no effect with --model {settings.model}", f"give {flags}"
        )
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in MODEL_FLAGS:
        if getattr(settings, name) != defaults[name] and name not in supported:
            models = ", ".join(model for model in MODELS if name in list_model_flags(model))
            raise SettingsError(
                f"--{name} has no effect with --model {settings.model}",
                f"leave it out, or choose another --model: {models}",
            )
    if settings.embedding_dim is not None and settings.embedding_dim % 4:
        raise SettingsError(
            f"--embedding_dim {settings.embedding_dim}: not a multiple of 4",
            "FBGEMM's tables need a multiple of 4",
        )


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
    for name in _UNSUPPORTED_BY_MERLIN:
        if getattr(settings, name):
            remedy = f"leave --{name} out, or use --loader kjt (docs/loader.md)"
            raise SettingsError(f"--loader merlin does not support --{name}", remedy)


def _check_tuning(settings: TrainSettings) -> None:
    if settings.tune is not None and not parse_duration(settings.tune):
        raise SettingsError(
            f"--tune {settings.tune}: not a duration",
            "give a number and s, m, h or d, for example 20m",
        )
    if settings.tune is not None and settings.model not in MODELS:
        raise SettingsError(
            f"--tune cannot search the settings of --model {settings.model}, which are unknown",
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
    """Make the parser, still without the arguments that :class:`TrainSettings` declares."""
    return Parser(
        prog="python train_torchrec.py",
        usage="python train_torchrec.py FLAGS",
        description="Train a sharded model on the parquet that `python -m etl run` wrote.",
        epilog="To train with several processes: torchx run -s local_cwd dist.ddp -j 1x8 "
        "--script train_torchrec.py -- FLAGS, or: torchrun --nproc-per-node 8 "
        "train_torchrec.py FLAGS. docs/flags.md compares the flags with those of other trainers.",
    )


def parse_settings(argv: Sequence[str]) -> TrainSettings:
    """Parse the trainer's command line.

    Raises:
        SettingsError: A flag is unknown (the error names the most similar one), a value is not
            allowed, or settings contradict each other.
    """
    argv = ["--adagrad" if argument == THREE_DASHES else argument for argument in argv]
    return parse(build_parser(), argv, TrainSettings)[0]
