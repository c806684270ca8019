"""Metrics of binary classification, exact over all samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from nvt_torchrec.base.auroc import auroc, grouped_auroc
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID

#: The points of a calibration curve.
_TENTHS = 10


@dataclasses.dataclass(frozen=True)
class Metrics:
    """The metrics of an evaluation; if rows have weights, all means and AUROC are weighted.

    Attributes:
        samples: The number of evaluated rows.
        positives: The number of these rows with label 1.
        auroc: The area under the ROC curve; None if all labels are equal.
        log_loss: The mean binary cross-entropy in nats; None without samples.
        normalized_entropy: The log loss over that of always predicting the mean label (He et al.
            2014, "Practical Lessons from Predicting Clicks on Ads at Facebook", §2): below 1 is
            better than that. None if all labels are equal.
        accuracy: The share of rows where (probability >= 0.5) is the label; None without samples.
        positive_rate: The mean label; None without samples.
        mean_prediction: The mean probability; None without samples.
        calibration: The mean prediction over the mean label (ibid.): above 1, too many clicks are
            predicted. None without a positive label.
        total_weight: The sum of the rows' weights; None if they have none. Rows of weight 0 count
            for nothing: where one of these metrics is None without rows or without positives, it is
            without those of a positive weight.
        calibration_curve: The mean prediction and the mean label of each tenth of the rows, by
            rising prediction; equal predictions are in one tenth, and there may be fewer. ``()``
            without samples.
        effective_counts: The numbers of rows with label 1 and 0; of weighted rows, how many of
            equal weights would vary as much: (Σ w)² / Σ w² (Kish 1965, "Survey Sampling").
        gauc: The mean AUROC of groups of rows (:func:`base.auroc.grouped_auroc`); None without a
            group with both labels.
        gauc_samples: The number of rows that it is of; None if the rows are not grouped.
    """

    samples: int
    positives: int
    auroc: float | None = None
    log_loss: float | None = None
    normalized_entropy: float | None = None
    accuracy: float | None = None
    positive_rate: float | None = None
    mean_prediction: float | None = None
    calibration: float | None = None
    total_weight: float | None = None
    calibration_curve: tuple[tuple[float, float], ...] = ()
    effective_counts: tuple[float, float] = (0.0, 0.0)
    gauc: float | None = None
    gauc_samples: int | None = None

    def to_dict(self) -> dict[str, float | int | None]:
        """Return the numbers, JSON-ready; those of weights or groups only if there are any."""
        value = dataclasses.asdict(self)
        del value["calibration_curve"], value["effective_counts"]
        if self.total_weight is None:
            del value["total_weight"]
        if self.gauc_samples is None:
            del value["gauc"], value["gauc_samples"]
        return value


#: The metrics of each label that a model predicts, by its name.
ByLabel: TypeAlias = dict[str, Metrics]


def sum_log_losses(metrics: ByLabel | None) -> float | None:
    """Return the sum of the labels' log losses; None if no row has a label."""
    losses = [of_label.log_loss or 0.0 for of_label in (metrics or {}).values()]
    return sum(losses) or None


def count_effective_rows(metrics: ByLabel | None) -> float:
    """Return the number of rows, of weighted ones the effective number; 0 without a label."""
    for of_label in (metrics or {}).values():
        return sum(of_label.effective_counts)
    return 0.0


def to_json(metrics: Mapping[str, Metrics]) -> dict[str, Any]:
    """Return a JSON-ready form of metrics by label, see :func:`unwrap_single_label`."""
    return unwrap_single_label({label: of_label.to_dict() for label, of_label in metrics.items()})


def unwrap_single_label(values: dict[str, Any]) -> Any:
    """Return values by label as JSON shows them: of one label, its value; None of no label."""
    return values if len(values) > 1 else next(iter(values.values()), None)


def groups_of(ids: np.ndarray) -> np.ndarray:
    """Return the groups of rows with these ids: int64, -1 where an id stands for no one value."""
    return np.where(ids > FIRST_OOV_ID, ids, np.int64(-1))


def compute_metrics(
    logits: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> Metrics:
    """Compute all metrics, summed in float64.

    Args:
        logits: The logits [N].
        labels: The labels [N], 0 or 1.
        weights: The weights [N], 0 or more; None if all rows count alike.
        groups: The number of each row's group [N], negative for none; None if there are no groups.
    """
    logits = np.asarray(logits)
    labels = np.asarray(labels)
    samples = len(labels)
    ungrouped = None if groups is None else 0
    if not samples:
        return Metrics(0, 0, gauc_samples=ungrouped)
    x = logits.astype(np.float64)
    y = labels.astype(np.float64)
    w = None if weights is None else weights.astype(np.float64)
    total = float(samples) if w is None else float(w.sum())
    positives = int(np.count_nonzero(y > 0.5))
    if not total:
        return Metrics(samples, positives, total_weight=total, gauc_samples=ungrouped)

    def mean(values: np.ndarray) -> float:
        return float(np.mean(values)) if w is None else float(np.sum(w * values)) / total

    # -y log σ(x) - (1-y) log(1-σ(x)) = max(x, 0) - xy + log(1 + exp(-|x|)), without overflow
    log_loss = mean(np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x))))
    rate = mean(y)
    normalized = None
    if 0 < rate < 1:
        normalized = log_loss / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
    probabilities = np.exp(-np.logaddexp(0, -x))
    prediction = mean(probabilities)
    grouped = (None, ungrouped) if groups is None else grouped_auroc(logits, labels, groups, w)
    return Metrics(
        samples=samples,
        positives=positives,
        auroc=auroc(logits, labels, w),
        log_loss=log_loss,
        normalized_entropy=normalized,
        accuracy=mean((x >= 0) == (y > 0.5)),
        positive_rate=rate,
        mean_prediction=prediction,
        calibration=prediction / rate if rate else None,
        total_weight=None if w is None else total,
        calibration_curve=_calibration_curve(probabilities, y, w),
        effective_counts=(_effective(y > 0.5, w), _effective(y <= 0.5, w)),
        gauc=grouped[0],
        gauc_samples=grouped[1],
    )


def _effective(rows: np.ndarray, weights: np.ndarray | None) -> float:
    each = rows[rows].astype(float) if weights is None else weights[rows]
    return float(each.sum() ** 2 / np.sum(each**2)) if each.any() else 0.0


def _calibration_curve(
    probabilities: np.ndarray, labels: np.ndarray, weights: np.ndarray | None
) -> tuple[tuple[float, float], ...]:
    tenths = np.quantile(probabilities, np.arange(1, _TENTHS) / _TENTHS)
    tenth = np.searchsorted(tenths, probabilities)
    each = np.ones(len(labels)) if weights is None else weights
    summed = (1, probabilities, labels)
    count, *sums = (np.bincount(tenth, each * values, _TENTHS) for values in summed)
    return tuple(zip(*(np.array(sums)[:, count > 0] / count[count > 0]).tolist(), strict=True))


def to_results(
    metrics: Mapping[str, ByLabel], baselines: Mapping[tuple[str, str], ByLabel]
) -> dict[str, Any]:
    """Return the metrics of the model and of the baselines by split, JSON-ready."""
    of_baselines: dict[str, dict[str, Any]] = {}
    for (split, name), found in baselines.items():
        of_baselines.setdefault(split, {})[name] = to_json(found)
    of_model = {split: to_json(found) for split, found in metrics.items()}
    return {"metrics": of_model, "baselines": of_baselines}
