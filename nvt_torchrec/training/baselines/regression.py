"""Logistic regression on a run's data: what a first training starts from, and what it must beat.

It has a weight for each value of each categorical column, one for each that a history holds, of
which the mean counts, one for each dense column and for each edge of its bins
(:mod:`.models.piecewise`), and a bias, and minimizes Σ loss + ½ Σ penalty ·
weight², the bias excluded. Dense columns have the penalty 1, as scikit-learn's by default. That of
a categorical column is one over the variance of its weights, so far as they differ by more than
chance: small for the ids of users, whose effects are large, and large for columns of small effects,
whose rare values would otherwise have weights of noise. So is that of a dense column's edges, whose
weights say how its effect differs from a straight line: a regression without them is fitted first.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from scipy import optimize
from torch import distributed as dist

from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.piecewise import interpolate
from nvt_torchrec.training.data.loaders import make_sample
from nvt_torchrec.training.launch.distributed import Group
from nvt_torchrec.training.settings.train_settings import TrainSettings

#: Rows are read in batches of so many, with at most so many events of a history.
BATCH, _EVENTS = 8192, 50
#: Least and largest penalty of a categorical column.
_PENALTIES = 1.0, 200.0
#: Variance of weights that the estimate of their variance is best for; others hardly change it.
_TYPICAL_VARIANCE = 0.1
#: Steps of the fit: more changed the AUROC by less than 0.001 on the logs of
#: ``python -m benchmarks.regression``.
_STEPS = 16


@dataclasses.dataclass(frozen=True)
class Column:
    """The ids of some rows in a categorical column, the events of a history, or the edges around
    values of a dense column.

    Attributes:
        ids: The ids of all rows, int64.
        rows: The row of each id, int64; None if each row has one.
        shares: What part of the weight of an edge or event counts, float64; None: all of it.
    """

    ids: np.ndarray
    rows: np.ndarray | None
    shares: np.ndarray | None = None

    @classmethod
    def from_bins(cls, values: np.ndarray, edges: np.ndarray) -> Column:
        """Return the two edges, and their shares, of each value."""
        below, share = interpolate(values, edges)
        rows = np.arange(len(values))
        return cls(*map(np.concatenate, ([below, below + 1], [rows, rows], [1 - share, share])))

    def sums(self, weights: np.ndarray, count: int) -> np.ndarray:
        """Return for each of ``count`` rows the sum of its ids' ``weights`` [n], float64."""
        if self.rows is None:
            return weights
        if self.shares is not None:
            weights = weights * self.shares
        return np.bincount(self.rows, weights, count)

    def sums_by_id(
        self, places: np.ndarray, values: np.ndarray, power: int, count: int
    ) -> np.ndarray:
        """Return for each of ``count`` places of ids the sum of its rows' ``values``, float64."""
        if self.rows is not None:
            values = values[self.rows]
        if self.shares is not None:
            values = values * self.shares**power
        return np.bincount(places, values, count)


@dataclasses.dataclass(frozen=True)
class RowSample:
    """Rows of a split.

    Attributes:
        dense: The dense values, float32 [n, dense columns].
        columns: The categorical columns, then the histories'.
        labels: The values of each label that is trained, by its name, float32 [n].
        weights: The weights of the rows, float32 [n]; None if they have none.
    """

    dense: np.ndarray
    columns: list[Column]
    labels: dict[str, np.ndarray]
    weights: np.ndarray | None

    def bins(self, edges: np.ndarray | None) -> list[Column]:
        """Return the columns of the dense values' edges; none without edges."""
        if edges is None:
            return []
        return [Column.from_bins(*pair) for pair in zip(self.dense.T, edges, strict=True)]

    def click_rate(self, label: str) -> float:
        """Return the (weighted) share of the rows with label 1; 0 without rows."""
        labels = self.labels[label]
        return float(np.average(labels, weights=self.weights)) if len(labels) else 0.0


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
        """Return the logits of rows, float64 [n]; ids without a weight count 0."""
        logits = sample.dense @ self.dense + self.bias
        columns = sample.columns + sample.bins(self.edges)
        for column, ids, weights in zip(columns, self.ids, self.weights, strict=True):
            known = np.zeros(len(column.ids))
            if len(ids):  # lists may all be empty in training
                places = np.searchsorted(ids, column.ids).clip(max=len(ids) - 1)
                known = np.where(ids[places] == column.ids, weights[places], 0.0)
            logits += column.sums(known, len(logits))
        return logits


