"""The dense transform in float64: fill, raise to the minimum, logarithm, normalize.

The formulas are in :mod:`workflows.nodes`. Values equal those of NVTabular's operators on pandas
bit for bit. Logarithms are NumPy's: compiled code would call another library, which rounds
differently in the last place, and that matters for values near the mean.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from numba import types

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.missing import WORD_BITS, bit_of, word_of
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.workflows.dense import DENSE_MINIMUM, DENSE_SHIFT
from nvt_torchrec.workflows.moments import normalization

#: Number of integers in the table of a column; most counts are among the first few.
_INTEGERS = 1 << 16
#: Cells of all tables (16 MiB): with more than 64 columns each has a smaller table.
_TABLE_CELLS = WORD_BITS * _INTEGERS
_BLOCK_ROWS = 4096  # so that a few columns in float64 fit in a cache


@dataclasses.dataclass(frozen=True)
class DensePlan:
    """The parameters of ``(y − center) / scale``, float64 [dense columns] each.

    Attributes:
        fill: replaces missing values.
        center: 0 where nothing is normalized.
        scale: 1 where nothing is normalized, and where the standard deviation is 0 (NVTabular's
            Normalize then only subtracts the mean).
        logarithm: bool [dense columns], whether y is a logarithm, or the value itself.
        looked_up: int64, the columns with a logarithm.
        table: float32 [columns with a logarithm, integers], the results for the integers from the
            minimum on.
    """

    fill: np.ndarray
    center: np.ndarray
    scale: np.ndarray
    logarithm: np.ndarray
    looked_up: np.ndarray = dataclasses.field(init=False)
    table: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        looked_up = np.flatnonzero(self.logarithm)
        integers = min(_INTEGERS, _TABLE_CELLS // max(1, len(looked_up)))
        numbers = np.arange(DENSE_MINIMUM, DENSE_MINIMUM + integers)[None]
        table = np.empty((len(looked_up), integers), np.float32)
        at = 0
        for own in _runs(self.logarithm):
            if self.logarithm[own.start]:
                size = own.stop - own.start
                table[at : at + size] = self._calculated(own, numbers)
                at += size
        object.__setattr__(self, "looked_up", looked_up)
        object.__setattr__(self, "table", table)

    @classmethod
    def make(cls, spec: FeatureSpec, statistics: dict[str, dict[str, float]]) -> DensePlan:
        """Make the plan of a spec and its statistics. Raises KeyError if a column has none."""
        center, scale = normalization(spec, statistics)
        return cls(
            fill=np.array([float(column.fill) for column in spec.dense]),
            center=center,
            scale=scale,
            logarithm=np.array([spec.transform_of(c) != "normalize" for c in spec.dense], bool),
        )

    def transform(self, values: np.ndarray, missing: np.ndarray, out: np.ndarray) -> None:
        """Fill ``out``, float32 [columns, n].

        Args:
            values: [columns, n], int32 or float64.
            missing: uint64 [words, n], the mask of missing values.
            out: the result.
        """
        from_table = values.dtype == np.int32 and len(self.looked_up) > 0
        if from_table:
            beyond = _look_up(values, missing, self.fill, self.looked_up, self.table, out)
            for k in np.flatnonzero(beyond):
                j = int(self.looked_up[k])
                word = word_of(missing, j)
                rows = _rows_beyond(
                    values[j], word, j % WORD_BITS, self.fill[j], self.table.shape[1], beyond[k]
                )
                absent = (word[rows] >> bit_of(j)) & _ONE
                filled = np.where(absent, self.fill[j], values[j, rows])
                out[j, rows] = self.calculate(j, filled)
        for own in _runs(self.logarithm):
            if not (from_table and self.logarithm[own.start]):
                self._calculate(own, values, word_of(missing, own.start), out)

    def _calculate(
        self, own: slice, values: np.ndarray, missing: np.ndarray, out: np.ndarray
    ) -> None:
        """Fill ``out`` for columns of one word and one kind, block by block."""
        bits = np.arange(own.start, own.stop, dtype=np.uint64)[:, None] % np.uint64(WORD_BITS)
        for begin in range(0, len(missing), _BLOCK_ROWS):
            rows = slice(begin, begin + _BLOCK_ROWS)
            absent = (missing[rows] >> bits) & _ONE
            filled = np.where(absent, self.fill[own, None], values[own, rows])
            out[own, rows] = self._calculated(own, filled)

    @property
    def first_beyond(self) -> int:
        """The first integer that is not in the table."""
        return DENSE_MINIMUM + self.table.shape[1]

    def calculate(self, column: int, filled: np.ndarray) -> np.ndarray:
        """Transform filled values [n] of one column without the table; float32 [n]."""
        return self._calculated(slice(column, column + 1), filled[None])[0]

    def _calculated(self, columns: slice, filled: np.ndarray) -> np.ndarray:
        """Transform filled values [columns or 1, rows] of columns of one kind; float32."""
        y = filled.astype(np.float64)
        if self.logarithm[columns.start]:
            np.maximum(y, DENSE_MINIMUM, out=y)
            y += DENSE_SHIFT
            np.log(y, out=y)
        with np.errstate(over="ignore"):  # too large values become infinite, as in NVTabular
            y = y - self.center[columns, None]
            y /= self.scale[columns, None]
            return y.astype(np.float32)


def _runs(logarithm: np.ndarray) -> list[slice]:
    """Return runs of columns that are all logarithms or all not, and whose bits are in one word."""
    begins = [
        j for j in range(len(logarithm)) if j % WORD_BITS == 0 or logarithm[j] != logarithm[j - 1]
    ]
    return [slice(*ends) for ends in itertools.pairwise([*begins, len(logarithm)])]


_ONE = np.uint64(1)


@compiled(
    types.Array(types.int64, 1, "C")(
        types.Array(types.int32, 2, "A", readonly=True),
        types.Array(types.uint64, 2, "A", readonly=True),
        types.Array(types.float64, 1, "C", readonly=True),
        types.Array(types.int64, 1, "C", readonly=True),
        types.Array(types.float32, 2, "C", readonly=True),
        types.Array(types.float32, 2, "C"),
    ),
)
def _look_up(values, missing, fill, columns, table, out):
    """Fill some columns of ``out`` from the table; return how many values of each are beyond it.

    Those values are clipped here. Two loops over contiguous rows, which both can be vectorized.
    """
    beyond = np.zeros(len(columns), np.int64)
    word = -1
    bits = np.empty(0, np.uint64)
    least = np.int32(DENSE_MINIMUM)
    most = np.int32(DENSE_MINIMUM + table.shape[1] - 1)
    places = np.empty(values.shape[1], np.int32)
    for k in range(len(columns)):
        j = columns[k]
        if j >> 6 != word:
            word = j >> 6
            bits = np.ascontiguousarray(missing[word])
        column, of_column, result = np.ascontiguousarray(values[j]), table[k], out[j]
        bit, of_fill = np.uint64(1) << np.uint64(j & 63), np.int32(fill[j])
        above = 0
        for i in range(len(bits)):
            x = of_fill if bits[i] & bit else column[i]
            above += np.int32(x > most)
            places[i] = min(max(x, least), most) - least
        for i in range(len(bits)):
            result[i] = of_column[np.uint32(places[i])]
        beyond[k] = above
    return beyond


@compiled(
    types.Array(types.int64, 1, "C")(
        types.Array(types.int32, 1, "A", readonly=True),
        types.Array(types.uint64, 1, "A", readonly=True),
        types.int64,
        types.float64,
        types.int64,
        types.int64,
    ),
)
def _rows_beyond(values, missing, shift, fill, integers, count):
    """Return the ``count`` rows in which a column is beyond the table of so many integers."""
    rows = np.empty(count, np.int64)
    bit = np.uint64(shift)
    first = DENSE_MINIMUM + integers
    at = 0
    for i in range(len(values)):
        absent = (missing[i] >> bit) & np.uint64(1)
        if (np.int64(fill) if absent else np.int64(values[i])) >= first:
            rows[at] = i
            at += 1
    return rows
