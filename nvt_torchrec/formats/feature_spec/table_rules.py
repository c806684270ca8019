"""Tables that are joined to the log by a key, such as those of users, items or campaigns."""

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
    """A table that adds columns to the rows of the log that have its key.

    Attributes:
        name: The name by which columns of the spec refer to the table.
        path: Its files, relative to the directory of the log: a name or a glob. ``--table``
            overrides it.
        key: The columns of the log that hold the key. A column that is also a feature is read as
            that feature is.
        key_names: The columns of the table that hold the key, in the order of ``key``; () if they
            have the same names.
        input: The format of its files; None to derive it from the ending of their names (text has a
            header).
        valid_from: The column of the table with the time from which a row counts, so that a key may
            have several versions; "" if each key has one row.
        time_format: The format of ``valid_from``, see :func:`.raw_types.time.check_time_format`.
        known: How long after ``valid_from`` a version is known, such as "1h"; "" for at once.
        log_time: The column of the log with the time of a row, by which its version is chosen; ""
            for the column of ``[events]`` or of a ``[split]`` by time.
        log_time_format: The format of ``log_time``.
    """

    #: The word for it in messages and in the names of files.
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
            ("name", self.name.isidentifier(), "use letters, digits and _ only"),
            ("path", self.path, 'name its files, such as path = "items.csv"'),
            (
                "path",
                is_inside(self.path),
                f"write a path in the directory of the log, and pass --table {self.name}=PATH",
            ),
            ("key", self.key and all(self.key), 'name columns of the log, such as key = ["item"]'),
            ("key", len(set(self.key)) == len(self.key), "list each column once"),
            ("key_names", len(names) == len(self.key), "name one column for each column of key"),
            ("key_names", all(names) and len(set(names)) == len(names), "list each column once"),
            ("known", not self.known or parse_duration(self.known), DURATION),
            (
                "log_time_format",
                self.log_time or not self.log_time_format,
                "add log_time, or remove log_time_format",
            ),
        )
        for field in ("time_format", "known", "log_time"):
            is_used = self.valid_from or not getattr(self, field)
            check(
                self,
                f"table {self.name}: ",
                (field, is_used, f"add valid_from, or remove {field}"),
            )
        check_time_format(self.time_format, f"table {self.name}: ")
        check_time_format(self.log_time_format, f"table {self.name}: ")

    @property
    def delay(self) -> int:
        """Microseconds from ``valid_from`` until a version is known."""
        return parse_duration(self.known)

    @property
    def file_key(self) -> tuple[str, ...]:
        """The columns of the table that hold the key."""
        return self.key_names or self.key


def is_inside(path: str) -> bool:
    """Return whether a path in a spec stays within the directory of the log."""
    return not path.startswith("/") and ".." not in path.split("/") and "://" not in path


def check_tables(
    rules: Sequence[TableRule],
    columns: Sequence[DenseColumn | CategoricalColumn],
    *,
    has_times: bool,
) -> None:
    """Check that the names of tables are unique, and that columns refer to existing tables.

    Args:
        rules: The tables.
        columns: The columns of the spec.
        has_times: Whether [events] or [split] names the time of a row.

    Raises:
        SettingsError: A name is not unique, a table does not exist, or a table has versions but
            rows have no time, or several.
    """
    names = [rule.name for rule in rules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingsError(f"tables of the same name: {', '.join(twice)}", "rename one of them")
    for column in columns:
        if column.table and column.table not in names:
            remedy = f"add a [[table]] with name = {column.table!r}"
            if names:
                remedy = format_choices(names)
            raise SettingsError(f"column {column.name}: table = {column.table!r}", remedy)
    with_versions = [rule for rule in rules if rule.valid_from]
    for rule in with_versions:
        if not (rule.log_time or has_times):
            raise SettingsError(
                f"table {rule.name}: valid_from = {rule.valid_from!r}, but rows of the log have no "
                "time",
                'name the column of the time, such as log_time = "time"',
            )
    if len({(rule.log_time, rule.log_time_format) for rule in with_versions}) > 1:
        raise SettingsError(
            "tables with different log_time, but a row has one time",
            "give all of them the same log_time and log_time_format",
        )
