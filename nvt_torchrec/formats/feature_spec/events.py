"""Features from the events before a row: ``[events]``, aggregates and histories.

Every row of the log is also an event, for each key (``of``), such as the user. An event counts for
a row if it was known before the row's time. Ties never count, so no row sees its own label.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence, Set
from typing import ClassVar, NamedTuple

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.aggregates import AGGREGATES, AggregateValue
from nvt_torchrec.formats.feature_spec.field_checks import check, format_choices
from nvt_torchrec.formats.feature_spec.raw_types.time import check_time_format
from nvt_torchrec.formats.feature_spec.split import Split

#: Microseconds of each unit of a duration.
_UNITS = {"s": 10**6, "m": 60 * 10**6, "h": 3600 * 10**6, "d": 86_400 * 10**6}
#: The remedy for a malformed duration.
DURATION = 'give a whole number of s, m, h or d, such as "90m" or "30d"'
CUTS = ("event", "day")
#: The default number of events per key that a history keeps for later days and for inference.
KEPT_EVENTS = 1000


class EventKey(NamedTuple):
    """A key that events are grouped by.

    Attributes:
        columns: The columns whose values are the key.
        source: The :class:`.source_rules.SourceRule` that the events come from; "" for the log.
    """

    columns: tuple[str, ...]
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Events:
    """When the events of a log happened, and when they became known.

    Attributes:
        time: The column of the file with the time of a row.
        time_format: The format of ``time``, see :func:`.raw_types.time.check_time_format`.
        known: How long after its time an event becomes known, such as "1h"; "" for at once.
        source: Instead of ``known``, the column with the time at which an event became known.
        cut: ``event``: events known before the row's own time count; ``day``: those known before
            the row's day (UTC), as for a model that is published each morning.
        between: The half-open range of times that the rows of a block may have. Set while a block
            is read, never by a spec file.
        optional: Whether rows with labels may lack a time, too. Set while rows are scored, never by
            a spec file.
    """

    time: str
    time_format: str = ""
    known: str = ""
    source: str = ""
    cut: str = "event"
    between: tuple[int, ...] | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        check_time_format(self.time_format, "events: ")
        check(
            self,
            "events: ",
            ("time", self.time, 'name the column of the time, such as time = "time"'),
            ("known", not self.known or parse_duration(self.known), DURATION),
            ("known", not (self.known and self.source), "give known or from, not both"),
            ("cut", self.cut in CUTS, format_choices(CUTS)),
        )

    @property
    def delay(self) -> int:
        """Microseconds from an event's time until it is known."""
        return parse_duration(self.known)


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """A dense column that summarizes the events of a row's key before the row.

    Attributes:
        key: The columns of the file whose values are the key; ``of`` in TOML. With none, all rows
            share one key.
        value: The kind of value, a key of :data:`.aggregates.AGGREGATES`.
        window: How long events count, such as "30d"; "" for always.
        label: The label of a rate; "" for other values.
        smoothing: The weight, in events, of the rate of all earlier events in a rate; 0 to estimate
            it from the training rows by the method of moments.
        column: The column whose values are aggregated, as in ``sum(column)``; "" for values
            without one.
        source: The source whose events are aggregated, and which has ``column``; "" for the log.
    """

    toml_keys: ClassVar = {"key": "of"}

    key: tuple[str, ...]
    value: str
    window: str = ""
    label: str = ""
    smoothing: float = 0
    column: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        check(self, "aggregate: ", ("value", self.value in AGGREGATES, format_choices(AGGREGATES)))
        kind = self.kind
        check(
            self,
            "aggregate: ",
            (
                "key",
                all(self.key),
                'name columns of the file, such as of = ["user"]; of = [] for all rows',
            ),
            ("key", len(set(self.key)) == len(self.key), "list each column once"),
            ("window", not self.window or parse_duration(self.window), DURATION),
            (
                "window",
                kind.has_window or not self.window,
                f"remove it: {kind.name} takes no window",
            ),
            ("label", bool(self.label) == kind.has_label, "give a label for a rate, and only then"),
            (
                "value",
                self.column or not kind.has_column,
                f'write "{kind.name}(…)" with the name of a column of the file',
            ),
            ("column", kind.has_column or not self.column, f'write "{kind.name}" without a column'),
            ("smoothing", self.smoothing >= 0, "give a number of at least 0"),
            (
                "source",
                not (self.source and kind.has_label),
                f"remove {kind.name} from values: the events of a source have no label",
            ),
        )

    @property
    def kind(self) -> AggregateValue:
        """The kind of value."""
        return AGGREGATES[self.value]

    @property
    def group(self) -> EventKey:
        """The key that the events are grouped by."""
        return EventKey(self.key, self.source)

    @property
    def name(self) -> str:
        """The name of its column, such as ``user_purchases_amount_sum_30d``."""
        key = self.key or ("all",)
        parts = [*key, self.label, self.source, self.column, self.value, self.window]
        return "_".join(filter(None, parts))


