"""Checks of a training run's settings, called by ``TrainSettings``."""

from __future__ import annotations

import math
from typing import Any

from clicklog.errors import SettingsError
from dlrm.settings.train_settings import TrainSettings, as_text

_AT_LEAST_ONE = (
    "batch_size",
    "test_batch_size",
    "epochs",
    "max_steps",
    "embedding_dim",
    "num_embeddings",
    "max_table_size",
    "dcn_num_layers",
    "dcn_low_rank_dim",
    "throughput_check_freq_within_epoch",
    "validation_freq_within_epoch",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "synthetic_dataset_num_entries",
    "inference_benchmark_steps",
    "profile_steps",
    "loader_memory",
    "checkpoint_freq",
    "keep_checkpoints",
    "world_size",
)
_POSITIVE = (
    "learning_rate",
    "dense_learning_rate",
    "lr_after_change_point",
    "eps",
    "decay_power",
    "hbm_gib",
    "checkpoint_minutes",
)
_NOT_NEGATIVE = (
    "lr_warmup_steps",
    "lr_decay_start",
    "lr_decay_steps",
    "decay_end_lr",
    "test_after",
    "benchmark_warmup_steps",
    "synthetic_dataset_numerical_features",
)
_SIZES = (
    "num_embeddings_per_feature",
    "dense_arch_layer_sizes",
    "over_arch_layer_sizes",
    "interaction_branch1_layer_sizes",
    "interaction_branch2_layer_sizes",
    "multi_hot_sizes",
    "synthetic_dataset_table_sizes",
    "inference_benchmark_batch_sizes",
)
#: A setting, its value, and what says nothing unless it has that value.
_BELONGS = (
    ("change_lr", True, ("lr_change_point", "lr_after_change_point")),
    ("plan_only", True, ("world_size",)),
    ("checkpoint_dir", None, ("checkpoint_freq", "checkpoint_minutes")),
    ("checkpoint_dir", None, ("keep_checkpoints", "resume")),
    ("multi_hot_sizes", None, ("multi_hot_distribution_type",)),
    ("profile", True, ("profile_steps",)),
    ("interaction_type", "dcn", ("dcn_num_layers", "dcn_low_rank_dim")),
    (
        "interaction_type",
        "projection",
        ("interaction_branch1_layer_sizes", "interaction_branch2_layer_sizes"),
    ),
    ("lr_policy", "nvidia", ("decay_power", "decay_end_lr")),
    ("dataset_type", "synthetic", ("synthetic_dataset_num_entries",)),
    ("dataset_type", "synthetic", ("synthetic_dataset_table_sizes",)),
    ("dataset_type", "synthetic", ("synthetic_dataset_numerical_features",)),
    ("dataset_type", "parquet", ("shuffle_training_set", "undersampling_rate", "loader_memory")),
    ("dataset_type", "parquet", ("hash_indices", "drop_last_training_batch")),
    (
        "mode",
        "inference_benchmark",
        ("inference_benchmark_batch_sizes", "inference_benchmark_steps"),
    ),
    ("mode", "train", ("auc_threshold", "max_steps", "test_after", "profile", "tensorboard")),
    ("mode", "train", ("checkpoint_dir", "save_checkpoint_path", "print_lr")),
)


def check_settings(settings: TrainSettings) -> None:
    """Raise :class:`SettingsError` for values and combinations that make no sense."""
    _check_choices(settings)
    _check_numbers(settings)
    _check_layers(settings)
    for switch, value, names in _BELONGS:
        _belongs(settings, switch, value, names)
    _check_tables(settings)
    _check_schedule(settings)
    _check_run(settings)


def _default(name: str) -> Any:
    return TrainSettings.__dataclass_fields__[name].default


def _check_choices(settings: TrainSettings) -> None:
    for name, field in TrainSettings.__dataclass_fields__.items():
        value, choices = getattr(settings, name), field.metadata["parse"]
        if isinstance(choices, tuple) and value is not None and value not in choices:
            raise SettingsError(f"--{name} {value}", f"one of {', '.join(choices)}")


def _check_numbers(settings: TrainSettings) -> None:
    for names, remedy, fits in (
        (_AT_LEAST_ONE, "it must be at least 1", lambda value: value >= 1),
        (_POSITIVE, "it must be a positive number", lambda value: value > 0),
        (_NOT_NEGATIVE, "it must not be negative", lambda value: value >= 0),
    ):
        for name in names:
            value = getattr(settings, name)
            if value is not None and not (math.isfinite(value) and fits(value)):
                raise SettingsError(f"--{name} {value}", remedy)
    for name in ("undersampling_rate", "dataset_subset"):
        value = getattr(settings, name)
        if value is not None and not 0 < value <= 1:
            raise SettingsError(f"--{name} {value}", "a share, above 0 and at most 1")
    if not 0 <= settings.lr_change_point <= 1:
        raise SettingsError(
            f"--lr_change_point {settings.lr_change_point}",
            "it is a share of all steps, between 0 and 1",
        )
    if settings.auc_threshold is not None and not 0 < settings.auc_threshold <= 1:
        raise SettingsError(
            f"--auc_threshold {settings.auc_threshold}", "an AUROC, above 0 and at most 1"
        )
    if not 0 <= settings.seed < 2**63:
        raise SettingsError(f"--seed {settings.seed}", "it must be between 0 and 2**63 - 1")


