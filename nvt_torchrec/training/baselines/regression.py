"""Logistic regression on a run's data: what a first training starts from, and what it must beat.

It has a weight for each value of each categorical column, one for each that a history holds, of
which the mean counts, one for each dense column and for each edge of its bins
(:mod:`.models.piecewise`), and a bias, and minimizes Σ loss + ½ Σ penalty ·
weight², the bias excluded. Dense columns have the penalty 1, as scikit-learn's by default. That of
a categorical column is one over the variance of its weights, so far as they differ by more than
chance: small for the ids of users, whose effects are large, and large for columns of small effects,
whose rare values would otherwise have weights of noise. So is that of a dense column's edges, whose
weights say how its effect differs from a straight line: a regression without them is fitted first.

:mod:`.penalties` raises the penalties of ids that rows of valid find too small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from scipy import optimize, sparse

from nvt_torchrec.training.baselines.row_sample import Column, RowSample
from nvt_torchrec.training.baselines.vector_statistics import VectorStatistics

#: The smallest penalty of a categorical column.
_MIN_PENALTY = 1.0
#: The largest one, for columns whose values do not differ beyond chance.
_MAX_PENALTY = 200.0
#: Variance of weights that the estimate of their variance is best for; others hardly change it.
_TYPICAL_VARIANCE = 0.1
#: Steps of the fit: more changed the AUROC by less than 0.001 on the logs of
#: ``python -m benchmarks.regression``.
_MAX_STEPS = 16


@dataclasses.dataclass(frozen=True)
class Regression:
    """A fitted logistic regression.

    Attributes:
        ids: For each column of the sample the ids that have a weight, int64, ascending; with bins,
            for each dense column the numbers of the edges that have one.
        weights: Their weights, float64.
        dense: The weights of the dense columns, float64.
        bias: The bias.
        penalties: The penalties of ``weights``, float64, one a column.
        edges: The edges of the dense columns' bins (:func:`find_edges`); None without bins.
    """

    ids: list[np.ndarray]
    weights: list[np.ndarray]
    dense: np.ndarray
    bias: float
    penalties: np.ndarray
    edges: np.ndarray | None = None

    def logits(self, sample: RowSample) -> np.ndarray:
        """Return the logits of rows, corrections included, float64 [n]; unknown ids count 0."""
        logits = sample.dense @ self.dense + self.bias + sample.corrections
        for terms in self.iterate_column_logits(sample):
            logits += terms
        return logits

    def iterate_column_logits(self, sample: RowSample) -> Iterator[np.ndarray]:
        """Yield what each column, then each dense column's bins, adds to the logits [n]."""
        columns = sample.columns + sample.bins(self.edges)
        for column, ids, weights in zip(columns, self.ids, self.weights, strict=True):
            known = np.zeros(len(column.ids))
            if len(ids):  # lists may all be empty in training
                positions = np.searchsorted(ids, column.ids).clip(max=len(ids) - 1)
                known = np.where(ids[positions] == column.ids, weights[positions], 0.0)
            yield column.sum_by_row(known, len(sample))

    def log_loss(self, sample: RowSample, label: str) -> float:
        """Return the (weighted) mean log loss of rows."""
        logits = self.logits(sample)
        losses = np.logaddexp(0, logits) - sample.labels[label] * logits
        return float(np.average(losses, weights=sample.weights))

    def shift(self, offset: float) -> Regression:
        """Return the regression with a bias that is larger by ``offset``."""
        return dataclasses.replace(self, bias=self.bias + offset)


@dataclasses.dataclass(frozen=True)
class Start:
    """What a first training starts from.

    Attributes:
        edges: The edges of the dense columns' bins (:func:`find_edges`); None without bins.
        regressions: The regression of each label that has one.
        lookups: Of each table, the ids that categorical columns without lists look up, ascending
            int64, and how often a row does so in the mean, float32.
        vectors: By what the data's vectors are standardized; None without any.
    """

    edges: np.ndarray | None = None
    regressions: dict[str, Regression] = dataclasses.field(default_factory=dict)
    lookups: dict[str, tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)
    vectors: VectorStatistics | None = None


