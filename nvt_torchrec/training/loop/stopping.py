"""When a run stops early, and the model of its best evaluation, which it keeps."""

from __future__ import annotations

import logging
from typing import Any

from nvt_torchrec.models.metrics import ByLabel, count_effective_rows, sum_log_losses
from nvt_torchrec.training.launch.distributed import Group, from_rank_0
from nvt_torchrec.training.launch.run_state import RunState, copied
from nvt_torchrec.training.optim.learning_rates import period
from nvt_torchrec.training.reporting.progress import Progress
from nvt_torchrec.training.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)

#: By how much, summed over the rows of valid, the log loss must be lower in the middle of a
#: schedule. It is the one-standard-error rule (Breiman et al. 1984, "Classification and Regression
#: Trees", §3.4.3) for models that differ little: if the new one is right, the rows' differences sum
#: to d nats with the variance 2 d, and d is more than its standard error where it is more than 2.
#: With each row's difference instead, kept for the next evaluation, logs of 2,500 rows had models
#: as good, and some of 45,000 rows worse ones.
NATS = 2.0


class Stopping:
    """Decide after each evaluation of valid whether a run stops; methods are collective.

    Without ``--early_stopping`` nothing is kept. With it, each rank has a copy of its part of
    weights and optimizer state in main memory, and every checkpoint holds that copy, too.

    Attributes:
        best: The ``loss``, ``step`` and ``samples`` of the best evaluation, and the number of
            evaluations since, ``worse``; None without one. JSON-ready. With ``--stop_by auroc``
            ``loss`` is 1 − AUROC. An evaluation is better at the end of a schedule if its loss is
            lower, else, by log loss, if it is so by ``NATS`` in all.
        state: The tensors then, as a checkpoint holds them; None likewise.
    """

    def __init__(self, settings: TrainSettings, group: Group) -> None:
        self._settings, self._group = settings, group
        self.best: dict[str, Any] | None = None
        self.state: dict[str, Any] | None = None

    def evaluated(self, metrics: ByLabel | None, progress: Progress, run: RunState) -> None:
        """Look at an evaluation, which rank 0 has; at the last one, end the run after its step."""
        patience, target = self._settings.early_stopping, self._settings.stop_at_auroc
        if not (patience or target):
            return
        values = list((metrics or {}).values())
        reached = bool(target and values and min(m.auroc or 0.0 for m in values) >= target)
        found = self._loss(metrics), count_effective_rows(metrics), reached
        loss, rows, reached = from_rank_0(self._group, found)
        if patience and loss is not None:
            ends = period(progress.step, progress.epoch_steps)[0], progress.total_steps
            by_loss = self._settings.stop_by == "log_loss"
            minimum = NATS / rows if by_loss and progress.step not in ends else 0.0
            worse = self.best["worse"] + 1 if self.best and not reached else 0
            if self.best is None or reached or loss < self.best["loss"] - minimum:
                worse, state = 0, run.tensors()
                self.state = copied({name: state[name] for name in ("model", "optimizer")})
                self.best = {"loss": loss, "step": progress.step, "samples": progress.samples}
            self.best = {**self.best, "worse": worse}
            reached |= worse >= patience
        if reached:
            progress.total_steps = progress.step

    def _loss(self, metrics: ByLabel | None) -> float | None:
        """Return what should be low, summed over the labels; None if no row has a label."""
        if self._settings.stop_by == "log_loss":
            return sum_log_losses(metrics)
        values = (metrics or {}).values()
        areas = [m.auroc for m in values if m.auroc is not None]
        return sum(1 - area for area in areas) if areas else None

    def finish(self, progress: Progress, run: RunState) -> None:
        """Go back to the best evaluation, if there is one."""
        if self.best and self.state and self.best["step"] != progress.step:
            progress.step, progress.samples = self.best["step"], self.best["samples"]
            run.load(self.state)
            if self._group.rank == 0:
                log.info(
                    "the model is that of the best evaluation, after step %s", f"{progress.step:,}"
                )
