"""Moments of the dense columns: merged without cancellation, and the statistics they give.

Moments are float64 [dense columns, 4]: count, origin (the first value), mean − origin, and the sum
of squared deviations from the mean (M2); all 0 of columns that are not normalized. They are merged
by the formula of Chan, Golub and LeVeque (Updating formulae and a pairwise algorithm for computing
sample variances, 1979), in the order of the rows, so that the result does not depend on who
computed which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.transforms import TRANSFORMS

#: One row of moments per dense column.
COUNT, ORIGIN, OFFSET, M2 = range(4)


def normalized(spec: FeatureSpec) -> bool:
    """Return whether moments are counted; without dense columns, as for the spec's transform."""
    if spec.dense:
        return bool(spec.normalized_names)
    return TRANSFORMS[spec.dense_transform].normalized


def merge_moments(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Merge the moments of disjoint rows, at least one, in their order."""
    merged = parts[0].copy()
    for other in parts[1:]:
        for j in range(len(merged)):
            merged[j] = _merge_two(merged[j], other[j])
    return merged


def _merge_two(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not a[COUNT] or not b[COUNT]:
        return a if a[COUNT] else b
    count = a[COUNT] + b[COUNT]
    share = b[COUNT] / count
    delta = b[ORIGIN] - a[ORIGIN] + (b[OFFSET] - a[OFFSET])
    m2 = a[M2] + b[M2] + delta**2 * a[COUNT] * share
    return np.array([count, a[ORIGIN], a[OFFSET] + delta * share, m2])


def statistics(merged: np.ndarray, spec: FeatureSpec) -> dict[str, dict[str, float]]:
    """Return mean and std of each normalized column; std divides by n − 1, 0 below two rows."""
    result, wanted = {}, set(spec.normalized_names)
    for name, (count, origin, offset, m2) in zip(spec.dense_names, merged, strict=True):
        if name not in wanted:
            continue
        std = math.sqrt(m2 / (count - 1)) if count > 1 else 0.0
        result[name] = {"mean": float(origin + offset), "std": std}
    return result
