"""Warn early that a run does not learn, with the likely remedy.

The loss of training steps is checked after steps 1, 2, 4, 8, …, the AUROC at evaluations of valid
after the first tenth of an epoch; calibration, and AUROC beside the regression's, at the end.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch

from nvt_torchrec.base.auroc import TOO_GOOD
from nvt_torchrec.dlrm.launch.distributed import Group, reduce_sum
from nvt_torchrec.dlrm.metrics import Metrics
from nvt_torchrec.dlrm.model import StepOutput
from nvt_torchrec.dlrm.models.config import ModelConfig
from nvt_torchrec.dlrm.optimizers import Remedies
from nvt_torchrec.dlrm.order import find_order
from nvt_torchrec.dlrm.reporting.baselines import best_column
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
#: A model with a better AUROC may have seen the label, by one column; and has seen it.
_SUSPICIOUS, _IMPOSSIBLE = 0.95, 0.995
#: How far AUROCs may be apart: as such, and in standard deviations if they are of the same rows.
_EQUAL, _PAIRED = 0.001, 0.6
#: The factor by which the log loss of valid rises where a model overfits.
_RISEN = 1.01
#: What to do where always predicting the click rate of training is off as well.
_SHIFTED = (
    "so is that of always predicting the click rate of training: clicks are rarer or more frequent "
    "in %s; train on rows of the same time, or divide them at random"
)
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
        self._settings, self._group, self._events = settings, group, events
        self._remedies = remedies
        self._warned: set[str] = set()
        self._at_end: list[str] = []
        self._losses: list[tuple[float, int]] = []  # of valid, with their steps
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
        self._epoch_steps = epoch_steps
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
        if valid is None or valid.auroc is None or valid.log_loss is None:
            return
        self._losses.append((valid.log_loss, step))
        if step > self._begin and _is_chance(valid.auroc, *valid.effective_counts):
            self._warn(
                "chance",
                step,
                f"AUROC {valid.auroc:.4f} of valid: nothing is learned yet",
                self._remedies.at_chance,
            )

    def finished(
        self,
        step: int,
        config: ModelConfig,
        metrics: Mapping[str, Metrics],
        baselines: Mapping[tuple[str, str], Metrics],
    ) -> list[str]:
        """Check the last evaluations beside the baselines', on rank 0.

        Args:
            step: The last step.
            config: The model's shape.
            metrics: The last metrics by split.
            baselines: The metrics of the baselines by split and name.

        Returns:
            The warnings, to be logged at the end.
        """
        for split, result in metrics.items():
            beside = [m for (of, _), m in baselines.items() if of == split]
            if result.auroc is None:
                continue
            if result.gauc_samples == 0:
                problem = f"no GAUC of {split}: no id of training is in rows of both labels"
                column = self._settings.gauc_column
                remedy = f"give column {column} of the spec hash_buckets, and run the ETL again"
                self._warn("gauc", step, problem, remedy, last=True)
            column, area = "", 0.0
            if result.auroc > _SUSPICIOUS:
                column, area = best_column(self._settings, config, split)
            if result.auroc > _IMPOSSIBLE or area > TOO_GOOD:
                problem = f"AUROC {result.auroc:.4f} of {split} is too good to be true"
                remedy = (
                    f"look at column {column}, alone {area:.3f}: leave out what is known only "
                    "after the click"
                )
                self._warn("leak", step, problem, remedy, last=True)
            regression = baselines.get((split, REGRESSION))
            if regression and regression.auroc and result.auroc < _limit(result, regression):
                problem = (
                    f"AUROC {result.auroc:.4f} of {split} is worse than the {regression.auroc:.4f} "
                    "of a logistic regression"
                )
                self._warn("worse", step, problem, self._cause(), last=True)
            if _is_off(result):
                problem = (
                    f"calibration {result.calibration:.3f} of {split}: the mean prediction is "
                    f"{result.mean_prediction:.4f}, the click rate {result.positive_rate:.4f}"
                )
                shifted = beside and all(map(_is_off, beside))
                remedy = _SHIFTED % split if shifted else self._cause()
                self._warn("calibration", step, problem, remedy, last=True)
        return self._at_end

    def _cause(self) -> str:
        """Return the likely cause of a model that is worse than it should be, and the remedy."""
        for last, step in self._losses[-1:]:
            least, best = min(self._losses)
            if step > self._epoch_steps and last > _RISEN * least:
                return (
                    f"overfitting: the log loss of valid was {least:.4f} after step {best} and is "
                    f"{last:.4f} now; give --max_steps {best}, or fewer --epochs"
                )
        if self._sorted_by:
            return (
                f"the training rows were read in the order of column {self._sorted_by}: give "
                f"--shuffle_training_set; or {self._remedies.at_end}"
            )
        return self._remedies.at_end

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

    def _warn(self, kind: str, step: int, problem: str, remedy: str, *, last: bool = False) -> None:
        """Warn now, or with ``last`` at the end of the log."""
        if kind in self._warned:
            return
        self._warned.add(kind)
        self._events.write("warning", step=step, text=problem, remedy=remedy)
        text = f"WARNING: step {step}: {problem}\n  -> {remedy}"
        if last:
            self._at_end.append(text)
        else:
            log.warning("%s", text)


def _limit(model: Metrics, regression: Metrics) -> float:
    """Return the AUROC below which a model is worse than a regression by more than chance.

    On the same rows, scores that are much alike differ by less than both vary.
    """
    share = _PAIRED if model.samples == regression.samples else 2
    return (regression.auroc or 0.0) - _EQUAL - share * _deviation(*regression.effective_counts)


def _is_off(metrics: Metrics) -> bool:
    """Return whether a calibration is off by more than a twentieth, and more than by chance."""
    clicks, _ = metrics.effective_counts
    if metrics.calibration is None or not clicks:
        return False
    return abs(metrics.calibration - 1) > _OFF + 2 / math.sqrt(clicks)


def _is_chance(area: float, clicks: float, rest: float) -> bool:
    """Return whether an AUROC shows that nothing is learned, with enough rows to be sure."""
    return area < NOTHING_LEARNED and area + 2 * _deviation(clicks, rest) < SOMETHING_LEARNED


def _deviation(clicks: float, rest: float) -> float:
    """Return the standard deviation of the AUROC of random scores (Hanley & McNeil 1982)."""
    return math.sqrt((clicks + rest + 1) / (12 * clicks * rest)) if clicks and rest else math.inf
