"""Choose the penalties of a regression's ids on rows of valid.

Training rows cannot show that a penalty is too small. If dense columns describe what happened to an
id before (docs/events.md), the id's weight is fitted to the same clicks, and takes over a part of
their effect. Later rows, many of which may have ids that training never saw, only have the dense
columns. So the penalties are raised as long as the loss of valid falls.
"""

from __future__ import annotations

import logging

import numpy as np
from scipy import optimize

from nvt_torchrec.training.baselines.regression import (
    Objective,
    Regression,
    compute_probabilities,
)
from nvt_torchrec.training.baselines.row_sample import RowSample

log = logging.getLogger(__name__)

#: The factor of each raise. With smaller steps (a factor of 2, up to 8 raises) ml-100k's loss on
#: valid changed by less than 0.001.
_FACTOR = 5.0
#: The largest number of raises.
_MAX_RAISES = 4
#: How much the loss, summed over the rows of valid, must fall (as in :mod:`.loop.stopping`).
NATS = 2.0
#: A column with a calibration slope below this is overfitted.
_LOW_SLOPE = 0.75
#: The penalty of the distance of a slope from 1, which keeps columns of little effect at 1.
_SLOPE_PENALTY = 10.0


def choose_penalties(
    objective: Objective,
    start: Regression,
    valid: RowSample,
    label: str,
    offset: float = 0.0,
) -> Regression:
    """Raise penalties of ids while the log loss of valid falls, and return the best regression.

    Each step tries two sets of columns: all categorical ones, and the overfitted ones
    (:func:`_find_slopes`).

    Args:
        objective: The objective of the training rows.
        start: A regression fitted to these rows.
        valid: Rows of valid; if empty, ``start`` is returned.
        label: The label.
        offset: The difference between the logits of ``valid`` and those of the training rows.
    """
    best = start
    if not len(valid):
        return best
    first_loss = best.shift(offset).log_loss(valid, label)
    best_loss = first_loss
    # The penalties of bins follow those of the sample's columns.
    features = np.arange(len(best.penalties)) < len(valid.columns)
    categorical = features.copy()
    for position, column in enumerate(valid.columns):
        categorical[position] = column.is_categorical
    for _ in range(_MAX_RAISES):
        overfitted = features & (_find_slopes(best.shift(offset), valid, label) < _LOW_SLOPE)
        tries = []
        for raised in (categorical, overfitted):
            if raised.any():
                penalties = np.where(raised, _FACTOR * best.penalties, best.penalties)
                regression = objective.solve(best, penalties)
                tries.append((regression.shift(offset).log_loss(valid, label), regression))
        if not tries:
            break
        loss, regression = min(tries, key=lambda attempt: attempt[0])
        if loss > best_loss - NATS / len(valid):
            break
        best = regression
        best_loss = loss
    if best is not start:
        factor = (best.penalties / start.penalties).max()
        log.info(
            "regression of %s: penalties of ids raised up to %g times, chosen on valid, whose log "
            "loss is %.4f instead of %.4f", label, factor, best_loss, first_loss,
        )  # fmt: skip
    return best


def _find_slopes(regression: Regression, sample: RowSample, label: str) -> np.ndarray:
    """Return each column's calibration slope on rows, float64 [columns].

    It is the factor of the column's part of the logits with which the rows fit best (Cox 1958, "Two
    Further Applications of a Model for Binary Regression"). Below 1, the column's weights are too
    large. All factors and a bias are fitted together, by logistic regression with a ridge penalty
    towards 1.
    """
    parts = np.column_stack([*regression.iterate_column_logits(sample)])
    rest = sample.dense @ regression.dense + regression.bias + sample.corrections
    labels = sample.labels[label]
    scale = sample.relative_weights()
    num_columns = parts.shape[1]
    inputs = np.column_stack([parts, np.ones(len(rest))])
    first = np.append(np.ones(num_columns), 0.0)
    penalty = np.append(np.full(num_columns, _SLOPE_PENALTY), 0.0)

    def compute_loss(slopes: np.ndarray) -> tuple[float, np.ndarray]:
        logits = rest + inputs @ slopes
        distance = slopes - first
        losses = np.logaddexp(0, logits) - labels * logits
        errors = scale * (compute_probabilities(logits) - labels)
        loss = scale @ losses + penalty @ distance**2 / 2
        gradient = inputs.T @ errors + penalty * distance
        return loss, gradient

    return optimize.minimize(compute_loss, first, jac=True, method="L-BFGS-B").x[:-1]
