"""The dense layers' part of a training step, replayed as CUDA graphs.

``torch.cuda.make_graphed_callables`` captures what has the same shapes in every step. Lookups and
messages between ranks stay outside: how many ids there are differs from step to step.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torchrec.models.dlrm import DLRM


def can_capture(device: torch.device) -> bool:
    """Whether there are CUDA graphs on ``device``."""
    return device.type == "cuda"


def replay_dense(dlrm: DLRM, dense_features: int, batch_size: int, *, amp: bool) -> None:
    """Let training steps of ``batch_size`` samples replay the dense layers, not launch them.

    Evaluation and smaller batches compute as before. The parts without weights do, too: a graph
    reads its inputs where they lay when it was captured, so DLRM's dot products would have all
    pooled vectors copied first.

    Call it before the layers are wrapped in DDP, whose hooks cannot be captured, and after they
    got the forward that they keep.

    Args:
        dlrm: its dense layers are on a device for which :func:`can_capture` holds.
        dense_features: how many dense features there are.
        batch_size: of a rank.
        amp: the steps run under autocast to bfloat16.
    """
    device = next(dlrm.dense_arch.parameters()).device
    shape = (batch_size, dlrm.sparse_arch.F, dlrm.sparse_arch.D)
    with torch.autocast(device.type, torch.bfloat16, enabled=amp, cache_enabled=False):
        with torch.no_grad():
            dense = torch.zeros(batch_size, dense_features, device=device)
            vectors = torch.zeros(shape, device=device)
            bottom = dlrm.dense_arch(dense)
            top = dlrm.inter_arch(bottom, vectors)
        parts = [(dlrm.dense_arch, (dense,))]
        if list(dlrm.inter_arch.parameters()):
            parts.append((dlrm.inter_arch, (bottom.requires_grad_(), vectors.requires_grad_())))
        parts.append((dlrm.over_arch, (top.requires_grad_(),)))
        if device.type == "cuda":
            # Gradients are added up on the stream that their parameters were captured on. Were
            # that not the one on which training runs, each of them would be waited for.
            torch.cuda.graph.default_capture_stream = torch.cuda.current_stream(device)
        graphed = torch.cuda.make_graphed_callables(
            tuple(_Captured(part) for part, _ in parts), tuple(inputs for _, inputs in parts)
        )
    for (part, inputs), replay in zip(parts, graphed, strict=True):
        part.forward = _Forward(part, replay, inputs)


class _Captured(nn.Module):
    """The weights and the present forward of a part, whose own is replaced afterwards."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self._launch = part, part.forward

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._launch(*inputs)


class _Forward:
    """The forward of a part: a replay where the inputs are such as were captured."""

    def __init__(
        self, part: nn.Module, replay: nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> None:
        self._part, self._launch, self._replay = part, part.forward, replay
        self._names = tuple(inspect.signature(part.forward).parameters)
        self._captured = [(one.shape, one.dtype) for one in inputs]

    def __call__(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        inputs += tuple(named[name] for name in self._names[len(inputs) :])
        alike = [(one.shape, one.dtype) for one in inputs] == self._captured
        if alike and self._part.training and torch.is_grad_enabled():
            return self._replay(*inputs)
        return self._launch(*inputs)
