"""Optimizers: fused into the backward pass of the tables, ordinary for the dense layers."""

from __future__ import annotations

import torch
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from clicklog.errors import SettingsError
from dlrm.model import TrainModel
from dlrm.settings import OPTIMIZERS, TrainSettings

#: For the tables, what FBGEMM fuses into the backward of each of these classes; for the dense
#: layers the classes themselves. FBGEMM's Adam leaves rows alone that a batch does not hold, as
#: torch.optim.SparseAdam does.
_TABLES = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
}
_DENSE = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}


def fuse_table_optimizer(model: TrainModel, settings: TrainSettings, device: torch.device) -> None:
    """Mark the (unsharded) tables with the optimizer that sharding fuses into their backward.

    Raises:
        SettingsError: FBGEMM has no such optimizer for tables on ``device``.
    """
    name = settings.table_optimizer
    if name == "adam" and device.type == "cpu":
        raise SettingsError(
            "--optimizer adam on a CPU: FBGEMM has no Adam for tables there",
            "train on a GPU, or with --optimizer adagrad or rowwise_adagrad",
        )
    apply_optimizer_in_backward(
        _TABLES[name], model.dlrm.sparse_arch.parameters(), _options(name, settings)
    )


def combine_optimizers(
    model: DistributedModelParallel, settings: TrainSettings
) -> CombinedOptimizer:
    """The optimizer of the whole sharded model: of the dense layers, and the fused ones."""
    name = OPTIMIZERS[settings.table_optimizer]
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: _DENSE[name](parameters, **_options(name, settings)),
    )
    return CombinedOptimizer([("dense", dense), ("tables", model.fused_optimizer)])


def _options(name: str, settings: TrainSettings) -> dict[str, float]:
    rate = {"lr": settings.learning_rate}
    return rate if name == "sgd" else {**rate, "eps": settings.eps}


def set_learning_rate(optimizer: CombinedOptimizer, value: float) -> None:
    """Set the learning rate of dense layers and tables, from the next step on.

    The fused optimizers take it over in ``zero_grad``, which the pipeline calls before each step.
    """
    for group in optimizer.param_groups:
        group["lr"] = value
