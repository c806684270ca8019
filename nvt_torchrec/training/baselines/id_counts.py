"""Weights for the frequency of ids, in the regression that a model starts from.

If few rows share an id, their number is informative: an item that one user has heard differs from
an item that everybody hears, and an id that training never saw is the rarest of all. A weight of
the id cannot express that, because it is fitted to the very rows that it is used for, and an
unknown id has no weight. So the regression gets a weight for each number of *other* training rows
with the same id: a training row whose id occurs nowhere else stands for the unknown ids of later
rows (Good 1953, "The Population Frequencies of Species"). Once the regression is fitted, an id's
count is a constant. So the two weights are added up to one per id, and the model needs no counts.
"""

from __future__ import annotations

import dataclasses
import logging

import numpy as np

from nvt_torchrec.training.baselines.penalties import NATS, choose_penalties
from nvt_torchrec.training.baselines.regression import Objective, Regression
from nvt_torchrec.training.baselines.row_sample import Column, RowSample

log = logging.getLogger(__name__)

#: A column gets weights of counts if at least this many training rows have an id that occurs in no
#: other row. With fewer, the weight of unknown ids would be a guess.
_MIN_SINGLE_ROWS = 100
#: Smaller counts have their own weights; from here on, counts share a weight up to √2 times the
#: smallest of them.
_FIRST_SHARED_COUNT = 4


@dataclasses.dataclass(frozen=True)
class IdCounts:
    """The number of training rows of each id, for the columns that get weights of counts.

    Attributes:
        rows: The number of rows with each id, int64 [rows of the table], by the position of the
            column among ``RowSample.columns``.
        num_columns: The number of columns of the sample.
    """

    rows: dict[int, np.ndarray]
    num_columns: int

    @classmethod
    def count(cls, sample: RowSample, table_rows: tuple[int, ...]) -> IdCounts:
        """Count the ids of all training rows.

        Args:
            sample: All training rows.
            table_rows: The number of rows of each column's table.
        """
        rows_by_position = {}
        for position, (column, size) in enumerate(zip(sample.columns, table_rows, strict=True)):
            # Lists and histories have several ids per row, whose counts would have to be combined.
            if column.rows is not None:
                continue
            rows = np.bincount(column.ids, minlength=size)
            if np.count_nonzero(rows == 1) >= _MIN_SINGLE_ROWS:
                rows_by_position[position] = rows
        return cls(rows_by_position, len(sample.columns))

    def add_columns(self, sample: RowSample, *, in_training: bool) -> RowSample:
        """Return the rows with an additional column, of count classes, for each counted column.

        Args:
            sample: The rows.
            in_training: Whether these are the counted rows. Then a row does not count itself.
        """
        columns = list(sample.columns)
        for position, rows in self.rows.items():
            others = rows[sample.columns[position].ids]
            if in_training:
                others = others - 1
            # Shares keep the column from counting as categorical: choose_penalties would raise its
            # penalty together with those of the ids.
            shares = np.ones(len(sample))
            columns.append(Column(_classify_counts(others), np.arange(len(sample)), shares))
        return dataclasses.replace(sample, columns=columns)

    def add_weights(self, regression: Regression, objective: Objective) -> Regression:
        """Return a regression with weights of 0 for the counts of ``objective``'s rows.

        Args:
            regression: A regression without weights of counts.
            objective: The objective of the training rows with the additional columns.
        """
        zeros = objective.to_regression(np.zeros(objective.num_weights), np.zeros(0))
        weights = list(regression.weights)
        weights[self.num_columns : self.num_columns] = zeros.weights[self._positions]
        return dataclasses.replace(regression, ids=zeros.ids, weights=weights)

    def insert_penalties(self, regression: Regression, estimated: np.ndarray) -> np.ndarray:
        """Return a regression's penalties together with the estimated penalties of the counts."""
        return np.insert(regression.penalties, self.num_columns, estimated[self._positions])

    def merge(self, regression: Regression) -> Regression:
        """Add the weights of counts to those of the ids, and return the regression without them."""
        ids = list(regression.ids)
        weights = list(regression.weights)
        classes = ids[self._positions]
        count_weights = weights[self._positions]
        for index, (position, rows) in enumerate(self.rows.items()):
            # Since training rows do not count themselves, none may have exactly this count. Its
            # weight is then interpolated.
            merged = np.interp(_classify_counts(rows), classes[index], count_weights[index])
            merged[ids[position]] += weights[position]
            ids[position] = np.arange(len(rows))
            weights[position] = merged
        del ids[self._positions]
        del weights[self._positions]
        penalties = np.delete(regression.penalties, self._positions)
        return dataclasses.replace(regression, ids=ids, weights=weights, penalties=penalties)

    @property
    def _positions(self) -> slice:
        """The positions of the additional columns, between those of the sample and the bins."""
        return slice(self.num_columns, self.num_columns + len(self.rows))


def add_count_weights(
    regression: Regression,
    sample: RowSample,
    valid: RowSample,
    label: str,
    table_rows: tuple[int, ...],
    offset: float = 0.0,
) -> Regression:
    """Return a regression with weights of counts if they lower the log loss of valid.

    Args:
        regression: A regression fitted to ``sample``, with penalties chosen on valid.
        sample: All training rows.
        valid: Rows of valid; if empty, ``regression`` is returned.
        label: The label.
        table_rows: The number of rows of each column's table.
        offset: The difference between the logits of ``valid`` and those of the training rows.
    """
    counts = IdCounts.count(sample, table_rows)
    if not (counts.rows and len(valid)):
        return regression
    loss = regression.shift(offset).log_loss(valid, label)
    counted_valid = counts.add_columns(valid, in_training=False)
    objective = Objective(counts.add_columns(sample, in_training=True), label, regression.edges)
    start = counts.add_weights(regression, objective)
    penalties = counts.insert_penalties(regression, objective.estimate_penalties(start))
    counted = objective.solve(start, penalties)
    if counted.shift(offset).log_loss(counted_valid, label) > loss - NATS / len(valid):
        return regression
    # With weights of counts, the weights of ids explain less, so their penalties may have to rise.
    counted = choose_penalties(objective, counted, counted_valid, label, offset)
    log.info(
        "regression of %s: weights for the frequency of ids, chosen on valid, whose log loss is "
        "%.4f instead of %.4f", label, counted.shift(offset).log_loss(counted_valid, label), loss,
    )  # fmt: skip
    return counts.merge(counted)


def _classify_counts(counts: np.ndarray) -> np.ndarray:
    """Return the class of each count, int64; counts of a class share a weight."""
    ratio = np.maximum(counts, _FIRST_SHARED_COUNT) / _FIRST_SHARED_COUNT
    shared = _FIRST_SHARED_COUNT + np.floor(2 * np.log2(ratio)).astype(np.int64)
    return np.where(counts < _FIRST_SHARED_COUNT, counts, shared)
