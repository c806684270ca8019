"""The sums kept over the events of each group, and the aggregates computed from them.

The ETL (:mod:`etl.events.sums`) and the state for inference (:mod:`.event_sums`) compute the sums
in different ways. Both take from here which sums are needed and how aggregates follow from them.
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

#: Bit of an event's flags that is set if the event is a training row.
TRAIN = 0
#: Bit that is set if the event is a row, not an event that a history keeps from earlier days.
EVENT = 1
#: First bit of the labels; the bits of the histories that contain the event follow the labels.
FIRST_LABEL = 2
#: Time from which events are known that count for every row.
BEFORE_ALL = -(2**62)
#: Integers that are kept for the total of a column: the number of values, and the words of the sum.
PARTS = 1 + WORDS


def get_history_bit(spec: FeatureSpec, number: int) -> int:
    """Return the flag bit of a history's events."""
    return FIRST_LABEL + len(spec.labels) + number


@dataclasses.dataclass(frozen=True)
class GroupAggregate:
    """An aggregate of a group, and the positions of its inputs in :class:`GroupSums`.

    Attributes:
        name: The name of its column.
        rule: Its rule.
        kind: Computes its value.
        count: Index of the sum that counts its events; None if they are not counted.
        positives: Index of the sum that counts events with its label; None if it needs none.
        total: Index of the total of its column; None if it needs none.
        picks: Index of each pick, by field of :class:`EventsBefore`.
        distinct: Index of its count of distinct values; None if it needs none.
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
    """The values computed in one pass over the events, keyed by their index in the group.

    Attributes:
        sums: The flag bit of the events that are counted.
        totals: The column whose values are added up.
        picks: The column, and the kind of pick.
        distinct: The column whose distinct values are counted.
    """

    sums: Mapping[int, int]
    totals: Mapping[int, str]
    picks: Mapping[int, tuple[str, str]]
    distinct: Mapping[int, str]


@dataclasses.dataclass(frozen=True)
class GroupSums:
    """The values computed over the events of a group.

    Attributes:
        key: The columns of its key.
        source: The source of the events; "" for the log.
        amounts: The numeric columns of the events.
        num_labels: Number of labels of the events; 0 for the events of a source.
        sums: For each sum, the window in microseconds (0: unlimited), and the flag bit of the
            events that are counted, see :data:`TRAIN`.
        totals: For each total, the window, and the column whose values are added up.
        picks: For each picked value, the window, the column, and the kind of pick, a key of
            :data:`.event_picks.PICK_KINDS`.
        distinct: For each count of distinct values, the window and the column.
        histories: The indices of its histories; the last sums count their events.
        has_last: Whether an aggregate needs the time of the last event.
        aggregates: Its aggregates.
    """

    key: tuple[str, ...]
    source: str
    amounts: tuple[str, ...]
    num_labels: int
    sums: tuple[tuple[int, int], ...]
    totals: tuple[tuple[int, str], ...]
    picks: tuple[tuple[int, str, str], ...]
    distinct: tuple[tuple[int, str], ...]
    histories: tuple[int, ...]
    has_last: bool
    aggregates: tuple[GroupAggregate, ...]

    @functools.cached_property
    def windows(self) -> tuple[int, ...]:
        """The distinct windows, at least one."""
        windows = [window for window, _ in self.sums]
        windows += [window for window, _ in self.totals]
        windows += [window for window, _, _ in self.picks]
        windows += [window for window, _ in self.distinct]
        return tuple(dict.fromkeys(windows))

    @functools.cached_property
    def total_columns(self) -> tuple[str, ...]:
        """The distinct columns of :attr:`totals`."""
        return tuple(dict.fromkeys(column for _, column in self.totals))

    @functools.cached_property
    def distinct_columns(self) -> tuple[str, ...]:
        """The distinct columns of :attr:`distinct`."""
        return tuple(dict.fromkeys(column for _, column in self.distinct))

    @functools.cached_property
    def stored_picks(self) -> tuple[tuple[str, str], ...]:
        """The distinct (column, kind) of :attr:`picks`, regardless of the window."""
        return tuple(dict.fromkeys((column, kind) for _, column, kind in self.picks))

    @functools.cached_property
    def pick_kinds(self) -> np.ndarray:
        """The kinds of :attr:`stored_picks` as numbers for kernels, int64 [stored picks]."""
        return np.array([PICK_KINDS[kind] for _, kind in self.stored_picks], np.int64)

    @functools.cached_property
    def picks_and_windows(self) -> tuple[np.ndarray, np.ndarray]:
        """For each pick, its index in :attr:`stored_picks` and its window, int64 [picks] each."""
        numbers = [self.stored_picks.index((column, kind)) for _, column, kind in self.picks]
        windows = [window for window, _, _ in self.picks]
        return np.array(numbers, np.int64), np.array(windows, np.int64)

    @property
    def num_measures(self) -> int:
        """Number of integers kept for an event, or for several events merged into one.

        They are the number of events, the number of events with each label, and :data:`PARTS`
        integers for each column of totals.
        """
        return 1 + self.num_labels + PARTS * len(self.total_columns)

    @functools.cached_property
    def windows_and_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Windows, and rows of :attr:`.event_sums.GroupEvents.sums`, int64 [n] each.

        They list each sum, each part of each total, and each count of distinct values. A history
        has no row there: its sum gets the first index beyond the rows.
        """
        windows = []
        rows = []
        num_rows = self.num_measures + len(self.distinct_columns)
        for window, bit in self.sums:
            is_measure = bit < FIRST_LABEL + self.num_labels
            windows.append(window)
            rows.append(bit - EVENT if is_measure else num_rows)
        for window, column in self.totals:
            first = 1 + self.num_labels + PARTS * self.total_columns.index(column)
            windows += [window] * PARTS
            rows += range(first, first + PARTS)
        for window, column in self.distinct:
            windows.append(window)
            rows.append(self.num_measures + self.distinct_columns.index(column))
        return np.array(windows, np.int64), np.array(rows, np.int64)

    def select_window(self, window: int) -> WindowParts:
        """Return the values that are computed within a window."""
        sums = {}
        totals = {}
        picks = {}
        distinct = {}
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
        """Return the values that are kept of events that have left all windows."""
        forever = dict.fromkeys(column for window, column in self.distinct if not window)
        return WindowParts(
            sums=dict(enumerate(range(EVENT, FIRST_LABEL + self.num_labels))),
            totals=dict(enumerate(self.total_columns)),
            picks=dict(enumerate(self.stored_picks)),
            distinct=dict(enumerate(forever)),
        )

    def find_sum(self, bit: int, window: int = 0) -> int:
        """Return the index of the sum that counts the events with a flag bit in a window."""
        return self.sums.index((window, bit))


