"""The transforms of dense columns in float64: fill, compute y, normalize.

The formulas are in :mod:`formats.feature_spec.transforms`. Values equal those of NVTabular's
operators on pandas bit for bit. Logarithms are NumPy's: compiled code would call another library,
which rounds differently in the last place, and that matters for values near the mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numba import types

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.transforms import DenseTransform
from nvt_torchrec.formats.rows import WORD_BITS, bit_of, word_of

#: Number of integers in the table of a column; most counts are among the first few.
_INTEGERS = 1 << 16
#: Cells of all tables (16 MiB): with more than 64 columns each has a smaller table.
_TABLE_CELLS = WORD_BITS * _INTEGERS
_BLOCK_ROWS = 4096  # so that a few columns in float64 fit in a cache


class DensePlan:
    """The parameters of ``(y − center) / scale``, float64 [dense columns] each.

    Attributes:
        transforms: The transforms of the columns.
        fill: Replaces missing values.
        center, scale: See :func:`normalization`.
        looked_up: The columns whose results for integers are looked up, int64.
        least: The smallest integer in the table of each of these, int64.
        table: Their results for the integers from there on, float32 [looked up, integers].
    """

    def __init__(self, spec: FeatureSpec, statistics: dict[str, dict[str, float]]) -> None:
        """Make the plan of a spec and its statistics. Raises KeyError if a column has none."""
        self.transforms = tuple(map(spec.transform_of, spec.dense))
        self.fill = np.array([float(column.fill) for column in spec.dense])
        self.center, self.scale = normalization(spec, statistics)
        minima = {j: t.minimum for j, t in enumerate(self.transforms) if t.minimum is not None}
        self.looked_up = np.array(list(minima), np.int64)
        self.least = np.array(list(minima.values()), np.int64)
        integers = min(_INTEGERS, _TABLE_CELLS // max(1, len(minima)))
        self.table = np.empty((len(minima), integers), np.float32)
        for k, (j, least) in enumerate(minima.items()):
            self.table[k] = self.calculate(j, np.arange(least, least + integers))

    def transform(self, values: np.ndarray, missing: np.ndarray, out: np.ndarray) -> None:
        """Fill ``out``, float32 [columns, n].

        Args:
            values: [columns, n], int32 or float64.
            missing: uint64 [words, n], the mask of missing values.
            out: The result.
        """
        from_table = values.dtype == np.int32 and len(self.looked_up) > 0
        if from_table:
            where = self.fill, self.looked_up, self.least, self.table
            beyond = _look_up(values, missing, *where, out)
            for k in np.flatnonzero(beyond):
                j = int(self.looked_up[k])
                word, first = word_of(missing, j), self.first_beyond(j)
                over = values[j] >= first
                if self.fill[j] >= first:
                    over |= (word >> bit_of(j)) & _ONE != 0
                rows = np.flatnonzero(over)
                absent = (word[rows] >> bit_of(j)) & _ONE
                filled = np.where(absent, self.fill[j], values[j, rows])
                out[j, rows] = self.calculate(j, filled)
        for columns in _runs(self.transforms):
            if not (from_table and self.transforms[columns.start].minimum is not None):
                self._calculate(columns, values, word_of(missing, columns.start), out)

    def _calculate(
        self, columns: slice, values: np.ndarray, missing: np.ndarray, out: np.ndarray
    ) -> None:
        """Fill ``out`` for columns of one word and one function, block by block."""
        bits = np.arange(columns.start, columns.stop, dtype=np.uint64)[:, None] % np.uint64(
            WORD_BITS
        )
        for begin in range(0, len(missing), _BLOCK_ROWS):
            rows = slice(begin, begin + _BLOCK_ROWS)
            absent = (missing[rows] >> bits) & _ONE
            filled = np.where(absent, self.fill[columns, None], values[columns, rows])
            out[columns, rows] = self._calculated(columns, filled)

    def first_beyond(self, column: int) -> int:
        """Return the first integer that is not in the table of a column."""
        minimum = self.transforms[column].minimum
        assert minimum is not None
        return minimum + self.table.shape[1]

    def calculate(self, column: int, filled: np.ndarray) -> np.ndarray:
        """Transform filled values [n] of one column without the table; float32 [n]."""
        return self._calculated(slice(column, column + 1), filled[None])[0]

    def _calculated(self, columns: slice, filled: np.ndarray) -> np.ndarray:
        """Transform filled values [columns or 1, rows] of columns of one function; float32."""
        with np.errstate(over="ignore"):  # too large values become infinite, as in NVTabular
            y = self.transforms[columns.start].y(filled.astype(np.float64), np)
            y = y - self.center[columns, None]
            y /= self.scale[columns, None]
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


def _runs(transforms: Sequence[DenseTransform]) -> list[slice]:
    """Return runs of columns of the same function whose bits are in the same word."""
    begins = [
        j
        for j in range(len(transforms))
        if j % WORD_BITS == 0 or transforms[j].function != transforms[j - 1].function
    ]
    return [slice(*ends) for ends in itertools.pairwise([*begins, len(transforms)])]


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
        least = np.int32(minima[k])
        most = np.int32(minima[k] + table.shape[1] - 1)
        above = 0
        for i in range(len(bits)):
            x = of_fill if bits[i] & bit else column[i]
            above += np.int32(x > most)
            places[i] = min(max(x, least), most) - least
        for i in range(len(bits)):
            result[i] = of_column[np.uint32(places[i])]
        beyond[k] = above
    return beyond
