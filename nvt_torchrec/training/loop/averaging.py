"""A moving average of a run's weights, which is evaluated and kept instead of them.

The weights after a step follow the rows of the last batches. Averaging them over an epoch reduces
that noise (Polyak & Juditsky 1992, "Acceleration of stochastic approximation by averaging"), and
costs nothing at inference.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from nvt_torchrec.training.launch.run_state import RunState, copy_state, list_local_tensors
from nvt_torchrec.training.settings.train_settings import TrainSettings

#: How many times per epoch the average takes the weights, evenly spaced. Taking them after each
#: step would double the time of a step with large tables, and the models are no better.
_SAMPLES = 20


class Averaging:
    """Average the weights of a run; each rank averages its own part.

    Attributes:
        state: The average, in main memory, as a model's state dict; None before the first sample.
        samples: How many times the average has taken the weights.

    Args:
        run: The run.
        epoch_steps: The steps of an epoch.
        settings: The settings of the run. Without ``--average_weights`` nothing is done.
    """

    def __init__(self, run: RunState, epoch_steps: int, settings: TrainSettings) -> None:
        self._run = run
        self._is_on = bool(settings.average_weights)
        self._every = max(1, math.ceil(epoch_steps / _SAMPLES))
        self._window = max(1, epoch_steps // self._every)
        self._weights: list[torch.Tensor] | None = None
        self.state: dict[str, Any] | None = None
        self.samples = 0

    def note_step(self, step: int) -> None:
        """Add the weights after a step, counted from 1, to the average if they are due."""
        if not self._is_on or step % self._every:
            return
        weights = self._run.model.state_dict()
        if self.state is None:
            self.state = copy_state(weights)
        self.samples += 1
        # In the first epoch this is the mean of all samples; later, older samples fade.
        share = 1 / min(self.samples, self._window)
        for average, weight in self._pair(weights):
            average.lerp_(weight.to(average), share)

    def apply(self) -> None:
        """Replace the model's weights by the average, if there is one."""
        if self.state is None or self._weights is not None:
            return
        pairs = self._pair(self._run.model.state_dict())
        self._weights = [weight.clone() for _, weight in pairs]
        for average, weight in pairs:
            weight.copy_(average)

    def finish(self) -> None:
        """Replace the model's weights by the average for good, after the last step."""
        self.apply()
        self._weights = None

    def restore(self) -> None:
        """Undo :meth:`apply`, if it was called."""
        if self._weights is None:
            return
        pairs = self._pair(self._run.model.state_dict())
        for (_, weight), before in zip(pairs, self._weights, strict=True):
            weight.copy_(before)
        self._weights = None

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Use the average as the model's weights within the context."""
        self.apply()
        try:
            yield
        finally:
            self.restore()

    def _pair(self, weights: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the average and the current value of each floating-point tensor of this rank."""
        assert self.state is not None
        pairs = zip(list_local_tensors(self.state), list_local_tensors(weights), strict=True)
        return [(average, weight) for average, weight in pairs if weight.is_floating_point()]
