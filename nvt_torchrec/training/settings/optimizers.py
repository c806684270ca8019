"""The optimizers: one class for each ``--optimizer``. Add another one to :data:`OPTIMIZERS`.

PyTorch is imported only where it is used, so that ``--help`` answers at once.
"""

# ruff: noqa: D102, the base class describes the methods

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Remedies(NamedTuple):
    """The remedies for a loss that is too high, an AUROC at chance, and a poor final model."""

    too_high: str
    at_chance: str
    at_end: str


class Optimizer:
    """The optimizer of the tables and the dense layers.

    Attributes:
        NAME: The value of ``--optimizer``.
        DENSE: The name of the ``torch.optim`` class for the dense layers.
        DECAYS_TABLE_RATE: Whether the tables' learning rate falls at the end, like that of the
            dense layers, because the optimizer's steps do not shrink by themselves.
        ADAPTIVE: Whether the size of a step is independent of the size of the gradient.
        ON_CPU: Whether FBGEMM supports it for sharded tables on CPUs, too.
        DATA_PARALLEL: Whether ``torch.optim`` has it, so that it can train data-parallel tables.
    """

    NAME: str
    DENSE: str
    DECAYS_TABLE_RATE = False
    ADAPTIVE = True
    ON_CPU = True
    DATA_PARALLEL = True

    def table_class(self) -> type[torch.optim.Optimizer]:
        """Return the class for the tables; its FBGEMM version is fused into their backward pass."""
        import torch

        return getattr(torch.optim, self.DENSE)

    def options(self, learning_rate: float, eps: float) -> dict[str, float]:
        """Return the constructor arguments of both classes."""
        return {"lr": learning_rate, "eps": eps}

    def eps(self, global_batch: int) -> float:
        """Return the default epsilon for gradients of a batch's mean loss."""
        return 1e-8

    def rates(self, dim: int, widest: int, global_batch: int) -> tuple[float, float]:
        """Return the default learning rates of the tables and the dense layers.

        :mod:`training.optim.learning_rates` explains how they depend on the arguments.

        Args:
            dim: The width of the tables.
            widest: The width of the widest dense layer.
            global_batch: The samples of a step, on all ranks.
        """
        raise NotImplementedError

    def data_parallel_rate(self, dim: int) -> float | None:
        """Return the default rate of data-parallel tables; None if it is that of sharded tables."""
        return None


class Sgd(Optimizer):
    """SGD."""

    NAME = "sgd"
    DENSE = "SGD"
    DECAYS_TABLE_RATE = True
    ADAPTIVE = False

    def options(self, learning_rate: float, eps: float) -> dict[str, float]:
        return {"lr": learning_rate}

    def rates(self, dim: int, widest: int, global_batch: int) -> tuple[float, float]:
        # A rare row is in one sample of a batch, and its gradient is divided by the batch size.
        table_rate = min(30.0, global_batch / 8)
        scale = min(1.0, math.sqrt(global_batch / 4096))
        dense_rate = scale * min(1.0, math.sqrt(128 / widest))
        return table_rate, dense_rate


class Adagrad(Optimizer):
    """Adagrad with a moment per weight."""

    NAME = "adagrad"
    DENSE = "Adagrad"

    def eps(self, global_batch: int) -> float:
        # About the size of one sample's gradient, so that a row's first step depends on the size of
        # its gradient and not only on the sign.
        return 0.1 / global_batch

    def rates(self, dim: int, widest: int, global_batch: int) -> tuple[float, float]:
        table_rate = 0.05 / math.sqrt(dim / 16)
        dense_rate = 0.03 * min(1.0, 128 / widest)
        return table_rate, dense_rate


class RowwiseAdagrad(Adagrad):
    """Adagrad with one moment per table row: the squared gradients, averaged over the row."""

    NAME = "rowwise_adagrad"
    DATA_PARALLEL = False

    def table_class(self) -> type[torch.optim.Optimizer]:
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        return RowWiseAdagrad


class Adam(Optimizer):
    """Adam; for sharded tables it updates only a batch's rows, like ``torch.optim.SparseAdam``."""

    NAME = "adam"
    DENSE = "Adam"
    DECAYS_TABLE_RATE = True
    ON_CPU = False

    def rates(self, dim: int, widest: int, global_batch: int) -> tuple[float, float]:
        table_rate = 0.0125 / math.sqrt(dim / 16)
        scale = min(1.0, math.sqrt(global_batch / 2048))
        dense_rate = 0.01 * scale * min(1.0, 128 / widest)
        return table_rate, dense_rate

    def data_parallel_rate(self, dim: int) -> float:
        return 0.003 / math.sqrt(dim / 16)


#: The optimizers by the value of ``--optimizer``.
OPTIMIZERS: dict[str, Optimizer] = {
    kind.NAME: kind for kind in (Sgd(), Adagrad(), RowwiseAdagrad(), Adam())
}