def plan_groups(spec: FeatureSpec) -> list[GroupSums]:
    """Return the sums that the aggregates and histories of each group need."""
    return [_plan_group(spec, group) for group in spec.groups]


def _plan_group(spec: FeatureSpec, group: EventKey) -> GroupSums:
    rules: dict[str, Aggregate] = {}
    for column in spec.aggregates:
        if column.aggregate is not None and column.aggregate.group == group:
            rules[column.name] = column.aggregate
    histories = [number for number, rule in enumerate(spec.histories) if rule.group == group]
    sums = _plan_sums(spec, list(rules.values()), histories)
    # Dicts as ordered sets: aggregates share equal inputs, which stay in the order of the spec.
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
        num_labels=0 if group.source else len(spec.labels),
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

    The sums of a window are adjacent, because one pass over the events computes them.
    """
    bits_of_windows: dict[int, dict[int, None]] = {}
    for rule in rules:
        bits = bits_of_windows.setdefault(parse_duration(rule.window), {})
        if "count" in rule.kind.keeps:
            bits[EVENT] = None
        if "positives" in rule.kind.keeps:
            bits[_get_label_bit(spec, rule)] = None
    for number in histories:
        bits_of_windows.setdefault(0, {})[get_history_bit(spec, number)] = None
    sums = []
    for window, bits in bits_of_windows.items():
        sums += [(window, bit) for bit in bits]
    return sums


def _find_parts(spec: FeatureSpec, name: str, rule: Aggregate, group: GroupSums) -> GroupAggregate:
    """Return an aggregate with the indices of its inputs in the group."""
    window = parse_duration(rule.window)
    keeps = rule.kind.keeps
    count = None
    if "count" in keeps:
        count = group.sums.index((window, EVENT))
    positives = None
    if "positives" in keeps:
        positives = group.sums.index((window, _get_label_bit(spec, rule)))
    total = None
    if _has_total(rule):
        total = group.totals.index((window, rule.column))
    distinct = None
    if "distinct" in keeps:
        distinct = group.distinct.index((window, rule.column))
    picks = {kind: group.picks.index((window, rule.column, kind)) for kind in _list_picks(rule)}
    return GroupAggregate(name, rule, rule.kind, count, positives, total, picks, distinct)


def _get_label_bit(spec: FeatureSpec, rule: Aggregate) -> int:
    return FIRST_LABEL + spec.labels.index(rule.label)


def _has_total(rule: Aggregate) -> bool:
    return "total" in rule.kind.keeps or "amount_count" in rule.kind.keeps


def _list_picks(rule: Aggregate) -> list[str]:
    return [kind for kind in PICK_KINDS if kind in rule.kind.keeps]


def find_cuts(spec: FeatureSpec, times: np.ndarray) -> np.ndarray:
    """Return, for each row's time, the time before which events count for it, int64 [n]."""
    assert spec.events is not None
    return times // DAY * DAY if spec.events.cut == "day" else np.asarray(times)


