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

#: Events of a history that are looked up, where no model says how many it takes.
MAX_EVENTS = 50
_NO_BITS = np.empty(0, np.uint64)


@dataclasses.dataclass(frozen=True)
class CompiledWorkflow:
    """A fitted workflow without NVTabular: the same ids, the same float32.

    Attributes:
        spec: The columns.
        schema: Of the data it writes.
        digest: Of the workflow it was compiled from; see :mod:`workflows.description`.
        path: The directory of the workflow, without symbolic links.
        events: What happened before, as of the last day of the ETL; None for a spec without events.
        tables: The tables that columns are joined from; None for a spec without.
        vectors: The vectors that rows find in them; None for a spec without.
        row_spec: The columns of rows in memory: also lists of the values of histories, which a
            caller may give (:meth:`take_histories`).
        histories: The histories whose lists ``row_spec`` has.
        max_events: How many events of a history are taken at most.
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
    _places: np.ndarray
    _mapped: tuple[MappedArray, ...]
    row_spec: FeatureSpec
    tables: StoredTables | None = None
    vectors: VectorStores | None = None
    histories: tuple[StoredHistory, ...] = ()
    max_events: int = MAX_EVENTS
    _table_ids: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def optional(self) -> tuple[str, ...]:
        """The columns of :attr:`row_spec` that rows need not have."""
        return tuple(self.row_spec.categorical_names[len(self.spec.categorical) :])

    def take_histories(
        self, histories: Sequence[StoredHistory], maximum: int = MAX_EVENTS
    ) -> CompiledWorkflow:
        """Return the workflow that encodes lists of the values of histories as well.

        Where a row has none, the newest ``maximum`` events of ``events`` take their place.
        """
        shared = [name for history in histories for name in history.columns]
        places = [self.spec.categorical_names.index(name) for name in shared]
        names = [name for history in histories for name in history.features]
        columns = [self.spec.categorical[place] for place in places]
        lists = [
            dataclasses.replace(
                column, name=name, multi_hot=True, vocabulary=column.vocabulary_name,
                derive=None, table="",
                reading=dataclasses.replace(column.reading, sources=(name,)),
            )
            for name, column in zip(names, columns, strict=True)
        ]  # fmt: skip
        categorical = (*self.spec.categorical, *lists)
        return dataclasses.replace(
            self,
            row_spec=dataclasses.replace(self.spec, categorical=categorical),
            histories=tuple(histories),
            max_events=maximum,
            _places=self._places[[*range(len(self.spec.categorical)), *places]],
        )

    def transform(self, rows: RawRows) -> EncodedRows:
        """Encode rows that were read with this spec.

        Thread-safe; holds the interpreter lock for a few µs a column. Except for lists and strings,
        only the result is allocated. Rows whose aggregates were not added, as the ETL does, get
        those of ``events``, and rows without the columns of tables get these.

        Raises:
            BadInputError: A file of the compiled workflow was written to since it was opened.
        """
        self._check()
        if self.tables is not None:
            rows = self.tables.join(rows, self.spec)  # unless the ETL has looked them up
        if self.events is not None and rows.groups is not None and not rows.has_aggregates:
            rows = self.events.add(rows)
        dense = np.empty((len(self.spec.dense), len(rows)), np.float32)
        self._dense.transform(rows.dense, rows.dense_missing, dense)
        tallies = np.zeros((len(self._places), 2), np.int64)
        missing = rows.categorical_missing
        if isinstance(rows.categorical, np.ndarray):
            ids = Ids(np.empty(rows.categorical.shape, np.int32))
            for word, begin in zip(missing, range(0, len(ids.values), WORD_BITS), strict=False):
                columns = slice(begin, begin + WORD_BITS)
                tables.encode_hex(
                    rows.categorical[columns], word, 0, self._words, self._places[columns],
                    ids.values[columns], tallies[columns],
                )  # fmt: skip
        elif isinstance(rows.categorical, FlatColumns) and len(rows.categorical) == len(tallies):
            lookup = self._words, self._places, self._text_begins, self._text
            ids = flat_tables.encode_columns(rows.categorical, missing, *lookup, tallies)
        else:
            known = rows.categorical[: len(tallies)]  # others were read for another workflow
            ids = self._encode_columns(known, missing, tallies, rows.table_rows)
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
        """Return ``dense_vectors`` of rows, see :func:`workflows.vector_stores.gather_vectors`."""
        assert self.vectors is not None
        assert rows.vector_rows is not None
        return gather_vectors(self.vectors, rows.vector_rows, rows.given_vectors)

    def _check(self) -> None:
        for array in self._mapped:
            array.check()

    def host_arrays(self) -> tuple[np.ndarray, np.ndarray, DensePlan]:
        """Return what the transform reads, for a copy of it on a card.

        Returns:
            All hash tables; the place of each column's table, int64 [columns, fields]; the plan of
            the dense transform.

        Raises:
            BadInputError: A file of the compiled workflow was written to since it was opened.
        """
        self._check()
        return self._words, self._places, self._dense

    def find(self, column: str, values: np.ndarray | pa.StringArray) -> np.ndarray:
        """Return the place of values in the vocabulary of a categorical column: int64 [n].

        The first value has place 0; values out of the vocabulary have place -1.

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

    def _encode_columns(
        self,
        columns: Sequence[CategoryValues],
        missing: np.ndarray,
        tallies: np.ndarray,
        table_rows: np.ndarray | None = None,
    ) -> Ids:
        rows, end = missing.shape[1], 0
        columns = [*columns]
        of_tables = {}
        if table_rows is not None:
            of_tables = self._look_up_ids(table_rows, tallies)
            for j, looked_up in of_tables.items():
                columns[j] = looked_up
        ids = np.empty(sum(len(get_flat_values(values)) for values in columns), np.int32)
        each, offsets = np.arange(rows + 1), None
        if any(isinstance(values, Jagged) for values in columns):
            offsets = np.empty((len(columns), rows + 1), np.int32)
        for j, values in enumerate(columns):
            flat, absent, tally = get_flat_values(values), get_word(missing, j), tallies[j]
            begin, end = end, end + len(flat)
            if offsets is not None:
                offsets[j] = values.offsets if isinstance(values, Jagged) else each
                offsets[j] += begin
            if j in of_tables:
                ids[begin:end] = flat
                continue
            if isinstance(values, Jagged):  # a missing list is empty, and not the id 1
                tally[0] = np.count_nonzero(absent >> get_bit(j) & np.uint64(1))
                absent = _NO_BITS
            self._encode(j, flat, absent, ids[begin:end], tally)
        return Ids(ids if offsets is not None else ids.reshape(len(columns), rows), offsets)

    def _look_up_ids(self, table_rows: np.ndarray, tallies: np.ndarray) -> dict[int, Any]:
        """Return the ids of the columns of tables, by their index: int32 [n], or lists of them.

        Args:
            table_rows: See :class:`RawRows`.
            tallies: Gets the numbers of null ids and of those out of vocabulary.
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
        """Return the ids of the distinct values of a column of a table, int32; they are kept."""
        if j not in self._table_ids:  # threads may compute it twice
            self._table_ids[j] = self.encode_values(column.name, table.distinct(column.name))
        return self._table_ids[j]

    def _encode(
        self,
        j: int,
        values: np.ndarray | pa.StringArray,
        missing: np.ndarray,
        ids: np.ndarray,
        tally: np.ndarray,
    ) -> None:
        """Write the ids of values to ``ids``, and add the null and unknown ones to ``tally``."""
        place, bit = self._places[j], int(get_bit(j))
        if not isinstance(values, np.ndarray):
            begins, data = string_parts(values)
            texts = self._text_begins, self._text
            text_tables.encode_text(
                begins, data, missing, bit, self._words, place, *texts, ids, tally
            )
        elif values.dtype == np.int64:
            tables.encode_int(values, missing, bit, self._words, place, ids, tally)
        else:
            tables.encode_hex(
                values[None], missing, bit, self._words, place[None], ids[None], tally[None]
            )
