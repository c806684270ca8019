"""The transforms of dense columns in float64: fill, compute y, normalize.

The formulas are in :mod:`formats.feature_spec.transforms`. Values equal those of NVTabular's
operators on pandas bit for bit. Logarithms are NumPy's: compiled code would call another library,
which rounds differently in the last place, and that matters for values near the mean.
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

#: Number of integers in the table of a column; most counts are among the first few.
_INTEGERS = 1 << 16
#: Cells of all tables (16 MiB): with more than 64 columns each has a smaller table.
_TABLE_CELLS = WORD_BITS * _INTEGERS
_BLOCK_ROWS = 4096  # so that a few columns in float64 fit in a cache


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Columns that are calculated together, those of one function one after the other.

    A row of few values takes as long as the calls of NumPy that it needs, so these are for all
    columns at once, and the functions are called once each.

    Attributes:
        index: int64 [k], the columns.
        word: int64 [k], the word of each in the masks of missing values.
        bit: uint64 [k, 1], its bit there.
        fill, center, scale: float64 [k, 1], see :class:`DensePlan`.
        functions: What computes y, and of which of the k columns.
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
        center, scale: See :func:`normalization`.
        looked_up: The columns whose results for integers are looked up, int64.
        minimum: The smallest integer in the table of each of these, int64.
        table: Their results for the integers from there on, float32 [looked up, integers].
    """

    def __init__(self, spec: FeatureSpec, statistics: dict[str, dict[str, float]]) -> None:
        """Make the plan of a spec and its statistics. Raises KeyError if a column has none."""
        self.transforms = tuple(map(spec.get_transform, spec.dense))
        self.fill = np.array([float(column.fill) for column in spec.dense])
        self.center, self.scale = normalization(spec, statistics)
        minima = {j: t.minimum for j, t in enumerate(self.transforms) if t.minimum is not None}
        self.looked_up = np.array(list(minima), np.int64)
        self.minimum = np.array(list(minima.values()), np.int64)
        numbers = range(len(self.transforms))
        self._all = _Columns.arrange(numbers, self)
        # those that are calculated where integers are looked up
        self._rest = _Columns.arrange([j for j in numbers if j not in minima], self)
        integers = min(_INTEGERS, _TABLE_CELLS // max(1, len(minima)))
        self.table = np.empty((len(minima), integers), np.float32)
        for k, (j, minimum) in enumerate(minima.items()):
            self.table[k] = self.calculate(j, np.arange(minimum, minimum + integers))

    def transform(self, values: np.ndarray, missing: np.ndarray, out: np.ndarray) -> None:
        """Fill ``out``, float32 [columns, n].

        Args:
            values: [columns, n], int32 or float64.
            missing: uint64 [words, n], the mask of missing values.
            out: The result.
        """
        from_table = values.dtype == np.int32 and len(self.looked_up) > 0
        if from_table:
            where = self.fill, self.looked_up, self.minimum, self.table
            beyond = _look_up(values, missing, *where, out)
            for k in np.flatnonzero(beyond):
                j = int(self.looked_up[k])
                word, first = get_word(missing, j), self.first_beyond(j)
                over = values[j] >= first
                if self.fill[j] >= first:
                    over |= (word >> get_bit(j)) & _ONE != 0
                rows = np.flatnonzero(over)
                absent = (word[rows] >> get_bit(j)) & _ONE
                filled = np.where(absent, self.fill[j], values[j, rows])
                out[j, rows] = self.calculate(j, filled)
        self._calculate(self._rest if from_table else self._all, values, missing, out)

    def _calculate(
        self, columns: _Columns, values: np.ndarray, missing: np.ndarray, out: np.ndarray
    ) -> None:
        """Fill ``out`` for some columns, block by block."""
        index = columns.index
        if not len(index):
            return
        for begin in range(0, missing.shape[1], _BLOCK_ROWS):
            rows = slice(begin, begin + _BLOCK_ROWS)
            y = values[index, rows].astype(np.float64, copy=False)  # the index has made a copy
            absent = missing[columns.word, rows] & columns.bit
            if absent.any():
                np.copyto(y, columns.fill, where=absent != 0)
            with np.errstate(over="ignore"):  # too large values become infinite, as in NVTabular
                for part, transform in columns.functions:
                    y[part] = transform.apply(y[part], np)
                y -= columns.center
                y /= columns.scale
                out[index, rows] = y.astype(np.float32)

    def first_beyond(self, column: int) -> int:
        """Return the first integer that is not in the table of a column."""
        minimum = self.transforms[column].minimum
        assert minimum is not None
        return minimum + self.table.shape[1]

    def calculate(self, column: int, filled: np.ndarray) -> np.ndarray:
        """Transform filled values [n] of one column without the table; float32 [n]."""
        with np.errstate(over="ignore"):  # as above
            y = self.transforms[column].apply(filled.astype(np.float64), np)
            y = y - self.center[column]
            y /= self.scale[column]
            return y.astype(np.float32)


def normalization(
    spec: FeatureSpec, fitted: dict[str, dict[str, float]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return center and scale of (y − center) / scale, float64 [dense columns] each.

    They are 0 and 1 where nothing is normalized; the scale is 1, too, where the standard deviation
    is 0: NVTabular's Normalize then only subtracts the mean.

    Raises:
        KeyError: A normalized column has no statistics.
    """
    center, scale = np.zeros(len(spec.dense)), np.ones(len(spec.dense))
    for name in spec.normalized_names:
        j = spec.dense_names.index(name)
        center[j], std = fitted[name]["mean"], fitted[name]["std"]
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
    """Fill some columns of ``out`` from the table; return how many values of each are beyond it.

    Those values are clipped here. Two loops over contiguous rows, which both can be vectorized.
    """
    beyond = np.zeros(len(columns), np.int64)
    word = -1
    bits = np.empty(0, np.uint64)
    places = np.empty(values.shape[1], np.int32)
    for k in range(len(columns)):
        j = columns[k]
        if j >> 6 != word:
            word = j >> 6
            bits = np.ascontiguousarray(missing[word])
        column, of_column, result = np.ascontiguousarray(values[j]), table[k], out[j]
        bit, of_fill = np.uint64(1) << np.uint64(j & 63), np.int32(fill[j])
        minimum = np.int32(minima[k])
        maximum = np.int32(minima[k] + table.shape[1] - 1)
        above = 0
        for i in range(len(bits)):
            x = of_fill if bits[i] & bit else column[i]
            above += np.int32(x > maximum)
            places[i] = min(max(x, minimum), maximum) - minimum
        for i in range(len(bits)):
            result[i] = of_column[np.uint32(places[i])]
        beyond[k] = above
    return beyond
