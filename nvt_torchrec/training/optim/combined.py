"""Make a run's optimizers: fused into the tables' backward pass, and ``torch.optim`` for layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType as OptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen as Lookup,
)
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from nvt_torchrec.training.optim.learning_rates import Rates
from nvt_torchrec.training.settings.optimizers import OPTIMIZERS
from nvt_torchrec.training.settings.train_settings import TrainSettings


def fuse_table_optimizer(tables: torch.nn.Module, settings: TrainSettings) -> None:
    """Attach to the (unsharded) tables the optimizer that sharding fuses into their backward pass.

    Data-parallel tables are trained by ``torch.optim``, like the dense layers.
    """
    if settings.sharding == "data_parallel":
        return
    optimizer = OPTIMIZERS[settings.table_optimizer]
    options = optimizer.options(settings.learning_rate, settings.eps)
    apply_optimizer_in_backward(optimizer.table_class(), tables.parameters(), options)


def combine_optimizers(
    model: DistributedModelParallel, settings: TrainSettings
) -> CombinedOptimizer:
    """Combine the optimizers of the sharded model's dense layers and tables."""
    dense_parameters = {}
    data_parallel_tables = {}
    for name, parameter in in_backward_optimizer_filter(model.named_parameters()):
        if ".embedding_bags." in name:
            data_parallel_tables[name] = parameter
        else:
            dense_parameters[name] = parameter
    dense = _make_optimizer(
        dense_parameters,
        settings,
        learning_rate=settings.dense_learning_rate or settings.learning_rate,
        l2=settings.weight_decay,
    )
    tables: KeyedOptimizer = model.fused_optimizer
    if data_parallel_tables:
        tables = _make_optimizer(
            data_parallel_tables,
            settings,
            learning_rate=settings.learning_rate,
            l2=settings.embedding_l2,
        )
    return CombinedOptimizer([("dense", dense), ("tables", tables)])


def _make_optimizer(
    parameters: dict[str, torch.nn.Parameter],
    settings: TrainSettings,
    *,
    learning_rate: float,
    l2: float | None,
) -> KeyedOptimizerWrapper:
    """Make a ``torch.optim`` optimizer.

    Args:
        parameters: The parameters by name.
        settings: The settings of the run.
        learning_rate: The learning rate.
        l2: The strength λ of L2 regularization, which adds λ/2 · w² to the loss for each weight w
            of a matrix. Vectors, such as biases, are not regularized.
    """
    optimizer = OPTIMIZERS[settings.table_optimizer]
    optimizer_class = getattr(torch.optim, optimizer.DENSE)

    def make(tensors: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        matrices = []
        others = []
        for tensor in tensors:
            if tensor.dim() > 1:
                matrices.append(tensor)
            else:
                others.append(tensor)
        groups: list[dict[str, Any]] = []
        if matrices:
            groups.append({"params": matrices, "weight_decay": l2 or 0.0})
        if others:
            groups.append({"params": others})
        return optimizer_class(groups, **optimizer.options(learning_rate, settings.eps))

    return KeyedOptimizerWrapper(parameters, make)


def set_learning_rate(optimizer: CombinedOptimizer, rates: Rates) -> None:
    """Set the learning rates of tables and dense layers from the next step on.

    The fused optimizers read their rate in ``zero_grad``, which is called before each step.
    """
    for name, part in optimizer.optimizers:
        for group in part.param_groups:
            group["lr"] = rates.tables if name == "tables" else rates.dense


def iterate_lookups(model: DistributedModelParallel) -> Iterator[Lookup]:
    """Yield FBGEMM's modules that hold this rank's shards; ``modules()`` does not list them."""
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for part in module._lookups:
                yield from (inner for inner in part.modules() if isinstance(inner, Lookup))


def set_step(model: DistributedModelParallel, step: int) -> None:
    """Set the number of finished steps in the tables' Adam, whose bias correction depends on it.

    FBGEMM's Adam also counts evaluation steps, and starts from 0 after a resume. So this must be
    called after both.
    """
    for lookup in iterate_lookups(model):
        if lookup.optimizer == OptimType.ADAM:
            lookup.iter_cpu.fill_(step)
            lookup.iter.fill_(step)
