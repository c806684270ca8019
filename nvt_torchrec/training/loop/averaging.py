"""A moving average of a run's weights, which is evaluated and kept in their place.

The weights after a step follow the rows of the last batches. Their average over an epoch has less
of that noise, as one of the last iterates has (Polyak & Juditsky 1992, "Acceleration of stochastic
approximation by averaging"), at no cost for a prediction.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from nvt_torchrec.training.launch.run_state import RunState, copy_state, list_local_tensors
from nvt_torchrec.training.settings.train_settings import TrainSettings

#: The weights of an epoch that the average takes, evenly spaced. Taking them after each step would
#: double the time of a step of large tables, and gives models as good.
_SAMPLES = 20


class Averaging:
    """Average the weights of a run, of which each rank averages its part.

    Attributes:
        state: The average, in main memory and in the form of a model's state; None before the
            first sample.
        samples: How many weights it has taken.

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
        """Take the weights after a step, counted from 1, if it is time."""
        if not self._is_on or step % self._every:
            return
        weights = self._run.model.state_dict()
        if self.state is None:
            self.state = copy_state(weights)
        self.samples += 1
        # The mean of all weights until there are those of an epoch; then older ones fade.
        share = 1 / min(self.samples, self._window)
        for average, weight in self._pair(weights):
            average.lerp_(weight.to(average), share)

    def apply(self) -> None:
        """Put the average in the place of the weights, if there is one."""
        if self.state is None or self._weights is not None:
            return
        pairs = self._pair(self._run.model.state_dict())
        self._weights = [weight.clone() for _, weight in pairs]
        for average, weight in pairs:
            weight.copy_(average)

    def finish(self) -> None:
        """Put the average in the place of the weights for good, after the last step."""
        self.apply()
        self._weights = None

    def take_back(self) -> None:
        """Put the weights in their place again, if the average is there."""
        if self._weights is None:
            return
        pairs = self._pair(self._run.model.state_dict())
        for (_, weight), before in zip(pairs, self._weights, strict=True):
            weight.copy_(before)
        self._weights = None

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average in the place of the weights for a while."""
        self.apply()
        try:
            yield
        finally:
            self.take_back()

    def _pair(self, weights: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the average and the weights of each tensor of floats of this rank."""
        assert self.state is not None
        pairs = zip(list_local_tensors(self.state), list_local_tensors(weights), strict=True)
        return [pair for pair in pairs if pair[1].is_floating_point()]
