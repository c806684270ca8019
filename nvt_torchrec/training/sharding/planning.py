"""Plan the sharding: the ranks, the sharding type and the compute kernel of each table.

Either all tables are data-parallel or none is (:func:`choose_sharding`). Data-parallel tables have
their own ``torch.optim`` optimizer. TorchRec's planner alone would make some tables data-parallel,
depending on world size and batch size, and train them with the optimizer of the dense layers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner import types as planner_types
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import BoundsCheckMode, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import DataType

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.training.settings.optimizers import OPTIMIZERS
from nvt_torchrec.training.settings.train_settings import TrainSettings

GIB = 1024**3

#: The sharding types for ``auto``: with these, every fused optimizer computes the same as on one
#: rank. Column-wise is excluded: each column shard would keep its own row-wise Adagrad moment, and
#: FBGEMM's CPU backward takes many times as long on column shards.
_AUTO = [
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
]
#: TorchRec's cost estimates are for GPUs; on a CPU they choose row-wise for tiny tables.
_AUTO_CPU = [ShardingType.TABLE_WISE.value]
_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
#: The kernel of tables in the memory of their device.
FUSED = EmbeddingComputeKernel.FUSED.value
#: The kernel of tables in main memory that are cached on the GPU.
_CACHED = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
#: The largest number of weights, over all tables, with which tables are data-parallel by default:
#: in each step their optimizer spends time on every weight.
_MAX_DATA_PARALLEL_WEIGHTS = 1 << 22
#: FBGEMM's backward on GPUs numbers the rows of all tables of a rank in the type of the ids. With
#: more rows than this, the ids must be int64.
_MAX_INT32_ROWS = 2**31 - 1
#: The share of a rank's memory that is reserved for dense layers, activations and batches.
RESERVED = 0.25


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The hardware that a plan is for.

    Attributes:
        world_size: The number of ranks.
        local_world_size: The number of ranks per machine.
        device: "cuda" or "cpu".
        memory: The bytes of a rank's GPU, or of its share of main memory.
        host_memory: The bytes of main memory per rank.
    """

    world_size: int
    local_world_size: int
    device: str
    memory: int
    host_memory: int


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """One table in a plan.

    Attributes:
        table: The name of the table.
        rows: The number of its rows.
        dim: Its width.
        sharding: The sharding type.
        kernel: The compute kernel.
        ranks: The rank of each shard.
        gpu: The bytes of each shard in GPU memory: weights, optimizer state and buffers.
        host: The bytes of each shard in main memory.
    """

    table: str
    rows: int
    dim: int
    sharding: str
    kernel: str
    ranks: tuple[int, ...]
    gpu: tuple[int, ...]
    host: tuple[int, ...]


def choose_sharding(settings: TrainSettings, config: ModelConfig, device: str) -> TrainSettings:
    """Decide whether tables are data-parallel, unless ``--sharding`` says it.

    Small tables are data-parallel if each step changes every weight anyway: with L2 regularization,
    which gives every weight a gradient; or with an optimizer that FBGEMM does not support on CPUs,
    such as Adam, whose momentum moves a row's weights in later steps, too.

    Args:
        settings: The settings of the run.
        config: The model.
        device: "cuda" or "cpu".

    Returns:
        The settings with a value of ``sharding``.

    Raises:
        SettingsError: The optimizer cannot train such tables on the device.
    """
    name = settings.table_optimizer
    optimizer = OPTIMIZERS[name]
    weights = sum(config.tables.values()) * config.embedding_dim
    can_be_data_parallel = optimizer.DATA_PARALLEL and settings.table_precision == "fp32"
    can_be_sharded = optimizer.ON_CPU or device != "cpu"
    if settings.sharding == _DATA_PARALLEL:
        if not can_be_data_parallel:
            raise SettingsError(
                f"--sharding {_DATA_PARALLEL} with --optimizer {name} and --table_precision "
                f"{settings.table_precision}: torch.optim does not train such tables",
                "give --optimizer adagrad and --table_precision fp32, or leave --sharding out",
            )
        return settings
    chosen = settings.sharding or "auto"
    changes_every_weight = settings.embedding_l2 or not can_be_sharded
    is_small = weights <= _MAX_DATA_PARALLEL_WEIGHTS
    if chosen == "auto" and changes_every_weight and can_be_data_parallel and is_small:
        chosen = _DATA_PARALLEL
    if chosen != _DATA_PARALLEL and not can_be_sharded:
        raise SettingsError(
            f"--optimizer {name}: on CPUs it trains tables of at most "
            f"{_MAX_DATA_PARALLEL_WEIGHTS:,} weights, but these have {weights:,}",
            f"give --optimizer adagrad, train on a GPU, or give --sharding {_DATA_PARALLEL}, with "
            "which each step takes time for every row",
        )
    return dataclasses.replace(settings, sharding=chosen)  # type: ignore[call-arg]


