"""What is summed up over the events of each group, and the aggregates that follow from it.

The ETL and the state for inference sum up in ways of their own (:mod:`etl.events.sums`,
:mod:`.event_sums`); what they sum up, and the values of both, are decided here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from nvt_torchrec.base.exact_sums import WORDS
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.aggregates import AggregateValue, EventsBefore
from nvt_torchrec.formats.feature_spec.derivations import DAY, HOUR
from nvt_torchrec.formats.feature_spec.event_keys import list_amounts
from nvt_torchrec.formats.feature_spec.events import Aggregate, EventKey, parse_duration
from nvt_torchrec.workflows.event_picks import PICK_KINDS

#: The bits of an event's flags: whether it is a row for training, and whether it is a row at all,
#: not one of the events that a history keeps of earlier days; then a bit for each label, and one
#: for each history that has the event.
TRAIN = 0
EVENT = 1
FIRST_LABEL = 2
#: The time from which events that count for every row are known.
BEFORE_ALL = -(2**62)
#: Integers that are summed up of a column of numbers: how many there are, and the words of the sum.
PARTS = 1 + WORDS


def history_bit(spec: FeatureSpec, number: int) -> int:
    """Return the bit of the events of a history."""
    return FIRST_LABEL + len(spec.labels) + number


@dataclasses.dataclass(frozen=True)
class GroupAggregate:
    """An aggregate of a group, and where what it is computed of is found.

    Attributes:
        name: The name of its column.
        rule: Its rule.
        kind: What it is a value of.
        count: The number of the sum that counts its events; None if they are not counted.
        positives: That of the sum that counts those with its label; None if they are not counted.
        total: The number of the total of its column; None without one.
        picks: By field of :class:`EventsBefore`, the number of the pick.
        distinct: The number of its count of different values; None without one.
    """

    name: str
    rule: Aggregate
    kind: AggregateValue
    count: int | None
    positives: int | None
    total: int | None
    picks: Mapping[str, int]
    distinct: int | None


@dataclasses.dataclass(frozen=True)
class WindowParts:
    """What is summed up in one pass over the events, by its number in the group.

    Attributes:
        sums: The bit of the events that are counted.
        totals: The column whose numbers are summed up.
        picks: The column, and which of its numbers is picked.
        distinct: The column whose values are counted.
    """

    sums: Mapping[int, int]
    totals: Mapping[int, str]
    picks: Mapping[int, tuple[str, str]]
    distinct: Mapping[int, str]


@dataclasses.dataclass(frozen=True)
class GroupSums:
    """What is summed up over the events of a group.

    Attributes:
        key: The columns of its key.
        source: The source that has the events; "": the log.
        amounts: The columns of numbers that the events have.
        labels: How many labels the events have: those of a source have none.
        sums: Of each sum, the window in microseconds (0: always), and the bit of the events that
            are counted, see :data:`TRAIN`.
        totals: Of each total, the window, and the column whose numbers are summed up.
        picks: Of each number that is picked of the events, the window, the column, and which one it
            is, a key of :data:`.event_picks.PICK_KINDS`.
        distinct: Of each count of different values, the window and the column.
        histories: The numbers of its histories; the last sums are their events.
        has_last: Whether the time of the last event is wanted.
        aggregates: Its aggregates.
    """

    key: tuple[str, ...]
    source: str
    amounts: tuple[str, ...]
    labels: int
    sums: tuple[tuple[int, int], ...]
    totals: tuple[tuple[int, str], ...]
    picks: tuple[tuple[int, str, str], ...]
    distinct: tuple[tuple[int, str], ...]
    histories: tuple[int, ...]
    has_last: bool
    aggregates: tuple[GroupAggregate, ...]

    @functools.cached_property
    def windows(self) -> tuple[int, ...]:
        """The different windows; there is at least one."""
        windows = [window for window, _ in self.sums]
        windows += [window for window, _ in self.totals]
        windows += [window for window, _, _ in self.picks]
        windows += [window for window, _ in self.distinct]
        return tuple(dict.fromkeys(windows))

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        """The different columns of totals."""
        return tuple(dict.fromkeys(column for _, column in self.totals))

    @functools.cached_property
    def compared(self) -> tuple[str, ...]:
        """The different columns whose values are counted."""
        return tuple(dict.fromkeys(column for _, column in self.distinct))

    @functools.cached_property
    def picked(self) -> tuple[tuple[str, str], ...]:
        """The different columns and kinds of picks, whatever their windows."""
        return tuple(dict.fromkeys((column, kind) for _, column, kind in self.picks))

    @functools.cached_property
    def pick_kinds(self) -> np.ndarray:
        """The kinds of :attr:`picked` as kernels take them, int64 [picked]."""
        return np.array([PICK_KINDS[kind] for _, kind in self.picked], np.int64)

    @functools.cached_property
    def picks_and_windows(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each pick, its number in :attr:`picked`, and its window, int64 [picks]."""
        numbers = [self.picked.index((column, kind)) for _, column, kind in self.picks]
        windows = [window for window, _, _ in self.picks]
        return np.array(numbers, np.int64), np.array(windows, np.int64)

    @property
    def measures(self) -> int:
        """How many integers are kept of each event, or of several as one.

        They say how many events there are, how many with each label, and :data:`PARTS` of each
        column.
        """
        return 1 + self.labels + PARTS * len(self.columns)

    @functools.cached_property
    def windows_and_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Windows, and rows of :attr:`.event_sums.GroupEvents.sums`, int64 [n] each.

        Those of each sum, of each part of each total, and of each count of different values.
        Histories have no such row: their sums have a number beyond all.
        """
        windows, rows = [], []
        for window, bit in self.sums:
            is_measure = bit < FIRST_LABEL + self.labels
            windows.append(window)
            rows.append(bit - EVENT if is_measure else self.measures + len(self.compared))
        for window, column in self.totals:
            first = 1 + self.labels + PARTS * self.columns.index(column)
            windows += [window] * PARTS
            rows += range(first, first + PARTS)
        for window, column in self.distinct:
            windows.append(window)
            rows.append(self.measures + self.compared.index(column))
        return np.array(windows, np.int64), np.array(rows, np.int64)

    def select_window(self, window: int) -> WindowParts:
        """Return what is summed up within a window."""
        sums, totals, picks, distinct = {}, {}, {}, {}
        for i, (other, bit) in enumerate(self.sums):
            if other == window:
                sums[i] = bit
        for i, (other, column) in enumerate(self.totals):
            if other == window:
                totals[i] = column
        for i, (other, column, kind) in enumerate(self.picks):
            if other == window:
                picks[i] = column, kind
        for i, (other, column) in enumerate(self.distinct):
            if other == window:
                distinct[i] = column
        return WindowParts(sums, totals, picks, distinct)

    def select_kept(self) -> WindowParts:
        """Return what is kept of events that have left all windows."""
        forever = dict.fromkeys(column for window, column in self.distinct if not window)
        return WindowParts(
            sums=dict(enumerate(range(EVENT, FIRST_LABEL + self.labels))),
            totals=dict(enumerate(self.columns)),
            picks=dict(enumerate(self.picked)),
            distinct=dict(enumerate(forever)),
        )

    def find_sum(self, bit: int, window: int = 0) -> int:
        """Return the number of the sum of a window that counts the events with a bit."""
        return self.sums.index((window, bit))


def sums_of_groups(spec: FeatureSpec) -> list[GroupSums]:
    """Return what is summed up for the aggregates of each group."""
    return [_plan_group(spec, group) for group in spec.groups]


def _plan_group(spec: FeatureSpec, group: EventKey) -> GroupSums:
    rules: dict[str, Aggregate] = {}
    for column in spec.aggregates:
        if column.aggregate is not None and column.aggregate.group == group:
            rules[column.name] = column.aggregate
    histories = [number for number, rule in enumerate(spec.histories) if rule.group == group]
    sums = _plan_sums(spec, list(rules.values()), histories)
    # Dicts: aggregates share what they have in common, and the order is that of the spec.
    totals: dict[tuple[int, str], None] = {}
    picks: dict[tuple[int, str, str], None] = {}
    distinct: dict[tuple[int, str], None] = {}
    for rule in rules.values():
        window = parse_duration(rule.window)
        if _has_total(rule):
            totals[window, rule.column] = None
        for kind in _list_picks(rule):
            picks[window, rule.column, kind] = None
        if "distinct" in rule.kind.keeps:
            distinct[window, rule.column] = None
    group_sums = GroupSums(
        key=group.columns,
        source=group.source,
        amounts=tuple(list_amounts(spec.aggregate_rules, group.source)),
        labels=0 if group.source else len(spec.labels),
        sums=tuple(sums),
        totals=tuple(totals),
        picks=tuple(picks),
        distinct=tuple(distinct),
        histories=tuple(histories),
        has_last=any("last_time" in rule.kind.keeps for rule in rules.values()),
        aggregates=(),
    )
    aggregates = [_find_parts(spec, name, rule, group_sums) for name, rule in rules.items()]
    return dataclasses.replace(group_sums, aggregates=tuple(aggregates))


def _plan_sums(
    spec: FeatureSpec, rules: Sequence[Aggregate], histories: Sequence[int]
) -> list[tuple[int, int]]:
    """Return :attr:`GroupSums.sums`.

    The sums of a window follow each other, as they are made in one pass over the events.
    """
    bits_of_windows: dict[int, dict[int, None]] = {}
    for rule in rules:
        bits = bits_of_windows.setdefault(parse_duration(rule.window), {})
        if "count" in rule.kind.keeps:
            bits[EVENT] = None
        if "positives" in rule.kind.keeps:
            bits[_label_bit(spec, rule)] = None
    for number in histories:
        bits_of_windows.setdefault(0, {})[history_bit(spec, number)] = None
    return [(window, bit) for window, bits in bits_of_windows.items() for bit in bits]


def _find_parts(spec: FeatureSpec, name: str, rule: Aggregate, group: GroupSums) -> GroupAggregate:
    """Return an aggregate with the numbers of the parts of the group that it is computed of."""
    window, keeps = parse_duration(rule.window), rule.kind.keeps
    count = positives = total = distinct = None
    if "count" in keeps:
        count = group.sums.index((window, EVENT))
    if "positives" in keeps:
        positives = group.sums.index((window, _label_bit(spec, rule)))
    if _has_total(rule):
        total = group.totals.index((window, rule.column))
    if "distinct" in keeps:
        distinct = group.distinct.index((window, rule.column))
    picks = {kind: group.picks.index((window, rule.column, kind)) for kind in _list_picks(rule)}
    return GroupAggregate(name, rule, rule.kind, count, positives, total, picks, distinct)


def _label_bit(spec: FeatureSpec, rule: Aggregate) -> int:
    return FIRST_LABEL + spec.labels.index(rule.label)


def _has_total(rule: Aggregate) -> bool:
    return "total" in rule.kind.keeps or "amount_count" in rule.kind.keeps


def _list_picks(rule: Aggregate) -> list[str]:
    return [kind for kind in PICK_KINDS if kind in rule.kind.keeps]


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


@dataclasses.dataclass(frozen=True)
class FoundSums:
    """What the events before rows sum up to.

    Attributes:
        sums: Integers [sums, n], in the order of :attr:`GroupSums.sums`.
        totals: float64 [totals, 2, n]: of each, how many numbers there are, and their sum.
        picks: float64 [picks, n]; NaN where there is no number.
        distinct: Integers [distinct, n], how many different values there are.
        last: int64 [n], the times of the last events; None where they are not wanted.
    """

    sums: np.ndarray
    totals: np.ndarray
    picks: np.ndarray
    distinct: np.ndarray
    last: np.ndarray | None


def aggregate_values(
    group: GroupSums, rates: EarlierRates, found: FoundSums, cuts: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the values of a group's aggregates in their units; see :class:`AggregateValue`.

    Args:
        group: The group.
        rates: What rates are smoothed by.
        found: What the events before the rows sum up to; sums of histories are not read.
        cuts: int64 [n], the times before which events were summed up.

    Returns:
        float64 [n] by column; NaN where missing.
    """
    values = {}
    for aggregate in group.aggregates:
        kept: dict[str, np.ndarray] = {}
        smoothing = 0.0
        if aggregate.count is not None:
            kept["count"] = found.sums[aggregate.count]
        if aggregate.positives is not None:
            kept["positives"] = found.sums[aggregate.positives]
            kept["prior"] = rates.before(aggregate.rule.label, cuts)
            smoothing = rates.smoothing[aggregate.name]
        if aggregate.total is not None:
            kept["amount_count"], kept["total"] = found.totals[aggregate.total]
        for kind, number in aggregate.picks.items():
            kept[kind] = found.picks[number]
        if aggregate.distinct is not None:
            kept["distinct"] = found.distinct[aggregate.distinct]
        before = EventsBefore(cuts, last_time=found.last, smoothing=smoothing, **kept)
        values[aggregate.name] = aggregate.kind.compute(before)
    return values
