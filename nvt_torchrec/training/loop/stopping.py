"""Decide when a run stops early, and keep the model of the best evaluation."""

from __future__ import annotations

import logging
from typing import Any

from nvt_torchrec.models.metrics import ByLabel, count_effective_rows, sum_log_losses
from nvt_torchrec.training.launch.distributed import Group, broadcast_object
from nvt_torchrec.training.launch.run_state import RunState, copy_state
from nvt_torchrec.training.optim.learning_rates import find_period
from nvt_torchrec.training.reporting.progress import Progress
from nvt_torchrec.training.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)

#: How much lower the log loss, summed over the rows of valid, must be to count as better in the
#: middle of a schedule. It is the one-standard-error rule (Breiman et al. 1984, "Classification and
#: Regression Trees", §3.4.3) for models that differ little: if the new model is the true one, the
#: rows' differences sum to d nats with a variance of 2 d, so d exceeds its standard error if it is
#: more than 2. Estimating the standard error from the rows' differences was tried instead: the
#: models were as good on logs of 2,500 rows, and worse on some logs of 45,000 rows.
NATS = 2.0


class Stopping:
    """Decide after each evaluation of valid whether a run stops; methods are collective.

    Without ``--early_stopping`` nothing is kept. With it, each rank has a copy of its part of
    weights and optimizer state in main memory, and every checkpoint also holds that copy.

    Attributes:
        best: The best evaluation, JSON-ready: its ``loss``, ``step`` and ``samples``, and
            ``worse``, the number of evaluations since; None before the first. With
            ``--stop_by auroc``, ``loss`` is 1 − AUROC. At the end of a schedule an evaluation is
            better if its loss is lower; in the middle, if the log loss, summed over the rows, is
            lower by ``NATS``.
        state: The tensors at the best evaluation, as a checkpoint holds them; None before the
            first.
    """

    def __init__(self, settings: TrainSettings, group: Group) -> None:
        self._settings = settings
        self._group = group
        self.best: dict[str, Any] | None = None
        self.state: dict[str, Any] | None = None

    def note_evaluation(self, metrics: ByLabel | None, progress: Progress, run: RunState) -> None:
        """Record an evaluation, and end the run after this step if it should stop.

        Args:
            metrics: The metrics by label on rank 0; None on other ranks.
            progress: The run's progress, whose ``total_steps`` becomes the current step to stop.
            run: The run, whose tensors are copied if the evaluation is the best.
        """
        patience = self._settings.early_stopping
        if not (patience or self._settings.stop_at_auroc):
            return
        found = self._find_loss(metrics), count_effective_rows(metrics), self._is_good(metrics)
        loss, rows, is_last = broadcast_object(self._group, found)
        if patience and loss is not None:
            schedule_begin, _ = find_period(progress.step, progress.epoch_steps)
            ends_schedule = progress.step in (schedule_begin, progress.total_steps)
            margin = 0.0
            if self._settings.stop_by == "log_loss" and not ends_schedule:
                margin = NATS / rows
            # A model that reaches --stop_at_auroc is kept, whatever its loss.
            if self.best is None or is_last or loss < self.best["loss"] - margin:
                state = run.tensors()
                self.state = copy_state({name: state[name] for name in ("model", "optimizer")})
                self.best = {
                    "loss": loss,
                    "step": progress.step,
                    "samples": progress.samples,
                    "worse": 0,
                }
            else:
                self.best = {**self.best, "worse": self.best["worse"] + 1}
            is_last = is_last or self.best["worse"] >= patience
        if is_last:
            progress.total_steps = progress.step

    def _is_good(self, metrics: ByLabel | None) -> bool:
        """Return whether the AUROC of every label reaches ``--stop_at_auroc``."""
        target = self._settings.stop_at_auroc
        if not target or not metrics:
            return False
        return min(value.auroc or 0.0 for value in metrics.values()) >= target

    def _find_loss(self, metrics: ByLabel | None) -> float | None:
        """Return the loss to minimize, summed over the labels; None if no label has one."""
        if self._settings.stop_by == "log_loss":
            return sum_log_losses(metrics)
        aurocs = [m.auroc for m in (metrics or {}).values() if m.auroc is not None]
        return sum(1 - auroc for auroc in aurocs) if aurocs else None

    def finish(self, progress: Progress, run: RunState) -> None:
        """Load the model of the best evaluation, if there is one."""
        if self.best and self.state and self.best["step"] != progress.step:
            progress.step = self.best["step"]
            progress.samples = self.best["samples"]
            run.load(self.state)
            if self._group.rank == 0:
                log.info(
                    "keeping the model of the best evaluation, after step %s", f"{progress.step:,}"
                )