class Sharder(EmbeddingBagCollectionSharder):
    """A sharder with all sharding types on every device; TorchRec's has no row-wise one on CPUs."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types, which :func:`make_plan` restricts for each table."""
        return [*_AUTO, ShardingType.COLUMN_WISE.value, _DATA_PARALLEL]


def make_sharder(
    settings: TrainSettings, config: ModelConfig, plan: ShardingPlan | None = None
) -> Sharder:
    """Make the sharder, which sets how tables are read and messages between ranks are encoded.

    Args:
        settings: The settings of the run.
        config: The model's shape.
        plan: The plan; None before it is made.
    """
    num_rows = sum(config.tables.values())
    fits_int32 = num_rows <= _MAX_INT32_ROWS and not _caches_tables(plan)
    id_type = torch.int32 if fits_int32 else torch.int64
    lookups: dict[str, Any] = {
        "embedding_table_index_type": id_type,
        "embedding_table_offset_type": id_type,
        "bounds_check_mode": BoundsCheckMode.NONE,  # the loader has checked the ids
    }
    if settings.table_precision == "fp16":
        lookups["stochastic_rounding"] = True
    if settings.comm_precision == "fp32":
        return Sharder(fused_params=lookups)
    precision = CommType(settings.comm_precision)
    codecs = QCommsConfig(forward_precision=precision, backward_precision=precision)
    registry = get_qcomm_codecs_registry(codecs)
    return Sharder(fused_params=lookups, qcomm_codecs_registry=registry)


def _caches_tables(plan: ShardingPlan | None) -> bool:
    """Return whether a plan keeps a table in main memory, with a cache on the GPU."""
    if plan is None:
        return False
    for tables in plan.plan.values():
        if any(table.compute_kernel == _CACHED for table in tables.values()):
            return True
    return False


def make_plan(
    model: nn.Module,
    config: ModelConfig,
    settings: TrainSettings,
    hardware: Hardware,
    *,
    group: torch.distributed.ProcessGroup | None = None,
) -> tuple[ShardingPlan, list[TablePlan]]:
    """Plan the tables of ``model``.

    Args:
        model: The model with its tables on the meta device, and their optimizer attached.
        config: The model's shape.
        settings: The settings of the run.
        hardware: The hardware to plan for.
        group: The process group whose rank 0 plans for all ranks (collective). Without it, this
            process plans for itself.

    Returns:
        The plan, and its tables in order (empty on ranks other than 0).

    Raises:
        SettingsError: The tables do not fit.
    """
    recorder = _PlanRecorder()
    planner = EmbeddingShardingPlanner(
        topology=_make_topology(hardware),
        batch_size=settings.batch_size,
        storage_reservation=FixedPercentageStorageReservation(percentage=RESERVED),
        constraints=_constrain_tables(config, settings, hardware),
        stats=recorder,
    )
    sharders = [make_sharder(settings, config)]
    try:
        if group is None:
            plan = planner.plan(model, sharders)
        else:
            plan = planner.collective_plan(model, sharders, group)
    except planner_types.PlannerError as error:
        width = 2 if settings.table_precision == "fp16" else 4
        gib = sum(config.tables.values()) * config.embedding_dim * width / GIB
        reason = str(error).strip().splitlines()[0]
        raise SettingsError(
            f"the {len(config.tables)} tables ({gib:.1f} GiB of weights) do not fit on "
            f"{hardware.world_size} rank(s) with {hardware.memory / GIB:.1f} GiB each: {reason}",
            "use more ranks, --table_precision fp16, a smaller --embedding_dim, or smaller tables "
            "(the ETL's --max_table_size and --freq_threshold)",
        ) from error
    return plan, [_describe_table(option) for option in recorder.options]