def fit_regression(sample: RowSample, label: str, edges: np.ndarray | None = None) -> Regression:
    """Fit a regression to a label whose values are not all the same."""
    rate = sample.click_rate(label)
    straight = Objective(sample, label)
    zero = straight.to_regression(np.zeros(straight.num_weights), np.zeros(0))
    at_rate = zero.shift(np.log(rate / (1 - rate)))
    found = straight.solve(at_rate, straight.estimate_penalties(at_rate))
    if edges is None or not len(edges):
        return found
    bent = Objective(sample, label, edges)
    start = bent.add_bins(found)
    penalties = bent.estimate_penalties(start)
    penalties[: len(found.penalties)] = found.penalties
    return bent.solve(start, penalties)


class Objective:
    """What a regression on rows minimizes.

    Weights stand in one array: those of the columns, of the dense columns, and the bias.

    Attributes:
        num_weights: Their number.
    """

    def __init__(self, sample: RowSample, label: str, edges: np.ndarray | None = None) -> None:
        columns = sample.columns + sample.bins(edges)
        self._edges = edges
        self._ids, self._inputs = _make_inputs(columns, len(sample))
        self._sizes = [len(ids) for ids in self._ids]
        self._ends = np.cumsum(self._sizes, dtype=int)
        self._labels, self._dense = sample.labels[label], sample.dense.astype(np.float64)
        self._scale, self._corrections = sample.relative_weights(), sample.corrections
        self.num_weights = sum(self._sizes) + self._dense.shape[1] + 1

    def estimate_penalties(self, start: Regression) -> np.ndarray:
        """Return a penalty for each column, from what ``start`` leaves over, float64 [columns]."""
        rates = compute_probabilities(self._logits(self._flatten(start)))
        variance, scale = rates * (1 - rates), self._scale
        slopes = self._split_columns(self._sum_by_weight(scale * (self._labels - rates)))
        curvature = self._split_columns(self._sum_by_weight(variance * scale, squared=True))
        chance = self._split_columns(self._sum_by_weight(variance * scale**2, squared=True))
        penalties = []
        for column in zip(slopes, curvature, chance, strict=True):
            penalties.append(_estimate_penalty(*column))
        return np.array(penalties)

    def solve(self, start: Regression, penalties: np.ndarray) -> Regression:
        """Return the regression of the least loss, or that after some steps from ``start``."""
        dense_penalties = np.ones(self._dense.shape[1])
        bias_penalty = [0.0]
        penalty = np.concatenate([penalties.repeat(self._sizes), dense_penalties, bias_penalty])
        first = self._flatten(start)
        rates = compute_probabilities(self._logits(first))
        curvature = self._sum_by_weight(self._scale * rates * (1 - rates), squared=True)
        # L-BFGS needs few steps if all weights have similar curvatures, so it gets them in units in
        # which they do.
        unit = 1 / np.sqrt(np.maximum(penalty, 1) + curvature)

        def loss(scaled: np.ndarray) -> tuple[float, np.ndarray]:
            w = unit * scaled
            z = self._logits(w)
            losses = np.logaddexp(0, z) - self._labels * z
            errors = self._scale * (compute_probabilities(z) - self._labels)
            slopes = self._sum_by_weight(errors) + penalty * w
            return self._scale @ losses + penalty @ w**2 / 2, unit * slopes

        options = {"maxiter": _MAX_STEPS}
        found = optimize.minimize(loss, first / unit, jac=True, method="L-BFGS-B", options=options)
        return self.to_regression(unit * found.x, penalties)

    def add_bins(self, regression: Regression) -> Regression:
        """Return a regression without bins as one that has them, with weights of 0."""
        weights = list(regression.weights)
        for ids in self._ids[len(weights) :]:
            weights.append(np.zeros(len(ids)))
        return dataclasses.replace(regression, ids=self._ids, weights=weights, edges=self._edges)

    def to_regression(self, w: np.ndarray, penalties: np.ndarray) -> Regression:
        """Return weights as a regression."""
        *weights, rest = np.split(w, self._ends)
        return Regression(self._ids, weights, rest[:-1], float(rest[-1]), penalties, self._edges)

    def _flatten(self, regression: Regression) -> np.ndarray:
        """Return the weights of a regression in one array."""
        return np.concatenate([*regression.weights, regression.dense, [regression.bias]])

    def _split_columns(self, values: np.ndarray) -> list[np.ndarray]:
        """Return the values of each column's weights, of one for each weight."""
        return np.split(values, self._ends)[:-1]

    def _logits(self, w: np.ndarray) -> np.ndarray:
        """Return the logits of the rows, float64 [n]."""
        id_weights, rest = np.split(w, [sum(self._sizes)])
        logits = self._inputs @ id_weights + self._dense @ rest[:-1] + rest[-1]
        return logits + self._corrections

    def _sum_by_weight(self, values: np.ndarray, *, squared: bool = False) -> np.ndarray:
        """Return Σ over rows of input · value for each weight, or of input² · value."""
        inputs, dense = self._inputs, self._dense
        if squared:
            inputs, dense = inputs.power(2), dense**2
        return np.concatenate([inputs.T @ values, dense.T @ values, [values.sum()]])


