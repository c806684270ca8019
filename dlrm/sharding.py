"""Sharding: a plan for the tables, and the model spread over the ranks by it.

No table is ever data-parallel: TorchRec trains such tables with the optimizer of the dense layers,
whatever optimizer was asked for, and its planner would choose by world size and batch size.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    KernelConfig,
    PlannerError,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardingType

from clicklog.errors import SettingsError
from dlrm.config import ModelConfig
from dlrm.distributed import Group
from dlrm.model import TrainModel, fill_table
from dlrm.settings import TrainSettings

log = logging.getLogger(__name__)

#: Kinds of sharding offered to the planner: those under which every fused optimizer computes the
#: same as on one rank. Not column-wise: each column shard would keep a row-wise Adagrad moment of
#: its own, and FBGEMM's CPU backward takes many times as long on tables cut into columns.
SHARDING_TYPES = [
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
]

GIB = 1024**3


def shard_model(
    model: TrainModel, config: ModelConfig, settings: TrainSettings, group: Group
) -> DistributedModelParallel:
    """Plan, shard and initialize the model on all ranks (collective).

    ``model``'s tables must be on the meta device and have their optimizer already
    (:func:`dlrm.optimizers.fuse_table_optimizer`).

    Raises:
        SettingsError: the tables do not fit into the ranks' memory.
    """
    sharders = [EmbeddingBagCollectionSharder()]
    planner = EmbeddingShardingPlanner(
        topology=_topology(group),
        batch_size=settings.batch_size,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.25),
        constraints={
            table: ParameterConstraints(
                sharding_types=SHARDING_TYPES, compute_kernels=[EmbeddingComputeKernel.FUSED.value]
            )
            for table in config.table_names
        },
    )
    try:
        plan = planner.collective_plan(model, sharders, torch.distributed.GroupMember.WORLD)
    except PlannerError as error:
        gib = sum(config.num_embeddings) * config.embedding_dim * 4 / GIB
        raise SettingsError(
            f"no plan puts the {len(config.table_names)} tables ({gib:.1f} GiB of weights) on "
            f"{group.world_size} rank(s) with {_memory(group) / GIB:.1f} GiB each: "
            f"{str(error).strip().splitlines()[0]}",
            "more ranks, a smaller --embedding_dim, or tables capped by the ETL "
            "(--max_table_size, --freq_threshold)",
        ) from error
    _log_plan(plan, config, group)
    sharded = DistributedModelParallel(
        module=model,
        device=group.device,
        env=ShardingEnv.from_process_group(torch.distributed.GroupMember.WORLD),
        plan=plan,
        sharders=sharders,
    )
    _fill_tables(sharded, config, settings.seed)
    return sharded


def _topology(group: Group) -> Topology:
    trainer = TrainerConfig(
        world_size=group.world_size,
        local_world_size=group.local_world_size,
        **{"hbm_cap_bytes" if group.device.type == "cuda" else "ddr_cap_bytes": _memory(group)},
    )
    kernel = KernelConfig(compute_device=group.device.type)
    return TopologyFactory.create_topology(trainer_config=trainer, kernel_config=kernel)


def _memory(group: Group) -> int:
    """Bytes a rank has for its tables: of its GPU, or its share of the machine's memory."""
    if group.device.type == "cuda":
        return torch.cuda.get_device_properties(group.device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // group.local_world_size


def _fill_tables(model: DistributedModelParallel, config: ModelConfig, seed: int) -> None:
    rows = dict(zip(config.table_names, config.num_embeddings, strict=True))
    for name, value in model.state_dict().items():
        if not isinstance(value, ShardedTensor):
            continue
        table = name.split(".")[-2]
        for shard in value.local_shards():
            fill_table(
                shard.tensor,
                table,
                rows[table],
                config.embedding_dim,
                seed,
                tuple(shard.metadata.shard_offsets),
            )


def _log_plan(plan: ShardingPlan, config: ModelConfig, group: Group) -> None:
    if group.rank:
        return
    kinds: Counter[str] = Counter()
    weights = [0.0] * group.world_size
    for module in plan.plan.values():
        for sharding in module.values():
            kinds[sharding.sharding_type] += 1
            for shard in sharding.sharding_spec.shards:
                weights[shard.placement.rank()] += math.prod(shard.shard_sizes) * 4 / GIB
    log.info(
        "%d tables, %s rows × %d: %s; GiB per rank: %s",
        len(config.table_names),
        f"{sum(config.num_embeddings):,}",
        config.embedding_dim,
        ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
        " ".join(f"{gib:.2f}" for gib in weights),
    )
