"""Add the counts of a day to a vocabulary: which values get an id."""

from __future__ import annotations

import dataclasses

import numpy as np

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.formats.feature_spec import CategoricalColumn
from nvt_torchrec.formats.schema import LARGEST_TABLE
from nvt_torchrec.workflows.vocabulary import (
    FittedVocabulary,
    PendingValues,
    Values,
    concatenate,
    keep_pending,
    order_by_value,
    take,
    unequal,
)


@dataclasses.dataclass(frozen=True)
class DayOfVocabulary:
    """What was counted of a vocabulary on one day.

    Attributes:
        values: Distinct values, in any order.
        counts: int64 [n], at least 1.
        places: int64 [n], the place of each value in the vocabulary; -1 if it is not in it.
        nulls: Number of rows in which a single-hot column was missing.
    """

    values: Values
    counts: np.ndarray
    places: np.ndarray
    nulls: int


@dataclasses.dataclass(frozen=True)
class ExtendedVocabulary:
    """A vocabulary after a day.

    Attributes:
        vocabulary: The values with ids.
        pending: The values without an id.
        forgotten: How many pending values were forgotten, because there were too many.
    """

    vocabulary: FittedVocabulary
    pending: PendingValues
    forgotten: int


def extend_vocabulary(
    column: CategoricalColumn,
    before: FittedVocabulary,
    pending: PendingValues,
    counted: DayOfVocabulary,
) -> ExtendedVocabulary:
    """Add a day to a vocabulary.

    Values that qualify for an id by the column's policy are appended by falling count over all
    days, ties by value. With ``max_table_size`` every value has, while there is room.

    Raises:
        SchemaError: The vocabulary needs more ids than there are.
        SettingsError: Its strings have more than 2 GiB.
    """
    inside = counted.places >= 0
    counts = before.counts.copy()
    counts[counted.places[inside]] += counted.counts[inside]
    unseen = take(counted.values, np.flatnonzero(~inside))
    pending = _added_up(
        concatenate([pending.values, unseen], column.name),
        np.concatenate([pending.counts, counted.counts[~inside]]),
    )

    earned = _earned(column, len(counts), pending.counts)
    added = pending.take(earned)
    values = before.values
    if len(added):
        values = concatenate([values, added.values], column.name)
        counts = np.concatenate([counts, added.counts])
        pending = pending.take(np.delete(np.arange(len(pending)), earned))
    _check_size(column, len(counts))

    kept = keep_pending(pending)
    total = before.observed["oov"] + before.observed["unique"] + int(counted.counts.sum())
    unique = int(counts.sum())
    observed = {
        "null": before.observed["null"] + counted.nulls,
        "oov": total - unique,
        "unique": unique,
    }
    vocabulary = FittedVocabulary(values, counts, observed)
    return ExtendedVocabulary(vocabulary, kept, forgotten=len(pending) - len(kept))


def _added_up(values: Values, counts: np.ndarray) -> PendingValues:
    """Return the distinct values in ascending order, with the sum of their counts."""
    if not len(counts):
        return PendingValues(values, counts)
    ordered = PendingValues(values, counts).take(order_by_value(values))
    first = np.flatnonzero(
        np.concatenate([[True], unequal(ordered.values[1:], ordered.values[:-1])])
    )
    return PendingValues(take(ordered.values, first), np.add.reduceat(ordered.counts, first))


def _earned(column: CategoricalColumn, values: int, counts: np.ndarray) -> np.ndarray:
    """Return the indices of the pending values that get new ids, in the order of the ids.

    Args:
        column: The column.
        values: The number of values with an id.
        counts: Those of the pending values, which are in ascending order.
    """
    earned = np.flatnonzero(counts >= column.freq_threshold)
    earned = earned[np.argsort(-counts[earned], kind="stable")]
    if column.max_table_size:
        earned = earned[: max(0, column.max_table_size - column.reserved_ids - values)]
    return earned


def _check_size(column: CategoricalColumn, values: int) -> None:
    size = column.reserved_ids + values
    if size > LARGEST_TABLE:
        raise SchemaError(
            f"column {column.name}: its vocabulary needs {size} ids, and ids are 32-bit integers",
            "set max_table_size or hash_buckets for this column in the spec, and fit again",
        )
