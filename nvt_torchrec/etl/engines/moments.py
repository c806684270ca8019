"""Moments of the dense columns of rows; :mod:`workflows.moments` merges them.

The mean and the standard deviation that they give equal those of NVTabular's Normalize with
``nvt_compat.operators`` up to the rounding of float64.
"""

from __future__ import annotations

import numpy as np

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.transforms import LOG_SHIFT, TRANSFORMS
from nvt_torchrec.formats.rows import RawRows, bit_of, word_of

#: The smallest value whose logarithm is taken.
_MINIMUM = TRANSFORMS["log"].minimum
#: Logarithms of small integers: most values are small, and a look-up is faster than a call.
_LOGARITHMS = np.log(np.maximum(np.arange(1 << 16), 1))


def moments(rows: RawRows, spec: FeatureSpec) -> np.ndarray:
    """Compute the moments of the dense columns before normalization.

    Missing values are filled first, so each counts as a value.

    Returns:
        Per dense column: count, origin (the first value), mean − origin, sum of squared deviations
        from the mean; float64 [dense columns, 4]. All 0 where the column is not normalized.
    """
    result = np.zeros((len(spec.dense), 4))
    if not len(rows):
        return result
    scratch = np.empty(len(rows))
    for j, column in enumerate(spec.dense):
        transform = spec.transform_of(column)
        if not transform.normalized:
            continue
        logarithm = transform.function == TRANSFORMS["log"].function
        values, fill = rows.dense[j], rows.dense.dtype.type(column.fill)
        missing, bit = word_of(rows.dense_missing, j), np.uint64(1) << bit_of(j)
        if logarithm and values.dtype == np.int32:
            _logarithm_of_int(values, missing, bit, fill, _LOGARITHMS, scratch)
        elif logarithm:
            _logarithm(values, missing, bit, fill, scratch)
        else:
            _filled(values, missing, bit, fill, scratch)
        result[j] = _moments(scratch if logarithm else transform.y(scratch, np))
    return result


@compiled()
def _logarithm(values, missing, bit, fill, out):
    """Compute log(max(value, minimum) + shift) in float64, with ``fill`` for missing values."""
    for i in range(len(values)):
        value = fill if missing[i] & bit else values[i]
        out[i] = np.log(max(value, _MINIMUM) + LOG_SHIFT)


@compiled()
def _logarithm_of_int(values, missing, bit, fill, table, out):
    """Compute :func:`_logarithm` with a table for small integers, in loops that vectorize."""
    least, most = np.int32(_MINIMUM), np.int32(len(table) - LOG_SHIFT - 1)
    places = np.empty(len(values), np.int32)
    above = 0
    for i in range(len(values)):
        value = fill if missing[i] & bit else values[i]
        above += np.int32(value > most)
        places[i] = min(max(value, least), most) + np.int32(LOG_SHIFT)
    for i in range(len(values)):
        out[i] = table[np.uint32(places[i])]
    if above:
        for i in range(len(values)):
            value = fill if missing[i] & bit else values[i]
            if value > most:
                out[i] = np.log(np.float64(value) + LOG_SHIFT)


@compiled()
def _filled(values, missing, bit, fill, out):
    for i in range(len(values)):
        out[i] = fill if missing[i] & bit else values[i]


@compiled()
def _moments(values):
    """Compute count, origin, mean − origin and M2; four partial sums add in parallel."""
    count = len(values)
    origin = values[0]
    even = count - count % 4
    a = b = c = d = 0.0
    for i in range(0, even, 4):
        a += values[i] - origin
        b += values[i + 1] - origin
        c += values[i + 2] - origin
        d += values[i + 3] - origin
    for i in range(even, count):
        a += values[i] - origin
    offset = ((a + b) + (c + d)) / count
    a = b = c = d = 0.0
    for i in range(0, even, 4):
        a += (values[i] - origin - offset) ** 2
        b += (values[i + 1] - origin - offset) ** 2
        c += (values[i + 2] - origin - offset) ** 2
        d += (values[i + 3] - origin - offset) ** 2
    for i in range(even, count):
        a += (values[i] - origin - offset) ** 2
    return count, origin, offset, (a + b) + (c + d)
