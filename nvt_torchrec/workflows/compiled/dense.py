"""The transforms of dense columns in float64: fill, compute y, normalize.

The formulas are in :mod:`formats.feature_spec.transforms`. Results equal those of NVTabular's
operators on pandas bit for bit. Logarithms are computed by NumPy: compiled code would call another
library that rounds the last bit differently, which matters for values near the mean.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from numba import types

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.transforms import DenseTransform
from nvt_torchrec.formats.rows import WORD_BITS, get_bit, get_word

#: Number of integers in the table of a column; most values of count columns are small.
_INTEGERS = 1 << 16
#: Cells of all tables (16 MiB). With more than 64 columns, each has a smaller table.
_TABLE_CELLS = WORD_BITS * _INTEGERS
#: Rows that are calculated at once, so that a few columns in float64 fit in a cache.
_BLOCK_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Columns that are calculated together, ordered by their functions.

    For a single row, the number of NumPy calls decides the time. So each call handles all columns,
    and each function is called once, for all of its columns.

    Attributes:
        index: int64 [k], the columns.
        word: int64 [k], the index of each column's word in the masks of missing values.
        bit: uint64 [k, 1], a mask with each column's bit in that word.
        fill, center, scale: float64 [k, 1], see :class:`DensePlan`.
        functions: For each function, the slice of the k columns, and the transform that computes y.
    """

    index: np.ndarray
    word: np.ndarray
    bit: np.ndarray
    fill: np.ndarray
    center: np.ndarray
    scale: np.ndarray
    functions: tuple[tuple[slice, DenseTransform], ...]

    @classmethod
    def arrange(cls, columns: Sequence[int], plan: DensePlan) -> _Columns:
        """Arrange columns of a plan by their functions."""
        transforms = plan.transforms
        ordered = sorted(columns, key=lambda j: transforms[j].function)
        functions: list[tuple[slice, DenseTransform]] = []
        begin = 0
        for _, same in itertools.groupby(ordered, key=lambda j: transforms[j].function):
            group = list(same)
            functions.append((slice(begin, begin + len(group)), transforms[group[0]]))
            begin += len(group)
        index = np.array(ordered, np.int64)
        bit = _ONE << (index % WORD_BITS).astype(np.uint64)
        return cls(
            index=index,
            word=index // WORD_BITS,
            bit=bit[:, np.newaxis],
            fill=plan.fill[index, np.newaxis],
            center=plan.center[index, np.newaxis],
            scale=plan.scale[index, np.newaxis],
            functions=tuple(functions),
        )


