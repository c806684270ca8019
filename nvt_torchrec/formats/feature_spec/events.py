"""What happened before a row: the events of a log, aggregates of them, and histories.

Every row is an event of each group of columns (``of``), such as the user. An event counts for a
row if it was known before the row's time: ties never count, so no row sees its own label.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.field_checks import check, one_of
from nvt_torchrec.formats.feature_spec.raw_types.time import check_time_format
from nvt_torchrec.formats.feature_spec.split import Split

#: Microseconds of each unit of a duration.
_UNITS = {"s": 10**6, "m": 60 * 10**6, "h": 3600 * 10**6, "d": 86_400 * 10**6}
DURATION = 'give a whole number of s, m, h or d, such as "90m" or "30d"'
CUTS = ("event", "day")
#: By kind of value of an aggregate: its transform, and what replaces a missing one. ``since`` is
#: missing without an event of the key before: ten years then; ``rate`` before the first hour of
#: which any event is known.
AGGREGATE_VALUES: dict[str, tuple[str, float]] = {
    "count": ("log_normalize", 0),
    "rate": ("normalize", 0),
    "since": ("log1p_normalize", 315_360_000),
}
#: By kind of value, what a value of it is.
AGGREGATE_UNITS = {
    "count": "a number of events, whole and from 0 on",
    "rate": "a share from 0 to 1",
    "since": "seconds from 0 on, or a missing value (null) if there was no event",
}
#: The values of an aggregate without ``values``. A later kind of value does not join them: it would
#: be a further column of specs that there are.
DEFAULT_VALUES = ("count", "rate", "since")
#: Events of a key that a history keeps for the days that are added later and for inference.
KEPT_EVENTS = 1000


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
            ("cut", self.cut in CUTS, one_of(CUTS)),
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
        value: ``count`` of the events; smoothed ``rate`` of their label, from 0 to 1; ``since``:
            seconds since the last one, missing without one.
        window: How long events count, such as "30d"; "": always.
        label: Of a rate, the label.
        smoothing: Of a rate, the weight in events of the rate of all events before; 0: as the
            training rows say, by the method of moments.
    """

    key: tuple[str, ...]
    value: str
    window: str = ""
    label: str = ""
    smoothing: float = 0

    def __post_init__(self) -> None:
        check(
            self,
            "aggregate: ",
            (
                "key",
                all(self.key),
                'write of = ["user"], columns of the file; of = [] for all rows',
            ),
            ("key", len(set(self.key)) == len(self.key), "a column stands there twice"),
            ("value", self.value in AGGREGATE_VALUES, one_of(AGGREGATE_VALUES)),
            ("window", not self.window or parse_duration(self.window), DURATION),
            ("window", self.value != "since" or not self.window, "since has no window"),
            ("label", bool(self.label) == (self.value == "rate"), "a rate has one, others none"),
            ("smoothing", self.smoothing >= 0, "give a number from 0 on"),
        )

    @property
    def name(self) -> str:
        """The name of its column."""
        label = [self.label] if self.label else []
        return "_".join([*(self.key or ["all"]), *label, self.value, *filter(None, [self.window])])


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

    name: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    where: str = ""
    kept: int = KEPT_EVENTS

    def __post_init__(self) -> None:
        check(
            self,
            f"history {self.name}: ",
            ("name", self.name.isidentifier(), "use letters, digits and _ alone"),
            ("key", self.key and all(self.key), 'name columns of the file, such as of = ["user"]'),
            ("columns", self.columns, 'name categorical columns, such as columns = ["item"]'),
            ("kept", 1 <= self.kept <= 2**20, f"from 1 to {2**20}"),
        )


def find_wrong(value: str, numbers: np.ndarray) -> np.ndarray:
    """Return which numbers, float64 [n], are no values of an aggregate, bool [n].

    Args:
        value: The kind of value, a key of :data:`AGGREGATE_UNITS`.
        numbers: The numbers, NaN where missing.
    """
    if value == "since":
        return numbers < 0
    if value == "rate":
        return ~((numbers >= 0) & (numbers <= 1))
    return ~((numbers >= 0) & (numbers == np.floor(numbers)))


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
