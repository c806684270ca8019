"""Batch normalization with the statistics of a step's rows on all ranks.

``torch.nn.SyncBatchNorm`` runs only on GPUs, and would count the rows that pad a batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclasses.dataclass
class StepRows:
    """The row counts of the current step, shared by all layers of a model.

    Attributes:
        rows: The number of samples of this rank; they are the first rows of the batch.
        padded: The number of rows of this rank's batch, including padding.
        global_size: The number of samples of all ranks.
    """

    rows: int = 0
    padded: int = 0
    global_size: int = 0


class SyncedBatchNorm(nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` over the samples of all ranks; in training, forward is collective.

    The first dimension of its input must be the rows of the step, or several positions of each row,
    grouped by row.
    """

    step: StepRows

    @classmethod
    def replace_in(cls, module: nn.Module, step: StepRows) -> None:
        """Turn each ``BatchNorm1d`` in ``module`` into an instance of this class.

        The layers keep their weights, statistics and settings.

        Args:
            module: The module.
            step: The row counts of the current step, which the caller sets before each step.
        """
        for norm in module.modules():
            if type(norm) is nn.BatchNorm1d:
                norm.__class__ = cls
                vars(norm)["step"] = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize ``x``, [B, C] or [B, C, L]; in evaluation with the running statistics."""
        step = self.step
        uses_step_statistics = self.training or self.running_mean is None
        if not uses_step_statistics:
            return super().forward(x)
        # The sums below are collective, so with several ranks none of them may take the shortcut:
        # the others would wait for it forever.
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        if is_alone and step.rows == step.padded and len(x) > 1:
            return super().forward(x)
        values = x.float()
        if values.dim() == 3:
            values = values.transpose(1, 2).flatten(0, 1)
        positions = len(values) // max(step.padded, 1)
        samples = values[: step.rows * positions]
        count = max(step.global_size * positions, 1)
        mean = self._sum(samples) / count
        variance = self._sum((samples - mean).square()) / count
        self._update(mean.detach(), variance.detach(), count)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        if x.dim() == 3:
            scale = scale.unsqueeze(1)
            shift = shift.unsqueeze(1)
        return (x.float() * scale + shift).to(x.dtype)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the column sums over all ranks, float32 [C]."""
        total = values.sum(0)
        return _SumOfRanks.apply(total) if dist.is_initialized() else total

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        """Move the running statistics towards a step's statistics, as ``BatchNorm1d`` does."""
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:  # the running statistics are the mean over all steps
            momentum = 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, momentum)
        # The running variance is unbiased: it is divided by count - 1.
        self.running_var.lerp_(variance * (count / max(count - 1, 1)), momentum)


class _SumOfRanks(torch.autograd.Function):
    """Sum a tensor over all ranks.

    The gradient is summed over all ranks as well, because every rank's loss depends on the sum.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total
