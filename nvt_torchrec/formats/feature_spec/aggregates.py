"""The values of aggregates: one class each, in a registry by the name in the spec.

A class lists the running sums it needs for each key, as names of fields of :class:`EventsBefore`,
and computes its value from them. How a field is maintained (added when an event becomes known,
subtracted when it leaves the window, carried over to later days and to inference) does not depend
on the values that use it: :mod:`etl.events.sums` does this for the rows of a log,
:mod:`workflows.event_sums` for rows to score. A new value of existing fields is therefore one class
and one line in :data:`AGGREGATES`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np

#: Microseconds in a second.
_SECOND = 1e6


@dataclasses.dataclass(frozen=True)
class EventsBefore:
    """Sums over the events before each of n rows that have the row's key and are in its window.

    Every array but ``cuts`` is None unless the aggregate's value keeps it.

    Attributes:
        cuts: int64 [n], the times before which events count, in microseconds.
        count: Integers [n], the number of events.
        positives: Integers [n], the number of events with the label.
        last_time: int64 [n], the time of the last event, in microseconds; undefined for rows
            without an event. It ignores the window.
        amount_count: float64 [n], the number of events that have a number in the aggregate's
            column.
        total: float64 [n], the sum of these numbers.
        newest: float64 [n], the number of the last event that has one; NaN without such an event.
            Among events that become known at the same time, the last one in the log.
        smallest: float64 [n], the smallest number; NaN without one.
        largest: float64 [n], the largest number; NaN without one.
        distinct: Integers [n], the number of different values in the aggregate's column.
        prior: float64 [n], the rate of the label over all earlier events, whatever their key; NaN
            without any. Given with ``positives`` only.
        smoothing: The weight of ``prior``, in events. Given with ``positives`` only.
    """

    cuts: np.ndarray
    count: np.ndarray | None = None
    positives: np.ndarray | None = None
    last_time: np.ndarray | None = None
    amount_count: np.ndarray | None = None
    total: np.ndarray | None = None
    newest: np.ndarray | None = None
    smallest: np.ndarray | None = None
    largest: np.ndarray | None = None
    distinct: np.ndarray | None = None
    prior: np.ndarray | None = None
    smoothing: float = 0


class AggregateValue:
    """Base class of an aggregate's kinds of value, such as a count or a mean.

    Attributes:
        name: Its name in the spec.
        keeps: The fields of :class:`EventsBefore` that are maintained for each key.
        transform: The transform of its columns, unless the spec gives another one.
        fill: The replacement for a missing value.
        unit: A description of valid values, for errors about values that a caller passes.
        minimum: The smallest value.
        maximum: The largest value.
        is_whole: Whether values are whole numbers.
        allows_missing: Whether a value may be missing.
        has_window: Whether it can be restricted to the events within a window.
        has_label: Whether it refers to a label, and is smoothed.
        has_column: Whether it refers to a column of the log: ``name(column)``.
        takes_numbers: Whether the column must hold numbers; otherwise its values are only compared.
    """

    name: ClassVar[str]
    keeps: ClassVar[tuple[str, ...]]
    transform: ClassVar[str] = "normalize"
    fill: ClassVar[float] = 0
    unit: ClassVar[str]
    minimum: ClassVar[float] = -math.inf
    maximum: ClassVar[float] = math.inf
    is_whole: ClassVar[bool] = False
    allows_missing: ClassVar[bool] = False
    has_window: ClassVar[bool] = True
    has_label: ClassVar[bool] = False
    has_column: ClassVar[bool] = False
    takes_numbers: ClassVar[bool] = True

    def compute(self, before: EventsBefore) -> np.ndarray:
        """Return the values, float64 [n]; NaN where missing."""
        raise NotImplementedError

    def find_wrong(self, numbers: np.ndarray) -> np.ndarray:
        """Return a mask of the numbers that cannot be values of this kind, bool [n].

        Args:
            numbers: float64 [n], passed by a caller; NaN where missing.
        """
        wrong = (numbers < self.minimum) | (numbers > self.maximum)
        if self.is_whole:
            wrong |= numbers != np.floor(numbers)
        return wrong if self.allows_missing else wrong | np.isnan(numbers)


class Count(AggregateValue):
    """The number of events."""

    name = "count"
    keeps = ("count",)
    transform = "log_normalize"
    minimum = 0
    is_whole = True
    unit = "a number of events, whole and from 0 on"

    def compute(self, before: EventsBefore) -> np.ndarray:
        """See :meth:`AggregateValue.compute`."""
        assert before.count is not None
        return before.count.astype(np.float64)


class Rate(AggregateValue):
    """The share of events with the label, smoothed by the rate of all events.

    It is missing until the first hour whose events are known, because the prior is missing.
    """

    name = "rate"
    keeps = ("count", "positives")
    minimum = 0
    maximum = 1
    has_label = True
    unit = "a share from 0 to 1"

    def compute(self, before: EventsBefore) -> np.ndarray:
        """See :meth:`AggregateValue.compute`."""
        assert before.count is not None
        assert before.positives is not None
        assert before.prior is not None
        weight = before.smoothing
        return (before.positives + weight * before.prior) / (before.count + weight)


class Since(AggregateValue):
    """The seconds since the last event; missing without one, and then filled with ten years."""

    name = "since"
    keeps = ("count", "last_time")
    transform = "log1p_normalize"
    fill = 315_360_000
    minimum = 0
    allows_missing = True
    has_window = False
    unit = "seconds from 0 on, or a missing value (null) if there was no event"

    def compute(self, before: EventsBefore) -> np.ndarray:
        """See :meth:`AggregateValue.compute`."""
        assert before.count is not None
        assert before.last_time is not None
        has_event = before.count > 0
        cuts = before.cuts
        seconds = np.maximum(cuts - np.where(has_event, before.last_time, cuts), 0) / _SECOND
        return np.where(has_event, seconds, np.nan)


class Sum(AggregateValue):
    """The sum of the events' numbers; 0 without any."""

    name = "sum"
    keeps = ("total",)
    has_column = True
    unit = "a number"

    def compute(self, before: EventsBefore) -> np.ndarray:
        """See :meth:`AggregateValue.compute`."""
        assert before.total is not None
        return before.total


