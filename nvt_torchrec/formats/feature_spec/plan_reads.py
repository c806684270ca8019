"""What of a file the columns of a spec are read from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from nvt_torchrec.formats.feature_spec.columns import CategoricalColumn, DenseColumn
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.read_plan import LabelRule, Read, ReadPlan

if TYPE_CHECKING:
    from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec


class _Reads:
    """The columns to read, each once for each way of reading it.

    Args:
        decimal: The decimal point of numbers as text.
    """

    def __init__(self, decimal: str) -> None:
        self._decimal = decimal
        self._indices: dict[Read, int] = {}

    def index(self, read: Read) -> int:
        """Return the index of a read, which is added if it is not there."""
        if self._decimal != "." and RAW_TYPES[read.raw].has_point:
            read = dataclasses.replace(read, decimal=self._decimal)
        return self._indices.setdefault(read, len(self._indices))

    def indices(self, reads: list[Read]) -> tuple[int, ...]:
        """Return the index of each read."""
        return tuple(map(self.index, reads))

    @property
    def in_order(self) -> tuple[Read, ...]:
        """All reads, in the order in which they were added."""
        return tuple(self._indices)


def make_read_plan(spec: FeatureSpec, *, label: bool) -> ReadPlan:
    """Return what :meth:`.FeatureSpec.read_plan` does.

    The order in which reads are added is that of the fields of text without a header.
    """
    reads = _Reads(spec.input.decimal)
    labels: tuple[int, ...] = ()
    weight = key = None
    times = _time_reads(spec)
    if label:
        rules = spec.label_rules or (LabelRule(spec.label),)
        labels = reads.indices(
            [Read(rule.column, "label", trim=rule.trim, label=rule) for rule in rules]
        )
        if spec.weight:
            weight = reads.index(Read(spec.weight, "weight", trim=True))
        if spec.split.column:
            raw = "time" if spec.split.by == "time" else "string"
            time_format = spec.split.time_format
            key = reads.index(Read(spec.split.column, raw, trim=True, time_format=time_format))
        time_indices = reads.indices(times)
    dense = tuple(reads.indices(_column_reads(column)) for column in spec.dense)
    categorical = tuple(reads.indices(_column_reads(column)) for column in spec.categorical)
    groups = tuple(reads.indices([key_read(spec, name) for name in key]) for key in spec.groups)
    tables = tuple(
        reads.indices([key_read(spec, name) for name in rule.key]) for rule in spec.joined_tables
    )
    if not label:  # of a row to score, only its own time is known
        time_indices = reads.indices(times[:1])
    return ReadPlan(
        reads=reads.in_order,
        labels=labels,
        weight=weight,
        key=key,
        dense=dense,
        categorical=categorical,
        times=time_indices,
        groups=groups,
        tables=tables,
    )


def _time_reads(spec: FeatureSpec) -> list[Read]:
    """Return how the times of an event are read: its own, and from when it is known."""
    if not spec.events:
        return []
    sources = filter(None, (spec.events.time, spec.events.source))
    how = spec.events.time_format
    return [Read(source, "time", trim=True, time_format=how) for source in sources]


def key_read(spec: FeatureSpec, name: str) -> Read:
    """Return how a column of a key is read: as its feature is, else as text."""
    for column in spec.key_features:
        for read in _column_reads(column):
            if read.source == name:
                return read
    return Read(name, "string", trim=True)


def _column_reads(column: DenseColumn | CategoricalColumn) -> list[Read]:
    """Return what a column is read or derived from; nothing of what the row does not hold."""
    if column.table or (isinstance(column, DenseColumn) and column.aggregate):
        return []
    reading = column.reading
    return [
        Read(
            source,
            column.derive.reads if column.derive else column.raw,
            isinstance(column, CategoricalColumn) and column.multi_hot,
            reading.nulls,
            reading.trim,
            column.derive.time_format if column.derive else "",
            lenient=reading.lenient,
        )
        for source in reading.sources or (column.name,)
    ]
