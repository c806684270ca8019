"""The optimizers: one class for each ``--optimizer``. Add another one to :data:`OPTIMIZERS`.

PyTorch is imported where it is used, so that ``--help`` answers at once.
"""

# ruff: noqa: D102, the base class describes the methods

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Remedies(NamedTuple):
    """The remedies for a loss that is too high, an AUROC at chance, and a bad model at the end."""

    too_high: str
    at_chance: str
    at_end: str


class Optimizer:
    """An optimizer of the tables, and that of the dense layers beside them.

    Attributes:
        NAME: The value of ``--optimizer``.
        DENSE: The class of ``torch.optim`` for the dense layers.
        TABLES_FALL: Whether the tables' rate falls at the end, as that of the dense layers does:
            its steps do not shrink by themselves.
        ADAPTIVE: Whether the size of a step does not follow that of the gradient.
        ON_CPU: Whether FBGEMM trains sharded tables with it on CPUs, too.
        WHOLE: Whether ``torch.optim`` has it, which trains tables that each rank has whole.
    """

    NAME: str
    DENSE: str
    TABLES_FALL = False
    ADAPTIVE = True
    ON_CPU = True
    WHOLE = True

    def table_class(self) -> type[torch.optim.Optimizer]:
        """Return the class for the tables, whose FBGEMM version is fused into their backward."""
        import torch

        return getattr(torch.optim, self.DENSE)

    def options(self, learning_rate: float, eps: float) -> dict[str, float]:
        """Return the arguments of both classes."""
        return {"lr": learning_rate, "eps": eps}

    def eps(self, global_batch: int) -> float:
        """Return the default epsilon, for gradients of the mean loss of a batch."""
        return 1e-8

    def rates(self, dim: int, widest: int, global_batch: int) -> tuple[float, float]:
        """Return the default learning rates of the tables and the dense layers.

        :mod:`training.optim.learning_rates` explains them.

        Args:
            dim: The width of the tables.
            widest: The width of the widest dense layer.
            global_batch: The samples of a step, on all ranks.
        """
        raise NotImplementedError

    def rate_of_whole_tables(self, dim: int) -> float | None:
        """Return the default rate of tables that each rank has whole.

        None: it is that of sharded tables.
        """
        return None


class Sgd(Optimizer):
    """SGD."""

    NAME = "sgd"
    DENSE = "SGD"
    TABLES_FALL = True
    ADAPTIVE = False

    def options(self, learning_rate: float, eps: float) -> dict[str, float]:
        return {"lr": learning_rate}

    def rates(self, dim: int, widest: int, global_batch: int) -> tuple[float, float]:
        # The gradient of a rare row, which one sample of a batch has, is divided by the batch.
        table_rate = min(30.0, global_batch / 8)
        scale = min(1.0, math.sqrt(global_batch / 4096))
        dense_rate = scale * min(1.0, math.sqrt(128 / widest))
        return table_rate, dense_rate


class Adagrad(Optimizer):
    """Adagrad with a moment per weight."""

    NAME = "adagrad"
    DENSE = "Adagrad"

    def eps(self, global_batch: int) -> float:
        # About the gradient of one sample: a row's first step follows its size, not only its sign.
        return 0.1 / global_batch

    def rates(self, dim: int, widest: int, global_batch: int) -> tuple[float, float]:
        table_rate = 0.05 / math.sqrt(dim / 16)
        dense_rate = 0.03 * min(1.0, 128 / widest)
        return table_rate, dense_rate


class RowwiseAdagrad(Adagrad):
    """Adagrad with a moment per row of a table: the squared gradients, averaged over the row."""

    NAME = "rowwise_adagrad"
    WHOLE = False

    def table_class(self) -> type[torch.optim.Optimizer]:
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        return RowWiseAdagrad


class Adam(Optimizer):
    """Adam; of sharded tables on the rows that a batch holds, as ``torch.optim.SparseAdam``."""

    NAME = "adam"
    DENSE = "Adam"
    TABLES_FALL = True
    ON_CPU = False

    def rates(self, dim: int, widest: int, global_batch: int) -> tuple[float, float]:
        table_rate = 0.0125 / math.sqrt(dim / 16)
        scale = min(1.0, math.sqrt(global_batch / 2048))
        dense_rate = 0.01 * scale * min(1.0, 128 / widest)
        return table_rate, dense_rate

    def rate_of_whole_tables(self, dim: int) -> float:
        return 0.003 / math.sqrt(dim / 16)


#: By the value of ``--optimizer``.
OPTIMIZERS: dict[str, Optimizer] = {
    kind.NAME: kind for kind in (Sgd(), Adagrad(), RowwiseAdagrad(), Adam())
}