class Mean(AggregateValue):
    """The mean of the events' numbers; missing without any."""

    name = "mean"
    keeps = ("amount_count", "total")
    has_column = True
    allows_missing = True
    unit = "a number, or a missing value (null) if no event has one"

    def compute(self, before: EventsBefore) -> np.ndarray:
        """See :meth:`AggregateValue.compute`."""
        assert before.amount_count is not None
        assert before.total is not None
        means = np.full(len(before.total), np.nan)
        np.divide(before.total, before.amount_count, out=means, where=before.amount_count > 0)
        return means


class _PickedNumber(AggregateValue):
    """One of the events' numbers, kept as it is; missing without any."""

    has_column = True
    allows_missing = True
    unit = Mean.unit

    def compute(self, before: EventsBefore) -> np.ndarray:
        """See :meth:`AggregateValue.compute`."""
        (field,) = self.keeps
        picked = getattr(before, field)
        assert picked is not None
        return picked


class Last(_PickedNumber):
    """The number of the newest event that has a number."""

    name = "last"
    keeps = ("newest",)


class Minimum(_PickedNumber):
    """The smallest of the events' numbers."""

    name = "min"
    keeps = ("smallest",)


class Maximum(_PickedNumber):
    """The largest of the events' numbers."""

    name = "max"
    keeps = ("largest",)


class Distinct(AggregateValue):
    """The number of different values of events; missing values do not count."""

    name = "distinct"
    keeps = ("distinct",)
    transform = "log_normalize"
    minimum = 0
    is_whole = True
    has_column = True
    takes_numbers = False
    unit = "a number of different values, whole and from 0 on"

    def compute(self, before: EventsBefore) -> np.ndarray:
        """See :meth:`AggregateValue.compute`."""
        assert before.distinct is not None
        return before.distinct.astype(np.float64)


#: By the name in the spec.
AGGREGATES: dict[str, AggregateValue] = {
    value.name: value
    for value in (
        Count(),
        Rate(),
        Since(),
        Sum(),
        Mean(),
        Last(),
        Minimum(),
        Maximum(),
        Distinct(),
    )
}
#: The values of an aggregate without ``values``. New kinds of value must not be added here: they
#: would add columns to existing specs.
DEFAULT_VALUES = ("count", "rate", "since")
