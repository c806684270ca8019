"""Encode raw rows with a saved workflow into the dense values and ids that a model takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.untraced import make_untraced
from nvt_torchrec.base.versions import import_name
from nvt_torchrec.clicklog.in_memory.event_fields import EventFields
from nvt_torchrec.clicklog.in_memory.frames import read_rows
from nvt_torchrec.clicklog.in_memory.row_fields import DictRows, RowFields, open_rows
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError, add_remedy
from nvt_torchrec.clicklog.in_memory.vector_fields import VectorFields
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.spec_variants import drop_tables
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.formats.vectors import NO_VECTOR
from nvt_torchrec.inference.row_reader import RowReader
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.compiled.encoded_rows import EncodedRows
from nvt_torchrec.workflows.event_state import set_aggregates

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

#: From this number of rows on, reading column by column is faster than row by row: 64 rows of
#: Criteo's columns take 0.6 ms row by row and 1.0 ms by column; 256 rows take 2.3 and 1.8 ms.
MANY_ROWS = 128
#: The most readers that are cached, one for each set of table columns that rows hold themselves.
_MAX_READERS = 16
_NO_COLUMNS: frozenset[str] = frozenset()


class Encoder:
    """Encodes raw rows as the ETL encoded the training rows. Create it with :meth:`load`.

    Thread-safe.

    Attributes:
        workflow: The compiled workflow.
    """

    def __init__(self, workflow: compiled.CompiledWorkflow) -> None:
        self.workflow = workflow
        self._is_loaded = False
        spec = workflow.row_spec
        self._vector_fields = VectorFields(spec.vectors)
        reads = drop_tables(spec).read_plan(label=False).reads
        self._reads = [*reads, *self._vector_fields.reads]
        self._event_fields = EventFields(spec, workflow.histories)
        # Rows may hold columns of tables themselves. Column or vector of a table → the fields from
        # which it is then read.
        self._table_sources: dict[str, set[str]] = {}
        for column in spec.features:
            if column.table:
                self._table_sources[column.name] = {*(column.reading.sources or (column.name,))}
        for vector in spec.vectors:
            self._table_sources[vector.name] = {vector.name}
        # The readers, by the columns of tables that rows hold themselves. functools.cache on
        # _find_reader would create a reference cycle, which keeps this object's files open until
        # the garbage collector runs.
        self._readers = {_NO_COLUMNS: RowReader(spec, workflow.histories)}

    def _find_reader(self, own: frozenset[str]) -> RowReader:
        """Return the reader of rows that themselves hold the columns ``own`` of tables."""
        reader = self._readers.get(own)
        if reader is None:
            reader = RowReader(drop_tables(self.workflow.row_spec, own), self.workflow.histories)
            if len(self._readers) < _MAX_READERS:  # clients may send any number of combinations
                self._readers[own] = reader
        return reader

    @classmethod
    def load(cls, path: Path | str, *, check: bool = False) -> Encoder:
        """Open a saved workflow: ``OUT/workflow``, or ``BUNDLE/workflow``.

        Args:
            path: The workflow's directory.
            check: Compare its arrays with their checksums.

        Raises:
            BadInputError: ``path`` is not a workflow, or a file is missing or damaged.
            SchemaError: Its compiled form belongs to another workflow or another version.
        """
        workflow = compiled.load(path, verify=check)
        encoder = cls(workflow.add_histories(workflow.schema.histories))
        encoder._is_loaded = True
        return encoder

    def __reduce__(self) -> tuple[Callable[..., Encoder], tuple]:
        """Pickle a loaded encoder as the path of its files, which the copy opens again."""
        if not self._is_loaded:
            return type(self), (self.workflow,)
        return _open_again, (self.workflow.path, self.workflow.digest)

    @property
    def spec(self) -> FeatureSpec:
        """The raw columns."""
        return self.workflow.spec

    def encode(self, rows: Any) -> tuple[torch.Tensor, KeyedJaggedTensor]:
        """Encode rows as in the loader's batches, on the CPU.

        Args:
            rows: As in :meth:`inference.predictor.Predictor.predict`, except that a path is not
                accepted.

        Returns:
            Float32 [rows, dense columns]; the ids as a KeyedJaggedTensor, int32, with the
            categorical columns and those of histories as keys.

        Raises:
            SchemaError: A column is missing, or has a type that cannot hold its raw type; or the
                workflow has vectors: call :meth:`encode_with_vectors`.
            InvalidRowError: A column cannot hold a value.
            UnsupportedStackError: TorchRec is not installed.
        """
        jagged_tensor = _import_jagged_tensor()
        if self.workflow.vectors is not None:
            names = ", ".join(vector.name for vector in self.spec.vectors)
            raise SchemaError(
                f"the workflow has vectors ({names}), which encode() does not return",
                "call encode_with_vectors(), which returns (dense, ids, dense_vectors)",
            )
        return self._to_tensors(self.workflow.transform(self.read(rows)), jagged_tensor)

    def encode_with_vectors(
        self, rows: Any
    ) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
        """Encode rows as :meth:`encode` does, and add their vectors.

        The vectors are ``dense_vectors`` of the loader's batches, float32 [rows, sum of (width +
        1)]; without vectors in the workflow, [rows, 0].

        Raises:
            SchemaError, InvalidRowError, UnsupportedStackError: As :meth:`encode`.
            BadInputError: A file of vectors was written to since it was opened.
        """
        jagged_tensor = _import_jagged_tensor()
        encoded = self.workflow.transform(self.read(rows))
        vectors = np.empty((len(encoded), 0), np.float32)
        if self.workflow.vectors is not None:
            vectors = self.workflow.take_vectors(encoded)
        return *self._to_tensors(encoded, jagged_tensor), torch.from_numpy(vectors)

    def _to_tensors(
        self, encoded: EncodedRows, jagged_tensor: type[KeyedJaggedTensor]
    ) -> tuple[torch.Tensor, KeyedJaggedTensor]:
        """Convert encoded rows to the result of :meth:`encode`."""
        sparse = make_untraced(
            jagged_tensor,
            list(self.workflow.row_spec.categorical_names),
            torch.from_numpy(np.concatenate(encoded.ids.columns)),
            lengths=torch.from_numpy(encoded.ids.lengths.reshape(-1)),
            stride=len(encoded),
        )
        return torch.from_numpy(np.ascontiguousarray(encoded.dense.T)), sparse

    def read(self, rows: Any, shared: Mapping[str, Any] | None = None) -> RawRows:
        """Convert rows in memory to typed columns.

        Args:
            rows: The rows, as in :meth:`encode`.
            shared: Fields that all rows share, such as the user of a request whose rows are
                candidates. They are read once. A row's own field takes precedence.
        """
        try:
            workflow = self.workflow
            fields = open_rows(rows, self._reads, shared)
            self._event_fields.check(fields)
            reader = self._find_reader(self._find_own_columns(fields))
            if isinstance(fields, DictRows) and len(rows) < MANY_ROWS and not shared:
                read = reader.read(rows)
            else:
                read = read_rows(fields, reader.spec, workflow.histories, workflow.max_events)
            if workflow.tables is not None:
                read = workflow.tables.join(read, reader.spec)
            if workflow.vectors is not None:
                read = self._add_vectors(read, fields, reader.spec)
            return self._add_aggregates(read, fields)
        except InvalidRowError as error:
            raise add_remedy(error, self.spec) from None

    def _find_own_columns(self, fields: RowFields) -> frozenset[str]:
        """Return the columns of tables that the rows hold themselves."""
        if not self._table_sources:
            return _NO_COLUMNS
        given = fields.names
        return frozenset(name for name, sources in self._table_sources.items() if sources <= given)

    def _add_vectors(self, read: RawRows, fields: RowFields, spec: FeatureSpec) -> RawRows:
        """Add the vectors that rows hold themselves.

        Args:
            read: The rows, with the row numbers of the vectors that were looked up in tables.
            fields: Their fields.
            spec: The spec by which they were read; its vectors are those that were looked up.
        """
        vectors = self.spec.vectors
        numbers = np.full((len(vectors), len(read)), NO_VECTOR, np.int32)
        if read.vector_rows is not None:
            looked_up = [vector.name for vector in spec.vectors]
            for j, vector in enumerate(vectors):
                if vector.name in looked_up:
                    numbers[j] = read.vector_rows[looked_up.index(vector.name)]
        given = self._vector_fields.read(fields)
        return dataclasses.replace(read, vector_rows=numbers, given_vectors=given)

    def _add_aggregates(self, read: RawRows, fields: RowFields) -> RawRows:
        """Add the aggregates: the caller's values, or else those of the workflow's event state."""
        if self.workflow.events is None or read.groups is None:
            return read
        values, is_given = self._event_fields.read_aggregates(fields)
        if not is_given.all():
            stored = self.workflow.events.compute_aggregates(read.groups, read.times)
            values = np.where(is_given, values, stored) if is_given.any() else stored
        return set_aggregates(read, self.spec, values)


def _import_jagged_tensor() -> type[KeyedJaggedTensor]:
    """Import TorchRec's KeyedJaggedTensor. Raises UnsupportedStackError if it is not installed."""
    return import_name("torchrec.sparse.jagged_tensor", "KeyedJaggedTensor")


def _open_again(path: Path, digest: str) -> Encoder:
    encoder = Encoder.load(path)
    check_same_digest(digest, encoder.workflow.digest, path)
    return encoder


def check_same_digest(before: str, now: str, path: Path) -> None:
    """Check that a copy, as in another process, opens the same files as the original.

    Raises:
        SchemaError: The files have been replaced since.
    """
    if before != now:
        raise SchemaError(
            f"{path}: replaced since it was opened: digest {now:.12}… instead of {before:.12}…",
            "open it again, and pass the new object to the other process",
        )
