"""Metrics of binary classification, exact over all samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from nvt_torchrec.base.auroc import auroc, grouped_auroc
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID

#: The number of points of a calibration curve, each for a tenth of the rows.
_TENTHS = 10


@dataclasses.dataclass(frozen=True)
class Metrics:
    """The metrics of an evaluation. If rows have weights, all means and AUROC are weighted.

    Attributes:
        samples: The number of evaluated rows.
        positives: The number of rows with label 1.
        auroc: The area under the ROC curve; None if all labels are equal.
        log_loss: The mean binary cross-entropy in nats; None without samples.
        normalized_entropy: The log loss divided by the log loss of always predicting the mean label
            (He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook", §2).
            Below 1, the model is better than that prediction. None if all labels are equal.
        accuracy: The share of rows whose label is 1 if and only if the probability is at least 0.5;
            None without samples.
        positive_rate: The mean label; None without samples.
        mean_prediction: The mean probability; None without samples.
        calibration: The mean prediction divided by the mean label (ibid.). Above 1, too many clicks
            are predicted. None without a positive label.
        total_weight: The sum of the rows' weights; None if rows have no weights. Rows with weight 0
            are ignored: a metric that is None without samples or without positives is also None if
            all of these have weight 0.
        calibration_curve: The mean prediction and the mean label of each tenth of the rows, in
            ascending order of the predictions. Equal predictions are in the same tenth, so there
            may be fewer than ten. ``()`` without samples.
        effective_counts: The numbers of rows with label 1 and with label 0. If rows have weights,
            the number of equally weighted rows with the same variance, (Σ w)² / Σ w² (Kish 1965,
            "Survey Sampling").
        gauc: The mean AUROC of groups of rows (:func:`base.auroc.grouped_auroc`); None if no group
            has both labels.
        gauc_samples: The number of rows in the groups that ``gauc`` averages; None if rows are not
            grouped.
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
        """Return the scalar metrics, JSON-ready; without those of absent weights or groups."""
        value = dataclasses.asdict(self)
        del value["calibration_curve"], value["effective_counts"]
        if self.total_weight is None:
            del value["total_weight"]
        if self.gauc_samples is None:
            del value["gauc"], value["gauc_samples"]
        return value


#: The metrics of each label that a model predicts, by the label's name.
ByLabel: TypeAlias = dict[str, Metrics]


def sum_log_losses(metrics: ByLabel | None) -> float | None:
    """Return the sum of the labels' log losses; None if no row has a label."""
    if not metrics:
        return None
    return sum(label_metrics.log_loss or 0.0 for label_metrics in metrics.values()) or None


def count_effective_rows(metrics: ByLabel | None) -> float:
    """Return the number of rows, or with weights the effective number; 0 without a label."""
    if not metrics:
        return 0.0
    first = next(iter(metrics.values()))  # the same rows are evaluated for all labels
    return sum(first.effective_counts)


def to_json(metrics: Mapping[str, Metrics]) -> dict[str, Any]:
    """Return metrics by label as :func:`unwrap_single_label` does, JSON-ready."""
    return unwrap_single_label({label: value.to_dict() for label, value in metrics.items()})


def unwrap_single_label(values: dict[str, Any]) -> Any:
    """Return values by label in the form of our JSON files.

    Returns:
        The dict if it has several labels; the value if it has one label; None if it is empty.
    """
    if len(values) > 1:
        return values
    return next(iter(values.values()), None)


def find_groups(ids: np.ndarray) -> np.ndarray:
    """Return the group of each row, int64 [rows]: its id, or -1 for no group.

    Rows whose id is padding, null or unknown have no group, because such an id stands for several
    values.
    """
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
        weights: The weights [N], 0 or more; None for equal weights.
        groups: The group of each row [N], negative for no group; None if rows are not grouped.
    """
    logits = np.asarray(logits)
    labels = np.asarray(labels)
    samples = len(labels)
    gauc = None
    gauc_samples = None if groups is None else 0
    if not samples:
        return Metrics(0, 0, gauc_samples=gauc_samples)
    x = logits.astype(np.float64)
    y = labels.astype(np.float64)
    w = None if weights is None else weights.astype(np.float64)
    total = float(samples) if w is None else float(w.sum())
    positives = int(np.count_nonzero(y > 0.5))
    if not total:
        return Metrics(samples, positives, total_weight=total, gauc_samples=gauc_samples)

    def mean(values: np.ndarray) -> float:
        return float(np.mean(values)) if w is None else float(np.sum(w * values)) / total

    # -y log σ(x) - (1-y) log(1-σ(x)) = max(x, 0) - xy + log(1 + exp(-|x|)), without overflow
    log_loss = mean(np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x))))
    rate = mean(y)
    normalized = None
    if 0 < rate < 1:
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
        normalized = log_loss / entropy
    # σ(x) = exp(-log(1 + exp(-x))), without overflow
    probabilities = np.exp(-np.logaddexp(0, -x))
    prediction = mean(probabilities)
    if groups is not None:
        gauc, gauc_samples = grouped_auroc(logits, labels, groups, w)
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
        calibration_curve=_compute_calibration_curve(probabilities, y, w),
        effective_counts=(_count_effective(y > 0.5, w), _count_effective(y <= 0.5, w)),
        gauc=gauc,
        gauc_samples=gauc_samples,
    )


def _count_effective(chosen: np.ndarray, weights: np.ndarray | None) -> float:
    """Return the effective number of the rows in the mask ``chosen`` [N]."""
    if weights is None:
        return float(np.count_nonzero(chosen))
    own = weights[chosen]
    return float(own.sum() ** 2 / np.sum(own**2)) if own.any() else 0.0


def _compute_calibration_curve(
    probabilities: np.ndarray, labels: np.ndarray, weights: np.ndarray | None
) -> tuple[tuple[float, float], ...]:
    """Return the mean prediction and the mean label of each non-empty tenth of the rows."""
    bounds = np.quantile(probabilities, np.arange(1, _TENTHS) / _TENTHS)
    tenths = np.searchsorted(bounds, probabilities)
    if weights is None:
        weights = np.ones(len(labels))
    totals = np.bincount(tenths, weights, _TENTHS)
    filled = totals > 0
    predictions = np.bincount(tenths, weights * probabilities, _TENTHS)[filled] / totals[filled]
    rates = np.bincount(tenths, weights * labels, _TENTHS)[filled] / totals[filled]
    return tuple(zip(predictions.tolist(), rates.tolist(), strict=True))


def to_results(
    metrics: Mapping[str, ByLabel], baselines: Mapping[tuple[str, str], ByLabel]
) -> dict[str, Any]:
    """Return the metrics of the model and of the baselines by split, JSON-ready."""
    baseline_results: dict[str, dict[str, Any]] = {}
    for (split, name), baseline_metrics in baselines.items():
        baseline_results.setdefault(split, {})[name] = to_json(baseline_metrics)
    model_results = {split: to_json(model_metrics) for split, model_metrics in metrics.items()}
    return {"metrics": model_results, "baselines": baseline_results}
