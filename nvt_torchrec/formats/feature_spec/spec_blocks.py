"""The blocks of a feature spec, and what they name: columns, labels, keys of events."""

from __future__ import annotations

import dataclasses
import functools

from nvt_torchrec.formats.feature_spec.columns import CategoricalColumn, DenseColumn, InputFormat
from nvt_torchrec.formats.feature_spec.event_keys import list_amounts, list_groups, list_pairs
from nvt_torchrec.formats.feature_spec.events import Aggregate, EventKey, Events, HistoryRule
from nvt_torchrec.formats.feature_spec.label_files import LabelFile
from nvt_torchrec.formats.feature_spec.negatives import LOG_Q_CORRECTION, NegativesRule
from nvt_torchrec.formats.feature_spec.read_plan import LabelRule, Read
from nvt_torchrec.formats.feature_spec.source_rules import SourceRule
from nvt_torchrec.formats.feature_spec.split import BY_DAYS, Split
from nvt_torchrec.formats.feature_spec.table_rules import TableRule
from nvt_torchrec.formats.feature_spec.transforms import TRANSFORMS, DenseTransform
from nvt_torchrec.formats.feature_spec.vector_columns import VectorColumn


@dataclasses.dataclass(frozen=True)
class SpecBlocks:
    """The blocks of a feature spec, unchecked; :class:`.feature_spec.FeatureSpec` checks them.

    Attributes:
        label: Name of the label that is trained on unless another one is chosen.
        dense: The dense columns, in the order of the output.
        categorical: The categorical columns, likewise.
        dense_transform: Of dense columns that have no transform of their own.
        input: The file format.
        label_rules: The labels, ``label`` first; (): one label of 0 and 1.
        weight: The column of the file that weights a row in training and metrics; "" for none.
        split: Which rows are for training, validation and test.
        events: When the events happened that aggregates and histories are made of; None if there
            are neither.
        histories: The histories.
        tables: The tables that columns are joined from.
        negatives: The rows that are drawn; None for a log with rows of both labels.
        label_files: The labels that are from other files than the log.
        label_times_between: While a block is read, the times that rows without events may have;
            no file has it.
        event_sources: Further sources of events, beside the log's own rows.
        vectors: The vectors of tables.
        version_time: While a table with versions is read, how their times are read; no file has it.
        is_source: While a source is read: rows are events without labels; no file has it.
    """

    label: str
    dense: tuple[DenseColumn, ...]
    categorical: tuple[CategoricalColumn, ...]
    dense_transform: str = "log_normalize"
    input: InputFormat = dataclasses.field(default_factory=InputFormat)
    label_rules: tuple[LabelRule, ...] = ()
    weight: str = ""
    split: Split = BY_DAYS
    events: Events | None = None
    histories: tuple[HistoryRule, ...] = ()
    tables: tuple[TableRule, ...] = ()
    negatives: NegativesRule | None = None
    label_files: tuple[LabelFile, ...] = ()
    label_times_between: tuple[int, ...] | None = None
    event_sources: tuple[SourceRule, ...] = ()
    vectors: tuple[VectorColumn, ...] = ()
    version_time: Read | None = None
    is_source: bool = False

    def table_columns(self, table: str) -> list[DenseColumn | CategoricalColumn]:
        """Return the columns that are joined from a table, the dense ones first."""
        return [column for column in self.features if column.table == table]

    def table_vectors(self, table: str) -> list[VectorColumn]:
        """Return the vectors that rows find in a table."""
        return [vector for vector in self.vectors if vector.table == table]

    @functools.cached_property
    def joined_tables(self) -> list[TableRule]:
        """The tables that have columns or vectors."""
        used = {column.table for column in (*self.features, *self.vectors)}
        return [rule for rule in self.tables if rule.name in used]

    @property
    def read_tables(self) -> list[TableRule]:
        """The tables whose files are read: those that have columns, and that of negatives."""
        drawn_from = self.negatives.table if self.negatives else ""
        joined = [rule.name for rule in self.joined_tables]
        return [rule for rule in self.tables if rule.name in (*joined, drawn_from)]

    @functools.cached_property
    def aggregates(self) -> list[DenseColumn]:
        """The dense columns that are computed from the events before a row."""
        return [column for column in self.dense if column.aggregate]

    @functools.cached_property
    def aggregate_rules(self) -> list[Aggregate]:
        """The rules of :attr:`aggregates`."""
        return [column.aggregate for column in self.dense if column.aggregate]

    @property
    def amounts(self) -> list[str]:
        """The columns of the log whose numbers aggregates are of."""
        return list_amounts(self.aggregate_rules)

    @functools.cached_property
    def groups(self) -> list[EventKey]:
        """See :func:`.event_keys.list_groups`."""
        return list_groups(self.aggregate_rules, self.histories)

    @property
    def history_columns(self) -> list[str]:
        """The categorical columns of which there are histories."""
        return list(dict.fromkeys(name for rule in self.histories for name in rule.columns))

    @functools.cached_property
    def event_keys(self) -> list[EventKey]:
        """All keys that events are numbered by; :attr:`row_keys` come first."""
        return list(dict.fromkeys([*self.groups, *list_pairs(self.aggregate_rules)]))

    @functools.cached_property
    def row_keys(self) -> list[EventKey]:
        """The keys that rows of the log are numbered by, those of all groups among them."""
        return [key for key in self.event_keys if key in self.groups or not key.source]

    @property
    def columns(self) -> list[str]:
        """All columns of the output: labels, weight, dense, categorical."""
        weight = [self.weight] if self.weight else []
        return [*self.labels, *weight, *self.dense_names, *self.categorical_names]

    @property
    def features(self) -> tuple[DenseColumn | CategoricalColumn, ...]:
        """The dense columns, then the categorical ones."""
        return (*self.dense, *self.categorical)

    @property
    def labels(self) -> list[str]:
        """Names of the labels, the main one first."""
        return [rule.name for rule in self.label_rules] or [self.label]

    def get_transform(self, column: DenseColumn) -> DenseTransform:
        """Return the transform of a dense column."""
        return TRANSFORMS[column.transform or self.dense_transform]

    @property
    def normalized_names(self) -> list[str]:
        """Names of the dense columns whose mean and standard deviation are needed."""
        return [column.name for column in self.dense if self.get_transform(column).normalized]

    @property
    def log_q_correction(self) -> str:
        """The column of the output with the correction for popularity; "" unless there is one."""
        return LOG_Q_CORRECTION if self.negatives and self.negatives.popularity else ""

    @property
    def negative_columns(self) -> tuple[str, ...]:
        """The columns of the log with the item and the user of negatives; () without."""
        return (self.negatives.item, self.negatives.user) if self.negatives else ()

    @property
    def dense_names(self) -> list[str]:
        """Names of the dense columns."""
        return [column.name for column in self.dense]

    @property
    def categorical_names(self) -> list[str]:
        """Names of the categorical columns."""
        return [column.name for column in self.categorical]

    @property
    def feature_names(self) -> list[str]:
        """Names of the dense columns, then of the categorical ones."""
        return [column.name for column in self.features]

    @property
    def vocabularies(self) -> dict[str, tuple[CategoricalColumn, ...]]:
        """The columns of each vocabulary, in spec order; hashed columns have empty ones."""
        groups: dict[str, tuple[CategoricalColumn, ...]] = {}
        for column in self.categorical:
            name = column.vocabulary_name
            groups[name] = (*groups.get(name, ()), column)
        return groups
