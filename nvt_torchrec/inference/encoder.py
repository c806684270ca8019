"""A saved workflow that turns raw rows into what a model takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvt_torchrec.base.versions import import_name
from nvt_torchrec.clicklog.in_memory.event_fields import EventFields
from nvt_torchrec.clicklog.in_memory.frames import read_rows
from nvt_torchrec.clicklog.in_memory.row_fields import RowFields, open_rows
from nvt_torchrec.clicklog.in_memory.value_errors import (
    NOT_A_LIST,
    InvalidRowError,
    add_remedy,
    no_such_key,
)
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.base import EMPTY_ITEM, MESSAGES, is_missing
from nvt_torchrec.formats.feature_spec.read_plan import AS_IT_IS
from nvt_torchrec.formats.rows import CategoryValues, Jagged, RawRows, dense_dtype, mask_of_rows
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.event_state import add_aggregates

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

#: From this number of rows on, reading column by column is faster than row by row: 64 rows of
#: Criteo's columns take 0.6 ms row by row and 1.0 ms by column, 256 rows 2.3 and 1.8.
MANY_ROWS = 128


class Encoder:
    """Encodes raw rows as the ETL encoded those for the training. Made by :meth:`load`.

    Thread-safe.

    Attributes:
        workflow: The compiled workflow.
    """

    def __init__(self, workflow: compiled.CompiledWorkflow) -> None:
        self.workflow = workflow
        spec = workflow.row_spec
        self._reader = RowReader(spec) if reads_plainly(spec) else None
        self._reads = spec.read_plan(label=False).reads
        self._is_flat = not any("." in read.source for read in self._reads)
        self._event_fields = EventFields(spec, workflow.histories)

    @classmethod
    def load(cls, path: Path | str, *, check: bool = False) -> Encoder:
        """Open a saved workflow: ``OUT/workflow``, or ``BUNDLE/workflow``.

        Args:
            path: Its directory.
            check: Compare its arrays with their checksums.

        Raises:
            BadInputError: There is no workflow, or a file is missing or damaged.
            SchemaError: Its compiled form is another workflow's, or another version's.
        """
        workflow = compiled.load(path, verify=check)
        return cls(workflow.take_histories(workflow.schema.histories))

    @property
    def spec(self) -> FeatureSpec:
        """The raw columns."""
        return self.workflow.spec

    def encode(self, rows: Any) -> tuple[torch.Tensor, KeyedJaggedTensor]:
        """Return what the loader's batches hold of the same rows, on the CPU.

        Args:
            rows: As in :meth:`inference.predictor.Predictor.predict`, but no path.

        Returns:
            Float32 [rows, dense columns]; the ids as a KeyedJaggedTensor, int32, with the
            categorical columns and those of histories as keys.

        Raises:
            SchemaError: A column is missing, or has a type that cannot hold its raw type.
            InvalidRowError: A column cannot hold a value.
            UnsupportedStackError: TorchRec is not installed.
        """
        jagged_tensor = import_name("torchrec.sparse.jagged_tensor", "KeyedJaggedTensor")
        encoded = self.workflow.transform(self.read(rows))
        sparse = jagged_tensor(
            list(self.workflow.row_spec.categorical_names),
            torch.from_numpy(np.concatenate(encoded.ids.columns)),
            lengths=torch.from_numpy(encoded.ids.lengths.reshape(-1)),
            stride=len(encoded),
        )
        return torch.from_numpy(np.ascontiguousarray(encoded.dense.T)), sparse

    def read(self, rows: Any, shared: Mapping[str, Any] | None = None) -> RawRows:
        """Convert rows in memory to typed columns; see :meth:`encode`.

        Args:
            rows: The rows.
            shared: Fields of all rows that have none of their own, such as the user of a request,
                whose rows are candidates. They are read once.
        """
        try:
            if self._reader is not None and self._is_flat and not shared and is_few_dicts(rows):
                return self._reader.read(rows)
            workflow, fields = self.workflow, open_rows(rows, self._reads, shared)
            self._event_fields.check(fields)
            read = read_rows(fields, workflow.row_spec, workflow.histories, workflow.most_events)
            return self._add_aggregates(read, fields)
        except InvalidRowError as error:
            raise add_remedy(error, self.spec) from None

    def _add_aggregates(self, read: RawRows, fields: RowFields) -> RawRows:
        """Add the aggregates to rows that were read: those of the caller, else the state's."""
        if self.workflow.events is None or read.groups is None:
            return read
        values = self.workflow.events.values(read.groups, read.times)
        given = self._event_fields.read_aggregates(fields)
        for j, column in enumerate(self.spec.aggregates):
            if column.name in given:
                numbers, there = given[column.name]
                values[j] = np.where(there, numbers, values[j])
        return add_aggregates(read, self.spec, values)


