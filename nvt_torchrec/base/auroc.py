"""The area under the ROC curve: of scores, and of a single column of ids."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import to_numpy

#: A column with a larger AUROC alone is hardly a feature.
TOO_GOOD = 0.98
#: Rows of the mean label that are added to those of a value: one click of one row is no rate of 1.
_PRIOR_ROWS = 5
#: Bins of numbers, at most, and rows of a bin, at least.
_BINS, _BIN_ROWS = 50, 100


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
    same_group = np.zeros(len(scores), np.int8)
    areas, _, _ = _areas(np.argsort(scores), scores, labels, same_group, weights)
    return float(areas[0]) if len(areas) else None


def grouped_auroc(
    scores: np.ndarray, labels: np.ndarray, groups: np.ndarray, weights: np.ndarray | None = None
) -> tuple[float | None, int]:
    """Compute GAUC: the mean AUROC of groups of rows (Zhou et al. 2018, arXiv:1706.06978).

    Each group counts as its number of rows, or the sum of their weights. Groups with one label are
    left out.

    Args:
        scores: Any monotone scores [N], such as logits.
        labels: The labels [N], 0 or 1.
        groups: The number of each row's group [N]; negative for a row of no group.
        weights: The weights [N], 0 or more; None if all rows count alike.

    Returns:
        The mean, and the number of rows it is of; None and 0 if there is no group with both labels.
    """
    order = np.lexsort((scores, groups))
    areas, shares, rows = _areas(order[groups[order] >= 0], scores, labels, groups, weights)
    return (float(np.average(areas, weights=shares)), int(rows.sum())) if len(areas) else (None, 0)


def _areas(
    order: np.ndarray,
    scores: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray,
    weights: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return area, weight and number of rows of each group with both labels.

    ``order`` are the rows that count, by group and, in each group, by rising score.
    """
    if not len(order):
        return (np.zeros(0),) * 3
    groups, scores, positive = groups[order], scores[order], labels[order] > 0.5
    each = np.ones(len(order)) if weights is None else weights[order].astype(np.float64)
    begins = np.append(True, groups[1:] != groups[:-1])
    ties = np.flatnonzero(begins | np.append(True, scores[1:] != scores[:-1]))
    positives = np.add.reduceat(np.where(positive, each, 0.0), ties)
    negatives = np.add.reduceat(np.where(positive, 0.0, each), ties)
    first = np.flatnonzero(begins[ties])
    lower = np.cumsum(negatives) - negatives
    lower -= np.repeat(lower[first], np.diff(first, append=len(ties)))
    sums = (positives * (lower + negatives / 2), positives, negatives)
    won, ones, zeros = (np.add.reduceat(values, first) for values in sums)
    rows, both = np.diff(ties[first], append=len(order)), (ones > 0) & (zeros > 0)
    ones, zeros = ones[both], zeros[both]
    return won[both] / ones / zeros, ones + zeros, rows[both]


def bin_numbers(values: np.ndarray) -> np.ndarray:
    """Number the bins of equal counts, up to 50, that numbers [N] are in: a value at an edge, such
    as one that fills missing ones, has a bin of its own; int64 [N].
    """
    bins = min(len(values) // _BIN_ROWS, _BINS)
    edges = np.quantile(values, np.arange(1, bins) / max(bins, 1), method="nearest")
    return np.searchsorted(edges, values) + np.searchsorted(edges, values, "right")


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
    ids, size = to_numpy(encoded.indices).astype(np.int64), len(encoded.dictionary)
    half = np.random.default_rng(0).integers(0, 2, len(labels))
    cell = 2 * half + (labels > 0.5)
    cells = 4 * ids + (cell if rows is None else cell[rows])
    counts = np.bincount(cells, minlength=4 * size).reshape(size, 2, 2)
    areas = []
    for known, other in ((0, 1), (1, 0)):
        seen, positives = counts[:, known].sum(1), counts[:, known, 1]
        prior = _PRIOR_ROWS * positives.sum() / max(1, seen.sum())
        rates = (positives + prior) / (seen + _PRIOR_ROWS)
        if rows is None:
            value, label = np.nonzero(counts[:, other])
            areas.append(auroc(rates[value], label, counts[value, other, label]))
        else:  # the mean over the values of a row
            scores = np.bincount(rows, rates[ids], len(labels)) / np.bincount(rows)
            areas.append(auroc(scores[half == other], labels[half == other]))
    first, second = areas
    return None if first is None or second is None else (first + second) / 2