class DensePlan:
    """The parameters of ``(y − center) / scale``, float64 [dense columns] each.

    Attributes:
        transforms: The transforms of the columns.
        fill: Replaces missing values.
        center, scale: See :func:`get_normalization`.
        looked_up: int64 [looked up], the columns whose results for integers are in a table.
        minimum: int64 [looked up], the smallest integer in the table of each.
        table: float32 [looked up, integers], the results for the integers from there on.
    """

    def __init__(self, spec: FeatureSpec, statistics: dict[str, dict[str, float]]) -> None:
        """Make the plan. Raises KeyError if ``statistics`` lacks a normalized column."""
        self.transforms = tuple(map(spec.get_transform, spec.dense))
        self.fill = np.array([float(column.fill) for column in spec.dense])
        self.center, self.scale = get_normalization(spec, statistics)
        minima = {j: t.minimum for j, t in enumerate(self.transforms) if t.minimum is not None}
        self.looked_up = np.array(list(minima), np.int64)
        self.minimum = np.array(list(minima.values()), np.int64)
        numbers = range(len(self.transforms))
        self._all = _Columns.arrange(numbers, self)
        # The columns that are calculated even if the values are integers.
        self._rest = _Columns.arrange([j for j in numbers if j not in minima], self)
        integers = min(_INTEGERS, _TABLE_CELLS // max(1, len(minima)))
        self.table = np.empty((len(minima), integers), np.float32)
        for k, (j, minimum) in enumerate(minima.items()):
            self.table[k] = self.calculate(j, np.arange(minimum, minimum + integers))

    def transform(self, values: np.ndarray, missing: np.ndarray, out: np.ndarray) -> None:
        """Transform values, those beyond the tables by calculation.

        Args:
            values: [columns, n], int32 or float64.
            missing: uint64 [words, n], the mask of missing values.
            out: float32 [columns, n], the result.
        """
        from_table = values.dtype == np.int32 and len(self.looked_up) > 0
        if from_table:
            num_beyond = _look_up(
                values, missing, self.fill, self.looked_up, self.minimum, self.table, out
            )
            for k in np.flatnonzero(num_beyond):
                j = int(self.looked_up[k])
                word = get_word(missing, j)
                first = self.find_first_beyond(j)
                is_beyond = values[j] >= first
                if self.fill[j] >= first:
                    is_beyond |= (word >> get_bit(j)) & _ONE != 0
                rows = np.flatnonzero(is_beyond)
                absent = (word[rows] >> get_bit(j)) & _ONE
                filled = np.where(absent, self.fill[j], values[j, rows])
                out[j, rows] = self.calculate(j, filled)
        self._calculate(self._rest if from_table else self._all, values, missing, out)

    def _calculate(
        self, columns: _Columns, values: np.ndarray, missing: np.ndarray, out: np.ndarray
    ) -> None:
        """Fill ``out`` for the given columns, block by block."""
        index = columns.index
        if not len(index):
            return
        for begin in range(0, missing.shape[1], _BLOCK_ROWS):
            rows = slice(begin, begin + _BLOCK_ROWS)
            y = values[index, rows].astype(np.float64, copy=False)  # the index has made a copy
            absent = missing[columns.word, rows] & columns.bit
            if absent.any():
                np.copyto(y, columns.fill, where=absent != 0)
            with np.errstate(over="ignore"):  # values too large become infinite, as in NVTabular
                for part, transform in columns.functions:
                    y[part] = transform.apply(y[part], np)
                y -= columns.center
                y /= columns.scale
                out[index, rows] = y.astype(np.float32)

    def find_first_beyond(self, column: int) -> int:
        """Return the first integer that is not in the table of a column."""
        minimum = self.transforms[column].minimum
        assert minimum is not None
        return minimum + self.table.shape[1]

    def calculate(self, column: int, filled: np.ndarray) -> np.ndarray:
        """Transform filled values [n] of one column without the table; float32 [n]."""
        with np.errstate(over="ignore"):  # values too large become infinite, as in NVTabular
            y = self.transforms[column].apply(filled.astype(np.float64), np)
            y = y - self.center[column]
            y /= self.scale[column]
            return y.astype(np.float32)


def get_normalization(
    spec: FeatureSpec, fitted: dict[str, dict[str, float]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return center and scale of (y − center) / scale, float64 [dense columns] each.

    They are 0 and 1 for columns that are not normalized. The scale is also 1 if the standard
    deviation is 0, because NVTabular's Normalize then only subtracts the mean.

    Raises:
        KeyError: A normalized column has no statistics.
    """
    center = np.zeros(len(spec.dense))
    scale = np.ones(len(spec.dense))
    for name in spec.normalized_names:
        j = spec.dense_names.index(name)
        center[j] = fitted[name]["mean"]
        std = fitted[name]["std"]
        scale[j] = std if std > 0 else 1.0
    return center, scale


_ONE = np.uint64(1)


@compiled(
    types.Array(types.int64, 1, "C")(
        types.Array(types.int32, 2, "A", readonly=True),
        types.Array(types.uint64, 2, "A", readonly=True),
        types.Array(types.float64, 1, "C", readonly=True),
        types.Array(types.int64, 1, "C", readonly=True),
        types.Array(types.int64, 1, "C", readonly=True),
        types.Array(types.float32, 2, "C", readonly=True),
        types.Array(types.float32, 2, "C"),
    )
)
def _look_up(values, missing, fill, columns, minima, table, out):
    """Fill columns of ``out`` from the table; return the number of values beyond it, by column.

    Values beyond the table get a wrong result here: that of its last integer. There are two loops
    over contiguous values, because each of them can be vectorized, and one loop could not.
    """
    beyond = np.zeros(len(columns), np.int64)
    word = -1
    bits = np.empty(0, np.uint64)
    indices = np.empty(values.shape[1], np.int32)
    for k in range(len(columns)):
        j = columns[k]
        if j >> 6 != word:
            word = j >> 6
            bits = np.ascontiguousarray(missing[word])
        column = np.ascontiguousarray(values[j])
        results = table[k]
        result = out[j]
        bit = np.uint64(1) << np.uint64(j & 63)
        column_fill = np.int32(fill[j])
        minimum = np.int32(minima[k])
        maximum = np.int32(minima[k] + table.shape[1] - 1)
        above = 0
        for i in range(len(bits)):
            x = column_fill if bits[i] & bit else column[i]
            above += np.int32(x > maximum)
            indices[i] = min(max(x, minimum), maximum) - minimum
        for i in range(len(bits)):
            result[i] = results[np.uint32(indices[i])]
        beyond[k] = above
    return beyond
