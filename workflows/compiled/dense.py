"""The dense transform: fill, raise to the minimum, logarithm, normalize; float64 inside.

Formulas are in :mod:`workflows.graph`. Values are bit for bit those of NVTabular's operators on
pandas: logarithms are NumPy's (compiled code would call another library's, which rounds otherwise
in the last place, and where a value is near the mean that place is all there is).
"""

from __future__ import annotations

import dataclasses
import functools

import numba
import numpy as np
from numba import types

from clicklog.spec import FeatureSpec
from workflows.dense import DENSE_MINIMUM, DENSE_SHIFT

#: Logarithms in the table: 512 KiB, of which counts use the first few.
_LOGARITHMS = 1 << 16
_BLOCK_ROWS = 4096  # of which some columns in float64 stay in a cache


@functools.cache
def _logarithms(count: int) -> np.ndarray:
    first = DENSE_MINIMUM + DENSE_SHIFT
    return np.log(np.arange(first, first + count, dtype=np.float64))


@dataclasses.dataclass(frozen=True)
class DensePlan:
    """What becomes of dense columns: ``(y − center) / scale``, float64 [dense columns] each.

    Attributes:
        fill: replaces missing values.
        center: 0 where nothing is normalized.
        scale: 1 where nothing is normalized, and where the standard deviation is 0 (NVTabular's
            Normalize then only subtracts the mean).
        logarithms: of the integers from the minimum on, shift added; none if y is the value itself.
    """

    fill: np.ndarray
    center: np.ndarray
    scale: np.ndarray
    logarithms: np.ndarray

    @classmethod
    def make(cls, spec: FeatureSpec, statistics: dict[str, dict[str, float]]) -> DensePlan:
        """Of a spec and the statistics fitted with it. Raises KeyError if a column has none."""
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
            logarithms=_logarithms(0 if spec.dense_transform == "normalize" else _LOGARITHMS),
        )

    def transform(self, values: np.ndarray, missing: np.ndarray, out: np.ndarray) -> None:
        """Fill ``out``, float32 [columns, n].

        Args:
            values: [columns, n], int32 or float64.
            missing: uint64 [n], bit j set where column j is missing.
            out: the result.
        """
        rest = (1 << len(values)) - 1  # columns as bits
        if values.dtype == np.int32:
            rest = _transform(
                values, missing, self.fill, self.logarithms, self.center, self.scale, out
            )
        if rest:
            columns = np.array([j for j in range(len(values)) if rest >> j & 1], np.uint64)
            for begin in range(0, len(missing), _BLOCK_ROWS):
                rows = slice(begin, begin + _BLOCK_ROWS)
                out[columns, rows] = self._transform(columns, values[:, rows], missing[rows])

    def _transform(self, columns: np.ndarray, values: np.ndarray, missing: np.ndarray):
        """Any columns, with NumPy: their float32 [columns, rows]."""
        y = values[columns].astype(np.float64)
        absent = (missing >> columns[:, None]) & _ONE
        np.copyto(y, self.fill[columns, None], where=absent != 0)
        if len(self.logarithms):
            np.maximum(y, DENSE_MINIMUM, out=y)
            y += DENSE_SHIFT
            np.log(y, out=y)
        with np.errstate(over="ignore"):  # too large: infinite, as in NVTabular
            y -= self.center[columns, None]
            y /= self.scale[columns, None]
            return y.astype(np.float32)


_ONE = np.uint64(1)
_NUMBERS = types.Array(types.float64, 1, "C", readonly=True)


@numba.njit(
    types.uint64(types.Array(types.int32, 2, "A", readonly=True),
                 types.Array(types.uint64, 1, "A", readonly=True),
                 _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, types.Array(types.float32, 2, "C")),
    nogil=True,
    cache=True,
)  # fmt: skip
def _transform(values, missing, fill, logarithms, center, scale, out):
    """Integer columns; returns as bits the columns with a value beyond the logarithms."""
    rest = np.uint64(0)
    beyond = np.int64(len(logarithms) + DENSE_MINIMUM)
    for j in range(values.shape[0]):
        bit = np.uint64(j)
        filled = np.int64(fill[j])
        mean, std = center[j], scale[j]
        for i in range(values.shape[1]):
            x = np.int64(values[j, i])
            if (missing[i] >> bit) & np.uint64(1):
                x = filled
            y = np.float64(x)
            if len(logarithms):
                if x >= beyond:
                    rest |= np.uint64(1) << bit
                    break
                y = logarithms[max(x, DENSE_MINIMUM) - DENSE_MINIMUM]
            out[j, i] = np.float32((y - mean) / std)
    return rest