@dataclasses.dataclass(frozen=True)
class HistoryRule:
    """The newest events of a row's key before the row, as lists of ids.

    Attributes:
        name: The history's name; its features are called ``name.column``.
        key: The columns of the file whose values are the key, see :class:`Aggregate`.
        columns: The categorical columns whose ids are listed. They share the vocabularies and
            embedding tables of those columns.
        where: The label that events must have; "" for all events.
        kept: The number of events per key that are kept for later days and for inference.
    """

    toml_keys: ClassVar = {"key": "of"}

    name: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    where: str = ""
    kept: int = KEPT_EVENTS

    @property
    def group(self) -> EventKey:
        """The key that the events are grouped by."""
        return EventKey(self.key)

    def __post_init__(self) -> None:
        check(
            self,
            f"history {self.name}: ",
            ("name", self.name.isidentifier(), "use letters, digits and _ only"),
            ("key", self.key and all(self.key), 'name columns of the file, such as of = ["user"]'),
            ("columns", self.columns, 'name categorical columns, such as columns = ["item"]'),
            ("kept", 1 <= self.kept <= 2**20, f"give a number from 1 to {2**20}"),
        )


@functools.lru_cache
def parse_duration(text: str) -> int:
    """Return the microseconds of a duration such as "30d"; 0 for "" and malformed text."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    return int(match[1]) * _UNITS[match[2]] if match else 0


def check_split(split: Split, groups: list[tuple[str, ...]]) -> None:
    """Check that no training row counts events that are later than rows of valid or test.

    A split by files is checked again when the events are read, by the times in the files.

    Args:
        split: The split.
        groups: The columns of each key that events are grouped by.

    Raises:
        SettingsError: Training rows would count events of valid or test.
    """
    if split.by in ("days", "time") or (split.by == "files" and split.valid_files):
        return
    if split.by == "column" and all(split.column in key for key in groups):
        return
    share = " with a share for valid" if split.by == "files" else ""
    raise SettingsError(
        f"split by {split.by}{share}, with [events]: training rows would count events that are "
        "later than rows of valid and test",
        'write by = "time" or by = "days"; by = "files" with files for valid, too; or '
        'by = "column" with a column that is part of every of',
    )


def check_events(
    events: Events | None,
    split: Split,
    aggregates: Mapping[str, Aggregate],
    histories: Sequence[HistoryRule],
    *,
    labels: Sequence[str],
    single: Set[str],
) -> None:
    """Check that events, aggregates and histories fit each other and the other blocks of a spec.

    Args:
        events: The ``[events]`` block; None without one.
        split: How rows are divided into train, valid and test.
        aggregates: The aggregates by the names of their columns.
        histories: The histories.
        labels: The labels of the spec.
        single: The names of the categorical columns that hold one value per row.

    Raises:
        SettingsError: A label or column does not exist, or a block is missing.
    """
    keys = [rule.key for rule in aggregates.values()] + [rule.key for rule in histories]
    if events is None and keys:
        raise SettingsError(
            "aggregates or histories, but no [events]",
            "add [events], or remove the aggregates and histories",
        )
    if events is not None and not keys:
        raise SettingsError(
            "[events], but no [[aggregate]] or [[history]]",
            "add an [[aggregate]] or a [[history]], or remove [events]",
        )
    if events is not None:
        check_split(split, keys)
    for name, rule in aggregates.items():
        if rule.label and rule.label not in labels:
            raise SettingsError(f"aggregate {name}: label = {rule.label!r}", format_choices(labels))
    for history in histories:
        check(
            history,
            f"history {history.name}: ",
            (
                "columns",
                set(history.columns) <= single,
                "name categorical columns that are not multi_hot",
            ),
            ("where", history.where in ("", *labels), format_choices(labels)),
        )
