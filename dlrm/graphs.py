"""Replay the dense layers' part of a training step as CUDA graphs.

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
    """Return whether ``device`` has CUDA graphs."""
    return device.type == "cuda"


def replay_dense(
    dlrm: DLRM, batch_size: int, *, amp: bool, lookups: torch.dtype = torch.float32
) -> None:
    """Make training steps of ``batch_size`` samples replay the dense layers as CUDA graphs.

    Evaluation and smaller batches launch their kernels as before, and so do the parts without
    weights: a graph reads its inputs at the addresses of the capture, so all pooled vectors would
    be copied there before DLRM's dot products. What the layers save for their backward stays
    allocated.

    Call it on the stream that training runs on, while no other thread uses the device, after the
    layers got their final forward (see :func:`dlrm.build.set_up_dense`), and before they are
    wrapped in DDP, whose hooks cannot be captured.

    Args:
        dlrm: The model; its dense layers are on a device for which :func:`can_capture` is true.
        batch_size: The samples of a step on this rank.
        amp: Whether the steps run under autocast to bfloat16.
        lookups: The type of the pooled vectors that layers with weights read.
    """
    device = next(dlrm.over_arch.parameters()).device
    weight = next(dlrm.dense_arch.parameters(), None)
    dense_features = 0 if weight is None else weight.shape[1]
    with torch.autocast(device.type, torch.bfloat16, enabled=amp, cache_enabled=False):
        parts = _parts(dlrm, torch.zeros(batch_size, dense_features, device=device), lookups)
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
def _parts(
    dlrm: DLRM, dense: torch.Tensor, lookups: torch.dtype
) -> list[tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """The parts that are captured, with inputs of the shapes that they get in training."""

    def output_of(part: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        # not compiled: only for the shape and the dtype
        return type(part).forward(part, *inputs).requires_grad_()

    sparse = dlrm.sparse_arch
    shape = (len(dense), sparse.F, sparse.D)
    vectors = torch.zeros(shape, device=dense.device, dtype=lookups, requires_grad=True)
    parts, bottom = [], dense
    if list(dlrm.dense_arch.parameters()):
        parts, bottom = [(dlrm.dense_arch, (dense,))], output_of(dlrm.dense_arch, dense)
    top = output_of(dlrm.inter_arch, bottom, vectors)
    if list(dlrm.inter_arch.parameters()):
        parts.append((dlrm.inter_arch, (bottom, vectors)))
    return [*parts, (dlrm.over_arch, (top,))]


def _warm_up(parts: list[tuple[nn.Module, tuple[torch.Tensor, ...]]]) -> None:
    """Compile, load kernels and choose among them.

    ``make_graphed_callables`` would do so on a stream of its own and keep the autograd nodes that
    accumulate the gradients of the last part's weights. These nodes run on the stream on which they
    were made: DDP would copy gradients there while the training stream already sends them.
    """
    for part, inputs in parts:
        tensors = [tensor for tensor in (*inputs, *part.parameters()) if tensor.requires_grad]
        for _ in range(3):
            output = part(*inputs)
            torch.autograd.grad(output, tensors, torch.empty_like(output))


@contextlib.contextmanager
def _capturing(device: torch.device) -> Iterator[None]:
    """Capture on the current stream, and free nothing of earlier graphs meanwhile."""
    gc.collect()  # else they would later free what the new ones use: the stream's workspaces
    gc.disable()
    before = torch.cuda.graph.default_capture_stream
    torch.cuda.graph.default_capture_stream = torch.cuda.current_stream(device)
    try:
        yield
    finally:
        torch.cuda.graph.default_capture_stream = before
        gc.enable()


class _Captured(nn.Module):
    """The weights and the present forward of a part, whose forward is replaced afterwards."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self._launch = part, part.forward

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._launch(*inputs)


class _Forward:
    """The forward of a part: a replay if the inputs have the captured shapes and dtypes."""

    def __init__(
        self, part: nn.Module, replay: nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> None:
        self._part, self._launch, self._replay = part, part.forward, replay
        self._names = tuple(inspect.signature(part.forward).parameters)
        self._captured = [(tensor.shape, tensor.dtype) for tensor in inputs]

    def __call__(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        inputs += tuple(named[name] for name in self._names[len(inputs) :])
        replayable = [(tensor.shape, tensor.dtype) for tensor in inputs] == self._captured
        if replayable and self._part.training and torch.is_grad_enabled():
            return self._replay(*inputs)
        return self._launch(*inputs)
