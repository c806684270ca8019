"""Run the steps of a training on its batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from nvt_torchrec.training.data.loaders import Loader, TrainBatch, pad_batches
from nvt_torchrec.training.launch.run_state import RunState
from nvt_torchrec.training.optim import learning_rates
from nvt_torchrec.training.optim.combined import set_learning_rate
from nvt_torchrec.training.reporting.learning_check import LearningCheck
from nvt_torchrec.training.reporting.progress import Progress
from nvt_torchrec.training.settings.train_settings import TrainSettings
from nvt_torchrec.training.sharding.build import Pipeline


class Steps:
    """The steps of a training run on one rank, at their learning rates, counted and checked.

    Attributes:
        learning_rate: The learning rate of the tables in the last step.
        profiler: PyTorch's profiler, which each step notifies; None without ``--profile``.

    Args:
        run: The run to train.
        pipeline: The pipeline that trains it.
        settings: The settings of the run, with its rates.
        progress: The run's progress, which counts the steps.
        learning: The check of the steps' losses.
    """

    def __init__(
        self,
        run: RunState,
        pipeline: Pipeline,
        settings: TrainSettings,
        progress: Progress,
        learning: LearningCheck,
    ) -> None:
        self._run = run
        self._pipeline = pipeline
        self._settings = settings
        self._progress = progress
        self._learning = learning
        self.learning_rate = settings.learning_rate
        self.profiler: Any = None

    def read_batches(self, loader: Loader, first: int) -> Iterator[TrainBatch]:
        """Yield an epoch's batches from step ``first`` on, and measure the time spent waiting."""
        batches = pad_batches(loader, self._run.group, first)
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            self._progress.waited += time.perf_counter() - begin
            if batch is None:
                return
            yield batch

    def train(self, batches: Iterator[TrainBatch]) -> None:
        """Train the next batch, at the learning rates of this step (collective)."""
        progress = self._progress
        rates = learning_rates.compute_rates(
            self._settings, progress.step, progress.total_steps, progress.epoch_steps
        )
        self.learning_rate = rates.tables
        set_learning_rate(self._run.optimizer, rates)
        output = self._pipeline.progress(batches)
        progress.add(output)
        self._learning.add(progress.step, output)
        if self.profiler:
            self.profiler.step()
