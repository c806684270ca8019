"""Warn early if a run does not learn, with the likely remedy.

The training loss is checked after steps 1, 2, 4, 8, …, and the AUROC in evaluations of valid after
the first tenth of an epoch. At the end the calibration is checked, and AUROC and log loss are
compared with those of the baselines.
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
    find_best_column,
    measure_repeated_rows,
)
from nvt_torchrec.training.launch.distributed import Group, reduce_sum
from nvt_torchrec.training.reporting.metrics_log import MetricsLog, name_evaluation
from nvt_torchrec.training.reporting.verdict import estimate_deviation
from nvt_torchrec.training.settings.optimizers import Remedies
from nvt_torchrec.training.settings.train_settings import TrainSettings
from nvt_torchrec.training.sharding.train_model import StepOutput

log = logging.getLogger(__name__)

#: Below this AUROC a model has learned nothing; chance is 0.5.
NOTHING_LEARNED = 0.52
#: A model with this AUROC has learned something. A warning also needs an AUROC that is below this
#: one by more than chance.
SOMETHING_LEARNED = 0.54
#: A loss of this multiple of the loss of always predicting the click rate is too high.
TOO_MUCH_LOSS = 10
#: The share of an epoch after which a model should have learned something.
_SHARE = 0.1
#: The largest acceptable distance of the calibration from 1.
_MAX_CALIBRATION_ERROR = 0.05
#: With an AUROC above this, the label may have leaked into columns, or rows may be repeated.
_SUSPICIOUS = 0.95
#: With an AUROC above this, the label certainly has leaked.
_IMPOSSIBLE = 0.995
#: Training rows seem to be in another split if this share of its rows, in excess of the usual
#: share, is repeated.
_REPEATED = 0.02
#: The largest acceptable distance of a model's AUROC below a baseline's.
_MARGINS = {REGRESSION: 0.001, TREES: 0.005}
#: How far two AUROCs may differ by chance, in standard deviations of one AUROC. On the same rows
#: ("paired") similar scores differ by less than each of them varies.
_UNPAIRED = 2.0
_PAIRED = 0.6
#: A log loss of this multiple of that of always predicting the click rate is worse.
_WORSE = 1.002
#: Valid still improves if its log loss has fallen by more than this share in the last quarter.
_FALLING = 0.003
#: A model overfits if the log loss of valid has risen by this factor.
_RISEN = 1.01
#: The remedy if the calibration of always predicting the training click rate is off, too.
_SHIFTED = (
    "so is that of always predicting the click rate of training: clicks are rarer or more frequent "
    "in %s; train on rows of the same time, or split them at random"
)
#: The remedy if the logistic regression's calibration is off, but that of the click rate is not.
_UNSEEN = (
    "so is that of the logistic regression: rows of %s have values that training has not; let "
    "values that are rare in training share the id of unknown ones with --freq_threshold 20 of "
    "nvt-etl run, or split the rows at random"
)
#: The loss is only checked with at least this many clicks, and this many samples without a click.
_MIN_SAMPLES = 100


class LearningCheck:
    """Check training steps and evaluations; rank 0 warns of each kind of problem once.

    Args:
        settings: The settings of the run.
        group: This rank.
        events: The log that gets a ``warning`` event for each warning.
        epoch_steps: The steps of an epoch.
        remedies: The remedies for this run's optimizer.
    """

    def __init__(
        self,
        settings: TrainSettings,
        group: Group,
        events: MetricsLog,
        epoch_steps: int,
        remedies: Remedies,
    ) -> None:
        self._settings = settings
        self._group = group
        self._events = events
        self._remedies = remedies
        self._warned: set[str] = set()
        self._logged: list[str] = []
        self._at_end: list[str] = []
        #: The log losses of valid with their steps, by label.
        self._losses: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        #: The share of a split's rows that are training rows, and the usual share, by split.
        self._repeated: dict[str, tuple[float, float]] = {}
        # Samples, losses and clicks since the last check. The sums stay on the device, so that no
        # step waits for them.
        self._samples = 0
        sums = torch.zeros(1 + settings.label_count, dtype=torch.float64, device=group.device)
        self._loss = sums[0]
        self._clicks = sums[1:]
        self._epoch_steps = epoch_steps
        self._begin = max(math.ceil(_SHARE * epoch_steps), settings.lr_warmup_steps or 0)

    def add(self, step: int, output: StepOutput) -> None:
        """Add a step, and check the loss if the step's number is a power of 2 (collective).

        Args:
            step: The step, counted from 1 over all epochs.
            output: The results of the step.
        """
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
                name = self._name_evaluation("valid", label)
                problem = f"AUROC {valid.auroc:.4f} of {name}: nothing is learned yet"
                self._warn(f"chance {label}", step, problem, self._remedies.at_chance)

    def take_over(self, trial: LearningCheck) -> None:
        """Take over the findings of a trial's check, and log its warnings."""
        self._warned = trial._warned
        self._losses = trial._losses
        for text in trial._logged:
            log.warning("%s", text)

    def _name_evaluation(self, split: str, label: str) -> str:
        return name_evaluation(split, label if len(self._clicks) > 1 else "")

    def check_final(
        self,
        step: int,
        config: ModelConfig,
        metrics: Mapping[str, ByLabel],
        baselines: Mapping[tuple[str, str], ByLabel],
    ) -> list[str]:
        """Check the final metrics, and compare them with the baselines; only on rank 0.

        Args:
            step: The last step.
            config: The model's shape.
            metrics: The final metrics by split.
            baselines: The metrics of the baselines, by split and name.

        Returns:
            The warnings, to be logged at the end.
        """
        for split, metrics_by_label in metrics.items():
            for label, result in metrics_by_label.items():
                baselines_of_label = {}
                for (baseline_split, name), baseline in baselines.items():
                    if baseline_split == split and label in baseline:
                        baselines_of_label[name] = baseline[label]
                self._check_label(step, config, split, label, result, baselines_of_label)
        return self._at_end

    def _check_label(
        self,
        step: int,
        config: ModelConfig,
        split: str,
        label: str,
        result: Metrics,
        baselines: Mapping[str, Metrics],
    ) -> None:
        """Check a label's final metrics in a split; ``baselines`` are by name."""
        name = self._name_evaluation(split, label)

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
        # Normalized entropies are compared, because baselines may be measured on other rows.
        if (result.normalized_entropy or 0) > _WORSE * constant.normalized_entropy:
            problem = (
                f"log loss {result.log_loss:.4f} of {name} is above the {constant.log_loss:.4f} of "
                "always predicting the click rate"
            )
            warn("log loss", problem, self._find_cause(label))

    def _explain_leak(self, config: ModelConfig, split: str, label: str, auroc: float) -> str:
        """Return the remedy for a suspiciously high AUROC; "" if nothing is wrong.

        It is wrong if a single column predicts the label, if training rows are in the split as
        well, or if no model can be that good.
        """
        column, column_auroc = find_best_column(self._settings, config, split, label)
        if split not in self._repeated:  # the share is the same for all labels
            self._repeated[split] = measure_repeated_rows(self._settings, config, split)
        repeated, usual = self._repeated[split]
        is_repeated = repeated > _REPEATED + 2 * usual
        if is_repeated and column_auroc <= TOO_GOOD:
            return (
                f"{repeated:.0%} of its rows are in the training set as well: look for a day or a "
                "file that is listed twice, or for repeated rows"
            )
        if auroc > _IMPOSSIBLE or column_auroc > TOO_GOOD:
            return (
                f"look at column {column}, which alone has {column_auroc:.3f}: leave out columns "
                "that are only known after the click"
            )
        return ""

    def suggest_longer_training(self) -> str:
        """Return the flags for a longer training if valid still improved at the end; else ""."""
        settings = self._settings
        if settings.stop_at_auroc:
            return ""
        for losses in self._losses.values():
            # A resumed run evaluates a step again; its last evaluation counts.
            loss_by_step = {step: loss for loss, step in losses}
            *earlier, last = [loss_by_step[step] for step in sorted(loss_by_step)]
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
            "the training rows were not shuffled: if they are sorted by anything but time, give "
            f"--shuffle_training_set; or {self._remedies.at_end}"
        )

    def _check_loss(self, step: int) -> None:
        """Check the loss since the last check (collective)."""
        loss, *clicks = reduce_sum(self._group, self._loss, *self._clicks)
        loss /= self._group.world_size * self._samples
        samples = self._samples
        self._samples = 0
        self._loss.zero_()
        self._clicks.zero_()
        if self._group.rank:
            return
        constant_loss = 0.0  # the loss of always predicting the click rates
        rates = []
        for count in clicks:
            if not _MIN_SAMPLES <= count <= samples - _MIN_SAMPLES:
                return
            rate = count / samples
            rates.append(f"{rate:.2%}")
            constant_loss -= rate * math.log(rate) + (1 - rate) * math.log1p(-rate)
        if not loss <= TOO_MUCH_LOSS * constant_loss:  # also true for NaN
            self._warn(
                "loss",
                step,
                f"loss {loss:.4g}, while always predicting the click rate of {', '.join(rates)} "
                f"gives {constant_loss:.3f}: training diverges",
                self._remedies.too_high,
            )

    def _warn(self, kind: str, step: int, problem: str, remedy: str, *, last: bool = False) -> None:
        """Warn once for each kind: now, or at the end of the log if ``last`` is set."""
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
    """Return the AUROCs of baselines that are better than a model by more than a margin and chance.

    They are formatted for a sentence.
    """
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
    """Return whether a calibration is off by more than ``_MAX_CALIBRATION_ERROR`` and chance."""
    clicks, _ = metrics.effective_counts
    if metrics.calibration is None or not clicks:
        return False
    chance = 2 / math.sqrt(clicks)
    return abs(metrics.calibration - 1) > _MAX_CALIBRATION_ERROR + chance


def _is_chance(auroc: float, clicks: float, rest: float) -> bool:
    """Return whether an AUROC shows that nothing is learned, with enough rows to be sure.

    Args:
        auroc: The AUROC.
        clicks: The effective number of rows with a click.
        rest: The effective number of rows without a click.
    """
    highest = auroc + 2 * estimate_deviation(clicks, rest)
    return auroc < NOTHING_LEARNED and highest < SOMETHING_LEARNED
