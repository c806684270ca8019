"""The area under the ROC curve of scores, and of a single column."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import to_numpy

#: A single column with a larger AUROC probably reveals the label, and is not known before it.
TOO_GOOD = 0.98
#: The number of rows with the mean label that are added to the rows of each value, so that one
#: click in one row does not count as a rate of 1.
_PRIOR_ROWS = 5
#: The largest number of bins of numbers.
_MAX_BINS = 50
#: The smallest number of rows in a bin.
_MIN_BIN_ROWS = 100


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
        The area; None if there is no positive, or no negative, with a positive weight.
    """
    same_group = np.zeros(len(scores), np.int8)
    areas, _, _ = _compute_areas(np.argsort(scores), scores, labels, same_group, weights)
    return float(areas[0]) if len(areas) else None


def grouped_auroc(
    scores: np.ndarray, labels: np.ndarray, groups: np.ndarray, weights: np.ndarray | None = None
) -> tuple[float | None, int]:
    """Compute GAUC: the mean AUROC of groups of rows (Zhou et al. 2018, arXiv:1706.06978).

    Each group is weighted by its number of rows, or by the sum of their weights. Groups with one
    label are left out.

    Args:
        scores: Any monotone scores [N], such as logits.
        labels: The labels [N], 0 or 1.
        groups: The number of each row's group [N]; negative for a row without a group.
        weights: The weights [N], 0 or more; None if all rows count alike.

    Returns:
        The mean, and the number of rows in its groups; None and 0 without a group with both labels.
    """
    order = np.lexsort((scores, groups))
    in_groups = order[groups[order] >= 0]
    areas, shares, rows = _compute_areas(in_groups, scores, labels, groups, weights)
    if not len(areas):
        return None, 0
    return float(np.average(areas, weights=shares)), int(rows.sum())


def _compute_areas(
    order: np.ndarray,
    scores: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray,
    weights: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return area, weight and number of rows of each group with both labels.

    Args:
        order: The indices of the rows that count, by group and, in each group, by ascending score.
        scores: The scores [N].
        labels: The labels [N], 0 or 1.
        groups: The number of each row's group [N].
        weights: The weights [N]; None if all rows count alike.
    """
    if not len(order):
        return np.zeros(0), np.zeros(0), np.zeros(0)
    groups = groups[order]
    scores = scores[order]
    is_positive = labels[order] > 0.5
    row_weights = np.ones(len(order)) if weights is None else weights[order].astype(np.float64)
    begins_group = np.append(True, groups[1:] != groups[:-1])
    begins_tie = begins_group | np.append(True, scores[1:] != scores[:-1])

    # A tie is the rows of a group with the same score. For each tie, the weights of its positives
    # and of its negatives:
    ties = np.flatnonzero(begins_tie)
    positives = np.add.reduceat(np.where(is_positive, row_weights, 0.0), ties)
    negatives = np.add.reduceat(np.where(is_positive, 0.0, row_weights), ties)
    first_ties = np.flatnonzero(begins_group[ties])
    # the negatives of the same group with lower scores: a running sum that restarts in each group
    lower = np.cumsum(negatives) - negatives
    lower -= np.repeat(lower[first_ties], np.diff(first_ties, append=len(ties)))

    # For each group:
    won_pairs = np.add.reduceat(positives * (lower + negatives / 2), first_ties)
    ones = np.add.reduceat(positives, first_ties)
    zeros = np.add.reduceat(negatives, first_ties)
    rows = np.diff(ties[first_ties], append=len(order))
    has_both = (ones > 0) & (zeros > 0)
    ones = ones[has_both]
    zeros = zeros[has_both]
    return won_pairs[has_both] / ones / zeros, ones + zeros, rows[has_both]


def bin_numbers(values: np.ndarray) -> np.ndarray:
    """Return the bin of each number: up to 50 bins of equal counts.

    A value at an edge, such as the one that fills missing values, has a separate bin, because edges
    are counted from both sides.

    Args:
        values: Numbers [N].

    Returns:
        int64 [N].
    """
    bins = min(len(values) // _MIN_BIN_ROWS, _MAX_BINS)
    edges = np.quantile(values, np.arange(1, bins) / max(bins, 1), method="nearest")
    return np.searchsorted(edges, values) + np.searchsorted(edges, values, "right")


def column_auroc(
    values: pa.Array, labels: np.ndarray, rows: np.ndarray | None = None
) -> float | None:
    """Compute the AUROC of a single column, whose score is the mean label of each value.

    The mean labels of one half of the rows score the other half, and vice versa; the halves are
    random, but always the same. So a value that occurs once does not reveal its label, and a column
    without information has about 0.5.

    Args:
        values: The values, of any type; null is a value, too.
        labels: The labels [N], 0 or 1.
        rows: The row of each value, if rows have one or more values; None if row i has value i.

    Returns:
        The mean area of both halves; None if one of them has only one label.
    """
    encoded = values.dictionary_encode("encode")
    ids = to_numpy(encoded.indices).astype(np.int64)
    size = len(encoded.dictionary)
    half = np.random.default_rng(0).integers(0, 2, len(labels))
    # one bincount gives the counts of each value by half and label
    half_and_label = 2 * half + (labels > 0.5)
    cells = 4 * ids + (half_and_label if rows is None else half_and_label[rows])
    counts = np.bincount(cells, minlength=4 * size).reshape(size, 2, 2)
    areas = []
    for known in (0, 1):
        other = 1 - known
        seen = counts[:, known].sum(1)
        positives = counts[:, known, 1]
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
