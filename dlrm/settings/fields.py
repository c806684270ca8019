"""The trainer's flags, as fields of a dataclass.

The names and defaults are those of TorchRec's ``nvt_dataloader`` example, then those of
facebookresearch/dlrm's ``dlrm_main.py`` and of NVIDIA's DLRM; docs/flags.md lists all of theirs.
Knows no torch, so that ``--help`` and a mistyped flag answer at once.
"""

from __future__ import annotations

import dataclasses
import functools

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.dlrm.settings import other_trainers

#: Optimizer of the tables → that of the dense layers beside them.
OPTIMIZERS = {"sgd": "sgd", "adagrad": "adagrad", "rowwise_adagrad": "adagrad", "adam": "adam"}
LR_POLICIES = ("dlrm_main", "nvidia")
SHARDINGS = ("auto", "table_wise", "row_wise", "column_wise")
MODES = ("train", "test", "inference_benchmark")
PRECISIONS = ("fp32", "fp16", "bf16")
INTERACTIONS = ("original", "dcn", "projection")
DATASETS = ("parquet", "synthetic")
#: What computes the dot products; where inputs are padded; precisions of tables and of lookups.
INTERACTION_KERNELS = ("auto", "torch", "triton")
PADDINGS = ("auto", "always", "never")
TABLE_PRECISIONS = ("fp32", "fp16")
LOOKUP_PRECISIONS = ("auto", "fp32", "bf16")
INDEX_TYPES = ("auto", "int32", "int64")
DISTRIBUTIONS = ("uniform", "pareto")
#: Directory of the logs of runs without --log_path and --checkpoint_dir, a subdirectory for each.
LOGS = "training_log"

_data = functools.partial(flag, group="data")
_synthetic = functools.partial(flag, group="synthetic data", needs="--dataset_type synthetic")
_model = functools.partial(flag, group="model")
_optimization = functools.partial(flag, group="optimization")
_speed = functools.partial(flag, group="speed")
_sharding = functools.partial(flag, group="sharding")
_reporting = functools.partial(flag, group="reporting")
_checkpoints = functools.partial(flag, group="checkpoints")
_benchmark = functools.partial(
    flag, group="inference benchmark", least=1, needs="--mode inference_benchmark"
)


