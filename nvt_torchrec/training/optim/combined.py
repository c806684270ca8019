"""Make the optimizers: one fused into the tables' backward pass, one of torch for dense layers."""

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

    Data-parallel tables are trained as layers are, by ``torch.optim``.
    """
    if settings.sharding == "data_parallel":
        return
    kind = OPTIMIZERS[settings.table_optimizer]
    options = kind.options(settings.learning_rate, settings.eps)
    apply_optimizer_in_backward(kind.table_class(), tables.parameters(), options)


def combine_optimizers(
    model: DistributedModelParallel, settings: TrainSettings
) -> CombinedOptimizer:
    """Combine the optimizers of the dense layers and of the tables of the sharded model."""
    dense_parameters, whole_tables = {}, {}
    for name, parameter in in_backward_optimizer_filter(model.named_parameters()):
        if ".embedding_bags." in name:
            whole_tables[name] = parameter
        else:
            dense_parameters[name] = parameter
    dense_rate = settings.dense_learning_rate or settings.learning_rate
    dense = _make_optimizer(dense_parameters, settings, dense_rate, settings.weight_decay)
    tables: KeyedOptimizer = model.fused_optimizer
    if whole_tables:
        rate, l2 = settings.learning_rate, settings.embedding_l2
        tables = _make_optimizer(whole_tables, settings, rate, l2)
    return CombinedOptimizer([("dense", dense), ("tables", tables)])


def _make_optimizer(
    named: dict[str, torch.nn.Parameter], settings: TrainSettings, rate: float, l2: float | None
) -> KeyedOptimizerWrapper:
    """Make a ``torch.optim`` optimizer.

    Args:
        named: The parameters by name.
        settings: The settings of the run.
        rate: The learning rate.
        l2: The strength of the L2 regularization, which the loss has half of for each square of a
            weight. Only matrices are regularized.
    """
    kind = OPTIMIZERS[settings.table_optimizer]
    optimizer_class = getattr(torch.optim, kind.DENSE)

    def make(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        every = list(parameters)
        matrices = [parameter for parameter in every if parameter.dim() > 1]
        others = [parameter for parameter in every if parameter.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": l2 or 0.0},
            {"params": others},
        ]
        filled = [group for group in groups if group["params"]]
        return optimizer_class(filled, **kind.options(rate, settings.eps))

    return KeyedOptimizerWrapper(named, make)


def set_learning_rate(optimizer: CombinedOptimizer, rates: Rates) -> None:
    """Set the learning rates of tables and dense layers, from the next step on.

    The fused optimizers read their rate in ``zero_grad``, which is called before each step.
    """
    for name, part in optimizer.optimizers:
        for group in part.param_groups:
            group["lr"] = rates.tables if name == "tables" else rates.dense


def iterate_lookups(model: DistributedModelParallel) -> Iterator[Lookup]:
    """Yield FBGEMM's modules that hold this rank's shards; ``modules()`` does not yield them."""
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for part in module._lookups:
                yield from (inner for inner in part.modules() if isinstance(inner, Lookup))


def set_step(model: DistributedModelParallel, step: int) -> None:
    """Set the number of finished steps in the tables' Adam, whose bias correction depends on it.

    FBGEMM's Adam counts the steps of evaluations, too, and begins at 0 after a resume. So this must
    be called after both.
    """
    for lookup in iterate_lookups(model):
        if lookup.optimizer == OptimType.ADAM:
            lookup.iter_cpu.fill_(step)
            lookup.iter.fill_(step)
