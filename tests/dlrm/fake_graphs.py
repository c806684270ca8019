"""A stand-in for CUDA graphs on a CPU.

Its replays write their results to where they were captured, as those of CUDA do: outputs and
gradients that somebody kept from the step before change, and a weight must not move elsewhere.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

#: Replays of forwards and of backwards.
Counts = dict[str, int]


def install(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Let a CPU capture; returns what is counted from now on."""
    counts = {"forward": 0, "backward": 0}

    def make_graphed_callables(
        callables: tuple[nn.Module, ...],
        sample_args: tuple[tuple[torch.Tensor, ...], ...],
        num_warmup_iters: int,
    ) -> tuple[nn.Module, ...]:
        if torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled():
            raise RuntimeError("does not support the autocast caching")
        for module, inputs in zip(callables, sample_args, strict=True):
            _capture(module, inputs, counts)
        return callables

    monkeypatch.setattr("torch.cuda.make_graphed_callables", make_graphed_callables)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)
    monkeypatch.setattr("nvt_torchrec.dlrm.build.can_capture", lambda device: True)
    return counts


def _capture(module: nn.Module, inputs: tuple[torch.Tensor, ...], counts: Counts) -> None:
    weights = tuple(module.parameters())
    surface = (*inputs, *weights)
    wanted = [one for one in surface if one.requires_grad]
    places = [weight.data_ptr() for weight in weights]
    compute, autocast = module.forward, torch.is_autocast_enabled("cpu")
    live = compute(*inputs)
    output = live.detach().clone()
    above = torch.empty_like(output)
    # it raises if one of them is not used
    gradients = [one.clone() for one in torch.autograd.grad(live, wanted, torch.ones_like(live))]

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given: torch.Tensor) -> torch.Tensor:
            nonlocal live
            counts["forward"] += 1
            assert [weight.data_ptr() for weight in weights] == places
            for mine, theirs in zip(inputs, given[: len(inputs)], strict=True):
                assert mine.shape == theirs.shape
                assert mine.dtype == theirs.dtype
                mine.detach().copy_(theirs)
            with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                live = compute(*inputs)
            output.copy_(live.detach())
            return output.detach()

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            counts["backward"] += 1
            above.copy_(gradient)
            found = torch.autograd.grad(live, wanted, above)
            for mine, one in zip(gradients, found, strict=True):
                mine.copy_(one)
            left = iter(gradients)
            return tuple(next(left).detach() if one.requires_grad else None for one in surface)

    module.forward = lambda *given: Replay.apply(*given, *weights)
