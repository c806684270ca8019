"""The dense transform in float64: fill, raise to the minimum, logarithm, normalize.

The formulas are in :mod:`workflows.nodes`. Values equal those of NVTabular's operators on pandas
bit for bit. Logarithms are NumPy's: compiled code would call another library, which rounds
differently in the last place, and that matters for values near the mean.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numba import types

from clicklog.kernels import compiled
from clicklog.spec.feature_spec import FeatureSpec
from workflows.dense import DENSE_MINIMUM, DENSE_SHIFT

#: Number of integers in the table; most counts are among the first few.
_INTEGERS = 1 << 16
_BLOCK_ROWS = 4096  # so that a few columns in float64 fit in a cache


@dataclasses.dataclass(frozen=True)
class DensePlan:
    """The parameters of ``(y − center) / scale``, float64 [dense columns] each.

    Attributes:
        fill: replaces missing values.
        center: 0 where nothing is normalized.
        scale: 1 where nothing is normalized, and where the standard deviation is 0 (NVTabular's
            Normalize then only subtracts the mean).
        logarithm: whether y is a logarithm, or the value itself.
        table: float32 [dense columns, integers], the results for the integers from the minimum on;
            empty without logarithms.
    """

    fill: np.ndarray
    center: np.ndarray
    scale: np.ndarray
    logarithm: bool
    table: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        integers = np.arange(DENSE_MINIMUM, DENSE_MINIMUM + _INTEGERS * self.logarithm)
        object.__setattr__(self, "table", self._calculated(slice(None), integers[None]))

    @classmethod
    def make(cls, spec: FeatureSpec, statistics: dict[str, dict[str, float]]) -> DensePlan:
        """Make the plan of a spec and its statistics. Raises KeyError if a column has none."""
        columns = len(spec.dense)
        center, scale = np.zeros(columns), np.ones(columns)
        if spec.dense_transform != "log":
            for j, name in enumerate(spec.dense_names):
                center[j] = statistics[name]["mean"]
                std = statistics[name]["std"]
                scale[j] = std if std > 0 else 1.0
        return cls(
            fill=np.array([float(column.fill) for column in spec.dense]),
            center=center,
            scale=scale,
            logarithm=spec.dense_transform != "normalize",
        )

    def transform(self, values: np.ndarray, missing: np.ndarray, out: np.ndarray) -> None:
        """Fill ``out``, float32 [columns, n].

        Args:
            values: [columns, n], int32 or float64.
            missing: uint64 [n], bit j set where column j is missing.
            out: the result.
        """
        if values.dtype == np.int32 and self.logarithm:
            beyond = _look_up(values, missing, self.fill, self.table, out)
            for j in np.flatnonzero(beyond):
                rows = _rows_beyond(values[j], missing, j, self.fill[j], beyond[j])
                absent = (missing[rows] >> np.uint64(j)) & _ONE
                filled = np.where(absent, self.fill[j], values[j, rows])
                out[j, rows] = self.calculate(j, filled)
            return
        bits = np.arange(len(values), dtype=np.uint64)[:, None]
        for begin in range(0, len(missing), _BLOCK_ROWS):
            rows = slice(begin, begin + _BLOCK_ROWS)
            absent = (missing[rows] >> bits) & _ONE
            filled = np.where(absent, self.fill[:, None], values[:, rows])
            out[:, rows] = self._calculated(slice(None), filled)

    @property
    def first_beyond(self) -> int:
        """The first integer that is not in the table."""
        return DENSE_MINIMUM + self.table.shape[1]

    def calculate(self, column: int, filled: np.ndarray) -> np.ndarray:
        """Transform filled values [n] of one column without the table; float32 [n]."""
        return self._calculated(slice(column, column + 1), filled[None])[0]

    def _calculated(self, columns: slice, filled: np.ndarray) -> np.ndarray:
        """Transform filled values [columns or 1, rows]; float32 [columns, rows]."""
        y = filled.astype(np.float64)
        if self.logarithm:
            np.maximum(y, DENSE_MINIMUM, out=y)
            y += DENSE_SHIFT
            np.log(y, out=y)
        with np.errstate(over="ignore"):  # too large values become infinite, as in NVTabular
            y = y - self.center[columns, None]
            y /= self.scale[columns, None]
            return y.astype(np.float32)


_ONE = np.uint64(1)


@compiled(
    types.Array(types.int64, 1, "C")(
        types.Array(types.int32, 2, "A", readonly=True),
        types.Array(types.uint64, 1, "A", readonly=True),
        types.Array(types.float64, 1, "C", readonly=True),
        types.Array(types.float32, 2, "C", readonly=True),
        types.Array(types.float32, 2, "C"),
    ),
)
def _look_up(values, missing, fill, table, out):
    """Fill ``out`` from the table; return, by column, how many values are beyond the table.

    Those values are clipped here. Two loops over contiguous rows, which both can be vectorized.
    """
    beyond = np.zeros(values.shape[0], np.int64)
    bits = np.ascontiguousarray(missing)
    least = np.int32(DENSE_MINIMUM)
    most = np.int32(DENSE_MINIMUM + table.shape[1] - 1)
    places = np.empty(len(bits), np.int32)
    for j in range(values.shape[0]):
        column, of_column, result = np.ascontiguousarray(values[j]), table[j], out[j]
        bit, of_fill = np.uint64(1) << np.uint64(j), np.int32(fill[j])
        above = 0
        for i in range(len(bits)):
            x = of_fill if bits[i] & bit else column[i]
            above += np.int32(x > most)
            places[i] = min(max(x, least), most) - least
        for i in range(len(bits)):
            result[i] = of_column[np.uint32(places[i])]
        beyond[j] = above
    return beyond


@compiled(
    types.Array(types.int64, 1, "C")(
        types.Array(types.int32, 1, "A", readonly=True),
        types.Array(types.uint64, 1, "A", readonly=True),
        types.int64,
        types.float64,
        types.int64,
    ),
)
def _rows_beyond(values, missing, column, fill, count):
    """Return the ``count`` rows in which a column is beyond the table."""
    rows = np.empty(count, np.int64)
    bit = np.uint64(column)
    first = DENSE_MINIMUM + _INTEGERS
    at = 0
    for i in range(len(values)):
        absent = (missing[i] >> bit) & np.uint64(1)
        if (np.int64(fill) if absent else np.int64(values[i])) >= first:
            rows[at] = i
            at += 1
    return rows
