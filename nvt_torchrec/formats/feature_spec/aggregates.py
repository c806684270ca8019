"""The values of aggregates: one class each, in a registry by the name in the spec.

A class says what is kept of the events of each key, by names of fields of :class:`EventsBefore`,
and computes its value of them. How each field is kept (added as an event becomes known, subtracted
as it leaves a window, summed up for further days and for inference) is the same for all values
that name it: :mod:`etl.events.sums` for the rows of a log, :mod:`workflows.event_sums` for rows to
score. So a value of fields that there are is a class and its line in :data:`AGGREGATES`.
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
    """What is known of the events before rows: of the key and within the window of each.

    Attributes:
        cuts: int64 [n], the times before which events count, in microseconds.
        count: Integers [n], how many events there are; None unless kept, as all below.
        positives: Integers [n], how many of them have the label.
        last_time: int64 [n], when the last event happened, in microseconds; anything where there
            is none. It knows no window.
        amount_count: float64 [n], how many events have a number in the aggregate's column.
        total: float64 [n], the sum of these numbers.
        newest: float64 [n], the number of the last event that has one; NaN without any, as below.
            Of events that are known from the same time, the last one in the log.
        smallest: float64 [n], the smallest number.
        largest: float64 [n], the largest number.
        distinct: Integers [n], how many different values events have in the aggregate's column.
        prior: float64 [n], the rate of all events before; NaN where there are none. Only with
            ``positives``; so is ``smoothing``.
        smoothing: The weight of that rate, in events.
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
    """A kind of value of an aggregate; a subclass is one.

    Attributes:
        name: Its name in the spec.
        keeps: What is kept of each key: fields of :class:`EventsBefore`.
        transform: That of its columns, unless the spec gives another one.
        fill: What replaces a missing value.
        unit: What a value is, for errors about those that a caller gives.
        minimum: The smallest value.
        maximum: The largest value.
        is_whole: Whether values are whole numbers.
        allows_missing: Whether a value may be missing.
        has_window: Whether it can be of the events within a window.
        has_label: Whether it is of a label, and smoothed.
        has_column: Whether it is of a column of the log: ``name(column)``.
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
        """Return which numbers that a caller gave are no values, bool [n].

        Args:
            numbers: float64 [n], NaN where missing.
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

    It is missing before the first hour of which any event is known.
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
    """The seconds since the last event; missing without one, which is filled with ten years."""

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
        there = before.count > 0
        cuts = before.cuts
        seconds = np.maximum(cuts - np.where(there, before.last_time, cuts), 0) / _SECOND
        return np.where(there, seconds, np.nan)


class Sum(AggregateValue):
    """The sum of the numbers of events; 0 without any."""

    name = "sum"
    keeps = ("total",)
    has_column = True
    unit = "a number"

    def compute(self, before: EventsBefore) -> np.ndarray:
        """See :meth:`AggregateValue.compute`."""
        assert before.total is not None
        return before.total


class Mean(AggregateValue):
    """The mean of the numbers of events; missing without any."""

    name = "mean"
    keeps = ("amount_count", "total")
    has_column = True
    allows_missing = True
    unit = "a number, or a missing value (null) if no event has one"

    def compute(self, before: EventsBefore) -> np.ndarray:
        """See :meth:`AggregateValue.compute`."""
        assert before.amount_count is not None
        assert before.total is not None
        none = np.full(len(before.total), np.nan)
        return np.divide(before.total, before.amount_count, out=none, where=before.amount_count > 0)


class _PickedNumber(AggregateValue):
    """One of the numbers of events, which is what is kept; missing without any."""

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
    """The number of the newest event that has one."""

    name = "last"
    keeps = ("newest",)


class Minimum(_PickedNumber):
    """The smallest number of events."""

    name = "min"
    keeps = ("smallest",)


class Maximum(_PickedNumber):
    """The largest number of events."""

    name = "max"
    keeps = ("largest",)


class Distinct(AggregateValue):
    """The number of different values of events; missing ones do not count."""

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
#: The values of an aggregate without ``values``. A later kind of value does not join them: it would
#: be a further column of specs that there are.
DEFAULT_VALUES = ("count", "rate", "since")