def _check_layers(settings: TrainSettings) -> None:
    for name in _SIZES:
        sizes = getattr(settings, name)
        if sizes is not None and (not sizes or min(sizes) < 1):
            raise SettingsError(f"--{name} {as_text(sizes)}", "each size must be at least 1")
    dim = settings.embedding_dim
    if dim % 4:
        raise SettingsError(f"--embedding_dim {dim}", "FBGEMM's tables need a multiple of 4")
    over = settings.over_arch_layer_sizes
    if over[-1] != 1:
        raise SettingsError(
            f"--over_arch_layer_sizes {as_text(over)} ends with {over[-1]}",
            "the last layer is the logit of the click: end with 1",
        )
    if len(over) < 2:
        raise SettingsError(
            f"--over_arch_layer_sizes {as_text(over)}", "TorchRec's DLRM needs two or more layers"
        )
    if settings.interaction_type == "projection":
        for name in ("interaction_branch1_layer_sizes", "interaction_branch2_layer_sizes"):
            sizes = getattr(settings, name)
            if sizes[-1] % dim:
                raise SettingsError(
                    f"--{name} {as_text(sizes)} ends with {sizes[-1]}",
                    f"a projection makes vectors of --embedding_dim: end with a multiple of {dim}",
                )


def _belongs(settings: TrainSettings, switch: str, value: Any, names: tuple[str, ...]) -> None:
    """Refuse settings that say nothing unless ``switch`` has a value; None: not its default."""
    now = getattr(settings, switch)
    if now != _default(switch) if value is None else now == value:
        return
    need = f"--{switch}" if value in (None, True) else f"--{switch} {value}"
    for name in names:
        if getattr(settings, name) != _default(name):
            given = getattr(settings, name)
            given = "" if given is True else f" {as_text(given)}"
            raise SettingsError(
                f"--{name}{given} has no effect without {need}",
                f"add {need}, or leave --{name} out",
            )


def _check_tables(settings: TrainSettings) -> None:
    if settings.num_embeddings is not None and settings.num_embeddings_per_feature is not None:
        raise SettingsError(
            "--num_embeddings and --num_embeddings_per_feature are both set",
            "give one of them, or none: then the sizes come from the data",
        )
    if settings.max_table_size is None:
        return
    if settings.num_embeddings is not None:
        raise SettingsError(
            "--num_embeddings and --max_table_size are both set",
            "the first gives every table the same size, the second is a limit: give one",
        )
    if not settings.hash_indices:
        raise SettingsError(
            f"--max_table_size {settings.max_table_size} without --hash_indices",
            "add --hash_indices: ids beyond the limit are mapped into the table; or let the ETL "
            "cap the vocabularies (its --max_table_size)",
        )


def _check_schedule(settings: TrainSettings) -> None:
    if settings.adagrad and settings.optimizer not in (None, "rowwise_adagrad"):
        raise SettingsError(
            f"--adagrad and --optimizer {settings.optimizer}",
            "--adagrad means --optimizer rowwise_adagrad: give one of them",
        )
    if settings.change_lr and (settings.lr_warmup_steps or settings.lr_decay_steps):
        raise SettingsError("--change_lr and a warm-up or decay are both set", "give one schedule")
    if settings.change_lr and settings.learning_rate is None:
        raise SettingsError(
            "--change_lr without --learning_rate",
            "give the learning rate before the change, too (TorchRec's example has 15)",
        )
    if settings.lr_decay_start and not settings.lr_decay_steps:
        raise SettingsError(
            f"--lr_decay_start {settings.lr_decay_start} has no effect without --lr_decay_steps",
            "add --lr_decay_steps",
        )
    if settings.lr_decay_steps and settings.lr_decay_start < (settings.lr_warmup_steps or 0):
        raise SettingsError(
            f"--lr_decay_start {settings.lr_decay_start} is before the warm-up ends "
            f"(--lr_warmup_steps {settings.lr_warmup_steps})",
            "let the decay start after the warm-up",
        )
    if settings.test_after >= settings.epochs and settings.test_after:
        raise SettingsError(
            f"--test_after {settings.test_after:g} with --epochs {settings.epochs}",
            "training ends before the first evaluation: give less",
        )


def _check_run(settings: TrainSettings) -> None:
    if settings.checkpoint_dir and not (settings.checkpoint_freq or settings.checkpoint_minutes):
        raise SettingsError(
            f"--checkpoint_dir {settings.checkpoint_dir} without a frequency",
            "add --checkpoint_freq (steps) or --checkpoint_minutes",
        )
    if settings.mode == "test" and not settings.load_checkpoint_path:
        raise SettingsError("--mode test has nothing to test", "add --load_checkpoint_path")
    if settings.dataset_subset is not None and settings.limit_train_batches is not None:
        raise SettingsError(
            "--dataset_subset and --limit_train_batches are both set",
            "both shorten the epoch, one by a share, one by steps: give one",
        )
    if settings.plan_only and settings.dataset_type == "synthetic":
        raise SettingsError(
            "--plan_only and --dataset_type synthetic",
            "give the sizes by --num_embeddings_per_feature",
        )