class PriorRates(Protocol):
    """The rates over all events, toward which the rates of single keys are smoothed."""

    @property
    def smoothing(self) -> Mapping[str, float]:
        """The weight of the rate over all events, in events, by name of the aggregate."""

    def find_prior(self, label: str, times: np.ndarray) -> np.ndarray:
        """Return the rate over all events known before the hour of each time, float64 [n]."""


@dataclasses.dataclass(frozen=True)
class LaterRates:
    """The rates of labels over all events, for times after the end of a log.

    Attributes:
        smoothing: See :class:`PriorRates`.
        hours: int64 [hours], ascending: hours since 1970 in which more events become known.
        rates: By label, float64 [hours + 1]: the rate before each of these hours, and after the
            last one.
    """

    smoothing: Mapping[str, float]
    hours: np.ndarray
    rates: Mapping[str, np.ndarray]

    def find_prior(self, label: str, times: np.ndarray) -> np.ndarray:
        """See :meth:`PriorRates.find_prior`."""
        return self.rates[label][np.searchsorted(self.hours, times // HOUR)]


@dataclasses.dataclass(frozen=True)
class FoundSums:
    """The values of :class:`GroupSums` over the events before each row.

    Attributes:
        sums: Integers [sums, n], in the order of :attr:`GroupSums.sums`.
        totals: float64 [totals, 2, n]: the number of values, and their sum.
        picks: float64 [picks, n]; NaN if no event has a value.
        distinct: Integers [distinct, n], the numbers of distinct values.
        last: int64 [n], the time of the last event; None if no aggregate needs it.
    """

    sums: np.ndarray
    totals: np.ndarray
    picks: np.ndarray
    distinct: np.ndarray
    last: np.ndarray | None


def compute_aggregates(
    group: GroupSums, rates: PriorRates, found: FoundSums, cuts: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the values of a group's aggregates in their units; see :class:`AggregateValue`.

    Args:
        group: The group.
        rates: The rates over all events, for smoothing.
        found: The sums over the events before the rows; those of histories are not read.
        cuts: int64 [n], for each row the time before which events were summed.

    Returns:
        By column, float64 [n]; NaN where the aggregate is missing.
    """
    values = {}
    for aggregate in group.aggregates:
        kept: dict[str, np.ndarray] = {}
        smoothing = 0.0
        if aggregate.count is not None:
            kept["count"] = found.sums[aggregate.count]
        if aggregate.positives is not None:
            kept["positives"] = found.sums[aggregate.positives]
            kept["prior"] = rates.find_prior(aggregate.rule.label, cuts)
            smoothing = rates.smoothing[aggregate.name]
        if aggregate.total is not None:
            kept["amount_count"], kept["total"] = found.totals[aggregate.total]
        for kind, index in aggregate.picks.items():
            kept[kind] = found.picks[index]
        if aggregate.distinct is not None:
            kept["distinct"] = found.distinct[aggregate.distinct]
        before = EventsBefore(cuts, last_time=found.last, smoothing=smoothing, **kept)
        values[aggregate.name] = aggregate.kind.compute(before)
    return values
