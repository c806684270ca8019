"""Further sources of events: files beside the log whose rows are events, such as purchases."""

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
    """A source of events. They are summed up for the rows of the log, and are no rows themselves.

    Attributes:
        name: Of the source; aggregates name it.
        path: Its files, as :attr:`.table_rules.TableRule.path`.
        time: The column of its files with the time of an event.
        time_format: See :func:`.raw_types.time.check_time_format`.
        known: How long after its time an event is known, such as "1h"; "": at once.
        key: Columns of the log that are keys of aggregates and have another name in the source.
        key_names: These names, in the order of ``key``.
        nulls: Texts that mean a missing value, besides the empty one.
        input: See :attr:`.table_rules.TableRule.input`.
    """

    #: What it is called in messages, and in the names of files.
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
            ("name", self.name.isidentifier(), "use letters, digits and _ alone"),
            ("path", self.path, 'name its files, such as path = "purchases.csv"'),
            (
                "path",
                is_inside(self.path),
                f"write a path in the directory of the log, and pass --table {self.name}=PATH",
            ),
            ("time", self.time, 'name the column of the time, such as time = "time"'),
            ("known", not self.known or parse_duration(self.known), DURATION),
            ("key", all(self.key), 'name columns of both, such as key = {user = "user_id"}'),
            ("key_names", len(names) == len(self.key) and all(names), "name each column once"),
        )
        check_time_format(self.time_format, f"source {self.name}: ")

    @property
    def delay(self) -> int:
        """Microseconds after which an event is known."""
        return parse_duration(self.known)

    def to_source_names(self, key: Sequence[str]) -> tuple[str, ...]:
        """Return the columns of the source for those of the log that are a key."""
        own = dict(zip(self.key, self.key_names, strict=True))
        return tuple(own.get(name, name) for name in key)


def check_sources(
    rules: Sequence[SourceRule], tables: Sequence[TableRule], aggregates: Sequence[Aggregate]
) -> None:
    """Check that each source is there once, and is that of an aggregate.

    Args:
        rules: The sources.
        tables: The tables, whose names ``--table`` takes, too.
        aggregates: The aggregates.

    Raises:
        SettingsError: One is not; or an aggregate names what is not there.
    """
    names = [rule.name for rule in rules]
    for aggregate in aggregates:
        if aggregate.source and aggregate.source not in names:
            remedy = (
                format_choices(names) if names else f"add a [[source]] of name {aggregate.source!r}"
            )
            raise SettingsError(f"aggregate: source = {aggregate.source!r}", remedy)
    every = [*names, *(table.name for table in tables)]
    for rule in rules:
        if every.count(rule.name) > 1:
            raise SettingsError(f"sources or tables of the same name: {rule.name}")
        used = [aggregate for aggregate in aggregates if aggregate.source == rule.name]
        if not used:
            raise SettingsError(
                f"source {rule.name}: no [[aggregate]] names it",
                f'write source = "{rule.name}" in an [[aggregate]], or remove the [[source]]',
            )
        known = {name for aggregate in used for name in aggregate.key}
        if unknown := [name for name in rule.key if name not in known]:
            raise SettingsError(
                f"source {rule.name}: key names {unknown[0]!r}, which is no key of its aggregates",
                format_choices(known) if known else "remove it",
            )
        own = rule.to_source_names(sorted(known))
        if len(set(own)) < len(own):
            raise SettingsError(
                f"source {rule.name}: two of {', '.join(sorted(known))} are one of its columns, "
                f"{', '.join(own)}",
                "name another column in its key",
            )
        for name in dict.fromkeys(aggregate.column for aggregate in used):
            if rule.to_source_names([name]) != (name,):
                raise SettingsError(
                    f"source {rule.name}: a value of {name!r}, which is the log's name",
                    f"write the source's own, {rule.to_source_names([name])[0]!r}",
                )
