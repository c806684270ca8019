"""The trainer's settings: one dataclass that validates itself; :mod:`dlrm.flags` makes flags of it.

The names and defaults are those of TorchRec's ``nvt_dataloader`` example, except that an unset
``--num_embeddings`` or ``--num_embeddings_per_feature`` means: from the data. Knows no torch, so
that ``--help`` and a mistyped flag answer at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from clicklog.errors import SettingsError
from clicklog.splits import SPLITS


def _sizes(text: str) -> tuple[int, ...]:
    """``"512,256"`` → (512, 256)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no comma separated list of integers"
        ) from None


def _flag(group: str, default: Any, text: str, parse: Any = None) -> Any:
    """A settings field that is also a flag.

    ``parse`` makes its value (None for a switch), or is the tuple of values it may have.
    """
    return dataclasses.field(
        default=default, metadata={"group": group, "help": text, "parse": parse}
    )


#: Optimizers of the tables, and what trains the dense layers beside them.
OPTIMIZERS = {"sgd": "sgd", "adagrad": "adagrad", "rowwise_adagrad": "adagrad", "adam": "adam"}
LR_POLICIES = ("dlrm_main", "nvidia")
SHARDINGS = ("auto", "table_wise", "row_wise", "column_wise")
MODES = ("train", "test")
PRECISIONS = ("fp32", "fp16", "bf16")


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Everything a training run is told. Raises :class:`SettingsError` for what makes no sense.

    Each field is the flag of the same name; ``--help`` describes them.
    """

    binary_path: str = _flag(
        "data",
        "/data/criteo_1tb/criteo_binary/split/",
        "the ETL's OUT/criteo_binary/split: holds train, valid and test",
        str,
    )
    batch_size: int = _flag("data", 32, "samples per step and rank", int)
    shuffle_training_set: bool = _flag(
        "data", False, "read the row groups of the training set in a new order every epoch"
    )
    drop_last_training_batch: bool = _flag(
        "data", False, "leave out the last training step of an epoch when it is not full"
    )
    limit_train_batches: int | None = _flag("data", None, "steps of a training epoch", int)
    limit_val_batches: int | None = _flag("data", None, "steps of an evaluation of valid", int)
    limit_test_batches: int | None = _flag("data", None, "steps of the evaluation of test", int)
    undersampling_rate: float | None = _flag(
        "data", None, "share of the training rows with label 0 to keep", float
    )
    hash_indices: bool = _flag(
        "data", False, "map ids that a given table size has no row for into the table"
    )
    loader_memory: int | None = _flag(
        "data", None, "MiB that a loader may hold, of each split (default: 256)", int
    )
    seed: int = _flag("data", 0, "seed of the initial weights and of the shuffling", int)

    num_embeddings: int | None = _flag(
        "model", None, "rows of every embedding table (default: from the data)", int
    )
    num_embeddings_per_feature: tuple[int, ...] | None = _flag(
        "model", None, "rows of each table, comma separated (default: from the data)", _sizes
    )
    embedding_dim: int = _flag("model", 128, "width of the embedding tables", int)
    dense_arch_layer_sizes: tuple[int, ...] = _flag(
        "model", (512, 256, 128), "layers for the dense features; ends with embedding_dim", _sizes
    )
    over_arch_layer_sizes: tuple[int, ...] = _flag(
        "model", (1024, 1024, 512, 256, 1), "layers above the interaction; ends with 1", _sizes
    )

    epochs: int = _flag("optimization", 1, "passes over the training set", int)
    learning_rate: float = _flag("optimization", 15.0, "learning rate", float)
    optimizer: str | None = _flag(
        "optimization",
        None,
        "of the tables, fused into their backward; the dense layers get the same, or Adagrad "
        "beside rowwise_adagrad (default: sgd)",
        tuple(OPTIMIZERS),
    )
    adagrad: bool = _flag(
        "optimization", False, "the example's name for --optimizer rowwise_adagrad"
    )
    eps: float = _flag("optimization", 1e-8, "epsilon of Adagrad and Adam", float)
    change_lr: bool = _flag("optimization", False, "change the learning rate on the way")
    lr_change_point: float = _flag(
        "optimization", 0.80, "after which share of all steps, over all epochs, it changes", float
    )
    lr_after_change_point: float = _flag(
        "optimization", 3.0, "the learning rate from that point on", float
    )
    lr_warmup_steps: int = _flag(
        "optimization", 0, "steps over which the learning rate grows from 0", int
    )
    lr_decay_start: int = _flag("optimization", 0, "step at which the decay begins", int)
    lr_decay_steps: int = _flag("optimization", 0, "steps the decay takes; 0: no decay", int)
    lr_policy: str = _flag(
        "optimization",
        "dlrm_main",
        "whose warm-up and decay: of facebookresearch/dlrm, or of NVIDIA's DLRM",
        LR_POLICIES,
    )
    decay_power: float = _flag(
        "optimization", 2.0, "power of the decay (dlrm_main's is always 2)", float
    )
    decay_end_lr: float = _flag(
        "optimization", 0.0, "the learning rate after the decay, with --lr_policy nvidia", float
    )

    sharding: str = _flag(
        "sharding",
        "auto",
        "of every table; auto: TorchRec's planner chooses table-wise or row-wise",
        SHARDINGS,
    )
    sharding_file: str | None = _flag(
        "sharding", None, "TOML with kind and kernel per table, see docs/training.md", str
    )
    hbm_gib: float | None = _flag(
        "sharding", None, "GiB of memory per rank for the plan (default: the device's)", float
    )
    comm_precision: str = _flag(
        "sharding", "fp32", "of embeddings and gradients on their way between ranks", PRECISIONS
    )
    print_sharding_plan: bool = _flag("sharding", False, "print the plan, table by table")
    plan_only: bool = _flag(
        "sharding", False, "print the plan for --world_size GPUs of --hbm_gib and stop; needs none"
    )
    world_size: int | None = _flag("sharding", None, "ranks to plan for, with --plan_only", int)

    throughput_check_freq_within_epoch: int = _flag(
        "reporting", 1000, "steps between two lines of progress (and at the end of an epoch)", int
    )
    validation_freq_within_epoch: int = _flag(
        "reporting",
        10000,
        "steps between two evaluations of valid (and after each epoch; test once, at the end)",
        int,
    )
    log_path: str | None = _flag(
        "reporting", None, "directory to which metrics.jsonl is written (appended)", str
    )

    mode: str = _flag(
        "checkpoints", "train", "train, or test the model of --load_checkpoint_path", MODES
    )
    save_checkpoint_path: str | None = _flag(
        "checkpoints", None, "directory of the checkpoint that is written at the end", str
    )
    load_checkpoint_path: str | None = _flag(
        "checkpoints", None, "checkpoint whose weights to start from, or to test", str
    )
    checkpoint_dir: str | None = _flag(
        "checkpoints", None, "directory for checkpoints on the way, one for this run alone", str
    )
    checkpoint_freq: int | None = _flag(
        "checkpoints", None, "steps between two checkpoints on the way", int
    )
    checkpoint_minutes: float | None = _flag(
        "checkpoints",
        None,
        "minutes between two checkpoints on the way, looked at with each line of progress",
        float,
    )
    keep_checkpoints: int = _flag("checkpoints", 3, "how many of the newest to keep", int)
    resume: bool = _flag(
        "checkpoints",
        False,
        "go on from the newest checkpoint in --checkpoint_dir, if there is one; torchrun's "
        "restarts do so by themselves",
    )

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_layers()
        self._check_combinations()

    def _check_numbers(self) -> None:
        for name in (
            "batch_size",
            "epochs",
            "embedding_dim",
            "throughput_check_freq_within_epoch",
            "validation_freq_within_epoch",
            "limit_train_batches",
            "limit_val_batches",
            "limit_test_batches",
            "loader_memory",
            "checkpoint_freq",
            "keep_checkpoints",
            "world_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"--{name} {getattr(self, name)}", "it must be at least 1")
        for name in ("learning_rate", "lr_after_change_point"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SettingsError(f"--{name} {value}", "it must be a positive number")
        for name in ("lr_warmup_steps", "lr_decay_start", "lr_decay_steps", "decay_end_lr"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise SettingsError(f"--{name} {getattr(self, name)}", "it must not be negative")
        for name in ("eps", "decay_power", "hbm_gib", "checkpoint_minutes"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise SettingsError(f"--{name} {value}", "it must be a positive number")
        if not 0 <= self.lr_change_point <= 1:
            raise SettingsError(
                f"--lr_change_point {self.lr_change_point}",
                "it is a share of all steps, between 0 and 1",
            )
        if self.undersampling_rate is not None and not 0 < self.undersampling_rate <= 1:
            raise SettingsError(
                f"--undersampling_rate {self.undersampling_rate}", "a share, above 0 and at most 1"
            )
        if not 0 <= self.seed < 2**63:
            raise SettingsError(f"--seed {self.seed}", "it must be between 0 and 2**63 - 1")
        if self.num_embeddings is not None and self.num_embeddings < 1:
            raise SettingsError(f"--num_embeddings {self.num_embeddings}", "it must be at least 1")

    def _check_layers(self) -> None:
        for name in (
            "num_embeddings_per_feature",
            "dense_arch_layer_sizes",
            "over_arch_layer_sizes",
        ):
            sizes = getattr(self, name)
            if sizes is not None and (not sizes or min(sizes) < 1):
                raise SettingsError(f"--{name} {as_text(sizes)}", "each size must be at least 1")
        if self.embedding_dim % 4:
            raise SettingsError(
                f"--embedding_dim {self.embedding_dim}",
                "FBGEMM's tables need a multiple of 4",
            )
        last = self.dense_arch_layer_sizes[-1]
        if last != self.embedding_dim:
            raise SettingsError(
                f"--dense_arch_layer_sizes {as_text(self.dense_arch_layer_sizes)} ends with "
                f"{last}, but --embedding_dim is {self.embedding_dim}",
                "DLRM lets the dense features interact with the embeddings: make the two equal",
            )
        over = self.over_arch_layer_sizes
        if over[-1] != 1:
            raise SettingsError(
                f"--over_arch_layer_sizes {as_text(over)} ends with {over[-1]}",
                "the last layer is the logit of the click: end with 1",
            )
        if len(over) < 2:
            raise SettingsError(
                f"--over_arch_layer_sizes {as_text(over)}",
                "TorchRec's DLRM needs two or more layers",
            )

    def _check_combinations(self) -> None:
        if self.num_embeddings is not None and self.num_embeddings_per_feature is not None:
            raise SettingsError(
                "--num_embeddings and --num_embeddings_per_feature are both set",
                "give one of them, or none: then the sizes come from the data",
            )
        self._check_choices()
        self._need("change_lr", "lr_change_point", "lr_after_change_point")
        self._need("plan_only", "world_size")
        self._need("checkpoint_dir", "checkpoint_freq", "checkpoint_minutes")
        self._need("checkpoint_dir", "keep_checkpoints", "resume")
        if self.checkpoint_dir and not (self.checkpoint_freq or self.checkpoint_minutes):
            raise SettingsError(
                f"--checkpoint_dir {self.checkpoint_dir} without a frequency",
                "add --checkpoint_freq (steps) or --checkpoint_minutes",
            )
        if self.mode == "test":
            if not self.load_checkpoint_path:
                raise SettingsError("--mode test has nothing to test", "add --load_checkpoint_path")
            for name in ("checkpoint_dir", "save_checkpoint_path"):
                if getattr(self, name):
                    raise SettingsError(f"--mode test writes no checkpoint: --{name}")
        if self.lr_policy != "nvidia":
            for name in ("decay_power", "decay_end_lr"):
                if getattr(self, name) != _default(name):
                    raise SettingsError(
                        f"--{name} {getattr(self, name)} with --lr_policy {self.lr_policy}",
                        "it belongs to --lr_policy nvidia",
                    )
        if self.adagrad and self.optimizer not in (None, "rowwise_adagrad"):
            raise SettingsError(
                f"--adagrad and --optimizer {self.optimizer}",
                "--adagrad means --optimizer rowwise_adagrad: give one of them",
            )
        scheduled = self.lr_warmup_steps or self.lr_decay_steps
        if self.change_lr and scheduled:
            raise SettingsError(
                "--change_lr and a warm-up or decay are both set", "give one schedule"
            )
        if self.lr_decay_start and not self.lr_decay_steps:
            raise SettingsError(
                f"--lr_decay_start {self.lr_decay_start} has no effect without --lr_decay_steps",
                "add --lr_decay_steps",
            )
        if self.lr_decay_steps and self.lr_decay_start < self.lr_warmup_steps:
            raise SettingsError(
                f"--lr_decay_start {self.lr_decay_start} is before the warm-up ends "
                f"(--lr_warmup_steps {self.lr_warmup_steps})",
                "let the decay start after the warm-up",
            )

    def _check_choices(self) -> None:
        for name in ("optimizer", "lr_policy", "sharding", "comm_precision", "mode"):
            value, choices = getattr(self, name), self.__dataclass_fields__[name].metadata["parse"]
            if value is not None and value not in choices:
                raise SettingsError(f"--{name} {value}", f"one of {', '.join(choices)}")

    def _need(self, switch: str, *names: str) -> None:
        """Refuse settings that say nothing without a switch."""
        for name in names:
            if not getattr(self, switch) and getattr(self, name) != _default(name):
                raise SettingsError(
                    f"--{name} {getattr(self, name)} has no effect without --{switch}",
                    f"add --{switch}",
                )

    @property
    def table_optimizer(self) -> str:
        """What trains the tables: a key of ``OPTIMIZERS``."""
        return "rowwise_adagrad" if self.adagrad else self.optimizer or "sgd"

    def split_path(self, split: str) -> Path:
        """Directory of one split: train, valid or test."""
        return Path(self.binary_path) / split

    def check_data(self) -> None:
        """Check that ``binary_path`` is what the ETL writes, before anything is loaded.

        Raises:
            SettingsError: it is missing, or is something else; with a hint at what to give.
        """
        path = Path(self.binary_path)
        flag = f"--binary_path {self.binary_path}"
        if not path.is_dir():
            raise SettingsError(
                f"{flag}: no such directory", "it is OUT/criteo_binary/split of: python -m etl run"
            )
        missing = [split for split in SPLITS if not (path / split).is_dir()]
        if not missing:
            return
        inner = path / "criteo_binary" / "split"
        if all((inner / split).is_dir() for split in SPLITS):
            hint = f"give the directory of the splits: --binary_path {inner}"
        elif "valid" in missing and (path / "validation").is_dir():
            hint = "there is a directory 'validation'; the ETL calls it 'valid': rename it"
        elif any(path.glob("*/*.bin")) or any(path.glob("*.bin")):
            hint = "these are binary files of TorchRec's example; this reads the ETL's parquet"
        else:
            hint = "it is OUT/criteo_binary/split of: python -m etl run"
        raise SettingsError(f"{flag}: holds no {', '.join(missing)}", hint)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return dataclasses.asdict(self)


def _default(name: str) -> Any:
    return TrainSettings.__dataclass_fields__[name].default


def as_text(value: Any) -> Any:
    """A value as it is written after its flag."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else value
