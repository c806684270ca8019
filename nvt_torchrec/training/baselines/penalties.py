"""Penalties of a regression's ids, chosen on rows of valid.

On training rows a penalty that is too small cannot be seen. Where dense columns say what happened
to an id before (docs/events.md), the id's weight is fitted beside them to the same clicks, and
takes over a part of their effect. Later rows, of which most may have ids that training never saw,
have the dense columns alone. So the penalties are raised as long as the loss of valid falls.
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

#: Penalties are raised by this factor at a time. In smaller steps (2, 8 times) ml-100k's loss on
#: valid changed by less than 0.001.
_FACTOR = 5.0
#: The number of times that they are raised, at most.
_MAX_RAISES = 4
#: By how much the loss, summed over the rows of valid, must fall (as in :mod:`.loop.stopping`).
NATS = 2.0
#: A column whose part of the logits fits valid best times less than this is fitted too closely.
_LOW_SLOPE = 0.75
#: The penalty of the difference of a slope from 1, so that columns of little effect keep theirs.
_SLOPE_PENALTY = 10.0


def choose_penalties(
    objective: Objective,
    start: Regression,
    valid: RowSample,
    label: str,
    offset: float = 0.0,
) -> Regression:
    """Raise penalties of ids while the log loss of valid falls, and return the best regression.

    Each step tries two sets of columns: all categorical ones, and those of which valid wants less
    (:func:`_find_slopes`).

    Args:
        objective: That of the training rows.
        start: A regression that was fitted to them.
        valid: Rows of valid; without any, ``start`` is returned.
        label: The label.
        offset: By how much logits of ``valid`` are larger than those of the training rows.
    """
    best = start
    if not len(valid):
        return best
    first_loss = best_loss = best.shift(offset).log_loss(valid, label)
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
        loss, regression = min(tries, key=lambda each: each[0])
        if loss > best_loss - NATS / len(valid):
            break
        best, best_loss = regression, loss
    if best is not start:
        factor = (best.penalties / start.penalties).max()
        log.info(
            "regression of %s: penalties of ids raised up to %g times, chosen on valid, whose log "
            "loss is %.4f instead of %.4f", label, factor, best_loss, first_loss,
        )  # fmt: skip
    return best


def _find_slopes(regression: Regression, sample: RowSample, label: str) -> np.ndarray:
    """Return by which factor each column's part of the logits fits rows best, float64 [columns].

    It is the calibration slope of each column (Cox 1958, "Two Further Applications of a Model for
    Binary Regression"): below 1 its weights are too large. Ridge regression towards 1.
    """
    parts = np.column_stack([*regression.iterate_column_logits(sample)])
    rest = sample.dense @ regression.dense + regression.bias + sample.corrections
    labels, scale = sample.labels[label], sample.relative_weights()
    num_columns = parts.shape[1]
    inputs = np.column_stack([parts, np.ones(len(rest))])
    first = np.append(np.ones(num_columns), 0.0)
    penalty = np.append(np.full(num_columns, _SLOPE_PENALTY), 0.0)

    def loss(slopes: np.ndarray) -> tuple[float, np.ndarray]:
        logits, away = rest + inputs @ slopes, slopes - first
        losses = np.logaddexp(0, logits) - labels * logits
        errors = scale * (compute_probabilities(logits) - labels)
        return scale @ losses + penalty @ away**2 / 2, inputs.T @ errors + penalty * away

    return optimize.minimize(loss, first, jac=True, method="L-BFGS-B").x[:-1]
