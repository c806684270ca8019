"""Warn early that a run does not learn, with the likely remedy.

The loss of training steps is checked after steps 1, 2, 4, 8, …, the AUROC at evaluations of valid
after the first tenth of an epoch, the calibration at the end.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch

from nvt_torchrec.dlrm.launch.distributed import Group, reduce_sum
from nvt_torchrec.dlrm.metrics import Metrics
from nvt_torchrec.dlrm.model import StepOutput
from nvt_torchrec.dlrm.optimizers import Remedies
from nvt_torchrec.dlrm.order import find_order
from nvt_torchrec.dlrm.reporting.metrics_log import REGRESSION, MetricsLog
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)

#: Below this AUROC a model has learned nothing; chance is 0.5.
NOTHING_LEARNED = 0.52
#: A model with this AUROC has learned something; there must be no warning by chance.
SOMETHING_LEARNED = 0.54
#: The loss is too high from this multiple of the loss of always predicting the click rate on.
TOO_MUCH_LOSS = 10
#: The share of an epoch after which something should be learned.
_SHARE = 0.1
#: How far a calibration may be from 1.
_OFF = 0.05
#: The fewest clicks, and the fewest samples without a click, for a click rate.
_FEW = 100


class LearningCheck:
    """Check training steps and evaluations, and warn of each kind of problem once, on rank 0.

    Args:
        settings: The settings of the run.
        group: This rank.
        events: The log that gets a ``warning`` event for each warning.
        epoch_steps: The steps of an epoch.
        remedies: What helps.
    """

    def __init__(
        self,
        settings: TrainSettings,
        group: Group,
        events: MetricsLog,
        epoch_steps: int,
        remedies: Remedies,
    ) -> None:
        self._group, self._events = group, events
        self._remedies = remedies
        self._warned: set[str] = set()
        self._sorted_by = ""
        if not group.rank and settings.mode == "train" and not settings.shuffle_training_set:
            self._sorted_by = find_order(settings)
        if self._sorted_by:
            log.info(
                "the training rows are read as they lie, in the order of column %s: "
                "--shuffle_training_set reads them in a new order every epoch",
                self._sorted_by,
            )
        self._samples = 0
        # on the device, since the last check
        self._loss, self._clicks = torch.zeros(2, dtype=torch.float64, device=group.device)
        self._begin = max(math.ceil(_SHARE * epoch_steps), settings.lr_warmup_steps or 0)

    def add(self, step: int, output: StepOutput) -> None:
        """Add step ``step`` (from 1, over all epochs), and at some steps check (collective)."""
        self._samples += output.global_size
        self._loss.add_(output.loss, alpha=output.global_size)
        labels, weights = output.labels, output.weights
        self._clicks.add_((labels if weights is None else labels * weights).sum())
        if step & (step - 1) == 0:
            self._check_loss(step)

    def evaluated(self, step: int, valid: Metrics | None) -> None:
        """Check an evaluation of valid; ``valid`` is None on ranks other than 0."""
        if valid is None or valid.auroc is None or step <= self._begin:
            return
        if valid.total_weight is not None:
            return  # how much chance there is in it depends on all weights
        if _is_chance(valid.auroc, valid.positives, valid.samples):
            self._warn(
                "chance",
                step,
                f"AUROC {valid.auroc:.4f} of valid: nothing is learned yet",
                self._remedies.at_chance,
            )

    def finished(
        self,
        step: int,
        metrics: Mapping[str, Metrics],
        baselines: Mapping[tuple[str, str], Metrics],
    ) -> None:
        """Check the calibration of the last evaluations, on rank 0, beside the baselines'."""
        for split, result in metrics.items():
            if not _is_off(result):
                continue
            regression = baselines.get((split, REGRESSION))
            if regression and _is_off(regression):
                remedy = (
                    f"logistic regression's is {regression.calibration:.3f}: clicks are rarer or "
                    "more frequent than in training; train on rows of the same time"
                )
            else:
                remedy = self._remedies.calibration
            self._warn(
                "calibration",
                step,
                f"calibration {result.calibration:.3f} of {split}: the mean prediction is "
                f"{result.mean_prediction:.4f}, the click rate {result.positive_rate:.4f}",
                remedy,
            )

    def _check_loss(self, step: int) -> None:
        loss, clicks = reduce_sum(self._group, self._loss, self._clicks)
        loss /= self._group.world_size * self._samples
        samples, self._samples = self._samples, 0
        self._loss.zero_()
        self._clicks.zero_()
        if self._group.rank or not _FEW <= clicks <= samples - _FEW:
            return
        rate = clicks / samples
        base = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
        if not loss <= TOO_MUCH_LOSS * base:  # NaN, too
            self._warn(
                "loss",
                step,
                f"loss {loss:.4g}, where always predicting the click rate of "
                f"{rate:.2%} gives {base:.3f}: training diverges",
                self._remedies.too_high,
            )

    def _warn(self, kind: str, step: int, problem: str, remedy: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("step %d: %s\n  -> %s", step, problem, remedy)
            self._events.write("warning", step=step, text=problem, remedy=remedy)


def _is_off(metrics: Metrics) -> bool:
    """Return whether a calibration is off by more than a twentieth, and more than by chance."""
    if metrics.calibration is None or metrics.total_weight is not None:
        return False
    return abs(metrics.calibration - 1) > _OFF + 2 / math.sqrt(metrics.positives)


def _is_chance(area: float, clicks: int, rows: int) -> bool:
    """Return whether an AUROC shows that nothing is learned, with enough rows to be sure.

    Random scores have an AUROC of variance (rows + 1)/(12·clicks·rest) (Hanley & McNeil 1982).
    """
    rest = rows - clicks
    if area >= NOTHING_LEARNED or not clicks or not rest:
        return False
    return area + 2 * math.sqrt((rows + 1) / (12 * clicks * rest)) < SOMETHING_LEARNED
