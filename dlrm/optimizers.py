"""Optimizers: fused into the backward pass of the tables, ordinary for the dense layers."""

from __future__ import annotations

import torch
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm.model import TrainModel
from dlrm.settings import TrainSettings

#: Added to the root of row-wise Adagrad's moment: FBGEMM's default, and dlrm_main's.
TABLE_EPS = 1e-8


def fuse_table_optimizer(model: TrainModel, settings: TrainSettings) -> None:
    """Mark the (unsharded) tables with the optimizer that sharding fuses into their backward."""
    tables = model.dlrm.sparse_arch.parameters()
    if settings.adagrad:
        options = {"lr": settings.learning_rate, "eps": TABLE_EPS}
        apply_optimizer_in_backward(RowWiseAdagrad, tables, options)
    else:
        apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": settings.learning_rate})


def combine_optimizers(
    model: DistributedModelParallel, settings: TrainSettings
) -> CombinedOptimizer:
    """The optimizer of the whole sharded model: of the dense layers, and the fused ones."""
    kind = torch.optim.Adagrad if settings.adagrad else torch.optim.SGD
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: kind(parameters, lr=settings.learning_rate),
    )
    return CombinedOptimizer([("dense", dense), ("tables", model.fused_optimizer)])


def learning_rate(settings: TrainSettings, step: int, total_steps: int) -> float:
    """The learning rate of step ``step`` (from 0) out of ``total_steps``, of all epochs.

    With ``change_lr`` it is ``lr_after_change_point`` from step
    ``floor(total_steps * lr_change_point)`` on.
    """
    if settings.change_lr and step >= int(total_steps * settings.lr_change_point):
        return settings.lr_after_change_point
    return settings.learning_rate


def set_learning_rate(optimizer: CombinedOptimizer, value: float) -> None:
    """Set the learning rate of dense layers and tables, from the next step on.

    The fused optimizers take it over in ``zero_grad``, which the pipeline calls before each step.
    """
    for group in optimizer.param_groups:
        group["lr"] = value
