"""The area under the ROC curve: of scores, and of a single column of ids."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import to_numpy

#: Rows of the mean label that are added to those of a value: one click of one row is no rate of 1.
_PRIOR_ROWS = 5


def auroc(
    scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
) -> float | None:
    """Compute the area under the ROC curve; pairs of equal scores count half.

    It is the Mann-Whitney statistic: the share of pairs (positive, negative) in which the positive
    has the higher score; with weights, a pair counts as the product of its weights. The sums are
    float64, so without weights it is exact up to 2**52 pairs.

    Args:
        scores: Any monotone scores [N], such as logits.
        labels: The labels [N], 0 or 1.
        weights: The weights [N], 0 or more; None if all rows count alike.

    Returns:
        The area; None if there is no positive or no negative, of a positive weight.
    """
    order = np.argsort(scores)
    scores, positive = scores[order], labels[order] > 0.5
    each = np.ones(len(order)) if weights is None else weights[order].astype(np.float64)
    total = float(each[positive].sum()), float(each[~positive].sum())
    if not all(total):
        return None
    first_of_group = np.flatnonzero(np.append(True, scores[1:] != scores[:-1]))
    positives = np.add.reduceat(np.where(positive, each, 0.0), first_of_group)
    negatives = np.add.reduceat(np.where(positive, 0.0, each), first_of_group)
    lower = np.cumsum(negatives) - negatives
    return float(np.sum(positives * (lower + negatives / 2))) / total[0] / total[1]


def column_auroc(
    values: pa.Array, labels: np.ndarray, rows: np.ndarray | None = None
) -> float | None:
    """Compute the AUROC that a column has alone: that of the mean label of each value.

    The mean labels come from one half of the rows, chosen at random but always the same, and score
    the other half, and the other way round. So a value that occurs once does not give its label
    away, and a column without information has 0.5, but for chance.

    Args:
        values: The values, of any type; null is a value, too.
        labels: The labels [N], 0 or 1.
        rows: The row of each value, if rows have several values, at least one; None if value i is
            that of row i.

    Returns:
        The mean area of both halves; None if one of them has only one label.
    """
    encoded = values.dictionary_encode("encode")
    ids, size = to_numpy(encoded.indices), len(encoded.dictionary)
    first = np.random.default_rng(0).random(len(labels)) < 0.5
    areas = []
    for half in (first, ~first):
        counted = half if rows is None else half[rows]
        seen, its_labels = ids[counted], (labels if rows is None else labels[rows])[counted]
        prior = _PRIOR_ROWS * labels[half].mean() if half.any() else 0.0
        positives = np.bincount(seen, its_labels, size)
        scores = ((positives + prior) / (np.bincount(seen, minlength=size) + _PRIOR_ROWS))[ids]
        if rows is not None:  # the mean over the values of a row
            scores = np.bincount(rows, scores, len(labels)) / np.bincount(rows)
        areas.append(auroc(scores[~half], labels[~half]))
    one, other = areas
    return None if one is None or other is None else (one + other) / 2
