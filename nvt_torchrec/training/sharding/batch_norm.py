"""Batch normalization whose statistics are those of a step's rows on all ranks.

``torch.nn.SyncBatchNorm`` computes on GPUs alone, and would count the rows that pad a batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclasses.dataclass
class StepRows:
    """The rows of this rank in the present step, which all layers of a model share.

    Attributes:
        rows: The number of rows that are samples; they are the first ones.
        padded: The number of all rows, including those that pad the batch.
        global_size: The number of samples of all ranks.
    """

    rows: int = 0
    padded: int = 0
    global_size: int = 0


class SyncedBatchNorm(nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` over the samples of all ranks; its forward is then collective.

    The first dimension of its input must be the rows of the step, or several positions of each row,
    one row after the other.
    """

    step: StepRows

    @classmethod
    def replace_in(cls, module: nn.Module, step: StepRows) -> None:
        """Make each ``BatchNorm1d`` in ``module`` one of this class.

        Their weights, statistics and settings stay as they are.

        Args:
            module: The module.
            step: The rows of the present step, which the caller sets before each step.
        """
        for norm in module.modules():
            if type(norm) is nn.BatchNorm1d:
                norm.__class__ = cls
                vars(norm)["step"] = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, [B, C] or [B, C, L], normalized; in evaluation by running statistics."""
        step = self.step
        uses_step_statistics = self.training or self.running_mean is None
        if not uses_step_statistics:
            return super().forward(x)
        # All ranks must decide alike, because the sums are collective: of several ranks, none may
        # take the shortcut.
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
            scale, shift = scale.unsqueeze(1), shift.unsqueeze(1)
        return (x.float() * scale + shift).to(x.dtype)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of the columns over all ranks, float32 [C]."""
        total = values.sum(0)
        return _SumOfRanks.apply(total) if dist.is_initialized() else total

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        """Move the running statistics towards those of a step, as ``BatchNorm1d`` does."""
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:  # the mean of all steps
            momentum = 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, momentum)
        # The running variance is the unbiased one, of count - 1.
        self.running_var.lerp_(variance * (count / max(count - 1, 1)), momentum)


class _SumOfRanks(torch.autograd.Function):
    """Sum a tensor over all ranks.

    The gradient is summed over all ranks as well, because the losses of all of them depend on it.
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
