"""The sharding plan: which table lies where, cut how, computed by which kernel.

No table is ever data-parallel: TorchRec trains such tables with the optimizer of the dense layers,
whatever optimizer was asked for, and its planner would choose by world size and batch size.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
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
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    KernelConfig,
    PlannerError,
    ShardingOption,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ShardingPlan, ShardingType

from clicklog.errors import BadInputError, SettingsError
from clicklog.schema import SCHEMA_FILE, TableSchema
from dlrm.config import ModelConfig, model_config
from dlrm.model import TrainModel, build_dlrm
from dlrm.optim.default_rates import with_default_rates
from dlrm.optim.optimizers import fuse_table_optimizer
from dlrm.settings.fields import SHARDINGS
from dlrm.settings.train_settings import TrainSettings

GIB = 1024**3

#: Kinds of sharding for ``auto``: those under which every fused optimizer computes the same as on
#: one rank. Not column-wise: each column shard would keep a row-wise Adagrad moment of its own,
#: and FBGEMM's CPU backward takes many times as long on tables cut into columns.
_AUTO = [
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
]
#: TorchRec's estimates for row-wise are made for GPUs; on a CPU they choose it for tiny tables.
_AUTO_CPU = [ShardingType.TABLE_WISE.value]
_FUSED = EmbeddingComputeKernel.FUSED.value
_UVM = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
KERNELS = (_FUSED, _UVM)
#: Of the GPUs that are planned for, unless --hbm_gib says otherwise.
DEFAULT_HBM_GIB = 80.0
GPUS_PER_MACHINE = 8
#: Share of a rank's memory that is not for tables: dense layers, activations, batches.
_RESERVED = 0.25


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What the plan is for.

    Attributes:
        world_size, local_world_size: ranks, and ranks per machine.
        device: "cuda" or "cpu".
        memory: bytes per rank: of its GPU, or its share of main memory.
        host_memory: bytes of main memory per rank.
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
        table: its name.
        rows, dim: its size.
        sharding, kernel: kind of sharding, compute kernel.
        ranks: of its shards, in order.
        gpu, host: bytes of each shard in GPU and in main memory: weights, optimizer state, buffers.
    """

    table: str
    rows: int
    dim: int
    sharding: str
    kernel: str
    ranks: tuple[int, ...]
    gpu: tuple[int, ...]
    host: tuple[int, ...]


class Sharder(EmbeddingBagCollectionSharder):
    """Offers every kind of sharding on every device; TorchRec has no row-wise on a CPU."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Kinds of sharding; :func:`make_plan` narrows them for each table."""
        return [*_AUTO, ShardingType.COLUMN_WISE.value]


def sharder(settings: TrainSettings) -> Sharder:
    """The sharder, with codecs for what travels between ranks."""
    if settings.comm_precision == "fp32":
        return Sharder()
    precision = CommType(settings.comm_precision)
    config = QCommsConfig(forward_precision=precision, backward_precision=precision)
    return Sharder(qcomm_codecs_registry=get_qcomm_codecs_registry(config))


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
        model: with its tables on the meta device, and their optimizer attached.
        config: its shape.
        settings: kinds, kernels, batch size.
        hardware: what to plan for.
        group: plan on its rank 0 and share the plan (collective); None: plan in this process.

    Returns:
        The plan, and its tables in order (empty where another process planned).

    Raises:
        SettingsError: the tables do not fit, or a constraint makes no sense.
        BadInputError: the sharding file cannot be read.
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
    sharders = [sharder(settings)]
    try:
        if group is None:
            plan = planner.plan(model, sharders)
        else:
            plan = planner.collective_plan(model, sharders, group)
    except PlannerError as error:
        gib = sum(config.num_embeddings) * config.embedding_dim * 4 / GIB
        reason = str(error).strip().splitlines()[0]
        raise SettingsError(
            f"no plan puts the {len(config.table_names)} tables ({gib:.1f} GiB of weights) on "
            f"{hardware.world_size} rank(s) with {hardware.memory / GIB:.1f} GiB each: {reason}",
            "more ranks, a smaller --embedding_dim, or tables capped by the ETL "
            "(--max_table_size, --freq_threshold)",
        ) from error
    return plan, [_table_plan(option) for option in kept.options]


def gib_per_rank(tables: list[TablePlan], hardware: Hardware) -> list[float]:
    """GiB that the tables take in each rank's memory: of its GPU, or main memory without GPUs."""
    sums = [0] * hardware.world_size
    for one in tables:
        sizes = one.gpu if hardware.device == "cuda" else one.host
        for rank, size in zip(one.ranks, sizes, strict=True):
            sums[rank] += size
    return [size / GIB for size in sums]


def plan_text(tables: list[TablePlan], hardware: Hardware) -> str:
    """A plan as a table, with GiB per rank."""
    width = max(len(one.table) for one in tables)
    lines = [
        f"{'table':{width}} {'rows':>13} {'dim':>4} {'GPU GiB':>9} {'host GiB':>9}  "
        f"{'sharding':14} {'kernel':17} ranks"
    ]
    for one in tables:
        ranks = ",".join(map(str, sorted(set(one.ranks))))
        lines.append(
            f"{one.table:{width}} {one.rows:13,} {one.dim:4} {sum(one.gpu) / GIB:9.3f} "
            f"{sum(one.host) / GIB:9.3f}  {one.sharding:14} {one.kernel:17} {ranks}"
        )
    usable = hardware.memory * (1 - _RESERVED) / GIB
    lines.append(
        "GiB per rank: "
        + " ".join(f"{gib:.2f}" for gib in gib_per_rank(tables, hardware))
        + f"; each has {hardware.memory / GIB:.1f}, of which {usable:.1f} are for tables"
    )
    return "\n".join(lines)


