"""Logistic regression on a run's data: the start of a first training, and a baseline for it.

It has a bias and a weight for

- each value of each categorical column;
- each value in a history, where the mean over the row's events counts;
- each dense column, and each edge of its bins (:mod:`.models.piecewise`).

It minimizes Σ loss + ½ Σ penalty · weight² without a penalty for the bias. Dense columns have a
penalty of 1, scikit-learn's default. The penalty of a categorical column is one over the variance
of its weights beyond chance: small for user ids, whose effects are large, and large for columns of
small effects, whose rare values would otherwise get weights of pure noise. The penalties of a dense
column's edges are estimated in the same way. Their weights are deviations from a straight line, so
a regression without them is fitted first.

:mod:`.penalties` raises the penalties of ids that are too small for rows of valid.
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
#: The largest penalty, for columns whose values do not differ beyond chance.
_MAX_PENALTY = 200.0
#: The variance of weights for which the estimate of their variance is most precise. The estimate
#: hardly depends on it.
_TYPICAL_VARIANCE = 0.1
#: The number of steps of the fit. More steps changed the AUROC by less than 0.001 on the logs of
#: ``python -m benchmarks.regression``.
_MAX_STEPS = 16


@dataclasses.dataclass(frozen=True)
class Regression:
    """A fitted logistic regression.

    Attributes:
        ids: For each column of the sample, the ids that have a weight, int64, ascending; with bins,
            then for each dense column the indices of the edges that have a weight.
        weights: The weights of ``ids``, float64.
        dense: The weights of the dense columns, float64.
        bias: The bias.
        penalties: The penalties of ``weights``, float64, one per column.
        edges: The edges of the dense columns' bins (:func:`find_edges`); None without bins.
    """

    ids: list[np.ndarray]
    weights: list[np.ndarray]
    dense: np.ndarray
    bias: float
    penalties: np.ndarray
    edges: np.ndarray | None = None

    def logits(self, sample: RowSample) -> np.ndarray:
        """Return the logits of rows including corrections, float64 [n]; unknown ids add 0."""
        logits = sample.dense @ self.dense + self.bias + sample.corrections
        for terms in self.iterate_column_logits(sample):
            logits += terms
        return logits

    def iterate_column_logits(self, sample: RowSample) -> Iterator[np.ndarray]:
        """Yield the contribution to the logits, [n], of each column, then of each column's bins."""
        columns = sample.columns + sample.list_bins(self.edges)
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
        """Return the regression with ``offset`` added to its bias."""
        return dataclasses.replace(self, bias=self.bias + offset)


@dataclasses.dataclass(frozen=True)
class Start:
    """The start of a first training.

    Attributes:
        edges: The edges of the dense columns' bins (:func:`find_edges`); None without bins.
        regressions: The regressions by label.
        lookups: By table, the ids that single-valued categorical columns look up, int64, ascending,
            and the mean number of lookups of each id per row, float32.
        vectors: The statistics that standardize the data's vectors; None without vectors.
    """

    edges: np.ndarray | None = None
    regressions: dict[str, Regression] = dataclasses.field(default_factory=dict)
    lookups: dict[str, tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)
    vectors: VectorStatistics | None = None


def fit_regression(sample: RowSample, label: str, edges: np.ndarray | None = None) -> Regression:
    """Fit a regression to a label whose values are not all the same."""
    rate = sample.click_rate(label)
    linear = Objective(sample, label)
    zero = linear.to_regression(np.zeros(linear.num_weights), np.zeros(0))
    constant = zero.shift(np.log(rate / (1 - rate)))
    regression = linear.solve(constant, linear.estimate_penalties(constant))
    if edges is None or not len(edges):
        return regression
    piecewise = Objective(sample, label, edges)
    start = piecewise.add_bins(regression)
    penalties = piecewise.estimate_penalties(start)
    penalties[: len(regression.penalties)] = regression.penalties
    return piecewise.solve(start, penalties)


