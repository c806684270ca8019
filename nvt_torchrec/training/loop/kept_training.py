"""Keep a trial's training in main memory, so that a run that chooses it need not train it again."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from nvt_torchrec.models.metrics import ByLabel
from nvt_torchrec.training.launch.distributed import gather_objects
from nvt_torchrec.training.launch.run_state import copy_state, count_bytes
from nvt_torchrec.training.loop.stopping import Stopping
from nvt_torchrec.training.loop.trainer import Trainer
from nvt_torchrec.training.reporting.learning_check import LearningCheck
from nvt_torchrec.training.reporting.metrics_log import MetricsLog
from nvt_torchrec.training.reporting.progress import Progress

log = logging.getLogger(__name__)

#: The largest state of a rank that is kept, in bytes. A training with a larger state is repeated,
#: because the kept state and the trials of a long search would not fit into memory together.
_MAX_KEPT_BYTES = 2**31


@dataclasses.dataclass(frozen=True)
class KeptTraining:
    """A complete training of this rank, held in main memory.

    Attributes:
        tensors: Copies of weights, optimizer state and random number generators.
        loader: The state of the training set's loader after the last step.
        stopping: The best evaluation, with its own copy of the tensors.
        progress: The trained steps, samples and seconds.
        learning: The findings about losses and evaluations.
        events: The events to write to the run's log.
        learning_rate: The tables' learning rate in the last step.
        finished: The last trained step.
        metrics: The metrics of valid, on rank 0.
    """

    tensors: dict[str, Any]
    loader: dict[str, Any]
    stopping: Stopping
    progress: Progress
    learning: LearningCheck
    events: MetricsLog
    learning_rate: float
    finished: int | None
    metrics: dict[str, ByLabel]

    @classmethod
    def keep(cls, trial: Trainer) -> KeptTraining | None:
        """Copy the state of a finished trial; return None if it is too large (collective)."""
        tensors = trial.run.tensors()
        num_bytes = count_bytes(tensors) + count_bytes(trial.stopping.state or {})
        if max(gather_objects(trial.group, num_bytes)) > _MAX_KEPT_BYTES:
            return None
        return cls(
            tensors=copy_state(tensors),
            loader=trial.position(),
            stopping=trial.stopping,
            progress=trial.progress,
            learning=trial.learning,
            events=trial.events,
            learning_rate=trial.steps.learning_rate,
            finished=trial.finished,
            metrics=trial.metrics,
        )

    def load(self, trainer: Trainer) -> None:
        """Load this training into a trainer with the same settings (collective).

        A trial writes no files, so its events, and a checkpoint to resume from, are written now.
        """
        trainer.run.load(self.tensors)
        trainer.stopping.best = self.stopping.best
        trainer.stopping.state = self.stopping.state
        trainer.progress.take_over(self.progress)
        trainer.learning.take_over(self.learning)
        trainer.events.write_held(self.events)
        trainer.steps.learning_rate = self.learning_rate
        trainer.finished = self.finished
        trainer.metrics.update(self.metrics)
        trainer.taken_over = True
        if trainer.group.rank == 0:
            log.info("keeping the model of the best trial, which is not trained again")
        trainer.save_state(self.loader)
