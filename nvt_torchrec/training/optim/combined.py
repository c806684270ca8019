"""Optimizers: fused into the backward pass of the tables, ordinary for the dense layers."""

from __future__ import annotations

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType as OptimType
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from nvt_torchrec.training.optim.adam import TableAdam, lookups_of
from nvt_torchrec.training.optim.learning_rates import Rates
from nvt_torchrec.training.settings.optimizers import OPTIMIZERS
from nvt_torchrec.training.settings.train_settings import TrainSettings


def fuse_table_optimizer(tables: torch.nn.Module, settings: TrainSettings) -> None:
    """Mark the (unsharded) tables with the optimizer that sharding fuses into their backward."""
    kind = OPTIMIZERS[settings.table_optimizer]
    options = kind.options(settings.learning_rate, settings.eps)
    apply_optimizer_in_backward(kind.table_class(), tables.parameters(), options)


def combine_optimizers(
    model: DistributedModelParallel, settings: TrainSettings
) -> CombinedOptimizer:
    """Combine the optimizers of the dense layers and of the tables of the sharded model."""
    kind = OPTIMIZERS[settings.table_optimizer]
    dense_class = getattr(torch.optim, kind.DENSE)
    dense_rate = settings.dense_learning_rate or settings.learning_rate
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: dense_class(parameters, **kind.options(dense_rate, settings.eps)),
    )
    tables = model.fused_optimizer
    if is_table_adam(settings, model.device):
        tables = TableAdam(model, **kind.options(settings.learning_rate, settings.eps))
    return CombinedOptimizer([("dense", dense), ("tables", tables)])


def is_table_adam(settings: TrainSettings, device: torch.device) -> bool:
    """Return whether :mod:`training.optim.adam` trains the tables, not FBGEMM."""
    return device.type == "cpu" and not OPTIMIZERS[settings.table_optimizer].FUSED_ON_CPU


def set_learning_rate(optimizer: CombinedOptimizer, rates: Rates) -> None:
    """Set the learning rates of tables and dense layers, from the next step on.

    The fused optimizers read theirs in ``zero_grad``, which is called before each step.
    """
    for name, part in optimizer.optimizers:
        for group in part.param_groups:
            group["lr"] = rates.tables if name == "tables" else rates.dense


def set_step(model: DistributedModelParallel, optimizer: CombinedOptimizer, step: int) -> None:
    """Set the number of finished steps in the tables' Adam, which corrects its bias by it.

    FBGEMM's Adam counts evaluations too, and from 0 after a resume. Call this after both.
    """
    tables = dict(optimizer.optimizers)["tables"]
    if isinstance(tables, TableAdam):
        tables.steps = step
        return
    for lookup in lookups_of(model):
        if lookup.optimizer == OptimType.ADAM:
            lookup.iter_cpu.fill_(step)
            lookup.iter.fill_(step)
