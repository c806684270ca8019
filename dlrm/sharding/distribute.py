"""Shard the model over the ranks by its plan, and initialize its tables."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.dlrm.config import ModelConfig
from nvt_torchrec.dlrm.launch.distributed import Group
from nvt_torchrec.dlrm.model import TrainModel, fill_table
from nvt_torchrec.dlrm.optim.adam import leave_to_table_adam
from nvt_torchrec.dlrm.optim.combined import on_cpu_adam
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings
from nvt_torchrec.dlrm.sharding.planning import (
    GIB,
    Hardware,
    TablePlan,
    fit_text,
    gib_per_rank,
    make_plan,
    sharder,
)

log = logging.getLogger(__name__)


def shard_model(
    model: TrainModel,
    config: ModelConfig,
    settings: TrainSettings,
    group: Group,
    held: int = 0,
) -> tuple[DistributedModelParallel, dict[str, Any]]:
    """Plan, shard and initialize the model on all ranks (collective).

    ``held`` are the bytes of each GPU that loaders take; a plan for ``--hbm_gib`` leaves it to the
    caller to subtract them.

    The tables of ``model`` must be on the meta device, with their optimizer
    (:func:`dlrm.optim.combined.fuse_table_optimizer`).

    Returns:
        The sharded model, and on rank 0 the plan, JSON-ready: ``tables`` (the fields of
        :class:`dlrm.sharding.planning.TablePlan`), ``gib_per_rank``, ``memory_gib`` of a rank.

    Raises:
        SettingsError: The tables do not fit into the ranks' memory.
    """
    world = torch.distributed.GroupMember.WORLD
    hardware = _hardware(settings, group, held)
    plan, tables = make_plan(model, config, settings, hardware, group=world)
    if group.rank == 0:
        _log_plan(tables, hardware, settings)
    if on_cpu_adam(settings, group.device):
        leave_to_table_adam(model)
    sharded = DistributedModelParallel(
        module=model,
        device=group.device,
        env=ShardingEnv.from_process_group(world),
        plan=plan,
        sharders=[sharder(settings, config, plan)],
        init_data_parallel=group.world_size > 1,  # DDP for the dense layers
    )
    _fill_tables(sharded, config, settings.seed)
    described = {
        "tables": [dataclasses.asdict(table) for table in tables],
        "gib_per_rank": gib_per_rank(tables, hardware),
        "memory_gib": hardware.memory / GIB,
    }
    return sharded, described


def _hardware(settings: TrainSettings, group: Group, held: int) -> Hardware:
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // group.local_world_size
    memory = host
    if group.device.type == "cuda":
        memory = torch.cuda.get_device_properties(group.device).total_memory
        if held >= memory:
            raise SettingsError(
                f"the loaders take {held / GIB:.1f} GiB of a GPU of {memory / GIB:.1f} GiB",
                "give --loader_memory, or row groups of fewer rows",
            )
        if group.rank == 0 and settings.hbm_gib is None:
            log.info("%.1f GiB of each GPU are for the loaders", held / GIB)
        memory -= held
    if settings.hbm_gib is not None:
        memory = int(settings.hbm_gib * GIB)
    return Hardware(group.world_size, group.local_world_size, group.device.type, memory, host)


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


def _log_plan(tables: list[TablePlan], hardware: Hardware, settings: TrainSettings) -> None:
    kinds = Counter(table.sharding for table in tables)
    log.info(
        "%d tables, %s rows × %d: %s; GiB per rank: %s",
        len(tables),
        f"{sum(table.rows for table in tables):,}",
        tables[0].dim,
        ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
        " ".join(f"{gib:.2f}" for gib in gib_per_rank(tables, hardware)),
    )
    if any(sum(table.gpu) and sum(table.host) for table in tables):
        log.warning("%s", fit_text(tables))
    moments = settings.table_optimizer == "rowwise_adagrad"
    if moments and any(table.sharding == "column_wise" for table in tables):
        log.warning(
            "column-wise shards keep a row-wise Adagrad moment each: results depend on the plan"
        )
