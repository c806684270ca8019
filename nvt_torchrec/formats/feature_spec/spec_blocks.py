"""The blocks of a feature spec, and lists of the columns, labels and keys that they name."""

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
        label: The label that is trained on unless another one is chosen.
        dense: The dense columns, in the order of the output.
        categorical: The categorical columns, in the order of the output.
        dense_transform: The transform of dense columns that do not name one.
        input: The file format of the log.
        label_rules: How the labels are read, ``label`` first; () for one label of 0 and 1.
        weight: The column of the file with the weight of a row in training and metrics; "" for
            none.
        split: How rows are divided into train, valid and test.
        events: The times of the events for aggregates and histories; None if there are neither.
        histories: The histories.
        tables: The tables that columns are joined from.
        negatives: The rule by which negatives are drawn; None for a log with rows of both labels.
        label_files: The files of labels that do not come from the log.
        label_times_between: The half-open range of times that the rows of a block may have, in a
            spec without events. Set while a block is read, never by a spec file.
        event_sources: Sources of events in addition to the log's rows.
        vectors: The vectors of tables.
        version_time: How the times of a table's versions are read. Set while the table is read,
            never by a spec file.
        is_source: Whether the rows are events of a source, which have no labels. Set while the
            source is read, never by a spec file.
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
        """Return the vectors that are joined from a table."""
        return [vector for vector in self.vectors if vector.table == table]

    @functools.cached_property
    def joined_tables(self) -> list[TableRule]:
        """The tables that have columns or vectors."""
        used = {column.table for column in (*self.features, *self.vectors)}
        return [rule for rule in self.tables if rule.name in used]

    @property
    def read_tables(self) -> list[TableRule]:
        """The tables whose files are read: the joined ones and the one with items of negatives."""
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
        """The columns of the log whose numbers are aggregated."""
        return list_amounts(self.aggregate_rules)

    @functools.cached_property
    def groups(self) -> list[EventKey]:
        """The keys that events are grouped by, those of the log before those of sources."""
        return list_groups(self.aggregate_rules, self.histories)

    @property
    def history_columns(self) -> list[str]:
        """The categorical columns that histories list, each once."""
        names: dict[str, None] = {}
        for rule in self.histories:
            names |= dict.fromkeys(rule.columns)
        return list(names)

    @functools.cached_property
    def event_keys(self) -> list[EventKey]:
        """All keys of events: :attr:`groups`, then those with a column of distinct values."""
        return list(dict.fromkeys([*self.groups, *list_pairs(self.aggregate_rules)]))

    @functools.cached_property
    def row_keys(self) -> list[EventKey]:
        """The keys that rows of the log need: all groups, as features, and the log's other keys."""
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
        """The output column that corrects for drawing by popularity; "" if there is none."""
        return LOG_Q_CORRECTION if self.negatives and self.negatives.popularity else ""

    @property
    def negative_columns(self) -> tuple[str, ...]:
        """The columns of the log with item and user, if negatives are drawn; else ()."""
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
        """The columns of each vocabulary, in spec order; those of hashed columns are empty."""
        groups: dict[str, tuple[CategoricalColumn, ...]] = {}
        for column in self.categorical:
            name = column.vocabulary_name
            groups[name] = (*groups.get(name, ()), column)
        return groups