@dataclasses.dataclass(frozen=True)
class Start:
    """What a first training starts from.

    Attributes:
        edges: The edges of the dense columns' bins (:func:`find_edges`); None without bins.
        regressions: The regression of each label that has one.
    """

    edges: np.ndarray | None = None
    regressions: dict[str, Regression] = dataclasses.field(default_factory=dict)


def read_sample(
    settings: TrainSettings,
    config: ModelConfig,
    split: str,
    batches: int,
    files: tuple[Path, ...] | None = None,
) -> RowSample:
    """Read at most so many batches of rows of a split, drawn at random, on this rank alone."""
    alone = Group(0, 1, 1, torch.device("cpu"), dist.GroupMember.WORLD)  # type: ignore[arg-type]
    fewer = min(config.max_events, _EVENTS)
    config = dataclasses.replace(config, max_events=fewer, sequences=())
    count, names = len(config.features), config.labels
    dense, weights = [np.zeros((0, len(config.dense)), np.float32)], []
    labels = [np.zeros((0, len(names)))]
    ids, rows, held = ([[np.zeros(0, np.int64)] for _ in range(count)] for _ in range(3))
    read = 0
    for batch in make_sample(settings, config, split, alone, batches, BATCH, files):
        features, size = batch.sparse_features, len(batch.labels)
        lengths = features.lengths().view(count, size).long()
        ends = lengths.sum(1).cumsum(0)[:-1].tolist()
        for j, values in enumerate(np.split(features.values().numpy(), ends)):
            ids[j].append(values)
            rows[j].append(np.repeat(np.arange(read, read + size), lengths[j].numpy()))
            held[j].append(lengths[j].numpy())
        read += size
        dense.append(batch.dense_features.numpy())
        labels.append(batch.labels.numpy())
        if batch.weights is not None:
            weights.append(batch.weights.numpy())
    columns = []
    for j in range(count):
        values, of_ids, lengths = map(np.concatenate, (ids[j], rows[j], held[j]))
        shares = 1 / lengths[of_ids] if j >= len(config.categorical) else None
        single = shares is None and (lengths == 1).all()
        columns.append(Column(values, None if single else of_ids, shares))
    of_rows = np.concatenate(weights) if weights else None
    by_name = dict(zip(names, np.concatenate(labels).T.copy(), strict=True))
    return RowSample(np.concatenate(dense), columns, by_name, of_rows)


def fit_regression(sample: RowSample, label: str, edges: np.ndarray | None = None) -> Regression:
    """Fit a regression to a label whose values are not all the same."""
    rate = sample.click_rate(label)
    straight = _Objective(sample, label, sample.columns)
    penalties = straight.penalties(np.full(straight.count, rate))
    weights = np.zeros(sum(straight.sizes) + sample.dense.shape[1] + 1)
    weights[-1] = np.log(rate / (1 - rate))
    weights = straight.solve(weights, penalties)
    found = straight.regression(weights, penalties)
    if edges is None or not len(edges):
        return found
    bent = _Objective(sample, label, sample.columns + sample.bins(edges))
    of_bins = bent.penalties(_probabilities(straight.logits(weights)))[len(penalties) :]
    of_ids, rest = np.split(weights, [sum(straight.sizes)])
    start = np.concatenate([of_ids, np.zeros(sum(bent.sizes) - len(of_ids)), rest])
    penalties = np.concatenate([penalties, of_bins])
    found = bent.regression(bent.solve(start, penalties), penalties)
    return dataclasses.replace(found, edges=edges)


