"""Warn early that a run does not learn, with the likely remedy.

The loss of training steps is checked after steps 1, 2, 4, 8, …, the AUROC at evaluations of valid
after the first tenth of an epoch; at the end calibration, and AUROC and log loss beside the
baselines'.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping

import torch

from nvt_torchrec.base.auroc import TOO_GOOD
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.metrics import ByLabel, Metrics
from nvt_torchrec.training.baselines.baselines import (
    CLICK_RATE,
    REGRESSION,
    TREES,
    best_column,
    measure_repeated_rows,
)
from nvt_torchrec.training.launch.distributed import Group, reduce_sum
from nvt_torchrec.training.reporting.metrics_log import MetricsLog, name_of
from nvt_torchrec.training.reporting.verdict import estimate_deviation
from nvt_torchrec.training.settings.optimizers import Remedies
from nvt_torchrec.training.settings.train_settings import TrainSettings
from nvt_torchrec.training.sharding.train_model import StepOutput

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
#: From which share of rows on, beside what is usual, training rows seem to be in another split.
_REPEATED = 0.02
#: How far a model's AUROC may be below a baseline's.
_MARGINS = {REGRESSION: 0.001, TREES: 0.005}
#: How far AUROCs of the same rows may be apart, in standard deviations.
_PAIRED = 0.6
#: The factor from which on a log loss is above that of always predicting the click rate.
_WORSE = 1.002
#: Valid still improves if its log loss has fallen by more than this share in the last quarter.
_FALLING = 0.003
#: The factor by which the log loss of valid rises where a model overfits.
_RISEN = 1.01
#: What to do where always predicting the click rate of training is off as well.
_SHIFTED = (
    "so is that of always predicting the click rate of training: clicks are rarer or more frequent "
    "in %s; train on rows of the same time, or divide them at random"
)
#: What to do where the regression is off, and the click rate is not.
_UNSEEN = (
    "so is that of the logistic regression: rows of %s have values that training has not; let "
    "values that are rare in training share the id of unknown ones, by --freq_threshold 20 of "
    "nvt-etl run, or divide the rows at random"
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
        # of valid by label, with their steps
        self._losses: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        self._repeated: dict[str, tuple[float, float]] = {}  # by split
        self._samples = 0
        # on the device, since the last check
        sums = torch.zeros(1 + settings.label_count, dtype=torch.float64, device=group.device)
        self._loss, self._clicks = sums[0], sums[1:]
        self._epoch_steps = epoch_steps
        self._begin = max(math.ceil(_SHARE * epoch_steps), settings.lr_warmup_steps or 0)

    def add(self, step: int, output: StepOutput) -> None:
        """Add step ``step`` (from 1, over all epochs), and at some steps check (collective)."""
        self._samples += output.global_size
        self._loss.add_(output.loss, alpha=output.global_size)
        labels = output.labels
        if output.weights is not None:
            labels = labels * output.weights.unsqueeze(1)
        self._clicks.add_(labels.sum(0))
        if step & (step - 1) == 0:
            self._check_loss(step)

    def evaluated(self, step: int, metrics: ByLabel | None) -> None:
        """Check an evaluation of valid; ``metrics`` is None on ranks other than 0."""
        for label, valid in (metrics or {}).items():
            if valid.auroc is None or valid.log_loss is None:
                continue
            self._losses[label].append((valid.log_loss, step))
            if step > self._begin and _is_chance(valid.auroc, *valid.effective_counts):
                name = self._name_of("valid", label)
                problem = f"AUROC {valid.auroc:.4f} of {name}: nothing is learned yet"
                self._warn(f"chance {label}", step, problem, self._remedies.at_chance)

    def _name_of(self, split: str, label: str) -> str:
        return name_of(split, label if len(self._clicks) > 1 else "")

    def finished(
        self,
        step: int,
        config: ModelConfig,
        metrics: Mapping[str, ByLabel],
        baselines: Mapping[tuple[str, str], ByLabel],
    ) -> list[str]:
        """Check the last evaluations beside the baselines', on rank 0.

        Args:
            step: The last step.
            config: The model's shape.
            metrics: The last metrics by split.
            baselines: Those of the baselines by split and name.

        Returns:
            The warnings, to be logged at the end.
        """
        for split, by_label in metrics.items():
            beside = {name: m for (where, name), m in baselines.items() if where == split}
            for label, result in by_label.items():
                of_label = {name: m[label] for name, m in beside.items() if label in m}
                self._check_last(step, config, split, label, result, of_label)
        return self._at_end

    def _check_last(
        self,
        step: int,
        config: ModelConfig,
        split: str,
        label: str,
        result: Metrics,
        baselines: Mapping[str, Metrics],
    ) -> None:
        """Check the last metrics of a label in a split beside the baselines', by their names."""
        name = self._name_of(split, label)

        def warn(kind: str, problem: str, remedy: str) -> None:
            self._warn(f"{kind} {label}", step, problem, remedy, last=True)

        if result.auroc is None:
            if result.samples:
                problem = f"no AUROC of {name}: all its rows have the same label"
                warn("one label", problem, "correct [label] or [split] of the spec, or add rows")
            return
        if result.gauc_samples == 0:
            problem = f"no GAUC of {name}: no id of training is in rows of both labels"
            column = self._settings.gauc_column
            remedy = f"give column {column} of the spec hash_buckets, and run the ETL again"
            warn("gauc", problem, remedy)
        column, area, repeated = "", 0.0, 0.0
        if result.auroc > _SUSPICIOUS:
            column, area = best_column(self._settings, config, split, label)
            if split not in self._repeated:  # whatever the label
                self._repeated[split] = measure_repeated_rows(self._settings, config, split)
            repeated, usual = self._repeated[split]
            repeated = repeated if repeated > _REPEATED + 2 * usual else 0.0
        if result.auroc > _IMPOSSIBLE or area > TOO_GOOD or repeated:
            problem = f"AUROC {result.auroc:.4f} of {name} is too good to be true"
            remedy = (
                f"look at column {column}, alone {area:.3f}: leave out what is known only "
                "after the click"
            )
            if repeated and area <= TOO_GOOD:
                remedy = (
                    f"{repeated:.0%} of its rows are in the training set as well: look for a day "
                    "or a file that is there twice, or for rows that are repeated"
                )
            warn("leak", problem, remedy)
        better = []
        for other, margin in _MARGINS.items():
            beside = baselines.get(other)
            if beside and beside.auroc and result.auroc < _limit(result, beside, margin):
                called = f"a {other}" if other == REGRESSION else other
                better.append(f"the {beside.auroc:.4f} of {called}")
        if better:
            problem = f"AUROC {result.auroc:.4f} of {name} is worse than {' and '.join(better)}"
            warn("worse", problem, self._cause(label))
        constant = baselines.get(CLICK_RATE)
        # normalized, as the rows may be others
        worst = (constant and constant.normalized_entropy) or math.inf
        if _is_off(result):
            problem = (
                f"calibration {result.calibration:.3f} of {name}: the mean prediction is "
                f"{result.mean_prediction:.4f}, the click rate {result.positive_rate:.4f}"
            )
            if baselines and all(map(_is_off, baselines.values())):
                remedy = _SHIFTED % split
            elif REGRESSION in baselines and _is_off(baselines[REGRESSION]):
                remedy = _UNSEEN % split
            else:
                remedy = self._cause(label)
            warn("calibration", problem, remedy)
        elif constant and (result.normalized_entropy or 0) > _WORSE * worst:
            problem = (
                f"log loss {result.log_loss:.4f} of {name} is above the {constant.log_loss:.4f} of "
                "always predicting the click rate"
            )
            warn("log loss", problem, self._cause(label))

    def advice(self) -> str:
        """Return what to give if valid still improved at the end, or ""."""
        settings = self._settings
        for losses in () if settings.stop_at_auroc else self._losses.values():
            *earlier, last = [loss for _, loss in sorted({s: loss for loss, s in losses}.items())]
            before = earlier[-1 - len(earlier) // 4] if earlier else last
            if last <= min(earlier, default=last) and before > last * (1 + _FALLING):
                more = f"--epochs {2 * settings.epochs}"
                if settings.max_steps:
                    more = f"--max_steps {2 * settings.max_steps}"
                if not settings.early_stopping:
                    more += " --early_stopping 8"
                return (
                    f"valid still improved at the end: its log loss fell from {before:.4f} to "
                    f"{last:.4f} in the last quarter; try {more}"
                )
        return ""

    def _cause(self, label: str) -> str:
        """Return the likely cause of a model that is worse than it should be, and the remedy."""
        losses = [] if self._settings.early_stopping else self._losses.get(label, [])
        for last, step in losses[-1:]:
            minimum, best = min(losses)
            if step > self._epoch_steps and last > _RISEN * minimum:
                return (
                    f"overfitting: the log loss of valid was {minimum:.4f} after step {best} and "
                    f"is {last:.4f} now; give --early_stopping 8, which keeps the model of then"
                )
        if self._settings.shuffle_training_set:
            return self._remedies.at_end
        return (
            "the training rows were read as they lie: if they are sorted other than by time, give "
            f"--shuffle_training_set; or {self._remedies.at_end}"
        )

    def _check_loss(self, step: int) -> None:
        loss, *clicks = reduce_sum(self._group, self._loss, *self._clicks)
        loss /= self._group.world_size * self._samples
        samples, self._samples = self._samples, 0
        self._loss.zero_()
        self._clicks.zero_()
        if self._group.rank or not all(_FEW <= count <= samples - _FEW for count in clicks):
            return
        rates = [count / samples for count in clicks]
        base = -sum(rate * math.log(rate) + (1 - rate) * math.log1p(-rate) for rate in rates)
        if not loss <= TOO_MUCH_LOSS * base:  # NaN, too
            self._warn(
                "loss",
                step,
                f"loss {loss:.4g}, where always predicting the click rate of "
                f"{', '.join(f'{rate:.2%}' for rate in rates)} gives {base:.3f}: training diverges",
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


def _limit(model: Metrics, other: Metrics, margin: float) -> float:
    """Return the AUROC below which a model is worse by ``margin``, and by more than chance.

    On the same rows, scores that are much alike differ by less than both vary.
    """
    share = _PAIRED if model.samples == other.samples else 2
    return (other.auroc or 0.0) - margin - share * estimate_deviation(*other.effective_counts)


def _is_off(metrics: Metrics) -> bool:
    """Return whether a calibration is off by more than a twentieth, and more than by chance."""
    clicks, _ = metrics.effective_counts
    if metrics.calibration is None or not clicks:
        return False
    return abs(metrics.calibration - 1) > _OFF + 2 / math.sqrt(clicks)


def _is_chance(area: float, clicks: float, rest: float) -> bool:
    """Return whether an AUROC shows that nothing is learned, with enough rows to be sure."""
    return (
        area < NOTHING_LEARNED and area + 2 * estimate_deviation(clicks, rest) < SOMETHING_LEARNED
    )