def is_few_dicts(rows: Any) -> bool:
    """Return whether rows are so few dicts that reading them row by row is faster."""
    are_rows = isinstance(rows, list | tuple) and len(rows) < MANY_ROWS
    return are_rows and all(isinstance(row, Mapping) for row in rows)


def _list_parser(parse_item: Callable[[Any], Any]) -> Callable[[Any], list | None]:
    def parse(value: Any) -> list | None:
        if is_missing(value):
            return None
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise ValueError(NOT_A_LIST)
        items = [parse_item(item) for item in value]
        if None in items:
            raise ValueError(MESSAGES[EMPTY_ITEM])
        return items or None

    return parse


def reads_plainly(spec: FeatureSpec) -> bool:
    """Whether each column is one source, read without rules, as :class:`RowReader` reads it."""
    return (
        not spec.events
        and spec.input.decimal == "."
        and all(
            column.derive is None and dataclasses.replace(column.reading, sources=()) == AS_IT_IS
            for column in spec.features
        )
    )


class RowReader:
    """Reads rows that are dicts, with parsers that are made once for a spec that reads plainly.

    Made for few rows, as in JSON: one loop over the fields of a row, instead of an array per
    column.
    """

    def __init__(self, spec: FeatureSpec) -> None:
        self._columns, self._is_hex = spec.categorical, spec.is_criteo_format
        self._dtype = dense_dtype(spec)
        self._dense = [_field(j, column) for j, column in enumerate(spec.dense)]
        self._categorical = [_field(j, column) for j, column in enumerate(spec.categorical)]

    def read(self, rows: Sequence[Mapping[str, Any]]) -> RawRows:
        """Return typed columns of the rows; ignore further keys, such as the label.

        Raises:
            MissingColumnError: A row lacks a column.
            InvalidRowError: A column cannot hold a value.
        """
        count, width = len(rows), len(self._columns)
        dense, dense_missing = self._fields(rows, self._dense)
        flat, missing = self._fields(rows, self._categorical)
        categorical: np.ndarray | list[CategoryValues]
        if self._is_hex:
            categorical = np.array(flat, np.uint32).reshape(count, width).T
        else:
            categorical = [
                category_values(flat[j::width], column.raw, multi_hot=column.multi_hot)
                for j, column in enumerate(self._columns)
            ]
        return RawRows(
            labels=np.empty((0, count), np.uint8),
            dense=np.array(dense, self._dtype).reshape(count, len(self._dense)).T,
            dense_missing=mask_of_rows(dense_missing, len(self._dense)),
            categorical=categorical,
            categorical_missing=mask_of_rows(missing, width),
            line=np.arange(count),
            lines=count,
        )

    @staticmethod
    def _fields(rows: Sequence[Mapping[str, Any]], columns: list) -> tuple[list, list[int]]:
        """Return the values row by row, and for each row the bits of the missing ones."""
        values: list[Any] = []
        missing = []
        append = values.append
        for index, row in enumerate(rows):
            bits = 0
            for name, parse, bit, placeholder in columns:
                try:
                    value = parse(row[name])
                except KeyError:
                    raise no_such_key(index, name) from None
                except ValueError as error:
                    raise InvalidRowError(index, name, f"{row[name]!r:.60}: {error}") from None
                if value is None:
                    bits |= bit
                    value = placeholder
                append(value)
            missing.append(bits)
        return values, missing


def _field(j: int, column: DenseColumn | CategoricalColumn) -> tuple[str, Callable, int, Any]:
    """Return source, parser, bit and placeholder of a column."""
    (source,) = column.reading.sources or (column.name,)
    multi_hot = getattr(column, "multi_hot", False)
    placeholder = () if multi_hot else RAW_TYPES[column.raw].placeholder
    parse = RAW_TYPES[column.raw].from_python
    return source, _list_parser(parse) if multi_hot else parse, 1 << j, placeholder


def category_values(values: list, raw: str, *, multi_hot: bool) -> CategoryValues:
    """Convert parsed values to an array, or lists to :class:`Jagged`."""
    if multi_hot:
        offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
        items = [item for value in values for item in value]
        return Jagged(offsets, category_values(items, raw, multi_hot=False))
    return RAW_TYPES[raw].array(values)
