"""What the events before a row sum up to, and the aggregates that follow: in the ETL and later.

The ETL sums up as the rows pass by (:mod:`etl.events.sums`). For inference, :class:`GroupEvents`
keeps the events of each key, those before the longest window as one, so that the same sums follow
for a row of any later time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numba import types

from nvt_torchrec.base.arrays import mark_begins
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import DAY, HOUR
from nvt_torchrec.formats.feature_spec.events import parse_duration

#: The bits of an event's flags: whether it is a row for training, and whether it is a row at all,
#: not one of the events that a history keeps of earlier days; then a bit for each label, and one
#: for each history that has the event.
TRAIN, EVENT, FIRST_LABEL = 0, 1, 2
#: The time from which events that count for every row are known.
BEFORE_ALL = -(2**62)
#: Microseconds in a second.
_SECOND = 1e6
_DAMAGED = "copy the whole workflow again, or run the ETL again"


def history_bit(spec: FeatureSpec, number: int) -> int:
    """Return the bit of the events of a history."""
    return FIRST_LABEL + len(spec.labels) + number


@dataclasses.dataclass(frozen=True)
class GroupSums:
    """What is summed up over the events of a group.

    Attributes:
        key: The columns of its key.
        sums: Of each sum, the window in microseconds (0: always), and the bit of the events that
            are counted, see :data:`TRAIN`.
        histories: The numbers of its histories; the last sums are their events.
        has_last: Whether the time of the last event is wanted.
    """

    key: tuple[str, ...]
    sums: tuple[tuple[int, int], ...]
    histories: tuple[int, ...]
    has_last: bool

    @functools.cached_property
    def windows_and_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each sum, int64 [sums], its window, and its row in :attr:`GroupEvents.sums`."""
        windows, bits = np.array(self.sums, np.int64).reshape(-1, 2).T
        return windows, bits - EVENT

    def place(self, bit: int, window: int = 0) -> int:
        """Return the number of a sum."""
        return self.sums.index((window, bit))


def sums_of_groups(spec: FeatureSpec) -> list[GroupSums]:
    """Return what is summed up for the aggregates of each group."""
    groups = []
    for key in spec.groups:
        windows: dict[int, dict[int, None]] = {}
        aggregates = [a for c in spec.aggregates if (a := c.aggregate) and a.key == key]
        for aggregate in aggregates:
            bits = windows.setdefault(parse_duration(aggregate.window), {})
            bits[EVENT] = None
            if aggregate.label:
                bits[FIRST_LABEL + spec.labels.index(aggregate.label)] = None
        histories = [i for i, rule in enumerate(spec.histories) if rule.key == key]
        for number in histories:
            windows.setdefault(0, {})[history_bit(spec, number)] = None
        sums = tuple((window, bit) for window, bits in windows.items() for bit in bits)
        has_last = any(aggregate.value == "since" for aggregate in aggregates)
        groups.append(GroupSums(key, sums, tuple(histories), has_last))
    return groups


def has_aggregates(spec: FeatureSpec, group: GroupSums) -> bool:
    """Return whether there are aggregates of a group, and not only histories."""
    return any(c.aggregate.key == group.key for c in spec.aggregates if c.aggregate)


def cut_times(spec: FeatureSpec, times: np.ndarray) -> np.ndarray:
    """Return the times before which events count for rows of these times, int64 [n]."""
    assert spec.events is not None
    return times // DAY * DAY if spec.events.cut == "day" else np.asarray(times)


class EarlierRates(Protocol):
    """The rates of all events, by which those of keys are smoothed."""

    @property
    def smoothing(self) -> Mapping[str, float]:
        """By rate, the weight of the rate of all events, in events."""

    def before(self, label: str, times: np.ndarray) -> np.ndarray:
        """Return the rate of all events known before the hours of some times, float64 [n]."""


