"""Transform rows with a compiled workflow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import string_parts
from nvt_torchrec.base.files.mapping import MappedArray
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID, NULL_ID
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.flat_columns import FlatColumns
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.ids import Ids
from nvt_torchrec.formats.rows import (
    WORD_BITS,
    CategoryValues,
    Jagged,
    RawRows,
    get_bit,
    get_flat_values,
    get_word,
)
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.vectors import VectorStores
from nvt_torchrec.workflows.compiled import flat_tables, tables, text_tables
from nvt_torchrec.workflows.compiled.dense import DensePlan
from nvt_torchrec.workflows.compiled.encoded_rows import EncodedRows
from nvt_torchrec.workflows.event_state import EventState
from nvt_torchrec.workflows.stored_table import StoredTable
from nvt_torchrec.workflows.stored_tables import StoredTables
from nvt_torchrec.workflows.vector_stores import gather_vectors

#: Events of a history that are looked up for a row, unless a model takes another number.
MAX_EVENTS = 50
_NO_BITS = np.empty(0, np.uint64)


@dataclasses.dataclass(frozen=True)
class CompiledWorkflow:
    """A fitted workflow without NVTabular: the same ids, the same float32.

    Attributes:
        spec: The columns.
        schema: The schema of its output.
        digest: The digest of the workflow it was compiled from; see :mod:`workflows.description`.
        path: The directory of the workflow, without symbolic links.
        events: The event state as of the last day of the ETL; None for a spec without events.
        tables: The tables that columns are joined from; None for a spec without tables.
        vectors: The vectors of these tables; None for a spec without vectors.
        row_spec: The columns of rows in memory: those of ``spec``, and the list columns that
            :meth:`add_histories` adds.
        histories: The histories whose list columns ``row_spec`` has.
        max_events: The maximum number of events of a history.
    """

    spec: FeatureSpec
    schema: TableSchema
    digest: str
    path: Path
    events: EventState | None
    _dense: DensePlan
    _words: np.ndarray
    _text: np.ndarray
    _text_begins: np.ndarray
    _regions: np.ndarray
    _mapped: tuple[MappedArray, ...]
    row_spec: FeatureSpec
    tables: StoredTables | None = None
    vectors: VectorStores | None = None
    histories: tuple[StoredHistory, ...] = ()
    max_events: int = MAX_EVENTS
    _table_ids: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def optional(self) -> tuple[str, ...]:
        """The columns of :attr:`row_spec` that rows may lack: the lists of histories."""
        return tuple(self.row_spec.categorical_names[len(self.spec.categorical) :])

    def add_histories(
        self, histories: Sequence[StoredHistory], maximum: int = MAX_EVENTS
    ) -> CompiledWorkflow:
        """Return the workflow with a list column for each column of the given histories.

        Callers may pass these lists with a row. For other rows, the newest ``maximum`` events of
        the event state are used.
        """
        categorical = list(self.spec.categorical)
        indices = list(range(len(categorical)))
        for history in histories:
            for name, feature in zip(history.columns, history.features, strict=True):
                index = self.spec.categorical_names.index(name)
                column = self.spec.categorical[index]
                indices.append(index)
                categorical.append(
                    dataclasses.replace(
                        column,
                        name=feature,
                        multi_hot=True,
                        vocabulary=column.vocabulary_name,
                        derive=None,
                        table="",
                        reading=dataclasses.replace(column.reading, sources=(feature,)),
                    )
                )
        return dataclasses.replace(
            self,
            row_spec=dataclasses.replace(self.spec, categorical=tuple(categorical)),
            histories=tuple(histories),
            max_events=maximum,
            _regions=self._regions[indices],
        )

    def transform(self, rows: RawRows) -> EncodedRows:
        """Encode rows that were read with this spec.

        Thread-safe; holds the interpreter lock for a few µs for each column. Except for lists and
        strings, only the result is allocated. Rows without aggregates get those of ``events``, and
        rows without the columns of tables get those of ``tables``; the ETL has added both before.

        Raises:
            BadInputError: A file of the compiled workflow was written to since it was opened.
        """
        self._check()
        if self.tables is not None:
            rows = self.tables.join(rows, self.spec)  # returns rows of the ETL unchanged
        if self.events is not None and rows.groups is not None and not rows.has_aggregates:
            rows = self.events.add_aggregates(rows)
        dense = np.empty((len(self.spec.dense), len(rows)), np.float32)
        self._dense.transform(rows.dense, rows.dense_missing, dense)
        tallies = np.zeros((len(self._regions), 2), np.int64)
        ids = self._encode_categories(rows, tallies)
        if self.events is not None and rows.groups is not None and self.histories:
            sizes = dict(zip(self.schema.categorical, self.schema.table_sizes, strict=True))
            ids = self.events.add_histories(
                ids, rows.groups, self.histories, sizes, self.max_events, rows.times
            )
        return EncodedRows(
            labels=rows.labels.astype(np.float32),
            dense=dense,
            ids=ids,
            null=tallies[: len(self.spec.categorical), 0],
            oov=tallies[: len(self.spec.categorical), 1],
            weight=rows.weight,
            log_q_correction=rows.log_q_correction,
            pointers=rows.pointers,
            vector_rows=rows.vector_rows,
            given_vectors=rows.given_vectors,
        )

    def take_vectors(self, rows: EncodedRows) -> np.ndarray:
        """Return ``dense_vectors`` of rows; see :func:`workflows.vector_stores.gather_vectors`."""
        assert self.vectors is not None
        assert rows.vector_rows is not None
        return gather_vectors(self.vectors, rows.vector_rows, rows.given_vectors)

    def _check(self) -> None:
        for array in self._mapped:
            array.check()

    def get_host_arrays(self) -> tuple[np.ndarray, np.ndarray, DensePlan]:
        """Return the arrays that the transform reads, to be copied to a GPU.

        Returns:
            All hash tables, uint64; the region of each column's table, int64 [columns, fields]; the
            plan of the dense transform.

        Raises:
            BadInputError: A file of the compiled workflow was written to since it was opened.
        """
        self._check()
        return self._words, self._regions, self._dense

    def find(self, column: str, values: np.ndarray | pa.StringArray) -> np.ndarray:
        """Return the index of each value in the vocabulary of a categorical column, int64 [n].

        The first value has index 0, out-of-vocabulary values have index -1.

        Args:
            column: The name of a column.
            values: int64 [n] (raw hex32 and int), or a string array without nulls.

        Raises:
            BadInputError: A file of the compiled workflow was written to since it was opened.
        """
        ids = self.encode_values(column, values)
        reserved = self.spec.categorical[self.spec.categorical_names.index(column)].reserved_ids
        return np.maximum(ids.astype(np.int64) - reserved, -1)

    def encode_values(self, column: str, values: np.ndarray | pa.StringArray) -> np.ndarray:
        """Return the ids of values of a categorical column, int32 [n]; see :meth:`find`."""
        self._check()
        j = self.spec.categorical_names.index(column)
        described = self.spec.categorical[j]
        cells = values
        if isinstance(values, np.ndarray):
            cells = values.astype(RAW_TYPES[described.raw].dtype)
        ids = np.empty(len(cells), np.int32)
        self._encode(j, cells, _NO_BITS, ids, np.zeros(2, np.int64))
        return ids

    def _encode_categories(self, rows: RawRows, tallies: np.ndarray) -> Ids:
        """Return the ids of the categorical columns.

        Args:
            rows: The rows.
            tallies: int64 [columns, 2], to which the numbers of null and out-of-vocabulary ids are
                added.
        """
        missing = rows.categorical_missing
        if isinstance(rows.categorical, np.ndarray):
            ids = Ids(np.empty(rows.categorical.shape, np.int32))
            for word, begin in zip(missing, range(0, len(ids.values), WORD_BITS), strict=False):
                columns = slice(begin, begin + WORD_BITS)
                tables.encode_hex(
                    rows.categorical[columns],
                    word,
                    0,
                    self._words,
                    self._regions[columns],
                    ids.values[columns],
                    tallies[columns],
                )
            return ids
        if isinstance(rows.categorical, FlatColumns) and len(rows.categorical) == len(tallies):
            lookup = self._words, self._regions, self._text_begins, self._text
            return flat_tables.encode_columns(rows.categorical, missing, *lookup, tallies)
        # Rows that were read for a workflow with histories have more columns.
        own_columns = rows.categorical[: len(tallies)]
        return self._encode_columns(own_columns, missing, tallies, rows.table_rows)

    def _encode_columns(
        self,
        columns: Sequence[CategoryValues],
        missing: np.ndarray,
        tallies: np.ndarray,
        table_rows: np.ndarray | None = None,
    ) -> Ids:
        rows = missing.shape[1]
        columns = [*columns]
        ids_from_tables = {}
        if table_rows is not None:
            ids_from_tables = self._look_up_ids(table_rows, tallies)
            for j, column_ids in ids_from_tables.items():
                columns[j] = column_ids
        ids = np.empty(sum(len(get_flat_values(values)) for values in columns), np.int32)
        offsets = None
        if any(isinstance(values, Jagged) for values in columns):
            offsets = np.empty((len(columns), rows + 1), np.int32)
        one_each = np.arange(rows + 1)
        end = 0
        for j, values in enumerate(columns):
            flat = get_flat_values(values)
            begin, end = end, end + len(flat)
            if offsets is not None:
                offsets[j] = values.offsets if isinstance(values, Jagged) else one_each
                offsets[j] += begin
            if j in ids_from_tables:
                ids[begin:end] = flat
                continue
            absent = get_word(missing, j)
            if isinstance(values, Jagged):  # a missing list stays empty, and does not get id 1
                tallies[j, 0] = np.count_nonzero(absent >> get_bit(j) & np.uint64(1))
                absent = _NO_BITS
            self._encode(j, flat, absent, ids[begin:end], tallies[j])
        return Ids(ids if offsets is not None else ids.reshape(len(columns), rows), offsets)

    def _look_up_ids(self, table_rows: np.ndarray, tallies: np.ndarray) -> dict[int, Any]:
        """Return the ids of table columns, by index of the column: int32 [n], or lists of int32.

        Args:
            table_rows: See :class:`RawRows`.
            tallies: int64 [columns, 2], into which the numbers of null ids and out-of-vocabulary
                ids of these columns are written.
        """
        assert self.tables is not None
        numbers = {rule.name: i for i, rule in enumerate(self.spec.joined_tables)}
        found: dict[int, Any] = {}
        for j, column in enumerate(self.spec.categorical):
            if not column.table:
                continue
            table = self.tables.by_name[column.table]
            rows = table_rows[numbers[column.table]]
            bounds = NULL_ID, FIRST_OOV_ID, column.reserved_ids
            ids_by_code = self._encode_distinct(j, column, table)
            tallies[j] = 0
            found[j] = table.encode(column.name, rows, ids_by_code, bounds, tallies[j])
        return found

    def _encode_distinct(self, j: int, column: CategoricalColumn, table: StoredTable) -> np.ndarray:
        """Return the ids of the distinct values of a table's column, int32, from a cache."""
        if j not in self._table_ids:  # two threads may both compute them, which does no harm
            self._table_ids[j] = self.encode_values(column.name, table.list_distinct(column.name))
        return self._table_ids[j]

    def _encode(
        self,
        j: int,
        values: np.ndarray | pa.StringArray,
        missing: np.ndarray,
        ids: np.ndarray,
        tally: np.ndarray,
    ) -> None:
        """Write the ids of values to ``ids``; add null and out-of-vocabulary ones to ``tally``."""
        region = self._regions[j]
        bit = int(get_bit(j))
        if not isinstance(values, np.ndarray):
            begins, data = string_parts(values)
            texts = self._text_begins, self._text
            text_tables.encode_text(
                begins, data, missing, bit, self._words, region, *texts, ids, tally
            )
        elif values.dtype == np.int64:
            tables.encode_int(values, missing, bit, self._words, region, ids, tally)
        else:
            tables.encode_hex(
                values[None], missing, bit, self._words, region[None], ids[None], tally[None]
            )
