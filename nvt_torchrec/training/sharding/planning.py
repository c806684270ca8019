"""The sharding plan: the ranks, the kind of sharding and the kernel of each table.

Tables are data-parallel all together or not at all (:func:`choose_sharding`), and then have a
``torch.optim`` optimizer of their own. TorchRec's planner would choose some of them by world size
and batch size, and train these with the optimizer of the dense layers.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
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
from nvt_torchrec.formats.schema import SCHEMA_FILE, TableSchema
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import load_build
from nvt_torchrec.training.data.choices import choose_sizes
from nvt_torchrec.training.optim.combined import fuse_table_optimizer
from nvt_torchrec.training.optim.learning_rates import fill_rates
from nvt_torchrec.training.settings.fields import SIZES
from nvt_torchrec.training.settings.optimizers import OPTIMIZERS
from nvt_torchrec.training.settings.train_settings import TrainSettings, fill_sizes
from nvt_torchrec.training.sharding.model_config import model_config
from nvt_torchrec.training.sharding.train_model import TrainModel, build_model

GIB = 1024**3

#: The kinds of sharding for ``auto``: those under which every fused optimizer computes the same as
#: on one rank. Not column-wise: each column shard would keep a row-wise Adagrad moment of its own,
#: and FBGEMM's CPU backward takes many times as long on column shards.
_AUTO = [
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
]
#: TorchRec's cost estimates are for GPUs; on a CPU they choose row-wise for tiny tables.
_AUTO_CPU = [ShardingType.TABLE_WISE.value]
_WHOLE = ShardingType.DATA_PARALLEL.value
_FUSED = EmbeddingComputeKernel.FUSED.value
_UVM = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
#: The most weights of tables that each rank has whole by default: a step takes time for each.
_MAX_WHOLE = 1 << 22
#: The hardware of --plan_only, unless --hbm_gib gives another memory per GPU.
DEFAULT_HBM_GIB = 80.0
GPUS_PER_MACHINE = 8
#: FBGEMM's backward on GPUs numbers the rows of all tables of a rank in the type of the ids.
_MAX_INT32_ROWS = 2**31 - 1
#: The share of a rank's memory that is not for tables: dense layers, activations, batches.
_RESERVED = 0.25


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The machines that a plan is for.

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
        rows: Its rows.
        dim: Its width.
        sharding: The kind of sharding.
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
    """Return the settings with tables that are data-parallel, where ``--sharding`` leaves it open.

    A small table is trained whole where every weight has a gradient in each step: an L2
    regularization, or Adam's, which moves weights on after their row was seen.

    Raises:
        SettingsError: The device, or the kind of sharding, does not go with the optimizer.
    """
    name = settings.table_optimizer
    kind = OPTIMIZERS[name]
    weights = sum(config.tables.values()) * config.embedding_dim
    possible = kind.WHOLE and settings.table_precision == "fp32"
    fused = kind.ON_CPU or device != "cpu"
    if settings.sharding == _WHOLE:
        if not possible:
            raise SettingsError(
                f"--sharding {_WHOLE} with --optimizer {name} and --table_precision "
                f"{settings.table_precision}: torch.optim does not train such tables",
                "give --optimizer adagrad and --table_precision fp32, or leave --sharding out",
            )
        return settings
    chosen = settings.sharding or "auto"
    needed = settings.embedding_l2 or not fused
    if chosen == "auto" and needed and possible and weights <= _MAX_WHOLE:
        chosen = _WHOLE
    if chosen != _WHOLE and not fused:
        raise SettingsError(
            f"--optimizer {name}: on CPUs it trains tables of up to {_MAX_WHOLE:,} weights, these "
            f"have {weights:,}",
            f"give --optimizer adagrad, train on a GPU, or give --sharding {_WHOLE}, whose steps "
            "take time for every row",
        )
    return dataclasses.replace(settings, sharding=chosen)  # type: ignore[call-arg]


class Sharder(EmbeddingBagCollectionSharder):
    """Offer every kind of sharding on every device; TorchRec offers no row-wise on a CPU."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the kinds of sharding, which :func:`make_plan` restricts for each table."""
        return [*_AUTO, ShardingType.COLUMN_WISE.value, _WHOLE]


