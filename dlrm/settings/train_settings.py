"""The trainer's settings: one dataclass that validates itself; ``dlrm.settings.flags`` makes flags.

The names and defaults are those of TorchRec's ``nvt_dataloader`` example, then those of
facebookresearch/dlrm's ``dlrm_main.py`` and of NVIDIA's DLRM; docs/flags.md lists all of theirs.
An unset ``--num_embeddings`` or ``--num_embeddings_per_feature`` means: from the data. Knows no
torch, so that ``--help`` and a mistyped flag answer at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

from clicklog.errors import SettingsError
from clicklog.etl_output import EtlOutput
from clicklog.splits import SPLITS


def _sizes(text: str) -> tuple[int, ...]:
    """``"512,256"`` → (512, 256)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no comma separated list of integers"
        ) from None


def _flag(group: str, default: Any, text: str, parse: Any = None, also: str | None = None) -> Any:
    """A settings field that is also a flag.

    ``parse`` makes its value (None for a switch), or is the tuple of values it may have. ``also``
    is a second name of the flag, from another trainer.
    """
    return dataclasses.field(
        default=default, metadata={"group": group, "help": text, "parse": parse, "also": also}
    )


#: Optimizers of the tables, and what trains the dense layers beside them.
OPTIMIZERS = {"sgd": "sgd", "adagrad": "adagrad", "rowwise_adagrad": "adagrad", "adam": "adam"}
LR_POLICIES = ("dlrm_main", "nvidia")
SHARDINGS = ("auto", "table_wise", "row_wise", "column_wise")
MODES = ("train", "test", "inference_benchmark")
PRECISIONS = ("fp32", "fp16", "bf16")
INTERACTIONS = ("original", "dcn", "projection")
DATASETS = ("parquet", "synthetic")
DISTRIBUTIONS = ("uniform", "pareto")
#: Where runs without --log_path and --checkpoint_dir keep their logs, each in a directory.
LOGS = "training_log"


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Everything a training run is told. Raises :class:`SettingsError` for what makes no sense.

    Each field is the flag of the same name; ``--help`` describes them.
    """

    mode: str = _flag(
        "what to do",
        "train",
        "train; evaluate the test set; or measure latency and throughput of scoring it",
        MODES,
    )

    binary_path: str = _flag(
        "data",
        "/data/criteo_1tb/criteo_binary/split/",
        "the ETL's OUT/criteo_binary/split: holds train, valid and test",
        str,
    )
    dataset_type: str = _flag(
        "data", "parquet", "what lies at --binary_path, or random rows made in memory", DATASETS
    )
    batch_size: int = _flag("data", 32, "samples per step and rank", int)
    test_batch_size: int | None = _flag(
        "data", None, "the same for evaluations (default: --batch_size)", int
    )
    shuffle_training_set: bool = _flag(
        "data", False, "read the rows of the training set in a new order every epoch"
    )
    shuffle_batches: bool = _flag("data", False, "shuffle the rows within each training batch")
    drop_last_training_batch: bool = _flag(
        "data", False, "leave out the last training step of an epoch when it is not full"
    )
    dataset_subset: float | None = _flag(
        "data", None, "share of the training steps that make an epoch: the first", float
    )
    limit_train_batches: int | None = _flag("data", None, "steps of a training epoch", int)
    limit_val_batches: int | None = _flag("data", None, "steps of an evaluation of valid", int)
    limit_test_batches: int | None = _flag("data", None, "steps of the evaluation of test", int)
    undersampling_rate: float | None = _flag(
        "data", None, "share of the training rows with label 0 to keep", float
    )
    loader_memory: int | None = _flag(
        "data", None, "MiB that a loader may hold, of each split (default: 256; by cuDF, 1024)", int
    )
    multi_hot_sizes: tuple[int, ...] | None = _flag(
        "data",
        None,
        "ids per row of each column: the row's own, and others that follow from it",
        _sizes,
    )
    multi_hot_distribution_type: str | None = _flag(
        "data", None, "of the ids that --multi_hot_sizes adds (default: uniform)", DISTRIBUTIONS
    )
    synthetic_dataset_num_entries: int = _flag(
        "synthetic data", 2**25, "rows of an epoch; a tenth for valid and test", int
    )
    synthetic_dataset_table_sizes: tuple[int, ...] = _flag(
        "synthetic data", (100_000,) * 26, "ids of each categorical column", _sizes
    )
    synthetic_dataset_numerical_features: int = _flag("synthetic data", 13, "dense columns", int)
    seed: int = _flag("data", 0, "seed of the initial weights and of the shuffling", int)

    num_embeddings: int | None = _flag(
        "model", None, "rows of every embedding table (default: from the data)", int
    )
    num_embeddings_per_feature: tuple[int, ...] | None = _flag(
        "model", None, "rows of each table, comma separated (default: from the data)", _sizes
    )
    max_table_size: int | None = _flag(
        "model", None, "rows of a table at most; needs --hash_indices", int
    )
    hash_indices: bool = _flag(
        "model",
        False,
        "map ids that a given table size has no row for into the table, beside the reserved ids",
    )
    embedding_dim: int = _flag("model", 128, "width of the embedding tables", int)
    dense_arch_layer_sizes: tuple[int, ...] = _flag(
        "model", (512, 256, 128), "layers for the dense features; ends with embedding_dim", _sizes
    )
    over_arch_layer_sizes: tuple[int, ...] = _flag(
        "model", (1024, 1024, 512, 256, 1), "layers above the interaction; ends with 1", _sizes
    )
    interaction_type: str = _flag(
        "model",
        "original",
        "dot products of pairs (DLRM), a low-rank cross network (DCN v2), or two projections",
        INTERACTIONS,
    )
    dcn_num_layers: int = _flag("model", 3, "layers of the cross network", int)
    dcn_low_rank_dim: int = _flag("model", 512, "rank of the cross network's weights", int)
    interaction_branch1_layer_sizes: tuple[int, ...] = _flag(
        "model",
        (2048, 2048),
        "of the first projection; ends with a multiple of embedding_dim",
        _sizes,
    )
    interaction_branch2_layer_sizes: tuple[int, ...] = _flag(
        "model", (2048, 2048), "of the second projection, likewise", _sizes
    )

    epochs: int = _flag("optimization", 1, "passes over the training set", int)
    max_steps: int | None = _flag("optimization", None, "stop after so many steps", int)
    auc_threshold: float | None = _flag(
        "optimization", None, "stop when an evaluation of valid reaches this AUROC", float
    )
    learning_rate: float | None = _flag(
        "optimization",
        None,
        "learning rate (default: one for the tables and one for the dense layers, by optimizer, "
        "global batch and layers, after a warm-up; docs/training.md)",
        float,
    )
    dense_learning_rate: float | None = _flag(
        "optimization", None, "of the dense layers (default: --learning_rate, if given)", float
    )
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
    lr_warmup_steps: int | None = _flag(
        "optimization",
        None,
        "steps over which the learning rate grows from 0 (default: 5 % of an epoch, 10 to 200; "
        "none with --learning_rate)",
        int,
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

    amp: bool = _flag("speed", False, "compute the dense layers in bfloat16; weights stay float32")
    allow_tf32: bool = _flag("speed", False, "TensorFloat-32 for matrix products (GPUs)")
    compile_dense: bool = _flag("speed", False, "torch.compile for the dense layers")
    cuda_graphs: bool = _flag("speed", False, "CUDA graphs for the dense layers' steps (GPUs)")
    bind_cpus: bool = _flag(
        "speed", False, "keep each rank on CPU cores of its own, on the NUMA node of its GPU"
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
        "reporting",
        1000,
        "steps between two lines of progress (and at the end of an epoch)",
        int,
        also="print_freq",
    )
    validation_freq_within_epoch: int = _flag(
        "reporting",
        10000,
        "steps between two evaluations of valid (and after each epoch; test once, at the end)",
        int,
        also="test_freq",
    )
    test_after: float = _flag(
        "reporting", 0.0, "epochs before the first evaluation of valid", float
    )
    benchmark_warmup_steps: int = _flag(
        "reporting", 0, "first steps, left out of the throughput at the end", int
    )
    print_lr: bool = _flag("reporting", False, "print the learning rate of every step")
    log_path: str | None = _flag(
        "reporting",
        None,
        "directory for metrics.jsonl (appended), settings.json and training.html (default: "
        f"CHECKPOINT_DIR/log, or {LOGS}/DATE-TIME)",
        str,
    )
    tensorboard: bool = _flag("reporting", False, "write TensorBoard's event files there, too")
    profile: bool = _flag(
        "reporting", False, "write a trace of some steps, by torch.profiler, there"
    )
    profile_steps: int = _flag("reporting", 10, "how many, with --profile", int)

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

    inference_benchmark_batch_sizes: tuple[int, ...] = _flag(
        "inference benchmark", (1, 64, 4096), "rows that are scored at once, in turn", _sizes
    )
    inference_benchmark_steps: int = _flag(
        "inference benchmark", 200, "batches of each size, after --benchmark_warmup_steps", int
    )

    def __post_init__(self) -> None:
        from dlrm.settings.checks import check_settings

        check_settings(self)

    @property
    def table_optimizer(self) -> str:
        """What trains the tables: a key of ``OPTIMIZERS``."""
        return table_optimizer(self.optimizer, self.adagrad)

    def batch_size_of(self, split: str) -> int:
        """Samples per step and rank of a split."""
        return self.batch_size if split == "train" else self.test_batch_size or self.batch_size

    def split_path(self, split: str) -> Path:
        """Directory of one split: train, valid or test."""
        return Path(self.binary_path) / split

    def log_directory(self) -> Path:
        """Where the run's log goes; without a flag, one that is named by the time of the call."""
        if self.log_path:
            return Path(self.log_path)
        if self.checkpoint_dir:
            return Path(self.checkpoint_dir) / "log"
        return Path(LOGS) / time.strftime("%Y%m%d-%H%M%S")

    def check_data(self) -> None:
        """Check that ``binary_path`` is what the ETL writes, before anything is loaded.

        Raises:
            SettingsError: it is missing, or is something else; with a hint at what to give.
        """
        if self.dataset_type == "synthetic":
            return
        path = Path(self.binary_path)
        flag = f"--binary_path {self.binary_path}"
        if not path.is_dir():
            raise SettingsError(
                f"{flag}: no such directory", "it is OUT/criteo_binary/split of: python -m etl run"
            )
        missing = [split for split in SPLITS if not (path / split).is_dir()]
        if not missing:
            return
        inner = EtlOutput(path).splits
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


def table_optimizer(optimizer: str | None, adagrad: bool) -> str:
    """What ``--optimizer`` and ``--adagrad`` together mean: a key of ``OPTIMIZERS``."""
    return "rowwise_adagrad" if adagrad else optimizer or "sgd"


def as_text(value: Any) -> Any:
    """A value as it is written after its flag."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else value
