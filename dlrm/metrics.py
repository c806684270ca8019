"""Metrics of binary classification, exact over all samples. Needs only NumPy."""

from __future__ import annotations

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Metrics:
    """The metrics of an evaluation.

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
    """

    samples: int
    positives: int
    auroc: float | None
    log_loss: float | None
    normalized_entropy: float | None
    accuracy: float | None
    positive_rate: float | None
    mean_prediction: float | None
    calibration: float | None

    def to_dict(self) -> dict[str, float | int | None]:
        """Return a JSON-ready dict."""
        return dataclasses.asdict(self)


def auroc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Compute the exact area under the ROC curve; pairs of equal scores count half.

    It is the Mann-Whitney statistic: the share of pairs (positive, negative) in which the positive
    has the higher score. The sums are integers, so it is exact up to 2**62 pairs.

    Args:
        scores: Any monotone scores [N], such as logits.
        labels: The labels [N], 0 or 1.

    Returns:
        The area; None if there is no positive or no negative.
    """
    order = np.argsort(scores)
    scores = scores[order]
    positive = labels[order] > 0.5
    if not len(scores) or positive.all() or not positive.any():
        return None
    last_of_group = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))
    positives_up_to = np.cumsum(positive, dtype=np.int64)[last_of_group]
    negatives_up_to = last_of_group + 1 - positives_up_to
    positives = np.diff(positives_up_to, prepend=0)
    negatives = np.diff(negatives_up_to, prepend=0)
    # twice the pairs won: a negative with a lower score counts 2, one with the same score 1
    won = int(np.sum(positives * (2 * negatives_up_to - negatives)))
    return won / (2 * int(positives_up_to[-1]) * int(negatives_up_to[-1]))


def compute_metrics(logits: np.ndarray, labels: np.ndarray) -> Metrics:
    """Compute all metrics of ``logits`` [N] and ``labels`` [N] (0 or 1), summed in float64."""
    logits = np.asarray(logits)
    labels = np.asarray(labels)
    samples = len(labels)
    if not samples:
        return Metrics(0, 0, *[None] * 7)
    x = logits.astype(np.float64)
    y = labels.astype(np.float64)
    # -y log σ(x) - (1-y) log(1-σ(x)) = max(x, 0) - xy + log(1 + exp(-|x|)), without overflow
    log_loss = float(np.mean(np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x)))))
    rate = float(y.mean())
    normalized = None
    if 0 < rate < 1:
        normalized = log_loss / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
    prediction = float(np.mean(_sigmoid(x)))
    return Metrics(
        samples=samples,
        positives=int(np.count_nonzero(y > 0.5)),
        auroc=auroc(logits, labels),
        log_loss=log_loss,
        normalized_entropy=normalized,
        accuracy=float(np.mean((x >= 0) == (y > 0.5))),
        positive_rate=rate,
        mean_prediction=prediction,
        calibration=prediction / rate if rate else None,
    )


def _sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))
