"""What happened before a row: the events of a log, aggregates of them, and histories.

Every row is an event of each group of columns (``of``), such as the user. An event counts for a
row if it was known before the row's time: ties never count, so no row sees its own label.
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
DURATION = 'give a whole number of s, m, h or d, such as "90m" or "30d"'
CUTS = ("event", "day")
#: Events of a key that a history keeps for the days that are added later and for inference.
KEPT_EVENTS = 1000


class EventKey(NamedTuple):
    """What events are numbered by: the values of some columns.

    Attributes:
        columns: The columns.
        source: The source that has the events, see :class:`.source_rules.SourceRule`; "": the log.
    """

    columns: tuple[str, ...]
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Events:
    """When the events of a log happened, and when they are known.

    Attributes:
        time: The column of the file with the time of a row.
        time_format: See :func:`.raw_types.time.check_time_format`.
        known: How long after its time an event is known, such as "1h"; "": at once.
        source: Instead of ``known``, the column with the time from which an event is known.
        cut: ``event``: what is known before the row's own time counts; ``day``: before its day
            (UTC), as a model that is published each morning knows it.
        between: While a block is read, the times that its rows may have: from the first on, before
            the second; no file has it.
        optional: While rows are scored, rows with labels may lack a time, too; no file has it.
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
            ("known", not (self.known and self.source), "give it or from, not both"),
            ("cut", self.cut in CUTS, format_choices(CUTS)),
        )

    @property
    def delay(self) -> int:
        """Microseconds after which an event is known."""
        return parse_duration(self.known)


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """A number that sums up the events of a row's group before the row; a dense column.

    Attributes:
        key: The columns of the file whose values are the key of the group; ``of`` in TOML. Without
            any, all rows are of one group.
        value: The kind of value, a key of :data:`.aggregates.AGGREGATES`.
        window: How long events count, such as "30d"; "": always.
        label: Of a rate, the label.
        smoothing: Of a rate, the weight in events of the rate of all events before; 0: as the
            training rows say, by the method of moments.
        column: The column of the file whose numbers a value is of; "" for others.
        source: The source whose events it sums up, and which has ``column``; "": the log itself.
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
        of_column = f'write "{kind.name}(…)" with the name of a column of the file'
        check(
            self,
            "aggregate: ",
            (
                "key",
                all(self.key),
                'write of = ["user"], columns of the file; of = [] for all rows',
            ),
            ("key", len(set(self.key)) == len(self.key), "a column stands there twice"),
            ("window", not self.window or parse_duration(self.window), DURATION),
            ("window", kind.has_window or not self.window, f"{kind.name} has no window"),
            ("label", bool(self.label) == kind.has_label, "a rate has one, others none"),
            ("value", self.column or not kind.has_column, of_column),
            ("column", kind.has_column or not self.column, f'write "{kind.name}" without a column'),
            ("smoothing", self.smoothing >= 0, "give a number from 0 on"),
            (
                "source",
                not (self.source and kind.has_label),
                f"the events of a source have no label: remove {kind.name} from its values",
            ),
        )

    @property
    def kind(self) -> AggregateValue:
        """What it is a value of."""
        return AGGREGATES[self.value]

    @property
    def group(self) -> EventKey:
        """What the events are grouped by."""
        return EventKey(self.key, self.source)

    @property
    def name(self) -> str:
        """The name of its column: the key, what the value is of, the value, the window."""
        of_what = self.label, self.source, self.column
        parts = [*(self.key or ["all"]), *of_what, self.value, self.window]
        return "_".join(filter(None, parts))


@dataclasses.dataclass(frozen=True)
class HistoryRule:
    """The newest events of a row's group before the row, as lists of ids.

    Attributes:
        name: Of the history; its features are ``name.column``.
        key: See :class:`Aggregate`.
        columns: Names of categorical columns, whose vocabularies and tables the events share.
        where: The label that events must have; "": all events.
        kept: Events of a key that are kept for the days that are added later, and at inference.
    """

    toml_keys: ClassVar = {"key": "of"}

    name: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    where: str = ""
    kept: int = KEPT_EVENTS

    @property
    def group(self) -> EventKey:
        """What the events are grouped by."""
        return EventKey(self.key)

    def __post_init__(self) -> None:
        check(
            self,
            f"history {self.name}: ",
            ("name", self.name.isidentifier(), "use letters, digits and _ alone"),
            ("key", self.key and all(self.key), 'name columns of the file, such as of = ["user"]'),
            ("columns", self.columns, 'name categorical columns, such as columns = ["item"]'),
            ("kept", 1 <= self.kept <= 2**20, f"from 1 to {2**20}"),
        )


@functools.lru_cache
def parse_duration(text: str) -> int:
    """Return the microseconds of a duration such as "30d"; 0 for "" and what is none."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    return int(match[1]) * _UNITS[match[2]] if match else 0


def check_split(split: Split, groups: list[tuple[str, ...]]) -> None:
    """Check that a split keeps what happened before a row apart from what it is tested on.

    Files are compared by their times when the events are read.

    Raises:
        SettingsError: It does not.
    """
    if split.by in ("days", "time") or (split.by == "files" and split.valid_files):
        return
    if split.by == "column" and all(split.column in key for key in groups):
        return
    share = " with a share for valid" if split.by == "files" else ""
    raise SettingsError(
        f"split by {split.by}{share}, with [events]: rows for training would count events that are "
        "later than those of valid and test",
        'write by = "time" or by = "days"; by = "files" with files for valid, too; or '
        'by = "column" with a column that is in every of',
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
    """Check that events, aggregates and histories are those of one spec.

    Args:
        events: The rule of the events.
        split: Which rows are for training, validation and test.
        aggregates: The aggregates by the names of their columns.
        histories: The histories.
        labels: The labels of the spec.
        single: The categorical columns of one value.

    Raises:
        SettingsError: One names what is not there, or a part is missing.
    """
    keys = [rule.key for rule in aggregates.values()] + [rule.key for rule in histories]
    if events is None and keys:
        raise SettingsError(
            "aggregates or histories, but no [events]",
            "add [events], or remove aggregates or histories",
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
            ("columns", set(history.columns) <= single, "name categorical columns of one value"),
            ("where", history.where in ("", *labels), format_choices(labels)),
        )