def aggregate_values(
    spec: FeatureSpec,
    group: GroupSums,
    rates: EarlierRates,
    sums: np.ndarray,
    last: np.ndarray | None,
    cuts: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return the values of a group's aggregates in their units; see :class:`Aggregate`.

    Args:
        spec: The columns.
        group: The group.
        rates: What rates are smoothed by.
        sums: Each [n], in the order of ``group.sums``; those of histories are not read.
        last: int64 [n], the times of the last events; None where they are not wanted.
        cuts: int64 [n], the times before which events were summed up.

    Returns:
        float64 [n] by column; NaN where missing.
    """
    values = {}
    for column in spec.aggregates:
        aggregate = column.aggregate
        if aggregate is None or aggregate.key != group.key:
            continue
        window = parse_duration(aggregate.window)
        count = sums[group.place(EVENT, window)]
        if aggregate.value == "count":
            values[column.name] = count.astype(np.float64)
        elif aggregate.value == "since":
            assert last is not None
            seconds = np.maximum(cuts - np.where(count > 0, last, cuts), 0) / _SECOND
            values[column.name] = np.where(count > 0, seconds, np.nan)
        else:
            label = FIRST_LABEL + spec.labels.index(aggregate.label)
            positives = sums[group.place(label, window)]
            weight = rates.smoothing[column.name]
            prior = rates.before(aggregate.label, cuts)
            values[column.name] = (positives + weight * prior) / (count + weight)
    return values


@dataclasses.dataclass(frozen=True)
class GroupEvents:
    """The events of each key of a group, for sums as of any time from that of the state on.

    Attributes:
        keys: int64 [keys], rising.
        offsets: int64 [keys + 1], where the events of each key begin.
        known: int64 [events], from when each is known; rising for each key.
        last: int64 [events], the time of the last event of the key so far.
        sums: int64 [1 + labels, events], how many events of the key there are so far, and how many
            with each label.
    """

    keys: np.ndarray
    offsets: np.ndarray
    known: np.ndarray
    last: np.ndarray
    sums: np.ndarray

    @classmethod
    def collect(
        cls,
        spec: FeatureSpec,
        group: GroupSums,
        as_of: int,
        key: np.ndarray,
        known: np.ndarray,
        happened: np.ndarray,
        counts: np.ndarray,
    ) -> GroupEvents:
        """Sum up events that no row of ``as_of`` or later can tell apart.

        Args:
            spec: The columns.
            group: What is summed up.
            as_of: The earliest time before which events count for a row.
            key: int64 [n], rising: that of each event, or of several as one.
            known: int64 [n], from when they are known; rising for each key.
            happened: int64 [n], the time of the last one.
            counts: int64 [1 + labels, n], how many there are, and how many with each label.
        """
        windows = sorted({window for window, _ in group.sums if window})
        if not len(key):
            return cls(key, np.zeros(1, np.int64), known, happened, counts)
        begin = known
        if spec.events is not None and spec.events.cut == "day":
            # rows count events before the begin of their day, and from the begin of a window on,
            # which is always at the same time of a day
            bounds = np.unique([0, *(-window % DAY for window in windows)])
            begin = known // DAY * DAY
            begin += bounds[np.searchsorted(bounds, known - begin, side="right") - 1]
        begin = np.where(known < as_of - max(windows, default=0), BEFORE_ALL, begin)
        first = np.flatnonzero(mark_begins(key) | mark_begins(begin))
        keys, begins = np.unique(key[first], return_index=True)
        offsets = np.append(begins, len(first)).astype(np.int64)
        last = np.maximum.reduceat(happened, first)
        sums = np.add.reduceat(counts, first, axis=1)
        _accumulate(offsets, last, sums)
        return cls(keys, offsets, begin[first], last, sums)

    def sums_before(
        self, group: GroupSums, hashes: np.ndarray, cuts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what the events of rows' keys sum up to.

        Args:
            group: What is summed up.
            hashes: int64 [n], the keys; 0 without one.
            cuts: int64 [n], the time before which events count for each row.

        Returns:
            int64 [sums, n], 0 in those of histories, and int64 [n], the times of the last events.

        Raises:
            BadInputError: The events are damaged.
        """
        windows, rows = group.windows_and_rows
        found = np.zeros((len(group.sums), len(hashes)), np.int64)
        last = np.zeros(len(hashes), np.int64)
        events = self.keys, self.offsets, self.known, self.last, self.sums
        if not _sum_before(*events, hashes, cuts, windows, rows, found, last):
            raise BadInputError("events of a workflow: damaged: they are not there", _DAMAGED)
        return found, last


@compiled()
def _accumulate(offsets: np.ndarray, last: np.ndarray, sums: np.ndarray) -> None:
    """Replace values by those of all events of the key so far."""
    for key in range(len(offsets) - 1):
        for event in range(offsets[key] + 1, offsets[key + 1]):
            last[event] = max(last[event], last[event - 1])
            for row in range(len(sums)):
                sums[row, event] += sums[row, event - 1]


@compiled()
def find_first(known: np.ndarray, begin: int, end: int, time: int) -> int:
    """Return the first of the events from ``begin`` to ``end`` that is known at or after a time."""
    while begin < end:
        middle = (begin + end) // 2
        if known[middle] < time:
            begin = middle + 1
        else:
            end = middle
    return begin


_INTEGERS = types.Array(types.int64, 1, "A", readonly=True)


@compiled(
    types.boolean(
        *[_INTEGERS] * 4,
        types.Array(types.int64, 2, "C", readonly=True),
        *[_INTEGERS] * 4,
        types.Array(types.int64, 2, "C"),
        types.Array(types.int64, 1, "C"),
    )
)
def _sum_before(
    keys: np.ndarray,
    offsets: np.ndarray,
    known: np.ndarray,
    last: np.ndarray,
    sums: np.ndarray,
    hashes: np.ndarray,
    cuts: np.ndarray,
    windows: np.ndarray,
    rows: np.ndarray,
    found: np.ndarray,
    last_of_row: np.ndarray,
) -> bool:
    """Fill ``found`` and ``last_of_row``; return whether the events are where the offsets say."""
    for i in range(len(hashes)):
        key = find_first(keys, 0, len(keys), hashes[i])
        if hashes[i] == 0 or key == len(keys) or keys[key] != hashes[i]:
            continue
        begin, end = offsets[key], offsets[key + 1]
        if not 0 <= begin <= end <= len(known):
            return False
        end = find_first(known, begin, end, cuts[i])
        if end == begin:
            continue
        last_of_row[i] = last[end - 1]
        for s in range(len(windows)):
            if rows[s] >= len(sums):  # of a history
                continue
            found[s, i] = sums[rows[s], end - 1]
            if windows[s]:
                left = find_first(known, begin, end, cuts[i] - windows[s])
                if left > begin:
                    found[s, i] -= sums[rows[s], left - 1]
    return True


@compiled(
    types.boolean(
        *[_INTEGERS] * 5,
        types.int64,
        types.Array(types.int64, 1, "C"),
        types.Array(types.int64, 1, "C"),
    )
)
def find_newest(
    keys: np.ndarray,
    offsets: np.ndarray,
    known: np.ndarray,
    hashes: np.ndarray,
    cuts: np.ndarray,
    maximum: int,
    ends: np.ndarray,
    counts: np.ndarray,
) -> bool:
    """Find the newest events of rows' keys in those of a history.

    Args:
        keys: int64 [keys], rising.
        offsets: int64 [keys + 1], where the events of each key begin; the oldest comes first.
        known: int64 [events], from when each is known.
        hashes: int64 [n], the keys of the rows; 0 without one.
        cuts: int64 [n], the time before which events count for each row.
        maximum: The most events of a row.
        ends: int64 [n], filled with where the events of a row end.
        counts: int64 [n], filled with how many there are.

    Returns:
        Whether the events are where the offsets say.
    """
    for i in range(len(hashes)):
        key = find_first(keys, 0, len(keys), hashes[i])
        if hashes[i] == 0 or key == len(keys) or keys[key] != hashes[i]:
            continue
        begin, end = offsets[key], offsets[key + 1]
        if not 0 <= begin <= end <= len(known):
            return False
        ends[i] = find_first(known, begin, end, cuts[i])
        counts[i] = min(ends[i] - begin, maximum)
    return True


@dataclasses.dataclass(frozen=True)
class LaterRates:
    """The rates of labels in all events, as of the times after those of a log.

    Attributes:
        smoothing: See :class:`EarlierRates`.
        hours: int64 [hours], rising: hours since 1970 in which further events become known.
        rates: By label float64 [hours + 1], the rate before each of them, and after the last one.
    """

    smoothing: Mapping[str, float]
    hours: np.ndarray
    rates: Mapping[str, np.ndarray]

    def before(self, label: str, times: np.ndarray) -> np.ndarray:
        """See :meth:`EarlierRates.before`."""
        return self.rates[label][np.searchsorted(self.hours, times // HOUR)]