@dataclasses.dataclass(frozen=True)
class TrainFields(Settings):
    """The flags; :class:`dlrm.settings.train_settings.TrainSettings` checks and interprets them."""

    HINTS = other_trainers.HINTS

    # fmt: off
    mode: str = flag(
        "train; evaluate the test set; or measure latency and throughput of scoring it", "train",
        group="what to do", choices=MODES
    )

    binary_path: str = _data(
        "the ETL's OUT/criteo_binary/split: holds train, valid and test",
        "/data/criteo_1tb/criteo_binary/split/", metavar="PATH"
    )
    dataset_type: str = _data(
        "read parquet from --binary_path, or make random rows in memory", "parquet",
        choices=DATASETS
    )
    batch_size: int = _data("samples per step and rank", 32, least=1)
    test_batch_size: int | None = _data(
        "samples per step and rank of evaluations (default: --batch_size)", None, least=1
    )
    shuffle_training_set: bool = _data(
        "read the rows of the training set in a new order every epoch", False,
        needs="--dataset_type parquet"
    )
    shuffle_batches: bool = _data("shuffle the rows within each training batch", False)
    drop_last_training_batch: bool = _data(
        "leave out the last training step of an epoch when it is not full", False,
        needs="--dataset_type parquet"
    )
    dataset_subset: float | None = _data(
        "train on this share of the steps of an epoch: the first ones", None, above=0, most=1,
        excludes=("limit_train_batches",)
    )
    limit_train_batches: int | None = _data("largest number of steps of an epoch", None, least=1)
    limit_val_batches: int | None = _data(
        "largest number of steps of an evaluation of valid", None, least=1
    )
    limit_test_batches: int | None = _data(
        "largest number of steps of an evaluation of test", None, least=1
    )
    days: str | None = _data(
        "days of the training set to read: all; new, those that the checkpoint of --continue_from "
        "has not been trained on; or a list such as 0-3,7 (default: all)", None,
        metavar="all|new|LIST", needs="--mode train"
    )
    replay: float | None = _data(
        "share of the rows of the other training days to read as well", None, above=0, most=1,
        needs="--days new"
    )
    undersampling_rate: float | None = _data(
        "share of the training rows with label 0 to keep", None, above=0, most=1,
        needs="--dataset_type parquet"
    )
    loader_memory: int | None = _data(
        "MiB that the loader of each split may hold (default: 256, with cuDF 1024; up to four "
        "times that if large batches or many columns need it)", None, least=1,
        needs="--dataset_type parquet"
    )
    multi_hot_sizes: tuple[int, ...] | None = _data(
        "ids per row of each column: the one in the data, and others computed from it", None,
        least=1
    )
    multi_hot_distribution_type: str | None = _data(
        "distribution of the ids that --multi_hot_sizes adds (default: uniform)", None,
        choices=DISTRIBUTIONS, needs="--multi_hot_sizes"
    )
    label: str | None = _data(
        "label to train and evaluate, if the data have several (default: the main one)", None,
        metavar="NAME", needs="--dataset_type parquet"
    )
    seed: int = _data(
        "seed of the initial weights and of the shuffling", 0, least=0, most=2**63 - 1
    )

    synthetic_dataset_num_entries: int = _synthetic(
        "rows of an epoch; valid and test have a tenth of them", 2**25, least=1
    )
    synthetic_dataset_table_sizes: tuple[int, ...] = _synthetic(
        "number of ids of each categorical column", (100_000,) * 26, least=1
    )
    synthetic_dataset_numerical_features: int = _synthetic("number of dense columns", 13, least=0)

    num_embeddings: int | None = _model(
        "rows of every embedding table (default: from the data)", None, least=1,
        excludes=("num_embeddings_per_feature", "max_table_size")
    )
    num_embeddings_per_feature: tuple[int, ...] | None = _model(
        "rows of each embedding table (default: from the data)", None, least=1
    )
    max_table_size: int | None = _model(
        "largest number of rows of a table; needs --hash_indices", None, least=1,
        needs="--hash_indices"
    )
    hash_indices: bool = _model(
        "map ids that a given table size has no row for into the table, beside the reserved ids",
        False, needs="--dataset_type parquet"
    )
    embedding_dim: int = _model("width of the embedding tables", 128, least=1)
    dense_arch_layer_sizes: tuple[int, ...] = _model(
        "layers for the dense features; ends with embedding_dim", (512, 256, 128), least=1
    )
    over_arch_layer_sizes: tuple[int, ...] = _model(
        "layers above the interaction; ends with 1", (1024, 1024, 512, 256, 1), least=1
    )
    interaction_type: str = _model(
        "dot products of pairs (DLRM), a low-rank cross network (DCN v2), or two projections",
        "original", choices=INTERACTIONS
    )
    dcn_num_layers: int = _model(
        "layers of the cross network", 3, least=1, needs="--interaction_type dcn"
    )
    dcn_low_rank_dim: int = _model(
        "rank of the cross network's weights", 512, least=1, needs="--interaction_type dcn"
    )
    interaction_branch1_layer_sizes: tuple[int, ...] = _model(
        "layers of the first projection; ends with a multiple of embedding_dim", (2048, 2048),
        least=1, needs="--interaction_type projection"
    )
    interaction_branch2_layer_sizes: tuple[int, ...] = _model(
        "layers of the second projection; ends with a multiple of embedding_dim", (2048, 2048),
        least=1, needs="--interaction_type projection"
    )

    epochs: int = _optimization("passes over the training set", 1, least=1)
    max_steps: int | None = _optimization(
        "stop after this many steps", None, least=1, needs="--mode train"
    )
    auc_threshold: float | None = _optimization(
        "stop when an evaluation of valid reaches this AUROC", None, above=0, most=1,
        needs="--mode train"
    )
    learning_rate: float | None = _optimization(
        "learning rate (default: one for the tables and one for the dense layers, by optimizer, "
        "global batch and layers, after a warm-up; docs/training.md)", None, above=0
    )
    dense_learning_rate: float | None = _optimization(
        "learning rate of the dense layers (default: --learning_rate, if given)", None, above=0
    )
    optimizer: str | None = _optimization(
        "optimizer of the tables, fused into their backward pass; the dense layers use the same, "
        "or Adagrad with rowwise_adagrad (default: sgd)", None, choices=tuple(OPTIMIZERS)
    )
    adagrad: bool = _optimization("the example's name for --optimizer rowwise_adagrad", False)
    eps: float = _optimization("epsilon of Adagrad and Adam", 1e-8, above=0)
    change_lr: bool = _optimization("change the learning rate at --lr_change_point", False)
    lr_change_point: float = _optimization(
        "share of all steps, over all epochs, after which the learning rate changes", 0.80, least=0,
        most=1, needs="--change_lr"
    )
    lr_after_change_point: float = _optimization(
        "the learning rate from that point on", 3.0, above=0, needs="--change_lr"
    )
    lr_warmup_steps: int | None = _optimization(
        "steps over which the learning rate grows from 0 (default: 5 % of an epoch, 10 to 200; "
        "none with --learning_rate or --continue_from)", None, least=0
    )
    lr_decay_start: int = _optimization(
        "step at which the decay begins", 0, least=0, needs="--lr_decay_steps"
    )
    lr_decay_steps: int = _optimization("steps that the decay takes; 0: no decay", 0, least=0)
    lr_policy: str = _optimization(
        "warm up and decay as facebookresearch/dlrm does, or as NVIDIA's DLRM does", "dlrm_main",
        choices=LR_POLICIES
    )
    decay_power: float = _optimization(
        "power of the decay (dlrm_main's is always 2)", 2.0, above=0, needs="--lr_policy nvidia"
    )
    decay_end_lr: float = _optimization(
        "the learning rate after the decay, with --lr_policy nvidia", 0.0, least=0,
        needs="--lr_policy nvidia"
    )

    amp: bool = _speed("compute the dense layers in bfloat16; weights stay float32", False)
    allow_tf32: bool = _speed("TensorFloat-32 for matrix products (GPUs)", False)
    compile_dense: bool = _speed("torch.compile for the dense layers", False)
    cuda_graphs: bool = _speed("CUDA graphs for the dense layers' steps (GPUs)", False)
    interaction_kernel: str = _speed(
        "what computes the dot products: PyTorch's operators, or one Triton kernel (auto: the "
        "kernel on GPUs, if a trial gives the same)", "auto", choices=INTERACTION_KERNELS
    )
    pad_inputs: str = _speed(
        "pad the inputs of dense and top layers to multiples of 8; checkpoints stay as they are "
        "(auto: on GPUs with --amp or --allow_tf32)", "auto", choices=PADDINGS
    )
    table_precision: str = _speed(
        "type of the tables' weights; fp16 is rounded stochastically (on GPUs) and halves their "
        "memory; optimizer state stays fp32", "fp32", choices=TABLE_PRECISIONS
    )
    lookup_precision: str = _speed(
        "type of the lookups' output, with --amp on GPUs (auto: bf16 where the dot products round "
        "it anyway, on one rank)", "auto", choices=LOOKUP_PRECISIONS
    )
    index_type: str = _speed(
        "type of the ids that FBGEMM gets (auto: int32, unless the tables have 2³¹ rows or are "
        "cached on a GPU)", "auto", choices=INDEX_TYPES
    )
    bounds_check: bool = _speed("let FBGEMM check the ids again that the loader checked", False)
    bind_cpus: bool = _speed(
        "keep each rank on CPU cores of its own, on the NUMA node of its GPU", False
    )

    sharding: str = _sharding(
        "how to shard every table; auto: TorchRec's planner chooses table-wise or row-wise", "auto",
        choices=SHARDINGS
    )
    sharding_file: str | None = _sharding(
        "TOML with kind and kernel per table, see docs/training.md", None, metavar="PATH"
    )
    hbm_gib: float | None = _sharding(
        "GiB of memory per rank for the plan (default: the device's)", None, above=0
    )
    comm_precision: str = _sharding(
        "type of embeddings and gradients when they are sent between ranks", "fp32",
        choices=PRECISIONS
    )
    print_sharding_plan: bool = _sharding("print the plan, table by table", False)
    plan_only: bool = _sharding(
        "print the plan for --world_size GPUs of --hbm_gib and stop; needs no GPU", False
    )
    world_size: int | None = _sharding(
        "number of ranks to plan for, with --plan_only", None, least=1, needs="--plan_only"
    )

    throughput_check_freq_within_epoch: int = _reporting(
        "steps between two lines of progress; one more ends each epoch", 1000, least=1,
        also="print_freq"
    )
    validation_freq_within_epoch: int = _reporting(
        "steps between two evaluations of valid; one more ends each epoch; test follows at the end",
        10000, least=1, also="test_freq"
    )
    test_after: float = _reporting(
        "epochs before the first evaluation of valid", 0.0, least=0, needs="--mode train"
    )
    benchmark_warmup_steps: int = _reporting(
        "number of first steps that the throughput at the end leaves out", 0, least=0
    )
    print_lr: bool = _reporting(
        "print the learning rate of every step", False, needs="--mode train"
    )
    log_path: str | None = _reporting(
        "directory for metrics.jsonl (appended), settings.json and training.html (default: "
        f"CHECKPOINT_DIR/log, or {LOGS}/DATE-TIME)", None, metavar="PATH"
    )
    tensorboard: bool = _reporting(
        "write TensorBoard's event files to the log directory", False, needs="--mode train"
    )
    profile: bool = _reporting(
        "write a trace of --profile_steps steps, made by torch.profiler, to the log directory",
        False, needs="--mode train"
    )
    profile_steps: int = _reporting(
        "number of steps that --profile traces", 10, least=1, needs="--profile"
    )

    save_checkpoint_path: str | None = _checkpoints(
        "directory of the checkpoint that is written at the end", None, metavar="PATH",
        needs="--mode train"
    )
    load_checkpoint_path: str | None = _checkpoints(
        "checkpoint whose weights to start from, or to test", None, metavar="PATH"
    )
    continue_from: str | None = _checkpoints(
        "checkpoint, or --checkpoint_dir of a run, whose weights and optimizer state to start "
        "from; its data may be of an earlier generation, so its tables smaller", None,
        metavar="PATH", excludes=("load_checkpoint_path",)
    )
    checkpoint_dir: str | None = _checkpoints(
        "directory for the checkpoints written during training; each run needs its own", None,
        metavar="PATH", needs="--mode train"
    )
    checkpoint_freq: int | None = _checkpoints(
        "steps between two checkpoints", None, least=1, needs="--checkpoint_dir"
    )
    checkpoint_minutes: float | None = _checkpoints(
        "minutes between two checkpoints, compared with the clock at each line of progress", None,
        above=0, needs="--checkpoint_dir"
    )
    keep_checkpoints: int = _checkpoints(
        "number of the newest checkpoints to keep", 3, least=1, needs="--checkpoint_dir"
    )
    resume: bool = _checkpoints(
        "continue from the newest checkpoint in --checkpoint_dir, if there is one; torchrun's "
        "restarts do so without this flag", False, needs="--checkpoint_dir"
    )

    inference_benchmark_batch_sizes: tuple[int, ...] = _benchmark(
        "numbers of rows that are scored at once, one after the other", (1, 64, 4096)
    )
    inference_benchmark_steps: int = _benchmark(
        "batches of each size, after --benchmark_warmup_steps", 200
    )
    # fmt: on
