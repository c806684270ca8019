"""Weights of how often an id occurs, in the regression that a model starts from.

Where few rows share an id, their number says something of it: an item that one user has heard is
not like one that everybody hears, and an id that training never saw is the rarest of all. A weight
of the id alone cannot say so, because it is fitted to the very rows it is used for, and an unknown
id has none. So there is a weight for each number of *other* training rows with the id: a row whose
id no other row has is, in training, what an unknown id is later (Good 1953, "The Population
Frequencies of Species"). An id's number of rows is fixed once the regression is fitted. So its two
weights are added up to one, and a model knows nothing of all this.
"""

from __future__ import annotations

import dataclasses
import logging

import numpy as np

from nvt_torchrec.training.baselines.penalties import NATS, choose_penalties
from nvt_torchrec.training.baselines.regression import Objective, Regression
from nvt_torchrec.training.baselines.row_sample import Column, RowSample

log = logging.getLogger(__name__)

#: A column gets weights of counts if so many training rows have an id that no other row has. With
#: fewer the weight of an unknown id would be a guess.
_MIN_SINGLE_ROWS = 100
#: Each smaller count has a weight of its own; beyond, a weight is shared by counts up to √2 times
#: the smallest of them.
_FIRST_SHARED_COUNT = 4


@dataclasses.dataclass(frozen=True)
class IdCounts:
    """How many training rows have each id of the columns that get weights of counts.

    Attributes:
        rows: By the position of a column among ``RowSample.columns``, the number of rows with each
            id, int64 [rows of its table].
        num_columns: The number of columns of the sample.
    """

    rows: dict[int, np.ndarray]
    num_columns: int

    @classmethod
    def count(cls, sample: RowSample, table_rows: tuple[int, ...]) -> IdCounts:
        """Count the ids of all training rows.

        Args:
            sample: The training rows, all of them.
            table_rows: The rows of the table of each of its columns.
        """
        found = {}
        for position, (column, size) in enumerate(zip(sample.columns, table_rows, strict=True)):
            # A list or history has several ids a row, whose counts would have to be combined.
            if column.rows is not None:
                continue
            rows = np.bincount(column.ids, minlength=size)
            if np.count_nonzero(rows == 1) >= _MIN_SINGLE_ROWS:
                found[position] = rows
        return cls(found, len(sample.columns))

    def add_columns(self, sample: RowSample, *, in_training: bool) -> RowSample:
        """Return rows with a further column for each counted one: its ids say how many rows.

        Args:
            sample: The rows.
            in_training: Whether they are the counted rows. Then a row does not count itself.
        """
        columns = list(sample.columns)
        for position, rows in self.rows.items():
            others = rows[sample.columns[position].ids]
            if in_training:
                others = others - 1
            # With shares it is no categorical column, whose penalty would be raised with the ids'.
            shares = np.ones(len(sample))
            columns.append(Column(_number_counts(others), np.arange(len(sample)), shares))
        return dataclasses.replace(sample, columns=columns)

    def add_weights(self, regression: Regression, objective: Objective) -> Regression:
        """Return a regression with weights of 0 for the counts of ``objective``'s rows.

        Args:
            regression: One without weights of counts.
            objective: That of the training rows with further columns.
        """
        zeros = objective.to_regression(np.zeros(objective.num_weights), np.zeros(0))
        weights = list(regression.weights)
        weights[self.num_columns : self.num_columns] = zeros.weights[self._positions]
        return dataclasses.replace(regression, ids=zeros.ids, weights=weights)

    def insert_penalties(self, regression: Regression, estimated: np.ndarray) -> np.ndarray:
        """Return the penalties of a regression, with the estimated ones of the counts."""
        return np.insert(regression.penalties, self.num_columns, estimated[self._positions])

    def merge(self, regression: Regression) -> Regression:
        """Return the regression without weights of counts, which it adds to those of the ids."""
        ids, weights = list(regression.ids), list(regression.weights)
        numbers, count_weights = ids[self._positions], weights[self._positions]
        for index, (position, rows) in enumerate(self.rows.items()):
            # A count that no training row has, as a row does not count itself, lies between two
            # that rows have.
            merged = np.interp(_number_counts(rows), numbers[index], count_weights[index])
            merged[ids[position]] += weights[position]
            ids[position] = np.arange(len(rows))
            weights[position] = merged
        del ids[self._positions], weights[self._positions]
        penalties = np.delete(regression.penalties, self._positions)
        return dataclasses.replace(regression, ids=ids, weights=weights, penalties=penalties)

    @property
    def _positions(self) -> slice:
        """The positions of the further columns, between those of the sample and the bins."""
        return slice(self.num_columns, self.num_columns + len(self.rows))


def add_count_weights(
    regression: Regression,
    sample: RowSample,
    valid: RowSample,
    label: str,
    table_rows: tuple[int, ...],
    offset: float = 0.0,
) -> Regression:
    """Return a regression with weights of counts, if the log loss of valid is lower with them.

    Args:
        regression: One that was fitted to ``sample``, with penalties that valid chose.
        sample: All training rows.
        valid: Rows of valid; without any, ``regression`` is returned.
        label: The label.
        table_rows: The rows of the table of each column of ``sample``.
        offset: By how much logits of ``valid`` are larger than those of the training rows.
    """
    counts = IdCounts.count(sample, table_rows)
    if not (counts.rows and len(valid)):
        return regression
    loss = regression.shift(offset).log_loss(valid, label)
    counted_valid = counts.add_columns(valid, in_training=False)
    objective = Objective(counts.add_columns(sample, in_training=True), label, regression.edges)
    start = counts.add_weights(regression, objective)
    penalties = counts.insert_penalties(regression, objective.estimate_penalties(start))
    found = objective.solve(start, penalties)
    if found.shift(offset).log_loss(counted_valid, label) > loss - NATS / len(valid):
        return regression
    # Beside weights of counts, those of ids have less to say.
    found = choose_penalties(objective, found, counted_valid, label, offset)
    log.info(
        "regression of %s: weights of how often an id occurs, chosen on valid, whose log loss is "
        "%.4f instead of %.4f", label, found.shift(offset).log_loss(counted_valid, label), loss,
    )  # fmt: skip
    return counts.merge(found)


def _number_counts(counts: np.ndarray) -> np.ndarray:
    """Return the number of the weight of each count, int64."""
    ratio = np.maximum(counts, _FIRST_SHARED_COUNT) / _FIRST_SHARED_COUNT
    shared = _FIRST_SHARED_COUNT + np.floor(2 * np.log2(ratio)).astype(np.int64)
    return np.where(counts < _FIRST_SHARED_COUNT, counts, shared)
