"""Additional sources of events: files next to the log whose rows are events, such as purchases."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.columns import InputFormat
from nvt_torchrec.formats.feature_spec.events import DURATION, Aggregate, parse_duration
from nvt_torchrec.formats.feature_spec.field_checks import check, format_choices
from nvt_torchrec.formats.feature_spec.raw_types.time import check_time_format
from nvt_torchrec.formats.feature_spec.table_rules import TableRule, is_inside


@dataclasses.dataclass(frozen=True)
class SourceRule:
    """A source of events, which are aggregated for the rows of the log but are no samples.

    Attributes:
        name: The name by which aggregates refer to the source.
        path: Its files, as :attr:`.table_rules.TableRule.path`.
        time: The column of its files with the time of an event.
        time_format: The format of ``time``, see :func:`.raw_types.time.check_time_format`.
        known: How long after its time an event is known, such as "1h"; "" for at once.
        key: The columns of the log that are keys of aggregates and have another name in the source.
        key_names: The names of these columns in the source, in the order of ``key``.
        nulls: Texts that mean a missing value, in addition to the empty one.
        input: See :attr:`.table_rules.TableRule.input`.
    """

    #: The word for it in messages and in the names of files.
    role: ClassVar[str] = "source"

    name: str
    path: str
    time: str
    time_format: str = ""
    known: str = ""
    key: tuple[str, ...] = ()
    key_names: tuple[str, ...] = ()
    nulls: tuple[str, ...] = ()
    input: InputFormat | None = None

    def __post_init__(self) -> None:
        names = set(self.key_names)
        check(
            self,
            f"source {self.name}: ",
            ("name", self.name.isidentifier(), "use letters, digits and _ only"),
            ("path", self.path, 'name its files, such as path = "purchases.csv"'),
            (
                "path",
                is_inside(self.path),
                f"write a path in the directory of the log, and pass --table {self.name}=PATH",
            ),
            ("time", self.time, 'name the column of the time, such as time = "time"'),
            ("known", not self.known or parse_duration(self.known), DURATION),
            (
                "key",
                all(self.key),
                'name columns of the log and of the source, such as key = {user = "user_id"}',
            ),
            ("key_names", len(names) == len(self.key) and all(names), "list each column once"),
        )
        check_time_format(self.time_format, f"source {self.name}: ")

    @property
    def delay(self) -> int:
        """Microseconds from an event's time until it is known."""
        return parse_duration(self.known)

    def to_source_names(self, key: Sequence[str]) -> tuple[str, ...]:
        """Return the names that a key's columns, named as in the log, have in the source."""
        renamed = dict(zip(self.key, self.key_names, strict=True))
        return tuple(renamed.get(name, name) for name in key)


def check_sources(
    rules: Sequence[SourceRule], tables: Sequence[TableRule], aggregates: Sequence[Aggregate]
) -> None:
    """Check that the names of sources are unique, and that sources and aggregates fit each other.

    Args:
        rules: The sources.
        tables: The tables; a source must not have the name of one, as ``--table`` takes both.
        aggregates: The aggregates.

    Raises:
        SettingsError: A name is not unique, an aggregate's source does not exist, a source is not
            used, or its key does not fit its aggregates.
    """
    names = [rule.name for rule in rules]
    for aggregate in aggregates:
        if aggregate.source and aggregate.source not in names:
            remedy = f"add a [[source]] with name = {aggregate.source!r}"
            if names:
                remedy = format_choices(names)
            raise SettingsError(f"aggregate: source = {aggregate.source!r}", remedy)
    all_names = [*names, *(table.name for table in tables)]
    for rule in rules:
        if all_names.count(rule.name) > 1:
            raise SettingsError(
                f"sources or tables of the same name: {rule.name}", "rename one of them"
            )
        own_aggregates = [aggregate for aggregate in aggregates if aggregate.source == rule.name]
        _check_source(rule, own_aggregates)


def _check_source(rule: SourceRule, aggregates: Sequence[Aggregate]) -> None:
    """Check that a source fits its aggregates. Raises :class:`SettingsError`."""
    if not aggregates:
        raise SettingsError(
            f"source {rule.name}: no [[aggregate]] uses it",
            f'write source = "{rule.name}" in an [[aggregate]], or remove the [[source]]',
        )
    key_columns = sorted(set().union(*(aggregate.key for aggregate in aggregates)))
    for name in rule.key:
        if name not in key_columns:
            raise SettingsError(
                f"source {rule.name}: key names {name!r}, which is no key of its aggregates",
                format_choices(key_columns) if key_columns else "remove it",
            )
    source_names = rule.to_source_names(key_columns)
    if len(set(source_names)) < len(source_names):
        raise SettingsError(
            f"source {rule.name}: its columns {', '.join(source_names)} stand for the log's "
            f"{', '.join(key_columns)}: one of them is used twice",
            "name another column in its key",
        )
    for aggregate in aggregates:
        (source_name,) = rule.to_source_names([aggregate.column])
        if source_name != aggregate.column:
            raise SettingsError(
                f"source {rule.name}: values name the column {aggregate.column!r} by its name in "
                "the log",
                f"write its name in the source, {source_name!r}",
            )
