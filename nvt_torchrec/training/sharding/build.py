"""Build the model of a run, shard it over the ranks by its plan, and make what trains it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import TrainPipelineSparseDist, dist_data
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import Build
from nvt_torchrec.training.baselines.regression import Regression, Start
from nvt_torchrec.training.data.choices import read_schema
from nvt_torchrec.training.data.loaders import Loader, TrainBatch
from nvt_torchrec.training.launch.distributed import Group
from nvt_torchrec.training.launch.run_state import RunState
from nvt_torchrec.training.optim import combined
from nvt_torchrec.training.settings.train_settings import TrainSettings
from nvt_torchrec.training.sharding.planning import (
    GIB,
    Hardware,
    TablePlan,
    fit_text,
    gib_per_rank,
    make_plan,
    sharder,
)
from nvt_torchrec.training.sharding.train_model import (
    LookupL2,
    StepOutput,
    TrainModel,
    build_model,
    fill_table,
)

log = logging.getLogger(__name__)


def build(
    settings: TrainSettings,
    config: ModelConfig,
    group: Group,
    loaders: Mapping[str, Loader] | None = None,
    own: Build | None = None,
) -> tuple[RunState, dict[str, Any]]:
    """Build and shard the model (collective).

    ``loaders`` of the splits share the ranks' GPUs with the tables. ``own`` makes an own model.

    Returns:
        The sharded model with its optimizer, and on rank 0 the plan (:func:`_shard_model`).

    Raises:
        SettingsError: The tables do not fit into the ranks' memory.
    """
    fp16 = settings.table_precision == "fp16"
    if fp16 and group.device.type == "cpu" and group.rank == 0:
        log.warning(
            "--table_precision fp16 on a CPU: FBGEMM rounds to the nearest number there, so small "
            "updates are lost; on GPUs it rounds stochastically"
        )
    torch.manual_seed(settings.seed + group.rank)  # of what draws in a step, such as dropout
    unsharded = build_model(
        config, seed=settings.seed, device=group.device, tables=settings.table_precision, build=own
    )
    computing = settings.amp, settings.compile_dense, settings.undersampling_rate
    model = TrainModel(unsharded, group.world_size, group.device.type, *computing)
    combined.fuse_table_optimizer(unsharded.sparse_arch, settings)
    set_up_dense(unsharded.head.module, group.device, settings)
    held = _bytes_of(loaders or {})
    sharded, plan = _shard_model(model, config, settings, group, held)
    return RunState(config, sharded, combined.combine_optimizers(sharded, settings), group), plan


def _bytes_of(loaders: Mapping[str, Loader]) -> int:
    """Return the bytes of a GPU that the loaders take: train's, and the one that is evaluated."""
    sizes = {split: loader.device_bytes for split, loader in loaders.items()}
    return sizes.pop("train", 0) + max(sizes.values(), default=0)


