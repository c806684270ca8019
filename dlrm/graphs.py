"""The dense layers' part of a training step, replayed as CUDA graphs.

``torch.cuda.make_graphed_callables`` captures what has the same shapes in every step. Lookups and
messages between ranks stay outside: how many ids there are differs from step to step.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Iterator

import torch
from torch import nn
from torchrec.models.dlrm import DLRM


def can_capture(device: torch.device) -> bool:
    """Whether there are CUDA graphs on ``device``."""
    return device.type == "cuda"


def replay_dense(dlrm: DLRM, batch_size: int, *, amp: bool) -> None:
    """Let training steps of ``batch_size`` samples replay the dense layers, not launch them.

    Evaluation and smaller batches compute as before. The parts without weights do, too: a graph
    reads its inputs where they lay when it was captured, so DLRM's dot products would have all
    pooled vectors copied first. What the layers save for their backward stays allocated.

    Call it on the stream that training runs on, while no other thread uses the device; after the
    layers got the forward that they keep, and before they are wrapped in DDP, whose hooks cannot
    be captured.

    Args:
        dlrm: its dense layers are on a device for which :func:`can_capture` holds.
        batch_size: of a rank.
        amp: the steps run under autocast to bfloat16.
    """
    device = next(dlrm.over_arch.parameters()).device
    weight = next(dlrm.dense_arch.parameters(), None)
    dense_features = 0 if weight is None else weight.shape[1]
    with torch.autocast(device.type, torch.bfloat16, enabled=amp, cache_enabled=False):
        parts = _parts(dlrm, torch.zeros(batch_size, dense_features, device=device))
        _warm_up(parts)
        with _capturing(device):
            graphed = torch.cuda.make_graphed_callables(
                tuple(_Captured(part) for part, _ in parts),
                tuple(inputs for _, inputs in parts),
                num_warmup_iters=0,
            )
    for (part, inputs), replay in zip(parts, graphed, strict=True):
        part.forward = _Forward(part, replay, inputs)


@torch.no_grad()
def _parts(dlrm: DLRM, dense: torch.Tensor) -> list[tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """What is captured, with inputs such as it gets in training."""

    def launched(part: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        # not compiled: only for the shape and the dtype
        return type(part).forward(part, *inputs).requires_grad_()

    sparse = dlrm.sparse_arch
    vectors = torch.zeros(len(dense), sparse.F, sparse.D, device=dense.device, requires_grad=True)
    parts, bottom = [], dense
    if list(dlrm.dense_arch.parameters()):
        parts, bottom = [(dlrm.dense_arch, (dense,))], launched(dlrm.dense_arch, dense)
    top = launched(dlrm.inter_arch, bottom, vectors)
    if list(dlrm.inter_arch.parameters()):
        parts.append((dlrm.inter_arch, (bottom, vectors)))
    return [*parts, (dlrm.over_arch, (top,))]


def _warm_up(parts: list[tuple[nn.Module, tuple[torch.Tensor, ...]]]) -> None:
    """Compile, load kernels and choose among them.

    ``make_graphed_callables`` would do so on a stream of its own and keep the nodes by which the
    last part's weights get their gradients. Those belong to the stream on which they were made:
    there DDP would copy gradients that the training stream goes on to send.
    """
    for part, inputs in parts:
        wanted = [one for one in (*inputs, *part.parameters()) if one.requires_grad]
        for _ in range(3):
            output = part(*inputs)
            torch.autograd.grad(output, wanted, torch.empty_like(output))


@contextlib.contextmanager
def _capturing(device: torch.device) -> Iterator[None]:
    """Capture on the current stream, and let nothing of earlier graphs be freed meanwhile."""
    gc.collect()  # else they would free later what new ones use: the workspaces of the stream
    gc.disable()
    before = torch.cuda.graph.default_capture_stream
    torch.cuda.graph.default_capture_stream = torch.cuda.current_stream(device)
    try:
        yield
    finally:
        torch.cuda.graph.default_capture_stream = before
        gc.enable()


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
