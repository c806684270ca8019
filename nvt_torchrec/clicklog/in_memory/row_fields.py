"""Access to the fields of rows in memory by name, whatever form the rows have.

Rows are dicts, or columns: a frame, a table, a dict of arrays or lists. A field ``OBJECT.FIELD``
may be in an object of the row. All rows may share fields, which are read only once.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import check_valid, mask_to_arrow, to_arrow
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.clicklog.in_memory.python_values import times_to_arrow
from nvt_torchrec.clicklog.in_memory.value_errors import (
    InvalidRowError,
    MissingColumnError,
    make_missing_key_error,
)
from nvt_torchrec.clicklog.text.convert import to_fields
from nvt_torchrec.clicklog.text.remedies import suggest_column
from nvt_torchrec.formats.feature_spec.raw_types.base import is_missing
from nvt_torchrec.formats.feature_spec.read_plan import Read


@dataclasses.dataclass(frozen=True)
class RowField:
    """A field of ``n`` rows.

    Attributes:
        values: The distinct values [m], or one value for each row.
        index: int64 [n], the index of each row's value, -1 for rows without the field. None if
            there is a value for each row.
    """

    values: pa.Array | list
    index: np.ndarray | None = None

    @property
    def lacks(self) -> np.ndarray:
        """The indices of the rows without the field."""
        if self.index is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.index < 0)

    def fill(self) -> RowField:
        """Return the field with the value None in rows that lack it."""
        if self.index is None or not len(self.lacks):
            return self
        assert isinstance(self.values, list)  # in columns, either all rows have a field, or none
        index = np.where(self.index < 0, len(self.values), self.index)
        return RowField([*self.values, None], index)

    def get_row(self, position: int) -> int:
        """Return the first row with the value at a position in ``values``."""
        return position if self.index is None else int(np.argmax(self.index == position))


class RowFields(abc.ABC):
    """The fields of rows.

    Attributes:
        rows: The number of rows.
        shared: The fields of all rows that do not have them themselves.
        has_text: Whether texts are parsed like fields of a text file, whatever the raw type, as in
            frames.
    """

    rows: int
    shared: Mapping[str, Any]
    has_text = False

    @property
    @abc.abstractmethod
    def row_names(self) -> set[str]:
        """The names of all fields of the rows themselves, without shared fields."""

    @abc.abstractmethod
    def _find_own(self, name: str) -> RowField | None:
        """Return a field of the rows themselves; None if no row has it."""

    @abc.abstractmethod
    def missing(self, names: Sequence[str]) -> MissingColumnError:
        """Return the error about fields that a row lacks."""

    @property
    def names(self) -> set[str]:
        """The names of all fields."""
        return self.row_names | self.shared.keys()

    def find(self, name: str) -> RowField | None:
        """Return a field, preferring the row's own over the shared one; None if no row has it.

        Args:
            name: The name of the field, or ``OBJECT.FIELD``.

        Raises:
            SchemaError: The field is not a valid column.
            InvalidRowError: The OBJECT of a row is not an object.
        """
        own = self._find_own(name)
        if own is not None and (own.index is None or not len(own.lacks)):
            return own
        outer, _, inner = name.partition(".")
        if name in self.shared:
            value = self.shared[name]
        elif inner and outer in self.shared:
            value = get_inner(self.shared[outer], outer, inner, row=0)
        else:
            return own
        if own is None:
            return RowField([value], np.zeros(self.rows, np.int64))
        return dataclasses.replace(own.fill(), values=[*own.values, value])

    def error(self, name: str, reason: str, remedy: str) -> InvalidRowError | SchemaError:
        """Return the error about a field that is not allowed; it names the first row with it."""
        field = self.find(name)
        if isinstance(self, DictRows) and name not in self.shared and field is not None:
            row = 0 if field.index is None else int(np.argmax(field.index >= 0))
            return InvalidRowError(row, name, reason, remedy)
        return SchemaError(f"column {name}: {reason}", remedy)


class DictRows(RowFields):
    """Rows that are dicts."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], shared: Mapping[str, Any]) -> None:
        self._rows = rows
        self.shared = shared
        self.rows = len(rows)

    @functools.cached_property
    def row_names(self) -> set[str]:
        """See :attr:`RowFields.row_names`."""
        return set().union(*self._rows)

    def _find_own(self, name: str) -> RowField | None:
        try:  # usually all rows have the field
            return RowField([row[name] for row in self._rows])
        except KeyError:
            pass
        outer, _, inner = name.partition(".")
        values: list[Any] = []
        index = np.full(self.rows, -1)
        for i, row in enumerate(self._rows):
            if name in row:
                value = row[name]
            elif inner and outer in row:
                value = get_inner(row[outer], outer, inner, row=i)
            else:
                continue
            index[i] = len(values)
            values.append(value)
        return RowField(values, index) if values else None

    def missing(self, names: Sequence[str]) -> MissingColumnError:
        """See :meth:`RowFields.missing`."""
        field = self.find(names[0])
        return make_missing_key_error(0 if field is None else int(field.lacks[0]), names[0])