def set_up_dense(module: nn.Module, device: torch.device, settings: TrainSettings) -> None:
    """Apply the settings that say how the dense layers, those of ``module``, are computed.

    On GPUs ``torch.compile(mode="reduce-overhead")`` replays them as CUDA graphs;
    :class:`training.sharding.train_model.TrainModel` marks the steps and copies what it returns.
    """
    torch.backends.cuda.matmul.allow_tf32 = settings.allow_tf32
    if device.type == "cuda" and (settings.amp or settings.allow_tf32):  # on tensor cores
        getattr(module, "align_inputs", lambda: None)()
    own = ":" in settings.model and device.type == "cpu"
    # without it, threads add the gradients of a vector that is taken several times in any order
    torch.use_deterministic_algorithms(own, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if settings.compile_dense:
        module.forward = torch.compile(module.forward, dynamic=False, mode="reduce-overhead")


def _shard_model(
    model: TrainModel, config: ModelConfig, settings: TrainSettings, group: Group, held: int
) -> tuple[DistributedModelParallel, dict[str, Any]]:
    """Plan, shard and initialize the model on all ranks (collective).

    ``held`` are the bytes of each GPU that loaders take; a plan for ``--hbm_gib`` leaves it to the
    caller to subtract them.

    The tables of ``model`` must be on the meta device, with their optimizer
    (:func:`training.optim.combined.fuse_table_optimizer`).

    Returns:
        The sharded model, and on rank 0 the plan, JSON-ready: ``tables`` (the fields of
        :class:`training.sharding.planning.TablePlan`), ``gib_per_rank``, ``memory_gib`` of a rank.

    Raises:
        SettingsError: The tables do not fit into the ranks' memory.
    """
    world = torch.distributed.GroupMember.WORLD
    hardware = _hardware(settings, group, held)
    plan, tables = make_plan(model, config, settings, hardware, group=world)
    if group.rank == 0:
        _log_plan(tables, hardware)
    # a model of one's own may leave out a layer in some steps, or on some ranks
    own = {"static_graph": not config.own, "find_unused_parameters": bool(config.own)}
    sharded = DistributedModelParallel(
        module=model,
        device=group.device,
        env=ShardingEnv.from_process_group(world),
        plan=plan,
        sharders=[sharder(settings, config, plan)],
        init_data_parallel=group.world_size > 1,  # DDP for the dense layers
        data_parallel_wrapper=DefaultDataParallelWrapper(**own),
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
    rows = config.tables
    for table, shard, offsets in _shards(model):
        fill_table(shard, table, rows[table], config.embedding_dim, seed, offsets)
        if config.first_order:
            _, column = offsets
            shard[:, : max(0, config.first_order_width - column)] = 0


def _shards(model: DistributedModelParallel) -> Iterator[tuple[str, torch.Tensor, tuple[int, int]]]:
    """Yield the table, the weights and the first row and column of each shard of this rank."""
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                row, column = shard.metadata.shard_offsets
                yield name.split(".")[-2], shard.tensor.detach(), (row, column)
        elif ".embedding_bags." in name:
            yield name.split(".")[-2], value.detach(), (0, 0)


def regularize_tables(start: Start, run: RunState, settings: TrainSettings) -> None:
    """Let sharded tables have ``--embedding_l2``; those of each rank's own have it already."""
    if not settings.embedding_l2 or settings.sharding == "data_parallel":
        return
    config = run.config
    lists = read_schema(settings).multi_hot
    factors = {}
    for name, rows in zip(config.categorical, config.num_embeddings, strict=True):
        if name in lists or config.table_of[name] not in start.lookups:
            continue
        ids, lookups = start.lookups[config.table_of[name]]
        # an id that no row of the sample has is as rare as one that a single row has
        of_ids = torch.full((rows,), float(lookups.min()))
        of_ids[torch.from_numpy(ids)] = torch.from_numpy(lookups)
        scale = settings.embedding_l2 / settings.batch_size
        factors[name] = (scale / of_ids).to(run.group.device)
    for module in run.model.modules():
        if isinstance(module, LookupL2):
            module.set_factors(factors)


def start_from(start: Start, run: RunState) -> None:
    """Set the edges of bins, and let the first-order term be a logistic regression of each label.

    Values without a weight have 0, and so have the weights of a label without a regression.

    A model learns the weights of rare values slowly: with few rows an id, one that starts without
    them ends an epoch below the regression (``python -m benchmarks.regression``).
    """
    for name, buffer in run.model.named_buffers():
        if name.endswith("piecewise.edges"):
            buffer.copy_(torch.from_numpy(start.edges))
    for number, label in enumerate(run.config.labels if run.config.first_order else ()):
        if label in start.regressions:
            _write_regression(start.regressions[label], number, run)


@torch.no_grad()
def _write_regression(regression: Regression, number: int, run: RunState) -> None:
    """Write a regression to the first-order term of the label of this number."""
    config, model = run.config, run.model
    of_columns = list(zip(regression.ids, regression.weights, strict=True))
    features, table_of = config.features, config.table_of
    # by table: the coordinate of a feature's weights, the ids, and their weights
    fitted: dict[str, list[tuple[int, np.ndarray, np.ndarray]]] = defaultdict(list)
    # the bins of dense columns follow the features
    for (name, own), (ids, weights) in zip(features.items(), of_columns, strict=False):
        coordinate = config.first_order_coordinates[name] + number
        fitted[table_of[own]].append((coordinate, ids, weights))
    for table, shard, (first_row, first_column) in _shards(model):
        for coordinate, ids, weights in fitted[table]:
            if not first_column <= coordinate < first_column + shard.shape[1]:
                continue
            part = slice(*np.searchsorted(ids, [first_row, first_row + len(shard)]))
            rows = torch.from_numpy(ids[part] - first_row).to(shard.device)
            values = torch.from_numpy(weights[part] / config.first_order).to(shard)
            shard[rows, coordinate - first_column] = values
    for name, parameter in model.named_parameters():
        if name.endswith("first_order.weight"):
            parameter[number].copy_(torch.from_numpy(regression.dense))
        elif name.endswith("first_order.bias"):
            parameter[number].fill_(regression.bias)
        elif name.endswith("piecewise.vectors"):
            of_edges = parameter.view(len(config.dense), config.dense_bins + 1, -1)[..., number]
            for edges, (ids, weights) in zip(of_edges, of_columns[len(features) :], strict=True):
                values = torch.from_numpy(weights / config.first_order).to(edges)
                edges[torch.from_numpy(ids)] = values


def _log_plan(tables: list[TablePlan], hardware: Hardware) -> None:
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


def _keep(get_recat: Callable) -> Callable:
    """Return ``torchrec.distributed.dist_data._get_recat``, made to keep its result.

    Each step it copies a list to the GPU, and waits until the GPU has done all that it was given
    before; with one rank nothing uses the copy. Not measured on a GPU yet.
    """
    kept = functools.cache(get_recat)

    @functools.wraps(get_recat)
    def get(
        local_split: int,
        num_splits: int,
        stagger: int = 1,
        device: torch.device | None = None,
        batch_size_per_rank: list[int] | None = None,
    ) -> torch.Tensor | None:
        if len(set(batch_size_per_rank or ())) > 1:  # the result depends on them
            return get_recat(local_split, num_splits, stagger, device, batch_size_per_rank)
        return kept(local_split, num_splits, stagger, device)

    return get


dist_data._get_recat = _keep(dist_data._get_recat)


class OneRankPipeline:
    """Training steps of one rank, with the interface of TorchRec's pipeline.

    There are no messages between ranks that could overlap with computing, and TorchRec's pipeline
    spends time in each step on that (tracing, streams, waiting for sizes).
    """

    def __init__(self, model: DistributedModelParallel, optimizer: CombinedOptimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def progress(self, batches: Iterator[TrainBatch]) -> StepOutput:
        """Train the next batch, or evaluate it if the model is in evaluation mode.

        Raises:
            StopIteration: There is no next batch.
        """
        batch = next(batches)
        if not self._model.training:
            return self._model(batch)[1]
        self._optimizer.zero_grad()
        loss, output = self._model(batch)
        loss.backward()
        self._optimizer.step()
        return output


Pipeline: TypeAlias = OneRankPipeline | TrainPipelineSparseDist


def make_pipeline(run: RunState) -> Pipeline:
    """Return what trains and evaluates the model, batch by batch, on this rank."""
    if run.group.world_size == 1:
        return OneRankPipeline(run.model, run.optimizer)
    return TrainPipelineSparseDist(run.model, run.optimizer, run.group.device)