class _Objective:
    """What is minimized; its weights are those of ``columns``, of the dense columns, and the bias.

    Attributes:
        count: The number of rows.
        sizes: The number of weights of each column.
    """

    def __init__(self, sample: RowSample, label: str, columns: list[Column]) -> None:
        self._columns = columns
        self._seen, self._places = [], []
        for column in columns:
            known = np.zeros(column.ids.max(initial=0) + 1, bool)
            known[column.ids] = True
            self._seen.append(np.flatnonzero(known))
            self._places.append(np.cumsum(known)[column.ids] - 1)
        self.sizes = [len(ids) for ids in self._seen]
        self._ends = np.cumsum(self.sizes)
        self._labels, self._dense = sample.labels[label], sample.dense.astype(np.float64)
        self.count = len(self._labels)
        self._scale = np.ones(self.count)
        if sample.weights is not None:
            self._scale = sample.weights / sample.weights.mean()

    def logits(self, w: np.ndarray) -> np.ndarray:
        """Return the logits of the rows."""
        *of_ids, rest = np.split(w, self._ends)
        sums = self._dense @ rest[:-1] + rest[-1]
        for column, place, weights in zip(self._columns, self._places, of_ids, strict=True):
            sums += column.sums(weights[place], self.count)
        return sums

    def _per_weight(self, values: np.ndarray, power: int = 1) -> np.ndarray:
        """Return for each weight the sum of the rows' ``values``, times its inputs' power."""
        parts = [
            column.sums_by_id(place, values, power, size)
            for column, place, size in zip(self._columns, self._places, self.sizes, strict=True)
        ]
        return np.concatenate([*parts, (self._dense**power).T @ values, [values.sum()]])

    def penalties(self, rates: np.ndarray) -> np.ndarray:
        """Return the penalty of each column's weights where rows have these probabilities."""
        variance, scale = rates * (1 - rates), self._scale
        slopes = self._per_weight(scale * (self._labels - rates))
        curvature, chance = (self._per_weight(variance * s, 2) for s in (scale, scale**2))
        parts = (np.split(values, self._ends)[:-1] for values in (slopes, curvature, chance))
        return np.array([_penalty(*column) for column in zip(*parts, strict=True)])

    def solve(self, start: np.ndarray, penalties: np.ndarray) -> np.ndarray:
        """Return the weights of the least loss, or those after some steps from ``start``."""
        of_dense = np.ones(self._dense.shape[1])
        penalty = np.concatenate([penalties.repeat(self.sizes), of_dense, [0.0]])
        rates = _probabilities(self.logits(start))
        curvature = self._per_weight(self._scale * rates * (1 - rates), 2)
        # in units of which every weight has a similar curvature, so that few steps are enough
        unit = 1 / np.sqrt(np.maximum(penalty, 1) + curvature)

        def loss(scaled: np.ndarray) -> tuple[float, np.ndarray]:
            w = unit * scaled
            z = self.logits(w)
            losses = np.logaddexp(0, z) - self._labels * z
            errors = self._scale * (_probabilities(z) - self._labels)
            slopes = self._per_weight(errors) + penalty * w
            return self._scale @ losses + penalty @ w**2 / 2, unit * slopes

        options = {"maxiter": _STEPS}
        found = optimize.minimize(loss, start / unit, jac=True, method="L-BFGS-B", options=options)
        return unit * found.x

    def regression(self, w: np.ndarray, penalties: np.ndarray) -> Regression:
        """Return weights as a regression."""
        *of_ids, rest = np.split(w, self._ends)
        return Regression(self._seen, of_ids, rest[:-1], float(rest[-1]), penalties)


def _probabilities(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def _penalty(slopes: np.ndarray, curvature: np.ndarray, chance: np.ndarray) -> float:
    """Return the penalty of a categorical column: one over the variance of its weights.

    The variance is that of random effects by the method of moments (DerSimonian & Laird 1986,
    "Meta-analysis in Clinical Trials"): a value's effect is about slope / curvature, of which
    chance / curvature² is the variance by chance alone.

    Args:
        slopes: For each value the sum of label − click rate, where all weights are 0.
        curvature: Minus the derivative of the slope by the weight.
        chance: The variance of the slope if the value had no effect.
    """
    # not divided by the curvature, which is 0 for a value whose rows all have the weight 0
    weights = 1 / (1 + _TYPICAL_VARIANCE * curvature) ** 2
    excess = weights @ (slopes**2 - chance)
    least, most = _PENALTIES
    return float(np.clip(weights @ curvature**2 / excess, least, most)) if excess > 0 else most