def sum_gib_per_rank(tables: list[TablePlan], hardware: Hardware) -> list[float]:
    """Return the GiB of tables on each rank, in GPU memory or, without GPUs, in main memory."""
    sums = [0] * hardware.world_size
    for table in tables:
        sizes = table.gpu if hardware.device == "cuda" else table.host
        for rank, size in zip(table.ranks, sizes, strict=True):
            sums[rank] += size
    return [size / GIB for size in sums]


class _PlanRecorder(EmbeddingStats):
    """Record the planner's choices instead of printing its report."""

    def __init__(self) -> None:
        self.options: list[planner_types.ShardingOption] = []

    def log(self, *args: Any, best_plan: list[planner_types.ShardingOption], **kwargs: Any) -> None:
        """Record the best plan; the planner calls this."""
        self.options = best_plan


def _describe_table(option: planner_types.ShardingOption) -> TablePlan:
    rows, dim = option.tensor.shape
    return TablePlan(
        table=option.name,
        rows=rows,
        dim=dim,
        sharding=option.sharding_type,
        kernel=option.compute_kernel,
        ranks=tuple(shard.rank for shard in option.shards),
        gpu=tuple(shard.storage.hbm for shard in option.shards),
        host=tuple(shard.storage.ddr for shard in option.shards),
    )


def _make_topology(hardware: Hardware) -> Topology:
    cuda = hardware.device == "cuda"
    trainer = planner_types.TrainerConfig(
        world_size=hardware.world_size,
        local_world_size=hardware.local_world_size,
        hbm_cap_bytes=hardware.memory if cuda else None,
        ddr_cap_bytes=hardware.host_memory if cuda else hardware.memory,
    )
    return planner_types.TopologyFactory.create_topology(
        trainer_config=trainer,
        kernel_config=planner_types.KernelConfig(compute_device=hardware.device),
    )


def _constrain_tables(
    config: ModelConfig, settings: TrainSettings, hardware: Hardware
) -> dict[str, ParameterConstraints]:
    """Return, by table, the sharding types and kernels that the planner may choose from."""
    cuda = hardware.device == "cuda"
    # FBGEMM needs column shards whose width is a multiple of 4.
    shard_width = max(4, math.ceil(config.embedding_dim / hardware.world_size / 4) * 4)
    # A history that is summed looks up many ids for a row; other features look up one.
    summed = {*config.features} - {*config.categorical, *config.lists}
    constraints = {}
    for table, features in config.features_of_tables.items():
        sharding = settings.sharding or "auto"
        if sharding == "row_wise" and _has_empty_shards(config.tables[table], hardware):
            sharding = "table_wise"
        sharding_types = [sharding]
        if sharding == "auto":
            sharding_types = _AUTO if cuda else _AUTO_CPU
        kernels = [FUSED, _CACHED] if cuda else [FUSED]
        if sharding == _DATA_PARALLEL:
            kernels = [EmbeddingComputeKernel.DENSE.value]
        pooling_factors = []
        for name in features:
            pooling_factors.append(float(config.max_events if name in summed else 1))
        constraints[table] = ParameterConstraints(
            sharding_types=sharding_types,
            compute_kernels=kernels,
            min_partition=shard_width if sharding == "column_wise" else None,
            pooling_factors=pooling_factors,
            output_dtype=DataType.FP32 if settings.table_precision == "fp16" else None,
        )
    return constraints


def _has_empty_shards(rows: int, hardware: Hardware) -> bool:
    """Return whether row-wise sharding gives a rank no rows on CPUs, where FBGEMM then fails."""
    rows_per_rank = math.ceil(rows / hardware.world_size)
    is_last_empty = rows_per_rank * (hardware.world_size - 1) >= rows > 0
    return hardware.device == "cpu" and is_last_empty


def describe_fit(tables: list[TablePlan]) -> str:
    """Describe whether the tables fit into GPU memory, and what happens to those that do not."""
    cached = [table.table for table in tables if table.kernel == _CACHED]
    if not cached:
        return "all tables fit"
    return (
        f"{len(cached)} of {len(tables)} tables do not fit into GPU memory: they stay in main "
        f"memory, and FBGEMM caches them on the GPU: {', '.join(cached)}"
    )