class Objective:
    """The function that a regression on rows minimizes.

    Its argument is one array of weights: of the ids of all columns, of the dense columns, and the
    bias.

    Attributes:
        num_weights: The length of that array.
    """

    def __init__(self, sample: RowSample, label: str, edges: np.ndarray | None = None) -> None:
        columns = sample.columns + sample.list_bins(edges)
        self._edges = edges
        self._ids, self._inputs = _make_inputs(columns, len(sample))
        self._sizes = [len(ids) for ids in self._ids]
        self._ends = np.cumsum(self._sizes, dtype=int)
        self._labels = sample.labels[label]
        self._dense = sample.dense.astype(np.float64)
        self._scale = sample.relative_weights()
        self._corrections = sample.corrections
        self.num_weights = sum(self._sizes) + self._dense.shape[1] + 1

    def estimate_penalties(self, start: Regression) -> np.ndarray:
        """Estimate a penalty for each column from the residuals of ``start``, float64 [columns]."""
        rates = compute_probabilities(self._compute_logits(self._flatten(start)))
        variance = rates * (1 - rates)
        scale = self._scale
        slopes = self._split_columns(self._sum_by_weight(scale * (self._labels - rates)))
        curvature = self._split_columns(self._sum_by_weight(variance * scale, squared=True))
        chance = self._split_columns(self._sum_by_weight(variance * scale**2, squared=True))
        penalties = []
        for column in zip(slopes, curvature, chance, strict=True):
            penalties.append(_estimate_penalty(*column))
        return np.array(penalties)

    def solve(self, start: Regression, penalties: np.ndarray) -> Regression:
        """Minimize from ``start``, in at most ``_MAX_STEPS`` steps, and return the regression."""
        dense_penalties = np.ones(self._dense.shape[1])
        bias_penalty = [0.0]
        penalty = np.concatenate([penalties.repeat(self._sizes), dense_penalties, bias_penalty])
        first = self._flatten(start)
        rates = compute_probabilities(self._compute_logits(first))
        curvature = self._sum_by_weight(self._scale * rates * (1 - rates), squared=True)
        # L-BFGS needs few steps if all weights have similar curvatures. These units make them so.
        unit = 1 / np.sqrt(np.maximum(penalty, 1) + curvature)

        def compute_loss(scaled: np.ndarray) -> tuple[float, np.ndarray]:
            w = unit * scaled
            z = self._compute_logits(w)
            losses = np.logaddexp(0, z) - self._labels * z
            errors = self._scale * (compute_probabilities(z) - self._labels)
            gradient = self._sum_by_weight(errors) + penalty * w
            return self._scale @ losses + penalty @ w**2 / 2, unit * gradient

        result = optimize.minimize(
            compute_loss,
            first / unit,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": _MAX_STEPS},
        )
        return self.to_regression(unit * result.x, penalties)

    def add_bins(self, regression: Regression) -> Regression:
        """Add bins with weights of 0 to a regression without bins."""
        weights = list(regression.weights)
        for ids in self._ids[len(weights) :]:
            weights.append(np.zeros(len(ids)))
        return dataclasses.replace(regression, ids=self._ids, weights=weights, edges=self._edges)

    def to_regression(self, w: np.ndarray, penalties: np.ndarray) -> Regression:
        """Convert an array of weights to a regression."""
        *weights, rest = np.split(w, self._ends)
        return Regression(self._ids, weights, rest[:-1], float(rest[-1]), penalties, self._edges)

    def _flatten(self, regression: Regression) -> np.ndarray:
        """Convert a regression to an array of weights."""
        return np.concatenate([*regression.weights, regression.dense, [regression.bias]])

    def _split_columns(self, values: np.ndarray) -> list[np.ndarray]:
        """Split an array with a value for each weight by column, without dense columns and bias."""
        return np.split(values, self._ends)[:-1]

    def _compute_logits(self, w: np.ndarray) -> np.ndarray:
        """Return the logits of the rows, float64 [n]."""
        id_weights, rest = np.split(w, [sum(self._sizes)])
        logits = self._inputs @ id_weights + self._dense @ rest[:-1] + rest[-1]
        return logits + self._corrections

    def _sum_by_weight(self, values: np.ndarray, *, squared: bool = False) -> np.ndarray:
        """Return Σ over rows of input · value for each weight, or of input² · value."""
        inputs = self._inputs
        dense = self._dense
        if squared:
            inputs = inputs.power(2)
            dense = dense**2
        return np.concatenate([inputs.T @ values, dense.T @ values, [values.sum()]])


def _make_inputs(columns: list[Column], num_rows: int) -> tuple[list[np.ndarray], sparse.csr_array]:
    """Return the distinct ids of each column, and the matrix of their shares in each row.

    Returns:
        For each column its distinct ids, int64, ascending; and the matrix, float64 [num_rows,
        number of ids of all columns].
    """
    if not columns:
        return [], sparse.csr_array((num_rows, 0))
    ids = []
    rows = []
    indices = []
    shares = []
    width = 0
    for column in columns:
        # Marking the ids in a table is faster than np.unique, which would sort them.
        is_present = np.zeros(column.ids.max(initial=0) + 1, bool)
        is_present[column.ids] = True
        index_by_id = np.cumsum(is_present) - 1 + width
        # 32-bit indices halve the memory of the matrix.
        indices.append(index_by_id[column.ids].astype(np.int32))
        column_rows = np.arange(num_rows) if column.rows is None else column.rows
        rows.append(column_rows.astype(np.int32))
        shares.append(np.ones(len(column.ids)) if column.shares is None else column.shares)
        ids.append(np.flatnonzero(is_present))
        width += len(ids[-1])
    coordinates = np.concatenate(rows), np.concatenate(indices)
    return ids, sparse.csr_array((np.concatenate(shares), coordinates), shape=(num_rows, width))


def compute_probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the sigmoid of logits."""
    return 1 / (1 + np.exp(-logits))


def _estimate_penalty(slopes: np.ndarray, curvature: np.ndarray, chance: np.ndarray) -> float:
    """Return the penalty of a categorical column: one over the variance of its weights.

    The variance is that of random effects, estimated by the method of moments (DerSimonian & Laird
    1986, "Meta-analysis in Clinical Trials"): a value's effect is about slope / curvature, and its
    variance by chance alone is chance / curvature².

    Args:
        slopes: For each value, the sum of label − click rate over its rows.
        curvature: For each value, minus the derivative of the slope by the weight.
        chance: For each value, the variance of the slope if the value had no effect.
    """
    # Moments are weighted by the precision of each value's effect at a typical variance. They are
    # not divided by the curvature, because it is 0 for a value whose rows all have weight 0.
    weights = 1 / (1 + _TYPICAL_VARIANCE * curvature) ** 2
    excess = weights @ (slopes**2 - chance)
    if excess <= 0:
        return _MAX_PENALTY
    return float(np.clip(weights @ curvature**2 / excess, _MIN_PENALTY, _MAX_PENALTY))