class ColumnRows(RowFields):
    """Rows that are columns."""

    def __init__(self, columns: Any, shared: Mapping[str, Any], reads: Sequence[Read]) -> None:
        self.shared = shared
        self.has_text = not isinstance(columns, Mapping)
        self._sources = list(dict.fromkeys(read.source for read in reads))
        self._times = {read.source for read in reads if read.raw == "time"}
        columns = _read_stream(columns)
        names: Any
        if isinstance(columns, pa.Table | pa.RecordBatch):
            names = columns.schema.names
            self._get = columns.column
        elif isinstance(columns, Mapping):
            names = columns.keys()
            self._get = columns.__getitem__
        elif hasattr(columns, "columns"):  # pandas, Polars, cuDF
            names = columns.columns
            self._get = columns.__getitem__
        else:
            raise SchemaError(
                f"rows of type {type(columns).__name__}",
                "pass a frame, an Arrow table, a list of dicts or a dict of arrays; a path is for "
                "predict",
            )
        counts = collections.Counter(names)
        self._names = set(counts)
        for name in self._sources:
            if counts[name] > 1:
                raise SchemaError(
                    f"there are {counts[name]} columns {name}",
                    "rename or drop all but one of them",
                )
        self._arrays: dict[str, pa.Array | list] = {}
        self.rows = self._count_rows(columns)

    def _count_rows(self, columns: Any) -> int:
        """Return the number of rows. Raises SchemaError if the columns to read differ in length."""
        if isinstance(columns, pa.Table | pa.RecordBatch):
            return columns.num_rows
        if not isinstance(columns, Mapping):
            return len(columns)
        read = [name for name in self._sources if name in self._names] or [*columns]
        counts = {name: len(self._array(name)) for name in read}
        for name, count in counts.items():
            if count != counts[read[0]]:
                raise SchemaError(
                    f"column {name} has {count} rows, column {read[0]} {counts[read[0]]}",
                    "give each row a value, null for a missing one",
                )
        return counts[read[0]] if read else 0

    def _check_length(self, name: str) -> None:
        """Raise SchemaError for a column with another number of rows."""
        if len(self._array(name)) != self.rows:
            raise SchemaError(
                f"column {name} has {len(self._array(name))} rows, the others have {self.rows}",
                "give each row a value, null for a missing one; or share one value for all rows",
            )

    @property
    def row_names(self) -> set[str]:
        """See :attr:`RowFields.row_names`."""
        return self._names

    def _array(self, name: str) -> pa.Array | list:
        """Return the values of a column, converting them only once."""
        if name not in self._arrays:
            self._arrays[name] = to_values(self._get(name), name, times=name in self._times)
        return self._arrays[name]

    def _find_own(self, name: str) -> RowField | None:
        outer, _, inner = name.partition(".")
        if name in self._names:
            self._check_length(name)
            return RowField(self._array(name))
        if not inner or outer not in self._names:
            return None
        self._check_length(outer)
        objects = self._array(outer)
        if isinstance(objects, list):
            values = [get_inner(v, outer, inner, row=i) for i, v in enumerate(objects)]
            return RowField(values)
        if pa.types.is_null(objects.type):
            return RowField([None] * self.rows)
        if not pa.types.is_struct(objects.type):
            raise SchemaError(
                f"column {outer} is of type {objects.type}: expected an object with {inner}",
                f"pass objects, or a column {name}",
            )
        if objects.type.get_field_index(inner) < 0:
            return None
        return RowField(pc.struct_field(objects, [inner]))

    def missing(self, names: Sequence[str]) -> MissingColumnError:
        """See :meth:`RowFields.missing`."""
        hint = suggest_column(names[0], self.names, self._sources)
        if not hint:
            hint = "missing values are nulls in a column"
        what = f"there is no column {', '.join(names)}"
        return MissingColumnError(what, hint.strip(), names[0])


