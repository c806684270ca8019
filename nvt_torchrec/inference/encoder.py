"""A saved workflow that turns raw rows into what a model takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.versions import import_name
from nvt_torchrec.clicklog.in_memory.frames import read_aggregates, read_columns, read_dicts
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError, add_remedy
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.inference.row_reader import RowReader
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
        self._reader = RowReader(spec)
        self._nested = [name for name in spec.sources(label=False) if "." in name]
        self._lists: dict[str, set[str]] = {}  # by history, its columns
        for history, _, column in (name.partition(".") for name in workflow.optional):
            self._lists.setdefault(history, set()).add(column)

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

    def read(self, rows: Any) -> RawRows:
        """Convert rows in memory to typed columns; see :meth:`encode`."""
        are_dicts = isinstance(rows, list | tuple) and all(isinstance(row, Mapping) for row in rows)
        spec, optional = self.workflow.row_spec, self.workflow.optional
        try:
            if not are_dicts:
                return self._add_events(read_columns(rows, spec, optional), rows)
            if self._nested:
                rows = [self._flatten(index, row) for index, row in enumerate(rows)]
            few = len(rows) < MANY_ROWS
            read = self._reader.read(rows) if few else read_dicts(rows, spec)
            return self._add_events(read, rows)
        except InvalidRowError as error:
            raise add_remedy(error, self.spec) from None

    def _flatten(self, index: int, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row with the fields of objects beside them, and null where lists may lack."""
        for name, columns in self._lists.items():
            given = row.get(name)
            if given is not None and not (isinstance(given, Mapping) and given.keys() <= columns):
                what = f"{given!r:.60}: expected an object of lists: {', '.join(sorted(columns))}"
                raise InvalidRowError(index, name, what, f'pass {{"{min(columns)}": […]}}')
        nested = {name: row.get(name.partition(".")[0]) for name in self._nested}
        fields = {
            name: find_field(row, name) for name in nested if isinstance(nested[name], Mapping)
        }
        return {**dict.fromkeys(self.workflow.optional), **row, **fields}

    def _add_events(self, read: RawRows, rows: Any) -> RawRows:
        """Add the aggregates to rows that were read: those of the caller, else the state's."""
        if self.workflow.events is None or read.groups is None:
            return read
        values = self.workflow.events.values(read.groups)
        if isinstance(rows, list | tuple):
            given = {c.name for c in self.spec.aggregates if any(c.name in row for row in rows)}
            columns = {name: [row.get(name) for row in rows] for name in given}
            there = {name: np.array([name in row for row in rows]) for name in given}
        else:
            columns, there = rows, {}
        numbers = read_aggregates(columns, self.spec)
        for j, column in enumerate(self.spec.aggregates):
            if column.name in numbers:
                mask = there.get(column.name, True)
                values[j] = np.where(mask, numbers[column.name], values[j])
        return add_aggregates(read, self.spec, values)


def share_fields(rows: Any, shared: Mapping[str, Any]) -> Any:
    """Return rows, as dicts or as columns, with fields that all share; what rows have stays.

    ``shared`` is like a row: the user of a request with its history, whose rows are candidates.

    Raises:
        SchemaError: The rows are of another kind.
    """
    if isinstance(rows, Mapping):
        count, flat = max(map(len, rows.values()), default=0), dict[str, Any]()
        for name, value in shared.items():
            nested = isinstance(value, Mapping)
            flat |= {f"{name}.{key}": v for key, v in value.items()} if nested else {name: value}
        return {name: [value] * count for name, value in flat.items()} | {**rows}
    if isinstance(rows, list | tuple) and all(isinstance(row, Mapping) for row in rows):
        return [{**shared, **row} for row in rows]
    raise SchemaError(
        f"shared fields for rows of type {type(rows).__name__}",
        "pass rows as a list of dicts or a dict of arrays, or give the frame these columns",
    )


def find_field(row: Mapping[str, Any], name: str) -> Any:
    """Return a field of a row, or ``OBJECT.FIELD`` of an object in it; None without one."""
    outer, _, inner = name.partition(".")
    nested = row.get(outer)
    return row.get(name, nested.get(inner) if isinstance(nested, Mapping) else None)