def sharder(
    settings: TrainSettings, config: ModelConfig, plan: ShardingPlan | None = None
) -> Sharder:
    """Return the sharder: how tables are read, and codecs for the messages between ranks.

    Args:
        settings: The settings of the run.
        config: The model's shape.
        plan: The plan, once there is one.
    """
    tables = [table for part in plan.plan.values() for table in part.values()] if plan else []
    cached = any(table.compute_kernel == _UVM for table in tables)
    few = sum(config.tables.values()) <= _MAX_INT32_ROWS and not cached
    ids = torch.int32 if few else torch.int64
    lookups: dict[str, Any] = {
        "embedding_table_index_type": ids,
        "embedding_table_offset_type": ids,
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
        hardware: The machines to plan for.
        group: The process group whose rank 0 plans for all (collective). None: this process plans
            for itself.

    Returns:
        The plan, and its tables in order (empty on ranks other than 0).

    Raises:
        SettingsError: The tables do not fit.
    """
    constraints = _constraints(config, settings, hardware)
    kept = _KeepPlan()
    planner = EmbeddingShardingPlanner(
        topology=_topology(hardware),
        batch_size=settings.batch_size,
        storage_reservation=FixedPercentageStorageReservation(percentage=_RESERVED),
        constraints=constraints,
        stats=kept,
    )
    sharders = [sharder(settings, config)]
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
            f"no plan puts the {len(config.tables)} tables ({gib:.1f} GiB of weights) on "
            f"{hardware.world_size} rank(s) with {hardware.memory / GIB:.1f} GiB each: {reason}",
            "use more ranks, --table_precision fp16, a smaller --embedding_dim, or smaller tables "
            "(the ETL's --max_table_size and --freq_threshold)",
        ) from error
    return plan, [_table_plan(option) for option in kept.options]


def gib_per_rank(tables: list[TablePlan], hardware: Hardware) -> list[float]:
    """Return the GiB of the tables on each rank: in GPU memory, or in main memory without GPUs."""
    sums = [0] * hardware.world_size
    for table in tables:
        sizes = table.gpu if hardware.device == "cuda" else table.host
        for rank, size in zip(table.ranks, sizes, strict=True):
            sums[rank] += size
    return [size / GIB for size in sums]


def plan_text(tables: list[TablePlan], hardware: Hardware) -> str:
    """Format a plan as text: a line per table, and the GiB per rank."""
    width = max(len(table.table) for table in tables)
    lines = [
        f"{'table':{width}} {'rows':>13} {'dim':>4} {'GPU GiB':>9} {'host GiB':>9}  "
        f"{'sharding':14} {'kernel':17} ranks"
    ]
    for table in tables:
        ranks = ",".join(map(str, sorted(set(table.ranks))))
        lines.append(
            f"{table.table:{width}} {table.rows:13,} {table.dim:4} {sum(table.gpu) / GIB:9.3f} "
            f"{sum(table.host) / GIB:9.3f}  {table.sharding:14} {table.kernel:17} {ranks}"
        )
    usable = hardware.memory * (1 - _RESERVED) / GIB
    lines.append(
        "GiB per rank: "
        + " ".join(f"{gib:.2f}" for gib in gib_per_rank(tables, hardware))
        + f"; each has {hardware.memory / GIB:.1f}, of which {usable:.1f} are for tables"
    )
    return "\n".join(lines)


class _KeepPlan(EmbeddingStats):
    """Keep the planner's choices, instead of printing its report."""

    def __init__(self) -> None:
        self.options: list[planner_types.ShardingOption] = []

    def log(self, *args: Any, best_plan: list[planner_types.ShardingOption], **kwargs: Any) -> None:
        """Keep the best plan; the planner calls this."""
        self.options = best_plan


def _table_plan(option: planner_types.ShardingOption) -> TablePlan:
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


def _topology(hardware: Hardware) -> Topology:
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


def _constraints(
    config: ModelConfig, settings: TrainSettings, hardware: Hardware
) -> dict[str, ParameterConstraints]:
    cuda = hardware.device == "cuda"
    # the width of a column shard; FBGEMM needs multiples of 4
    width = max(4, math.ceil(config.embedding_dim / hardware.world_size / 4) * 4)
    means = {*config.features} - {*config.categorical, *config.lists}
    features, constraints = config.features_of_tables, {}
    for table, rows in config.tables.items():
        sharding = settings.sharding or "auto"
        if sharding == "row_wise" and _has_empty_shards(rows, hardware):
            sharding = "table_wise"
        auto = _AUTO if cuda else _AUTO_CPU
        kernels = [_FUSED, _UVM] if cuda else [_FUSED]
        if sharding == _WHOLE:
            kernels = [EmbeddingComputeKernel.DENSE.value]
        constraints[table] = ParameterConstraints(
            sharding_types=auto if sharding == "auto" else [sharding],
            compute_kernels=kernels,
            min_partition=width if sharding == "column_wise" else None,
            pooling_factors=[
                float(config.max_events if name in means else 1) for name in features[table]
            ],
            output_dtype=DataType.FP32 if settings.table_precision == "fp16" else None,
        )
    return constraints


def _has_empty_shards(rows: int, hardware: Hardware) -> bool:
    """Return whether a rank would get no row of a table; FBGEMM's CPU kernels fail on that."""
    each = -(-rows // hardware.world_size)
    return hardware.device == "cpu" and each * (hardware.world_size - 1) >= rows > 0


def plan_only(settings: TrainSettings) -> str:
    """Return the plan for ``--plan_only`` GPUs of ``--hbm_gib``, as text, without using a GPU.

    It assumes machines of 8 GPUs, with as much main memory per GPU as GPU memory. Without data at
    ``--binary_path``, the tables are those of ``--num_embeddings_per_feature``.

    Raises:
        SettingsError: The tables do not fit.
        BadInputError: There are neither data nor sizes.
    """
    sizes = settings.num_embeddings_per_feature
    ranks = settings.plan_only or 1
    if sizes and not (Path(settings.binary_path) / SCHEMA_FILE).exists():
        settings = fill_sizes(settings, SIZES["large"].min_rows, ranks)
        names = tuple(f"cat_{i}" for i in range(len(sizes)))
        schema = TableSchema(("label",), tuple(f"int_{i}" for i in range(13)), names, sizes)
    else:
        schema = TableSchema.read(settings.binary_path)
        settings = choose_sizes(settings, schema, ranks)
    config = model_config(settings, schema)
    settings = choose_sharding(settings, config, "cuda")
    memory = int((settings.hbm_gib or DEFAULT_HBM_GIB) * GIB)
    hardware = Hardware(ranks, min(ranks, GPUS_PER_MACHINE), "cuda", memory, memory)
    build = load_build(settings.model)
    unsharded = build_model(config, tables=settings.table_precision, build=build)
    model = TrainModel(unsharded, ranks)
    settings = fill_rates(settings, config, ranks * settings.batch_size, 1)
    fuse_table_optimizer(unsharded.sparse_arch, settings)
    _, tables = make_plan(model, config, settings, hardware)
    return f"{plan_text(tables, hardware)}\n{fit_text(tables)}"


def fit_text(tables: list[TablePlan]) -> str:
    """Describe whether the tables fit into GPU memory, and what happens to those that do not."""
    cached = [table.table for table in tables if table.kernel == _UVM]
    if not cached:
        return "all tables fit"
    return (
        f"{len(cached)} of {len(tables)} tables do not fit into GPU memory: they stay in main "
        f"memory, and FBGEMM caches them on the GPU: {', '.join(cached)}"
    )
