"""Python values → typed rows, checking each value.

Made for few rows, as in JSON: one loop over the fields of a row, instead of an array per column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nvt_torchrec.clicklog.in_memory.errors import NOT_A_LIST, InvalidRowError, no_such_key
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.base import EMPTY_ITEM, MESSAGES, is_missing
from nvt_torchrec.formats.feature_spec.reading import AS_IT_IS
from nvt_torchrec.formats.rows import CategoryValues, Jagged, RawRows, dense_dtype, mask_of_rows


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
    return spec.input.decimal == "." and all(
        column.derive is None and dataclasses.replace(column.reading, sources=()) == AS_IT_IS
        for column in spec.features
    )


class RowReader:
    """Reads rows that are dicts, with parsers that are made once for a spec that reads plainly."""

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
            label=None,
            dense=np.array(dense, self._dtype).reshape(count, len(self._dense)).T,
            dense_missing=mask_of_rows(dense_missing, len(self._dense)),
            categorical=categorical,
            categorical_missing=mask_of_rows(missing, width),
            line=np.arange(count),
            bad=[],
            bad_count=0,
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
