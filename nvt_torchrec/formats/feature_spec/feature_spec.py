"""The feature spec: the columns of a raw click log, their types and their transforms.

:mod:`formats.feature_spec.toml_file` reads it from TOML and describes every key.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.columns import CategoricalColumn, DenseColumn, check_names
from nvt_torchrec.formats.feature_spec.criteo_format import is_criteo_format
from nvt_torchrec.formats.feature_spec.events import check_events
from nvt_torchrec.formats.feature_spec.field_checks import check, format_choices
from nvt_torchrec.formats.feature_spec.label_files import check_label_files
from nvt_torchrec.formats.feature_spec.negatives import check_negatives, check_unread_labels
from nvt_torchrec.formats.feature_spec.plan_reads import (
    PlannedReads,
    list_amount_reads,
    list_column_reads,
    list_time_reads,
    make_row_time_read,
    make_split_read,
    plan_labels,
    select_underived,
)
from nvt_torchrec.formats.feature_spec.read_plan import LabelRule, Read, ReadPlan
from nvt_torchrec.formats.feature_spec.source_rules import check_sources
from nvt_torchrec.formats.feature_spec.spec_blocks import SpecBlocks
from nvt_torchrec.formats.feature_spec.spec_parts import drop_absent_parts
from nvt_torchrec.formats.feature_spec.table_rules import check_tables
from nvt_torchrec.formats.feature_spec.transforms import TRANSFORMS
from nvt_torchrec.formats.feature_spec.vector_columns import check_vectors

#: The largest number of dense columns, and of categorical ones, for which everything was tested.
#: With 1000 of each, ``graph.json`` has 5 MB, the report 7 MB and a parquet footer 0.3 MB; a
#: workflow opens within seconds, and batches of 64 rows need more than the loader's default memory.
MAX_COLUMNS = 1000


@dataclasses.dataclass(frozen=True)
class FeatureSpec(SpecBlocks):
    """The columns of a raw log, how they are read, split and transformed, and everything around it.

    :class:`.spec_blocks.SpecBlocks` describes its attributes.

    Raises:
        SettingsError: A block contradicts itself or another one.
    """

    def __post_init__(self) -> None:
        if self.label_rules and self.label_rules[0].name != self.label:
            raise SettingsError(f"the first label rule is not the rule of {self.label!r}")
        check(
            self,
            "",
            ("dense_transform", self.dense_transform in TRANSFORMS, format_choices(TRANSFORMS)),
            ("categorical", self.categorical or self.is_source, "add a [[categorical]] block"),
        )
        for kind in ("dense", "categorical"):
            count = len(getattr(self, kind))
            if count > MAX_COLUMNS:
                raise SettingsError(
                    f"the spec has {count} {kind} columns", f"use at most {MAX_COLUMNS}"
                )
        check_names(self.columns, self.vocabularies)
        label_source = self.label_rules[0].column if self.label_rules else self.label
        for column in self.features:
            if label_source in column.reading.sources:
                raise SettingsError(
                    f"column {column.name} is read from {label_source}, as the label is",
                    "remove the column: the model would see what it has to predict",
                )
        check_events(
            self.events,
            self.split,
            {column.name: column.aggregate for column in self.dense if column.aggregate},
            self.histories,
            labels=self.labels,
            single={column.name for column in self.categorical if not column.multi_hot},
        )
        has_times = self.events is not None or self.split.by == "time"
        check_tables(self.tables, self.features, has_times=has_times)
        check_unread_labels(self.label_rules, self.label_files, self.negatives, self.aggregates)
        check_label_files(self.label_files, self.labels, self.events, self.split)
        if self.negatives:
            groups = [group.columns for group in self.groups]
            check_negatives(self.negatives, self.features, self.tables, groups, self.columns)
        check_sources(self.event_sources, self.tables, self.aggregate_rules)
        names = [*self.columns, *(rule.name for rule in self.histories)]
        check_vectors(self.vectors, self.tables, names)

    def read_plan(self, *, label: bool) -> ReadPlan:
        """Return the plan of what is read from a file.

        Args:
            label: Whether rows have labels; if not, the weight and the column of the split are not
                read either.
        """
        return self._plans[label]

    @functools.cached_property
    def _plans(self) -> dict[bool, ReadPlan]:
        return {label: self._make_plan(label=label) for label in (False, True)}

    def _make_plan(self, *, label: bool) -> ReadPlan:
        # Reads must be added in this order: it defines the fields of text without a header, and
        # toml_file.py documents it.
        reads = PlannedReads(self.input.decimal)
        labels: tuple[int | None, ...] = ()
        weight = key = None
        times = list_time_reads(self.events)
        if label:
            rules = self.label_rules or [LabelRule(self.label)]
            labels = plan_labels(rules, [file.name for file in self.label_files], reads)
            if self.weight:
                weight = reads.add(Read(self.weight, "weight", trim=True))
            if self.split.column:
                key = reads.add(make_split_read(self.split))
            time_indices = reads.add_all(times)
        dense = tuple(reads.add_all(list_column_reads(column)) for column in self.dense)
        categorical = tuple(reads.add_all(list_column_reads(column)) for column in self.categorical)
        are_events = self.needs_time(label=label)
        keys = self.row_keys if are_events else self.groups
        groups = tuple(reads.add_all(map(self.make_key_read, key.columns)) for key in keys)
        tables = tuple(
            reads.add_all(map(self.make_key_read, rule.key)) for rule in self.joined_tables
        )
        amounts: tuple[int, ...] = ()
        if are_events:
            amounts = reads.add_all(list_amount_reads(self.amounts, self.amount_features))
        if not label:  # a row to score has its own time only, not the time when it becomes known
            time_indices = reads.add_all(times[:1])
        join_time = label_time = None
        if self.join_time:
            join_time = reads.add(self.join_time)
        negatives: tuple[int, ...] = ()
        negative_time = None
        if label and self.negatives:
            negatives = reads.add_all(map(self.make_key_read, self.negative_columns))
            row_time = make_row_time_read(self.joined_tables, self.events, self.split)
            negative_time = None if row_time is None else reads.add(row_time)
        label_keys: tuple[tuple[int, ...], ...] = ()
        if label and self.label_time:
            label_time = reads.add(self.label_time)
            label_keys = tuple(
                reads.add_all(map(self.make_key_read, file.key)) for file in self.label_files
            )
        return ReadPlan(
            reads=reads.ordered,
            labels=labels,
            weight=weight,
            key=key,
            dense=dense,
            categorical=categorical,
            times=time_indices,
            groups=groups,
            amounts=amounts,
            tables=tables,
            join_time=join_time,
            negatives=negatives,
            negative_time=negative_time,
            label_keys=label_keys,
            label_time=label_time,
        )

    @functools.cached_property
    def label_time(self) -> Read | None:
        """How the time of a row, to match its clicks, is read; None without labels from files."""
        if not self.label_files:
            return None
        return make_row_time_read(self.label_files, self.events, self.split)

    @property
    def label_window(self) -> int:
        """Microseconds after the time of a row until all its labels are known; 0 for at once."""
        return max((file.window for file in self.label_files), default=0)

    @functools.cached_property
    def join_time(self) -> Read | None:
        """How the time of a row, to choose versions of tables, is read; None without versions."""
        if self.version_time or not any(rule.valid_from for rule in self.joined_tables):
            return self.version_time
        return make_row_time_read(self.joined_tables, self.events, self.split)

    def make_key_read(self, name: str) -> Read:
        """Return how a column of a key is read: as its feature, or as text if it is no feature."""
        for column in self.key_features:
            for read in list_column_reads(column):
                if read.source == name:
                    return read
        return Read(name, "string", trim=True)

    @property
    def amount_features(self) -> list[DenseColumn]:
        """The dense columns that are read from columns of amounts, without being derived."""
        return select_underived(self.dense, self.amounts)

    @property
    def key_features(self) -> list[CategoricalColumn]:
        """The single-valued categorical columns that are part of any key.

        Keys are those of events, of tables, of labels from files, and of negatives.
        """
        names = set(self.negative_columns)
        for event_key in self.row_keys:
            names.update(event_key.columns)
        for table in self.joined_tables:
            names.update(table.key)
        for file in self.label_files:
            names.update(file.key)
        single = [column for column in self.categorical if not column.multi_hot]
        return select_underived(single, names)

    def sources(self, *, label: bool) -> list[str]:
        """Return the columns that a file must have, each once, in the order of the plan.

        These are all columns that are read, except for the times of rows that may lack one.
        """
        plan = self.read_plan(label=label)
        reads = plan.reads
        if not self.needs_time(label=label):
            needed = {plan.weight, plan.key, *plan.labels}
            for indices in (*plan.dense, *plan.categorical, *plan.groups, *plan.tables):
                needed.update(indices)
            reads = tuple(read for index, read in enumerate(reads) if index in needed)
        return list(dict.fromkeys(read.source for read in reads))

    def needs_time(self, *, label: bool) -> bool:
        """Return whether each row must have a time, if the spec names one.

        Rows with labels must, unless they are scored: they are events, whose amounts are read, too.
        """
        return self.is_source or (label and not (self.events and self.events.optional))

    @property
    def optional_time(self) -> str:
        """The column of the row's time that files without labels may lack; "" if there is none."""
        name = self.events.time if self.events else ""
        if self.join_time and not self.version_time:
            name = self.join_time.source
        return "" if name in self.sources(label=False) else name

    def field_sources(self, name: str) -> list[str]:
        """Return the columns of the file that an output column is read or derived from."""
        label_sources = {rule.name: [rule.column] for rule in self.label_rules}
        feature_sources = {column.name: list(column.reading.sources) for column in self.features}
        return label_sources.get(name) or feature_sources.get(name) or [name]

    def file_columns(self, *, label: bool) -> list[str]:
        """Return the names of the fields of a line of text without a header, "" where unused.

        Lines without labels lack the fields that only training reads.
        """
        names = list(self.input.columns) or self.sources(label=True)
        if label:
            return names
        training_only = set(self.sources(label=True)) - set(self.sources(label=False))
        return [name for name in names if name not in training_only]

    @property
    def is_criteo_format(self) -> bool:
        """Whether the files are in Criteo's format, for which there is a faster parser."""
        reads_more = (
            self.label_rules
            or self.weight
            or self.split.column
            or self.events
            or self.tables
            or self.negatives
        )
        return not reads_more and is_criteo_format(self.input, self.dense, self.categorical)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, which :func:`base.files.validation.parse` reads."""
        value = dataclasses.asdict(self)
        del value["version_time"], value["label_times_between"], value["is_source"]
        drop_absent_parts(value)
        return value
