"""The categorical values of a few rows in three arrays, instead of an array for each column.

For a single row, making and reading an array for each column would take most of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import string_array, to_offsets
from nvt_torchrec.formats.feature_spec import CategoricalColumn
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.rows import CategoryValues, Jagged


class FlatColumns(Sequence[CategoryValues]):
    """The values of all categorical columns; item j of the sequence is the values of column j.

    Attributes:
        numbers: int64, the values of all columns of numbers, one column after the other.
        begins: int32 [texts + 1], the offsets in ``data`` of the values of all columns of strings.
        data: uint8, the UTF-8 bytes of these values.
        missing: uint64, for the values of all columns, 1 where one is missing.
        layout: int64 [columns, 3] in C order. For each column: whether its values are strings, the
            index of its first value in ``numbers`` or ``begins``, and its number of values.
        lengths: int64 [columns, n], the number of values of each row; 1 in columns without lists.
        lists: The indices of the columns of lists.
    """

    def __init__(
        self, columns: Sequence[CategoricalColumn], values: Sequence[list], missing: list[int]
    ) -> None:
        """Take the parsed values [n] of each column.

        Args:
            columns: The columns.
            values: The values of each column, or lists of them; 0, "" or () where missing.
            missing: For each row, an integer that has bit j set if column j is missing.
        """
        self._columns = columns
        self.lists = [j for j, column in enumerate(columns) if column.multi_hot]
        numbers: list[int] = []
        texts: list[str] = []
        absent: list[int] = []
        layout: list[tuple[bool, int, int]] = []
        lengths: list[list[int]] = []
        for j, (column, given) in enumerate(zip(columns, values, strict=True)):
            items = given
            if column.multi_hot:
                items = [item for row in given for item in row]
                lengths.append([len(row) for row in given])
                absent += [0] * len(items)  # a missing list has no values
            else:
                lengths.append([1] * len(given))
                absent += [row >> j & 1 for row in missing]
            is_text = RAW_TYPES[column.raw].is_text
            target: list = texts if is_text else numbers
            layout.append((is_text, len(target), len(items)))
            target += items
        self.numbers = np.array(numbers, np.int64)
        self.missing = np.array(absent, np.uint64)
        self.layout = np.array(layout, np.int64).reshape(len(columns), 3)
        self.lengths = np.array(lengths, np.int64).reshape(len(columns), len(missing))
        encoded = [text.encode() for text in texts]
        self.begins = np.zeros(len(texts) + 1, np.int32)
        np.cumsum([len(text) for text in encoded], out=self.begins[1:])
        self.data = np.frombuffer(b"".join(encoded), np.uint8)

    def __len__(self) -> int:
        return len(self._columns)

    @overload
    def __getitem__(self, index: int) -> CategoryValues: ...

    @overload
    def __getitem__(self, index: slice) -> list[CategoryValues]: ...

    def __getitem__(self, index: int | slice) -> CategoryValues | list[CategoryValues]:
        if isinstance(index, slice):
            return [self[j] for j in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        column = self._columns[index]
        is_text, begin, count = self.layout[index].tolist()
        values: np.ndarray | pa.StringArray
        if is_text:
            begins = self.begins[begin : begin + count + 1]
            values = string_array(begins - begins[0], self.data[begins[0] : begins[-1]])
        else:
            values = self.numbers[begin : begin + count].astype(RAW_TYPES[column.raw].dtype)
        if not column.multi_hot:
            return values
        return Jagged(to_offsets(self.lengths[index]), values)