def open_rows(
    rows: Any, reads: Sequence[Read], shared: Mapping[str, Any] | None = None
) -> RowFields:
    """Return the fields of rows.

    Args:
        rows: Dicts, or columns.
        reads: The columns to read, whose lengths must be the same.
        shared: The fields of all rows that do not have them themselves.

    Raises:
        SchemaError: The rows have another type, or columns have different lengths.
    """
    if isinstance(rows, list | tuple) and all(isinstance(row, Mapping) for row in rows):
        return DictRows(rows, shared or {})
    if shared and not isinstance(rows, Mapping):
        raise SchemaError(
            f"shared fields for rows of type {type(rows).__name__}",
            "pass rows as a list of dicts or a dict of arrays, or give the frame these columns",
        )
    return ColumnRows(rows, shared or {}, reads)


def _read_stream(columns: Any) -> Any:
    """Read an Arrow stream, such as a Polars frame, to a table; return other rows unchanged.

    pandas frames are returned unchanged: the types of their columns show which values are missing.

    Raises:
        SchemaError: The rows are a Polars query that has not run.
    """
    if type(columns).__name__ == "LazyFrame":
        what = f"rows of type {type(columns).__module__.partition('.')[0]}.LazyFrame"
        raise SchemaError(f"{what}: a query that has not run", "pass frame.collect()")
    is_table = isinstance(columns, pa.Table | pa.RecordBatch | Mapping)
    is_pandas = hasattr(columns, "iloc")
    if is_table or is_pandas or not hasattr(columns, "__arrow_c_stream__"):
        return columns
    return pa.RecordBatchReader.from_stream(columns).read_all()


def get_inner(value: Any, outer: str, inner: str, *, row: int) -> Any:
    """Return a field of an object; None if either is missing.

    Raises:
        InvalidRowError: The value is not an object.
    """
    if isinstance(value, Mapping):
        return value.get(inner)
    if is_missing(value):
        return None
    reason = f"{value!r:.60}: expected an object with {inner}"
    raise InvalidRowError(row, outer, reason, f'pass {{"{inner}": …}}, or null')


def to_values(values: Any, name: str, *, times: bool) -> pa.Array | list:
    """Return an Arrow array if the type of the values is known, else a list of objects."""
    if isinstance(values, pa.ChunkedArray | pa.Array):
        check_valid(values, f"column {name}")
        return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if isinstance(values, np.ma.MaskedArray):
        return values.tolist()
    if isinstance(values, np.ndarray):
        if values.ndim == 1 and values.dtype.kind in "biuf" and values.dtype.itemsize <= 8:
            return mask_to_arrow(values) if values.dtype.kind == "b" else to_arrow(values)
        if times and values.ndim == 1 and values.dtype.kind == "M":
            return times_to_arrow(values)
        return _read_objects(list(values))
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise SchemaError(
            f"column {name}: {values!r:.60} is not a column",
            "pass rows as a list of dicts, or columns as a dict of arrays",
        )
    if hasattr(values, "to_arrow"):  # Polars; and cuDF, whose series cannot become NumPy arrays
        return to_values(values.to_arrow(), name, times=times)
    if isinstance(getattr(values, "dtype", None), np.dtype):  # pandas
        return to_values(np.asarray(values), name, times=times)
    if hasattr(values, "__arrow_c_stream__"):
        return to_values(pa.chunked_array(values), name, times=times)
    if hasattr(values, "__array__"):
        return to_values(np.asarray(values), name, times=times)
    return list(values)


def _read_objects(values: list) -> pa.Array | list:
    """Return an Arrow array if all values are strings or missing, as in pandas' object columns."""
    kinds = set(map(type, values))
    if str not in kinds or kinds - {str, float, type(None)}:
        return values
    texts = [value if isinstance(value, str) else "" for value in values]
    if float in kinds and not all(is_missing(v) for v in values if isinstance(v, float)):
        return values
    try:
        return to_fields([text.encode() for text in texts]).view(pa.string())
    except UnicodeEncodeError:
        return values  # converted one by one: the error names the row
