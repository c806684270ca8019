"""Negative rows, drawn for a log that records only what happened (rows with label 1)."""

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

#: The column of the output that corrects for drawing items by popularity.
LOG_Q_CORRECTION = "log_q_correction"
#: The largest number of negatives per row. All are written, so the output grows by this factor.
_MAX_PER_POSITIVE = 1000


@dataclasses.dataclass(frozen=True)
class NegativesRule:
    """Rows with label 0 that are drawn for each row with label 1: the same row, another item.

    Attributes:
        item: The column of the log whose values are drawn.
        user: The column of the log with the row's user. An item is not drawn for a user who has a
            row with label 1 for it.
        per_positive: The number of rows that are drawn for each row.
        table: The table whose keys are drawn; "" to draw from the items of the log.
        popularity: An item that occurs in c training rows with label 1 is drawn in proportion to
            (1 + c) ** popularity; 0 draws all items with the same probability.
        seed: The seed of the draws.
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
            ("per_positive", is_possible, f"give an integer from 1 to {_MAX_PER_POSITIVE}"),
            ("popularity", 0 <= self.popularity <= 2, "give a number from 0 to 2, such as 0.75"),
            ("seed", 0 <= self.seed < 2**63, "give an integer from 0 to 2**63 - 1"),
        )


def list_item_columns(
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
    """Check that labels that are not read from the log still take both values.

    Args:
        rules: The labels.
        files: The files of labels that come from other files.
        negatives: The rule by which negatives are drawn; None without one.
        aggregates: The columns that are computed from events.

    Raises:
        SettingsError: All rows, or all events of an aggregate, have label 1; or negatives are drawn
            although rows without a click are negatives already.
    """
    all_ones = [rule.name for rule in rules if rule.value is not None]
    if all_ones and negatives is None:
        raise SettingsError(
            f"label {all_ones[0]}: all rows have label 1", "add [negatives], or remove value"
        )
    for column in aggregates:
        if column.aggregate and column.aggregate.label in all_ones:
            raise SettingsError(
                f"aggregate {column.name}: its label is 1 in all rows", "remove the aggregate"
            )
    if files and negatives is not None:
        raise SettingsError(
            f"[negatives], and label {files[0].name} from another file",
            "remove [negatives]: rows without a click are negatives",
        )


def check_negatives(
    rule: NegativesRule,
    columns: Sequence[DenseColumn | CategoricalColumn],
    tables: Sequence[TableRule],
    groups: Sequence[tuple[str, ...]],
    names: Sequence[str],
) -> None:
    """Check that a drawn row, which has another item, looks like a row of the log.

    Args:
        rule: The rule by which negatives are drawn.
        columns: The columns of the spec.
        tables: The tables of the spec.
        groups: The columns of the keys of aggregates and histories.
        names: The names of all columns of the output.

    Raises:
        SettingsError: A column would distinguish drawn rows from others, the table to draw from
            does not exist, or a column has the name of the correction for popularity.
    """
    if rule.popularity and LOG_Q_CORRECTION in names:
        raise SettingsError(
            f"column {LOG_Q_CORRECTION}: the ETL writes a column of this name when negatives are "
            "drawn by popularity",
            "give your column another name",
        )
    if rule.table:
        by_name = {table.name: table for table in tables}
        if rule.table not in by_name:
            remedy = f"add a [[table]] with name = {rule.table!r}"
            if by_name:
                remedy = format_choices(by_name)
            raise SettingsError(f"negatives: from = {rule.table!r}", remedy)
        if by_name[rule.table].key != (rule.item,):
            raise SettingsError(
                f"negatives: the key of table {rule.table} is not {rule.item}",
                f"name a table whose key is {rule.item}, or remove from",
            )
    for column in columns:
        sources = {read.source for read in list_column_reads(column)}
        is_list = isinstance(column, CategoricalColumn) and column.multi_hot
        if rule.item in sources and (len(sources) > 1 or is_list):
            raise SettingsError(
                f"column {column.name} depends on {', '.join(sorted(sources))}, but negatives "
                f"replace only {rule.item}, one value per row",
                f"remove the column, or derive it from {rule.item} only",
            )
    for table in tables:
        if rule.item in table.key and len(table.key) > 1:
            raise SettingsError(
                f"table {table.name}: its key {', '.join(table.key)} has {rule.item}, which "
                "negatives replace, and other columns",
                f"use {rule.item} alone as its key, or remove the table",
            )
    for key in groups:
        if rule.item in key and len(key) > 1:
            raise SettingsError(
                f"an aggregate or history of {', '.join(key)}: it reveals the label of negatives, "
                "because no item is drawn that its user had before",
                f"use {rule.item} alone as its key, or a key without {rule.item}",
            )
