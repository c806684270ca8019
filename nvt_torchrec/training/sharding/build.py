"""Build a run's model, shard it over the ranks, and make its training pipeline."""

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
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import TrainPipelineSparseDist, dist_data
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import Build
from nvt_torchrec.models.head import Head
from nvt_torchrec.training.baselines.regression import Regression, Start
from nvt_torchrec.training.data.choices import read_schema
from nvt_torchrec.training.data.loaders import Loader, TrainBatch
from nvt_torchrec.training.launch.distributed import Group
from nvt_torchrec.training.launch.run_state import RunState
from nvt_torchrec.training.optim import combined
from nvt_torchrec.training.settings.train_settings import TrainSettings
from nvt_torchrec.training.sharding.data_parallel_warnings import hide_data_parallel_warnings
from nvt_torchrec.training.sharding.initial_weights import fill_table
from nvt_torchrec.training.sharding.lookup_precision import round_lookups, try_lookups
from nvt_torchrec.training.sharding.planning import (
    GIB,
    Hardware,
    TablePlan,
    describe_fit,
    make_plan,
    make_sharder,
    sum_gib_per_rank,
)
from nvt_torchrec.training.sharding.train_model import (
    LookupL2,
    StepOutput,
    TrainModel,
    build_model,
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

    Args:
        settings: The settings of the run.
        config: The model.
        group: This rank.
        loaders: The loaders of the splits, which share the ranks' GPUs with the tables.
        own: The ``build`` function of a custom model.

    Returns:
        The sharded model with its optimizer, and on rank 0 the plan (:func:`_shard_model`).

    Raises:
        SettingsError: The tables do not fit into the ranks' memory.
    """
    fp16 = settings.table_precision == "fp16"
    if fp16 and group.device.type == "cpu" and group.rank == 0:
        log.warning(
            "--table_precision fp16 on a CPU: FBGEMM rounds to the nearest value there, so small "
            "updates are lost; on GPUs it rounds stochastically"
        )
    torch.manual_seed(settings.seed + group.rank)  # each rank draws its own dropout masks
    unsharded = build_model(
        config,
        seed=settings.seed,
        device=group.device,
        table_precision=settings.table_precision,
        build=own,
    )
    model = TrainModel(
        unsharded,
        group.world_size,
        group.device.type,
        amp=settings.amp,
        compiled=settings.compile_dense,
        kept_negatives=settings.undersampling_rate,
        log_q_correction=bool(settings.log_q_correction),
    )
    combined.fuse_table_optimizer(unsharded.sparse_arch, settings)
    set_up_dense(unsharded.head, group.device, settings)
    loader_bytes = _sum_loader_bytes(loaders or {})
    sharded, plan = _shard_model(model, config, settings, group, loader_bytes)
    return RunState(config, sharded, combined.combine_optimizers(sharded, settings), group), plan


def _sum_loader_bytes(loaders: Mapping[str, Loader]) -> int:
    """Return the GPU memory that the loaders of a rank use at most, in bytes.

    The train loader keeps its memory during an evaluation, which adds one other loader at a time.
    """
    sizes = {split: loader.device_bytes for split, loader in loaders.items()}
    return sizes.pop("train", 0) + max(sizes.values(), default=0)


def set_up_dense(head: Head, device: torch.device, settings: TrainSettings) -> None:
    """Apply the precision and compilation settings to the dense layers.

    On GPUs ``torch.compile(mode="reduce-overhead")`` replays the head's module as CUDA graphs;
    :class:`training.sharding.train_model.TrainModel` marks the steps and copies the results.
    Without it, one of this project's kernels joins the vectors for the module.
    """
    torch.backends.cuda.matmul.allow_tf32 = settings.allow_tf32
    module = head.module
    uses_tensor_cores = device.type == "cuda" and (settings.amp or settings.allow_tf32)
    if uses_tensor_cores:
        getattr(module, "align_inputs", lambda: None)()
        if head.dense_vectors is not None:
            head.dense_vectors.aligned = True
    if device.type == "cuda" and not settings.compile_dense:
        head.join_on_gpu()
    # A custom model may use a vector several times. On CPUs, threads would otherwise add up the
    # vector's gradients in a random order.
    is_custom = ":" in settings.model
    torch.use_deterministic_algorithms(is_custom and device.type == "cpu", warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if settings.compile_dense:
        module.forward = torch.compile(module.forward, dynamic=False, mode="reduce-overhead")


@hide_data_parallel_warnings()
def _shard_model(
    model: TrainModel,
    config: ModelConfig,
    settings: TrainSettings,
    group: Group,
    loader_bytes: int,
) -> tuple[DistributedModelParallel, dict[str, Any]]:
    """Plan, shard and initialize the model on all ranks (collective).

    Args:
        model: The model. Its tables must be on the meta device, with their optimizer attached
            (:func:`training.optim.combined.fuse_table_optimizer`).
        config: The model's shape.
        settings: The settings of the run.
        group: This rank.
        loader_bytes: The bytes of each GPU that the loaders use. They are not subtracted from
            ``--hbm_gib``, which the user has chosen.

    Returns:
        The sharded model, and on rank 0 the plan, JSON-ready: ``tables`` (the fields of
        :class:`training.sharding.planning.TablePlan`), ``gib_per_rank``, and ``memory_gib``, the
        memory of each rank.

    Raises:
        SettingsError: The tables do not fit into the ranks' memory.
    """
    world = torch.distributed.GroupMember.WORLD
    hardware = _find_hardware(settings, group, loader_bytes)
    plan, tables = make_plan(model, config, settings, hardware, group=world)
    is_rounded = round_lookups(plan, model.model.head, config, settings, group)
    if group.rank == 0:
        _log_plan(tables, hardware)
    # A custom model may skip a layer in some steps, or on some ranks.
    is_custom = config.own is not None
    wrapper = DefaultDataParallelWrapper(
        static_graph=not is_custom, find_unused_parameters=is_custom
    )
    sharded = DistributedModelParallel(
        module=model,
        device=group.device,
        env=ShardingEnv.from_process_group(world),
        plan=plan,
        sharders=[make_sharder(settings, config, plan)],
        init_data_parallel=group.world_size > 1,  # DDP for the dense layers
        data_parallel_wrapper=wrapper,
    )
    _fill_tables(sharded, config, settings.seed)
    if is_rounded:
        unsharded = model.model
        unsharded.feature_sums.set_tables(_iterate_shards(sharded))
        try_lookups(sharded, unsharded.sparse_arch, unsharded.feature_sums, config)
    plan_record = {
        "tables": [dataclasses.asdict(table) for table in tables],
        "gib_per_rank": sum_gib_per_rank(tables, hardware),
        "memory_gib": hardware.memory / GIB,
    }
    return sharded, plan_record


def _find_hardware(settings: TrainSettings, group: Group, loader_bytes: int) -> Hardware:
    """Return this run's hardware, with the memory that remains for the model."""
    machine_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    host_memory = machine_memory // group.local_world_size
    memory = host_memory
    if group.device.type == "cuda":
        memory = torch.cuda.get_device_properties(group.device).total_memory
        if loader_bytes >= memory:
            raise SettingsError(
                f"the loaders need {loader_bytes / GIB:.1f} GiB of a GPU with {memory / GIB:.1f} "
                "GiB",
                "give a smaller --loader_memory, or write row groups of fewer rows",
            )
        if group.rank == 0 and settings.hbm_gib is None:
            log.info("%.1f GiB of each GPU are reserved for the loaders", loader_bytes / GIB)
        memory -= loader_bytes
    if settings.hbm_gib is not None:
        memory = int(settings.hbm_gib * GIB)
    kind = group.device.type
    return Hardware(group.world_size, group.local_world_size, kind, memory, host_memory)


def _fill_tables(model: DistributedModelParallel, config: ModelConfig, seed: int) -> None:
    """Write the initial weights of this rank's shards; the linear term's weights are 0."""
    rows = config.tables
    for table, shard, offsets in _iterate_shards(model):
        fill_table(shard, table, rows[table], config.embedding_dim, seed, offsets)
        # The first coordinates of each vector are the weights of the linear term.
        _, first_column = offsets
        shard[:, : max(0, config.first_order_width - first_column)] = 0


def _iterate_shards(
    model: DistributedModelParallel,
) -> Iterator[tuple[str, torch.Tensor, tuple[int, int]]]:
    """Yield, for each shard of this rank, its table, its weights, and its first row and column."""
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                row, column = shard.metadata.shard_offsets
                yield name.split(".")[-2], shard.tensor.detach(), (row, column)
        elif ".embedding_bags." in name:
            yield name.split(".")[-2], value.detach(), (0, 0)


def regularize_tables(start: Start, run: RunState, settings: TrainSettings) -> None:
    """Apply ``--embedding_l2`` to sharded tables.

    The optimizer of data-parallel tables regularizes them by itself.

    Args:
        start: The start of the training; its ``lookups`` hold, by table, how often a row of the
            log looks up each id on average.
        run: The run.
        settings: The settings of the run.
    """
    if not settings.embedding_l2 or settings.sharding == "data_parallel":
        return
    config = run.config
    lists = read_schema(settings).multi_hot
    factors = {}
    for name, rows in zip(config.categorical, config.num_embeddings, strict=True):
        if name in lists or config.table_by_column[name] not in start.lookups:
            continue
        ids, counts = start.lookups[config.table_by_column[name]]
        # Ids that the sample does not contain are assumed to be as rare as its rarest ids.
        lookups = torch.full((rows,), float(counts.min()))
        lookups[torch.from_numpy(ids)] = torch.from_numpy(counts)
        scale = settings.embedding_l2 / settings.batch_size
        factors[name] = (scale / lookups).to(run.group.device)
    for module in run.model.modules():
        if isinstance(module, LookupL2):
            module.set_factors(factors)


def apply_start(start: Start, run: RunState) -> None:
    """Write the bin edges, the mean and scale of the data's vectors, and the linear term.

    The linear term of each label becomes the label's logistic regression. Weights stay 0 for values
    that the regression does not contain, and for labels without a regression.

    Without this a model learns the weights of rare values slowly. If ids have few rows each, it
    ends an epoch worse than the regression (``python -m benchmarks.regression``).
    """
    for name, buffer in run.model.named_buffers():
        if name.endswith("piecewise.edges"):
            buffer.copy_(torch.from_numpy(start.edges))
        if start.vectors and name.endswith("dense_vectors.center"):
            buffer.copy_(torch.from_numpy(start.vectors.center))
        if start.vectors and name.endswith("dense_vectors.scale"):
            buffer.copy_(torch.from_numpy(start.vectors.scale))
    if not run.config.first_order:
        return
    for label_index, label in enumerate(run.config.labels):
        if label in start.regressions:
            _write_regression(start.regressions[label], label_index, run)


@torch.no_grad()
def _write_regression(regression: Regression, label_index: int, run: RunState) -> None:
    """Write a label's regression to the linear term."""
    config = run.config
    columns = list(zip(regression.ids, regression.weights, strict=True))
    # The columns of the features come first, the bins of the dense columns after them.
    num_features = len(config.features)
    feature_columns = columns[:num_features]
    bin_columns = columns[num_features:]
    # By table: the coordinate of a feature's weights, the ids (ascending), and their weights.
    fitted: dict[str, list[tuple[int, np.ndarray, np.ndarray]]] = defaultdict(list)
    for (name, column), (ids, weights) in zip(
        config.features.items(), feature_columns, strict=True
    ):
        coordinate = config.first_order_coordinates[name] + label_index
        fitted[config.table_by_column[column]].append((coordinate, ids, weights))
    for table, shard, (first_row, first_column) in _iterate_shards(run.model):
        for coordinate, ids, weights in fitted[table]:
            if not first_column <= coordinate < first_column + shard.shape[1]:
                continue
            in_shard = slice(*np.searchsorted(ids, [first_row, first_row + len(shard)]))
            rows = torch.from_numpy(ids[in_shard] - first_row).to(shard.device)
            values = torch.from_numpy(weights[in_shard] / config.first_order).to(shard)
            shard[rows, coordinate - first_column] = values
    for name, parameter in run.model.named_parameters():
        if name.endswith("first_order.weight"):
            parameter[label_index].copy_(torch.from_numpy(regression.dense))
        elif name.endswith("first_order.bias"):
            parameter[label_index].fill_(regression.bias)
        elif name.endswith("piecewise.vectors"):
            vectors = parameter.view(len(config.dense), config.dense_bins + 1, -1)
            edge_weights = vectors[..., label_index]
            for target, (edges, weights) in zip(edge_weights, bin_columns, strict=True):
                values = torch.from_numpy(weights / config.first_order).to(target)
                target[torch.from_numpy(edges)] = values


def _log_plan(tables: list[TablePlan], hardware: Hardware) -> None:
    kinds = Counter(table.sharding for table in tables)
    log.info(
        "%d tables, %s rows × %d: %s; GiB per rank: %s",
        len(tables),
        f"{sum(table.rows for table in tables):,}",
        tables[0].dim,
        ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
        " ".join(f"{gib:.2f}" for gib in sum_gib_per_rank(tables, hardware)),
    )
    if any(sum(table.gpu) and sum(table.host) for table in tables):
        log.warning("%s", describe_fit(tables))


def _cache_recat(get_recat: Callable) -> Callable:
    """Return ``torchrec.distributed.dist_data._get_recat`` with a cache of its results.

    Without the cache, each step copies a list to the GPU and waits until the GPU has finished all
    earlier work; with one rank the copy is not even used. The effect has not been measured on a GPU
    yet.
    """
    cached = functools.cache(get_recat)

    @functools.wraps(get_recat)
    def get(
        local_split: int,
        num_splits: int,
        stagger: int = 1,
        device: torch.device | None = None,
        batch_size_per_rank: list[int] | None = None,
    ) -> torch.Tensor | None:
        if len(set(batch_size_per_rank or ())) > 1:  # unequal sizes change the result
            return get_recat(local_split, num_splits, stagger, device, batch_size_per_rank)
        return cached(local_split, num_splits, stagger, device)

    return get


dist_data._get_recat = _cache_recat(dist_data._get_recat)


class OneRankPipeline:
    """Training steps of one rank, with the interface of TorchRec's pipeline.

    TorchRec's pipeline overlaps communication with computation. One rank has nothing to
    communicate, so the pipeline's tracing, streams and waiting for sizes would only cost time.
    """

    def __init__(self, model: DistributedModelParallel, optimizer: CombinedOptimizer) -> None:
        self._model = model
        self._optimizer = optimizer

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
    """Return the pipeline that trains and evaluates the model batch by batch on this rank."""
    if run.group.world_size == 1:
        return OneRankPipeline(run.model, run.optimizer)
    return TrainPipelineSparseDist(run.model, run.optimizer, run.group.device)
