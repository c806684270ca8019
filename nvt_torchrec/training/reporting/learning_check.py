"""Warn early that a run does not learn, with the likely remedy.

The loss of training is checked after steps 1, 2, 4, 8, …, and the AUROC at evaluations of valid
after the first tenth of an epoch. At the end the calibration is checked, and AUROC and log loss
beside those of the baselines.
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
#: A model with this AUROC has learned something. There is a warning only if the AUROC is below this
#: one by more than chance.
SOMETHING_LEARNED = 0.54
#: The loss is too high from this multiple of the loss of always predicting the click rate.
TOO_MUCH_LOSS = 10
#: The share of an epoch after which a model should have learned something.
_SHARE = 0.1
#: How far a calibration may be from 1.
_MAX_CALIBRATION_ERROR = 0.05
#: From this AUROC a model may have seen the label: columns and repeated rows are looked at.
_SUSPICIOUS = 0.95
#: From this AUROC a model has seen the label.
_IMPOSSIBLE = 0.995
#: From this share of rows, above the usual one, training rows seem to be in another split.
_REPEATED = 0.02
#: How far a model's AUROC may be below a baseline's.
_MARGINS = {REGRESSION: 0.001, TREES: 0.005}
#: How far AUROCs may be apart by chance, in standard deviations of one of them: of other rows, and
#: of the same rows, on which scores that are much alike differ by less than both vary.
_UNPAIRED = 2.0
_PAIRED = 0.6
#: From this factor a log loss is above that of always predicting the click rate.
_WORSE = 1.002
#: Valid still improves if its log loss has fallen by more than this share in the last quarter.
_FALLING = 0.003
#: A model overfits if the log loss of valid has risen by this factor.
_RISEN = 1.01
#: The remedy if the calibration of always predicting the click rate of training is off as well.
_SHIFTED = (
    "so is that of always predicting the click rate of training: clicks are rarer or more frequent "
    "in %s; train on rows of the same time, or divide them at random"
)
#: The remedy if that of the logistic regression is off, and that of the click rate is not.
_UNSEEN = (
    "so is that of the logistic regression: rows of %s have values that training has not; let "
    "values that are rare in training share the id of unknown ones, by --freq_threshold 20 of "
    "nvt-etl run, or divide the rows at random"
)
#: A click rate is known if there are this many clicks, and this many samples without one.
_MIN_SAMPLES = 100


class LearningCheck:
    """Check training steps and evaluations, and warn of each kind of problem once, on rank 0.

    Args:
        settings: The settings of the run.
        group: This rank.
        events: The log that gets a ``warning`` event for each warning.
        epoch_steps: The steps of an epoch.
        remedies: The remedies that fit the optimizer.
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
        self._logged: list[str] = []
        self._at_end: list[str] = []
        #: By label, the log losses of valid with their steps.
        self._losses: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        #: By split, the share of training rows in it, and the usual share.
        self._repeated: dict[str, tuple[float, float]] = {}
        # Samples, losses and clicks since the last check; the sums are on the device, so that no
        # step waits for them.
        self._samples = 0
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
        is_power_of_2 = step & (step - 1) == 0
        if is_power_of_2:
            self._check_loss(step)

    def note_evaluation(self, step: int, metrics: ByLabel | None) -> None:
        """Check an evaluation of valid; ``metrics`` is None on ranks other than 0."""
        for label, valid in (metrics or {}).items():
            if valid.auroc is None or valid.log_loss is None:
                continue
            self._losses[label].append((valid.log_loss, step))
            if step > self._begin and _is_chance(valid.auroc, *valid.effective_counts):
                name = self._name_of("valid", label)
                problem = f"AUROC {valid.auroc:.4f} of {name}: nothing is learned yet"
                self._warn(f"chance {label}", step, problem, self._remedies.at_chance)

    def take_over(self, trial: LearningCheck) -> None:
        """Continue with what the check of a trial has found, and log its warnings."""
        self._warned, self._losses = trial._warned, trial._losses
        for text in trial._logged:
            log.warning("%s", text)

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
        for split, metrics_by_label in metrics.items():
            for label, result in metrics_by_label.items():
                beside = {}
                for (baseline_split, name), baseline in baselines.items():
                    if baseline_split == split and label in baseline:
                        beside[name] = baseline[label]
                self._check_last(step, config, split, label, result, beside)
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
        if result.auroc > _SUSPICIOUS:
            remedy = self._explain_leak(config, split, label, result.auroc)
            if remedy:
                problem = f"AUROC {result.auroc:.4f} of {name} is too good to be true"
                warn("leak", problem, remedy)
        better = _list_better(result, baselines)
        if better:
            problem = f"AUROC {result.auroc:.4f} of {name} is worse than {' and '.join(better)}"
            warn("worse", problem, self._find_cause(label))
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
                remedy = self._find_cause(label)
            warn("calibration", problem, remedy)
            return
        constant = baselines.get(CLICK_RATE)
        if constant is None or not constant.normalized_entropy:
            return
        # Normalized, because baselines may be measured on other rows.
        if (result.normalized_entropy or 0) > _WORSE * constant.normalized_entropy:
            problem = (
                f"log loss {result.log_loss:.4f} of {name} is above the {constant.log_loss:.4f} of "
                "always predicting the click rate"
            )
            warn("log loss", problem, self._find_cause(label))

    def _explain_leak(self, config: ModelConfig, split: str, label: str, auroc: float) -> str:
        """Return the remedy for an AUROC that is suspiciously high; "" if nothing is wrong.

        It is wrong if a column alone gives the label away, if training rows are in the split as
        well, or if no model can be that good.
        """
        column, area = best_column(self._settings, config, split, label)
        if split not in self._repeated:  # it is the same for all labels
            self._repeated[split] = measure_repeated_rows(self._settings, config, split)
        repeated, usual = self._repeated[split]
        is_repeated = repeated > _REPEATED + 2 * usual
        if is_repeated and area <= TOO_GOOD:
            return (
                f"{repeated:.0%} of its rows are in the training set as well: look for a day "
                "or a file that is there twice, or for rows that are repeated"
            )
        if auroc > _IMPOSSIBLE or area > TOO_GOOD:
            return (
                f"look at column {column}, alone {area:.3f}: leave out what is known only "
                "after the click"
            )
        return ""

    def advice(self) -> str:
        """Return the flags to give if valid still improved at the end; "" if it did not."""
        settings = self._settings
        if settings.stop_at_auroc:
            return ""
        for losses in self._losses.values():
            # A resumed run evaluates a step again; the last time counts.
            loss_of_step = {step: loss for loss, step in losses}
            *earlier, last = [loss_of_step[step] for step in sorted(loss_of_step)]
            if not earlier or last > min(earlier):
                continue
            before = earlier[-1 - len(earlier) // 4]
            if before <= last * (1 + _FALLING):
                continue
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

    def _find_cause(self, label: str) -> str:
        """Return the likely cause of a model that is worse than it should be, and the remedy."""
        losses = self._losses.get(label)
        if losses and not self._settings.early_stopping:
            last, step = losses[-1]
            minimum, best_step = min(losses)
            if step > self._epoch_steps and last > _RISEN * minimum:
                return (
                    f"overfitting: the log loss of valid was {minimum:.4f} after step {best_step} "
                    f"and is {last:.4f} now; give --early_stopping 8, which keeps the best model"
                )
        if self._settings.shuffle_training_set:
            return self._remedies.at_end
        return (
            "the training rows were read as they lie: if they are sorted other than by time, give "
            f"--shuffle_training_set; or {self._remedies.at_end}"
        )

    def _check_loss(self, step: int) -> None:
        """Check the loss since the last check (collective)."""
        loss, *clicks = reduce_sum(self._group, self._loss, *self._clicks)
        loss /= self._group.world_size * self._samples
        samples, self._samples = self._samples, 0
        self._loss.zero_()
        self._clicks.zero_()
        if self._group.rank:
            return
        constant_loss = 0.0  # that of always predicting the click rates
        rates = []
        for count in clicks:
            if not _MIN_SAMPLES <= count <= samples - _MIN_SAMPLES:
                return
            rate = count / samples
            rates.append(f"{rate:.2%}")
            constant_loss -= rate * math.log(rate) + (1 - rate) * math.log1p(-rate)
        if not loss <= TOO_MUCH_LOSS * constant_loss:  # NaN is too high as well
            self._warn(
                "loss",
                step,
                f"loss {loss:.4g}, where always predicting the click rate of {', '.join(rates)} "
                f"gives {constant_loss:.3f}: training diverges",
                self._remedies.too_high,
            )

    def _warn(self, kind: str, step: int, problem: str, remedy: str, *, last: bool = False) -> None:
        """Warn, once for each kind: now, or with ``last`` at the end of the log."""
        if kind in self._warned:
            return
        self._warned.add(kind)
        self._events.write("warning", step=step, text=problem, remedy=remedy)
        text = f"WARNING: step {step}: {problem}\n  -> {remedy}"
        if last:
            self._at_end.append(text)
        else:
            self._logged.append(text)
            log.warning("%s", text)


def _list_better(result: Metrics, baselines: Mapping[str, Metrics]) -> list[str]:
    """Return the AUROCs of baselines that are better by more than a margin and by chance."""
    better = []
    for name, margin in _MARGINS.items():
        baseline = baselines.get(name)
        if baseline is None or not baseline.auroc or result.auroc is None:
            continue
        deviations = _PAIRED if result.samples == baseline.samples else _UNPAIRED
        chance = deviations * estimate_deviation(*baseline.effective_counts)
        if result.auroc < baseline.auroc - margin - chance:
            noun = f"a {name}" if name == REGRESSION else name
            better.append(f"the {baseline.auroc:.4f} of {noun}")
    return better


def _is_off(metrics: Metrics) -> bool:
    """Return whether a calibration is off by more than a twentieth, and by more than chance."""
    clicks, _ = metrics.effective_counts
    if metrics.calibration is None or not clicks:
        return False
    chance = 2 / math.sqrt(clicks)
    return abs(metrics.calibration - 1) > _MAX_CALIBRATION_ERROR + chance


def _is_chance(area: float, clicks: float, rest: float) -> bool:
    """Return whether an AUROC shows that nothing is learned, with enough rows to be sure.

    Args:
        area: The AUROC.
        clicks, rest: The effective numbers of rows with and without a click.
    """
    highest = area + 2 * estimate_deviation(clicks, rest)
    return area < NOTHING_LEARNED and highest < SOMETHING_LEARNED
