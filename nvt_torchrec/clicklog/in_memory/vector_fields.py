"""Vectors that rows in memory hold themselves, instead of those from a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import is_list, is_text, mask_to_arrow, null_mask, to_numpy
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.clicklog.in_memory.row_fields import RowField, RowFields
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.formats.feature_spec.raw_types.base import is_missing
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.feature_spec.vector_columns import VectorColumn
from nvt_torchrec.formats.given_vectors import GivenVectors

#: The types of numbers. bool is excluded separately, because it is a subclass of int.
_NUMBERS = int | float | np.integer | np.floating
_USUAL_NUMBERS = {int, float}
_LEAVE_OUT = "or remove the field from all rows to use the vectors of the workflow"


class VectorFields:
    """Reads the vectors that rows hold.

    A value is a list of ``width`` finite numbers; null or an empty list is a missing vector. Values
    are rounded to the dtype in which the workflow stores them, so that a vector gives the same
    score whether it comes from the table or from the caller.

    Args:
        vectors: The vectors of the workflow.
    """

    def __init__(self, vectors: Sequence[VectorColumn]) -> None:
        self._vectors = {vector.name: vector for vector in vectors}

    @property
    def reads(self) -> list[Read]:
        """The fields, as :func:`.row_fields.open_rows` takes them."""
        return [Read(name, "float", multi_hot=True) for name in self._vectors]

    def read(self, fields: RowFields) -> dict[str, GivenVectors]:
        """Return the vectors that rows hold, by name.

        Raises:
            MissingColumnError: Some rows have the field, but not all.
            SchemaError: The type of a column does not fit.
            InvalidRowError: A value is not a list of ``width`` numbers, or a number is not finite
                or too large.
        """
        if not self._vectors:
            return {}
        given = {}
        for name in self._vectors.keys() & fields.names:
            field = fields.find(name)
            if field is None:
                continue
            if len(field.lacks):
                raise fields.missing([name])
            given[name] = _read_vectors(field, self._vectors[name], fields.rows)
        return given


def _read_vectors(field: RowField, vector: VectorColumn, rows: int) -> GivenVectors:
    """Return the vectors of a field. Raises SchemaError, InvalidRowError."""
    reader = _VectorReader(field, vector)
    vectors: Sequence[np.ndarray] | np.ndarray
    if isinstance(field.values, list):
        vectors = []
        has_vector = np.zeros(len(field.values), np.bool_)
        for position, value in enumerate(field.values):
            numbers = reader.read_value(position, value)
            if numbers is not None:
                has_vector[position] = True
                vectors.append(numbers)
    else:
        vectors, has_vector = reader.read_arrow(field.values)
    # The first vector stands for all missing ones, so that many nulls take no memory.
    values = np.zeros((1 + len(vectors), vector.width + 1), np.float32)
    values[1:, -1] = 1
    if len(vectors):
        values[1:, :-1] = vectors
    index = np.where(has_vector, np.cumsum(has_vector), 0)
    return GivenVectors(values, index if field.index is None else index[field.index])


class _VectorReader:
    """Converts the values of a field; its errors name the first row that has a wrong value."""

    def __init__(self, field: RowField, vector: VectorColumn) -> None:
        self._field = field
        self._vector = vector

    def read_value(self, position: int, value: Any) -> np.ndarray | None:
        """Return the numbers of a Python value, float32 [width]; None if it is missing."""
        is_sequence = isinstance(value, list | tuple | np.ndarray)
        if not is_sequence and is_missing(value):
            return None
        if not is_sequence and hasattr(value, "__array__") and not isinstance(value, np.generic):
            value = np.asarray(value)  # a tensor or a series
        if isinstance(value, np.ndarray) and value.ndim == 1:
            # the items of an object array are Python values
            items = value.tolist() if value.dtype == object else value
        elif isinstance(value, list | tuple):
            items = value
        else:
            raise self._error(position, f"{value!r:.60}: expected {self._expected}")
        if not len(items):
            return None
        if len(items) != self._vector.width:
            raise self._error(position, f"a list of {len(items)}: expected {self._expected}")
        if isinstance(items, np.ndarray):
            if items.dtype.kind not in "iuf":
                raise self._error(position, f"values of {items.dtype}: expected {self._expected}")
        elif not {*map(type, items)} <= _USUAL_NUMBERS:
            self._check_items(position, items)
        try:
            numbers = np.array(items, np.float64)
        except OverflowError:  # an integer that is too large for any float
            raise self._error(position, f"a number beyond {self._vector.dtype}") from None
        return self._round(numbers[np.newaxis], np.array([position]))[0]

    def _check_items(self, position: int, items: Sequence[Any]) -> None:
        """Raise InvalidRowError if an item is not a number."""
        for number, item in enumerate(items):
            if isinstance(item, bool | np.bool_) or not isinstance(item, _NUMBERS):
                raise self._error(
                    position, f"its item {number} is {item!r:.60}: expected {self._expected}"
                )

    def read_arrow(self, array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Return the vectors of an Arrow array [n].

        Returns:
            The vectors, float32 [vectors, width]; and which values have one, bool [n].
        """
        width = self._vector.width
        kind = array.type
        if pa.types.is_null(kind):
            return np.empty((0, width), np.float32), np.zeros(len(array), np.bool_)
        if is_text(kind):
            texts = np.flatnonzero(~null_mask(array))
            if len(texts):
                text = array[int(texts[0])].as_py()
                raise self._error(int(texts[0]), f"{text!r:.60}: expected {self._expected}")
            return np.empty((0, width), np.float32), np.zeros(len(array), np.bool_)
        if not is_list(kind) or not _is_number(kind.value_type):
            raise SchemaError(
                f"column {self._vector.name} is of type {kind}: expected lists of numbers",
                self._remedy,
            )
        lengths = to_numpy(pc.list_value_length(array).cast(pa.int64()))
        lengths = np.where(null_mask(array), 0, lengths)
        is_wrong = (lengths != 0) & (lengths != width)
        if is_wrong.any():
            position = int(is_wrong.argmax())
            raise self._error(position, f"a list of {lengths[position]}: expected {self._expected}")
        positions = np.flatnonzero(lengths)
        items = array.filter(mask_to_arrow(lengths > 0)).flatten()
        if items.null_count:
            item = int(null_mask(items).argmax())
            raise self._error(
                int(positions[item // width]),
                f"its item {item % width} is null: expected {self._expected}",
            )
        return self._round(to_numpy(items).reshape(-1, width), positions), lengths > 0

    def _round(self, numbers: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Round numbers to the stored dtype; float32 [vectors, width].

        Args:
            numbers: Numbers of any type, [vectors, width].
            positions: The position of each vector, for errors.
        """
        with np.errstate(over="ignore"):  # too large numbers become infinite, and are refused below
            rounded = numbers.astype(self._vector.dtype)
        is_wrong = ~np.isfinite(rounded)
        if is_wrong.any():
            row, item = np.argwhere(is_wrong)[0]
            reason = f"its item {item} is {numbers[row, item]:g}: expected finite numbers"
            if np.isfinite(numbers[row, item]):
                reason += f" that {self._vector.dtype} holds"
            raise self._error(int(positions[row]), reason)
        return rounded.astype(np.float32, copy=False)

    @property
    def _expected(self) -> str:
        return f"a list of {self._vector.width} numbers"

    @property
    def _remedy(self) -> str:
        source = f"as in column {self._vector.column} of table {self._vector.table}"
        return f"pass {self._expected}, {source}, or null for a missing vector; {_LEAVE_OUT}"

    def _error(self, position: int, reason: str) -> InvalidRowError:
        row = self._field.get_row(position)
        return InvalidRowError(row, self._vector.name, reason, self._remedy)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)
