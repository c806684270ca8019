"""The trainer's flags, as fields of a dataclass.

Names and defaults follow TorchRec's ``nvt_dataloader`` example, then facebookresearch/dlrm's
``dlrm_main.py`` and NVIDIA's DLRM; docs/flags.md lists all of their flags. This module does not
import torch, so that ``--help`` and errors about flags appear at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.models.interactions import INTERACTIONS
from nvt_torchrec.models.registry import DEFAULT_MODEL, MAX_VECTOR_SCALE, MODELS
from nvt_torchrec.training.settings.optimizers import OPTIMIZERS
from nvt_torchrec.training.settings.other_trainers import LEFT_OUT
from nvt_torchrec.training.settings.sizes import SIZES

#: The parent directory of the logs of runs that have neither --log_path nor --checkpoint_dir.
LOGS = "training_log"

_data = functools.partial(flag, group="data")
_model = functools.partial(flag, group="model")
_optimization = functools.partial(flag, group="optimization")
_speed = functools.partial(flag, group="speed")
_sharding = functools.partial(flag, group="sharding")
_reporting = functools.partial(flag, group="reporting")
_checkpoints = functools.partial(flag, group="checkpoints")


@dataclasses.dataclass(frozen=True)
class TrainFields(Settings):
    """The flags, which :class:`training.settings.train_settings.TrainSettings` checks and reads."""

    OTHER_PROGRAMS = "docs/flags.md"
    LEFT_OUT = LEFT_OUT

    # fmt: off
    mode: str = flag(
        "train, or evaluate the test set", "train", group="what to do", choices=("train", "test")
    )

    binary_path: str = _data(
        "the ETL's OUT/criteo_binary/split, which holds train, valid and test",
        "/data/criteo_1tb/criteo_binary/split/", metavar="PATH",
        aliases=("dataset", "in_memory_binary_criteo_path")
    )
    batch_size: int | None = _data(
        "samples per step and rank (default: depends on the number of training rows)", None,
        minimum=1,
        aliases=("batchsize",)
    )
    test_batch_size: int | None = _data(
        "samples per step and rank in evaluations (default: --batch_size if given, else at least "
        "4096)", None, minimum=1, aliases=("batchsize_eval",)
    )
    shuffle_training_set: bool | None = _data(
        "read the training rows in a new random order in every epoch (default: on unless the "
        "data are split by time or days)", None,
        aliases=("shuffle", "shuffle_batch_order", "shuffle_batches")
    )
    drop_last_training_batch: bool = _data(
        "skip the last training step of an epoch if its batch is not full", False
    )
    limit_train_batches: int | None = _data("maximum number of steps per epoch", None, minimum=1)
    limit_val_batches: int | None = _data(
        "maximum number of steps per evaluation of valid", None, minimum=1,
        aliases=("max_eval_batches",)
    )
    limit_test_batches: int | None = _data(
        "maximum number of steps per evaluation of test", None, minimum=1
    )
    days: str | None = _data(
        "days of the training set to read: all; new, the days that the checkpoint of "
        "--continue_from has not been trained on; or a list such as 0-3,7 (default: all)", None,
        metavar="all|new|LIST", needs="--mode train"
    )
    undersampling_rate: float | None = _data(
        "share of the training rows with label 0 to keep (default: all)", None, above=0, maximum=1
    )
    loader_memory: int | None = _data(
        "memory of each split's loader in MiB (default: 256, with cuDF 1024; up to four times "
        "that if large batches or many columns need it)", None, minimum=1
    )
    loader: str | None = _data(
        "loader of the training set: KJTLoader or Merlin's Loader (default: kjt)", None,
        choices=("kjt", "merlin"), needs="--mode train"
    )
    max_events: int | None = _data(
        "maximum number of events per row and history, the newest ones; 0 ignores histories "
        "(default: 50)", None, minimum=0
    )
    sequences: tuple[str, ...] | None = _model(
        "histories whose newest --max_events events the model gets one by one, in addition to "
        "their means (default: all with --model din, else none)", None, needs="--model"
    )
    log_q_correction: bool | None = _data(
        "correct the loss for [negatives] that were drawn by popularity, so that the model learns "
        "to rank as if they had been drawn evenly (default: as in the checkpoint, else off)", None
    )
    vectors: bool | None = _data(
        "give the model the vectors of the data, such as text embeddings (default: on if the data "
        "have any)", None
    )
    label: str | None = _data(
        "label to train and evaluate, or several labels to train together (default: the data's "
        "main label)", None, metavar="NAME[,NAME…]"
    )
    seed: int = _data(
        "random seed of the initial weights and of shuffling", 0, minimum=0, maximum=2**63 - 1
    )

    size: str = _model(
        "preset for the width of tables and layers and the optimizer, where no other flag gives "
        "them; auto: by the number of training rows", "auto", choices=("auto", *SIZES)
    )
    model: str = _model(
        "model of this project, or a custom one: a function that can be imported from the current "
        "directory (docs/models.md)", DEFAULT_MODEL, metavar=f"{'|'.join(MODELS)}|MODULE:FUNCTION"
    )
    model_settings: Mapping[str, Any] | None = _model(
        "arguments of the custom model's function; a value that is not JSON is a string", None,
        needs="--model"
    )
    num_embeddings: int | None = _model(
        "number of rows of every embedding table (default: from the data)", None, minimum=1,
        excludes=("num_embeddings_per_feature", "max_table_size")
    )
    num_embeddings_per_feature: tuple[int, ...] | None = _model(
        "number of rows of each embedding table (default: from the data)", None, minimum=1
    )
    max_table_size: int | None = _model(
        "maximum number of rows of a table, for tables that do not fit into memory; needs "
        "--hash_indices", None, minimum=4, needs="--hash_indices"
    )
    hash_indices: bool | None = _model(
        "allow tables with fewer rows than the data have ids: larger ids share rows, modulo their "
        "number; the reserved ids 0, 1 and 2 keep their own rows", None
    )
    embedding_dim: int | None = _model(
        "width of the embedding tables (default: by --size)", None, minimum=1, aliases=("ev_size",)
    )
    dense_arch_layer_sizes: tuple[int, ...] | None = _model(
        "sizes of the layers for the dense features; the last one is embedding_dim (default: by "
        "--size)", None, minimum=1, aliases=("bottom_mlp_sizes",)
    )
    over_arch_layer_sizes: tuple[int, ...] | None = _model(
        "sizes of the layers above the interaction; the last one is the number of labels (default: "
        "by --size)", None, minimum=1, aliases=("top_mlp_sizes",)
    )
    batch_norm: bool | None = _model(
        "normalize the hidden layers over the rows of a step, before the ReLU (default: chosen on "
        "valid, or off)", None
    )
    dropout: float | None = _model(
        "dropout rate of the hidden layers (default: 0)", None, minimum=0, maximum=0.99
    )
    interaction_type: str = _model(
        "interaction: dot products of pairs (DLRM), or a low-rank cross network (DCN v2)",
        "original", choices=tuple(INTERACTIONS),
        aliases=("interaction_op",)
    )

    vector_scale: float | None = _model(
        "factor that multiplies the embedding vectors before the model gets them; the linear term "
        "is not scaled (default: set by the model; measured for a custom model; 1 with sgd)", None,
        above=0, maximum=MAX_VECTOR_SCALE,
    )
    first_order: float | None = _model(
        "weight of the linear (wide) term, which is added to the logit and starts as "
        "a logistic regression; 0 turns it off (default: 0.2, less with more than 25 columns)",
        None, minimum=0
    )

    dense_bins: int | None = _model(
        "number of bins per dense column; its vector and its linear weight are piecewise linear "
        "over them; 0: the model only gets the value (default: 8 to 64, by the number of training "
        "rows)", None, minimum=0, maximum=1024
    )

    epochs: int | None = _optimization(
        "maximum number of passes over the training set (default: by --size; 1 with --max_steps, "
        "--load_checkpoint_path or --continue_from)", None, minimum=1
    )
    early_stopping: int | None = _optimization(
        "stop after this many evaluations of valid without a new best one, and keep the best "
        "model; --stop_by names the metric; 0 turns it off (default: by --size; 0 with --epochs)",
        None, minimum=0
    )
    stop_at_auroc: float | None = _optimization(
        "stop when every label's AUROC of valid is at least this", None, above=0, maximum=1,
        needs="--mode train",
        aliases=("auc_threshold", "validation_auroc")
    )
    stop_by: str = _optimization(
        "metric of valid by which --early_stopping finds the best model",
        "log_loss", choices=("log_loss", "auroc")
    )
    average_weights: bool | None = _optimization(
        "evaluate and keep a moving average of the weights over an epoch (default: on for long "
        "trainings with L2 that are chosen on valid, else off)", None
    )
    max_steps: int | None = _optimization(
        "stop after this many steps", None, minimum=1, needs="--mode train",
        aliases=("max_iter",)
    )
    learning_rate: float | None = _optimization(
        "learning rate of tables and dense layers (default: a separate rate for each, which "
        "depends on optimizer, global batch and layers; docs/learning.md)", None, above=0,
        aliases=("lr",)
    )
    dense_learning_rate: float | None = _optimization(
        "learning rate of the dense layers (default: --learning_rate, if given)", None, above=0
    )
    optimizer: str | None = _optimization(
        "optimizer of the tables, fused into their backward pass; the dense layers use the same "
        "one (Adagrad if it is rowwise_adagrad); adam needs GPUs for large tables (default: by "
        "--size)",
        None,
        choices=tuple(OPTIMIZERS),
        aliases=("Adam_embedding_optimizer adam", "Adam_MLP_optimizer adam")
    )
    adagrad: bool = _optimization(
        "short for --optimizer rowwise_adagrad, as in TorchRec's example", False,
        excludes=("optimizer",)
    )
    eps: float | None = _optimization(
        "epsilon of Adagrad and Adam (default: depends on optimizer and global batch)", None,
        above=0
    )
    embedding_l2: float | None = _optimization(
        "L2 regularization of the tables: the loss grows by X/2 times the sum of their squared "
        "weights (default: chosen on valid, or 0)", None, minimum=0,
        aliases=("embedding_regularizer",)
    )
    weight_decay: float = _optimization(
        "L2 regularization of the matrices of the dense layers: the loss grows by X/2 times the "
        "sum of their squared weights", 0.0, minimum=0,
        aliases=("net_regularizer",)
    )
    tune: str | None = _optimization(
        "search model, layers, regularization and learning rates with Optuna on valid for this "
        "long, such as 20m or 8h, then use the best. Settings that are given are not searched; "
        "--model is searched only if it is the default", None, needs="--mode train",
        metavar="DURATION", excludes=("continue_from", "load_checkpoint_path")
    )
    change_lr: bool = _optimization(
        "change the learning rate at --lr_change_point", False, needs="--learning_rate"
    )
    lr_change_point: float = _optimization(
        "share of all steps, over all epochs, after which the learning rate changes", 0.80,
        minimum=0, maximum=1, needs="--change_lr"
    )
    lr_after_change_point: float = _optimization(
        "learning rate after --lr_change_point", 3.0, above=0, needs="--change_lr"
    )
    lr_warmup_steps: int | None = _optimization(
        "number of steps over which the learning rate grows from 0 (default: 5 % of an epoch, 10 "
        "to 200; none with --continue_from or --change_lr)", None, minimum=0,
        aliases=("warmup_steps",)
    )
    dense_decay: float | None = _optimization(
        "share of all steps, at the end of training, over which the dense layers' learning rate "
        "falls to 0; with sgd and adam the tables' rate falls, too (default: 0.5; 0 with "
        "--continue_from or another schedule)", None, minimum=0, maximum=1
    )
    lr_decay_start: int = _optimization(
        "step at which the learning rate begins to decay", 0, minimum=0, needs="--lr_decay_steps",
        aliases=("decay_start", "decay_start_step")
    )
    lr_decay_steps: int = _optimization(
        "number of steps of the decay; 0: no decay", 0, minimum=0,
        aliases=("decay_steps",)
    )

    amp: bool = _speed(
        "compute the dense layers in bfloat16; weights stay float32", False,
        aliases=("fp16", "use_mixed_precision")
    )
    allow_tf32: bool = _speed(
        "use TensorFloat-32 for matrix products (GPUs)", False,
        aliases=("enable_tf32_compute",)
    )
    compile_dense: bool = _speed(
        "compile the dense layers with torch.compile; on GPUs with CUDA graphs", False,
        aliases=("cuda_graphs",)
    )
    table_precision: str = _speed(
        "type of the tables' weights; fp16 halves their memory, with stochastic rounding on GPUs; "
        "optimizer state stays fp32", "fp32", choices=("fp32", "fp16")
    )
    strict_gpu: bool = _speed(
        "fail instead of warning if the GPU code gives other results than the CPU code at the "
        "start", False
    )
    cpu_decoding: bool = _speed("decode parquet on the CPU even if libcudf can do it", False)

    sharding: str | None = _sharding(
        "sharding type of every table; auto: TorchRec's planner chooses table-wise or row-wise; "
        "small tables are data_parallel with --embedding_l2, and with adam on CPUs (default: "
        "auto)", None,
        choices=("auto", "table_wise", "row_wise", "column_wise", "data_parallel"),
        aliases=("sharding_plan",)
    )
    hbm_gib: float | None = _sharding(
        "memory per rank, in GiB, for the sharding plan (default: the device's memory)", None,
        above=0, aliases=("memory_cap_for_embedding",)
    )
    comm_precision: str = _sharding(
        "type of embeddings and gradients when they are sent between ranks", "fp32",
        choices=("fp32", "fp16", "bf16")
    )
    plan_only: int | None = _sharding(
        "print the sharding plan for this many GPUs with --hbm_gib each and stop; needs no GPU",
        None, minimum=1
    )

    throughput_check_freq_within_epoch: int | None = _reporting(
        "number of steps between two progress lines; the end of an epoch adds one (default: a "
        "twentieth of an epoch, at most 1000)", None, minimum=1,
        aliases=("print_freq", "display_interval")
    )
    validation_freq_within_epoch: int | None = _reporting(
        "number of steps between two evaluations of valid; the end of an epoch adds one; test is "
        "evaluated once, at the end (default: a quarter of an epoch, at most 10000)", None,
        minimum=1, aliases=("test_freq", "eval_interval")
    )
    benchmark_warmup_steps: int = _reporting(
        "number of initial steps that the final throughput excludes", 0, minimum=0
    )
    gauc_column: str | None = _reporting(
        "id column, such as the user, for GAUC: evaluations also report the mean AUROC within the "
        "rows of each id", None, metavar="NAME"
    )
    boosted_trees: bool = _reporting(
        "fit boosted trees to training rows for comparison, if LightGBM is installed", True
    )
    log_path: str | None = _reporting(
        "directory for metrics.jsonl (appended), settings.json and training.html (default: "
        f"CHECKPOINT_DIR/log, or {LOGS}/DATE-TIME)", None, metavar="PATH"
    )
    json: bool = _reporting(
        "print the result as a JSON object on standard output, for programs", False
    )
    tensorboard: bool = _reporting(
        "write TensorBoard's event files to the log directory", False, needs="--mode train"
    )
    profile: bool = _reporting(
        "write torch.profiler's trace of ten steps to the log directory", False,
        needs="--mode train"
    )

    save_checkpoint_path: str | None = _checkpoints(
        "directory for the checkpoint that is written at the end", None, metavar="PATH",
        needs="--mode train",
        aliases=("output_dir",)
    )
    keep: int | None = _checkpoints(
        "how many of the newest checkpoints to keep: in --checkpoint_dir (default: 3), and of "
        "--save_checkpoint_path and the checkpoints next to it that it continues (default: all)",
        None, minimum=1
    )
    load_checkpoint_path: str | None = _checkpoints(
        "checkpoint whose weights to start from, or to test", None, metavar="PATH"
    )
    continue_from: str | None = _checkpoints(
        "checkpoint, or another run's --checkpoint_dir, whose weights and optimizer state to start "
        "from; it may have smaller tables, of an earlier generation of the data", None,
        metavar="PATH", excludes=("load_checkpoint_path",)
    )
    checkpoint_dir: str | None = _checkpoints(
        "directory for the checkpoints written during training; each run needs its own", None,
        metavar="PATH", needs="--mode train"
    )
    checkpoint_freq: int | None = _checkpoints(
        "number of steps between two checkpoints (default: as between two evaluations of valid)",
        None, minimum=1, needs="--checkpoint_dir"
    )
    resume: bool = _checkpoints(
        "continue from the newest checkpoint in --checkpoint_dir, if it has any", False,
        needs="--checkpoint_dir"
    )
    # fmt: on
