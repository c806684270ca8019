"""Tables that are joined to the log by a key: what is known of a user, an item, a campaign."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.columns import CategoricalColumn, DenseColumn, InputFormat
from nvt_torchrec.formats.feature_spec.events import DURATION, parse_duration
from nvt_torchrec.formats.feature_spec.field_checks import check, format_choices
from nvt_torchrec.formats.feature_spec.raw_types.time import check_time_format


@dataclasses.dataclass(frozen=True)
class TableRule:
    """A table whose columns are columns of the rows that have its key.

    Attributes:
        name: Of the table; columns of the spec name it.
        path: Its files, relative to the directory of the log: a name or a glob. A run may name
            others (``--table``).
        key: The columns of the log that hold the key; each is compared as its feature is read.
        key_names: The columns of the table with the key, in the order of ``key``; (): the same
            names.
        input: The format of its files; None: by the ending of their names, text with a header.
        valid_from: The column of the table with the time from which a row counts, so that a key has
            versions; "": each key has one row.
        time_format: Of ``valid_from``, see :func:`.raw_types.time.check_time_format`.
        log_time: The column of the log with the time of a row, by which a version is chosen; "":
            that of ``[events]`` or of a ``[split]`` by time.
        log_time_format: Its format.
        known: How long after ``valid_from`` a version is known, such as "1h"; "": at once.
    """

    #: What it is called in messages, and in the names of files.
    role: ClassVar[str] = "table"

    name: str
    path: str
    key: tuple[str, ...]
    key_names: tuple[str, ...] = ()
    input: InputFormat | None = None
    valid_from: str = ""
    time_format: str = ""
    known: str = ""
    log_time: str = ""
    log_time_format: str = ""

    def __post_init__(self) -> None:
        names = self.key_names or self.key
        check(
            self,
            f"table {self.name}: ",
            ("name", self.name.isidentifier(), "use letters, digits and _ alone"),
            ("path", self.path, 'name its files, such as path = "items.csv"'),
            (
                "path",
                is_inside(self.path),
                f"write a path in the directory of the log, and pass --table {self.name}=PATH",
            ),
            ("key", self.key and all(self.key), 'name columns of the log, such as key = ["item"]'),
            ("key", len(set(self.key)) == len(self.key), "a column stands there twice"),
            ("key_names", len(names) == len(self.key), "name a column for each one of the log"),
            ("key_names", all(names) and len(set(names)) == len(names), "name each column once"),
            ("time_format", self.valid_from or not self.time_format, "it is that of valid_from"),
            ("known", not self.known or parse_duration(self.known), DURATION),
            ("known", self.valid_from or not self.known, "it is counted from valid_from"),
            ("log_time", self.valid_from or not self.log_time, "it goes with valid_from"),
            ("log_time_format", self.log_time or not self.log_time_format, "it is of log_time"),
        )
        check_time_format(self.time_format, f"table {self.name}: ")
        check_time_format(self.log_time_format, f"table {self.name}: ")

    @property
    def delay(self) -> int:
        """Microseconds after which a version is known."""
        return parse_duration(self.known)

    @property
    def file_key(self) -> tuple[str, ...]:
        """The columns of the table with the key."""
        return self.key_names or self.key


def is_inside(path: str) -> bool:
    """Return whether a path that a spec names leads to files in the directory of the log."""
    return not path.startswith("/") and ".." not in path.split("/") and "://" not in path


def check_tables(
    rules: Sequence[TableRule],
    columns: Sequence[DenseColumn | CategoricalColumn],
    *,
    has_times: bool,
) -> None:
    """Check that each table is there once, and that all that columns name are there.

    Args:
        rules: The tables.
        columns: The columns of the spec.
        has_times: Whether [events] or [split] names the time of a row.

    Raises:
        SettingsError: One is not; or a table has versions, and rows have no time.
    """
    names = [rule.name for rule in rules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingsError(f"tables of the same name: {', '.join(twice)}")
    for column in columns:
        if column.table and column.table not in names:
            remedy = format_choices(names) if names else f"add a [[table]] of name {column.table!r}"
            raise SettingsError(f"column {column.name}: table = {column.table!r}", remedy)
    with_versions = [rule for rule in rules if rule.valid_from]
    for rule in with_versions:
        if not (rule.log_time or has_times):
            raise SettingsError(
                f"table {rule.name}: valid_from = {rule.valid_from!r}, but rows have no time",
                'name it, such as log_time = "time"',
            )
    if len({(rule.log_time, rule.log_time_format) for rule in with_versions}) > 1:
        raise SettingsError(
            "tables with different log_time, and a row has one time", "name the same one in each"
        )
