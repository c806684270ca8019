"""Add the counts of a day to a vocabulary: which values earn an id, which ids are given away."""

from __future__ import annotations

import dataclasses

import numpy as np

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.formats.feature_spec import CategoricalColumn
from nvt_torchrec.formats.schema import LARGEST_TABLE
from nvt_torchrec.workflows.extension.state import SeenValues, VocabularyState
from nvt_torchrec.workflows.vocabulary import (
    FittedVocabulary,
    Values,
    concatenate,
    kept_pending,
    order_by,
    order_by_value,
    take,
    unequal,
)


@dataclasses.dataclass(frozen=True)
class DayOfVocabulary:
    """What was counted of a vocabulary on one day.

    Attributes:
        day: The day.
        values: Distinct values, in any order.
        counts: int64 [n], at least 1.
        places: int64 [n], the place of each value in the vocabulary; -1 if it is not in it.
        nulls: Number of rows in which a single-hot column was missing.
    """

    day: int
    values: Values
    counts: np.ndarray
    places: np.ndarray
    nulls: int


@dataclasses.dataclass(frozen=True)
class ExtendedVocabulary:
    """A vocabulary after a day.

    Attributes:
        vocabulary: The values with ids.
        state: What is remembered beside it.
        reused: int64, the places whose values are others than before, ascending.
        forgotten: How many pending values were forgotten, because there were too many.
    """

    vocabulary: FittedVocabulary
    state: VocabularyState
    reused: np.ndarray
    forgotten: int


def extend_vocabulary(
    column: CategoricalColumn,
    before: FittedVocabulary,
    state: VocabularyState,
    counted: DayOfVocabulary,
    retire_after_days: int | None,
) -> ExtendedVocabulary:
    """Add a day to a vocabulary.

    Values that qualify for an id by the column's policy are appended by falling count over all
    days, ties by value. With ``max_table_size`` every value has, while there is room. Where there
    is none, and with ``retire_after_days``, ids of values that were not seen for so many days are
    given to the pending values that were seen since then, those with the highest counts first. The
    values longest unseen lose their ids first, then those with the lowest counts, then those with
    the largest ids; they become pending, with their counts.

    Raises:
        SchemaError: The vocabulary needs more ids than there are.
        SettingsError: Its strings have more than 2 GiB.
    """
    day = counted.day
    inside = counted.places >= 0
    places = counted.places[inside]
    counts = before.counts.copy()
    counts[places] += counted.counts[inside]
    last_days = None if state.last_days is None else state.last_days.copy()
    if last_days is not None:
        last_days[places] = day
    new = np.flatnonzero(~inside)
    seen_today = SeenValues(
        take(counted.values, new), counted.counts[new], np.full(len(new), day, np.int32)
    )
    pending = _added_up(state.pending.and_also(seen_today, column.name))

    earned = _earned(column, len(counts), pending)
    added = pending.take(earned)
    values = before.values
    if len(added):
        values = concatenate([values, added.values], column.name)
        counts = np.concatenate([counts, added.counts])
        pending = pending.take(np.delete(np.arange(len(pending)), earned))
        if last_days is not None:
            last_days = np.concatenate([last_days, added.days])
    _check_size(column, len(counts))

    reused = np.empty(0, np.int64)
    if retire_after_days is not None and last_days is not None and len(pending):
        gaining, losing = _exchanged(counts, last_days, pending, day - retire_after_days)
        retired = SeenValues(take(values, losing), counts[losing], last_days[losing])
        gained = pending.take(gaining)
        place = np.arange(len(values))
        place[losing] = len(values) + np.arange(len(gained))
        values = take(concatenate([values, gained.values], column.name), place)
        counts[losing], last_days[losing] = gained.counts, gained.days
        pending = pending.take(np.delete(np.arange(len(pending)), gaining))
        pending = pending.and_also(retired, column.name)
        reused = np.sort(losing)

    kept = kept_pending(pending.values, [-pending.counts, -pending.days.astype(np.int64)])
    forgotten = len(pending) - len(kept)
    pending = pending.take(kept)
    total = before.observed["oov"] + before.observed["unique"] + int(counted.counts.sum())
    unique = int(counts.sum())
    observed = {
        "null": before.observed["null"] + counted.nulls,
        "oov": total - unique,
        "unique": unique,
    }
    return ExtendedVocabulary(
        FittedVocabulary(values, counts, observed),
        VocabularyState(pending, last_days),
        reused,
        forgotten,
    )


def _added_up(known: SeenValues) -> SeenValues:
    """Return the distinct values in ascending order, with the sum of their counts and last day."""
    if not len(known):
        return known
    ordered = known.take(order_by_value(known.values))
    first = np.flatnonzero(
        np.concatenate([[True], unequal(ordered.values[1:], ordered.values[:-1])])
    )
    return SeenValues(
        take(ordered.values, first),
        np.add.reduceat(ordered.counts, first),
        np.maximum.reduceat(ordered.days, first),
    )


def _earned(column: CategoricalColumn, values: int, pending: SeenValues) -> np.ndarray:
    """Return the indices of the pending values that get new ids, in the order of the ids."""
    earned = np.flatnonzero(pending.counts >= column.freq_threshold)
    order = order_by([-pending.counts[earned]], take(pending.values, earned))
    room = len(order)
    if column.max_table_size:
        room = max(0, column.max_table_size - column.reserved_ids - values)
    return earned[order[:room]]


def _exchanged(
    counts: np.ndarray, last_days: np.ndarray, pending: SeenValues, last_day: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of pending values that get an id, and the places they get, in order.

    Args:
        counts: Of the values with ids.
        last_days: On which they were last seen.
        pending: The values without an id.
        last_day: Values last seen on this day, or before, are retired.
    """
    gaining = np.flatnonzero(pending.days > last_day)
    gaining = gaining[order_by([-pending.counts[gaining]], take(pending.values, gaining))]
    losing = np.flatnonzero(last_days <= last_day)
    losing = losing[np.lexsort((-losing, counts[losing], last_days[losing]))]
    number = min(len(gaining), len(losing))
    return gaining[:number], losing[:number]


def _check_size(column: CategoricalColumn, values: int) -> None:
    size = column.reserved_ids + values
    if size > LARGEST_TABLE:
        raise SchemaError(
            f"column {column.name}: its vocabulary needs {size} ids, and ids are 32-bit integers",
            "set max_table_size or hash_buckets for this column in the spec, and fit again",
        )