def _make_inputs(columns: list[Column], num_rows: int) -> tuple[list[np.ndarray], sparse.csr_array]:
    """Return the ids that each column has, and a matrix of the shares of ids in rows.

    Returns:
        For each column its distinct ids, int64, ascending; and float64 [num_rows, their number].
    """
    if not columns:
        return [], sparse.csr_array((num_rows, 0))
    ids, rows, indices, shares = [], [], [], []
    width = 0
    for column in columns:
        # A table of all ids, because np.unique would sort them.
        known = np.zeros(column.ids.max(initial=0) + 1, bool)
        known[column.ids] = True
        index_of_id = np.cumsum(known) - 1 + width
        # 32 bits halve the memory of the matrix.
        indices.append(index_of_id[column.ids].astype(np.int32))
        row_of_id = np.arange(num_rows) if column.rows is None else column.rows
        rows.append(row_of_id.astype(np.int32))
        shares.append(np.ones(len(column.ids)) if column.shares is None else column.shares)
        ids.append(np.flatnonzero(known))
        width += len(ids[-1])
    coordinates = np.concatenate(rows), np.concatenate(indices)
    return ids, sparse.csr_array((np.concatenate(shares), coordinates), shape=(num_rows, width))


def compute_probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the sigmoid of logits."""
    return 1 / (1 + np.exp(-logits))


def _estimate_penalty(slopes: np.ndarray, curvature: np.ndarray, chance: np.ndarray) -> float:
    """Return the penalty of a categorical column: one over the variance of its weights.

    The variance is that of random effects by the method of moments (DerSimonian & Laird 1986,
    "Meta-analysis in Clinical Trials"): a value's effect is about slope / curvature, of which
    chance / curvature² is the variance by chance alone.

    Args:
        slopes: For each value the sum of label − click rate, where all weights are 0.
        curvature: Minus the derivative of the slope by the weight.
        chance: The variance of the slope if the value had no effect.
    """
    # Moments are weighted by the precision of each value's effect at a typical variance. They are
    # not divided by the curvature, which is 0 for a value whose rows all have the weight 0.
    weights = 1 / (1 + _TYPICAL_VARIANCE * curvature) ** 2
    excess = weights @ (slopes**2 - chance)
    if excess <= 0:
        return _MAX_PENALTY
    return float(np.clip(weights @ curvature**2 / excess, _MIN_PENALTY, _MAX_PENALTY))
