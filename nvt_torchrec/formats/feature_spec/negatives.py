"""Negative rows, drawn for a log in which only what happened was written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.columns import CategoricalColumn, DenseColumn
from nvt_torchrec.formats.feature_spec.field_checks import check, format_choices
from nvt_torchrec.formats.feature_spec.label_files import LabelFile
from nvt_torchrec.formats.feature_spec.plan_reads import list_column_reads
from nvt_torchrec.formats.feature_spec.read_plan import LabelRule
from nvt_torchrec.formats.feature_spec.table_rules import TableRule

#: The column of the output with the correction for the popularity by which items are drawn.
LOG_Q_CORRECTION = "log_q_correction"
#: The most rows that are drawn for a row: each is written, so this is what the output grows by.
_MAX_PER_POSITIVE = 1000


@dataclasses.dataclass(frozen=True)
class NegativesRule:
    """Rows with label 0 that are drawn for each row with label 1: the same row, another item.

    Attributes:
        item: The column of the log whose values are drawn.
        user: The column of the log that says whose row it is: no item is drawn that the user of the
            row has a row with label 1 with.
        per_positive: How many rows are drawn for a row.
        table: The table whose keys may be drawn; "": the items of the log.
        popularity: An item is drawn in proportion to (1 + c) to the power of this, where c is in
            how many training rows with label 1 it is; 0: all items alike.
        seed: Another seed draws other items.
    """

    item: str
    user: str
    per_positive: int
    table: str = ""
    popularity: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        is_possible = 0 < self.per_positive <= _MAX_PER_POSITIVE
        check(
            self,
            "negatives: ",
            ("item", self.item, 'name the column of the log whose values are drawn, as in "item"'),
            ("user", self.user and self.user != self.item, "name the column of a row's user"),
            ("per_positive", is_possible, f"give a number from 1 to {_MAX_PER_POSITIVE}"),
            ("popularity", 0 <= self.popularity <= 2, "give a number from 0 to 2, such as 0.75"),
            ("seed", 0 <= self.seed < 2**63, "give a number from 0 on"),
        )


def item_columns(
    rule: NegativesRule, columns: Sequence[DenseColumn | CategoricalColumn]
) -> list[DenseColumn | CategoricalColumn]:
    """Return the columns that are read or derived from the item alone."""
    found = []
    for column in columns:
        sources = {read.source for read in list_column_reads(column)}
        if sources == {rule.item}:
            found.append(column)
    return found


def check_unread_labels(
    rules: Sequence[LabelRule],
    files: Sequence[LabelFile],
    negatives: NegativesRule | None,
    aggregates: Sequence[DenseColumn],
) -> None:
    """Check that labels which are not read from the log leave rows of both kinds.

    Args:
        rules: The labels.
        files: Those that are from other files.
        negatives: How rows are drawn; None if none are.
        aggregates: The columns that are computed from events.

    Raises:
        SettingsError: All rows have a label, or all events of an aggregate, or negatives would be
            drawn beside rows without a click.
    """
    all_ones = [rule.name for rule in rules if rule.value is not None]
    if all_ones and negatives is None:
        raise SettingsError(
            f"label {all_ones[0]}: all rows have label 1", "add [negatives], or leave value out"
        )
    for column in aggregates:
        if column.aggregate and column.aggregate.label in all_ones:
            raise SettingsError(
                f"aggregate {column.name}: its label is 1 in all rows", "leave it out"
            )
    if files and negatives is not None:
        raise SettingsError(
            f"[negatives], and label {files[0].name} from another file",
            "leave [negatives] out: rows without a click are negatives",
        )


def check_negatives(
    rule: NegativesRule,
    columns: Sequence[DenseColumn | CategoricalColumn],
    tables: Sequence[TableRule],
    groups: Sequence[tuple[str, ...]],
    names: Sequence[str],
) -> None:
    """Check that a row with another item is one that could be in the log.

    Args:
        rule: How rows are drawn.
        columns: The columns of the spec.
        tables: The tables that are joined, and all others.
        groups: The columns of the keys of aggregates and histories.
        names: The names of all columns of the output.

    Raises:
        SettingsError: A column would tell a drawn row from others, there is no such table, or a
            column has the name of the correction for popularity.
    """
    if rule.popularity and LOG_Q_CORRECTION in names:
        raise SettingsError(
            f"column {LOG_Q_CORRECTION}: the ETL writes one of this name, as negatives are drawn "
            "by popularity",
            "give the column another name",
        )
    if rule.table:
        by_name = {table.name: table for table in tables}
        if rule.table not in by_name:
            remedy = (
                format_choices(by_name) if by_name else f"add a [[table]] of name {rule.table!r}"
            )
            raise SettingsError(f"negatives: from = {rule.table!r}", remedy)
        if by_name[rule.table].key != (rule.item,):
            raise SettingsError(
                f"negatives: the key of table {rule.table} is not {rule.item}",
                f"name a table whose key is {rule.item}, or leave from out",
            )
    for column in columns:
        sources = {read.source for read in list_column_reads(column)}
        is_list = isinstance(column, CategoricalColumn) and column.multi_hot
        if rule.item in sources and (len(sources) > 1 or is_list):
            raise SettingsError(
                f"column {column.name} is made of {', '.join(sorted(sources))}, of which negatives "
                f"replace {rule.item}",
                f"leave the column out, or make it of {rule.item} alone",
            )
    for table in tables:
        if rule.item in table.key and len(table.key) > 1:
            raise SettingsError(
                f"table {table.name}: its key has {rule.item}, which negatives replace, and others",
                f"use {rule.item} alone as its key, or leave the table out",
            )
    for key in groups:
        if rule.item in key and len(key) > 1:
            raise SettingsError(
                f"an aggregate or history of {', '.join(key)}: with negatives it tells the label, "
                "as no item is drawn that its user had before",
                f"make it of {rule.item} alone, or without {rule.item}",
            )