class _KeepPlan(EmbeddingStats):
    """Keeps what the planner chose, in place of its own report."""

    def __init__(self) -> None:
        self.options: list[ShardingOption] = []

    def log(self, *args: Any, best_plan: list[ShardingOption], **kwargs: Any) -> None:
        """Called by the planner."""
        self.options = best_plan


def _table_plan(option: ShardingOption) -> TablePlan:
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
    trainer = TrainerConfig(
        world_size=hardware.world_size,
        local_world_size=hardware.local_world_size,
        hbm_cap_bytes=hardware.memory if cuda else None,
        ddr_cap_bytes=hardware.host_memory if cuda else hardware.memory,
    )
    return TopologyFactory.create_topology(
        trainer_config=trainer, kernel_config=KernelConfig(compute_device=hardware.device)
    )


def _constraints(
    config: ModelConfig, settings: TrainSettings, hardware: Hardware
) -> dict[str, ParameterConstraints]:
    chosen = _read_file(settings.sharding_file, config) if settings.sharding_file else {}
    constraints = {}
    for feature, table, rows in zip(
        config.categorical, config.table_names, config.num_embeddings, strict=True
    ):
        one = chosen.get(feature, {})
        sharding = one.get("sharding", settings.sharding)
        if sharding == "row_wise" and _has_empty_shards(rows, hardware):
            sharding = "table_wise"
        kernels = list(KERNELS) if hardware.device == "cuda" else [_FUSED]
        if "kernel" in one:
            if one["kernel"] not in kernels:
                raise SettingsError(
                    f"{settings.sharding_file}: {feature}: kernel {one['kernel']!r} on a "
                    f"{hardware.device}",
                    f"one of {', '.join(kernels)}",
                )
            kernels = [one["kernel"]]
        # the width of a column shard; FBGEMM needs multiples of 4
        width = max(4, math.ceil(config.embedding_dim / hardware.world_size / 4) * 4)
        auto = _AUTO if hardware.device == "cuda" else _AUTO_CPU
        constraints[table] = ParameterConstraints(
            sharding_types=auto if sharding == "auto" else [sharding],
            compute_kernels=kernels,
            min_partition=width if sharding == "column_wise" else None,
        )
    return constraints


def _has_empty_shards(rows: int, hardware: Hardware) -> bool:
    """Whether a rank would get no row of a table; FBGEMM's CPU kernels read beyond such a one."""
    each = -(-rows // hardware.world_size)
    return hardware.device == "cpu" and each * (hardware.world_size - 1) >= rows > 0


def _read_file(path: str, config: ModelConfig) -> dict[str, dict[str, str]]:
    """``[cat_0]``, ``sharding = "row_wise"``, ``kernel = "fused_uvm_caching"`` …, both optional."""
    try:
        value = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInputError(
            f"{path}: cannot be read as a sharding file: {error}", "see docs/training.md"
        ) from error
    for feature, one in value.items():
        if feature not in config.categorical:
            raise SettingsError(
                f"{path}: no categorical column {feature!r}",
                f"the data has {config.categorical[0]} … {config.categorical[-1]}",
            )
        if not isinstance(one, dict) or not set(one) <= {"sharding", "kernel"}:
            raise SettingsError(f"{path}: {feature}: {one!r}", "give sharding = and kernel = only")
        if one.get("sharding", "auto") not in SHARDINGS:
            raise SettingsError(
                f"{path}: {feature}: sharding {one['sharding']!r}", f"one of {', '.join(SHARDINGS)}"
            )
    return value


def plan_only(settings: TrainSettings) -> str:
    """What the plan would be on ``--world_size`` GPUs of ``--hbm_gib``; needs neither.

    Machines have 8 GPUs each, and as much main memory per GPU as the GPU has. Without data at
    ``--binary_path``, ``--num_embeddings_per_feature`` says how many tables there are.

    Raises:
        SettingsError: the tables do not fit.
        BadInputError: there are no data, and no sizes either.
    """
    sizes = settings.num_embeddings_per_feature
    if sizes and not (Path(settings.binary_path) / SCHEMA_FILE).exists():
        names = tuple(f"cat_{i}" for i in range(len(sizes)))
        schema = TableSchema("label", tuple(f"int_{i}" for i in range(13)), names, sizes)
    else:
        schema = TableSchema.read(settings.binary_path)
    config = model_config(settings, schema)
    ranks = settings.world_size or 1
    memory = int((settings.hbm_gib or DEFAULT_HBM_GIB) * GIB)
    hardware = Hardware(ranks, min(ranks, GPUS_PER_MACHINE), "cuda", memory, memory)
    model = TrainModel(build_dlrm(config), ranks)
    settings = with_default_rates(settings, config, ranks * settings.batch_size, 1)
    fuse_table_optimizer(model, settings)
    _, tables = make_plan(model, config, settings, hardware)
    return f"{plan_text(tables, hardware)}\n{fit_text(tables)}"


def fit_text(tables: list[TablePlan]) -> str:
    """Whether the tables fit into the ranks' own memory, and what happens to those that do not."""
    cached = [one.table for one in tables if one.kernel == _UVM]
    if not cached:
        return "all tables fit"
    return (
        f"{len(cached)} of {len(tables)} tables do not fit into GPU memory: they stay in main "
        f"memory, and FBGEMM caches them on the GPU: {', '.join(cached)}"
    )
