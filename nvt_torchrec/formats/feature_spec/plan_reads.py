"""The reads of columns of a file that the parts of a spec need."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import TypeVar

from nvt_torchrec.formats.feature_spec.columns import (
    CategoricalColumn,
    DenseColumn,
    VectorValues,
)
from nvt_torchrec.formats.feature_spec.events import Events
from nvt_torchrec.formats.feature_spec.label_files import LabelFile
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.read_plan import LabelRule, Read
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.formats.feature_spec.table_rules import TableRule

AnyColumn = TypeVar("AnyColumn", DenseColumn, CategoricalColumn)


class PlannedReads:
    """An ordered set of reads; the same column may be read in several ways.

    Args:
        decimal: The decimal point of numbers in text.
    """

    def __init__(self, decimal: str) -> None:
        self._decimal = decimal
        self._indices: dict[Read, int] = {}

    def add(self, read: Read) -> int:
        """Add a read unless it is present; return its index."""
        if self._decimal != "." and RAW_TYPES[read.raw].has_point:
            read = dataclasses.replace(read, decimal=self._decimal)
        return self._indices.setdefault(read, len(self._indices))

    def add_all(self, reads: Iterable[Read]) -> tuple[int, ...]:
        """Add each read as :meth:`add` does; return their indices."""
        return tuple(map(self.add, reads))

    @property
    def ordered(self) -> tuple[Read, ...]:
        """All reads, in the order in which they were added."""
        return tuple(self._indices)


def plan_labels(
    rules: Iterable[LabelRule], from_files: Collection[str], reads: PlannedReads
) -> tuple[int | None, ...]:
    """Add the reads of labels; return the index of each.

    The index is None for a label that is not read, because it is constant or comes from another
    file.

    Args:
        rules: The labels.
        from_files: The names of labels that come from other files.
        reads: The set that the reads are added to.
    """
    indices: list[int | None] = []
    for rule in rules:
        if rule.value is not None or rule.name in from_files:
            indices.append(None)
        else:
            indices.append(reads.add(Read(rule.column, "label", trim=rule.trim, label=rule)))
    return tuple(indices)


def list_time_reads(events: Events | None) -> list[Read]:
    """Return how the times of an event are read: its own, then the one at which it is known."""
    if not events:
        return []
    names = [events.time]
    if events.source:
        names.append(events.source)
    return [Read(name, "time", trim=True, time_format=events.time_format) for name in names]


def make_row_time_read(
    rules: Iterable[TableRule | LabelFile], events: Events | None, split: Split
) -> Read | None:
    """Return how the time of a row is read; None if no part of the spec names one.

    Args:
        rules: Tables with versions, or labels from files. All that name a time name the same one.
        events: The ``[events]`` block; None without one.
        split: How rows are divided into train, valid and test.
    """
    for rule in rules:
        if rule.log_time:
            return Read(rule.log_time, "time", trim=True, time_format=rule.log_time_format)
    if events:
        return list_time_reads(events)[0]
    return make_split_read(split) if split.by == "time" else None


def make_split_read(split: Split) -> Read:
    """Return how the column that splits the rows is read."""
    raw = "time" if split.by == "time" else "string"
    return Read(split.column, raw, trim=True, time_format=split.time_format)


def select_underived(columns: Iterable[AnyColumn], names: Collection[str]) -> list[AnyColumn]:
    """Return the columns that are read from the named columns of the file without derivation."""
    found = []
    for column in columns:
        reads = list_column_reads(column)
        if reads and not column.derive and reads[0].source in names:
            found.append(column)
    return found


def list_column_reads(column: DenseColumn | CategoricalColumn) -> list[Read]:
    """Return the reads that a column is made from; none for columns that the rows do not hold."""
    if column.table or (isinstance(column, DenseColumn) and column.aggregate):
        return []
    reading = column.reading
    if isinstance(column, VectorValues):
        (source,) = reading.sources
        read = Read(source, column.raw, multi_hot=True, trim=True)
        return [dataclasses.replace(read, width=column.width, maximum=column.maximum)]
    raw = column.raw
    time_format = ""
    if column.derive:
        raw = column.derive.reads
        time_format = column.derive.time_format
    reads = []
    for source in reading.sources or (column.name,):
        read = Read(
            source,
            raw,
            multi_hot=isinstance(column, CategoricalColumn) and column.multi_hot,
            nulls=reading.nulls,
            trim=reading.trim,
            time_format=time_format,
            lenient=reading.lenient,
        )
        reads.append(read)
    return reads


def list_amount_reads(names: Iterable[str], features: Iterable[DenseColumn]) -> list[Read]:
    """Return how columns of amounts are read: as their features, or as floats without one."""
    by_source: dict[str, Read] = {}
    for column in features:
        (read,) = list_column_reads(column)
        by_source.setdefault(read.source, read)
    return [by_source.get(name, Read(name, "float", trim=True)) for name in names]
